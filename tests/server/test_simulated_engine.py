"""The simulated engine keeps the promises of the port that tests rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kiln_core.actions import ActionSchema, parse_reply
from kiln_core.chat import chat_choice
from kiln_core.engine import EngineSettings, GenerationRequest
from kiln_core.records import ChatMessage
from tests.server.test_adapters import make_adapter
from tests.simulators.engine import SimulatedEngine

OBJECT = {"type": "object"}
SCHEMAS: list[dict[str, Any]] = [
    {**OBJECT, "properties": {}},
    {
        **OBJECT,
        "properties": {"a": {"type": "integer", "minimum": -2, "maximum": 2}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {
        **OBJECT,
        "properties": {
            "b": {"type": "boolean"},
            "c": {"enum": ["x", 1, None]},
            "d": {"const": "größe"},
            "e": {"type": "string", "minLength": 2, "maxLength": 3},
            "f": {"type": "array", "items": {"type": "null"}, "maxItems": 3},
            "g": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "h": {"$ref": "#/$defs/deep"},
            "i": True,
            "j": {"type": ["string", "integer"], "exclusiveMinimum": 3},
        },
        "required": ["b", "d", "h"],
        "$defs": {"deep": {**OBJECT, "properties": {"k": {"type": "boolean"}}}},
    },
]


@pytest.fixture
def engine(tmp_path: Path) -> SimulatedEngine:
    return SimulatedEngine(EngineSettings(adapter_dir=tmp_path, slots=1), thinking=True)


def request(seed: int, schema: Any = None, **more: Any) -> GenerationRequest:
    return GenerationRequest(
        messages=(ChatMessage(role="user", content="go"),),
        seed=seed,
        max_tokens=more.pop("max_tokens", 256),
        action_schema=schema,
        **more,
    )


@pytest.mark.parametrize("schema", SCHEMAS)
def test_guided_text_satisfies_its_schema(
    engine: SimulatedEngine, schema: dict[str, Any]
) -> None:
    compiled = ActionSchema(schema)
    contents = set()
    for seed in range(50):
        generation = engine.generate(request(seed, schema))
        parse_reply(generation.content, compiled)
        contents.add(generation.content)
    assert len(contents) > 1 or schema == SCHEMAS[0]
    assert engine.guide(schema, 256).guide_sha256
    assert engine.guide(schema, 1).guide_sha256 is None


@pytest.mark.parametrize("schema", [None, *SCHEMAS])
@pytest.mark.parametrize("budget", [None, 0, 3, 200])
def test_provenance_of_every_completion_is_valid(
    engine: SimulatedEngine, schema: Any, budget: int | None
) -> None:
    wanted = request(2**64 - 1, schema, thinking_budget_tokens=budget)
    generation = engine.generate(wanted)
    choice = chat_choice(wanted, generation, provenance=True)
    assert choice.rollout_provenance
    assert len(generation.logprobs) == len(generation.action_token_ids)


def test_equal_requests_give_equal_completions(engine: SimulatedEngine) -> None:
    one, other = (engine.generate(request(5, SCHEMAS[2])) for _ in range(2))
    assert one == other
    assert engine.generate(request(6, SCHEMAS[2])) != one


def test_cut_completion_has_as_many_tokens_as_allowed(engine: SimulatedEngine) -> None:
    for limit in range(1, 20):
        generation = engine.generate(request(1, SCHEMAS[1], max_tokens=limit))
        assert len(generation.action_token_ids) <= limit


def test_adapter_is_part_of_the_identity(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    make_adapter(tmp_path, "one", ["said"])
    info = engine.load_adapter("one")
    generation = engine.generate(request(1, adapter="one"))
    assert generation.content == "said"
    assert generation.behavior_policy == engine.policy_identity("one")
    assert generation.behavior_policy.adapter_name == "one"
    assert info.content_sha256
