"""Discrete: counting, divisors, remainders and numerals. Solvers count one by one."""

from __future__ import annotations

import re
from functools import reduce
from itertools import combinations, permutations
from math import comb, factorial, gcd, lcm

from examples.environments.game import Draws
from examples.environments.math.question import (
    AnswerNumber,
    Problem,
    family,
    numbers,
)

WORDS = {
    1: ("CAT", "SUN", "DOG", "BEE", "EGG"),
    2: ("BOOK", "TREE", "LAMP", "NOON", "SALT"),
    3: ("APPLE", "LEVEL", "BREAD", "MAMMA", "ONION"),
}


def teams(draws: Draws, level: int) -> Problem:
    """Ways to choose some of many, or to choose and to rank them."""
    many = draws.between(4, {1: 6, 2: 8, 3: 9}[level])
    some = draws.between(2, min(many - 1, level + 2))
    if level > 1 and draws.chance(0.5):
        text = f"In how many orders can {some} of {many} runners come in first?"
        return text, factorial(many) // factorial(many - some)
    return f"How many teams of {some} can be made of {many} people?", comb(many, some)


def anagrams(draws: Draws, level: int) -> Problem:
    """Different orders of the letters of a word."""
    word = draws.choice(WORDS[level])
    repeats = [factorial(word.count(letter)) for letter in sorted(set(word))]
    orders = factorial(len(word)) // reduce(int.__mul__, repeats)
    return f"In how many different orders can the letters of {word} be written?", orders


def divisor(draws: Draws, level: int) -> Problem:
    """Greatest common divisor or least common multiple."""
    limit = {1: 6, 2: 12, 3: 25}[level]
    shared = draws.between(2, limit)
    a, b = shared * draws.between(2, limit), shared * draws.between(2, limit)
    if draws.chance(0.5):
        return f"What is the greatest common divisor of {a} and {b}?", gcd(a, b)
    return f"What is the least common multiple of {a} and {b}?", lcm(a, b)


def remainder(draws: Draws, level: int) -> Problem:
    """Remainder of a power."""
    number, modulus = (
        draws.between(2, 12),
        draws.between(3, {1: 7, 2: 13, 3: 31}[level]),
    )
    power = draws.between(2, {1: 3, 2: 10, 3: 60}[level])
    text = f"What is the remainder of {number}^{power} divided by {modulus}?"
    return text, pow(number, power, modulus)


def multiples(draws: Draws, level: int) -> Problem:
    """Numbers that two divisors share or do not, by inclusion and exclusion."""
    limit = draws.between(10, {1: 30, 2: 100, 3: 400}[level])
    a, b = draws.between(2, 6), draws.between(7, 11)
    both = limit // lcm(a, b)
    text = f"How many of the numbers from 1 to {limit} are divisible by {a}"
    if level == 1:
        return f"{text}?", limit // a
    either = limit // a + limit // b - both
    if level == 2:
        return f"{text} or {b}?", either
    return f"{text} or {b}, but not by both?", either - both


def numeral(draws: Draws, level: int) -> Problem:
    """A numeral of another base, in decimal."""
    base = {1: 2, 2: draws.between(3, 7), 3: draws.between(5, 9)}[level]
    places = {1: 4, 2: 4, 3: 6}[level]
    digits = [
        draws.between(1, base - 1),
        *(draws.below(base) for _ in range(places - 1)),
    ]
    written = "".join(map(str, digits))
    text = f"Which decimal number is {written} of base {base}?"
    return text, int(written, base)


def _counted_teams(found: re.Match[str]) -> int:
    some, many = numbers(found)
    return sum(1 for _ in combinations(range(many), some))


def _counted_orders(found: re.Match[str]) -> int:
    some, many = numbers(found)
    return sum(1 for _ in permutations(range(many), some))


def _first_common(found: re.Match[str]) -> int:
    """Try one number after another."""
    a, b = int(found[2]), int(found[3])
    if found[1] == "greatest common divisor":
        return next(n for n in range(min(a, b), 0, -1) if a % n == b % n == 0)
    return next(n for n in range(a, a * b + 1, a) if n % b == 0)


def _multiplied(found: re.Match[str]) -> int:
    number, power, modulus = numbers(found)
    rest = 1
    for _ in range(power):
        rest = rest * number % modulus
    return rest


def _counted_multiples(found: re.Match[str]) -> int:
    limit, a, b = int(found[1]), int(found[2]), int(found[3] or 0)
    counted = 0
    for n in range(1, limit + 1):
        one, other = n % a == 0, bool(b) and n % b == 0
        counted += one != other if found[4] else one or other
    return counted


def _summed(found: re.Match[str]) -> int:
    base = int(found[2])
    return sum(int(digit) * base**place for place, digit in enumerate(found[1][::-1]))


GAME = family(
    "discrete",
    "Solve the problem and answer with a whole number.",
    AnswerNumber,
    {
        "teams": teams,
        "anagrams": anagrams,
        "divisor": divisor,
        "remainder": remainder,
        "multiples": multiples,
        "numeral": numeral,
    },
    {
        r"How many teams of (\d+) can be made of (\d+) people\?": _counted_teams,
        r"In how many orders can (\d+) of (\d+) runners come in first\?": (
            _counted_orders
        ),
        r"In how many different orders can the letters of (\w+) be written\?": (
            lambda found: len(set(permutations(found[1])))
        ),
        r"What is the (.+) of (\d+) and (\d+)\?": _first_common,
        r"What is the remainder of (\d+)\^(\d+) divided by (\d+)\?": _multiplied,
        r"How many of the numbers from 1 to (\d+) are divisible by (\d+)"
        r"(?: or (\d+))?(, but not by both)?\?": _counted_multiples,
        r"Which decimal number is (\d+) of base (\d+)\?": _summed,
    },
)
