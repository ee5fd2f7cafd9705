"""Getting a session on a server that may be full.

A full server says so in a first frame, by refusing the upgrade, or by closing at once;
that ends the socket, not the wait. Another session is tried with bounded backoff until
there is room or the wait is over.

Whoever finds the server full waits in line, and newcomers queue behind. Without a line
a worker that has just closed a session would take the next one at once, again and
again, and those who wait with backoff would starve. The bound counts from the head of
the line: waiting for our own episodes says nothing about the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import anyio

from kiln_core import limits
from kiln_core.drive.http import EnvironmentClient
from kiln_core.drive.websocket import (
    CapacityAtUpgrade,
    EnvironmentSession,
    SessionTimes,
    open_session,
)
from kiln_core.errors import CapacityExhausted
from kiln_core.session import ErrorReceived, Event, Reset

__all__ = ["acquire"]

SETTLE_SECONDS = 0.02
"""How long a server takes to notice that a session of ours has ended."""

Opened: TypeAlias = tuple[EnvironmentSession, Event]


@asynccontextmanager
async def acquire(
    client: EnvironmentClient, reset: Reset, wait_seconds: float, times: SessionTimes
) -> AsyncIterator[tuple[EnvironmentSession, Event, int]]:
    """Open a session on a server that may be full, and reset it.

    Args:
        client: The environment.
        reset: Sent first; its answer tells whether there was room.
        wait_seconds: Bound of waiting for room, once nobody of us is ahead.
        times: Deadlines of the session.

    Yields:
        The session, the answer to ``reset``, and how often the server was full.

    Raises:
        CapacityExhausted: No room came in time.
        TransportError: The session could not be opened or was lost.
        RemoteProtocolError: The answer broke the protocol.
    """
    try:
        async with AsyncExitStack() as stack:
            opened, retries = None, 0
            if not client.line.locked():
                opened = await _try(stack, client, reset, times)
                retries = int(opened is None)
            if opened is None:
                async with client.line:
                    opened, retries = await _wait(
                        stack, client, reset, wait_seconds, times, retries
                    )
            yield *opened, retries
    finally:
        client.freed.set()
        client.freed = anyio.Event()


async def _wait(
    stack: AsyncExitStack,
    client: EnvironmentClient,
    reset: Reset,
    wait_seconds: float,
    times: SessionTimes,
    retries: int,
) -> tuple[Opened, int]:
    """Try until there is room; return the session and how often there was none.

    Raises:
        CapacityExhausted: No room came in time.
    """
    deadline = anyio.current_time() + wait_seconds
    while True:
        if retries:
            pause = min(
                limits.CAPACITY_BACKOFF_SECONDS * retries,
                limits.CAPACITY_BACKOFF_MAX_SECONDS,
                max(deadline - anyio.current_time(), 0),
            )
            with anyio.move_on_after(pause):
                await client.freed.wait()
                await anyio.sleep(SETTLE_SECONDS)
        opened = await _try(stack, client, reset, times)
        if opened is not None:
            return opened, retries
        retries += 1
        if anyio.current_time() >= deadline:
            raise CapacityExhausted(
                f"{client.base_url} had no free session within {wait_seconds:g} s",
                environment=client.base_url,
                protocol_code="CAPACITY_REACHED",
                capacity_retries=retries,
            )


async def _try(
    stack: AsyncExitStack, client: EnvironmentClient, reset: Reset, times: SessionTimes
) -> Opened | None:
    """Open a session and reset it; return None when there is no room."""
    async with AsyncExitStack() as attempt:
        try:
            session = await attempt.enter_async_context(open_session(client, times))
        except CapacityAtUpgrade:
            return None
        answer = await session.exchange(reset)
        if isinstance(answer, ErrorReceived) and (
            answer.error.code == "CAPACITY_REACHED"
        ):
            return None
        stack.push_async_exit(attempt.pop_all())
    return session, answer
