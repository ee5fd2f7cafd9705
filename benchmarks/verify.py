"""Offline verification of bundles of several shapes, against the floor.

Speed is taken in one process, in turns, over processor time; memory in a fresh process
of the command itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.floor import floor_of
from benchmarks.harness import Result, Target, against, interleaved, result
from benchmarks.made_bundle import SHAPES, made_bundle
from kiln_core.bundle import Bundle, BundlePaths
from kiln_core.capture import read_capture
from kiln_core.drive.files import publish_bundle, read_bundle
from kiln_core.verify import verify_bundle

SIZE_BYTES: Final = int(os.environ.get("KILN_BENCH_MIB", "32")) * 2**20
"""Of dataset and manifest together; 512 makes the largest that are allowed."""
SUMMARY: Final = "openenv.rollout-summary.json"
MIB: Final = 2**20
PEAK: Final = """
import atexit, runpy, sys

@atexit.register
def tell():
    with open("/proc/self/status") as status:
        print(*[line.split()[1] for line in status if "VmHWM" in line], file=sys.stderr)

sys.argv[0] = "kiln"
runpy.run_module("kiln_cli", run_name="__main__")
"""
"""Runs a command, then tells the largest resident size of its process in KiB."""


def measure() -> Iterator[Result]:
    """Yield MB/s and peak memory of every shape."""
    for name, shape in SHAPES.items():
        bundle = made_bundle(shape, SIZE_BYTES)
        with tempfile.TemporaryDirectory() as directory:
            publish_bundle(bundle, paths_in(Path(directory)))
            yield _speed(name, bundle, Path(directory) / SUMMARY)
            yield _memory(name, bundle, Path(directory) / SUMMARY)


def paths_in(directory: Path) -> BundlePaths:
    """Return where a bundle goes; its own names are relative."""
    names = BundlePaths()
    return BundlePaths(
        dataset=directory / names.dataset,
        replay=directory / names.replay,
        summary=directory / names.summary,
    )


def _speed(name: str, bundle: Bundle, summary: Path) -> Result:
    size = (len(bundle.dataset) + len(bundle.replay)) / 1e6
    floor = floor_of(bundle.dataset, bundle.replay)

    def rate(action: Callable[[], object]) -> float:
        started = time.process_time()
        action()
        return size / (time.process_time() - started)

    def ours() -> float:
        return rate(lambda: verify_bundle(read_bundle(summary, whole=False)[0]))

    return result(
        f"verify_{name}",
        "MB/s",
        interleaved(ours, lambda: rate(floor)),
        "floor",
        Target(bar=0.4, goal=0.7),
        ("msgspec",),
    )


def _memory(name: str, bundle: Bundle, summary: Path) -> Result:
    capture = read_capture(bundle.replay, "replay manifest")
    lines = [len(line) for line in bundle.dataset.splitlines()]
    texts = [len(capture.text(index)) for index in range(len(capture))]
    largest = max(one + other for one, other in zip(lines, texts, strict=True))
    bound = (len(bundle.replay) + 3 * largest) / MIB + 128
    return result(
        f"verify_{name}_memory",
        "MiB",
        against(
            bound, lambda: _peak_mib("openenv", "verify", "--summary", str(summary))
        ),
        "bound",
        Target(bar=1, goal=1, higher_is_better=False),
        ("msgspec",),
    )


def _peak_mib(*arguments: str) -> float:
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    return int(ran.stderr) / 1024
