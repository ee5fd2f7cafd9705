"""Reading request bodies: bounded, strict, typed, and off the event loop when large."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from anyio import to_thread
from starlette.requests import Request

from kiln_core import limits
from kiln_core.canonical import JsonValue, printable, read_json, split_path
from kiln_core.errors import LimitError, UsageError

__all__ = ["MAX_BODY_BYTES", "read_body"]

MAX_BODY_BYTES = 1 * limits.MIB
SMALL_BYTES = 64 * limits.KIB
"""Decoded where it is read; more would keep other requests waiting."""
DRAINED_BYTES = 16 * limits.MIB
"""How much of a body that is too large is taken, so that its sender hears why."""
T = TypeVar("T", bound=msgspec.Struct)


async def read_body(
    request: Request,
    body_type: type[T],
    *,
    limit_bytes: int = MAX_BODY_BYTES,
    reader: Callable[[JsonValue], T] | None = None,
) -> T:
    """Read a JSON body into a struct.

    Args:
        request: The request.
        body_type: What the body must be.
        limit_bytes: Its bound.
        reader: Turns the decoded body into one, where that takes more than types.

    Raises:
        LimitError: The body is too large.
        MalformedJson: It is not strict JSON.
        UsageError: It is not such a request; the message names the member.
    """
    body = bytearray()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit_bytes:
            body += chunk
        elif size > limit_bytes + DRAINED_BYTES:
            break
    if size > limit_bytes:
        raise LimitError(
            f"a body of {request.url.path} is at most {limit_bytes} bytes",
            limit_bytes=limit_bytes,
        )
    if size <= SMALL_BYTES:
        return _decoded(bytes(body), body_type, reader)
    return await to_thread.run_sync(_decoded, bytes(body), body_type, reader)


def _decoded(
    body: bytes, body_type: type[T], reader: Callable[[JsonValue], T] | None
) -> T:
    value = read_json(body, "the request body")
    if reader is not None:
        return reader(value)
    try:
        return msgspec.convert(value, body_type)
    except msgspec.ValidationError as error:
        reason, pointer = split_path(str(error))
        raise UsageError(
            f"invalid request at {pointer or 'its root'}: {printable(reason)}",
            pointer=pointer,
        ) from error
