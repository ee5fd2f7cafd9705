"""The rules of one replayed episode, checked against its two other forms.

`check_episode` looks at the manifest alone; `check_rollout` derives provenance,
trajectory and trace anew and compares them with the dataset line. Both report through
the same callback, so that verification can name file and place.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from kiln_core.actions import ActionSchema, InvalidAction, parse_reply, split_reasoning
from kiln_core.canonical import Sha256, read_json, same_json, same_member
from kiln_core.discovery import EnvironmentInspection
from kiln_core.errors import MalformedJson
from kiln_core.manifest import (
    ObservationResult,
    ReplayCandidate,
    ReplayExchange,
    ReplayGroup,
    episode_return,
)
from kiln_core.prompt import error_text, observation_text
from kiln_core.receipt import OpenEnvRolloutSummary
from kiln_core.records import (
    EpisodeTermination,
    ScoredRollout,
    TurnSegment,
    observed_turns,
)
from kiln_core.selection import harness_code
from kiln_core.trace import check_tokens

__all__ = ["Fail", "check_episode", "check_rollout"]

ENDING_WITH_ERROR = EpisodeTermination.PROTOCOL_ERROR


class Fail(Protocol):
    """Raises for one place; never returns."""

    def __call__(
        self, check: str, pointer: str, message: str, expected: Any, found: Any
    ) -> NoReturn:
        """Raise `kiln_core.errors.InvalidBundle`."""


def check_episode(
    candidate: ReplayCandidate, summary: OpenEnvRolloutSummary, at: str, fail: Fail
) -> None:
    """Check everything a candidate says of itself in the manifest.

    Args:
        candidate: The candidate.
        summary: Its controls.
        at: JSON Pointer of the candidate.
        fail: Called for the first contradiction.
    """
    if len(candidate.exchanges) > summary.max_steps:
        fail(
            "replay_episode",
            f"{at}/exchanges",
            "too many exchanges",
            summary.max_steps,
            len(candidate.exchanges),
        )
    recoverable = 0
    last = len(candidate.exchanges) - 1
    for index, exchange in enumerate(candidate.exchanges):
        place = f"{at}/exchanges/{index}"
        if exchange.step_index != index:
            fail(
                "replay_episode",
                f"{place}/step_index",
                "steps must be contiguous",
                index,
                exchange.step_index,
            )
        ends, recoverable = _ends(exchange, recoverable, summary, place, fail)
        if ends and index != last:
            fail(
                "replay_episode",
                f"{place}/result",
                "an exchange follows the end",
                last,
                index,
            )
    _check_ending(candidate, summary, at, fail)
    _check_totals(candidate, summary, recoverable, at, fail)


def _ends(
    exchange: ReplayExchange,
    recoverable: int,
    summary: OpenEnvRolloutSummary,
    at: str,
    fail: Fail,
) -> tuple[bool, int]:
    """Return whether an exchange ends the episode, and the recoverable errors yet."""
    result = exchange.result
    if isinstance(result, ObservationResult):
        return result.observation.done, recoverable
    continued = result.error.recoverable and (
        recoverable < summary.max_recoverable_errors
    )
    if result.continued != continued:
        fail(
            "replay_episode",
            f"{at}/result/continued",
            "the recovery budget says otherwise",
            continued,
            result.continued,
        )
    return not continued, recoverable + result.error.recoverable


def _check_ending(
    candidate: ReplayCandidate, summary: OpenEnvRolloutSummary, at: str, fail: Fail
) -> None:
    ending = _ending(candidate, summary)
    allowed = {ending}
    # An invalid reply leaves no exchange, so it looks like an episode cut short.
    if ending is None:
        allowed = {EpisodeTermination.INVALID_MODEL_ACTION}
    if candidate.termination not in allowed:
        fail(
            "replay_episode",
            f"{at}/termination",
            "the exchanges end otherwise",
            sorted(str(e.value) for e in allowed if e),
            candidate.termination.value,
        )
    done = candidate.termination is EpisodeTermination.DONE
    if candidate.terminal_done != done:
        fail(
            "replay_episode",
            f"{at}/terminal_done",
            "it must follow termination",
            done,
            candidate.terminal_done,
        )
    ended_by_code = (
        candidate.termination is ENDING_WITH_ERROR and not _recoverable_last(candidate)
    )
    if (candidate.final_state is UNSET) != ended_by_code:
        fail(
            "replay_episode",
            f"{at}/final_state",
            "it is absent exactly after a terminal code",
            "absent" if ended_by_code else "present",
            "absent" if candidate.final_state is UNSET else "present",
        )


def _ending(
    candidate: ReplayCandidate, summary: OpenEnvRolloutSummary
) -> EpisodeTermination | None:
    """Return how the exchanges end; None when they stop without an end."""
    if candidate.exchanges:
        result = candidate.exchanges[-1].result
        if isinstance(result, ObservationResult):
            if result.observation.done:
                return EpisodeTermination.DONE
        elif not result.continued:
            return ENDING_WITH_ERROR
    if len(candidate.exchanges) == summary.max_steps:
        return EpisodeTermination.MAX_STEPS
    return None


def _recoverable_last(candidate: ReplayCandidate) -> bool:
    result = candidate.exchanges[-1].result
    return not isinstance(result, ObservationResult) and result.error.recoverable


def _check_totals(
    candidate: ReplayCandidate,
    summary: OpenEnvRolloutSummary,
    recoverable: int,
    at: str,
    fail: Fail,
) -> None:
    if candidate.recoverable_protocol_errors != recoverable:
        fail(
            "replay_episode",
            f"{at}/recoverable_protocol_errors",
            "the exchanges hold another number",
            recoverable,
            candidate.recoverable_protocol_errors,
        )
    total = episode_return(
        [exchange.result for exchange in candidate.exchanges],
        summary.protocol_error_reward,
        ended_invalid=(
            candidate.termination is EpisodeTermination.INVALID_MODEL_ACTION
        ),
    )
    if not math.isfinite(total) or not same_json(total, candidate.episode_return):
        fail(
            "replay_return",
            f"{at}/episode_return",
            "the rewards sum to another return",
            total,
            candidate.episode_return,
        )


class RolloutContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a dataset rollout is checked against."""

    summary: OpenEnvRolloutSummary
    inspection: EnvironmentInspection
    action_schema: ActionSchema
    group: ReplayGroup
    reset_sha256: Sha256
    """Digest of the group's reset object."""
    candidate: ReplayCandidate
    shared_prompt_tokens: int
    """Length of the group's ``prompt_token_ids``, 0 when absent."""


def check_rollout(
    rollout: ScoredRollout, context: RolloutContext, at: str, fail: Fail
) -> None:
    """Check a dataset rollout against the manifest and the summary.

    Args:
        rollout: The rollout.
        context: What it must agree with.
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
    _check_provenance(rollout, context, at, fail)
    _check_trajectory(rollout.segments, context, f"{at}/trajectory", fail)
    if not isinstance(rollout.trace, UnsetType) and rollout.trace.tokens is not None:
        check_tokens(
            rollout.trace.tokens,
            observed_turns(rollout.segments),
            context.shared_prompt_tokens,
            f"{at}/trace/tokens",
            fail,
        )


def _check_provenance(
    rollout: ScoredRollout, context: RolloutContext, at: str, fail: Fail
) -> None:
    found = rollout.openenv
    if isinstance(found, UnsetType):
        fail(
            "dataset_provenance", f"{at}/openenv", "it is missing", "present", "absent"
        )
    for name, wanted in _expected_provenance(context).items():
        got = getattr(found, name)
        if not same_member(wanted, got):
            fail(
                "dataset_provenance",
                f"{at}/openenv/{name}",
                "manifest and summary say otherwise",
                wanted,
                got,
            )


def _expected_provenance(context: RolloutContext) -> dict[str, Any]:
    """Return every member of the provenance as the other two files have it.

    Values, not a record: what is compared may be invalid in both.
    """
    identity, candidate = context.inspection.identity, context.candidate
    version = identity.openapi_version
    code: str | UnsetType = UNSET
    if candidate.termination is ENDING_WITH_ERROR:
        result = candidate.exchanges[-1].result
        assert not isinstance(result, ObservationResult)  # noqa: S101 - check_episode
        code = result.error.code
    return {
        "environment_name": identity.metadata.name,
        "environment_base_url": identity.base_url,
        "openapi_version": UNSET if version is None else version,
        "discovery_sha256": identity.discovery_sha256,
        "environment_schema_sha256": identity.schema_sha256,
        "action_schema_sha256": context.action_schema.sha256,
        "behavior_policy": context.summary.behavior_policy,
        "reset_sha256": context.reset_sha256,
        "seed": context.group.seed,
        "steps": len(candidate.exchanges),
        "episode_return": candidate.episode_return,
        "terminal_done": candidate.terminal_done,
        "termination": candidate.termination,
        "protocol_error_code": code,
    }


def _check_trajectory(
    segments: list[TurnSegment], context: RolloutContext, at: str, fail: Fail
) -> None:
    candidate = context.candidate
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
        place = f"{at}/{2 * index}"
        _check_role(segments[2 * index], "assistant", "action", place, fail)
        action = _parsed(segments[2 * index].content, context)
        if isinstance(action, InvalidAction) or not same_json(action, exchange.action):
            fail(
                "dataset_trajectory",
                place,
                "it is not the action that was sent",
                exchange.action,
                segments[2 * index].content,
            )
        _check_result(segments[2 * index + 1], exchange, f"{at}/{2 * index + 1}", fail)
    if invalid:
        _check_invalid_tail(segments[-2], segments[-1], context, at, fail)


def _parsed(content: str, context: RolloutContext) -> dict[str, Any] | InvalidAction:
    text = split_reasoning(content, thinking=context.summary.thinking)
    try:
        return parse_reply(text, context.action_schema)
    except InvalidAction as invalid:
        return invalid


def _check_role(
    segment: TurnSegment, role: str, kind: str, at: str, fail: Fail
) -> None:
    for name, expected in (("role", role), ("kind", kind), ("tool_call_id", UNSET)):
        found = getattr(segment, name)
        if found != expected:
            fail(
                "dataset_trajectory",
                f"{at}/{name}",
                "a turn of an episode has another",
                expected,
                found,
            )
    if kind == "action":
        _check_warning(segment, UNSET, at, fail)


def _check_result(
    segment: TurnSegment, exchange: ReplayExchange, at: str, fail: Fail
) -> None:
    _check_role(segment, "tool", "observation", at, fail)
    result = exchange.result
    if isinstance(result, ObservationResult):
        text = observation_text(result.observation)
        _check_warning(segment, UNSET, at, fail)
        if segment.content != text:
            fail(
                "dataset_trajectory",
                f"{at}/content",
                "it is not the observation of the manifest",
                text,
                segment.content,
            )
        return
    text = error_text(result.error, continued=result.continued)
    _check_warning(segment, len(segment.content.encode()), at, fail)
    if not _same_text(text, segment.content):
        fail(
            "dataset_trajectory",
            f"{at}/content",
            "it is not the error of the manifest",
            text,
            segment.content,
        )


def _check_warning(
    segment: TurnSegment, expected: int | UnsetType, at: str, fail: Fail
) -> None:
    if segment.warning_prefix_len != expected:
        fail(
            "dataset_trajectory",
            f"{at}/warning_prefix_len",
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
    action: TurnSegment,
    error: TurnSegment,
    context: RolloutContext,
    at: str,
    fail: Fail,
) -> None:
    last = 2 * len(context.candidate.exchanges)
    _check_role(action, "assistant", "action", f"{at}/{last}", fail)
    _check_role(error, "tool", "observation", f"{at}/{last + 1}", fail)
    _check_warning(error, len(error.content.encode()), f"{at}/{last + 1}", fail)
    parsed = _parsed(action.content, context)
    code = parsed.code if isinstance(parsed, InvalidAction) else "a valid action"
    if harness_code(error.content) != code:
        fail(
            "dataset_trajectory",
            f"{at}/{last + 1}/content",
            "the harness error is not what the reply earns",
            code,
            error.content,
        )
