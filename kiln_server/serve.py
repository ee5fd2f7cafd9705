"""Running a server: Hypercorn around the application, with a clean end.

The port is taken before the model is loaded, so a port in use is reported at once.
SIGTERM and Ctrl-C stop accepting, fail what is queued, and end every thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import click
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config

from kiln_core.engine import Engine, EngineSettings
from kiln_core.errors import MissingExtra, OutputUnwritable, UsageError
from kiln_server.app import create_app
from kiln_server.settings import ServerSettings, settings_from

__all__ = ["create_engine", "listen", "run"]

GRACEFUL_SECONDS = 5.0


def run(flags: Mapping[str, Any]) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        flags: Command-line flags by setting; None means "not given".
    """
    settings = settings_from(os.environ, flags)
    listener = listen(settings)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    engine = create_engine(settings)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"Kiln serves {engine.served_model_id} on http://{shown}:{port}")
    asyncio.run(_run(settings, engine, listener))


def listen(settings: ServerSettings) -> socket.socket:
    """Take the port.

    Raises:
        UsageError: It is in use, or not ours to take.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot serve on {settings.host}:{settings.port}: {error.strerror}",
            hint="choose another --port, or stop what uses it",
        ) from error
    listener.setblocking(False)  # noqa: FBT003 - the socket API
    return listener


def create_engine(settings: ServerSettings) -> Engine:
    """Create the engine that the settings name.

    Raises:
        UsageError: There is no engine of that name.
        MissingExtra: It is not installed.
        OutputUnwritable: The adapter directory cannot be made.
    """
    found = {entry.name: entry for entry in entry_points(group="kiln.engines")}
    if settings.engine not in found:
        raise UsageError(
            f"there is no engine {settings.engine!r}",
            hint=f"installed engines: {', '.join(sorted(found)) or 'none'}",
        )
    try:
        factory = found[settings.engine].load()
    except ImportError as error:
        raise MissingExtra(
            f"engine {settings.engine} needs {error.name}, which is not installed",
            hint=f"pip install 'kiln-openenv[{settings.engine}]'",
        ) from error
    try:
        settings.adapter_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputUnwritable(
            f"adapter directory {settings.adapter_dir} cannot be made: {error.strerror}"
        ) from error
    engine: Engine = factory(
        EngineSettings(
            model=settings.model,
            served_model_id=settings.served_model_id,
            adapter_dir=settings.adapter_dir,
            compile_cache_dir=settings.compile_cache_dir,
        )
    )
    return engine


async def _run(
    settings: ServerSettings, engine: Engine, listener: socket.socket
) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.graceful_timeout = GRACEFUL_SECONDS
    config.accesslog = None
    config.errorlog = None
    app: Any = create_app(settings, engine)
    await hypercorn_serve(app, config, shutdown_trigger=stopping.wait)
