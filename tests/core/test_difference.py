"""`kiln_core/difference.py`: the places where two values differ, none left out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from kiln_core.canonical import canonical_bytes, same_json
from kiln_core.difference import differences, escape_token, first_difference
from tests.core.test_canonical import json_values


@given(json_values, json_values)
def test_difference_is_none_exactly_for_equal_bytes(left: Any, right: Any) -> None:
    same = canonical_bytes(left) == canonical_bytes(right)
    assert same_json(left, right) is same
    assert (first_difference(left, right) is None) is same
    assert (not list(differences(left, right))) is same
    assert first_difference(left, left) is None


DIFFERENCES: list[tuple[Any, Any, list[str]]] = [
    (1, 1, []),
    (1, 1.0, [""]),
    (True, 1, [""]),
    (None, False, [""]),
    ({}, [], [""]),
    ({"a": 1}, {"a": 2}, ["/a"]),
    ({"a": 1}, {}, ["/a"]),
    ({}, {"a": None}, ["/a"]),
    ({"b": 1, "a": 1}, {"b": 2, "a": 2}, ["/a", "/b"]),
    ([1, 2], [1], ["/1"]),
    ([], [None], ["/0"]),
    ([[0], 2], [[1], 3, 4], ["/0/0", "/1", "/2"]),
    ({"a/b": {"m~n": 1}}, {"a/b": {"m~n": 2}}, ["/a~1b/m~0n"]),
    ({"": {"": 1}}, {"": {"": 2}}, ["//"]),
    ({"\U00010000": 1, "\uffff": 1}, {}, ["/\uffff", "/\U00010000"]),
]


@pytest.mark.parametrize(("left", "right", "pointers"), DIFFERENCES)
def test_differences_are_in_canonical_order(
    left: Any, right: Any, pointers: list[str]
) -> None:
    assert list(differences(left, right)) == pointers
    assert first_difference(left, right) == (pointers[0] if pointers else None)


def test_tokens_are_escaped_as_rfc_6901_says() -> None:
    assert escape_token("~1/~") == "~01~1~0"
