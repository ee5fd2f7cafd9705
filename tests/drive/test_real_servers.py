"""The edge against the real OpenEnv SDK: collect, verify, replay, and sudden death."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from kiln_core.drive.collect import collect
from kiln_core.drive.files import publish_bundle, read_bundle
from kiln_core.drive.replay import ReplayRequest, replay_bundle
from kiln_core.drive.websocket import SessionTimes
from kiln_core.errors import KilnError, TransportError
from kiln_core.ports import PolicyRequest
from kiln_core.records import EpisodeTermination
from kiln_core.scripted import ScriptedPolicy
from kiln_core.verify import verify_bundle
from tests.drive.collection import SlowPolicy, adds, collection, verified
from tests.drive.conftest import Real
from tests.drive.test_files import paths, summary_in

pytestmark = pytest.mark.anyio

TIMES = SessionTimes(exchange_seconds=5, recovery_seconds=1.0)

POLICIES = {
    "counter": ScriptedPolicy(
        [['{"amount":1}', '{"amount":2}', '{"amount":0}'], ['{"amount":3}', "none"]]
    ),
    "bandit": ScriptedPolicy([[f'{{"arm":{arm}}}' for arm in range(4)]]),
    "signals": ScriptedPolicy([[f'{{"lamp":{lamp}}}' for lamp in range(4)]]),
}


@pytest.mark.parametrize("name", POLICIES)
async def test_collect_publish_verify_replay(
    real: Real, name: str, tmp_path: Path
) -> None:
    request = collection(
        getattr(real, name), groups=4, group_size=4, seed_start=11, concurrency=8
    )
    bundle = await collect(request, POLICIES[name], times=TIMES)
    publish_bundle(bundle, paths(tmp_path))
    files, _, _ = read_bundle(summary_in(tmp_path))
    checked = verify_bundle(files)
    assert checked.summary == bundle.summary
    assert len({r.episode_return for r in bundle.summary.rollouts}) > 1
    if name != "counter":
        assert bundle.summary.stats.done_count == 16
    outcome = await replay_bundle(ReplayRequest(bundle=checked), times=TIMES)
    assert outcome.report is not None
    assert outcome.report.rollouts == 16


async def test_dataset_repeats_at_any_concurrency(real: Real) -> None:
    datasets = set()
    for concurrency in (1, 16):
        request = collection(
            real.signals, groups=4, group_size=4, concurrency=concurrency
        )
        bundle = await collect(request, POLICIES["signals"], times=TIMES)
        datasets.add(bundle.dataset)
    assert len(datasets) == 1


async def test_one_session_server(real: Real) -> None:
    """https://github.com/huggingface/OpenEnv/pull/517"""
    request = collection(real.small, group_size=4, groups=2)
    bundle = await collect(request, adds(1, 3), times=TIMES)
    assert bundle.summary.stats.done_count == 8
    assert bundle.summary.stats.capacity_retry_count > 0
    outcome = await replay_bundle(ReplayRequest(bundle=verified(bundle)), times=TIMES)
    assert outcome.report is not None


async def test_several_environments(real: Real) -> None:
    urls = (real.counter, real.small)
    request = collection(*urls, groups=4)
    bundle = await collect(request, adds(1, 3), times=TIMES)
    assert [r.environment_url for r in bundle.summary.rollouts[::2]] == [*urls, *urls]


async def test_error_that_the_policy_corrects(real: Real) -> None:
    request = collection(real.counter, max_steps=4)
    bundle = await collect(request, adds(1, 0, 3), times=TIMES)
    first = bundle.summary.rollouts[0]
    assert first.termination is EpisodeTermination.DONE
    assert (first.recoverable_protocol_errors, first.steps) == (1, 3)


async def test_policy_slower_than_a_keepalive_interval(
    real: Real,
) -> None:
    async def think(request: PolicyRequest) -> None:
        await anyio.sleep(0.6)

    request = collection(real.counter)
    bundle = await collect(
        request, SlowPolicy(think, 1, 3), times=SessionTimes(exchange_seconds=1.0)
    )
    assert bundle.summary.stats.done_count == 2


async def test_cancelled_collection_frees_its_sessions(
    real: Real,
) -> None:
    async def think(request: PolicyRequest) -> None:
        await anyio.sleep(10)

    request = collection(real.small, group_size=1)
    with anyio.move_on_after(0.3) as scope:
        await collect(request, SlowPolicy(think, 1), times=TIMES)
    assert scope.cancelled_caught
    free = collection(real.small, group_size=1, capacity_wait_seconds=1)
    await collect(free, adds(1, 3), times=TIMES)


async def collected_while(
    url: str, strike: Callable[[], object], times: SessionTimes = TIMES
) -> KilnError:
    """Collect and strike at the second turn of each episode; return the failure."""

    async def think(request: PolicyRequest) -> None:
        if len(request.messages) > 2:
            strike()
            await anyio.sleep(0.3)

    request = collection(url, groups=2, episode_retries=1)
    with anyio.fail_after(10), pytest.raises(KilnError) as caught:
        await collect(request, SlowPolicy(think, 1, 3), times=times)
    error = caught.value
    assert isinstance(error, TransportError)
    assert error.retryable
    assert error.hint
    assert error.details["attempts"] == 2
    return error


async def test_server_that_stops_and_one_that_is_terminated(
    real: Real,
) -> None:
    """https://github.com/huggingface/OpenEnv/pull/1103

    SIGSTOP leaves the sockets open and nothing answers; SIGTERM closes with 1012.
    """
    victim = real.stopped
    times = SessionTimes(0.6, 0.6, recovery_seconds=0.1)
    stopped = await collected_while(
        victim.url, lambda: victim.process.send_signal(signal.SIGSTOP), times
    )
    assert "timed out" in stopped.message
    victim.process.send_signal(signal.SIGCONT)
    await collect(collection(victim.url), adds(1, 3), times=TIMES)

    gone = await collected_while(victim.url, victim.process.terminate)
    assert "cannot be reached" in gone.message


async def test_server_that_restarts_and_one_that_is_killed(
    real: Real,
) -> None:
    """The lost candidate starts again on the new server; without one, none does."""
    victim = real.killed
    restarted: list[bool] = []

    async def restart(request: PolicyRequest) -> None:
        if len(request.messages) > 2 and not restarted:
            restarted.append(True)
            await anyio.to_thread.run_sync(victim.restart)

    request = collection(victim.url, group_size=1, concurrency=1)
    bundle = await collect(request, SlowPolicy(restart, 1, 3), times=TIMES)
    rollout = json.loads(bundle.dataset)["completions"][0]
    assert rollout["trace"]["attempt"] == 1
    assert bundle.summary.stats.mean_episode_return == 0.75

    gone = await collected_while(victim.url, victim.process.kill)
    assert "cannot be reached" in gone.message
