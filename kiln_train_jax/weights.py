"""Model weights between safetensors files and the decoder's parameters.

Loading follows one rule instead of a table: a parameter's path is its tensor's name
under `model.`, and a kernel is the transpose of the stored weight. A folder holds one
`model.safetensors`, or shards listed by `model.safetensors.index.json`. Every tensor is
checked for its name, shape and finiteness; none may be missing or left over.

Other containers only need to produce the same mapping from tensor name to array.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.flax import save

from kiln_core.canonical import digest_json
from kiln_core.errors import FileUnreadable, InvalidRecord
from kiln_train_jax.model import Decoder

if TYPE_CHECKING:
    from pathlib import Path

    import jax

    from kiln_core.canonical import Sha256
    from kiln_train_jax.config import ModelConfig

Tensors: TypeAlias = Mapping[str, np.ndarray]

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
DTYPES: Final = frozenset({"float32", "float16", "bfloat16"})


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Read every tensor of a model folder, in the dtype of the file.

    Raises:
        FileUnreadable: A weight file is missing.
        InvalidRecord: A file is truncated or no safetensors file.
    """
    tensors: dict[str, np.ndarray] = {}
    for path in _weight_files(folder):
        tensors.update(read_safetensors(path))
    return tensors


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read one safetensors file.

    Raises:
        FileUnreadable: It is missing.
        InvalidRecord: It is truncated or no safetensors file.
    """
    if not path.is_file():
        raise FileUnreadable(f"{path.name} is missing", file=str(path))
    try:
        with safe_open(path, framework="flax") as file:
            return {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise InvalidRecord(
            f"{path.name} is not a complete safetensors file: {error}", file=str(path)
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, sharded or not.

    Raises:
        FileUnreadable: There is neither a single file nor an index.
        InvalidRecord: The index is not usable.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() or not index.is_file():
        return [single]
    try:
        shards = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except msgspec.DecodeError as error:
        raise InvalidRecord(f"{INDEX} is not usable: {error}") from error
    names = sorted(set(shards.values()))
    if any(set(name) & set("/\\\0") or name.startswith(".") for name in names):
        raise InvalidRecord(f"{INDEX} names a file outside of the folder")
    return [folder / name for name in names]


class _Index(msgspec.Struct):
    """The part of a shard index that matters."""

    weight_map: dict[str, str]


def build(config: ModelConfig, tensors: Tensors, *, dtype: jnp.dtype) -> Decoder:
    """Put tensors into a decoder.

    Args:
        config: Shape of the model.
        tensors: By Hugging Face name, kernels `[out, in]`.
        dtype: Dtype of the parameters in memory.

    Raises:
        InvalidRecord: A tensor is missing, left over, of a wrong shape or dtype, or
            not finite.
    """
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    wanted = {_name(path): (path, leaf) for path, leaf in flat}
    _check_names(config, wanted.keys(), tensors.keys())
    loaded = [
        (path, leaf.replace(_parameter(name, tensors[name], leaf.shape, dtype)))
        for name, (path, leaf) in wanted.items()
    ]
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def _parameter(
    name: str, tensor: np.ndarray, shape: tuple[int, ...], dtype: jnp.dtype
) -> jax.Array:
    """Return one parameter from its tensor.

    Raises:
        InvalidRecord: Its shape, dtype or values are wrong.
    """
    oriented = np.ascontiguousarray(tensor.T if _transposed(name) else tensor)
    if oriented.shape != shape or str(tensor.dtype) not in DTYPES:
        raise InvalidRecord(
            f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, "
            f"the configuration asks for {list(shape)}"
        )
    if not np.isfinite(oriented.astype(np.float32)).all():
        raise InvalidRecord(f"tensor {name} holds values that are not finite")
    return jnp.asarray(oriented.astype(dtype))


def random_tensors(config: ModelConfig, *, seed: int) -> dict[str, np.ndarray]:
    """Return float32 tensors of a model that has learnt nothing.

    The stream is numpy's frozen legacy generator, so a seed means the same weights
    everywhere: kernels normal with variance 1 / inputs, embedding 0.02, gains one.
    """
    stream = np.random.RandomState(seed)
    tensors = {}
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    for path, leaf in nnx.to_flat_state(state):
        name, shape = _name(path), leaf.shape
        if len(shape) == 1:
            values = np.ones(shape)
        elif name == "model.embed_tokens.weight":
            values = stream.standard_normal(shape) * 0.02
        else:
            values = stream.standard_normal(shape[::-1]) * shape[0] ** -0.5
        tensors[name] = values.astype(np.float32)
    return tensors


def to_tensors(model: Decoder, *, dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Return the tensors of a decoder by Hugging Face name, kernels `[out, in]`."""
    _, state = nnx.split(model)
    tensors = {}
    for path, leaf in nnx.to_flat_state(state):
        name = _name(path)
        values = leaf[...].T if _transposed(name) else leaf[...]
        tensors[name] = jnp.asarray(values, dtype)
    return tensors


def write_safetensors(tensors: Mapping[str, jax.Array], path: Path) -> None:
    """Write tensors to one file, names sorted, so that equal input is equal bytes."""
    path.write_bytes(save(dict(sorted(tensors.items())), metadata={"format": "pt"}))


def tensors_digest(config: object, tensors: Tensors) -> Sha256:
    """Digest a configuration and every tensor: name, dtype, shape, bytes.

    Args:
        config: JSON form of the configuration.
        tensors: By name, in the dtype of their file.
    """
    return _digest_of(config, {name: _row(each) for name, each in tensors.items()})


class ReadOnce(Mapping[str, np.ndarray]):
    """Tensors that are costly to read, digested on the way to where they go."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._rows: dict[str, list[object]] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        self._rows[name] = _row(tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def digest(self, config: object) -> Sha256:
        """Return what `tensors_digest` would of all tensors read so far."""
        return _digest_of(config, self._rows)


def _digest_of(config: object, rows: Mapping[str, list[object]]) -> Sha256:
    named = [[name, *row] for name, row in sorted(rows.items())]
    return digest_json({"config": config, "tensors": named})


def _row(tensor: np.ndarray) -> list[object]:
    """Return what a digest says of one tensor: dtype, shape, digest of its bytes."""
    content = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    return [
        str(tensor.dtype),
        list(tensor.shape),
        hashlib.sha256(content).hexdigest(),
    ]


def _check_names(
    config: ModelConfig, wanted: Collection[str], found: Collection[str]
) -> None:
    """Check that a file holds exactly the tensors of its architecture.

    Raises:
        InvalidRecord: One is missing or left over.
    """
    needed, present = set(wanted), set(found)
    if config.tie_word_embeddings:
        present.discard("lm_head.weight")  # some files repeat the tied embedding
    for problem, names in (
        ("is missing from the weights", needed - present),
        ("has no place in this architecture", present - needed),
    ):
        if names:
            raise InvalidRecord(f"tensor {min(names)} {problem}")


def _name(path: tuple[object, ...]) -> str:
    """Return the Hugging Face name of a parameter path."""
    parts = [str(part) for part in path]
    if parts[-1] == "kernel":
        parts[-1] = "weight"
    elif parts == ["embed_tokens"]:
        parts.append("weight")
    prefix = [] if parts[0] == "lm_head" else ["model"]
    return ".".join([*prefix, *parts])


def _transposed(name: str) -> bool:
    """Tell whether a tensor is stored as the transpose of its kernel."""
    return name.endswith("_proj.weight") or name == "lm_head.weight"
