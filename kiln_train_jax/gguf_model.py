"""A model out of a GGUF file, in the terms of a Hugging Face folder.

Everything a folder says in several files is derived from the one: a configuration
document, tensors under their Hugging Face names, a `tokenizer.json`, the chat template
and the tokens that end a turn. The rest of the package cannot tell the difference.

Two things are not as they seem. The `llama` architecture stores the rows of its query
and key projections in the interleaved order of its rotation; they are put back, and
those of `qwen3` left alone. And the file names its pre-tokenizer instead of describing
it: one that is not in `PRE_TOKENIZERS` is refused, because a near miss would feed the
model other tokens without anybody noticing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kiln_core.canonical import canonical_bytes
from kiln_core.errors import InvalidRecord
from kiln_train_jax.config import ARCHITECTURES
from kiln_train_jax.gguf_file import GgufFile, read_gguf
from kiln_train_jax.tokenizer import bpe_document, byte_level

if TYPE_CHECKING:
    from pathlib import Path

INTERLEAVED: Final = frozenset({"llama"})
"""Architectures whose query and key rows are stored in rotation order."""

_MODULES: Final = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face modules by their name in the file."""

_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}@|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen and Llama 3 cut text; @ is how many digits stay together."""


class PreTokenizer(NamedTuple):
    """How text is cut before merges apply, as `tokenizer.json` says it."""

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    """A piece that is a token as a whole is that token."""


def _split(digits: str) -> dict[str, Any]:
    pattern = {"Regex": _SPLIT.replace("@", digits)}
    return {
        "type": "Split",
        "pattern": pattern,
        "behavior": "Isolated",
        "invert": False,
    }


PRE_TOKENIZERS: Final = {
    "gpt-2": PreTokenizer((byte_level(use_regex=True),)),
    "smollm": PreTokenizer(
        ({"type": "Digits", "individual_digits": True}, byte_level(use_regex=True))
    ),
    "qwen2": PreTokenizer(
        (_split(""), byte_level(use_regex=False)), normalizer={"type": "NFC"}
    ),
    "llama-bpe": PreTokenizer(
        (_split("{1,3}"), byte_level(use_regex=False)), ignore_merges=True
    ),
}
"""Pre-tokenizers by the name the file gives them."""

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types that occur in byte-level vocabularies."""


class GgufModel(NamedTuple):
    """The parts of a folder."""

    config: dict[str, Any]
    """As `config.json`."""
    tensors: Mapping[str, np.ndarray]
    """float32 by Hugging Face name, dequantised when read."""
    tokenizer: bytes
    """As `tokenizer.json`."""
    tokenizer_config: dict[str, Any]
    """As `tokenizer_config.json`, the chat template included."""
    generation_config: dict[str, Any]
    """As `generation_config.json`."""


def read_model(path: Path) -> GgufModel:
    """Read a GGUF file of a supported architecture.

    Raises:
        FileUnreadable: It is missing.
        InvalidRecord: It is truncated, or its model or tokenizer is not supported.
    """
    file = read_gguf(path)
    config = config_document(file)
    tokens = _Metadata(file.metadata).tokens()
    return GgufModel(
        config,
        HuggingFaceTensors(file, config),
        tokenizer_document(file.metadata),
        _tokenizer_config(file.metadata, tokens),
        {"eos_token_id": _end_ids(file.metadata)},
    )


def config_document(file: GgufFile) -> dict[str, Any]:
    """Return the `config.json` that a file's metadata amounts to.

    Raises:
        InvalidRecord: A key is missing, of another type, or asks for what no folder of
            these architectures could.
    """
    kind = file.metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise InvalidRecord(
            f"the GGUF architecture {kind!r} is not supported",
            hint="supported: qwen3 and llama",
        )
    about = _Metadata(file.metadata, f"{kind}.")
    _refuse_variants(about)
    hidden, heads = about.whole("embedding_length"), about.whole("attention.head_count")
    width = about.whole("attention.key_length", hidden // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if about.whole(name, width) != width:
            raise InvalidRecord(f"{about.prefix}{name} is not the head's {width}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidRecord("tensor token_embd.weight is missing from the weights")
    return {
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": about.whole("feed_forward_length"),
        "num_hidden_layers": about.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": about.whole("attention.head_count_kv", heads),
        "head_dim": width,
        "rms_norm_eps": about.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": about.real("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "max_position_embeddings": about.whole("context_length"),
    }


def _refuse_variants(about: _Metadata) -> None:
    """Refuse keys that would change the forward pass.

    Raises:
        InvalidRecord: Such a key is set.
    """
    scaling = about.values.get(f"{about.prefix}rope.scaling.type", "none")
    refused = {
        f"rope scaling {scaling!r}": scaling != "none",
        "experts": bool(about.whole("expert_count", 0)),
        "a sliding window": bool(about.whole("attention.sliding_window", 0)),
    }
    for option, present in refused.items():
        if present:
            raise InvalidRecord(
                f"the model uses {option}, which is not supported",
                hint="supported: Qwen3 dense and Llama without scaling or biases",
            )


class HuggingFaceTensors(Mapping[str, np.ndarray]):
    """Tensors under their Hugging Face names, dequantised one at a time.

    Nothing is kept, so that loading needs little more memory than the model itself.
    """

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file = file
        self._config = config
        self._stored = {hugging_face_name(name): name for name in file.tensors}

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._file.dequantised(self._stored[name])
        if self._config["model_type"] not in INTERLEAVED:
            return tensor
        if name.endswith("q_proj.weight"):
            return _unpermuted(tensor, self._config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            return _unpermuted(tensor, self._config["num_key_value_heads"])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def hugging_face_name(name: str) -> str:
    """Return a tensor's Hugging Face name; an unknown one stays as it is."""
    if name == "output.weight":
        return "lm_head.weight"
    *layer, module, kind = name.split(".")
    if kind != "weight" or module not in _MODULES:
        return name
    within = f"layers.{layer[-1]}." if layer else ""
    return f"model.{within}{_MODULES[module]}.weight"


def _unpermuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in half-split order, from pairs that lie side by side.

    Raises:
        InvalidRecord: The rows cannot be shared out over the heads.
    """
    rows, inputs = tensor.shape[0], tensor.shape[-1]
    if tensor.ndim != 2 or rows % (2 * heads):
        raise InvalidRecord(
            f"a projection of shape {list(tensor.shape)} cannot be cut into "
            f"{heads} heads"
        )
    pairs = tensor.reshape(heads, rows // heads // 2, 2, inputs)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, inputs))


def tokenizer_document(metadata: Mapping[str, Any]) -> bytes:
    """Return the `tokenizer.json` of a file's vocabulary.

    Raises:
        InvalidRecord: The kind of tokenizer or its pre-tokenizer is not known, or the
            vocabulary is not whole.
    """
    about = _Metadata(metadata, "tokenizer.ggml.")
    kind, name = about.values.get(f"{about.prefix}model"), about.pre_tokenizer()
    if kind != "gpt2" or name not in PRE_TOKENIZERS:
        raise InvalidRecord(
            f"the GGUF tokenizer {kind!r} with pre-tokenizer {name!r} is not known",
            hint=f"known: gpt2 with one of {', '.join(sorted(PRE_TOKENIZERS))}",
        )
    tokens = about.tokens()
    kinds = about.items("token_type", int) or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise InvalidRecord("the GGUF vocabulary is not whole: types or names repeat")
    merges = [merge.split(" ", 1) for merge in about.items("merges", str)]
    if any(len(pair) != 2 for pair in merges):
        raise InvalidRecord("the GGUF vocabulary holds a merge of one part")
    added = [
        (token, place, kind == CONTROL)
        for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in {CONTROL, USER_DEFINED}
    ]
    cut = PRE_TOKENIZERS[name]
    document = bpe_document(
        vocabulary={
            token: place
            for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind != UNUSED
        },
        merges=merges,
        added=added,
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(cut.steps)},
        ignore_merges=cut.ignore_merges,
    )
    return canonical_bytes({**document, "normalizer": cut.normalizer})


def _tokenizer_config(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Return the special tokens by their role, and the chat template.

    Raises:
        InvalidRecord: There is no chat template.
    """
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        raise InvalidRecord(
            "the model has no chat template", hint="use an instruction-tuned model"
        )
    named = {
        f"{role}_token": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("pad", "padding"),
            ("unk", "unknown"),
        )
    }
    texts = {
        role: tokens[place]
        for role, place in named.items()
        if isinstance(place, int) and place < len(tokens)
    }
    return {**texts, "chat_template": template}


def _end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a turn."""
    found = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
    return sorted({place for place in found if isinstance(place, int)})


class _Metadata(NamedTuple):
    """Typed access to the keys under a prefix."""

    values: Mapping[str, Any]
    prefix: str = "tokenizer.ggml."

    def whole(self, name: str, default: int | None = None) -> int:
        """Return an integer.

        Raises:
            InvalidRecord: It is missing or something else.
        """
        value = self.values.get(f"{self.prefix}{name}", default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidRecord(f"{self.prefix}{name} is {value!r}, not one integer")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Return a float as the double its shortest decimal names.

        Raises:
            InvalidRecord: It is missing or something else.
        """
        value = self.values.get(f"{self.prefix}{name}", default)
        if not isinstance(value, float):
            raise InvalidRecord(f"{self.prefix}{name} is {value!r}, not a number")
        return float(str(np.float32(value)))

    def items(self, name: str, kind: type) -> list[Any]:
        """Return a list, empty where the key is missing.

        Raises:
            InvalidRecord: It is no list, or holds something else.
        """
        value = self.values.get(f"{self.prefix}{name}", [])
        if not isinstance(value, list) or not all(isinstance(v, kind) for v in value):
            raise InvalidRecord(f"{self.prefix}{name} is no list of {kind.__name__}")
        return value

    def tokens(self) -> list[str]:
        """Return the vocabulary in order.

        Raises:
            InvalidRecord: There is none.
        """
        tokens = self.items("tokens", str)
        if not tokens:
            raise InvalidRecord("the GGUF file has no tokenizer")
        return tokens

    def pre_tokenizer(self) -> str | None:
        """Return the name of the pre-tokenizer, None where the file has none."""
        name = self.values.get(f"{self.prefix}pre")
        return name if isinstance(name, str) else None
