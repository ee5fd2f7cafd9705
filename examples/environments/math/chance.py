"""Chance: probabilities as exact fractions. The solvers list all outcomes."""

from __future__ import annotations

import re
from itertools import permutations, product
from math import comb

from examples.environments.game import Draws
from examples.environments.math.question import (
    AnswerFraction,
    Problem,
    family,
    numbers,
    ratio,
)


def marbles(draws: Draws, level: int) -> Problem:
    """Red marbles out of a bag: one, two, or three without putting back."""
    red = draws.between(level, 3 + 2 * level)
    blue = draws.between(1, 3 + 2 * level)
    bag = f"A bag has {red} red and {blue} blue marbles."
    if level == 1:
        return f"{bag} What is the probability to draw a red one?", ratio(
            red, red + blue
        )
    text = f"{bag} What is the probability that {level} drawn together are all red?"
    return text, ratio(comb(red, level), comb(red + blue, level))


def dice(draws: Draws, level: int) -> Problem:
    """The sum of one, two or three dice."""
    total = draws.between(level, 6 * level)
    rolls = list(product(range(1, 7), repeat=level))
    least = level > 1 and draws.chance(0.5)
    hits = sum(sum(roll) >= total if least else sum(roll) == total for roll in rolls)
    what = "at least" if least else "exactly"
    thrown = "A die is" if level == 1 else f"{level} dice are"
    text = f"{thrown} thrown. What is the probability of {what} {total} in sum?"
    return text, ratio(hits, len(rolls))


def coins(draws: Draws, level: int) -> Problem:
    """Heads of fair coins."""
    tosses = draws.between(2, 2 + 2 * level)
    heads = draws.between(0, tosses)
    text = f"A fair coin is tossed {tosses} times."
    if level < 3 or draws.chance(0.5):
        text += f" What is the probability of exactly {heads} heads?"
        return text, ratio(comb(tosses, heads), 2**tosses)
    hits = sum(comb(tosses, more) for more in range(heads, tosses + 1))
    return f"{text} What is the probability of at least {heads} heads?", ratio(
        hits, 2**tosses
    )


def given(draws: Draws, level: int) -> Problem:
    """A conditional probability of one die: given a bound, or given a parity."""
    sides = draws.choice({1: (6, 8), 2: (10, 12), 3: (20, 30)}[level])
    bound, number = draws.between(2, sides - 1), draws.between(2, 4)
    hits = [n for n in range(bound, sides + 1) if n % number == 0]
    text = (
        f"A die with sides 1 to {sides} shows at least {bound}. "
        f"What is the probability that it shows a multiple of {number}?"
    )
    return text, ratio(len(hits), sides - bound + 1)


def _share(hits: list[bool]) -> str:
    return ratio(sum(hits), len(hits))


def _drawn_one(found: re.Match[str]) -> str:
    red, blue = numbers(found)
    return _share([True] * red + [False] * blue)


def _drawn_some(found: re.Match[str]) -> str:
    red, blue, count = numbers(found)
    return _share(
        [all(m < red for m in d) for d in permutations(range(red + blue), count)]
    )


def _thrown(found: re.Match[str]) -> str:
    sums = [sum(roll) for roll in product(range(1, 7), repeat=int(found[1] or 1))]
    total = int(found[3])
    return _share([s >= total if found[2] == "at least" else s == total for s in sums])


def _tossed(found: re.Match[str]) -> str:
    heads = [sum(toss) for toss in product((0, 1), repeat=int(found[1]))]
    wanted = int(found[3])
    return _share(
        [h >= wanted if found[2] == "at least" else h == wanted for h in heads]
    )


def _shown(found: re.Match[str]) -> str:
    sides, bound, number = numbers(found)
    return _share([n % number == 0 for n in range(1, sides + 1) if n >= bound])


BAG = r"A bag has (\d+) red and (\d+) blue marbles\. What is the probability "

GAME = family(
    "chance",
    "Work out the probability and answer with a fraction such as 3/8.",
    AnswerFraction,
    {"marbles": marbles, "dice": dice, "coins": coins, "given": given},
    {
        BAG + r"to draw a red one\?": _drawn_one,
        BAG + r"that (\d+) drawn together are all red\?": _drawn_some,
        r"(?:A die is|(\d+) dice are) thrown\. What is the probability of "
        r"(exactly|at least) (\d+) in sum\?": _thrown,
        r"A fair coin is tossed (\d+) times\. What is the probability of "
        r"(exactly|at least) (\d+) heads\?": _tossed,
        r"A die with sides 1 to (\d+) shows at least (\d+)\. What is the probability "
        r"that it shows a multiple of (\d+)\?": _shown,
    },
)
