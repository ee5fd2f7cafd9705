"""What every test of the edge is held to: it leaves no task and no socket behind."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest

from tests.drive.servers import RealServer, real_servers


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def libraries_are_no_garbage() -> None:
    """What is loaded by now is not looked at again by every collection."""
    gc.collect()
    gc.freeze()


class Real(NamedTuple):
    """Servers of the SDK; ``small`` has one session, victims are for a test each."""

    counter: str
    bandit: str
    signals: str
    small: str
    provider: str
    stopped: RealServer
    killed: RealServer


@pytest.fixture(scope="session")
def processes() -> Iterator[list[RealServer]]:
    plain = ("counter:64:0", "bandit:64:0", "signals:64:0", "counter:1:0")
    plain = (*plain, "tests.drive.provider:64:0")
    with real_servers(plain, ("counter:64:0",), ("counter:64:0",)) as servers:
        yield servers


@pytest.fixture(scope="session", autouse=True)
def start_early(request: pytest.FixtureRequest) -> None:
    """Let the servers import the SDK while other tests run, if any test needs them."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    if alone and any("real" in item.fixturenames for item in request.session.items):  # type: ignore[attr-defined]  # of functions
        request.getfixturevalue("processes")


@pytest.fixture(scope="session")
def real(processes: list[RealServer]) -> Real:
    return Real(*processes[0].urls, *processes[1:])


@pytest.fixture(autouse=True)
async def leaves_nothing_behind(anyio_backend: str) -> AsyncIterator[None]:
    """Tasks are counted; garbage is collected so that open sockets warn here."""
    yield
    for _ in range(20):
        if not running_tasks():
            break
        await asyncio.sleep(0.002)
    assert not running_tasks()
    gc.collect()


def running_tasks() -> list[str]:
    """Return the tasks of this loop but those of the test runner."""
    return [
        repr(task)
        for task in asyncio.all_tasks()
        if not task.done() and "TestRunner" not in repr(task.get_coro())
    ]
