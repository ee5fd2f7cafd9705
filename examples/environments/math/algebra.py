"""Algebra: equations with whole solutions, systems, quadratics and sequences.

Problems are drawn from their solution; the solvers search for it or use the formula.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import isqrt

from examples.environments.game import Draws
from examples.environments.math.question import (
    AnswerNumber,
    Problem,
    family,
    listed,
)
from examples.environments.math.terms import coefficients_of, polynomial, read, write

LIMITS = {1: 9, 2: 15, 3: 30}


def linear(draws: Draws, level: int) -> Problem:
    """One unknown: on one side, on both, and on level 3 behind brackets."""
    limit = LIMITS[level]
    x = draws.between(-limit, limit)
    a, b = draws.between(2, 9), draws.between(1, limit) * draws.choice((1, -1))
    if level == 1:
        return f"Solve {polynomial((b, a))} = {a * x + b}.", x
    c = draws.between(1, a - 1)
    if level == 2:
        right = polynomial(((a - c) * x + b, c))
        return f"Solve {polynomial((b, a))} = {right}.", x
    right = polynomial((a * (x + b) - c * x, c))
    return f"Solve {a}({polynomial((b, 1))}) = {right}.", x


def system(draws: Draws, level: int) -> Problem:
    """Two equations with two unknowns, of which x is asked for."""
    limit = LIMITS[level]
    x, y = draws.between(-limit, limit), draws.between(-limit, limit)
    a, b = draws.between(1, 5), draws.between(1, 5)
    # Signs that differ keep the two lines from being parallel.
    c, d = (1, -1) if level == 1 else (draws.between(1, 5), -draws.between(1, 5))
    first = f"{write(((a, 'x'), (b, 'y')))} = {a * x + b * y}"
    second = f"{write(((c, 'x'), (d, 'y')))} = {c * x + d * y}"
    return f"Given {first} and {second}, what is x?", x


def quadratic(draws: Draws, level: int) -> Problem:
    """The larger root of a quadratic with two whole roots."""
    limit = {1: 5, 2: 10, 3: 20}[level]
    first = draws.between(-limit, limit - 1)
    second = draws.between(first + 1, limit)
    shown = polynomial((first * second, -(first + second), 1))
    return f"What is the larger root of {shown} = 0?", second


def sequence(draws: Draws, level: int) -> Problem:
    """The next term: of constant differences, constant ratios, or growing steps."""
    start, step = draws.between(-9, 9), draws.between(2, 9)
    if level == 1:
        terms = [start + step * n for n in range(6)]
    elif level == 2:
        ratio = draws.between(2, 3)
        terms = [step * ratio**n for n in range(6)]
    else:
        growth = draws.between(1, 5)
        terms = [start + step * n + growth * n * (n - 1) // 2 for n in range(6)]
    shown = ", ".join(map(str, terms[:-1]))
    return f"Which number comes next: {shown}?", terms[-1]


def _searched(found: re.Match[str]) -> int:
    """Try all x for which the left side may equal the right side."""
    factor = int(found[1] or 1)
    left, right = (coefficients_of(side) for side in (found[2], found[3]))
    return next(
        x
        for x in range(-99, 100)
        if factor * (left[1] * x + left[0]) == right[1] * x + right[0]
    )


def _eliminated(found: re.Match[str]) -> int:
    """Cramer's rule."""
    first, second = read(found[1]), read(found[3])
    a, b, c, d = first["x"], first["y"], second["x"], second["y"]
    e, f = int(found[2]), int(found[4])
    return (e * d - b * f) // (a * d - b * c)


def _larger_root(found: re.Match[str]) -> int:
    """The formula."""
    c, b, *_ = coefficients_of(found[1])
    return (-b + isqrt(b * b - 4 * c)) // 2


def _next_term(found: re.Match[str]) -> int:
    """Go on with constant ratios, or else with the table of differences."""
    terms = listed(found[1])
    if all(a * terms[1] == b * terms[0] for a, b in pairwise(terms)):
        return terms[-1] * terms[1] // terms[0] if terms[0] else 0
    following = 0
    while any(terms):
        following += terms[-1]
        terms = [b - a for a, b in pairwise(terms)]
    return following


GAME = family(
    "algebra",
    "Solve the problem and answer with a whole number.",
    AnswerNumber,
    {
        "linear": linear,
        "system": system,
        "quadratic": quadratic,
        "sequence": sequence,
    },
    {
        r"Solve (?:(\d+)\()?([^()=]+?)\)? = (.+)\.": _searched,
        r"Given (.+) = (-?\d+) and (.+) = (-?\d+), what is x\?": _eliminated,
        r"What is the larger root of (.+) = 0\?": _larger_root,
        r"Which number comes next: (.+)\?": _next_term,
    },
)
