"""What the math families share: one question, one exact answer, one integer reward.

A family is a table of kinds. A kind draws a problem, its text and its one answer, from
a difficulty; the seed chooses the kind. The player of a family does not see that: it
recognises the text and computes the answer anew, most often in another way, which
holds the two to each other in the tests.

After the end every further step repeats the last observation and reward and changes
nothing (`frozen`), so a client whose answer was lost can ask again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeAlias

from pydantic import Field

from examples.environments.game import (
    Draws,
    Facts,
    Game,
    Integer,
    Move,
    Reward,
    TextView,
)

Value: TypeAlias = int | str
Problem: TypeAlias = tuple[str, Value]
"""A text and the one right answer."""
KindOfProblem: TypeAlias = Callable[[Draws, int], Problem]
Solver: TypeAlias = Callable[[re.Match[str]], Value]
"""Computes an answer from what a pattern found in a text."""


class AnswerNumber(Move):
    """Answer with a whole number."""

    answer: Integer


class AnswerFraction(Move):
    """Answer with a fraction such as 3/8; it need not be in lowest terms."""

    answer: str = Field(pattern="^[0-9]{1,6}/[1-9][0-9]{0,5}$")


class AnswerWord(Move):
    """Answer with one word."""

    answer: str = Field(pattern="^[A-Za-z]{1,12}$")


class QuestionFacts(Facts):
    """The kind of question and what was answered; the answer when it is over."""

    kind: str = ""
    answered: int | str | None = None
    answer: int | str | None = None


@dataclass(frozen=True)
class Question:
    """A question, and what was answered."""

    kind: str
    text: str
    answer: Value
    answered: Value | None = None

    @property
    def over(self) -> bool:
        """Whether it was answered."""
        return self.answered is not None

    @property
    def right(self) -> bool:
        """Whether the answer given is exactly the right one."""
        return self.over and same(self.answered, self.answer)

    def step(
        self, move: AnswerNumber | AnswerFraction | AnswerWord
    ) -> tuple[Question, Reward]:
        """Answer, and end the episode."""
        after = replace(self, answered=move.answer)
        return after, int(after.right)

    def view(self) -> TextView:
        """Ask, or say whether the answer was right."""
        if not self.over:
            return TextView(input_text=self.text)
        verdict = "Right." if self.right else f"Wrong: the answer is {self.answer}."
        return TextView(input_text=verdict)

    def facts(self) -> QuestionFacts:
        """Return kind and answers; the right one only at the end."""
        return QuestionFacts(
            kind=self.kind,
            answered=self.answered,
            answer=self.answer if self.over else None,
        )


def same(given: Value | None, answer: Value) -> bool:
    """Say whether an answer is right: numbers by value, words in either case."""
    if isinstance(given, str) and isinstance(answer, str):
        if "/" in given and "/" in answer:
            return Fraction(given) == Fraction(answer)
        return given.lower() == answer.lower()
    return given == answer


def family(
    name: str,
    description: str,
    move: type[Any],
    kinds: Mapping[str, KindOfProblem],
    solvers: Mapping[str, Solver],
) -> Game[Any]:
    """Return the environment of a family.

    Args:
        name: Name of the environment.
        description: What the policy is told.
        move: How an answer is given.
        kinds: The problems by the name of their kind.
        solvers: What computes the answer to a text, by a pattern of the whole text.
    """

    def deal(seed: int, level: int) -> Question:
        draws = Draws(seed)
        kind = draws.choice(tuple(kinds))
        text, answer = kinds[kind](draws, level)
        return Question(kind, text, answer)

    def play(text: str) -> Any:
        for pattern, solver in solvers.items():
            found = re.fullmatch(pattern, text)
            if found:
                return move(answer=solver(found))
        message = f"no solver knows the question {text!r}"
        raise LookupError(message)

    return Game(
        name=name,
        kind="math",
        description=description,
        move=move,
        deal=deal,
        play=play,
        steps=1,
        facts=QuestionFacts,
        frozen=True,
    )


def numbers(found: re.Match[str]) -> list[int]:
    """Return the groups of a match as whole numbers; a sign may stand apart."""
    return [int(group.replace(" ", "")) for group in found.groups()]


def listed(text: str) -> list[int]:
    """Return the numbers of a list such as `3, -1, 4`."""
    return [int(number) for number in text.split(", ")]


def ratio(part: int, total: int) -> str:
    """Return a probability as a fraction in lowest terms."""
    value = Fraction(part, total)
    return f"{value.numerator}/{value.denominator}"
