"""Reading request bodies: bounded, strict, typed."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from kiln_core import limits
from kiln_core.canonical import read_json, split_path
from kiln_core.errors import LimitError, UsageError

__all__ = ["MAX_BODY_BYTES", "read_body"]

MAX_BODY_BYTES = 1 * limits.MIB
T = TypeVar("T", bound=msgspec.Struct)


async def read_body(
    request: Request, body_type: type[T], *, limit_bytes: int = MAX_BODY_BYTES
) -> T:
    """Read a JSON body into a struct.

    Args:
        request: The request.
        body_type: What the body must be.
        limit_bytes: Its bound.

    Raises:
        LimitError: The body is too large.
        MalformedJson: It is not strict JSON.
        UsageError: It is not such a request; the message names the member.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise LimitError(f"a body of this route is at most {limit_bytes} bytes")
    value = read_json(bytes(body), "the request body")
    try:
        return msgspec.convert(value, body_type)
    except msgspec.ValidationError as error:
        reason, pointer = split_path(str(error))
        raise UsageError(
            f"invalid request at {pointer or 'its root'}: {reason}", pointer=pointer
        ) from error
