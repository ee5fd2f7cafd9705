"""How sure a paired evaluation is: intervals beside the exact sign test.

They are for people and decide nothing. The win rate is of the seeds that are not tied;
the mean improvement is resampled by whole seeds, since episodes of one seed are not
independent. Resampling is keyed, so that equal evidence gives equal intervals.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["improvement_interval", "win_rate_interval"]

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 2_000
MAX_DRAWS: Final = 4_000_000
"""Bound of resamples times seeds."""
BISECTIONS: Final = 60


def win_rate_interval(wins: int, losses: int) -> tuple[float, float]:
    """Return the exact 95 % confidence interval of the win rate of untied seeds.

    Clopper and Pearson 1934, "The use of confidence or fiducial limits illustrated in
    the case of the binomial", Biometrika 26. Without a trial nothing is known.

    Args:
        wins: Seeds that improved.
        losses: Seeds that regressed.
    """
    trials = wins + losses
    half = (1 - CONFIDENCE) / 2
    low = high = 0.0
    if wins:
        low = _solve(lambda rate: _tail_from(wins, trials, rate) >= half)
    high = 1.0
    if losses:
        high = 1 - _solve(lambda rate: _tail_from(losses, trials, rate) >= half)
    return low, high


def improvement_interval(differences: Sequence[float], key: str) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean improvement.

    Efron 1979, "Bootstrap methods: another look at the jackknife", resampling seeds.

    Args:
        differences: One per seed, from `kiln_core.evaluation.paired_differences`.
        key: What fixes the resampling, such as a digest of the evidence.
    """
    count = len(differences)
    resamples = max(200, min(RESAMPLES, MAX_DRAWS // count))
    generator = random.Random(key)  # noqa: S311 - resampling, not a secret
    means = sorted(
        math.fsum(differences[int(generator.random() * count)] for _ in range(count))
        / count
        for _ in range(resamples)
    )
    tail = int(resamples * (1 - CONFIDENCE) / 2)
    return means[tail], means[-1 - tail]


def _solve(reached: Callable[[float], bool]) -> float:
    """Return the least rate of which a growing condition holds."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if reached(middle):
            high = middle
        else:
            low = middle
    return high


def _tail_from(successes: int, trials: int, rate: float) -> float:
    """Return the probability of at least so many successes."""
    if rate >= 1:
        return 1.0
    odds = math.log(rate) - math.log1p(-rate)
    log_choose = math.lgamma(trials + 1) + trials * math.log1p(-rate)
    return math.fsum(
        math.exp(
            log_choose
            - math.lgamma(count + 1)
            - math.lgamma(trials - count + 1)
            + count * odds
        )
        for count in range(successes, trials + 1)
    )
