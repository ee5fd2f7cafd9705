"""Reading a replay manifest one group at a time.

A manifest may be as large as everything an environment ever said, and decoded it is
several times larger. So only its head is decoded whole; each group is decoded when it
is looked at, and proven strict by itself. In the form that Kiln writes, groups are
found by their indent; a manifest of another writer is taken apart member by member,
with the same guarantees.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw

from kiln_core import limits
from kiln_core.canonical import (
    Part,
    Sha256,
    encoded_again,
    read_record,
)
from kiln_core.discovery import EnvironmentInspection
from kiln_core.errors import KilnError
from kiln_core.manifest import (
    Observation,
    OpenEnvReplayManifest,
    ReplayGroup,
)

__all__ = ["Capture", "ManifestHead", "outline", "read_capture"]

OPENING: Final = b',\n  "groups": [\n    {'
"""What stands before the first group, and nowhere else: strings hold no line break."""
ENDING: Final = b"\n    }"
ENDINGS: Final = re.compile(re.escape(ENDING))
"""Finds it twice as fast as `bytes.find`, which is slow where most is white space."""
BETWEEN: Final = b",\n    {"
"""What stands between two groups."""
CLOSING: Final = b"\n  ]\n}\n"
WHITE: Final = b" \t\r\n"


class ManifestHead(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A replay manifest without its groups."""

    schema: Literal["kiln.openenv-replay.v1"]
    client_profile: Literal["openenv-http/1.x"]
    dataset_sha256: Sha256
    protocol_error_reward: float
    max_steps: Annotated[int, Meta(ge=1, le=limits.MAX_STEPS)]
    environments: Annotated[
        list[EnvironmentInspection],
        Meta(min_length=1, max_length=limits.MAX_ENVIRONMENTS),
    ]

    def manifest(self, groups: list[ReplayGroup]) -> OpenEnvReplayManifest:
        """Return the manifest with these groups."""
        members = {name: getattr(self, name) for name in self.__struct_fields__}
        return OpenEnvReplayManifest(**members, groups=groups)


class _Members(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The members of a manifest as text."""

    schema: Raw
    client_profile: Raw
    dataset_sha256: Raw
    protocol_error_reward: Raw
    max_steps: Raw
    environments: Raw
    groups: Raw


class _GroupMembers(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The members of a group as text."""

    group_index: Raw
    environment_index: Raw
    seed: Raw
    reset_payload: Raw
    reset_observation: Raw
    candidates: Raw


class Capture:
    """A replay manifest of which the head is read.

    Attributes:
        head: All but the groups.
    """

    def __init__(self, head: ManifestHead, groups: Sequence[Any], what: str) -> None:
        self.head = head
        self._groups = groups
        self._what = what

    def __len__(self) -> int:
        return len(self._groups)

    def text(self, index: int) -> bytes:
        """Return a group as it was written."""
        return bytes(self._groups[index])

    def group(self, index: int) -> ReplayGroup:
        """Decode a group.

        Raises:
            MalformedJson: It is not strict JSON.
            InvalidRecord: It is no group; ``details`` hold the pointer.
        """
        part = Part(f"/groups/{index}", 2)
        return read_record(self.text(index), ReplayGroup, self._what, part)


def read_capture(data: bytes, what: str) -> Capture:
    """Read the head of a replay manifest and find its groups.

    Args:
        data: The file.
        what: Names it in errors.

    Raises:
        MalformedJson: It is not strict JSON.
        InvalidRecord: It is no manifest; ``details`` hold the pointer.
    """
    capture = _own_form(data, what)
    return _any_form(data, what) if capture is None else capture


def outline(group: ReplayGroup) -> ReplayGroup:
    """Return a group without what went over the wire, to keep."""
    return msgspec.structs.replace(
        group,
        reset_observation=Observation(
            observation=None, reward=None, done=group.reset_observation.done
        ),
        candidates=[
            msgspec.structs.replace(candidate, exchanges=[], final_state=UNSET)
            for candidate in group.candidates
        ],
    )


def _own_form(data: bytes, what: str) -> Capture | None:
    """Find the groups of a manifest that Kiln wrote; None for any other form."""
    opened = data.find(OPENING)
    if opened < 0 or not data.endswith(ENDING + CLOSING):
        return None
    view = memoryview(data)
    groups: list[memoryview] = []
    start, last = opened + len(OPENING) - 1, len(data) - len(CLOSING)
    endings = ENDINGS.finditer(data, start)
    while len(groups) <= limits.MAX_GROUPS:
        stop = next(endings).end()
        groups.append(view[start:stop])
        if stop == last:
            break
        if not data.startswith(BETWEEN, stop):
            return None
        start = stop + len(BETWEEN) - 1
    try:
        head = read_record(data[:opened] + b"\n}\n", ManifestHead, what)
    except KilnError:
        return None
    return Capture(head, groups, what)


def _any_form(data: bytes, what: str) -> Capture:
    try:
        members = msgspec.json.decode(data, type=_Members)
        # before a list of any elements is made, each must look like a group
        count = len(msgspec.json.decode(members.groups, type=list[_GroupMembers]))
        if 1 <= count <= limits.MAX_GROUPS and _is_whole(data, members):
            head = {n: getattr(members, n) for n in ManifestHead.__struct_fields__}
            groups = msgspec.json.decode(members.groups, type=list[Raw])
            read = read_record(encoded_again(head), ManifestHead, what)
            return Capture(read, groups, what)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    # something is wrong or odd: the plain reader says what, or that it is not
    manifest = read_record(data, OpenEnvReplayManifest, what)
    head = {n: getattr(manifest, n) for n in ManifestHead.__struct_fields__}
    texts = [encoded_again(group) for group in manifest.groups]
    return Capture(ManifestHead(**head), texts, what)


def _is_whole(data: bytes, members: _Members) -> bool:
    """Say whether all text of an object is that of its members, so none came twice."""
    names = members.__struct_fields__
    texts = [bytes(getattr(members, name)) for name in names]
    # braces, and per member two quotes, a colon and a comma but for the last
    around = 2 + sum(len(name) + 4 for name in names) - 1
    return _dense(data) == around + sum(_dense(text) for text in texts)


def _dense(data: bytes) -> int:
    """Count the bytes that are no white space."""
    pieces = range(0, len(data), limits.MIB)
    return sum(len(data[i : i + limits.MIB].translate(None, WHITE)) for i in pieces)
