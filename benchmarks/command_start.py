"""How long commands take to start, against importing click alone."""

from __future__ import annotations

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
    yield _against_click("help", "--help")
    with tempfile.TemporaryDirectory() as directory:
        bundle = made_bundle(SHAPES["one_turn_traced"], 20_000)
        publish_bundle(bundle, paths_in(Path(directory)))
        summary = str(Path(directory) / SUMMARY)
        yield _against_click("verify", "openenv", "verify", "--summary", summary)


def _against_click(name: str, *arguments: str) -> Result:
    samples = interleaved(
        lambda: _seconds("-m", "kiln_cli", *arguments),
        lambda: _seconds("-c", "import click"),
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


def _seconds(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started
