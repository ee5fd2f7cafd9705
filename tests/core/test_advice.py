"""`kiln_core/advice.py`: what an outcome suggests, and when it suggests nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from kiln_core.advice import collection_advice
from kiln_core.receipt import (
    OpenEnvRolloutSummary,
    OpenEnvTrainingSelection,
    RolloutRecord,
    rollout_stats,
)
from kiln_core.records import EpisodeTermination
from tests.core.bundles import small_collection

DONE, HORIZON = EpisodeTermination.DONE, EpisodeTermination.MAX_STEPS
INVALID = EpisodeTermination.INVALID_MODEL_ACTION
FAULT = EpisodeTermination.PROTOCOL_ERROR

Ending = tuple[int, float, EpisodeTermination]

SUMMARY = small_collection().bundle().summary


def summary(*endings: Ending, codes: tuple[str, ...] = ()) -> OpenEnvRolloutSummary:
    """Return a summary of rollouts that ended so, in groups of two unless told."""
    left = list(codes)
    records: list[RolloutRecord] = []
    for group, reward, termination in endings:
        fault = termination is FAULT
        records.append(
            msgspec.structs.replace(
                SUMMARY.rollouts[0],
                group_index=group,
                episode_return=reward,
                termination=termination,
                terminal_done=termination is DONE,
                protocol_error_code=left.pop(0) if fault else UNSET,
            )
        )
    return msgspec.structs.replace(
        SUMMARY,
        group_size=2,
        rollout_count=len(records),
        rollouts=records,
        stats=rollout_stats(records),
        training_selection=UNSET,
    )


def test_useful_collection_needs_no_advice() -> None:
    assert collection_advice(summary((0, 1.0, DONE), (0, 0.5, HORIZON))) == []


@pytest.mark.parametrize(("invalid", "told"), [(2, False), (3, True), (4, True)])
def test_mostly_invalid_replies_are_told_with_their_remedies(
    invalid: int, told: bool
) -> None:
    endings = [(0, float(i), INVALID if i < invalid else DONE) for i in range(4)]
    advice = collection_advice(summary(*endings))
    assert len(advice) == told
    for text in advice:
        assert text.startswith(f"{invalid} of 4 rollouts ended as invalid_model_action")
        for part in (
            *("INVALID_MODEL_ACTION", "ACTION_SCHEMA_VALIDATION_FAILED"),
            *("--max-action-tokens", "kiln train sft", "--thinking false"),
        ):
            assert part in text


def test_errors_that_end_episodes_are_counted_by_code() -> None:
    codes = ("SESSION_ERROR", "EXECUTION_ERROR", "SESSION_ERROR")
    endings = [(0, float(i), FAULT if i < 3 else DONE) for i in range(8)]
    (advice,) = collection_advice(summary(*endings, codes=codes))
    assert "3 of 8 rollouts" in advice
    assert "(EXECUTION_ERROR 1, SESSION_ERROR 2)" in advice
    assert f"--max-recoverable-errors ({SUMMARY.max_recoverable_errors})" in advice
    assert "the code was terminal" in advice


NO_SIGNAL = summary((0, 1.0, DONE), (0, 1.0, DONE), (1, 2.0, DONE), (1, 2.0, HORIZON))


def test_equal_returns_in_every_group_are_no_signal() -> None:
    (advice,) = collection_advice(NO_SIGNAL)
    assert "rewards have no variance" in advice
    for remedy in ("harder tasks", "sampling", "informative reward", "kiln train sft"):
        assert remedy in advice


@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": 1},
        {
            "training_selection": OpenEnvTrainingSelection(
                groups_submitted=0,
                rollouts_submitted=0,
                no_output_rollouts_discarded=0,
                no_usable_output_groups_skipped=0,
                no_reward_gradient_groups_skipped=2,
            )
        },
    ],
)
def test_variance_is_not_asked_of_single_rollouts_nor_told_twice(
    changes: dict[str, Any],
) -> None:
    assert collection_advice(msgspec.structs.replace(NO_SIGNAL, **changes)) == []
