"""A reverse proxy that demands a bearer token on every route, the upgrade included.

The SDK's server knows no authentication, so outside a proxy adds it. This one forwards
to any server, keeps what it was asked, and writes every frame down.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
from aiohttp import WSMsgType, web


@dataclass
class BearerProxy:
    """A running proxy."""

    target: str
    token: str
    url: str = ""
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Authorization header of every request, refused ones included."""
    frames: list[Any] = field(default_factory=list)
    """What clients sent, decoded."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        authorization = request.headers.get("Authorization")
        self.requests.append((request.path, authorization))
        if authorization != f"Bearer {self.token}":
            return web.json_response({"detail": "who are you?"}, status=401)
        async with aiohttp.ClientSession() as http:
            if request.headers.get("Upgrade", "").lower() == "websocket":
                return await self.relay(request, http)
            url = self.target + request.path_qs
            async with http.request(
                request.method, url, data=await request.read()
            ) as answer:
                return web.Response(
                    body=await answer.read(),
                    status=answer.status,
                    content_type=answer.content_type,
                )

    async def relay(
        self, request: web.Request, http: aiohttp.ClientSession
    ) -> web.WebSocketResponse:
        near = web.WebSocketResponse()
        await near.prepare(request)
        async with (
            http.ws_connect(self.target.replace("http", "ws", 1) + "/ws") as far,
            anyio.create_task_group() as group,
        ):

            async def back() -> None:
                async for message in far:
                    await near.send_str(message.data)
                await near.close(code=far.close_code or 1000)

            group.start_soon(back)
            async for message in near:
                assert message.type is WSMsgType.TEXT
                self.frames.append(json.loads(message.data))
                await far.send_str(message.data)
            await far.close()
        return near


@asynccontextmanager
async def bearer_proxy(target: str, token: str) -> AsyncIterator[BearerProxy]:
    proxy = BearerProxy(target, token)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield proxy
    finally:
        await runner.cleanup()
