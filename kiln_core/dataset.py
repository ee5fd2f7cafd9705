"""Reading a dataset: one canonical group a line, and where a file went wrong.

A line is decoded, encoded again and compared, so a duplicate key, a reordered field or
a float that is not in shortest form can never pass. Opening files is not done here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

import msgspec
from msgspec import UnsetType

from kiln_core.canonical import compact
from kiln_core.errors import InvalidBundle
from kiln_core.records import AgenticGroup

__all__ = ["fail_in", "read_groups"]

MAX_SHOWN: Final = 300
"""Characters of an expected or found value in an error."""


def read_groups(
    dataset: bytes, file: str = "openenv.rollouts.jsonl"
) -> Iterator[AgenticGroup]:
    """Yield the groups of a dataset, each from one canonical line.

    Args:
        dataset: The file.
        file: Its name, for errors.

    Raises:
        InvalidBundle: A line is blank, unended, no group, or not canonical.
    """
    start = number = 0
    while start < len(dataset):
        number += 1
        stop = dataset.find(b"\n", start) + 1 or len(dataset)
        yield _group(dataset[start:stop], number, file)
        start = stop


def _group(line: bytes, number: int, file: str) -> AgenticGroup:
    fail = fail_in(file, number)
    if not line.endswith(b"\n"):
        fail("dataset_canonical", "", "the line is not ended", "a line feed", "none")
    try:
        line.decode()
        group = msgspec.json.decode(line, type=AgenticGroup)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidBundle(
            f"{file} line {number} is not a group of rollouts: {error}",
            check="dataset_record",
            file=file,
            line=number,
        ) from error
    again = compact(group) + b"\n"
    if again != line:
        place = next(
            (i for i, (a, b) in enumerate(zip(again, line, strict=False)) if a != b),
            min(len(again), len(line)),
        )
        fail(
            "dataset_canonical",
            "",
            f"the line is not canonical at byte {place}",
            again[place : place + 40],
            line[place : place + 40],
        )
    return group


def fail_in(file: str, line: int | None = None) -> Callable[..., NoReturn]:
    """Return the callback that raises `InvalidBundle` for a place in a file.

    Args:
        file: Its name.
        line: 1-based line of the dataset, None for a single document.
    """
    where = file if line is None else f"{file} line {line}"

    def fail(
        check: str, pointer: str, message: str, expected: Any, found: Any
    ) -> NoReturn:
        raise InvalidBundle(
            f"{where}{' at ' + pointer if pointer else ''}: {message} "
            f"(expected {_shown(expected)}, found {_shown(found)})",
            check=check,
            file=file,
            line=line,
            pointer=pointer,
            expected=_shown(expected),
            found=_shown(found),
        )

    return fail


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, UnsetType):
        return "absent"
    if isinstance(value, bytes):
        text = value.decode(errors="replace")
    elif isinstance(value, str):
        text = value
    else:
        text = compact(value).decode()
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
