"""Cells of a square board, by row and column from the top left, and ways to go."""

from __future__ import annotations

from typing import TypeAlias

Cell: TypeAlias = tuple[int, int]

SCREEN: dict[str, Cell] = {
    "up": (-1, 0),
    "right": (0, 1),
    "down": (1, 0),
    "left": (0, -1),
}
"""Ways to go on a screen, as rows and columns."""
COMPASS: dict[str, Cell] = {
    "north": (-1, 0),
    "east": (0, 1),
    "south": (1, 0),
    "west": (0, -1),
}
"""Ways to go on a map whose north is up."""
OFFSETS = SCREEN | COMPASS


def square(size: int, first: int = 0) -> list[Cell]:
    """Return the cells of a square board row by row; indices begin with `first`."""
    side = range(first, first + size)
    return [(row, column) for row in side for column in side]


def beside(cell: Cell, direction: str, distance: int = 1) -> Cell:
    """Return the cell some cells away in a direction; a negative distance is behind."""
    down, right = OFFSETS[direction]
    return cell[0] + distance * down, cell[1] + distance * right


def find(rows: list[str], marks: str) -> Cell:
    """Return the first cell of a drawn board that shows one of the marks.

    Raises:
        LookupError: If there is none.
    """
    for row, line in enumerate(rows):
        for column, mark in enumerate(line):
            if mark in marks:
                return row, column
    message = f"no {marks!r} on the board"
    raise LookupError(message)
