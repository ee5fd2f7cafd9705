"""2048: slide tiles so that equal ones merge, until the goal tile appears.

The rules of Gabriele Cirulli's game (2014) on its 4x4 board: a slide moves every tile
as far as it goes, two equal tiles merge once a slide, and a 2 (or, one time in ten, a
4) appears on a free cell, drawn from the seed and the number of the turn. A slide pays
what it merges, an integer. One that moves nothing is refused. The episode ends with the
goal tile of the level or when no slide is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from examples.environments.game import (
    ChoiceView,
    Draws,
    Facts,
    Game,
    IllegalMove,
    Move,
    Reward,
)

Row: TypeAlias = tuple[int, ...]
Board: TypeAlias = tuple[Row, ...]

SIDE = 4
DIRECTIONS = ("left", "up", "right", "down")
GOALS = {1: 32, 2: 64, 3: 128}
FOUR_PROBABILITY = 0.1


class Slide(Move):
    """Slide all tiles."""

    direction: Literal["left", "up", "right", "down"]


class TileFacts(Facts):
    """The board by rows, 0 for a free cell, and the points so far."""

    board: tuple[tuple[int, ...], ...] = ()
    score: int = 0


@dataclass(frozen=True)
class Tiles:
    """A board of tiles and the tile to reach."""

    seed: int
    goal: int
    board: Board
    score: int = 0
    taken: int = 0

    @property
    def won(self) -> bool:
        """Whether the goal tile is there."""
        return max(map(max, self.board)) >= self.goal

    @property
    def over(self) -> bool:
        """Whether the goal is reached or nothing can move."""
        return self.won or not legal(self.board)

    def step(self, move: Slide) -> tuple[Tiles, Reward]:
        """Slide, and let a new tile appear.

        Raises:
            IllegalMove: If nothing would move.
        """
        board, points = slide(self.board, move.direction)
        if board == self.board:
            message = f"nothing moves {move.direction}"
            raise IllegalMove(message)
        taken = self.taken + 1
        board = appear(board, Draws(self.seed, taken))
        after = replace(self, board=board, score=self.score + points, taken=taken)
        return after, points

    def view(self) -> ChoiceView:
        """Write the board as rows of numbers."""
        heading = f"Score {self.score}, goal {self.goal}."
        if self.over:
            heading += " You won." if self.won else " No slide is left."
        rows = (" ".join(map(str, row)) for row in self.board)
        return ChoiceView(
            input_text="\n".join([heading, *rows]),
            legal_actions=[] if self.over else legal(self.board),
        )

    def facts(self) -> TileFacts:
        """Return board and score."""
        return TileFacts(board=self.board, score=self.score)


def slide(board: Board, direction: str) -> tuple[Board, int]:
    """Return the board after a slide, and the points of its merges."""
    # Turned so that the slide goes left, and turned back.
    lines = _turned(board, direction)
    merged = [_merge(line) for line in lines]
    after = _turned(tuple(line for line, _ in merged), direction)
    return after, sum(points for _, points in merged)


def _turned(board: Board, direction: str) -> Board:
    """Return the board seen from one side; doing it twice changes nothing."""
    if direction in {"up", "down"}:
        board = tuple(zip(*board, strict=True))
    if direction == "right":
        return tuple(row[::-1] for row in board)
    if direction == "down":  # the anti-transpose is its own inverse
        return tuple(row[::-1] for row in board)[::-1]
    return board


def _merge(line: Row) -> tuple[Row, int]:
    tiles = [tile for tile in line if tile]
    merged: list[int] = []
    points = 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            points += tile
        merged.append(tile)
    return tuple(merged + [0] * (len(line) - len(merged))), points


def legal(board: Board) -> list[str]:
    """Return the directions in which something moves."""
    return [way for way in DIRECTIONS if slide(board, way)[0] != board]


def appear(board: Board, draws: Draws) -> Board:
    """Put a new tile on a free cell."""
    cells = [divmod(index, SIDE) for index in range(SIDE * SIDE)]
    place = draws.choice([cell for cell in cells if not board[cell[0]][cell[1]]])
    tile = 4 if draws.chance(FOUR_PROBABILITY) else 2
    return tuple(
        tuple(tile if (r, c) == place else old for c, old in enumerate(row))
        for r, row in enumerate(board)
    )


def deal(seed: int, level: int) -> Tiles:
    """Begin with two tiles."""
    draws = Draws(seed)
    board = appear(appear(((0,) * SIDE,) * SIDE, draws), draws)
    return Tiles(seed, GOALS[level], board)


def play(text: str) -> Slide:
    """Slide to the board that looks best two slides ahead."""
    board = tuple(tuple(map(int, row.split())) for row in text.splitlines()[1:])
    best = max(legal(board), key=lambda way: _promise(board, way, 2))
    return Slide.model_validate({"direction": best})


def _promise(board: Board, direction: str, depth: int) -> float:
    after, points = slide(board, direction)
    if depth == 1:
        return points + _order(after)
    nexts: list[float] = [_promise(after, way, depth - 1) for way in legal(after)]
    return points + max(nexts, default=-1000.0)


def _order(board: Board) -> float:
    """Return how free and how smooth a board is."""
    lines = (*board, *zip(*board, strict=True))
    steps: int = sum(abs(a - b) for line in lines for a, b in pairwise(line))
    free = sum(row.count(0) for row in board)
    return 4 * free - steps / 4


GAME = Game(
    name="g2048",
    kind="arcade",
    description=(
        "Slide the tiles of 2048: equal tiles merge and pay their sum. 0 is free."
    ),
    move=Slide,
    deal=deal,
    play=play,
    steps=48,
    view=ChoiceView,
    facts=TileFacts,
)
