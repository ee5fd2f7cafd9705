"""Real servers in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.demo import KILN, server


@contextmanager
def environment_server(name: str) -> Iterator[str]:
    """Run a real server of the SDK; give its address."""
    serve = ("-m", "examples.environments", "serve", name, "--port", "0")
    with server([sys.executable, *serve]) as url:
        yield url


@contextmanager
def kiln_server(folder: Path) -> Iterator[str]:
    """Run ``kiln serve`` on the embedded model; give its address once it is ready."""
    adapters = ("--adapter-dir", str(folder / "adapters"))
    with server([*KILN, "serve", "--port", "0", *adapters]) as url:
        kiln("health", "--url", url, "--wait", "600")
        yield url


def kiln(*arguments: str) -> None:
    """Run a command to its end."""
    subprocess.run(
        [*KILN, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
