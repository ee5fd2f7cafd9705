"""`kiln_core/drive/recover.py`: time for an environment to come back, and no more."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from kiln_core.drive import recover as recovering
from kiln_core.drive.collect import collect
from kiln_core.drive.http import Credential, environment_client
from kiln_core.drive.recover import is_lost, recover
from kiln_core.drive.websocket import SessionTimes
from kiln_core.errors import (
    CapacityAtUpgrade,
    CapacityExhausted,
    CredentialReflected,
    HttpStatusError,
    KilnError,
    RemoteProtocolError,
    SessionLost,
    TransportError,
)
from tests.drive.collection import Notes, adds, collection
from tests.simulators.environment import Document, Peer, Simulator, document, plain

pytestmark = pytest.mark.anyio


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses that are made, and make none of them."""
    made: list[float] = []

    async def pass_by(seconds: float) -> None:
        made.append(seconds)
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(recovering.anyio, "sleep", pass_by)
    return made


def coming_back(server: Simulator, looks: int, answer: Document) -> None:
    """Let the health check fail some more times."""
    up = server.documents["/health"]

    class Returning(dict[str, Document]):
        def get(self, route: str, default: object = None) -> Document | None:  # type: ignore[override]
            nonlocal looks
            if route == "/health":
                looks -= 1
                return answer if looks >= 0 else up
            return super().get(route)

    server.documents = Returning(server.documents)


async def test_healthy_environment_costs_one_pause(pauses: list[float]) -> None:
    async with Simulator().serving() as server:
        async with environment_client(server.url) as client:
            for attempt in (1, 2, 3, 4, 9):
                await recover(client, attempt, 10)
        assert server.paths == ["/health"] * 5
    assert pauses == [0.25, 0.5, 1.0, 2.0, 2.0]


async def test_restart_is_waited_for_with_growing_pauses(pauses: list[float]) -> None:
    async with Simulator().serving() as server:
        coming_back(server, 5, document({}, 503))
        async with environment_client(server.url) as client:
            await recover(client, 1, 10)
        assert server.paths == ["/health"] * 6
    assert pauses == [0.25, 0.25, 0.5, 1.0, 2.0, 2.0]


async def test_environment_that_stays_away_is_given_up_in_time() -> None:
    async with Simulator().serving() as server:
        url = server.url
    async with environment_client(url) as client:
        with anyio.fail_after(5):
            await recover(client, 1, 0.05)


async def test_health_that_hangs_is_given_up_in_time() -> None:
    async with Simulator().serving() as server:
        server.documents["/health"].seconds = 30
        async with environment_client(server.url) as client:
            with anyio.fail_after(5):
                await recover(client, 1, 0.05)


async def test_waiting_can_be_cancelled() -> None:
    async with Simulator().serving() as server:
        server.documents["/health"] = document({}, 503)
        async with environment_client(server.url) as client:
            with anyio.move_on_after(0.05) as scope:
                await recover(client, 1, 600)
    assert scope.cancelled_caught


async def test_environment_that_reflects_is_not_waited_for(
    pauses: list[float],
) -> None:
    token = "s3cret"
    async with Simulator().serving() as server:
        server.documents["/health"] = document({"echo": token})
        async with environment_client(server.url, Credential(token)) as client:
            await recover(client, 1, 10)
    assert pauses == [0.25]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (SessionLost("x"), True),
        (TransportError("x"), True),
        (HttpStatusError("x"), True),
        (CapacityAtUpgrade("x"), True),
        (CredentialReflected("x"), False),
        (RemoteProtocolError("x"), False),
        (CapacityExhausted("x"), False),
        (KilnError("x"), False),
    ],
)
def test_only_transport_is_lost(error: KilnError, lost: bool) -> None:
    assert is_lost(error) is lost


async def test_restart_costs_a_collection_one_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attempts that came faster than the restart would all have been spent on it."""
    monkeypatch.setattr(recovering, "PAUSE_SECONDS", 0.01)

    async def restart(peer: Peer, answer: str) -> None:
        if peer.index == 0:
            coming_back(server, 6, document({}, 503))
            peer.drop()
        else:
            await plain(peer, answer)

    async with Simulator({"step 2": restart}).serving() as server:
        notes = Notes()
        request = collection(server.url, group_size=1, episode_retries=1)
        with anyio.fail_after(10):
            bundle = await collect(
                request, adds(1, 3), observer=notes, times=SessionTimes(2.0)
            )
        assert len(server.peers) == 2
    assert bundle.summary.stats.done_count == 1
    assert len(notes.warnings) == 1
