"""A real model, fetched by `make model-smollm2`: it must be there, never skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln_core.canonical import read_json
from kiln_core.engine import EngineSettings, GenerationRequest
from kiln_core.records import ChatMessage
from kiln_train_jax.plugin import JaxPlugin

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    assert MODEL.is_file(), "run 'make model-smollm2' first"
    engine = JaxPlugin(
        EngineSettings(
            model=str(MODEL),
            adapter_dir=tmp_path_factory.mktemp("adapters"),
            compile_cache_dir=tmp_path_factory.mktemp("xla"),
            context_tokens=256,
            slots=2,
        )
    )
    engine.start()
    yield engine
    engine.stop()


def ask(engine, text, **changes):
    plain = GenerationRequest(
        messages=(ChatMessage(role="user", content=text),),
        seed=0,
        max_tokens=24,
        temperature=0.0,
        **changes,
    )
    return engine.submit(plain).result()


def test_it_knows_the_capital_of_france(engine):
    answer = ask(engine, "What is the capital of France?")
    assert answer.content == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_it_answers_in_json_when_guided(engine):
    answer = ask(engine, "What is the capital of France?", action_schema=SCHEMA)
    assert read_json(answer.content.encode(), "answer")["city"]
    assert answer.guide_sha256


def test_its_tokens_are_those_of_its_tokenizer(engine):
    tokenizer = engine.folder.tokenizer
    assert tokenizer.encode_text("Hello 12 caf\u00e9") == [19556, 216, 33, 34, 37366]
    assert tokenizer.encode_markup("<|im_start|>user") == [1, 4093]
    assert len(tokenizer.encode_text("<|im_start|>")) > 1
    assert (engine.folder.stop_ids, engine.context_tokens) == (frozenset({2}), 256)
