"""The rules that a captured episode must follow by itself.

Nothing but the manifest and the controls is looked at here; `kiln_core.transcript`
compares the dataset with it.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn, Protocol

from msgspec import UNSET

from kiln_core.canonical import same_json
from kiln_core.manifest import (
    ObservationResult,
    ProtocolErrorResult,
    ReplayCandidate,
    episode_return,
)
from kiln_core.receipt import OpenEnvRolloutSummary
from kiln_core.records import (
    DONE,
    INVALID_MODEL_ACTION,
    MAX_STEPS,
    PROTOCOL_ERROR,
    EpisodeTermination,
)

__all__ = ["Fail", "check_episode"]


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
        if exchange.step_index != index:
            fail(
                "replay_episode",
                f"{at}/exchanges/{index}/step_index",
                "steps must be contiguous",
                index,
                exchange.step_index,
            )
        result = exchange.result
        if isinstance(result, ObservationResult):
            ends = result.observation.done
        else:
            ends = _ends(result, index, recoverable, summary, at, fail)
            recoverable += result.error.recoverable
        if ends and index != last:
            fail(
                "replay_episode",
                f"{at}/exchanges/{index}/result",
                "an exchange follows the end",
                last,
                index,
            )
    _check_ending(candidate, summary, at, fail)
    _check_totals(candidate, summary, recoverable, at, fail)


def _ends(
    result: ProtocolErrorResult,
    index: int,
    recoverable: int,
    summary: OpenEnvRolloutSummary,
    at: str,
    fail: Fail,
) -> bool:
    """Return whether an error ends the episode, after so many recoverable ones."""
    continued = result.error.recoverable and (
        recoverable < summary.max_recoverable_errors
    )
    if result.continued != continued:
        fail(
            "replay_episode",
            f"{at}/exchanges/{index}/result/continued",
            "the recovery budget says otherwise",
            continued,
            result.continued,
        )
    return not continued


def _check_ending(
    candidate: ReplayCandidate, summary: OpenEnvRolloutSummary, at: str, fail: Fail
) -> None:
    # An invalid reply leaves no exchange, so it looks like an episode cut short.
    ending = _ending(candidate, summary) or INVALID_MODEL_ACTION
    if candidate.termination is not ending:
        fail(
            "replay_episode",
            f"{at}/termination",
            "the exchanges end otherwise",
            [ending.value],
            candidate.termination.value,
        )
    done = candidate.termination is DONE
    if candidate.terminal_done != done:
        fail(
            "replay_episode",
            f"{at}/terminal_done",
            "it must follow termination",
            done,
            candidate.terminal_done,
        )
    ended_by_code = candidate.termination is PROTOCOL_ERROR and not _recoverable_last(
        candidate
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
                return DONE
        elif not result.continued:
            return PROTOCOL_ERROR
    if len(candidate.exchanges) == summary.max_steps:
        return MAX_STEPS
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
        ended_invalid=(candidate.termination is INVALID_MODEL_ACTION),
    )
    if not math.isfinite(total) or not same_json(total, candidate.episode_return):
        fail(
            "replay_return",
            f"{at}/episode_return",
            "the rewards sum to another return",
            total,
            candidate.episode_return,
        )
