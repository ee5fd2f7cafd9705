"""Servers of older SDK releases, each in a virtual environment of its own.

A release is installed by pip; what it depends on comes from the environment the tests
run in, so that it is as the lock says and nothing large is installed twice. Releases
that cannot be installed fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from msgspec import UNSET

from kiln_core.drive.collect import collect
from kiln_core.drive.files import publish_bundle, read_bundle
from kiln_core.drive.http import environment_client
from kiln_core.drive.replay import ReplayRequest, replay_bundle, require_no_drift
from kiln_core.drive.tasks import task_catalog
from kiln_core.records import EpisodeTermination
from kiln_core.scripted import ScriptedPolicy
from kiln_core.tasks import TaskSelection
from kiln_core.verify import verify_bundle
from tests.drive.collection import collection, verified
from tests.drive.test_files import paths, summary_in
from tests.interop.test_peers import TIMES, adds, observed, played, steps_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PEER = Path(__file__).with_name("old_peer.py")


class Traits(NamedTuple):
    """What a release has that an older one lacks."""

    inventory: int
    """Status of `/list_environments`."""
    metadata: bool
    """Whether the metadata of an observation is on the wire."""


RELEASES = {
    "openenv-core==0.2.3": Traits(inventory=404, metadata=False),
    "openenv-core==0.3.0": Traits(inventory=404, metadata=False),
    "openenv==0.4.2": Traits(inventory=200, metadata=True),
    "openenv==0.7.0": Traits(inventory=200, metadata=True),
}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """Where each release serves: with many sessions, and with one."""
    pythons = [
        installed(release, tmp_path_factory.mktemp("release")) for release in RELEASES
    ]
    with ExitStack() as stack:
        started = [stack.enter_context(serving(python)) for python in pythons]
        yield {
            release: ports(process)
            for release, process in zip(RELEASES, started, strict=True)
        }


def installed(release: str, folder: Path) -> Path:
    """Install a release; return the Python that has it."""
    python = folder / "bin" / "python"
    run("venv", "--without-pip", folder)
    run(
        *("pip", "--python", python, "install", "-q", "--disable-pip-version-check"),
        *("--no-deps", release),
    )
    # A path file comes after the environment's own packages, so the release wins.
    (own,) = folder.glob("lib/*/site-packages")
    (own / "locked.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stderr[-2000:]}"


@contextmanager
def serving(python: Path) -> Iterator[subprocess.Popen[str]]:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.Popen(
        [python, PEER], env=kept, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ports(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    found = process.stdout.readline().split()
    assert len(found) == 2, f"{process.args!r} could not serve"
    return [f"http://127.0.0.1:{port}" for port in found]


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_collect_publish_verify_replay(
    urls: dict[str, list[str]], release: str, tmp_path: Path
) -> None:
    many, one = urls[release]
    policy = ScriptedPolicy(
        [['{"amount":1}', '{"amount":2}', '{"amount":0}'], ['{"amount":3}', "none"]]
    )
    request = collection(
        *(many, one), groups=4, group_size=4, concurrency=8, capacity_wait_seconds=20
    )
    bundle = await collect(request, policy, times=TIMES)
    publish_bundle(bundle, paths(tmp_path))
    checked = verify_bundle(read_bundle(summary_in(tmp_path))[0])
    assert len({r.episode_return for r in checked.summary.rollouts}) > 1
    assert checked.summary.stats.capacity_retry_count > 0
    replay = ReplayRequest(bundle=checked, concurrency=8, capacity_wait_seconds=20)
    outcome = await replay_bundle(replay, times=TIMES)
    require_no_drift(outcome)
    assert outcome.report is not None
    assert outcome.report.rollouts == 16


async def test_what_the_release_lacks(urls: dict[str, list[str]], release: str) -> None:
    url = urls[release][0]
    async with aiohttp.ClientSession(url) as http:
        inventory = await http.get("/list_environments")
        schema = await (await http.get("/schema")).json()
    traits = RELEASES[release]
    assert inventory.status == traits.inventory
    assert schema.keys() == {"action", "observation", "state"}
    policy = ScriptedPolicy([['{"amount":3}']])
    bundle = await collect(collection(url, seed_start=5), policy, times=TIMES)
    identity = bundle.summary.environments[0].identity
    assert identity.environments == [identity.metadata.name]
    reset: Any = verified(bundle).replay.groups[0].reset_observation
    if traits.metadata:
        assert reset.observation == {"total": 0, "metadata": {"seed": 5}}
        assert reset.metadata == {"seed": 5}
    else:
        assert (reset.observation, reset.metadata) == ({"total": 0}, UNSET)


async def test_release_without_tasks_says_so(
    urls: dict[str, list[str]], release: str
) -> None:
    """The oldest have no such routes, later ones answer that nobody provides any."""
    async with environment_client(urls[release][0]) as client:
        catalog = await task_catalog(client, TaskSelection(split="train"))
    assert (catalog.task_api, catalog.splits) == ("unsupported", [])


ERRORS = {
    "step": (0, "EXECUTION_ERROR", EpisodeTermination.DONE),
    "validator": (-1, "SESSION_ERROR", EpisodeTermination.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("name", ERRORS)
async def test_error_of_a_step_is_recorded(
    urls: dict[str, list[str]], release: str, name: str
) -> None:
    amount, code, ending = ERRORS[name]
    candidate = await played(urls[release][0], *adds(2, amount, 2))
    result: Any = candidate.exchanges[1].result
    assert (result.error.code, candidate.termination) == (code, ending)
    assert observed(candidate, 0).reward == 0


async def test_action_outside_the_schema_is_never_sent(
    urls: dict[str, list[str]], release: str
) -> None:
    candidate = await played(urls[release][0], *adds(1, 4))
    assert candidate.termination is EpisodeTermination.INVALID_MODEL_ACTION
    assert len(candidate.exchanges) == steps_of(candidate) == 1
