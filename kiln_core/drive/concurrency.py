"""Task groups that raise what happened, not a group of it.

anyio wraps every exception that leaves a task group. Callers of Kiln catch one typed
error, so a group is collapsed to the leaf that matters: an interrupt before an error of
ours before any other, and the first of several.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from kiln_core.errors import KilnError

__all__ = ["task_group"]


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
