"""`kiln_core/drive/concurrency.py`: one failure leaves a task group, the one to tell."""

from __future__ import annotations

import gc

import anyio
import pytest
from anyio import to_thread

from kiln_core.drive.concurrency import YOUNG_OBJECTS, run, task_group
from kiln_core.errors import KilnError, SessionLost, UsageError

pytestmark = pytest.mark.anyio


async def fail(error: BaseException) -> None:
    raise error


async def raised(*errors: BaseException) -> BaseException:
    """Return what leaves a group in which tasks fail at the same time."""
    try:
        async with task_group() as group:
            for error in errors:
                group.start_soon(fail, error)
    except BaseException as error:
        return error
    raise AssertionError


async def test_single_error_is_not_wrapped() -> None:
    lost = SessionLost("gone")
    assert await raised(lost) is lost


async def test_own_error_wins_over_another() -> None:
    wrong = UsageError("wrong")
    assert await raised(ValueError("bug"), wrong) is wrong


async def test_first_own_error_wins() -> None:
    first = UsageError("first")
    assert await raised(first, UsageError("second")) is first


async def test_stranger_than_an_error_passes_too() -> None:
    class Stop(BaseException):
        pass

    stop = Stop()
    assert await raised(stop) is stop


async def test_foreign_error_passes_unwrapped() -> None:
    bug = ValueError("bug")
    assert await raised(bug) is bug


async def test_interrupt_wins_over_everything() -> None:
    """Ctrl-C must never turn into an ordinary failure that someone retries."""
    stop = KeyboardInterrupt()
    # Not in a task of its own, where asyncio itself would act on it.
    with pytest.raises(KeyboardInterrupt) as caught:
        async with task_group() as group:
            group.start_soon(fail, SessionLost("gone"))
            try:
                await anyio.sleep(1)
            finally:
                raise stop
    assert caught.value is stop


async def test_nested_groups_are_flattened() -> None:
    lost = SessionLost("gone")

    async def inner() -> None:
        async with task_group() as group:
            group.start_soon(fail, lost)

    with pytest.raises(SessionLost) as caught:
        async with task_group() as outer:
            outer.start_soon(inner)
            await anyio.sleep(1)
    assert caught.value is lost


async def test_cause_of_the_error_is_kept() -> None:
    lost, cause = SessionLost("gone"), OSError("reset")
    lost.__cause__ = cause
    assert (await raised(lost)).__cause__ is cause


async def test_cancellation_from_outside_stays_one() -> None:
    with anyio.move_on_after(0.01) as scope:
        async with task_group() as group:
            group.start_soon(anyio.sleep, 5)
            await anyio.sleep(5)
    assert scope.cancelled_caught


async def test_error_while_cancelled_is_told() -> None:
    """A failure during clean-up is no cancellation any more."""

    async def clean_up_badly() -> None:
        try:
            await anyio.sleep(5)
        finally:
            raise UsageError("bad clean-up")

    with pytest.raises(KilnError, match="bad clean-up"), anyio.move_on_after(0.01):
        async with task_group() as group:
            group.start_soon(clean_up_badly)
            await anyio.sleep(5)


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [
        ((700, 10, 10), (YOUNG_OBJECTS, 10, 10)),
        ((YOUNG_OBJECTS + 1, 5, 6), (YOUNG_OBJECTS + 1, 5, 6)),
        ((0, 10, 10), (0, 10, 10)),
    ],
)
async def test_garbage_is_looked_for_seldom_while_it_runs(
    before: tuple[int, int, int], meanwhile: tuple[int, int, int]
) -> None:
    async def ask(fails: bool) -> tuple[int, int, int]:
        if fails:
            raise UsageError("wrong")
        return gc.get_threshold()

    usual = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        assert await to_thread.run_sync(run, ask, False) == meanwhile
        assert gc.get_threshold() == before
        with pytest.raises(UsageError):
            await to_thread.run_sync(run, ask, True)
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*usual)
