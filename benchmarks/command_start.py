"""How long ``kiln --help`` takes, against importing click alone."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from benchmarks.harness import interleaved, result


def measure() -> list[dict[str, Any]]:
    """Return wall seconds of both commands."""
    figures = interleaved(
        lambda: _seconds("-m", "kiln_cli", "--help"),
        lambda: _seconds("-c", "import click"),
    )
    return [
        result("command_start", "s", figures, "python -c 'import click'", ("click",))
    ]


def _seconds(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started
