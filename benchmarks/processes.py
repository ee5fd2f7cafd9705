"""Real servers in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def environment_server(name: str) -> Iterator[str]:
    """Run a real server of the SDK; give its address."""
    with _serving(
        "examples.environments", "serve", name, "--port", "0", stderr=None
    ) as url:
        yield url


@contextmanager
def kiln_server(folder: Path) -> Iterator[str]:
    """Run ``kiln serve`` on the embedded model; give its address once it is ready."""
    adapters = ("--adapter-dir", str(folder / "adapters"))
    with _serving(
        "kiln_cli", "serve", "--port", "0", *adapters, stderr=subprocess.DEVNULL
    ) as url:
        kiln("health", "--url", url, "--wait", "600")
        yield url


def kiln(*arguments: str) -> None:
    """Run a command to its end."""
    subprocess.run(
        [sys.executable, "-m", "kiln_cli", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@contextmanager
def _serving(*command: str, stderr: int | None) -> Iterator[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    try:
        yield (server.stdout.readline() if server.stdout else "").split()[-1]
    finally:
        server.terminate()
        server.wait()
