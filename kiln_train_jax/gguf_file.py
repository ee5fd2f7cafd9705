"""A GGUF file as metadata and tensors, whatever model it holds.

The layout is that of the GGUF specification of ggml, versions 2 and 3, little endian:
header, typed key-value pairs, tensor descriptions, aligned data. The file is foreign:
every length is checked against what is left of it before anything is read or
allocated, so a truncated or hostile file ends in one sentence, never in a long wait.
The `gguf` package only undoes the quantisation; its own reader trusts lengths and
takes seconds for a large vocabulary.

What the keys and tensors mean is not handled here (`gguf_model.py`).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kiln_core.errors import FileUnreadable, InvalidRecord

if TYPE_CHECKING:
    from pathlib import Path

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
ALIGNMENT: Final = 32
"""Bytes, where the file names no other."""

SCALARS: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
"""Value types of fixed size by their number in the file."""
STRING: Final = 8
ARRAY: Final = 9
DIMENSIONS: Final = 4
"""Most axes of a tensor."""


class StoredTensor(NamedTuple):
    """Where one tensor lies, and how it is encoded."""

    shape: tuple[int, ...]
    """Slowest axis first, as numpy has it."""
    encoding: int
    """Number of the ggml type."""
    data: np.ndarray
    """uint8 `[rows, bytes of a row]`, a view of the mapped file."""


class GgufFile(NamedTuple):
    """An opened file; tensors stay on disk until they are read."""

    metadata: dict[str, Any]
    """Numbers, booleans, strings, and lists of those."""
    tensors: dict[str, StoredTensor]

    def dequantised(self, name: str) -> np.ndarray:
        """Return one tensor as float32.

        Raises:
            InvalidRecord: Its encoding cannot be undone.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self.tensors[name]
        kind = GGMLQuantizationType(stored.encoding)
        try:
            values: np.ndarray = dequantize(stored.data, kind)
        except NotImplementedError as error:
            raise InvalidRecord(
                f"tensor {name} is {kind.name}, which is not supported",
                hint="use a file in F32, F16, BF16, Q8_0, Q4 to Q6 or their K kinds",
            ) from error
        return np.ascontiguousarray(values.reshape(stored.shape), np.float32)


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file.

    Raises:
        FileUnreadable: It is missing or not permitted.
        InvalidRecord: It is truncated, or no GGUF file of a known version.
    """
    try:
        data = np.memmap(path, np.uint8, "r").data
    except OSError as error:
        raise FileUnreadable(f"{path.name} cannot be read", file=str(path)) from error
    except ValueError as error:  # numpy maps no empty file
        raise InvalidRecord(f"{path.name} is empty", file=str(path)) from error
    try:
        return _parse(_Cursor(data))
    except _Malformed as error:
        raise InvalidRecord(
            f"{path.name} is not a complete GGUF file: {error}", file=str(path)
        ) from error


class _Malformed(Exception):
    """Why the bytes are no GGUF file."""


class _Cursor:
    """Reads forward, and never past the end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.offset = 0

    def take(self, size: int) -> memoryview:
        """Return the next bytes.

        Raises:
            _Malformed: The file ends before.
        """
        if size > len(self.data) - self.offset:
            raise _Malformed("it ends too early")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def number(self, form: str) -> int:
        """Return the next unsigned integer, `<I` or `<Q`."""
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def text(self) -> str:
        """Return the next string.

        Raises:
            _Malformed: It is not UTF-8.
        """
        try:
            return str(self.take(self.number("<Q")), "utf-8")
        except UnicodeDecodeError as error:
            raise _Malformed("a string is not UTF-8") from error

    def value(self, kind: int) -> Any:
        """Return the next value of a type.

        Raises:
            _Malformed: There is no such type.
        """
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise _Malformed(f"value type {kind} does not exist")
        dtype = SCALARS[kind]
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def _array(self) -> list[Any]:
        """Return the next array.

        Raises:
            _Malformed: It is an array of arrays, which no model file needs.
        """
        kind, count = self.number("<I"), self.number("<Q")
        if kind in SCALARS:
            dtype = SCALARS[kind]
            values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
            return list(values.tolist())
        if kind != STRING:
            raise _Malformed(f"an array holds value type {kind}")
        if count * 8 > len(self.data) - self.offset:
            raise _Malformed("it ends too early")
        return [self.text() for _ in range(count)]


class _Description(NamedTuple):
    """What the header says of one tensor."""

    dimensions: tuple[int, ...]
    """Fastest axis first."""
    encoding: int
    offset: int
    """From the start of the data."""


def _parse(cursor: _Cursor) -> GgufFile:
    """Read the whole header, then find each tensor's bytes.

    Raises:
        _Malformed: A part of it is not as the specification says.
    """
    if bytes(cursor.take(len(MAGIC))) != MAGIC:
        raise _Malformed("it does not begin with GGUF")
    version = cursor.number("<I")
    if version not in VERSIONS:
        raise _Malformed(f"its version is {version}, known are 2 and 3")
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text()
        if key in metadata:
            raise _Malformed(f"key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.number("<I"))
    described: dict[str, _Description] = {}
    for _ in range(tensors):
        name = cursor.text()
        if name in described:
            raise _Malformed(f"tensor {name!r} occurs twice")
        described[name] = _description(cursor)
    begin = _aligned(cursor.offset, metadata.get("general.alignment", ALIGNMENT))
    return GgufFile(
        metadata,
        {name: _located(cursor, begin, name, one) for name, one in described.items()},
    )


def _description(cursor: _Cursor) -> _Description:
    """Read where and how one tensor is stored.

    Raises:
        _Malformed: It has too many axes.
    """
    axes = cursor.number("<I")
    if not 1 <= axes <= DIMENSIONS:
        raise _Malformed(f"a tensor has {axes} axes")
    dimensions = tuple(cursor.number("<Q") for _ in range(axes))
    return _Description(dimensions, cursor.number("<I"), cursor.number("<Q"))


def _aligned(offset: int, alignment: Any) -> int:
    """Return where the data begins.

    Raises:
        _Malformed: The alignment is no power of two.
    """
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Malformed(f"its alignment is {alignment!r}")
    return -(-offset // alignment) * alignment


def _located(
    cursor: _Cursor, begin: int, name: str, described: _Description
) -> StoredTensor:
    """Return one tensor as a view of the file.

    Raises:
        _Malformed: Its type is unknown, or its bytes are not all there.
    """
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    if described.encoding not in sizes:
        raise _Malformed(f"tensor {name!r} has the unknown type {described.encoding}")
    block, block_bytes = sizes[described.encoding]
    width, rows = described.dimensions[0], 1
    for size in described.dimensions[1:]:
        rows *= size
    if width % block or not width * rows:
        raise _Malformed(f"tensor {name!r} has no whole rows")
    row_bytes = width // block * block_bytes
    cursor.offset = begin + described.offset
    return StoredTensor(
        described.dimensions[::-1],
        described.encoding,
        np.frombuffer(cursor.take(rows * row_bytes), np.uint8).reshape(rows, row_bytes),
    )
