"""Space: right triangles, points and turns, angles, areas and bodies of blocks."""

from __future__ import annotations

import re

from examples.environments.game import Draws
from examples.environments.math.question import (
    AnswerNumber,
    Problem,
    family,
    numbers,
)

TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29))


def hypotenuse(draws: Draws, level: int) -> Problem:
    """The third side of a right triangle with whole sides."""
    a, b, c = draws.choice(TRIPLES[: 1 + 2 * (level - 1)])
    scale = draws.between(1, {1: 9, 2: 5, 3: 4}[level])
    a, b, c = a * scale, b * scale, c * scale
    if level == 1 or draws.chance(0.5):
        return f"A right triangle has legs {a} and {b}. How long is its hypotenuse?", c
    text = f"A right triangle has a leg {a} and the hypotenuse {c}."
    return f"{text} How long is the other leg?", b


def turn(draws: Draws, level: int) -> Problem:
    """A point turned about the origin, or about another point on level 3."""
    limit = {1: 5, 2: 12, 3: 20}[level]
    x, y = draws.between(-limit, limit), draws.between(-limit, limit)
    centre = (0, 0)
    if level == 3:
        centre = (draws.between(-9, 9), draws.between(-9, 9))
    quarters = draws.between(1, 3) if level > 1 else 1
    right, up = x - centre[0], y - centre[1]
    for _ in range(quarters):
        right, up = -up, right
    ahead = draws.chance(0.5)
    text = (
        f"The point ({x}, {y}) is turned anticlockwise by {90 * quarters} degrees "
        f"about ({centre[0]}, {centre[1]}). "
        f"What is its new {'x' if ahead else 'y'} coordinate?"
    )
    return text, centre[0] + right if ahead else centre[1] + up


def angle(draws: Draws, level: int) -> Problem:
    """The missing angle of a triangle, a quadrilateral, or a polygon."""
    corners = {1: 3, 2: 4, 3: draws.between(5, 7)}[level]
    total = 180 * (corners - 2)
    even = total // corners
    known = [even + draws.between(-20, 20) for _ in range(corners - 1)]
    shown = ", ".join(map(str, known))
    text = f"All but one angle of a polygon with {corners} corners are, in degrees,"
    return f"{text} {shown}. How large is the last?", total - sum(known)


def triangle(draws: Draws, level: int) -> Problem:
    """Twice the area of a triangle with corners on a lattice."""
    limit = {1: 6, 2: 10, 3: 20}[level]
    least = 0 if level == 1 else -limit
    points = [(draws.between(least, limit), draws.between(least, limit)) for _ in "abc"]
    (ax, ay), (bx, by), (cx, cy) = points
    text = (
        f"What is twice the area of the triangle with corners ({ax}, {ay}), "
        f"({bx}, {by}) and ({cx}, {cy})?"
    )
    return text, abs((bx - ax) * (cy - ay) - (cx - ax) * (by - ay))


def blocks(draws: Draws, level: int) -> Problem:
    """Unit cubes of a painted box by how many of their faces have paint."""
    limit = {1: 5, 2: 8, 3: 12}[level]
    a, b, c = (draws.between(3, limit) for _ in range(3))
    text = f"A box of {a} by {b} by {c} unit cubes is painted outside."
    inner = (a - 2) * (b - 2) * (c - 2)
    if level == 1:
        return f"{text} How many cubes have no paint?", inner
    if level == 2:
        return f"{text} How many cubes have paint?", a * b * c - inner
    edges = 4 * (a + b + c - 6)
    return f"{text} How many cubes have exactly two painted faces?", edges


def _third_side(found: re.Match[str]) -> int:
    """Search for the whole side that makes the triangle right."""
    a, b = numbers(found)
    right = "hypotenuse?" in found.string
    return next(
        c
        for c in range(1, 200)
        if (a * a + b * b == c * c if right else a * a + c * c == b * b)
    )


def _turned(found: re.Match[str]) -> int:
    """Turn as complex numbers: a quarter is a multiplication by i."""
    x, y, degrees, x0, y0 = map(int, found.groups()[:-1])
    place = complex(x - x0, y - y0) * 1j ** (degrees // 90) + complex(x0, y0)
    return round(place.real if found[6] == "x" else place.imag)


def _last_angle(found: re.Match[str]) -> int:
    known = [int(number) for number in found[1].split(", ")]
    return 180 * (len(known) - 1) - sum(known)


def _shoelace(found: re.Match[str]) -> int:
    ax, ay, bx, by, cx, cy = numbers(found)
    return abs(ax * by - ay * bx + bx * cy - by * cx + cx * ay - cy * ax)


def _counted_cubes(found: re.Match[str]) -> int:
    """Look at every cube of the box."""
    *sides, question = found.groups()
    a, b, c = map(int, sides)
    faces = [
        (x in (0, a - 1)) + (y in (0, b - 1)) + (z in (0, c - 1))
        for x in range(a)
        for y in range(b)
        for z in range(c)
    ]
    if question == "no paint":
        return faces.count(0)
    return len(faces) - faces.count(0) if question == "paint" else faces.count(2)


POINT = r"\((-?\d+), (-?\d+)\)"

GAME = family(
    "space",
    "Solve the problem of geometry and answer with a whole number.",
    AnswerNumber,
    {
        "hypotenuse": hypotenuse,
        "turn": turn,
        "angle": angle,
        "triangle": triangle,
        "blocks": blocks,
    },
    {
        r"A right triangle has legs (\d+) and (\d+)\. How long is its hypotenuse\?": (
            _third_side
        ),
        r"A right triangle has a leg (\d+) and the hypotenuse (\d+)\. "
        r"How long is the other leg\?": _third_side,
        rf"The point {POINT} is turned anticlockwise by (\d+) degrees about {POINT}\. "
        r"What is its new ([xy]) coordinate\?": _turned,
        r"All but one angle of a polygon with \d+ corners are, in degrees, (.+)\. "
        r"How large is the last\?": _last_angle,
        rf"What is twice the area of the triangle with corners {POINT}, {POINT} "
        rf"and {POINT}\?": _shoelace,
        r"A box of (\d+) by (\d+) by (\d+) unit cubes is painted outside\. "
        r"How many cubes have (no paint|paint|exactly two painted faces)\?": (
            _counted_cubes
        ),
    },
)
