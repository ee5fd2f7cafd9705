"""`kiln_core/artifact.py`: the same bytes as at once, and never too many of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kiln_core.artifact import Artifact, group_piece, manifest_pieces
from kiln_core.canonical import Record, digest, pretty
from kiln_core.errors import LimitError
from kiln_core.manifest import OpenEnvReplayManifest, ReplayGroup
from tests.core.bundles import Collection, bytes_of, verify

COLLECTION = Collection()
BUNDLE = COLLECTION.bundle()
MANIFEST = verify(bytes_of(BUNDLE)).replay
BARE = msgspec.structs.replace(MANIFEST, groups=[])


def test_pieces_are_the_bytes_of_the_whole() -> None:
    pieces = list(manifest_pieces(BARE, map(group_piece, MANIFEST.groups)))
    assert b"".join(pieces) == pretty(MANIFEST) == BUNDLE.replay


def test_text_that_looks_like_the_frame_is_left_alone() -> None:
    """Empty lists, brackets and line feeds in strings and in free JSON."""
    text = '"groups": []\n  ]\n}\n'
    group = MANIFEST.groups[0]
    candidates = [
        msgspec.structs.replace(c, final_state={text: [[], {}, text, "\n"]})
        for c in group.candidates
    ]
    odd = msgspec.structs.replace(
        group, reset_payload={text: [], "seed": 0}, candidates=candidates
    )
    for groups in (
        [odd],
        [odd, odd],
        [msgspec.structs.replace(odd, candidates=[])],
        [],
    ):
        whole = pretty(msgspec.structs.replace(MANIFEST, groups=groups))
        assert b"".join(manifest_pieces(BARE, map(group_piece, groups))) == whole


@pytest.mark.parametrize("record", [OpenEnvReplayManifest, ReplayGroup])
def test_list_that_is_filled_in_stands_last(record: type[Record]) -> None:
    assert record.__struct_fields__[-1] in {"groups", "candidates"}


def test_hash_follows_what_is_written() -> None:
    file = Artifact("it", 5)
    assert (file.sha256, file.getvalue()) == (digest(b""), b"")
    for end in (1, 3, 5):
        file.write(b"abcde"[file.size_bytes : end])
        assert file.sha256 == digest(b"abcde"[:end])
    assert (file.getvalue(), file.size_bytes) == (b"abcde", 5)


def test_piece_too_many_is_refused_and_not_kept() -> None:
    file = Artifact("it", 5)
    file.write(b"abcd")
    with pytest.raises(LimitError, match="it would cross the bound of 5 bytes") as over:
        file.write(b"ef")
    assert over.value.details == {
        "limit_bytes": 5,
        "used_bytes": 4,
        "refused_bytes": 2,
    }
    assert over.value.hint
    assert (file.getvalue(), file.sha256) == (b"abcd", digest(b"abcd"))
    file.write(b"e")
    with pytest.raises(LimitError):
        file.reserve(1)


def test_no_piece_is_made_after_one_that_was_refused() -> None:
    made: list[int] = []

    def pieces() -> Iterator[bytes]:
        for index in range(9):
            made.append(index)
            yield b"xx"

    file = Artifact("it", 5)
    with pytest.raises(LimitError):
        file.write_all(pieces())
    assert made == [0, 1, 2]
    assert file.getvalue() == b"xxxx"


def test_manifest_over_its_bound_is_never_built_whole() -> None:
    groups = [group_piece(group) for group in MANIFEST.groups] * 40
    taken: list[bytes] = []

    def counted() -> Iterator[bytes]:
        for group in groups:
            taken.append(group)
            yield group

    file = Artifact("the replay manifest", 2 * len(BUNDLE.replay))
    with pytest.raises(LimitError, match="the replay manifest would cross"):
        file.write_all(manifest_pieces(BARE, counted()))
    assert file.size_bytes > len(BUNDLE.replay)
    assert 1 < len(taken) < len(groups)
