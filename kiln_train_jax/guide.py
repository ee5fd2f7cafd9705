"""Guided decoding: an action schema as the set of tokens allowed next.

`narrowing.py` decides what may be said; llguidance (Microsoft, MIT) compiles that into
masks over the vocabulary. Tokens that leave no choice are handed out in one run, so the
model is not asked for them. An empty allowed set is an error, never "anything goes".

A schema that cannot be narrowed faithfully, or that the compiler refuses, is reported
as `Unguidable` with its reason; the caller decides to go on without a guide.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from kiln_core.actions import ActionSchema
from kiln_core.canonical import canonical_bytes, digest, read_json
from kiln_core.errors import InvalidActionSchema, PolicyError
from kiln_train_jax.narrowing import narrow
from kiln_train_jax.schema_words import CannotNarrow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance._lib import JsonCompileOptions

    from kiln_core.canonical import Sha256
    from kiln_train_jax.tokenizer import Tokenizer

CACHED_GUIDES: Final = 256
WORD_BITS: Final = 32
OPTIONS: Final[JsonCompileOptions] = {"whitespace_flexible": False}


class Unguidable(Exception):
    """A schema that cannot guide decoding; the text says why."""


class Guide:
    """A compiled action schema.

    Attributes:
        sha256: Digest of the canonical narrowed schema.
        max_bytes: Bound on the longest action, and so on its tokens.
        notes: What the narrowing took away.
    """

    def __init__(
        self, vocabulary: LLTokenizer, schema: dict[str, Any], max_bytes: int
    ) -> None:
        """Compile a narrowed schema.

        Raises:
            Unguidable: llguidance cannot express it.
        """
        text = canonical_bytes(schema)
        self.sha256: Sha256 = digest(text)
        self.max_bytes = max_bytes
        self.notes: tuple[str, ...] = ()
        grammar = LLMatcher.grammar_from_json_schema(text.decode(), overrides=OPTIONS)
        self._first = LLMatcher(vocabulary, grammar, log_level=0)
        if self._first.is_error():
            raise Unguidable(_first_line(self._first.get_error()))

    def start(self) -> GuideState:
        """Return the state before the first token of an action."""
        return GuideState(self._first.deep_copy())


class GuideState:
    """Where one action stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

    def take_forced(self) -> list[int]:
        """Return, and move over, the tokens that follow without a choice.

        Raises:
            PolicyError: The grammar is in an error state.
        """
        forced = list(self._matcher.compute_ff_tokens())
        if forced:
            self.consume(forced)
        return forced

    def write_mask(self, words: np.ndarray) -> None:
        """Write the allowed set.

        Args:
            words: int32 `[ceil(vocab / 32)]`, bit b of word w stands for token 32w + b.

        Raises:
            PolicyError: No token is allowed.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error() or not words.any():
            raise PolicyError(
                "the grammar allows no next token: "
                f"{_first_line(self._matcher.get_error())}"
            )

    def consume(self, tokens: Sequence[int]) -> None:
        """Move over sampled or forced tokens.

        Raises:
            PolicyError: The grammar does not allow them.
        """
        if not self._matcher.consume_tokens(list(tokens)):
            raise PolicyError(
                f"a token left the grammar: {_first_line(self._matcher.get_error())}"
            )


class GuideCompiler:
    """Compiles action schemas for one vocabulary, and keeps recent ones."""

    def __init__(self, tokenizer: Tokenizer, *, stop_id: int) -> None:
        """Read the vocabulary.

        Args:
            tokenizer: Names the bytes of every token.
            stop_id: The token that ends a turn.
        """
        self._vocabulary = LLTokenizer(
            tokenizer.document.decode(),
            n_vocab=tokenizer.vocab_size,
            eos_token=stop_id,
        )
        self._compile = lru_cache(CACHED_GUIDES)(self._compile_text)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes a token stands for; of a marker, those of its name."""
        return bytes(self._vocabulary.decode_bytes([token]))

    def compile(self, schema: Any, max_tokens: int) -> Guide:
        """Compile a schema for actions of at most `max_tokens`, stop token included.

        Args:
            schema: JSON Schema of the action; key order does not matter.
            max_tokens: Generation budget of one action.

        Raises:
            Unguidable: It cannot guide.
        """
        outcome = self._compile(canonical_bytes(schema), max_tokens)
        if isinstance(outcome, str):
            raise Unguidable(outcome)
        return outcome

    def _compile_text(self, text: bytes, max_tokens: int) -> Guide | str:
        """Compile canonical bytes; a refusal is remembered as its reason."""
        schema = read_json(text, "the action schema")
        try:
            ActionSchema(schema)  # bounded, self-contained, well-formed
            narrowed = narrow(schema, max_tokens - 1)
            guide = Guide(self._vocabulary, narrowed.schema, narrowed.max_bytes)
        except (CannotNarrow, Unguidable, InvalidActionSchema) as error:
            return str(error)
        except RecursionError:
            return "its references nest too deep"
        guide.notes = narrowed.notes
        return guide


def mask_words(vocab_size: int) -> int:
    """Return how many 32-bit words a mask over `vocab_size` tokens takes."""
    return -(-vocab_size // WORD_BITS)


def mask_of(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return the mask that allows exactly `tokens`: int32 `[words]`."""
    bits = np.zeros(mask_words(vocab_size) * WORD_BITS, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _first_line(text: str) -> str:
    """Return the first line of a compiler message; the rest quotes the grammar."""
    return text.strip().split("\n", 1)[0][:200]
