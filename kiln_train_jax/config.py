"""The shape of a model, read from a Hugging Face `config.json`.

Decides which checkpoints this package understands: Qwen3 dense and the Llama family
without rope scaling, biases or sliding windows. Anything else is refused with a
sentence naming what is supported, never loaded approximately.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from kiln_core.errors import InvalidRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

ARCHITECTURES: Final = {"qwen3": True, "llama": False}
"""Supported `model_type` values, and whether q and k are normalised per head."""

ROPE_THETA: Final = 10_000.0
"""Rotary base of a `config.json` that does not name one."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the forward pass needs to know about a checkpoint."""

    model_type: str
    """`qwen3` or `llama`."""
    vocab_size: int
    """Rows of the embedding, padding included."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Width of one head; not always hidden_size / num_attention_heads."""
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Longest context in tokens."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a generation, as the config names them."""

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return ARCHITECTURES[self.model_type]

    @classmethod
    def from_hugging_face(cls, document: Mapping[str, Any]) -> Self:
        """Read the members of a `config.json` that matter.

        Args:
            document: The decoded file; unknown members are ignored.

        Raises:
            InvalidRecord: The architecture or one of its options is not supported, a
                member is missing or of the wrong type, or the head counts do not fit.
        """
        kind = document.get("model_type")
        if kind not in ARCHITECTURES:
            raise InvalidRecord(
                f"model_type {kind!r} is not supported",
                hint="supported: Qwen3 dense (qwen3) and the Llama family (llama)",
            )
        _refuse_unsupported(document)
        fields = {name: document[name] for name in _COPIED if name in document}
        fields["rope_theta"] = _rope_theta(document)
        fields["eos_token_ids"] = _as_tuple(document.get("eos_token_id"))
        fields.setdefault("tie_word_embeddings", False)
        fields.setdefault("rms_norm_eps", 1e-6)
        heads, hidden = document.get("num_attention_heads"), document.get("hidden_size")
        fields.setdefault("num_key_value_heads", heads)
        if fields.get("head_dim") is None and isinstance(heads, int) and heads > 0:
            fields["head_dim"] = hidden // heads if isinstance(hidden, int) else 0
        try:
            config = msgspec.convert(fields, cls, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRecord(f"config.json is not usable: {error}") from error
        config._check_sizes()
        return config

    def _check_sizes(self) -> None:
        for name in _SIZES:
            if not 0 < getattr(self, name) < 2**31:
                raise InvalidRecord(f"config.json is not usable: {name} is no size")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidRecord(
                f"{self.num_attention_heads} attention heads cannot be grouped over "
                f"{self.num_key_value_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise InvalidRecord(f"head_dim {self.head_dim} is odd: no rotary halves")


_COPIED: Final = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "max_position_embeddings",
)


_SIZES: Final = tuple(
    name
    for name in (*_COPIED, "rope_theta")
    if name not in {"model_type", "tie_word_embeddings"}
)
"""Members that count or scale something: positive, or there is no model."""


def _refuse_unsupported(document: Mapping[str, Any]) -> None:
    """Refuse options that would change the forward pass.

    Raises:
        InvalidRecord: Such an option is on.
    """
    rope = _rope(document)
    kind = rope.get("rope_type", rope.get("type", "default"))
    shares = (document.get("partial_rotary_factor"), rope.get("partial_rotary_factor"))
    layers = document.get("layer_types") or ["full_attention"]
    refused = {
        f"rope scaling {kind!r}": kind != "default",
        "rotary positions by layer": any(isinstance(v, dict) for v in rope.values()),
        "partial rotary positions": any(share not in {None, 1} for share in shares),
        "layers without full attention": (
            not isinstance(layers, list) or set(map(str, layers)) != {"full_attention"}
        ),
        "attention_bias": bool(document.get("attention_bias")),
        "mlp_bias": bool(document.get("mlp_bias")),
        "use_sliding_window": bool(document.get("use_sliding_window")),
        "quantization_config": bool(document.get("quantization_config")),
        f"hidden_act {document.get('hidden_act')!r}": (
            document.get("hidden_act", "silu") != "silu"
        ),
    }
    for option, present in refused.items():
        if present:
            raise InvalidRecord(
                f"the model uses {option}, which is not supported",
                hint="supported: Qwen3 dense and Llama without scaling or biases",
            )


def _rope(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file says of rotary positions, under either name.

    Raises:
        InvalidRecord: It is no object.
    """
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = document.get(name) or {}
        if not isinstance(value, dict):
            raise InvalidRecord(f"config.json is not usable: {name} is no object")
        found |= value
    return found


def _rope_theta(document: Mapping[str, Any]) -> Any:
    """Return the rotary base, wherever this version of the file keeps it."""
    nested = _rope(document).get("rope_theta")
    return document.get("rope_theta") or nested or ROPE_THETA


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Return an optional id or list of ids as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
