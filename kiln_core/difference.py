"""Where two JSON values differ, as JSON Pointers (RFC 6901)."""

from __future__ import annotations

from collections.abc import Iterator

from kiln_core.canonical import JsonValue, same_json

__all__ = ["differences", "escape_token", "first_difference"]


def first_difference(left: JsonValue, right: JsonValue) -> str | None:
    """Return the JSON Pointer of the first difference, or None where there is none.

    Objects are walked in sorted key order, arrays by index; a missing member and a
    different length count at the member that is missing.
    """
    # most values are equal, and one comparison of bytes is far cheaper than a walk
    return None if same_json(left, right) else next(differences(left, right), "")


def differences(left: JsonValue, right: JsonValue, at: str = "") -> Iterator[str]:
    """Yield the JSON Pointer of every place where two values differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        yield from _member_differences(left, right, at)
    elif isinstance(left, list) and isinstance(right, list):
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            yield from differences(one, other, f"{at}/{index}")
        if len(left) != len(right):
            yield f"{at}/{min(len(left), len(right))}"
    elif not same_json(left, right):
        yield at


def _member_differences(
    left: dict[str, JsonValue], right: dict[str, JsonValue], at: str
) -> Iterator[str]:
    for key in sorted(left.keys() | right.keys()):
        place = f"{at}/{escape_token(key)}"
        if key in left and key in right:
            yield from differences(left[key], right[key], place)
        else:
            yield place


def escape_token(key: str) -> str:
    """Escape one reference token of a JSON Pointer (RFC 6901 section 3)."""
    return key.replace("~", "~0").replace("/", "~1")
