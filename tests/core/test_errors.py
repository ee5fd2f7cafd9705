"""The tree in the docstring is the tree of the classes, and each is reportable."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from kiln_core import errors
from kiln_core.canonical import compact, read_json
from kiln_core.errors import KilnError


def tree(error_type: type[KilnError]) -> list[type[KilnError]]:
    found = [error_type]
    for child in error_type.__subclasses__():
        if child.__module__ == errors.__name__:
            found += tree(child)
    return found


CLASSES = tree(KilnError)


def drawn() -> list[tuple[int, str]]:
    """Return indent and name of every line of the drawing."""
    assert errors.__doc__ is not None
    drawing = errors.__doc__.partition("::\n\n")[2].partition("\n\nThe core")[0]
    lines = [re.match(r"( +)(\w+)", line) for line in drawing.splitlines()]
    return [(len(m.group(1)), m.group(2)) for m in lines if m]


def test_drawing_shows_every_class_below_its_parent() -> None:
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for indent, name in drawn():
        above = [entry for entry in above if entry[0] < indent]
        parents[name] = above[-1][1] if above else "Exception"
        above.append((indent, name))
    assert parents == {c.__name__: c.__bases__[0].__name__ for c in CLASSES}


def test_every_class_is_exported_in_order() -> None:
    assert sorted(c.__name__ for c in CLASSES) == sorted(errors.__all__)
    assert errors.__all__ == sorted(errors.__all__)


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [c.code for c in CLASSES]
    assert len(set(codes)) == len(codes)
    for code in codes:
        assert re.fullmatch(r"[a-z][a-z_]*", code)


@pytest.mark.parametrize("error_type", CLASSES, ids=lambda c: c.__name__)
def test_error_is_reported_as_a_document(error_type: type[KilnError]) -> None:
    assert error_type.__doc__
    error = error_type("it broke", pointer="/a", nothing=None)
    assert str(error) == "it broke"
    assert error.document() == {
        "error": {
            "code": error_type.code,
            "message": "it broke",
            "hint": error_type.default_hint,
            "details": {"pointer": "/a"},
        }
    }
    assert isinstance(error_type.retryable, bool)
    assert error_type("x", hint="do this").hint == "do this"
    assert error_type("x", hint="").hint == ""


@pytest.mark.parametrize(
    "detail",
    [
        math.nan,
        math.inf,
        "\ud800",
        object(),
        {1: {2}},
        b"\xff",
        (1, math.nan),
        {"\udcff": 1},
    ],
    ids=lambda v: repr(v)[:20],
)
def test_no_detail_can_break_the_report(detail: Any) -> None:
    error = KilnError(
        "bad \ud800 text", hint="\udcff", value=detail, fine=[1, 1.5, True]
    )
    document = read_json(compact(error.document()), "report")
    assert document["error"]["details"]["fine"] == [1, 1.5, True]
