"""Which runs are retained, which waits, which starts: bounded, first in first out.

A `RunLedger` is a value; every operation returns another one. At most
``max_active_runs`` runs hold a slot, each until it ends, and only the head of the queue
is given one. At most ``max_tracked_runs`` are retained, whatever their state: finished
ones that are older than the time to live go first, then the finished one that was
submitted first. What is not retained any more does not own its idempotency key.

A key is looked up twice: before a request is validated, and when its run is inserted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from kiln_core.contract import OpenEnvTrainingContract
from kiln_core.errors import IdempotencyConflict, RunCapacityFull, RunNotFound
from kiln_core.evaluation import EnvironmentEvalConfig
from kiln_core.evidence import PolicyIdentity
from kiln_core.lifecycle import QUEUED, TERMINAL, admit_run
from kiln_core.run import (
    RUN_LIST_SCHEMA,
    RUN_SCHEMA,
    EnvironmentEvalProgress,
    OpenEnvEnvironmentEvalStatus,
    OpenEnvRunList,
    OpenEnvRunRequest,
    OpenEnvRunStatus,
    RunAdmission,
    RunProgress,
)
from kiln_core.run_request import RunRequestDraft, changed_members

__all__ = [
    "Insertion",
    "RunLedger",
    "RunLimits",
    "active_runs",
    "admit_next",
    "find_run",
    "insert_run",
    "listed_runs",
    "new_run",
    "projected",
    "queued_runs",
    "retained_run",
    "with_run",
    "without_runs",
]

RETRY_AFTER_SECONDS: Final = 5
NONE: Final[Mapping[str, OpenEnvRunStatus]] = MappingProxyType({})


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many runs a server performs and remembers."""

    max_active_runs: int = 4
    max_tracked_runs: int = 128
    """Active, queued and retained ones together."""
    tracked_run_ttl_seconds: int = 604_800
    """How long a finished run is retained."""


class RunLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The retained runs."""

    runs: Mapping[str, OpenEnvRunStatus] = NONE
    """By id."""
    last_sequence: int = 0
    """Of every run there ever was, retained or not."""


class Insertion(msgspec.Struct, frozen=True, kw_only=True):
    """What a creation gave."""

    ledger: RunLedger
    status: OpenEnvRunStatus
    """Projected."""
    replayed: bool
    """Whether the key was bound to this run already."""
    forgotten: tuple[str, ...] = ()
    """Ids of the runs that are retained no more."""


def new_run(
    request: OpenEnvRunRequest,
    run_id: str,
    admission: RunAdmission,
    now_ms: int,
    contract: OpenEnvTrainingContract | UnsetType = UNSET,
) -> OpenEnvRunStatus:
    """Return a run as it is queued.

    Args:
        request: Normalised.
        run_id: A fresh UUID.
        admission: Its place in the queue.
        now_ms: When it was submitted.
        contract: Sealed; that of a train run.
    """
    return OpenEnvRunStatus(
        schema=RUN_SCHEMA,
        run_id=run_id,
        kind=request.kind,
        state=QUEUED,
        request=request,
        submitted_unix_ms=max(now_ms, 0),
        admission=admission,
        progress=RunProgress(
            groups_completed=0,
            groups_total=request.groups,
            rollouts_completed=0,
            rollouts_total=request.groups * request.group_size,
        ),
        training_contract=contract,
        environment_evaluation=_pending(request),
    )


def retained_run(
    ledger: RunLedger, draft: RunRequestDraft, limits: RunLimits, now_ms: int
) -> OpenEnvRunStatus | None:
    """Return the run that a request's key is bound to, None where it is free.

    Args:
        ledger: The retained runs.
        draft: The request, valid or not: a bound key answers first.
        limits: Say what is retained.
        now_ms: Now.

    Raises:
        IdempotencyConflict: It is bound to another request.
    """
    if draft.idempotency_key is None:
        return None
    for status in ledger.runs.values():
        bound = status.request.idempotency_key == draft.idempotency_key
        if bound and not expired(status, limits, now_ms):
            _check_same(status, draft)
            return projected(ledger, status)
    return None


def insert_run(
    ledger: RunLedger,
    request: OpenEnvRunRequest,
    run_id: str,
    limits: RunLimits,
    now_ms: int,
    contract: OpenEnvTrainingContract | UnsetType = UNSET,
) -> Insertion:
    """Queue a run, unless its key is bound to it already.

    Args:
        ledger: The retained runs.
        request: Validated.
        run_id: A fresh UUID.
        limits: How many there may be.
        now_ms: Now.
        contract: Sealed; that of a train run.

    Raises:
        IdempotencyConflict: The key is bound to another request.
        RunCapacityFull: As many runs as may be are unfinished.
    """
    key = request.idempotency_key
    draft = RunRequestDraft(
        idempotency_key=None if isinstance(key, UnsetType) else key,
        request=request,
        refusal=None,
    )
    known = retained_run(ledger, draft, limits, now_ms)
    if known is not None:
        return Insertion(ledger=ledger, status=known, replayed=True)
    kept, forgotten = _make_room(ledger, limits, now_ms)
    sequence = ledger.last_sequence + 1
    status = new_run(
        request,
        run_id,
        RunAdmission(
            max_active_runs=limits.max_active_runs,
            sequence=sequence,
            queue_position=len(queued_runs(ledger)) + 1,
        ),
        now_ms,
        contract,
    )
    return Insertion(
        ledger=RunLedger(runs={**kept.runs, run_id: status}, last_sequence=sequence),
        status=status,
        replayed=False,
        forgotten=forgotten,
    )


def admit_next(
    ledger: RunLedger, limits: RunLimits, now_ms: int
) -> OpenEnvRunStatus | None:
    """Return the head of the queue with a slot, None where none waits or is free."""
    queue = queued_runs(ledger)
    if not queue or len(active_runs(ledger)) >= limits.max_active_runs:
        return None
    return admit_run(queue[0], limits.max_active_runs, now_ms)


def with_run(ledger: RunLedger, status: OpenEnvRunStatus) -> RunLedger:
    """Return the ledger with the new status of a retained run."""
    return RunLedger(
        runs={**ledger.runs, status.run_id: status}, last_sequence=ledger.last_sequence
    )


def without_runs(ledger: RunLedger, forgotten: Collection[str]) -> RunLedger:
    """Return the ledger without some of its runs."""
    return RunLedger(
        runs={i: status for i, status in ledger.runs.items() if i not in forgotten},
        last_sequence=ledger.last_sequence,
    )


def find_run(ledger: RunLedger, run_id: str) -> OpenEnvRunStatus:
    """Return one run as it is shown.

    Raises:
        RunNotFound: None of that id is retained.
    """
    status = ledger.runs.get(run_id)
    if status is None:
        raise RunNotFound("there is no such run")
    return projected(ledger, status)


def listed_runs(ledger: RunLedger) -> OpenEnvRunList:
    """Return every retained run as it is shown, newest first."""
    positions = _positions(ledger)
    runs = [_at(status, positions) for status in ledger.runs.values()]
    return OpenEnvRunList(
        schema=RUN_LIST_SCHEMA, runs=sorted(runs, key=age, reverse=True)
    )


def projected(ledger: RunLedger, status: OpenEnvRunStatus) -> OpenEnvRunStatus:
    """Return a run with its place in the queue as it is now."""
    return _at(status, _positions(ledger) if status.state is QUEUED else {})


def queued_runs(ledger: RunLedger) -> list[OpenEnvRunStatus]:
    """Return the runs that wait, the head first."""
    waiting = [status for status in ledger.runs.values() if status.state is QUEUED]
    return sorted(waiting, key=lambda status: status.admission.sequence)


def active_runs(ledger: RunLedger) -> list[OpenEnvRunStatus]:
    """Return the runs that hold a slot."""
    return [
        status
        for status in ledger.runs.values()
        if status.state is not QUEUED and status.state not in TERMINAL
    ]


def age(status: OpenEnvRunStatus) -> tuple[int, int, str]:
    """Return what orders runs by when they were submitted, the oldest first."""
    return status.submitted_unix_ms, status.admission.sequence, status.run_id


def expired(status: OpenEnvRunStatus, limits: RunLimits, now_ms: int) -> bool:
    """Say whether a run ended too long ago to be retained."""
    finished = status.finished_unix_ms
    return (
        status.state in TERMINAL
        and not isinstance(finished, UnsetType)
        and now_ms - finished > limits.tracked_run_ttl_seconds * 1000
    )


def _make_room(
    ledger: RunLedger, limits: RunLimits, now_ms: int
) -> tuple[RunLedger, tuple[str, ...]]:
    """Forget what must be forgotten for one more run.

    Raises:
        RunCapacityFull: That is not enough.
    """
    forgotten = [
        run_id
        for run_id, status in ledger.runs.items()
        if expired(status, limits, now_ms)
    ]
    finished = [
        status.run_id
        for status in sorted(ledger.runs.values(), key=age)
        if status.state in TERMINAL and status.run_id not in forgotten
    ]
    excess = len(ledger.runs) - len(forgotten) - limits.max_tracked_runs + 1
    if excess > len(finished):
        raise RunCapacityFull(
            f"{limits.max_tracked_runs} runs are tracked and none of them has ended",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
    forgotten += finished[: max(excess, 0)]
    return without_runs(ledger, forgotten), tuple(forgotten)


def _check_same(status: OpenEnvRunStatus, draft: RunRequestDraft) -> None:
    """Check that a key is used again for the same.

    Raises:
        IdempotencyConflict: It is not.
    """
    if draft.request is None:
        assert draft.refusal is not None  # noqa: S101 - one of the two is there
        why = f"and this one is invalid: {draft.refusal.message}"
    else:
        changed = changed_members(status.request, draft.request)
        if not changed:
            return
        why = f"which differs in {', '.join(changed)}"
    raise IdempotencyConflict(
        f"the idempotency key is bound to the request of run {status.run_id}, {why}",
        run_id=status.run_id,
    )


def _positions(ledger: RunLedger) -> dict[str, int]:
    return {s.run_id: place for place, s in enumerate(queued_runs(ledger), start=1)}


def _at(status: OpenEnvRunStatus, positions: Mapping[str, int]) -> OpenEnvRunStatus:
    admission = msgspec.structs.replace(
        status.admission, queue_position=positions.get(status.run_id, UNSET)
    )
    return msgspec.structs.replace(status, admission=admission)


def _pending(
    request: OpenEnvRunRequest,
) -> OpenEnvEnvironmentEvalStatus | UnsetType:
    """Return the paired evaluation that a run will make."""
    config: EnvironmentEvalConfig | UnsetType = request.environment_eval
    if isinstance(config, UnsetType):
        return UNSET
    assert not isinstance(config.seed_start, UnsetType)  # noqa: S101 - reading fills it
    base = request.adapter == "base"
    return OpenEnvEnvironmentEvalStatus(
        state="pending",
        seed_start=config.seed_start,
        groups=config.groups,
        group_size=config.group_size,
        baseline=PolicyIdentity(adapter=UNSET if base else request.adapter),
        candidate=PolicyIdentity(adapter=request.output_adapter),
        progress=EnvironmentEvalProgress(
            groups_completed=0,
            groups_total=config.groups,
            rollouts_completed=0,
            rollouts_total=config.groups * config.group_size,
        ),
    )
