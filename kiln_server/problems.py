"""Errors to HTTP answers, in one table."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kiln_core import errors
from kiln_core.canonical import compact
from kiln_core.errors import KilnError

__all__ = [
    "FAILED_UNEXPECTEDLY",
    "STATUSES",
    "answer",
    "disconnected",
    "http_error",
    "problem",
    "refused",
    "status_of",
    "unexpected",
]

STATUSES: Final[dict[type[KilnError], int]] = {
    errors.KilnError: 500,
    errors.UsageError: 400,
    errors.RunNotFound: 404,
    errors.AdapterNotFound: 404,
    errors.ArtifactError: 400,
    errors.ProtocolError: 502,
    errors.EnvironmentFault: 502,
    errors.TransportError: 502,
    errors.DriftError: 409,
    errors.LimitError: 413,
    errors.ContextOverflow: 400,
    errors.PolicyError: 502,
    errors.AdmissionError: 409,
    errors.CapacityFull: 503,
    errors.QueueFull: 429,
    errors.TrainingError: 500,
}
"""HTTP status by error class; the nearest ancestor counts."""

CODES: Final = {404: "not_found", 405: "method_not_allowed"}
CLIENT_GONE: Final = 499
"""Nobody reads it; logs of proxies know it as "client closed request"."""
RETRY_AFTER_SECONDS: Final = 1
FAILED_UNEXPECTEDLY: Final = KilnError(
    "the server failed unexpectedly",
    hint="its log has the details; please report them",
)

log = logging.getLogger("kiln.server")


def status_of(error_type: type[KilnError]) -> int:
    """Return the HTTP status of an error class."""
    return next(STATUSES[t] for t in error_type.__mro__ if t in STATUSES)


def answer(record: object, status: int = 200) -> Response:
    """Return a JSON answer of a record."""
    return Response(compact(record), status, media_type="application/json")


def problem(error: KilnError) -> Response:
    """Return the answer of an error."""
    response = answer(error.document(), status_of(type(error)))
    if error.retryable:
        after = error.details.get("retry_after_seconds", RETRY_AFTER_SECONDS)
        response.headers["Retry-After"] = str(math.ceil(after))
    return response


async def refused(request: Request, error: Exception) -> Response:
    """Answer a Kiln error that a route raised."""
    assert isinstance(error, KilnError)  # noqa: S101 - registered for it
    return problem(error)


async def http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown route, method or resource in our own form."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
    message, hint = str(error.detail), ""
    if message == HTTPStatus(error.status_code).phrase:
        message = f"{request.method} {request.url.path}: {message}"
        hint = "the routes are listed in docs/operations.md"
    document = {
        "error": {
            "code": CODES.get(error.status_code, "http_error"),
            "message": message,
            "hint": hint,
            "details": {},
        }
    }
    response = answer(document, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def disconnected(request: Request, error: Exception) -> Response:
    """End a request whose client went away while it was being read."""
    return Response(status_code=CLIENT_GONE)


async def unexpected(request: Request, error: Exception) -> Response:
    """Answer a bug of ours: logged whole, told in one sentence."""
    log.error("unexpected failure on %s", request.url.path, exc_info=error)
    return problem(FAILED_UNEXPECTEDLY)
