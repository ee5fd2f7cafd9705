"""Reason: orders, liars, syllogisms and calendars. Answers are single words.

Every problem has exactly one answer: problems of orders and liars are drawn until the
statements leave one possible world, and the solvers look at all worlds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise, permutations, product

from examples.environments.game import Draws
from examples.environments.math.question import AnswerWord, Problem, family

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
DAYS = (
    *("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"),
    *("Saturday", "Sunday"),
)
THINGS = ("wugs", "blips", "zorks", "fens", "mips", "tolls", "quims", "daxes")


def order(draws: Draws, level: int) -> Problem:
    """Who is tallest, or shortest, of some people."""
    people = draws.sample(NAMES, 2 + level)
    facts = [f"{a} is taller than {b}." for a, b in pairwise(people)]
    told = " ".join(draws.sample(facts, len(facts)))
    if draws.chance(0.5):
        return f"{told} Who is the tallest?", people[0]
    return f"{told} Who is the shortest?", people[-1]


def knaves(draws: Draws, level: int) -> Problem:
    """Knights tell the truth, knaves lie: is one of them a knight?"""
    people = sorted(draws.sample(NAMES, 1 + level))
    while True:
        asked, text = draws.choice(people), _testimony(draws, people)
        verdicts = {world[asked] for world in worlds(text)}
        if len(verdicts) == 1:
            rule = "Knights always tell the truth, knaves always lie."
            answer = "yes" if verdicts.pop() else "no"
            return f"{rule} {text} Is {asked} a knight, yes or no?", answer


def _testimony(draws: Draws, people: list[str]) -> str:
    """Draw a world and what its people say of each other."""
    world = {name: draws.chance(0.5) for name in people}
    said = []
    for speaker in people:
        about = draws.choice([name for name in people if name != speaker])
        # A knight names what the other is, a knave the opposite.
        role = "knight" if world[about] == world[speaker] else "knave"
        said.append(f"{speaker} says: {about} is a {role}.")
    # Turning every role round leaves what is said true: a count tells them apart.
    said.append(f"There are {sum(world.values())} knights.")
    return " ".join(said)


def worlds(text: str) -> Iterator[dict[str, bool]]:
    """Return every way to be knights and knaves that fits what is said."""
    said = re.findall(r"(\w+) says: (\w+) is a (\w+)\.", text)
    count = int(re.findall(r"There are (\d+) knights", text)[0])
    people = sorted({name for speaker, about, _ in said for name in (speaker, about)})
    for roles in product((False, True), repeat=len(people)):
        world = dict(zip(people, roles, strict=True))
        true = all(world[a] == (world[b] == (role == "knight")) for a, b, role in said)
        if true and sum(roles) == count:
            yield world


def syllogism(draws: Draws, level: int) -> Problem:
    """Whether a chain of statements makes another one certain."""
    things = draws.sample(THINGS, 2 + level)
    links = [f"All {a} are {b}." for a, b in pairwise(things)]
    first, last = 0, len(things) - 1
    if draws.chance(0.5):
        first, last = last, first
    told = " ".join(draws.sample(links, len(links)))
    text = (
        f"{told} Is it certain that all {things[first]} are {things[last]}, yes or no?"
    )
    return text, "yes" if first < last else "no"


def calendar(draws: Draws, level: int) -> Problem:
    """The day of the week some days before or after another."""
    today = draws.below(7)
    distance = draws.between(2, {1: 10, 2: 60, 3: 400}[level])
    if level > 1 and draws.chance(0.5):
        text = f"Today is {DAYS[today]}. Which day was it {distance} days ago?"
        return text, DAYS[(today - distance) % 7]
    text = f"Today is {DAYS[today]}. Which day is it in {distance} days?"
    return text, DAYS[(today + distance) % 7]


def _ordered(found: re.Match[str]) -> str:
    """Try every order of the people."""
    facts = re.findall(r"(\w+) is taller than (\w+)\.", found[1])
    people: list[str] = sorted({name for fact in facts for name in fact})
    fitting = next(
        row
        for row in permutations(people)
        if all(row.index(a) < row.index(b) for a, b in facts)
    )
    return fitting[0 if found[2] == "tallest" else -1]


def _unmasked(found: re.Match[str]) -> str:
    world = next(worlds(found[1]))
    return "yes" if world[found[2]] else "no"


def _followed(found: re.Match[str]) -> str:
    """Follow the chain from its first member."""
    links = dict(re.findall(r"All (\w+) are (\w+)\.", found[1]))
    at = found[2]
    while at in links:
        at = links[at]
        if at == found[3]:
            return "yes"
    return "no"


def _walked(found: re.Match[str]) -> str:
    """Go day by day."""
    day = DAYS.index(found[1])
    for _ in range(int(found[2])):
        day += -1 if found[3] == "ago" else 1
        day = day % len(DAYS)
    return DAYS[day]


GAME = family(
    "reason",
    "Solve the puzzle and answer with one word.",
    AnswerWord,
    {
        "order": order,
        "knaves": knaves,
        "syllogism": syllogism,
        "calendar": calendar,
    },
    {
        r"((?:\w+ is taller than \w+\. )+)Who is the (tallest|shortest)\?": _ordered,
        r"Knights always tell the truth, knaves always lie\. (.+) "
        r"Is (\w+) a knight, yes or no\?": _unmasked,
        r"((?:All \w+ are \w+\. )+)Is it certain that all (\w+) are (\w+), "
        r"yes or no\?": _followed,
        r"Today is (\w+)\. Which day (?:was|is) it (?:in )?(\d+) days ?(ago)?\?": (
            _walked
        ),
    },
)
