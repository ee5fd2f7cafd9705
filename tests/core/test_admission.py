"""`kiln_core/admission.py`: bounded, first in first out, one run per key."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from kiln_core.admission import (
    Insertion,
    RunLedger,
    RunLimits,
    active_runs,
    admit_next,
    find_run,
    insert_run,
    listed_runs,
    projected,
    queued_runs,
    retained_run,
    with_run,
)
from kiln_core.errors import (
    IdempotencyConflict,
    RunCapacityFull,
    RunNotFound,
)
from kiln_core.lifecycle import cancelled_run, request_cancel
from tests.core.runs import NOW, asked, drafted, run_id

LIMITS = RunLimits(max_active_runs=2, max_tracked_runs=3, tracked_run_ttl_seconds=10)


def inserted(
    ledger: RunLedger, now_ms: int = NOW, limits: RunLimits = LIMITS, **members: Any
) -> Insertion:
    return insert_run(ledger, asked(**members), run_id(), limits, now_ms)


def filled(count: int) -> RunLedger:
    ledger = RunLedger()
    for place in range(count):
        ledger = inserted(ledger, NOW + place).ledger
    return ledger


def ended(ledger: RunLedger, place: int, now_ms: int = NOW) -> RunLedger:
    status = list(ledger.runs.values())[place]
    return with_run(ledger, cancelled_run(status, now_ms))


def test_new_run_is_last_in_the_queue() -> None:
    insertion = inserted(filled(2))
    assert not insertion.replayed
    assert insertion.forgotten == ()
    assert insertion.status.admission.sequence == 3
    assert insertion.status.admission.queue_position == 3
    assert insertion.status.admission.max_active_runs == 2


def test_head_only_and_only_so_many() -> None:
    ledger = filled(3)
    order = [status.run_id for status in queued_runs(ledger)]
    for expected in order[:2]:
        status = admit_next(ledger, LIMITS, NOW + 9)
        assert status is not None
        assert status.run_id == expected
        ledger = with_run(ledger, status)
    assert admit_next(ledger, LIMITS, NOW + 9) is None
    assert len(active_runs(ledger)) == 2
    assert admit_next(RunLedger(), LIMITS, NOW) is None
    first = next(iter(ledger.runs.values()))
    freed = with_run(ledger, cancelled_run(first, NOW + 10))
    last = admit_next(freed, LIMITS, NOW + 11)
    assert last is not None
    assert last.run_id == order[2]


def test_positions_are_those_of_now() -> None:
    ledger = filled(3)
    first, second, third = queued_runs(ledger)
    ledger = with_run(ledger, request_cancel(first, NOW))
    assert projected(ledger, second).admission.queue_position == 1
    assert find_run(ledger, third.run_id).admission.queue_position == 2
    assert find_run(ledger, first.run_id).admission.queue_position is UNSET
    shown = {r.run_id: r.admission.queue_position for r in listed_runs(ledger).runs}
    assert shown == {third.run_id: 2, second.run_id: 1, first.run_id: UNSET}


def test_list_is_newest_first() -> None:
    ledger = filled(3)
    assert [r.admission.sequence for r in listed_runs(ledger).runs] == [3, 2, 1]


def test_unknown_run() -> None:
    with pytest.raises(RunNotFound):
        find_run(filled(1), run_id())


def test_full_of_unfinished_runs() -> None:
    with pytest.raises(RunCapacityFull) as caught:
        inserted(filled(3))
    assert caught.value.details["retry_after_seconds"] == 5
    assert caught.value.retryable


def test_oldest_finished_run_makes_room() -> None:
    ledger = ended(ended(filled(3), 2), 1)
    order = list(ledger.runs)
    insertion = inserted(ledger, NOW + 5)
    assert insertion.forgotten == (order[1],)
    assert len(insertion.ledger.runs) == 3
    assert insertion.ledger.last_sequence == 4


def test_expired_runs_are_forgotten_first() -> None:
    ledger = ended(ended(filled(3), 0, NOW + 9000), 2, NOW)
    order = list(ledger.runs)
    insertion = inserted(ledger, NOW + 10_001 + 2)
    assert insertion.forgotten == (order[2],)
    both = inserted(ledger, NOW + 30_000)
    assert both.forgotten == (order[0], order[2])


def test_run_is_retained_for_all_of_its_time() -> None:
    ledger = ended(filled(1), 0, NOW)
    assert inserted(ledger, NOW + 10_000).forgotten == ()
    assert inserted(ledger, NOW + 10_001).forgotten == tuple(ledger.runs)
    assert inserted(ledger, NOW - 99_999).forgotten == ()


def test_smaller_bound_forgets_several() -> None:
    ledger = ended(ended(ended(filled(3), 0), 1), 2)
    small = msgspec.structs.replace(LIMITS, max_tracked_runs=1)
    assert len(inserted(ledger, NOW, small).forgotten) == 3


def test_same_request_with_a_key_is_the_same_run() -> None:
    first = inserted(RunLedger(), idempotency_key="k", groups=8)
    again = inserted(first.ledger, NOW + 5, idempotency_key="k", temperature=1)
    assert again.replayed
    assert again.status == first.status
    assert again.ledger is first.ledger
    draft = drafted(idempotency_key="k")
    assert retained_run(first.ledger, draft, LIMITS, NOW) == first.status


def test_same_request_without_a_key_is_another_run() -> None:
    first = inserted(RunLedger())
    assert inserted(first.ledger).status.run_id != first.status.run_id
    assert retained_run(first.ledger, drafted(), LIMITS, NOW) is None


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"groups": 9, "thinking": False}, "differs in groups, thinking"),
        ({"grups": 9}, "invalid: .*`grups`"),
        ({"kind": "train"}, "invalid: .*output_adapter"),
    ],
)
def test_another_request_with_a_key_is_a_conflict(
    members: dict[str, Any], said: str
) -> None:
    """Also one that is invalid: a bound key answers before anything else counts."""
    first = inserted(RunLedger(), idempotency_key="k")
    draft = drafted(idempotency_key="k", **members)
    with pytest.raises(IdempotencyConflict, match=said) as caught:
        retained_run(first.ledger, draft, LIMITS, NOW)
    assert caught.value.details["run_id"] == first.status.run_id
    free = drafted(idempotency_key="free", **members)
    assert retained_run(first.ledger, free, LIMITS, NOW) is None


def test_conflict_at_insertion() -> None:
    first = inserted(RunLedger(), idempotency_key="k")
    with pytest.raises(IdempotencyConflict):
        inserted(first.ledger, idempotency_key="k", groups=9)


def test_full_ledger_still_answers_its_keys() -> None:
    ledger = inserted(filled(2), idempotency_key="k").ledger
    assert inserted(ledger, idempotency_key="k").replayed


def test_key_of_a_forgotten_run_is_free() -> None:
    first = inserted(RunLedger(), idempotency_key="k")
    ledger = ended(first.ledger, 0)
    assert inserted(ledger, NOW + 10_000, idempotency_key="k", groups=8).replayed
    later = inserted(ledger, NOW + 10_001, idempotency_key="k", groups=9)
    assert later.forgotten == (first.status.run_id,)
    assert not later.replayed


def test_ledger_is_a_value() -> None:
    ledger = filled(1)
    before = dict(ledger.runs)
    inserted(ledger)
    ended(ledger, 0)
    assert ledger.runs == before
