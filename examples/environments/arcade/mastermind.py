"""Mastermind: find the secret code from how many pegs of each guess are right.

The answer to a guess counts black pegs (right colour at the right place) and white
ones (right colour elsewhere). Finding the code within the guesses pays 1, running out
pays 0. A guess of the wrong length or with a colour the level does not have is
refused. `state` tells the code when the episode is over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product

from pydantic import Field

from examples.environments.game import (
    Draws,
    Facts,
    Game,
    IllegalMove,
    Move,
    Reward,
    TextView,
)

COLOURS = {1: "abcd", 2: "abcdef", 3: "abcdefgh"}
LENGTHS = {1: 3, 2: 4, 3: 4}
GUESSES = 10


class Guess(Move):
    """Guess the code: one letter a peg."""

    code: str = Field(pattern="^[a-h]{3,4}$")


class MastermindFacts(Facts):
    """The guesses with their answers; the code when the episode is over."""

    guesses: tuple[str, ...] = ()
    code: str | None = None


@dataclass(frozen=True)
class Mastermind:
    """A secret code and the guesses so far."""

    code: str
    colours: str
    guesses: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether the last guess was the code."""
        return self.guesses[-1:] == (self.code,)

    @property
    def over(self) -> bool:
        """Whether the code is found or no guess is left."""
        return self.found or len(self.guesses) == GUESSES

    def step(self, move: Guess) -> tuple[Mastermind, Reward]:
        """Guess the code.

        Raises:
            IllegalMove: If it has another length, or colours that are not in use.
        """
        if len(move.code) != len(self.code) or not set(move.code) <= set(self.colours):
            message = f"a code has {len(self.code)} letters of {self.colours}"
            raise IllegalMove(message)
        after = replace(self, guesses=(*self.guesses, move.code))
        return after, int(after.found)

    def lines(self) -> list[str]:
        """Return the guesses with their answers."""
        answers = ((guess, *pegs(self.code, guess)) for guess in self.guesses)
        return [
            f"{guess}: {black} black, {white} white" for guess, black, white in answers
        ]

    def view(self) -> TextView:
        """Show the guesses and their answers."""
        heading = (
            f"{len(self.code)} pegs of {self.colours}. "
            f"Guess {len(self.guesses) + 1} of {GUESSES}."
        )
        if self.over:
            heading = "Found." if self.found else f"The code was {self.code}."
        return TextView(input_text="\n".join([heading, *self.lines()]))

    def facts(self) -> MastermindFacts:
        """Return the guesses, and the code at the end."""
        return MastermindFacts(
            guesses=tuple(self.lines()), code=self.code if self.over else None
        )


def pegs(code: str, guess: str) -> tuple[int, int]:
    """Return the black and the white pegs of a guess."""
    black = sum(a == b for a, b in zip(code, guess, strict=True))
    shared = sum(min(code.count(peg), guess.count(peg)) for peg in set(guess))
    return black, shared - black


def deal(seed: int, level: int) -> Mastermind:
    """Draw a code; colours may repeat."""
    draws, colours = Draws(seed), COLOURS[level]
    code = "".join(draws.choice(colours) for _ in range(LENGTHS[level]))
    return Mastermind(code, colours)


def play(text: str) -> Guess:
    """Guess the middle one of the codes that explain every answer."""
    heading = re.match(r"(\d+) pegs of (\w+)", text)
    assert heading, text  # noqa: S101 - every running position says so
    codes = ["".join(code) for code in product(heading[2], repeat=int(heading[1]))]
    for guess, black, white in re.findall(r"(\w+): (\d) black, (\d) white", text):
        answer = int(black), int(white)
        codes = [code for code in codes if pegs(code, guess) == answer]
    return Guess(code=codes[len(codes) // 2])


GAME = Game(
    name="mastermind",
    kind="arcade",
    description=(
        "Find the secret code. Black: right colour and place; white: right colour only."
    ),
    move=Guess,
    deal=deal,
    play=play,
    steps=GUESSES,
    facts=MastermindFacts,
)
