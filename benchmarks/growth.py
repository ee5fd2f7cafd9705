"""How time grows with size: the slope of a line through doublings, in logarithms."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks.environment_steps import play_kiln
from benchmarks.harness import ROUNDS, Result, Samples, Target, result
from benchmarks.made_bundle import SHAPES, made_bundle
from benchmarks.processes import environment_server
from kiln_core.drive.concurrency import run
from kiln_core.verify import BundleBytes, verify_bundle

MIB: Final = 2**20
SIZES_MIB: Final = (2, 4, 8, 16)
GROUPS: Final = (16, 32, 64, 128)


def measure() -> Iterator[Result]:
    """Yield the exponents of verification and of collection."""
    shape = SHAPES["short_turns_traced"]
    bundles = [made_bundle(shape, size * MIB) for size in SIZES_MIB]
    sizes = [float(len(b.dataset) + len(b.replay)) for b in bundles]
    files = [
        BundleBytes(summary=b.summary_bytes, dataset=b.dataset, replay=b.replay)
        for b in bundles
    ]
    yield _exponent(
        "growth_verify",
        sizes,
        lambda index: _seconds(lambda: verify_bundle(files[index])),
    )
    with environment_server("counter") as url:
        yield _exponent(
            "growth_collection",
            [float(groups) for groups in GROUPS],
            lambda index: _seconds(lambda: run(play_kiln, url, 4, GROUPS[index], 8)),
        )


def _exponent(
    name: str, sizes: Sequence[float], seconds: Callable[[int], float]
) -> Result:
    """Fit one exponent per round, so that there are samples of it."""
    seconds(0)
    slopes = []
    for _ in range(ROUNDS):
        times = [seconds(index) for index in range(len(sizes))]
        fit = statistics.linear_regression(
            [math.log(size) for size in sizes], [math.log(t) for t in times]
        )
        slopes.append(fit.slope)
    return result(
        name,
        "",
        Samples(slopes, [1.0]),
        "straight line",
        Target(bar=1.1, goal=1.1, higher_is_better=False),
    )


def _seconds(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started
