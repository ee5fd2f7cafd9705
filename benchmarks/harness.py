"""Interleaved measurement and the one JSON form of a result."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from kiln_core.canonical import pretty

RESULTS: Final = Path(__file__).parent / "results"
ROUNDS: Final = 5


def interleaved(
    ours: Callable[[], float], peer: Callable[[], float], rounds: int = ROUNDS
) -> tuple[float, float]:
    """Measure A, B, A, B, ... and return the medians.

    Args:
        ours: Returns one figure of ours.
        peer: Returns one figure of the peer.
        rounds: Pairs, after one warm-up pair.
    """
    ours(), peer()
    pairs = [(ours(), peer()) for _ in range(rounds)]
    return (
        statistics.median(one for one, _ in pairs),
        statistics.median(other for _, other in pairs),
    )


def result(
    name: str,
    unit: str,
    figures: tuple[float, float],
    peer: str,
    libraries: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return a result: ours, the peer's, and their ratio.

    Args:
        name: Of the figure; also its file name.
        unit: Of both figures.
        figures: Ours and the peer's.
        peer: What it was measured against.
        libraries: Distributions whose versions matter.
    """
    ours, theirs = figures
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "peer": {"name": peer, "value": theirs},
        "ratio": ours / theirs,
        "versions": {library: _version(library) for library in libraries},
        "cpu": {"machine": platform.machine(), "count": os.cpu_count()},
        "load": os.getloadavg()[0],
    }


def save(document: dict[str, Any]) -> None:
    """Write a result where ``docs/performance.md`` looks for it."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{document['name']}.json"
    path.write_bytes(pretty(document))


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "missing"
