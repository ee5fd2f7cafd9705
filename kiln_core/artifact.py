"""An artifact as it is written: in pieces, hashed as they come, within its bound.

The piece that would cross the bound is refused before it is kept, and a replay manifest
is encoded group by group, as they are collected, so no artifact that is too large is
ever built whole. The bytes are those of the record encoded at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from kiln_core import limits
from kiln_core.canonical import Record, Sha256, encoded_again
from kiln_core.errors import LimitError
from kiln_core.manifest import OpenEnvReplayManifest, ReplayGroup

__all__ = ["Artifact", "group_piece", "manifest_pieces"]

INDENT: Final = b"  "
EMPTY: Final = b"[]"


class Artifact:
    """The bytes of one file under way.

    Args:
        what: Names it in errors.
        limit_bytes: Its bound; ``limits.MAX_ARTIFACT_BYTES`` unless given.
    """

    def __init__(self, what: str, limit_bytes: int | None = None) -> None:
        self.size_bytes = 0
        self._what = what
        self._limit_bytes = (
            limits.MAX_ARTIFACT_BYTES if limit_bytes is None else limit_bytes
        )
        self._pieces: list[bytes] = []
        self._hash = hashlib.sha256()

    def write(self, piece: bytes) -> None:
        """Append a piece.

        Raises:
            LimitError: The bound would be crossed; the piece is not kept then.
        """
        self.reserve(len(piece))
        self._hash.update(piece)
        self._pieces.append(piece)

    def reserve(self, size_bytes: int) -> None:
        """Count bytes that are to come, so that too many are refused early.

        Raises:
            LimitError: The bound would be crossed; nothing is counted then.
        """
        if self.size_bytes + size_bytes > self._limit_bytes:
            raise LimitError(
                f"{self._what} would cross the bound of {self._limit_bytes} bytes",
                hint="collect fewer or shorter rollouts",
                limit_bytes=self._limit_bytes,
                used_bytes=self.size_bytes,
                refused_bytes=size_bytes,
            )
        self.size_bytes += size_bytes

    def write_all(self, pieces: Iterable[bytes]) -> None:
        """Append pieces, none of which is made before the one in front of it is kept.

        Raises:
            LimitError: The bound would be crossed.
        """
        for piece in pieces:
            self.write(piece)

    @property
    def sha256(self) -> Sha256:
        """Digest of what was written so far."""
        return "sha256:" + self._hash.hexdigest()

    def getvalue(self) -> bytes:
        """Return what was written so far."""
        return b"".join(self._pieces)


def manifest_pieces(
    manifest: OpenEnvReplayManifest, groups: Iterable[bytes]
) -> Iterator[bytes]:
    """Yield a manifest as `pretty` writes it, group by group.

    Args:
        manifest: Without groups.
        groups: Its groups in order, each as `group_piece` wrote it.
    """
    head, tail = _around(manifest, 0)
    yield head
    yield from _listed(groups, 2)
    yield tail


def group_piece(group: ReplayGroup) -> bytes:
    """Return a group as it stands in a manifest."""
    head, tail = _around(msgspec.structs.replace(group, candidates=[]), 2)
    candidates = (_nested(candidate, 4) for candidate in group.candidates)
    return b"".join((head, *_listed(candidates, 4), tail))


def _around(record: Record, depth: int) -> tuple[bytes, bytes]:
    """Return what stands before and after the empty list that ends a record."""
    text = _nested(record, depth)
    if not depth:
        text += b"\n"
    head, _, tail = text.rpartition(EMPTY)
    return head, tail


def _listed(items: Iterable[bytes], depth: int) -> Iterator[bytes]:
    """Yield a list of items that are already indented for a place in it."""
    opening = b"[\n" + depth * INDENT
    written = False
    for item in items:
        yield b",\n" + depth * INDENT if written else opening
        yield item
        written = True
    yield b"\n" + (depth - 1) * INDENT + b"]" if written else EMPTY


def _nested(record: Record, depth: int) -> bytes:
    """Return a record as it stands ``depth`` levels deep; strings hold no newline.

    What was collected was checked when it came.
    """
    text = msgspec.json.format(encoded_again(record), indent=2)
    return text.replace(b"\n", b"\n" + depth * INDENT)
