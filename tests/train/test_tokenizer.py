from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer as HuggingFaceTokenizer

from kiln_core.errors import InvalidRecord
from kiln_train_jax.tokenizer import (
    SPECIAL_BYTE_TOKENS,
    THINK_TOKENS,
    Tokenizer,
    byte_document,
)

BYTES = Tokenizer(byte_document(), vocab_size=272)


@given(st.text())
def test_byte_text_round_trips(text):
    ids = BYTES.encode_text(text)
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


@pytest.mark.parametrize("marker", [*SPECIAL_BYTE_TOKENS, *THINK_TOKENS])
def test_marker_in_foreign_text_stays_bytes(marker):
    assert BYTES.encode_text(f"a{marker}b") == list(f"a{marker}b".encode())


@pytest.mark.parametrize("marker", [*SPECIAL_BYTE_TOKENS, *THINK_TOKENS])
def test_marker_in_markup_is_one_token(marker):
    (token,) = BYTES.encode_markup(marker)
    assert token >= 256
    assert BYTES.id_of(marker) == token
    assert BYTES.decode([token]) == marker


def test_document_opens_in_a_plain_loader():
    loaded = HuggingFaceTokenizer.from_str(byte_document().decode())
    assert loaded.encode("<|user|>hé").ids == [263, 104, 195, 169]
    assert loaded.decode([104, 195, 169]) == "hé"


def test_bytes_have_llguidance_byte_ids():
    ours = LLTokenizer(byte_document().decode(), n_vocab=272, eos_token=266)
    theirs = LLTokenizer("byte")
    text = 'caf\u00e9 {"k":1}'
    assert ours.tokenize_str(text) == theirs.tokenize_str(text)


def test_invalid_utf8_decodes_without_failing():
    assert BYTES.decode([0xFF, 65]) == "\ufffdA"


def test_more_tokens_than_embedding_rows_is_refused():
    with pytest.raises(InvalidRecord, match="269 tokens, the model 256"):
        Tokenizer(byte_document(), vocab_size=256)


def test_damaged_document_is_refused():
    with pytest.raises(InvalidRecord, match=r"tokenizer\.json"):
        Tokenizer(byte_document()[:-5], vocab_size=272)
