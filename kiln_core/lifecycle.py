"""The life of a run: which state may follow which, and what each step records.

::

    queued > discovering > collecting > revalidating > rollout_ready
                                                     > submitting > training_queued
      > training_running [> post_evaluating] [> environment_evaluating] > completed

A train run whose selection is empty goes from ``revalidating`` or ``submitting`` to
``completed``. Every unfinished run may become ``failed`` or ``cancelled``; a finished
one never changes. A queued run that is cancelled ends at once; an active one notes the
request and ends at its next boundary.

Every step is a function from a status and a time to the next status. Time may go
backwards: no wait is negative, and no run ends before it began. Nothing is written
here.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from kiln_core.discovery import EnvironmentIdentity
from kiln_core.errors import Conflict, RunNotCancellable
from kiln_core.failure import (
    FailureCode,
    FailureStage,
    OpenEnvRunFailure,
    classify_failure,
    run_failure,
)
from kiln_core.receipt import RolloutStats
from kiln_core.run import (
    OpenEnvEnvironmentEvalStatus,
    OpenEnvPostEvalStatus,
    OpenEnvRunStatus,
    OpenEnvTrainingStatus,
    RunAdmission,
    RunArtifact,
    RunProgress,
    RunState,
)
from kiln_core.training import TrainingResponse

__all__ = [
    "EDGES",
    "STAGES",
    "TERMINAL",
    "admit_run",
    "cancel_requested",
    "cancelled_run",
    "completed_run",
    "contradicted",
    "evaluating_run",
    "failed_run",
    "interrupted_run",
    "moved_run",
    "progressed_run",
    "published_run",
    "request_cancel",
    "run_failed_with",
    "submitted_run",
    "trained_run",
]

QUEUED: Final = RunState.QUEUED
TERMINAL: Final = frozenset(
    {
        RunState.ROLLOUT_READY,
        RunState.COMPLETED,
        RunState.FAILED,
        RunState.CANCELLED,
    }
)
"""States that nothing follows."""
ENDS: Final = frozenset({RunState.FAILED, RunState.CANCELLED})

EDGES: Final = {
    RunState.QUEUED: ENDS | {RunState.DISCOVERING},
    RunState.DISCOVERING: ENDS | {RunState.COLLECTING},
    RunState.COLLECTING: ENDS | {RunState.REVALIDATING},
    RunState.REVALIDATING: ENDS
    | {RunState.ROLLOUT_READY, RunState.SUBMITTING, RunState.COMPLETED},
    RunState.SUBMITTING: ENDS | {RunState.TRAINING_QUEUED, RunState.COMPLETED},
    RunState.TRAINING_QUEUED: ENDS | {RunState.TRAINING_RUNNING},
    RunState.TRAINING_RUNNING: ENDS
    | {
        RunState.POST_EVALUATING,
        RunState.ENVIRONMENT_EVALUATING,
        RunState.COMPLETED,
    },
    RunState.POST_EVALUATING: ENDS
    | {RunState.ENVIRONMENT_EVALUATING, RunState.COMPLETED},
    RunState.ENVIRONMENT_EVALUATING: ENDS | {RunState.COMPLETED},
    RunState.ROLLOUT_READY: frozenset[RunState](),
    RunState.COMPLETED: frozenset[RunState](),
    RunState.FAILED: frozenset[RunState](),
    RunState.CANCELLED: frozenset[RunState](),
}
"""Which states may follow a state."""

OF_A_ROLLOUT: Final = frozenset(
    {
        RunState.QUEUED,
        RunState.DISCOVERING,
        RunState.COLLECTING,
        RunState.REVALIDATING,
        RunState.ROLLOUT_READY,
        *ENDS,
    }
)
"""States that a run without training can be in."""

STAGES: Final = {
    RunState.QUEUED: FailureStage.ADMISSION,
    RunState.DISCOVERING: FailureStage.DISCOVERY,
    RunState.COLLECTING: FailureStage.COLLECTION,
    RunState.REVALIDATING: FailureStage.IDENTITY_VERIFICATION,
    RunState.SUBMITTING: FailureStage.TRAINING_SUBMISSION,
    RunState.TRAINING_QUEUED: FailureStage.TRAINING,
    RunState.TRAINING_RUNNING: FailureStage.TRAINING,
    RunState.POST_EVALUATING: FailureStage.POST_EVALUATION,
    RunState.ENVIRONMENT_EVALUATING: FailureStage.ENVIRONMENT_EVALUATION,
    RunState.ROLLOUT_READY: FailureStage.ORCHESTRATION,
    RunState.COMPLETED: FailureStage.ORCHESTRATION,
    RunState.FAILED: FailureStage.ORCHESTRATION,
    RunState.CANCELLED: FailureStage.ORCHESTRATION,
}
"""What fails where; publication and restoration are named by those who do them."""

CANCEL_NOTE: Final = "cancellation was requested; it takes effect at the next boundary"
CANCELLED_NOTE: Final = "cancelled on request"


def admit_run(
    status: OpenEnvRunStatus, max_active_runs: int, now_ms: int
) -> OpenEnvRunStatus:
    """Give a queued run a slot; it holds it until it ends.

    Raises:
        Conflict: It is not queued.
    """
    admitted_ms = max(now_ms, status.submitted_unix_ms)
    return moved_run(
        status,
        RunState.DISCOVERING,
        admission=RunAdmission(
            max_active_runs=max_active_runs,
            sequence=status.admission.sequence,
            admitted_unix_ms=admitted_ms,
            queue_wait_ms=admitted_ms - status.submitted_unix_ms,
        ),
    )


def moved_run(
    status: OpenEnvRunStatus, state: RunState, **changes: Any
) -> OpenEnvRunStatus:
    """Move a run to another state.

    Args:
        status: The run.
        state: One that may follow.
        **changes: What else is known now.

    Raises:
        Conflict: That state may not follow.
    """
    reason = contradicted(status, state)
    if reason:
        raise Conflict(f"a {status.kind} run that is {status.state} {reason}")
    return msgspec.structs.replace(status, state=state, **changes)


def contradicted(status: OpenEnvRunStatus, state: RunState) -> str:
    """Say why a state may not follow; nothing where it may."""
    request = status.request
    if state not in EDGES[status.state]:
        return f"cannot become {state}"
    if status.kind == "rollout" and state not in OF_A_ROLLOUT:
        return f"has no state {state}"
    if status.kind == "train" and state is RunState.ROLLOUT_READY:
        return f"has no state {state}"
    needed = {
        RunState.POST_EVALUATING: request.post_eval,
        RunState.ENVIRONMENT_EVALUATING: request.environment_eval,
    }
    if needed.get(state, request) is UNSET:
        return f"was asked for nothing that makes it {state}"
    return ""


def progressed_run(
    status: OpenEnvRunStatus,
    groups_completed: int,
    rollouts_completed: int,
    environments: list[EnvironmentIdentity] | UnsetType = UNSET,
) -> OpenEnvRunStatus:
    """Note how much of a collection is done; it never becomes less, nor too much.

    Args:
        status: The run.
        groups_completed: So far.
        rollouts_completed: So far.
        environments: Who takes part, once it is known.
    """
    old = status.progress
    progress = RunProgress(
        groups_completed=_between(
            old.groups_completed, groups_completed, old.groups_total
        ),
        groups_total=old.groups_total,
        rollouts_completed=_between(
            old.rollouts_completed, rollouts_completed, old.rollouts_total
        ),
        rollouts_total=old.rollouts_total,
    )
    return msgspec.structs.replace(
        status,
        progress=progress,
        environments=status.environments if environments is UNSET else environments,
    )


def published_run(
    status: OpenEnvRunStatus,
    artifacts: list[RunArtifact],
    stats: RolloutStats,
    now_ms: int,
    warnings: list[str] | None = None,
) -> OpenEnvRunStatus:
    """Note that the bundle is published: the end of a rollout run.

    Args:
        status: The run, ``revalidating``.
        artifacts: What can be downloaded.
        stats: Of the collection.
        now_ms: When.
        warnings: What the selection left out; a train run goes on to ``submitting``.

    Raises:
        Conflict: It is in another state.
    """
    facts: dict[str, Any] = {
        "artifacts": list(artifacts),
        "rollout_stats": stats,
        "warnings": list(warnings) if warnings else status.warnings,
    }
    if status.kind == "train":
        return moved_run(status, RunState.SUBMITTING, **facts)
    return _ended(status, RunState.ROLLOUT_READY, now_ms, **facts)


def submitted_run(
    status: OpenEnvRunStatus,
    response: TrainingResponse,
    artifacts: list[RunArtifact],
) -> OpenEnvRunStatus:
    """Note that a train run's corpus was submitted.

    Args:
        status: The run, ``submitting``.
        response: Names the job.
        artifacts: With the summary that holds the submission.

    Raises:
        Conflict: It is in another state.
    """
    return moved_run(
        status,
        RunState.TRAINING_QUEUED,
        training_job_id=response.job_id,
        training_submission=response,
        artifacts=list(artifacts),
    )


def trained_run(
    status: OpenEnvRunStatus, training: OpenEnvTrainingStatus
) -> OpenEnvRunStatus:
    """Note what the training job says of itself.

    Its progress never becomes less; a job that runs or has ended moves the run to
    ``training_running``.
    """
    old = status.training
    if not isinstance(old, UnsetType) and training.progress < old.progress:
        training = msgspec.structs.replace(training, progress=old.progress)
    if status.state is RunState.TRAINING_QUEUED and training.state != "queued":
        status = moved_run(status, RunState.TRAINING_RUNNING)
    return msgspec.structs.replace(status, training=training)


def evaluating_run(
    status: OpenEnvRunStatus,
    evaluation: OpenEnvEnvironmentEvalStatus | None = None,
    post_evaluations: list[OpenEnvPostEvalStatus] | None = None,
) -> OpenEnvRunStatus:
    """Note how evaluations go, entering the state of the last one given.

    Args:
        status: The run.
        evaluation: The paired one, where it goes on.
        post_evaluations: The static ones, where they do.

    Raises:
        Conflict: The run's state allows neither.
    """
    if post_evaluations is not None:
        status = _entered(status, RunState.POST_EVALUATING)
        status = msgspec.structs.replace(
            status, post_evaluations=list(post_evaluations)
        )
    if evaluation is not None:
        status = _entered(status, RunState.ENVIRONMENT_EVALUATING)
        status = msgspec.structs.replace(status, environment_evaluation=evaluation)
    return status


def completed_run(
    status: OpenEnvRunStatus, now_ms: int, **changes: Any
) -> OpenEnvRunStatus:
    """End a train run that did all it was asked for.

    Its paired evaluation counts as skipped where it never began, as after a selection
    that was empty.

    Args:
        status: The run.
        now_ms: When.
        **changes: What else is known now: artifacts, warnings.

    Raises:
        Conflict: Its state does not allow it.
    """
    status = _evaluation_as(status, pending="skipped")
    return _ended(status, RunState.COMPLETED, now_ms, **changes)


def failed_run(
    status: OpenEnvRunStatus, failure: OpenEnvRunFailure
) -> OpenEnvRunStatus:
    """End a run that failed.

    Raises:
        Conflict: It has ended already.
    """
    status = _evaluation_as(status, pending="skipped", active="failed")
    return _ended(
        status,
        RunState.FAILED,
        failure.occurred_unix_ms,
        failure=failure,
        error=failure.message,
    )


def run_failed_with(
    status: OpenEnvRunStatus,
    error: BaseException,
    now_ms: int,
    stage: FailureStage | None = None,
) -> OpenEnvRunStatus:
    """End a run by an error.

    Args:
        status: The run.
        error: What ended it.
        now_ms: When.
        stage: Where, unless it is that of the run's state.

    Raises:
        Conflict: It has ended already.
    """
    return failed_run(
        status, classify_failure(error, stage or STAGES[status.state], now_ms)
    )


def interrupted_run(status: OpenEnvRunStatus, now_ms: int) -> OpenEnvRunStatus:
    """End an unfinished run that nobody performs any more."""
    return failed_run(
        status,
        run_failure(
            FailureCode.RUN_INTERRUPTED,
            FailureStage.RESTORATION,
            f"the server stopped while the run was {status.state}",
            now_ms,
        ),
    )


def request_cancel(status: OpenEnvRunStatus, now_ms: int) -> OpenEnvRunStatus:
    """Cancel a queued run; note the request on one that is active.

    Raises:
        RunNotCancellable: It has ended.
    """
    if status.state in TERMINAL:
        raise RunNotCancellable(f"run {status.run_id} is {status.state} already")
    if status.state is QUEUED:
        return cancelled_run(status, now_ms)
    return msgspec.structs.replace(status, error=CANCEL_NOTE)


def cancel_requested(status: OpenEnvRunStatus) -> bool:
    """Say whether an active run is to end at its next boundary."""
    return status.state not in TERMINAL and status.error == CANCEL_NOTE


def cancelled_run(status: OpenEnvRunStatus, now_ms: int) -> OpenEnvRunStatus:
    """End a run that was cancelled; it carries no failure.

    Raises:
        Conflict: It has ended already.
    """
    status = _evaluation_as(status, pending="cancelled", active="cancelled")
    return _ended(status, RunState.CANCELLED, now_ms, error=CANCELLED_NOTE)


def _ended(
    status: OpenEnvRunStatus, state: RunState, now_ms: int, **changes: Any
) -> OpenEnvRunStatus:
    """Move a run to a state that nothing follows."""
    begun = status.admission.admitted_unix_ms
    earliest = status.submitted_unix_ms if isinstance(begun, UnsetType) else begun
    return moved_run(
        status,
        state,
        **{
            "admission": msgspec.structs.replace(
                status.admission, queue_position=UNSET
            ),
            "finished_unix_ms": max(now_ms, earliest),
            "error": UNSET,
            **changes,
        },
    )


def _entered(status: OpenEnvRunStatus, state: RunState) -> OpenEnvRunStatus:
    return status if status.state is state else moved_run(status, state)


def _between(low: int, value: int, high: int) -> int:
    return max(low, min(value, high))


def _evaluation_as(
    status: OpenEnvRunStatus, *, pending: str, active: str | None = None
) -> OpenEnvRunStatus:
    """Say what becomes of a paired evaluation that has not ended."""
    evaluation = status.environment_evaluation
    if isinstance(evaluation, UnsetType):
        return status
    state = evaluation.state
    if state == "pending":
        state = pending  # type: ignore[assignment]  # one of its states
    elif state.startswith("collecting_") and active:
        state = active  # type: ignore[assignment]  # one of its states
    return msgspec.structs.replace(
        status,
        environment_evaluation=msgspec.structs.replace(evaluation, state=state),
    )
