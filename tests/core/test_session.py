"""Every state by every command and every frame; nothing comes out of a poisoned one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln_core import limits
from kiln_core.errors import (
    CredentialReflected,
    InvalidRecord,
    KilnError,
    LimitError,
    LocalProtocolError,
    RemoteProtocolError,
)
from kiln_core.session import (
    ANSWERS,
    COMMANDS,
    OVER,
    Close,
    Command,
    ErrorReceived,
    ObservationReceived,
    ReadState,
    Reset,
    Session,
    SessionState,
    StateReceived,
    Step,
    binary_frame,
    oversized,
)
from tests.simulators.pure import error_frame, observation_frame

SECRET = "sesame-open/1"


def text(frame: Any) -> str:
    return json.dumps(frame)  # noqa: TID251 - the other side of the wire


OBSERVATION = text(observation_frame({"a": 1}, 1, False))
STATE = text({"type": "state", "data": {"b": 1, "a": 2}})
RECOVERABLE = text(error_frame("EXECUTION_ERROR"))
TERMINAL = text(error_frame("SESSION_ERROR"))
FRAMES = {
    "observation": OBSERVATION,
    "state": STATE,
    "recoverable": RECOVERABLE,
    "terminal": TERMINAL,
}
ALL_COMMANDS: dict[type, Command] = {
    Reset: Reset({"seed": 1}),
    Step: Step({"a": 1}),
    ReadState: ReadState(),
    Close: Close(),
}


def ready() -> Session:
    session = Session(secrets=(SECRET,))
    session.send(Reset({}))
    session.receive(OBSERVATION)
    return session


def in_state(state: SessionState) -> Session:
    """Return a session brought to a state by legal moves alone."""
    session = Session(secrets=(SECRET,)) if state is SessionState.FRESH else ready()
    moves: dict[SessionState, Callable[[Session], object]] = {
        SessionState.FRESH: lambda s: None,
        SessionState.READY: lambda s: None,
        SessionState.AWAITING_RESET: lambda s: s.send(Reset({})),
        SessionState.AWAITING_STEP: lambda s: s.send(Step({})),
        SessionState.AWAITING_STATE: lambda s: s.send(ReadState()),
        SessionState.CLOSED: lambda s: s.send(Close()),
        SessionState.ENDED: lambda s: (s.send(Step({})), s.receive(TERMINAL)),
        SessionState.POISONED: lambda s: s.poisoned(binary_frame()),
    }
    moves[state](session)
    assert session.state is state
    return session


def test_tables_name_every_state() -> None:
    states = {state for state, _ in COMMANDS} | {state for state, _ in ANSWERS}
    assert states == set(SessionState)
    assert {kind for _, kind in ANSWERS} == set(FRAMES)


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("state", SessionState, ids=lambda s: s.value)
def test_command_is_allowed_where_the_table_says(
    state: SessionState, command: type
) -> None:
    session = in_state(state)
    expected = COMMANDS.get((state, command))
    if expected is None:
        with pytest.raises(LocalProtocolError):
            session.send(ALL_COMMANDS[command])
        assert session.state is state
    else:
        session.send(ALL_COMMANDS[command])
        assert session.state is expected


ALLOWED: dict[type, set[SessionState]] = {
    Reset: {SessionState.FRESH, SessionState.READY},
    Step: {SessionState.READY},
    ReadState: {SessionState.READY},
    Close: set(SessionState),
}


@pytest.mark.parametrize("command", ALLOWED, ids=lambda c: c.__name__)
def test_table_allows_one_outstanding_command(command: type) -> None:
    assert {state for state, c in COMMANDS if c is command} == ALLOWED[command]


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("state", SessionState, ids=lambda s: s.value)
def test_frame_is_an_answer_where_the_table_says(
    state: SessionState, kind: str
) -> None:
    session = in_state(state)
    expected = ANSWERS.get((state, kind))
    if expected is None:
        with pytest.raises(RemoteProtocolError):
            session.receive(FRAMES[kind])
        assert session.state is SessionState.POISONED
    else:
        session.receive(FRAMES[kind])
        assert session.state is expected
        assert session.awaiting is False


def test_answers_match_their_command() -> None:
    wanted = {
        (SessionState.AWAITING_RESET, "observation"),
        (SessionState.AWAITING_STEP, "observation"),
        (SessionState.AWAITING_STATE, "state"),
    }
    plain = {key for key in ANSWERS if key[1] in {"observation", "state"}}
    assert plain == wanted
    assert (SessionState.FRESH, "recoverable") not in ANSWERS
    assert (SessionState.READY, "terminal") not in ANSWERS


@pytest.mark.parametrize("state", SessionState, ids=lambda s: s.value)
def test_predicates_follow_the_state(state: SessionState) -> None:
    session = in_state(state)
    assert session.over is (state in OVER)
    assert session.awaiting is state.value.startswith("awaiting")
    assert (session.poison is not None) is (state is SessionState.POISONED)


SENT = [
    (
        Reset({"seed": 7, "a": {"c": 1, "b": 2}}),
        '{"data":{"a":{"b":2,"c":1},"seed":7},"type":"reset"}',
    ),
    (Step({"amount": 2}), '{"data":{"amount":2},"type":"step"}'),
    (ReadState(), '{"type":"state"}'),
    (Close(), '{"type":"close"}'),
]


@pytest.mark.parametrize(("command", "frame"), SENT)
def test_command_has_this_frame(command: Any, frame: str) -> None:
    session = Session() if isinstance(command, Reset) else ready()
    assert session.send(command) == frame


def test_frame_over_the_servers_bound_is_not_sent() -> None:
    session = ready()
    with pytest.raises(LimitError):
        session.send(Step({"a": "x" * limits.MAX_CLIENT_MESSAGE_BYTES}))
    assert session.state is SessionState.READY


@pytest.mark.parametrize("value", [float("nan"), "\ud800", 10**5000], ids=range(3))
def test_command_without_json_form_is_not_sent(value: Any) -> None:
    session = ready()
    with pytest.raises(InvalidRecord):
        session.send(Step({"a": value}))
    assert session.state is SessionState.READY


def test_events_hold_what_came_in_canonical_order() -> None:
    session = ready()
    session.send(Step({}))
    event = session.receive(
        text(
            observation_frame(
                {"b": 1, "a": {"d": 1, "c": 2}}, 3.0, True, metadata={"y": 1, "x": 2}
            )
        )
    )
    assert isinstance(event, ObservationReceived)
    assert list(event.observation.observation) == ["a", "b"]
    assert list(event.observation.observation["a"]) == ["c", "d"]
    assert isinstance(event.observation.reward, float)
    session.send(ReadState())
    state = session.receive(STATE)
    assert isinstance(state, StateReceived)
    assert list(state.state) == ["a", "b"]
    session.send(Step({}))
    error = session.receive(
        text(error_frame("VALIDATION_ERROR", errors=[{"b": 1, "a": 2}]))
    )
    assert isinstance(error, ErrorReceived)
    assert list(error.error.errors[0]) == ["a", "b"]  # type: ignore[index]  # set
    assert session.state is SessionState.READY


def observation(**data: Any) -> str:
    whole = {"observation": {}, "reward": 1, "done": False} | data
    return text({"type": "observation", "data": whole})


def raw(reward: str) -> str:
    return f'{{"type":"observation","data":{{"observation":{{}},"reward":{reward},"done":false}}}}'


INVALID: dict[str, str] = {
    "empty": "",
    "no json": "hello",
    "null": "null",
    "list": "[]",
    "string": '"observation"',
    "no type": '{"data":{}}',
    "no data": '{"type":"observation"}',
    "third member": '{"type":"state","data":{},"id":1}',
    "two frames": STATE + STATE,
    "duplicate key": '{"type":"state","type":"state","data":{}}',
    "unknown type": '{"type":"mcp","data":{}}',
    "type of another case": '{"type":"State","data":{}}',
    "null type": '{"type":null,"data":{}}',
    "unhashable type": '{"type":[],"data":{}}',
    "null data": '{"type":"observation","data":null}',
    "bare observation": text({"observation": {}, "reward": 1, "done": False}),
    "unknown observation member": observation(extra=1),
    "string reward": observation(reward="1"),
    "list reward": observation(reward=[1]),
    "number as done": observation(done=1),
    "null done": observation(done=None),
    "no done": text({"type": "observation", "data": {"observation": {}, "reward": 1}}),
    "NaN reward": raw("NaN"),
    "infinite reward": raw("Infinity"),
    "1e400 as reward": raw("1e400"),
    "integer beyond a double": raw("1" + "0" * 309),
    "integer beyond reading": raw("1" * 5000),
    "NaN in the observation": '{"type":"state","data":[NaN]}',
    "lone surrogate": '{"type":"state","data":"\\ud800"}',
    "raw surrogate": '{"type":"state","data":"\ud800"}',
    "deep": '{"type":"state","data":' + "[" * 200 + "]" * 200 + "}",
    "very deep": '{"type":"state","data":' + "[" * 9999 + "]" * 9999 + "}",
    "unknown code": text(error_frame("TEAPOT")),
    "lower-case code": text(error_frame("execution_error")),
    "error without message": text({"type": "error", "data": {"code": "SESSION_ERROR"}}),
    "unknown error member": text(error_frame("SESSION_ERROR", extra=1)),
    "negative sessions": text(error_frame("CAPACITY_REACHED", active_sessions=-1)),
    "string sessions": text(error_frame("CAPACITY_REACHED", max_sessions="1")),
    "errors as object": text(error_frame("VALIDATION_ERROR", errors={})),
    "error as string": '{"type":"error","data":"SESSION_ERROR"}',
    "closed session": '{"type":"closed","data":{}}',
}


@pytest.mark.parametrize("frame", INVALID.values(), ids=INVALID.keys())
@pytest.mark.parametrize("command", [Reset({}), Step({}), ReadState()], ids=repr)
def test_invalid_frame_poisons(frame: str, command: Any) -> None:
    session = ready()
    session.send(command)
    with pytest.raises(RemoteProtocolError) as caught:
        session.receive(frame)
    assert session.state is SessionState.POISONED
    assert session.poison is caught.value
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


def test_error_keeps_optional_members() -> None:
    session = Session()
    event = session.receive(
        text(error_frame("CAPACITY_REACHED", "full", active_sessions=1, max_sessions=1))
    )
    assert isinstance(event, ErrorReceived)
    assert (event.error.active_sessions, event.error.max_sessions) == (1, 1)
    assert session.state is SessionState.ENDED


@pytest.mark.parametrize("size", [limits.MAX_SERVER_MESSAGE_BYTES, 100])
def test_frame_at_the_bound_is_read_and_over_it_poisons(size: int) -> None:
    session = Session(max_frame_bytes=size)
    session.send(Reset({}))
    session.receive(OBSERVATION)
    session.send(ReadState())
    padding = size - len(b'{"type":"state","data":""}')
    session.receive(quoted("x" * padding))
    session.send(ReadState())
    with pytest.raises(RemoteProtocolError, match=f"over {size} bytes"):
        session.receive(quoted("x" * (padding + 1)))
    assert session.state is SessionState.POISONED


def test_size_counts_bytes_not_characters() -> None:
    session = Session(max_frame_bytes=40)
    session.send(Reset({}))
    with pytest.raises(RemoteProtocolError):
        session.receive(quoted("\u00e9" * 10))


def quoted(inside: str) -> str:
    return f'{{"type":"state","data":"{inside}"}}'


REFLECTIONS = {
    "in a value": text({"type": "state", "data": {"a": f"x{SECRET}y"}}),
    "as a key": text({"type": "state", "data": {SECRET: 1}}),
    "in broken json": f"<html>{SECRET}",
    "in an error": text(error_frame("EXECUTION_ERROR", SECRET)),
    "by escapes": quoted("".join(f"\\u{ord(c):04x}" for c in SECRET)),
    "by an escaped slash": quoted(SECRET.replace("/", "\\/")),
}


@pytest.mark.parametrize("frame", REFLECTIONS.values(), ids=REFLECTIONS.keys())
def test_reflected_secret_poisons(frame: str) -> None:
    session = ready()
    session.send(ReadState())
    with pytest.raises(CredentialReflected) as caught:
        session.receive(frame)
    assert session.state is SessionState.POISONED
    assert SECRET not in str(caught.value)
    assert not caught.value.retryable


def test_secret_with_json_escapes_is_found() -> None:
    secret = 'a"b\\c'
    session = Session(secrets=(secret,))
    session.send(Reset({}))
    with pytest.raises(CredentialReflected):
        session.receive(text({"type": "state", "data": [secret]}))


def test_session_without_secret_reads_any_text() -> None:
    session = Session()
    session.send(Reset({}))
    session.receive(text(observation_frame({"a": SECRET}, None, False)))


def test_first_poison_is_kept_and_absorbs() -> None:
    session = ready()
    first = session.poisoned(binary_frame())
    assert session.poisoned(oversized(5)) is first
    with pytest.raises(RemoteProtocolError, match="binary frame"):
        session.receive(OBSERVATION)
    with pytest.raises(LocalProtocolError) as caught:
        session.send(Step({}))
    assert caught.value.__cause__ is first
    session.send(Close())
    assert session.state is SessionState.POISONED


def test_late_answer_is_never_the_next_one() -> None:
    """F1: https://github.com/huggingface/OpenEnv/issues/1143"""
    session = ready()
    session.send(Step({"n": 3}))
    session.poisoned(KilnError("timeout"))
    for _ in range(3):
        with pytest.raises(KilnError, match="timeout"):
            session.receive(OBSERVATION)
    with pytest.raises(LocalProtocolError):
        session.send(Step({"n": 4}))


moves = st.lists(
    st.sampled_from([*ALL_COMMANDS.values(), *FRAMES.values(), *INVALID.values()])
    | st.sampled_from([*REFLECTIONS.values()]),
    max_size=30,
)


@given(moves)
def test_any_sequence_keeps_lock_step(sequence: list[Any]) -> None:
    session = Session(secrets=(SECRET,))
    outstanding: Any = None
    for move in sequence:
        before = session.state
        poisoned = before is SessionState.POISONED
        try:
            if isinstance(move, str):
                event = session.receive(move)
            else:
                session.send(move)
        except LocalProtocolError:
            assert not isinstance(move, str)
            assert session.state is before
            continue
        except (RemoteProtocolError, CredentialReflected):
            assert isinstance(move, str)
            assert session.state is SessionState.POISONED
            outstanding = None
            continue
        if not isinstance(move, str):
            assert outstanding is None or isinstance(move, Close)
            outstanding = None if isinstance(move, Close) else move
            assert not poisoned or isinstance(move, Close)
            continue
        assert not poisoned
        if isinstance(event, ObservationReceived):
            assert isinstance(outstanding, (Reset, Step))
        elif isinstance(event, StateReceived):
            assert isinstance(outstanding, ReadState)
        else:
            assert outstanding is not None or before is SessionState.FRESH
        outstanding = None


@given(st.text())
def test_any_text_is_an_event_or_poison(frame: str) -> None:
    session = ready()
    session.send(ReadState())
    try:
        session.receive(frame)
    except RemoteProtocolError:
        assert session.state is SessionState.POISONED
