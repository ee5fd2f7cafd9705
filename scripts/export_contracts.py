"""Write the published contracts, or check that they are what the structs say.

python scripts/export_contracts.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from kiln_core.canonical import pretty
from kiln_core.schemas import published

CONTRACTS = Path(__file__).resolve().parent.parent / "contracts"


def main(arguments: list[str]) -> int:
    """Write or compare every document; return how many differ."""
    problems = 0
    for name, document in published().items():
        path, data = CONTRACTS / name, pretty(document)
        if "--check" not in arguments:
            path.write_bytes(data)
        elif not path.exists() or path.read_bytes() != data:
            problems += 1
            print(f"contracts/{name} is not what the structs say; export it again")
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
