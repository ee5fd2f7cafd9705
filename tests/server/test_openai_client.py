"""The public ``openai`` client against a real engine behind a real socket."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import openai
import pytest

from kiln_core.engine import EngineSettings
from kiln_train_jax.adapters import write_adapter
from kiln_train_jax.engine import JaxEngine
from kiln_train_jax.lora import TARGETS, Lora, init
from kiln_train_jax.plugin import JaxPlugin
from tests.server.running import Running, running, until
from tests.server.test_chat import guided

MESSAGES: Any = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "snöwman ☃?"},
]
ADAPTERS = ("left", "right")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> None:
    """The server of this module goes on between tests, with worker threads of anyio."""


@pytest.fixture(scope="module")
def kiln(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    adapters = tmp_path_factory.mktemp("adapters")
    engine = JaxPlugin(
        EngineSettings(
            model="builtin:random",
            adapter_dir=adapters,
            compile_cache_dir=tmp_path_factory.mktemp("xla"),
            context_tokens=768,
            slots=4,
            max_queued_requests=8,
        )
    )
    for seed, name in enumerate(ADAPTERS):
        make_adapter(engine, adapters / name, seed)
    with running(adapters, engine=engine) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def compiled_late(kiln: Running) -> list[str]:
    """What the first adapters compile, which is loaded before anything else."""
    with compilations() as found:
        for name in ADAPTERS:
            assert kiln.post("/v1/adapters/load", {"name": name}).status == 200
    return found


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect what JAX says it compiles."""
    found: list[str] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "ompil" in record.getMessage():
                found.append(record.getMessage())

    handler, logger = Collects(), logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield found
    finally:
        logger.removeHandler(handler)


def make_adapter(engine: JaxEngine, folder: Path, seed: int) -> None:
    """Write an adapter that really changes the model."""
    config, stream = engine.folder.config, np.random.default_rng(seed)
    blank = init(config, rank=4, alpha=8.0, key=jax.random.key(0), targets=TARGETS)
    layers = jax.tree.map(
        lambda leaf: 0.3 * stream.normal(size=leaf.shape).astype(np.float32),
        blank.layers,
    )
    folder.mkdir()
    write_adapter(
        folder,
        Lora(layers, np.float32(2.0)),
        model_id=engine.served_model_id,
        rank=4,
        alpha=8.0,
    )


@pytest.fixture
def client(kiln: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{kiln.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def ask(client: openai.OpenAI, **members: Any) -> Any:
    asked = {
        "model": "builtin:random",
        "messages": MESSAGES,
        "seed": 5,
        "max_tokens": 24,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        **members,
    }
    return client.chat.completions.create(**asked)


def test_models_are_the_base_and_its_adapters(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["builtin:random", *ADAPTERS]


def test_plain_answer_repeats(client: openai.OpenAI) -> None:
    first, again = ask(client), ask(client)
    assert first.choices[0].message.role == "assistant"
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.usage.total_tokens == (
        first.usage.prompt_tokens + first.usage.completion_tokens
    )


@pytest.mark.parametrize("thinks", [True, False])
def test_stream_is_the_whole_answer(client: openai.OpenAI, *, thinks: bool) -> None:
    extra = {
        "chat_template_kwargs": {"enable_thinking": thinks},
        "thinking_budget_tokens": 8,
    }
    asked = {"n": 2, "logprobs": True, "top_logprobs": 2, "extra_body": extra}
    whole = ask(client, **asked)
    chunks = list(
        ask(client, stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        parts = [
            c for chunk in chunks for c in chunk.choices if c.index == choice.index
        ]
        said = "".join(part.delta.content or "" for part in parts)
        assert said == choice.message.content
        reasoning = "".join(
            getattr(part.delta, "reasoning_content", None) or "" for part in parts
        )
        assert reasoning == (getattr(choice.message, "reasoning_content", "") or "")
        tokens = [t for p in parts if p.logprobs for t in p.logprobs.content]
        assert tokens == choice.logprobs.content
        assert parts[-1].finish_reason == choice.finish_reason


def test_several_choices_differ_and_the_first_is_the_lone_one(
    client: openai.OpenAI,
) -> None:
    several = ask(client, n=3)
    contents = [choice.message.content for choice in several.choices]
    assert contents[0] == ask(client).choices[0].message.content
    assert len(set(contents)) == 3


def test_logprobs_have_the_shape_of_the_client(client: openai.OpenAI) -> None:
    (choice,) = ask(client, logprobs=True, top_logprobs=3).choices
    for token in choice.logprobs.content:
        assert token.logprob <= 0.0
        assert bytes(token.bytes).decode(errors="replace") == token.token
        assert len(token.top_logprobs) == 3


def test_guided_answer_is_valid_json(client: openai.OpenAI) -> None:
    (choice,) = ask(client, response_format=guided(), max_tokens=64).choices
    assert json.loads(choice.message.content).keys() == {"arm"}
    assert choice.finish_reason == "stop"


def test_two_adapters_answer_at_once_and_each_as_alone(
    client: openai.OpenAI,
) -> None:
    names = ["builtin:random", *ADAPTERS] * 2

    def said(name: str) -> Any:
        answer = ask(client, model=name, max_tokens=40)
        assert answer.model == name
        return answer.choices[0].message.content

    alone = [said(name) for name in names]
    assert len(set(alone)) == 3
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(said, names)) == alone


def test_plain_completions(client: openai.OpenAI) -> None:
    asked: Any = {"model": "builtin:random", "prompt": ["ab", "☃"], "seed": 1, "n": 2}
    whole = client.completions.create(logprobs=2, **asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    parts: dict[int, str] = {}
    for event in client.completions.create(stream=True, **asked):
        for choice in event.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
    assert [parts[index] for index in range(4)] == [c.text for c in whole.choices]
    ids = client.completions.create(model="builtin:random", prompt=list(b"ab"), seed=1)
    assert ids.choices[0].text == whole.choices[0].text


# Errors


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, temperature=-1)
    assert bad.value.code == "usage"
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, model="nobody")
    assert missing.value.code == "adapter_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, max_tokens=10_000)
    assert long.value.code == "context_overflow"
    with pytest.raises(openai.BadRequestError, match="tools"):
        ask(client, tools=[{"type": "function", "function": {"name": "f"}}])


def test_full_queue_is_a_rate_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.RateLimitError) as full:
        ask(client, n=64, max_tokens=200)
    assert full.value.code == "queue_full"
    assert full.value.response.headers["retry-after"] == "1"
    assert ask(client).choices


def test_timeout_frees_the_slots(client: openai.OpenAI, kiln: Running) -> None:
    """What is asked cannot end early, so that no machine answers within the timeout."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    digits = {"type": "array", "items": digit, "minItems": 200, "maxItems": 200}
    schema = {"type": "object", "properties": {"a": digits}, "required": ["a"]}
    asked: Any = {"max_tokens": 700, "n": 8, "response_format": guided(schema)}
    cancelled = 'kiln_chat_requests_total{status="cancelled"}'
    before = kiln.metric(cancelled)
    ask(client, **asked)
    with pytest.raises(openai.APITimeoutError):
        ask(client, timeout=0.25, **asked)
    until(lambda: kiln.metric(cancelled) == before + 1)
    with ask(client, stream=True, **asked) as stream:
        next(iter(stream))
    until(lambda: kiln.metric(cancelled) == before + 2)
    scheduler = kiln.engine._scheduler  # type: ignore[attr-defined]  # the real engine
    until(lambda: not any(scheduler._active) and not scheduler._queue)
    assert ask(client).choices


# Compilation


def test_compilations_are_seen() -> None:
    with compilations() as found:
        jax.jit(lambda x: x * 3)(np.arange(7))
    assert found


def test_nothing_is_compiled_after_the_start(
    client: openai.OpenAI, kiln: Running, compiled_late: list[str]
) -> None:
    """No request waits for the compilation of anybody's shape."""
    with compilations() as found:
        for number in range(24):
            changes: dict[str, Any] = [
                {},
                {"temperature": 0, "stop": ["a", "b"]},
                {"top_p": 0.5, "logprobs": True, "top_logprobs": 20},
                {"n": 3, "response_format": guided(), "max_tokens": 64},
                {"model": "left", "extra_body": {"top_k": 3, "min_p": 0.1}},
                {"extra_body": {"thinking_budget_tokens": 3}, "stream": True},
            ][number % 6]
            words: Any = [{"role": "user", "content": "x" * (number * 29)}]
            answer = ask(client, messages=words, seed=number, **changes)
            assert list(answer) if changes.get("stream") else answer.choices
        kiln.post("/v1/adapters/unload", {"name": "right"})
        kiln.post("/v1/adapters/load", {"name": "right"})
    assert [*compiled_late, *found] == []
