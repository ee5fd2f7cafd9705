"""From requests for completions to generations: queueing, waiting, giving up.

Whoever leaves - an answered client, one that went away, a server that stops - frees the
slots of what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import anyio
from anyio import to_thread
from prometheus_client import Counter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kiln_core.engine import Delta, Generation, GenerationRequest
from kiln_core.errors import CapacityFull, KilnError, UsageError
from kiln_server.events import EventStream
from kiln_server.state import ServerState

__all__ = ["Live", "Said", "counted", "generate", "submit_all"]

POLL_SECONDS = 0.5
"""How often a waiting request looks whether anybody still waits for it."""
Futures = Sequence[Future[Generation]]


class Said(NamedTuple):
    """What one of several completions has said, or its end."""

    choice: int
    what: Delta | Generation


async def counted(answering: Awaitable[Response], counter: Counter) -> Response:
    """Await an answer and count how it ended; a stream counts its own end.

    Args:
        answering: Makes the answer.
        counter: Labelled by status.

    Raises:
        KilnError: The request cannot be answered.
        ClientDisconnect: Nobody waits for the answer.
        CancelledError: The server is stopping.
    """
    try:
        response = await answering
    except KilnError:
        counter.labels(status="refused").inc()
        raise
    except (ClientDisconnect, asyncio.CancelledError):
        counter.labels(status="cancelled").inc()
        raise
    except Exception:
        counter.labels(status="failed").inc()
        raise
    if not isinstance(response, EventStream):
        counter.labels(status="completed").inc()
    return response


async def generate(
    state: ServerState, request: Request, wanted: Sequence[GenerationRequest]
) -> list[Generation]:
    """Sample requests and await them all.

    Args:
        state: Of the server.
        request: Whose client waits.
        wanted: What to sample; they have one schema.

    Raises:
        KilnError: One of them cannot be sampled.
        ClientDisconnect: The client went away.
        CancelledError: This task was cancelled.
    """
    futures = await to_thread.run_sync(submit_all, state, wanted)
    try:
        return await _all_of(state, request, futures)
    finally:
        _give_up(futures)


def submit_all(
    state: ServerState,
    wanted: Sequence[GenerationRequest],
    hear: Callable[[int, Delta], None] | None = None,
) -> list[Future[Generation]]:
    """Queue requests, all of them or none.

    Args:
        state: Of the server.
        wanted: What to sample; they have one schema, and it is honoured or refused.
        hear: Told what each says, by its index.

    Raises:
        UsageError: The schema cannot guide decoding, or a request is wrong.
        QueueFull: There is no place for all.
    """
    first = wanted[0]
    if first.action_schema is not None:
        report = state.engine.guide(first.action_schema, first.max_tokens)
        if report.guide_sha256 is None:
            raise UsageError(
                f"response_format cannot be honoured: {report.warning}",
                hint="simplify the schema, raise max_tokens, or leave it out",
            )
    futures: list[Future[Generation]] = []
    try:
        for index, request in enumerate(wanted):
            listener = None if hear is None else partial(hear, index)
            futures.append(state.engine.submit(request, listener))
    except BaseException:
        _give_up(futures)
        raise
    return futures


class Live:
    """Completions that are told while they are sampled; `submit` makes one.

    Args:
        state: Of the server.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[tuple[int, Delta | Future[Generation]]]
        self._heard = asyncio.Queue()
        self._futures: list[Future[Generation]] = []

    @classmethod
    async def submit(
        cls, state: ServerState, wanted: Sequence[GenerationRequest]
    ) -> Live:
        """Queue requests.

        Args:
            state: Of the server.
            wanted: What to sample; they have one schema.

        Raises:
            UsageError: A request is wrong.
            QueueFull: There is no place for all.
        """
        live = cls(state)
        try:
            await to_thread.run_sync(live._queue, wanted)
        except BaseException:
            live.give_up()
            raise
        return live

    async def events(self) -> AsyncGenerator[Said, None]:
        """Yield what is said, and last for each choice its generation.

        Raises:
            KilnError: A completion failed.
            CapacityFull: The server is stopping.
        """
        going = len(self._futures)
        while going:
            self._state.require_time()
            heard = None
            with anyio.move_on_after(POLL_SECONDS):
                heard = await self._heard.get()
            if heard is None:
                continue
            choice, what = heard
            if isinstance(what, Delta):
                yield Said(choice, what)
                continue
            if what.cancelled():
                raise CapacityFull("the server is stopping")
            going -= 1
            yield Said(choice, what.result())

    def give_up(self) -> None:
        """Free the slots of what still runs."""
        _give_up(self._futures)

    def _queue(self, wanted: Sequence[GenerationRequest]) -> None:
        self._futures = submit_all(self._state, wanted, self._hear)
        for index, future in enumerate(self._futures):
            future.add_done_callback(partial(self._hear, index))

    def _hear(self, choice: int, what: Delta | Future[Generation]) -> None:
        """Take what a thread of the engine says to the event loop."""
        with suppress(RuntimeError):  # the loop has ended, and nobody listens
            self._loop.call_soon_threadsafe(self._heard.put_nowait, (choice, what))


async def _all_of(
    state: ServerState, request: Request, futures: Futures
) -> list[Generation]:
    """Await generations while their client waits.

    Raises:
        ClientDisconnect: The client went away.
        CapacityFull: The server is stopping.
        CancelledError: This task was cancelled.
    """
    waiting = [asyncio.wrap_future(future) for future in futures]
    for one in waiting:
        one.add_done_callback(_noticed)
    while True:
        done, rest = await asyncio.wait(
            waiting, timeout=POLL_SECONDS, return_when=asyncio.FIRST_EXCEPTION
        )
        if any(one.cancelled() for one in done):
            raise CapacityFull("the server is stopping")
        failures = [error for one in done if (error := one.exception()) is not None]
        if failures:
            raise failures[0]
        if not rest:
            return [one.result() for one in waiting]
        if await request.is_disconnected():
            raise ClientDisconnect
        state.require_time()


def _noticed(future: asyncio.Future[Generation]) -> None:
    """Mark a failure that comes when nobody waits any more as seen."""
    if not future.cancelled():
        future.exception()


def _give_up(futures: Futures) -> None:
    for future in futures:
        future.cancel()
