"""Answers that are streamed as server-sent events, as OpenAI clients read them.

Every event is one line of JSON; ``[DONE]`` ends a whole stream. What goes wrong on the
way is an event with an ``error``, and then there is no ``[DONE]``. The server ends a
stream itself, so that a stop never leaves one hanging.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import anyio
from prometheus_client import Counter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kiln_core.canonical import compact
from kiln_core.errors import KilnError
from kiln_server.problems import FAILED_UNEXPECTEDLY

__all__ = ["EventStream"]

HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

log = logging.getLogger("kiln.server")


class EventStream(Response):
    """Sends records as they come.

    Args:
        records: What is sent.
        ended: Called when nothing more is.
        counter: Counts the end, labelled by status.
    """

    def __init__(
        self,
        records: AsyncGenerator[object, None],
        ended: Callable[[], None],
        counter: Counter,
    ) -> None:
        super().__init__(headers=HEADERS)
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]
        self._records = records
        self._ended = ended
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every record, then the end."""
        status = "cancelled"
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_when_gone, receive, group.cancel_scope)
                async with aclosing(self._records) as records:
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                    status = await _send_all(records, scope, send)
                group.cancel_scope.cancel()
        finally:
            self._ended()
            self._counter.labels(status=status).inc()


async def _send_all(
    records: AsyncGenerator[object, None], scope: Scope, send: Send
) -> str:
    """Send events to their end; return how that was."""
    status, last = "completed", b"data: [DONE]\n\n"
    try:
        async for record in records:
            await _send(send, _event(record), more=True)
    except KilnError as error:
        status, last = "failed", _event(error.document())
    except Exception:
        log.exception("unexpected failure on %s", scope["path"])
        status, last = "failed", _event(FAILED_UNEXPECTEDLY.document())
    await _send(send, last, more=True)
    await _send(send, b"", more=False)
    return status


async def _send(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(record: object) -> bytes:
    return b"data: " + compact(record) + b"\n\n"


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
