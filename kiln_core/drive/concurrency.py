"""The event loop, and task groups that raise what happened, not a group of it.

anyio wraps every exception that leaves a task group. Callers of Kiln catch one typed
error, so a group is collapsed to the leaf that matters: an interrupt before an error of
ours before any other, and the first of several.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeVar, TypeVarTuple

import anyio
from anyio.abc import TaskGroup

from kiln_core.errors import KilnError

__all__ = ["run", "task_group"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

YOUNG_OBJECTS: Final = 50_000
"""Allocated before Python looks for cycles among them; its own default is 700."""


def run(function: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T:
    """Run an asynchronous function to its end, on uvloop where that exists.

    A step of an environment is a small message there and back, of which asyncio's own
    loop is a large part.
    """
    options = {"use_uvloop": sys.platform != "win32"}
    with _seldom_collected():
        return anyio.run(function, *arguments, backend_options=options)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Look for garbage cycles less often: what a collection makes is mostly kept."""
    before = gc.get_threshold()
    gc.set_threshold(max(YOUNG_OBJECTS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Open a task group whose failure is a single exception."""
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as failures:
        leading = _leading(failures)
        raise leading from leading.__cause__


def _leading(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    leaves = _leaves(failures)
    for wanted in (KeyboardInterrupt, SystemExit, KilnError, Exception):
        for leaf in leaves:
            if isinstance(leaf, wanted):
                return leaf
    return leaves[0]


def _leaves(
    failures: BaseExceptionGroup[BaseException],
) -> list[BaseException]:
    leaves: list[BaseException] = []
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            leaves += _leaves(failure)
        else:
            leaves.append(failure)
    return leaves
