"""JSON Schema words that narrowing understands, and how schemas combine.

Everything here looks at schemas as data: which keywords exist, which types a schema
implies, where a reference leads, what two schemas mean together, and whether two can be
told apart. What would need more than that is refused.
"""

from __future__ import annotations

from typing import Any, Final

from kiln_core.canonical import canonical_bytes
from kiln_train_jax.schema_bounds import Schema

ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated"}
    | {"readOnly", "writeOnly", "$comment", "$schema", "$id", "$defs", "definitions"}
    | {"discriminator", "contentMediaType", "contentEncoding", "contentSchema"}
)
OBJECT_WORDS: Final = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties"}
    | {"minProperties", "maxProperties"}
)
ARRAY_WORDS: Final = frozenset(
    {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}
)
STRING_WORDS: Final = frozenset({"minLength", "maxLength", "pattern", "format"})
NUMBER_WORDS: Final = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
WORDS_OF_TYPE: Final = {
    "object": OBJECT_WORDS,
    "array": ARRAY_WORDS,
    "string": STRING_WORDS,
    "number": NUMBER_WORDS,
    "integer": NUMBER_WORDS,
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
GENERAL_WORDS: Final = frozenset(
    {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
)
ANY_TYPES: Final = ("boolean", "integer", "number", "string", "null")
"""What an unconstrained value is narrowed to: the scalars."""


class CannotNarrow(Exception):
    """A schema that has no faithful finite narrowing; the text says why."""


def refuse_unknown(node: Schema) -> None:
    """Refuse keywords outside the ones this module gives a meaning to.

    Raises:
        CannotNarrow: There is one.
    """
    known = ANNOTATIONS | GENERAL_WORDS | OBJECT_WORDS | ARRAY_WORDS
    known |= STRING_WORDS | NUMBER_WORDS
    for word in sorted(node):
        if word not in known and not word.startswith("x-"):
            raise CannotNarrow(f"keyword {word!r} is not supported")


def types_of(node: Schema) -> tuple[str, ...]:
    """Return the JSON types to offer: the named ones, or those its keywords imply."""
    named = node.get("type")
    if isinstance(named, list):
        return tuple(named)
    if isinstance(named, str):
        return (named,)
    implied = tuple(
        kind
        for kind in ("object", "array", "string", "number")
        if WORDS_OF_TYPE[kind] & set(node)
    )
    return implied or ANY_TYPES


def assertions(node: Schema, *, but: str) -> Schema:
    """Return the members of a schema that constrain values, one left out."""
    return {
        word: part for word, part in node.items() if word not in ANNOTATIONS | {but}
    }


def merged(left: Any, right: Any) -> Any:
    """Return a schema that means both, where that is a union of keywords.

    Raises:
        CannotNarrow: Both constrain the same thing.
    """
    if left is False or right is False:
        return False
    if left is True or right is True:
        return right if left is True else left
    declared = [side.get("properties", {}).keys() for side in (left, right)]
    closed = any(
        side.get("additionalProperties", True) is not True for side in (left, right)
    )
    if closed and all(declared) and declared[0] != declared[1]:
        # Each side alone would forbid what only the other declares.
        raise CannotNarrow("a closed object is combined with other properties")
    both = {**left}
    for word, part in right.items():
        if word in ANNOTATIONS or both.get(word, part) == part:
            both.setdefault(word, part)
        elif word == "required":
            both[word] = sorted({*both[word], *part})
        elif word == "properties" and not both[word].keys() & part.keys():
            both[word] = {**both[word], **part}
        else:
            raise CannotNarrow(f"schemas to be combined both say {word!r}")
    return both


def resolve(reference: str, document: Any) -> Any:
    """Follow a local reference.

    Raises:
        CannotNarrow: It is not a pointer into the document.
    """
    node = document
    if not reference.startswith("#"):
        raise CannotNarrow("a reference leads outside the schema")
    for token in reference.removeprefix("#").split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict) and key in node:
            node = node[key]
        else:
            raise CannotNarrow("a reference leads nowhere")
    return node


def disjoint(left: Schema, right: Schema) -> bool:
    """Tell whether types or a shared constant member keep two schemas apart."""
    kinds = [set(types_of(side)) if "type" in side else None for side in (left, right)]
    if kinds[0] is not None and kinds[1] is not None:
        numeric = {"integer", "number"}
        overlap = kinds[0] & kinds[1] or (kinds[0] & numeric and kinds[1] & numeric)
        if not overlap:
            return True
    shared = set(left.get("required", ())) & set(right.get("required", ()))
    if kinds != [{"object"}, {"object"}]:
        return False
    return any(
        _constants(left, name).isdisjoint(_constants(right, name))
        for name in shared
        if _constants(left, name) and _constants(right, name)
    )


def _constants(node: Schema, name: str) -> set[bytes]:
    """Return the texts a member may have, empty when they are not enumerated."""
    member = node.get("properties", {}).get(name)
    if not isinstance(member, dict):
        return set()
    values = [member["const"]] if "const" in member else member.get("enum", [])
    # Equal numbers are equal values in JSON Schema, so 1 and 1.0 must not differ.
    return {
        canonical_bytes(float(value) if isinstance(value, int) else value)
        for value in values
    }
