"""One candidate's episode as a generator without IO.

`run_episode` yields what it needs (`Reset`, `Ask`, `Step`, `ReadState`, `Close`) and is
sent what came (an event of ``kiln_core.session`` or a `PolicyReply`). Live collection,
exact replay and the tests are three drivers of this one generator.

An episode ends in one of four ways and no other: ``done``, ``max_steps``,
``invalid_model_action`` (the reply is retained, never sent) or ``protocol_error``. What
is neither (a lost socket, a broken protocol) leaves no episode: the driver drops the
generator.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from kiln_core.actions import (
    THINK_CLOSE,
    ActionSchema,
    InvalidAction,
    parse_reply,
    split_reasoning,
)
from kiln_core.canonical import JsonValue, canonical_bytes, compact, encoded_again
from kiln_core.discovery import EnvironmentInspection
from kiln_core.errors import (
    EpisodeUnfit,
    PolicyError,
    RemoteProtocolError,
    SessionRefused,
)
from kiln_core.limits import Lease
from kiln_core.manifest import (
    Observation,
    ObservationResult,
    ProtocolErrorResult,
    ReplayExchange,
    episode_return,
)
from kiln_core.ports import PolicyReply
from kiln_core.prompt import (
    error_text,
    initial_messages,
    observation_text,
    result_segment,
    segment_messages,
)
from kiln_core.records import ChatMessage, EpisodeTermination, TurnSegment
from kiln_core.session import (
    Close,
    ErrorReceived,
    ObservationReceived,
    ReadState,
    Reset,
    StateReceived,
    Step,
)

__all__ = ["Ask", "Episode", "EpisodeSetup", "run_episode"]


class Ask(msgspec.Struct, frozen=True):
    """Ask the policy for its next turn."""

    step_index: int
    messages: tuple[ChatMessage, ...]


class EpisodeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines an episode but the answers."""

    inspection: EnvironmentInspection
    action_schema: ActionSchema
    reset_payload: dict[str, JsonValue]
    max_steps: int
    max_recoverable_errors: int
    protocol_error_reward: float
    thinking: bool


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """A finished episode."""

    messages: list[ChatMessage]
    reset_observation: Observation
    trajectory: list[TurnSegment]
    exchanges: list[ReplayExchange]
    replies: list[PolicyReply]
    final_state: JsonValue | UnsetType
    episode_return: float
    termination: EpisodeTermination
    protocol_error_code: str | UnsetType
    recoverable_protocol_errors: int

    @property
    def model_tokens(self) -> int:
        """Prompt and completion tokens of all turns."""
        return sum(reply.total_tokens for reply in self.replies)

    @property
    def model_latency_ms(self) -> float:
        """Time spent waiting for the policy, in milliseconds."""
        return float(sum(reply.latency_ms for reply in self.replies))


Request: TypeAlias = Reset | Ask | Step | ReadState | Close
Response: TypeAlias = (
    ObservationReceived | ErrorReceived | StateReceived | PolicyReply | None
)
EpisodeGenerator: TypeAlias = Generator[Request, Response, Episode]


class _Recorder:
    """Collects what an episode retains and charges it when it arrives."""

    def __init__(self, setup: EpisodeSetup, lease: Lease) -> None:
        self.setup = setup
        self.lease = lease
        self.trajectory: list[TurnSegment] = []
        self.messages: list[ChatMessage] = []
        """What the policy reads: the prompt, then the trajectory."""
        self.exchanges: list[ReplayExchange] = []
        self.replies: list[PolicyReply] = []
        self.recoverable = 0
        self.termination = EpisodeTermination.MAX_STEPS
        self.error_code: str | UnsetType = UNSET
        self.session_ended = False

    def retain(self, data: bytes, what: str) -> None:
        self.lease.charge(len(data), what)

    def take_reply(self, reply: PolicyReply) -> str:
        """Retain a reply; return the text that should be an action.

        Raises:
            PolicyError: It is no Unicode text, or its cost is no count.
        """
        if reply.total_tokens < 0 or not 0 <= reply.latency_ms < math.inf:
            raise PolicyError("the policy counted tokens or time below zero")
        self.replies.append(reply)
        content = reply.content or ""
        if self.setup.thinking:
            closed = reply.content is not None
            content = (reply.reasoning or "") + (
                THINK_CLOSE + content if closed else ""
            )
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise PolicyError("the policy's reply holds a lone surrogate") from error
        self._add_segment(
            TurnSegment(role="assistant", content=content, kind="action"), "an action"
        )
        if reply.sample is not None:
            self.retain(compact(reply.sample.provenance), "token ids of a turn")
        return split_reasoning(content, thinking=self.setup.thinking)

    def refuse(self, invalid: InvalidAction) -> None:
        self._add_warning(canonical_bytes(invalid.document()).decode())
        self.termination = EpisodeTermination.INVALID_MODEL_ACTION

    def take_answer(
        self, step: int, action: dict[str, JsonValue], event: Response
    ) -> bool:
        """Retain the answer to a step; return whether the episode goes on."""
        if isinstance(event, ObservationReceived):
            return self._take_observation(step, action, event.observation)
        if isinstance(event, ErrorReceived):
            return self._take_error(step, action, event)
        unexpected = _unexpected(event)
        raise unexpected

    def _take_observation(
        self, step: int, action: dict[str, JsonValue], observation: Observation
    ) -> bool:
        self._add_exchange(step, action, ObservationResult(observation=observation))
        text = observation_text(observation)
        self._add_segment(result_segment(text, harness=False), "an observation")
        if observation.done:
            self.termination = EpisodeTermination.DONE
        return not observation.done

    def _take_error(
        self, step: int, action: dict[str, JsonValue], event: ErrorReceived
    ) -> bool:
        error = event.error
        continued = (
            error.recoverable and self.recoverable < self.setup.max_recoverable_errors
        )
        self.recoverable += error.recoverable
        self._add_exchange(
            step, action, ProtocolErrorResult(error=error, continued=continued)
        )
        self._add_warning(error_text(error, continued=continued))
        if not continued:
            self.termination = EpisodeTermination.PROTOCOL_ERROR
            self.error_code = error.code
            self.session_ended = not error.recoverable
        return continued

    def _add_exchange(
        self,
        step: int,
        action: dict[str, JsonValue],
        result: ObservationResult | ProtocolErrorResult,
    ) -> None:
        exchange = ReplayExchange(step_index=step, action=action, result=result)
        # its parts were decoded, so nothing in them is not finite
        self.retain(encoded_again(exchange), "an exchange")
        self.exchanges.append(exchange)

    def _add_warning(self, text: str) -> None:
        self._add_segment(result_segment(text, harness=True), "an error")

    def _add_segment(self, segment: TurnSegment, what: str) -> None:
        self.retain(encoded_again(segment), what)
        self.trajectory.append(segment)
        self.messages += segment_messages([segment])

    def total_return(self) -> float:
        """Return the episode's return.

        Raises:
            EpisodeUnfit: It is not finite: each reward is, their sum need not be.
        """
        total = episode_return(
            [exchange.result for exchange in self.exchanges],
            self.setup.protocol_error_reward,
            ended_invalid=self.termination is EpisodeTermination.INVALID_MODEL_ACTION,
        )
        if not math.isfinite(total):
            raise EpisodeUnfit("the rewards of an episode add up to no finite return")
        return total


def run_episode(setup: EpisodeSetup, lease: Lease) -> EpisodeGenerator:
    """Play one episode.

    Args:
        setup: What determines it.
        lease: Charged for everything it retains.

    Yields:
        Commands for the session, and `Ask` for the policy.

    Returns:
        The finished episode.

    Raises:
        SessionRefused: ``reset`` was answered with an error.
        EpisodeUnfit: ``reset`` was already done, or the return is not finite.
        LimitError: The budget is exhausted.
        PolicyError: A reply is no Unicode text, or its cost is no count.
        RemoteProtocolError: The final state was answered with an error.
    """
    record = _Recorder(setup, lease)
    reset_observation = _reset_observation((yield Reset(setup.reset_payload)))
    record.retain(compact(reset_observation), "a reset observation")
    messages = initial_messages(setup.inspection, reset_observation)
    record.messages += messages
    for step in range(setup.max_steps):
        text = record.take_reply(_reply((yield Ask(step, tuple(record.messages)))))
        try:
            action = parse_reply(text, setup.action_schema)
        except InvalidAction as invalid:
            record.refuse(invalid)
            break
        if not record.take_answer(step, action, (yield Step(action))):
            break
    final_state: JsonValue | UnsetType = UNSET
    if not record.session_ended:
        final_state = _final_state((yield ReadState()))
        record.retain(canonical_bytes(final_state), "a final state")
    yield Close()
    return Episode(
        messages=messages,
        reset_observation=reset_observation,
        trajectory=record.trajectory,
        exchanges=record.exchanges,
        replies=record.replies,
        final_state=final_state,
        episode_return=record.total_return(),
        termination=record.termination,
        protocol_error_code=record.error_code,
        recoverable_protocol_errors=record.recoverable,
    )


def _reset_observation(event: Response) -> Observation:
    if isinstance(event, ErrorReceived):
        raise SessionRefused(
            f"the environment answered reset with {event.error.code}",
            hint="check the reset options and the environment's own log",
            protocol_code=event.error.code,
            protocol_message=event.error.message[:512],
        )
    if not isinstance(event, ObservationReceived):
        raise _unexpected(event)
    if event.observation.done:
        raise EpisodeUnfit(
            "the environment is done at reset, so no action can be taken",
            hint="choose reset options that start an episode",
        )
    return event.observation


def _final_state(event: Response) -> JsonValue:
    if isinstance(event, StateReceived):
        return event.state
    if isinstance(event, ErrorReceived):
        raise RemoteProtocolError(
            f"the environment answered state with {event.error.code}",
            hint="an environment must be able to tell its state",
            protocol_code=event.error.code,
        )
    raise _unexpected(event)


def _reply(event: Response) -> PolicyReply:
    if not isinstance(event, PolicyReply):
        raise _unexpected(event)
    return event


def _unexpected(event: Response) -> TypeError:
    return TypeError(f"the driver sent {type(event).__name__} out of turn")
