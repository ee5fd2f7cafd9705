from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kiln_core.canonical import compact, convert_record, read_json, read_record
from kiln_core.errors import InvalidRecord
from kiln_core.manifest import (
    RECOVERABLE_CODES,
    Observation,
    ObservationResult,
    ProtocolError,
    ProtocolErrorResult,
    episode_return,
    observation_lines,
    reward_is_finite,
    training_reward,
    wire_observation,
)

TAGS: list[tuple[str, Any, float]] = [
    ("null", None, 0.0),
    ("true", True, 1.0),
    ("false", False, 0.0),
    ("3", 3, 3.0),
    ("3.0", 3.0, 3.0),
    ("-0.0", -0.0, -0.0),
    ("1152921504606846977", 2**60 + 1, 2.0**60),
    ("1180591620717411303424", 2**70, 2.0**70),
    ("5e-324", 5e-324, 5e-324),
]


def frame(reward: str) -> bytes:
    return b'{"observation":{},"reward":%b,"done":false}' % reward.encode()


@pytest.mark.parametrize(("text", "value", "training"), TAGS)
def test_reward_keeps_its_tag(text: str, value: Any, training: float) -> None:
    """F3: https://github.com/huggingface/OpenEnv/issues/1199"""
    for record in (
        read_record(frame(text), Observation, "x"),
        convert_record(read_json(frame(text), "x"), Observation, "x"),
    ):
        assert record.reward == value
        assert type(record.reward) is type(value)
        assert compact(record) == frame(text)
        assert compact(training_reward(record.reward)) == compact(training)


def test_five_kinds_of_one_are_distinct_on_disk() -> None:
    written = {compact(read_record(frame(t), Observation, "x")) for t, _, _ in TAGS}
    assert len(written) == len(TAGS)


@pytest.mark.parametrize(
    "text", ['"1"', "[]", "{}", "1" + "0" * 309, "-1" + "0" * 4000]
)
def test_reward_that_is_no_finite_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidRecord):
        read_record(frame(text), Observation, "x")
    with pytest.raises(InvalidRecord):
        convert_record(read_json(frame(text), "x"), Observation, "x")


@pytest.mark.parametrize(
    ("reward", "finite"),
    [
        (None, True),
        (True, True),
        (10**308, True),
        (10**400, False),
        (-(10**4000), False),
        (float("nan"), False),
        (float("-inf"), False),
    ],
)
def test_finiteness_is_that_of_a_double(reward: Any, finite: bool) -> None:
    assert reward_is_finite(reward) is finite


def answered(*rewards: Any) -> list[ObservationResult | ProtocolErrorResult]:
    error = ProtocolError(code="EXECUTION_ERROR", message="")
    return [
        ProtocolErrorResult(error=error, continued=True)
        if reward == "error"
        else ObservationResult(
            observation=Observation(observation=None, reward=reward, done=False)
        )
        for reward in rewards
    ]


@pytest.mark.parametrize(
    ("rewards", "invalid", "expected"),
    [
        ((), False, 0.0),
        ((), True, -0.1),
        ((0.1, 0.2, 0.3), False, 0.6000000000000001),
        ((0.3, 0.2, 0.1), False, 0.6),
        ((1e16, 1, -1e16), False, 0.0),
        ((-1e16, 1e16, 1), False, 1.0),
        ((None, True, "error", 2), True, 1 - 0.1 + 2 - 0.1),
        ((-0.0,), False, 0.0),
    ],
)
def test_return_is_added_left_to_right(
    rewards: tuple[Any, ...], invalid: bool, expected: float
) -> None:
    found = episode_return(answered(*rewards), -0.1, ended_invalid=invalid)
    assert compact(found) == compact(float(expected))


def test_observation_is_sorted_by_value_alone() -> None:
    one = Observation(
        observation={"b": {"d": 1, "c": 2}, "a": 1},
        reward=1,
        done=True,
        metadata={"y": 1, "x": 2},
    )
    plain = Observation(observation=1, reward=None, done=False)
    first, second = observation_lines([one, plain])
    assert first == (
        b'{"observation":{"a":1,"b":{"c":2,"d":1}},"reward":1,"done":true,'
        b'"metadata":{"x":2,"y":1}}'
    )
    assert second == compact(plain)
    assert wire_observation(plain) == {"observation": 1, "reward": None, "done": False}


def test_codes_are_recoverable_or_end_the_session() -> None:
    codes = msgspec.inspect.type_info(ProtocolError)
    assert isinstance(codes, msgspec.inspect.StructType)
    literal = codes.fields[0].type
    assert isinstance(literal, msgspec.inspect.LiteralType)
    ended = {"CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"}
    assert set(literal.values) - RECOVERABLE_CODES == ended
    for code in literal.values:
        error = ProtocolError(code=code, message="")  # type: ignore[arg-type]  # each
        assert error.recoverable is (code not in ended)
