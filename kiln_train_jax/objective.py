"""The loss of a batch as a function of the adapter.

What the prompts of a step share is run once, its keys and values serve all rows; hidden
states are gathered at the positions that predict a sampled id, so that no `[rows, time,
vocab]` array exists; log-probabilities are of the very distribution each id was drawn
from. Per-token losses come from `losses.py`; here they are masked and summed with the
weights that the batch carries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from kiln_core.grpo import GrpoConfig, NoReference
from kiln_train_jax.attention import MASKED, FullContext
from kiln_train_jax.batch import Batch
from kiln_train_jax.lora import Lora
from kiln_train_jax.losses import (
    cispo_loss,
    clipped,
    entropy,
    k1_loss,
    k3_loss,
    policy_loss,
    sequence_log_ratio,
    token_log_ratio,
)
from kiln_train_jax.model import Decoder
from kiln_train_jax.reference import Layers
from kiln_train_jax.sampler import allowed

__all__ = ["Measures", "Objective", "Scores", "Terms", "loss_of", "scores"]

Estimator: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


class Terms(NamedTuple):
    """What the loss is made of; equal terms share one compiled program."""

    level: Literal["token", "sequence", "cispo"]
    recorded: bool
    """Whether the ratio is taken to the recorded probabilities; else it is 1."""
    low: float
    high: float
    max_weight: float
    policy: bool
    kl_coeff: float
    estimator: Estimator | None
    """None without a KL term."""
    shared_prefix: bool
    """Whether the reference runs the shared prompt once, or for every row."""
    echo: float | None
    """Weight of the environment's cross entropy; None without ECHO."""
    segments: int | None
    """Segments of layers whose activations are computed again; None keeps all."""

    @classmethod
    def of(cls, config: GrpoConfig) -> Terms:
        """Return the terms a configuration asks for."""
        high = config.clip_eps_high
        echo = config.loss.echo
        return cls(
            level=config.is_level,
            recorded=config.behavior_policy == "recorded",
            low=1.0 - config.clip_epsilon,
            high=1.0 + (config.clip_epsilon if high is None else high),
            max_weight=config.cispo_max_weight,
            policy=not config.loss.no_policy_loss,
            kl_coeff=config.kl_coeff,
            estimator=_estimator(config),
            shared_prefix=config.shared_prefix_reference,
            echo=None if echo is None else echo.lambda_,
            segments=config.grad_checkpoint_segments,
        )


def _estimator(config: GrpoConfig) -> Estimator | None:
    if config.kl_coeff == 0 or isinstance(config.kl_reference_policy, NoReference):
        return None
    return {"k1": k1_loss, "k3": k3_loss, "none": None}[config.kl_estimator]


class Measures(NamedTuple):
    """What a batch contributes to a step's report; float32 scalars."""

    kl: jax.Array
    """Mean log ratio to the reference, in nats; 0 without a KL term."""
    echo: jax.Array
    """Mean cross entropy of trained environment ids, in nats."""
    entropy: jax.Array
    """Mean entropy of the distributions that ids were drawn from, in nats."""
    clip_fraction: jax.Array
    """Share of the weight whose ratio is clipped."""
    agreement: jax.Array
    """Largest |ratio - 1| between recorded and recomputed probabilities."""


class Scores(NamedTuple):
    """Log-probabilities of a batch, float32."""

    sampled: jax.Array
    """`[rows, sampled]`, under the distribution each was drawn from."""
    entropy: jax.Array
    """`[rows, sampled]`, of that distribution, without gradient."""
    observed: jax.Array
    """`[rows, observed]`, at temperature 1; zero without ECHO."""


class Objective:
    """The loss of a batch as a function of the adapter.

    Args:
        graph: Structure of the base model.
        terms: What the loss is made of.
    """

    def __init__(self, graph: Any, terms: Terms) -> None:
        self.graph = graph
        self.terms = terms

    def __call__(
        self,
        layers: Layers,
        scale: jax.Array,
        parameters: Any,
        reference: Layers | None,
        batch: Batch,
    ) -> tuple[jax.Array, Measures]:
        """Return the loss and what is reported beside it.

        Args:
            layers: Of the adapter.
            scale: alpha / rank.
            parameters: Of the base.
            reference: Adapter of the KL reference; None is the base.
            batch: One of the step's.
        """
        model: Decoder = nnx.merge(self.graph, parameters)
        terms = self.terms
        found = scores(model, Lora(layers, scale), batch, terms)
        base: Scores | None = None
        if terms.estimator is not None:
            held = None if reference is None else Lora(reference, scale)
            base = scores(model, held, batch, terms, shared=terms.shared_prefix)
        return loss_of(terms, found, base, batch)


def loss_of(
    terms: Terms, found: Scores, base: Scores | None, batch: Batch
) -> tuple[jax.Array, Measures]:
    """Return the loss of a batch that was scored, and what is reported beside it.

    Args:
        terms: What the loss is made of.
        found: Under the policy.
        base: Under the KL reference; None without a KL term.
        batch: Its weights.
    """
    real = jnp.asarray(batch.weight) > 0
    logprobs = jnp.where(real, found.sampled, 0.0)
    # what was recorded nowhere is taken for what it is now: its ratio is 1
    recorded = jnp.where(
        jnp.isfinite(batch.behavior), batch.behavior, jax.lax.stop_gradient(logprobs)
    )
    behavior = jnp.where(real, recorded, 0.0)
    loss, clip_fraction = _policy_term(terms, logprobs, behavior, batch)
    kl = jnp.float32(0.0)
    if terms.estimator is not None and base is not None:
        reference = jax.lax.stop_gradient(jnp.where(real, base.sampled, 0.0))
        divergence = terms.estimator(logprobs, reference)
        loss += terms.kl_coeff * jnp.sum(batch.kl_weight * divergence)
        kl = jnp.sum(batch.weight * (logprobs - reference))
    echo = jnp.float32(0.0)
    if terms.echo is not None:
        echo = jnp.sum(batch.observed_weight * -found.observed)
        loss += terms.echo * echo
    return loss, Measures(
        kl=kl,
        echo=echo,
        entropy=jnp.sum(batch.weight * jnp.where(real, found.entropy, 0.0)),
        clip_fraction=clip_fraction,
        agreement=jnp.max(jnp.abs(jnp.exp(logprobs - behavior) - 1.0)),
    )


def _policy_term(
    terms: Terms, logprobs: jax.Array, behavior: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Return the surrogate's sum and how much of it is clipped.

    Args:
        terms: Level, bounds, and whether the ratio is forced to 1.
        logprobs: Zero where padded.
        behavior: Recorded, zero where padded.
        batch: Weights and gains.
    """
    if not terms.policy:
        return jnp.float32(0.0), jnp.float32(0.0)
    gain, real = jnp.asarray(batch.gain), jnp.asarray(batch.weight) > 0
    if not terms.recorded:
        behavior = jax.lax.stop_gradient(logprobs)
    if terms.level == "sequence":
        ratio = jnp.exp(sequence_log_ratio(logprobs, behavior, real))
    else:
        ratio = jnp.exp(token_log_ratio(logprobs, behavior))
    if terms.level == "cispo":
        loss = cispo_loss(logprobs, ratio, gain, terms.max_weight)
        cut = (ratio > terms.max_weight) & (gain != 0.0)
    else:
        loss = policy_loss(ratio, gain, terms.low, terms.high)
        cut = clipped(ratio, gain, terms.low, terms.high)
    return jnp.sum(loss), jnp.sum(jnp.where(cut, batch.weight, 0.0))


def scores(
    model: Decoder, lora: Lora | None, batch: Any, terms: Terms, *, shared: bool = True
) -> Scores:
    """Return log-probabilities of sampled and of environment ids.

    Args:
        model: The base.
        lora: The adapter; None is the base alone.
        batch: A `Batch`, traced.
        terms: Whether ECHO is on, and how activations are kept.
        shared: Whether the common prompt is run once, or for every row.
    """
    rows, time = batch.tokens.shape
    copies = 1 if shared else rows
    prefix = jnp.broadcast_to(batch.prefix, (copies, *batch.prefix.shape))
    places = jnp.arange(prefix.shape[1], dtype=jnp.int32)
    length = jnp.broadcast_to(batch.prefix_length, (copies,))
    _, memory = model(
        prefix,
        jnp.broadcast_to(places, prefix.shape),
        FullContext(),
        lora,
        segments=terms.segments,
    )
    positions = jnp.arange(time, dtype=jnp.int32) + batch.prefix_length
    hidden, _ = model(
        batch.tokens,
        jnp.broadcast_to(positions, (rows, time)),
        FullContext(memory, length),
        lora,
        segments=terms.segments,
    )
    logits = _gathered(model, hidden, batch.position)
    logits = logits / batch.temperature[:, None, None]
    open_set = allowed(batch.mask.reshape(-1, batch.mask.shape[-1]), logits.shape[-1])
    logits = jnp.where(open_set.reshape(logits.shape), logits, MASKED)
    observed = jnp.zeros(batch.observed_target.shape, jnp.float32)
    if terms.echo is not None:
        seen = _gathered(model, hidden, batch.observed_position)
        observed = _chosen(seen, batch.observed_target)
    return Scores(
        sampled=_chosen(logits, batch.target),
        entropy=entropy(jax.lax.stop_gradient(logits)),
        observed=observed,
    )


def _gathered(model: Decoder, hidden: jax.Array, at: jax.Array) -> jax.Array:
    """Return logits at positions `[rows, n]` of hidden states `[rows, time, h]`."""
    return model.logits(jnp.take_along_axis(hidden, at[..., None], axis=1))


def _chosen(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the float32 log-probability of each token under its logits."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
