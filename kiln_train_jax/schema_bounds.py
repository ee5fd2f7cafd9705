"""How long the text of a narrowed schema can get, and numbers that have an end.

Companion of `narrowing.py`: bounds on the bytes of constants, strings, numbers and of
whole schemas, and the narrowing of integers and numbers to bounded decimals without
exponents. All arithmetic on bounds is decimal, as the schema wrote them.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any, Final, TypeAlias

from kiln_core.canonical import canonical_bytes

Schema: TypeAlias = dict[str, Any]

INTEGER_SPAN: Final = 999_999
"""Distance from the known bound, or from zero, to the bound that is made up."""
NUMBER_SPAN: Final = 1_000
DECIMALS: Final = 2
MAX_DECIMALS: Final = 6
EXACT: Final = 2**53
LARGE: Final = 2**40
"""Magnitude up to which decimals survive the reader's 64-bit floats."""
PRECISION: Final = 1_000
"""Decimal digits carried when bounds are moved: more than a bound may have."""
KEY_CHARACTERS: Final = 16
"""Longest key of an open object, ASCII."""
FORMAT_CHARACTERS: Final = {
    "date": 10,
    "time": 32,
    "date-time": 40,
    "ipv4": 15,
    "ipv6": 45,
    "uuid": 36,
}
"""Formats of bounded length, all ASCII."""


def longest(node: Schema) -> int:
    """Return a bound on the UTF-8 bytes of any text of a narrowed schema."""
    if "anyOf" in node:
        return max(longest(branch) for branch in node["anyOf"])
    if "enum" in node:
        return max(_text_bytes(value) for value in node["enum"])
    kind = node["type"]
    if kind in {"integer", "number"}:
        return _number_bytes(node)
    if kind == "string":
        return 2 + _character_bytes(node) * int(node["maxLength"])
    if kind == "array":
        members = [longest(part) for part in node.get("prefixItems", ())]
        spare = int(node["maxItems"]) - len(members)
        if spare > 0 and node["items"] is not False:
            members += [longest(node["items"])] * spare
        return 2 + sum(members) + max(0, len(members) - 1)
    if kind == "object":
        entries = [
            _text_bytes(name) + 1 + longest(member)
            for name, member in node.get("properties", {}).items()
        ]
        for member in node.get("patternProperties", {}).values():
            entry = KEY_CHARACTERS + 3 + longest(member)
            entries += [entry] * int(node["maxProperties"])
        return 2 + sum(entries) + max(0, len(entries) - 1)
    return 5 if kind == "boolean" else 4


def _character_bytes(node: Schema) -> int:
    """Bound the bytes of one character: patterns may write it as an escape."""
    if node.get("format") in FORMAT_CHARACTERS:
        return 1
    return 6 if "pattern" in node or "format" in node else 4


def _text_bytes(value: Any) -> int:
    """Bound the JSON text of a constant, whatever escapes are chosen."""
    if isinstance(value, str):
        plain = sum(len(character.encode()) for character in value)
        escaped = sum(
            6 - len(character.encode())
            for character in value
            if _must_escape(character)
        )
        return 2 + plain + escaped
    if isinstance(value, list):
        return 2 + sum(_text_bytes(part) + 1 for part in value)
    if isinstance(value, dict):
        return 2 + sum(
            _text_bytes(name) + _text_bytes(part) + 2 for name, part in value.items()
        )
    return max(len(canonical_bytes(value)), len(repr(value)), 24)


def _must_escape(character: str) -> bool:
    return character in '"\\/' or ord(character) < 32 or ord(character) == 127


def _number_bytes(node: Schema) -> int:
    ends = [abs(Decimal(str(node[word]))) for word in ("minimum", "maximum")]
    whole = max(len(str(int(end))) for end in ends)
    step = Decimal(str(node.get("multipleOf", 1)))
    exponent = step.as_tuple().exponent
    decimals = -exponent if isinstance(exponent, int) and exponent < 0 else 0
    return 1 + whole + (1 + decimals if node["type"] == "number" else 0)


def number(kind: str, node: Schema) -> Schema | None:
    """Bound an integer or a number, and give a number its decimals."""
    with localcontext() as exact:
        exact.prec = PRECISION
        return _bounded(kind, node)


def _bounded(kind: str, node: Schema) -> Schema | None:
    low, high = _bounds(kind, node)
    if low > high:
        return None
    step = node.get("multipleOf")
    if kind == "integer":
        narrowed: Schema = {"type": kind, "minimum": int(low), "maximum": int(high)}
        if step is not None:
            narrowed["multipleOf"] = step
        return narrowed if _reachable(low, high, Decimal(str(step or 1))) else None
    decimals = DECIMALS
    while decimals < MAX_DECIMALS and (high - low) * 10**decimals < 100:
        decimals += 1
    unit = Decimal(str(step)) if step is not None else Decimal(1).scaleb(-decimals)
    if unit % 1 and max(abs(low), abs(high)) > LARGE:
        # A double would round such a text away from its bound: whole numbers only.
        return _bounded("integer", node) if (1 / unit) % 1 == 0 else None
    edges = {"exclusiveMinimum", "exclusiveMaximum"} & set(node)
    low = _edge(low, unit, up=True, strict="exclusiveMinimum" in edges, node=node)
    high = _edge(high, unit, up=False, strict="exclusiveMaximum" in edges, node=node)
    if low > high:
        return None
    return {
        "type": kind,
        "minimum": _plain(low),
        "maximum": _plain(high),
        "multipleOf": _plain(unit),
    }


def _bounds(kind: str, node: Schema) -> tuple[Decimal, Decimal]:
    """Return inclusive bounds, made up where the schema has none.

    For numbers an exclusive bound is returned as it is; `_edge` moves it inside.
    """
    span = INTEGER_SPAN if kind == "integer" else NUMBER_SPAN
    lows = [node[word] for word in ("minimum", "exclusiveMinimum") if word in node]
    highs = [node[word] for word in ("maximum", "exclusiveMaximum") if word in node]
    low = max((Decimal(str(bound)) for bound in lows), default=None)
    high = min((Decimal(str(bound)) for bound in highs), default=None)
    if low is None:
        low = Decimal(-span) if high is None else min(Decimal(-span), high - span)
    if high is None:
        high = max(Decimal(span), low + span)
    if kind == "integer":
        strict_low = Decimal(str(node.get("exclusiveMinimum", "-Infinity")))
        strict_high = Decimal(str(node.get("exclusiveMaximum", "Infinity")))
        low, high = Decimal(math.ceil(low)), Decimal(math.floor(high))
        low += 1 if low == strict_low else 0
        high -= 1 if high == strict_high else 0
        # The grammar compiler keeps bounds as doubles: none beyond their whole numbers.
        low, high = max(low, Decimal(-EXACT)), min(high, Decimal(EXACT))
    return low, high


def _edge(
    bound: Decimal, unit: Decimal, *, up: bool, strict: bool, node: Schema
) -> Decimal:
    """Move a bound to the nearest multiple of `unit` inside of it."""
    steps = bound / unit
    moved = Decimal(math.ceil(steps) if up else math.floor(steps)) * unit
    word = "exclusiveMinimum" if up else "exclusiveMaximum"
    if strict and moved == Decimal(str(node[word])):
        moved += unit if up else -unit
    return moved


def _plain(value: Decimal) -> int | float:
    """Return a bound as JSON has it; whole ones stay exact beyond 2^53."""
    return float(value) if value % 1 else int(value)


def _reachable(low: Decimal, high: Decimal, step: Decimal) -> bool:
    """Tell whether a multiple of `step` lies within inclusive bounds."""
    return Decimal(math.ceil(low / step)) * step <= high
