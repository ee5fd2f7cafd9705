"""Replies and the schemas they are held to, friendly and hostile."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kiln_core import limits
from kiln_core.actions import (
    INVALID_ACTION,
    NO_OUTPUT,
    SCHEMA_FAILED,
    ActionSchema,
    InvalidAction,
    parse_reply,
    split_reasoning,
)
from kiln_core.canonical import compact, digest_json
from kiln_core.errors import InvalidActionSchema
from tests.simulators.pure import COUNTER_ACTION

COUNTER = ActionSchema(COUNTER_ACTION)


@pytest.fixture(autouse=True)
def nothing_is_slow() -> Iterator[None]:
    """Hostile input costs a fraction of a second; where it stalls, it stalls for hours."""
    started = time.process_time()
    yield
    assert time.process_time() - started < 10


def refused(text: str, schema: ActionSchema = COUNTER) -> InvalidAction:
    with pytest.raises(InvalidAction) as caught:
        parse_reply(text, schema)
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        '{"amount":2}',
        ' \n{"amount" : 2}\t',
        '```json\n{"amount": 2}\n```',
        '```JSON {"amount":2}```',
        '```{"amount":2}```',
        '```json{"amount":2}```',
        '```\n\n{\n"amount":\n2\n}\n\n```',
        '\u00a0{"amount":2}\u3000',
        '{"amount":2.0}',
    ],
)
def test_reply_is_one_object_perhaps_in_a_fence(text: str) -> None:
    assert parse_reply(text, COUNTER) == {"amount": 2}


def test_action_keys_are_put_in_canonical_order() -> None:
    action = parse_reply('{"metadata":{"b":1,"a":[{"d":1,"c":2}]},"amount":1}', COUNTER)
    assert list(action) == ["amount", "metadata"]
    assert list(action["metadata"]) == ["a", "b"]
    assert list(action["metadata"]["a"][0]) == ["c", "d"]


def test_fence_inside_a_string_is_text() -> None:
    schema = ActionSchema({"type": "object"})
    assert parse_reply('```json\n{"a":"```"}\n```', schema) == {"a": "```"}
    assert parse_reply('{"a":"```json"}', schema) == {"a": "```json"}


@pytest.mark.parametrize("text", ["", " ", "\n\t\r ", "\u3000"])
def test_blank_reply_is_no_output(text: str) -> None:
    assert refused(text).code == NO_OUTPUT


@pytest.mark.parametrize(
    "text",
    [
        "I choose two",
        "2",
        "[]",
        "null",
        '"x"',
        "true",
        '{"amount":2} ok',
        'ok {"amount":2}',
        '{"amount":2}{"amount":2}',
        '{"amount":2,}',
        "{'amount':2}",
        '{"amount":2,"amount":2}',
        '{"amount":NaN}',
        '{"amount":1e999}',
        '{"amount":"\\ud800"}',
        '{"amount":"\ud800"}',
        '```json\n{"amount":2}',
        '{"amount":2}\n```',
        '```js\n{"amount":2}\n```',
        '````{"amount":2}````',
        '```json\n```json\n{"amount":2}\n```\n```',
        "```",
        "``````",
        "`````",
        '{"amount":' + "1" * 5000 + "}",
        '{"amount":' + "[" * 500 + "]" * 500 + "}",
        '{"a":' * 20_000,
        "\x00",
    ],
    ids=lambda t: repr(t)[:40],
)
def test_reply_that_is_no_object_is_invalid(text: str) -> None:
    assert refused(text).code == INVALID_ACTION


@pytest.mark.parametrize(
    "text",
    [
        "```" + " " * 100_000 + "x",
        "```json" + "\n" * 100_000 + "x",
        "```" + "`" * 100_001,
        " " * 200_000 + "x",
        "[" * 200_000,
        '{"a":"' + "\\" * 100_000,
    ],
    ids=lambda t: repr(t)[:20],
)
def test_no_reply_can_stall_the_parser(text: str) -> None:
    assert refused(text).code == INVALID_ACTION


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"amount":"2"}',
        '{"amount":true}',
        '{"amount":2.5}',
        '{"amount":-1}',
        '{"amount":10}',
        '{"amount":1,"extra":1}',
        '{"amount":1,"metadata":[]}',
        '{"amount":' + "9" * 4000 + "}",
    ],
    ids=lambda t: t[:40],
)
def test_action_the_schema_refuses_is_never_sent(text: str) -> None:
    assert refused(text).code == SCHEMA_FAILED


def test_refusal_is_retained_as_a_harness_error() -> None:
    assert InvalidAction("CODE", "why").document() == {
        "openenv_harness_error": {"code": "CODE", "message": "why"},
        "done": True,
    }


def test_diagnosis_names_keyword_and_places() -> None:
    message = refused('{"amount":"secret","other":"secret"}').message
    assert "type at action /amount (schema /properties/amount/type)" in message
    assert "additionalProperties at action $ (schema /additionalProperties)" in message
    assert "secret" not in message


def test_diagnosis_is_bounded_and_holds_no_value() -> None:
    names = [f"field {i}" + "n" * 500 for i in range(10)]
    schema = ActionSchema({"properties": {name: {"type": "null"} for name in names}})
    action = dict.fromkeys(names, "the payload")
    with pytest.raises(InvalidAction) as caught:
        schema.check(action)
    issues = caught.value.message.split("; ")
    assert len(issues) == limits.MAX_ACTION_ISSUES + 1
    assert issues[-1] == "additional issues omitted"
    assert "payload" not in caught.value.message
    assert all(len(issue) < 3 * limits.MAX_ISSUE_BYTES for issue in issues)


def test_pointer_in_a_diagnosis_is_escaped() -> None:
    schema = ActionSchema({"properties": {"a/b~c": {"type": "null"}}})
    with pytest.raises(InvalidAction, match=r"at action /a~1b~0c \("):
        schema.check({"a/b~c": 1})


def test_cut_names_stay_text() -> None:
    name = "\u00e9" * 500
    schema = ActionSchema({"properties": {name: {"type": "null"}}})
    with pytest.raises(InvalidAction) as caught:
        schema.check({name: 1})
    caught.value.message.encode()


def test_depth_of_an_action_is_bounded() -> None:
    schema = ActionSchema({"type": "object"})

    def nested(levels: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for _ in range(levels - 1):
            value = {"a": value}
        return value

    schema.check(nested(limits.MAX_ACTION_DEPTH))
    for levels in (limits.MAX_ACTION_DEPTH + 1, 900):
        with pytest.raises(InvalidAction, match="nests too deep"):
            schema.check(nested(levels))


def test_schema_is_identified_by_value() -> None:
    shuffled = dict(reversed(COUNTER_ACTION.items()))
    assert (
        ActionSchema(shuffled).sha256 == COUNTER.sha256 == digest_json(COUNTER_ACTION)
    )
    assert list(ActionSchema(shuffled).document) == sorted(COUNTER_ACTION)


PYDANTIC: dict[str, Any] = {
    "$defs": {
        "Move": {
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/Square"}, "kind": {"const": "move"}},
            "required": ["to"],
        },
        "Square": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "integer"}],
            "minItems": 2,
            "maxItems": 2,
        },
        "Resign": {"type": "object", "properties": {"kind": {"const": "resign"}}},
        "Tree": {
            "type": "object",
            "properties": {
                "left": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]},
                "right": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]},
                "value": {"type": "number"},
            },
            "required": ["value"],
        },
    },
    "type": "object",
    "properties": {
        "cmd": {
            "discriminator": {"mapping": {"move": "#/$defs/Move"}},
            "oneOf": [{"$ref": "#/$defs/Move"}, {"$ref": "#/$defs/Resign"}],
        },
        "tree": {"$ref": "#/$defs/Tree"},
        "name": {"type": "string", "pattern": "^[a-h][1-8]$", "default": {"$ref": "x"}},
        "grid": {
            "type": "array",
            "items": {"type": "array", "items": {"enum": [0, 1]}},
        },
        "metadata": {"type": "object", "additionalProperties": True},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("action", "valid"),
    [
        ({}, True),
        ({"cmd": {"to": [1, 2], "kind": "move"}}, True),
        ({"cmd": {"to": [1], "kind": "move"}}, False),
        ({"cmd": {"kind": "resign"}}, True),
        ({"name": "a1"}, True),
        ({"name": "a9"}, False),
        ({"tree": {"value": 1, "left": {"value": 2, "right": None}}}, True),
        ({"tree": {"value": 1, "left": {"value": 2, "right": {}}}}, False),
        ({"grid": [[0, 1] * 50] * 50}, True),
        ({"grid": [[0, 2] * 50] * 50}, False),
        ({"metadata": {"any": ["thing"]}}, True),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_ordinary_schema_decides(action: dict[str, Any], valid: bool) -> None:
    schema = ActionSchema(PYDANTIC)
    if valid:
        schema.check(action)
    else:
        with pytest.raises(InvalidAction):
            schema.check(action)


@pytest.mark.parametrize("padding", [0, 1_000], ids=["short", "long"])
def test_actions_are_judged_together_as_each_is(padding: int) -> None:
    schema = ActionSchema({"properties": {"x": {"type": "integer"}}})
    good, bad = ({"x": x, "note": "n" * padding} for x in (1, "1"))
    longest = len(compact(good)) + 2
    assert schema.accepts_all([], 0)
    assert schema.accepts_all([good, good], longest)
    assert not schema.accepts_all([good, bad], longest)


def test_recursive_schema_takes_deep_actions() -> None:
    schema = ActionSchema(PYDANTIC)
    tree: dict[str, Any] = {"value": 0}
    for _ in range(10):
        tree = {"value": 1, "left": tree, "right": None}
    schema.check({"tree": tree})


def test_references_in_values_are_no_references() -> None:
    schema = ActionSchema(
        {"properties": {"x": {"const": {"$ref": "http://h"}}, "$ref": {"type": "null"}}}
    )
    schema.check({"x": {"$ref": "http://h"}, "$ref": None})
    with pytest.raises(InvalidAction):
        schema.check({"$ref": 1})


@pytest.mark.parametrize("schema", [True, {}, {"title": "x"}])
def test_trivial_schema_takes_everything(schema: Any) -> None:
    ActionSchema(schema).check({"a": [1]})


def test_false_schema_takes_nothing() -> None:
    with pytest.raises(InvalidAction):
        ActionSchema(False).check({})


def chain(length: int) -> dict[str, Any]:
    links: dict[str, Any] = {
        f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)
    }
    return {"$defs": {**links, f"a{length}": {}}, "$ref": "#/$defs/a0"}


def dag(
    levels: int,
    level: Callable[[dict[str, Any]], dict[str, Any]],
    prefix: str = "$defs",
) -> dict[str, Any]:
    """Return a schema in which every level applies the next one twice."""
    links = {f"a{i}": level({"$ref": f"#/{prefix}/a{i + 1}"}) for i in range(levels)}
    return {
        "$defs": {**links, f"a{levels}": {"type": "object"}},
        "$ref": f"#/{prefix}/a0",
    }


def nested_schema(levels: int, key: str = "not") -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {key: schema}
    return schema


def revisits(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"allOf": [schema], "unevaluatedProperties": False}
    return schema


HOSTILE: dict[str, Any] = {
    "no schema": None,
    "a list": [],
    "a string": "object",
    "a number": 7,
    "unknown type": {"type": "objekt"},
    "bad keyword": {"properties": []},
    "bad pattern": {"pattern": "("},
    "lookaround": {"properties": {"x": {"pattern": "(?=a)b"}}},
    "backreference": {"properties": {"x": {"pattern": r"(a+)\1"}}},
    "huge pattern": {"pattern": "((((a{100}){100}){100}){100})"},
    "slow pattern": {"pattern": "[ab]*a[ab]{8000}c"},
    "many patterns": {"patternProperties": {f"a{i}": {} for i in range(65)}},
    "many slow patterns": {
        "properties": {f"a{i}": {"pattern": rf"\p{{L}}{{8}}{i}"} for i in range(500)}
    },
    "remote reference": {"$ref": "http://127.0.0.1:1/x"},
    "remote reference in a member": {
        "properties": {"a": {"items": {"$ref": "https://h/x"}}}
    },
    "remote reference not used": {"$defs": {"a": {"$ref": "https://h/x"}}},
    "relative reference": {"$ref": "other.json#/a"},
    "relative reference to an id": {"$id": "http://h/x", "$ref": "y.json"},
    "file reference": {"$ref": "file:///etc/hosts"},
    "urn reference": {"$ref": "urn:x"},
    "remote dynamic reference": {"$dynamicRef": "http://h/x#a"},
    "remote metaschema": {"$schema": "http://h.example/schema"},
    "reference to nothing": {"$ref": "#/$defs/nope"},
    "reference to no anchor": {"$ref": "#nope"},
    "reference through a scalar": {"title": "x", "$ref": "#/title/x"},
    "reference past a list": {"allOf": [{}], "$ref": "#/allOf/1"},
    "reference into a list by name": {"allOf": [{}], "$ref": "#/allOf/x"},
    "self reference": {"$ref": "#"},
    "self reference by combinators": {"allOf": [{"anyOf": [{"$ref": "#"}]}]},
    "self reference by escapes": {
        "$defs": {"a": {"$ref": "#/%24defs/a"}},
        "$ref": "#/%24defs/a",
    },
    "self reference by anchor": {
        "$defs": {"a": {"$anchor": "x", "$ref": "#x"}},
        "$ref": "#x",
    },
    "self reference by dynamic anchor": {"$dynamicAnchor": "n", "$dynamicRef": "#n"},
    "self reference of 2019": {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "$recursiveRef": "#",
    },
    "self reference by dependents": {"dependentSchemas": {"a": {"$ref": "#"}}},
    "mutual references": {
        "$defs": {
            "a": {"not": {"$ref": "#/$defs/b"}},
            "b": {"if": {"$ref": "#/$defs/a"}},
        },
        "$ref": "#/$defs/a",
    },
    "twin anchors": {
        "$defs": {"a": {"$anchor": "x"}, "b": {"$anchor": "x"}},
        "$ref": "#x",
    },
    "moved base": {
        "$defs": {"a": {"$id": "urn:x", "$defs": {"q": {}}, "$ref": "#/$defs/q"}},
        "$ref": "#/$defs/a",
    },
    "path through a moved base": {
        "$defs": {"a": {"$id": "urn:x", "$defs": {"q": {}}}},
        "$ref": "#/$defs/a/$defs/q",
    },
    "moved base of draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "properties": {"a": {"id": "urn:x"}},
    },
    "moved dialect": {
        "properties": {"a": {"$schema": "http://json-schema.org/draft-04/schema#"}}
    },
    "chain of 900 references": chain(900),
    "chain of 8000 references": chain(8000),
    "doubling in place": dag(30, lambda r: {"anyOf": [r, r]}),
    "doubling by escapes": dag(30, lambda r: {"anyOf": [r, r]}, "%24defs"),
    "doubling by dependents": dag(30, lambda r: {"dependentSchemas": {"x": r, "y": r}}),
    "doubling by conditions": dag(30, lambda r: {"if": r, "then": r, "else": r}),
    "doubling by revisits": dag(
        12, lambda r: {"allOf": [r, r], "unevaluatedProperties": False}
    ),
    "doubling of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **dag(30, lambda r: {"dependencies": {"x": r, "y": r}}),
    },
    "revisits without references": revisits(24),
    "deep": nested_schema(100),
    "very deep": nested_schema(900),
    "large": {"description": "x" * 300_000},
    "many parts": {"properties": {f"p{i}": {} for i in range(10_001)}},
    "negative length": {"minLength": -1},
    "fraction as length": {"maxProperties": 1.5},
    "no number": {"maximum": float("nan")},
    "no text": {"title": "\ud800"},
}


REASONS: dict[str, str] = {
    "is not a JSON Schema": "no schema/a list/a string/a number",
    "is no valid JSON Schema at /type (anyOf)": "unknown type",
    "is no valid JSON Schema at /properties (type)": "bad keyword",
    "is no valid JSON Schema at /minLength (minimum)": "negative length",
    "is no valid JSON Schema at /maxProperties (type)": "fraction as length",
    "has a pattern that is none or does not run in linear time at /pattern": (
        "bad pattern/huge pattern/slow pattern"
    ),
    "does not run in linear time at /properties/x/pattern": "lookaround/backreference",
    "has over 64 patterns": "many patterns/many slow patterns",
    "refers to a document outside itself": (
        "remote reference/remote reference in a member/remote reference not used/"
        "relative reference/relative reference to an id/file reference/urn reference/"
        "remote dynamic reference/remote metaschema"
    ),
    "refers to what is not there": (
        "reference to nothing/reference to no anchor/reference through a scalar/"
        "reference past a list/reference into a list by name"
    ),
    "expands without bound": (
        "self reference/self reference by combinators/self reference by escapes/"
        "self reference by anchor/self reference by dynamic anchor/"
        "self reference of 2019/self reference by dependents/mutual references/"
        "doubling in place/doubling by escapes/doubling by dependents/"
        "doubling by conditions/doubling by revisits/doubling of draft 7/"
        "revisits without references"
    ),
    "share an anchor": "twin anchors",
    "has its own $id": (
        "moved base/path through a moved base/moved base of draft 4/moved dialect"
    ),
    "chains over 128 references": "chain of 900 references/chain of 8000 references",
    "nests deeper than 64 levels": "deep/very deep",
    "is over 262144 bytes": "large",
    "has over 10000 parts": "many parts",
    "has no JSON form": "no number/no text",
}
"""The reason that is told, and the rows it is told for."""


def test_every_hostile_schema_has_its_reason() -> None:
    named = [name for names in REASONS.values() for name in names.split("/")]
    assert sorted(named) == sorted(HOSTILE)


@pytest.mark.parametrize(
    ("name", "reason"),
    [(name, reason) for reason, names in REASONS.items() for name in names.split("/")],
)
def test_hostile_schema_is_refused_in_time_with_the_reason(
    name: str, reason: str
) -> None:
    with pytest.raises(InvalidActionSchema, match=re.escape(reason)) as caught:
        ActionSchema(HOSTILE[name])
    assert caught.value.hint


def test_reason_of_a_refusal_holds_no_value_of_the_schema() -> None:
    canary = "canary-7f3a"
    for schema in (
        {"type": canary},
        {"properties": {"x": {"pattern": f"(?={canary})"}}},
        {"$defs": {"a": {"$ref": f"https://h/{canary}"}}},
        {"$schema": f"https://h/{canary}"},
        {"properties": {"x": {"minLength": [canary]}}},
    ):
        with pytest.raises(InvalidActionSchema) as caught:
            ActionSchema(schema)
        assert canary not in str(caught.value.document())


def deep(levels: int, key: str = "x", leaf: Any = None) -> Any:
    value: Any = {} if leaf is None else leaf
    for _ in range(levels):
        value = {key: value}
    return value


def member(schema: Any) -> dict[str, Any]:
    return {"properties": {"x": schema}}


EXPENSIVE: dict[str, tuple[Any, Any]] = {
    "doubling by members": (
        dag(31, lambda r: {"allOf": [member(r), member(r)]}),
        deep(31),
    ),
    "doubling by patterns": (
        dag(29, lambda r: {"patternProperties": {"x": r, "^x": r}}),
        deep(29),
    ),
    "doubling by items": (
        {"properties": {"l": dag(29, lambda r: {"items": r, "contains": r})}}
        | {"$defs": dag(29, lambda r: {"items": r, "contains": r})["$defs"]},
        {"l": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]},
    ),
    "branching recursion": (
        {"anyOf": [{**member({"$ref": "#"}), "required": [f"z{i}"]} for i in range(4)]},
        deep(12),
    ),
    "large enumeration of many": (
        {"properties": {"l": {"items": {"enum": [[i, i] for i in range(20_000)]}}}},
        {"l": [[19_999, 19_999]] * 5000},
    ),
    "patterns over a long text": (
        {
            "properties": {
                "x": {
                    "allOf": [{"pattern": f"[ab]*a[ab]{{900}}{i}"} for i in range(60)]
                }
            }
        },
        {"x": "ab" * 250_000},
    ),
    "revisits of members": (
        {
            "allOf": [{"anyOf": [member({"$ref": "#"})]}],
            "unevaluatedProperties": {"$ref": "#"},
        },
        deep(24, "y"),
    ),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_action_that_would_cost_too_much_is_refused(name: str) -> None:
    schema, action = EXPENSIVE[name]
    with pytest.raises(InvalidAction) as caught:
        ActionSchema(schema).check(action)
    assert caught.value.code == SCHEMA_FAILED
    assert caught.value.message == "the action is too large and nested for its schema"


def test_long_text_and_many_members_are_affordable() -> None:
    schema = ActionSchema(
        {
            "properties": {
                "code": {"type": "string"},
                "name": {"type": "string", "pattern": r"^\w+$"},
                "cells": {"type": "array", "items": {"type": "integer"}},
            }
        }
    )
    schema.check({"code": "x" * 500_000, "name": "n" * 1000})
    schema.check({"cells": list(range(16_000))})
    with pytest.raises(InvalidAction, match="does not satisfy the action schema"):
        schema.check({"cells": [*range(16_000), "x"]})


@pytest.mark.parametrize(
    "action", [{"x": 10**4000}, {"x": -(10**300)}, {"x": 1e308}, {"x": 2**64}]
)
def test_extreme_numbers_get_a_verdict(action: dict[str, Any]) -> None:
    ActionSchema({"properties": {"x": {"type": "number"}}}).check(action)
    bounded = ActionSchema({"properties": {"x": {"minimum": 0, "maximum": 5}}})
    with pytest.raises(InvalidAction):
        bounded.check(action)


@pytest.mark.parametrize(
    ("text", "thinking", "action"),
    [
        ("a</think>b", True, "b"),
        ("</think>b", True, "b"),
        ("a</think>b</think>c", True, "b</think>c"),
        ("a</think>", True, ""),
        ("never closed", True, ""),
        ("", True, ""),
        ("a</think>b", False, "a</think>b"),
        ("", False, ""),
        ("<think>a</think>b", True, "b"),
    ],
)
def test_action_follows_the_first_close_of_reasoning(
    text: str, thinking: bool, action: str
) -> None:
    assert split_reasoning(text, thinking=thinking) == action
