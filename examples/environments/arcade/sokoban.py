"""Sokoban: push every box onto a goal.

Boards are made backwards: boxes begin on the goals and are pulled away by a random
walk, so each board can be solved. A box that comes onto a goal pays 1, one that leaves
it costs 1, and the episode ends when all are there or the steps run out. Walking into
a wall, or pushing a box that cannot move, is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeAlias

from examples.environments.board import SCREEN, Cell, beside, square
from examples.environments.game import (
    ChoiceView,
    Draws,
    Facts,
    Game,
    IllegalMove,
    Move,
    Reward,
)

Cells: TypeAlias = frozenset[Cell]
Things: TypeAlias = tuple[Cells, Cell]
"""What moves: the boxes and the worker."""

SIZES = {1: 4, 2: 5, 3: 6}
BOXES = {1: 1, 2: 2, 3: 3}
PULLS = {1: 4, 2: 8, 3: 14}
PILLAR_SHARE = 0.1
STEPS_A_BOX = 30


class Step(Move):
    """Walk one cell, pushing a box that is in the way."""

    direction: Literal["up", "right", "down", "left"]


class SokobanFacts(Facts):
    """The board in the usual letters, and the boxes on their goals."""

    board: tuple[str, ...] = ()
    placed: int = 0


@dataclass(frozen=True)
class Sokoban:
    """A room, its goals, the boxes, and the worker."""

    floor: Cells
    goals: Cells
    boxes: Cells
    worker: Cell
    left: int

    @property
    def placed(self) -> int:
        """Boxes on goals."""
        return len(self.boxes & self.goals)

    @property
    def over(self) -> bool:
        """Whether all boxes are placed or no step is left."""
        return self.placed == len(self.goals) or not self.left

    def legal(self) -> list[str]:
        """Return the directions that are open."""
        return [way for way in SCREEN if self._moved(way)]

    def _moved(self, direction: str) -> Things | None:
        return moved(self.floor, (self.boxes, self.worker), direction)

    def step(self, move: Step) -> tuple[Sokoban, Reward]:
        """Walk or push.

        Raises:
            IllegalMove: If a wall, or a box that cannot move, is in the way.
        """
        things = self._moved(move.direction)
        if things is None:
            message = f"cannot go {move.direction}"
            raise IllegalMove(message)
        boxes, worker = things
        after = replace(self, boxes=boxes, worker=worker, left=self.left - 1)
        return after, after.placed - self.placed

    def rows(self) -> list[str]:
        """Return the board; `*` is a box on a goal, `+` the worker on one."""
        side = range(max(map(max, self.floor)) + 2)
        return ["".join(self._shown((r, c)) for c in side) for r in side]

    def _shown(self, cell: Cell) -> str:
        goal = cell in self.goals
        if cell == self.worker:
            return "+" if goal else "@"
        if cell in self.boxes:
            return "*" if goal else "$"
        if cell not in self.floor:
            return "#"
        return "." if goal else " "

    def view(self) -> ChoiceView:
        """Draw the board."""
        heading = (
            f"{self.placed} of {len(self.goals)} boxes placed, {self.left} steps left."
        )
        return ChoiceView(
            input_text="\n".join([heading, *self.rows()]),
            legal_actions=[] if self.over else self.legal(),
        )

    def facts(self) -> SokobanFacts:
        """Return the board."""
        return SokobanFacts(board=tuple(self.rows()), placed=self.placed)


def moved(floor: Cells, things: Things, direction: str) -> Things | None:
    """Return boxes and worker after a step, or None if something is in the way."""
    boxes, worker = things
    ahead = beside(worker, direction)
    if ahead in boxes:
        behind = beside(ahead, direction)
        if behind not in floor or behind in boxes:
            return None
        return boxes - {ahead} | {behind}, ahead
    return (boxes, ahead) if ahead in floor else None


def reachable(floor: Cells, boxes: Cells, start: Cell) -> set[Cell]:
    """Return the cells a worker can walk to without pushing."""
    seen, edge = {start}, [start]
    while edge:
        at = edge.pop()
        around = {beside(at, way) for way in SCREEN}
        fresh = (around & floor) - boxes - seen
        seen |= fresh
        edge.extend(fresh)
    return seen


def deal(seed: int, level: int) -> Sokoban:
    """Pull boxes away from their goals until none is left on one."""
    attempt = 0
    while True:
        board = _pulled(Draws(seed, attempt), level)
        if board is not None and not board.placed:
            return board
        attempt += 1


def _pulled(draws: Draws, level: int) -> Sokoban | None:
    cells = square(SIZES[level], 1)
    pillars = draws.sample(cells, int(len(cells) * PILLAR_SHARE))
    floor = frozenset(cells) - set(pillars)
    *goals, worker = draws.sample(sorted(floor), BOXES[level] + 1)
    boxes = frozenset(goals)
    for _ in range(PULLS[level]):
        pulls = sorted(_pulls(floor, boxes, worker))
        if not pulls:
            return None
        box, direction = draws.choice(pulls)
        # The worker stands beside the box, walks away from it, and the box follows.
        boxes = boxes - {box} | {beside(box, direction, -1)}
        worker = beside(box, direction, -2)
    left = STEPS_A_BOX * BOXES[level]
    return Sokoban(floor, frozenset(goals), boxes, worker, left)


def _pulls(floor: Cells, boxes: Cells, worker: Cell) -> Iterator[tuple[Cell, str]]:
    area = reachable(floor, boxes, worker)
    free = floor - boxes
    for box, way in product(boxes, SCREEN):
        if beside(box, way, -1) in area and beside(box, way, -2) in free:
            yield box, way


def solve(board: Sokoban) -> list[str]:
    """Return the fewest steps that place all boxes, or none if there are none."""
    start = (board.boxes, board.worker)
    ways: dict[Things, tuple[Things, str]] = {start: (start, "")}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        if here[0] == board.goals:
            return _steps_to(here, ways)
        for direction in SCREEN:
            after = moved(board.floor, here, direction)
            if after is None or after in ways:
                continue
            if after[0] is here[0] or not _stuck(board, after[0]):
                ways[after] = (here, direction)
                queue.append(after)
    return []


def _steps_to(end: Things, ways: dict[Things, tuple[Things, str]]) -> list[str]:
    steps: list[str] = []
    while ways[end][1]:
        end, direction = ways[end]
        steps.append(direction)
    return steps[::-1]


def _stuck(board: Sokoban, boxes: Cells) -> bool:
    """Say whether a box stands in a corner for ever."""
    for box in boxes - board.goals:
        walls = {way for way in SCREEN if beside(box, way) not in board.floor}
        if walls & {"up", "down"} and walls & {"left", "right"}:
            return True
    return False


def play(text: str) -> Step:
    """Take the first step of a shortest solution."""
    steps = solve(read(text))
    return Step.model_validate({"direction": steps[0] if steps else "up"})


def read(text: str) -> Sokoban:
    """Return the board that a text shows."""
    rows = text.splitlines()[1:]
    marks = {(r, c): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}
    return Sokoban(
        floor=frozenset(cell for cell, mark in marks.items() if mark != "#"),
        goals=frozenset(cell for cell, mark in marks.items() if mark in ".*+"),
        boxes=frozenset(cell for cell, mark in marks.items() if mark in "$*"),
        worker=next(cell for cell, mark in marks.items() if mark in "@+"),
        left=STEPS_A_BOX,
    )


GAME = Game(
    name="sokoban",
    kind="arcade",
    description=(
        "Push every box $ onto a goal (.). You are @; # is wall, * a box on its goal."
    ),
    move=Step,
    deal=deal,
    play=play,
    steps=STEPS_A_BOX,
    view=ChoiceView,
    facts=SokobanFacts,
)
