"""Servers and a corpus that the tests of the server share."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from kiln_core.drive.collect import CollectionRequest, EnvironmentTarget, collect
from kiln_core.drive.policy import http_policy
from kiln_core.plan import CollectionControls
from tests.server.running import Running, running, until
from tests.simulators.environment import Simulator


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """What a test starts has ended when it ends."""
    before = set(threading.enumerate())
    yield
    # worker threads of anyio are told to end, and do a moment later
    until(lambda: not [t for t in set(threading.enumerate()) - before if not t.daemon])


@pytest.fixture
def kiln(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as client:
        yield client


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The dataset of a real collection: simulated environment, simulated engine."""
    folder = tmp_path_factory.mktemp("corpus")
    with running(folder) as client, Simulator().serving_in_thread() as environment:
        return anyio.run(_collect, client.url, environment.url)


async def _collect(url: str, environment: str) -> bytes:
    request = CollectionRequest(
        environments=(EnvironmentTarget(base_url=environment),),
        controls=CollectionControls(groups=3, group_size=4, max_steps=3),
        reset_templates=({},),
    )
    async with http_policy(url, None) as policy:
        bundle = await collect(request, policy)
    return bundle.dataset


@pytest.fixture
def groups(dataset: bytes) -> list[dict[str, Any]]:
    """The groups of that dataset, fresh, to be sent or spoiled."""
    return [json.loads(line) for line in dataset.splitlines()]
