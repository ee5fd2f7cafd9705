"""The dataset line: one GRPO group of scored rollouts (``AgenticGroup``).

``openenv.rollouts.jsonl`` holds one canonical line per group, each ended by a single
line feed. Fields stand in declared order; members that are absent are left out. The
provenance of each rollout fails closed: a record that contradicts itself cannot be
built and cannot be read.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from kiln_core import limits
from kiln_core.canonical import JsonValue, Record, Sha256, compact
from kiln_core.provenance import (
    BehaviorPolicyIdentity,
    RolloutProvenance,
    TokenId,
    check_identity_text,
)
from kiln_core.trace import RolloutTrace, TokenTrace

__all__ = [
    "AgenticGroup",
    "ChatMessage",
    "EpisodeTermination",
    "OpenEnvRolloutProvenance",
    "ScoredRollout",
    "TurnSegment",
]

ROLLOUT_SCHEMA: Final = "kiln.openenv-rollout.v1"
TURN_BREAK: Final = "<TURN_BREAK>"
"""Joins the actions of a rollout in its ``text``."""

Seed: TypeAlias = Annotated[int, Meta(ge=0, le=limits.MAX_SEED)]
Steps: TypeAlias = Annotated[int, Meta(ge=0, le=limits.MAX_STEPS)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]


class EpisodeTermination(StrEnum):
    """Why an episode ended; no other reason exists."""

    DONE = "done"
    """The environment said so."""
    MAX_STEPS = "max_steps"
    """The horizon was used up."""
    INVALID_MODEL_ACTION = "invalid_model_action"
    """The policy's reply was no acceptable action; it was not sent."""
    PROTOCOL_ERROR = "protocol_error"
    """A terminal wire error, or one recoverable error too many."""


# a member is read faster from a name than from its enumeration
DONE: Final = EpisodeTermination.DONE
MAX_STEPS: Final = EpisodeTermination.MAX_STEPS
INVALID_MODEL_ACTION: Final = EpisodeTermination.INVALID_MODEL_ACTION
PROTOCOL_ERROR: Final = EpisodeTermination.PROTOCOL_ERROR


class ChatMessage(Record, frozen=True, kw_only=True, gc=False):
    """One message of the prompt."""

    role: Annotated[str, Meta(min_length=1)]
    content: str
    tool_calls: list[JsonValue] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET


class TurnSegment(Record, frozen=True, kw_only=True, gc=False):
    """One piece of a trajectory: an action of the policy, or what came back."""

    role: Annotated[str, Meta(min_length=1)]
    content: str
    """Raw text, before any chat template."""
    kind: Literal["context", "action", "observation"]
    tool_call_id: str | UnsetType = UNSET
    warning_prefix_len: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    """Leading UTF-8 bytes of ``content`` that are harness text, never trained."""


class OpenEnvRolloutProvenance(Record, frozen=True, kw_only=True, gc=False):
    """``kiln.openenv-rollout.v1``: where one scored rollout comes from."""

    schema: Literal["kiln.openenv-rollout.v1"]
    environment_name: Annotated[str, Meta(min_length=1)]
    environment_base_url: Annotated[str, Meta(min_length=1)]
    openapi_version: str | UnsetType = UNSET
    discovery_sha256: Sha256 | UnsetType = UNSET
    """Complete discovery digest; absent only in legacy data."""
    environment_schema_sha256: Sha256
    action_schema_sha256: Sha256
    behavior_policy: BehaviorPolicyIdentity | UnsetType = UNSET
    """Absent only in legacy data."""
    reset_sha256: Sha256
    """Digest of the effective reset object, its ``seed`` included."""
    seed: Seed
    steps: Steps
    """Environment exchanges, protocol errors included."""
    episode_return: float
    terminal_done: bool
    termination: EpisodeTermination
    protocol_error_code: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        check_identity_text(self.environment_name, "environment_name")
        if len(self.environment_base_url.encode()) > limits.MAX_URL_BYTES:
            raise ValueError("environment_base_url is too long")
        if not isinstance(self.openapi_version, UnsetType):
            check_identity_text(self.openapi_version, "openapi_version")
        if not isinstance(self.protocol_error_code, UnsetType):
            check_identity_text(self.protocol_error_code, "protocol_error_code")
        if not math.isfinite(self.episode_return):
            raise ValueError("episode_return must be finite")
        check_termination(
            self.termination, self.terminal_done, self.protocol_error_code
        )


class ScoredRollout(Record, frozen=True, kw_only=True):
    """One candidate: what it said, what it earned, and how that is known."""

    text: str
    """The actions, joined by ``<TURN_BREAK>``."""
    reward: float
    trajectory: list[TurnSegment] | UnsetType = UNSET
    provenance: RolloutProvenance | UnsetType = UNSET
    """Never set in OpenEnv corpora; one completion has one, an episode many."""
    openenv: OpenEnvRolloutProvenance | UnsetType = UNSET
    trace: RolloutTrace | UnsetType = UNSET

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError("reward must be finite")
        if not isinstance(self.openenv, UnsetType):
            self._check_against(self.openenv)

    def _check_against(self, openenv: OpenEnvRolloutProvenance) -> None:
        # 0.0 and -0.0 are equal numbers and different records
        earned = openenv.episode_return
        if self.reward != earned or (
            self.reward == 0 and compact(self.reward) != compact(earned)
        ):
            raise ValueError("reward differs from openenv.episode_return")
        if self.text != joined_actions(self.segments):
            raise ValueError("text is not the trajectory's actions joined")

    @property
    def segments(self) -> list[TurnSegment]:
        """The trajectory, empty when absent."""
        return [] if isinstance(self.trajectory, UnsetType) else self.trajectory

    @property
    def token_trace(self) -> TokenTrace | None:
        """The token ids of its turns, None when unknown."""
        return None if isinstance(self.trace, UnsetType) else self.trace.tokens


class AgenticGroup(Record, frozen=True, kw_only=True):
    """One line of the dataset: a shared prompt and its candidates."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    completions: Annotated[
        list[ScoredRollout], Meta(min_length=1, max_length=limits.MAX_GROUP_SIZE)
    ]
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | UnsetType = UNSET
    """Ids of the prompt all candidates share; absent when unknown."""


def joined_actions(trajectory: list[TurnSegment]) -> str:
    """Return the text of a rollout: its actions joined by ``<TURN_BREAK>``."""
    return TURN_BREAK.join(
        [segment.content for segment in trajectory if segment.kind == "action"]
    )


def observed_turns(trajectory: list[TurnSegment]) -> list[bool]:
    """Say, per turn, whether its result was environment text."""
    return [
        segment.warning_prefix_len is UNSET
        for segment in trajectory
        if segment.kind == "observation"
    ]


def check_termination(
    termination: EpisodeTermination,
    terminal_done: bool,  # noqa: FBT001 - mirrors the record's field
    protocol_error_code: str | UnsetType,
) -> None:
    """Check that three fields tell one story.

    Raises:
        ValueError: ``terminal_done`` or ``protocol_error_code`` contradicts
            ``termination``.
    """
    if terminal_done != (termination is DONE):
        raise ValueError("terminal_done must be true exactly when termination is done")
    has_code = not isinstance(protocol_error_code, UnsetType)
    if has_code != (termination is PROTOCOL_ERROR):
        raise ValueError(
            "protocol_error_code must stand exactly with termination protocol_error"
        )
