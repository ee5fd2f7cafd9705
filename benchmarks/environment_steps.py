"""Environment steps per second through the whole client, one real SDK server.

Ours pays for schema check, transcript, digests and the retained-bytes budget; the
peers are the SDK's own asynchronous client and a bare aiohttp loop on the same server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Final

import aiohttp
import anyio

from benchmarks.harness import Result, Target, installed, interleaved, result
from benchmarks.processes import environment_server
from kiln_core.drive.collect import CollectionRequest, EnvironmentTarget, collect
from kiln_core.drive.concurrency import run
from kiln_core.plan import CollectionControls
from kiln_core.scripted import ScriptedPolicy

STEPS: Final = 68
"""Of an episode: three additions, then refusals until the budget of errors ends."""
EPISODES: Final = {1: 48, 32: 6}
"""Per session, by sessions at a time: enough that discovery does not weigh."""
ROUNDS: Final = 9
"""Many, since what else a machine does weighs on short messages most."""
BAD: Final = '{"amount": 0}'
"""Refused by the counter with a recoverable error, so an episode can be long."""
LIBRARIES: Final = ("aiohttp", "openenv", "websockets")


def measure() -> Iterator[Result]:
    """Yield steps per second at 1 and 32 sessions, against both peers.

    Raises:
        SystemExit: The SDK, which serves the environment, is not installed.
    """
    if installed("openenv") is None:
        raise SystemExit(
            "the server of this benchmark needs benchmarks/requirements-peers.txt"
        )
    with environment_server("counter") as url:
        for sessions in EPISODES:
            yield from _at(url, sessions)


def _at(url: str, sessions: int) -> Iterator[Result]:
    def ours() -> float:
        return run(play_kiln, url, sessions)

    for name, title, play, bar, goal in (
        ("sdk", "the SDK's async client", _sdk, 1.0, 1.0),
        ("raw", "raw aiohttp", _raw, 0.9, 0.9),
    ):
        yield result(
            f"environment_steps_{sessions}_{name}",
            "steps/s",
            interleaved(ours, partial(anyio.run, play, url, sessions), ROUNDS),
            title,
            Target(bar=bar, goal=goal),
            LIBRARIES,
        )


async def play_kiln(
    url: str, sessions: int, groups: int = 0, steps: int = STEPS
) -> float:
    """Collect once; return steps per second."""
    request = CollectionRequest(
        environments=(EnvironmentTarget(base_url=url),),
        controls=CollectionControls(
            groups=groups or EPISODES[sessions],
            group_size=sessions,
            max_steps=steps,
            concurrency=sessions,
            max_recoverable_errors=64,
        ),
        reset_templates=({},),
    )
    turns = [['{"amount": 1}']] * 3 + [[BAD]] * 64
    started = time.perf_counter()
    bundle = await collect(request, ScriptedPolicy(turns))
    seconds = time.perf_counter() - started
    return bundle.summary.stats.total_environment_steps / seconds


async def _raw(url: str, sessions: int) -> float:
    async def play(http: aiohttp.ClientSession) -> None:
        for _ in range(EPISODES[sessions]):
            await episode(http)

    async def episode(http: aiohttp.ClientSession) -> None:
        address = "ws" + url.removeprefix("http") + "/ws"
        async with http.ws_connect(address, compress=0) as socket:
            await socket.send_str('{"type":"reset","data":{"seed":0}}')
            await socket.receive()
            for step in range(STEPS):
                amount = 1 if step < 3 else 0
                await socket.send_str(f'{{"type":"step","data":{{"amount":{amount}}}}}')
                await socket.receive()

    started = time.perf_counter()
    async with aiohttp.ClientSession() as http, anyio.create_task_group() as group:
        for _ in range(sessions):
            group.start_soon(play, http)
    return sessions * EPISODES[sessions] * STEPS / (time.perf_counter() - started)


async def _sdk(url: str, sessions: int) -> float:
    from openenv.core import GenericEnvClient

    async def play() -> None:
        for _ in range(EPISODES[sessions]):
            await episode()

    async def episode() -> None:
        async with GenericEnvClient(base_url=url) as client:
            await client.reset(seed=0)
            for step in range(STEPS):
                try:
                    await client.step({"amount": 1 if step < 3 else 0})
                except RuntimeError:
                    continue

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(sessions):
            group.start_soon(play)
    return sessions * EPISODES[sessions] * STEPS / (time.perf_counter() - started)
