"""How long commands take to start, against importing click alone.

Both from compiled modules, as an installation has them, wherever the sources lie.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Result, Target, interleaved, result
from benchmarks.made_bundle import SHAPES, made_bundle
from benchmarks.verify import SUMMARY, paths_in
from kiln_core.drive.files import publish_bundle

ROUNDS = 9


def measure() -> Iterator[Result]:
    """Yield wall seconds of ``kiln --help`` and of verifying a small bundle."""
    with tempfile.TemporaryDirectory() as directory:
        compiled = Path(directory) / "compiled"
        yield _against_click(compiled, "help", "--help")
        bundle = made_bundle(SHAPES["one_turn_traced"], 20_000)
        publish_bundle(bundle, paths_in(Path(directory)))
        summary = str(Path(directory) / SUMMARY)
        yield _against_click(
            compiled, "verify", "openenv", "verify", "--summary", summary
        )


def _against_click(compiled: Path, name: str, *arguments: str) -> Result:
    samples = interleaved(
        lambda: _seconds(compiled, "-m", "kiln_cli", *arguments),
        lambda: _seconds(compiled, "-c", "import click"),
        ROUNDS,
    )
    return result(
        f"command_start_{name}",
        "s",
        samples,
        "import click",
        Target(bar=3, goal=2, higher_is_better=False),
        ("click",),
    )


def _seconds(compiled: Path, *arguments: str) -> float:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(compiled)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, *arguments]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - started
