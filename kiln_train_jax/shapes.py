"""Which padded shapes a job runs, so that it compiles few programs.

A compiled program serves one shape. Rounding to two significant binary digits bounds
the waste at a third but leaves a multi-turn corpus with another shape at nearly every
step, and a compilation costs as much as dozens of steps. All steps are known before the
first, so shapes are joined until at most `MAX_PROGRAMS` are left, cheapest join first,
and further where that costs next to nothing. The choice depends on the corpus and the
configuration alone.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ShapePlan", "Sizes", "bucket"]

MAX_PROGRAMS: Final = 2
"""Shapes of one job."""
FREE_WASTE: Final = 0.25
"""Shapes are joined beyond that while the job grows by less than this share."""
MAX_SHAPES: Final = 32
"""Distinct shapes compared; more are rounded to powers of two first."""


class Sizes(NamedTuple):
    """The padded shape of a batch."""

    rows: int
    prefix: int
    time: int
    sampled: int
    observed: int

    @property
    def cost(self) -> int:
        """Ids the model must run; a head is a fraction of a layer stack."""
        heads = self.rows * (self.sampled + self.observed) // 4
        return self.prefix + self.rows * self.time + heads

    def joined(self, other: Sizes) -> Sizes:
        """Return the least shape that holds both."""
        return Sizes(*map(max, self, other))

    def holds(self, other: Sizes) -> bool:
        """Say whether another shape fits in."""
        return self.joined(other) == self

    @property
    def coarse(self) -> Sizes:
        """The shape rounded up to powers of two."""
        return Sizes(*(1 << (size - 1).bit_length() for size in self))


class ShapePlan:
    """The shapes of a job.

    Args:
        needed: The bucketed shape of every batch of every step.
    """

    def __init__(self, needed: Iterable[Sizes] = ()) -> None:
        counts = Counter(needed)
        if len(counts) > MAX_SHAPES:
            coarse: Counter[Sizes] = Counter()
            for sizes, count in counts.items():
                coarse[sizes.coarse] += count
            counts = coarse
        self.shapes: tuple[Sizes, ...] = tuple(sorted(_joined(counts)))

    def of(self, needed: Sizes) -> Sizes:
        """Return the cheapest planned shape that holds a batch, else its own."""
        holding = [sizes for sizes in self.shapes if sizes.holds(needed)]
        return min(holding, key=lambda sizes: (sizes.cost, sizes), default=needed)


def bucket(size: int, smallest: int) -> int:
    """Round up to two significant binary digits, so that waste is at most a third."""
    size = max(size, smallest)
    step = 1 << max(size.bit_length() - 2, 0)
    return -(-size // step) * step


def _joined(counts: Counter[Sizes]) -> Counter[Sizes]:
    """Join shapes until few are left."""
    least = sum(sizes.cost * count for sizes, count in counts.items())
    while len(counts) > 1:
        added, one, other = min(
            (_added(counts, one, other), one, other)
            for one, other in combinations(sorted(counts), 2)
        )
        total = added + sum(sizes.cost * count for sizes, count in counts.items())
        if len(counts) <= MAX_PROGRAMS and total > least * (1 + FREE_WASTE):
            break
        together = counts.pop(one) + counts.pop(other)
        counts[one.joined(other)] += together
    return counts


def _added(counts: Counter[Sizes], one: Sizes, other: Sizes) -> int:
    """Return the cost of joining two shapes over all their batches."""
    cost = one.joined(other).cost
    return (cost - one.cost) * counts[one] + (cost - other.cost) * counts[other]
