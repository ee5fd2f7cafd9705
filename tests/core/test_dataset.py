from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kiln_core.dataset import fail_in, read_groups
from kiln_core.errors import InvalidBundle
from tests.core.bundles import Collection, small_collection
from tests.simulators.pure import BASE_POLICY


def test_groups_are_read_one_by_one() -> None:
    groups = read_groups(Collection().bundle().dataset)
    assert len(next(groups).completions) == 7
    assert len(list(groups)) == 3
    assert list(read_groups(b"")) == []


def test_error_stops_at_its_line() -> None:
    line = small_collection().bundle().dataset
    groups = read_groups(line + b"{}\n" + line, "d.jsonl")
    next(groups)
    with pytest.raises(InvalidBundle, match=r"d\.jsonl line 2") as caught:
        next(groups)
    assert caught.value.details == {
        "check": "dataset_record",
        "file": "d.jsonl",
        "line": 2,
        "pointer": "",
    }


SHOWN: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (5, 5),
    (0.5, 0.5),
    ("text", "text"),
    ("x" * 301, "x" * 300 + "..."),
    (b"ab\xff", "ab\ufffd"),
    (msgspec.UNSET, "absent"),
    ([1, {"a": None}], '[1,{"a":null}]'),
    (["y" * 400], '["' + "y" * 298 + "..."),
]


@pytest.mark.parametrize(("value", "shown"), SHOWN, ids=range(len(SHOWN)))
def test_values_in_errors_are_bounded(value: Any, shown: Any) -> None:
    with pytest.raises(InvalidBundle) as caught:
        fail_in("f.json", 3)("check", "/a", "why", value, 1)
    assert caught.value.details.get("expected") == shown
    assert str(caught.value).startswith("f.json line 3 at /a: why (expected ")


def test_records_in_errors_are_shown_as_json() -> None:
    with pytest.raises(InvalidBundle) as caught:
        fail_in("f.json")("check", "", "why", BASE_POLICY, msgspec.UNSET)
    assert caught.value.details["expected"].startswith('{"served_model_id":"toy"')
    assert caught.value.details["found"] == "absent"
    assert str(caught.value).startswith("f.json: why")
