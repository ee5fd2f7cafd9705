"""The client side: what it makes of answers, good and bad, over real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import msgspec
import pytest

from kiln_core import limits
from kiln_core.drive.http import Credential
from kiln_core.drive.policy import _chat_body, http_policy
from kiln_core.drive.server import server_client
from kiln_core.errors import (
    CapacityFull,
    ContextOverflow,
    KilnError,
    PolicyDrift,
    PolicyError,
    ServerRefusal,
    ServerUnreachable,
    UsageError,
)
from kiln_core.ports import PolicyRequest
from kiln_core.records import ChatMessage
from tests.server.running import Running, running

Reply = tuple[int, dict[str, str], bytes]


def told(value: object, status: int = 200, **headers: str) -> Reply:
    return status, headers, json.dumps(value).encode()  # noqa: TID251 - another server


def refusal(code: str, status: int, **headers: str) -> Reply:
    error = {"code": code, "message": "no", "hint": "do it", "details": {"limit": 3}}
    return told({"error": error}, status, **headers)


@contextmanager
def answering(reply: Callable[[str], Reply]) -> Iterator[str]:
    """Serve what a function says for each path."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, body = reply(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Clients go away; that is theirs to do."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def get(url: str, **options: Any) -> Any:
    async def run() -> Any:
        async with server_client(url, **options) as server:
            return await server.get("/x")

    return anyio.run(run)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (refusal("usage", 400), ServerRefusal),
        (refusal("context_overflow", 400), ContextOverflow),
        (refusal("policy_drift", 409), PolicyDrift),
        (refusal("capacity_full", 503), CapacityFull),
        (refusal("anything", 429), CapacityFull),
        (told({}, 500), ServerRefusal),
        (told([], 404), ServerRefusal),
        (told({"error": "text"}, 400), ServerRefusal),
        ((200, {}, b""), PolicyError),
        ((200, {}, b"<html>"), PolicyError),
        ((200, {}, b'{"a":1,"a":2}'), PolicyError),
        ((302, {"Location": "/elsewhere"}, b""), PolicyError),
        (told({}, 200, Content_Encoding="gzip"), PolicyError),
    ],
)
def test_answer_becomes_its_error(reply: Reply, error: type[KilnError]) -> None:
    with answering(lambda _: reply) as url, pytest.raises(error) as caught:
        get(url)
    assert type(caught.value) is error
    assert caught.value.message


def test_error_keeps_the_words_of_the_server() -> None:
    with answering(lambda _: refusal("usage", 400)) as url:
        with pytest.raises(ServerRefusal) as caught:
            get(url)
    error = caught.value
    assert (error.message, error.hint) == ("the Kiln server refused: no", "do it")
    assert error.details["server_code"] == "usage"
    with answering(lambda _: refusal("context_overflow", 400)) as url:
        with pytest.raises(ContextOverflow) as overflow:
            get(url)
    assert overflow.value.details == {"limit": 3}


def test_answer_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONTROL_PLANE_BYTES", 100)
    with answering(lambda _: told("x" * 200)) as url:
        with pytest.raises(PolicyError, match="more than 100 bytes"):
            get(url)


def test_silent_server_is_given_up(kiln: Running) -> None:
    kiln.engine.answers.clear()

    async def run() -> Any:
        async with server_client(kiln.url, total_seconds=0.2) as server:
            body = {"messages": [{"role": "user", "content": "x"}]}
            return await server.post("/v1/chat/completions", body)

    with pytest.raises(ServerUnreachable, match="did not answer in time"):
        anyio.run(run)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0.05),
        ("7", 7.0),
        ("9999", 30.0),
        ("soon", 1.0),
        ("-1", 0.05),
        ("nan", 1.0),
        ("inf", 30.0),
        ("-inf", 0.05),
        (None, 1.0),
    ],
)
def test_retry_after_is_honoured_within_reason(
    header: str | None, seconds: float
) -> None:
    headers = {} if header is None else {"Retry_After": header}
    with answering(lambda _: refusal("capacity_full", 503, **headers)) as url:
        with pytest.raises(CapacityFull) as caught:
            get(url)
    assert caught.value.details["retry_after_seconds"] == seconds


def test_full_server_is_asked_again() -> None:
    answers = [refusal("capacity_full", 503, Retry_After="0.05")] * 3 + [told("done")]

    async def run(url: str, wait: float) -> Any:
        async with server_client(url) as server:
            return await server.post_when_free("/x", {}, wait)

    with answering(lambda _: answers.pop(0)) as url:
        assert anyio.run(run, url, 5.0) == "done"
    always = refusal("capacity_full", 503, Retry_After="0.05")
    with answering(lambda _: always) as url, pytest.raises(CapacityFull):
        anyio.run(run, url, 0.12)


def test_token_is_sent_and_never_shown() -> None:
    credential = Credential("s3cret")
    assert "s3cret" not in repr(credential)
    with pytest.raises(KilnError) as caught:
        get("http://127.0.0.1:1", credential=credential)
    assert "s3cret" not in str(caught.value.document())


# The policy

REQUEST = PolicyRequest(
    messages=(ChatMessage(role="user", content="go"),),
    seed=2**64 - 1,
    max_tokens=32,
    temperature=1.0,
    thinking=True,
    thinking_budget_tokens=None,
    action_schema=None,
)


def test_policy_answers_with_its_sample(kiln: Running) -> None:
    async def run() -> Any:
        async with http_policy(kiln.url, None) as policy:
            return await policy.describe(), await policy.complete(REQUEST)

    description, reply = anyio.run(run)
    assert description.concurrency == 4
    assert reply.sample.provenance.seed == 2**64 - 1
    assert reply.behavior_policy == description.behavior_policy
    assert reply.latency_ms > 0
    headers = kiln.engine.submitted[0]
    assert (headers.top_p, headers.top_k, headers.thinking) == (1.0, 0, True)


@pytest.mark.parametrize("left_out", ["choices", "rollout_provenance", "spans"])
def test_answer_without_provenance_is_refused(kiln: Running, left_out: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "go"}],
        "rollout_provenance": True,
    }
    whole = kiln.post("/v1/chat/completions", body).json
    if left_out == "choices":
        whole["choices"] = []
    elif left_out == "spans":
        whole["choices"][0]["prompt_content_spans"] = []
    else:
        del whole["choices"][0]["rollout_provenance"]

    async def run(url: str) -> Any:
        async with http_policy(url, None) as policy:
            return await policy.complete(REQUEST)

    with answering(lambda _: told(whole)) as url:
        with pytest.raises(PolicyError, match="the server returned no"):
            anyio.run(run, url)


LIES: dict[str, tuple[str, object]] = {
    "seed": ("rollout_provenance/seed", 7),
    "prompt_messages_sha256": (
        "rollout_provenance/prompt_messages_sha256",
        "sha256:" + "0" * 64,
    ),
    "behavior_policy.adapter": (
        "rollout_provenance/behavior_policy/adapter",
        {"name": "mine", "content_sha256": "sha256:" + "0" * 64},
    ),
    "template_invocation.enable_thinking": (
        "rollout_provenance/template_invocation",
        {"template_kwargs": {"enable_thinking": False}},
    ),
    "sampling.thinking_budget": (
        "rollout_provenance/sampling/thinking_budget",
        {"max_tokens": 3, "close_token_ids": [1]},
    ),
    **{
        f"sampling {name}": (f"rollout_provenance/sampling/{name}", value)
        for name, value in {
            "temperature": 0.5,
            "max_tokens": 31,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 1.0,
            "frequency_penalty": -1.0,
            "stop": ["x"],
        }.items()
    },
}
"""What a provenance may claim that was not asked; places are in the choice."""


def answer_to(kiln: Running, request: PolicyRequest) -> Any:
    """Return the server's document of an answer."""
    return kiln.post("/v1/chat/completions", _chat_body(request, None)).json


def completed_by(answer: Any, request: PolicyRequest, adapter: str | None) -> Any:
    async def run(url: str) -> Any:
        async with http_policy(url, adapter) as policy:
            return await policy.complete(request)

    with answering(lambda _: told(answer)) as url:
        return anyio.run(run, url)


@pytest.mark.parametrize("lie", LIES)
def test_provenance_of_another_request_is_refused(kiln: Running, lie: str) -> None:
    answer = answer_to(kiln, REQUEST)
    assert completed_by(answer, REQUEST, None).total_tokens > 0
    path, value = LIES[lie]
    *above, last = path.split("/")
    place = answer["choices"][0]
    for name in above:
        place = place[name]
    place[last] = value
    with pytest.raises(PolicyError, match="is of another request") as caught:
        completed_by(answer, REQUEST, None)
    assert caught.value.details["field"] == lie.partition(" ")[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"messages": (ChatMessage(role="user", content="stop"),)},
        {"temperature": 0.5},
        {"max_tokens": 33},
        {"thinking_budget_tokens": 3},
    ],
)
def test_answer_to_an_earlier_request_is_refused(
    kiln: Running, changes: dict[str, Any]
) -> None:
    """As of a proxy that caches: the answer is true, of another request."""
    earlier = answer_to(kiln, REQUEST)
    with pytest.raises(PolicyError):
        completed_by(earlier, msgspec.structs.replace(REQUEST, **changes), None)


def test_answer_of_the_base_is_not_one_of_an_adapter(kiln: Running) -> None:
    with pytest.raises(PolicyError) as caught:
        completed_by(answer_to(kiln, REQUEST), REQUEST, "mine")
    assert caught.value.details["field"] == "behavior_policy.adapter"


@pytest.mark.parametrize(
    "count", ["prompt_tokens", "completion_tokens", "total_tokens"]
)
def test_tokens_counted_must_be_those_returned(kiln: Running, count: str) -> None:
    answer = answer_to(kiln, REQUEST)
    answer["usage"][count] += 1
    with pytest.raises(PolicyError, match="counted other tokens"):
        completed_by(answer, REQUEST, None)


def test_no_more_requests_than_slots_are_in_flight(kiln: Running) -> None:
    async def run() -> None:
        async with http_policy(kiln.url, None) as policy:
            await policy.describe()
            async with anyio.create_task_group() as group:
                for _ in range(30):
                    group.start_soon(policy.complete, REQUEST)

    anyio.run(run)
    assert len(kiln.engine.submitted) == 30
    assert kiln.engine.most_busy <= 4
    assert kiln.metric('kiln_chat_requests_total{status="refused"}') == 0


def test_thinking_policy_says_so(tmp_path: Any) -> None:
    async def run(url: str) -> Any:
        async with http_policy(url, None) as policy:
            return await policy.describe(), await policy.complete(REQUEST)

    with running(tmp_path, thinking=True) as kiln:
        description, reply = anyio.run(run, kiln.url)
    assert description.thinking
    assert reply.reasoning in {"left", "right"}


WRONG_URLS = [
    *(
        "",
        "x",
        "ftp://x",
        "http://",
        "http://u:p@x",
        "http://x?q",
        "http://[",
        "http:/x",
    ),
    *("http://x..y", "http://" + "a" * 64, "http://a b", "http://x\ny", "http://x:0x1"),
    *("http://x:65536", "http://x#f"),
]


@pytest.mark.parametrize("url", WRONG_URLS)
def test_wrong_url_is_usage(url: str) -> None:
    with pytest.raises(UsageError):
        get(url)
