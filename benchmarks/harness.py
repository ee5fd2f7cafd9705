"""Interleaved measurement, the one JSON form of a result, and the page made of them."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

RESULTS: Final = Path(__file__).parent / "results"
ROUNDS: Final = 5


class Samples(msgspec.Struct, frozen=True):
    """Figures of both sides, pair by pair."""

    ours: list[float]
    peer: list[float]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured; no name and no path of it."""

    machine: str
    cores: int
    python: str


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure is measured against."""

    name: str
    value: float | None
    """None when it is not installed."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a ratio should be."""

    bar: float
    """Asked for."""
    goal: float
    """Aimed at."""
    higher_is_better: bool = True


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One figure."""

    name: str
    unit: str
    ours: float
    peer: Peer
    ratio: float | None
    """Ours over the peer's."""
    target: Target
    samples: Samples
    versions: dict[str, str]
    cpu: Machine
    load: float
    """Processes that wanted to run, on average of the last minute."""


def interleaved(
    ours: Callable[[], float], peer: Callable[[], float], rounds: int = ROUNDS
) -> Samples:
    """Measure A, B, A, B, ... after one pair to warm up.

    Args:
        ours: Returns one figure of ours.
        peer: Returns one figure of the peer.
        rounds: Pairs.
    """
    ours(), peer()
    pairs = [(ours(), peer()) for _ in range(rounds)]
    return Samples([one for one, _ in pairs], [other for _, other in pairs])


def against(number: float, ours: Callable[[], float], rounds: int = ROUNDS) -> Samples:
    """Measure against a number instead of a program."""
    ours()
    return Samples([ours() for _ in range(rounds)], [number])


def result(
    name: str,
    unit: str,
    samples: Samples,
    peer: str,
    target: Target,
    libraries: tuple[str, ...] = (),
) -> Result:
    """Return a result: medians and their ratio.

    Args:
        name: Of the figure; also its file name.
        unit: Of both figures.
        samples: What was measured; none of the peer when it is missing.
        peer: What it was measured against.
        target: What the ratio should be.
        libraries: Distributions whose versions matter.
    """
    ours = statistics.median(samples.ours)
    theirs = statistics.median(samples.peer) if samples.peer else None
    return Result(
        name=name,
        unit=unit,
        ours=ours,
        peer=Peer(name=peer, value=theirs),
        ratio=None if theirs is None else ours / theirs,
        target=target,
        samples=samples,
        versions={library: installed(library) or "missing" for library in libraries},
        cpu=Machine(
            machine=platform.machine(),
            cores=os.cpu_count() or 0,
            python=platform.python_version(),
        ),
        load=round(os.getloadavg()[0], 2),
    )


def save(document: Result) -> None:
    """Write a result where the page is made from."""
    RESULTS.mkdir(exist_ok=True)
    data = msgspec.json.format(msgspec.json.Encoder().encode(document), indent=2)
    (RESULTS / f"{document.name}.json").write_bytes(data + b"\n")


def results() -> list[Result]:
    """Return the results that are checked in, by name."""
    files = sorted(RESULTS.glob("*.json"))
    return [msgspec.json.decode(file.read_bytes(), type=Result) for file in files]


def line(document: Result) -> str:
    """Return a result in one line."""
    ours = f"{document.name}: {document.ours:.4g} {document.unit}"
    if document.ratio is None:
        return f"{ours}; {document.peer.name} is missing"
    peer = f"{document.peer.name} ({document.peer.value:.4g})"
    return f"{ours}, {document.ratio:.2f}x {peer}, load {document.load}"


def installed(library: str) -> str | None:
    """Return the version of a distribution, None when it is missing."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None
