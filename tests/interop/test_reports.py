"""What users of OpenEnv reported in public, against real servers of the SDK."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import pytest
from msgspec import UNSET

from kiln_core.bundle import Bundle
from kiln_core.drive.collect import collect
from kiln_core.drive.http import environment_client
from kiln_core.drive.replay import ReplayRequest, replay_bundle, require_no_drift
from kiln_core.drive.websocket import EnvironmentSession, open_session
from kiln_core.errors import CapacityExhausted
from kiln_core.manifest import ObservationResult, ReplayCandidate
from kiln_core.ports import Policy
from kiln_core.session import Command, Event, ReadState, Reset, StateReceived, Step
from tests.drive.collection import collection, verified
from tests.drive.servers import ROOT
from tests.interop.test_peers import TIMES, adds, observed, played, plays
from tests.interop.words import WORDS

pytestmark = pytest.mark.anyio


# Sessions that others hold


async def no_session_is_free(url: str, policy: Policy) -> CapacityExhausted:
    request = collection(url, capacity_wait_seconds=1)
    with pytest.raises(CapacityExhausted) as caught:
        await collect(request, policy, times=TIMES)
    full = caught.value
    assert full.retryable
    assert full.details["protocol_code"] == "CAPACITY_REACHED"
    assert full.details["capacity_retries"] > 1
    assert "had no free session within 1 s" in full.message
    assert "other clients" in full.hint
    return full


@contextmanager
def stopped_holder(url: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that holds a session and does not run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.interop.holder", url],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_half_open_holder_ends_the_wait_at_its_limit(
    peers: dict[str, str],
) -> None:
    """https://github.com/huggingface/OpenEnv/pull/1000"""
    policy = plays(*adds(1, 3))
    with stopped_holder(peers["held"]):
        await no_session_is_free(peers["held"], policy)
    bundle = await collect(collection(peers["held"]), policy, times=TIMES)
    assert bundle.summary.stats.done_count == 2


@asynccontextmanager
async def mcp_session(url: str) -> AsyncIterator[None]:
    """Hold the session that `POST /mcp` opens, which ends only when it is closed."""

    async def call(method: str, **params: str) -> Any:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        async with aiohttp.ClientSession() as http:
            answer = await http.post(f"{url}/mcp", json=body)
            return (await answer.json())["result"]

    opened = await call("openenv/session/create")
    try:
        yield
    finally:
        await call("openenv/session/close", session_id=opened["session_id"])


async def test_mcp_session_over_http_holds_a_slot(peers: dict[str, str]) -> None:
    """https://github.com/huggingface/OpenEnv/pull/1169"""
    policy = plays({"tool_name": "add", "arguments": {"a": 1, "b": 1}})
    async with mcp_session(peers["one tool"]):
        await no_session_is_free(peers["one tool"], policy)
    bundle = await collect(collection(peers["one tool"]), policy, times=TIMES)
    assert bundle.summary.stats.max_steps_count == 2


# Sessions beside one another


async def replays(bundle: Bundle) -> None:
    request = ReplayRequest(bundle=verified(bundle))
    require_no_drift(await replay_bundle(request, times=TIMES))


def candidates(bundle: Bundle) -> list[ReplayCandidate]:
    groups = verified(bundle).replay.groups
    return [candidate for group in groups for candidate in group.candidates]


async def test_sessions_that_share_one_thread(peers: dict[str, str]) -> None:
    """https://github.com/huggingface/OpenEnv/pull/516

    An exchange may wait for the steps of all other sessions, and is in time still.
    """
    request = collection(peers["bench"], group_size=8, concurrency=8)
    bundle = await collect(request, plays({"seconds": 0.05}), times=TIMES)
    alone = {"at_once": 1, "threads": 1}
    for candidate in candidates(bundle):
        assert [observed(candidate, n).observation["seen"] for n in (0, 1)] == [
            alone,
            alone,
        ]
    await replays(bundle)


def episode(seed: int) -> list[Command]:
    """Return the commands of an episode of the text game."""
    guesses = [Step({"guess": word}) for word in WORDS[1:]]
    return [Reset({"seed": seed}), *guesses, ReadState()]


async def answer(session: EnvironmentSession, command: Command) -> Event:
    event = await session.exchange(command)
    if isinstance(event, StateReceived):
        assert isinstance(event.state, dict)
        del event.state["episode_id"]  # drawn anew
    return event


async def test_interleaved_sessions_do_not_see_one_another(
    peers: dict[str, str],
) -> None:
    """https://github.com/huggingface/OpenEnv/issues/194"""
    episodes = [episode(seed) for seed in (0, 2)]
    serial = []
    async with environment_client(peers["words"]) as client:
        for commands in episodes:
            async with open_session(client, TIMES) as session:
                serial.append([await answer(session, command) for command in commands])
        async with open_session(client, TIMES) as a, open_session(client, TIMES) as b:
            interleaved = [
                (await answer(a, one), await answer(b, other))
                for one, other in zip(*episodes, strict=True)
            ]
    assert serial[0] != serial[1]
    assert interleaved == list(zip(*serial, strict=True))


async def test_dataset_of_many_steps_repeats_at_any_concurrency(
    peers: dict[str, str],
) -> None:
    """https://github.com/huggingface/OpenEnv/pull/239"""
    policy = plays(*({"guess": word} for word in WORDS))
    datasets = set()
    for concurrency in (1, 16):
        request = collection(
            peers["words"], groups=4, group_size=4, concurrency=concurrency
        )
        datasets.add((await collect(request, policy, times=TIMES)).dataset)
    assert len(datasets) == 1


# What is on the wire


async def test_metadata_is_kept_where_it_was(peers: dict[str, str]) -> None:
    """https://github.com/huggingface/OpenEnv/issues/616

    Since 0.4.0 it stands in the observation, and beside it when there is any. Older
    servers send none: ``test_old_releases``.
    """
    bundle = await collect(
        collection(peers["notes"]), plays({"note": "loud"}, {"note": None})
    )
    group = verified(bundle).replay.groups[0]
    assert group.reset_observation.metadata == {"level": 1}
    with_some, without = (e.result for e in group.candidates[0].exchanges)
    assert isinstance(with_some, ObservationResult)
    assert isinstance(without, ObservationResult)
    some = {"by": [None], "note": "loud"}
    nested: Any = with_some.observation.observation
    assert nested["metadata"] == with_some.observation.metadata == some
    nested = without.observation.observation
    assert (nested["metadata"], without.observation.metadata) == ({}, UNSET)
    await replays(bundle)


async def test_dead_proxy_of_the_environment_is_not_asked(
    peers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/huggingface/OpenEnv/pull/846"""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "WS_PROXY", "ws_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    bundle = await collect(collection(peers["counter"]), plays(*adds(1, 3)))
    await replays(bundle)


async def test_unknown_reset_option_is_sent_and_kept(peers: dict[str, str]) -> None:
    """https://github.com/huggingface/OpenEnv/issues/183

    The server drops it in silence, so the bundle must say that it was sent.
    """
    option = {"unknown_key": {"level": 9}}
    plain = await collect(collection(peers["bandit"]), plays({"arm": 2}))
    bundle = await collect(
        collection(peers["bandit"], template=option), plays({"arm": 2})
    )
    group, other = (verified(b).replay.groups[0] for b in (bundle, plain))
    assert group.reset_payload == {"seed": 0, **option}
    assert group.reset_observation == other.reset_observation
    await replays(bundle)


async def test_environment_that_is_never_done_and_pays_nothing(
    peers: dict[str, str],
) -> None:
    """https://github.com/PrimeIntellect-ai/verifiers/pull/1724"""
    call = {"tool_name": "add", "arguments": {"a": 1, "b": 1}}
    candidate = await played(peers["tools"], *[call] * 5)
    assert candidate.termination.value == "max_steps"
    assert [observed(candidate, n).reward for n in range(5)] == [None] * 5
    assert (candidate.episode_return, candidate.terminal_done) == (0.0, False)
