"""Environment steps per second through the whole client, one real SDK server.

Ours pays for schema check, transcript, digests and the retained-bytes budget; the
peers are the SDK's own asynchronous client and a bare aiohttp loop on the same server.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import aiohttp
import anyio

from benchmarks.harness import interleaved, result
from kiln_core.drive.collect import CollectionRequest, EnvironmentTarget, collect
from kiln_core.plan import CollectionControls
from kiln_core.scripted import ScriptedPolicy

STEPS = 68
"""Of an episode: three additions, then refusals until the budget of errors ends."""
EPISODES = 8
"""Per session, so that discovery does not weigh."""
SESSIONS = (1, 32)
SERVE = ("examples.environments", "serve", "counter", "--port", "0")
BAD = '{"amount": 0}'
"""Refused by the counter with a recoverable error, so an episode can be long."""


def measure() -> list[dict[str, Any]]:
    """Return steps per second at 1 and 32 sessions, against both peers."""
    server = subprocess.Popen(
        [
            sys.executable,
            *["-m", "examples.environments", "serve", "counter", "--port", "0"],
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = (server.stdout.readline() if server.stdout else "").split()[-1]
        return [document for sessions in SESSIONS for document in _at(url, sessions)]
    finally:
        server.terminate()
        server.wait()


def _at(url: str, sessions: int) -> list[dict[str, Any]]:
    def ours() -> float:
        return anyio.run(_kiln, url, sessions)

    sdk = interleaved(ours, lambda: anyio.run(_sdk, url, sessions))
    raw = interleaved(ours, lambda: anyio.run(_raw, url, sessions))
    libraries = ("aiohttp", "openenv", "websockets")
    return [
        result(
            f"environment_steps_{sessions}_sdk",
            "steps/s",
            sdk,
            "the SDK's async client",
            libraries,
        ),
        result(
            f"environment_steps_{sessions}_raw",
            "steps/s",
            raw,
            "raw aiohttp",
            libraries,
        ),
    ]


async def _kiln(url: str, sessions: int) -> float:
    request = CollectionRequest(
        environments=(EnvironmentTarget(base_url=url),),
        controls=CollectionControls(
            groups=EPISODES,
            group_size=sessions,
            max_steps=STEPS,
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
        for _ in range(EPISODES):
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
    return sessions * EPISODES * STEPS / (time.perf_counter() - started)


async def _sdk(url: str, sessions: int) -> float:
    from openenv.core import GenericEnvClient

    async def play() -> None:
        for _ in range(EPISODES):
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
    return sessions * EPISODES * STEPS / (time.perf_counter() - started)
