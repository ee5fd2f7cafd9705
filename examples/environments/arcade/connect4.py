"""Connect Four: drop discs into seven columns until four stand in a line.

The policy plays X against an opponent of the level: at random; one that wins at once
or prevents it; one that looks four discs ahead. On difficulty 1 the policy begins,
later the seed draws who does. A win pays 1, a loss -1, a draw 0, all integers. A full
column is refused, and `legal_actions` lists the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pydantic import Field

from examples.environments.game import (
    Draws,
    Facts,
    Game,
    IllegalMove,
    Integer,
    Move,
    NumberView,
    Reward,
)

Columns: TypeAlias = tuple[str, ...]
"""The discs of each column, from the bottom."""

WIDTH, HEIGHT, LINE = 7, 6, 4
CENTRE_FIRST = (3, 2, 4, 1, 5, 0, 6)
LOOKAHEAD = {1: 0, 2: 2, 3: 4}
"""Discs an opponent looks ahead."""
PLAYER_LOOKAHEAD = 4


class Drop(Move):
    """Drop a disc into a column."""

    column: Integer = Field(ge=0, le=WIDTH - 1)


class Connect4Facts(Facts):
    """The discs by column from the bottom, and who won."""

    columns: tuple[str, ...] = ()
    winner: str | None = None


@dataclass(frozen=True)
class Connect4:
    """A position in which X is to move, or the game is over."""

    seed: int
    level: int
    columns: Columns
    winner: str | None = None

    @property
    def over(self) -> bool:
        """Whether somebody won or the board is full."""
        return self.winner is not None or not legal(self.columns)

    def step(self, move: Drop) -> tuple[Connect4, Reward]:
        """Drop a disc and let the opponent answer.

        Raises:
            IllegalMove: If the column is full.
        """
        if move.column not in legal(self.columns):
            message = f"column {move.column} is full"
            raise IllegalMove(message)
        after = self._dropped(move.column, "X")
        if not after.over:
            after = after.answered()
        return after, {"X": 1, "O": -1}.get(after.winner or "", 0)

    def _dropped(self, column: int, disc: str) -> Connect4:
        columns = drop(self.columns, column, disc)
        winner = disc if wins(columns, column) else None
        return Connect4(self.seed, self.level, columns, winner)

    def answered(self) -> Connect4:
        """Return the position after a disc of the opponent."""
        draws = Draws(self.seed, sum(map(len, self.columns)))
        columns = legal(self.columns)
        depth = LOOKAHEAD[self.level]
        if depth:
            values = {c: value(self.columns, c, "O", depth) for c in columns}
            columns = [c for c in columns if values[c] == max(values.values())]
        return self._dropped(draws.choice(columns), "O")

    def view(self) -> NumberView:
        """Draw the board, top row first, under the numbers of the columns."""
        ends = {"X": "X won.", "O": "O won."}
        heading = ends.get(self.winner or "", "Draw." if self.over else "X to move.")
        numbers = "".join(map(str, range(WIDTH)))
        rows = (
            "".join(column[row : row + 1] or "." for column in self.columns)
            for row in reversed(range(HEIGHT))
        )
        return NumberView(
            input_text="\n".join([heading, numbers, *rows]),
            legal_actions=[] if self.over else legal(self.columns),
        )

    def facts(self) -> Connect4Facts:
        """Return columns and winner."""
        return Connect4Facts(columns=self.columns, winner=self.winner)


def legal(columns: Columns) -> list[int]:
    """Return the columns that are not full."""
    return [index for index, column in enumerate(columns) if len(column) < HEIGHT]


def drop(columns: Columns, column: int, disc: str) -> Columns:
    """Return the columns with one more disc."""
    return (*columns[:column], columns[column] + disc, *columns[column + 1 :])


def wins(columns: Columns, column: int) -> bool:
    """Say whether the topmost disc of a column completes a line."""
    row = len(columns[column]) - 1
    disc = columns[column][row]

    def reach(right: int, up: int) -> int:
        steps = 0
        x, y = column + right, row + up
        while 0 <= x < WIDTH and 0 <= y < len(columns[x]) and columns[x][y] == disc:
            steps, x, y = steps + 1, x + right, y + up
        return steps

    lines = ((1, 0), (0, 1), (1, 1), (1, -1))
    return any(reach(x, y) + reach(-x, -y) + 1 >= LINE for x, y in lines)


def value(
    columns: Columns,
    column: int,
    disc: str,
    depth: int,
    low: int = -99,
    high: int = 99,
) -> int:
    """Return what dropping a disc is worth to its owner: near wins are worth more.

    Args:
        columns: The position before.
        column: Where the disc goes.
        disc: `X` or `O`.
        depth: Discs to look ahead, this one included.
        low: Values up to this one need not be exact (alpha-beta search).
        high: Values from this one need not be exact.
    """
    after = drop(columns, column, disc)
    if wins(after, column):
        return depth
    replies = [c for c in CENTRE_FIRST if len(after[c]) < HEIGHT]
    if depth == 1 or not replies:
        return 0
    other, best = "O" if disc == "X" else "X", -99
    for reply in replies:
        least = max(best, -high)
        best = max(best, value(after, reply, other, depth - 1, least, -low))
        if best >= -low:
            break
    return -best


def deal(seed: int, level: int) -> Connect4:
    """Begin with an empty board, or with one disc of the opponent."""
    start = Connect4(seed, level, ("",) * WIDTH)
    return start.answered() if level > 1 and Draws(seed).chance(0.5) else start


def play(text: str) -> Drop:
    """Drop the disc that is worth most five discs ahead, near the centre."""
    rows = text.splitlines()[:1:-1]
    columns = tuple("".join(line).strip(".") for line in zip(*rows, strict=True))
    values = {
        column: value(columns, column, "X", PLAYER_LOOKAHEAD)
        for column in CENTRE_FIRST
        if len(columns[column]) < HEIGHT
    }
    return Drop(column=max(values, key=lambda column: values[column]))


GAME = Game(
    name="connect4",
    kind="arcade",
    description="Play X in Connect Four: drop discs, four in a line win.",
    move=Drop,
    deal=deal,
    play=play,
    steps=21,
    view=NumberView,
    facts=Connect4Facts,
)
