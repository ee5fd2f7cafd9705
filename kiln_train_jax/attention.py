"""What a layer's queries may look at: its own sequence, or a slot's cache.

One model, three ways to attend, behind one method `attend(layer, q, k, v)`:

* `FullContext` for training and scoring: causal over the fed tokens, behind an
  optional prompt whose keys and values were computed once and are shared by all rows;
* `RowContext` for prefill: one slot's cache, a feed of several tokens;
* `BatchContext` for decode: every slot's cache, one token each.

The cached two read keys in fixed chunks with a running softmax (Milakov and Gimelshein
2018, "Online normalizer calculation for softmax", 1805.02867, algorithm 3), and only as
many chunks as the longest active row needs. A chunk that a row may not see changes
that row by exactly nothing: its maximum stays, the correction is exp(0) = 1 and the
added weights are exp(-huge) = 0. So a row's bits do not depend on how long its
neighbours are, and the cost does not depend on how long the cache is.

Caches are one array a layer, `[slots, kv_heads, seq, head_dim]`: a stacked cache would
be copied every token. `dynamic_update_slice` clamps silently, so a cache must be longer
than the longest sequence plus the largest feed; `cache_length` says how long.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

MASKED = -1e30
"""Score of a forbidden key: large and finite, since -inf gives NaN gradients."""

CHUNK = 128
"""Cache positions read at a time."""


class KeyValue(NamedTuple):
    """Rotated keys and values of one layer, `[rows, kv_heads, seq, head_dim]`."""

    key: jax.Array
    value: jax.Array


class Context(Protocol):
    """What the queries of a forward pass may attend to."""

    def attend(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, KeyValue]:
        """Attend with the queries of one layer.

        Args:
            layer: Index of the layer.
            query: `[rows, kv_heads, group, time, head_dim]`, rotated and scaled.
            key: `[rows, kv_heads, time, head_dim]`, rotated.
            value: As `key`.

        Returns:
            The weighted values, shaped as `query`, and the layer's keys and values
            (the updated cache, where there is one).
        """
        ...


def cache_length(context_tokens: int, largest_feed: int) -> int:
    """Return the cache length for a context: feed included, whole chunks."""
    return -(-(context_tokens + largest_feed) // CHUNK) * CHUNK


class FullContext(NamedTuple):
    """Causal attention over the fed tokens, behind an optional shared prompt."""

    prefix: tuple[KeyValue, ...] | None = None
    """Per layer, `[1 or rows, kv_heads, prefix, head_dim]`."""
    prefix_lengths: jax.Array | None = None
    """int32 `[1 or rows]`: how many prefix positions are real; None means all."""

    def attend(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, KeyValue]:
        """Attend causally; see `Context.attend`."""
        time = query.shape[3]
        causal = jnp.tril(jnp.ones((time, time), bool))
        # Heads lead, so that a prompt shared by all rows is one matrix product a head.
        query, keys, values = (jnp.swapaxes(part, 0, 1) for part in (query, key, value))
        own = jnp.einsum("kbgth,kbsh->kbgts", query, keys)
        parts = [(jnp.where(causal, own.astype(jnp.float32), MASKED), values)]
        if self.prefix is not None:
            parts.append(self._attend_before(query, self.prefix[layer]))
        mixed = _weigh(parts)
        return jnp.swapaxes(mixed, 0, 1).astype(query.dtype), KeyValue(key, value)

    def _attend_before(
        self, query: jax.Array, past: KeyValue
    ) -> tuple[jax.Array, jax.Array]:
        """Return scores against the prefix, `[kv_heads, rows, ...]`, and its values."""
        keys, values = (jnp.swapaxes(part, 0, 1) for part in past)
        scores = _times(query, jnp.swapaxes(keys, -1, -2)).astype(jnp.float32)
        if self.prefix_lengths is None:
            return scores, values
        real: jax.Array = jnp.arange(scores.shape[-1]) < self.prefix_lengths[:, None]
        return jnp.where(real[:, None, None, :], scores, MASKED), values


def _weigh(parts: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Mix the values of several key ranges under one softmax over all of them.

    Args:
        parts: Scores `[kv_heads, rows, group, time, keys]` float32, and values
            `[kv_heads, 1 or rows, keys, head_dim]`, of each range.

    Returns:
        float32 `[kv_heads, rows, group, time, head_dim]`.
    """
    tops = [scores.max(-1, keepdims=True) for scores, _ in parts]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
    total = mixed = jnp.zeros((), jnp.float32)
    for scores, values in parts:
        weights = jnp.exp(scores - top)
        total += weights.sum(-1, keepdims=True)
        mixed += _times(weights.astype(values.dtype), values).astype(jnp.float32)
    return mixed / total


def _times(left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply `[k, rows, group, time, n]` with `[k, 1 or rows, n, m]`."""
    heads, rows, group, time, inner = left.shape
    if right.shape[1] == 1:
        product = left.reshape(heads, -1, inner) @ right[:, 0]
    else:
        product = left.reshape(heads, rows, -1, inner) @ right
    return product.reshape(heads, rows, group, time, right.shape[-1])


class RowContext(NamedTuple):
    """One slot of the caches, fed several tokens of one request."""

    caches: tuple[KeyValue, ...]
    """Per layer, `[slots, kv_heads, seq, head_dim]`."""
    slot: jax.Array
    """int32 scalar: the row of the caches."""
    start: jax.Array
    """int32 scalar: position of the first fed token."""

    def attend(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, KeyValue]:
        """Write the feed into the slot, then attend; see `Context.attend`."""
        cache = self.caches[layer]
        place = (self.slot, 0, self.start, 0)
        cache = KeyValue(
            jax.lax.dynamic_update_slice(cache.key, key, place),
            jax.lax.dynamic_update_slice(cache.value, value, place),
        )
        _, heads, _, width = cache.key.shape

        def read(index: jax.Array) -> KeyValue:
            at = (self.slot, 0, index * CHUNK, 0)
            size = (1, heads, CHUNK, width)
            return KeyValue(
                jax.lax.dynamic_slice(cache.key, at, size),
                jax.lax.dynamic_slice(cache.value, at, size),
            )

        positions = self.start + jnp.arange(query.shape[3], dtype=jnp.int32)
        last = self.start + query.shape[3]
        return _attend_in_chunks(query, positions[None], last, read), cache


class BatchContext(NamedTuple):
    """Every slot of the caches, each fed one token at its own position."""

    caches: tuple[KeyValue, ...]
    """Per layer, `[slots, kv_heads, seq, head_dim]`."""
    starts: jax.Array
    """int32 `[slots]`: position of each row's token."""
    longest: jax.Array
    """int32 scalar: positions the longest *active* row must see."""

    def attend(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, KeyValue]:
        """Write one token a slot, then attend; see `Context.attend`."""
        cache = self.caches[layer]
        cache = KeyValue(
            _write_rows(cache.key, key, self.starts),
            _write_rows(cache.value, value, self.starts),
        )

        def read(index: jax.Array) -> KeyValue:
            return KeyValue(
                jax.lax.dynamic_slice_in_dim(cache.key, index * CHUNK, CHUNK, 2),
                jax.lax.dynamic_slice_in_dim(cache.value, index * CHUNK, CHUNK, 2),
            )

        positions = self.starts[:, None]
        return _attend_in_chunks(query, positions, self.longest, read), cache


def _write_rows(cache: jax.Array, rows: jax.Array, starts: jax.Array) -> jax.Array:
    """Write `rows` `[slots, kv_heads, 1, head_dim]` at each row's own position."""
    for slot in range(cache.shape[0]):
        place = (slot, 0, starts[slot], 0)
        cache = jax.lax.dynamic_update_slice(cache, rows[slot : slot + 1], place)
    return cache


def _attend_in_chunks(
    query: jax.Array,
    positions: jax.Array,
    longest: jax.Array,
    read: _Reader,
) -> jax.Array:
    """Attend over cache chunks with a running maximum and sum.

    Args:
        query: `[rows, kv_heads, group, time, head_dim]`.
        positions: int32 `[rows, time]`, the position of each query.
        longest: int32 scalar, how many positions must be read.
        read: Returns the keys and values of chunk `index`.

    Returns:
        The weighted values, shaped as `query`.
    """

    def step(
        index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, mixed = state
        chunk = read(index)
        scores = jnp.einsum("bkgth,bksh->bkgts", query, chunk.key)
        places = index * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        seen = places <= positions[:, None, None, :, None]
        scores = jnp.where(seen, scores.astype(jnp.float32), MASKED)
        higher = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - higher)
        keep = jnp.exp(top - higher)
        total = total * keep + weights.sum(-1, keepdims=True)
        added = jnp.einsum(
            "bkgts,bksh->bkgth", weights.astype(chunk.value.dtype), chunk.value
        )
        return higher, total, mixed * keep + added.astype(jnp.float32)

    rows, heads, group, time, width = query.shape
    state = (
        jnp.full((rows, heads, group, time, 1), MASKED, jnp.float32),
        jnp.zeros((rows, heads, group, time, 1), jnp.float32),
        jnp.zeros((rows, heads, group, time, width), jnp.float32),
    )
    chunks = (longest + CHUNK - 1) // CHUNK
    _, total, mixed = jax.lax.fori_loop(0, chunks, step, state)
    weighed: jax.Array = (mixed / total).astype(query.dtype)
    return weighed


class _Reader(Protocol):
    """Reads one chunk of a cache."""

    def __call__(self, index: jax.Array) -> KeyValue: ...
