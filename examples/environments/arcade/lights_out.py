"""Lights Out: switch all lights off; a press also switches the neighbours.

Boards are made by presses on a dark board, so all of them can be solved. Switching the
last light off pays 1 and ends the episode, as do too many presses, for 0. A light that
the board of the level does not have is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from pydantic import Field

from examples.environments.game import (
    Draws,
    Facts,
    Game,
    IllegalMove,
    Integer,
    Move,
    Reward,
    TextView,
)

SIZES = {1: 3, 2: 4, 3: 5}
PRESSES = {1: 3, 2: 5, 3: 8}
"""Different lights that are pressed to make a board."""


class Toggle(Move):
    """Press a light; they are numbered by rows from the top left, from 0."""

    light: Integer = Field(ge=0, le=SIZES[3] ** 2 - 1)


class LightsFacts(Facts):
    """The rows of the board, `*` lit and `.` dark."""

    board: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lights:
    """A square of lights, by rows, and the presses that are left."""

    lit: tuple[bool, ...]
    left: int

    @property
    def size(self) -> int:
        """Lights in a row."""
        return next(size for size in SIZES.values() if size * size == len(self.lit))

    @property
    def over(self) -> bool:
        """Whether all is dark, or no press is left."""
        return not any(self.lit) or not self.left

    def step(self, move: Toggle) -> tuple[Lights, Reward]:
        """Press a light.

        Raises:
            IllegalMove: If the board has no such light.
        """
        if move.light >= len(self.lit):
            message = f"there is no light {move.light}: the last is {len(self.lit) - 1}"
            raise IllegalMove(message)
        lit = press(self.lit, self.size, move.light)
        after = replace(self, lit=lit, left=self.left - 1)
        return after, int(not any(lit))

    def rows(self) -> list[str]:
        """Return the board as text."""
        text = "".join("*" if light else "." for light in self.lit)
        return [text[at : at + self.size] for at in range(0, len(text), self.size)]

    def view(self) -> TextView:
        """Draw the board."""
        heading = f"{self.left} presses left."
        if self.over:
            heading = "No press is left." if any(self.lit) else "All lights are off."
        return TextView(input_text="\n".join([heading, *self.rows()]))

    def facts(self) -> LightsFacts:
        """Return the board."""
        return LightsFacts(board=tuple(self.rows()))


def press(lit: tuple[bool, ...], size: int, light: int) -> tuple[bool, ...]:
    """Switch a light and the lights beside, above and below it."""
    row, column = divmod(light, size)
    return tuple(
        state ^ (abs(row - at // size) + abs(column - at % size) <= 1)
        for at, state in enumerate(lit)
    )


def deal(seed: int, level: int) -> Lights:
    """Press some lights of a dark board, again until one is lit."""
    size, attempt = SIZES[level], 0
    lit: tuple[bool, ...] = (False,) * (size * size)
    while not any(lit):
        draws = Draws(seed, attempt)
        for light in draws.sample(range(size * size), PRESSES[level]):
            lit = press(lit, size, light)
        attempt += 1
    return Lights(lit, 4 * PRESSES[level])


def solve(lit: tuple[bool, ...], size: int) -> list[int]:
    """Return the shortest list of lights to press.

    The first row is tried in every way; each row below then has to press exactly
    under the lights that are still lit above it ("light chasing").
    """
    solutions = []
    for first in product((False, True), repeat=size):
        board, presses = lit, [at for at in range(size) if first[at]]
        for light in presses:
            board = press(board, size, light)
        for light in range(size, size * size):
            if board[light - size]:
                board = press(board, size, light)
                presses.append(light)
        if not any(board):
            solutions.append(presses)
    return min(solutions, key=len)


def play(text: str) -> Toggle:
    """Press the first light of a shortest solution."""
    rows = text.splitlines()[1:]
    lit = tuple(light == "*" for light in "".join(rows))
    return Toggle(light=solve(lit, len(rows))[0])


GAME = Game(
    name="lights_out",
    kind="arcade",
    description=(
        "Switch all lights (*) off. A press on light row * width + column also "
        "switches the four beside it."
    ),
    move=Toggle,
    deal=deal,
    play=play,
    steps=9,
    facts=LightsFacts,
)
