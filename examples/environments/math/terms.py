"""Sums of terms as people write them: `x^2 - 3x + 4`, not `1x^2 + -3x + 4`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def write(terms: Iterable[tuple[int, str]]) -> str:
    """Write factors and their unknowns as a sum; terms of factor 0 are left out."""
    text = ""
    for factor, unknown in terms:
        if not factor:
            continue
        sign = "- " if factor < 0 else "+ "
        if not text:
            sign = "-" if factor < 0 else ""
        size = "" if unknown and abs(factor) == 1 else str(abs(factor))
        text += f" {sign}{size}{unknown}" if text else f"{sign}{size}{unknown}"
    return text or "0"


def read(text: str) -> dict[str, int]:
    """Return the factors of a sum by their unknowns; the constant's is empty."""
    factors: dict[str, int] = {}
    found = re.findall(r"([+-]?) ?(\d*)([xy](?:\^\d)?)?", text)
    for sign, size, unknown in found:
        if size or unknown:
            factors[unknown] = int(f"{sign}{size or 1}")
    return factors


def polynomial(coefficients: Sequence[int]) -> str:
    """Write a polynomial of x, its constant first here and last in the text."""
    names = ("", "x", *(f"x^{power}" for power in range(2, len(coefficients))))
    return write(reversed(list(zip(coefficients, names, strict=False))))


def coefficients_of(text: str) -> list[int]:
    """Read a polynomial up to x^5, its constant first."""
    factors = read(text)
    names = ("", "x", *(f"x^{power}" for power in range(2, 6)))
    return [factors.get(name, 0) for name in names]
