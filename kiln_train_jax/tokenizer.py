"""Text to token ids and back, with special tokens under our control.

A tokenizer is a Hugging Face `tokenizer.json`. Two encoders are built from it: one that
knows the added tokens, for what the chat template itself writes, and one that has been
made to forget them, for everything a user, a tool or an environment says. A planted
`</think>` or role marker is then a run of ordinary bytes, whatever flags the file gives
that token.

`byte_document` writes the tokenizer of the embedded models: one token a byte, in the
order that llguidance calls its byte vocabulary, then role and thinking tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer as HuggingFaceTokenizer

from kiln_core.canonical import canonical_bytes, digest, read_json
from kiln_core.errors import InvalidRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

SPECIAL_BYTE_TOKENS: Final = (
    "<|reserved_0|>",
    "<|reserved_1|>",
    "<|reserved_2|>",
    "<|reserved_3|>",
    "<|reserved_4|>",
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
)
"""Ids 256 and up of the byte vocabulary."""

THINK_TOKENS: Final = ("<think>", "</think>")
"""Ids after those; not special, as in Qwen3: they are part of what a model says."""

BYTE_VOCABULARY: Final = 272
"""Embedding rows of the embedded models; the last three stand for no token."""


class Tokenizer:
    """A vocabulary, its two encoders and its decoder."""

    def __init__(self, document: bytes, *, vocab_size: int) -> None:
        """Build from the bytes of a `tokenizer.json`.

        Args:
            document: The file.
            vocab_size: Rows of the model's embedding.

        Raises:
            InvalidRecord: The file is no tokenizer, or has more tokens than the model.
        """
        self.document = document
        self.vocab_size = vocab_size
        self.sha256 = digest(document)
        try:
            parsed = read_json(document, "tokenizer.json")
            self._aware = HuggingFaceTokenizer.from_str(document.decode())
            self._plain = HuggingFaceTokenizer.from_str(_without_added(parsed))
        except Exception as error:  # tokenizers raises Exception itself
            raise InvalidRecord(f"tokenizer.json cannot be used: {error}") from error
        for encoder in (self._aware, self._plain):
            encoder.no_padding()
            encoder.no_truncation()
        self.added: dict[str, int] = {
            token["content"]: token["id"] for token in parsed.get("added_tokens", ())
        }
        """Every added token by its text."""
        self.special_ids: frozenset[int] = frozenset(
            token["id"] for token in parsed.get("added_tokens", ()) if token["special"]
        )
        """Ids of the tokens flagged special: markers, not text."""
        self.size = self._aware.get_vocab_size(with_added_tokens=True)
        highest = max(self._aware.get_vocab(with_added_tokens=True).values(), default=0)
        if max(self.size, highest + 1) > vocab_size:
            raise InvalidRecord(
                f"the tokenizer has {max(self.size, highest + 1)} tokens, "
                f"the model {vocab_size}",
                hint="tokenizer.json and config.json must be of one model",
            )

    def encode_text(self, text: str) -> list[int]:
        """Encode foreign text: nothing in it becomes a special token."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the characters `[start, stop)` of foreign text each id stands for."""
        return list(self._plain.encode(text, add_special_tokens=False).offsets)

    def encode_markup(self, text: str) -> list[int]:
        """Encode text of the chat template: special tokens are recognised."""
        return list(self._aware.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, special tokens included; never fails."""
        return str(self._aware.decode(list(ids), skip_special_tokens=False))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, None if there is none."""
        found = self._aware.token_to_id(token)
        return None if found is None else int(found)

    def has(self, token_id: int) -> bool:
        """Tell whether an id stands for a token at all."""
        return self._aware.id_to_token(token_id) is not None


def _without_added(parsed: dict[str, Any]) -> str:
    """Return a tokenizer document that knows no added token."""
    bare = {**parsed, "added_tokens": [], "post_processor": None}
    model = parsed["model"]
    if model.get("ignore_merges"):  # then the vocabulary alone recognises a marker
        added = {token["content"] for token in parsed.get("added_tokens", ())}
        kept = {text: i for text, i in model["vocab"].items() if text not in added}
        bare["model"] = {**model, "vocab": kept}
    return canonical_bytes(bare).decode()


def byte_document() -> bytes:
    """Return the `tokenizer.json` of the embedded byte-level models."""
    names = (*SPECIAL_BYTE_TOKENS, *THINK_TOKENS)
    document = bpe_document(
        vocabulary={text: place for place, text in enumerate(byte_alphabet())},
        merges=[],
        added=[
            (name, 256 + place, name in SPECIAL_BYTE_TOKENS)
            for place, name in enumerate(names)
        ],
        pre_tokenizer=byte_level(use_regex=False),
    )
    return canonical_bytes(document)


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    """Return the step that spells bytes as characters, cutting words or not."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": use_regex,
    }


def bpe_document(
    *,
    vocabulary: dict[str, int],
    merges: list[list[str]],
    added: list[tuple[str, int, bool]],
    pre_tokenizer: dict[str, Any],
    ignore_merges: bool = False,
) -> dict[str, Any]:
    """Return the `tokenizer.json` of a byte-level BPE.

    Args:
        vocabulary: Ids by token, bytes spelled as `byte_alphabet` does.
        merges: Pairs, the first to apply first.
        added: Text, id, and whether it is special, of every added token.
        pre_tokenizer: How text is cut before merges apply.
        ignore_merges: A piece that is a token as a whole is that token.
    """
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                **plain,
                "id": place,
                "content": text,
                "normalized": False,
                "special": special,
            }
            for text, place, special in added
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": byte_level(use_regex=False),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of each byte that byte-level BPE uses.

    Printable Latin-1 characters stand for themselves, the rest follow from U+0100 in
    order: the mapping every ByteLevel tokenizer file is written with.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [
        chr(value) if value in printable else chr(next(spare)) for value in range(256)
    ]
