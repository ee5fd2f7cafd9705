"""Run every benchmark, or those named: ``python -m benchmarks [NAME ...] [--report]``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from benchmarks.harness import line, results, save
from benchmarks.report import PAGE, page

NAMES = (
    "agreement",
    "chat",
    "command_start",
    "environment_steps",
    "grpo_step",
    "growth",
    "sampling",
    "verify",
)


def main(arguments: list[str]) -> int:
    """Run, print one line each, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAME")
    parser.add_argument(
        "--report", action="store_true", help="write docs/performance.md"
    )
    options = parser.parse_args(arguments)
    for name in options.names or ([] if options.report else NAMES):
        for document in import_module(f"benchmarks.{name}").measure():
            save(document)
            print(line(document), flush=True)
    if options.report:
        PAGE.write_text(page(results()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
