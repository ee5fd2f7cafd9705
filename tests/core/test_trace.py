from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln_core.canonical import convert_record
from kiln_core.errors import InvalidRecord, PolicyDrift, PolicyError
from kiln_core.records import ChatMessage
from kiln_core.trace import (
    RolloutTrace,
    TurnSample,
    prompt_token_ids,
    token_trace,
    turn_tokens,
)
from tests.core.bundles import DROP, put
from tests.simulators.pure import END, ROLE, TOKENIZER, sha, toy_sample

SYSTEM = ChatMessage(role="system", content="s")
USER = ChatMessage(role="user", content="hello")
FIRST = "ab"
RESULT = ChatMessage(role="tool", content="result")


def two_turns(**second: Any) -> list[TurnSample]:
    prompt = [SYSTEM, USER]
    later = [*prompt, ChatMessage(role="assistant", content=FIRST), RESULT]
    return [toy_sample(prompt, FIRST), toy_sample(later, "xyz", **second)]


def test_first_turn_repeats_the_shared_prompt_whole() -> None:
    samples = two_turns()
    trace = token_trace(samples, [True, True])
    assert trace is not None
    shared = prompt_token_ids(samples)
    assert shared is not None
    assert trace.turns[0].prompt_prefix == len(shared)
    assert trace.turns[0].prompt_token_ids == []
    assert trace.turns[0].observation_spans == []
    assert trace.turns[0].action_token_ids == [*FIRST.encode(), END]
    assert trace.tokenizer_sha256 == TOKENIZER.sha256
    assert trace.sampling.max_tokens == 64


def test_later_turn_holds_only_what_is_new() -> None:
    samples = two_turns()
    trace = token_trace(samples, [True, True])
    assert trace is not None
    before = samples[0].provenance.input_token_ids
    turn = trace.turns[1]
    assert turn.prompt_prefix == len(before)
    assert turn.prompt_token_ids == [ROLE, *b"result", END, ROLE]
    start, stop = turn.observation_spans[0]
    prompt = before + turn.prompt_token_ids
    assert bytes(prompt[start:stop]) == b"result"


def test_prompt_that_does_not_extend_the_last_starts_where_they_part() -> None:
    first = toy_sample([USER], "thinking.")
    second = toy_sample([USER, RESULT], "x")
    turn = turn_tokens(second.provenance, first.provenance.input_token_ids, [])
    assert turn.prompt_prefix == len(first.provenance.input_token_ids) - 10
    ids = first.provenance.input_token_ids[: turn.prompt_prefix]
    whole = second.provenance
    assert (
        ids + turn.prompt_token_ids == whole.input_token_ids[: whole.prompt_token_count]
    )


def test_shorter_prompt_is_a_prefix_of_what_came() -> None:
    sample = toy_sample([USER], "x").provenance
    longer = [*sample.input_token_ids, 1, 2, 3]
    turn = turn_tokens(sample, longer, [])
    assert turn.prompt_prefix == sample.prompt_token_count
    assert turn.prompt_token_ids == []


def test_choices_without_alternative_have_no_logprob() -> None:
    """The endpoint says 0.0 where grammar forces; the trace says null."""
    turn = turn_tokens(toy_sample([USER], "abcd").provenance, [], [])
    assert turn.logprobs == [None, -0.125, -0.25, None, None]


def test_error_turns_have_no_observation() -> None:
    trace = token_trace(two_turns(), [False, False])
    assert trace is not None
    assert trace.turns[1].observation_spans == []


def test_no_turn_has_no_trace() -> None:
    assert token_trace([], []) is None
    assert prompt_token_ids([]) is None


def test_tokenizer_change_within_an_episode_is_drift() -> None:
    samples = two_turns()
    other = msgspec.structs.replace(TOKENIZER, vocab_sha256=sha("0"))
    provenance = msgspec.structs.replace(samples[1].provenance, tokenizer=other)
    samples[1] = msgspec.structs.replace(samples[1], provenance=provenance)
    with pytest.raises(PolicyDrift):
        token_trace(samples, [True, True])


def test_sampling_change_within_an_episode_is_drift() -> None:
    with pytest.raises(PolicyDrift):
        token_trace(two_turns(max_tokens=65), [True, True])


@pytest.mark.parametrize("spans", [(), ((0, 1000),), ((5, 4),), ((-1, 2),)])
def test_content_outside_the_prompt_is_the_policys_fault(
    spans: tuple[tuple[int, int], ...],
) -> None:
    sample = msgspec.structs.replace(toy_sample([USER], "x"), content_spans=spans)
    with pytest.raises(PolicyError):
        token_trace([sample], [True])


@pytest.fixture
def document() -> Any:
    trace = RolloutTrace(
        schema="kiln.rollout-trace.v1",
        attempt=0,
        guide_sha256=sha("0"),
        tokens=token_trace(two_turns(), [True, True]),
    )
    return msgspec.to_builtins(trace)


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("/schema", "kiln.rollout-trace.v2"),
        ("/attempt", -1),
        ("/attempt", 17),
        ("/guide_sha256", "x"),
        ("/guide_sha256", DROP),
        ("/tokens", DROP),
        ("/tokens/turns/0/prompt_prefix", -1),
        ("/tokens/turns/0/prompt_token_ids", [-1]),
        ("/tokens/turns/0/action_token_ids", []),
        ("/tokens/turns/0/logprobs", []),
        ("/tokens/turns/0/logprobs/1", 0.5),
        ("/tokens/turns/0/logprobs/1", "x"),
        ("/tokens/turns/1/observation_spans", [[0]]),
        ("/tokens/turns/1/observation_spans", [[0, 1, 2]]),
        ("/tokens/turns/1/observation_spans", [[3, 2]]),
        ("/tokens/turns/1/observation_spans", [[0, 3], [2, 4]]),
        ("/tokens/turns/1/observation_spans", [[0, 10_000]]),
        ("/tokens/turns/1/observation_spans", [[-1, 2]]),
        ("/tokens/turns", [{}]),
        ("/tokens/sampling/top_p", 2.0),
        ("/tokens/sampling/temperature", -1.0),
        ("/tokens/sampling/max_tokens", 0),
        ("/tokens/tokenizer_sha256", None),
        ("/extra", 1),
        ("/tokens/extra", 1),
        ("/tokens/turns/0/extra", 1),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_trace_fails_closed(document: dict[str, Any], pointer: str, value: Any) -> None:
    convert_record(document, RolloutTrace, "trace")
    put(document, pointer, value)
    with pytest.raises(InvalidRecord):
        convert_record(document, RolloutTrace, "trace")


def test_adjoining_and_empty_spans_are_allowed(document: dict[str, Any]) -> None:
    put(document, "/tokens/turns/1/observation_spans", [[0, 2], [2, 2], [2, 4]])
    convert_record(document, RolloutTrace, "trace")


def test_trace_may_hold_no_tokens(document: dict[str, Any]) -> None:
    put(document, "/tokens", None)
    assert convert_record(document, RolloutTrace, "trace").tokens is None


texts = st.lists(
    st.text(st.characters(codec="utf-8"), max_size=8), min_size=1, max_size=4
)


@given(texts, st.booleans())
def test_any_episode_can_be_put_together_again(
    turns: list[str], observed: bool
) -> None:
    """The trace holds every id of every turn, whatever the texts."""
    messages = [SYSTEM, USER]
    samples = []
    for text in turns:
        samples.append(toy_sample(messages, text))
        messages = [*messages, ChatMessage(role="assistant", content=text), RESULT]
    trace = token_trace(samples, [observed] * len(turns))
    assert trace is not None
    before = prompt_token_ids(samples)
    assert before is not None
    for turn, sample in zip(trace.turns, samples, strict=True):
        prompt = before[: turn.prompt_prefix] + turn.prompt_token_ids
        before = prompt + turn.action_token_ids
        assert before == sample.provenance.input_token_ids
