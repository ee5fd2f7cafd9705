"""A captured exchange against a live one: exact, typed, and where they differ.

Pointers are relative to a candidate: ``/reset_observation/observation/value``,
``/exchanges/2/result/observation/reward``, ``/final_state/episode_id``. Numbers keep
their type: a reward of ``1`` is not ``1.0`` and not ``true``.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kiln_core.canonical import JsonValue
from kiln_core.difference import differences
from kiln_core.manifest import Observation, ReplayExchangeResult

__all__ = [
    "VOLATILE",
    "Drift",
    "covers",
    "find_drift",
    "is_volatile",
    "result_document",
]

_ABSENT: Any = object()

VOLATILE: Final[dict[str, str]] = {
    "/final_state/episode_id": "the environment draws a new episode id each time",
    "/exchanges/*/result/error/errors/*/url": (
        "this address names a page about the error and holds the version of pydantic"
    ),
}
"""Places that change with no change of behaviour, and why."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """One place where live differs from captured."""

    pointer: str
    """JSON Pointer relative to the candidate."""
    expected: JsonValue
    """Captured value; None with ``expected_absent``."""
    found: JsonValue
    """Live value; None with ``found_absent``."""
    expected_absent: bool = False
    found_absent: bool = False


def find_drift(
    captured: JsonValue, live: JsonValue, at: str, ignored: frozenset[str] = frozenset()
) -> Drift | None:
    """Return the first difference that is not exempt.

    Args:
        captured: Decoded JSON as recorded.
        live: Decoded JSON as observed now.
        at: Pointer of both in the candidate.
        ignored: Pointers that may differ, with everything below them.
    """
    for pointer in differences(captured, live, at):
        if any(covers(exemption, pointer) for exemption in ignored):
            continue
        tokens = pointer[len(at) :].split("/")[1:]
        expected, found = _walk(captured, tokens), _walk(live, tokens)
        return Drift(
            pointer=pointer,
            expected=None if expected is _ABSENT else expected,
            found=None if found is _ABSENT else found,
            expected_absent=expected is _ABSENT,
            found_absent=found is _ABSENT,
        )
    return None


def covers(exemption: str, pointer: str) -> bool:
    """Say whether a place is exempt, or below one that is.

    Args:
        exemption: A JSON Pointer in which ``*`` stands for any index of an array.
        pointer: The place.
    """
    wanted, found = exemption.split("/"), pointer.split("/")
    return len(wanted) <= len(found) and all(
        w == f or (w == "*" and f.isdecimal())
        for w, f in zip(wanted, found, strict=False)
    )


def is_volatile(pointer: str) -> bool:
    """Say whether a place is known to change with no change of behaviour."""
    return any(covers(place, pointer) for place in VOLATILE)


def result_document(result: ReplayExchangeResult | Observation) -> JsonValue:
    """Return a result or an observation as decoded JSON."""
    return msgspec.to_builtins(result)


def _walk(value: JsonValue, tokens: list[str]) -> JsonValue:
    for token in tokens:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return _ABSENT
    return value
