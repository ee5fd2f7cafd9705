from __future__ import annotations

from typing import Any

import pytest

from kiln_core.compare import Drift, covers, find_drift, is_volatile, result_document
from kiln_core.manifest import Observation, ObservationResult

CASES: list[tuple[Any, Any, str | None, Any, Any]] = [
    ({"reward": 1}, {"reward": 1}, None, None, None),
    ({"reward": 1}, {"reward": 1.0}, "/at/reward", 1, 1.0),
    ({"reward": 1}, {"reward": True}, "/at/reward", 1, True),
    ({"reward": True}, {"reward": 1.0}, "/at/reward", True, 1.0),
    ({"reward": 0}, {"reward": False}, "/at/reward", 0, False),
    ({"reward": None}, {"reward": 0}, "/at/reward", None, 0),
    ({"reward": 0.0}, {"reward": -0.0}, "/at/reward", 0.0, -0.0),
    ({"n": 2**60}, {"n": 2**60 + 1}, "/at/n", 2**60, 2**60 + 1),
    ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "/at/a/1/b", 2, 3),
    ({"a/b": {"~": 1}}, {"a/b": {"~": 2}}, "/at/a~1b/~0", 1, 2),
    ("x", "y", "/at", "x", "y"),
    ({"a": 1, "b": 1}, {"b": 2, "a": 2}, "/at/a", 1, 2),
    ({"done": False}, {"done": True}, "/at/done", False, True),
]


@pytest.mark.parametrize(("captured", "live", "pointer", "expected", "found"), CASES)
def test_first_difference_is_typed_and_placed(
    captured: Any, live: Any, pointer: str | None, expected: Any, found: Any
) -> None:
    drift = find_drift(captured, live, "/at")
    if pointer is None:
        assert drift is None
        return
    assert drift is not None
    assert drift.pointer == pointer
    assert repr((drift.expected, drift.found)) == repr((expected, found))
    assert not (drift.expected_absent)
    assert not (drift.found_absent)


@pytest.mark.parametrize(
    ("captured", "live", "drift"),
    [
        ({"a": 1}, {}, Drift(pointer="/a", expected=1, found=None, found_absent=True)),
        (
            {},
            {"a": None},
            Drift(pointer="/a", expected=None, found=None, expected_absent=True),
        ),
        (
            [1],
            [1, 2],
            Drift(pointer="/1", expected=None, found=2, expected_absent=True),
        ),
        ([1, 2], [1], Drift(pointer="/1", expected=2, found=None, found_absent=True)),
    ],
)
def test_absent_is_not_null(captured: Any, live: Any, drift: Drift) -> None:
    assert find_drift(captured, live, "") == drift


STATE = {"episode_id": "a", "step_count": 1, "episode_id_2": 1, "deep": {"x": [1]}}


@pytest.mark.parametrize(
    ("ignored", "live", "pointer"),
    [
        ({"/final_state/episode_id"}, {**STATE, "episode_id": "b"}, None),
        (
            {"/final_state/episode_id"},
            {**STATE, "episode_id": "b", "step_count": 2},
            "/final_state/step_count",
        ),
        (
            {"/final_state/episode_id"},
            {**STATE, "episode_id_2": 2},
            "/final_state/episode_id_2",
        ),
        ({"/final_state/deep"}, {**STATE, "deep": {"x": [2]}}, None),
        ({"/final_state/deep/x"}, {**STATE, "deep": 1}, "/final_state/deep"),
        ({"/final_state"}, {}, None),
        (
            {"/final_state/episode_id"},
            {k: STATE[k] for k in STATE if k != "episode_id"},
            None,
        ),
        (set(), {**STATE, "episode_id": "b"}, "/final_state/episode_id"),
    ],
)
def test_exempt_pointers_cover_what_is_below_them(
    ignored: set[str], live: Any, pointer: str | None
) -> None:
    drift = find_drift(STATE, live, "/final_state", frozenset(ignored))
    assert (drift.pointer if drift else None) == pointer


def test_result_is_compared_as_the_document_it_was() -> None:
    observation = Observation(observation={"a": 1}, reward=1.0, done=False)
    result = ObservationResult(observation=observation)
    assert result_document(result) == {
        "kind": "observation",
        "observation": {"observation": {"a": 1}, "reward": 1.0, "done": False},
    }
    assert result_document(observation)["reward"] == 1.0


@pytest.mark.parametrize(
    ("exemption", "pointer", "exempt"),
    [
        ("/a", "/a", True),
        ("/a", "/a/b", True),
        ("/a", "/ab", False),
        ("/a/b", "/a", False),
        ("/a/*/b", "/a/0/b", True),
        ("/a/*/b", "/a/12/b/c", True),
        ("/a/*/b", "/a/x/b", False),
        ("/a/*/b", "/a/*/b", True),
        ("/a/*", "/a", False),
        ("/a/*/b", "/a/0", False),
        ("/a~1b", "/a~1b/c", True),
    ],
)
def test_star_stands_for_any_index(exemption: str, pointer: str, exempt: bool) -> None:
    assert covers(exemption, pointer) is exempt


@pytest.mark.parametrize(
    ("pointer", "volatile"),
    [
        ("/final_state/episode_id", True),
        ("/exchanges/3/result/error/errors/0/url", True),
        ("/exchanges/3/result/error/errors/0/msg", False),
        ("/exchanges/3/result/observation/observation/url", False),
        ("/final_state/total", False),
    ],
)
def test_volatile_places_are_two(pointer: str, volatile: bool) -> None:
    assert is_volatile(pointer) is volatile
