"""What a server that starts makes of the records it finds.

An external episode, a trainer or an evaluation cannot be resumed, so a run that held a
slot and has not ended fails as interrupted. A run that never held one goes on waiting,
in the exact order of the sequence numbers; one of version 4 is sealed once into version
5 and never again. Finished runs are retained as long as ever.

Versions differ in how far they followed a run: 1 ended when training was queued, 2
followed training, 3 the paired evaluation, 4 brought the queue, 5 the sealed contract.
Older records are read into the form of version 5; a member no version knows makes a
record foreign, and it is left alone.

Reading and writing files is not done here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from kiln_core import limits as bounds
from kiln_core.admission import (
    RunLedger,
    RunLimits,
    age,
    expired,
)
from kiln_core.canonical import compact, convert_record, read_json
from kiln_core.errors import Conflict, InvalidRecord, UsageError
from kiln_core.failure import FailureCode, FailureStage, run_failure
from kiln_core.lifecycle import QUEUED, TERMINAL, failed_run, interrupted_run
from kiln_core.run import RUN_SCHEMA, OpenEnvRunRequest, OpenEnvRunStatus, RunState
from kiln_core.run_request import (
    contract_matches,
    read_run_request,
    seal_contract,
)

__all__ = [
    "RecordedRun",
    "Restoration",
    "read_run_record",
    "restore_runs",
]

VERSIONS: Final = {f"kiln.openenv-run.v{number}": number for number in range(1, 6)}
QUEUE_SINCE: Final = 4
CONTRACT_SINCE: Final = 5
UNFOLLOWED: Final = (
    "recorded by version 1, which did not follow the training job it submitted"
)


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A record as it was found."""

    version: int
    status: OpenEnvRunStatus
    """In the form of version 5."""


class Restoration(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the records."""

    ledger: RunLedger
    changed: tuple[OpenEnvRunStatus, ...]
    """Statuses that are not what their files say; to be written before serving."""
    forgotten: tuple[str, ...]
    """Ids of runs that are retained no more, so that no later start finds them."""
    resumed: int
    """Runs that go on waiting."""
    interrupted: int
    """Runs that failed because the server stopped."""


def read_run_record(data: bytes, what: str) -> RecordedRun:
    """Read a ``run.json`` of any version.

    Args:
        data: The file.
        what: Names it in errors.

    Raises:
        MalformedJson: It is not strict JSON.
        InvalidRecord: It is no record of a run, or over the bound.
    """
    if len(data) > bounds.MAX_RUN_RECORD_BYTES:
        raise InvalidRecord(f"{what} is over {bounds.MAX_RUN_RECORD_BYTES} bytes")
    document = read_json(data, what, bounds.MAX_ARTIFACT_DEPTH)
    schema = document.get("schema") if isinstance(document, dict) else None
    version = VERSIONS.get(schema) if isinstance(schema, str) else None
    if version is None:
        raise InvalidRecord(f"{what} is no record of a run")
    if version < CONTRACT_SINCE:
        document = _upgraded(document, version)
    status = convert_record(document, OpenEnvRunStatus, what)
    if status.kind != status.request.kind:
        raise InvalidRecord(f"{what} contradicts itself at /kind", pointer="/kind")
    return RecordedRun(version=version, status=status)


def restore_runs(
    records: Iterable[RecordedRun], limits: RunLimits, now_ms: int
) -> Restoration:
    """Decide what becomes of every record that was found.

    Args:
        records: In any order, one per run.
        limits: Those of now, which may be smaller than they were.
        now_ms: Now.

    Raises:
        Conflict: Two retained runs are bound to one idempotency key.
    """
    found = {record.status.run_id: record for record in records}
    kept = []
    for record in found.values():
        status = _decided(record, now_ms)
        if not expired(status, limits, now_ms):
            kept.append(status)
    kept.sort(key=age, reverse=True)
    queue = sorted(
        (status for status in kept if status.state is QUEUED),
        key=lambda status: (status.admission.sequence, age(status)),
    )
    ordered = queue + [status for status in kept if status.state is not QUEUED]
    retained = ordered[: limits.max_tracked_runs]
    dropped = [_dropped(s, limits, now_ms) for s in ordered[len(retained) :]]
    _check_keys(retained)
    return Restoration(
        ledger=RunLedger(
            runs={status.run_id: status for status in reversed(retained)},
            last_sequence=max(
                (r.status.admission.sequence for r in found.values()), default=0
            ),
        ),
        changed=tuple(
            status
            for status in (*retained, *dropped)
            if status is not found[status.run_id].status
        ),
        forgotten=tuple(found.keys() - {status.run_id for status in retained}),
        resumed=sum(status.state is QUEUED for status in retained),
        interrupted=sum(
            status.failure is not UNSET
            and status is not found[status.run_id].status
            and status.failure.code is FailureCode.RUN_INTERRUPTED
            for status in retained
        ),
    )


def pristine(status: OpenEnvRunStatus) -> bool:
    """Say whether a queued run never held a slot and left no trace."""
    done = status.progress
    return (
        status.state is QUEUED
        and done.groups_completed == done.rollouts_completed == 0
        and status.admission.admitted_unix_ms is UNSET
        and not status.post_evaluations
        and all(
            getattr(status, name) is UNSET
            for name in (
                "finished_unix_ms",
                "rollout_stats",
                "environments",
                "artifacts",
                "training_job_id",
                "training_submission",
                "training",
                "error",
            )
        )
    )


def complete(request: OpenEnvRunRequest) -> bool:
    """Say whether the default that depends on other members is filled in."""
    config = request.environment_eval
    return isinstance(config, UnsetType) or config.seed_start is not UNSET


def _decided(record: RecordedRun, now_ms: int) -> OpenEnvRunStatus:
    """Return what one run is now."""
    status = record.status
    if status.state in TERMINAL:
        return status
    if not pristine(status) or record.version < QUEUE_SINCE:
        return interrupted_run(status, now_ms)
    if record.version == QUEUE_SINCE:
        return _sealed(status, now_ms)
    if not complete(status.request):
        return _unusable(status, "its request is not normalised", now_ms)
    if not contract_matches(status.request, status.training_contract):
        return _unusable(status, "its training contract is not its request's", now_ms)
    return status


def _sealed(status: OpenEnvRunStatus, now_ms: int) -> OpenEnvRunStatus:
    """Return a queued run of version 4 as one of version 5, a fresh value."""
    try:
        request = read_run_request(compact(status.request)).accepted()
        contract = seal_contract(request) if request.kind == "train" else UNSET
    except UsageError as error:
        return _unusable(status, error.message, now_ms)
    return msgspec.structs.replace(status, request=request, training_contract=contract)


def _unusable(status: OpenEnvRunStatus, why: str, now_ms: int) -> OpenEnvRunStatus:
    return failed_run(
        status,
        run_failure(
            FailureCode.PERSISTED_CONTRACT_INVALID,
            FailureStage.RESTORATION,
            f"the recorded run cannot be resumed: {why}",
            now_ms,
        ),
    )


def _dropped(
    status: OpenEnvRunStatus, limits: RunLimits, now_ms: int
) -> OpenEnvRunStatus:
    """Return a run for which there is no room; one that waited has failed."""
    if status.state is not QUEUED:
        return status
    return failed_run(
        status,
        run_failure(
            FailureCode.RUN_ADMISSION_FAILED,
            FailureStage.RESTORATION,
            f"the server was restarted with room for {limits.max_tracked_runs} runs",
            now_ms,
        ),
    )


def _check_keys(retained: list[OpenEnvRunStatus]) -> None:
    """Check that a key names one run.

    Raises:
        Conflict: It names two.
    """
    owners: dict[str, str] = {}
    for status in retained:
        key = status.request.idempotency_key
        if not isinstance(key, str):
            continue
        if key in owners:
            raise Conflict(
                f"runs {owners[key]} and {status.run_id} are bound to one "
                "idempotency key",
                hint="move the directory of one of them away",
            )
        owners[key] = status.run_id


def _upgraded(document: dict[str, Any], version: int) -> dict[str, Any]:
    """Return an older document in the form of version 5.

    Raises:
        InvalidRecord: It has a member that its version did not know.
    """
    unknown = {"training_contract"}
    if version < QUEUE_SINCE:
        unknown.add("admission")
    for name in sorted(unknown & document.keys()):
        raise InvalidRecord(
            f"a record of version {version} has no {name}", pointer=f"/{name}"
        )
    upgraded = {**document, "schema": RUN_SCHEMA}
    if version < QUEUE_SINCE:
        # there was no queue: the run was active at once
        submitted = document.get("submitted_unix_ms")
        upgraded["admission"] = {
            "max_active_runs": 1,
            "sequence": 1,
            "admitted_unix_ms": submitted,
            "queue_wait_ms": 0,
        }
    if version == 1 and document.get("state") == RunState.TRAINING_QUEUED.value:
        upgraded["state"] = RunState.COMPLETED.value
        upgraded["warnings"] = [UNFOLLOWED]
        upgraded.setdefault("finished_unix_ms", document.get("submitted_unix_ms"))
    return upgraded
