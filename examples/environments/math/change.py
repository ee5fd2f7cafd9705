"""Change: slopes, derivatives, areas under curves and growth, all with whole answers.

Polynomials are written with their highest power first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from examples.environments.game import Draws
from examples.environments.math.question import (
    AnswerNumber,
    Problem,
    family,
)
from examples.environments.math.terms import coefficients_of, polynomial


def _value(coefficients: Sequence[int], x: int) -> int:
    return sum(factor * x**power for power, factor in enumerate(coefficients))


def _drawn(draws: Draws, degree: int, multiple: int = 1) -> list[int]:
    lower = [draws.between(-5, 5) * multiple for _ in range(degree)]
    return [*lower, draws.between(1, 4) * multiple]


def slope(draws: Draws, level: int) -> Problem:
    """Average rate of change between two whole places."""
    factors = _drawn(draws, level)
    a = draws.between(-5, 4)
    b = a + draws.between(1, 3)
    text = (
        f"What is the average rate of change of {polynomial(factors)} "
        f"from x = {a} to x = {b}?"
    )
    return text, (_value(factors, b) - _value(factors, a)) // (b - a)


def derivative(draws: Draws, level: int) -> Problem:
    """Derivative of a polynomial at a place."""
    factors, x = _drawn(draws, level + 1), draws.between(-4, 4)
    slopes = [power * factor for power, factor in enumerate(factors)][1:]
    text = f"What is the derivative of {polynomial(factors)} at x = {x}?"
    return text, _value(slopes, x)


def integral(draws: Draws, level: int) -> Problem:
    """Definite integral; factors are multiples of 12, so that it is whole."""
    factors = _drawn(draws, level, 12)
    a = draws.between(-3, 2)
    b = a + draws.between(1, 3)
    primitive = [0, *(factor // (power + 1) for power, factor in enumerate(factors))]
    text = f"What is the integral of {polynomial(factors)} from x = {a} to x = {b}?"
    return text, _value(primitive, b) - _value(primitive, a)


def growth(draws: Draws, level: int) -> Problem:
    """A stock that multiplies and changes by a constant every year."""
    start, factor = draws.between(2, 20), draws.between(2, 3)
    constant, years = draws.between(-3, 9), {1: 1, 2: 3, 3: 5}[level]
    stock = start
    for _ in range(years):
        stock = stock * factor + constant
    change = f"grows by {constant}" if constant >= 0 else f"shrinks by {-constant}"
    text = (
        f"A stock of {start} is multiplied by {factor} every year and then {change}. "
        f"What is it after {years} years?"
    )
    return text, stock


def _difference_quotient(found: re.Match[str]) -> int:
    factors, (a, b) = coefficients_of(found[1]), (int(found[2]), int(found[3]))
    return (_value(factors, b) - _value(factors, a)) // (b - a)


def _double_horner(found: re.Match[str]) -> int:
    """Horner's scheme twice: the remainder of the quotient is the derivative."""
    x, value, first = int(found[2]), 0, 0
    for factor in reversed(coefficients_of(found[1])):
        first = first * x + value
        value = value * x + factor
    return first


def _simpson(found: re.Match[str]) -> int:
    """Simpson's rule, which is exact up to the third power."""
    factors, (a, b) = coefficients_of(found[1]), (int(found[2]), int(found[3]))
    middle = Fraction(a + b, 2)
    centre = sum(factor * middle**power for power, factor in enumerate(factors))
    area = (_value(factors, a) + 4 * centre + _value(factors, b)) * (b - a) / 6
    return int(area)


def _grown(found: re.Match[str]) -> int:
    """The closed form of the recurrence."""
    start, factor, verb, amount, years = found.groups()
    constant = int(amount) if verb == "grows" else -int(amount)
    power: int = int(factor) ** int(years)
    return int(start) * power + constant * (power - 1) // (int(factor) - 1)


PLACES = r"from x = (-?\d+) to x = (-?\d+)\?"

GAME = family(
    "change",
    "Work out the change and answer with a whole number.",
    AnswerNumber,
    {
        "slope": slope,
        "derivative": derivative,
        "integral": integral,
        "growth": growth,
    },
    {
        r"What is the average rate of change of (.+) " + PLACES: _difference_quotient,
        r"What is the derivative of (.+) at x = (-?\d+)\?": _double_horner,
        r"What is the integral of (.+) " + PLACES: _simpson,
        r"A stock of (\d+) is multiplied by (\d+) every year and then (grows|shrinks) "
        r"by (\d+)\. What is it after (\d+) years\?": _grown,
    },
)
