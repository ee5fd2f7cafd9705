from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln_core import limits
from kiln_core.errors import InvalidRecord, UsageError
from kiln_core.plan import (
    CollectionControls,
    check_controls,
    controls_from,
    effective_reset,
    generation_seed,
    recorded_controls,
    reset_plan_digest,
    reset_templates,
    seed_intervals_overlap,
)
from tests.core.bundles import CONTROLS, Collection

SEEDS = [
    ((0, 0, 0), 0),
    ((0, 1, 0), 11400714819323198485),
    ((0, 0, 1), 13787848793156543929),
    ((7, 0, 0), 7),
    ((2**63 - 1, 0, 0), 2**63 - 1),
]


def independent_seed(seed: int, candidate: int, step: int) -> int:
    wrap = 1 << 64
    return (
        seed
        ^ (candidate * 0x9E3779B97F4A7C15 % wrap)
        ^ (step * 0xBF58476D1CE4E5B9 % wrap)
    )


@pytest.mark.parametrize(("place", "seed"), SEEDS)
def test_generation_seed_is_the_documented_one(
    place: tuple[int, int, int], seed: int
) -> None:
    assert generation_seed(*place) == seed


@given(st.integers(0, limits.MAX_SEED), st.integers(0, 255), st.integers(0, 255))
def test_generation_seed_is_unsigned_64_bit(
    seed: int, candidate: int, step: int
) -> None:
    found = generation_seed(seed, candidate, step)
    assert found == independent_seed(seed, candidate, step)
    assert 0 <= found <= limits.MAX_GENERATION_SEED


def test_seeds_of_a_group_are_all_different() -> None:
    seeds = {generation_seed(9, c, s) for c in range(256) for s in range(256)}
    assert len(seeds) == 256 * 256


DEFAULTS = {
    "groups": 8,
    "group_size": 4,
    "seed_start": 0,
    "max_steps": 8,
    "concurrency": 4,
    "max_action_tokens": 256,
    "thinking_budget_tokens": None,
    "temperature": 1.0,
    "thinking": True,
    "protocol_error_reward": -1.0,
    "max_recoverable_errors": 3,
    "capacity_wait_seconds": 300,
    "episode_retries": 2,
}


def test_controls_have_the_documented_defaults() -> None:
    assert msgspec.to_builtins(CollectionControls()) == DEFAULTS
    assert controls_from({}) == CollectionControls()


BOUNDS: list[tuple[str, Any, Any]] = [
    ("groups", 1, 16384),
    ("group_size", 1, 256),
    ("max_steps", 1, 256),
    ("concurrency", 1, 256),
    ("max_action_tokens", 1, 16384),
    ("max_recoverable_errors", 0, 64),
    ("capacity_wait_seconds", 1, 3600),
    ("episode_retries", 0, 16),
    ("seed_start", 0, 2**63 - 8),
    ("temperature", 0.0, 1e300),
    ("protocol_error_reward", -1e300, 1e300),
]


def changed(**values: Any) -> CollectionControls:
    smallest = {"group_size": 1} if values.get("groups", 0) > 64 else {}
    return msgspec.structs.replace(CollectionControls(), **(smallest | values))


@pytest.mark.parametrize(("name", "low", "high"), BOUNDS)
def test_control_is_accepted_at_its_bounds(name: str, low: Any, high: Any) -> None:
    check_controls(changed(**{name: low}), 1)
    check_controls(changed(**{name: high}), 1)


@pytest.mark.parametrize(("name", "low", "high"), BOUNDS[:9])
def test_control_is_refused_beyond_its_bounds(name: str, low: Any, high: Any) -> None:
    for value in (low - 1, high + 1):
        with pytest.raises(UsageError, match=r"must be|would exceed"):
            check_controls(changed(**{name: value}), 1)


@pytest.mark.parametrize(
    "controls",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"protocol_error_reward": float("nan")},
        {"protocol_error_reward": float("-inf")},
        {"thinking_budget_tokens": 256},
        {"thinking_budget_tokens": -1},
        {"thinking_budget_tokens": 1, "thinking": False},
        {"groups": 64, "group_size": 256, "seed_start": 2**63 - 63},
        {"seed_start": 2**63 - 8, "groups": 9},
        {"groups": 65, "group_size": 256},
        {"groups": 5461, "group_size": 4},
    ],
)
def test_controls_that_contradict_each_other_are_refused(
    controls: dict[str, Any],
) -> None:
    with pytest.raises(UsageError):
        check_controls(msgspec.structs.replace(CollectionControls(), **controls), 1)


def test_rollouts_are_bounded_together() -> None:
    check_controls(changed(groups=64, group_size=256), 1)
    check_controls(changed(groups=16384, group_size=1), 1)
    check_controls(changed(seed_start=2**63 - 1, groups=1), 1)
    check_controls(changed(thinking_budget_tokens=255), 1)
    check_controls(changed(thinking_budget_tokens=0), 1)


@pytest.mark.parametrize("environments", [0, 9, 65])
def test_every_environment_must_be_used(environments: int) -> None:
    with pytest.raises(UsageError):
        check_controls(CollectionControls(), environments)
    check_controls(CollectionControls(), 8)


@pytest.mark.parametrize(
    "values",
    [
        {"groups": "8"},
        {"groups": 8.0},
        {"colour": 1},
        {"thinking": 1},
        {"temperature": "1"},
    ],
)
def test_control_of_another_type_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="invalid collection control"):
        controls_from(values)


def test_summary_records_every_control() -> None:
    summary = Collection().bundle().summary
    recorded = recorded_controls(summary)
    assert recorded == msgspec.structs.replace(CONTROLS, thinking=False)
    budget = msgspec.structs.replace(summary, thinking_budget_tokens=5)
    assert recorded_controls(budget).thinking_budget_tokens == 5


def test_templates_are_seed_free_and_in_order() -> None:
    options = {"seed": 9, "b": 1, "a": {"d": 1, "c": 2}}
    shared = reset_templates(options, [], 2)
    assert shared == [{"a": {"c": 2, "d": 1}, "b": 1}] * 2
    assert list(shared[0]) == ["a", "b"]
    assert reset_templates({}, [{"x": 1}, {"seed": 1}], 2) == [{"x": 1}, {}]
    assert reset_templates({}, [], 3) == [{}, {}, {}]


@pytest.mark.parametrize(
    ("shared", "aligned", "environments"),
    [
        ({"a": 1}, [{}], 1),
        ({}, [{}], 2),
        ({}, [{}, {}], 1),
        ([], [], 1),
        ({}, [[]], 1),
        ({}, [None], 1),
        ({"a": "x" * limits.MAX_RESET_OPTIONS_BYTES}, [], 1),
    ],
    ids=range(7),
)
def test_reset_options_are_refused(
    shared: Any, aligned: Any, environments: int
) -> None:
    with pytest.raises(UsageError):
        reset_templates(shared, aligned, environments)


def test_reset_options_must_be_json() -> None:
    with pytest.raises(InvalidRecord):
        reset_templates({"a": float("nan")}, [], 1)


def test_largest_reset_options_fit_a_frame() -> None:
    size = limits.MAX_RESET_OPTIONS_BYTES - len('{"a":""}')
    templates = reset_templates({"a": "x" * size}, [], 1)
    frame = len(msgspec.json.Encoder().encode({"data": templates[0], "type": "reset"}))
    assert frame + len('"seed":9223372036854775807,') < limits.MAX_CLIENT_MESSAGE_BYTES


def test_plan_digest_is_of_the_array_of_templates() -> None:
    text = b'[{"a":1,"b":2},{}]'
    expected = "sha256:" + hashlib.sha256(text).hexdigest()
    assert reset_plan_digest([{"b": 2, "a": 1}, {}]) == expected
    assert reset_plan_digest([{}, {"a": 1, "b": 2}]) != expected
    assert reset_plan_digest([]) == (
        "sha256:4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"
    )


def test_effective_reset_is_the_template_with_its_seed() -> None:
    reset = effective_reset({"z": 1, "a": 2}, 5)
    assert list(reset.items()) == [("a", 2), ("seed", 5), ("z", 1)]


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ((0, 8), (8, 20), False),
        ((0, 8), (7, 20), True),
        ((8, 20), (0, 8), False),
        ((8, 20), (0, 9), True),
        ((0, 100), (40, 2), True),
        ((5, 1), (5, 1), True),
        ((5, 1), (6, 1), False),
    ],
)
def test_half_open_seed_intervals(
    one: tuple[int, int], other: tuple[int, int], overlap: bool
) -> None:
    assert seed_intervals_overlap(*one, *other) is overlap
    assert seed_intervals_overlap(*other, *one) is overlap
