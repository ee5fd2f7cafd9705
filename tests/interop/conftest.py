"""What the tests of interoperability share: the peers, all served by one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drive.conftest import (
    anyio_backend,
    leaves_nothing_behind,
    libraries_are_no_garbage,
)
from tests.drive.servers import ROOT
from tests.interop.certificates import write_certificates

__all__ = ["anyio_backend", "leaves_nothing_behind", "libraries_are_no_garbage"]

SERVED = {
    "counter": "counter:64",
    "bandit": "bandit:64",
    "words": "words:64",
    "raising": "raising:64",
    "commands": "commands:64",
    "tasks": "tasks:64",
    "tools": "tools:64",
    "bench": "bench:64",
    "notes": "notes:64",
    "prefixed": "prefixed:64",
    "production": "production:64",
    "one session": "counter:1",
    "one tool": "tools:1",
    "held": "counter:1",
    "tls": "counter:64:{certificates}",
}
"""Servers by name, as arguments of ``tests.interop.host``."""


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    write_certificates(folder)
    write_certificates(folder / "other")
    return folder


@pytest.fixture(scope="session")
def peers(certificates: Path) -> Iterator[dict[str, str]]:
    """The URL of every peer."""
    words = [word.format(certificates=certificates) for word in SERVED.values()]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.interop.host", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ports = process.stdout.readline().split()
        urls = dict(zip(SERVED, (f"http://127.0.0.1:{p}" for p in ports), strict=True))
        urls["prefixed"] += "/openenv/prefix"
        urls["tls"] = urls["tls"].replace("http", "https")
        yield urls
    finally:
        process.kill()
        process.communicate()
