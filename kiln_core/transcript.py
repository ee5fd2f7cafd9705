"""One rollout of the dataset, derived anew from what went over the wire.

`check_rollout` derives provenance, trajectory and trace from the manifest and compares
them with the dataset line. It reports through a callback, so that verification can name
file and place.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, UnsetType

from kiln_core import limits
from kiln_core.actions import ActionSchema, InvalidAction, action_bytes, split_reasoning
from kiln_core.canonical import (
    Sha256,
    decoded_bytes,
    encoded_again,
    read_json,
    same_json,
    same_member,
)
from kiln_core.discovery import EnvironmentInspection
from kiln_core.episode_rules import ENDING_WITH_ERROR, Fail
from kiln_core.errors import MalformedJson
from kiln_core.manifest import (
    ObservationResult,
    ReplayCandidate,
    ReplayExchange,
)
from kiln_core.prompt import error_text, observation_text
from kiln_core.receipt import OpenEnvRolloutSummary
from kiln_core.records import (
    ROLLOUT_SCHEMA,
    EpisodeTermination,
    ScoredRollout,
    TurnSegment,
    observed_turns,
)
from kiln_core.selection import harness_code
from kiln_core.trace import check_tokens

__all__ = ["RolloutSetting", "check_rollout"]

ROLES: Final = {"action": "assistant", "observation": "tool"}
"""Who speaks in each kind of segment."""
SHORT_ACTION: Final = 2 * limits.MAX_JSON_DEPTH
"""Bytes of JSON that cannot nest too deep for a reply."""


class RolloutSetting:
    """What the rollouts of a group are checked against, beside their candidates.

    Attributes:
        summary: The summary.
        action_schema: Compiled for the group's environment.
        shared_prompt_tokens: Length of the group's ``prompt_token_ids``, 0 when absent.
        provenance: The members of a provenance that all of the group share.
    """

    def __init__(
        self,
        *,
        summary: OpenEnvRolloutSummary,
        inspection: EnvironmentInspection,
        action_schema: ActionSchema,
        seed: int,
        reset_sha256: Sha256,
        shared_prompt_tokens: int,
    ) -> None:
        self.summary = summary
        self.action_schema = action_schema
        self.shared_prompt_tokens = shared_prompt_tokens
        identity = inspection.identity
        version = identity.openapi_version
        self.provenance: dict[str, Any] = {
            "environment_name": identity.metadata.name,
            "environment_base_url": identity.base_url,
            "openapi_version": UNSET if version is None else version,
            "discovery_sha256": identity.discovery_sha256,
            "environment_schema_sha256": identity.schema_sha256,
            "action_schema_sha256": action_schema.sha256,
            "behavior_policy": summary.behavior_policy,
            "reset_sha256": reset_sha256,
            "seed": seed,
        }
        shared = {"schema": ROLLOUT_SCHEMA, **_present(self.provenance)}
        self._opening = encoded_again(shared)[:-1]

    def provenance_bytes(self, own: dict[str, Any]) -> bytes:
        """Return the canonical bytes of a provenance with these members of its own."""
        return self._opening + b"," + encoded_again(_present(own))[1:]


def _present(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not UNSET}


def check_rollout(
    rollout: ScoredRollout,
    candidate: ReplayCandidate,
    setting: RolloutSetting,
    at: str,
    fail: Fail,
) -> None:
    """Check a dataset rollout against the manifest and the summary.

    Args:
        rollout: The rollout.
        candidate: What went over the wire; `check_episode` holds for it.
        setting: What its group must agree with.
        at: JSON Pointer of the rollout in its line.
        fail: Called for the first contradiction.
    """
    if rollout.provenance is not UNSET:
        fail(
            "dataset_provenance",
            f"{at}/provenance",
            "an episode has no single completion's provenance",
            "absent",
            "present",
        )
    _check_provenance(rollout, candidate, setting, at, fail)
    place = f"{at}/trajectory"
    _check_trajectory(rollout.segments, candidate, setting, place, fail)
    if not isinstance(rollout.trace, UnsetType) and rollout.trace.tokens is not None:
        check_tokens(
            rollout.trace.tokens,
            observed_turns(rollout.segments),
            setting.shared_prompt_tokens,
            f"{at}/trace/tokens",
            fail,
        )


def _check_provenance(
    rollout: ScoredRollout,
    candidate: ReplayCandidate,
    setting: RolloutSetting,
    at: str,
    fail: Fail,
) -> None:
    found = rollout.openenv
    if isinstance(found, UnsetType):
        fail(
            "dataset_provenance", f"{at}/openenv", "it is missing", "present", "absent"
        )
    own = _own_provenance(candidate)
    if setting.provenance_bytes(own) == encoded_again(found):
        return
    for name, wanted in (setting.provenance | own).items():
        got = getattr(found, name)
        if not same_member(wanted, got):
            fail(
                "dataset_provenance",
                f"{at}/openenv/{name}",
                "manifest and summary say otherwise",
                wanted,
                got,
            )


def _own_provenance(candidate: ReplayCandidate) -> dict[str, Any]:
    """Return the members of a provenance that are the candidate's own.

    Values, not a record: what is compared may be invalid in both.
    """
    code: str | UnsetType = UNSET
    if candidate.termination is ENDING_WITH_ERROR:
        result = candidate.exchanges[-1].result
        assert not isinstance(result, ObservationResult)  # noqa: S101 - check_episode
        code = result.error.code
    return {
        "steps": len(candidate.exchanges),
        "episode_return": candidate.episode_return,
        "terminal_done": candidate.terminal_done,
        "termination": candidate.termination,
        "protocol_error_code": code,
    }


def _check_trajectory(
    segments: list[TurnSegment],
    candidate: ReplayCandidate,
    setting: RolloutSetting,
    at: str,
    fail: Fail,
) -> None:
    invalid = candidate.termination is EpisodeTermination.INVALID_MODEL_ACTION
    expected = 2 * (len(candidate.exchanges) + invalid)
    if len(segments) != expected:
        fail(
            "dataset_trajectory",
            at,
            "the manifest has another number of turns",
            expected,
            len(segments),
        )
    for index, exchange in enumerate(candidate.exchanges):
        _check_action(segments, 2 * index, exchange, setting, at, fail)
        _check_result(segments, 2 * index + 1, exchange, at, fail)
    if invalid:
        _check_invalid_tail(segments, setting, at, fail)


def _check_action(
    segments: list[TurnSegment],
    index: int,
    exchange: ReplayExchange,
    setting: RolloutSetting,
    at: str,
    fail: Fail,
) -> None:
    segment = segments[index]
    # one comparison of records is far cheaper than one of each member
    if segment != TurnSegment(role="assistant", content=segment.content, kind="action"):
        _check_role(segment, "action", at, index, fail)
    if not _is_action(segment.content, exchange.action, setting):
        fail(
            "dataset_trajectory",
            f"{at}/{index}",
            "it is not the action that was sent",
            exchange.action,
            segment.content,
        )


def _is_action(content: str, sent: dict[str, Any], setting: RolloutSetting) -> bool:
    """Say whether a segment holds the action that was sent."""
    expected = decoded_bytes(sent)
    text = split_reasoning(content, thinking=setting.summary.thinking)
    try:
        if text.encode() == expected and len(expected) <= SHORT_ACTION:
            # the reply is canonical, so the value is known without parsing it
            setting.action_schema.check(sent, len(expected))
            return True
        return action_bytes(text, setting.action_schema) == expected
    except InvalidAction:
        return False


def _parsed(content: str, setting: RolloutSetting) -> bytes | InvalidAction:
    """Return the canonical bytes of the action in a segment."""
    text = split_reasoning(content, thinking=setting.summary.thinking)
    try:
        return action_bytes(text, setting.action_schema)
    except InvalidAction as invalid:
        return invalid


def _check_role(
    segment: TurnSegment, kind: str, at: str, index: int, fail: Fail
) -> None:
    role = ROLES[kind]
    right = segment.role == role and segment.kind == kind
    if not (right and segment.tool_call_id is UNSET):
        for name, expected in (("role", role), ("kind", kind), ("tool_call_id", UNSET)):
            found = getattr(segment, name)
            if found != expected:
                fail(
                    "dataset_trajectory",
                    f"{at}/{index}/{name}",
                    "a turn of an episode has another",
                    expected,
                    found,
                )
    if kind == "action":
        _check_warning(segment, UNSET, at, index, fail)


def _check_result(
    segments: list[TurnSegment],
    index: int,
    exchange: ReplayExchange,
    at: str,
    fail: Fail,
) -> None:
    segment, result = segments[index], exchange.result
    if isinstance(result, ObservationResult):
        text = observation_text(result.observation)
        if segment == TurnSegment(role="tool", content=text, kind="observation"):
            return
        _check_role(segment, "observation", at, index, fail)
        _check_warning(segment, UNSET, at, index, fail)
        if segment.content != text:
            fail(
                "dataset_trajectory",
                f"{at}/{index}/content",
                "it is not the observation of the manifest",
                text,
                segment.content,
            )
        return
    text = error_text(result.error, continued=result.continued)
    _check_role(segment, "observation", at, index, fail)
    _check_warning(segment, len(segment.content.encode()), at, index, fail)
    if not _same_text(text, segment.content):
        fail(
            "dataset_trajectory",
            f"{at}/{index}/content",
            "it is not the error of the manifest",
            text,
            segment.content,
        )


def _check_warning(
    segment: TurnSegment, expected: int | UnsetType, at: str, index: int, fail: Fail
) -> None:
    if segment.warning_prefix_len != expected:
        fail(
            "dataset_trajectory",
            f"{at}/{index}/warning_prefix_len",
            "an error is harness text to its last byte, and nothing else is",
            expected,
            segment.warning_prefix_len,
        )


def _same_text(expected: str, found: str) -> bool:
    if expected == found:
        return True
    try:
        return same_json(read_json(expected, "text"), read_json(found, "text"))
    except MalformedJson:
        return False


def _check_invalid_tail(
    segments: list[TurnSegment], setting: RolloutSetting, at: str, fail: Fail
) -> None:
    last = len(segments) - 2
    action, error = segments[last:]
    _check_role(action, "action", at, last, fail)
    _check_role(error, "observation", at, last + 1, fail)
    _check_warning(error, len(error.content.encode()), at, last + 1, fail)
    parsed = _parsed(action.content, setting)
    code = parsed.code if isinstance(parsed, InvalidAction) else "a valid action"
    if harness_code(error.content) != code:
        fail(
            "dataset_trajectory",
            f"{at}/{last + 1}/content",
            "the harness error is not what the reply earns",
            code,
            error.content,
        )
