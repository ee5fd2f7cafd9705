"""The optimizer a configuration names, from optax.

Muon orthogonalises matrices only: `optax.contrib.muon` hands anything but 2-D leaves to
Adam without a word, which is why an adapter's factors are kept as 2-D leaves.
"""

from __future__ import annotations

import optax

from kiln_core.grpo import AdamW, Muon, Sgd


def make_optimizer(
    kind: Muon | AdamW | Sgd, rate: float
) -> optax.GradientTransformation:
    """Return the gradient transformation of an optimizer and its learning rate."""
    if isinstance(kind, Muon):
        return optax.contrib.muon(
            rate,
            ns_steps=kind.ns_iters,
            beta=kind.momentum,
            nesterov=kind.nesterov,
            weight_decay=kind.weight_decay,
        )
    if isinstance(kind, AdamW):
        return optax.adamw(
            rate,
            b1=kind.beta1,
            b2=kind.beta2,
            eps=kind.epsilon,
            weight_decay=kind.weight_decay,
        )
    if kind.weight_decay:
        return optax.chain(
            optax.add_decayed_weights(kind.weight_decay), optax.sgd(rate)
        )
    return optax.sgd(rate)
