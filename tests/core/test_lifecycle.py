"""`kiln_core/lifecycle.py`: thirteen states, what may follow, what is recorded."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from kiln_core.canonical import compact, read_record
from kiln_core.errors import Conflict, RunNotCancellable, TransportError
from kiln_core.failure import FailureStage
from kiln_core.lifecycle import (
    EDGES,
    STAGES,
    TERMINAL,
    admit_run,
    cancel_requested,
    cancelled_run,
    completed_run,
    contradicted,
    evaluating_run,
    interrupted_run,
    moved_run,
    progressed_run,
    published_run,
    request_cancel,
    run_failed_with,
    submitted_run,
    trained_run,
)
from kiln_core.run import OpenEnvRunStatus, RunState
from tests.core.runs import (
    EVERYTHING,
    NOW,
    POST,
    RESPONSE,
    STATS,
    TRAINING,
    artifact,
    queued,
    walked,
)

ACTIVE = [s for s in RunState if s not in TERMINAL and s is not RunState.QUEUED]


def test_tables_are_total() -> None:
    assert set(EDGES) == set(STAGES) == set(RunState)
    assert {state for state in RunState if not EDGES[state]} == TERMINAL
    assert len(RunState) == 13
    named = {FailureStage.RESTORATION, FailureStage.ARTIFACT_PUBLICATION}
    assert set(STAGES.values()) == set(FailureStage) - named


def test_every_state_is_reached() -> None:
    reached, waiting = set(), [RunState.QUEUED]
    while waiting:
        state = waiting.pop()
        if state not in reached:
            reached.add(state)
            waiting += EDGES[state]
    assert reached == set(RunState)


@pytest.mark.parametrize("state", RunState)
def test_status_of_every_state_is_a_record(state: RunState) -> None:
    status = walked(state)
    assert status.state is state
    assert read_record(compact(status), OpenEnvRunStatus, "status") == status
    assert (status.finished_unix_ms is not UNSET) is (state in TERMINAL)
    waits = state is RunState.QUEUED
    assert (status.admission.queue_position is not UNSET) is waits


@pytest.mark.parametrize("after", RunState)
@pytest.mark.parametrize("before", RunState)
def test_only_edges_can_be_walked(before: RunState, after: RunState) -> None:
    status = msgspec.structs.replace(walked(before), failure=UNSET)
    kind = "rollout" if after is RunState.ROLLOUT_READY else status.kind
    status = msgspec.structs.replace(status, kind=kind)
    if after in EDGES[before]:
        assert moved_run(status, after).state is after
    else:
        with pytest.raises(Conflict, match=f"is {before} cannot become {after}"):
            moved_run(status, after)


@pytest.mark.parametrize(
    ("members", "before", "after", "reason"),
    [
        ({}, "revalidating", "submitting", "has no state submitting"),
        ({}, "revalidating", "completed", "has no state completed"),
        (EVERYTHING, "revalidating", "rollout_ready", "has no state rollout_ready"),
        (
            {"kind": "train", "output_adapter": "n"},
            "training_running",
            "post_evaluating",
            "asked for nothing",
        ),
        (
            {"kind": "train", "output_adapter": "n"},
            "training_running",
            "environment_evaluating",
            "asked for nothing",
        ),
    ],
)
def test_kind_and_request_bound_the_states(
    members: dict[str, Any], before: str, after: str, reason: str
) -> None:
    status = walked(RunState(before), **{"groups": 8, **members})
    assert reason in contradicted(status, RunState(after))


@pytest.mark.parametrize("state", ACTIVE)
def test_active_run_notes_a_cancellation(state: RunState) -> None:
    noted = request_cancel(walked(state), NOW + 30)
    assert noted.state is state
    assert cancel_requested(noted)
    assert request_cancel(noted, NOW + 31) == noted
    ended = cancelled_run(noted, NOW + 32)
    assert (ended.state, ended.finished_unix_ms) == ("cancelled", NOW + 32)
    assert ended.failure is UNSET
    assert not cancel_requested(ended)
    assert ended.environment_evaluation.state == "cancelled"  # type: ignore[union-attr]  # it is there


def test_queued_run_is_cancelled_at_once() -> None:
    ended = request_cancel(queued(), NOW + 3)
    assert (ended.state, ended.finished_unix_ms) == ("cancelled", NOW + 3)
    assert ended.admission.queue_position is UNSET


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_finished_run_is_not_cancellable(state: RunState) -> None:
    with pytest.raises(RunNotCancellable, match=f"is {state} already"):
        request_cancel(walked(state), NOW)
    assert not cancel_requested(walked(state))


@pytest.mark.parametrize("state", [RunState.QUEUED, *ACTIVE])
def test_every_unfinished_run_can_fail(state: RunState) -> None:
    ended = run_failed_with(walked(state), TransportError("gone"), NOW + 30)
    assert ended.failure is not UNSET
    assert (ended.failure.stage, ended.error) == (STAGES[state], "gone")
    evaluation = ended.environment_evaluation
    evaluates = state is RunState.ENVIRONMENT_EVALUATING
    assert evaluation.state == ("failed" if evaluates else "skipped")  # type: ignore[union-attr]  # it is there
    interrupted = interrupted_run(walked(state), NOW + 30)
    assert interrupted.failure is not UNSET
    assert str(state) in interrupted.failure.message


def test_publication_names_its_own_stage() -> None:
    ended = run_failed_with(
        walked(RunState.REVALIDATING),
        OSError(),
        NOW,
        FailureStage.ARTIFACT_PUBLICATION,
    )
    assert ended.failure is not UNSET
    assert ended.failure.code == "artifact_publication_failed"


def test_admission_tells_the_wait() -> None:
    status = queued()
    admitted = admit_run(status, 2, NOW + 1500)
    assert msgspec.to_builtins(admitted.admission) == {
        "max_active_runs": 2,
        "sequence": 1,
        "admitted_unix_ms": NOW + 1500,
        "queue_wait_ms": 1500,
    }
    with pytest.raises(Conflict):
        admit_run(admitted, 2, NOW)


def test_clock_that_goes_backwards() -> None:
    admitted = admit_run(queued(), 2, NOW - 9999)
    assert admitted.admission.queue_wait_ms == 0
    assert admitted.admission.admitted_unix_ms == NOW
    assert cancelled_run(admitted, NOW - 5).finished_unix_ms == NOW
    assert request_cancel(queued(), -5).finished_unix_ms == NOW
    assert queued(-5).submitted_unix_ms == 0


@given(st.lists(st.tuples(st.integers(-5, 99), st.integers(-5, 99)), max_size=9))
def test_progress_never_becomes_less_nor_too_much(
    reports: list[tuple[int, int]],
) -> None:
    status = walked(RunState.COLLECTING)
    seen = [status.progress]
    for groups, rollouts in reports:
        status = progressed_run(status, groups, rollouts)
        seen.append(status.progress)
    for before, after in itertools.pairwise(seen):
        assert before.groups_completed <= after.groups_completed <= 8
        assert before.rollouts_completed <= after.rollouts_completed <= 32


def test_environments_are_noted_once_known() -> None:
    status = progressed_run(walked(RunState.DISCOVERING), 0, 0, [])
    assert progressed_run(status, 1, 4).environments == []


def test_training_progress_never_becomes_less() -> None:
    status = walked(RunState.TRAINING_QUEUED)
    waiting = msgspec.structs.replace(TRAINING, state="queued", progress=0.0)
    status = trained_run(status, waiting)
    assert status.state is RunState.TRAINING_QUEUED
    status = trained_run(status, TRAINING)
    assert status.state is RunState.TRAINING_RUNNING
    late = trained_run(status, msgspec.structs.replace(TRAINING, progress=0.1))
    assert late.training is not UNSET
    assert late.training.progress == TRAINING.progress


def test_job_that_ended_between_two_looks() -> None:
    done = msgspec.structs.replace(TRAINING, state="completed", progress=1.0)
    status = trained_run(walked(RunState.TRAINING_QUEUED), done)
    assert status.state is RunState.TRAINING_RUNNING


def test_empty_selection_completes_the_run() -> None:
    for state in (RunState.REVALIDATING, RunState.SUBMITTING):
        status = walked(state)
        ended = completed_run(
            status, NOW + 9, artifacts=[artifact(status)], warnings=["nothing left"]
        )
        assert (ended.state, ended.warnings) == ("completed", ["nothing left"])
        assert ended.environment_evaluation.state == "skipped"  # type: ignore[union-attr]  # it is there
        assert ended.training_job_id is UNSET


def test_rollout_ends_with_its_bundle() -> None:
    status = walked(RunState.REVALIDATING, groups=8)
    ended = published_run(status, [artifact(status)], STATS, NOW + 9)
    assert (ended.state, ended.finished_unix_ms) == ("rollout_ready", NOW + 9)
    assert ended.warnings is UNSET
    assert ended.environment_evaluation is UNSET


def test_evaluations_are_noted_while_they_go_on() -> None:
    status = walked(RunState.POST_EVALUATING)
    done = msgspec.structs.replace(POST, state="completed")
    assert evaluating_run(status, post_evaluations=[done]).post_evaluations == [done]
    assert evaluating_run(status) == status
    with pytest.raises(Conflict):
        evaluating_run(walked(RunState.COLLECTING), post_evaluations=[POST])


def test_submission_names_the_job() -> None:
    status = walked(RunState.SUBMITTING)
    again = artifact(status, "summary")
    assert submitted_run(status, RESPONSE, [again]).training_job_id == "job"
    with pytest.raises(Conflict):
        submitted_run(walked(RunState.COLLECTING), RESPONSE, [again])


def test_completion_forgets_a_cancellation_that_came_too_late() -> None:
    noted = request_cancel(walked(RunState.TRAINING_RUNNING), NOW)
    assert completed_run(noted, NOW).error is UNSET
