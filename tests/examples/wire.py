"""Conversations with a server, frame by frame, past everything a client checks."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

DEADLINE_SECONDS = 20
STATE = {"type": "state"}


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as response:
        return json.load(response)


def reset(**options: Any) -> dict[str, Any]:
    return {"type": "reset", "data": options}


def step(**action: Any) -> dict[str, Any]:
    return {"type": "step", "data": action}


@asynccontextmanager
async def session(url: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        aiohttp.ClientSession() as client,
        client.ws_connect(f"{url}/ws") as websocket,
    ):
        yield websocket


async def ask(websocket: aiohttp.ClientWebSocketResponse, frame: dict[str, Any]) -> str:
    """Send one frame and return the text of the answer."""
    await websocket.send_json(frame)
    return await websocket.receive_str()


def converse(url: str, *frames: dict[str, Any]) -> list[str]:
    """Send frames one after another on one socket and return the answers' texts."""

    async def run() -> list[str]:
        async with session(url) as websocket:
            return [await ask(websocket, frame) for frame in frames]

    return asyncio.run(run())


def error(text: str) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads(text)
    assert frame.pop("type") == "error"
    data: dict[str, Any] = frame.pop("data")
    assert not frame
    return data
