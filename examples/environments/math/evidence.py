"""Evidence: averages, tables and what a test result says, all in whole numbers."""

from __future__ import annotations

import re
import statistics
from collections import Counter

from examples.environments.game import Draws
from examples.environments.math.question import (
    AnswerNumber,
    Problem,
    family,
    listed,
    numbers,
)

COUNTS = {1: 3, 2: 5, 3: 9}


def mean(draws: Draws, level: int) -> Problem:
    """The mean of some values, or on level 3 the one value that is missing."""
    count = COUNTS[level]
    average = draws.between(5, 10 * level)
    values = [average + draws.between(-4, 4) for _ in range(count - 1)]
    values.append(average * count - sum(values))
    shown = ", ".join(map(str, values[:-1]))
    if level == 3:
        text = f"The mean of {count} values is {average}. All but one are {shown}."
        return f"{text} What is the last?", values[-1]
    return f"What is the mean of {shown}, {values[-1]}?", average


def middle(draws: Draws, level: int) -> Problem:
    """Median or range of an odd number of values."""
    values = [draws.between(0, 20 * level) for _ in range(COUNTS[level])]
    shown = ", ".join(map(str, values))
    if draws.chance(0.5):
        return f"What is the range of {shown}?", max(values) - min(values)
    return f"What is the median of {shown}?", sorted(values)[len(values) // 2]


def mode(draws: Draws, level: int) -> Problem:
    """The value that occurs most often, of which there is one."""
    others = draws.sample(range(1, 10), 2 + level)
    often = others.pop()
    values = others * level + [often] * (level + 1)
    shown = ", ".join(map(str, draws.sample(values, len(values))))
    return f"Which value occurs most often in {shown}?", often


def screening(draws: Draws, level: int) -> Problem:
    """Bayes' rule in natural frequencies: the ill ones among the positive ones."""
    share = draws.between(1, 5) * (10 if level == 1 else 1)
    hit, alarm = draws.between(6, 9) * 10, draws.between(1, 4) * 10
    ill = 10 * share
    positive_ill = ill * hit // 100
    positive = positive_ill + (1000 - ill) * alarm // 100
    text = (
        f"Of 1000 people {share} % are ill. A test is positive for {hit} % of the ill "
        f"and for {alarm} % of the others."
    )
    if level < 3:
        return f"{text} How many people with a positive test are expected?", positive
    text += " Of those with a positive test, how many in 100 are ill, rounded down?"
    return text, 100 * positive_ill // positive


def independent(draws: Draws, level: int) -> Problem:
    """The count a table of two by two would have if its traits were independent."""
    unit = draws.between(1, 3 * level)
    a, b, c, d = (draws.between(1, 3 + level) for _ in range(4))
    row, column = a * unit * (c + d), c * unit * (a + b)
    total = unit * (a + b) * (c + d)
    text = (
        f"Of {total} people, {row} drink tea and {column} wear glasses. How many of "
        "the tea drinkers would wear glasses if the two were independent?"
    )
    return text, a * c * unit


def _mean(found: re.Match[str]) -> int:
    return int(statistics.mean(listed(found[1])))


def _missing(found: re.Match[str]) -> int:
    """Search for the value that brings the mean to what it is."""
    count, average, known = int(found[1]), int(found[2]), listed(found[3])
    return next(
        value for value in range(-500, 500) if sum(known) + value == count * average
    )


def _range(found: re.Match[str]) -> int:
    ordered = sorted(listed(found[1]))
    return ordered[-1] - ordered[0]


def _screened(found: re.Match[str]) -> int:
    """Sort the 1000 people one by one."""
    share, hit, alarm = map(int, found.groups()[:3])
    ill = 1000 * share // 100
    true = sum(100 * (n + 1) <= ill * hit for n in range(ill))
    false = sum(100 * (n + 1) <= (1000 - ill) * alarm for n in range(1000 - ill))
    return true + false if found[4].startswith("How") else 100 * true // (true + false)


def _expected(found: re.Match[str]) -> int:
    total, row, column = numbers(found)
    return row * column // total


GAME = family(
    "evidence",
    "Weigh the data and answer with a whole number.",
    AnswerNumber,
    {
        "mean": mean,
        "middle": middle,
        "mode": mode,
        "screening": screening,
        "independent": independent,
    },
    {
        r"What is the mean of (.+)\?": _mean,
        r"The mean of (\d+) values is (\d+)\. All but one are (.+)\. "
        r"What is the last\?": _missing,
        r"What is the range of (.+)\?": _range,
        r"What is the median of (.+)\?": lambda found: int(
            statistics.median(listed(found[1]))
        ),
        r"Which value occurs most often in (.+)\?": lambda found: Counter(
            listed(found[1])
        ).most_common(1)[0][0],
        r"Of 1000 people (\d+) % are ill\. A test is positive for (\d+) % of the ill "
        r"and for (\d+) % of the others\. (.+)": _screened,
        r"Of (\d+) people, (\d+) drink tea and (\d+) wear glasses\. "
        r"How many of the tea drinkers would wear glasses "
        r"if the two were independent\?": _expected,
    },
)
