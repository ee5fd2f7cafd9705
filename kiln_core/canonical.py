"""The one JSON writer, the one strict reader, and the digest of canonical bytes.

Canonical JSON of Kiln (``kiln-canonical-v1``): UTF-8, no white space, object keys of
free JSON sorted by their UTF-8 bytes, records in declared field order, integers exact,
floats in shortest round-trip form with a fraction or an exponent (``1.0``, ``1e16``,
``1e-7``), only the mandatory escapes. ``1``, ``1.0`` and ``true`` are three values,
and ``-0.0`` is not ``0.0``.

The reader refuses what other readers take in silence: NaN and infinities (also
``1e999``), duplicate keys, lone surrogates, invalid UTF-8, trailing data, a byte order
mark, and nesting beyond ``limits.MAX_JSON_DEPTH`` (RFC 8259 sections 4, 6, 8, 9).

Reading and writing of files is not done here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from kiln_core import limits
from kiln_core.errors import InvalidRecord, MalformedJson

__all__ = [
    "JsonValue",
    "Record",
    "Sha256",
    "compact",
    "digest",
    "digest_json",
    "first_difference",
    "pretty",
    "read_json",
    "read_record",
    "same_json",
    "sorted_json",
]

JsonValue: TypeAlias = Any
"""None, bool, int, float, str, list or dict with string keys."""

Sha256: TypeAlias = Annotated[
    str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$", max_length=71)
]
"""``sha256:`` and 64 lower-case hexadecimal digits."""


END: Final = r"(?!\n)$"
"""Ends a pattern at the end of the text; Python's ``$`` also stands before a last
line feed. Published schemas, whose ``$`` does not, say ``$``."""


class Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=True
):
    """Base of every record that Kiln authors: closed, immutable, in declared order."""


RecordT = TypeVar("RecordT", bound=msgspec.Struct)

MAX_QUOTED: Final = 300
"""Characters of a peer's text in a message of ours."""
TOO_DEEP: Final = b"\n" + b"  " * (limits.MAX_ARTIFACT_DEPTH + 1)
"""An indent that only a document beyond the bound has."""

_records = msgspec.json.Encoder()
_values = msgspec.json.Encoder(order="sorted")
_finite_only = json.JSONEncoder(allow_nan=False, check_circular=False)


def compact(record: Any) -> bytes:
    """Encode a record in declared field order, without white space.

    Free JSON inside a record must have come through `sorted_json` or `read_json`
    followed by it, so that its keys are in order already.

    Raises:
        InvalidRecord: The value holds a number that is not finite, an integer beyond
            what JSON can carry exactly, or a lone surrogate.
    """
    return _encode(_records, record)


def encoded_again(record: msgspec.Struct) -> bytes:
    """Encode a record that was decoded, which therefore holds only what JSON can.

    Raises:
        InvalidRecord: It nests too deep to be encoded.
    """
    try:
        return _records.encode(record)
    except RecursionError as error:
        raise InvalidRecord("value nests too deep") from error


def pretty(record: Any) -> bytes:
    """Encode a record for people: two spaces of indent and a final newline.

    Raises:
        InvalidRecord: As `compact`.
    """
    return msgspec.json.format(compact(record), indent=2) + b"\n"


def digest(data: bytes) -> Sha256:
    """Return ``sha256:`` and the hexadecimal SHA-256 (FIPS 180-4) of ``data``."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def canonical_bytes(value: JsonValue) -> bytes:
    """Encode free JSON with sorted keys.

    Raises:
        InvalidRecord: As `compact`.
    """
    return _encode(_values, value)


def digest_json(value: JsonValue) -> Sha256:
    """Return the digest of the canonical bytes of free JSON.

    Raises:
        InvalidRecord: As `compact`.
    """
    return digest(canonical_bytes(value))


def sorted_json(value: JsonValue) -> JsonValue:
    """Return free JSON with the keys of every object in canonical order.

    Raises:
        InvalidRecord: As `compact`.
    """
    try:
        return msgspec.json.decode(canonical_bytes(value))
    except msgspec.DecodeError as error:
        # a sign counts as a digit when reading, not when writing
        raise InvalidRecord(f"value has no JSON form: {_reason(error)}") from error


def same_json(left: JsonValue, right: JsonValue) -> bool:
    """Say whether two values have the same canonical bytes."""
    return canonical_bytes(left) == canonical_bytes(right)


def same_member(left: Any, right: Any) -> bool:
    """Say whether two record members have the same bytes, or are both absent."""
    if left is msgspec.UNSET or right is msgspec.UNSET:
        return left is right
    # bytes decide only where equal values may differ in them: 0.0 and -0.0, 1 and true
    if type(left) is type(right) and isinstance(left, (str, int)):
        return bool(left == right)
    return compact(left) == compact(right)


def read_json(
    data: bytes | str, what: str, max_depth: int = limits.MAX_JSON_DEPTH
) -> JsonValue:
    """Decode exactly one strict JSON document.

    Args:
        data: UTF-8 bytes or text.
        what: Names the document in the error.
        max_depth: Objects and arrays that may stand in each other.

    Raises:
        MalformedJson: The document is not strict JSON or nests too deep.
    """
    try:
        value = msgspec.json.decode(data)
        _keys_only.decode(data if isinstance(data, str) else data.decode())
    except (msgspec.DecodeError, UnicodeError, ValueError, RecursionError) as error:
        raise MalformedJson(f"{what} is not strict JSON: {_reason(error)}") from error
    if nests_deeper(value, max_depth):
        raise MalformedJson(
            f"{what} nests deeper than {max_depth} levels", limit=max_depth
        )
    return value


def read_record(
    data: bytes, record_type: type[RecordT], what: str, **details: Any
) -> RecordT:
    """Decode a strict JSON document into one of our records.

    Args:
        data: The document, compact or pretty.
        record_type: The struct it must be.
        what: Names the document in the error.
        **details: More facts for the error, such as ``file``.

    Raises:
        MalformedJson: The document is not strict JSON.
        InvalidRecord: It is not such a record; ``details`` hold the pointer.
    """
    if not _is_own_encoding(data):
        read_json(data, what, limits.MAX_ARTIFACT_DEPTH)
    try:
        return msgspec.json.decode(data, type=record_type)
    except msgspec.ValidationError as error:
        invalid = _not_a_record(error, what, details)
        raise invalid from error


def convert_record(value: JsonValue, record_type: type[RecordT], what: str) -> RecordT:
    """Turn decoded JSON into one of our records.

    Raises:
        InvalidRecord: It is not such a record; ``details`` hold the pointer.
    """
    try:
        return msgspec.convert(value, record_type)
    except msgspec.ValidationError as error:
        invalid = _not_a_record(error, what, {})
        raise invalid from error


def split_path(message: str) -> tuple[str, str]:
    """Split a msgspec message into its reason and the JSON Pointer (RFC 6901).

    Where msgspec writes ``[...]`` for any member of an object, so does the pointer.
    """
    # the last one: a message may quote an unknown key that looks like a path
    start = message.rfind(" - at `")
    match = re.fullmatch(r" - at `(?:key in )?\$(.*)`", message[start:], re.DOTALL)
    if start < 0 or match is None:
        return message, ""
    tokens = re.findall(r"\.([^.\[\]]+)|\[([^\]]*)\]", match.group(1))
    pointer = "".join("/" + (name or index) for name, index in tokens)
    return message[:start], pointer


def total(values: Iterable[float]) -> float:
    """Add floats left to right in 64 bits.

    The built-in ``sum`` compensates rounding from Python 3.12 on, so a return that one
    version recorded another could not recompute.
    """
    result = 0.0
    for value in values:
        result += value
    return result


def first_difference(left: JsonValue, right: JsonValue) -> str | None:
    """Return the JSON Pointer of the first difference, or None where there is none.

    Objects are walked in sorted key order, arrays by index; a missing member and a
    different length count at the member that is missing.
    """
    # most values are equal, and one comparison of bytes is far cheaper than a walk
    return None if same_json(left, right) else next(differences(left, right), "")


def differences(left: JsonValue, right: JsonValue, at: str = "") -> Iterator[str]:
    """Yield the JSON Pointer of every place where two values differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        yield from _member_differences(left, right, at)
    elif isinstance(left, list) and isinstance(right, list):
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            yield from differences(one, other, f"{at}/{index}")
        if len(left) != len(right):
            yield f"{at}/{min(len(left), len(right))}"
    elif not same_json(left, right):
        yield at


def _member_differences(
    left: dict[str, JsonValue], right: dict[str, JsonValue], at: str
) -> Iterator[str]:
    for key in sorted(left.keys() | right.keys()):
        place = f"{at}/{escape_token(key)}"
        if key in left and key in right:
            yield from differences(left[key], right[key], place)
        else:
            yield place


def escape_token(key: str) -> str:
    """Escape one reference token of a JSON Pointer (RFC 6901 section 3)."""
    return key.replace("~", "~0").replace("/", "~1")


def _distinct_keys(pairs: list[tuple[str, JsonValue]]) -> None:
    if len(dict(pairs)) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {key!r}")


_keys_only = json.JSONDecoder(object_pairs_hook=_distinct_keys)


def _encode(encoder: msgspec.json.Encoder, value: Any) -> bytes:
    try:
        data = encoder.encode(value)
    except (ValueError, OverflowError, RecursionError, TypeError) as error:
        raise InvalidRecord(f"value has no JSON form: {_reason(error)}") from error
    # msgspec writes NaN and infinities as null: only a value that seems to hold a null
    # can be affected, so the second pass is skipped for all others.
    if b"null" in data and _has_non_finite(value):
        raise InvalidRecord("value holds a number that is not finite")
    return data


def _has_non_finite(value: Any) -> bool:
    try:
        _finite_only.encode(msgspec.to_builtins(value))
    except ValueError:
        return True
    return False


def _is_own_encoding(data: bytes) -> bool:
    """Say whether re-encoding gives the same bytes, so that no key came twice."""
    try:
        value = msgspec.json.decode(data)
        again = _records.encode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    if data in (again, again + b"\n"):
        return not nests_deeper(value, limits.MAX_ARTIFACT_DEPTH)
    # strings hold no line break, so such an indent is nesting
    own = data == msgspec.json.format(again, indent=2) + b"\n"
    return own and TOO_DEEP not in data


def nests_deeper(value: JsonValue, levels: int) -> bool:
    """Say whether more than ``levels`` objects and arrays stand in each other."""
    if isinstance(value, dict):
        members: Any = value.values()
    elif isinstance(value, list):
        members = value
    else:
        return False
    return levels == 0 or any(nests_deeper(member, levels - 1) for member in members)


def printable(text: str, limit: int = MAX_QUOTED) -> str:
    """Return text of a peer as one short line that is safe to show."""
    shown = "".join(
        char if char.isprintable() else ascii(char)[1:-1] for char in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[:limit] + "..."


def _not_a_record(
    error: msgspec.ValidationError, what: str, details: dict[str, Any]
) -> InvalidRecord:
    reason, pointer = split_path(str(error))
    return InvalidRecord(
        f"{what} is invalid at {pointer or 'its root'}: {printable(reason)}",
        pointer=pointer,
        **details,
    )


def _reason(error: Exception) -> str:
    return printable(str(error) or type(error).__name__)
