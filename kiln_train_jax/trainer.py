"""GRPO on recorded token ids: corpus and configuration in, adapter out.

The loss is in `objective.py`, its parts in `losses.py`; here are its compiled gradient,
the optimizer step, and the checks between them. The first step must reproduce the
recorded probabilities where the ratio is forced to 1: then the corpus comes from the
very policy that is trained. With recorded ratios it may come from an earlier one.

Same corpus, configuration and machine give the same bytes: the order of groups, of
accumulation and of random keys is fixed, and so are the padded shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from kiln_core.engine import TrainingProgress
from kiln_core.errors import TrainingError
from kiln_core.grpo import AdamW, GrpoConfig, Muon, Sgd
from kiln_train_jax.anomaly import bad_leaf, bad_token
from kiln_train_jax.batch import Batch, Layout
from kiln_train_jax.lora import Lora
from kiln_train_jax.model import Decoder
from kiln_train_jax.objective import Objective, Scores, Terms, scores
from kiln_train_jax.optimizer import make_optimizer
from kiln_train_jax.reference import Layers, Reference, held_tokens
from kiln_train_jax.shapes import ShapePlan
from kiln_train_jax.units import TrainingUnit

__all__ = ["GrpoTrainer", "StepMetrics", "step_groups"]

AGREEMENT_WARNING: Final = 1e-5
"""A first-step ratio further from 1 than this deserves a warning."""
AGREEMENT_FAILURE: Final = 1e-3
"""A first-step ratio further from 1 than this means another distribution."""


class StepMetrics(NamedTuple):
    """What one optimizer step measured; the weights of its ids sum to 1."""

    loss: float
    kl: float
    """Mean log ratio to the reference, in nats; 0 without a KL term."""
    echo: float
    """Mean cross entropy of environment ids, in nats; 0 without ECHO."""
    entropy: float
    """Mean entropy of the distributions that ids were drawn from, in nats."""
    clip_fraction: float
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
        self.warnings: list[str] = []
        self.layout = Layout(
            model.config.vocab_size,
            per_sample=config.loss_aggregation == "per_sample",
            echo=config.loss.echo is not None,
            signed=config.behavior_policy == "recorded",
        )
        self._shapes = ShapePlan()
        self._steps = 0
        self._first = True
        self._reference = Reference(config, lora.layers)
        optimizer, self._apply = _compiled_update(
            config.optimizer, config.effective_learning_rate
        )
        self._state = optimizer.init(self.layers)
        graph, parameters = nnx.split(model)
        self._parameters = parameters
        self._gradient = _compiled(graph, Terms.of(config))
        self._scores = _compiled_scores(graph, Terms.of(config))

    @property
    def lora(self) -> Lora:
        """The adapter as it stands."""
        return Lora(self.layers, self.scale)

    @property
    def state(self) -> tuple[Layers, Any, Layers | None]:
        """Adapter, optimizer state and KL reference: all that a step changes."""
        return self.layers, self._state, self._reference.layers

    def restore(self, state: tuple[Layers, Any, Layers | None], steps: int) -> None:
        """Go on from the state after a number of steps."""
        self.layers, self._state, self._reference.layers = state
        self._steps = steps
        self._first = steps == 0

    def prepare(self, steps: Iterable[Sequence[TrainingUnit]]) -> None:
        """Fix the padded shapes of a job, so that it compiles few programs.

        Args:
            steps: The units of every step to come.
        """
        self._shapes = self.layout.plan(steps)

    def step(self, units: Sequence[TrainingUnit]) -> StepMetrics:
        """Take one optimizer step over the units of its groups.

        Raises:
            TrainingError: The first step does not reproduce the recorded
                probabilities, or a number is not finite.
        """
        batches = self._look_ahead(self.layout.batches(units, self._shapes))
        parts, gradients = [], []
        for batch in batches:
            (loss, aux), gradient = self._gradient(
                self.layers,
                self.scale,
                self._parameters,
                self._reference.layers,
                batch,
            )
            measured = {name: float(value) for name, value in aux._asdict().items()}
            parts.append(StepMetrics(loss=float(loss), **measured))
            gradients.append(gradient)
        metrics = _joined(parts)
        self._check(metrics)
        gradient = jax.tree.map(lambda *leaves: sum(leaves), *gradients)
        self._update(gradient)
        return metrics

    def _look_ahead(self, batches: list[Batch]) -> list[Batch]:
        """Score a step before its gradient, where the configuration needs that.

        Raises:
            TrainingError: A log-probability is not finite, and `detect_anomaly` is on.
        """
        quantile = self.config.entropy_aware_kl_quantile
        if quantile is None and not self.config.detect_anomaly:
            return batches
        found: list[Scores] = [
            self._scores(self.layers, self.scale, self._parameters, batch)
            for batch in batches
        ]
        if self.config.detect_anomaly:
            for batch, seen in zip(batches, found, strict=True):
                self._refuse(bad_token(batch, seen))
        if quantile is None:
            return batches
        entropies = [np.asarray(seen.entropy) for seen in found]
        return held_tokens(batches, entropies, quantile)

    def _update(self, gradient: Layers) -> None:
        """Move the adapter, unless a number is not finite.

        Raises:
            TrainingError: One is not.
        """
        layers, state, finite = self._apply(self.layers, self._state, gradient)
        if not finite:
            if self.config.detect_anomaly:
                for what, leaves in (("gradient", gradient), ("update", layers)):
                    place = bad_leaf(leaves)
                    self._refuse(place and f"the {what} of {place} is not finite")
            diverged = _not_finite("the gradient")
            raise diverged
        self.layers, self._state = layers, state
        self._steps += 1
        self._reference.advance(self._steps, layers)

    def _refuse(self, anomaly: str | None) -> None:
        """Fail for an anomaly.

        Raises:
            TrainingError: There is one.
        """
        if anomaly is not None:
            raise TrainingError(
                f"step {self._steps + 1}: {anomaly}", hint="lower learning_rate"
            )

    def _check(self, metrics: StepMetrics) -> None:
        if not np.isfinite(metrics.loss):
            diverged = _not_finite("the loss")
            raise diverged
        if not self._first:
            return
        self._first = False
        on_policy = self.config.behavior_policy != "recorded"
        if metrics.agreement > AGREEMENT_FAILURE and on_policy:
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


def _not_finite(what: str) -> TrainingError:
    return TrainingError(
        f"{what} is not finite",
        hint="lower learning_rate; detect_anomaly names the first bad number",
    )


@lru_cache(maxsize=8)
def _compiled(graph: Any, terms: Terms) -> Callable[..., Any]:
    """Return the compiled loss and gradient; jobs on one model share it."""
    objective = Objective(graph, terms)
    compiled: Callable[..., Any] = jax.jit(jax.value_and_grad(objective, has_aux=True))
    return compiled


@lru_cache(maxsize=8)
def _compiled_scores(graph: Any, terms: Terms) -> Callable[..., Any]:
    """Return the compiled forward pass; jobs on one model share it."""

    def score(layers: Layers, scale: Any, parameters: Any, batch: Batch) -> Scores:
        return scores(nnx.merge(graph, parameters), Lora(layers, scale), batch, terms)

    return jax.jit(score)


@lru_cache(maxsize=8)
def _compiled_update(
    kind: Muon | AdamW | Sgd, rate: float
) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
    """Return an optimizer and its compiled step; equal configurations share it."""
    optimizer = make_optimizer(kind, rate)

    def update(layers: Layers, state: Any, gradient: Layers) -> Any:
        updates, state = optimizer.update(gradient, state, layers)
        moved = jax.tree.map(jnp.add, layers, updates)
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(moved)]
        finite += [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)]
        return moved, state, jnp.all(jnp.stack(finite))

    return optimizer, jax.jit(update)


def _joined(parts: Sequence[StepMetrics]) -> StepMetrics:
    """Return the metrics of a step from those of its batches, whose weights add up."""
    total = StepMetrics(*map(sum, zip(*parts, strict=True)))
    return total._replace(agreement=max(part.agreement for part in parts))


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
    """Return the report of a step."""
    return TrainingProgress(
        step=step,
        steps=steps,
        epoch=epoch,
        loss=metrics.loss,
        mean_reward=mean_reward,
        kl=metrics.kl,
        entropy=metrics.entropy,
        clip_fraction=metrics.clip_fraction,
        logprob_agreement=agreement,
    )
