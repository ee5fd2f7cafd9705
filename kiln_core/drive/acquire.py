"""Getting a session on a server that may be full.

A full server says so in a first frame, by refusing the upgrade, or by closing at once;
that ends the socket, not the wait. Another session is tried with bounded backoff until
there is room or the wait is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio

from kiln_core import limits
from kiln_core.drive.http import EnvironmentClient
from kiln_core.drive.websocket import (
    CapacityAtUpgrade,
    EnvironmentSession,
    SessionTimes,
    full_server,
    open_session,
)
from kiln_core.errors import CapacityExhausted
from kiln_core.session import ErrorReceived, Event, Reset

__all__ = ["acquire"]


@asynccontextmanager
async def acquire(
    client: EnvironmentClient, reset: Reset, wait_seconds: float, times: SessionTimes
) -> AsyncIterator[tuple[EnvironmentSession, Event, int]]:
    """Open a session on a server that may be full, and reset it.

    Args:
        client: The environment.
        reset: Sent first; its answer tells whether there was room.
        wait_seconds: Bound of waiting for room.
        times: Deadlines of the session.

    Yields:
        The session, the answer to ``reset``, and how often the server was full.

    Raises:
        CapacityExhausted: No room came in time.
        TransportError: The session could not be opened or was lost.
        RemoteProtocolError: The answer broke the protocol.
    """
    deadline = anyio.current_time() + wait_seconds
    retries = 0
    while True:
        async with AsyncExitStack() as stack:
            answer: Event
            try:
                session = await stack.enter_async_context(open_session(client, times))
                answer = await session.exchange(reset)
            except CapacityAtUpgrade as error:
                answer = full_server(error.message)
            if not _is_full(answer):
                yield session, answer, retries
                return
        retries += 1
        pause = min(
            limits.CAPACITY_BACKOFF_SECONDS * retries,
            limits.CAPACITY_BACKOFF_MAX_SECONDS,
        )
        if anyio.current_time() + pause > deadline:
            raise CapacityExhausted(
                f"{client.base_url} had no free session within {wait_seconds:g} s",
                environment=client.base_url,
                protocol_code="CAPACITY_REACHED",
            )
        await anyio.sleep(pause)


def _is_full(answer: Event) -> bool:
    return isinstance(answer, ErrorReceived) and answer.error.code == "CAPACITY_REACHED"
