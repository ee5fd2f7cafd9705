"""The chat endpoint's wire form: what a request asks of an engine, and what it tells."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kiln_core.canonical import compact, convert_record, digest_json, read_record
from kiln_core.chat import (
    REFUSED,
    ChatRequest,
    chat_choice,
    generation_request,
    rollout_provenance,
)
from kiln_core.engine import Generation, GenerationRequest
from kiln_core.errors import UsageError
from kiln_core.provenance import RolloutProvenance
from tests.simulators.pure import BASE_POLICY, TOKENIZER, sha

MESSAGES = [{"role": "user", "content": "go"}]
SCHEMA = {"type": "object"}
GENERATION = Generation(
    content='{"a":1}',
    reasoning_content="so",
    reasoning_closed=True,
    finish_reason="stop",
    prompt_token_ids=(1, 2, 3),
    action_token_ids=(4, 9, 5),
    logprobs=(-0.5, None, 0.0),
    content_spans=((1, 2),),
    close_token_ids=(9,),
    thinking=True,
    guide_sha256=sha("7"),
    behavior_policy=BASE_POLICY,
    tokenizer=TOKENIZER,
    backend="toy",
)


def asked(**members: Any) -> GenerationRequest:
    body = convert_record({"messages": MESSAGES, **members}, ChatRequest, "body")
    return generation_request(body, 7, served_model_id="toy")


def test_defaults_are_those_of_the_field() -> None:
    request = asked()
    assert (request.seed, request.max_tokens, request.temperature) == (7, 256, 1.0)
    assert (request.top_p, request.top_k, request.min_p) == (1.0, 0, 0.0)
    assert (request.adapter, request.thinking, request.stop) == (None, True, ())
    assert request.action_schema is None
    assert request.thinking_budget_tokens is None


@pytest.mark.parametrize(
    ("members", "name", "value"),
    [
        ({"seed": 0}, "seed", 0),
        ({"seed": 2**64 - 1}, "seed", 2**64 - 1),
        ({"max_tokens": 3}, "max_tokens", 3),
        ({"max_tokens": 3, "max_completion_tokens": 5}, "max_tokens", 5),
        ({"temperature": 0}, "temperature", 0.0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 4}, "top_k", 4),
        ({"min_p": 0.25}, "min_p", 0.25),
        ({"stop": "a"}, "stop", ("a",)),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"adapter": "mine"}, "adapter", "mine"),
        ({"adapter": "NONE"}, "adapter", None),
        ({"model": "toy"}, "adapter", None),
        ({"model": "mine"}, "adapter", "mine"),
        ({"model": "mine", "adapter": "mine"}, "adapter", "mine"),
        ({"model": "toy", "adapter": "mine"}, "adapter", "mine"),
        ({"thinking_budget_tokens": 0}, "thinking_budget_tokens", 0),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "thinking", False),
        ({"chat_template_kwargs": {}}, "thinking", True),
        ({"response_format": {"type": "text"}}, "action_schema", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "action_schema",
            {},
        ),
    ],
)
def test_member_becomes_what_is_sampled(
    members: dict[str, Any], name: str, value: Any
) -> None:
    assert getattr(asked(**members), name) == value


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("x", "x"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ],
)
def test_content_may_be_parts_or_null(content: Any, text: str) -> None:
    request = asked(messages=[{"role": "user", "content": content}])
    assert request.messages[0].content == text


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**64}, "seed must be"),
        ({"model": "one", "adapter": "two"}, "contradict"),
        ({"adapter": "../x"}, "safe name"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "true or false"),
        ({"response_format": {"type": "json_schema"}}, "needs its json_schema"),
        ({"stop": ""}, "stop strings"),
        ({"stop": ["x" * 16_385]}, "stop strings"),
        ({"messages": [{"role": "user", "tool_calls": [1]}]}, "tool calls"),
        ({"messages": [{"role": "user", "function_call": {"a": 1}}]}, "tool calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "text parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "text parts",
        ),
    ],
)
def test_request_nobody_can_serve_is_refused(
    members: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        asked(**members)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0])
def test_member_that_would_change_the_result_is_refused(
    row: tuple[str, tuple[Any, ...], str],
) -> None:
    name, harmless, instead = row
    for value in harmless:
        assert asked(**{name: value}) == asked()
    body = ChatRequest(messages=[], **{name: 77})
    with pytest.raises(UsageError, match=name) as caught:
        generation_request(body, 0, served_model_id="toy")
    assert caught.value.hint == instead


def test_provenance_tells_every_token() -> None:
    request = asked(thinking_budget_tokens=1, stop=["x"], seed=2**64 - 1)
    record = rollout_provenance(request, GENERATION)
    assert read_record(compact(record), RolloutProvenance, "x") == record
    assert record.input_token_ids == [1, 2, 3, 4, 9, 5]
    assert [t.source for t in record.action_tokens] == ["sampled", "forced", "sampled"]
    assert [t.sequence_index for t in record.action_tokens] == [3, 4, 5]
    assert record.prompt_messages_sha256 == digest_json(MESSAGES)
    budget = record.sampling.thinking_budget
    assert budget is not msgspec.UNSET
    assert (budget.max_tokens, budget.close_token_ids) == (1, [9])
    template = record.template_invocation
    assert template is not msgspec.UNSET
    assert template.template_kwargs == {"enable_thinking": True}


def test_model_without_a_thinking_mode_has_no_budget() -> None:
    plain = msgspec.structs.replace(
        GENERATION, close_token_ids=(), logprobs=(-0.5, 0.0, 0.0)
    )
    record = rollout_provenance(asked(thinking_budget_tokens=1), plain)
    assert record.sampling.thinking_budget is msgspec.UNSET
    assert record.template_invocation is msgspec.UNSET


def test_generation_without_a_decision_has_no_provenance() -> None:
    forced = msgspec.structs.replace(GENERATION, logprobs=(None, None, None))
    with pytest.raises(UsageError, match="nothing was sampled"):
        rollout_provenance(asked(), forced)


@pytest.mark.parametrize(
    ("change", "content", "reasoning"),
    [
        ({}, '{"a":1}', "so"),
        ({"reasoning_content": None}, '{"a":1}', msgspec.UNSET),
        ({"reasoning_closed": False}, None, "so"),
    ],
)
def test_choice_keeps_reasoning_apart(
    change: dict[str, Any], content: str | None, reasoning: Any
) -> None:
    generation = msgspec.structs.replace(GENERATION, **change)
    request = asked(thinking_budget_tokens=1)
    choice = chat_choice(request, generation, provenance=False)
    assert choice.message.content == content
    assert choice.message.reasoning_content == reasoning
    assert choice.rollout_provenance is msgspec.UNSET
    exact = chat_choice(request, generation, provenance=True)
    assert exact.prompt_content_spans == [(1, 2)]
    assert exact.guide_sha256 == sha("7")
