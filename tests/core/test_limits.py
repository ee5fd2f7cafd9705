from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln_core import limits
from kiln_core.errors import LimitError
from kiln_core.limits import Lease, RetainedBudget

FACTS = {
    "MAX_SEED": 9223372036854775807,
    "MAX_GENERATION_SEED": 18446744073709551615,
    "MAX_SERVER_MESSAGE_BYTES": 524288,
    "MAX_CLIENT_MESSAGE_BYTES": 16777216,
    "MAX_DISCOVERY_BYTES": 2 * 1024 * 1024,
    "MAX_ENVIRONMENTS": 64,
    "MAX_GROUPS": 16384,
    "MAX_GROUP_SIZE": 256,
    "MAX_ROLLOUTS": 16384,
    "MAX_STEPS": 256,
    "MAX_CONCURRENCY": 256,
    "MAX_ACTION_TOKENS": 16384,
    "MAX_RECOVERABLE_ERRORS": 64,
    "MAX_CAPACITY_WAIT_SECONDS": 3600,
    "MAX_ARTIFACT_BYTES": 268435456,
    "RETAINED_BUDGET_BYTES": 512 * 1024 * 1024,
    "CONTRACT_RESERVE_BYTES": 1024 * 1024,
    "MAX_RESET_OPTIONS_BYTES": 16 * 1024 * 1024 - 1024,
    "MAX_FAILURE_MESSAGE_BYTES": 4096,
    "MAX_ACTION_ISSUES": 4,
    "MAX_ISSUE_BYTES": 192,
    "HTTP_CONNECT_SECONDS": 10,
    "HTTP_TOTAL_SECONDS": 60,
    "EXCHANGE_SECONDS": 60,
    "CAPACITY_BACKOFF_SECONDS": 0.25,
    "CAPACITY_BACKOFF_MAX_SECONDS": 2,
    "CONTROL_PLANE_SECONDS": 180,
}


@pytest.mark.parametrize(("name", "value"), FACTS.items())
def test_bound_is_the_documented_one(name: str, value: float) -> None:
    assert getattr(limits, name) == value


def test_collections_leave_room_for_the_contract() -> None:
    assert RetainedBudget().limit_bytes == 511 * 1024 * 1024


def test_budget_refuses_the_piece_that_is_too_many() -> None:
    budget = RetainedBudget(10)
    budget.charge(10, "a group")
    with pytest.raises(
        LimitError, match="keeping an observation would exceed"
    ) as caught:
        budget.charge(1, "an observation")
    assert caught.value.details == {
        "limit_bytes": 10,
        "used_bytes": 10,
        "refused_bytes": 1,
    }
    assert budget.used_bytes == 10


def test_settling_exchanges_pieces_for_their_compact_form() -> None:
    budget = RetainedBudget(100)
    lease = Lease(budget)
    lease.charge(60, "x")
    lease.charge(30, "y")
    lease.settle(50, "z")
    assert (lease.used_bytes, budget.used_bytes) == (50, 50)
    with pytest.raises(LimitError):
        lease.settle(101, "z")
    lease.close()
    assert budget.used_bytes == 0


steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["charge", "settle", "close"]),
        st.integers(0, 60),
    ),
    max_size=40,
)


@given(steps)
def test_budget_always_is_the_sum_of_its_leases(
    operations: list[tuple[int, str, int]],
) -> None:
    budget = RetainedBudget(100)
    leases = [Lease(budget) for _ in range(3)]
    for index, operation, size in operations:
        lease = leases[index]
        try:
            if operation == "charge":
                lease.charge(size, "x")
            elif operation == "settle":
                lease.settle(size, "x")
            else:
                lease.close()
        except LimitError:
            pass
        assert budget.used_bytes == sum(each.used_bytes for each in leases)
        assert 0 <= budget.used_bytes <= budget.limit_bytes
    for lease in leases:
        lease.close()
    assert budget.used_bytes == 0
