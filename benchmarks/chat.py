"""Chat completions per second over HTTP, against the same engine called in process.

32 conversations at a time, several guided turns each, so that prefixes are reused.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import anyio
from msgspec.structs import replace

from benchmarks.harness import Result, Target, interleaved, result
from benchmarks.processes import kiln_server
from kiln_core.drive.concurrency import run
from kiln_core.drive.policy import http_policy
from kiln_core.engine import EngineSettings, GenerationRequest
from kiln_core.ports import PolicyRequest
from kiln_core.records import ChatMessage
from kiln_train_jax.plugin import JaxPlugin

SESSIONS: Final = 32
TURNS: Final = 4
MAX_TOKENS: Final = 32
SCHEMA: Final = {
    "type": "object",
    "properties": {"lamp": {"type": "integer", "minimum": 0, "maximum": 3}},
    "required": ["lamp"],
    "additionalProperties": False,
}
Say = Callable[[tuple[ChatMessage, ...], int], Awaitable[str]]
"""Answers messages under a seed."""


def measure() -> Iterator[Result]:
    """Yield completions per second with 32 conversations at a time."""
    with tempfile.TemporaryDirectory() as directory:
        engine = JaxPlugin(EngineSettings(adapter_dir=Path(directory) / "own"))
        engine.start()
        try:
            with kiln_server(Path(directory)) as url:
                samples = interleaved(
                    lambda: run(_over_http, url), lambda: run(_in_process, engine)
                )
        finally:
            engine.stop()
    yield result(
        f"chat_{SESSIONS}",
        "completions/s",
        samples,
        "the engine in process",
        Target(bar=0.7, goal=0.9),
        ("aiohttp", "hypercorn", "jax", "starlette"),
    )


async def _over_http(url: str) -> float:
    async with http_policy(url, None) as policy:
        await policy.describe()

        async def say(messages: tuple[ChatMessage, ...], seed: int) -> str:
            request = PolicyRequest(
                messages=messages,
                seed=seed,
                max_tokens=MAX_TOKENS,
                temperature=1.0,
                thinking=False,
                thinking_budget_tokens=None,
                action_schema=SCHEMA,
            )
            return (await policy.complete(request)).content or ""

        return await _rate(say)


async def _in_process(engine: JaxPlugin) -> float:
    plain = GenerationRequest(
        messages=(),
        seed=0,
        max_tokens=MAX_TOKENS,
        thinking=False,
        action_schema=SCHEMA,
    )

    async def say(messages: tuple[ChatMessage, ...], seed: int) -> str:
        request = replace(plain, messages=messages, seed=seed)
        # rendering a prompt is the caller's work, and must not hold up the loop
        future = await anyio.to_thread.run_sync(engine.submit, request)
        return (await asyncio.wrap_future(future)).content

    return await _rate(say)


async def _rate(say: Say) -> float:
    """Play all conversations; return completions per second."""
    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for session in range(SESSIONS):
            group.start_soon(partial(_converse, say, session))
    return SESSIONS * TURNS / (time.perf_counter() - started)


async def _converse(say: Say, session: int) -> None:
    messages = (
        ChatMessage(role="system", content="You press one of four lamps. " * 8),
        ChatMessage(role="user", content=f"ticket {session}: which lamp?"),
    )
    for turn in range(TURNS):
        text = await say(messages, 1_000 * session + turn)
        messages += (
            ChatMessage(role="assistant", content=text),
            ChatMessage(role="tool", content=f"turn {turn}: another one?"),
        )
