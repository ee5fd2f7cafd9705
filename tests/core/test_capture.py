"""A manifest is read group by group as strictly as it is read whole."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kiln_core import limits
from kiln_core.canonical import Measured, digest, pretty, read_record
from kiln_core.capture import outline, read_capture
from kiln_core.dataset import read_groups
from kiln_core.errors import InvalidBundle, InvalidRecord, KilnError, MalformedJson
from kiln_core.manifest import OpenEnvReplayManifest, ReplayGroup
from kiln_core.structure import check_structure
from tests.core.bundles import Collection, bytes_of, verify
from tests.core.test_verify import spread

GOOD = bytes_of(Collection().bundle())
REPLAY = GOOD.replay
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "own": lambda data: data,
    "compact": lambda data: msgspec.json.format(data, indent=-1),
    "other indent": lambda data: msgspec.json.format(data, indent=3),
    "no final line feed": lambda data: data[:-1],
    "carriage returns": lambda data: data.replace(b"\n", b"\r\n"),
    "other order and numbers": lambda data: spread(msgspec.json.decode(data)),
    "escaped member": lambda data: data.replace(b'"groups"', b'"\\u0067roups"'),
    "space in a group": lambda data: data.replace(b'"seed": 41', b'"seed":  41'),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_groups(form: str) -> None:
    data = FORMS[form](REPLAY)
    capture = read_capture(data, "r")
    groups = [capture.group(index) for index in range(len(capture))]
    whole = read_record(REPLAY, OpenEnvReplayManifest, "r")
    assert capture.head.manifest(groups) == whole


LIES: dict[str, tuple[bytes, bytes, type[KilnError], str | None]] = {
    "member twice": (
        b'"max_steps": 4,',
        b'"max_steps": 4, "max_steps": 4,',
        MalformedJson,
        None,
    ),
    "groups twice": (
        b'"groups": [\n',
        b'"groups": [],\n  "groups": [\n',
        MalformedJson,
        None,
    ),
    "member of a group twice": (
        b'"seed": 41,',
        b'"seed": 41, "seed": 41,',
        MalformedJson,
        None,
    ),
    "key of an observation twice": (
        b'"total": 0',
        b'"total": 0, "total": 0',
        MalformedJson,
        None,
    ),
    "surplus member": (b'"seed": 41,', b'"seed": 41, "x": 1,', InvalidRecord, ""),
    "wrong type": (b'"seed": 41,', b'"seed": "41",', InvalidRecord, "/groups/1/seed"),
    "no group": (b'"groups": [\n    {', b'"groups": [\n    7, {', InvalidRecord, None),
    "NaN": (b'"total": 0', b'"total": NaN', MalformedJson, None),
    "lone surrogate": (b'"ticket"', b'"\\ud800"', MalformedJson, None),
    "not UTF-8": (b'"ticket"', b'"\xff"', MalformedJson, None),
    "too deep": (
        b'"total": 0',
        b'"total": ' + b"[" * 160 + b"]" * 160,
        MalformedJson,
        None,
    ),
}


@pytest.mark.parametrize("form", ["own", "compact"])
@pytest.mark.parametrize("lie", LIES)
def test_lie_is_refused_in_every_form(lie: str, form: str) -> None:
    old, new, error, pointer = LIES[lie]
    if form == "compact":
        old, new = old.replace(b": ", b":"), new.replace(b": ", b":")
        old, new = old.replace(b"\n    ", b""), new.replace(b"\n    ", b"")
        old, new = old.removesuffix(b"\n"), new.removesuffix(b"\n")
    data = FORMS[form](REPLAY).replace(old, new, 1)
    assert data != FORMS[form](REPLAY)

    def read() -> None:
        capture = read_capture(data, "r")
        for index in range(len(capture)):
            capture.group(index)

    with pytest.raises(error) as caught:
        read()
    if pointer:
        assert caught.value.details["pointer"] == pointer


def test_depth_at_the_bound_is_read_in_its_own_form() -> None:
    manifest = msgspec.json.decode(REPLAY)
    for levels, accepted in ((154, True), (155, False)):
        deep: Any = 1
        for _ in range(levels):
            deep = [deep]
        manifest["groups"][0]["candidates"][0]["final_state"] = {"a": deep}
        data = pretty(manifest)
        capture = read_capture(data, "r")
        if accepted:
            capture.group(0)
            read_record(data, OpenEnvReplayManifest, "r")
            continue
        with pytest.raises(MalformedJson):
            capture.group(0)
        with pytest.raises(MalformedJson):
            read_record(data, OpenEnvReplayManifest, "r")


def test_outline_keeps_the_plan_and_drops_the_wire() -> None:
    group = read_capture(REPLAY, "r").group(0)
    kept = outline(group)
    assert isinstance(kept, ReplayGroup)
    assert kept.reset_payload == group.reset_payload
    assert [c.candidate_index for c in kept.candidates] == list(range(7))
    assert not any(c.exchanges for c in kept.candidates)


def test_dataset_may_come_in_pieces_of_any_size() -> None:
    whole = list(read_groups(GOOD.dataset))
    for size in (1, 7, 1000, len(GOOD.dataset)):
        pieces = [
            GOOD.dataset[at : at + size] for at in range(0, len(GOOD.dataset), size)
        ]
        measured = Measured(pieces)
        assert list(read_groups(measured)) == whole
        assert measured.size_bytes == len(GOOD.dataset)
        assert measured.sha256 == digest(GOOD.dataset)


def test_dataset_that_changes_between_two_readings_is_refused() -> None:
    other = GOOD.dataset.replace(b"-0.125", b"-0.375", 1)
    assert other != GOOD.dataset
    readings = iter([GOOD.dataset, other])
    files = msgspec.structs.replace(GOOD, dataset=lambda: (next(readings),))
    with pytest.raises(InvalidBundle, match="changed while it was read") as caught:
        verify(files)
    assert caught.value.details["check"] == "dataset_digest"
    verify(msgspec.structs.replace(GOOD, dataset=lambda: (GOOD.dataset,)))


HOSTILE = (b"[" + b"[]," * 40_000 + b"0]", b"[" + b"0," * 400_000 + b"0]")


@pytest.mark.parametrize("value", HOSTILE, ids=["containers", "values"])
def test_hostile_manifest_is_refused_before_it_is_decoded(
    value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory stays at a few times the file, whatever is in it."""
    monkeypatch.setattr(limits, "UNCOUNTED_BYTES", 10_000)
    monkeypatch.setattr(limits, "MAX_DECODED_VALUES", 100_000)
    monkeypatch.setattr(limits, "MAX_DECODED_CONTAINERS", 10_000)
    state = b'"final_state": ' + value + b",\n          "
    data = REPLAY.replace(b'"episode_return"', state + b'"episode_return"', 1)
    tracemalloc.start()
    with pytest.raises(MalformedJson, match="more values"):
        read_capture(data, "r").group(0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(data) + 1_000_000
    with pytest.raises(InvalidBundle, match="more values"):
        next(read_groups(b'{"messages":' + value + b"}\n"))


def test_text_full_of_commas_is_no_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNCOUNTED_BYTES", 0)
    monkeypatch.setattr(limits, "MAX_DECODED_VALUES", 10)
    monkeypatch.setattr(limits, "MAX_DECODED_CONTAINERS", 3)
    check_structure(b'{"a":",,,,,,,,,,,,,[[[[[\\"{{{{","b":[1,2]}', "x")
    with pytest.raises(MalformedJson):
        check_structure(b'{"a":[[],[],[]]}', "x")
