"""The simulator tells the truth: its plain answers are those of the real SDK."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from tests.drive.conftest import Real
from tests.simulators.environment import Simulator

pytestmark = pytest.mark.anyio

CONVERSATION = (
    '{"type":"state"}',
    '{"type":"step","data":{"amount":1}}',
    '{"type":"reset","data":{"seed":3,"episode_id":"e","unknown":1}}',
    '{"type":"step","data":{"amount":1}}',
    '{"type":"step","data":{"amount":0}}',
    '{"type":"step","data":{"amount":9}}',
    '{"type":"step","data":{}}',
    '{"type":"step"}',
    '{"type":"nope"}',
    "{bad",
    '{"type":"state","data":{}}',
    '{"type":"state"}',
    '{"type":"step","data":{"amount":3}}',
    '{"type":"step","data":{"amount":1}}',
    '{"type":"state"}',
    '{"type":"reset"}',
    '{"type":"state"}',
)
"""Frames that show every kind of answer of a session that goes on."""


@pytest.fixture(scope="module")
def sdk(real: Real) -> str:
    return real.small


def comparable(text: str) -> Any:
    """Return a frame, less the address of pydantic's page about an error."""
    frame = json.loads(text)
    for problem in frame["data"].get("errors", []):
        problem.pop("url", None)
        problem.pop("ctx", None)
    return frame


async def ask(ws: aiohttp.ClientWebSocketResponse, frame: str | bytes) -> str:
    if isinstance(frame, bytes):
        await ws.send_bytes(frame)
    else:
        await ws.send_str(frame)
    return await ws.receive_str(timeout=5)


async def ending(ws: aiohttp.ClientWebSocketResponse) -> int | None:
    message = await ws.receive(timeout=5)
    assert message.type is aiohttp.WSMsgType.CLOSE
    return ws.close_code


async def test_frames_equal_those_of_the_sdk(sdk: str) -> None:
    async with Simulator().serving() as simulator, aiohttp.ClientSession() as http:
        answers = []
        for url in (sdk, simulator.url):
            async with http.ws_connect(f"{url}/ws") as ws:
                answers.append([await ask(ws, frame) for frame in CONVERSATION])
                await ws.send_str('{"type":"close"}')
                assert await ending(ws) == 1000
    for frame, theirs, ours in zip(CONVERSATION, *answers, strict=True):
        assert comparable(ours) == comparable(theirs), frame
        if "errors" not in theirs:
            assert ours == theirs, frame


@pytest.mark.parametrize("frame", ["[1]", '"x"', "null", "7", b'{"type":"close"}'])
async def test_session_errors_equal_those_of_the_sdk(
    sdk: str, frame: str | bytes
) -> None:
    async with Simulator().serving() as simulator, aiohttp.ClientSession() as http:
        answers = []
        for url in (sdk, simulator.url):
            async with http.ws_connect(f"{url}/ws") as ws:
                answers.append(json.loads(await ask(ws, frame)))
                assert await ending(ws) == 1000
    assert answers[0] == answers[1]
    assert answers[0]["data"]["code"] == "SESSION_ERROR"


async def test_full_server_speaks_like_the_sdk(sdk: str) -> None:
    async with (
        Simulator(max_sessions=1).serving() as simulator,
        aiohttp.ClientSession() as http,
    ):
        answers = []
        for url in (sdk, simulator.url):
            async with http.ws_connect(f"{url}/ws") as holder:
                await ask(holder, '{"type":"state"}')
                async with http.ws_connect(f"{url}/ws") as ws:
                    answers.append(await ws.receive_str(timeout=5))
                    assert await ending(ws) == 1000
    assert answers[0] == answers[1]


async def test_documents_equal_those_of_the_sdk(sdk: str) -> None:
    """Byte for byte where the SDK's own wording plays no part."""
    async with Simulator().serving() as simulator, aiohttp.ClientSession() as http:
        for route in ("/health", "/metadata", "/list_environments"):
            async with http.get(sdk + route) as theirs:
                async with http.get(simulator.url + route) as ours:
                    assert await ours.read() == await theirs.read(), route
        async with http.get(f"{sdk}/schema") as theirs:
            schema = await theirs.json()
        async with http.get(f"{simulator.url}/schema") as ours:
            simulated = await ours.json()
        assert schema.keys() == simulated.keys()
        assert schema["action"] == simulated["action"]
        for url in (sdk, simulator.url):
            async with http.get(f"{url}/openapi.json") as answer:
                assert (await answer.json())["info"]["version"] == "1.0.0"
            async with http.get(f"{url}/nope") as answer:
                assert (answer.status, await answer.json()) == (
                    404,
                    {"detail": "Not Found"},
                )
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await http.ws_connect(f"{url}/ws/")
            assert refused.value.status == 403
