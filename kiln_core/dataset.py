"""Reading a dataset: one canonical group a line, and where a file went wrong.

A line is decoded, encoded again and compared, so a duplicate key, a reordered field or
a float that is not in shortest form can never pass. Opening files is not done here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NoReturn

import msgspec
from msgspec import UNSET, UnsetType

from kiln_core.canonical import (
    compact,
    encoded_again,
    lines_again,
    printable,
    same_member,
    split_path,
)
from kiln_core.errors import InvalidBundle, InvalidRecord, MalformedJson
from kiln_core.receipt import OpenEnvRolloutSummary
from kiln_core.records import AgenticGroup
from kiln_core.structure import check_structure
from kiln_core.trace import RolloutTrace, SamplingTransform

__all__ = ["TraceLedger", "fail_in", "read_groups"]

MAX_SHOWN: Final = 300
"""Characters of an expected or found value in an error."""


def read_groups(
    dataset: bytes | Iterable[bytes], file: str = "openenv.rollouts.jsonl"
) -> Iterator[AgenticGroup]:
    """Yield the groups of a dataset, each from one canonical line.

    Args:
        dataset: The file, whole or in pieces.
        file: Its name, for errors.

    Raises:
        InvalidBundle: A line is blank, unended, no group, or not canonical.
    """
    pieces = (dataset,) if isinstance(dataset, bytes) else dataset
    for number, line in enumerate(_lines(pieces), 1):
        yield _group(line, number, file)


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield each line with its line feed; the last may have none."""
    begun: list[bytes] = []
    for piece in pieces:
        start = 0
        while stop := piece.find(b"\n", start) + 1:
            begun.append(piece[start:stop])
            yield b"".join(begun)
            begun.clear()
            start = stop
        if start < len(piece):
            begun.append(piece[start:])
    if begun:
        yield b"".join(begun)


class TraceLedger:
    """What the traces of a dataset say together.

    A collection has one tokenizer, one sampling transform, and one guide per
    environment, so that every trace must repeat them.

    Attributes:
        retried: Rollouts that needed more than one attempt.
        traced: Rollouts that carry token ids.
    """

    def __init__(self, summary: OpenEnvRolloutSummary) -> None:
        self.retried = 0
        self.traced = 0
        self._agreed: set[Any] = set()
        """Guides, tokenizers and transforms that were found to agree."""
        self._known: dict[str, Any] = {
            "sampling/temperature": summary.temperature,
            "sampling/max_tokens": summary.max_action_tokens,
        }

    def add(
        self, environment_index: int, group: AgenticGroup, fail: Callable[..., Any]
    ) -> None:
        """Take the traces of the next group.

        Args:
            environment_index: Where the group was played.
            group: Its line.
            fail: Called for the first contradiction.
        """
        traces = [
            (index, one.trace)
            for index, one in enumerate(group.completions)
            if not isinstance(one.trace, UnsetType)
        ]
        tokens = [trace.tokens for _, trace in traces if trace.tokens is not None]
        facts: set[Any] = {(environment_index, one.guide_sha256) for _, one in traces}
        facts.update(one.tokenizer_sha256 for one in tokens)
        facts.update(lines_again([one.sampling for one in tokens], free=False))
        # nearly every group says what others said already
        if not facts <= self._agreed:
            for index, trace in traces:
                at = f"/completions/{index}/trace"
                self._check_trace(environment_index, trace, at, fail)
            self._agreed |= facts
        self.retried += sum(trace.attempt > 0 for _, trace in traces)
        self.traced += len(tokens)
        if bool(tokens) != (group.prompt_token_ids is not UNSET):
            fail(
                "dataset_trace",
                "/prompt_token_ids",
                "they stand exactly where a rollout has token ids",
                "present" if tokens else "absent",
                "absent" if tokens else "present",
            )

    def _check_trace(
        self,
        environment_index: int,
        trace: RolloutTrace,
        at: str,
        fail: Callable[..., Any],
    ) -> None:
        guide = f"guide of environment {environment_index}"
        self._check(guide, trace.guide_sha256, f"{at}/guide_sha256", fail)
        tokens = trace.tokens
        if tokens is None:
            return
        place = "tokenizer_sha256"
        self._check(place, tokens.tokenizer_sha256, f"{at}/tokens/{place}", fail)
        for name in SamplingTransform.__struct_fields__:
            place = f"sampling/{name}"
            found = getattr(tokens.sampling, name)
            self._check(place, found, f"{at}/tokens/{place}", fail)

    def _check(self, fact: str, found: Any, at: str, fail: Callable[..., Any]) -> None:
        known = self._known.setdefault(fact, found)
        if known is not found and not same_member(known, found):
            fail(
                "dataset_trace",
                at,
                "the rest of the collection has another",
                known,
                found,
            )


def _group(line: bytes, number: int, file: str) -> AgenticGroup:
    fail = fail_in(file, number)
    if not line.endswith(b"\n"):
        fail("dataset_canonical", "", "the line is not ended", "a line feed", "none")
    try:
        check_structure(line, file)
        group = msgspec.json.decode(line, type=AgenticGroup)
        again = encoded_again(group)
    except (
        *(msgspec.DecodeError, UnicodeError, RecursionError),
        *(InvalidRecord, MalformedJson),
    ) as error:
        reason, pointer = split_path(str(error))
        raise InvalidBundle(
            f"{file} line {number} is not a group of rollouts: {printable(reason)}",
            check="dataset_record",
            file=file,
            line=number,
            pointer=pointer,
        ) from error
    # all strings are decoded, so bytes that are no text are refused above
    if len(line) != len(again) + 1 or not line.startswith(again):
        again += b"\n"
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
