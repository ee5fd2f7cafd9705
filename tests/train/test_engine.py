"""The engine as a caller sees it: exact at any load, safe against bad requests."""

from __future__ import annotations

import random
import threading
from concurrent.futures import wait

import numpy as np
import pytest
from msgspec.structs import replace

from kiln_core.actions import ActionSchema, parse_reply
from kiln_core.engine import EngineSettings
from kiln_core.errors import (
    CapacityFull,
    ContextOverflow,
    PolicyError,
    QueueFull,
    UsageError,
)
from kiln_core.records import ChatMessage
from kiln_train_jax import programs
from kiln_train_jax.engine import JaxEngine
from tests.train.conftest import LAMP_SCHEMA


def exact(generation):
    return generation.action_token_ids, generation.logprobs


def mixed(request_for, count):
    """Return requests that take every path: guided, free, thinking, filtered."""
    changes = (
        {},
        {"action_schema": LAMP_SCHEMA},
        {"thinking": True, "thinking_budget_tokens": 5, "action_schema": LAMP_SCHEMA},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.0},
    )
    return [
        request_for(number, **changes[number % len(changes)]) for number in range(count)
    ]


def test_load_changes_no_bit(engine, request_for):
    """One, eight and sixteen in flight, in any order: equal tokens, equal bits."""
    requests = mixed(request_for, 16)
    alone = [exact(engine.submit(request).result()) for request in requests]
    eight = []
    for start in (0, 8):
        futures = [engine.submit(r) for r in requests[start : start + 8]]
        eight += [exact(future.result()) for future in futures]
    order = list(range(16))
    random.Random(1).shuffle(order)
    futures = {number: engine.submit(requests[number]) for number in order}
    sixteen = [exact(futures[number].result()) for number in range(16)]
    assert alone == eight == sixteen


def test_more_requests_than_slots_all_finish(engine, request_for):
    futures = [engine.submit(request_for(number)) for number in range(40)]
    assert len({future.result().action_token_ids for future in futures}) > 30


def test_prefix_hit_miss_and_eviction_give_equal_bits(settings, request_for):
    engine = JaxEngine(settings)
    engine.start()
    try:
        scheduler = engine._scheduler
        request = request_for(4, max_tokens=8)
        miss = exact(engine.submit(request).result())
        assert engine.prefix_counts[0] == 0
        hit = exact(engine.submit(request).result())
        assert engine.prefix_counts[0] > 0
        scheduler._index.clear()
        evicted = exact(engine.submit(request).result())
        assert miss == hit == evicted
    finally:
        engine.stop()


def test_next_turn_reuses_the_prompt_and_is_exact(engine, request_for):
    """A turn after generated tokens must not see keys that decode steps made."""
    first = request_for(3, max_tokens=80)
    reply = engine.submit(first).result()
    turn = (
        *first.messages,
        ChatMessage(role="assistant", content=reply.content),
        ChatMessage(role="tool", content="and then?"),
    )
    second = replace(first, messages=turn, max_tokens=8)
    warm = exact(engine.submit(second).result())
    engine._scheduler._index.clear()
    assert exact(engine.submit(second).result()) == warm


def test_identity_and_ids_come_with_every_answer(engine, request_for):
    request = request_for(2, action_schema=LAMP_SCHEMA)
    generation = engine.submit(request).result()
    assert generation.behavior_policy == engine.policy_identity(None)
    assert generation.guide_sha256 == engine.guide(LAMP_SCHEMA, 24).guide_sha256
    assert len(generation.logprobs) == len(generation.action_token_ids)
    decode = engine.folder.tokenizer.decode
    assert decode(generation.action_token_ids[:-1]) == generation.content
    for message, (start, stop) in zip(
        request.messages, generation.content_spans, strict=True
    ):
        ids = generation.prompt_token_ids[start:stop]
        assert decode(ids) == message.content.strip()


def test_guided_actions_are_valid(engine, request_for):
    schema = ActionSchema(LAMP_SCHEMA)
    futures = [
        engine.submit(request_for(number, action_schema=LAMP_SCHEMA, max_tokens=64))
        for number in range(12)
    ]
    for future in futures:
        generation = future.result()
        assert generation.finish_reason == "stop"
        parse_reply(generation.content, schema)
        values = [p for p in generation.logprobs if p]
        assert values
        assert max(values) < 0.0


def test_schema_that_cannot_guide_leaves_the_answer_free(engine, request_for):
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    report = engine.guide(schema, 24)
    assert report.guide_sha256 is None
    assert "cannot guide" in report.warning
    generation = engine.submit(request_for(1, action_schema=schema)).result()
    assert generation.guide_sha256 is None


def test_reasoning_comes_apart_from_the_answer(engine, request_for):
    request = request_for(
        1,
        thinking=True,
        thinking_budget_tokens=6,
        action_schema=LAMP_SCHEMA,
        max_tokens=80,
    )
    generation = engine.submit(request).result()
    assert generation.thinking
    assert generation.reasoning_closed
    assert generation.reasoning_content
    assert "</think>" not in generation.content
    parse_reply(generation.content, ActionSchema(LAMP_SCHEMA))
    (close,) = generation.close_token_ids
    forced = [
        token
        for token, logprob in zip(
            generation.action_token_ids, generation.logprobs, strict=True
        )
        if logprob is None
    ]
    assert forced == [close]


def test_reasoning_that_never_closes_is_no_answer(engine, request_for):
    generation = engine.submit(request_for(1, thinking=True, max_tokens=4)).result()
    assert generation.content == ""
    assert not generation.reasoning_closed
    assert generation.finish_reason == "length"


def test_zero_temperature_is_greedy_whatever_the_seed(engine, request_for):
    answers = {
        engine.submit(replace(request_for(1, temperature=0.0), seed=seed))
        .result()
        .action_token_ids
        for seed in (0, 5, 2**64 - 1)
    }
    assert len(answers) == 1


def test_high_half_of_the_seed_changes_the_answer(engine, request_for):
    request = request_for(1)
    low, high = (
        engine.submit(replace(request, seed=seed)).result().action_token_ids
        for seed in (7, 7 + 2**40)
    )
    assert low != high


def test_stop_text_is_cut_from_the_answer(engine, request_for):
    full = engine.submit(request_for(2)).result()
    stop = full.content[3:5]
    cut = engine.submit(replace(request_for(2), stop=(stop,))).result()
    assert cut.content == full.content[: full.content.index(stop)]
    assert cut.finish_reason == "stop"


def test_too_long_a_prompt_names_tokens_and_limit(engine, request_for):
    long = ChatMessage(role="user", content="x" * 800)
    request = replace(request_for(1), messages=(long,), max_tokens=10)
    with pytest.raises(
        ContextOverflow, match="need 813, the context has 768"
    ) as caught:
        engine.submit(request)
    assert caught.value.details == {"tokens": 813, "limit": 768}


def test_longest_prompt_and_action_fit(engine, request_for):
    content = "x" * (768 - 3 - 40)
    request = replace(
        request_for(1), messages=(ChatMessage(role="user", content=content),)
    )
    generation = engine.submit(replace(request, max_tokens=40)).result()
    assert len(generation.prompt_token_ids) + 40 == 768
    assert len(generation.action_token_ids) <= 40


@pytest.mark.parametrize(
    "change",
    [
        {"seed": -1},
        {"seed": 2**64},
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"top_k": -1},
        {"thinking_budget_tokens": -1},
        {"stop": ("",)},
        {"adapter": "nobody"},
        {"messages": ()},
        {"messages": (ChatMessage(role="robot", content="x"),)},
    ],
)
def test_bad_request_is_refused_at_once(engine, request_for, change):
    with pytest.raises(UsageError):
        engine.submit(replace(request_for(1), **change))


def test_abandoned_request_frees_its_slot(engine, request_for):
    long = [engine.submit(request_for(n, max_tokens=500)) for n in range(16)]
    assert all(future.cancel() for future in long)
    generation = engine.submit(request_for(1, max_tokens=4)).result(timeout=60)
    assert len(generation.action_token_ids) <= 4


def test_abandoned_request_frees_its_place_in_the_queue(engine, request_for):
    running = [engine.submit(request_for(n, max_tokens=500)) for n in range(16)]
    waiting = []
    with pytest.raises(QueueFull):
        while True:
            waiting.append(engine.submit(request_for(1)))
    assert all(future.cancel() for future in waiting)
    last = engine.submit(request_for(1, max_tokens=4))
    for future in running:
        future.cancel()
    assert last.result(timeout=60).action_token_ids


def test_full_queue_is_refused_and_the_rest_is_served(engine, request_for):
    futures, refused = [], 0
    for number in range(200):
        try:
            futures.append(engine.submit(request_for(number, max_tokens=30)))
        except CapacityFull:
            refused += 1
    assert refused
    done, late = wait(futures, timeout=120)
    assert len(done) == 200 - refused
    assert not late


def test_failure_of_the_device_loop_fails_requests_not_the_engine(engine, request_for):
    scheduler = engine._scheduler
    whole = scheduler._programs

    class Broken:
        def __getattr__(self, name):
            raise RuntimeError("device lost")

    scheduler._programs = Broken()
    try:
        with pytest.raises(PolicyError, match="device lost"):
            engine.submit(request_for(1)).result(timeout=60)
    finally:
        scheduler._programs = whole
    assert engine.submit(request_for(1)).result(timeout=60).action_token_ids


def test_stopped_engine_refuses_and_ends_its_thread(settings, request_for):
    engine = JaxEngine(settings)
    assert not engine.ready
    with pytest.raises(UsageError, match="not started"):
        engine.submit(request_for(1))
    engine.start()
    assert engine.ready
    future = engine.submit(request_for(1))
    engine.stop()
    assert future.done()
    assert not engine.ready
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("kiln-device-loop") <= 1


def test_stop_does_not_wait_for_the_compiler(settings, monkeypatch):
    compiling, go_on = threading.Event(), threading.Event()
    whole = programs._compile

    def held(wanted):
        compiling.set()
        go_on.wait()
        return whole(wanted)

    monkeypatch.setattr(programs, "_compile", held)
    engine = JaxEngine(settings)
    starting = threading.Thread(target=engine.start)
    starting.start()
    compiling.wait()
    engine.stop()
    starting.join()
    assert not engine.ready
    engine.stop()
    go_on.set()
    until_ended("kiln-compile")
    engine.start()  # a stopped engine stays stopped
    assert not engine.ready
    until_ended("kiln-compile")


def until_ended(name):
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


def test_failure_to_compile_is_raised_by_the_start(settings, monkeypatch):
    monkeypatch.setattr(programs, "_compile", lambda wanted: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        JaxEngine(settings).start()


def test_context_beyond_the_model_is_refused(tmp_path):
    settings = EngineSettings(
        model="builtin:random", adapter_dir=tmp_path, context_tokens=10**6
    )
    with pytest.raises(UsageError, match="context_tokens"):
        JaxEngine(settings)


def test_logprobs_are_float32_in_shortest_form(engine, request_for):
    generation = engine.submit(request_for(1)).result()
    for logprob in generation.logprobs:
        assert float(str(np.float32(logprob))) == logprob
