"""The rollouts of a line, derived anew from what went over the wire.

`check_rollouts` derives provenance, trajectory and trace from the manifest and compares
them with the dataset line. It reports through a callback, so that verification can name
file and place.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, UnsetType

from kiln_core.actions import ActionSchema, InvalidAction, action_bytes, split_reasoning
from kiln_core.canonical import (
    Sha256,
    decoded_bytes,
    encoded_again,
    lines_again,
    read_json,
    same_json,
    same_member,
)
from kiln_core.discovery import EnvironmentInspection
from kiln_core.episode_rules import Fail
from kiln_core.errors import MalformedJson
from kiln_core.manifest import (
    ObservationResult,
    ReplayCandidate,
    ReplayExchange,
)
from kiln_core.prompt import (
    error_text,
    observation_text,
    observation_texts,
    result_segment,
)
from kiln_core.receipt import OpenEnvRolloutSummary
from kiln_core.records import (
    INVALID_MODEL_ACTION,
    PROTOCOL_ERROR,
    ROLLOUT_SCHEMA,
    ScoredRollout,
    TurnSegment,
    observed_turns,
)
from kiln_core.selection import harness_code
from kiln_core.trace import check_tokens

__all__ = ["RolloutSetting", "check_rollouts"]

ROLES: Final = {"action": "assistant", "observation": "tool"}
"""Who speaks in each kind of segment."""


class RolloutSetting:
    """What the rollouts of a group are checked against, beside their candidates.

    Attributes:
        summary: The summary.
        action_schema: Compiled for the group's environment.
        shared_prompt_tokens: Length of the group's ``prompt_token_ids``, 0 when absent.
        provenance: The members of a provenance that all of the group share.
        opening: Their canonical bytes, with which each provenance begins.
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
        shared = {"schema": ROLLOUT_SCHEMA, **self.provenance}
        shared = {name: value for name, value in shared.items() if value is not UNSET}
        self.opening = encoded_again(shared)[:-1]


def check_rollouts(
    rollouts: list[ScoredRollout],
    candidates: list[ReplayCandidate],
    setting: RolloutSetting,
    fail: Fail,
) -> None:
    """Check the rollouts of a line against the manifest and the summary.

    Args:
        rollouts: The rollouts.
        candidates: What went over the wire, as many; `check_episode` holds for each.
        setting: What their group must agree with.
        fail: Called for the first contradiction.
    """
    # nearly always all is well, which one pass over the group says far faster
    derived = _are_derived(rollouts, candidates, setting)
    collected = _are_as_collected(rollouts, candidates, setting)
    for index, (rollout, candidate) in enumerate(
        zip(rollouts, candidates, strict=True)
    ):
        at = f"/completions/{index}"
        if not derived:
            _check_provenance(rollout, candidate, setting, at, fail)
        _check_length(rollout.segments, candidate, at, fail)
        place = f"{at}/trajectory"
        if not (collected or _are_as_collected([rollout], [candidate], setting)):
            _check_turns(rollout.segments, candidate.exchanges, setting, place, fail)
        if candidate.termination is INVALID_MODEL_ACTION:
            _check_invalid_tail(rollout.segments, setting, place, fail)
        _check_trace(rollout, setting, at, fail)


def _check_trace(
    rollout: ScoredRollout, setting: RolloutSetting, at: str, fail: Fail
) -> None:
    if rollout.token_trace is not None:
        check_tokens(
            rollout.token_trace,
            observed_turns(rollout.segments),
            setting.shared_prompt_tokens,
            f"{at}/trace/tokens",
            fail,
        )


def _are_derived(
    rollouts: list[ScoredRollout],
    candidates: list[ReplayCandidate],
    setting: RolloutSetting,
) -> bool:
    """Say whether every provenance is the one that manifest and summary give."""
    found = [one.openenv for one in rollouts if one.provenance is UNSET]
    if len(found) != len(rollouts) or UNSET in found:
        return False
    own = [_own_provenance(candidate) for candidate in candidates]
    for members in own:
        if members["protocol_error_code"] is UNSET:
            del members["protocol_error_code"]
    opening = setting.opening + b","
    return lines_again(found, free=False) == [
        opening + line[1:] for line in lines_again(own, free=False)
    ]


def _check_provenance(
    rollout: ScoredRollout,
    candidate: ReplayCandidate,
    setting: RolloutSetting,
    at: str,
    fail: Fail,
) -> None:
    if rollout.provenance is not UNSET:
        fail(
            "dataset_provenance",
            f"{at}/provenance",
            "an episode has no single completion's provenance",
            "absent",
            "present",
        )
    found = rollout.openenv
    if isinstance(found, UnsetType):
        fail(
            "dataset_provenance", f"{at}/openenv", "it is missing", "present", "absent"
        )
    for name, wanted in (setting.provenance | _own_provenance(candidate)).items():
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
    if candidate.termination is PROTOCOL_ERROR:
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


def _check_length(
    segments: list[TurnSegment], candidate: ReplayCandidate, at: str, fail: Fail
) -> None:
    invalid = candidate.termination is INVALID_MODEL_ACTION
    expected = 2 * (len(candidate.exchanges) + invalid)
    if len(segments) != expected:
        fail(
            "dataset_trajectory",
            f"{at}/trajectory",
            "the manifest has another number of turns",
            expected,
            len(segments),
        )


def _are_as_collected(
    rollouts: list[ScoredRollout],
    candidates: list[ReplayCandidate],
    setting: RolloutSetting,
) -> bool:
    """Say whether all turns are what canonical replies and the answers give.

    Where they are not, each must be looked at by itself.
    """
    actions: list[TurnSegment] = []
    answers: list[TurnSegment] = []
    exchanges: list[ReplayExchange] = []
    for rollout, candidate in zip(rollouts, candidates, strict=True):
        stop = 2 * len(candidate.exchanges)
        actions += rollout.segments[0:stop:2]
        answers += rollout.segments[1:stop:2]
        exchanges += candidate.exchanges
    # no rollout gives more than its candidate has, so equal lengths leave no shift
    return (
        answers == _answers(exchanges)
        and actions
        == [
            TurnSegment(role="assistant", content=action.content, kind="action")
            for action in actions
        ]
        and _are_canonical(actions, exchanges, setting)
    )


def _answers(exchanges: list[ReplayExchange]) -> list[TurnSegment]:
    """Return the segments that a collection makes of what came back."""
    results = [exchange.result for exchange in exchanges]
    texts = iter(
        observation_texts(
            [one.observation for one in results if isinstance(one, ObservationResult)]
        )
    )
    return [
        result_segment(next(texts), harness=False)
        if isinstance(result, ObservationResult)
        else result_segment(
            error_text(result.error, continued=result.continued), harness=True
        )
        for result in results
    ]


def _are_canonical(
    actions: list[TurnSegment],
    exchanges: list[ReplayExchange],
    setting: RolloutSetting,
) -> bool:
    """Say whether replies are the actions that were sent, in canonical form."""
    sent = [exchange.action for exchange in exchanges]
    lines = lines_again(sent, free=True)
    thinking = setting.summary.thinking
    found = [split_reasoning(one.content, thinking=thinking) for one in actions]
    # the values are known then, without parsing a reply
    return [text.encode() for text in found] == lines and (
        setting.action_schema.accepts_all(sent, max(map(len, lines), default=0))
    )


def _check_turns(
    segments: list[TurnSegment],
    exchanges: list[ReplayExchange],
    setting: RolloutSetting,
    at: str,
    fail: Fail,
) -> None:
    for index, exchange in enumerate(exchanges):
        _check_action(segments, 2 * index, exchange, setting, at, fail)
        _check_result(segments, 2 * index + 1, exchange, at, fail)


def _check_action(
    segments: list[TurnSegment],
    index: int,
    exchange: ReplayExchange,
    setting: RolloutSetting,
    at: str,
    fail: Fail,
) -> None:
    segment = segments[index]
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
        if text.encode() == expected:
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
