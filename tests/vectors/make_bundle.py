"""Make a golden bundle: ``python -m tests.vectors.make_bundle KIND DIRECTORY``.

KIND is ``prompt-N`` for a bundle of the present summary version and prompt version N,
or an older summary version, ``v2`` to ``v4``. Each covers all four terminations in two
environments. A vector is made once and never again: when prompt or summary get a new
version, make a new directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.core.bundles import LEGACY_SOURCES, Collection, bytes_of, legacy_bundle


def main(kind: str, directory: Path) -> None:
    """Write the three files."""
    if kind in LEGACY_SOURCES:
        files = legacy_bundle(kind).seal()
    else:
        files = bytes_of(Collection(thinking=True).bundle())
    directory.mkdir(parents=True)
    for name, data in (
        (files.dataset_name, files.dataset),
        (files.replay_name, files.replay),
        (files.summary_name, files.summary),
    ):
        (directory / name).write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
