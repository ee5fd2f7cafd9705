"""What the policy is held to by the KL term, and at which tokens.

Three references: the base without adapter, none, or a moving average of the adapter.
The average is of the factors A and B, not of their product; with decay 0 it is a
snapshot of the policy, taken every `refresh_every` steps.

`entropy_aware_kl_quantile` q leaves the tokens free where the policy is least sure.
Wang et al. 2025, "Beyond the 80/20 Rule", 2506.01939, find that the few tokens of high
entropy are where reinforcement learning acts; Wang et al. 2025, "Stabilizing Knowledge,
Promoting Reasoning", 2507.15778, hold the others closer to the reference. So the KL
term acts where the entropy is at most the q-quantile of the step: q = 1 holds all
tokens, q = 0.8 frees the fifth of highest entropy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import jax
import numpy as np

from kiln_core.grpo import EmaReference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiln_core.grpo import GrpoConfig
    from kiln_train_jax.batch import Batch
    from kiln_train_jax.lora import Pair

__all__ = ["Layers", "Reference", "held_tokens", "weighted_quantile"]

Layers: TypeAlias = "tuple[dict[str, Pair], ...]"


class Reference:
    """The reference of a run as it stands.

    Args:
        config: Which one, and how it moves.
        start: Factors of the adapter that training starts from.
    """

    def __init__(self, config: GrpoConfig, start: Layers) -> None:
        kind = config.kl_reference_policy
        self._moving = kind if isinstance(kind, EmaReference) else None
        self.layers: Layers | None = None if self._moving is None else start

    def advance(self, steps: int, policy: Layers) -> None:
        """Follow the policy, where it is time.

        Args:
            steps: Optimizer steps taken so far.
            policy: Factors after them.
        """
        if self._moving is None or steps % self._moving.refresh_every:
            return
        decay = self._moving.decay
        if decay == 0.0:
            self.layers = policy
            return
        self.layers = jax.tree.map(
            lambda old, new: decay * old + (1.0 - decay) * new, self.layers, policy
        )


def held_tokens(
    batches: Sequence[Batch], entropies: Sequence[np.ndarray], quantile: float
) -> list[Batch]:
    """Return a step's batches with the KL term on its surer tokens alone.

    The denominator stays all sampled tokens of the step.

    Args:
        batches: Of one step.
        entropies: float32 `[rows, sampled]` of each, in nats.
        quantile: Share of the weight that is held, 0 to 1.
    """
    flat = np.concatenate([found.ravel() for found in entropies])
    weights = np.concatenate([batch.weight.ravel() for batch in batches])
    limit = weighted_quantile(flat, weights, quantile)
    return [
        batch._replace(kl_weight=np.where(found <= limit, batch.weight, 0.0))
        for batch, found in zip(batches, entropies, strict=True)
    ]


def weighted_quantile(
    values: np.ndarray, weights: np.ndarray, quantile: float
) -> np.float32:
    """Return the least value at or below which lies a share of the weight.

    Args:
        values: float32 `[n]`.
        weights: float32 `[n]`, at least one positive; 0 where padded.
        quantile: The share, 0 to 1.
    """
    real = weights > 0
    order = np.argsort(values[real], kind="stable")
    ordered = values[real][order]
    below = np.cumsum(weights[real][order], dtype=np.float64)
    # a sum of float32 shares: a millionth decides no token
    at = np.searchsorted(below, quantile * below[-1] * (1.0 - 1e-6))
    limit: np.float32 = ordered[min(int(at), len(ordered) - 1)]
    return limit
