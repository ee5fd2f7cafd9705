"""Offline verification, against the floor: hash, typed decode, canonical encode.

The bundle is made here from a scripted collection whose groups are repeated; 32 MiB
by default, so that the figure is steady and the run short.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from benchmarks.harness import interleaved, result
from benchmarks.made_bundle import large_bundle
from kiln_core.canonical import compact, digest
from kiln_core.records import AgenticGroup
from kiln_core.verify import verify_bundle

MIB = 2**20


def measure() -> list[dict[str, Any]]:
    """Return MB/s over dataset and replay manifest."""
    files = large_bundle(32 * MIB)
    size = (len(files.dataset) + len(files.replay)) / 1e6
    lines = files.dataset.splitlines(keepends=True)

    def ours() -> float:
        started = time.perf_counter()
        verify_bundle(files)
        return size / (time.perf_counter() - started)

    def floor() -> float:
        started = time.perf_counter()
        digest(files.dataset), digest(files.replay)
        for line in lines:
            compact(msgspec.json.decode(line, type=AgenticGroup))
        compact(msgspec.json.decode(files.replay))
        return size / (time.perf_counter() - started)

    return [
        result(
            "offline_verify",
            "MB/s",
            interleaved(ours, floor),
            "hash + typed decode + re-encode",
            ("msgspec",),
        )
    ]
