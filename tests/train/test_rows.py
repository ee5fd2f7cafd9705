"""What a row feeds, and when it ends, without any model."""

from __future__ import annotations

import numpy as np
import pytest

from kiln_train_jax.guide import GuideCompiler, mask_of, mask_words
from kiln_train_jax.programs import BLOCK, FEEDS
from kiln_train_jax.rows import Row, Rules, Sampling
from kiln_train_jax.tokenizer import Tokenizer, byte_document

BYTES = Tokenizer(byte_document(), vocab_size=272)
COMPILER = GuideCompiler(BYTES, stop_id=266)
END, CLOSE = 266, 268
SAMPLING = Sampling(seed=1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
FREE = mask_of(range(256), 272)
LAMP = {
    "type": "object",
    "properties": {"lamp": {"type": "integer", "minimum": 0, "maximum": 3}},
    "required": ["lamp"],
}


def row_of(prompt=5, schema=None, **changes):
    fields = {
        "max_tokens": 40,
        "stop_ids": frozenset({END}),
        "end_id": END,
        "free_mask": FREE,
        "close_ids": (CLOSE,),
        "guide": COMPILER.compile(schema, 40) if schema else None,
    }
    return Row([65] * prompt, SAMPLING, Rules(**{**fields, **changes}), BYTES.decode)


def feed_lengths(row):
    lengths = []
    while True:
        feed = row.next_feed()
        lengths.append((len(feed.tokens), feed.length, feed.is_block))
        row.fed += len(feed.tokens)
        if feed.draws:
            return lengths


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (1, [(1, 1, False)]),
        (2, [(2, 16, False)]),
        (17, [(17, BLOCK, False)]),
        (BLOCK, [(BLOCK, BLOCK, False)]),
        (BLOCK + 1, [(BLOCK, BLOCK, True), (1, 1, False)]),
        (2 * BLOCK + 20, [(BLOCK, BLOCK, True)] * 2 + [(20, BLOCK, False)]),
    ],
)
def test_prompt_is_fed_in_blocks_and_a_rest(prompt, expected):
    assert feed_lengths(row_of(prompt)) == expected
    assert {length for _, length, _ in expected} <= {1, *FEEDS}


def test_forced_opening_joins_the_prompt():
    row = row_of(prompt=5, schema=LAMP)
    assert feed_lengths(row) == [(5 + len('{"lamp":'), 16, False)]


def test_guided_action_takes_one_draw():
    row = row_of(schema=LAMP)
    row.take(ord("2"), -1.5)
    assert row.finish_reason == "stop"
    assert bytes(row.action[:-1]) == b'{"lamp":2}'
    assert row.action[-1] == END
    assert row.logprobs == [0.0] * 8 + [-1.5, 0.0, 0.0]


def test_forced_run_and_drawn_token_share_a_feed():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "long_name": {"type": "boolean"}},
        "required": ["a", "long_name"],
    }
    row = row_of(schema=schema)
    feed_lengths(row)
    row.take(ord("t"), -0.5)
    assert feed_lengths(row) == [(1 + len('rue,"long_name":'), BLOCK, False)]


def test_mask_is_free_without_a_guide():
    words = np.zeros(mask_words(272), np.int32)
    row_of().write_mask(words)
    assert np.array_equal(words, FREE)


def test_stop_token_ends_free_speech():
    row = row_of()
    row.take(ord("a"), -1.0)
    row.take(END, -2.0)
    assert row.finish_reason == "stop"


def test_length_ends_free_speech():
    row = row_of(max_tokens=2)
    row.take(ord("a"), -1.0)
    assert row.finish_reason is None
    row.take(ord("b"), -1.0)
    assert row.finish_reason == "length"


def test_stop_text_is_found_across_tokens():
    row = row_of(stop_texts=("yz", "b"))
    for letter in b"axyz":
        assert row.finish_reason is None
        row.take(letter, -1.0)
    assert row.finish_reason == "stop"
    assert row.answer_stop == 2


def test_reasoning_ends_with_its_close_and_the_guide_begins():
    row = row_of(schema=LAMP, thinking=True)
    row.take(ord("h"), -1.0)
    assert row.answer_start is None
    row.take(CLOSE, -2.0)
    assert row.answer_start == 2
    assert bytes(row.action[2:]) == b'{"lamp":'


def test_spent_budget_forces_the_close_without_logprob():
    row = row_of(thinking=True, thinking_budget=2)
    row.take(ord("h"), -1.0)
    row.take(ord("m"), -1.0)
    assert row.action == [ord("h"), ord("m"), CLOSE]
    assert row.logprobs == [-1.0, -1.0, None]
    assert row.answer_start == 3


def test_zero_budget_closes_at_once():
    row = row_of(thinking=True, thinking_budget=0)
    assert row.action == [CLOSE]
    assert row.answer_start == 1


def test_forced_tokens_never_exceed_the_bound():
    row = row_of(schema=LAMP, thinking=True, thinking_budget=3, max_tokens=5)
    for _ in range(3):
        row.take(ord("h"), -1.0)
    assert len(row.action) == 5
    assert row.finish_reason == "length"


def test_action_without_a_choice_needs_no_model():
    row = row_of(
        schema={"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    )
    assert row.finish_reason == "stop"
    assert bytes(row.action[:-1]) == b'{"a":1}'
    assert set(row.logprobs) == {0.0}
