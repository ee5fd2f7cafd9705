"""Maze: find the way from one corner to the other.

The mazes are perfect: between any two rooms there is exactly one way, carved by a
depth-first walk of the seed. A step costs 0.01, the exit pays 1.0, both floats. A wall
refuses the step, and `legal_actions` lists the open directions of the room.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from examples.environments.board import COMPASS, Cell, beside, find, square
from examples.environments.game import (
    ChoiceView,
    Draws,
    Facts,
    Game,
    IllegalMove,
    Move,
    Reward,
)

SIZES = {1: 3, 2: 5, 3: 8}
STEP_REWARD = -0.01
EXIT_REWARD = 1.0


class Go(Move):
    """Go to the next room."""

    direction: Literal["north", "east", "south", "west"]


class MazeFacts(Facts):
    """The map, and the room's row and column from 0."""

    plan: tuple[str, ...] = ()
    row: int = 0
    column: int = 0


@dataclass(frozen=True)
class Maze:
    """A map and a room of it.

    Rooms are at the odd places of the map, walls and openings between them.
    """

    plan: tuple[str, ...]
    room: Cell = (0, 0)
    taken: int = 0

    @property
    def size(self) -> int:
        """Rooms in a row."""
        return len(self.plan) // 2

    @property
    def out(self) -> bool:
        """Whether the exit is reached."""
        return self.room == (self.size - 1, self.size - 1)

    @property
    def over(self) -> bool:
        """Whether the exit is reached, or too many steps were taken."""
        return self.out or self.taken == 4 * self.size**2

    def legal(self) -> list[str]:
        """Return the open directions."""
        ways = {way: beside(_place(self.room), way) for way in COMPASS}
        return [way for way, (r, c) in ways.items() if self.plan[r][c] != "#"]

    def step(self, move: Go) -> tuple[Maze, Reward]:
        """Go to the next room.

        Raises:
            IllegalMove: If there is a wall.
        """
        if move.direction not in self.legal():
            message = f"there is a wall to the {move.direction}"
            raise IllegalMove(message)
        room = beside(self.room, move.direction)
        after = replace(self, room=room, taken=self.taken + 1)
        return after, EXIT_REWARD if after.out else STEP_REWARD

    def view(self) -> ChoiceView:
        """Draw the map with `A` for the policy and `E` for the exit."""
        heading = "You are out." if self.out else f"Step {self.taken + 1}."
        rows = [list(row) for row in self.plan]
        rows[-2][-2] = "E"
        row, column = _place(self.room)
        rows[row][column] = "A"
        return ChoiceView(
            input_text="\n".join([heading, *map("".join, rows)]),
            legal_actions=[] if self.over else self.legal(),
        )

    def facts(self) -> MazeFacts:
        """Return map and room."""
        row, column = self.room
        return MazeFacts(plan=self.plan, row=row, column=column)


def _place(room: Cell) -> Cell:
    """Return where a room is on the map."""
    return 2 * room[0] + 1, 2 * room[1] + 1


def deal(seed: int, level: int) -> Maze:
    """Carve a maze."""
    size, draws = SIZES[level], Draws(seed)
    rooms = square(size)
    stack = [draws.choice(rooms)]
    seen, carved = {stack[0]}, {_place(room) for room in rooms}
    while stack:
        ways = {way: beside(stack[-1], way) for way in COMPASS}
        fresh = [
            way for way, room in ways.items() if room in rooms and room not in seen
        ]
        if not fresh:
            stack.pop()
            continue
        way = draws.choice(fresh)
        carved.add(beside(_place(stack[-1]), way))
        stack.append(ways[way])
        seen.add(ways[way])
    side = range(2 * size + 1)
    return Maze(tuple("".join(".#"[(r, c) not in carved] for c in side) for r in side))


def play(text: str) -> Go:
    """Go the one way to the exit."""
    rows = text.splitlines()[1:]
    start = (len(rows) - 2, len(rows) - 2)
    distances = {start: 0}
    queue = deque([start])
    while queue:
        place = queue.popleft()
        for after in (beside(place, way) for way in COMPASS):
            if rows[after[0]][after[1]] != "#" and after not in distances:
                distances[after] = distances[place] + 1
                queue.append(after)
    here = find(rows, "A")
    best = min(
        COMPASS, key=lambda way: distances.get(beside(here, way), len(distances))
    )
    return Go.model_validate({"direction": best})


GAME = Game(
    name="maze",
    kind="arcade",
    description="Go from A to the exit E. # is wall; north is up.",
    move=Go,
    deal=deal,
    play=play,
    steps=SIZES[1] ** 2,
    view=ChoiceView,
    facts=MazeFacts,
    reward="float",
)
