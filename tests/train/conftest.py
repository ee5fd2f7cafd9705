from __future__ import annotations

import pytest
from msgspec.structs import replace

from kiln_core.engine import EngineSettings, GenerationRequest
from kiln_core.records import ChatMessage
from kiln_train_jax.plugin import JaxPlugin
from kiln_train_jax.tokenizer import BYTE_VOCABULARY, Tokenizer, byte_document

LAMP_SCHEMA = {
    "type": "object",
    "properties": {
        "lamp": {"type": "integer", "minimum": 0, "maximum": 3},
        "note": {"type": "string"},
    },
    "required": ["lamp", "note"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer(byte_document(), vocab_size=BYTE_VOCABULARY)


@pytest.fixture(scope="session")
def settings(tmp_path_factory):
    return EngineSettings(
        model="builtin:random",
        adapter_dir=tmp_path_factory.mktemp("adapters"),
        compile_cache_dir=tmp_path_factory.mktemp("xla"),
        context_tokens=768,
        max_queued_requests=64,
    )


@pytest.fixture(scope="session")
def engine(settings):
    engine = JaxPlugin(settings)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def request_for():
    """Return a factory of requests that differ by number."""
    plain = GenerationRequest(
        messages=(
            ChatMessage(role="system", content="You answer in the room. " * 8),
            ChatMessage(role="user", content="?"),
        ),
        seed=0,
        max_tokens=24,
        thinking=False,
    )

    def build(number: int, **changes):
        user = ChatMessage(role="user", content=f"question {number} " * (number % 5))
        messages = (plain.messages[0], user)
        seed = (number * 0x9E3779B97F4A7C15) % 2**64
        return replace(plain, **{"messages": messages, "seed": seed, **changes})

    return build
