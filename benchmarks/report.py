"""``docs/performance.md``, made of the results that are checked in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.harness import Result

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "performance.md"

HEAD: Final = """# Performance

```console
make bench
```

Every figure is measured side by side with a peer or a floor in one run, turn by turn, and is the median of at least five;
the ratio is what counts, since other work on a machine slows both. `load` is how many processes wanted to run meanwhile on
the cores named: above them, figures are noisy. `make bench` measures all again, `python -m benchmarks NAME` one
script, and `python -m benchmarks --report` writes this page from `benchmarks/results`.

Peers that are not part of Kiln's own environment are in `benchmarks/requirements-peers.txt`; one that is not installed is
shown as missing.

"""

SECTIONS: Final = (
    (
        "environment_steps",
        "Environment steps through the whole client",
        "One real server of the OpenEnv SDK, 1 or 32 sessions at a time. Ours checks every action against its schema, keeps "
        "transcript\nand exchange, charges the retained-bytes budget and derives the bundle; the peers do none of that.",
    ),
    (
        "verify",
        "Offline verification",
        "Dataset and replay manifest, per second of processor time, against the floor: SHA-256, typed decoding and canonical\n"
        "encoding of the same bytes by the same library without any check. `memory` is the largest resident size of a fresh\n"
        "`kiln openenv verify` against its bound: replay manifest, three times the largest group, and 128 MiB.",
    ),
    (
        "command_start",
        "Starting a command",
        "Wall time of a process, against one that imports click.",
    ),
    (
        "sampling",
        "Sampling",
        "New tokens per second with log-probabilities on: 8 requests of 64 tokens, 64 of 128, the same float32 weights of\n"
        "`builtin:tiny`'s shape on both sides. Programs are compiled before the clock starts. Other peers that could be asked,\n"
        "Tunix and vLLM on CPU, are missing: neither is installed where this was measured.\n\n"
        "Where a decode step of 64 rows goes, at 100 positions each, by leaving parts out on two quiet cores: 11 ms in all,\n"
        "of which attention 6, projections and logits 4, the draw 0.7, writing the caches 0.2. Attention reads 16 MB of keys and\n"
        "values a step; at the 5 GB/s of that machine's memory this alone is 3 ms. Other forms of it (keys transposed, products\n"
        "summed element by element, shorter chunks) were no faster, nor were XLA's other matrix libraries. A prompt of 64 tokens\n"
        "is fed in 6 ms, one at a time. An adapter adds 1 to 3 ms a step.",
    ),
    (
        "grpo_step",
        "One GRPO step",
        "Seconds to sample, take the optimizer step and serve what it gave: 8 completions of 64 tokens and 64 of 128, four a\n"
        "prompt, LoRA of rank 8 on every linear layer. The same weights on both sides; TRL's clock leaves our part out.",
    ),
    (
        "chat",
        "Chat completions over HTTP",
        "32 conversations of several guided turns, with full rollout provenance, against the same engine in process.",
    ),
    (
        "agreement",
        "Sampled against recomputed log-probabilities",
        "The largest difference of a first training step, by temperature, as the receipt of `kiln openenv train` on a real\n"
        "environment states it; the figures in the field, on GPUs, are 1e-3 to 1e-2.",
    ),
    (
        "growth",
        "Growth",
        "The exponent of time over size, fitted over doublings; 1 is a straight line.",
    ),
)


def page(results: Sequence[Result]) -> str:
    """Return the page."""
    parts = [HEAD]
    for prefix, title, text in SECTIONS:
        parts += [f"## {title}\n\n{text}\n\n", _table(results, prefix), "\n"]
    return "".join(parts).rstrip() + "\n"


def _table(results: Sequence[Result], prefix: str) -> str:
    rows = [
        "| figure | ours | peer | ratio | asked | goal | load |\n"
        "|---|---|---|---|---|---|---|\n"
    ]
    rows += [_row(r) for r in results if r.name.startswith(prefix)]
    machines = sorted(
        {
            f"Python {r.cpu.python} on {r.cpu.cores} cores of {r.cpu.machine}"
            for r in results
            if r.name.startswith(prefix)
        }
    )
    versions = sorted(
        {
            f"{name} {version}"
            for r in results
            if r.name.startswith(prefix)
            for name, version in r.versions.items()
        }
    )
    rows.append(f"\n{'; '.join([*machines, *versions])}.\n")
    return "".join(rows)


def _row(result: Result) -> str:
    sign = "≥" if result.target.higher_is_better else "≤"
    peer = f"{result.peer.name}, missing"
    ratio = "-"
    if result.ratio is not None and result.peer.value is not None:
        peer = f"{result.peer.name} {_number(result.peer.value)}"
        ratio = f"{result.ratio:.2f}"
    return (
        f"| `{result.name}` | {_number(result.ours)} {result.unit} | {peer} | {ratio} "
        f"| {sign} {result.target.bar:g} | {sign} {result.target.goal:g} | {result.load:.1f} |\n"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
