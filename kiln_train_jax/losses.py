"""Per-token losses, without reduction.

Each takes float32 arrays of one shape and returns one of that shape; the trainer masks
and reduces. Where the importance ratio is forced to 1, the behavior's log-probabilities
are the policy's own behind stop-gradient: the surrogate's value is then the advantage,
its gradient the policy gradient, and nothing is ever clipped.

References: Schulman et al. 2017, "Proximal Policy Optimization", 1707.06347, equation 7
(clipped surrogate); Shao et al. 2024, "DeepSeekMath", 2402.03300, equation 3; Yu et al.
2025, "DAPO", 2503.14476, equation 8 (asymmetric clip); Zheng et al. 2025, "GSPO",
2507.18071, equations 5 and 7; MiniMax 2025, "MiniMax-M1", 2506.13585, equations 4 and 5
(CISPO); Ye et al. 2020, "Mastering Complex Control in MOBA Games", 1912.09729, equation
4 (a bound on the ratio of bad actions).
"""

from __future__ import annotations

import math
from typing import Final

import jax
import jax.numpy as jnp

MAX_LOG_RATIO: Final = math.log(10.0)
"""Importance weights are truncated at 10, before `exp` can overflow."""


def token_log_ratio(logprobs: jax.Array, behavior: jax.Array) -> jax.Array:
    """Return the truncated log importance ratio of each token.

    Args:
        logprobs: `[rows, sampled]`, under the policy.
        behavior: Of the same tokens under the policy that sampled them, no gradient.
    """
    return jnp.minimum(logprobs - behavior, MAX_LOG_RATIO)


def sequence_log_ratio(
    logprobs: jax.Array, behavior: jax.Array, real: jax.Array
) -> jax.Array:
    """Return each row's length-normalised log ratio, at every one of its tokens.

    The length divides once, here; the reducer weighs tokens and divides by no length of
    its own, so at ratio 1 the gradient is that of the token level.

    Args:
        logprobs: `[rows, sampled]`, under the policy.
        behavior: Of the same tokens under the policy that sampled them, no gradient.
        real: bool, False where padded.
    """
    difference = jnp.where(real, logprobs - behavior, 0.0)
    length = jnp.maximum(real.sum(-1, keepdims=True), 1)
    mean = difference.sum(-1, keepdims=True) / length
    return jnp.broadcast_to(jnp.minimum(mean, MAX_LOG_RATIO), logprobs.shape)


def clipped(
    ratio: jax.Array, advantages: jax.Array, low: float, high: float
) -> jax.Array:
    """Say where the surrogate is clipped; a ratio on the bound is not.

    Args:
        ratio: Importance ratio.
        advantages: Of each token's rollout.
        low: Bound for negative advantages, 1 - clip_epsilon.
        high: Bound for positive ones, 1 + clip_eps_high.
    """
    up = (advantages > 0.0) & (ratio > high)
    return up | ((advantages < 0.0) & (ratio < low))


def policy_loss(
    ratio: jax.Array, advantages: jax.Array, low: float, high: float
) -> jax.Array:
    """Return the clipped GRPO surrogate, negated.

    Args:
        ratio: Importance ratio, with gradient.
        advantages: Of each token's rollout.
        low: Bound for negative advantages.
        high: Bound for positive ones.
    """
    bound = jnp.where(advantages > 0.0, high, low)
    return -advantages * jnp.where(clipped(ratio, advantages, low, high), bound, ratio)


def cispo_loss(
    logprobs: jax.Array, ratio: jax.Array, advantages: jax.Array, max_weight: float
) -> jax.Array:
    """Return the CISPO loss: the ratio is a weight without gradient, bounded above.

    No token loses its gradient, and nothing bounds the weight from below.

    Args:
        logprobs: Of the sampled tokens under the policy.
        ratio: Importance ratio.
        advantages: Of each token's rollout.
        max_weight: Largest weight.
    """
    weight = jax.lax.stop_gradient(jnp.minimum(ratio, max_weight))
    return -weight * advantages * logprobs


def k1_loss(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """Return the k1 estimate of KL(policy || reference) with its proper gradient.

    The estimate is the log ratio. Differentiated as it stands it has zero expected
    gradient, since the expectation is over the policy too; the gradient of the
    divergence is the log ratio times the score.

    Args:
        logprobs: Of the sampled tokens under the policy.
        reference: Of the same tokens under the reference, no gradient.
    """
    log_ratio = jax.lax.stop_gradient(logprobs - reference)
    score = logprobs - jax.lax.stop_gradient(logprobs)
    return log_ratio + log_ratio * score


def k3_loss(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """Return the k3 estimate of KL(policy || reference).

    Schulman 2020, "Approximating KL Divergence", `exp(-r) - 1 + r` for log ratio r:
    never negative, and of low variance. It is differentiated as it stands, as in
    DeepSeekMath, equation 4: the expected gradient is that of KL(reference || policy),
    which has the same minimum.

    Args:
        logprobs: Of the sampled tokens under the policy.
        reference: Of the same tokens under the reference, no gradient.
    """
    log_ratio = logprobs - reference
    return jnp.expm1(-log_ratio) + log_ratio


def entropy(logits: jax.Array) -> jax.Array:
    """Return the entropy in nats of distributions given by logits `[..., vocab]`."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
