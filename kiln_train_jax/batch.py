"""From the rows of an optimizer step to padded arrays.

A step's prompts mostly agree: candidates of a group share all of theirs, and groups of
one environment its system message. What all rows share is computed once, and equal rows
become one row with the sum of their weights. Where that would cost more than keeping
groups apart, they are kept apart and their gradients added.

How rows come from recorded groups is not handled here (`units.py`), nor which shapes a
job uses (`shapes.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kiln_train_jax.guide import mask_words
from kiln_train_jax.shapes import ShapePlan, Sizes, bucket
from kiln_train_jax.units import TrainingRow, TrainingUnit

__all__ = ["Batch", "Layout", "Pack"]

SMALLEST: Final = Sizes(rows=2, prefix=32, time=32, sampled=8, observed=8)
"""Smaller shapes cost no less, and would be programs of their own."""


class Batch(NamedTuple):
    """Padded arrays of rows behind one shared prefix."""

    prefix: np.ndarray
    """int32 `[prefix]`."""
    prefix_length: np.ndarray
    """int32 scalar: how many of them are real."""
    tokens: np.ndarray
    """int32 `[rows, time]`."""
    position: np.ndarray
    """int32 `[rows, sampled]`: where each sampled id is predicted."""
    target: np.ndarray
    """int32 `[rows, sampled]`."""
    mask: np.ndarray
    """int32 `[rows, sampled, words]`."""
    behavior: np.ndarray
    """float32 `[rows, sampled]`: recorded log-probabilities, NaN where none were."""
    weight: np.ndarray
    """float32 `[rows, sampled]`: share of the step's mean, 0 where padded."""
    kl_weight: np.ndarray
    """float32 `[rows, sampled]`: the same, where the KL term acts."""
    gain: np.ndarray
    """float32 `[rows, sampled]`: share times advantage."""
    temperature: np.ndarray
    """float32 `[rows]`."""
    observed_position: np.ndarray
    """int32 `[rows, observed]`: where each environment id is predicted."""
    observed_target: np.ndarray
    """int32 `[rows, observed]`."""
    observed_weight: np.ndarray
    """float32 `[rows, observed]`."""
    rollout: np.ndarray
    """int32 `[rows, 2]`: group and candidate (the first of equal rows), for naming."""


class Layout(NamedTuple):
    """How the rows of a step are weighed and laid out."""

    vocabulary: int
    """Number of token ids."""
    per_sample: bool = False
    """Whether every rollout weighs the same, instead of every token."""
    echo: bool = False
    """Whether environment ids are weighted."""
    signed: bool = False
    """Whether equal rows of unlike sign stay apart, since a clip treats them so."""

    def packs(self, units: Sequence[TrainingUnit]) -> list[Pack]:
        """Lay out the units of one optimizer step.

        Returns:
            Packs whose weights together sum to 1 over all sampled ids, and to at most 1
            over the environment ids.
        """
        shares = _Shares(units, per_sample=self.per_sample)
        together = [Pack(_common_prefix(units), units, shares, self)]
        apart = [Pack(len(unit.prompt), [unit], shares, self) for unit in units]
        return min(together, apart, key=lambda packs: sum(p.sizes.cost for p in packs))

    def plan(self, steps: Iterable[Sequence[TrainingUnit]]) -> ShapePlan:
        """Return the shapes that the batches of all steps of a job share."""
        return ShapePlan(pack.sizes for units in steps for pack in self.packs(units))

    def batches(
        self, units: Sequence[TrainingUnit], plan: ShapePlan | None = None
    ) -> list[Batch]:
        """Return the padded arrays of one optimizer step.

        Args:
            units: Of its groups, in order.
            plan: Shapes of the job; None gives each batch its own.
        """
        plan = plan or ShapePlan()
        return [pack.batch(plan.of(pack.sizes)) for pack in self.packs(units)]


class _Shares:
    """How much each id of a step weighs."""

    def __init__(self, units: Sequence[TrainingUnit], *, per_sample: bool) -> None:
        rows = [row for unit in units for row in unit.rows]
        self._sampled: Counter[tuple[int, int]] = Counter()
        for row in rows:
            self._sampled[row.rollout] += len(row.sampled)
        self._rollouts = sum(count > 0 for count in self._sampled.values())
        self._observing = sum(row.observation_tokens > 0 for row in rows)
        self._per_sample = per_sample

    def sampled(self, row: TrainingRow) -> float:
        """Return the share of each sampled id of a row."""
        if self._per_sample:
            return 1.0 / max(self._rollouts * self._sampled[row.rollout], 1)
        return 1.0 / max(self._sampled.total(), 1)

    def observed(self, row: TrainingRow) -> float:
        """Return the share of each environment id of a row; warnings are counted."""
        return 1.0 / max(self._observing * row.observation_tokens, 1)


class _Line:
    """A row as it is laid out: equal rows are one line with added weights."""

    def __init__(self, tail: list[int], row: TrainingRow) -> None:
        self.tokens = tail + row.tokens
        self.row = row
        self.offset = len(tail)
        self.weight = self.gain = self.observed_weight = 0.0

    def add(self, row: TrainingRow, shares: _Shares) -> None:
        """Add the weights of an equal row."""
        share = shares.sampled(row)
        self.weight += share
        self.gain += share * row.advantage
        self.observed_weight += shares.observed(row)


class Pack:
    """Lines behind one prefix.

    Args:
        shared: How many leading prompt ids of all units are the prefix.
        units: In order.
        shares: What each id weighs.
        layout: How lines are joined and what carries a loss.
    """

    def __init__(
        self,
        shared: int,
        units: Sequence[TrainingUnit],
        shares: _Shares,
        layout: Layout,
    ) -> None:
        lines: dict[Any, _Line] = {}
        for unit in units:
            tail = unit.prompt[shared:]
            for row in unit.rows:
                sign = float(np.sign(row.advantage)) if layout.signed else 0.0
                key = (tuple(tail), sign, *row.content)
                lines.setdefault(key, _Line(tail, row)).add(row, shares)
        self._prefix = units[0].prompt[:shared]
        self._lines = list(lines.values())
        self._layout = layout

    @property
    def sizes(self) -> Sizes:
        """The shape it needs, rounded up; without ECHO no environment id is looked at.

        Padding is counted, so that the cheaper of two layouts is.
        """
        rows = [line.row for line in self._lines]
        observed = max(len(row.observed) for row in rows) if self._layout.echo else 0
        exact = Sizes(
            rows=len(rows),
            prefix=len(self._prefix),
            time=max(len(line.tokens) for line in self._lines),
            sampled=max(len(row.sampled) for row in rows),
            observed=observed,
        )
        rounded = Sizes(*map(bucket, exact, SMALLEST))
        return rounded if observed else rounded._replace(observed=1)

    def batch(self, sizes: Sizes) -> Batch:
        """Return the arrays, padded to a shape that holds them."""
        batch = _empty(sizes, mask_words(self._layout.vocabulary), len(self._prefix))
        batch.prefix[: len(self._prefix)] = self._prefix
        for at, line in enumerate(self._lines):
            _fill(batch, at, line)
            if self._layout.echo:
                _fill_observed(batch, at, line)
        return batch


def _empty(sizes: Sizes, words: int, prefix_length: int) -> Batch:
    """Return zeroed arrays; the mask of a padded place allows everything."""
    drawn = (sizes.rows, sizes.sampled)
    seen = (sizes.rows, sizes.observed)
    return Batch(
        prefix=np.zeros(sizes.prefix, np.int32),
        prefix_length=np.asarray(prefix_length, np.int32),
        tokens=np.zeros((sizes.rows, sizes.time), np.int32),
        position=np.zeros(drawn, np.int32),
        target=np.zeros(drawn, np.int32),
        mask=np.full((*drawn, words), -1, np.int32),
        behavior=np.zeros(drawn, np.float32),
        weight=np.zeros(drawn, np.float32),
        kl_weight=np.zeros(drawn, np.float32),
        gain=np.zeros(drawn, np.float32),
        temperature=np.ones(sizes.rows, np.float32),
        observed_position=np.zeros(seen, np.int32),
        observed_target=np.zeros(seen, np.int32),
        observed_weight=np.zeros(seen, np.float32),
        rollout=np.full((sizes.rows, 2), -1, np.int32),
    )


def _fill(batch: Batch, at: int, line: _Line) -> None:
    row = line.row
    batch.rollout[at] = row.rollout
    batch.tokens[at, : len(line.tokens)] = line.tokens
    batch.temperature[at] = row.temperature
    for index, sampled in enumerate(row.sampled):
        batch.position[at, index] = line.offset + sampled.position
        batch.target[at, index] = sampled.token
        batch.mask[at, index] = sampled.mask
        known = sampled.logprob is not None
        batch.behavior[at, index] = sampled.logprob if known else np.nan
    batch.weight[at, : len(row.sampled)] = line.weight
    batch.kl_weight[at, : len(row.sampled)] = line.weight
    batch.gain[at, : len(row.sampled)] = line.gain


def _fill_observed(batch: Batch, at: int, line: _Line) -> None:
    row = line.row
    for index, position in enumerate(row.observed):
        batch.observed_position[at, index] = line.offset + position - 1
        batch.observed_target[at, index] = row.tokens[position]
    batch.observed_weight[at, : len(row.observed)] = line.observed_weight


def _common_prefix(units: Sequence[TrainingUnit]) -> int:
    """Return how many leading prompt ids all units share."""
    first, *others = [unit.prompt for unit in units]
    shared = len(first)
    for prompt in others:
        agree = zip(first[:shared], prompt, strict=False)
        shared = next(
            (i for i, (one, other) in enumerate(agree) if one != other),
            min(shared, len(prompt)),
        )
    return shared
