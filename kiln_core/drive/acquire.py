"""Getting a session on a server that may be full.

A full server says so in a first frame, by refusing the upgrade, or by closing at once;
that ends the socket, not the wait. Another session is tried with bounded backoff until
there is room or the wait is over.

Whoever finds the server full waits in line, and newcomers queue behind. Without a line
a worker that has just closed a session would take the next one at once, again and
again, and those who wait with backoff would starve. The bound counts from the head of
the line: waiting for our own episodes says nothing about the server. A full server says
so at once, so the head of the line does not hold up the others while it is reset.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import anyio

from kiln_core import limits
from kiln_core.drive.concurrency import task_group
from kiln_core.drive.http import EnvironmentClient
from kiln_core.drive.websocket import (
    EnvironmentSession,
    SessionTimes,
    open_session,
)
from kiln_core.errors import CapacityAtUpgrade, CapacityExhausted
from kiln_core.session import ErrorReceived, Event, Reset

__all__ = ["acquire"]

Opened: TypeAlias = tuple[EnvironmentSession, Event]

SETTLE_SECONDS = 0.02
"""How long a server takes to notice that a session of ours has ended."""
REFUSAL_SECONDS = 0.25
"""A session not refused by then is taken to have found room, for the line's sake."""


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
            visitor = _Visitor(stack, client, reset, times)
            session, answer = await visitor.enter(wait_seconds)
            yield session, answer, visitor.retries
    finally:
        client.freed.set()
        client.freed = anyio.Event()


class _Visitor:
    """Someone who wants a session; holds its turn at the head of the line or not."""

    def __init__(
        self,
        stack: AsyncExitStack,
        client: EnvironmentClient,
        reset: Reset,
        times: SessionTimes,
    ) -> None:
        self.retries = 0
        self._stack = stack
        self._client = client
        self._reset = reset
        self._times = times
        self._at_head = False
        self._refused_at = -math.inf

    async def enter(self, wait_seconds: float) -> Opened:
        """Return a session that is reset, at once where nobody waits."""
        opened = None
        if self._client.line.value:
            opened = await self._try()
        if opened is None:
            try:
                opened = await self._queue(wait_seconds)
            finally:
                self._step_aside()
        return opened

    async def _queue(self, wait_seconds: float) -> Opened:
        """Try until there is room.

        Raises:
            CapacityExhausted: None came in time.
        """
        await self._reach_head()
        deadline = anyio.current_time() + wait_seconds
        while True:
            await self._pause(deadline)
            opened = await self._try()
            if opened is not None:
                return opened
            if anyio.current_time() >= deadline:
                raise CapacityExhausted(
                    f"{self._client.base_url} had no free session within "
                    f"{wait_seconds:g} s",
                    environment=self._client.base_url,
                    protocol_code="CAPACITY_REACHED",
                    capacity_retries=self.retries,
                )
            await self._reach_head()

    async def _pause(self, deadline: float) -> None:
        """Back off from the last refusal, unless a session of ours ends meanwhile."""
        pause = min(
            limits.CAPACITY_BACKOFF_SECONDS * self.retries,
            limits.CAPACITY_BACKOFF_MAX_SECONDS,
        )
        with anyio.CancelScope(deadline=min(self._refused_at + pause, deadline)):
            await self._client.freed.wait()
            await anyio.sleep(SETTLE_SECONDS)

    async def _try(self) -> Opened | None:
        """Open a session and reset it; return None when there is no room."""
        async with AsyncExitStack() as attempt:
            try:
                opening = open_session(self._client, self._times)
                session = await attempt.enter_async_context(opening)
            except CapacityAtUpgrade:
                self._count_refusal()
                return None
            async with task_group() as group:
                group.start_soon(self._step_aside_soon)
                answer = await session.exchange(self._reset)
                group.cancel_scope.cancel()
            if isinstance(answer, ErrorReceived) and (
                answer.error.code == "CAPACITY_REACHED"
            ):
                self._count_refusal()
                return None
            self._stack.push_async_exit(attempt.pop_all())
        return session, answer

    def _count_refusal(self) -> None:
        self.retries += 1
        self._refused_at = anyio.current_time()

    async def _reach_head(self) -> None:
        if not self._at_head:
            await self._client.line.acquire()
            self._at_head = True

    def _step_aside(self) -> None:
        if self._at_head:
            self._at_head = False
            self._client.line.release()

    async def _step_aside_soon(self) -> None:
        await anyio.sleep(REFUSAL_SECONDS)
        self._step_aside()
