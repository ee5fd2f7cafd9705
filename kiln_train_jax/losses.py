"""Per-token losses, without reduction.

Each takes float32 arrays of one shape and returns one of that shape; the trainer masks
and reduces. The importance ratio is forced to 1: the corpus was sampled from the very
policy that is trained, so the surrogate's value is the advantage and its gradient the
policy gradient. Later epochs over the same corpus are then plain REINFORCE on it; no
clipping takes part, because a ratio of 1 is never clipped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def policy_loss(logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
    """Return the GRPO surrogate with ratio 1, negated.

    Args:
        logprobs: Of the sampled tokens under the policy.
        advantages: Of each token's rollout.
    """
    ratio = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
    return -advantages * ratio


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
    never negative, and of low variance.

    Args:
        logprobs: Of the sampled tokens under the policy.
        reference: Of the same tokens under the reference, no gradient.
    """
    log_ratio = logprobs - reference
    return jnp.expm1(-log_ratio) + log_ratio
