"""Growing text: whole characters only, stop texts wherever they begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln_train_jax.text import GrowingText, StopSearch
from kiln_train_jax.tokenizer import BYTE_VOCABULARY, Tokenizer, byte_document

BYTES = Tokenizer(byte_document(), vocab_size=BYTE_VOCABULARY)


def grown(tokens):
    text = GrowingText(BYTES.decode)
    return text, [text.append(token) for token in tokens]


@given(st.lists(st.integers(0, 268), max_size=40))
def test_pieces_are_the_whole_text_whatever_the_bytes(tokens):
    text, pieces = grown(tokens)
    assert "".join(pieces) == text.settled
    assert text.settled + text.pending == BYTES.decode(tokens)
    assert len(text.starts) == len(text.ends) <= len(tokens)


@given(st.text(max_size=20))
def test_no_piece_splits_a_character(words):
    text, pieces = grown(words.encode())
    if "\N{REPLACEMENT CHARACTER}" not in words:
        assert text.settled == words
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_tokens_know_their_characters():
    text, _ = grown("a☃b".encode())
    assert text.starts == [0, 1, 1, 1, 2]
    assert text.ends == [1, 2, 2, 2, 3]


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_search_finds_what_find_finds(pieces, stops):
    search, said = StopSearch(stops), ""
    for piece in pieces:
        place = search.advance(piece)
        said += piece
        places = [said.find(stop) for stop in stops if stop in said]
        assert place == min(places, default=None)
        if place is not None:
            return
        held = max(
            n
            for stop in stops
            for n in range(len(stop))
            if n <= len(said) and said.endswith(stop[:n])
        )
        assert search.held == held


def test_search_looks_at_pending_text_without_keeping_it():
    search = StopSearch(["xy"])
    assert search.advance("x", "z") is None
    assert search.held == 1
    assert search.advance("", "y") == 0


@pytest.mark.parametrize("stops", [[], ["longer than all"]])
def test_nothing_is_found_in_nothing(stops):
    search = StopSearch(stops)
    assert search.advance("") is None
    assert search.held == 0
