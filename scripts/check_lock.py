"""Check that the lock names no registry and covers every direct dependency.

python scripts/check_lock.py
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN = "kiln-openenv"


def main() -> int:
    """Print what is wrong with the lock; return the number of problems."""
    lock = (ROOT / "constraints.txt").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in wanted} - {OWN}
    locked = set(re.findall(r"^([a-z0-9.-]+)(?:\[[^\]]*\])?==", lock, re.MULTILINE))
    problems = [f"{name} is not locked" for name in sorted(names - locked)]
    if "://" in lock:
        problems.append("the lock holds an address")
    if "--hash=sha256:" not in lock:
        problems.append("the lock holds no hashes")
    for problem in problems:
        print(f"constraints.txt: {problem}; run 'make lock'")
    return len(problems)


if __name__ == "__main__":
    sys.exit(main())
