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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from kiln_core import limits
from kiln_core.errors import InvalidRecord, MalformedJson
from kiln_core.structure import check_structure

__all__ = [
    "JsonValue",
    "Record",
    "Sha256",
    "compact",
    "digest",
    "digest_json",
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


class Part(msgspec.Struct, frozen=True):
    """Where a piece of text stands in the document it was taken from."""

    pointer: str = ""
    """JSON Pointer (RFC 6901) of the piece."""
    depth: int = 0
    """Objects and arrays around it, each of which indents it by two spaces."""


RecordT = TypeVar("RecordT", bound=msgspec.Struct)

MAX_QUOTED: Final = 300
"""Characters of a peer's text in a message of ours."""
TOO_DEEP: Final = b"\n" + b"  " * (limits.MAX_ARTIFACT_DEPTH + 1)
"""An indent that only a document beyond the bound has."""
DEEP: Final = b" " * (len(TOO_DEEP) // 8 - 1)
"""What it leaves of every eighth byte, which is faster to look for."""


WHITE: Final = b" \t\n\r"
"""White space of JSON (RFC 8259 section 2)."""

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


def encoded_again(record: Any) -> bytes:
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


class Measured:
    """Bytes that pass by, counted and digested.

    Attributes:
        size_bytes: How many there were so far.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.size_bytes = 0
        self._chunks = chunks
        self._hash = hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self.size_bytes += len(chunk)
            self._hash.update(chunk)
            yield chunk

    @property
    def sha256(self) -> Sha256:
        """The digest so far."""
        return "sha256:" + self._hash.hexdigest()


def canonical_bytes(value: JsonValue) -> bytes:
    """Encode free JSON with sorted keys.

    Raises:
        InvalidRecord: As `compact`.
    """
    return _encode(_values, value)


def decoded_bytes(value: JsonValue) -> bytes:
    """Encode free JSON with sorted keys that was decoded, so holds only what JSON can.

    Raises:
        InvalidRecord: It nests too deep to be encoded.
    """
    return lines_again([value], free=True)[0]


def lines_again(values: Sequence[Any], *, free: bool) -> list[bytes]:
    """Encode several values that were decoded, in one pass.

    Args:
        values: Records, or free JSON.
        free: Whether keys are sorted, as `decoded_bytes` does.

    Raises:
        InvalidRecord: One nests too deep to be encoded.
    """
    encoder = _values if free else _records
    try:
        # strings hold no line break, it is escaped
        return encoder.encode_lines(values).splitlines()
    except RecursionError as error:
        raise InvalidRecord("value nests too deep") from error


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
    return decoded_json(canonical_bytes(value))


def decoded_json(data: bytes) -> JsonValue:
    """Decode canonical bytes of our own.

    Raises:
        InvalidRecord: A number in them has more digits than can be read.
    """
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        # a sign counts as a digit when reading, not when writing
        raise InvalidRecord(f"value has no JSON form: {_reason(error)}") from error


def same_json(left: JsonValue, right: JsonValue) -> bool:
    """Say whether two values have the same canonical bytes."""
    if _same_scalar(left, right):
        return True
    return canonical_bytes(left) == canonical_bytes(right)


def same_member(left: Any, right: Any) -> bool:
    """Say whether two record members have the same bytes, or are both absent."""
    if left is msgspec.UNSET or right is msgspec.UNSET:
        return left is right
    return _same_scalar(left, right) or compact(left) == compact(right)


def _same_scalar(left: Any, right: Any) -> bool:
    """Say whether two values are surely the same without encoding them.

    Bytes decide where equal values may differ in them: 0.0 and -0.0, 1 and true.
    """
    if type(left) is not type(right) or left != right:
        return False
    return isinstance(left, (str, int)) or (isinstance(left, float) and left != 0)


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
        raw = data.encode() if isinstance(data, str) else data
        value = msgspec.json.decode(raw)
        own = _records.encode(value) == raw
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedJson(f"{what} is not strict JSON: {_reason(error)}") from error
    return _strict(value, raw, what, max_depth, own=own)


def _strict(
    value: JsonValue,
    raw: bytes,
    what: str,
    max_depth: int = limits.MAX_JSON_DEPTH,
    *,
    own: bool,
) -> JsonValue:
    """Return a decoded document in which no key comes twice and nothing is too deep.

    Args:
        value: The document, decoded.
        raw: Its bytes.
        what: Names it in the error.
        max_depth: Objects and arrays that may stand in each other.
        own: Whether a writer gave it back byte for byte: then no key came twice.

    Raises:
        MalformedJson: It is not strict.
    """
    try:
        if not own:
            _keys_only.decode(raw.decode())
    except (UnicodeError, ValueError, RecursionError) as error:
        raise MalformedJson(f"{what} is not strict JSON: {_reason(error)}") from error
    if may_nest_deeper(raw, max_depth) and nests_deeper(value, max_depth):
        raise MalformedJson(
            f"{what} nests deeper than {max_depth} levels", limit=max_depth
        )
    return value


def canonical_of(text: str, what: str) -> tuple[JsonValue, bytes]:
    """Decode one strict JSON document; return its value and its canonical bytes.

    Raises:
        MalformedJson: As `read_json`.
    """
    try:
        raw = text.encode()
        value = msgspec.json.decode(raw)
        data = _values.encode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedJson(f"{what} is not strict JSON: {_reason(error)}") from error
    # most replies are canonical but for white space, in which no key comes twice
    own = data == raw or (b" " not in data and raw.translate(None, WHITE) == data)
    return _strict(value, raw, what, own=own), data


def read_record(
    data: bytes,
    record_type: type[RecordT],
    what: str,
    part: Part | None = None,
    **details: Any,
) -> RecordT:
    """Decode a strict JSON document into one of our records.

    Args:
        data: The document, compact or pretty.
        record_type: The struct it must be.
        what: Names the document in the error.
        part: Where the data stands in a larger document.
        **details: More facts for the error, such as ``file``.

    Raises:
        MalformedJson: The document is not strict JSON, or too large in structure.
        InvalidRecord: It is not such a record; ``details`` hold the pointer.
    """
    part = part or Part()
    check_structure(data, what)
    depth = limits.MAX_ARTIFACT_DEPTH - part.depth
    try:
        record = msgspec.json.decode(data, type=record_type)
        own = _is_own_encoding(data, record, part)
    except msgspec.ValidationError as error:
        read_json(data, what, depth)
        invalid = _not_a_record(error, what, details, part.pointer)
        raise invalid from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedJson(f"{what} is not strict JSON: {_reason(error)}") from error
    if not own:
        read_json(data, what, depth)
    return record


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
    if b"null" in data and _has_non_finite(value, data):
        raise InvalidRecord("value holds a number that is not finite")
    return data


def _has_non_finite(value: Any, data: bytes) -> bool:
    """Say whether a number of a value became a null in its encoding."""
    plain = msgspec.to_builtins(value)
    # where nothing became another value, nothing became null, and that is quick to see
    with suppress(msgspec.DecodeError):
        if msgspec.json.decode(data) == plain:
            return False
    try:
        _finite_only.encode(plain)
    except ValueError:
        return True
    return False


def _is_own_encoding(data: bytes, record: msgspec.Struct, part: Part) -> bool:
    """Say whether re-encoding gives the same bytes, so that no key came twice."""
    again = _records.encode(record)
    if len(data) <= len(again) + 1:
        return data in {again, again + b"\n"} and not may_nest_deeper(
            data, limits.MAX_JSON_DEPTH
        )
    # strings hold no line break, so such an indent is nesting
    if DEEP in data[::8] and TOO_DEEP in data:
        return False
    depth = part.depth
    if not depth:
        return data.removesuffix(b"\n") == msgspec.json.format(again, indent=2)
    # written inside as many arrays, it has the same indent as in its document
    around = msgspec.json.format(b"[" * depth + again + b"]" * depth, indent=2)
    start, stop = around.index(b"{"), around.rindex(b"}") + 1
    return len(data) == stop - start and around.startswith(data, start)


def nests_deeper(value: JsonValue, levels: int) -> bool:
    """Say whether more than ``levels`` objects and arrays stand in each other."""
    if isinstance(value, dict):
        members: Any = value.values()
    elif isinstance(value, list):
        members = value
    else:
        return False
    if levels == 0:
        return True
    for member in members:
        # a call per scalar would be most of the work
        if isinstance(member, (dict, list)) and nests_deeper(member, levels - 1):
            return True
    return False


def may_nest_deeper(document: bytes, levels: int) -> bool:
    """Say whether a document has enough brackets to nest beyond ``levels``."""
    return document.count(b"{") + document.count(b"[") > levels


def printable(text: str, limit: int = MAX_QUOTED) -> str:
    """Return text of a peer as one short line that is safe to show."""
    shown = "".join(
        char if char.isprintable() else ascii(char)[1:-1] for char in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[:limit] + "..."


def _not_a_record(
    error: msgspec.ValidationError, what: str, details: dict[str, Any], at: str = ""
) -> InvalidRecord:
    reason, pointer = split_path(str(error))
    pointer = at + pointer
    return InvalidRecord(
        f"{what} is invalid at {pointer or 'its root'}: {printable(reason)}",
        pointer=pointer,
        **details,
    )


def _reason(error: Exception) -> str:
    return printable(str(error) or type(error).__name__)
