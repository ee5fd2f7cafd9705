"""Grid: walk over a field with rocks and pits to the goal, several cells at a time.

A move is a direction and a distance: the one action of the pack with two fields. The
walk passes cell by cell; a rock or the edge in the way refuses the whole move. Every
move costs 0.1, the goal pays 1.0, a pit costs 1.0 and ends the episode. On difficulty
3 the wind blows one cell in a fixed direction after every move, unless blocked.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeAlias, get_args

from pydantic import Field

from examples.environments.board import COMPASS, Cell, beside, find, square
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

Direction: TypeAlias = Literal["north", "east", "south", "west"]

LONGEST = 3
SIZES = {1: 5, 2: 6, 3: 7}
SHARE = 0.15
"""Of the cells that are rocks, and of those that are pits."""
STEP_LIMIT = 24
MOVE_REWARD = -0.1
GOAL_REWARD = 1.0
PIT_REWARD = -1.0


class Walk(Move):
    """Walk some cells in one direction."""

    direction: Direction
    distance: Integer = Field(ge=1, le=LONGEST)


class GridFacts(Facts):
    """The field and where the walker is, as rows and columns from 0."""

    field: tuple[str, ...] = ()
    row: int = 0
    column: int = 0
    wind: str | None = None


@dataclass(frozen=True)
class Grid:
    """A field: `#` rock, `o` pit, `G` goal, `.` free; and a walker on it."""

    field: tuple[str, ...]
    wind: str | None = None
    at: Cell = (0, 0)
    taken: int = 0

    @property
    def over(self) -> bool:
        """Whether the walker is at the goal, in a pit, or out of steps."""
        return self.cell(self.at) in set("Go") or self.taken == STEP_LIMIT

    def cell(self, at: Cell) -> str:
        """Return what is at a cell; outside of the field everything is rock."""
        row, column = at
        inside = 0 <= row < len(self.field) and 0 <= column < len(self.field)
        return self.field[row][column] if inside else "#"

    def step(self, move: Walk) -> tuple[Grid, Reward]:
        """Walk, then drift with the wind.

        Raises:
            IllegalMove: If a rock or the edge is in the way.
        """
        at = self.at
        for _ in range(move.distance):
            at = self._walked(at, move.direction)
            if self.cell(at) in set("Go"):
                break
        else:
            drifted = beside(at, self.wind) if self.wind else at
            at = at if self.cell(drifted) == "#" else drifted
        after = replace(self, at=at, taken=self.taken + 1)
        ends = {"G": GOAL_REWARD, "o": PIT_REWARD}
        return after, ends.get(self.cell(at), MOVE_REWARD)

    def _walked(self, at: Cell, direction: str) -> Cell:
        after = beside(at, direction)
        if self.cell(after) == "#":
            message = f"something is in the way to the {direction}"
            raise IllegalMove(message)
        return after

    def view(self) -> TextView:
        """Draw the field, north up, with the walker as `A`."""
        ends = {"G": "You reached the goal.", "o": "You fell into a pit."}
        heading = ends.get(self.cell(self.at), f"Move {self.taken + 1}.")
        if self.wind:
            heading += f" The wind blows {self.wind}."
        rows = [list(row) for row in self.field]
        rows[self.at[0]][self.at[1]] = "A"
        return TextView(input_text="\n".join([heading, *map("".join, rows)]))

    def facts(self) -> GridFacts:
        """Return the field and the walker's place."""
        row, column = self.at
        return GridFacts(field=self.field, row=row, column=column, wind=self.wind)


def deal(seed: int, level: int) -> Grid:
    """Draw fields until one has a way that still pays."""
    size, attempt = SIZES[level], 0
    while True:
        draws = Draws(seed, attempt)
        cells = square(size)[1:-1]
        count = int(len(cells) * SHARE)
        marks = dict.fromkeys(draws.sample(cells, 2 * count), "o")
        marks |= dict.fromkeys(list(marks)[:count], "#")
        marks[size - 1, size - 1] = "G"
        rows = (
            "".join(marks.get((r, c), ".") for c in range(size)) for r in range(size)
        )
        wind = draws.choice(tuple(COMPASS)) if level == max(SIZES) else None
        grid = Grid(tuple(rows), wind)
        if 0 < len(plan(grid)) < 1 + GOAL_REWARD / -MOVE_REWARD:
            return grid
        attempt += 1


def plan(grid: Grid) -> list[Walk]:
    """Return the fewest moves to the goal, or none."""
    moves = [
        Walk(direction=direction, distance=distance)
        for direction, distance in product(get_args(Direction), range(1, LONGEST + 1))
    ]
    ways: dict[Cell, list[Walk]] = {grid.at: []}
    queue = deque([grid.at])
    while queue:
        at = queue.popleft()
        for move in moves:
            try:
                after, _ = replace(grid, at=at, taken=0).step(move)
            except IllegalMove:
                continue
            if after.cell(after.at) == "G":
                return [*ways[at], move]
            if after.cell(after.at) != "o" and after.at not in ways:
                ways[after.at] = [*ways[at], move]
                queue.append(after.at)
    return []


def play(text: str) -> Walk:
    """Walk the shortest way."""
    heading, *rows = text.splitlines()
    wind = re.search(r"blows (\w+)", heading)
    field = tuple(line.replace("A", ".") for line in rows)
    return plan(Grid(field, wind[1] if wind else None, find(rows, "A")))[0]


GAME = Game(
    name="grid",
    kind="synthesis",
    description=(
        "Walk from A to the goal G in few moves. # is a rock, o a pit; north is up."
    ),
    move=Walk,
    deal=deal,
    play=play,
    steps=12,
    facts=GridFacts,
    reward="float",
)
