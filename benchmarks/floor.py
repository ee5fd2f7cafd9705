"""The least that verifying a bundle costs: hash, typed decode, canonical re-encode.

The types are those of the records without their own checks in Python, so that the
floor is what msgspec and SHA-256 alone take.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from kiln_core.canonical import digest
from kiln_core.manifest import OpenEnvReplayManifest
from kiln_core.records import AgenticGroup


def bare(hint: Any, known: dict[Any, Any] | None = None) -> Any:
    """Return a type with every record in it replaced by one without checks."""
    known = {} if known is None else known
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if hint not in known:
            known[hint] = _struct(hint, known)
        return known[hint]
    origin = get_origin(hint)
    if origin is None:
        return hint
    if origin is Annotated:
        inner, *metadata = get_args(hint)
        return Annotated[(bare(inner, known), *metadata)]
    parts = tuple(
        part if isinstance(part, str) else bare(part, known) for part in get_args(hint)
    )
    if origin in {Union, types.UnionType}:
        return Union[parts]  # noqa: UP007 - of a tuple
    return origin[parts]


def _struct(record: type[msgspec.Struct], known: dict[Any, Any]) -> Any:
    hints = get_type_hints(record, include_extras=True)
    config = record.__struct_config__
    fields: list[Any] = []
    for field in msgspec.structs.fields(record):
        hint = bare(hints[field.name], known)
        named = (field.name, hint)
        fields.append(named if field.required else (*named, field.default))
    return msgspec.defstruct(
        record.__name__,
        fields,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
        tag_field=config.tag_field,
        tag=config.tag,
    )


def floor_of(dataset: bytes, replay: bytes) -> Callable[[], None]:
    """Return what does the least once."""
    group = msgspec.json.Decoder(bare(AgenticGroup))
    manifest = msgspec.json.Decoder(bare(OpenEnvReplayManifest))
    encode = msgspec.json.Encoder().encode

    def once() -> None:
        digest(dataset), digest(replay)
        start = 0
        while start < len(dataset):
            stop = dataset.find(b"\n", start) + 1
            line = dataset[start:stop]
            if encode(group.decode(line)) + b"\n" != line:
                raise ValueError("not canonical")
            start = stop
        encode(manifest.decode(replay))

    return once
