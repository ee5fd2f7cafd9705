"""The replay manifest ``kiln.openenv-replay.v1``: what went over the wire.

It retains, per group, the exact reset object and reset observation, and per candidate
every action with its result, so that the episode can be sent again. It links to the
dataset by digest and holds no second training representation. JSON values of the
environment keep their types: ``1``, ``1.0`` and ``true`` are different rewards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from kiln_core import limits
from kiln_core.canonical import (
    JsonValue,
    Record,
    Sha256,
    decoded_bytes,
    lines_again,
)
from kiln_core.discovery import EnvironmentInspection
from kiln_core.records import Count, EpisodeTermination, Seed

__all__ = [
    "Observation",
    "OpenEnvReplayManifest",
    "ProtocolError",
    "ReplayCandidate",
    "ReplayExchange",
    "ReplayExchangeResult",
    "ReplayGroup",
]

REPLAY_SCHEMA: Final = "kiln.openenv-replay.v1"

MAX_FLOAT: Final = sys.float_info.max

ErrorCode: TypeAlias = Literal[
    "INVALID_JSON",
    "UNKNOWN_TYPE",
    "VALIDATION_ERROR",
    "EXECUTION_ERROR",
    "CAPACITY_REACHED",
    "FACTORY_ERROR",
    "SESSION_ERROR",
]
RECOVERABLE_CODES: Final = frozenset(
    {"INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR"}
)
"""Codes after which the session goes on; all others end it."""


class ProtocolError(Record, frozen=True, kw_only=True):
    """A typed error frame of an OpenEnv server."""

    code: ErrorCode
    message: str
    errors: list[JsonValue] | UnsetType = UNSET
    active_sessions: Count | UnsetType = UNSET
    max_sessions: Count | UnsetType = UNSET
    factory_name: str | UnsetType = UNSET

    @property
    def recoverable(self) -> bool:
        """Whether the session can go on after it."""
        return self.code in RECOVERABLE_CODES


class Observation(Record, frozen=True, kw_only=True, gc=False):
    """The data of an observation frame, exactly as received."""

    observation: JsonValue
    reward: bool | int | float | None
    """Tagged: the JSON type is part of the value."""
    done: bool
    metadata: JsonValue | UnsetType = UNSET

    def __post_init__(self) -> None:
        reward = self.reward
        # the exact rule is for the few integers that are larger than any float
        if not (
            reward is None or -MAX_FLOAT <= reward <= MAX_FLOAT
        ) and not reward_is_finite(reward):
            raise ValueError("reward must be finite as a 64-bit float")


class ObservationResult(
    Record, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="observation"
):
    """The environment answered an action with an observation."""

    observation: Observation


class ProtocolErrorResult(
    Record, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="protocol_error"
):
    """The environment answered an action with a typed error."""

    error: ProtocolError
    continued: bool
    """Whether the episode went on after it."""


ReplayExchangeResult: TypeAlias = ObservationResult | ProtocolErrorResult


class ReplayExchange(Record, frozen=True, kw_only=True, gc=False):
    """One action that was sent, and its answer."""

    step_index: Count
    action: dict[str, Any]
    result: ReplayExchangeResult


class ReplayCandidate(Record, frozen=True, kw_only=True, gc=False):
    """One episode as it went over the wire."""

    candidate_index: Count
    exchanges: Annotated[list[ReplayExchange], Meta(max_length=limits.MAX_STEPS)]
    final_state: JsonValue | UnsetType = UNSET
    """Absent exactly when a terminal wire error ended the session."""
    episode_return: float
    terminal_done: bool
    termination: EpisodeTermination
    recoverable_protocol_errors: Count
    capacity_retries: Count
    model_tokens: Count
    model_latency_ms: Annotated[float, Meta(ge=0)]


class ReplayGroup(Record, frozen=True, kw_only=True):
    """One reset and the candidates that started from it."""

    group_index: Count
    environment_index: Count
    seed: Seed
    reset_payload: dict[str, Any]
    """The effective reset object, its ``seed`` included."""
    reset_observation: Observation
    candidates: Annotated[
        list[ReplayCandidate], Meta(min_length=1, max_length=limits.MAX_GROUP_SIZE)
    ]


class OpenEnvReplayManifest(Record, frozen=True, kw_only=True):
    """``openenv.replay.json``."""

    schema: Literal["kiln.openenv-replay.v1"]
    client_profile: Literal["openenv-http/1.x"]
    dataset_sha256: Sha256
    protocol_error_reward: float
    max_steps: Annotated[int, Meta(ge=1, le=limits.MAX_STEPS)]
    environments: Annotated[
        list[EnvironmentInspection],
        Meta(min_length=1, max_length=limits.MAX_ENVIRONMENTS),
    ]
    groups: Annotated[
        list[ReplayGroup], Meta(min_length=1, max_length=limits.MAX_GROUPS)
    ]


def reward_is_finite(reward: bool | int | float | None) -> bool:  # noqa: FBT001 - tag
    """Say whether a tagged reward has a finite 64-bit training value."""
    try:
        return reward is None or math.isfinite(reward)
    except OverflowError:
        return False


def training_reward(reward: bool | int | float | None) -> float:  # noqa: FBT001 - tag
    """Return the training value of a tagged reward: null and false 0, true 1."""
    return 0.0 if reward is None else float(reward)


def episode_return(
    results: list[ReplayExchangeResult],
    protocol_error_reward: float,
    *,
    ended_invalid: bool,
) -> float:
    """Sum an episode's return, left to right in 64-bit floats.

    Args:
        results: The answers, in order.
        protocol_error_reward: What each protocol error and an invalid action earn.
        ended_invalid: Whether an invalid action ended the episode.
    """
    total = 0.0
    for result in results:
        if isinstance(result, ObservationResult):
            reward = result.observation.reward
            total += 0.0 if reward is None else float(reward)
        else:
            total += protocol_error_reward
    return total + protocol_error_reward if ended_invalid else total


class _Wire(msgspec.Struct, kw_only=True, gc=False):
    """An observation of which the free JSON is encoded."""

    observation: Raw
    reward: bool | int | float | None
    done: bool
    metadata: Raw | UnsetType


def observation_lines(observations: Sequence[Observation]) -> list[bytes]:
    """Encode decoded observations, each with its free JSON in canonical order.

    A manifest may come from a writer that keeps another order; what a policy reads of
    an observation must depend on its value alone.
    """
    values = lines_again([one.observation for one in observations], free=True)
    # encoded values are written as they are
    return lines_again(
        [
            _Wire(
                observation=Raw(value),
                reward=one.reward,
                done=one.done,
                metadata=(
                    UNSET if one.metadata is UNSET else Raw(decoded_bytes(one.metadata))
                ),
            )
            for value, one in zip(values, observations, strict=True)
        ],
        free=False,
    )


def wire_observation(observation: Observation) -> dict[str, JsonValue]:
    """Return the complete observation as the JSON object it was."""
    value = msgspec.to_builtins(observation)
    assert isinstance(value, dict)  # noqa: S101 - a struct becomes a dict
    return value
