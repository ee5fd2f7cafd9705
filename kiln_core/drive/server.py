"""A client of a Kiln server: JSON over HTTP, bounded, typed errors.

Used by the HTTP policy and by every command that talks to a server.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import anyio
import msgspec

from kiln_core import limits
from kiln_core.canonical import JsonValue, compact, convert_record, read_json
from kiln_core.drive.http import Credential, bounded_body, client_session
from kiln_core.errors import (
    CapacityFull,
    ContextOverflow,
    InvalidRecord,
    KilnError,
    MalformedJson,
    PolicyDrift,
    PolicyError,
    ServerRefusal,
    ServerUnreachable,
    TransportError,
    UsageError,
)

__all__ = ["ServerClient", "server_client", "typed"]

FULL_STATUSES: Final = frozenset({429, 503})
DEFAULT_RETRY_SECONDS: Final = 1.0
MAX_RETRY_SECONDS: Final = 30.0
NOT_KILN: Final = "check that --url is the address of a Kiln server of this version"
SAME_HERE: Final[dict[str, type[KilnError]]] = {
    error.code: error for error in (ContextOverflow, PolicyDrift)
}
"""Refusals that are the same error on this side; all others are `ServerRefusal`."""

T = TypeVar("T", bound=msgspec.Struct)


class ServerClient:
    """Requests to one Kiln server; use `server_client`."""

    def __init__(self, url: str, http: aiohttp.ClientSession, client: str) -> None:
        self.url = url
        self._http = http
        self._headers = {"Content-Type": "application/json", "x-kiln-client": client}

    async def get(self, path: str, **query: str) -> JsonValue:
        """Return the JSON answer of a GET.

        Raises:
            ServerUnreachable: Nothing answers.
            ServerRefusal: It answered with an error.
        """
        return await self.request("GET", path, query=query)

    async def post(self, path: str, body: Any) -> JsonValue:
        """Return the JSON answer of a POST of a record or of free JSON.

        Raises:
            ServerUnreachable: Nothing answers.
            ServerRefusal: It answered with an error.
        """
        return await self.request("POST", path, body=body)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: dict[str, str] | None = None,
    ) -> JsonValue:
        """Return the JSON answer of a request.

        Raises:
            ServerUnreachable: Nothing answers, or not in time.
            ServerRefusal: It answered with an error.
            CapacityFull: It is full; ``details["retry_after_seconds"]`` says when.
            ContextOverflow: A prompt does not fit the model.
            PolicyError: The answer is no JSON, or too large.
        """
        data = None if body is None else compact(body)
        try:
            async with self._http.request(
                method,
                self.url + path,
                data=data,
                params=query,
                headers=self._headers,
                allow_redirects=False,
            ) as response:
                answer = await bounded_body(
                    response, self.url + path, limits.MAX_CONTROL_PLANE_BYTES
                )
                document = self._document(path, response.status, answer)
                if response.status >= 300:
                    refusal = _refusal(self.url, response, document)
                    raise refusal
                return document
        except TransportError as error:
            raise PolicyError(error.message, hint=error.hint) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            timed_out = isinstance(error, TimeoutError)
            raise ServerUnreachable(
                f"the Kiln server at {self.url} "
                + ("did not answer in time" if timed_out else "cannot be reached"),
                hint="it may be overloaded: look at its log" if timed_out else None,
                url=self.url,
            ) from error

    async def post_when_free(self, path: str, body: Any, wait_seconds: float) -> Any:
        """POST, and while the server is full wait as it says and try again.

        Raises:
            CapacityFull: It was still full after ``wait_seconds``.
            KilnError: As `request`.
        """
        deadline = anyio.current_time() + wait_seconds
        while True:
            try:
                return await self.post(path, body)
            except CapacityFull as error:
                pause = float(error.details["retry_after_seconds"])
                if anyio.current_time() + pause > deadline:
                    raise
                await anyio.sleep(pause)

    def _document(self, path: str, status: int, answer: bytes) -> JsonValue:
        try:
            return read_json(answer, f"the answer of {self.url}{path}")
        except MalformedJson as error:
            raise PolicyError(
                f"{self.url}{path} answered with status {status} and no JSON",
                hint=NOT_KILN,
                url=self.url,
                http_status=status,
            ) from error


@asynccontextmanager
async def server_client(
    url: str,
    credential: Credential | None = None,
    *,
    client: str = "openenv-cli",
    total_seconds: float = limits.CONTROL_PLANE_SECONDS,
) -> AsyncIterator[ServerClient]:
    """Open a client of a Kiln server.

    Args:
        url: Its base URL.
        credential: Its API token.
        client: Value of the ``x-kiln-client`` header.
        total_seconds: Deadline of one request.

    Raises:
        UsageError: The URL is no http(s) URL.
    """
    base = _base_url(url)
    headers = {} if credential is None else credential.header()
    async with client_session(headers=headers, total_seconds=total_seconds) as http:
        yield ServerClient(base, http, client)


def typed(document: JsonValue, answer_type: type[T], what: str) -> T:
    """Turn an answer into the record it must be.

    Raises:
        PolicyError: It is another, so the server is not what we think.
    """
    try:
        return convert_record(document, answer_type, f"the server's {what}")
    except InvalidRecord as error:
        raise PolicyError(error.message, hint=NOT_KILN) from error


def _base_url(text: str) -> str:
    url = text.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        usable = parts.scheme in {"http", "https"} and host and url.isprintable()
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"--url {text!r} is malformed: {error}") from error
    if not usable or " " in url or parts.query or parts.fragment or "@" in parts.netloc:
        raise UsageError(
            f"--url {text!r} is not the http or https address of a server",
            hint="such as http://127.0.0.1:8420, without user, query or fragment",
        )
    return url


def _refusal(
    url: str, response: aiohttp.ClientResponse, document: JsonValue
) -> KilnError:
    error = document.get("error") if isinstance(document, dict) else None
    error = error if isinstance(error, dict) else {}
    code = str(error.get("code", "unknown"))
    message = str(error.get("message", f"HTTP status {response.status}"))
    hint = str(error.get("hint", ""))
    details = error.get("details")
    facts = details if isinstance(details, dict) else {}
    if code in SAME_HERE:
        return SAME_HERE[code](message, hint=hint, **facts)
    facts = {"server_code": code, "http_status": response.status, "url": url}
    if response.status in FULL_STATUSES:
        return CapacityFull(
            message, hint=hint, retry_after_seconds=_retry_after(response), **facts
        )
    return ServerRefusal(f"the Kiln server refused: {message}", hint=hint, **facts)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    try:
        seconds = float(response.headers.get("Retry-After", ""))
    except ValueError:
        return DEFAULT_RETRY_SECONDS
    if math.isnan(seconds):
        return DEFAULT_RETRY_SECONDS
    return min(max(seconds, 0.05), MAX_RETRY_SECONDS)
