"""Drawing the next token, and the log-probability it was drawn with.

The distribution is: logits / temperature, forbidden tokens at a large finite negative,
then top-k, top-p over what is left, min-p, and a float32 log-softmax over the rest.
The log-probability is of exactly this distribution: a set of one token gives exactly
0.0, and so does temperature 0, which always takes the largest logit.

Every row draws with its own key: both halves of its 64-bit seed, folded with the
position of the drawn token. Nothing about its neighbours enters.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

from kiln_train_jax.attention import MASKED

IMPOSSIBLE: Final = MASKED / 2
"""A log-probability below this means that the token cannot be drawn."""


class Draw(NamedTuple):
    """How each row's next token is drawn; every array has a leading row axis."""

    mask: jax.Array
    """int32 `[rows, words]`, bit b of word w allows token 32w + b."""
    seed: jax.Array
    """uint32 `[rows, 2]`: high and low half."""
    position: jax.Array
    """int32 `[rows]`: where the drawn token will stand."""
    temperature: jax.Array
    """float32 `[rows]`; 0 is greedy."""
    top_k: jax.Array
    """int32 `[rows]`; 0 keeps every token."""
    top_p: jax.Array
    """float32 `[rows]`; 1 keeps every token."""
    min_p: jax.Array
    """float32 `[rows]`; 0 keeps every token."""


def draw_tokens(logits: jax.Array, draw: Draw) -> tuple[jax.Array, jax.Array]:
    """Draw one token a row.

    Args:
        logits: float32 `[rows, vocab]`.
        draw: How.

    Returns:
        Tokens, int32 `[rows]`, and their log-probabilities, float32 `[rows]`; NaN where
        a logit of the row is not finite, so that nothing can be drawn from it.
    """
    greedy = draw.temperature <= 0.0
    logprobs = masked_logprobs(logits, draw)
    noise = jax.vmap(_noise, in_axes=(0, 0, None))(
        draw.seed, draw.position, logits.shape[-1]
    )
    noise = jnp.where(greedy[:, None], 0.0, noise)
    # Fused into the search for the largest, the noise would be computed one by one.
    logprobs, noisy = jax.lax.optimization_barrier(  # type: ignore[no-untyped-call]
        (logprobs, logprobs + noise)
    )
    tokens = _first_largest(noisy)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    sound = jnp.all(jnp.isfinite(logits), axis=-1)
    return tokens, jnp.where(sound, jnp.where(greedy, 0.0, chosen), jnp.nan)


def _first_largest(values: jax.Array) -> jax.Array:
    """Return where each row's largest value first stands, int32 `[rows]`.

    It is `argmax` in two passes over numbers, which XLA vectorises on CPU; one that
    carries places along with values is several times slower. NaN gives the last place.
    """
    largest = values.max(axis=-1, keepdims=True)
    last = values.shape[-1] - 1
    places = jnp.arange(values.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(values == largest, places, last), axis=-1)


def likeliest(logits: jax.Array, draw: Draw, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the likeliest tokens of each row, first one first.

    Args:
        logits: float32 `[rows, vocab]`.
        draw: How each row is drawn.
        count: How many.

    Returns:
        Tokens, int32, and log-probabilities, float32, both `[rows, count]`; a token
        that cannot be drawn has one below `IMPOSSIBLE`.
    """
    logprobs, tokens = jax.lax.top_k(masked_logprobs(logits, draw), count)
    return tokens.astype(jnp.int32), logprobs


def masked_logprobs(logits: jax.Array, draw: Draw) -> jax.Array:
    """Return the log-probabilities that rows are drawn from, float32 `[rows, vocab]`.

    Args:
        logits: float32 `[rows, vocab]`.
        draw: Mask, temperature and cuts; the rest is not read.
    """
    divisor = jnp.where(draw.temperature > 0.0, draw.temperature, 1.0)
    scaled = logits / divisor[:, None]
    scaled = jnp.where(allowed(draw.mask, logits.shape[-1]), scaled, MASKED)
    cut = (draw.top_k > 0) | (draw.top_p < 1.0) | (draw.min_p > 0.0)
    # Sorting a vocabulary is most of the work, and training never asks for it.
    floor = jax.lax.cond(
        jnp.any(cut),
        lambda: jnp.where(cut, _floor(scaled, draw), -jnp.inf),
        lambda: jnp.full(cut.shape, -jnp.inf),
    )
    return jax.nn.log_softmax(
        jnp.where(scaled >= floor[:, None], scaled, MASKED), axis=-1
    )


def _floor(scaled: jax.Array, draw: Draw) -> jax.Array:
    """Return the smallest logit each row keeps, float32 `[rows]`."""
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    places = jnp.arange(scaled.shape[-1])
    kept = jnp.where(draw.top_k > 0, draw.top_k, scaled.shape[-1])[:, None]
    ordered = jnp.where(places < kept, ordered, MASKED)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    inside = before < draw.top_p[:, None]
    inside &= probabilities >= draw.min_p[:, None] * probabilities[:, :1]
    inside &= places < kept
    inside |= places == 0  # the likeliest token always stays
    return jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1)


def _noise(seed: jax.Array, position: jax.Array, vocabulary: int) -> jax.Array:
    """Return one row's Gumbel noise, float32 `[vocab]`."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, position), (vocabulary,))


def allowed(mask: jax.Array, vocabulary: int) -> jax.Array:
    """Unpack bit masks `[rows, words]` to bool `[rows, vocab]`."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocabulary].astype(bool)
