"""Streamed answers: what an OpenAI client reads, and what happens on the way."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from kiln_core.errors import PolicyError
from kiln_server import state
from tests.server.running import SECONDS, Running, running, until
from tests.server.test_chat import CHAT, body, guided

COMPLETIONS = "/v1/completions"


@pytest.fixture
def thinker(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, thinking=True) as client:
        yield client


@contextmanager
def opened(kiln: Running, path: str, wanted: Any) -> Iterator[HTTPResponse]:
    """Ask for a stream; its events are read by the caller."""
    connection = HTTPConnection("127.0.0.1", kiln.port, timeout=SECONDS)
    connection.request("POST", path, json.dumps(wanted).encode())  # noqa: TID251 - a client's body
    try:
        with connection.getresponse() as response:
            yield response
    finally:
        connection.close()


def next_event(response: HTTPResponse) -> Any:
    """Return the next event; None where the stream ended."""
    line = response.readline()
    if not line:
        return None
    assert line.startswith(b"data: ")
    assert response.readline() == b"\n"
    text = line.removeprefix(b"data: ").decode().strip()
    return text if text == "[DONE]" else json.loads(text)


def events(kiln: Running, wanted: Any, path: str = CHAT) -> list[Any]:
    with opened(kiln, path, {**wanted, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return rest_of(response)


def rest_of(response: HTTPResponse) -> list[Any]:
    found = []
    while (event := next_event(response)) is not None:
        found.append(event)
    return found


def joined(found: list[Any], member: str, index: int = 0) -> str:
    return "".join(
        choice["delta"].get(member, "")
        for event in found[:-1]
        for choice in event["choices"]
        if choice["index"] == index
    )


def test_stream_says_what_the_whole_answer_says(kiln: Running) -> None:
    whole = kiln.post(CHAT, body()).json["choices"][0]
    found = events(kiln, body())
    assert found[-1] == "[DONE]"
    first, *_, last = found[:-1]
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}}
        | {"finish_reason": None}
    ]
    assert last["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert last["choices"][0]["delta"] == {}
    assert joined(found, "content") == whole["message"]["content"]
    assert len({event["id"] for event in found[:-1]}) == 1
    assert {event["object"] for event in found[:-1]} == {"chat.completion.chunk"}
    assert not any("usage" in event for event in found[:-1])
    assert kiln.metric('kiln_chat_requests_total{status="completed"}') == 2


def test_usage_comes_last_when_asked(kiln: Running) -> None:
    usage = kiln.post(CHAT, body(n=2)).json["usage"]
    found = events(kiln, body(n=2, stream_options={"include_usage": True}))
    *others, last, done = found
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]) == ([], usage)
    assert all(event["usage"] is None for event in others)


def test_reasoning_is_streamed_apart(thinker: Running) -> None:
    wanted = body(response_format=guided())
    message = thinker.post(CHAT, wanted).json["choices"][0]["message"]
    found = events(thinker, wanted)
    assert joined(found, "reasoning_content") == message["reasoning_content"]
    assert joined(found, "content") == message["content"]


def test_choices_are_streamed_side_by_side(kiln: Running) -> None:
    wanted = body(n=3, rollout_provenance=True, logprobs=True, top_logprobs=1)
    choices = kiln.post(CHAT, wanted).json["choices"]
    found = events(kiln, wanted)
    for index, choice in enumerate(choices):
        assert joined(found, "content", index) == choice["message"]["content"]
        own = [
            part
            for event in found[:-1]
            for part in event["choices"]
            if part["index"] == index
        ]
        assert own[-1]["rollout_provenance"] == choice["rollout_provenance"]
        tokens = [
            t for part in own for t in part.get("logprobs", {}).get("content", ())
        ]
        assert tokens == choice["logprobs"]["content"]


def test_bad_request_is_refused_before_the_stream(kiln: Running) -> None:
    answer = kiln.post(CHAT, body(stream=True, seed=-1))
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    missing = kiln.post(CHAT, body(stream=True, model="nobody"))
    assert (missing.status, missing.json["error"]["code"]) == (404, "adapter_not_found")


@pytest.mark.parametrize(
    ("error", "code"),
    [(PolicyError("lost"), "policy_failed"), (ZeroDivisionError(), "internal_error")],
)
def test_failure_on_the_way_is_an_error_event(
    kiln: Running, error: Exception, code: str
) -> None:
    kiln.engine.speak_error = error
    found = events(kiln, body())
    assert found[-1]["error"].keys() == {"code", "message", "hint", "details"}
    assert found[-1]["error"]["code"] == code
    assert "[DONE]" not in found
    assert kiln.metric('kiln_chat_requests_total{status="failed"}') == 1
    kiln.engine.speak_error = None
    assert events(kiln, body())[-1] == "[DONE]"


def test_client_that_leaves_in_the_middle_frees_its_slot(kiln: Running) -> None:
    kiln.engine.speaks.clear()
    data = json.dumps(body(stream=True, n=2)).encode()  # noqa: TID251 - a client's body
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection(("127.0.0.1", kiln.port)) as connection:
        connection.sendall(head.encode() + b"\r\n" + data)
        assert b" 200 " in connection.recv(100)
        until(lambda: kiln.engine.busy == 2)
    until(lambda: kiln.engine.busy == 0)
    until(lambda: kiln.metric('kiln_chat_requests_total{status="cancelled"}') == 1)
    kiln.engine.speaks.set()
    assert kiln.post(CHAT, body()).status == 200


def test_client_that_leaves_while_queued_frees_its_place(kiln: Running) -> None:
    kiln.engine.answers.clear()
    with opened(kiln, CHAT, body(stream=True)) as response:
        assert next_event(response)["choices"][0]["delta"]["role"] == "assistant"
    until(lambda: kiln.engine.busy == 0)
    until(lambda: kiln.metric('kiln_chat_requests_total{status="cancelled"}') == 1)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stop_ends_open_streams(
    kiln: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(state, "ANSWER_SECONDS", 0.2)
    kiln.engine.speaks.clear()
    wanted = {**body(stream=True), "prompt": "x"}
    stopping = threading.Thread(target=kiln.stop)
    with opened(kiln, path, wanted) as response:
        until(lambda: kiln.engine.busy == 1)
        stopping.start()
        found = rest_of(response)
    stopping.join()
    assert found[-1]["error"]["message"] == "the server is stopping"


def test_lines_hold_one_event_each_whatever_is_said(
    kiln: Running, tmp_path: Path
) -> None:
    from tests.server.test_adapters import make_adapter

    said = "a\r\nb\n\ndata: [DONE]\u2028\u0085\N{SNOWMAN}\\"
    make_adapter(tmp_path, "odd", [said])
    kiln.post("/v1/adapters/load", {"name": "odd"})
    assert joined(events(kiln, body(adapter="odd")), "content") == said


def test_stream_of_plain_completions(kiln: Running) -> None:
    wanted = {"prompt": ["a", "b"], "n": 2, "seed": 3, "logprobs": 1}
    whole = kiln.post(COMPLETIONS, wanted).json
    options = {"stream_options": {"include_usage": True}}
    found = events(kiln, {**wanted, **options}, COMPLETIONS)
    assert found[-1] == "[DONE]"
    assert found[-2]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [
            part
            for event in found[:-1]
            for part in event["choices"]
            if part["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        offsets = [
            o for p in parts if p["logprobs"] for o in p["logprobs"]["text_offset"]
        ]
        assert offsets == choice["logprobs"]["text_offset"]
