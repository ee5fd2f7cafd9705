from __future__ import annotations

import msgspec
import pytest

from kiln_core.canonical import digest
from kiln_core.dataset import read_groups
from kiln_core.errors import InvalidRecord
from kiln_core.records import AgenticGroup, ChatMessage, ScoredRollout
from kiln_core.training import admit_corpus, corpus_digest
from tests.core.bundles import Collection

DATASET = Collection().bundle().dataset
GROUPS = list(read_groups(DATASET))
ORDINARY = AgenticGroup(
    messages=[ChatMessage(role="user", content="go")],
    completions=[ScoredRollout(text="x", reward=1.0)],
)


def test_admitted_corpus_is_the_bytes_of_its_lines() -> None:
    admitted = admit_corpus(GROUPS, "inline")
    assert admitted.admitted_corpus_sha256 == corpus_digest(GROUPS) == digest(DATASET)
    assert (admitted.source, admitted.rows) == ("inline", 4)
    assert admitted.openenv is not msgspec.UNSET
    assert admitted.openenv.rollouts == 28


def test_ordinary_corpus_has_no_lineage() -> None:
    assert admit_corpus([ORDINARY], "inline").openenv is msgspec.UNSET


def test_mixed_corpus_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="mixes"):
        admit_corpus([GROUPS[0], ORDINARY], "inline")
