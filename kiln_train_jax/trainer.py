"""GRPO on recorded token ids: corpus and configuration in, adapter out.

The step reads top to bottom: what the prompts of a step share is run once, its keys and
values serve all rows; hidden states are gathered at the positions that predict
a sampled id, so that no `[rows, time, vocab]` array exists; log-probabilities are of
the very distribution each id was drawn from; the loss is summed with weights fixed in
the batch. What GRPO has and this leaves out: the clipped ratio, since the corpus comes
from the policy that is trained and its ratio is 1 (`losses.py`).

Same corpus, configuration and machine give the same bytes: the order of groups, of
accumulation and of random keys is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from kiln_core.engine import TrainingProgress
from kiln_core.errors import TrainingError
from kiln_core.grpo import AdamW, GrpoConfig, Muon, NoReference, Sgd
from kiln_train_jax.attention import MASKED, FullContext
from kiln_train_jax.batch import Batch, TrainingUnit, step_batches
from kiln_train_jax.lora import Lora, Pair
from kiln_train_jax.losses import k1_loss, k3_loss, policy_loss
from kiln_train_jax.model import Decoder
from kiln_train_jax.optimizer import make_optimizer
from kiln_train_jax.sampler import allowed

__all__ = ["GrpoTrainer", "StepMetrics", "step_groups"]

AGREEMENT_WARNING: Final = 1e-5
"""A first-step ratio further from 1 than this deserves a warning."""
AGREEMENT_FAILURE: Final = 1e-3
"""A first-step ratio further from 1 than this means another distribution."""

Layers: TypeAlias = tuple[dict[str, Pair], ...]
Estimator: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


class StepMetrics(NamedTuple):
    """What one optimizer step measured."""

    loss: float
    kl: float
    echo: float
    """Mean cross entropy of environment ids, in nats; 0 without ECHO."""
    agreement: float
    """Largest |ratio - 1| between recorded and recomputed probabilities."""


class GrpoTrainer:
    """Trains one adapter.

    Args:
        model: The base; its parameters are shared and never changed.
        lora: The adapter to start from, 2-D leaves.
        config: Materialised.
    """

    def __init__(self, model: Decoder, lora: Lora, config: GrpoConfig) -> None:
        self.config = config
        self.scale = lora.scale
        self.layers: Layers = lora.layers
        self.vocabulary = model.config.vocab_size
        self.warnings: list[str] = []
        self._first = True
        optimizer, self._apply = _compiled_update(
            config.optimizer, config.effective_learning_rate
        )
        self._state = optimizer.init(self.layers)
        graph, parameters = nnx.split(model)
        self._parameters = parameters
        echo = config.loss.echo
        self._gradient = _compiled(
            graph,
            config.kl_coeff,
            _estimator(config),
            0.0 if echo is None else echo.lambda_,
        )

    @property
    def lora(self) -> Lora:
        """The adapter as it stands."""
        return Lora(self.layers, self.scale)

    def step(self, units: Sequence[TrainingUnit]) -> StepMetrics:
        """Take one optimizer step over the units of its groups.

        Raises:
            TrainingError: The first step does not reproduce the recorded
                probabilities, or a number is not finite.
        """
        batches = step_batches(
            units,
            self.vocabulary,
            per_sample=self.config.loss_aggregation == "per_sample",
            echo=self.config.loss.echo is not None,
        )
        parts, gradients = [], []
        for batch in batches:
            (loss, aux), gradient = self._gradient(
                self.layers, self.scale, self._parameters, batch
            )
            parts.append(StepMetrics(float(loss), *(float(value) for value in aux)))
            gradients.append(gradient)
        metrics = _joined(parts)
        self._check(metrics)
        gradient = jax.tree.map(lambda *leaves: sum(leaves), *gradients)
        self.layers, self._state = self._apply(self.layers, self._state, gradient)
        return metrics

    def _check(self, metrics: StepMetrics) -> None:
        if not np.isfinite(metrics.loss):
            raise TrainingError("the loss is not finite")
        if not self._first:
            return
        self._first = False
        if metrics.agreement > AGREEMENT_FAILURE:
            raise TrainingError(
                "the recorded log-probabilities are not those of this policy: a ratio "
                f"differs from 1 by {metrics.agreement:.3g}",
                hint="the corpus was sampled by another model, adapter or transform",
            )
        if metrics.agreement > AGREEMENT_WARNING:
            self.warnings.append(
                "recorded and recomputed probabilities differ by up to "
                f"{metrics.agreement:.3g}"
            )


def _estimator(config: GrpoConfig) -> Estimator | None:
    """Return how the divergence from the base is estimated; None when it is off."""
    if config.kl_coeff == 0 or isinstance(config.kl_reference_policy, NoReference):
        return None
    return {"k1": k1_loss, "k3": k3_loss, "none": None}[config.kl_estimator]


@lru_cache(maxsize=8)
def _compiled(
    graph: Any, kl_coeff: float, estimator: Estimator | None, echo: float
) -> Callable[..., Any]:
    """Return the compiled loss and gradient; jobs on one model share it."""
    objective = _Objective(graph, kl_coeff, estimator, echo)
    compiled: Callable[..., Any] = jax.jit(jax.value_and_grad(objective, has_aux=True))
    return compiled


@lru_cache(maxsize=8)
def _compiled_update(
    kind: Muon | AdamW | Sgd, rate: float
) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
    """Return an optimizer and its compiled step; equal configurations share it."""
    optimizer = make_optimizer(kind, rate)

    def update(layers: Layers, state: Any, gradient: Layers) -> Any:
        updates, state = optimizer.update(gradient, state, layers)
        return jax.tree.map(jnp.add, layers, updates), state

    return optimizer, jax.jit(update)


class _Objective:
    """The loss of a batch as a function of the adapter."""

    def __init__(
        self, graph: Any, kl_coeff: float, estimator: Estimator | None, echo: float
    ) -> None:
        self.graph = graph
        self.kl_coeff = kl_coeff
        self.estimator = estimator
        self.echo = echo

    def __call__(
        self, layers: Layers, scale: jax.Array, parameters: Any, batch: Batch
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        """Return the loss, and divergence, environment loss and agreement.

        Args:
            layers: Of the adapter.
            scale: alpha / rank.
            parameters: Of the base.
            batch: One of the step's.
        """
        model: Decoder = nnx.merge(self.graph, parameters)
        real = batch.weight > 0
        logprobs, observed = _scores(model, Lora(layers, scale), batch)
        logprobs = jnp.where(real, logprobs, 0.0)
        loss = jnp.sum(policy_loss(logprobs, jnp.asarray(batch.gain)))
        kl = jnp.float32(0.0)
        if self.estimator is not None:
            base, _ = _scores(model, None, batch)
            reference = jax.lax.stop_gradient(jnp.where(real, base, 0.0))
            divergence = self.estimator(logprobs, reference)
            loss += self.kl_coeff * jnp.sum(batch.weight * divergence)
            kl = jnp.sum(batch.weight * (logprobs - reference))
        echo = -jnp.sum(batch.observed_weight * observed)
        ratio = jnp.exp(logprobs - jnp.where(real, batch.behavior, 0.0))
        agreement = jnp.max(jnp.abs(ratio - 1.0))
        return loss + self.echo * echo, (kl, echo, agreement)


def _joined(parts: Sequence[StepMetrics]) -> StepMetrics:
    """Return the metrics of a step from those of its batches, whose weights add up."""
    return StepMetrics(
        loss=sum(part.loss for part in parts),
        kl=sum(part.kl for part in parts),
        echo=sum(part.echo for part in parts),
        agreement=max(part.agreement for part in parts),
    )


def _scores(
    model: Decoder, lora: Lora | None, batch: Any
) -> tuple[jax.Array, jax.Array]:
    """Return log-probabilities of sampled and of environment ids.

    Args:
        model: The base.
        lora: The adapter; None is the base alone.
        batch: A `Batch`, traced.

    Returns:
        float32 `[rows, sampled]` and `[rows, observed]`.
    """
    length = batch.prefix_length
    places = jnp.arange(batch.prefix.shape[-1], dtype=jnp.int32)
    _, memory = model(batch.prefix[None], places[None], FullContext(), lora)
    rows, time = batch.tokens.shape
    positions = jnp.arange(time, dtype=jnp.int32) + length
    hidden, _ = model(
        batch.tokens,
        jnp.broadcast_to(positions, (rows, time)),
        FullContext(memory, length[None]),
        lora,
    )
    logits = _gathered(model, hidden, batch.position)
    logits = logits / batch.temperature[:, None, None]
    open_set = allowed(batch.mask.reshape(-1, batch.mask.shape[-1]), logits.shape[-1])
    logits = jnp.where(open_set.reshape(logits.shape), logits, MASKED)
    sampled = _chosen(logits, batch.target)
    observed = _chosen(
        _gathered(model, hidden, batch.observed_position), batch.observed_target
    )
    return sampled, observed


def _gathered(model: Decoder, hidden: jax.Array, at: jax.Array) -> jax.Array:
    """Return logits at positions `[rows, n]` of hidden states `[rows, time, h]`."""
    return model.logits(jnp.take_along_axis(hidden, at[..., None], axis=1))


def _chosen(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the float32 log-probability of each token under its logits."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]


def step_groups(
    groups: int, config: GrpoConfig, seed: int
) -> list[tuple[int, list[int]]]:
    """Return, per optimizer step, its 1-based epoch and the groups it takes.

    The first epoch keeps the corpus order; later ones are shuffled by a counter-based
    generator (Philox, Salmon et al. 2011) keyed with seed and epoch.

    Args:
        groups: How many take part.
        config: Epochs and groups per step.
        seed: Of the run.
    """
    steps = []
    for epoch in range(config.epochs):
        order = np.arange(groups)
        if epoch:
            order = np.random.Generator(
                np.random.Philox(key=[seed, epoch])
            ).permutation(groups)
        for start in range(0, groups, config.groups_per_step):
            chosen = order[start : start + config.groups_per_step]
            steps.append((epoch + 1, [int(index) for index in chosen]))
    return steps


def progress_of(
    metrics: StepMetrics,
    step: int,
    steps: int,
    epoch: int,
    mean_reward: float,
    agreement: float,
) -> TrainingProgress:
    """Return the report of a step; nothing is clipped at a ratio of 1."""
    return TrainingProgress(
        step=step,
        steps=steps,
        epoch=epoch,
        loss=metrics.loss,
        mean_reward=mean_reward,
        kl=metrics.kl,
        clip_fraction=0.0,
        logprob_agreement=agreement,
    )
