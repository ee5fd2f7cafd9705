"""How much work an action schema of an environment can cause, bounded before any.

A validator can be made to run for hours by a schema of a few lines: references that
double at every level, in place or from member to member, and ``unevaluated*`` keywords
that visit their neighbours again. So a schema is laid out as a graph of the subschemas
that can be reached, its in-place expansion is bounded when it is compiled, and before
an action is checked the visits it would cause are counted, without any shortcut.

What cannot be followed exactly is refused: references out of the document, nested
identifiers that move the base of references, and references that lead nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import unquote

from kiln_core import limits
from kiln_core.canonical import JsonValue
from kiln_core.errors import InvalidActionSchema

__all__ = ["SchemaCost"]

IN_PLACE_LISTS: Final = ("allOf", "anyOf", "oneOf")
IN_PLACE_SINGLES: Final = ("if", "then", "else", "not")
IN_PLACE_MAPS: Final = ("dependentSchemas", "dependencies")
EACH_PROPERTY: Final = ("unevaluatedProperties",)
EACH_ITEM: Final = ("additionalItems", "contains", "unevaluatedItems")
REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
ANCHORS: Final = ("$anchor", "$dynamicAnchor")

PATTERN_COST: Final = 100
"""Visits that running one pattern over 64 characters may be worth."""
REVISITS: Final = 3
"""How often ``unevaluated*`` makes a validator visit its neighbours."""
UNIT_CHARACTERS: Final = 64
BOUNDLESS: Final = 10**12
"""Where counting stops."""
TRIVIAL: Final = 0
"""Index of the node that stands for every boolean schema."""

Applied = Counter[int]
"""How often each subschema is applied to one value."""


class _Node:
    """One subschema: what it costs itself, and which others it applies to what."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.own = 1 + sum(_size(schema.get(k)) for k in ("enum", "required"))
        self.own += _size(schema.get("properties"))
        self.patterns = int("pattern" in schema)
        self.name_patterns = _size(schema.get("patternProperties"))
        unevaluated = any(key.startswith("unevaluated") for key in schema)
        self.revisits = REVISITS if unevaluated else 1
        self.in_place: list[int] = []
        self.named: dict[str, int] = {}
        self.each_property: list[int] = []
        self.other_properties: list[int] = []
        self.names: list[int] = []
        self.prefix: list[int] = []
        self.each_item: list[int] = []
        self.other_items: list[int] = []

    def for_property(self, name: str) -> list[int]:
        """Return what is applied to a member; every pattern may match its name."""
        named = self.named.get(name)
        rest = self.other_properties if named is None else [named]
        return [*self.each_property, *rest]

    def for_item(self, index: int) -> list[int]:
        """Return what is applied to an item."""
        rest = [self.prefix[index]] if index < len(self.prefix) else self.other_items
        return [*self.each_item, *rest]


class _Closure:
    """All that is applied to a value, and what that costs."""

    def __init__(self, applied: Applied, nodes: list[_Node]) -> None:
        self.applied = applied
        used = [(nodes[index], times) for index, times in applied.items()]
        self.own = sum(times * node.own for node, times in used)
        self.patterns = PATTERN_COST * sum(t * node.patterns for node, t in used)
        self.name_patterns = PATTERN_COST * sum(
            times * node.name_patterns for node, times in used
        )


class SchemaCost:
    """The graph of a schema's reachable subschemas."""

    def __init__(self, schema: JsonValue) -> None:
        """Lay out a schema.

        Raises:
            InvalidActionSchema: It refers out of itself or nowhere, or crosses a
                bound of ``kiln_core.limits``.
        """
        self._root = schema
        self._nodes = [_Node({})]
        self._index: dict[int, int] = {}
        self._waiting: list[dict[str, Any]] = []
        self._anchors: dict[str, dict[str, Any]] = {}
        self._patterns = 0
        self._referenced = 0
        self._find_anchors(schema)
        self._start = self._node(schema)
        while self._waiting:
            self._expand(self._waiting.pop())
        self._order = self._in_place_order()
        self._rank = {index: rank for rank, index in enumerate(self._order)}
        self._check_expansion()
        # without references a subschema is applied to a value once at most
        self._once = self._referenced == 0 and all(n.revisits == 1 for n in self._nodes)
        self._all_costs = sum(
            node.own + PATTERN_COST * (node.patterns + node.name_patterns)
            for node in self._nodes
        )

    def work(self, action: JsonValue, limit: int, size_bytes: int | None = None) -> int:
        """Count the visits that checking an action can cause, until over ``limit``.

        Args:
            action: The action.
            limit: Where counting may stop.
            size_bytes: Length of its JSON, where known.
        """
        if self._once:
            if size_bytes is not None and self.is_small(size_bytes):
                return self._all_costs * size_bytes
            bound = self._all_costs * _size_of(action)
            if bound <= limits.MAX_DIAGNOSED_WORK:
                return bound
        total = 0
        closures: dict[frozenset[tuple[int, int]], _Closure] = {}
        waiting: list[tuple[JsonValue, Applied]] = [(action, Counter([self._start]))]
        while waiting and total <= limit:
            value, applied = waiting.pop()
            key = frozenset(applied.items())
            closure = closures.get(key)
            if closure is None:
                closure = closures[key] = self._closure(applied)
            total += closure.own + closure.patterns * _units(value)
            for part, below in self._parts_of(value, closure.applied):
                total += len(closure.applied)
                if isinstance(part, _Name):
                    total += closure.name_patterns * _units(part)
                if below:
                    waiting.append((part, below))
                if total > limit:
                    break
        return total

    def is_small(self, size_bytes: int) -> bool:
        """Say whether checking any action of so many bytes of JSON is surely cheap."""
        # a value of one unit takes a byte at least
        return self._once and self._all_costs * size_bytes <= limits.MAX_DIAGNOSED_WORK

    def _closure(self, applied: Applied) -> _Closure:
        """Return what is applied to a value, combinators and references followed."""
        found = set(applied)
        waiting = list(applied)
        while waiting:
            parts = set(self._nodes[waiting.pop()].in_place) - found
            found |= parts
            waiting += parts
        closed = Counter(applied)
        for index in sorted(found, key=self._rank.__getitem__, reverse=True):
            node = self._nodes[index]
            for part in node.in_place:
                closed[part] += min(closed[index] * node.revisits, BOUNDLESS)
        return _Closure(closed, self._nodes)

    def _parts_of(
        self, value: JsonValue, applied: Applied
    ) -> Iterator[tuple[JsonValue, Applied]]:
        nodes = [(self._nodes[index], times) for index, times in applied.items()]
        if isinstance(value, dict):
            for name, member in value.items():
                yield _Name(name), _sum((n.names, n, t) for n, t in nodes)
                yield member, _sum((n.for_property(name), n, t) for n, t in nodes)
        elif isinstance(value, list):
            prefix = max((len(node.prefix) for node, _ in nodes), default=0)
            rest = _sum((n.for_item(prefix), n, t) for n, t in nodes)
            for index, item in enumerate(value):
                if index < prefix:
                    yield item, _sum((n.for_item(index), n, t) for n, t in nodes)
                else:
                    yield item, rest

    def _node(self, schema: JsonValue) -> int:
        if not isinstance(schema, dict):
            return TRIVIAL
        known = self._index.get(id(schema))
        if known is not None:
            return known
        if len(self._nodes) > limits.MAX_SCHEMA_EXPANSION:
            raise InvalidActionSchema(
                f"the action schema has over {limits.MAX_SCHEMA_EXPANSION} parts"
            )
        if schema is not self._root and _moves_base(schema, self._root):
            raise InvalidActionSchema("a part of the action schema has its own $id")
        index = len(self._nodes)
        self._index[id(schema)] = index
        self._nodes.append(_Node(schema))
        self._waiting.append(schema)
        return index

    def _expand(self, schema: dict[str, Any]) -> None:
        node = self._nodes[self._index[id(schema)]]
        node.in_place = [
            *self._all(_listed(schema, *IN_PLACE_LISTS)),
            *self._all(schema.get(keyword) for keyword in IN_PLACE_SINGLES),
        ]
        for keyword in IN_PLACE_MAPS:
            node.in_place += self._all(_mapped(schema, keyword).values())
        for keyword in REFERENCES:
            if isinstance(schema.get(keyword), str):
                self._referenced += 1
                node.in_place.append(self._node(self._resolve(schema[keyword])))
        named = _mapped(schema, "properties")
        node.named = dict(zip(named, self._all(named.values()), strict=True))
        node.each_property = [
            *self._all(_mapped(schema, "patternProperties").values()),
            *self._all(schema.get(keyword) for keyword in EACH_PROPERTY),
        ]
        node.other_properties = self._all([schema.get("additionalProperties")])
        node.names = self._all([schema.get("propertyNames")])
        # "items" is a list in older drafts
        node.prefix = self._all(_listed(schema, "prefixItems", "items"))
        node.other_items = self._all([schema.get("items")])
        node.each_item = self._all(schema.get(keyword) for keyword in EACH_ITEM)
        self._count_patterns(node)

    def _all(self, parts: Iterable[JsonValue]) -> list[int]:
        return [self._node(part) for part in parts if isinstance(part, (dict, bool))]

    def _count_patterns(self, node: _Node) -> None:
        self._patterns += node.patterns + node.name_patterns
        if self._patterns > limits.MAX_SCHEMA_PATTERNS:
            raise InvalidActionSchema(
                f"the action schema has over {limits.MAX_SCHEMA_PATTERNS} patterns"
            )

    def _resolve(self, reference: str) -> JsonValue:
        if not reference.startswith("#"):
            raise InvalidActionSchema(
                "the action schema refers to a document outside itself"
            )
        fragment = unquote(reference[1:])
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get(fragment)
        else:
            target = self._follow(fragment.split("/")[1:])
        if target is None:
            raise InvalidActionSchema("the action schema refers to what is not there")
        return target

    def _follow(self, tokens: list[str]) -> JsonValue:
        node = self._root
        for token in tokens:
            if node is not self._root and _moves_base(node, self._root):
                raise InvalidActionSchema("a part of the action schema has its own $id")
            key = token.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(key)
            elif isinstance(node, list) and key.isascii() and key.isdigit():
                node = node[int(key)] if int(key) < len(node) else None
            else:
                return None
        return node

    def _find_anchors(self, schema: JsonValue) -> None:
        waiting = [schema]
        while waiting:
            value = waiting.pop()
            if isinstance(value, list):
                waiting += value
            elif isinstance(value, dict):
                waiting += value.values()
                for keyword in ANCHORS:
                    name = value.get(keyword)
                    if isinstance(name, str):
                        self._add_anchor(name, value)

    def _add_anchor(self, name: str, schema: dict[str, Any]) -> None:
        if self._anchors.setdefault(name, schema) is not schema:
            raise InvalidActionSchema("two parts of the action schema share an anchor")

    def _in_place_order(self) -> list[int]:
        """Order nodes so that each follows those it applies in place.

        Raises:
            InvalidActionSchema: There is a cycle: no validator would ever return.
        """
        order: list[int] = []
        done: set[int] = set()
        for start in range(len(self._nodes)):
            path = [(start, iter(self._nodes[start].in_place))]
            on_path = {start}
            while path and start not in done:
                index, parts = path[-1]
                part = next((p for p in parts if p not in done), None)
                if part is None:
                    path.pop()
                    on_path.discard(index)
                    done.add(index)
                    order.append(index)
                elif part in on_path:
                    raise InvalidActionSchema("the action schema expands without bound")
                else:
                    path.append((part, iter(self._nodes[part].in_place)))
                    on_path.add(part)
        return order

    def _check_expansion(self) -> None:
        counts = [0] * len(self._nodes)
        chains = [0] * len(self._nodes)
        for index in self._order:
            node = self._nodes[index]
            applied = sum(counts[part] for part in node.in_place)
            counts[index] = min(1 + node.revisits * applied, BOUNDLESS)
            chains[index] = 1 + max((chains[part] for part in node.in_place), default=0)
        if max(counts) > limits.MAX_SCHEMA_EXPANSION:
            raise InvalidActionSchema("the action schema expands without bound")
        if max(chains) > limits.MAX_SCHEMA_CHAIN:
            raise InvalidActionSchema(
                f"the action schema chains over {limits.MAX_SCHEMA_CHAIN} references"
            )


class _Name(str):
    """A name of a member, to which only ``propertyNames`` applies."""

    __slots__ = ()


def _sum(parts: Iterable[tuple[list[int], _Node, int]]) -> Applied:
    applied: Applied = Counter()
    for indices, node, times in parts:
        for index in indices:
            applied[index] += min(times * node.revisits, BOUNDLESS)
    return applied


def _size(value: JsonValue) -> int:
    return len(value) if isinstance(value, (list, dict)) else 0


def _listed(schema: dict[str, Any], *keywords: str) -> Iterator[JsonValue]:
    for keyword in keywords:
        value = schema.get(keyword)
        if isinstance(value, list):
            yield from value


def _mapped(schema: dict[str, Any], keyword: str) -> dict[str, JsonValue]:
    value = schema.get(keyword)
    members = value.items() if isinstance(value, dict) else ()
    return {name: part for name, part in members if isinstance(part, (dict, bool))}


def _size_of(action: JsonValue) -> int:
    if isinstance(action, dict):
        return 1 + sum(_units(k) + _size_of(v) for k, v in action.items())
    if isinstance(action, list):
        return 1 + sum(_size_of(item) for item in action)
    return _units(action)


def _units(value: JsonValue) -> int:
    """Return how much a pattern has to read."""
    return 1 + len(value) // UNIT_CHARACTERS if isinstance(value, str) else 1


def _moves_base(schema: JsonValue, root: JsonValue) -> bool:
    """Say whether references below a schema are relative to another base."""
    if not isinstance(schema, dict):
        return False
    dialect = str(root.get("$schema", "")) if isinstance(root, dict) else ""
    keywords = ("$id", "$schema", "id") if "draft-04" in dialect else ("$id", "$schema")
    return any(isinstance(schema.get(keyword), str) for keyword in keywords)
