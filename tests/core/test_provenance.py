from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kiln_core.canonical import compact, convert_record, digest, read_record
from kiln_core.errors import InvalidRecord
from kiln_core.provenance import (
    BehaviorPolicyIdentity,
    RolloutProvenance,
    TemplateInvocation,
    check_identity_text,
    scored_payload_digest,
)
from kiln_core.records import ChatMessage
from tests.core.bundles import DROP, put
from tests.simulators.pure import (
    ADAPTER_POLICY,
    BASE_POLICY,
    TOKENIZER,
    sha,
    toy_sample,
)

MESSAGES = [ChatMessage(role="user", content="go")]


@pytest.fixture
def document() -> Any:
    provenance = toy_sample(MESSAGES, "abcd").provenance
    return msgspec.to_builtins(provenance)


def test_provenance_is_read_as_it_was_written(document: dict[str, Any]) -> None:
    record = convert_record(document, RolloutProvenance, "provenance")
    assert read_record(compact(record), RolloutProvenance, "x") == record


PROMPT = len(toy_sample(MESSAGES, "abcd").provenance.input_token_ids) - 5
CHANGES: list[tuple[str, Any]] = [
    ("/schema", "kiln.rollout-provenance.v2"),
    ("/input_token_ids", []),
    ("/input_token_ids/0", -1),
    ("/input_token_ids/0", 2**32),
    ("/input_token_ids/0", 1.0),
    ("/prompt_token_count", 0),
    ("/prompt_token_count", 1000),
    ("/prompt_token_count", PROMPT + 1),
    ("/prompt_messages_sha256", "sha256:0"),
    ("/scored_payload_sha256", None),
    ("/action_tokens", []),
    ("/action_tokens/0/sequence_index", PROMPT + 1),
    ("/action_tokens/0/sequence_index", PROMPT - 1),
    ("/action_tokens/4/sequence_index", PROMPT + 5),
    ("/action_tokens/0/token_id", 1),
    ("/action_tokens/0/source", "guessed"),
    ("/action_tokens/0/source", "forced"),
    ("/action_tokens/0/behavior_logprob", None),
    ("/action_tokens/0/behavior_logprob", 2e-6),
    ("/action_tokens/0/behavior_logprob", "-1"),
    ("/action_tokens/4/behavior_logprob", -1.0),
    ("/action_tokens/4/source", "sampled"),
    ("/behavior_policy/served_model_id", ""),
    ("/behavior_policy/served_model_id", " toy"),
    ("/behavior_policy/served_model_id", "t\u0085oy"),
    ("/behavior_policy/implementation", "k\niln"),
    ("/behavior_policy/implementation", "\u00e9" * 129),
    ("/behavior_policy/implementation", "x" * 257),
    ("/behavior_policy/base_model_sha256", "abc"),
    ("/behavior_policy/adapter", {"name": "", "content_sha256": sha("0")}),
    ("/behavior_policy/adapter", {"name": "a\x7f", "content_sha256": sha("0")}),
    ("/behavior_policy/adapter", None),
    ("/behavior_policy/colour", "red"),
    ("/tokenizer/vocab_sha256", DROP),
    ("/template_invocation", {"tools": [{}] * 257}),
    ("/template_invocation", {"template_kwargs": {"": 1}}),
    ("/template_invocation", {"template_kwargs": {"k" * 257: 1}}),
    ("/template_invocation", {"template_kwargs": {str(i): 1 for i in range(257)}}),
    ("/template_invocation", {"tool_choice": "x" * 2**20}),
    ("/template_invocation", {"other": 1}),
    ("/sampling/temperature", -0.5),
    ("/sampling/top_p", 1.5),
    ("/sampling/top_k", -1),
    ("/sampling/min_p", -0.1),
    ("/sampling/max_tokens", 0),
    ("/sampling/repetition_penalty", 0.0),
    ("/sampling/presence_penalty", 2.5),
    ("/sampling/frequency_penalty", -2.5),
    ("/sampling/stop", [""]),
    ("/sampling/stop", ["x"] * 257),
    ("/sampling/stop", ["x" * 10_000, "y" * 10_000]),
    ("/sampling/thinking_budget", {"close_token_ids": [257]}),
    ("/sampling/thinking_budget", {"max_tokens": 3, "close_token_ids": []}),
    ("/sampling/thinking_budget", {"max_tokens": 3, "close_token_ids": [9]}),
    ("/sampling/thinking_budget", DROP),
    ("/seed", -1),
    ("/seed", 2**64),
    ("/generation_backend", ""),
    ("/generation_backend", "x" * 65),
    ("/unknown", 1),
]


@pytest.mark.parametrize(("pointer", "value"), CHANGES, ids=lambda v: repr(v)[:40])
def test_provenance_fails_closed(
    document: dict[str, Any], pointer: str, value: Any
) -> None:
    put(document, pointer, value)
    with pytest.raises(InvalidRecord):
        convert_record(document, RolloutProvenance, "provenance")


def test_a_completion_of_forced_tokens_alone_is_refused(
    document: dict[str, Any],
) -> None:
    document["action_tokens"] = document["action_tokens"][4:]
    with pytest.raises(InvalidRecord, match="at least one action token"):
        convert_record(document, RolloutProvenance, "provenance")


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("/seed", 2**64 - 1),
        ("/action_tokens/0/behavior_logprob", 1e-6),
        ("/action_tokens/0/behavior_logprob", -1e30),
        ("/sampling/temperature", 0.0),
        ("/sampling/thinking_budget", {"max_time_ms": 5, "close_token_ids": [257]}),
        ("/template_invocation", {"template_kwargs": {"enable_thinking": True}}),
        ("/input_token_ids/0", 2**32 - 1),
    ],
)
def test_extreme_values_are_accepted(
    document: dict[str, Any], pointer: str, value: Any
) -> None:
    put(document, pointer, value)
    convert_record(document, RolloutProvenance, "provenance")


def test_identity_names_its_adapter() -> None:
    assert BASE_POLICY.adapter_name is None
    assert ADAPTER_POLICY.adapter_name == "first"
    assert b"adapter" not in compact(BASE_POLICY)
    assert list(msgspec.to_builtins(ADAPTER_POLICY)) == [
        "served_model_id",
        "base_model_sha256",
        "adapter",
        "inference_config_sha256",
        "implementation",
    ]


@pytest.mark.parametrize("field", BehaviorPolicyIdentity.__struct_fields__)
def test_identities_differ_by_any_field(field: str) -> None:
    value = {"adapter": msgspec.UNSET}.get(field, sha("9"))
    other = msgspec.structs.replace(ADAPTER_POLICY, **{field: value})
    assert other != ADAPTER_POLICY


def test_tokenizer_digest_is_of_its_three_parts() -> None:
    text = (
        f'{{"chat_template_sha256":"{sha("f")}","config_sha256":"{sha("e")}",'
        f'"vocab_sha256":"{sha("d")}"}}'
    )
    assert TOKENIZER.sha256 == digest(text.encode())


def test_payload_digest_binds_text_and_trajectory_but_no_reward() -> None:
    text = '{"schema":"kiln.scored-rollout-payload.v1","text":"hi","trajectory":[]}'
    assert scored_payload_digest("hi", []) == digest(text.encode())
    assert scored_payload_digest("hi", [1]) != scored_payload_digest("hi", [])


@pytest.mark.parametrize("text", ["a", "\u00e9" * 128, "two words", "\u3042"])
def test_identity_text_is_accepted(text: str) -> None:
    check_identity_text(text, "name")


@pytest.mark.parametrize(
    "text", ["", " ", "a ", "\ta", "a\x00", "a\x1b", "a\x9f", "\u00e9" * 129, "\ud800"]
)
def test_identity_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"name|surrogates"):
        check_identity_text(text, "name")


def test_template_invocation_without_members_is_small() -> None:
    assert compact(TemplateInvocation()) == b"{}"
