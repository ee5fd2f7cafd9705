"""How much a JSON document holds, counted before it is decoded.

A value of two bytes may take eighty in memory, so a hostile document could need many
times its size. What a record of an environment can plausibly hold is far below that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from kiln_core import limits
from kiln_core.errors import MalformedJson

__all__ = ["check_structure"]

STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def check_structure(data: bytes, what: str) -> None:
    """Refuse a document that would take many times its size when decoded.

    Args:
        data: The document.
        what: Names it in the error.

    Raises:
        MalformedJson: It holds too many values, or too many objects and arrays.
    """
    if len(data) <= limits.UNCOUNTED_BYTES:
        return
    # An upper bound first: strings may hold commas and brackets too.
    if _values_in(data) and _values_in(b"".join(_outside_strings(data))):
        raise MalformedJson(
            f"{what} holds more values than can be read safely",
            hint="it is no plausible record of an environment",
            limit=limits.MAX_DECODED_VALUES,
        )


def _values_in(data: bytes) -> bool:
    """Say whether there are more separators or brackets than the bounds allow."""
    containers = data.count(b"{") + data.count(b"[")
    values = data.count(b",") + containers
    return (
        containers > limits.MAX_DECODED_CONTAINERS or values > limits.MAX_DECODED_VALUES
    )


def _outside_strings(data: bytes) -> Iterator[bytes]:
    start = 0
    for string in STRING.finditer(data):
        yield data[start : string.start()]
        start = string.end()
    yield data[start:]
