"""Low-rank adapters as plain pytrees: one to train, a bank of them to serve.

A projection `y = x W` becomes `y = x W + (x A) B * alpha / rank` (Hu et al. 2021,
"LoRA", 2106.09685, section 4.1). The trainer holds one adapter with 2-D leaves (Muon
orthogonalises matrices and silently hands stacks to Adam); the engine holds a bank
with a leading slot axis, in which slot 0 is the base model: zeros. The same `project`
serves both.

Reading and writing adapter folders is not handled here (`adapters.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from kiln_train_jax.config import ModelConfig

TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
"""Every projection an adapter may touch, by its Hugging Face name."""


class Pair(NamedTuple):
    """The two factors of one projection's update."""

    down: jax.Array
    """A: `[in, rank]`, or `[slots, in, rank]` in a bank."""
    up: jax.Array
    """B: `[rank, out]`, or with the same leading axis as `down`."""


class Lora(NamedTuple):
    """Factors of every layer, and the scaling that multiplies their product."""

    layers: tuple[dict[str, Pair], ...]
    """One mapping a layer, from target name to its factors."""
    scale: jax.Array
    """alpha / rank: float32 scalar, or `[slots]`; of a bank applied to rows
    `[slots, rows, 1]`, zero where a row has another adapter."""


def target_shape(config: ModelConfig, target: str) -> tuple[int, int]:
    """Return `(in, out)` of one projection."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }[target]


def init(
    config: ModelConfig,
    *,
    rank: int,
    alpha: float,
    key: jax.Array,
    targets: tuple[str, ...] = TARGETS,
) -> Lora:
    """Return a fresh adapter: A uniform in +-sqrt(3 / in), B zero, so no change yet.

    Args:
        config: Shape of the base model.
        rank: Columns of A and rows of B.
        alpha: Numerator of the scaling alpha / rank.
        key: PRNG key that alone decides the values.
        targets: Names from `TARGETS`.

    Returns:
        Float32 factors with 2-D leaves and a scalar scale.
    """
    layers = []
    for layer in range(config.num_hidden_layers):
        pairs = {}
        for position, target in enumerate(targets):
            inputs, outputs = target_shape(config, target)
            leaf = jax.random.fold_in(key, layer * len(TARGETS) + position)
            bound = (3.0 / inputs) ** 0.5
            down = jax.random.uniform(leaf, (inputs, rank), minval=-bound, maxval=bound)
            pairs[target] = Pair(down, jnp.zeros((rank, outputs), jnp.float32))
        layers.append(pairs)
    return Lora(tuple(layers), jnp.float32(alpha / rank))


def resized(lora: Lora, fresh: Lora) -> Lora:
    """Return the same function with the rank and scaling of a fresh adapter.

    The columns added to A are the fresh adapter's and the rows added to B zero: they
    add nothing yet, and have a gradient, which zeros in both would not. B takes up the
    change of scaling, exactly where that is a power of two.

    Args:
        lora: 2-D leaves, of at most the fresh adapter's rank.
        fresh: Of the same base; targets that `lora` leaves alone are dropped.
    """
    factor = lora.scale / fresh.scale
    layers = tuple(
        {target: _padded(pair, pairs[target], factor) for target, pair in own.items()}
        for own, pairs in zip(lora.layers, fresh.layers, strict=True)
    )
    return Lora(layers, fresh.scale)


def _padded(own: Pair, fresh: Pair, factor: jax.Array) -> Pair:
    rank = own.down.shape[1]
    return Pair(
        fresh.down.at[:, :rank].set(own.down), fresh.up.at[:rank].set(own.up * factor)
    )


def empty_bank(config: ModelConfig, *, slots: int, rank: int) -> Lora:
    """Return a bank of `slots` adapters, all zero: every slot is the base model."""

    def pair(target: str) -> Pair:
        inputs, outputs = target_shape(config, target)
        return Pair(
            jnp.zeros((slots, inputs, rank), jnp.float32),
            jnp.zeros((slots, rank, outputs), jnp.float32),
        )

    layers = tuple(
        {target: pair(target) for target in TARGETS}
        for _ in range(config.num_hidden_layers)
    )
    return Lora(layers, jnp.zeros((slots,), jnp.float32))


def select_rows(bank: Lora, rows: jax.Array) -> Lora:
    """Give each row of a batch its adapter.

    Factors are not gathered: a copy a row would be larger than the model itself.

    Args:
        bank: Factors with a leading slot axis.
        rows: int32 `[rows]`, the slot of each row.

    Returns:
        The bank, its scale `[slots, rows, 1]`.
    """
    slots = jnp.arange(bank.scale.shape[0], dtype=rows.dtype)
    own = slots[:, None] == rows
    return Lora(bank.layers, jnp.where(own, bank.scale[:, None], 0.0)[..., None])


def select_one(bank: Lora, slot: jax.Array) -> Lora:
    """Take one adapter out of a bank as 2-D factors; `slot` is an int32 scalar."""
    layers = jax.tree.map(lambda leaf: leaf[slot], bank.layers)
    return Lora(layers, bank.scale[slot])


def project(
    inputs: jax.Array, kernel: jax.Array, pair: Pair | None, scale: jax.Array
) -> jax.Array:
    """Apply one projection with its low-rank update.

    Args:
        inputs: `[rows, time, in]`.
        kernel: `[in, out]`.
        pair: Factors of this projection, or None for the base alone.
        scale: alpha / rank, a scalar, or of a bank `[slots, rows, 1]`.

    Returns:
        `[rows, time, out]` in the dtype of `inputs`.
    """
    # One 2-D product: XLA's gradient of a 3-D one is 1.7 times slower on CPU.
    flat = inputs.reshape(-1, inputs.shape[-1])
    outputs = flat @ kernel
    if pair is not None and pair.down.ndim == 2:
        outputs += (((flat @ pair.down) @ pair.up) * scale).astype(outputs.dtype)
    elif pair is not None:
        outputs += _of_bank(flat, pair, scale, inputs.shape[1]).astype(outputs.dtype)
    return outputs.reshape(*inputs.shape[:-1], -1)


def _of_bank(flat: jax.Array, pair: Pair, scale: jax.Array, time: int) -> jax.Array:
    """Return the update of each row by its own adapter.

    The adapters that rows have are applied one after the other to every row, and each
    row keeps its own: what others compute on it may not be finite, and never reaches
    it. So its bits do not depend on which adapters its neighbours have, and the cost
    grows with the adapters in use and not with those loaded.

    Args:
        flat: `[rows * time, in]`.
        pair: Factors with a leading slot axis.
        scale: `[slots, rows, 1]`.
        time: Consecutive entries of `flat` that belong to one row.
    """
    shares = jnp.repeat(scale, time, axis=1)
    used = jnp.any(scale != 0, axis=(1, 2))
    used_first = jnp.argsort(~used, stable=True)

    def apply(index: jax.Array, updates: jax.Array) -> jax.Array:
        slot = used_first[index]
        update = ((flat @ pair.down[slot]) @ pair.up[slot]) * shares[slot]
        return jnp.where(shares[slot] != 0, update, updates)

    update_type = jnp.result_type(flat, pair.down, shares, pair.up)
    none = jnp.zeros((flat.shape[0], pair.up.shape[-1]), update_type)
    updated: jax.Array = jax.lax.fori_loop(0, jnp.sum(used), apply, none)
    return updated
