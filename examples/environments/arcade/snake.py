"""Snake: steer to the food without running into a wall or yourself.

Every food pays 1 and makes the snake one cell longer; a crash costs 1 and ends the
episode, as do the last food of the level (with nothing but its reward) and starving.
Turning back on the spot is refused. The seed draws where each food appears.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from examples.environments.board import SCREEN, Cell, beside, find, square
from examples.environments.game import (
    ChoiceView,
    Draws,
    Facts,
    Game,
    IllegalMove,
    Move,
    Reward,
)

SIZES = {1: 5, 2: 6, 3: 8}
FOODS = {1: 2, 2: 5, 3: 10}


class Steer(Move):
    """Move the head one cell."""

    direction: Literal["up", "right", "down", "left"]


class SnakeFacts(Facts):
    """The field's side, the body from head to tail, and the food, as [row, column]."""

    size: int = 0
    body: tuple[Cell, ...] = ()
    food: Cell | None = None
    eaten: int = 0


@dataclass(frozen=True)
class Snake:
    """A snake on a square field; `food` is None when the last one was eaten."""

    seed: int
    level: int
    body: tuple[Cell, ...]
    food: Cell | None
    eaten: int = 0
    hunger: int = 0
    crashed: bool = False

    @property
    def size(self) -> int:
        """Side of the field."""
        return SIZES[self.level]

    @property
    def starved(self) -> bool:
        """Whether the food took more steps than the field has cells."""
        return self.hunger > self.size * self.size

    @property
    def over(self) -> bool:
        """Whether the snake crashed, starved, or ate everything."""
        return self.crashed or self.starved or self.food is None

    def legal(self) -> list[str]:
        """Return the directions that do not turn back."""
        return [way for way in SCREEN if beside(self.body[0], way) != self.body[1]]

    def step(self, move: Steer) -> tuple[Snake, Reward]:
        """Move the head, and the tail unless there is food.

        Raises:
            IllegalMove: If the snake would turn back on the spot.
        """
        if move.direction not in self.legal():
            message = f"cannot turn back {move.direction}"
            raise IllegalMove(message)
        head = beside(self.body[0], move.direction)
        if head == self.food:
            return self._fed(head), 1
        # The tail moves away in the same step, so its cell is free.
        if head in self.body[:-1] or not _inside(head, self.size):
            return replace(self, crashed=True), -1
        body = (head, *self.body[:-1])
        return replace(self, body=body, hunger=self.hunger + 1), 0

    def _fed(self, head: Cell) -> Snake:
        body, eaten = (head, *self.body), self.eaten + 1
        food = None
        if eaten < FOODS[self.level]:
            food = _food(self.seed, self.size, body)
        return replace(self, body=body, food=food, eaten=eaten, hunger=0)

    def view(self) -> ChoiceView:
        """Draw the field: `H` head, `o` body, `t` tail, `*` food."""
        heading = f"Eaten {self.eaten} of {FOODS[self.level]}."
        if self.over:
            state = {self.crashed: "crashed", self.starved: "starved"}
            heading += f" The snake {state.get(True, 'is full')}."
        marks = dict.fromkeys(self.body, "o") | {self.body[-1]: "t"}
        marks[self.body[0]] = "H"
        if self.food:
            marks[self.food] = "*"
        sides = range(self.size)
        rows = ("".join(marks.get((r, c), ".") for c in sides) for r in sides)
        return ChoiceView(
            input_text="\n".join([heading, *rows]),
            legal_actions=[] if self.over else self.legal(),
        )

    def facts(self) -> SnakeFacts:
        """Return field, body and food."""
        return SnakeFacts(
            size=self.size, body=self.body, food=self.food, eaten=self.eaten
        )


def _inside(cell: Cell, size: int) -> bool:
    return 0 <= cell[0] < size and 0 <= cell[1] < size


def _food(seed: int, size: int, body: tuple[Cell, ...]) -> Cell:
    free = [cell for cell in square(size) if cell not in body]
    return Draws(seed, len(body)).choice(free)


def deal(seed: int, level: int) -> Snake:
    """Put a snake of three cells somewhere, heading right, and the first food."""
    size = SIZES[level]
    row, column = Draws(seed).below(size), size // 2
    body = tuple((row, column - back) for back in range(3))
    return Snake(seed, level, body, _food(seed, size, body))


def play(text: str) -> Steer:
    """Go the shortest way to the food, else where there is most room."""
    rows = text.splitlines()[1:]
    marks = {(r, c): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}
    head = find(rows, "H")
    free = {cell for cell, mark in marks.items() if mark in ".*t"}
    best: tuple[tuple[int, int], str] = ((0, 0), "up")
    for direction in SCREEN:
        cell = beside(head, direction)
        if cell not in free:
            continue
        distances = _distances(cell, free - {head})
        meal = min((d for c, d in distances.items() if marks[c] == "*"), default=99)
        roomy = len(distances) >= sum(mark in "ot" for mark in marks.values())
        best = max(best, ((1 + roomy, -meal if roomy else len(distances)), direction))
    return Steer.model_validate({"direction": best[1]})


def _distances(start: Cell, free: set[Cell]) -> dict[Cell, int]:
    distances = {start: 0}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for direction in SCREEN:
            after = beside(cell, direction)
            if after in free and after not in distances:
                distances[after] = distances[cell] + 1
                queue.append(after)
    return distances


GAME = Game(
    name="snake",
    kind="arcade",
    description=(
        "Steer the snake's head H to the food *. Walls and its body (o, tail t) kill."
    ),
    move=Steer,
    deal=deal,
    play=play,
    steps=24,
    view=ChoiceView,
    facts=SnakeFacts,
)
