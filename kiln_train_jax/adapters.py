"""LoRA adapters as PEFT folders, and the bank slots they are served from.

A folder holds `adapter_config.json` and `adapter_model.safetensors`, as `peft` and
other servers read them: tensors named `base_model.model.` + module + `.lora_A.weight`,
oriented `(out, in)`. The configuration names the served model id and no path, so a
folder means the same wherever it lies; its content digest covers the configuration
without that name, and every tensor.

Training is not handled here, nor who may load what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from kiln_core.canonical import pretty, read_json
from kiln_core.errors import ArtifactError, InvalidRecord
from kiln_train_jax.lora import TARGETS, Lora, Pair, target_shape
from kiln_train_jax.weights import read_safetensors, tensors_digest, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kiln_core.canonical import Sha256
    from kiln_train_jax.config import ModelConfig

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
ATTENTION: Final = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """`adapter_config.json` as PEFT writes it, the members that mean something here."""

    peft_type: str = "LORA"
    task_type: str = "CAUSAL_LM"
    base_model_name_or_path: str
    """The served model id, never a path."""
    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    bias: str = "none"
    fan_in_fan_out: bool = False
    inference_mode: bool = True
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: list[str]


class Adapter(NamedTuple):
    """A loaded adapter."""

    config: AdapterConfig
    lora: Lora
    """2-D float32 leaves, the targets of the folder alone."""
    content_sha256: Sha256


def read_adapter(folder: Path, config: ModelConfig) -> Adapter:
    """Read an adapter folder for a base model.

    Args:
        folder: Holds the two files.
        config: Shape of the base model.

    Raises:
        ArtifactError: A file is missing or malformed, an option is not supported, or a
            tensor does not fit the model.
    """
    document = _read_document(folder)
    adapter_config = _check_config(document)
    tensors = read_safetensors(folder / WEIGHTS_FILE)
    lora = _to_lora(adapter_config, tensors, config)
    return Adapter(adapter_config, lora, _digest(document, tensors))


def write_adapter(
    folder: Path,
    lora: Lora,
    *,
    model_id: str,
    rank: int,
    alpha: float,
) -> Adapter:
    """Write an adapter folder; the folder must exist.

    Args:
        folder: Receives the two files.
        lora: 2-D leaves.
        model_id: Served id of the base model.
        rank: Of every pair.
        alpha: Numerator of the scaling.

    Returns:
        What reading it back gives.
    """
    adapter_config = AdapterConfig(
        base_model_name_or_path=model_id,
        r=rank,
        lora_alpha=alpha,
        target_modules=sorted(lora.layers[0]),
    )
    write_safetensors(to_tensors(lora), folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_bytes(pretty(adapter_config))
    tensors = read_safetensors(folder / WEIGHTS_FILE)
    document = msgspec.to_builtins(adapter_config)
    return Adapter(adapter_config, lora, _digest(document, tensors))


def to_tensors(lora: Lora) -> dict[str, jax.Array]:
    """Return an adapter's tensors by PEFT name, oriented `(out, in)`, float32."""
    tensors = {}
    for layer, pairs in enumerate(lora.layers):
        for target, pair in pairs.items():
            module = _module(layer, target)
            down, up = (np.asarray(part, np.float32).T for part in pair)
            tensors[f"{PREFIX}{module}.lora_A.weight"] = jnp.asarray(down)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = jnp.asarray(up)
    return tensors


def into_bank(bank: Lora, slot: int, lora: Lora | None) -> Lora:
    """Return a bank with one slot replaced.

    Args:
        bank: Factors with a leading slot axis.
        slot: Which, from 1.
        lora: 2-D leaves of at most the bank's rank; None clears the slot.

    Returns:
        A new bank; ranks beyond the adapter's own, and untouched targets, are zero.
    """
    layers = []
    for layer, pairs in enumerate(bank.layers):
        own = {} if lora is None else lora.layers[layer]
        layers.append(
            {target: _padded(pair, own.get(target)) for target, pair in pairs.items()}
        )
    scale = jnp.float32(0.0) if lora is None else lora.scale
    placed: Lora = _place(bank, np.int32(slot), Lora(tuple(layers), scale))
    return placed


@jax.jit
def _place(bank: Lora, slot: jax.Array, one: Lora) -> Lora:
    """Write one adapter over a slot of every bank array."""
    placed: Lora = jax.tree.map(lambda many, own: many.at[slot].set(own), bank, one)
    return placed


def _padded(pair: Pair, own: Pair | None) -> Pair:
    """Return factors of the bank's rank, zero beyond the adapter's own."""
    down = np.zeros(pair.down.shape[1:], np.float32)
    up = np.zeros(pair.up.shape[1:], np.float32)
    if own is not None:
        rank = own.down.shape[1]
        down[:, :rank], up[:rank] = own.down, own.up
    return Pair(jnp.asarray(down), jnp.asarray(up))


def _read_document(folder: Path) -> dict[str, Any]:
    """Read the configuration file.

    Raises:
        ArtifactError: It is missing.
        InvalidRecord: It is no JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        document = read_json(path.read_bytes(), CONFIG_FILE)
    except OSError as error:
        raise ArtifactError(f"{CONFIG_FILE} cannot be read", file=str(path)) from error
    if not isinstance(document, dict):
        raise InvalidRecord(f"{CONFIG_FILE} is not a JSON object", file=str(path))
    return document


def _check_config(document: dict[str, Any]) -> AdapterConfig:
    """Check that the adapter means what this package computes.

    Raises:
        InvalidRecord: It is no plain LoRA.
    """
    if isinstance(document.get("target_modules"), str):
        raise InvalidRecord("target_modules must be a list of projection names")
    try:
        config = msgspec.convert(document, AdapterConfig)
    except msgspec.ValidationError as error:
        raise InvalidRecord(f"{CONFIG_FILE} is not usable: {error}") from error
    unknown = sorted(set(config.target_modules) - set(TARGETS))
    refused = {
        f"peft_type {config.peft_type}": config.peft_type != "LORA",
        f"bias {config.bias}": config.bias != "none",
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "fan_in_fan_out": config.fan_in_fan_out,
        "modules_to_save": bool(config.modules_to_save),
        "rank_pattern or alpha_pattern": bool(
            config.rank_pattern or config.alpha_pattern
        ),
        f"target modules {', '.join(unknown)}": bool(unknown),
        f"rank {config.r}": config.r < 1,
    }
    for option, present in refused.items():
        if present:
            raise InvalidRecord(
                f"the adapter uses {option}, which is not supported",
                hint="supported: plain LoRA on the attention and MLP projections",
            )
    return config


def _to_lora(
    adapter_config: AdapterConfig,
    tensors: Mapping[str, np.ndarray],
    config: ModelConfig,
) -> Lora:
    """Turn tensors into factors, each checked against the model.

    Raises:
        InvalidRecord: A tensor is missing, left over, or of a wrong shape.
    """
    rank = adapter_config.r
    left = dict(tensors)
    layers = []
    for layer in range(config.num_hidden_layers):
        pairs = {}
        for target in adapter_config.target_modules:
            inputs, outputs = target_shape(config, target)
            module = _module(layer, target)
            down = _take(left, f"{PREFIX}{module}.lora_A.weight", (rank, inputs))
            up = _take(left, f"{PREFIX}{module}.lora_B.weight", (outputs, rank))
            pairs[target] = Pair(jnp.asarray(down.T), jnp.asarray(up.T))
        layers.append(pairs)
    if left:
        raise InvalidRecord(f"tensor {min(left)} has no place in this model")
    return Lora(tuple(layers), jnp.float32(adapter_config.lora_alpha / rank))


def _take(
    tensors: dict[str, np.ndarray], name: str, shape: tuple[int, int]
) -> np.ndarray:
    """Remove one tensor from a mapping as float32.

    Raises:
        InvalidRecord: It is missing, of a wrong shape, or not finite.
    """
    tensor = tensors.pop(name, None)
    if tensor is None or tensor.shape != shape:
        found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
        raise InvalidRecord(
            f"adapter tensor {name} is {found}, the model asks for {list(shape)}",
            hint="the adapter belongs to another base model",
        )
    values = tensor.astype(np.float32)
    if not np.isfinite(values).all():
        raise InvalidRecord(f"adapter tensor {name} holds values that are not finite")
    return values


def _module(layer: int, target: str) -> str:
    block = "self_attn" if target in ATTENTION else "mlp"
    return f"model.layers.{layer}.{block}.{target}"


def _digest(document: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> Sha256:
    """Digest an adapter: its configuration without the base's name, its tensors."""
    kept = {
        name: value
        for name, value in document.items()
        if name != "base_model_name_or_path"
    }
    return tensors_digest(kept, tensors)
