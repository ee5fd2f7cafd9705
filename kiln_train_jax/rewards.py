"""Which groups of a corpus train, by their rewards.

Dynamic sampling (Yu et al. 2025, "DAPO", 2503.14476, section 3.2) drops groups without
reward variance: they have no relative advantage. The variance filter keeps those whose
population variance lies within bounds. Both are decided on exact 64-bit rewards. What
happens when too few are left is the configuration's word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kiln_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiln_core.grpo import GrpoConfig

__all__ = ["GroupChoice", "choose_groups", "reward_warnings"]


class GroupChoice(NamedTuple):
    """Which groups train."""

    kept: list[int]
    """Indices in the corpus, in order."""
    warnings: list[str]


def choose_groups(
    rewards: Sequence[Sequence[float]], config: GrpoConfig
) -> GroupChoice:
    """Choose the groups that train.

    With ECHO, groups of equal rewards train too: their text teaches.

    Args:
        rewards: Of each candidate, by group.
        config: Names the filters.

    Raises:
        TrainingError: Fewer groups are left than `reward_filter_min_groups`, and
            `reward_filter_on_empty` says so.
    """
    drop_equal = config.dynamic_sampling and config.loss.echo is None
    kept = [
        index
        for index, group in enumerate(rewards)
        if not (drop_equal and len(set(group)) == 1)
        and _within(float(np.var(np.asarray(group, np.float64))), config)
    ]
    if len(kept) >= config.reward_filter_min_groups:
        return GroupChoice(kept, [])
    left = f"{len(kept)} of {len(rewards)} groups are left by their rewards"
    if config.reward_filter_on_empty == "train-all":
        every = list(range(len(rewards)))
        return GroupChoice(every, [f"{left}: training on all"])
    if config.reward_filter_on_empty == "skip":
        return GroupChoice([], [f"{left}: nothing is trained"])
    if kept:
        raise TrainingError(
            f"{left}, reward_filter_min_groups asks for "
            f"{config.reward_filter_min_groups}"
        )
    nothing = _no_gradient(config)
    raise nothing


def _within(variance: float, config: GrpoConfig) -> bool:
    low, high = config.reward_filter_var_min, config.reward_filter_var_max
    return (low is None or variance >= low) and (high is None or variance <= high)


def _no_gradient(config: GrpoConfig) -> TrainingError:
    if (config.reward_filter_var_min, config.reward_filter_var_max) == (None, None):
        return TrainingError(
            "no group carries a gradient: within each, all rewards are equal",
            hint="collect more candidates, or on harder tasks",
        )
    return TrainingError(
        "no group is left: the variance of its rewards is 0 or out of bounds",
        hint="widen reward_filter_var_min and reward_filter_var_max",
    )


def reward_warnings(
    rewards: Sequence[Sequence[float]], config: GrpoConfig
) -> list[str]:
    """Return what a corpus's rewards say about training on it; nothing changes.

    Args:
        rewards: Of each candidate, by group.
        config: Names the thresholds.
    """
    warnings = []
    mean = float(np.mean([reward for group in rewards for reward in group]))
    if mean >= config.reward_saturation_threshold:
        warnings.append(
            f"the mean reward {mean:.4g} is at reward_saturation_threshold "
            f"{config.reward_saturation_threshold}: there is little left to learn"
        )
    threshold = config.reward_low_variance_threshold
    low = sum(float(np.var(group)) < threshold for group in rewards)
    if low:
        warnings.append(
            f"{low} of {len(rewards)} groups have a reward variance below "
            f"reward_low_variance_threshold {threshold}"
        )
    return warnings
