"""`kiln_core/restoration.py`: what a restart keeps, resumes, fails and refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from kiln_core import limits
from kiln_core.admission import RunLimits, queued_runs
from kiln_core.canonical import compact, pretty, read_json
from kiln_core.errors import Conflict, InvalidRecord, MalformedJson
from kiln_core.lifecycle import STAGES, TERMINAL, cancelled_run
from kiln_core.restoration import (
    RecordedRun,
    Restoration,
    read_run_record,
    restore_runs,
)
from kiln_core.run import OpenEnvRunStatus, RunState
from tests.core.runs import (
    EVERYTHING,
    NOW,
    POST,
    STATS,
    TRAINING,
    artifact,
    queued,
    walked,
)

LIMITS = RunLimits(max_tracked_runs=4, tracked_run_ttl_seconds=10)
TRAIN = {"kind": "train", "output_adapter": "next"}
LATER = NOW + 1000


def placed(status: OpenEnvRunStatus, sequence: int, **changes: Any) -> OpenEnvRunStatus:
    admission = msgspec.structs.replace(status.admission, sequence=sequence)
    return msgspec.structs.replace(status, admission=admission, **changes)


def restored(
    *statuses: OpenEnvRunStatus,
    version: int = 5,
    limits: RunLimits = LIMITS,
    now_ms: int = LATER,
) -> Restoration:
    records = [RecordedRun(version=version, status=status) for status in statuses]
    return restore_runs(records, limits, now_ms)


def only(restoration: Restoration) -> OpenEnvRunStatus:
    [status] = restoration.ledger.runs.values()
    return status


def document(status: OpenEnvRunStatus, version: int, **changes: Any) -> dict[str, Any]:
    value = read_json(compact(status), "status")
    value["schema"] = f"kiln.openenv-run.v{version}"
    for name in ("training_contract",) if version < 5 else ():
        value.pop(name, None)
    if version < 4:
        value.pop("admission")
    return {**value, **changes}


def read(value: object) -> RecordedRun:
    return read_run_record(msgspec.json.Encoder().encode(value), "run.json")


# Reading


@pytest.mark.parametrize("state", RunState)
def test_record_of_this_version(state: RunState) -> None:
    status = walked(state)
    record = read_run_record(pretty(status).rstrip(b"\n"), "run.json")
    assert record == RecordedRun(version=5, status=status)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
@pytest.mark.parametrize("state", [RunState.FAILED, RunState.COLLECTING])
def test_record_of_an_older_version(version: int, state: RunState) -> None:
    record = read(document(walked(state), version))
    assert (record.version, record.status.state) == (version, state)
    assert record.status.schema == "kiln.openenv-run.v5"
    assert record.status.admission.queue_position is UNSET


def test_version_1_ends_when_training_is_queued() -> None:
    record = read(document(walked(RunState.TRAINING_QUEUED), 1))
    assert (record.status.state, record.status.finished_unix_ms) == ("completed", NOW)
    assert "version 1" in record.status.warnings[0]  # type: ignore[index]  # it is there
    assert only(restored(record.status, version=1)) == record.status
    later = read(document(walked(RunState.TRAINING_QUEUED), 2))
    assert later.status.state is RunState.TRAINING_QUEUED


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", MalformedJson),
        (b"{", MalformedJson),
        (b'{"schema":"kiln.openenv-run.v5","schema":1}', MalformedJson),
        (b"[]", InvalidRecord),
        (b"7", InvalidRecord),
        (b"{}", InvalidRecord),
        (b'{"schema":5}', InvalidRecord),
        (b'{"schema":"kiln.openenv-run.v6"}', InvalidRecord),
        (b'{"schema":"kiln.openenv-run.v5"}', InvalidRecord),
        (b" " * (limits.MAX_RUN_RECORD_BYTES + 1), InvalidRecord),
    ],
)
def test_foreign_file(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"run\.json"):
        read_run_record(data, "run.json")


@pytest.mark.parametrize(
    ("version", "member"),
    [(4, "training_contract"), (3, "admission"), (2, "x"), (5, "x"), (1, "finished")],
)
def test_member_a_version_did_not_know(version: int, member: str) -> None:
    with pytest.raises(InvalidRecord, match=member):
        read(document(queued(), version, **{member: {}}))


def test_record_that_contradicts_itself() -> None:
    with pytest.raises(InvalidRecord, match="/kind"):
        read(document(queued(), 5, kind="train"))


# Deciding


@pytest.mark.parametrize("members", [{}, TRAIN])
def test_pristine_run_goes_on_waiting(members: dict[str, Any]) -> None:
    status = queued(**members)
    restoration = restored(status)
    assert only(restoration) is status
    assert (restoration.resumed, restoration.changed) == (1, ())


def test_queue_resumes_in_exact_order() -> None:
    """By sequence, whatever the order of files and of the clock."""
    runs = [
        placed(queued(now_ms=NOW - 100 * sequence), sequence)
        for sequence in (7, 2, 9, 4)
    ]
    restoration = restored(*runs)
    order = [s.admission.sequence for s in queued_runs(restoration.ledger)]
    assert order == [2, 4, 7, 9]
    assert restoration.ledger.last_sequence == 9


@pytest.mark.parametrize(
    "state", [s for s in RunState if s not in TERMINAL and s is not RunState.QUEUED]
)
@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_active_run_was_interrupted(state: RunState, version: int) -> None:
    restoration = restored(walked(state), version=version)
    status = only(restoration)
    assert status.failure is not UNSET
    assert (status.failure.code, status.failure.stage) == (
        "run_interrupted",
        "restoration",
    )
    assert status.failure.retryable
    assert status.finished_unix_ms == LATER
    assert restoration.changed == (status,)
    assert (restoration.interrupted, restoration.resumed) == (1, 0)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_finished_run_stays_as_it_is(state: RunState) -> None:
    status = walked(state)
    restoration = restored(status)
    assert only(restoration) is status
    assert (restoration.changed, restoration.interrupted) == ((), 0)


TRACES: dict[str, dict[str, Any]] = {
    "groups": {
        "progress": msgspec.structs.replace(queued().progress, groups_completed=1)
    },
    "rollouts": {
        "progress": msgspec.structs.replace(queued().progress, rollouts_completed=1)
    },
    "admission": {
        "admission": msgspec.structs.replace(queued().admission, admitted_unix_ms=1)
    },
    "artifacts": {"artifacts": [artifact(queued())]},
    "statistics": {"rollout_stats": STATS},
    "environments": {"environments": []},
    "job": {"training_job_id": "j"},
    "training": {"training": TRAINING},
    "evaluations": {"post_evaluations": [POST]},
    "error": {"error": "x"},
    "end": {"finished_unix_ms": NOW},
}


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("version", [4, 5])
def test_queued_run_with_a_trace_was_interrupted(trace: str, version: int) -> None:
    status = msgspec.structs.replace(queued(), **TRACES[trace])
    [failed] = restored(status, version=version).changed
    assert failed.failure is not UNSET
    assert failed.failure.code == "run_interrupted"


@pytest.mark.parametrize("version", [1, 2, 3])
def test_queued_run_from_before_the_queue_was_interrupted(version: int) -> None:
    [failed] = restored(
        read(document(queued(), version)).status, version=version
    ).changed
    assert failed.state is RunState.FAILED


def test_contract_must_match_its_request() -> None:
    status = queued(**TRAIN)
    for contract in (
        UNSET,
        queued(**{**TRAIN, "output_adapter": "o"}).training_contract,
    ):
        broken = msgspec.structs.replace(status, training_contract=contract)
        [failed] = restored(broken).changed
        assert failed.failure is not UNSET
        assert failed.failure.code == "persisted_contract_invalid"
        assert not failed.failure.retryable
    rollout = msgspec.structs.replace(
        queued(), training_contract=status.training_contract
    )
    assert only(restored(rollout)).state is RunState.FAILED


@pytest.mark.parametrize("members", [{}, TRAIN])
def test_queued_run_of_version_4_is_sealed_once(members: dict[str, Any]) -> None:
    record = read(document(queued(**members), 4))
    restoration = restore_runs([record], LIMITS, LATER)
    [sealed] = restoration.changed
    assert sealed is only(restoration)
    assert (sealed.state, restoration.resumed) == ("queued", 1)
    if members:
        assert sealed.training_contract is not UNSET
        assert sealed.training_contract.behavior_policy is UNSET
    again = restore_runs([read(document(sealed, 5))], LIMITS, LATER)
    assert again.changed == ()
    assert only(again) == sealed


def without_held_out_seeds(status: OpenEnvRunStatus) -> OpenEnvRunStatus:
    config = msgspec.structs.replace(status.request.environment_eval, seed_start=UNSET)  # type: ignore[type-var]  # it is there
    request = msgspec.structs.replace(status.request, environment_eval=config)
    return msgspec.structs.replace(status, request=request)


def test_request_of_version_4_is_normalised() -> None:
    status = queued(**EVERYTHING)
    record = read(document(without_held_out_seeds(status), 4))
    [sealed] = restored(record.status, version=4).changed
    assert sealed.request == status.request


def test_request_of_version_5_that_is_not_normalised() -> None:
    [failed] = restored(without_held_out_seeds(queued(**EVERYTHING))).changed
    assert failed.failure is not UNSET
    assert failed.failure.code == "persisted_contract_invalid"


def test_queued_run_of_version_4_that_cannot_be_sealed() -> None:
    record = read(document(queued(**TRAIN), 4))
    request = msgspec.structs.replace(record.status.request, output_adapter="../x")
    status = msgspec.structs.replace(record.status, request=request)
    [failed] = restored(status, version=4).changed
    assert failed.failure is not UNSET
    assert failed.failure.code == "persisted_contract_invalid"
    assert "../x" in failed.failure.message


def test_expired_runs_are_left_out() -> None:
    old, young = (cancelled_run(queued(), NOW + wait) for wait in (0, 1))
    restoration = restored(old, young, now_ms=NOW + 10_001)
    assert only(restoration) == young
    assert restoration.changed == ()
    assert restoration.forgotten == (old.run_id,)


def test_clock_that_went_backwards_expires_nothing() -> None:
    assert only(restored(cancelled_run(queued(), NOW), now_ms=1))
    [failed] = restored(walked(RunState.COLLECTING), now_ms=1).changed
    assert failed.finished_unix_ms == NOW + 5


def test_queue_comes_first_when_there_is_less_room() -> None:
    waiting = [placed(queued(now_ms=NOW - 9), place) for place in (1, 2)]
    finished = [
        placed(cancelled_run(queued(now_ms=NOW + place), NOW + place), place)
        for place in (3, 4, 5)
    ]
    restoration = restored(*finished, *waiting)
    kept = {status.admission.sequence for status in restoration.ledger.runs.values()}
    assert kept == {1, 2, 4, 5}
    assert restoration.changed == ()
    assert restoration.ledger.last_sequence == 5


def test_dropped_queued_run_has_failed() -> None:
    waiting = [placed(queued(now_ms=NOW - place), place) for place in (1, 2, 3)]
    small = msgspec.structs.replace(LIMITS, max_tracked_runs=2)
    restoration = restored(*waiting, limits=small)
    [failed] = restoration.changed
    assert failed.failure is not UNSET
    assert (failed.failure.code, failed.failure.stage) == (
        "run_admission_failed",
        "restoration",
    )
    assert (failed.run_id,) == restoration.forgotten == (waiting[2].run_id,)
    assert len(restoration.ledger.runs) == restoration.resumed == 2


def test_duplicate_key_among_retained_runs_is_an_error() -> None:
    one = queued(idempotency_key="k")
    other = cancelled_run(queued(idempotency_key="k", groups=9), NOW)
    with pytest.raises(Conflict) as caught:
        restored(one, other)
    assert one.run_id in caught.value.message
    assert other.run_id in caught.value.message


def test_runs_that_are_not_retained_own_no_key() -> None:
    old = cancelled_run(queued(idempotency_key="k"), NOW)
    new = queued(idempotency_key="k", now_ms=NOW + 1)
    assert only(restored(old, new, now_ms=NOW + 10_001)) is new
    small = msgspec.structs.replace(LIMITS, max_tracked_runs=1)
    assert only(restored(old, new, limits=small)) is new


def test_nothing_to_restore() -> None:
    assert restored().ledger.last_sequence == 0


def test_order_of_the_ledger_is_that_of_submission() -> None:
    runs = [cancelled_run(queued(now_ms=NOW + wait), NOW + wait) for wait in (3, 1, 2)]
    ordered = list(restored(*runs).ledger.runs.values())
    assert all(a.submitted_unix_ms < b.submitted_unix_ms for a, b in pairwise(ordered))


def test_stage_of_restoration_is_no_state() -> None:
    assert "restoration" not in {str(stage) for stage in STAGES.values()}
