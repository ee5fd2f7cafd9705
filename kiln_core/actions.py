"""Action schemas of environments, compiled safely, and replies parsed into actions.

An action schema is hostile input: nothing is fetched, its size, depth and in-place
expansion are bounded, patterns run in linear time, and a diagnosis names only closed
keywords and JSON Pointers, never values. A reply is checked here before ``step``, so an
action the schema refuses is never sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Protocol

from jsonschema_rs import RegexOptions, ValidationError, validator_for

from kiln_core import limits
from kiln_core.canonical import (
    JsonValue,
    canonical_bytes,
    digest_json,
    read_json,
    sorted_json,
)
from kiln_core.errors import InvalidActionSchema, MalformedJson

__all__ = ["ActionSchema", "InvalidAction", "parse_reply", "split_reasoning"]

NO_OUTPUT: Final = "MODEL_ACTION_NO_OUTPUT"
INVALID_ACTION: Final = "INVALID_MODEL_ACTION"
SCHEMA_FAILED: Final = "ACTION_SCHEMA_VALIDATION_FAILED"
THINK_CLOSE: Final = "</think>"

IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
IN_PLACE_SINGLE: Final = ("if", "then", "else", "not")
MAX_DIAGNOSED_BRANCHES: Final = 10_000
"""An error tree grows with subschemas to the power of the instance's depth."""
FENCE: Final = re.compile(r"\A```(?:json|JSON)?\s*(.*?)\s*```\Z", re.DOTALL)


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
        self.document = sorted_json(schema)
        self.sha256 = digest_json(schema)
        _check_bounds(self.document)
        self._validator = _compile(self.document)

    def check(self, action: dict[str, JsonValue]) -> None:
        """Check an action.

        Raises:
            InvalidAction: The schema refuses it.
        """
        if _depth(action) > limits.MAX_ACTION_DEPTH:
            raise InvalidAction(SCHEMA_FAILED, "the action nests too deep")
        # The verdict is is_valid: building the error tree of a hostile schema can
        # take seconds and gigabytes, so a diagnosis is made only for small schemas.
        if not self._validator.is_valid(action):
            raise InvalidAction(SCHEMA_FAILED, self._diagnosis(action))

    def _diagnosis(self, action: dict[str, JsonValue]) -> str:
        branches = _expansion(self.document)
        if branches ** _depth(action) > MAX_DIAGNOSED_BRANCHES:
            return "the action does not satisfy the action schema"
        issues: list[str] = []
        for error in self._validator.iter_errors(action):
            if len(issues) == limits.MAX_ACTION_ISSUES:
                issues.append("additional issues omitted")
                break
            issues.append(_issue(error))
        return "; ".join(issues) or "the action does not satisfy the action schema"


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
    stripped = text.strip()
    if not stripped:
        raise InvalidAction(NO_OUTPUT, "the model gave no final answer")
    fenced = FENCE.match(stripped)
    try:
        value = read_json(fenced.group(1) if fenced else stripped, "the reply")
    except MalformedJson:
        raise InvalidAction(
            INVALID_ACTION, "the reply is not exactly one JSON object"
        ) from None
    if not isinstance(value, dict):
        raise InvalidAction(INVALID_ACTION, "the reply is not a JSON object")
    schema.check(value)
    action: dict[str, JsonValue] = sorted_json(value)
    return action


def _compile(schema: JsonValue) -> _Validator:
    try:
        validator: _Validator = validator_for(
            schema,
            offline=True,
            pattern_options=RegexOptions(size_limit=limits.MIB),
        )
        validator.is_valid({})
    except Exception as error:
        # a boundary: whatever the compiler throws at hostile input means the same
        raise InvalidActionSchema(
            "the action schema cannot be compiled without fetching or guessing",
            hint="publish a self-contained JSON Schema with linear-time patterns",
            reason=type(error).__name__,
        ) from error
    return validator


def _check_bounds(schema: JsonValue) -> None:
    if not isinstance(schema, (dict, bool)):
        raise InvalidActionSchema("the action schema is not a JSON Schema")
    if len(canonical_bytes(schema)) > limits.MAX_SCHEMA_BYTES:
        raise InvalidActionSchema(
            f"the action schema is over {limits.MAX_SCHEMA_BYTES} bytes"
        )
    if _depth(schema) > limits.MAX_SCHEMA_DEPTH:
        raise InvalidActionSchema(
            f"the action schema nests deeper than {limits.MAX_SCHEMA_DEPTH} levels"
        )
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise InvalidActionSchema(
                "the action schema refers to a document outside itself"
            )
    if _expansion(schema) > limits.MAX_SCHEMA_EXPANSION:
        raise InvalidActionSchema("the action schema expands without bound")


def _depth(value: JsonValue) -> int:
    if isinstance(value, dict):
        return 1 + max((_depth(member) for member in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((_depth(member) for member in value), default=0)
    return 0


def _references(value: JsonValue) -> Iterator[str]:
    if isinstance(value, dict):
        for key, member in value.items():
            if key in {"$ref", "$dynamicRef", "$recursiveRef"} and isinstance(
                member, str
            ):
                yield member
            else:
                yield from _references(member)
    elif isinstance(value, list):
        for member in value:
            yield from _references(member)


def _expansion(schema: JsonValue) -> int:
    """Count subschemas that apply to one instance, following references in place.

    A chain of ``anyOf`` over the same reference doubles at every level, which no
    validator survives; the count is memoised, so it is linear here. The largest count
    over all subschemas is what matters, since members apply to other instances.
    """
    counts: dict[int, int] = {}
    running: set[int] = set()

    def applied(node: JsonValue) -> int:
        if not isinstance(node, dict):
            return 1
        known = counts.get(id(node))
        if known is not None:
            return known
        if id(node) in running:
            return limits.MAX_SCHEMA_EXPANSION + 1
        running.add(id(node))
        count = min(
            1 + sum(applied(part) for part in _in_place_parts(node, schema)),
            limits.MAX_SCHEMA_EXPANSION + 1,
        )
        running.discard(id(node))
        counts[id(node)] = count
        return count

    return max(applied(node) for node in _subschemas(schema))


def _in_place_parts(node: dict[str, Any], root: JsonValue) -> Iterator[JsonValue]:
    for keyword in IN_PLACE:
        parts = node.get(keyword)
        if isinstance(parts, list):
            yield from parts
    for keyword in IN_PLACE_SINGLE:
        if keyword in node:
            yield node[keyword]
    for keyword in ("$ref", "$dynamicRef"):
        reference = node.get(keyword)
        if isinstance(reference, str):
            target = _resolve(reference, root)
            if target is not None:
                yield target


def _subschemas(value: JsonValue) -> Iterator[JsonValue]:
    yield value
    if isinstance(value, dict):
        for member in value.values():
            yield from _subschemas(member)
    elif isinstance(value, list):
        for member in value:
            yield from _subschemas(member)


def _resolve(reference: str, root: JsonValue) -> JsonValue | None:
    node = root
    for token in reference.removeprefix("#").split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def _issue(error: ValidationError) -> str:
    keyword = _bounded(str(error.kind.name))
    place = _bounded(_pointer(error.instance_path) or "$")
    rule = _bounded(_pointer(error.schema_path) or "$")
    return f"{keyword} at action {place} (schema {rule})"


def _pointer(path: list[str | int]) -> str:
    return "".join(f"/{token}" for token in path)


def _bounded(text: str) -> str:
    data = text.encode()[: limits.MAX_ISSUE_BYTES]
    return data.decode(errors="ignore")
