from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from kiln_core.canonical import compact, convert_record
from kiln_core.errors import InvalidRecord
from kiln_core.records import (
    AgenticGroup,
    ChatMessage,
    OpenEnvRolloutProvenance,
    ScoredRollout,
    TurnSegment,
    joined_actions,
    observed_turns,
)
from tests.core.bundles import DROP, Parts, bytes_of, put, small_collection
from tests.simulators.pure import toy_sample

FIELDS: dict[type, list[str]] = {
    AgenticGroup: ["messages", "completions", "prompt_token_ids"],
    ChatMessage: ["role", "content", "tool_calls", "name", "tool_call_id"],
    ScoredRollout: ["text", "reward", "trajectory", "provenance", "openenv", "trace"],
    TurnSegment: ["role", "content", "kind", "tool_call_id", "warning_prefix_len"],
    OpenEnvRolloutProvenance: [
        "schema",
        "environment_name",
        "environment_base_url",
        "openapi_version",
        "discovery_sha256",
        "environment_schema_sha256",
        "action_schema_sha256",
        "behavior_policy",
        "reset_sha256",
        "seed",
        "steps",
        "episode_return",
        "terminal_done",
        "termination",
        "protocol_error_code",
    ],
}


@pytest.mark.parametrize("record", FIELDS, ids=lambda r: r.__name__)
def test_record_is_closed_and_written_in_this_order(record: type) -> None:
    info = msgspec.inspect.type_info(record)
    assert isinstance(info, msgspec.inspect.StructType)
    assert [field.encode_name for field in info.fields] == FIELDS[record]
    assert info.forbid_unknown_fields


@pytest.fixture(scope="module")
def line() -> Any:
    return Parts(bytes_of(small_collection().bundle())).dataset[0]


def changed(line: dict[str, Any], pointer: str, value: Any) -> Any:
    copy = msgspec.json.decode(compact(line))
    put(copy, pointer, value)
    return copy


CHANGES: list[tuple[str, Any]] = [
    ("/messages", []),
    ("/messages/0/role", ""),
    ("/messages/0/content", None),
    ("/messages/0/extra", 1),
    ("/completions", []),
    ("/completions", DROP),
    ("/prompt_token_ids", []),
    ("/prompt_token_ids/0", 2**32),
    ("/completions/0/text", "other"),
    ("/completions/0/reward", -7.0),
    ("/completions/0/reward", None),
    ("/completions/0/reward", "1"),
    ("/completions/0/trajectory", []),
    ("/completions/0/trajectory/0/kind", "thought"),
    ("/completions/0/trajectory/0/role", ""),
    ("/completions/0/trajectory/1/warning_prefix_len", 0),
    ("/completions/0/openenv/schema", "kiln.openenv-rollout.v2"),
    ("/completions/0/openenv/environment_name", ""),
    ("/completions/0/openenv/environment_name", " counter"),
    ("/completions/0/openenv/environment_name", "c\x00"),
    ("/completions/0/openenv/environment_name", "x" * 257),
    ("/completions/0/openenv/environment_base_url", ""),
    ("/completions/0/openenv/environment_base_url", "http://" + "h" * 2048),
    ("/completions/0/openenv/openapi_version", ""),
    ("/completions/0/openenv/openapi_version", None),
    ("/completions/0/openenv/openapi_version", "v" * 257),
    ("/completions/0/openenv/discovery_sha256", "sha256:"),
    ("/completions/0/openenv/environment_schema_sha256", DROP),
    ("/completions/0/openenv/action_schema_sha256", 1),
    ("/completions/0/openenv/reset_sha256", DROP),
    ("/completions/0/openenv/seed", -1),
    ("/completions/0/openenv/seed", 2**63),
    ("/completions/0/openenv/steps", 257),
    ("/completions/0/openenv/episode_return", 3.5),
    ("/completions/0/openenv/terminal_done", False),
    ("/completions/0/openenv/termination", "max_steps"),
    ("/completions/0/openenv/termination", "protocol_error"),
    ("/completions/0/openenv/protocol_error_code", "SESSION_ERROR"),
    ("/completions/0/openenv/extra", 1),
    ("/completions/0/extra", 1),
    ("/extra", 1),
]


@pytest.mark.parametrize(("pointer", "value"), CHANGES, ids=lambda v: repr(v)[:50])
def test_group_fails_closed(line: dict[str, Any], pointer: str, value: Any) -> None:
    convert_record(line, AgenticGroup, "line")
    with pytest.raises(InvalidRecord):
        convert_record(changed(line, pointer, value), AgenticGroup, "line")


def test_reward_equals_the_return_bit_for_bit(line: dict[str, Any]) -> None:
    """0.0 and -0.0 compare equal as numbers."""
    zero = changed(line, "/completions/0/openenv/episode_return", 0.0)
    put(zero, "/completions/0/reward", 0.0)
    convert_record(zero, AgenticGroup, "line")
    put(zero, "/completions/0/reward", -0.0)
    with pytest.raises(InvalidRecord, match="reward differs"):
        convert_record(zero, AgenticGroup, "line")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_returns_and_rewards_are_finite(line: dict[str, Any], value: float) -> None:
    rollout = convert_record(line, AgenticGroup, "line").completions[0]
    assert rollout.openenv is not UNSET
    with pytest.raises(ValueError, match="finite"):
        msgspec.structs.replace(rollout.openenv, episode_return=value)
    with pytest.raises(ValueError, match="finite"):
        ScoredRollout(text="", reward=value)


def test_group_size_is_bounded(line: dict[str, Any]) -> None:
    one = line["completions"][0]
    convert_record(changed(line, "/completions", [one] * 256), AgenticGroup, "line")
    with pytest.raises(InvalidRecord):
        convert_record(changed(line, "/completions", [one] * 257), AgenticGroup, "line")


def test_ordinary_rollout_needs_neither_trajectory_nor_openenv() -> None:
    provenance = toy_sample([ChatMessage(role="user", content="x")], "hi").provenance
    rollout = ScoredRollout(text="hi", reward=1.0, provenance=provenance)
    assert rollout.segments == []
    assert list(msgspec.to_builtins(rollout)) == ["text", "reward", "provenance"]


def segment(kind: str, content: str, prefix: int | None = None) -> TurnSegment:
    return TurnSegment(
        role="tool",
        content=content,
        kind=kind,  # type: ignore[arg-type]  # a parameter
        warning_prefix_len=UNSET if prefix is None else prefix,
    )


def test_text_is_the_actions_joined() -> None:
    trajectory = [
        segment("action", "a"),
        segment("observation", "b"),
        segment("context", "c"),
        segment("action", "d<TURN_BREAK>"),
    ]
    assert joined_actions(trajectory) == "a<TURN_BREAK>d<TURN_BREAK>"
    assert joined_actions([]) == ""


def test_results_are_environment_text_unless_they_are_warnings() -> None:
    trajectory = [
        segment("action", "a"),
        segment("observation", "b"),
        segment("observation", "c", 1),
    ]
    assert observed_turns(trajectory) == [True, False]
