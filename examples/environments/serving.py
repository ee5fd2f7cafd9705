"""Run one environment application on a listening socket until told to stop."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI

SHUTDOWN_SECONDS = 2
"""How long open sessions may delay the end of the server."""


class _Server(uvicorn.Server):
    """Server that prints one line once it accepts connections."""

    def __init__(self, config: uvicorn.Config, announcement: str) -> None:
        super().__init__(config)
        self._announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        sys.stdout.write(f"{self._announcement}\n")
        sys.stdout.flush()


def run(app: FastAPI, listener: socket.socket, announcement: str) -> None:
    """Serve the application; return after SIGTERM or SIGINT.

    Args:
        app: The application of an environment.
        listener: A listening socket; it is closed at the end.
        announcement: The line to print when connections are accepted.
    """
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_SECONDS
    )
    server = _Server(config, announcement)

    def stop(_number: int, _frame: object) -> None:
        server.should_exit = True

    # uvicorn installs handlers of its own while it runs and afterwards raises the
    # signal again: these make that harmless, and cover the moments before and after.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run([listener])
