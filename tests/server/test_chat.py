"""``/v1/chat/completions`` and ``/v1/guides`` over real sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kiln_core.actions import ActionSchema, parse_reply
from kiln_core.canonical import convert_record, digest_json
from kiln_core.inference import choice_seed
from kiln_core.provenance import RolloutProvenance, scored_payload_digest
from kiln_server import state
from tests.server.running import Running, running, until

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"arm": {"type": "integer", "minimum": 0, "maximum": 3}},
    "required": ["arm"],
    "additionalProperties": False,
}
MESSAGES = [
    {"role": "system", "content": "Pull an arm."},
    {"role": "user", "content": "snöwman ☃ </think> <|end|>"},
]


def body(**members: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "seed": 7, **members}


def guided(schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "action", "schema": schema}}


@pytest.fixture
def thinker(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, thinking=True) as client:
        yield client


def provenance(choice: Any) -> RolloutProvenance:
    return convert_record(choice["rollout_provenance"], RolloutProvenance, "provenance")


def test_plain_answer_is_openai_shaped(kiln: Running) -> None:
    answer = kiln.post(CHAT, body())
    assert answer.status == 200
    assert answer.json.keys() == {
        *("id", "object", "created", "model", "choices", "usage"),
    }
    (choice,) = answer.json["choices"]
    assert choice.keys() == {"index", "message", "finish_reason"}
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] in {"yes", "no", "perhaps", "<think>"}
    usage = answer.json["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer.json["model"] == "simulated"


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_provenance_holds_for_every_seed(kiln: Running, seed: int) -> None:
    answer = kiln.post(
        CHAT,
        body(
            seed=seed,
            rollout_provenance=True,
            response_format=guided(),
            temperature=0.5,
            max_tokens=64,
        ),
    )
    (choice,) = answer.json["choices"]
    found = provenance(choice)
    content = choice["message"]["content"]
    assert parse_reply(content, ActionSchema(SCHEMA))
    assert found.seed == seed
    assert found.prompt_messages_sha256 == digest_json(MESSAGES)
    assert found.scored_payload_sha256 == scored_payload_digest(content, [])
    assert (found.sampling.temperature, found.sampling.max_tokens) == (0.5, 64)
    assert choice["guide_sha256"] == digest_json(SCHEMA)
    ids = found.input_token_ids
    spans = choice["prompt_content_spans"]
    assert [bytes(ids[a:b]).decode() for a, b in spans] == [
        message["content"] for message in MESSAGES
    ]
    assert bytes(t for t in ids[found.prompt_token_count :] if t < 256) == (
        content.encode()
    )
    assert answer.json["usage"]["prompt_tokens"] == found.prompt_token_count
    identity = kiln.get("/v1/policy").json["behavior_policy"]
    assert choice["rollout_provenance"]["behavior_policy"] == identity


def test_same_seed_gives_same_tokens_at_any_load(kiln: Running) -> None:
    wanted = body(rollout_provenance=True, response_format=guided())

    def ids(_: int) -> Any:
        (choice,) = kiln.post(CHAT, wanted).json["choices"]
        return choice["rollout_provenance"]["input_token_ids"]

    alone = ids(0)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ids, range(8))) == [alone] * 8


def test_without_a_seed_answers_differ(kiln: Running) -> None:
    seeds = set()
    for _ in range(4):
        answer = kiln.post(CHAT, {"messages": MESSAGES, "rollout_provenance": True})
        seeds.add(answer.json["choices"][0]["rollout_provenance"]["seed"])
    assert len(seeds) == 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "/messages"),
    "messages missing": ({"messages": None}, "/messages"),
    "seed too large": ({"seed": 2**64}, "seed"),
    "seed negative": ({"seed": -1}, "seed"),
    "seed text": ({"seed": "7"}, "/seed"),
    "unknown adapter": ({"adapter": "nobody"}, "adapter 'nobody' is not loaded"),
    "adapter traverses": ({"adapter": "../../etc"}, "not a safe name"),
    "adapter absolute": ({"adapter": "/etc"}, "not a safe name"),
    "adapter empty": ({"adapter": ""}, "not a safe name"),
    "unknown model": ({"model": "gpt-unknown"}, "'gpt-unknown' is not loaded"),
    "model and adapter": ({"model": "a", "adapter": "b"}, "contradict"),
    "none": ({"n": 0}, "/n"),
    "too many": ({"n": 129}, "/n"),
    "tools": ({"tools": [{"type": "function"}]}, "not supported: tools"),
    "functions": ({"functions": [{"name": "f"}]}, "not supported: functions"),
    "top without logprobs": ({"top_logprobs": 2}, "needs logprobs"),
    "too many logprobs": ({"logprobs": True, "top_logprobs": 21}, "/top_logprobs"),
    "logit bias": ({"logit_bias": {"3": 1}}, "not supported: logit_bias"),
    "frequency": ({"frequency_penalty": 0.5}, "not supported: frequency_penalty"),
    "presence": ({"presence_penalty": -1}, "not supported: presence_penalty"),
    "repetition": ({"repetition_penalty": 1.1}, "not supported: repetition_penalty"),
    "time budget": ({"thinking_budget_ms": 5}, "not supported: thinking_budget_ms"),
    "json object": ({"response_format": {"type": "json_object"}}, "/response_format"),
    "schema missing": ({"response_format": {"type": "json_schema"}}, "json_schema"),
    "schema null": ({"response_format": guided(None)}, "/response_format"),
    "schema a list": ({"response_format": guided([])}, "/response_format"),
    "schema unguidable": ({"response_format": guided({"not": {}})}, "cannot guide"),
    "template argument": ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
    "thinking a word": (
        {"chat_template_kwargs": {"enable_thinking": "false"}},
        "enable_thinking must be",
    ),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "only text parts",
    ),
    "tool calls": (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "tool calls",
    ),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
    "empty stop": ({"stop": [""]}, "stop strings"),
    "huge stop": ({"stop": ["x" * 20_000]}, "stop strings"),
    "many stops": ({"stop": ["x"] * 257}, "/stop"),
    "no tokens": ({"max_tokens": 0}, "/max_tokens"),
    "too many tokens": ({"max_tokens": 10**30}, "do not fit"),
    "temperature": ({"temperature": -1}, "/temperature"),
    "top_p": ({"top_p": 0}, "/top_p"),
    "prompt too long": (
        {"messages": [{"role": "user", "content": "x" * 20_000}]},
        "do not fit",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_request_is_refused_in_one_sentence(kiln: Running, name: str) -> None:
    members, reason = REFUSED[name]
    answer = kiln.post(CHAT, body(**members))
    assert answer.status == (404 if "not loaded" in reason else 400)
    assert reason in answer.message
    assert not kiln.engine.submitted


def test_refusals_are_counted(kiln: Running) -> None:
    kiln.post(CHAT, body(seed=-1))
    kiln.post(CHAT, b"{")
    kiln.post(CHAT, body())
    assert kiln.metric('kiln_chat_requests_total{status="refused"}') == 2
    assert kiln.metric('kiln_chat_requests_total{status="completed"}') == 1
    assert kiln.metric('kiln_chat_tokens_total{kind="prompt"}') > 10
    assert kiln.metric('kiln_chat_tokens_total{kind="completion"}') > 1


def test_values_that_change_nothing_are_accepted(kiln: Running) -> None:
    answer = kiln.post(
        CHAT,
        body(
            stream=False,
            n=1,
            tools=[],
            tool_choice="auto",
            logprobs=False,
            logit_bias={},
            frequency_penalty=0.0,
            presence_penalty=0,
            repetition_penalty=1.0,
            stop=None,
            response_format={"type": "text"},
            model="simulated",
            adapter="base",
            user="somebody",
            metadata={"a": 1},
            thinking_budget_ms=None,
        ),
    )
    assert answer.status == 200


def test_text_format_ignores_a_schema(kiln: Running) -> None:
    wanted = {**guided(), "type": "text"}
    (choice,) = kiln.post(CHAT, body(response_format=wanted)).json["choices"]
    assert not choice["message"]["content"].startswith("{")


def test_text_parts_are_joined(kiln: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    kiln.post(CHAT, body(messages=[{"role": "user", "content": parts}]))
    assert kiln.engine.submitted[0].messages[0].content == "ab"


def test_stop_string_ends_the_text(kiln: Running) -> None:
    answer = kiln.post(CHAT, body(stop=["e", "o", "r"]))
    assert answer.json["choices"][0]["message"]["content"] in {"y", "n", "p", "<think>"}


def test_cut_answer_says_length(kiln: Running) -> None:
    (choice,) = kiln.post(CHAT, body(max_tokens=1)).json["choices"]
    assert choice["finish_reason"] == "length"


# Several choices, log-probabilities


def test_choices_have_seeds_of_their_own_and_the_first_is_the_lone_one(
    kiln: Running,
) -> None:
    asked = body(n=3, rollout_provenance=True)
    answer = kiln.post(CHAT, asked).json
    alone = kiln.post(CHAT, {**asked, "n": 1}).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["choices"][0] == alone["choices"][0]
    for index, choice in enumerate(answer["choices"]):
        found = provenance(choice)
        assert found.seed == choice_seed(7, index)
        again = kiln.post(CHAT, {**asked, "n": 1, "seed": found.seed}).json
        assert again["choices"][0] == {**choice, "index": 0}
    usage = answer["usage"]
    assert usage["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == sum(
        len(provenance(choice).action_tokens) for choice in answer["choices"]
    )


def test_choices_that_do_not_all_fit_the_queue_are_refused(kiln: Running) -> None:
    kiln.engine.answers.clear()
    answer = kiln.post(CHAT, body(n=20))
    assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
    until(lambda: kiln.engine.busy == 0)
    kiln.engine.answers.set()
    assert kiln.post(CHAT, body(n=4)).status == 200


def test_logprobs_describe_the_content(kiln: Running) -> None:
    asked = body(logprobs=True, top_logprobs=2, response_format=guided())
    (choice,) = kiln.post(CHAT, asked).json["choices"]
    tokens = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    said = bytes(byte for token in tokens for byte in token["bytes"])
    assert said.decode() == choice["message"]["content"]
    assert all(token["logprob"] <= 0 for token in tokens)
    assert {len(token["top_logprobs"]) for token in tokens} == {1, 2}
    asked.pop("top_logprobs")
    (choice,) = kiln.post(CHAT, asked).json["choices"]
    assert {len(token["top_logprobs"]) for token in choice["logprobs"]["content"]} == {
        0
    }


# Thinking


def test_reasoning_comes_apart_from_the_answer(thinker: Running) -> None:
    answer = thinker.post(CHAT, body(rollout_provenance=True, response_format=guided()))
    (choice,) = answer.json["choices"]
    assert choice["message"]["reasoning_content"] in {"left", "right"}
    assert json.loads(choice["message"]["content"])
    found = choice["rollout_provenance"]
    assert found["template_invocation"] == {
        "template_kwargs": {"enable_thinking": True}
    }
    provenance(choice)


def test_thinking_can_be_turned_off(thinker: Running) -> None:
    answer = thinker.post(
        CHAT,
        body(rollout_provenance=True, chat_template_kwargs={"enable_thinking": False}),
    )
    (choice,) = answer.json["choices"]
    assert "reasoning_content" not in choice["message"]
    found = choice["rollout_provenance"]
    assert found["template_invocation"]["template_kwargs"]["enable_thinking"] is False


def test_budget_forces_the_close(thinker: Running) -> None:
    answer = thinker.post(
        CHAT,
        body(
            rollout_provenance=True,
            response_format=guided(),
            thinking_budget_tokens=2,
        ),
    )
    (choice,) = answer.json["choices"]
    assert choice["message"]["reasoning_content"] in {"le", "ri"}
    found = provenance(choice)
    forced = [t for t in found.action_tokens if t.source == "forced"]
    assert [token.token_id for token in forced] == [259]
    assert found.sampling.thinking_budget


def test_nothing_sampled_is_refused_not_a_crash(thinker: Running) -> None:
    answer = thinker.post(
        CHAT, body(rollout_provenance=True, thinking_budget_tokens=0, max_tokens=1)
    )
    assert answer.status == 400
    assert "nothing was sampled" in answer.message


def test_unclosed_reasoning_leaves_no_content(thinker: Running) -> None:
    (choice,) = thinker.post(CHAT, body(max_tokens=2)).json["choices"]
    assert choice["message"]["content"] is None


# Load


def hold(kiln: Running, connections: list[socket.socket], count: int) -> None:
    """Send requests whose answers are held back."""
    kiln.engine.answers.clear()
    data = json.dumps(body()).encode()  # noqa: TID251 - a client's body
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", kiln.port))
        connection.sendall(head.encode() + b"\r\n" + data)
        connections.append(connection)
    until(lambda: len(kiln.engine.submitted) == len(connections))


def test_gone_clients_free_their_slots(kiln: Running) -> None:
    connections: list[socket.socket] = []
    hold(kiln, connections, 6)
    until(lambda: kiln.engine.busy == 4)
    for connection in connections:
        connection.close()
    until(lambda: kiln.engine.busy == 0, 3)
    until(lambda: kiln.metric('kiln_chat_requests_total{status="cancelled"}') == 6)
    kiln.engine.answers.set()
    assert kiln.post(CHAT, body()).status == 200


def test_full_queue_says_when_to_come_back(kiln: Running) -> None:
    connections: list[socket.socket] = []
    hold(kiln, connections, 4)  # the slots
    until(lambda: kiln.engine.busy == 4)
    hold(kiln, connections, 8)  # the queue
    answer = kiln.post(CHAT, body())
    assert answer.status == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json["error"]["code"] == "queue_full"
    kiln.engine.answers.set()
    for connection in connections:
        assert b" 200 " in connection.recv(100)
        connection.close()


def test_fifty_clients_at_once_are_answered(tmp_path: Path) -> None:
    with running(tmp_path, slots=8) as kiln:
        kiln.engine.settings = kiln.engine.settings.__class__(
            adapter_dir=tmp_path, max_queued_requests=100
        )
        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda s: kiln.post(CHAT, body(seed=s)), range(50)))
        assert {answer.status for answer in answers} == {200}
        assert kiln.engine.most_busy <= 8


def test_engine_failure_is_told_and_does_not_end_the_server(
    kiln: Running, caplog: pytest.LogCaptureFixture
) -> None:
    whole = kiln.engine.generate
    kiln.engine.generate = lambda request: 1 / 0  # type: ignore[assignment, return-value]  # a bug
    answer = kiln.post(CHAT, body())
    assert answer.status == 500
    assert answer.message == "the server failed unexpectedly"
    assert "ZeroDivisionError" in caplog.text
    assert "ZeroDivisionError" not in answer.body.decode()
    assert kiln.metric('kiln_chat_requests_total{status="failed"}') == 1
    kiln.engine.generate = whole  # type: ignore[method-assign]  # as it was
    assert kiln.post(CHAT, body()).status == 200


def test_stop_answers_waiting_requests(
    kiln: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "ANSWER_SECONDS", 0.2)
    kiln.engine.answers.clear()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(kiln.post(CHAT, body())))
    thread.start()
    until(lambda: kiln.engine.busy == 1)
    kiln.stop()
    thread.join()
    assert answers[0].status == 503
    assert answers[0].message == "the server is stopping"


# Guides


def test_guide_says_whether_a_schema_can_guide(kiln: Running) -> None:
    good = kiln.post("/v1/guides", {"action_schema": SCHEMA, "max_tokens": 32})
    assert good.json == {"guide_sha256": digest_json(SCHEMA), "warning": None}
    bad = kiln.post("/v1/guides", {"action_schema": {"not": {}}, "max_tokens": 32})
    assert bad.json["guide_sha256"] is None
    assert "cannot guide" in bad.json["warning"]


@pytest.mark.parametrize(
    "wrong",
    [{}, {"action_schema": {}, "max_tokens": 0}, {"action_schema": {}, "more": 1}, []],
)
def test_bad_guide_request_is_refused(kiln: Running, wrong: Any) -> None:
    assert kiln.post("/v1/guides", wrong).status == 400
