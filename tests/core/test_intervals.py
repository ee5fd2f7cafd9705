"""Intervals beside the sign test."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from kiln_core.intervals import improvement_interval, win_rate_interval


def at_least(successes: int, trials: int, rate: float) -> float:
    exact = Fraction(rate)
    return float(
        sum(
            math.comb(trials, k) * exact**k * (1 - exact) ** (trials - k)
            for k in range(successes, trials + 1)
        )
    )


@pytest.mark.parametrize(
    ("wins", "losses"),
    [(1, 0), (0, 1), (15, 5), (14, 6), (5, 5), (20, 0), (0, 20), (3, 57)],
)
def test_ends_are_where_the_exact_tails_are_a_fortieth(wins: int, losses: int) -> None:
    trials = wins + losses
    low, high = win_rate_interval(wins, losses)
    assert 0 <= low < wins / trials or wins == 0
    assert 1 >= high > wins / trials or losses == 0
    if wins:
        assert at_least(wins, trials, low) == pytest.approx(0.025, abs=1e-9)
    else:
        assert low == 0
    if losses:
        below = 1 - at_least(wins + 1, trials, high)
        assert below == pytest.approx(0.025, abs=1e-9)
    else:
        assert high == 1


def test_check_values_of_the_exact_interval() -> None:
    """Fifteen of twenty, and twenty of twenty, as tables print them."""
    assert win_rate_interval(15, 5) == pytest.approx((0.508954, 0.913429), abs=1e-6)
    assert win_rate_interval(20, 0) == pytest.approx((0.831566, 1.0), abs=1e-6)
    assert win_rate_interval(0, 0) == (0.0, 1.0)


def test_interval_of_many_seeds_is_narrow_and_finite() -> None:
    low, high = win_rate_interval(8_192, 8_192)
    assert 0.49 < low < 0.5 < high < 0.51


def test_bootstrap_is_keyed_and_holds_the_mean() -> None:
    differences = [0.5, -0.25, 1.0, 0.0, 0.75, 0.5, 0.25, -0.5]
    first = improvement_interval(differences, "a")
    assert first == improvement_interval(differences, "a")
    assert first != improvement_interval(differences, "b")
    low, high = first
    assert low < sum(differences) / 8 < high


def test_bootstrap_of_equal_differences_is_a_point() -> None:
    assert improvement_interval([0.25] * 20, "k") == (0.25, 0.25)
    assert improvement_interval([0.25], "k") == (0.25, 0.25)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    import random

    generator = random.Random(7)
    covered = 0
    for trial in range(100):
        sample = [generator.gauss(0.3, 1.0) for _ in range(40)]
        low, high = improvement_interval(sample, str(trial))
        covered += low <= 0.3 <= high
    assert covered >= 85
