"""Real environments of the OpenEnv SDK, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


class RealServer:
    """One process that serves environments.

    Args:
        wanted: As ``name:sessions:port``.
    """

    def __init__(self, *wanted: str) -> None:
        self._wanted = wanted
        self._urls: list[str] = []
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.drive.sdk_host", *self._wanted],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def urls(self) -> list[str]:
        """Where they are; reading it waits until they are served."""
        if not self._urls:
            assert self.process.stdout is not None
            self._urls = self.process.stdout.readline().split()
        return self._urls

    @property
    def url(self) -> str:
        return self.urls[0]

    def restart(self) -> None:
        """Kill it and serve at the same place again."""
        urls = list(self.urls)
        self.stop()
        self._wanted = tuple(
            f"{word.rpartition(':')[0]}:{url.rpartition(':')[2]}"
            for word, url in zip(self._wanted, urls, strict=True)
        )
        self._urls = []
        self.process = self._start()
        assert self.urls == urls

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def real_servers(*wanted: tuple[str, ...]) -> Iterator[list[RealServer]]:
    """Start processes together, since each takes seconds."""
    started = [RealServer(*words) for words in wanted]
    try:
        yield started
    finally:
        for server in started:
            server.stop()
