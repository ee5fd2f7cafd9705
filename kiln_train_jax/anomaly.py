"""Naming the first number of a step that is not finite.

With `detect_anomaly` every step is scored before its gradient is taken, and gradient
and adapter are looked at as a whole; the search itself runs on the host, on values that
are there anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kiln_train_jax.batch import Batch
    from kiln_train_jax.objective import Scores
    from kiln_train_jax.reference import Layers

__all__ = ["bad_leaf", "bad_token"]


def bad_token(batch: Batch, found: Scores) -> str | None:
    """Name the first token of a batch whose log-probability is not finite.

    Args:
        batch: What was scored.
        found: Its scores.

    Returns:
        None when all are finite.
    """
    kinds = (
        ("sampled", found.sampled, batch.weight, batch.target),
        ("environment", found.observed, batch.observed_weight, batch.observed_target),
    )
    for kind, logprobs, weight, target in kinds:
        values = np.asarray(logprobs)
        bad = np.argwhere((weight > 0) & ~np.isfinite(values))
        if len(bad):
            row, place = bad[0]
            group, rollout = batch.rollout[row]
            return (
                f"the log-probability of {kind} token {place} (id {target[row, place]})"
                f" of group {group}, rollout {rollout} is {values[row, place]}"
            )
    return None


def bad_leaf(layers: Layers) -> str | None:
    """Name the first factor that holds a value that is not finite.

    Args:
        layers: Factors of an adapter, or their gradient.

    Returns:
        None when all are finite.
    """
    for layer, pairs in enumerate(layers):
        for target, pair in pairs.items():
            for factor, leaf in (("lora_A", pair.down), ("lora_B", pair.up)):
                if not np.isfinite(np.asarray(leaf)).all():
                    return f"layer {layer} {target} {factor}"
    return None
