"""Serve an environment of the pack, or list them.

`serve` prints one line when the server accepts connections and ends with exit code 0
on SIGTERM and Ctrl-C. The port is taken before the SDK is imported, so that a port in
use is reported at once.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from examples.environments import MAX_SESSIONS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, ModuleType


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # until the server has its own handlers
    options = _parser().parse_args(arguments)
    if options.command == "inventory":
        return _inventory()
    return _serve(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.environments", description="Example environments."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("inventory", help="print the environments as JSON")
    serve = commands.add_parser("serve", help="serve an environment until stopped")
    serve.add_argument("name", choices=_imported("registry").GAMES, metavar="NAME")
    serve.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    serve.add_argument(
        "--port", type=_port, default=8000, help="0 takes a free one; default: 8000"
    )
    serve.add_argument(
        "--max-sessions",
        type=_sessions,
        default=MAX_SESSIONS,
        help="sessions at once; default: %(default)s",
    )
    return parser


def _port(text: str) -> int:
    return _number(text, 0, 65_535)


def _sessions(text: str) -> int:
    return _number(text, 1, 10_000)


def _number(text: str, lowest: int, highest: int) -> int:
    if text.isdecimal() and lowest <= int(text) <= highest:
        return int(text)
    message = f"{text!r} is not a number from {lowest} to {highest}"
    raise argparse.ArgumentTypeError(message)


def _inventory() -> int:
    json.dump(_imported("registry").inventory(), sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


def _imported(name: str) -> ModuleType:
    # The SDK imports gradio for a web page that is not served here, and does without
    # when it is missing. None makes Python report it as missing: 2 s instead of 5.
    sys.modules.setdefault("gradio", None)  # type: ignore[arg-type]  # as documented
    try:
        return import_module(f"examples.environments.{name}")
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'kiln-openenv[examples]'"
        raise SystemExit(message) from None


def _serve(options: argparse.Namespace) -> int:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        sys.stderr.write(f"cannot listen on {options.host}:{options.port}: {reason}\n")
        return 1
    game = _imported("registry").GAMES[options.name]
    app = _imported("hosting").create_app(game, options.max_sessions)
    host = f"[{options.host}]" if family == socket.AF_INET6 else options.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    _imported("serving").run(app, listener, f"serving {options.name} on {url}")
    return 0


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
