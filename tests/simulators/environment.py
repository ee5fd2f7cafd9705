"""An OpenEnv server that misbehaves where a test says so, on a real socket.

Without a script it is the ``counter`` of ``examples/environments``: the same documents
that matter and the same frames, which ``tests/drive/test_simulator.py`` compares with
the real one. A script names single moments of a session (``open``, ``reset``,
``step 2``, ``state``, ...) and what happens then instead of the plain answer.

Like the SDK's server it answers commands in order, in a task of its own, so that pings
and close frames are handled while a command is being worked on.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections import Counter as Tally
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import WSMsgType, web

TARGET = 4

METADATA = {
    "name": "counter",
    "description": "Add amounts to reach a total of exactly 4.",
    "readme_content": None,
    "version": "1",
    "author": None,
    "documentation_url": None,
}
ACTION_SCHEMA = {
    "additionalProperties": False,
    "properties": {"amount": {"maximum": 3, "minimum": 0, "type": "integer"}},
    "required": ["amount"],
    "type": "object",
}
OBSERVATION_SCHEMA = {
    "additionalProperties": False,
    "properties": {"total": {"title": "Total", "type": "integer"}},
    "required": ["total"],
    "type": "object",
}
STATE_SCHEMA = {"additionalProperties": True, "type": "object"}
SCHEMA = {
    "action": ACTION_SCHEMA,
    "observation": OBSERVATION_SCHEMA,
    "state": STATE_SCHEMA,
    "reset_observation": OBSERVATION_SCHEMA,
}
OPENAPI = {
    "openapi": "3.1.0",
    "info": {"title": "OpenEnv Environment HTTP API", "version": "1.0.0"},
    "paths": {},
}

dump = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@dataclass
class Document:
    """What a route answers."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """How long it takes."""


def document(value: object, status: int = 200) -> Document:
    return Document(dump(value).encode(), status)


def redirect(target: str, status: int = 307) -> Document:
    return Document(b"", status, {"Location": target})


def default_documents() -> dict[str, Document]:
    return {
        "/health": document({"status": "healthy"}),
        "/metadata": document(METADATA),
        "/schema": document(SCHEMA),
        "/list_environments": document(["counter"]),
        "/openapi.json": document(OPENAPI),
    }


# Frames


def observation(inner: object, reward: object = None, *, done: bool = False) -> str:
    return dump(
        {
            "type": "observation",
            "data": {"observation": inner, "reward": reward, "done": done},
        }
    )


def raw_observation(
    reward: str, *, done: bool = False, inner: str = '{"total":1}'
) -> str:
    """Return a frame with a reward exactly as it is written here."""
    ending = "true" if done else "false"
    data = f'{{"observation":{inner},"reward":{reward},"done":{ending}}}'
    return f'{{"type":"observation","data":{data}}}'


def error(code: str, message: str = "no", **more: object) -> str:
    return dump({"type": "error", "data": {"message": message, "code": code, **more}})


def state(value: object) -> str:
    return dump({"type": "state", "data": value})


class Counter:
    """Adds amounts until the total is 4; the seed is only remembered."""

    def __init__(self) -> None:
        self.seed: object = None
        self.episode_id: object = None
        self.phase = "idle"
        self.total = 0
        self.steps = 0

    def reset(self, data: dict[str, Any]) -> str:
        self.seed = data.get("seed") or 0
        self.episode_id = data.get("episode_id")
        self.phase, self.total, self.steps = "running", 0, 0
        return observation({"metadata": {}, "total": 0})

    def step(self, action: dict[str, Any]) -> str:
        if "amount" not in action:
            return _invalid("missing", "amount", "Field required", action)
        amount = action["amount"]
        if amount > 3:
            return _invalid(
                "less_than_equal",
                "amount",
                "Input should be less than or equal to 3",
                amount,
            )
        if self.phase != "running":
            text = {"idle": "no episode yet", "over": "the episode is over"}
            return error("EXECUTION_ERROR", f"{text[self.phase]}: reset first")
        total = self.total + amount
        if not self.total < total <= TARGET:
            return error("EXECUTION_ERROR", f"cannot add {amount} to {self.total}")
        done = total == TARGET
        self.total, self.steps = total, self.steps + 1
        self.phase = "over" if done else "running"
        reward = 1.0 if done else -0.25
        return observation({"metadata": {}, "total": total}, reward, done=done)

    def state(self) -> str:
        return state(
            {
                "episode_id": self.episode_id,
                "step_count": self.steps,
                "seed": self.seed,
                "phase": self.phase,
                "total": self.total,
            }
        )


def _invalid(kind: str, place: str, text: str, given: object) -> str:
    problem = {"type": kind, "loc": [place], "msg": text, "input": given}
    return error("VALIDATION_ERROR", "Invalid message", errors=[problem])


# Sessions


class Peer:
    """One session as the server sees it.

    Attributes:
        received: Frames from the client, as text.
        sent: Text frames to the client.
        ended: Set when the connection is over.
        close_code: With which code the client closed, 1006 for none.
    """

    def __init__(
        self, index: int, socket: web.WebSocketResponse, request: web.Request
    ) -> None:
        self.index = index
        self.received: list[str] = []
        self.sent: list[str] = []
        self.ended = asyncio.Event()
        self.close_code: int | None = None
        self.world = Counter()
        self.pings = 0
        self.pongs = 0
        self._socket = socket
        self._request = request
        self._inbox: asyncio.Queue[web.WSMessage] = asyncio.Queue()
        self._moments: Tally[str] = Tally()

    @property
    def commands(self) -> list[str]:
        """The types of the commands received."""
        return [json.loads(text)["type"] for text in self.received]

    @property
    def actions(self) -> list[Any]:
        """The actions received."""
        frames = [json.loads(text) for text in self.received]
        return [frame["data"] for frame in frames if frame["type"] == "step"]

    async def send(self, text: str) -> None:
        self.sent.append(text)
        with suppress(ConnectionError):
            await self._socket.send_str(text)

    async def send_binary(self, data: bytes) -> None:
        await self._socket.send_bytes(data)

    def write_compressed(self, data: bytes) -> None:
        """Write a text frame with RSV1 set, as permessage-deflate would (RFC 7692)."""
        self.write(b"\xc1\x7f" + len(data).to_bytes(8) + data)

    async def send_frame(self, data: bytes, kind: WSMsgType) -> None:
        await self._socket.send_frame(data, kind)

    def write(self, data: bytes) -> None:
        """Put bytes on the wire, whatever WebSockets say."""
        assert self._request.transport is not None
        self._request.transport.write(data)

    async def write_slowly(self, data: bytes, pause_seconds: float) -> None:
        """Put bytes on the wire one at a time, until the client is gone."""
        with suppress(ConnectionError):
            for byte in data:
                self.write(bytes([byte]))
                await asyncio.sleep(pause_seconds)

    async def flood(self, frame: bytes, times: int) -> None:
        """Put the same bytes on the wire, no faster than they are taken."""
        with suppress(ConnectionError):
            for _ in range(times):
                self.write(frame * 100)
                await asyncio.sleep(0)

    async def ping(self) -> None:
        await self._socket.ping()

    async def close(self, code: int, reason: str = "") -> None:
        await self._socket.close(code=code, message=reason.encode())

    def drop(self) -> None:
        """End the connection without a word (RST)."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def deafen(self) -> None:
        """Stop reading for good, so that the client's writes back up."""
        assert self._request.transport is not None
        self._request.transport.pause_reading()  # type: ignore[attr-defined]  # TCP

    async def run(self, script: Script, idle_seconds: float | None) -> None:
        """Serve the session until the client is gone."""
        worker = asyncio.create_task(self._work(script, idle_seconds))
        try:
            async for message in self._socket:
                if message.type is WSMsgType.PONG:
                    self.pongs += 1
                elif message.type is WSMsgType.PING:
                    self.pings += 1
                    await self._socket.pong(message.data)
                else:
                    if message.type is WSMsgType.TEXT:
                        self.received.append(message.data)
                    self._inbox.put_nowait(message)
        finally:
            worker.cancel()
            self.close_code = self._socket.close_code
            self.ended.set()
        with suppress(asyncio.CancelledError):
            await worker

    async def _work(self, script: Script, idle_seconds: float | None) -> None:
        await self._moment("open", script, "")
        while True:
            try:
                async with asyncio.timeout(idle_seconds):
                    message = await self._inbox.get()
            except TimeoutError:
                await self.close(1011)
                return
            if message.type is not WSMsgType.TEXT:
                await self._session_error("'text'")
                return
            try:
                frame = json.loads(message.data)
            except ValueError as failure:
                await self.send(error("INVALID_JSON", f"Invalid JSON: {failure}"))
                continue
            if not isinstance(frame, dict):
                kind = type(frame).__name__
                await self._session_error(f"{kind!r} object has no attribute 'get'")
                return
            kind = str(frame.get("type"))
            if kind == "close":
                await self.close(1000)
                return
            await self._moment(kind, script, self._answer(kind, frame))

    async def _moment(self, kind: str, script: Script, answer: str) -> None:
        self._moments[kind] += 1
        numbered = script.get(f"{kind} {self._moments[kind]}")
        handler = numbered or script.get(kind, plain)
        await handler(self, answer)

    def _answer(self, kind: str, frame: dict[str, Any]) -> str:
        extra = frame.keys() - {"type", "data"}
        if (kind == "state" and "data" in frame) or extra:
            place = next(iter(extra), "data")
            return _invalid(
                "extra_forbidden", place, "Extra inputs are not permitted", {}
            )
        if kind == "state":
            return self.world.state()
        if kind == "reset":
            return self.world.reset(frame.get("data", {}))
        if kind == "step":
            if "data" not in frame:
                return _invalid("missing", "data", "Field required", frame)
            return self.world.step(frame["data"])
        return error("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def _session_error(self, message: str) -> None:
        await self.send(error("SESSION_ERROR", message))
        await self.close(1000)


Handler = Callable[[Peer, str], Awaitable[None]]
Script = Mapping[str, Handler]


async def plain(peer: Peer, answer: str) -> None:
    """Answer as the environment does; at ``open`` there is nothing to say."""
    if answer:
        await peer.send(answer)


async def silent(peer: Peer, answer: str) -> None:
    """Never answer."""


async def drop(peer: Peer, answer: str) -> None:
    peer.drop()


async def hang_up(peer: Peer, answer: str) -> None:
    """Say how it should end but never answer again: the worker stays busy."""
    await asyncio.Event().wait()


def late(seconds: float) -> Handler:
    """Answer after a while."""

    async def handler(peer: Peer, answer: str) -> None:
        await asyncio.sleep(seconds)
        await plain(peer, answer)

    return handler


def says(*texts: str) -> Handler:
    """Send these frames instead of the answer."""

    async def handler(peer: Peer, answer: str) -> None:
        for text in texts:
            await peer.send(text)

    return handler


def closes(code: int) -> Handler:
    async def handler(peer: Peer, answer: str) -> None:
        await peer.close(code)

    return handler


def refuses(code: str, *, close: bool = True) -> Handler:
    """Answer with an error frame and, for terminal codes, close like the SDK."""

    async def handler(peer: Peer, answer: str) -> None:
        await peer.send(error(code))
        if close:
            await peer.close(1000)

    return handler


def both(first: Handler, second: Handler) -> Handler:
    async def handler(peer: Peer, answer: str) -> None:
        await first(peer, answer)
        await second(peer, answer)

    return handler


@dataclass
class Request:
    """One HTTP request, the upgrade included."""

    path: str
    headers: dict[str, str]
    method: str = "GET"
    raw_path: str = ""
    """As it was on the wire, percent-encoding included."""
    body: bytes = b""


async def _abort_transports(loop: Any) -> None:
    """End connections that were accepted while the server was closing already."""
    for _ in range(5):
        await asyncio.sleep(0)
        for transport in list(loop._transports.values()):
            transport.abort()


class Simulator:
    """The server.

    Args:
        script: What sessions do, or a function of a session's number.
        max_sessions: Sessions at once; None for no limit.
        full: How it says that it is full.
        base_path: Prefix of every route.
        idle_seconds: Sessions without a command for so long are closed with 1011, as
            by servers that need application traffic.
        upgrade_headers: Sent with every accepted upgrade, whatever was asked for.

    Attributes:
        documents: What each route answers; a route without one is 404.
        provider: Answers what no document does, the Task routes for example.
        requests: Every HTTP request so far.
        peers: Every session that was let in.
        turned_away: How many upgrades found it full.
    """

    def __init__(
        self,
        script: Script | Callable[[int], Script] | None = None,
        *,
        max_sessions: int | None = None,
        full: Literal["frame", "upgrade", "close"] = "frame",
        base_path: str = "",
        idle_seconds: float | None = None,
        upgrade_headers: Mapping[str, str] | None = None,
    ) -> None:
        self.upgrade_headers = upgrade_headers or {}
        self.idle_seconds = idle_seconds
        self.script = script or {}
        self.max_sessions = max_sessions
        self.full = full
        self.base_path = base_path
        self.documents = default_documents()
        self.provider: Callable[[Request], Document | None] = lambda request: None
        self.requests: list[Request] = []
        self.peers: list[Peer] = []
        self.turned_away = 0
        self.most_at_once = 0
        self.failures: list[BaseException] = []
        self.url = ""
        self._open = 0
        self._stopping = asyncio.Event()

    @property
    def paths(self) -> list[str]:
        """Paths requested so far."""
        return [request.path for request in self.requests]

    def change(self, route: str, **members: Any) -> None:
        """Change members of a JSON document."""
        value = json.loads(self.documents[route].body)
        self.documents[route] = document({**value, **members})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Simulator]:
        """Serve in this event loop."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        site = web.SockSite(runner, listener)
        await site.start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}{self.base_path}"
        try:
            yield self
        finally:
            self._stopping.set()
            for peer in self.peers:
                if not peer.ended.is_set():
                    peer.drop()
            await runner.cleanup()
        if self.failures:
            raise self.failures[0]

    @contextmanager
    def serving_in_thread(self) -> Iterator[Simulator]:
        """Serve in another thread, so that a blocked loop of the test matters."""
        started = threading.Event()
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()

        async def main() -> None:
            async with self.serving():
                started.set()
                await stop.wait()
            await _abort_transports(loop)

        thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
        thread.start()
        try:
            assert started.wait(5)
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    async def all_ended(self, seconds: float = 3.0) -> bool:
        """Say whether every session ends within a time."""
        try:
            async with asyncio.timeout(seconds):
                for peer in self.peers:
                    await peer.ended.wait()
        except TimeoutError:
            return False
        return True

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        asked = Request(
            request.path,
            dict(request.headers),
            request.method,
            request.raw_path,
            await request.read(),
        )
        self.requests.append(asked)
        route = request.path.removeprefix(self.base_path)
        upgrade = request.headers.get("Upgrade", "").lower() == "websocket"
        if not request.path.startswith(self.base_path):
            return web.Response(status=403 if upgrade else 404)
        answer = self.documents.get(route) or self.provider(asked)
        if upgrade and (route != "/ws" or answer is not None):
            return self._response(answer) if answer else web.Response(status=403)
        if upgrade:
            return await self._session(request)
        if answer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if answer.seconds:
            with suppress(TimeoutError):
                async with asyncio.timeout(answer.seconds):
                    await self._stopping.wait()
        return self._response(answer)

    @staticmethod
    def _response(answer: Document) -> web.Response:
        headers = {"Content-Type": "application/json", **answer.headers}
        return web.Response(body=answer.body, status=answer.status, headers=headers)

    async def _session(self, request: web.Request) -> web.StreamResponse:
        is_full = self.max_sessions is not None and self._open >= self.max_sessions
        if is_full:
            self.turned_away += 1
        if is_full and self.full == "upgrade":
            return web.Response(status=503)
        ws = web.WebSocketResponse(autoping=False, max_msg_size=0, timeout=0.5)
        ws.headers.update(self.upgrade_headers)
        await ws.prepare(request)
        if is_full:
            await self._turn_away(ws)
            return ws
        peer = Peer(len(self.peers), ws, request)
        self.peers.append(peer)
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        try:
            script = self.script(peer.index) if callable(self.script) else self.script
            await peer.run(script, self.idle_seconds)
        except ConnectionError:
            pass
        except Exception as failure:
            self.failures.append(failure)
            raise
        finally:
            self._open -= 1
        return ws

    async def _turn_away(self, ws: web.WebSocketResponse) -> None:
        if self.full == "close":
            await ws.close(code=1013)
            return
        most = self.max_sessions
        message = (
            f"Server at capacity: {most}/{most} sessions active. "
            "Cannot accept new connections."
        )
        await ws.send_str(
            error("CAPACITY_REACHED", message, active_sessions=most, max_sessions=most)
        )
        await ws.close(code=1000)


@asynccontextmanager
async def raw_server(*answers: bytes | None) -> AsyncIterator[str]:
    """Serve bytes to whoever connects: the first answer first, the last for ever.

    None never answers; every answer ends its connection.
    """
    waiting = list(answers)

    async def handle(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with tcp_server(handle) as url:
        yield url


@asynccontextmanager
async def tunnel(url: str) -> AsyncIterator[str]:
    """Forward connections, but swallow every ping and pong (RFC 6455 5.5)."""
    host, port = url.removeprefix("http://").split(":")

    async def handle(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        directions = [
            asyncio.create_task(forward_frames(reader, back)),
            asyncio.create_task(forward_frames(there, writer)),
        ]
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        for direction in directions:
            direction.cancel()
        for side in (writer, back):
            side.close()
            with suppress(ConnectionError):
                await side.wait_closed()

    async with tcp_server(handle) as forwarded:
        yield forwarded


async def forward_frames(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Forward HTTP heads and bodies as they are, and frames after an upgrade."""
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            if b"upgrade: websocket" in head.lower():
                break
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            writer.write(await reader.readexactly(int(length[1]) if length else 0))
        while True:
            head = await reader.readexactly(2)
            size = head[1] & 0x7F
            extended = {126: 2, 127: 8}.get(size, 0)
            head += await reader.readexactly(extended)
            size = int.from_bytes(head[2:]) if extended else size
            mask = 4 if head[1] & 0x80 else 0
            payload = await reader.readexactly(mask + size)
            if head[0] & 0x0F not in {WSMsgType.PING, WSMsgType.PONG}:
                writer.write(head + payload)


@asynccontextmanager
async def tcp_server(
    handle: Callable[
        [asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]
    ],
) -> AsyncIterator[str]:
    """Serve TCP connections; all of them have ended when this ends."""
    running: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(handle(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
        for task in tuple(running):
            with suppress(TimeoutError):
                await asyncio.wait_for(task, 2)
