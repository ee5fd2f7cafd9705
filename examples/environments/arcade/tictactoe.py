"""Tic-tac-toe: three in a line on nine cells.

The policy plays X against an opponent of the level: at random; one that wins at once
or prevents it, else plays at random; a perfect one, against which a draw is all there
is. On difficulty 1 the policy begins, later the seed draws who does. A win pays 1, a
loss -1, a draw 0. A taken cell is refused, and `legal_actions` lists the free ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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

CELLS = 9
LINES = (
    *((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    *((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    *((0, 4, 8), (2, 4, 6)),
)
RANDOM, ATTENTIVE, PERFECT = 1, 2, 3


class Mark(Move):
    """Mark a cell; they are numbered by rows from the top left."""

    cell: Integer = Field(ge=0, le=CELLS - 1)


class TicTacToeFacts(Facts):
    """The nine cells by rows, `.` for a free one."""

    board: str = "." * CELLS


@dataclass(frozen=True)
class TicTacToe:
    """A position in which X is to move, or the game is over."""

    seed: int
    level: int
    board: str = "." * CELLS

    @property
    def over(self) -> bool:
        """Whether somebody won or no cell is free."""
        return winner(self.board) is not None or "." not in self.board

    def step(self, move: Mark) -> tuple[TicTacToe, Reward]:
        """Mark a cell and let the opponent answer.

        Raises:
            IllegalMove: If the cell is taken.
        """
        if self.board[move.cell] != ".":
            message = f"cell {move.cell} is taken"
            raise IllegalMove(message)
        after = TicTacToe(self.seed, self.level, mark(self.board, move.cell, "X"))
        if not after.over:
            after = after.answered()
        return after, {"X": 1, "O": -1}.get(winner(after.board) or "", 0)

    def answered(self) -> TicTacToe:
        """Return the position after a mark of the opponent."""
        cells = self._replies()
        cell = Draws(self.seed, self.board.count(".")).choice(cells)
        return TicTacToe(self.seed, self.level, mark(self.board, cell, "O"))

    def _replies(self) -> list[int]:
        cells = free(self.board)
        if self.level == PERFECT:
            values = {cell: -value(mark(self.board, cell, "O"), "X") for cell in cells}
            return [cell for cell in cells if values[cell] == max(values.values())]
        if self.level == ATTENTIVE:
            for who in "OX":
                urgent = [c for c in cells if winner(mark(self.board, c, who))]
                if urgent:
                    return urgent
        return cells

    def view(self) -> NumberView:
        """Draw the board; a free cell shows its number."""
        ends = {"X": "X won.", "O": "O won."}
        open_heading = "Draw." if self.over else "X to move."
        heading = ends.get(winner(self.board) or "", open_heading)
        shown = "".join(
            str(index) if cell == "." else cell for index, cell in enumerate(self.board)
        )
        rows = (shown[start : start + 3] for start in (0, 3, 6))
        return NumberView(
            input_text="\n".join([heading, *rows]),
            legal_actions=[] if self.over else free(self.board),
        )

    def facts(self) -> TicTacToeFacts:
        """Return the board."""
        return TicTacToeFacts(board=self.board)


def free(board: str) -> list[int]:
    """Return the free cells."""
    return [index for index, cell in enumerate(board) if cell == "."]


def mark(board: str, cell: int, who: str) -> str:
    """Return the board with one more mark."""
    return board[:cell] + who + board[cell + 1 :]


def winner(board: str) -> str | None:
    """Return who has three in a line."""
    for a, b, c in LINES:
        if board[a] == board[b] == board[c] != ".":
            return board[a]
    return None


@cache
def value(board: str, who: str) -> int:
    """Return what a position is worth to the one who moves; fast wins more."""
    if winner(board):
        return -1 - board.count(".")
    if "." not in board:
        return 0
    other = "O" if who == "X" else "X"
    return max(-value(mark(board, cell, who), other) for cell in free(board))


def deal(seed: int, level: int) -> TicTacToe:
    """Begin with an empty board, or with one mark of the opponent."""
    start = TicTacToe(seed, level)
    return start.answered() if level > RANDOM and Draws(seed).chance(0.5) else start


def play(text: str) -> Mark:
    """Mark the best cell."""
    shown = "".join(text.splitlines()[1:])
    board = "".join("." if cell.isdigit() else cell for cell in shown)
    best = max(free(board), key=lambda cell: -value(mark(board, cell, "X"), "O"))
    return Mark(cell=best)


GAME = Game(
    name="tictactoe",
    kind="arcade",
    description="Play X in tic-tac-toe: mark a free cell, three in a line win.",
    move=Mark,
    deal=deal,
    play=play,
    steps=5,
    view=NumberView,
    facts=TicTacToeFacts,
)
