"""The dataset against the replay manifest, one group after the other.

A group and its line are compared while the group is decoded, so that neither file need
be in memory as a whole. What is found is kept until the check it belongs to has its
turn, since `kiln_core.verify` reports the first check that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

from msgspec import UNSET, UnsetType

from kiln_core.actions import ActionSchema
from kiln_core.bundle import rollout_record
from kiln_core.canonical import digest_json
from kiln_core.dataset import TraceLedger, fail_in
from kiln_core.episode_rules import check_episode
from kiln_core.errors import InvalidActionSchema, InvalidBundle
from kiln_core.manifest import ReplayGroup
from kiln_core.prompt import SYSTEM_PROMPTS, first_messages
from kiln_core.receipt import (
    OpenEnvRolloutSummary,
    OpenEnvTrainingSelection,
    RolloutRecord,
)
from kiln_core.records import AgenticGroup
from kiln_core.selection import TrainingSelector, selector_for
from kiln_core.transcript import RolloutSetting, check_rollouts

__all__ = ["CrossCheck"]


class CrossCheck:
    """Compares groups with dataset lines, in order.

    Attributes:
        records: What the summary must say of every rollout so far.
    """

    def __init__(
        self,
        summary: OpenEnvRolloutSummary,
        lines: Iterator[AgenticGroup],
        names: tuple[str, str, str],
    ) -> None:
        """Prepare.

        Args:
            summary: The summary.
            lines: The groups of the dataset.
            names: Of summary, dataset and replay manifest, for errors.
        """
        self.records: list[RolloutRecord] = []
        self._summary = summary
        self._lines = lines
        self._summary_name, self._dataset_name, self._replay_name = names
        self._groups = 0
        self._lines_read = 0
        self._traces = TraceLedger(summary)
        self._selector = _selector(summary)
        self._schemas: list[ActionSchema] = []
        self._systems = [
            [prompt(inspection) for prompt in SYSTEM_PROMPTS]
            for inspection in summary.environments
        ]
        self._episode_failure: InvalidBundle | None = None
        self._dataset_failure = _failure(self._compile)

    @property
    def retried(self) -> int:
        """Rollouts that needed more than one attempt."""
        return self._traces.retried

    @property
    def traced(self) -> int:
        """Rollouts that carry token ids."""
        return self._traces.traced

    def add(self, group: ReplayGroup) -> None:
        """Take the next group of the manifest."""
        index = self._groups
        self._groups += 1
        # each relies on what the one before has established
        if self._episode_failure is None:
            self._episode_failure = _failure(lambda: self._episodes(index, group))
        if self._episode_failure is None and self._dataset_failure is None:
            self._dataset_failure = _failure(lambda: self._line(index, group))

    def finish_episodes(self) -> None:
        """Say whether every episode follows the rules.

        Raises:
            InvalidBundle: One does not.
        """
        if self._episode_failure is not None:
            raise self._episode_failure

    def finish(self) -> None:
        """Say whether every line agrees with its group, and none is left.

        Raises:
            InvalidBundle: One does not.
        """
        if self._dataset_failure is not None:
            raise self._dataset_failure
        count = self._lines_read + sum(1 for _ in self._lines)
        if count != self._groups:
            fail_in(self._dataset_name)(
                "dataset_groups",
                "",
                "the manifest has another number of groups",
                self._groups,
                count,
            )
        recorded = self._summary.training_selection
        if self._selector is not None and not isinstance(recorded, UnsetType):
            fail = fail_in(self._summary_name)
            _check_selection(recorded, self._selector.record(), fail)

    def _compile(self) -> None:
        for index, inspection in enumerate(self._summary.environments):
            try:
                self._schemas.append(ActionSchema(inspection.schema.action))
            except InvalidActionSchema as error:
                raise InvalidBundle(
                    f"{self._summary_name}: {error.message}",
                    check="summary_record",
                    file=self._summary_name,
                    pointer=f"/environments/{index}/schema/action",
                ) from error

    def _episodes(self, index: int, group: ReplayGroup) -> None:
        fail = fail_in(self._replay_name)
        for place, candidate in enumerate(group.candidates):
            at = f"/groups/{index}/candidates/{place}"
            check_episode(candidate, self._summary, at, fail)

    def _line(self, index: int, captured: ReplayGroup) -> None:
        group = next(self._lines, None)
        if group is None:
            return
        self._lines_read += 1
        # another environment is against the plan, and that is reported first
        if captured.environment_index == index % len(self._schemas):
            self._group(group, captured)
            if self._selector is not None:
                self._selector.select(group)

    def _group(self, group: AgenticGroup, captured: ReplayGroup) -> None:
        fail = fail_in(self._dataset_name, self._lines_read)
        environment = captured.environment_index
        inspection = self._summary.environments[environment]
        prompts = [
            first_messages(system, captured.reset_observation)
            for system in self._systems[environment]
        ]
        if group.messages not in prompts:
            fail(
                "dataset_prompt",
                "/messages",
                "no prompt version gives these messages for the captured reset",
                [message.content for message in prompts[-1]],
                [message.content for message in group.messages],
            )
        if len(group.completions) != len(captured.candidates):
            fail(
                "dataset_groups",
                "/completions",
                "the manifest has another number",
                len(captured.candidates),
                len(group.completions),
            )
        shared = group.prompt_token_ids
        setting = RolloutSetting(
            summary=self._summary,
            inspection=inspection,
            action_schema=self._schemas[environment],
            seed=captured.seed,
            reset_sha256=digest_json(captured.reset_payload),
            shared_prompt_tokens=0 if isinstance(shared, UnsetType) else len(shared),
        )
        check_rollouts(group.completions, captured.candidates, setting, fail)
        self.records += [
            rollout_record(captured.group_index, inspection, rollout, candidate)
            for rollout, candidate in zip(
                group.completions, captured.candidates, strict=True
            )
        ]
        self._traces.add(environment, group, fail)


def _failure(check: Callable[[], None]) -> InvalidBundle | None:
    try:
        check()
    except InvalidBundle as failure:
        return failure
    return None


def _selector(summary: OpenEnvRolloutSummary) -> TrainingSelector | None:
    """Return what repeats the recorded selection; None where none is recorded."""
    if summary.training_selection is UNSET:
        return None
    contract = summary.training_contract
    if isinstance(contract, UnsetType):
        return TrainingSelector()
    return selector_for(contract.effective_config)


def _check_selection(
    recorded: OpenEnvTrainingSelection,
    expected: OpenEnvTrainingSelection,
    fail: Callable[..., NoReturn],
) -> None:
    for name in recorded.__struct_fields__:
        wanted, found = getattr(expected, name), getattr(recorded, name)
        if name != "warnings" and wanted != found:
            fail(
                "summary_selection",
                f"/training_selection/{name}",
                "the dataset gives another selection",
                wanted,
                found,
            )
