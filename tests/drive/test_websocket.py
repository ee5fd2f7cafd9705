"""`kiln_core/drive/websocket.py`: one socket, one clock, and nothing read twice."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import time
import traceback
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from socket import AF_INET, socket

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from aiohttp import WSMsgType

from kiln_core import limits
from kiln_core.drive.http import Credential, environment_client
from kiln_core.drive.websocket import (
    CLOSE_SECONDS,
    CapacityAtUpgrade,
    EnvironmentSession,
    SessionTimes,
    open_session,
)
from kiln_core.errors import (
    CredentialReflected,
    HttpStatusError,
    KilnError,
    LimitError,
    LocalProtocolError,
    RemoteProtocolError,
    SessionLost,
    TransportError,
    UsageError,
)
from kiln_core.session import (
    ErrorReceived,
    ObservationReceived,
    ReadState,
    Reset,
    StateReceived,
    Step,
)
from tests.simulators.environment import (
    Document,
    Handler,
    Peer,
    Script,
    Simulator,
    both,
    closes,
    drop,
    error,
    late,
    observation,
    plain,
    raw_observation,
    raw_server,
    redirect,
    refuses,
    says,
    silent,
    state,
    tunnel,
)

pytestmark = pytest.mark.anyio

TOKEN = "s3cret/token+A=="
QUICK = SessionTimes(exchange_seconds=0.5)
RESET = Reset({"seed": 1})
ONE = Step({"amount": 1})
STATE = ReadState()


@pytest.fixture(scope="module", params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both event loops that sessions run on."""
    return "asyncio", {"use_uvloop": request.param}


@asynccontextmanager
async def session(
    url: str, times: SessionTimes = QUICK, token: str | None = None
) -> AsyncIterator[EnvironmentSession]:
    credential = Credential(token) if token else None
    with anyio.fail_after(8):
        async with (
            environment_client(url, credential) as client,
            open_session(client, times) as opened,
        ):
            yield opened


@asynccontextmanager
async def serving(
    script: Script, times: SessionTimes = QUICK, token: str | None = None
) -> AsyncIterator[tuple[EnvironmentSession, Peer]]:
    """Yield a session that is reset, and its other end."""
    async with Simulator(script).serving() as server:
        async with session(server.url, times, token) as opened:
            await opened.exchange(RESET)
            yield opened, server.peers[0]
        assert await server.all_ended(CLOSE_SECONDS + 0.5)


async def failing(opened: EnvironmentSession, command: Step | ReadState) -> KilnError:
    with pytest.raises(KilnError) as caught:
        await opened.exchange(command)
    return caught.value


# An ordinary session


async def test_ordinary_session_and_its_frames() -> None:
    async with serving({}) as (opened, peer):
        answer = await opened.exchange(ONE)
        assert isinstance(answer, ObservationReceived)
        assert answer.observation.reward == -0.25
        refused = await opened.exchange(Step({"amount": 0}))
        assert isinstance(refused, ErrorReceived)
        assert refused.error.code == "EXECUTION_ERROR"
        assert isinstance(await opened.exchange(STATE), StateReceived)
    assert peer.received == [
        '{"data":{"seed":1},"type":"reset"}',
        '{"data":{"amount":1},"type":"step"}',
        '{"data":{"amount":0},"type":"step"}',
        '{"type":"state"}',
        '{"type":"close"}',
    ]


async def test_health_precedes_the_upgrade() -> None:
    async with Simulator().serving() as server:
        async with session(server.url):
            pass
        assert server.paths == ["/health", "/ws"]
        server.documents["/health"].status = 500
        with pytest.raises(HttpStatusError):
            async with session(server.url):
                pass
        assert server.paths == ["/health", "/ws", "/health"]


async def test_error_in_the_body_leaves_unchanged_and_closes() -> None:
    async with Simulator().serving() as server:
        bug = ValueError("bug")
        with pytest.raises(ValueError, match="bug") as caught:
            async with session(server.url):
                raise bug
        assert caught.value is bug
        assert await server.all_ended()


async def test_session_outlives_the_http_deadline() -> None:
    """The total timeout of an aiohttp session must not end its WebSockets."""
    async with Simulator().serving() as server:
        async with (
            environment_client(server.url, total_seconds=0.1) as client,
            open_session(client, QUICK) as opened,
        ):
            await opened.exchange(RESET)
            await anyio.sleep(0.25)
            answer = await opened.exchange(ONE)
        assert isinstance(answer, ObservationReceived)


@pytest.mark.parametrize(
    ("exchange_seconds", "keepalive_seconds"),
    [(60, 10), (3600, 10), (20, 5), (0.4, 0.1), (0.001, 0.01)],
)
def test_keepalive_is_a_bounded_quarter(
    exchange_seconds: float, keepalive_seconds: float
) -> None:
    assert SessionTimes(exchange_seconds).keepalive_seconds == keepalive_seconds


# Poison


async def binary(peer: Peer, answer: str) -> None:
    await peer.send_binary(answer.encode())


BOMB = zlib.compress(observation("x" * 20_000_000).encode(), wbits=-15)


async def bomb(peer: Peer, answer: str) -> None:
    peer.write_compressed(BOMB)


async def invalid_text(peer: Peer, answer: str) -> None:
    await peer.send_frame(b'{"type":"\xff"}', WSMsgType.TEXT)


async def reserved_opcode(peer: Peer, answer: str) -> None:
    peer.write(b"\x83\x00")


async def masked_frame(peer: Peer, answer: str) -> None:
    peer.write(b"\x81\x82\x00\x00\x00\x00{}")


async def stray_continuation(peer: Peer, answer: str) -> None:
    peer.write(b"\x80\x02{}")


async def endless_fragments(peer: Peer, answer: str) -> None:
    peer.write(b"\x01\x7d" + b"x" * 125)
    for _ in range(limits.MAX_SERVER_MESSAGE_BYTES // 125 + 2):
        peer.write(b"\x00\x7d" + b"x" * 125)


def reflecting(text: str) -> Handler:
    return says(observation("@").replace("@", text))


BROKEN: dict[str, Handler] = {
    "binary": binary,
    "compressed bomb": bomb,
    "invalid utf-8": invalid_text,
    "reserved opcode": reserved_opcode,
    "masked frame": masked_frame,
    "stray continuation": stray_continuation,
    "endless fragments": endless_fragments,
    "oversized": says(observation("x" * limits.MAX_SERVER_MESSAGE_BYTES)),
    "not json": says("<html>"),
    "empty": says(""),
    "trailing data": says(observation(1) + "{}"),
    "array": says("[]"),
    "no type": says('{"data":{}}'),
    "no data": says('{"type":"observation"}'),
    "request id": says('{"type":"state","data":{},"id":1}'),
    "unknown type": says('{"type":"pong","data":{}}'),
    "mcp": says('{"type":"mcp","data":{}}'),
    "state for a step": says(state({})),
    "NaN reward": says(raw_observation("NaN")),
    "infinite reward": says(raw_observation("Infinity")),
    "-infinite reward": says(raw_observation("-Infinity")),
    "1e400 reward": says(raw_observation("1e400")),
    "400 digits reward": says(raw_observation("9" * 400)),
    "text reward": says(raw_observation('"1"')),
    "list reward": says(raw_observation("[1]")),
    "leading zero": says(raw_observation("01")),
    "NaN observation": says(raw_observation("1", inner='{"x":NaN}')),
    "1e999 observation": says(raw_observation("1", inner='{"x":[1e999]}')),
    "duplicate key": says(raw_observation('1,"reward":2')),
    "nested duplicate": says(raw_observation("1", inner='{"a":1,"a":2}')),
    "lone surrogate": says(raw_observation("1", inner='"\\ud800"')),
    "too deep": says(raw_observation("1", inner="[" * 200 + "]" * 200)),
    "unknown observation key": says(raw_observation('1,"info":{}')),
    "done is 1": says(raw_observation("1").replace("false", "1")),
    "no done": says('{"type":"observation","data":{"observation":1,"reward":1}}'),
    "unknown error code": says(error("WHATEVER")),
    "lower case code": says(error("execution_error")),
    "unknown error member": says(error("EXECUTION_ERROR", trace="x")),
    "error without message": says('{"type":"error","data":{"code":"EXECUTION_ERROR"}}'),
}
"""Answers to a step that break the protocol."""


async def hard_close(peer: Peer, answer: str) -> None:
    peer.write(b"\x88\x02\x03\xe8")
    peer.drop()


LOST: dict[str, Handler] = {
    "no answer": silent,
    "close 1000": closes(1000),
    "close 1001": closes(1001),
    "close 1009": closes(1009),
    "close 1011": closes(1011),
    "close 1012": closes(1012),
    "close 1013": closes(1013),
    "dropped": drop,
    "close and drop": hard_close,
}
"""Ways in which a session dies in a step."""


@pytest.mark.parametrize("cause", BROKEN)
async def test_broken_answer_poisons(cause: str) -> None:
    async with serving({"step": BROKEN[cause]}) as (opened, peer):
        first = await failing(opened, ONE)
        assert type(first) is RemoteProtocolError
        assert first.hint
        assert first.details["environment"].startswith("http://127.0.0.1:")
        assert await failing(opened, ONE) is first
        assert await failing(opened, STATE) is first
    assert peer.commands == ["reset", "step"]


@pytest.mark.parametrize("cause", LOST)
async def test_lost_session_poisons(cause: str) -> None:
    async with serving({"step": LOST[cause]}) as (opened, peer):
        first = await failing(opened, ONE)
        assert type(first) is SessionLost
        assert first.hint
        assert await failing(opened, ONE) is first
    assert peer.commands == ["reset", "step"]


@pytest.mark.parametrize(
    "text",
    [TOKEN, TOKEN.replace("/", "\\/"), "".join(f"\\u{ord(c):04x}" for c in TOKEN)],
)
@pytest.mark.parametrize("place", ["observation", "error", "unparsable", "reset"])
async def test_reflected_credential_poisons(place: str, text: str) -> None:
    handler = {
        "observation": reflecting(text),
        "error": says(error("EXECUTION_ERROR", "@").replace("@", text)),
        "unparsable": says(f"{{{TOKEN}"),
        "reset": plain,
    }[place]
    script = {"step": handler}
    if place == "reset":
        script = {"reset 2": reflecting(text)}
    async with serving(script, token=TOKEN) as (opened, _):
        with pytest.raises(CredentialReflected) as caught:
            await opened.exchange(RESET if place == "reset" else ONE)
    assert TOKEN not in str(caught.value.document()) + repr(caught.value)


async def test_frame_of_exactly_the_bound_is_taken() -> None:
    frame = observation("@")
    filler = "x" * (limits.MAX_SERVER_MESSAGE_BYTES - len(frame) + 1)
    async with serving({"step": says(frame.replace("@", filler))}) as (opened, _):
        assert isinstance(await opened.exchange(ONE), ObservationReceived)


async def test_bound_counts_bytes_not_characters() -> None:
    filler = "\u20ac" * (limits.MAX_SERVER_MESSAGE_BYTES // 3)
    async with serving({"step": says(observation(filler))}) as (opened, _):
        assert "over 524288 bytes" in (await failing(opened, ONE)).message


async def test_late_answer_is_never_used() -> None:
    """https://github.com/huggingface/OpenEnv/issues/1143"""
    async with serving({"step 1": late(0.5)}, SessionTimes(0.3)) as (opened, peer):
        first = await failing(opened, ONE)
        assert first.message.endswith("gave no answer in 0.3 s")
        await anyio.sleep(0.3)
        assert await failing(opened, STATE) is first
    assert peer.commands == ["reset", "step"]


async def test_cancelled_exchange_poisons() -> None:
    """https://github.com/python-websockets/websockets/issues/486"""
    async with serving({"step 1": late(0.1)}, SessionTimes(5)) as (opened, peer):
        with anyio.move_on_after(0.02):
            await opened.exchange(ONE)
        await anyio.sleep(0.2)
        assert isinstance(await failing(opened, ONE), SessionLost)
    assert peer.commands == ["reset", "step"]


@pytest.mark.parametrize("late_by", [0.0, 0.02])
async def test_frame_nobody_asked_for_poisons(late_by: float) -> None:
    async with serving({}) as (opened, peer):
        await peer.send(observation({"total": 9}, 5))
        await anyio.sleep(late_by)
        assert "nobody asked for" in (await failing(opened, ONE)).message
    assert peer.commands == ["reset"]


async def test_second_answer_is_not_the_next_one() -> None:
    twice = says(observation({"total": 0}), observation({"total": 0}))
    async with serving({"reset": twice}) as (opened, peer):
        assert "nobody asked for" in (await failing(opened, ONE)).message
    assert peer.commands == ["reset"]


async def test_policy_is_not_asked_in_a_session_that_is_poisoned_already() -> None:
    """The frame too many may come in the same segment as the answer."""
    twice = says(observation({"total": 0}), observation({"total": 0}))
    async with serving({"reset": twice}, SessionTimes(8)) as (opened, _):
        with anyio.fail_after(1), pytest.raises(RemoteProtocolError):
            await opened.pumped(lambda: sleepy(5))


async def test_oversized_command_is_refused_before_it_is_sent() -> None:
    async with serving({}) as (opened, peer):
        with pytest.raises(LimitError):
            await opened.exchange(Step({"a": "x" * limits.MAX_CLIENT_MESSAGE_BYTES}))
        assert isinstance(await opened.exchange(ONE), ObservationReceived)
    assert peer.commands == ["reset", "step", "close"]


async def test_two_exchanges_at_once_are_our_own_fault() -> None:
    async with serving({"step": late(0.1)}) as (opened, peer):
        async with anyio.create_task_group() as group:
            group.start_soon(opened.exchange, ONE)
            await anyio.sleep(0.02)
            assert isinstance(await failing(opened, STATE), LocalProtocolError)
        assert isinstance(await opened.exchange(STATE), StateReceived)
    assert peer.commands == ["reset", "step", "state", "close"]


async def test_exchange_after_close_is_our_own_fault() -> None:
    async with serving({}) as (opened, _):
        await opened.close()
        await opened.close()
        assert isinstance(await failing(opened, ONE), LocalProtocolError | SessionLost)


async def test_ping_from_a_peer_that_is_gone() -> None:
    """The pong cannot be written; that is a lost session and no bug."""

    async def ping_and_go(peer: Peer, answer: str) -> None:
        for _ in range(50):
            await peer.ping()
        peer.drop()

    async with serving({"step": ping_and_go}) as (opened, _):
        assert isinstance(await failing(opened, ONE), SessionLost)


async def test_peer_that_never_reads_is_left_in_time() -> None:
    """https://github.com/huggingface/OpenEnv/pull/1181: a send needs a deadline."""

    async def deaf(peer: Peer, answer: str) -> None:
        await plain(peer, answer)
        peer.deafen()

    large = Step({"a": "x" * (limits.MAX_CLIENT_MESSAGE_BYTES - 100)})
    started = time.monotonic()
    async with Simulator({"reset": deaf}).serving() as server:
        async with session(server.url) as opened:
            await opened.exchange(RESET)
            assert isinstance(await failing(opened, large), SessionLost)
        assert time.monotonic() - started < CLOSE_SECONDS + 1.5
        await anyio.sleep(0.05)
        assert not connections_to(server.url)


def connections_to(url: str) -> list[int]:
    """Return the descriptors of this process that are connected to a server."""
    port = int(url.rpartition(":")[2])
    found = []
    for descriptor in range(3, 256):
        with suppress(OSError), socket(fileno=os.dup(descriptor)) as peer:
            if peer.family == AF_INET and peer.getpeername()[1] == port:
                found.append(descriptor)
    return found


# While the policy thinks


async def sleepy(seconds: float = 0.3) -> str:
    await anyio.sleep(seconds)
    return "done"


async def test_result_of_the_policy_is_passed_on() -> None:
    async with serving({}) as (opened, peer):
        assert await opened.pumped(lambda: sleepy(0)) == "done"
        assert isinstance(await opened.exchange(ONE), ObservationReceived)
    assert peer.commands == ["reset", "step", "close"]


async def test_state_is_read_while_the_policy_thinks() -> None:
    async with serving({}, SessionTimes(0.4)) as (opened, peer):
        assert await opened.pumped(lambda: sleepy(0.55)) == "done"
        assert isinstance(await opened.exchange(ONE), ObservationReceived)
    assert 2 <= peer.commands.count("state") <= 5
    assert peer.actions == [{"amount": 1}]


async def test_pings_are_answered_while_the_policy_thinks() -> None:
    async def pinging(peer: Peer, answer: str) -> None:
        await plain(peer, answer)
        for _ in range(5):
            await asyncio.sleep(0.02)
            await peer.ping()

    async with serving({"reset": pinging}, SessionTimes(5)) as (opened, peer):
        await opened.pumped(lambda: sleepy(0.2))
        assert peer.pongs == 5


async def test_policy_in_a_thread_does_not_starve_the_socket() -> None:
    """https://github.com/huggingface/OpenEnv/pull/362"""

    async def pinging(peer: Peer, answer: str) -> None:
        await plain(peer, answer)
        await peer.ping()

    async def blocking() -> str:
        await anyio.to_thread.run_sync(time.sleep, 0.4)
        return "done"

    async with serving({"reset": pinging}, SessionTimes(0.4)) as (opened, peer):
        assert await opened.pumped(blocking) == "done"
        assert peer.pongs == 1
        assert peer.commands.count("state") >= 2
        assert isinstance(await opened.exchange(ONE), ObservationReceived)


async def test_tunnel_that_swallows_pings_is_survived() -> None:
    """https://github.com/huggingface/OpenEnv/issues/875"""

    async def pinging(peer: Peer, answer: str) -> None:
        await plain(peer, answer)
        await peer.ping()

    script = {"reset": pinging, "state": pinging}
    async with Simulator(script).serving() as server, tunnel(server.url) as url:
        async with session(url, SessionTimes(0.4)) as opened:
            await opened.exchange(RESET)
            await opened.pumped(lambda: sleepy(0.3))
            assert isinstance(await opened.exchange(ONE), ObservationReceived)
        assert await server.all_ended()
        assert server.peers[0].pongs == server.peers[0].pings == 0


@pytest.mark.parametrize("frame", [observation(1), state({}), error("SESSION_ERROR")])
async def test_frame_while_the_policy_thinks_ends_it_at_once(frame: str) -> None:
    async def talking(peer: Peer, answer: str) -> None:
        await plain(peer, answer)
        await asyncio.sleep(0.05)
        await peer.send(frame)

    async with serving({"reset": talking}, SessionTimes(8)) as (opened, peer):
        with anyio.fail_after(1), pytest.raises(RemoteProtocolError):
            await opened.pumped(lambda: sleepy(5))
        assert isinstance(await failing(opened, ONE), RemoteProtocolError)
    assert peer.commands == ["reset"]


@pytest.mark.parametrize("turns", range(6))
async def test_frame_wins_over_a_policy_that_answers(turns: int) -> None:
    """Both are ready at once: the action is not sent."""
    async with serving({}) as (opened, peer):

        async def answer() -> str:
            await peer.send(observation({"total": 9}, 5))
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            return "done"

        with pytest.raises(RemoteProtocolError):
            await opened.pumped(answer)
            await opened.exchange(ONE)
    assert peer.commands == ["reset"]


async def test_frame_that_waits_in_the_kernel_wins_too() -> None:
    """A policy that blocks the loop does not let old frames pass as answers."""

    def talking(peer: Peer) -> None:
        frame = observation({"total": 9}, 5).encode()
        peer.write(bytes((0x81, len(frame))) + frame)

    with Simulator({}).serving_in_thread() as server:
        async with session(server.url) as opened:
            await opened.exchange(RESET)
            peer = server.peers[0]

            async def blocking() -> str:
                talking(peer)
                time.sleep(0.05)  # noqa: ASYNC251 - the loop is blocked on purpose
                return "done"

            with pytest.raises(RemoteProtocolError):
                await opened.pumped(blocking)
                await opened.exchange(ONE)
    assert peer.commands == ["reset"]


async def test_lost_socket_while_the_policy_thinks_ends_it_at_once() -> None:
    async def leaving(peer: Peer, answer: str) -> None:
        await plain(peer, answer)
        await asyncio.sleep(0.05)
        peer.drop()

    async with serving({"reset": leaving}, SessionTimes(8)) as (opened, _):
        with anyio.fail_after(1), pytest.raises(SessionLost):
            await opened.pumped(lambda: sleepy(5))


async def test_action_waits_for_an_outstanding_state() -> None:
    """The policy answers while a keepalive exchange is under way."""
    async with serving({"state 1": late(0.25)}, SessionTimes(0.8)) as (opened, peer):
        await opened.pumped(lambda: sleepy(0.3))
        answer = await opened.exchange(ONE)
        assert isinstance(answer, ObservationReceived)
    assert peer.commands == ["reset", "state", "step", "close"]


async def test_unanswered_keepalive_is_a_lost_session() -> None:
    async with serving({"state": silent}, SessionTimes(0.2)) as (opened, peer):
        with anyio.fail_after(2), pytest.raises(SessionLost, match="no answer"):
            await opened.pumped(lambda: sleepy(5))
    assert peer.commands == ["reset", "state"]


async def test_refused_keepalive_does_no_harm() -> None:
    refused = refuses("EXECUTION_ERROR", close=False)
    async with serving({"state": refused}, SessionTimes(0.4)) as (opened, peer):
        assert await opened.pumped(lambda: sleepy(0.4)) == "done"
        assert isinstance(await opened.exchange(ONE), ObservationReceived)
    assert peer.commands.count("state") >= 2


async def test_terminal_error_to_a_keepalive_ends_the_session() -> None:
    times = SessionTimes(0.2)
    async with serving({"state": refuses("SESSION_ERROR")}, times) as (opened, _):
        with anyio.fail_after(2), pytest.raises(RemoteProtocolError) as caught:
            await opened.pumped(lambda: sleepy(5))
        assert caught.value.details["protocol_code"] == "SESSION_ERROR"


async def test_failing_policy_passes_its_error() -> None:
    async def failing_policy() -> str:
        await anyio.sleep(0.07)
        raise UsageError("no")

    async with serving({"state": late(0.1)}, SessionTimes(0.2)) as (opened, _):
        with pytest.raises(UsageError, match="no"):
            await opened.pumped(failing_policy)
        # The state that was outstanding may have been answered or not.
        assert isinstance(await failing(opened, ONE), SessionLost)


async def test_cancelled_policy_leaves_the_session_closed() -> None:
    async with Simulator().serving() as server:
        with anyio.CancelScope() as scope:

            async def cancelled() -> None:
                scope.cancel()
                await sleepy(5)

            async with session(server.url) as opened:
                await opened.exchange(RESET)
                await opened.pumped(cancelled)
        assert await server.all_ended()
        assert server.peers[0].commands == ["reset", "close"]
        assert server.peers[0].close_code == 1000


# Before the first command


@pytest.mark.parametrize("code", ["CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"])
@pytest.mark.parametrize("pause", [0.0, 0.05])
async def test_terminal_frame_before_the_first_command(code: str, pause: float) -> None:
    """The server may have closed already when the first command is sent."""
    async with Simulator({"open": refuses(code)}).serving() as server:
        async with session(server.url) as opened:
            await anyio.sleep(pause)
            answer = await opened.exchange(RESET)
        assert isinstance(answer, ErrorReceived)
        assert answer.error.code == code


async def test_terminal_frame_and_a_dropped_connection() -> None:
    script = {"open": both(refuses("FACTORY_ERROR", close=False), drop)}
    async with Simulator(script).serving() as server, session(server.url) as opened:
        answer = await opened.exchange(RESET)
        assert isinstance(answer, ErrorReceived)


@pytest.mark.parametrize("moment", ["open", "reset"])
@pytest.mark.parametrize("pause", [0.0, 0.05])
async def test_close_1013_means_a_full_server(moment: str, pause: float) -> None:
    async with Simulator({moment: closes(1013)}).serving() as server:
        async with session(server.url) as opened:
            await anyio.sleep(pause)
            answer = await opened.exchange(RESET)
        assert isinstance(answer, ErrorReceived)
        assert answer.error.code == "CAPACITY_REACHED"


@pytest.mark.parametrize("handler", [closes(1000), closes(1012), drop])
@pytest.mark.parametrize("pause", [0.0, 0.05])
async def test_other_close_before_the_first_command(
    handler: Handler, pause: float
) -> None:
    async with Simulator({"open": handler}).serving() as server:
        async with session(server.url) as opened:
            await anyio.sleep(pause)
            with pytest.raises(SessionLost):
                await opened.exchange(RESET)


@pytest.mark.parametrize("frame", [error("EXECUTION_ERROR"), observation(1), state(1)])
async def test_greeting_poisons(frame: str) -> None:
    async with Simulator({"open": says(frame)}).serving() as server:
        async with session(server.url) as opened:
            await anyio.sleep(0.05)
            with pytest.raises(RemoteProtocolError):
                await opened.exchange(RESET)
        assert server.peers[0].commands == []


LARGE = Reset({"task": "x" * 12_000_000})


@pytest.mark.parametrize("explained", [True, False])
async def test_send_that_fails_halfway(explained: bool) -> None:
    """What the server said before it went counts, not that the send failed."""

    async def leave(peer: Peer, answer: str) -> None:
        peer.deafen()
        await asyncio.sleep(0.05)
        if explained:
            await peer.send(error("CAPACITY_REACHED"))
            await asyncio.sleep(0.05)
        peer.drop()

    async with Simulator({"open": leave}).serving() as server:
        async with session(server.url, SessionTimes(5)) as opened:
            if explained:
                answer = await opened.exchange(LARGE)
                assert isinstance(answer, ErrorReceived)
                return
            with pytest.raises(SessionLost) as caught:
                await opened.exchange(LARGE)
            assert "closed the" in caught.value.message


# The upgrade


async def refusal(answer: Document, token: str | None = None) -> TransportError:
    async with Simulator().serving() as server:
        server.documents["/ws"] = answer
        with pytest.raises(TransportError) as caught:
            async with session(server.url, token=token):
                pass
    assert caught.value.hint
    assert caught.value.details["environment"].endswith("/ws")
    return caught.value


async def test_upgrade_refused_with_503_means_a_full_server() -> None:
    assert isinstance(await refusal(Document(b"", 503)), CapacityAtUpgrade)


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_upgrade_refused_with_403_may_be_a_wrong_path(token: str | None) -> None:
    refused = await refusal(Document(b"", 403), token)
    assert refused.details["http_status"] == 403
    assert "WebSocket path" in refused.hint
    assert ("origin" in refused.hint) == (token is not None)
    assert "--credential-env" in refused.hint


@pytest.mark.parametrize("status", [200, 400, 401, 404, 426, 429, 500, 502])
async def test_upgrade_refused_with_another_status(status: int) -> None:
    refused = await refusal(Document(TOKEN.encode(), status), TOKEN)
    assert refused.details["http_status"] == status
    assert TOKEN not in str(refused.document())
    assert TOKEN not in "".join(traceback.format_exception(refused))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirected_upgrade_is_refused(status: int) -> None:
    async with Simulator().serving() as target:
        refused = await refusal(redirect(f"{target.url}/ws", status), TOKEN)
        assert target.requests == []
    assert refused.details["http_status"] == status
    assert "redirects are not followed" in refused.hint


def switching(*headers: str) -> bytes:
    lines = ("HTTP/1.1 101 Switching Protocols", *headers, "", "")
    return "\r\n".join(lines).encode()


WRONG_KEY = base64.b64encode(hashlib.sha1(b"wrong").digest()).decode()  # noqa: S324 - RFC 6455


@pytest.mark.parametrize(
    "answer",
    [
        switching("Upgrade: websocket", "Connection: Upgrade"),
        switching(
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {WRONG_KEY}",
        ),
        switching("Upgrade: h2c", "Connection: Upgrade"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"",
        b"nonsense\r\n\r\n",
    ],
)
async def test_failed_handshake_is_a_typed_failure(answer: bytes) -> None:
    health = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    async with raw_server(health, answer) as url:
        with pytest.raises(TransportError) as caught:
            async with session(url):
                pass
    assert caught.value.hint


async def test_upgrade_that_is_never_answered_times_out() -> None:
    health = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    async with raw_server(health, None) as url:
        with anyio.fail_after(2), pytest.raises(TransportError, match="timed out"):
            async with session(url):
                pass


async def test_credential_goes_with_the_upgrade() -> None:
    async with Simulator().serving() as server:
        async with session(server.url, token=TOKEN):
            pass
        upgrade = server.requests[-1]
    assert upgrade.path == "/ws"
    assert upgrade.headers["Authorization"] == f"Bearer {TOKEN}"
    assert "Sec-WebSocket-Extensions" not in upgrade.headers


async def test_upgrade_ignores_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "WS_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with Simulator().serving() as server, session(server.url) as opened:
        assert isinstance(await opened.exchange(RESET), ObservationReceived)
