"""Run every benchmark, or those named: ``python -m benchmarks [NAME ...]``."""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks.harness import save

NAMES = ("command_start", "environment_steps", "offline_verify")


def main(names: list[str]) -> int:
    """Run, print one line each, and write the results."""
    for name in names or NAMES:
        for document in import_module(f"benchmarks.{name}").measure():
            save(document)
            peer = document["peer"]
            print(
                f"{document['name']}: {document['ours']:.4g} {document['unit']}, "
                f"{document['ratio']:.2f}x {peer['name']} ({peer['value']:.4g})"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
