"""Damage to the bytes of a bundle whose digests were linked again afterwards."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln_core.canonical import compact
from kiln_core.errors import InvalidBundle
from kiln_core.verify import BundleBytes
from tests.core.bundles import VARIANTS, Parts, bytes_of, verify

GOOD = bytes_of(VARIANTS["plain"]().bundle())
EXAMPLES = settings(max_examples=150, deadline=None)


def holds(files: BundleBytes) -> bool:
    """Verify; anything but a verdict is an error of ours."""
    try:
        verify(files)
    except InvalidBundle as error:
        assert error.details["check"]
        assert error.details["file"]
        return False
    return True


def flipped(data: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[place % len(data)] ^= 1 << bit
    return bytes(changed)


def spans(data: bytes, start: int, length: int) -> bytes:
    place = start % len(data)
    return data[:place] + data[place + 1 + length :]


def without_tokens(dataset: bytes) -> list[Any]:
    """Return dataset lines without what only a model can check."""
    lines = [msgspec.json.decode(line) for line in dataset.splitlines()]
    for line in lines:
        line.pop("prompt_token_ids", None)
        for rollout in line["completions"]:
            turns = rollout["trace"]["tokens"]["turns"]
            rollout["trace"]["tokens"]["turns"] = len(turns)
            rollout["trace"]["tokens"].pop("tokenizer_sha256")
    return lines


@EXAMPLES
@given(place=st.integers(0, len(GOOD.dataset)), bit=st.integers(0, 7))
def test_relinked_flip_in_the_dataset_changes_at_most_token_ids(
    place: int, bit: int
) -> None:
    """Ids and log-probabilities are bound by digest; only a model can recompute them."""
    dataset = flipped(GOOD.dataset, place, bit)
    if holds(Parts(GOOD).seal_bytes(dataset)):
        assert without_tokens(dataset) == without_tokens(GOOD.dataset)


def without_states(replay: bytes) -> bytes:
    """Return a manifest without the final states, which no other file repeats."""
    manifest = msgspec.json.decode(replay)
    for group in manifest["groups"]:
        for candidate in group["candidates"]:
            if "final_state" in candidate:
                candidate["final_state"] = None
    return compact(manifest)


@EXAMPLES
@given(place=st.integers(0, len(GOOD.replay)), bit=st.integers(0, 7))
def test_relinked_flip_in_the_manifest_changes_at_most_a_final_state(
    place: int, bit: int
) -> None:
    """Of the values: white space is free where another implementation writes it."""
    replay = flipped(GOOD.replay, place, bit)
    if holds(Parts(GOOD).seal_bytes(GOOD.dataset, replay)):
        assert without_states(replay) == without_states(GOOD.replay)


@EXAMPLES
@given(start=st.integers(0, 2**20), length=st.integers(0, 64))
def test_relinked_gap_is_noticed(start: int, length: int) -> None:
    dataset = spans(GOOD.dataset, start, length)
    if holds(Parts(GOOD).seal_bytes(dataset)):
        assert without_tokens(dataset) == without_tokens(GOOD.dataset)


@EXAMPLES
@given(cut=st.integers(0, len(GOOD.dataset) - 1))
def test_relinked_truncation_of_the_dataset_is_noticed(cut: int) -> None:
    assert not holds(Parts(GOOD).seal_bytes(GOOD.dataset[:cut]))


@EXAMPLES
@given(cut=st.integers(0, len(GOOD.replay) - 2))
def test_relinked_truncation_of_the_manifest_is_noticed(cut: int) -> None:
    assert not holds(Parts(GOOD).seal_bytes(GOOD.dataset, GOOD.replay[:cut]))


@EXAMPLES
@given(data=st.binary(max_size=400))
def test_any_bytes_get_a_verdict(data: bytes) -> None:
    for name in ("summary", "dataset", "replay"):
        assert not holds(msgspec.structs.replace(GOOD, **{name: data}))
    assert not holds(Parts(GOOD).seal_bytes(data))
    assert not holds(Parts(GOOD).seal_bytes(GOOD.dataset, data))
