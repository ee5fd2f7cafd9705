"""Action schemas of environments, compiled safely, and replies parsed into actions.

An action schema is hostile input: nothing is fetched, its size, depth and in-place
expansion are bounded, patterns run in linear time, and a diagnosis names only closed
keywords and JSON Pointers, never values. A reply is checked here before ``step``, so an
action the schema refuses is never sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from jsonschema_rs import RegexOptions, ValidationError, validator_for

from kiln_core import limits
from kiln_core.canonical import (
    JsonValue,
    canonical_bytes,
    canonical_of,
    decoded_json,
    digest_json,
    nests_deeper,
    sorted_json,
)
from kiln_core.difference import escape_token
from kiln_core.errors import InvalidActionSchema, InvalidRecord, MalformedJson
from kiln_core.schema_cost import SchemaCost

__all__ = ["ActionSchema", "InvalidAction", "parse_reply", "split_reasoning"]

NO_OUTPUT: Final = "MODEL_ACTION_NO_OUTPUT"
INVALID_ACTION: Final = "INVALID_MODEL_ACTION"
SCHEMA_FAILED: Final = "ACTION_SCHEMA_VALIDATION_FAILED"
THINK_CLOSE: Final = "</think>"

FENCE: Final = "```"
FENCE_TAGS: Final = ("json", "JSON")


class InvalidAction(Exception):
    """A reply that is no acceptable action; carries its harness error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def document(self) -> dict[str, JsonValue]:
        """Return the harness error as the trajectory retains it."""
        return {
            "openenv_harness_error": {"code": self.code, "message": self.message},
            "done": True,
        }


class _Validator(Protocol):
    def is_valid(self, instance: Any) -> bool: ...

    def iter_errors(self, instance: Any) -> Iterator[ValidationError]: ...


class ActionSchema:
    """A compiled action schema.

    Attributes:
        document: The schema as published, keys in canonical order.
        sha256: Digest of its canonical bytes.
    """

    def __init__(self, schema: JsonValue) -> None:
        """Compile.

        Raises:
            InvalidActionSchema: It is no JSON Schema, refers to anything outside
                itself, or crosses a bound of ``kiln_core.limits``.
        """
        _check_bounds(schema)
        self.document = sorted_json(schema)
        self.sha256 = digest_json(schema)
        self._cost = SchemaCost(self.document)
        self._validator = _compile(self.document)

    def check(
        self, action: dict[str, JsonValue], size_bytes: int | None = None
    ) -> None:
        """Check an action.

        Args:
            action: The action.
            size_bytes: Length of its JSON, where known: a short one is cheap to check
                whatever it holds.

        Raises:
            InvalidAction: The schema refuses it, or checking it would cost too much.
        """
        if not _is_shallow(size_bytes) and nests_deeper(
            action, limits.MAX_ACTION_DEPTH
        ):
            raise InvalidAction(SCHEMA_FAILED, "the action nests too deep")
        work = self._cost.work(action, limits.MAX_ACTION_WORK, size_bytes)
        if work > limits.MAX_ACTION_WORK:
            raise InvalidAction(
                SCHEMA_FAILED, "the action is too large and nested for its schema"
            )
        # The verdict is is_valid: building the error tree of a hostile schema can
        # take seconds and gigabytes, so a diagnosis is made only where it is cheap.
        if not self._validator.is_valid(action):
            cheap = work <= limits.MAX_DIAGNOSED_WORK
            raise InvalidAction(SCHEMA_FAILED, self._diagnosis(action, cheap=cheap))

    def accepts_all(
        self, actions: Sequence[dict[str, JsonValue]], longest_bytes: int
    ) -> bool:
        """Say whether `check` takes every action.

        Args:
            actions: The actions.
            longest_bytes: Length of the longest's JSON.
        """
        if _is_shallow(longest_bytes) and self._cost.is_small(longest_bytes):
            return all(map(self._validator.is_valid, actions))
        try:
            for action in actions:
                self.check(action)
        except InvalidAction:
            return False
        return True

    def _diagnosis(self, action: dict[str, JsonValue], *, cheap: bool) -> str:
        if not cheap:
            return "the action does not satisfy the action schema"
        issues: list[str] = []
        for error in self._validator.iter_errors(action):
            if len(issues) == limits.MAX_ACTION_ISSUES:
                issues.append("additional issues omitted")
                break
            issues.append(_issue(error))
        return "; ".join(issues)


def _is_shallow(size_bytes: int | None) -> bool:
    """Say whether JSON of so many bytes cannot nest too deep for an action."""
    return size_bytes is not None and size_bytes <= 2 * limits.MAX_ACTION_DEPTH


def split_reasoning(text: str, *, thinking: bool) -> str:
    """Return the part of an action segment that is the action.

    Args:
        text: The segment as the trajectory holds it.
        thinking: Whether reasoning precedes the action in this collection; without
            it a JSON string may hold ``</think>``.
    """
    if not thinking:
        return text
    _, closed, action = text.partition(THINK_CLOSE)
    return action if closed else ""


def parse_reply(text: str, schema: ActionSchema) -> dict[str, JsonValue]:
    """Parse the final answer of a reply into an action.

    One closed Markdown fence around it is tolerated; anything else than exactly one
    JSON object is not.

    Returns:
        The action, keys in canonical order.

    Raises:
        InvalidAction: It is blank, not one JSON object, or refused by the schema.
    """
    action: dict[str, JsonValue] = decoded_json(action_bytes(text, schema))
    return action


def action_bytes(text: str, schema: ActionSchema) -> bytes:
    """Parse the final answer of a reply into the canonical bytes of an action.

    Raises:
        InvalidAction: As `parse_reply`.
    """
    stripped = text.strip()
    if not stripped:
        raise InvalidAction(NO_OUTPUT, "the model gave no final answer")
    try:
        value, data = canonical_of(_unfenced(stripped), "the reply")
    except MalformedJson:
        raise InvalidAction(
            INVALID_ACTION, "the reply is not exactly one JSON object"
        ) from None
    if not isinstance(value, dict):
        raise InvalidAction(INVALID_ACTION, "the reply is not a JSON object")
    schema.check(value, len(data))
    return data


def _compile(schema: JsonValue) -> _Validator:
    try:
        validator: _Validator = validator_for(
            schema,
            offline=True,
            pattern_options=RegexOptions(size_limit=limits.MAX_PATTERN_BYTES),
        )
        validator.is_valid({})
    except ValidationError as error:
        invalid = _no_schema(error)
        raise invalid from error
    except Exception as error:
        # a boundary: whatever the compiler throws at hostile input means the same
        raise InvalidActionSchema(
            "the action schema cannot be compiled", reason=type(error).__name__
        ) from error
    return validator


def _no_schema(error: ValidationError) -> InvalidActionSchema:
    """Return what a schema is refused for: keyword and place, never its values."""
    keyword = _bounded(str(error.kind.name))
    pointer = _bounded(_pointer(error.instance_path))
    if keyword == "$ref":
        what = "refers to a document outside itself"
    elif keyword == "format":
        what = f"has a pattern that is none or does not run in linear time at {pointer}"
    else:
        what = f"is no valid JSON Schema at {pointer or '$'} ({keyword})"
    return InvalidActionSchema(
        f"the action schema {what}", keyword=keyword, pointer=pointer
    )


def _unfenced(text: str) -> str:
    """Return what stands in a closed fence, or the text itself.

    No regular expression: a reply of spaces would make one run for hours.
    """
    if len(text) < 2 * len(FENCE) or not (
        text.startswith(FENCE) and text.endswith(FENCE)
    ):
        return text
    inner = text[len(FENCE) : -len(FENCE)]
    for tag in FENCE_TAGS:
        if inner.startswith(tag):
            inner = inner.removeprefix(tag)
            break
    return inner.strip()


def _check_bounds(schema: JsonValue) -> None:
    if not isinstance(schema, (dict, bool)):
        raise InvalidActionSchema("the action schema is not a JSON Schema")
    if nests_deeper(schema, limits.MAX_SCHEMA_DEPTH):
        raise InvalidActionSchema(
            f"the action schema nests deeper than {limits.MAX_SCHEMA_DEPTH} levels"
        )
    try:
        size = len(canonical_bytes(schema))
    except InvalidRecord as error:
        raise InvalidActionSchema("the action schema has no JSON form") from error
    if size > limits.MAX_SCHEMA_BYTES:
        raise InvalidActionSchema(
            f"the action schema is over {limits.MAX_SCHEMA_BYTES} bytes"
        )


def _issue(error: ValidationError) -> str:
    keyword = _bounded(str(error.kind.name))
    place = _bounded(_pointer(error.instance_path) or "$")
    rule = _bounded(_pointer(error.schema_path) or "$")
    return f"{keyword} at action {place} (schema {rule})"


def _pointer(path: list[str | int]) -> str:
    return "".join(f"/{escape_token(str(token))}" for token in path)


def _bounded(text: str) -> str:
    data = text.encode()[: limits.MAX_ISSUE_BYTES]
    return data.decode(errors="ignore")
