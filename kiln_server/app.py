"""The ASGI application: routes, authentication, error answers, life cycle.

Any ASGI server can run it; ``kiln serve`` uses Hypercorn.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from kiln_core.engine import Engine
from kiln_core.errors import AdmissionError, KilnError
from kiln_server import problems
from kiln_server.routes import adapters, chat, health, training
from kiln_server.settings import ServerSettings
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


def create_app(settings: ServerSettings, engine: Engine) -> ASGIApp:
    """Build the application.

    Args:
        settings: How it runs.
        engine: Started and stopped with the application; requests are answered 503
            until it is ready.
    """
    state = ServerState(settings, engine)
    app = Starlette(
        routes=[*health.ROUTES, *chat.ROUTES, *adapters.ROUTES, *training.ROUTES],
        exception_handlers={
            KilnError: problems.refused,
            HTTPException: problems.http_error,
            Exception: problems.unexpected,
        },
        lifespan=_lifespan,
    )
    app.state.kiln = state
    return RequireToken(app, settings.api_token) if settings.api_token else app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    state: ServerState = app.state.kiln
    starting = asyncio.create_task(to_thread.run_sync(_start, state))
    state.jobs.start()
    try:
        yield
    finally:
        await to_thread.run_sync(_stop, state)
        await starting


def _start(state: ServerState) -> None:
    try:
        state.engine.start()
    except KilnError as error:
        state.failure = error.message
        log.error("the engine cannot start: %s", error.message)  # noqa: TRY400 - ours


def _stop(state: ServerState) -> None:
    state.jobs.stop()
    state.engine.stop()
