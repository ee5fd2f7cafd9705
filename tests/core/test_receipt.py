from __future__ import annotations

import pytest

from kiln_core.canonical import compact
from kiln_core.receipt import RolloutRecord, RolloutStats, rollout_stats
from kiln_core.records import EpisodeTermination


def record(
    value: float, termination: str = "done", latency: float = 0.0
) -> RolloutRecord:
    ending = EpisodeTermination(termination)
    more = {"protocol_error_code": "X"} if termination == "protocol_error" else {}
    return RolloutRecord(
        group_index=0,
        candidate_index=0,
        environment_name="e",
        environment_url="u",
        seed=0,
        steps=2,
        episode_return=value,
        terminal_done=termination == "done",
        termination=ending,
        recoverable_protocol_errors=1,
        capacity_retries=3,
        model_tokens=5,
        model_latency_ms=latency,
        **more,
    )


def test_no_rollouts_have_empty_statistics() -> None:
    assert compact(rollout_stats([])) == (
        b'{"mean_episode_return":0.0,"min_episode_return":null,'
        b'"max_episode_return":null,"done_count":0,"max_steps_count":0,'
        b'"invalid_model_action_count":0,"protocol_error_count":0,'
        b'"recoverable_protocol_error_count":0,"capacity_retry_count":0,'
        b'"total_environment_steps":0,"total_model_tokens":0,'
        b'"mean_model_latency_ms":0.0}'
    )


def test_every_rollout_counts_once() -> None:
    endings = ["done", "max_steps", "invalid_model_action", "protocol_error", "done"]
    found = rollout_stats([record(float(i), e, 2.0 * i) for i, e in enumerate(endings)])
    assert found == RolloutStats(
        mean_episode_return=2.0,
        min_episode_return=0.0,
        max_episode_return=4.0,
        done_count=2,
        max_steps_count=1,
        invalid_model_action_count=1,
        protocol_error_count=1,
        recoverable_protocol_error_count=5,
        capacity_retry_count=15,
        total_environment_steps=10,
        total_model_tokens=25,
        mean_model_latency_ms=4.0,
    )


@pytest.mark.parametrize(
    ("returns", "mean"),
    [
        ([1e16, 1.0, -1e16], 0.0),
        ([0.1] * 10, 0.09999999999999999),
        ([1.0, 1e16, -1e16], 0.0),
    ],
)
def test_mean_is_summed_left_to_right(returns: list[float], mean: float) -> None:
    assert (
        rollout_stats([record(value) for value in returns]).mean_episode_return == mean
    )
