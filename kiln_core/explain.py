"""Why a training run learnt, or did not: told from a dataset and a receipt alone.

Each group of a corpus either carries a gradient or says why not. The notes name the
common causes of a run that changes nothing, in the terms of its own configuration.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

from msgspec import UNSET, UnsetType

from kiln_core.advice import NO_VARIANCE_REMEDY
from kiln_core.canonical import Record, total
from kiln_core.grpo import AdamW, GrpoConfig
from kiln_core.records import AgenticGroup, Count
from kiln_core.selection import TrainingSelector, Verdict, selector_for

__all__ = ["GroupExplanation", "TrainingExplanation", "explain_training"]

EXPLANATION_SCHEMA: Final = "kiln.training-explanation.v1"
SMALL_RATE: Final = 1e-4
"""AdamW below it moves a small model hardly at all."""
FEW_STEPS: Final = 8


class GroupExplanation(Record, frozen=True, kw_only=True):
    """What one group gives the trainer."""

    line: Count
    """1-based line of the dataset."""
    environment: str | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    rollouts: Count
    without_output: Count
    """Rollouts that gave no final answer and are never trained on."""
    reward_min: float
    reward_max: float
    verdict: Verdict


class TrainingExplanation(Record, frozen=True, kw_only=True):
    """``kiln.training-explanation.v1``: a corpus group by group, and what follows."""

    schema: Literal["kiln.training-explanation.v1"]
    groups: list[GroupExplanation]
    training_groups: Count
    equal_reward_groups: Count
    unusable_groups: Count
    reward_mean: float
    notes: list[str]
    """Sentences for people, most important first."""


def explain_training(
    groups: Iterable[AgenticGroup],
    config: GrpoConfig,
    receipt: dict[str, Any] | None = None,
) -> TrainingExplanation:
    """Explain what a configuration makes of a corpus.

    Args:
        groups: Of the dataset, in order.
        config: What was or would be trained.
        receipt: Decoded ``train_receipt.json``, where there is one.
    """
    selector = selector_for(config)
    explained, rewards = [], []
    for line, group in enumerate(groups, 1):
        explained.append(_explained(group, line, selector))
        rewards += [completion.reward for completion in group.completions]
    counts = Counter(group.verdict for group in explained)
    notes = [*_corpus_notes(explained), *_config_notes(explained, config)]
    if receipt is not None:
        notes += _receipt_notes(receipt)
    return TrainingExplanation(
        schema=EXPLANATION_SCHEMA,
        groups=explained,
        training_groups=counts["trains"],
        equal_reward_groups=counts["equal_rewards"],
        unusable_groups=counts["no_usable_output"],
        reward_mean=total(rewards) / max(len(rewards), 1),
        notes=notes,
    )


def _explained(
    group: AgenticGroup, line: int, selector: TrainingSelector
) -> GroupExplanation:
    verdict, usable = selector.judge(group)
    rewards = [completion.reward for completion in usable or group.completions]
    environment: str | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    openenv = group.completions[0].openenv
    if not isinstance(openenv, UnsetType):
        environment, seed = openenv.environment_name, openenv.seed
    return GroupExplanation(
        line=line,
        environment=environment,
        seed=seed,
        rollouts=len(group.completions),
        without_output=len(group.completions) - len(usable),
        reward_min=min(rewards),
        reward_max=max(rewards),
        verdict=verdict,
    )


def _corpus_notes(groups: Sequence[GroupExplanation]) -> list[str]:
    notes = []
    flat = [group for group in groups if group.verdict == "equal_rewards"]
    mute = [group for group in groups if group.verdict == "no_usable_output"]
    trains = len(groups) - len(flat) - len(mute)
    if not trains:
        notes.append(
            f"no group carries a gradient, so nothing can be learnt: "
            f"{NO_VARIANCE_REMEDY}"
        )
    if flat:
        values = sorted({group.reward_max for group in flat})
        told = ", ".join(f"{value:g}" for value in values[:3])
        more = " and others" if len(values) > 3 else ""
        notes.append(
            f"{len(flat)} of {len(groups)} groups are skipped because all their "
            f"rewards are equal ({told}{more}): with no difference inside a group, "
            "every advantage is 0"
        )
    if mute:
        notes.append(
            f"{len(mute)} groups are skipped because no rollout gave a final answer: "
            "raise --max-action-tokens, or bootstrap the format with 'kiln train sft'"
        )
    for name in sorted({str(group.environment) for group in flat}):
        own = [group for group in groups if str(group.environment) == name]
        if len(own) > 1 and all(group.verdict != "trains" for group in own):
            notes.append(
                f"environment {name} contributes nothing: none of its "
                f"{len(own)} groups has different rewards"
            )
    return notes


def _config_notes(groups: Sequence[GroupExplanation], config: GrpoConfig) -> list[str]:
    trains = sum(group.verdict == "trains" for group in groups)
    steps = config.epochs * math.ceil(trains / config.groups_per_step)
    notes = []
    if config.behavior_policy == "no_importance_correction":
        notes.append(
            "a policy loss near 0 is no fault: advantages of a group sum to 0 and the "
            "ratio is 1, so the loss says nothing while its gradient does not vanish"
        )
    rate = config.effective_learning_rate
    if isinstance(config.optimizer, AdamW) and rate < SMALL_RATE:
        notes.append(
            f"AdamW at a learning rate of {rate:g} hardly moves a small model: "
            "use Muon, or a rate near 1e-3"
        )
    if trains and steps < FEW_STEPS:
        notes.append(
            f"{trains} groups make {steps} optimizer steps: more groups, epochs or "
            "fewer groups per step give the policy time to move"
        )
    return notes


def _receipt_notes(receipt: dict[str, Any]) -> list[str]:
    notes = []
    norms = receipt.get("lora_delta_norms")
    if isinstance(norms, dict) and norms and not any(norms.values()):
        notes.append("the adapter is exactly as it started: no step changed it")
    audit = receipt.get("grpo", {}).get("policy_audit", {})
    agreement = audit.get("first_step_agreement")
    if isinstance(agreement, float):
        notes.append(
            f"sampled and recomputed probabilities differed by at most {agreement:.3g} "
            "in the first step"
        )
    return notes + [str(warning) for warning in receipt.get("warnings", [])]
