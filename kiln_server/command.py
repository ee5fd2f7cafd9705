"""``kiln serve``, found by the command line through its entry point.

Starlette and Hypercorn are imported when it runs, so that ``kiln --help`` stays fast.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from kiln_server.signals import ending_signals

__all__ = ["serve"]


@click.command(
    epilog="""\b
Examples:
  kiln serve
  kiln serve --model ./Qwen3-0.6B --adapter-dir ./adapters
  kiln serve --port 0 --serving-profile stable
"""
)
@click.option(
    "--model",
    help="builtin:tiny, builtin:random, a Hugging Face folder or a GGUF file.",
)
@click.option("--served-model-id", metavar="ID", help="Name in /v1/models.")
@click.option("--adapter-dir", type=click.Path(path_type=Path), help="Adapter folder.")
@click.option("--host", help="Address to bind; others than loopback need a token.")
@click.option("--port", type=int, help="Port; 0 takes a free one.  [default: 8420]")
@click.option(
    "--serving-profile",
    type=click.Choice(["stable", "maintenance", "experimental"]),
    help="Serve only, train only, or both.  [default: experimental]",
)
@click.option("--engine", help="Which installed engine runs the model.  [default: jax]")
@click.option(
    "--json", "as_json", is_flag=True, help="Announce the address as a JSON document."
)
def serve(*, as_json: bool, **flags: Any) -> None:
    """Serve a model: chat, adapters and training.

    Every flag has an environment variable: KILN_MODEL_PATH, KILN_ADAPTER_DIR,
    KILN_SERVER_PORT and so on. KILN_API_TOKEN, when set, is demanded of every client.
    """
    for number in ending_signals():
        signal.signal(number, _leave)  # until the event loop has its own handlers
    from kiln_server.serve import run

    run(flags, as_json=as_json)


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(0)
