"""Make a published bundle for the vectors: ``python -m tests.vectors.make_bundle DIR``.

The bundle covers all four terminations in two environments, with thinking and token
ids, and names the prompt version its directory has in its name. A vector is made once
and never again: when the prompt gets a new version, make a new directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.core.bundles import Collection, bytes_of


def main(directory: Path) -> None:
    """Write the three files."""
    files = bytes_of(Collection(thinking=True).bundle())
    for name, data in (
        (files.dataset_name, files.dataset),
        (files.replay_name, files.replay),
        (files.summary_name, files.summary),
    ):
        (directory / name).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
