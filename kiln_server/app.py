"""The ASGI application: routes, authentication, error answers, life cycle.

Any ASGI server can run it; ``kiln serve`` uses Hypercorn.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from kiln_core.errors import AdmissionError, KilnError
from kiln_server import problems
from kiln_server.routes import adapters, chat, completions, health, training
from kiln_server.settings import is_loopback
from kiln_server.state import ServerState

__all__ = ["create_app"]

OPEN_PATHS = frozenset({"/health", "/v1/health"})
"""Paths that need no API token."""

log = logging.getLogger("kiln.server")


class RequireToken:
    """Demands the API token on every route but the open ones (RFC 6750)."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                error = AdmissionError(
                    "this server needs its API token",
                    hint="set KILN_API_TOKEN to the token it was started with",
                )
                response = problems.answer(error.document(), 401)
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


class RefuseStrangers:
    """Refuses, on a server without a token, what a page of another site sends.

    A browser lets any page send requests to this machine, and a page whose name is made
    to resolve to it (DNS rebinding) may also read the answers. Both show in headers
    that a page cannot choose.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 403."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            named = [b"//" + headers[b"host"]] if b"host" in headers else []
            named += [headers[b"origin"]] if b"origin" in headers else []
            if not all(map(_is_ours, named)):
                error = AdmissionError(
                    "this server answers only programs and pages of its own machine",
                    hint="ask for it as 127.0.0.1, or serve it with KILN_API_TOKEN",
                )
                await problems.answer(error.document(), 403)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def create_app(state: ServerState) -> ASGIApp:
    """Build the application.

    Args:
        state: Its engine is started and stopped with the application; requests are
            answered 503 until it is ready.
    """
    app = Starlette(
        routes=[
            *health.ROUTES,
            *chat.ROUTES,
            *completions.ROUTES,
            *adapters.ROUTES,
            *training.ROUTES,
        ],
        exception_handlers={
            KilnError: problems.refused,
            HTTPException: problems.http_error,
            ClientDisconnect: problems.disconnected,
            Exception: problems.unexpected,
        },
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False  # it would send clients where Host says
    app.state.kiln = state
    token = state.settings.api_token
    return RequireToken(app, token) if token else RefuseStrangers(app)


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    state: ServerState = app.state.kiln
    starting = asyncio.create_task(_started(state))
    state.jobs.start()
    try:
        yield
    finally:
        state.ending.set()
        await to_thread.run_sync(_stop, state)
        await starting
        # what a start that was under way brought up after the stop
        await to_thread.run_sync(state.engine.stop)


async def _started(state: ServerState) -> None:
    await to_thread.run_sync(_start, state)
    if state.failure is not None:
        state.failed.set()


def _start(state: ServerState) -> None:
    try:
        state.engine.start()
        state.was_ready = state.engine.ready
    except KilnError as error:
        state.failure = error.message
        log.error("the engine cannot start: %s", error.message)  # noqa: TRY400 - ours
    except Exception:
        # the boundary of the engine: a bug in it must be told, not waited for
        state.failure = "it failed unexpectedly; see the log"
        log.exception("the engine cannot start")


def _stop(state: ServerState) -> None:
    state.jobs.stop()
    state.engine.stop()


def _is_ours(address: bytes) -> bool:
    """Say whether a Host or an Origin is this machine."""
    try:
        host = urlsplit(address.decode("ascii")).hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)
