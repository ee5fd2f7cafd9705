"""HTTP to an environment: bounded, unredirected, unproxied, optionally authenticated.

Every answer is read up to a bound and searched for the bearer token before it is
parsed. Redirects are never followed, the environment's proxy settings never used, and
only the identity encoding is accepted, so that a bound means bytes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import anyio

from kiln_core import limits
from kiln_core.canonical import JsonValue, canonical_bytes, read_json
from kiln_core.discovery import (
    Authentication,
    DiscoveryDocuments,
    EnvironmentInspection,
    inspection,
)
from kiln_core.drive.concurrency import task_group
from kiln_core.errors import (
    CredentialReflected,
    HttpStatusError,
    MalformedJson,
    RemoteProtocolError,
    TransportError,
    UsageError,
)

__all__ = ["Credential", "EnvironmentClient", "client_session", "environment_client"]

OPTIONAL_ROUTES: Final = frozenset({"/list_environments", "/openapi.json"})
"""Routes that older OpenEnv servers lack."""
CHUNK_BYTES: Final = 64 * limits.KIB
CHECK_CREDENTIAL: Final = (
    "check the credential: it must be of exactly this origin (scheme, host and port), "
    "the environment variable named by --credential-env set and not empty, and one "
    "--credential-env given per environment, in order, also for replay; a credential "
    "for another machine needs https"
)


class Credential:
    """A bearer token; never shown, never recorded.

    Args:
        token: The secret.

    Raises:
        UsageError: It is empty, untrimmed, or holds characters no header may carry.
    """

    def __init__(self, token: str) -> None:
        if (
            not token
            or not token.isascii()
            or any(c <= " " or c == "\x7f" for c in token)
        ):
            raise UsageError(
                "a bearer token must be non-empty ASCII without white space"
            )
        self._token = token

    def __repr__(self) -> str:
        return "Credential(...)"

    def header(self) -> dict[str, str]:
        """Return the Authorization header (RFC 6750 section 2.1)."""
        return {"Authorization": f"Bearer {self._token}"}

    @property
    def secret(self) -> str:
        """The token itself, for the reflection check."""
        return self._token

    def reflected_in(self, data: bytes) -> bool:
        """Say whether bytes hold the token, plain or as a canonical JSON string."""
        written = canonical_bytes(self._token)[1:-1]
        return self._token.encode() in data or written in data


class Answer(NamedTuple):
    """An HTTP answer that its caller judges.

    Attributes:
        url: What was asked.
        status: Any but a redirect.
        document: Strict JSON of a 2xx, which must be, and of a 404, which may be;
            None otherwise.
    """

    url: str
    status: int
    document: JsonValue | None

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300


class EnvironmentClient:
    """Discovery of one environment, over a session that the caller owns.

    Attributes:
        base_url: Canonical base URL.
        http: The aiohttp session, credential included.
        credential: What authenticates, or None.
        line: Taken by whoever is next in line for a session of a full server.
        freed: Set, and replaced, whenever a session of ours has ended.
    """

    def __init__(
        self,
        base_url: str,
        http: aiohttp.ClientSession,
        credential: Credential | None = None,
    ) -> None:
        self.base_url = base_url
        self.http = http
        self.credential = credential
        self.line = anyio.Semaphore(1, max_value=1)
        self.freed = anyio.Event()

    @property
    def authentication(self) -> Authentication:
        """How requests are authenticated."""
        return "none" if self.credential is None else "bearer"

    async def health(self) -> None:
        """Check that the environment is up; precedes discovery and every session.

        Raises:
            HttpStatusError: ``/health`` is not exactly 200.
            TransportError: It cannot be reached.
        """
        await self._fetch("/health")

    async def inspect(self) -> EnvironmentInspection:
        """Discover the environment.

        Raises:
            TransportError: It cannot be reached, or an answer is unusable.
            RemoteProtocolError: It is no OpenEnv server.
        """
        await self.health()
        found: dict[str, JsonValue | None] = {}

        async def fetch(route: str) -> None:
            found[route] = await self._document(route)

        async with task_group() as group:
            for route in ("/metadata", "/schema", *sorted(OPTIONAL_ROUTES)):
                group.start_soon(fetch, route)
        documents = DiscoveryDocuments(
            metadata=found["/metadata"],
            schema=found["/schema"],
            environments=found["/list_environments"],
            openapi=found["/openapi.json"],
        )
        return inspection(self.base_url, documents, self.authentication)

    async def _document(self, route: str) -> JsonValue | None:
        try:
            body = await self._fetch(route)
        except HttpStatusError as error:
            if error.details.get("http_status") != 404:
                raise
            if route in OPTIONAL_ROUTES:
                return None
            raise RemoteProtocolError(
                f"{self.base_url} has no {route}, so it is no OpenEnv server",
                hint="check the URL: it must be the base URL of an OpenEnv server",
                environment=self.base_url,
                http_status=404,
            ) from error
        try:
            return self._read(body, self.base_url + route)
        except MalformedJson as error:
            raise RemoteProtocolError(
                f"{error.message}; this is no OpenEnv server",
                hint="check the URL: it must be the base URL of an OpenEnv server",
                environment=self.base_url,
            ) from error

    async def ask(self, route: str, question: JsonValue | None = None) -> Answer:
        """Ask a route that may decline: by POST where there is a question, else GET.

        Args:
            route: Path below the base URL, percent-encoded.
            question: JSON to post.

        Raises:
            TransportError: It cannot be reached, redirects, or the answer is unusable.
            RemoteProtocolError: A 2xx is not strict JSON.
        """
        url = self.base_url + route
        status, body = await self._exchange(url, question)
        document = None if body is None else self._judged(body, url, status)
        return Answer(url, status, document)

    async def _exchange(
        self, url: str, question: JsonValue | None
    ) -> tuple[int, bytes | None]:
        method, data, headers = "GET", None, {}
        if question is not None:
            method, data = "POST", canonical_bytes(question)
            headers = {"Content-Type": "application/json"}
        try:
            async with self.http.request(
                method, url, data=data, headers=headers, allow_redirects=False
            ) as response:
                status = response.status
                if 300 <= status < 400:
                    raise status_error(url, status)
                told = 200 <= status < 300 or status == 404
                return status, await self._body(response, url) if told else None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable(url, error) from error

    def _judged(self, body: bytes, url: str, status: int) -> JsonValue | None:
        try:
            return self._read(body, url)
        except MalformedJson as error:
            if status == 404:
                return None
            raise RemoteProtocolError(
                error.message,
                hint="look at the log of the server",
                environment=url,
            ) from error

    def _read(self, body: bytes, url: str) -> JsonValue:
        document = read_json(body, url)
        # Escapes such as \/ hide a token from the search of the raw bytes.
        if self.credential is not None:
            self._check_reflection(canonical_bytes(document), url)
        return document

    async def _fetch(self, route: str) -> bytes:
        url = self.base_url + route
        try:
            async with self.http.get(url, allow_redirects=False) as response:
                if response.status != 200 and not (
                    route != "/health" and 200 <= response.status < 300
                ):
                    raise status_error(url, response.status)
                return await self._body(response, url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable(url, error) from error

    async def _body(self, response: aiohttp.ClientResponse, url: str) -> bytes:
        body = await bounded_body(response, url, limits.MAX_DISCOVERY_BYTES)
        self._check_reflection(body, url)
        return body

    def _check_reflection(self, data: bytes, url: str) -> None:
        if self.credential is not None and self.credential.reflected_in(data):
            raise CredentialReflected(
                f"{url} returned the bearer token it was sent", environment=url
            )


@asynccontextmanager
async def environment_client(
    base_url: str,
    credential: Credential | None = None,
    *,
    total_seconds: float = limits.HTTP_TOTAL_SECONDS,
) -> AsyncIterator[EnvironmentClient]:
    """Open a client for an environment.

    Args:
        base_url: From `kiln_core.discovery.environment_url`.
        credential: Sent with every request and the WebSocket upgrade.
        total_seconds: Deadline of one HTTP request; sessions may last longer.

    Raises:
        UsageError: A credential would travel in clear text to another machine.
    """
    if credential is not None:
        _check_transport(base_url)
    headers = credential.header() if credential is not None else {}
    async with client_session(headers=headers, total_seconds=total_seconds) as http:
        yield EnvironmentClient(base_url, http, credential)


@asynccontextmanager
async def client_session(
    *, headers: dict[str, str], total_seconds: float
) -> AsyncIterator[aiohttp.ClientSession]:
    """Open an aiohttp session with every convenience that could surprise off."""
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_redirect)
    async with aiohttp.ClientSession(
        headers={"Accept-Encoding": "identity", **headers},
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(
            total=total_seconds, sock_connect=limits.HTTP_CONNECT_SECONDS
        ),
        trace_configs=[trace],
        trust_env=False,
    ) as http:
        yield http


async def bounded_body(
    response: aiohttp.ClientResponse, url: str, limit_bytes: int
) -> bytes:
    """Read an answer up to a bound.

    Raises:
        TransportError: It is longer, or encoded.
    """
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise TransportError(
            f"{url} answered in an encoding nobody asked for",
            hint="have the server or its proxy honour 'Accept-Encoding: identity'",
            environment=url,
        )
    body = bytearray()
    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
        body += chunk
        if len(body) > limit_bytes:
            raise TransportError(
                f"{url} answered with more than {limit_bytes} bytes",
                hint="the answer is too large to be what was asked for",
                environment=url,
            )
    return bytes(body)


def status_error(
    url: str, status: int, hints: Mapping[int, str] = MappingProxyType({})
) -> HttpStatusError:
    """Return the error of an unexpected HTTP status, with the hint that fits.

    Args:
        url: What was asked.
        status: What it answered.
        hints: Of statuses that mean something particular there.
    """
    if status in hints:
        hint = hints[status]
    elif 300 <= status < 400:
        hint = "redirects are not followed: pass the canonical base URL directly"
    elif status in {401, 403}:
        hint = CHECK_CREDENTIAL
    elif status == 404:
        hint = "check the URL: it must be the base URL of an OpenEnv server"
    else:
        hint = "look at the log of the server"
    return HttpStatusError(
        f"{url} answered with HTTP status {status}",
        hint=hint,
        environment=url,
        http_status=status,
    )


def unreachable(url: str, error: Exception) -> TransportError:
    """Return the error of a failed exchange."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "unknown reason")
        what = f"has a certificate that cannot be trusted: {reason}"
        hint = "name its authority's certificate in SSL_CERT_FILE, or use its own host"
    elif isinstance(error, aiohttp.ClientSSLError):
        what, hint = "does not speak the TLS of https", "check its scheme and port"
    elif isinstance(error, TimeoutError):
        what, hint = "timed out", "check that the server is up and not overloaded"
    elif isinstance(error, aiohttp.ClientPayloadError):
        what, hint = "broke off its answer", "look at the log of the server"
    elif isinstance(error, aiohttp.ClientResponseError):
        what, hint = "gave an answer that is not HTTP", "check the URL and its port"
    else:
        what = "cannot be reached"
        hint = "check that the server is running and the URL is right"
    return TransportError(
        f"{url} {what}", hint=hint, environment=url, reason=type(error).__name__
    )


async def inspect_all(
    clients: list[EnvironmentClient],
) -> list[EnvironmentInspection]:
    """Inspect environments concurrently; the result keeps their order.

    Raises:
        KilnError: The first failure of any of them.
    """
    found: dict[int, EnvironmentInspection] = {}

    async def inspect(index: int) -> None:
        found[index] = await clients[index].inspect()

    # each request has a deadline of its own, and two follow one another
    async with task_group() as group:
        for index in range(len(clients)):
            group.start_soon(inspect, index)
    return [found[index] for index in range(len(clients))]


def is_loopback(host: str | None) -> bool:
    """Say whether a host is this machine: localhost, 127.0.0.0/8 or ::1."""
    if host is None:
        return False
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_transport(base_url: str) -> None:
    parts = urlsplit(base_url)
    if parts.scheme != "https" and not is_loopback(parts.hostname):
        raise UsageError(
            f"a credential for {base_url} would travel in clear text",
            hint="use https, or an environment on this machine",
        )


async def _refuse_redirect(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    parameters: aiohttp.TraceRequestRedirectParams,
) -> None:
    raise status_error(str(parameters.url), parameters.response.status)
