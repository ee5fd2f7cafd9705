"""Which part of a corpus carries a gradient.

A rollout whose model gave no final answer teaches nothing and is dropped alone; a group
whose remaining rewards are all equal has no relative advantage and is skipped. The
bundle keeps every episode; only the submission is smaller.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from kiln_core.actions import NO_OUTPUT
from kiln_core.advice import NO_VARIANCE_REMEDY
from kiln_core.canonical import Record, convert_record, read_json
from kiln_core.errors import InvalidRecord, MalformedJson
from kiln_core.grpo import GrpoConfig
from kiln_core.receipt import OpenEnvTrainingSelection
from kiln_core.records import AgenticGroup, ScoredRollout

__all__ = ["TrainingSelector", "Verdict", "selector_for"]

Verdict = Literal["trains", "equal_rewards", "no_usable_output"]
"""What the trainer can do with a group."""


class HarnessError(Record, frozen=True, kw_only=True):
    """Why a reply was no acceptable action."""

    code: str
    message: str


class HarnessErrorSegment(Record, frozen=True, kw_only=True):
    """The segment that ends a trajectory after such a reply."""

    openenv_harness_error: HarnessError
    done: Literal[True]


class TrainingSelector:
    """Selects group by group and counts what it leaves out.

    Args:
        keep_equal_rewards: Whether groups of equal rewards are kept, since another
            loss (ECHO) learns from them or dynamic sampling is off.
    """

    def __init__(self, *, keep_equal_rewards: bool = False) -> None:
        self._keep_equal_rewards = keep_equal_rewards
        self._groups = 0
        self._rollouts = 0
        self._no_output = 0
        self._no_usable = 0
        self._no_gradient = 0

    def select(self, group: AgenticGroup) -> AgenticGroup | None:
        """Return the trainable part of a group, None when there is none."""
        verdict, usable = self.judge(group)
        self._no_output += len(group.completions) - len(usable)
        if verdict == "no_usable_output":
            self._no_usable += 1
            return None
        if verdict == "equal_rewards":
            self._no_gradient += 1
            return None
        self._groups += 1
        self._rollouts += len(usable)
        return msgspec.structs.replace(group, completions=usable)

    def judge(self, group: AgenticGroup) -> tuple[Verdict, list[ScoredRollout]]:
        """Say what a group gives the trainer, and by which rollouts; count nothing."""
        usable = [c for c in group.completions if not without_output(c)]
        if not usable:
            return "no_usable_output", usable
        rewards = {completion.reward for completion in usable}
        if len(rewards) == 1 and not self._keep_equal_rewards:
            return "equal_rewards", usable
        return "trains", usable

    def record(self) -> OpenEnvTrainingSelection:
        """Return the counts so far, with one warning per kind of omission."""
        warnings = self._warnings()
        return OpenEnvTrainingSelection(
            groups_submitted=self._groups,
            rollouts_submitted=self._rollouts,
            no_output_rollouts_discarded=self._no_output,
            no_usable_output_groups_skipped=self._no_usable,
            no_reward_gradient_groups_skipped=self._no_gradient,
            warnings=warnings or UNSET,
        )

    def _warnings(self) -> list[str]:
        warnings = []
        if self._no_output:
            warnings.append(
                f"{self._no_output} rollouts gave no final answer and were discarded; "
                "raise --max-action-tokens if reasoning is cut off"
            )
        if self._no_usable:
            warnings.append(
                f"{self._no_usable} groups had no usable rollout and were skipped"
            )
        if self._no_gradient:
            warnings.append(
                f"{self._no_gradient} groups had equal rewards and were skipped"
            )
        if not self._groups:
            warnings.append(
                "nothing is left to train on, since rewards have no variance within "
                f"a group: {NO_VARIANCE_REMEDY}"
            )
        return warnings


def selector_for(config: GrpoConfig) -> TrainingSelector:
    """Return the selector of a configuration."""
    kept = config.loss.echo is not None or not config.dynamic_sampling
    return TrainingSelector(keep_equal_rewards=kept)


def without_output(rollout: ScoredRollout) -> bool:
    """Say whether a rollout ended because the model gave no final answer."""
    if not rollout.segments:
        return False
    last = rollout.segments[-1]
    if last.kind != "observation" or isinstance(last.warning_prefix_len, UnsetType):
        return False
    return harness_code(last.content) == NO_OUTPUT


def harness_code(content: str) -> str | None:
    """Return the code of a harness error segment, None when it is none."""
    try:
        document = read_json(content, "segment")
        error = convert_record(document, HarnessErrorSegment, "segment")
    except (MalformedJson, InvalidRecord):
        return None
    return error.openenv_harness_error.code
