"""An action schema narrowed to a finite language: valid for sure, ended for sure.

A grammar that allows everything a schema allows lets a model talk for ever: strings,
numbers and open objects have no end. This module rewrites a schema into a smaller one
whose every value is a value of the original, and whose longest text is known:

* references are followed in place, recursion is cut where it nests too deep;
* an object is closed: its declared properties, the optional ones optional, nothing
  else; only the SDK's inherited `metadata` is dropped. An object that declares nothing
  keeps at most one entry with a short key (two entries might repeat a key);
* strings and arrays are capped, integers bounded, numbers bounded and decimal;
* alternatives that cannot be reached are dropped; `oneOf` becomes `anyOf` only where
  its branches exclude each other.

A keyword whose meaning would be lost is refused by `CannotNarrow`, never ignored.
The caps come from the bytes that are available, widest first; a token is at least one
byte, so bytes bound tokens for every vocabulary. No grammar is compiled here.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jsonschema_rs

from kiln_core import limits
from kiln_core.canonical import canonical_bytes, sorted_json
from kiln_train_jax.schema_bounds import (
    FORMAT_CHARACTERS,
    KEY_CHARACTERS,
    Schema,
    longest,
    number,
)
from kiln_train_jax.schema_words import (
    CannotNarrow,
    assertions,
    disjoint,
    merged,
    refuse_unknown,
    resolve,
    types_of,
)

KEY_PATTERN: Final = f"^[A-Za-z_][A-Za-z0-9_]{{0,{KEY_CHARACTERS - 1}}}$"
MAX_NESTING: Final = 12
MAX_NODES: Final = 4_000

FORMATS: Final = frozenset(FORMAT_CHARACTERS) | {"duration", "email", "hostname", "uri"}
PATTERN_CHARACTERS: Final = 32
"""Room a pattern gets even where the caps are tighter."""


class Caps(NamedTuple):
    """How much room open-ended parts get."""

    characters: int
    """Longest free string."""
    items: int
    """Most array items beyond the required ones."""
    recursion: int
    """How often one reference may occur inside itself."""


LADDER: Final = (
    Caps(4096, 64, 3),
    Caps(1024, 32, 3),
    Caps(256, 16, 2),
    Caps(128, 8, 2),
    Caps(64, 8, 2),
    Caps(32, 4, 2),
    Caps(16, 4, 1),
    Caps(8, 2, 1),
    Caps(4, 1, 0),
    Caps(1, 1, 0),
    Caps(0, 0, 0),
)
"""Caps from wide to narrow; the first whose longest text fits is taken."""


class Narrowed(NamedTuple):
    """A narrowed schema and the longest text it allows."""

    schema: Schema
    max_bytes: int
    notes: tuple[str, ...]
    """What was taken away, for people; empty when nothing was."""


def narrow(schema: Any, max_bytes: int) -> Narrowed:
    """Narrow an action schema to texts of at most `max_bytes`.

    Args:
        schema: JSON Schema that `ActionSchema` accepts; key order does not matter.
        max_bytes: Room for the whole action.

    Raises:
        CannotNarrow: A keyword has no faithful narrowing, nothing would be left to
            decide, no value is possible, or the shortest action does not fit.
    """
    document = sorted_json(schema)
    smallest = 0
    for caps in LADDER:
        narrowing = _Narrowing(document, caps)
        narrowed = narrowing.root()
        smallest = longest(narrowed)
        if smallest <= max_bytes:
            return Narrowed(narrowed, smallest, tuple(sorted(narrowing.notes)))
    raise CannotNarrow(
        f"its actions may need {smallest} bytes, and {max_bytes} tokens are allowed"
    )


class _Narrowing:
    """One pass over a document under one set of caps."""

    def __init__(self, document: Any, caps: Caps) -> None:
        self.document = document
        self.caps = caps
        self.notes: set[str] = set()
        self.nodes = 0

    def root(self) -> Schema:
        """Narrow the whole document.

        Raises:
            CannotNarrow: Nothing is left to decide, or no value is possible.
        """
        document = self.document
        if isinstance(document, dict) and _is_inherited_metadata(document):
            properties = dict(document["properties"])
            del properties["metadata"]
            self.notes.add("the inherited metadata property is left out")
            if not properties and not document.get("required"):
                raise CannotNarrow("every property would vanish")
            document = {**document, "properties": properties}
            if not properties:
                document["additionalProperties"] = False
        narrowed = self.node(document, ())
        if narrowed is None:
            raise CannotNarrow("no finite value satisfies it")
        return narrowed

    def node(self, node: Any, path: tuple[str, ...]) -> Schema | None:
        """Narrow a subschema; None when no value of it is finite and possible.

        Args:
            node: A schema, or true or false.
            path: References followed to get here, and one mark per level of nesting.

        Raises:
            CannotNarrow: A keyword has no faithful narrowing.
        """
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise CannotNarrow("it is too large once references are followed")
        if node is False or path.count(_LEVEL) > MAX_NESTING:
            return None
        if node is True:
            node = {}
        refuse_unknown(node)
        _refuse_format(node, self.document)
        if "$ref" in node:
            return self._reference(node, path)
        if "allOf" in node:
            return self._all_of(node, path)
        if "const" in node or "enum" in node:
            return self._enumerated(node)
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                return self._alternatives(node, keyword, path)
        return self._any([self._typed(kind, node, path) for kind in types_of(node)])

    def _reference(self, node: Schema, path: tuple[str, ...]) -> Schema | None:
        reference = node["$ref"]
        if path.count(reference) > self.caps.recursion:
            return None
        rest = assertions(node, but="$ref")
        target = resolve(reference, self.document)
        if rest:
            target = merged(target, rest)
        return self.node(target, (*path, reference))

    def _all_of(self, node: Schema, path: tuple[str, ...]) -> Schema | None:
        whole: Any = assertions(node, but="allOf")
        for part in node["allOf"]:
            follow = part
            while isinstance(follow, dict) and "$ref" in follow:
                if path.count(follow["$ref"]) > self.caps.recursion:
                    return None
                path = (*path, follow["$ref"])
                rest = assertions(follow, but="$ref")
                follow = resolve(follow["$ref"], self.document)
                follow = merged(follow, rest) if rest else follow
            whole = merged(whole, follow)
        return self.node(whole, path)

    def _enumerated(self, node: Schema) -> Schema | None:
        values = [node["const"]] if "const" in node else list(node["enum"])
        check = jsonschema_rs.validator_for(
            {**node, "$defs": _definitions(self.document, "$defs")}
            | {"definitions": _definitions(self.document, "definitions")},
            offline=True,
            pattern_options=jsonschema_rs.RegexOptions(size_limit=limits.MIB),
        )
        kept = [value for value in values if check.is_valid(value)]
        return {"enum": kept} if kept else None

    def _alternatives(
        self, node: Schema, keyword: str, path: tuple[str, ...]
    ) -> Schema | None:
        rest = assertions(node, but=keyword)
        branches = [
            merged(branch, rest) if rest else branch for branch in node[keyword]
        ]
        if keyword == "oneOf":
            self._check_exclusive(branches)
        return self._any([self.node(branch, path) for branch in branches])

    def _check_exclusive(self, branches: list[Any]) -> None:
        """Check that no value satisfies two branches of a `oneOf`.

        Raises:
            CannotNarrow: That cannot be shown from types and constant members.
        """
        shapes = [self._followed(branch) for branch in branches]
        for index, shape in enumerate(shapes):
            for other in shapes[index + 1 :]:
                if not disjoint(shape, other):
                    raise CannotNarrow("branches of a oneOf may overlap")

    def _followed(self, node: Any) -> Schema:
        seen = 0
        while isinstance(node, dict) and "$ref" in node and seen < MAX_NESTING:
            node, seen = resolve(node["$ref"], self.document), seen + 1
        return node if isinstance(node, dict) else {}

    def _any(self, branches: list[Schema | None]) -> Schema | None:
        flat: list[Schema] = []
        for branch in branches:
            if branch is not None:
                flat += branch["anyOf"] if set(branch) == {"anyOf"} else [branch]
        unique = list({canonical_bytes(branch): branch for branch in flat}.values())
        if len(unique) < 2:
            return unique[0] if unique else None
        return {"anyOf": unique}

    def _typed(self, kind: str, node: Schema, path: tuple[str, ...]) -> Schema | None:
        if kind == "object":
            return self._object(node, path)
        if kind == "array":
            return self._array(node, path)
        if kind == "string":
            return self._string(node)
        if kind in {"integer", "number"}:
            return number(kind, node)
        return {"type": kind}

    def _string(self, node: Schema) -> Schema | None:
        low = int(node.get("minLength", 0))
        cap = max(self.caps.characters, low)
        high = min(int(node.get("maxLength", cap)), cap)
        kept: Schema = {
            word: node[word] for word in ("pattern", "format") if word in node
        }
        if kept:
            # A pattern or format needs some room whatever the caps say.
            room = max(cap, PATTERN_CHARACTERS)
            room = FORMAT_CHARACTERS.get(node.get("format", ""), room)
            high = min(int(node.get("maxLength", room)), room)
        if low > high:
            return None
        return {"type": "string", "minLength": low, "maxLength": high, **kept}

    def _array(self, node: Schema, path: tuple[str, ...]) -> Schema | None:
        deeper = (*path, _LEVEL)
        leading = [self.node(part, deeper) for part in node.get("prefixItems", ())]
        rest = self.node(node.get("items", True), deeper)
        low = int(node.get("minItems", 0))
        high = int(node.get("maxItems", max(low, len(leading), self.caps.items)))
        if None in leading:
            leading = leading[: leading.index(None)]
            high = min(high, len(leading))
        if rest is None:
            high = min(high, len(leading))
        high = min(high, max(low, len(leading), self.caps.items))
        if node.get("uniqueItems"):
            high = min(high, 1)
        if low > high:
            return None
        narrowed: Schema = {"type": "array", "minItems": low, "maxItems": high}
        if leading[:high]:
            narrowed["prefixItems"] = leading[:high]
        narrowed["items"] = rest if rest is not None and high > len(leading) else False
        return narrowed

    def _object(self, node: Schema, path: tuple[str, ...]) -> Schema | None:
        if node.get("patternProperties"):
            raise CannotNarrow("patternProperties is not supported")
        extra = node.get("additionalProperties", True)
        declared = dict(node.get("properties", {}))
        required = list(node.get("required", ()))
        for name in required:
            declared.setdefault(name, extra)
        if not declared and extra is not False:
            return self._open_object(node, extra, path)
        members = {
            name: self.node(declared[name], (*path, _LEVEL)) for name in declared
        }
        if any(members[name] is None for name in required):
            return None
        narrowed = {
            name: member for name, member in members.items() if member is not None
        }
        if int(node.get("minProperties", 0)) > len(required):
            raise CannotNarrow("minProperties counts optional properties")
        most = int(node.get("maxProperties", len(narrowed)))
        if most < len(narrowed):
            narrowed = {name: narrowed[name] for name in sorted(required)}
        if most < len(narrowed):
            return None
        if extra is not False:
            self.notes.add("objects are closed over their declared properties")
        return {
            "type": "object",
            "properties": narrowed,
            "required": sorted(required),
            "additionalProperties": False,
        }

    def _open_object(
        self, node: Schema, extra: Any, path: tuple[str, ...]
    ) -> Schema | None:
        low = int(node.get("minProperties", 0))
        member = self.node(extra, (*path, _LEVEL))
        most = min(int(node.get("maxProperties", 1)), 1, self.caps.items)
        if low > most or (low and member is None):
            return None
        self.notes.add("open objects hold at most one entry")
        if member is None or not most:
            return {
                "type": "object",
                "properties": {},
                "required": [],
                "additionalProperties": False,
            }
        return {
            "type": "object",
            "patternProperties": {KEY_PATTERN: member},
            "additionalProperties": False,
            "minProperties": low,
            "maxProperties": most,
        }


_LEVEL: Final = "\0level"


def _is_inherited_metadata(document: Schema) -> bool:
    """Recognise the SDK's own member: optional, open, named `metadata`."""
    member = document.get("properties", {}).get("metadata")
    return (
        isinstance(member, dict)
        and "metadata" not in document.get("required", ())
        and member.get("type") == "object"
        and member.get("additionalProperties", True) is True
        and not member.get("properties")
    )


def _refuse_format(node: Schema, document: Any) -> None:
    """Refuse formats that are unknown, or that an old dialect would enforce.

    Raises:
        CannotNarrow: The format has no grammar that its validator is sure to accept.
    """
    name = node.get("format")
    if name is None or "string" not in types_of(node):
        return
    dialect = document.get("$schema", "") if isinstance(document, dict) else ""
    if name not in FORMATS or "draft-0" in dialect:
        raise CannotNarrow(f"string format {name!r} is not supported")


def _definitions(document: Any, word: str) -> Any:
    return document.get(word, {}) if isinstance(document, dict) else {}
