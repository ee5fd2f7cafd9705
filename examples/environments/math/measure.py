"""Measure: units, times, rectangles and speeds, all in whole numbers."""

from __future__ import annotations

import re

from examples.environments.game import Draws
from examples.environments.math.question import (
    AnswerNumber,
    Problem,
    family,
    numbers,
)

UNITS = {
    "m": ("cm", 100),
    "km": ("m", 1000),
    "kg": ("g", 1000),
    "l": ("ml", 1000),
    "h": ("min", 60),
    "min": ("s", 60),
    "day": ("h", 24),
    "week": ("day", 7),
}
DAY_MINUTES = 24 * 60


def convert(draws: Draws, level: int) -> Problem:
    """A quantity in a smaller unit; on level 3 in the unit after that."""
    if level == 3:
        days, hours, minutes = draws.between(1, 9), draws.below(24), draws.below(60)
        text = f"How many min are {days} day {hours} h {minutes} min?"
        return text, (days * 24 + hours) * 60 + minutes
    unit = draws.choice(tuple(UNITS))
    smaller, factor = UNITS[unit]
    amount = draws.between(2, 12)
    if level == 1:
        return f"How many {smaller} are {amount} {unit}?", amount * factor
    rest = draws.between(1, factor - 1)
    text = f"How many {smaller} are {amount} {unit} {rest} {smaller}?"
    return text, amount * factor + rest


def clock(draws: Draws, level: int) -> Problem:
    """Minutes between two times of day; on level 3 the second may be tomorrow."""
    step = {1: 15, 2: 5, 3: 1}[level]
    start = draws.below(DAY_MINUTES // step) * step
    last = DAY_MINUTES - 1 if level < 3 else start + DAY_MINUTES - 1
    end = min(start + draws.between(1, 600 // step) * step, last)
    day = "the next day" if end >= DAY_MINUTES else "the same day"
    text = f"How many minutes is it from {_time(start)} to {_time(end)} on {day}?"
    return text, end - start


def _time(minutes: int) -> str:
    return f"{minutes // 60 % 24:02}:{minutes % 60:02}"


def rectangle(draws: Draws, level: int) -> Problem:
    """Perimeter or area of a rectangle; on level 3 with a corner cut out of it."""
    limit = {1: 10, 2: 40, 3: 30}[level]
    width, height = draws.between(3, limit), draws.between(3, limit)
    size = f"A rectangle is {width} cm wide and {height} cm high."
    if level == 3:
        cut_width, cut_height = (
            draws.between(1, width - 1),
            draws.between(1, height - 1),
        )
        cut = f"A corner of {cut_width} cm by {cut_height} cm is cut off."
        area = width * height - cut_width * cut_height
        return f"{size} {cut} What area is left, in square cm?", area
    if draws.chance(0.5):
        return f"{size} What is its area in square cm?", width * height
    return f"{size} What is its perimeter in cm?", 2 * (width + height)


def speed(draws: Draws, level: int) -> Problem:
    """The way driven at a constant speed, in whole kilometres."""
    minutes = draws.choice(
        {1: (60, 120), 2: (30, 90, 150), 3: (20, 50, 100, 130)}[level]
    )
    steps = 60 // _common(minutes, 60)
    kmh = draws.between(3, 12) * 10 * steps // _common(10, steps)
    text = f"A car drives at {kmh} km/h for {minutes} minutes. How many km is that?"
    return text, kmh * minutes // 60


def _common(a: int, b: int) -> int:
    return a if not b else _common(b, a % b)


def _converted(found: re.Match[str]) -> int:
    """Add up a quantity unit by unit, through the chain of smaller units."""
    wanted, quantity = found.groups()
    words = quantity.split()
    total = 0
    for amount, unit in zip(map(int, words[::2]), words[1::2], strict=True):
        value, at = amount, unit
        while at != wanted:
            at, factor = UNITS[at]
            value *= factor
        total += value
    return total


def _elapsed(found: re.Match[str]) -> int:
    *times, day = found.groups()
    hour, minute, end_hour, end_minute = map(int, times)
    tomorrow = DAY_MINUTES if day == "next" else 0
    return tomorrow + (end_hour - hour) * 60 + end_minute - minute


def _counted_area(found: re.Match[str]) -> int:
    """Count the square centimetres that are not in the corner."""
    width, height, cut_width, cut_height = numbers(found)
    return sum(
        x >= cut_width or y >= cut_height for x in range(width) for y in range(height)
    )


def _area(found: re.Match[str]) -> int:
    width, height = numbers(found)
    return width * height


def _perimeter(found: re.Match[str]) -> int:
    width, height = numbers(found)
    return width + height + width + height


def _way(found: re.Match[str]) -> int:
    kmh, minutes = numbers(found)
    return kmh * minutes // 60


RECTANGLE = r"A rectangle is (\d+) cm wide and (\d+) cm high\."

GAME = family(
    "measure",
    "Work out the measure and answer with a whole number, without its unit.",
    AnswerNumber,
    {"convert": convert, "clock": clock, "rectangle": rectangle, "speed": speed},
    {
        r"How many (\w+) are ((?:\d+ \w+ ?)+)\?": _converted,
        r"How many minutes is it from (\d+):(\d+) to (\d+):(\d+) on the (\w+) day\?": (
            _elapsed
        ),
        RECTANGLE + r" What is its area in square cm\?": _area,
        RECTANGLE + r" What is its perimeter in cm\?": _perimeter,
        RECTANGLE
        + r" A corner of (\d+) cm by (\d+) cm is cut off\."
        + r" What area is left, in square cm\?": _counted_area,
        r"A car drives at (\d+) km/h for (\d+) minutes\. How many km is that\?": _way,
    },
)
