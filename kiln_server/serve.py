"""Running a server: Hypercorn around the application, with a clean end.

The port is taken before the model is loaded, so a port in use is reported at once.
SIGTERM and Ctrl-C stop accepting, let requests finish for a moment, cancel what trains,
and end every thread; the exit code is 0 then, at whatever moment they come.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from importlib.metadata import entry_points
from typing import Any, NoReturn

import click
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config

from kiln_core.canonical import compact
from kiln_core.engine import Engine, EngineSettings
from kiln_core.errors import MissingExtra, OutputUnwritable, UsageError
from kiln_server.app import create_app
from kiln_server.settings import ServerSettings, settings_from
from kiln_server.signals import ending_signals
from kiln_server.state import GRACEFUL_SECONDS, ServerState

__all__ = ["create_engine", "listen", "run", "serve"]

UNFINISHED = 2
"""Exit code when the engine could not be started."""
END_SECONDS = 300.0
"""Bound of cancelling a job and ending an engine: one step of each may be running."""


def run(flags: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        flags: Command-line flags by setting; None means "not given".
        as_json: Whether the announcement is a JSON document.

    Raises:
        Exit: The engine could not be started, as the log has said.
    """
    settings = settings_from(os.environ, flags)
    with closing(listen(settings)) as listener:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        engine = create_engine(settings)
        state = ServerState(settings, engine)
        early: list[int] = []
        for number in ending_signals():
            # an exit while the event loop is being made would leave it half made
            signal.signal(number, lambda received, _: early.append(received))
        _announce(state, listener, as_json=as_json)
        asyncio.run(_until_signal(state, listener, early))
    if state.failure is not None:
        raise click.exceptions.Exit(UNFINISHED)
    if not state.was_ready:
        _leave_the_compiler()


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
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or "the address is malformed"
        raise UsageError(
            f"cannot serve on {settings.host}:{settings.port}: {reason}",
            hint="choose another --port, or stop what uses it",
        ) from error
    listener.setblocking(False)  # noqa: FBT003 - the socket API
    return listener


def create_engine(settings: ServerSettings) -> Engine:
    """Create the engine that the settings name.

    Raises:
        UsageError: There is no engine of that name.
        MissingExtra: It is not installed.
        OutputUnwritable: The adapter directory cannot be made or written.
    """
    found = {entry.name: entry for entry in entry_points(group="kiln.engines")}
    if settings.engine not in found:
        raise UsageError(
            f"there is no engine {settings.engine!r}",
            hint=f"installed engines: {', '.join(sorted(found)) or 'none'}",
        )
    _make_adapter_directory(settings)
    wanted = EngineSettings(
        model=settings.model,
        served_model_id=settings.served_model_id,
        adapter_dir=settings.adapter_dir,
        compile_cache_dir=settings.compile_cache_dir,
    )
    try:
        engine: Engine = found[settings.engine].load()(wanted)
    except ImportError as error:
        raise MissingExtra(
            f"engine {settings.engine} needs {error.name}, which is not installed",
            hint=f"pip install 'kiln-openenv[{settings.engine}]'",
        ) from error
    return engine


async def serve(
    state: ServerState, listener: socket.socket, stopping: asyncio.Event
) -> None:
    """Serve on a listening socket until an event is set.

    Args:
        state: Of a server that has not run yet.
        listener: Its port; closed when no more connections are accepted.
        stopping: Set to end.
    """
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.graceful_timeout = GRACEFUL_SECONDS
    config.shutdown_timeout = END_SECONDS
    config.accesslog = None
    config.errorlog = None
    app: Any = create_app(state)
    others = asyncio.all_tasks()
    serving = asyncio.create_task(
        hypercorn_serve(app, config, shutdown_trigger=stopping.wait)
    )
    try:
        told = [asyncio.create_task(e.wait()) for e in (stopping, state.failed)]
        await _first(serving, *told)
        stopping.set()
        state.stop_serving()
        ending = asyncio.create_task(state.ending.wait())
        await _first(serving, ending, timeout=2 * GRACEFUL_SECONDS)
        if not state.ending.is_set():
            # From Python 3.12 on, Hypercorn waits for the last connection without a
            # bound before it ends the application: a client could keep us alive.
            await _cancelled(asyncio.all_tasks() - others)
    finally:
        with suppress(asyncio.CancelledError):
            await serving


def _leave_the_compiler() -> NoReturn:
    """End the process while its engine compiles, which nothing can interrupt.

    An ordinary exit would wait for the compiler's threads.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(0)


async def _until_signal(
    state: ServerState, listener: socket.socket, early: list[int]
) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    ours = ending_signals()
    for number in ours:
        loop.add_signal_handler(number, stopping.set)
    if early:
        stopping.set()
    try:
        await serve(state, listener, stopping)
    finally:
        for number in ours:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # we are leaving already


async def _first(*tasks: asyncio.Task[Any], timeout: float | None = None) -> None:  # noqa: ASYNC109 - of asyncio.wait
    """Wait for the first of tasks; cancel those but the first that go on."""
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks[1:]:
        task.cancel()


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _make_adapter_directory(settings: ServerSettings) -> None:
    folder = settings.adapter_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputUnwritable(
            f"adapter directory {folder} cannot be made: {error.strerror}"
        ) from error
    trains = settings.serving_profile != "stable"
    if trains and not os.access(folder, os.W_OK | os.X_OK):
        raise OutputUnwritable(
            f"adapter directory {folder} is not writable",
            hint="choose another --adapter-dir, or serve with --serving-profile stable",
        )


def _announce(state: ServerState, listener: socket.socket, *, as_json: bool) -> None:
    """Say where the server is; it serves on when nobody reads that."""
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    model = state.engine.served_model_id
    with suppress(BrokenPipeError):
        if as_json:
            profile = state.settings.serving_profile
            click.echo(
                compact({"url": url, "model": model, "serving_profile": profile})
            )
        else:
            click.echo(f"Kiln serves {model} on {url}")
