"""A request decides its answer, bit for bit, whatever happens around it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from kiln_core.errors import PolicyError
from kiln_core.inference import requests_for
from kiln_train_jax.attention import FullContext
from kiln_train_jax.replaying import TurnReplayer
from kiln_train_jax.rows import Sampling
from kiln_train_jax.sampler import IMPOSSIBLE, Draw, masked_logprobs
from tests.train.conftest import LAMP_SCHEMA
from tests.train.test_adapters import make

PATHS = {
    "free": {},
    "guided": {"action_schema": LAMP_SCHEMA, "max_tokens": 48},
    "thinking": {
        "thinking": True,
        "thinking_budget_tokens": 5,
        "action_schema": LAMP_SCHEMA,
    },
    "cut": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "greedy": {"temperature": 0.0},
    "stopped": {
        "stop": ("e", "qz", "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}")
    },
    "raw": {"messages": (), "prompt": "<|user|>raw <|end|>", "max_tokens": 12},
}
"""Requests that take every path through the engine."""


def exact(generation):
    return (
        generation.action_token_ids,
        generation.logprobs,
        generation.content,
        generation.reasoning_content,
        generation.finish_reason,
    )


def answers(engine, requests):
    """Submit together; return what came."""
    return [exact(f.result()) for f in [engine.submit(r) for r in requests]]


@pytest.fixture
def requests(request_for):
    return [request_for(n, **change) for n, change in enumerate(PATHS.values())]


@pytest.fixture
def alone(engine, requests):
    return [exact(engine.submit(request).result()) for request in requests]


@pytest.fixture
def two_adapters(engine):
    names = ("first", "second")
    for seed, name in enumerate(names):
        make(engine, name, seed)
        engine.load_adapter(name)
    yield names
    for name in names:
        engine.unload_adapter(name)


# What is told while it is sampled


def test_streams_are_told_whole_and_change_nothing(engine, requests, alone):
    told = [[] for _ in requests]
    futures = [
        engine.submit(replace(request, top_logprobs=3), heard.append)
        for request, heard in zip(requests, told, strict=True)
    ]
    for future, heard, before in zip(futures, told, alone, strict=True):
        generation = future.result()
        assert exact(generation) == before
        assert "".join(delta.content for delta in heard) == generation.content
        reasoning = "".join(delta.reasoning for delta in heard)
        assert reasoning == (generation.reasoning_content or "")
        tokens = tuple(token for delta in heard for token in delta.tokens)
        assert tokens == generation.answer_tokens


def test_stream_comes_in_pieces_of_whole_characters(engine, request_for):
    content = request_for(1, max_tokens=40, temperature=1.5)
    heard = []
    generation = engine.submit(content, heard.append).result()
    assert len(heard) > 5
    assert "".join(delta.content for delta in heard) == generation.content
    for before, delta in enumerate(heard[1:]):
        # what is invalid is told with the valid character behind it, or at the end
        if heard[before].content.endswith("\N{REPLACEMENT CHARACTER}"):
            assert before == len(heard) - 2
        assert delta.content


def test_stop_text_never_leaks(engine, request_for):
    whole = engine.submit(request_for(2, max_tokens=40)).result().content
    for start in range(3, len(whole) - 4, 7):
        stop = whole[start : start + 4]
        heard = []
        asked = request_for(2, max_tokens=40, stop=(stop,), top_logprobs=0)
        generation = engine.submit(asked, heard.append).result()
        assert generation.finish_reason == "stop"
        assert generation.content == whole[: whole.index(stop)]
        assert "".join(delta.content for delta in heard) == generation.content
        told = b"".join(token.data for delta in heard for token in delta.tokens)
        assert stop.encode() not in told


def test_stop_text_ends_a_guided_answer_too(engine, request_for):
    asked = request_for(2, action_schema=LAMP_SCHEMA, stop=('"note',))
    generation = engine.submit(asked).result()
    assert generation.content.endswith(",")
    assert generation.finish_reason == "stop"


# Log-probabilities that are asked for


def test_described_tokens_are_the_answer(engine, request_for):
    asked = request_for(3, top_logprobs=5)
    generation = engine.submit(asked).result()
    ids = [token.token_id for token in generation.answer_tokens]
    assert ids == [t for t in generation.action_token_ids if t < 256]
    for token, logprob in zip(
        generation.answer_tokens, generation.logprobs, strict=False
    ):
        assert token.logprob == logprob
        values = [choice.logprob for choice in token.top]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        same = [c.logprob for c in token.top if c.token_id == token.token_id]
        assert same in ([], [logprob])
        assert token.logprob <= values[0]


@pytest.mark.parametrize(
    ("change", "most"),
    [({"temperature": 0.0}, 1), ({"top_k": 2}, 2), ({"top_k": 1}, 1)],
)
def test_only_possible_tokens_are_among_the_likeliest(
    engine, request_for, change, most
):
    generation = engine.submit(request_for(1, top_logprobs=20, **change)).result()
    sizes = {len(token.top) for token in generation.answer_tokens}
    assert max(sizes) == most
    if most == 1:
        assert {token.logprob for token in generation.answer_tokens} == {0.0}


def test_forced_token_has_no_alternative_and_logprob_zero(engine, request_for):
    asked = request_for(1, top_logprobs=20, action_schema=LAMP_SCHEMA, max_tokens=64)
    tokens = engine.submit(asked).result().answer_tokens
    first = tokens[: len('{"lamp":')]
    assert [(t.logprob, len(t.top)) for t in first] == [(0.0, 1)] * len(first)
    lamp = tokens[len(first)]
    assert {choice.text for choice in lamp.top} == {"0", "1", "2", "3"}
    assert sum(np.exp(choice.logprob) for choice in lamp.top) == pytest.approx(1)


# Everything around a request


@pytest.mark.parametrize("load", [8, 16, 40])
def test_load_and_slot_change_no_bit(engine, requests, alone, load):
    places = [(7 * number + load) % len(requests) for number in range(load)]
    together = answers(engine, [requests[place] for place in places])
    assert together == [alone[place] for place in places]


def test_choices_are_what_their_seeds_give_alone(engine, request_for):
    choices = requests_for([request_for(2)], 9)
    together = answers(engine, choices)
    assert [exact(engine.submit(one).result()) for one in choices] == together
    assert together[0] == exact(engine.submit(request_for(2)).result())
    assert len({ids for ids, *_ in together}) == 9


def test_eviction_from_a_tiny_pool_changes_no_bit(engine, requests, alone):
    index = engine._scheduler._index
    blocks = index._blocks
    index.clear()
    index._blocks = 2
    try:
        for _ in range(2):
            assert answers(engine, requests * 2) == alone * 2
        assert len(index._entries) == 2
    finally:
        index.clear()
        index._blocks = blocks
    assert answers(engine, requests) == alone


def test_other_adapters_change_no_bit(engine, requests, alone, two_adapters):
    others = [
        replace(request, adapter=name) for request in requests for name in two_adapters
    ]
    adapted = [exact(engine.submit(request).result()) for request in others]
    assert not set(alone) & set(adapted)
    mixed = answers(engine, [*requests, *others])
    assert mixed == [*alone, *adapted]


def test_adapter_that_overflows_fails_alone(engine, requests, alone):
    """Its numbers reach no other row, no later one, and no caller as an answer."""
    make(engine, "huge", 3, size=1e30)
    engine.load_adapter("huge")
    try:
        assert answers(engine, requests) == alone
        failing = [
            engine.submit(replace(each, adapter="huge")) for each in requests * 4
        ]
        beside = [engine.submit(request) for request in requests]
        for future in failing:
            with pytest.raises(PolicyError, match="not finite"):
                future.result()
        assert [exact(future.result()) for future in beside] == alone
    finally:
        engine.unload_adapter("huge")
    for _ in range(3):
        assert answers(engine, requests * 3) == alone * 3


# Sampler and trainer


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.02},
        {"action_schema": LAMP_SCHEMA, "max_tokens": 48},
        {"thinking": True, "thinking_budget_tokens": 6, "top_p": 0.95},
    ],
)
def test_full_forward_gives_the_sampled_logprobs(
    engine, request_for, change, temperature
):
    asked = request_for(1, temperature=temperature, **change)
    generation = engine.submit(asked).result()
    found = recomputed(engine, asked, generation)
    recorded = [generation.logprobs[index] for index in found]
    differences = np.abs(np.array(recorded) - np.array(list(found.values())))
    assert len(found) > 3
    assert not np.any(np.array(list(found.values())) < IMPOSSIBLE)
    assert differences.max() <= 2e-6 / min(temperature, 1.0)


def recomputed(engine, asked, generation):
    """Return log-probabilities of sampled tokens by a forward over the whole."""
    prompt, action = generation.prompt_token_ids, generation.action_token_ids
    config = engine.folder.config
    rules, _ = engine.rules_of_turn(
        asked.action_schema, asked.max_tokens, thinking=generation.thinking
    )
    sampling = Sampling(0, asked.temperature, asked.top_p, asked.top_k, asked.min_p)
    rules = rules._replace(
        thinking_budget=asked.thinking_budget_tokens if generation.thinking else None
    )
    replayer = TurnReplayer(
        engine.rules_of_turn,
        engine.opens_reasoning,
        config.vocab_size,
        engine.folder.tokenizer.encode_text,
    )
    masks = replayer._walk(prompt, action, generation.logprobs, rules, sampling)
    ids = np.zeros((1, 256), np.int32)
    ids[0, : len(prompt) + len(action)] = [*prompt, *action]
    places = np.array([len(prompt) + index - 1 for index in masks])
    logits = _logits(engine.folder.model, ids)[0, places]
    count = len(masks)
    draw = Draw(
        mask=jnp.array(np.stack(list(masks.values()))),
        seed=jnp.zeros((count, 2), jnp.uint32),
        position=jnp.zeros(count, jnp.int32),
        temperature=jnp.full(count, asked.temperature, jnp.float32),
        top_k=jnp.full(count, asked.top_k, jnp.int32),
        top_p=jnp.full(count, asked.top_p, jnp.float32),
        min_p=jnp.full(count, asked.min_p, jnp.float32),
    )
    logprobs = np.asarray(masked_logprobs(logits, draw))
    return {
        index: float(logprobs[row, action[index]]) for row, index in enumerate(masks)
    }


def _logits(model, ids):
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    hidden, _ = model(jnp.asarray(ids), positions, FullContext(), None)
    return jax.device_get(model.logits(hidden))
