"""Authentication, error answers and hostile bodies."""

from __future__ import annotations

import hmac
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kiln_core import errors
from kiln_core.errors import KilnError
from kiln_server import app, bodies, problems, serve
from kiln_server.bodies import MAX_BODY_BYTES
from tests.server.running import Running, running, until

CHAT = "/v1/chat/completions"
ROUTES = [
    ("GET", "/health"),
    ("GET", "/v1/health"),
    ("GET", "/v1/models"),
    ("GET", "/v1/policy"),
    ("GET", "/metrics"),
    ("POST", CHAT),
    ("POST", "/v1/guides"),
    ("GET", "/v1/adapters"),
    ("POST", "/v1/adapters/load"),
    ("POST", "/v1/adapters/unload"),
    ("POST", "/v1/openenv/training/preflight"),
    ("POST", "/v1/train/grpo"),
    ("POST", "/v1/train/agentic"),
    ("GET", "/v1/train/status"),
    ("GET", "/v1/train/status/x"),
    ("GET", "/v1/train/jobs/x"),
    ("DELETE", "/v1/train/queue/x"),
]
OPEN = {"/health", "/v1/health"}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, api_token="s3cret") as client:
        yield client


# Token


def test_every_route_is_listed_here(kiln: Running) -> None:
    from kiln_server.routes import adapters, chat, health, training

    routes = [*health.ROUTES, *chat.ROUTES, *adapters.ROUTES, *training.ROUTES]
    known = {path.replace("/x", "/{job_id}") for _, path in ROUTES}
    assert {route.path for route in routes} == known


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/nowhere")])
def test_route_demands_the_token(guarded: Running, method: str, path: str) -> None:
    answer = guarded.request(method, path)
    if path in OPEN:
        assert answer.status == 200
        return
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.message == "this server needs its API token"
    assert "s3cret" not in answer.body.decode()


@pytest.mark.parametrize(
    "given",
    [
        *("s3cret", "Bearer s3cre", "Bearer s3cretx", "bearer s3cret", "Basic s3cret"),
        *("Bearer  s3cret", "Bearer", "Bearer \xff"),
    ],
)
def test_wrong_token_is_refused(guarded: Running, given: str) -> None:
    assert guarded.get("/v1/models", Authorization=given).status == 401


def test_right_token_opens_every_route(guarded: Running) -> None:
    for method, path in ROUTES:
        answer = guarded.request(method, path, Authorization="Bearer s3cret")
        assert answer.status != 401


def test_tokens_are_compared_in_constant_time(
    guarded: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    original = hmac.compare_digest

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return original(given, expected)

    monkeypatch.setattr(app.hmac, "compare_digest", compare)
    guarded.get("/v1/models", Authorization="Bearer guess")
    assert compared == [(b"Bearer guess", b"Bearer s3cret")]


# Pages of other sites


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:8420"},
        {"Host": "192.0.2.1"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "["},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
)
def test_pages_of_other_sites_are_refused(
    kiln: Running, headers: dict[str, str]
) -> None:
    answer = kiln.request("POST", CHAT, {"messages": []}, **headers)
    assert answer.status in {400, 403}
    assert not kiln.engine.submitted


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:8420"},
        {"Host": "127.0.0.1"},
        {"Host": "[::1]:8420"},
        {"Host": "LOCALHOST"},
        {"Origin": "http://localhost:3000"},
    ],
)
def test_pages_of_this_machine_are_served(
    kiln: Running, headers: dict[str, str]
) -> None:
    assert kiln.get("/v1/models", **headers).status == 200


def test_with_a_token_any_host_is_served(guarded: Running) -> None:
    answer = guarded.get(
        "/v1/models", Host="models.example", Authorization="Bearer s3cret"
    )
    assert answer.status == 200


# Bodies

CHAT_BODY = {"messages": [{"role": "user", "content": "x"}]}
MALFORMED = {
    "empty": b"",
    "no json": b"hello",
    "cut": b'{"messages": [',
    "trailing": b'{"messages": []} x',
    "two documents": b"{}{}",
    "duplicate key": b'{"messages": [], "seed": 1, "seed": 2}',
    "nan": b'{"messages": [], "temperature": NaN}',
    "infinity": b'{"messages": [], "temperature": 1e999}',
    "not utf-8": b'{"messages": "\xff"}',
    "lone surrogate": b'{"messages": "\\ud800"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "utf-16": '{"messages": []}'.encode("utf-16"),
    "too deep": b'{"messages": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("path", [CHAT, "/v1/adapters/load", "/v1/train/grpo"])
def test_malformed_body_is_refused(kiln: Running, path: str, name: str) -> None:
    answer = kiln.post(path, MALFORMED[name])
    assert answer.status == 400
    assert answer.json["error"]["code"] == "malformed_json"
    assert "the request body" in answer.message


@pytest.mark.parametrize("value", [[], "x", 1, None, True])
def test_body_of_another_type_is_refused(kiln: Running, value: Any) -> None:
    answer = kiln.post(CHAT, json.dumps(value).encode())  # noqa: TID251 - a client's
    assert answer.status == 400
    assert "Expected `object`" in answer.message


@pytest.mark.parametrize(
    ("path", "limit"),
    [("/v1/guides", MAX_BODY_BYTES), (CHAT, 16 * MAX_BODY_BYTES)],
)
def test_oversized_body_is_refused(kiln: Running, path: str, limit: int) -> None:
    answer = kiln.post(path, b" " * (limit + 1))
    assert answer.status == 413
    assert answer.json["error"]["code"] == "limit_exceeded"
    assert str(limit) in answer.message
    assert kiln.get("/health").status == 200


def test_large_body_is_decoded_off_the_event_loop(
    kiln: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    decode = bodies._decoded

    def decoded(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return decode(*arguments)

    monkeypatch.setattr(bodies, "_decoded", decoded)
    for count in (1, 40_000):
        messages = [{"role": "user", "content": "x"}] * count
        answer = kiln.post(CHAT, {"messages": messages})
    assert answer.json["error"]["code"] == "context_overflow"
    assert threads == ["kiln-server", "AnyIO worker thread"]


def test_endless_body_is_cut_off(kiln: Running) -> None:
    head = b"POST /v1/guides HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with socket.create_connection(("127.0.0.1", kiln.port)) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        sent = 0
        try:
            while sent < 64:
                connection.sendall(chunk)
                sent += 1
        except ConnectionError:
            pass
    assert 16 <= sent < 64
    assert kiln.get("/health").status == 200


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/adapters/load", "/v1/openenv/training/preflight"]
)
def test_client_gone_halfway_is_no_failure(
    kiln: Running, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", kiln.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n"
        connection.sendall(head.encode() + b'{"mess')
    if path == CHAT:
        until(lambda: kiln.metric('kiln_chat_requests_total{status="cancelled"}'))
    assert kiln.get("/health").status == 200
    assert not caplog.records


def test_client_that_never_finishes_does_not_keep_the_server_alive(
    kiln: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on, Hypercorn alone would wait for ever."""
    # read when serving starts, so this one starts again
    kiln.stop()
    monkeypatch.setattr(serve, "GRACEFUL_SECONDS", 0.2)
    with (
        running(kiln.state.settings.adapter_dir) as slow,
        socket.create_connection(("127.0.0.1", slow.port)) as connection,
    ):
        head = b"POST /v1/guides HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        connection.sendall(head + b"\r\n{")
        assert slow.get("/health").status == 200
        slow.stop()
        assert slow.state.ending.is_set()


def test_garbage_on_the_socket_hurts_nobody(kiln: Running) -> None:
    for garbage in (b"\x16\x03\x01" * 50, b"GET\r\n\r\n", b"\0" * 70_000):
        with socket.create_connection(("127.0.0.1", kiln.port)) as connection:
            connection.sendall(garbage)
    assert kiln.get("/health").status == 200


# Errors


def every_error(root: type[KilnError] = KilnError) -> list[type[KilnError]]:
    return [root, *(e for sub in root.__subclasses__() for e in every_error(sub))]


def test_every_error_has_a_status() -> None:
    known = {getattr(errors, name) for name in errors.__all__}
    assert known <= set(every_error())
    for error in every_error():
        status = problems.status_of(error)
        assert 400 <= status < 600
        full = issubclass(error, errors.CapacityFull)
        assert (status in {429, 503}) == full
        assert (status == 429) == issubclass(error, errors.QueueFull)


def test_retryable_errors_say_when(kiln: Running) -> None:
    for error in every_error():
        answer = problems.problem(error("no", retry_after_seconds=0.2))
        assert ("retry-after" in answer.headers) == error.retryable
        if error.retryable:
            assert answer.headers["retry-after"] == "1"


def test_unknown_route_and_method_answer_in_our_form(kiln: Running) -> None:
    missing = kiln.get("/v1/nothing")
    assert (missing.status, missing.json["error"]["code"]) == (404, "not_found")
    wrong = kiln.request("DELETE", "/v1/models")
    assert wrong.status == 405
    assert wrong.json["error"]["code"] == "method_not_allowed"
    assert set(wrong.headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert wrong.message


def test_nothing_is_redirected(kiln: Running) -> None:
    for path in ("/v1/models/", "//evil.example/", "/health/"):
        assert kiln.get(path).status == 404


def test_unknown_path_is_not_reflected_as_markup(kiln: Running) -> None:
    answer = kiln.get("/<script>alert(1)</script>")
    assert answer.status == 404
    assert answer.headers["content-type"] == "application/json"
