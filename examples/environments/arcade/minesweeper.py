"""Minesweeper: open every cell without a mine.

An opened cell tells how many of its eight neighbours are mines; one without any opens
its neighbours too. The first cell is safe: the mines are laid when it is opened, from
the seed, and not around it. A move opens or flags a cell; a flag protects a cell and is
taken off by the next one. Every opened cell pays 1, an integer, a mine pays 0 and ends
the episode. Opening an open or a flagged cell is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product

from pydantic import Field

from examples.environments.board import Cell, square
from examples.environments.game import (
    Draws,
    Facts,
    Game,
    IllegalMove,
    Move,
    Reward,
    TextView,
)

SIZES = {1: 4, 2: 6, 3: 8}
MINES = {1: 2, 2: 5, 3: 10}


class Probe(Move):
    """Open or flag a cell: `open B3` is the second column of the third row."""

    move: str = Field(pattern="^(open|flag) [A-H][1-8]$")


class MinesFacts(Facts):
    """The board as it is shown, and how many mines it has."""

    board: tuple[str, ...] = ()
    mines: int = 0


@dataclass(frozen=True)
class Minesweeper:
    """A field; `mines` is empty until the first cell is opened."""

    seed: int
    level: int
    mines: frozenset[Cell] = frozenset()
    opened: frozenset[Cell] = frozenset()
    flags: frozenset[Cell] = frozenset()

    @property
    def size(self) -> int:
        """Side of the field."""
        return SIZES[self.level]

    @property
    def exploded(self) -> bool:
        """Whether a mine was opened."""
        return bool(self.mines & self.opened)

    @property
    def over(self) -> bool:
        """Whether a mine exploded or all other cells are open."""
        safe = self.size**2 - MINES[self.level]
        return self.exploded or len(self.opened) == safe

    def step(self, move: Probe) -> tuple[Minesweeper, Reward]:
        """Open or flag a cell.

        Raises:
            IllegalMove: If it is not on the board, open already, or flagged.
        """
        verb, place = move.move.split()
        cell = int(place[1]) - 1, ord(place[0]) - ord("A")
        if max(cell) >= self.size:
            message = f"the board has no cell {place}"
            raise IllegalMove(message)
        if cell in self.opened:
            message = f"{place} is open already"
            raise IllegalMove(message)
        if verb == "flag":
            return replace(self, flags=self.flags ^ {cell}), 0
        if cell in self.flags:
            message = f"{place} is flagged: flag it again to take the flag off"
            raise IllegalMove(message)
        return self._open(cell)

    def _open(self, cell: Cell) -> tuple[Minesweeper, int]:
        mines = self.mines or lay(self.seed, self.level, cell)
        if cell in mines:
            return replace(self, opened=self.opened | {cell}), 0
        new, edge = {cell}, [cell]
        while edge:
            at = edge.pop()
            beside = neighbours(at, self.size)
            if not mines.intersection(beside):
                fresh = set(beside) - new - self.opened - self.flags
                new |= fresh
                edge.extend(fresh)
        after = replace(self, mines=mines, opened=self.opened | new)
        return after, len(new)

    def rows(self) -> list[str]:
        """Return the board: `#` closed, `F` flagged, `*` exploded, else a number."""
        return [
            "".join(self._shown((r, c)) for c in range(self.size))
            for r in range(self.size)
        ]

    def _shown(self, cell: Cell) -> str:
        if cell not in self.opened:
            return "F" if cell in self.flags else "#"
        if cell in self.mines:
            return "*"
        return str(len(self.mines.intersection(neighbours(cell, self.size))))

    def view(self) -> TextView:
        """Draw the board with the names of its columns and rows."""
        heading = f"{MINES[self.level]} mines."
        if self.over:
            heading = (
                "A mine exploded." if self.exploded else "All safe cells are open."
            )
        names = "  " + "".join(chr(ord("A") + c) for c in range(self.size))
        rows = (f"{number} {row}" for number, row in enumerate(self.rows(), 1))
        return TextView(input_text="\n".join([heading, names, *rows]))

    def facts(self) -> MinesFacts:
        """Return the board as it is shown."""
        return MinesFacts(board=tuple(self.rows()), mines=MINES[self.level])


def neighbours(cell: Cell, size: int) -> list[Cell]:
    """Return the up to eight cells around one."""
    around = ((cell[0] + r, cell[1] + c) for r, c in square(3, -1) if r or c)
    return [(r, c) for r, c in around if 0 <= r < size and 0 <= c < size]


def lay(seed: int, level: int, first: Cell) -> frozenset[Cell]:
    """Lay the mines anywhere but at the first cell and around it."""
    size = SIZES[level]
    kept = {first, *neighbours(first, size)}
    cells = [cell for cell in square(size) if cell not in kept]
    return frozenset(Draws(seed, first[0], first[1]).sample(cells, MINES[level]))


def deal(seed: int, level: int) -> Minesweeper:
    """Begin with a closed board."""
    return Minesweeper(seed, level)


def play(text: str) -> Probe:
    """Open a cell that must be safe, or else the one that seems safest."""
    rows = [line[2:] for line in text.splitlines()[2:]]
    size = len(rows)
    closed = {cell for cell in square(size) if rows[cell[0]][cell[1]] in "#F"}
    if len(closed) == size * size:
        return _opening((size // 2, size // 2))
    risks = _risks(rows, closed, int(re.findall(r"\d+", text)[0]))
    return _opening(min(sorted(risks), key=lambda cell: risks[cell]))


def _opening(cell: Cell) -> Probe:
    return Probe(move=f"open {chr(ord('A') + cell[1])}{cell[0] + 1}")


def _risks(rows: list[str], closed: set[Cell], mines: int) -> dict[Cell, float]:
    """Return how likely a closed cell is a mine: 0 and 1 are certain.

    Each number says how many mines a set of closed cells has. Taking a set that lies
    in another away from it gives a third; what is left is judged by the worst share.
    """
    groups = {frozenset(closed): mines}
    for cell in square(len(rows)):
        if cell not in closed:
            around = frozenset(closed.intersection(neighbours(cell, len(rows))))
            groups[around] = int(rows[cell[0]][cell[1]])
    for _ in range(3):
        if any(cells and not count for cells, count in groups.items()):
            break  # something is safe already
        pairs = [(a, b) for a, b in product(groups, repeat=2) if a and a < b]
        groups |= {b - a: groups[b] - groups[a] for a, b in pairs}
    risks = dict.fromkeys(closed, 0.0)
    for cells, count in sorted(groups.items(), key=lambda item: len(item[0])):
        for cell in cells:
            risks[cell] = max(risks[cell], count / len(cells))
    safe = {cell for cells, count in groups.items() if not count for cell in cells}
    return risks | dict.fromkeys(safe, 0.0)


GAME = Game(
    name="minesweeper",
    kind="arcade",
    description=(
        "Open all cells without a mine, such as B3. A number counts the mines around; "
        "# is closed."
    ),
    move=Probe,
    deal=deal,
    play=play,
    steps=SIZES[1] ** 2,
    facts=MinesFacts,
)
