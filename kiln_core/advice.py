"""What the outcome of a collection suggests to its owner.

Warnings for people; nothing of them is part of a bundle. Each names the cause and what
may be done, in the terms of the flags of ``kiln openenv rollout``.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from msgspec import UnsetType

from kiln_core.receipt import OpenEnvRolloutSummary
from kiln_core.records import EpisodeTermination

__all__ = ["NO_VARIANCE_REMEDY", "collection_advice"]

NO_VARIANCE_REMEDY: Final = (
    "use harder tasks, more policy sampling (--temperature, --group-size), a more "
    "informative reward, or bootstrap the model with 'kiln train sft'"
)


def collection_advice(summary: OpenEnvRolloutSummary) -> list[str]:
    """Return a warning per thing that makes a collection less useful than it could be.

    Args:
        summary: Of the collection.
    """
    found = (_mostly_invalid(summary), _ended_by_errors(summary), _no_variance(summary))
    return [warning for warning in found if warning is not None]


def _mostly_invalid(summary: OpenEnvRolloutSummary) -> str | None:
    invalid = summary.stats.invalid_model_action_count
    if 2 * invalid <= summary.rollout_count:
        return None
    return (
        f"{invalid} of {summary.rollout_count} rollouts ended as invalid_model_action. "
        "Look at the action schema and the harness code in the trajectory: "
        "INVALID_MODEL_ACTION (or MODEL_ACTION_NO_OUTPUT, nothing at all) means the "
        "reply was not one JSON object, ACTION_SCHEMA_VALIDATION_FAILED that its shape "
        "or values missed the schema. Raise --max-action-tokens if reasoning is cut "
        "off, consider 'kiln train sft' on the JSON format of final answers, and use "
        "--thinking false only to train on final answers alone"
    )


def _ended_by_errors(summary: OpenEnvRolloutSummary) -> str | None:
    codes = Counter(
        str(record.protocol_error_code)
        for record in summary.rollouts
        if record.termination is EpisodeTermination.PROTOCOL_ERROR
    )
    if not codes:
        return None
    named = ", ".join(f"{code} {count}" for code, count in sorted(codes.items()))
    return (
        f"{codes.total()} of {summary.rollout_count} rollouts ended by an error "
        f"({named}): the candidate spent --max-recoverable-errors "
        f"({summary.max_recoverable_errors}), or the code was terminal. Look at the "
        "trajectory and the counters of the summary before changing that budget"
    )


def _no_variance(summary: OpenEnvRolloutSummary) -> str | None:
    # with a training contract its own selection says what carries a gradient
    if summary.group_size == 1 or not isinstance(summary.training_selection, UnsetType):
        return None
    returns: dict[int, set[float]] = {}
    for record in summary.rollouts:
        returns.setdefault(record.group_index, set()).add(record.episode_return)
    if any(len(different) > 1 for different in returns.values()):
        return None
    return (
        "rewards have no variance: the candidates of every group got the same return, "
        f"so GRPO would learn nothing; {NO_VARIANCE_REMEDY}"
    )
