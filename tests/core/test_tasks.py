"""`kiln_core/tasks.py`: what may be asked of a task provider, and what it may answer."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln_core import limits
from kiln_core.canonical import compact, sorted_json
from kiln_core.errors import KilnError, RemoteProtocolError, UsageError
from kiln_core.tasks import (
    EnvironmentTasks,
    TaskCatalog,
    TaskCatalogReport,
    TaskSelection,
    choose_environment,
    choose_split,
    read_count,
    read_row,
    read_rows,
    read_splits,
    route_segment,
    task_selection,
)

BASE = "http://127.0.0.1:8000"
URL = f"{BASE}/counter/route"

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def named(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "type": "train"} for name in names]


# What is asked


def test_default_page() -> None:
    assert task_selection() == TaskSelection(start=0, limit=50)


@pytest.mark.parametrize("size", [1, 255, 256])
def test_name_within_its_bound(size: int) -> None:
    name = "ä" * (size // 2) + "x" * (size % 2)
    assert len(name.encode()) == size
    assert task_selection(environment_name=name, split=name).split == name


@pytest.mark.parametrize("name", ["", "x" * 257, "ä" * 129, "\udcff"])
@pytest.mark.parametrize("member", ["environment_name", "split"])
def test_name_beyond_its_bound_is_refused(member: str, name: str) -> None:
    with pytest.raises(UsageError, match="1 to 256 bytes"):
        task_selection(**{member: name})


@pytest.mark.parametrize(
    "page",
    [{"start": -1}, {"start": 2**63}, {"limit": 0}, {"limit": -1}, {"limit": 201}],
)
def test_page_beyond_its_bounds_is_refused(page: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="a page"):
        task_selection(**page)


@pytest.mark.parametrize(
    ("start", "limit", "num_tasks", "stop"),
    [
        (0, 50, 1000, 50),
        (0, 50, 20, 20),
        (100, 25, 1000, 125),
        (990, 200, 1000, 1000),
        (1000, 1, 1000, 1000),
        (2000, 50, 1000, 1000),
        (0, 1, 0, 0),
        (2**63 - 1, 200, 2**63 - 1, 2**63 - 1),
    ],
)
def test_stop_of_a_page(start: int, limit: int, num_tasks: int, stop: int) -> None:
    assert task_selection(start=start, limit=limit).stop(num_tasks) == stop


@given(st.integers(0, 2**63 - 1), st.integers(1, 200), st.integers(0, 2**63 - 1))
def test_page_is_never_longer_than_its_limit(
    start: int, limit: int, num_tasks: int
) -> None:
    stop = task_selection(start=start, limit=limit).stop(num_tasks)
    assert stop <= num_tasks
    assert stop - start <= limit


# Selection


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        (["counter"], None, "counter"),
        (["counter", "counter"], None, "counter"),
        (["counter"], "COUNTER", "counter"),
        (["a", "B"], "b", "B"),
        (["Äther"], "äTHER", "Äther"),
        (["train", "Train"], "Train", "Train"),
    ],
)
def test_environment_is_chosen_in_any_case(
    names: list[str], wanted: str | None, chosen: str
) -> None:
    assert choose_environment(names, wanted, BASE) == chosen
    if wanted is not None:
        assert choose_split(named(*names), wanted, BASE) == chosen


@pytest.mark.parametrize(
    ("names", "wanted", "reason"),
    [
        (["a"], "b", f"{BASE} has no environment 'b'; it has 'a'"),
        ([], "b", "it has none"),
        ([], None, "advertises 0 environments: none"),
        (["a", "b"], None, "advertises 2 environments: 'a', 'b'"),
        (["Ab", "aB"], "ab", "'ab' may be any of 'Ab', 'aB'"),
        ([str(n) for n in range(20)], "x", "'7' and 12 more"),
    ],
)
def test_unknown_environment_names_what_there_is(
    names: list[str], wanted: str | None, reason: str
) -> None:
    with pytest.raises(UsageError) as caught:
        choose_environment(names, wanted, BASE)
    assert reason in caught.value.message
    assert caught.value.hint


def test_unknown_split_names_what_there_is() -> None:
    with pytest.raises(UsageError) as caught:
        choose_split(named("train", "test"), "dev", BASE)
    assert caught.value.message == (
        f"{BASE} has no split 'dev'; it has 'train', 'test'"
    )


def test_refusal_is_bounded_and_holds_nothing_a_terminal_obeys() -> None:
    hostile = ["\x1b[2J\u202e\n" + "x" * 100_000] * 500 + ["\x9b" * 1000, "y"]
    with pytest.raises(UsageError) as caught:
        choose_environment(hostile, None, BASE)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1_500


@pytest.mark.parametrize(
    ("name", "segment"),
    [
        ("counter", "counter"),
        ("a/b c", "a%2Fb%20c"),
        ("hard/odd %", "hard%2Fodd%20%25"),
        ("?#", "%3F%23"),
        ("ä", "%C3%A4"),
        ("...", "..."),
        ("../x", "..%2Fx"),
        ("%2F", "%252F"),
    ],
)
def test_name_is_one_segment(name: str, segment: str) -> None:
    assert route_segment(name, BASE) == segment


@given(st.text(min_size=1, max_size=60).filter(lambda name: name not in {".", ".."}))
def test_any_name_is_one_segment(name: str) -> None:
    segment = route_segment(name, BASE)
    assert segment.isascii()
    assert not set(segment) & set("/?#\\ \r\n")
    assert unquote(segment) == name


@pytest.mark.parametrize("name", ["", ".", "..", "x" * 257])
def test_name_that_no_route_carries(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="no route can carry"):
        route_segment(name, BASE)


# What is answered


def test_members_of_a_split_are_kept() -> None:
    split = {"type": "curriculum-7", "z": [1, {"b": 1.0, "a": None}], "name": "x"}
    (found,) = read_splits([split], URL)
    assert found == split
    assert list(found) == ["name", "type", "z"]
    assert list(found["z"][1]) == ["a", "b"]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"splits": []},
        "train",
        ["train"],
        [[]],
        [{}],
        [{"name": "x"}],
        [{"type": "x"}],
        [{"name": 1, "type": "x"}],
        [{"name": "x", "type": None}],
        [{"name": "", "type": "x"}],
        [{"name": "x" * 257, "type": "x"}],
        named("a") + [1],
        named(*["x"] * 1025),
    ],
)
def test_splits_of_another_shape(answer: object) -> None:
    with pytest.raises(RemoteProtocolError, match="Task API prescribes"):
        read_splits(answer, URL)


@pytest.mark.parametrize("count", [0, 1, 2**63 - 1])
def test_count(count: int) -> None:
    assert read_count({"num_tasks": count, "more": 1}, URL) == count


@pytest.mark.parametrize(
    "answer",
    [
        None,
        5,
        [],
        {},
        *({"num_tasks": n} for n in (-1, True, 3.0, "3", None, 2**63, [1])),
    ],
)
def test_count_of_another_shape(answer: object) -> None:
    with pytest.raises(RemoteProtocolError, match="num_tasks"):
        read_count(answer, URL)


def test_rows_are_any_json() -> None:
    rows = [None, 1, 1.0, True, "x", [], {"b": 1, "a": [2]}]
    assert read_rows({"tasks": rows, "env_name": "x"}, URL) == rows


@pytest.mark.parametrize("answer", [None, [], {}, {"tasks": {}}, {"tasks": None}])
def test_rows_of_another_shape(answer: object) -> None:
    with pytest.raises(RemoteProtocolError, match="tasks"):
        read_rows(answer, URL)


def test_raw_collection_is_bounded() -> None:
    most = limits.MAX_TASK_COLLECTION
    assert len(read_rows({"tasks": [0] * most}, URL)) == most
    for asked in (most, most * 2):
        with pytest.raises(RemoteProtocolError, match=r"16385 rows, .* the 16384"):
            read_rows({"tasks": [0] * (most + 1)}, URL, asked)


def test_more_rows_than_asked_for_are_refused_and_fewer_are_not() -> None:
    assert read_rows({"tasks": [1, 2]}, URL, 3) == [1, 2]
    with pytest.raises(RemoteProtocolError, match=r"4 rows, .* the 3"):
        read_rows({"tasks": [1, 2, 3, 4]}, URL, 3)


def test_row() -> None:
    assert read_row({"task": {"b": 1, "a": 2}}, URL) == {"a": 2, "b": 1}
    assert read_row({"task": None}, URL) is None
    with pytest.raises(RemoteProtocolError, match="task"):
        read_row({"tasks": []}, URL)


def test_number_that_only_a_reader_takes_is_the_provider_s_fault() -> None:
    with pytest.raises(RemoteProtocolError, match="no JSON form"):
        read_row({"task": -(10**4299) * 9}, URL)


@given(JSON)
def test_any_answer_is_read_or_refused(answer: Any) -> None:
    for read in (read_splits, read_count, read_rows, read_row):
        for wrapped in (answer, {"num_tasks": answer, "tasks": answer, "task": answer}):
            try:
                compact(read(wrapped, URL))
            except KilnError as error:
                assert type(error) is RemoteProtocolError
                assert error.message.isprintable()


@given(st.lists(JSON, max_size=3))
def test_report_is_read_back(rows: list[Any]) -> None:
    catalog = TaskCatalog(
        environment_name="x",
        task_api="available",
        splits=read_splits(named("train"), URL),
        selected_split="train",
        num_tasks=9,
        start=3,
        stop=6,
        tasks=read_rows({"tasks": rows}, URL),
    )
    report = TaskCatalogReport(
        schema="kiln.openenv-task-catalog.v1",
        catalogs=[EnvironmentTasks(base_url=BASE, catalog=catalog)],
    )
    written = compact(report)
    again = msgspec.json.decode(written, type=TaskCatalogReport)
    assert compact(again) == written
    assert again.catalogs[0].catalog.tasks == sorted_json(rows)


def test_absent_members_are_left_out() -> None:
    catalog = TaskCatalog(
        environment_name="x", task_api="unsupported", splits=[], tasks=[]
    )
    assert compact(catalog) == (
        b'{"environment_name":"x","task_api":"unsupported","splits":[],"tasks":[]}'
    )
