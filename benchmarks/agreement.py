"""How far recomputed log-probabilities are from those that were sampled.

The whole way: `kiln openenv train` collects on a real server of the SDK through a real
Kiln server, and the trainer recomputes the first step's tokens from the published
bundle; its receipt says by how much the largest importance ratio differs from 1, which
is that difference in nats.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.harness import Result, Target, against, result
from benchmarks.processes import environment_server, kiln, kiln_server

LIMIT_NATS: Final = 1e-5
GOAL_NATS: Final = 2e-6
"""At temperature 1; over the temperature below it."""
TEMPERATURES: Final = (0.7, 1.0, 1.3)


class _Audit(msgspec.Struct):
    first_step_agreement: float


class _Grpo(msgspec.Struct):
    policy_audit: _Audit


class _Receipt(msgspec.Struct):
    grpo: _Grpo


def measure() -> Iterator[Result]:
    """Yield the largest difference of a first step, by temperature."""
    with (
        tempfile.TemporaryDirectory() as directory,
        environment_server("signals") as environment,
        kiln_server(Path(directory)) as url,
    ):
        runs = count()
        for temperature in TEMPERATURES:
            goal = GOAL_NATS / min(temperature, 1.0) / LIMIT_NATS

            def difference(temperature: float = temperature) -> float:
                folder = Path(directory) / str(next(runs))
                return _trained(folder, environment, url, temperature)

            yield result(
                f"agreement_{temperature:g}",
                "nats",
                against(LIMIT_NATS, difference),
                "limit",
                Target(bar=1, goal=goal, higher_is_better=False),
                ("jax",),
            )


def _trained(folder: Path, environment: str, url: str, temperature: float) -> float:
    """Collect 8 groups of 8, train on them; return what the receipt says."""
    folder.mkdir()
    name = f"run-{folder.name}"
    seed = 1_000 * int(folder.name)
    arguments = {
        "--environment": environment,
        "--url": url,
        "--output-adapter": name,
        "--groups": "8",
        "--group-size": "8",
        "--concurrency": "16",
        "--max-action-tokens": "32",
        "--temperature": str(temperature),
        "--thinking": "false",
        "--seed-start": str(seed),
        "--output": str(folder / "dataset.jsonl"),
        "--replay-output": str(folder / "replay.json"),
        "--summary-output": str(folder / "summary.json"),
    }
    pairs = [part for pair in arguments.items() for part in pair]
    kiln("openenv", "train", *pairs)
    receipt = folder.parent / "adapters" / name / "train_receipt.json"
    document = msgspec.json.decode(receipt.read_bytes(), type=_Receipt)
    return document.grpo.policy_audit.first_step_agreement
