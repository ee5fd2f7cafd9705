"""`kiln_core/drive/acquire.py`: waiting for a session of a server that may be full."""

from __future__ import annotations

import time
from typing import Literal

import anyio
import pytest

from kiln_core import limits
from kiln_core.drive import acquire as acquiring
from kiln_core.drive.acquire import acquire
from kiln_core.drive.http import EnvironmentClient, environment_client
from kiln_core.drive.websocket import SessionTimes
from kiln_core.errors import (
    CapacityExhausted,
    HttpStatusError,
    RemoteProtocolError,
    SessionLost,
)
from kiln_core.session import ErrorReceived, ObservationReceived, Reset
from tests.simulators.environment import (
    Document,
    Handler,
    Peer,
    Simulator,
    drop,
    late,
    plain,
    refuses,
    says,
    silent,
)

pytestmark = pytest.mark.anyio

QUICK = SessionTimes(exchange_seconds=1.0)
RESET = Reset({"seed": 1})

Full = Literal["frame", "upgrade", "close"]
FULL: tuple[Full, ...] = ("frame", "upgrade", "close")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often, so that tests are short."""
    monkeypatch.setattr(limits, "CAPACITY_BACKOFF_SECONDS", 0.02)
    monkeypatch.setattr(limits, "CAPACITY_BACKOFF_MAX_SECONDS", 0.05)


async def hold(client: EnvironmentClient, seconds: float, wait: float = 3) -> int:
    """Hold a session for a while; return how often the server was full."""
    async with acquire(client, RESET, wait, QUICK) as (_, answer, retries):
        assert isinstance(answer, ObservationReceived)
        await anyio.sleep(seconds)
        return retries


async def test_room_at_once() -> None:
    async with Simulator(max_sessions=1).serving() as server:
        async with environment_client(server.url) as client:
            assert await hold(client, 0) == 0
        assert server.turned_away == 0


@pytest.mark.parametrize("full", FULL)
async def test_room_after_a_while(full: Full) -> None:
    async with (
        Simulator(max_sessions=1, full=full).serving() as server,
        environment_client(server.url) as client,
        anyio.create_task_group() as group,
    ):
        group.start_soon(hold, client, 0.4)
        await anyio.sleep(0.05)
        retries = await hold(client, 0)
        assert retries == server.turned_away >= 2
        assert server.most_at_once == 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("moment", ["open", "reset"])
async def test_capacity_frame_before_or_after_the_reset(moment: str) -> None:
    def script(session: int) -> dict[str, Handler]:
        return {moment: refuses("CAPACITY_REACHED")} if session < 2 else {}

    async with (
        Simulator(script).serving() as server,
        environment_client(server.url) as client,
    ):
        assert await hold(client, 0) == 2
        assert await server.all_ended()


@pytest.mark.parametrize("full", FULL)
async def test_no_room_in_time_is_a_typed_failure(full: Full) -> None:
    async with (
        Simulator(max_sessions=0, full=full).serving() as server,
        environment_client(server.url) as client,
    ):
        started = time.monotonic()
        with pytest.raises(CapacityExhausted) as caught:
            await hold(client, 0, wait=0.3)
        # the pause after the second try would end at .75
        assert 0.3 <= time.monotonic() - started < 0.7
    error = caught.value
    assert error.message == f"{server.url} had no free session within 0.3 s"
    assert error.details["protocol_code"] == "CAPACITY_REACHED"
    assert error.details["capacity_retries"] == server.turned_away
    assert error.retryable
    assert "--capacity-wait-seconds" in error.hint


async def test_pauses_grow_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CAPACITY_BACKOFF_SECONDS", 0.05)
    monkeypatch.setattr(limits, "CAPACITY_BACKOFF_MAX_SECONDS", 0.1)
    async with (
        Simulator(max_sessions=0).serving() as server,
        environment_client(server.url) as client,
    ):
        with pytest.raises(CapacityExhausted):
            await hold(client, 0, wait=0.5)
    # at 0, .05, .15, .25, .35, .45 and at the end, unless the machine is busy
    assert 3 <= server.turned_away <= 7


async def test_last_try_is_at_the_end_of_the_wait() -> None:
    """Room that comes late in the wait is not missed because a pause was too long."""
    async with (
        Simulator(max_sessions=1).serving() as server,
        environment_client(server.url) as somebody_else,
        environment_client(server.url) as client,
        anyio.create_task_group() as group,
    ):
        group.start_soon(hold, somebody_else, 0.55)
        await anyio.sleep(0.05)
        # tries at 0, .25 and .7; the next pause alone would end at .75
        assert await hold(client, 0, wait=0.7) >= 2


async def test_room_that_we_make_is_taken_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waits for one of our own sessions need not wait out a pause."""
    monkeypatch.setattr(limits, "CAPACITY_BACKOFF_SECONDS", 2.0)
    async with (
        Simulator(max_sessions=1).serving() as server,
        environment_client(server.url) as client,
    ):
        with anyio.fail_after(1.5):
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(hold, client, 0.02, 10)
    assert len(server.peers) == 5


async def test_slow_resets_do_not_hold_up_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who has found room gives way before its environment is reset."""
    monkeypatch.setattr(acquiring, "REFUSAL_SECONDS", 0.02)
    async with (
        Simulator({"reset": late(0.6)}, max_sessions=4).serving() as server,
        environment_client(server.url) as client,
    ):
        started = time.monotonic()
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(hold, client, 0, 10)
        # two rounds of .6 each; one after the other would be five
        assert time.monotonic() - started < 2.4
    assert (server.most_at_once, len(server.peers)) == (4, 8)


@pytest.mark.usefixtures("impatient")
async def test_refusal_that_comes_late_is_one_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who had given way for nothing goes to the end of the line."""
    monkeypatch.setattr(acquiring, "REFUSAL_SECONDS", 0.01)

    async def slow(peer: Peer, answer: str) -> None:
        await anyio.sleep(0.1)
        await refuses("CAPACITY_REACHED")(peer, answer)

    def script(session: int) -> dict[str, Handler]:
        return {"reset": slow} if session < 4 else {}

    async with (
        Simulator(script).serving() as server,
        environment_client(server.url) as client,
    ):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(hold, client, 0)
        assert client.line.value == 1
    assert len(server.peers) == 7


@pytest.mark.usefixtures("impatient")
async def test_who_waits_is_served_in_order() -> None:
    """A worker that closes a session must not take the next one before others."""
    served: list[str] = []

    async def work(name: str) -> None:
        for _ in range(3):
            async with acquire(client, RESET, 3, QUICK):
                served.append(name)
                await anyio.sleep(0.04)

    async with (
        Simulator(max_sessions=1).serving() as server,
        environment_client(server.url) as client,
        anyio.create_task_group() as group,
    ):
        for name in "abc":
            group.start_soon(work, name)
    rounds = [served[i : i + 3] for i in range(0, 9, 3)]
    assert [sorted(names) for names in rounds] == [["a", "b", "c"]] * 3
    assert rounds[0] == rounds[1] == rounds[2]


@pytest.mark.usefixtures("impatient")
async def test_waiting_for_ones_own_episodes_does_not_count() -> None:
    """Three of ours hold the one session longer together than the bound of one."""
    async with (
        Simulator(max_sessions=1).serving() as server,
        environment_client(server.url) as client,
        anyio.create_task_group() as group,
    ):
        for _ in range(4):
            group.start_soon(hold, client, 0.3, 0.5)
    assert len(server.peers) == 4


@pytest.mark.usefixtures("impatient")
async def test_sessions_that_fit_are_held_together() -> None:
    async with (
        Simulator(max_sessions=3).serving() as server,
        environment_client(server.url) as client,
        anyio.create_task_group() as group,
    ):
        for _ in range(9):
            group.start_soon(hold, client, 0.1)
    assert server.most_at_once == 3
    assert len(server.peers) == 9


@pytest.mark.parametrize("full", FULL)
async def test_cancelled_wait_leaves_no_socket(full: Full) -> None:
    async with Simulator(max_sessions=1, full=full).serving() as server:
        async with environment_client(server.url) as client:
            with anyio.move_on_after(0.4):
                async with anyio.create_task_group() as group:
                    for _ in range(4):
                        group.start_soon(hold, client, 5)
            assert client.line.value == 1
        assert await server.all_ended()


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (silent, SessionLost),
        (drop, SessionLost),
        (says("{}"), RemoteProtocolError),
    ],
)
@pytest.mark.usefixtures("impatient")
async def test_other_failures_end_the_wait(
    handler: Handler, error: type[Exception]
) -> None:
    """Only a full server is waited for; the line moves on after a failure."""

    def script(session: int) -> dict[str, Handler]:
        return {"reset": [refuses("CAPACITY_REACHED"), handler, plain][session]}

    async with (
        Simulator(script).serving() as server,
        environment_client(server.url) as client,
    ):
        with pytest.raises(error):
            await hold(client, 0)
        assert await hold(client, 0) == 0


async def test_refused_upgrade_is_no_full_server() -> None:
    async with (
        Simulator().serving() as server,
        environment_client(server.url) as client,
    ):
        server.documents["/ws"] = Document(b"", 429)
        with pytest.raises(HttpStatusError):
            await hold(client, 0)


@pytest.mark.parametrize("code", ["FACTORY_ERROR", "SESSION_ERROR", "EXECUTION_ERROR"])
async def test_other_errors_are_answers(code: str) -> None:
    async with (
        Simulator({"reset": refuses(code)}).serving() as server,
        environment_client(server.url) as client,
        acquire(client, RESET, 3, QUICK) as (_, answer, retries),
    ):
        assert isinstance(answer, ErrorReceived)
        assert (answer.error.code, retries) == (code, 0)


async def test_error_in_the_body_passes_unchanged() -> None:
    bug = ValueError("bug")
    async with Simulator().serving() as server:
        async with environment_client(server.url) as client:
            with pytest.raises(ValueError, match="bug") as caught:
                async with acquire(client, RESET, 3, QUICK):
                    raise bug
        assert caught.value is bug
        assert await server.all_ended()
