from __future__ import annotations

import numpy as np
import pytest

from kiln_core.canonical import digest_json
from kiln_core.errors import PolicyError
from kiln_train_jax.guide import GuideCompiler, Unguidable, mask_of, mask_words
from kiln_train_jax.narrowing import narrow

LAMP = {
    "type": "object",
    "properties": {"lamp": {"type": "integer", "minimum": 0, "maximum": 3}},
    "required": ["lamp"],
}
END = 266


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GuideCompiler(tokenizer, stop_id=END)


def allowed(state):
    words = np.zeros(mask_words(272), np.int32)
    state.write_mask(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def test_forced_runs_surround_the_one_decision(compiler):
    state = compiler.compile(LAMP, 32).start()
    assert bytes(state.take_forced()) == b'{"lamp":'
    assert bytes(allowed(state).tolist()) == b"0123"
    state.consume([ord("2")])
    assert bytes(state.take_forced()) == b"}"
    assert state.finished


def test_no_white_space_is_allowed(compiler):
    state = compiler.compile({**LAMP, "required": []}, 32).start()
    state.consume([ord("{")])
    assert set(allowed(state).tolist()) == {ord("}"), ord('"')}


def test_states_of_one_guide_are_independent(compiler):
    guide = compiler.compile(LAMP, 32)
    first, second = guide.start(), guide.start()
    first.take_forced()
    first.consume([ord("1")])
    assert bytes(second.take_forced()) == b'{"lamp":'


def test_token_outside_of_the_grammar_is_an_error(compiler):
    state = compiler.compile(LAMP, 32).start()
    state.take_forced()
    with pytest.raises(PolicyError, match="left the grammar"):
        state.consume([ord("x")])


def test_empty_allowed_set_is_an_error(compiler):
    state = compiler.compile(LAMP, 32).start()
    with pytest.raises(PolicyError):
        state.consume([0])
    with pytest.raises(PolicyError, match="no next token"):
        allowed(state)


def test_digest_is_of_the_narrowed_schema(compiler):
    guide = compiler.compile(LAMP, 32)
    assert guide.sha256 == digest_json(narrow(LAMP, 31).schema)


def test_refusal_is_remembered(compiler):
    for _ in range(2):
        with pytest.raises(Unguidable, match="'not'"):
            compiler.compile({"not": {}}, 32)


@pytest.mark.parametrize("tokens", [[0], [31, 32], [271], list(range(272))])
def test_mask_of_names_exactly_its_tokens(tokens):
    words = mask_of(tokens, 272)
    assert words.shape == (mask_words(272),)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == tokens
