"""`kiln_core/drive/http.py`: discovery of servers that are old, odd, hostile or absent."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress

import anyio
import pytest

from kiln_core import limits
from kiln_core.canonical import digest_json
from kiln_core.discovery import EnvironmentInspection
from kiln_core.drive.http import (
    Credential,
    environment_client,
    inspect_all,
    is_loopback,
)
from kiln_core.errors import (
    CredentialReflected,
    HttpStatusError,
    KilnError,
    RemoteProtocolError,
    TransportError,
    UsageError,
)
from tests.simulators.environment import (
    METADATA,
    OPENAPI,
    SCHEMA,
    Document,
    Simulator,
    document,
    raw_server,
    redirect,
    tcp_server,
)

pytestmark = pytest.mark.anyio

TOKEN = "s3cret/token+A=="
ROUTES = ("/metadata", "/schema", "/list_environments", "/openapi.json")


async def inspect(url: str, token: str | None = None) -> EnvironmentInspection:
    with anyio.fail_after(5):
        async with environment_client(
            url, Credential(token) if token else None
        ) as client:
            return await client.inspect()


async def failure(url: str, token: str | None = None) -> KilnError:
    with pytest.raises(KilnError) as caught:
        await inspect(url, token)
    assert caught.value.hint
    return caught.value


# What servers are like


async def test_complete_discovery() -> None:
    async with Simulator().serving() as server:
        found = await inspect(server.url)
    assert server.paths[0] == "/health"
    assert sorted(server.paths[1:]) == sorted(ROUTES)
    identity = found.identity
    assert (identity.base_url, identity.authentication) == (server.url, "none")
    assert identity.websocket_url == server.url.replace("http", "ws") + "/ws"
    assert (identity.environments, identity.openapi_version) == (["counter"], "1.0.0")
    assert identity.metadata.name == "counter"
    assert identity.schema_sha256 == digest_json(SCHEMA)
    assert identity.discovery_sha256 == digest_json(
        {
            "schema": "kiln.openenv-discovery.v1",
            "metadata": METADATA,
            "environment_schema": SCHEMA,
            "environments": ["counter"],
            "openapi": OPENAPI,
        }
    )
    assert found.schema.action == SCHEMA["action"]


async def test_digest_ignores_white_space_and_key_order() -> None:
    async with Simulator().serving() as server:
        before = await inspect(server.url)
        for route in ROUTES:
            value = json.loads(server.documents[route].body)
            if isinstance(value, dict):
                value = dict(reversed(value.items()))
            text = json.JSONEncoder(indent=3).encode(value)
            server.documents[route] = Document(text.encode())
        assert await inspect(server.url) == before


async def test_old_server_without_inventory_and_openapi() -> None:
    async with Simulator().serving() as server:
        del server.documents["/list_environments"], server.documents["/openapi.json"]
        schema = {k: SCHEMA[k] for k in ("action", "observation", "state")}
        server.documents["/schema"] = document(schema)
        found = await inspect(server.url)
    assert found.identity.environments == ["counter"]
    assert found.identity.openapi_version is None
    assert found.identity.schema_sha256 == digest_json(schema)


async def test_unknown_fields_only_enter_the_digest() -> None:
    async with Simulator().serving() as server:
        before = await inspect(server.url)
        server.change("/metadata", license="MIT")
        server.change("/schema", tool_schema={})
        server.change("/openapi.json", **{"x-build": 7})
        after = await inspect(server.url)
    assert after.schema == before.schema
    assert after.identity.metadata == before.identity.metadata
    assert after.identity.discovery_sha256 != before.identity.discovery_sha256


async def test_base_path_is_kept() -> None:
    async with Simulator(base_path="/deep/openenv").serving() as server:
        found = await inspect(server.url)
        assert found.identity.websocket_url.endswith("/deep/openenv/ws")
        root = server.url.removesuffix("/deep/openenv")
        assert isinstance(await failure(root), HttpStatusError)


@pytest.mark.parametrize("status", [201, 204, 202])
async def test_health_must_be_exactly_200(status: int) -> None:
    async with Simulator().serving() as server:
        server.documents["/health"] = Document(b"", status)
        error = await failure(server.url)
    assert error.details["http_status"] == status
    assert server.paths == ["/health"]


async def test_documents_may_be_any_2xx() -> None:
    async with Simulator().serving() as server:
        server.documents["/schema"].status = 203
        await inspect(server.url)


@pytest.mark.parametrize("status", [401, 403, 404, 500, 501, 503])
async def test_status_of_health_is_told(status: int) -> None:
    async with Simulator().serving() as server:
        server.documents["/health"] = Document(b"<html>", status)
        error = await failure(server.url)
    assert isinstance(error, HttpStatusError)
    assert error.details["http_status"] == status
    assert ("credential" in error.hint) == (status in {401, 403})


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("status", [401, 403, 500, 501, 307])
async def test_failing_document_is_fatal(route: str, status: int) -> None:
    async with Simulator().serving() as server:
        server.documents[route] = Document(b"secret detail", status)
        error = await failure(server.url)
    assert isinstance(error, HttpStatusError)
    assert error.details["environment"] == server.url + route
    assert "secret detail" not in str(error.document())


@pytest.mark.parametrize("route", ["/metadata", "/schema"])
async def test_missing_document_means_no_openenv_server(route: str) -> None:
    async with Simulator().serving() as server:
        del server.documents[route]
        error = await failure(server.url)
    assert isinstance(error, RemoteProtocolError)
    assert "no OpenEnv server" in error.message
    assert "check the URL" in error.hint


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"<html>hello</html>",
        b"",
        b"{} {}",
        b'{"a":NaN}',
        b'{"a":1,"a":2}',
        b'{"a":1e999}',
        b'{"a":"\\ud800"}',
        b'"\xff"',
        b"\xef\xbb\xbf{}",
        b"[" * 200 + b"]" * 200,
    ],
)
async def test_document_that_is_no_strict_json(route: str, body: bytes) -> None:
    async with Simulator().serving() as server:
        server.documents[route] = Document(body)
        error = await failure(server.url)
    assert isinstance(error, RemoteProtocolError)
    assert route in error.message


@pytest.mark.parametrize(
    ("route", "value"),
    [
        ("/metadata", []),
        ("/metadata", {"name": "x"}),
        ("/metadata", {"name": "", "description": "d"}),
        ("/metadata", {"name": "x", "description": None}),
        ("/metadata", {"name": "x", "description": "d", "version": 1}),
        ("/schema", {"action": {}, "observation": {}}),
        ("/schema", [1]),
        ("/list_environments", {"counter": 1}),
        ("/list_environments", ["counter", 1]),
        ("/list_environments", ["x"] * (limits.MAX_ENVIRONMENT_NAMES + 1)),
    ],
)
async def test_document_of_another_shape(route: str, value: object) -> None:
    async with Simulator().serving() as server:
        server.documents[route] = document(value)
        error = await failure(server.url)
    assert isinstance(error, RemoteProtocolError)
    assert error.details["route"] == route


async def test_openapi_of_another_shape_only_lacks_a_version() -> None:
    async with Simulator().serving() as server:
        for value in ([], {}, {"info": 1}, {"info": {"version": 2}}):
            server.documents["/openapi.json"] = document(value)
            assert (await inspect(server.url)).identity.openapi_version is None


# Bounds


@pytest.mark.parametrize("route", ["/health", *ROUTES])
async def test_oversized_answer_is_refused(route: str) -> None:
    body = b'"' + b"x" * limits.MAX_DISCOVERY_BYTES + b'"'
    async with Simulator().serving() as server:
        server.documents[route] = Document(body)
        error = await failure(server.url)
    assert "more than 2097152 bytes" in error.message


async def test_answer_of_exactly_the_bound_is_read() -> None:
    async with Simulator().serving() as server:
        filler = limits.MAX_DISCOVERY_BYTES - len(b'{"x":""}')
        server.documents["/openapi.json"] = document({"x": "y" * filler})
        await inspect(server.url)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP", "identity,gzip"])
async def test_encoded_answer_is_refused(encoding: str) -> None:
    """A bound means bytes only if nothing is inflated behind our back."""
    async with Simulator().serving() as server:
        body = gzip.compress(b"{" + b" " * 10_000_000 + b"}")
        server.documents["/schema"] = Document(
            body, headers={"Content-Encoding": encoding}
        )
        error = await failure(server.url)
    assert isinstance(error, TransportError)
    assert "encoding" in error.message
    assert {r.headers["Accept-Encoding"] for r in server.requests} == {"identity"}


async def test_slow_answer_ends_at_the_deadline() -> None:
    async with Simulator().serving() as server:
        server.documents["/schema"].seconds = 5
        async with environment_client(server.url, total_seconds=0.1) as client:
            with anyio.fail_after(2), pytest.raises(TransportError) as caught:
                await client.inspect()
    assert "timed out" in caught.value.message


async def test_server_that_accepts_and_never_answers() -> None:
    async with (
        raw_server(None) as url,
        environment_client(url, total_seconds=0.1) as client,
    ):
        with anyio.fail_after(2), pytest.raises(TransportError) as caught:
            await client.health()
    assert caught.value.message == f"{url}/health timed out"


async def test_answer_that_drips_ends_at_the_deadline() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(100):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    async with (
        tcp_server(drip) as url,
        environment_client(url, total_seconds=0.2) as client,
    ):
        with anyio.fail_after(1.5), pytest.raises(TransportError, match="timed out"):
            await client.health()


# Broken peers


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def test_nobody_listens() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    error = await failure(url)
    assert type(error) is TransportError
    assert error.message == f"{url}/health cannot be reached"
    assert "server is running" in error.hint


async def test_unknown_host() -> None:
    assert type(await failure("http://no-such-host.invalid")) is TransportError


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\x01\x02\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 200\r\n\r\n" * 2,
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        HEAD + b"Content-Length: 100\r\n\r\nshort",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\nabc",
        HEAD + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
        HEAD + b"X: y\r\n" * 10_000 + b"\r\n",
        HEAD + b"\xff\xfe: y\r\n\r\n",
        HEAD + b"bad header\r\n\r\n",
        HEAD + b"X: a\x00b\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    ],
)
async def test_garbage_is_a_typed_failure(answer: bytes) -> None:
    async with raw_server(answer) as url:
        error = await failure(url)
    assert isinstance(error, TransportError | RemoteProtocolError)


async def test_answer_cut_short_is_not_called_unreachable() -> None:
    async with raw_server(HEAD + b"Content-Length: 100\r\n\r\nshort") as url:
        error = await failure(url)
    assert error.message == f"{url}/health broke off its answer"


async def test_answer_that_is_no_http_is_not_called_unreachable() -> None:
    async with raw_server(b"SSH-2.0-OpenSSH_9.6\r\n\r\n") as url:
        error = await failure(url)
    assert error.message == f"{url}/health gave an answer that is not HTTP"


# The trust boundary


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("route", ["/health", *ROUTES])
async def test_redirect_is_refused(route: str, status: int) -> None:
    async with Simulator().serving() as target, Simulator().serving() as server:
        server.documents[route] = redirect(target.url + route, status)
        error = await failure(server.url, TOKEN)
        assert target.requests == []
    assert error.details["http_status"] == status
    assert "redirects are not followed" in error.hint


async def test_proxies_of_the_environment_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "WS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with Simulator().serving() as server:
        await inspect(server.url)


async def test_cookies_are_not_kept() -> None:
    async with Simulator().serving() as server:
        for answer in server.documents.values():
            answer.headers["Set-Cookie"] = "a=b"
        # aiohttp's own jar takes no cookies from bare addresses
        await inspect(server.url.replace("127.0.0.1", "localhost"))
    assert all("Cookie" not in request.headers for request in server.requests)


async def test_credential_goes_with_every_request() -> None:
    async with Simulator().serving() as server:
        found = await inspect(server.url, TOKEN)
    assert found.identity.authentication == "bearer"
    sent = {request.headers.get("Authorization") for request in server.requests}
    assert sent == {f"Bearer {TOKEN}"}
    assert TOKEN not in repr(found)


async def test_no_credential_sends_no_header() -> None:
    async with Simulator().serving() as server:
        await inspect(server.url)
    assert all("Authorization" not in request.headers for request in server.requests)


def escaped_solidus(token: str) -> bytes:
    return token.replace("/", "\\/").encode()


def escaped_letters(token: str) -> bytes:
    return "".join(f"\\u{ord(c):04x}" for c in token).encode()


@pytest.mark.parametrize("route", ["/health", *ROUTES])
async def test_reflected_credential_is_refused(route: str) -> None:
    async with Simulator().serving() as server:
        server.documents[route] = document({"you sent": f"Bearer {TOKEN}"})
        error = await failure(server.url, TOKEN)
    assert isinstance(error, CredentialReflected)
    assert not error.retryable
    assert TOKEN not in str(error.document()) + repr(error)


@pytest.mark.parametrize("escaped", [escaped_solidus, escaped_letters])
@pytest.mark.parametrize("place", ['"%s"', '{"%s":1}', '["%s"]'])
async def test_reflection_behind_json_escapes_is_refused(
    escaped: Callable[[str], bytes], place: str
) -> None:
    """Encoders that write / as \\/ hide a token from a search of the bytes."""
    async with Simulator().serving() as server:
        body = place.encode().replace(b"%s", escaped(TOKEN))
        server.documents["/openapi.json"] = Document(body)
        assert isinstance(await failure(server.url, TOKEN), CredentialReflected)


async def test_reflection_across_chunks_is_refused() -> None:
    async with Simulator().serving() as server:
        filler = "x" * (64 * 1024 - 12)
        server.documents["/openapi.json"] = document({"a": filler + TOKEN})
        assert isinstance(await failure(server.url, TOKEN), CredentialReflected)


@pytest.mark.parametrize("status", [401, 500])
async def test_error_body_of_an_authenticated_call_is_not_shown(status: int) -> None:
    async with Simulator().serving() as server:
        server.documents["/metadata"] = Document(TOKEN.encode(), status)
        error = await failure(server.url, TOKEN)
    assert TOKEN not in str(error.document())
    assert TOKEN not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com",
        "http://127.0.0.1.example.com",
        "http://localhost.example.com",
        "http://10.0.0.1:8000",
        "http://[2001:db8::1]",
        "http://0.0.0.0:8000",
    ],
)
async def test_credential_in_clear_text_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="clear text") as caught:
        async with environment_client(url, Credential(TOKEN)):
            pass
    assert TOKEN not in str(caught.value.document())
    async with environment_client(url):
        pass


@pytest.mark.parametrize(
    "url", ["https://example.com", "http://localhost:1", "http://[::1]:1"]
)
async def test_credential_over_tls_or_loopback_is_allowed(url: str) -> None:
    async with environment_client(url, Credential(TOKEN)) as client:
        assert client.authentication == "bearer"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.255.0.9", True),
        ("::1", True),
        ("", False),
        (None, False),
        ("127.1", False),
        ("example.com", False),
        ("::2", False),
    ],
)
def test_loopback(host: str | None, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("token", ["", " a", "a ", "a b", "a\n", "a\x00", "ä", "a\x7f"])
def test_unusable_token_is_refused(token: str) -> None:
    with pytest.raises(UsageError) as caught:
        Credential(token)
    assert repr(token) not in str(caught.value.document()) or not token


def test_credential_is_never_shown() -> None:
    credential = Credential(TOKEN)
    assert TOKEN not in repr(credential) + str(credential) + f"{credential}"


# Several environments


async def test_inspections_keep_their_order() -> None:
    async with Simulator().serving() as slow, Simulator().serving() as fast:
        slow.documents["/health"].seconds = 0.05
        async with environment_client(slow.url) as a, environment_client(fast.url) as b:
            found = await inspect_all([a, b])
    assert [f.identity.base_url for f in found] == [slow.url, fast.url]


async def test_one_failure_ends_all_inspections_as_a_single_error() -> None:
    async with Simulator().serving() as slow, Simulator().serving() as broken:
        slow.documents["/health"].seconds = 5
        del broken.documents["/metadata"], broken.documents["/schema"]
        async with (
            environment_client(slow.url) as a,
            environment_client(broken.url) as b,
        ):
            with anyio.fail_after(2), pytest.raises(RemoteProtocolError) as caught:
                await inspect_all([a, b])
    assert caught.value.details["environment"] == broken.url
