"""One WebSocket session as a machine without IO: commands to frames, frames to events.

Theory of operation. OpenEnv frames carry no request ids, so the only safety is
lock-step: at most one command is outstanding, and its answer is the next application
frame. A session is FRESH until its first command. `send` moves it to AWAITING_*, an
answer of the right type moves it to READY. Two things may come unasked: in FRESH, a
terminal error (a full server says so before it is asked); in READY nothing.

Everything else poisons: a late, unsolicited, binary, malformed, oversized or wrong
frame, a reflected credential, a timeout, a lost socket. POISONED absorbs. After it no
frame is ever read as an answer and no action is sent again, since the peer's episode
can no longer be known to be where we think it is.

A recoverable error answers `step` and leaves the session READY; a terminal error ends
it. The driver in ``kiln_core.drive.websocket`` owns the socket and the clock.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

import msgspec

from kiln_core import limits
from kiln_core.canonical import (
    JsonValue,
    canonical_bytes,
    convert_record,
    read_json,
    sorted_json,
)
from kiln_core.errors import (
    CredentialReflected,
    InvalidRecord,
    KilnError,
    LimitError,
    LocalProtocolError,
    MalformedJson,
    RemoteProtocolError,
)
from kiln_core.manifest import Observation, ProtocolError

__all__ = [
    "Close",
    "ErrorReceived",
    "ObservationReceived",
    "ReadState",
    "Reset",
    "Session",
    "SessionState",
    "StateReceived",
    "Step",
]


class SessionState(Enum):
    """Where a session stands."""

    FRESH = "fresh"
    READY = "ready"
    AWAITING_RESET = "awaiting_reset"
    AWAITING_STEP = "awaiting_step"
    AWAITING_STATE = "awaiting_state"
    ENDED = "ended"
    """The environment ended it by a terminal error."""
    CLOSED = "closed"
    """We ended it."""
    POISONED = "poisoned"

    __hash__ = object.__hash__
    """By identity, which needs no call into Python; the tables are asked each step."""


class Reset(msgspec.Struct, frozen=True):
    """Start an episode."""

    payload: dict[str, JsonValue]


class Step(msgspec.Struct, frozen=True):
    """Act."""

    action: dict[str, JsonValue]


class ReadState(msgspec.Struct, frozen=True):
    """Ask for the state; also what keeps an idle session alive."""


class Close(msgspec.Struct, frozen=True):
    """Say goodbye; no answer comes."""


Command: TypeAlias = Reset | Step | ReadState | Close


class ObservationReceived(msgspec.Struct, frozen=True):
    """An answer to `Reset` or `Step`."""

    observation: Observation


class StateReceived(msgspec.Struct, frozen=True):
    """An answer to `ReadState`."""

    state: JsonValue


class ErrorReceived(msgspec.Struct, frozen=True):
    """A typed error; ``error.recoverable`` says whether the session lives."""

    error: ProtocolError


Event: TypeAlias = ObservationReceived | StateReceived | ErrorReceived

COMMANDS: Final[dict[tuple[SessionState, type], SessionState]] = {
    (SessionState.FRESH, Reset): SessionState.AWAITING_RESET,
    (SessionState.READY, Reset): SessionState.AWAITING_RESET,
    (SessionState.READY, Step): SessionState.AWAITING_STEP,
    (SessionState.READY, ReadState): SessionState.AWAITING_STATE,
    (SessionState.FRESH, Close): SessionState.CLOSED,
    (SessionState.READY, Close): SessionState.CLOSED,
    (SessionState.AWAITING_RESET, Close): SessionState.CLOSED,
    (SessionState.AWAITING_STEP, Close): SessionState.CLOSED,
    (SessionState.AWAITING_STATE, Close): SessionState.CLOSED,
    (SessionState.ENDED, Close): SessionState.CLOSED,
    (SessionState.POISONED, Close): SessionState.POISONED,
    (SessionState.CLOSED, Close): SessionState.CLOSED,
}
"""Which command is allowed when, and where it leads."""

ANSWERS: Final[dict[tuple[SessionState, str], SessionState]] = {
    (SessionState.AWAITING_RESET, "observation"): SessionState.READY,
    (SessionState.AWAITING_STEP, "observation"): SessionState.READY,
    (SessionState.AWAITING_STATE, "state"): SessionState.READY,
    (SessionState.AWAITING_RESET, "recoverable"): SessionState.READY,
    (SessionState.AWAITING_STEP, "recoverable"): SessionState.READY,
    (SessionState.AWAITING_STATE, "recoverable"): SessionState.READY,
    (SessionState.FRESH, "terminal"): SessionState.ENDED,
    (SessionState.AWAITING_RESET, "terminal"): SessionState.ENDED,
    (SessionState.AWAITING_STEP, "terminal"): SessionState.ENDED,
    (SessionState.AWAITING_STATE, "terminal"): SessionState.ENDED,
}
"""Which answer is allowed when, and where it leads; any other poisons."""

AWAITING: Final = frozenset(
    {
        SessionState.AWAITING_RESET,
        SessionState.AWAITING_STEP,
        SessionState.AWAITING_STATE,
    }
)
OVER: Final = frozenset(
    {SessionState.ENDED, SessionState.CLOSED, SessionState.POISONED}
)


class Session:
    """The machine of one session.

    Attributes:
        state: Where it stands.
        poison: The error that poisoned it, or None.
    """

    def __init__(
        self,
        *,
        secrets: tuple[str, ...] = (),
        max_frame_bytes: int = limits.MAX_SERVER_MESSAGE_BYTES,
    ) -> None:
        self.state = SessionState.FRESH
        self.poison: KilnError | None = None
        # as the raw bytes would hold them, and as JSON writes them
        self._secrets = tuple(
            {
                form
                for secret in secrets
                for form in (secret.encode(), canonical_bytes(secret)[1:-1])
            }
        )
        self._max_frame_bytes = max_frame_bytes

    @property
    def awaiting(self) -> bool:
        """Whether a command is outstanding."""
        return self.state in AWAITING

    @property
    def over(self) -> bool:
        """Whether nothing can be sent or received any more."""
        return self.state in OVER

    def send(self, command: Command) -> str:
        """Return the text frame of a command.

        Raises:
            LocalProtocolError: The command is not allowed now.
            LimitError: The frame would be larger than a server accepts.
        """
        following = COMMANDS.get((self.state, type(command)))
        if following is None:
            raise LocalProtocolError(
                f"{type(command).__name__} is not allowed in a session that is "
                f"{self.state.value}"
            ) from self.poison
        frame = _frame(command)
        if len(frame) > limits.MAX_CLIENT_MESSAGE_BYTES:
            raise LimitError(
                f"a {type(command).__name__.lower()} frame of {len(frame)} bytes is "
                f"over the {limits.MAX_CLIENT_MESSAGE_BYTES} bytes servers accept"
            )
        self.state = following
        return frame.decode()

    def receive(self, text: str) -> Event:
        """Take one text frame.

        Raises:
            RemoteProtocolError: The frame breaks the protocol; the session is
                poisoned.
            CredentialReflected: The frame holds a configured secret; poisoned too.
        """
        if self.state is SessionState.POISONED and self.poison is not None:
            raise self.poison
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > self._max_frame_bytes:
            raise self.poisoned(oversized(self._max_frame_bytes))
        if self._reflects(data):
            raise self.poisoned(_reflected())
        if not self.awaiting and self.state is not SessionState.FRESH:
            raise self.poisoned(_broken("sent a frame nobody asked for"))
        kind, event = self._read(data)
        following = ANSWERS.get((self.state, kind))
        if following is None:
            raise self.poisoned(
                _broken(f"sent a {kind} frame while {self.state.value}")
            )
        self.state = following
        return event

    def _read(self, data: bytes) -> tuple[str, Event]:
        try:
            frame = read_json(data, "frame")
            # escapes hide a token from the bytes, not from what would be retained
            if self._secrets and self._reflects(canonical_bytes(frame)):
                raise self.poisoned(_reflected())
            return _event(frame)
        except (MalformedJson, InvalidRecord) as error:
            raise self.poisoned(
                _broken(f"sent an invalid frame: {error.message}")
            ) from error

    def _reflects(self, data: bytes) -> bool:
        return any(secret in data for secret in self._secrets)

    def poisoned(self, error: KilnError) -> KilnError:
        """Poison the session for good; return the error that is to be raised."""
        if self.poison is None:
            self.state = SessionState.POISONED
            self.poison = error
        return self.poison


def oversized(limit_bytes: int) -> RemoteProtocolError:
    """Return the error for a frame over the limit."""
    return _broken(f"sent a frame over {limit_bytes} bytes")


def binary_frame() -> RemoteProtocolError:
    """Return the error for a binary frame."""
    return _broken("sent a binary frame")


def _reflected() -> CredentialReflected:
    return CredentialReflected("a frame holds the bearer token it was sent")


def _broken(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the environment {what}", hint="report it to the environment's authors"
    )


def _frame(command: Command) -> bytes:
    if isinstance(command, Reset):
        return canonical_bytes({"type": "reset", "data": command.payload})
    if isinstance(command, Step):
        return canonical_bytes({"type": "step", "data": command.action})
    kind = "state" if isinstance(command, ReadState) else "close"
    return canonical_bytes({"type": kind})


def _event(frame: JsonValue) -> tuple[str, Event]:
    if not isinstance(frame, dict) or frame.keys() != {"type", "data"}:
        raise InvalidRecord("it must be an object of type and data")
    kind, body = frame["type"], frame["data"]
    if kind == "observation":
        return kind, ObservationReceived(_observation(body))
    if kind == "state":
        return kind, StateReceived(sorted_json(body))
    if kind == "error":
        error = convert_record(body, ProtocolError, "error frame")
        return (
            "recoverable" if error.recoverable else "terminal",
            ErrorReceived(sorted_record(error)),
        )
    raise InvalidRecord("its type is unknown")


def _observation(body: JsonValue) -> Observation:
    return convert_record(sorted_json(body), Observation, "observation frame")


def sorted_record(error: ProtocolError) -> ProtocolError:
    """Return an error with its free JSON in canonical order."""
    if isinstance(error.errors, msgspec.UnsetType):
        return error
    return msgspec.structs.replace(error, errors=sorted_json(error.errors))
