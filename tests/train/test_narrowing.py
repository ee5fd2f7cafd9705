"""The promise of a guide: what it allows is always valid, and always ends."""

from __future__ import annotations

import json
import random

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln_core.actions import ActionSchema, parse_reply
from kiln_train_jax.guide import GuideCompiler, Unguidable, mask_words
from kiln_train_jax.narrowing import longest, narrow
from kiln_train_jax.schema_words import CannotNarrow
from kiln_train_jax.tokenizer import Tokenizer, byte_document

BYTES = Tokenizer(byte_document(), vocab_size=272)
END = 266
COMPILER = GuideCompiler(BYTES, stop_id=END)
METADATA = {"type": "object", "additionalProperties": True, "default": {}}


def fields(required=None, **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties) if required is None else required,
        "additionalProperties": False,
    }


MOVE = fields(
    kind={"const": "move"},
    to={
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "integer"}],
        "minItems": 2,
        "maxItems": 2,
    },
)
SAY = fields(kind={"const": "say"}, text={"type": "string", "maxLength": 200})

SCHEMAS = {
    "sdk integer": fields(
        ["lamp"],
        metadata=METADATA,
        lamp={"type": "integer", "minimum": 0, "maximum": 3},
    ),
    "free text": {
        "type": "object",
        "properties": {"metadata": METADATA, "message": {"type": "string"}},
        "required": ["message"],
    },
    "pydantic optionals": fields(
        [],
        a={"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        b={"type": "number"},
        c={"type": "boolean"},
    ),
    "discriminated union": {
        "$defs": {"Move": MOVE, "Say": SAY},
        **fields(
            cmd={
                "oneOf": [{"$ref": "#/$defs/Move"}, {"$ref": "#/$defs/Say"}],
                "discriminator": {"propertyName": "kind"},
            }
        ),
    },
    "union of types": fields(
        x={"type": ["string", "integer", "null"], "minLength": 2, "minimum": 3}
    ),
    "enums": fields(
        e={"enum": ["x", 1, None, {"q": [1.5]}, 'é\n"\\']},
        f={"type": "string", "enum": ["u", "v", 3]},
    ),
    "recursive": {
        "$defs": {
            "Tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
                    "next": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
            }
        },
        "$ref": "#/$defs/Tree",
    },
    "tool call": {
        "type": "object",
        "properties": {
            "type": {"const": "call_tool"},
            "tool_name": {"type": "string"},
            "arguments": {"type": "object"},
        },
        "required": ["tool_name", "arguments"],
    },
    "numbers": fields(
        p={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        q={"type": "number", "minimum": 0.001, "maximum": 0.002},
        r={"type": "integer", "exclusiveMinimum": 3, "multipleOf": 5},
        s={"type": "number", "multipleOf": 0.25, "minimum": -1},
        t={"type": "integer", "minimum": 10**12},
        u={"type": "number", "maximum": -5000.5},
        v={"type": "number", "exclusiveMaximum": 7, "minimum": 6.99},
        w={"type": "number", "minimum": 2**53 - 9, "maximum": 2**53 + 3},
    ),
    "patterns": fields(
        d={"type": "string", "format": "date"},
        i={"type": "string", "pattern": "^[A-Z]{3}-[0-9]+$"},
    ),
    "all of": {
        **fields(
            x={"allOf": [{"$ref": "#/$defs/P"}], "description": "d"},
            y={"allOf": [{"minimum": 2, "type": "integer"}, {"maximum": 7}]},
        ),
        "$defs": {"P": fields(k={"type": "boolean"})},
    },
    "dictionary": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0},
    },
    "anything": fields(["x"], x={}, y=True),
    "unique": fields(
        x={"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    ),
    "nested": fields(
        a=fields(
            ["b"],
            metadata=METADATA,
            b={
                "type": "array",
                "items": {"type": "array", "items": {"type": "string"}},
            },
        )
    ),
    "open tuple": fields(
        a={"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}
    ),
    "impossible branch": fields(
        x={"anyOf": [{"type": "integer", "minimum": 5, "maximum": 4}, {"const": "k"}]},
    ),
    "root union": {"oneOf": [MOVE, SAY]},
}

REFUSED = {
    "metadata alone": fields([], metadata=METADATA),
    "not": fields(a={"not": {"type": "string"}}),
    "unknown format": fields(a={"type": "string", "format": "zork"}),
    "enforced format": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **fields(a={"type": "string", "format": "email"}),
    },
    "minProperties": {**fields([], a={"type": "integer"}), "minProperties": 1},
    "overlapping oneOf": fields(
        a={"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}
    ),
    "conditional": {**fields(a={"type": "integer"}), "if": {"required": ["a"]}},
    "unknown keyword": fields(a={"type": "array", "contains": {"const": 1}}),
    "pattern properties": {"type": "object", "patternProperties": {"^a": {}}},
    "remote reference": {"$ref": "https://example.invalid/schema"},
    "dangling reference": {"$ref": "#/$defs/Nothing"},
    "endless recursion": {
        "$defs": {"A": fields(a={"$ref": "#/$defs/A"})},
        "$ref": "#/$defs/A",
    },
    "malformed": {"type": "object", "properties": {"a": {"minLength": "x"}}},
    "malformed members": {"type": "object", "properties": []},
    "long chain": {
        "$defs": {
            **{f"d{n}": fields(a={"$ref": f"#/$defs/d{n + 1}"}) for n in range(400)},
            "d400": {"type": "null"},
        },
        "$ref": "#/$defs/d0",
    },
    "beyond doubles": fields(a={"type": "integer", "minimum": 2**53 + 1}),
    "nothing possible": fields(a={"type": "integer", "minimum": 5, "maximum": 4}),
    "closed combination": {
        "allOf": [fields(a={"type": "integer"}), fields(b={"type": "integer"})]
    },
}


def act(guide, rng, greed):
    """Sample one action; `greed` prefers what makes it long."""
    state, action = guide.start(), []
    words = np.zeros(mask_words(272), np.int32)
    while True:
        action += state.take_forced()
        if state.finished:
            return [*action, END]
        state.write_mask(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        choices = np.flatnonzero(bits).tolist()
        if rng.random() < greed:
            closers = {ord('"'), ord("]"), ord("}"), END}
            choices = [c for c in choices if c not in closers] or choices
            choices = [c for c in choices if c >= 0xF0] or choices
        token = rng.choice(choices)
        if token == END:
            return [*action, END]
        state.consume([token])
        action.append(token)
        assert len(action) <= 2 * guide.max_bytes + 2, bytes(action)


def smallest(schema):
    """Return the bytes the tightest narrowing may need."""
    with pytest.raises(CannotNarrow) as caught:
        narrow(schema, 0)
    return int(str(caught.value).split()[4])


@pytest.mark.parametrize("budget", [40, 96, 512])
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_sampled_action_is_valid_and_ends(name, budget):
    schema = SCHEMAS[name]
    if smallest(schema) >= budget:
        with pytest.raises(Unguidable, match="may need"):
            COMPILER.compile(schema, budget)
        return
    guide = COMPILER.compile(schema, budget)
    validator = jsonschema_rs.validator_for(schema, offline=True)
    rng = random.Random(f"{name}:{budget}")
    for attempt in range(20):
        action = act(guide, rng, greed=(attempt % 4) / 3)
        text = bytes(action[:-1]).decode()
        assert len(action) <= min(budget, guide.max_bytes + 1)
        assert validator.is_valid(json.loads(text)), text
        parse_reply(text, ActionSchema(schema))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_narrowed_is_refused(name):
    with pytest.raises(Unguidable):
        COMPILER.compile(REFUSED[name], 512)


SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-300, 300),
        st.integers(0, 300),
    ),
    st.builds(
        lambda low, span: {"type": "number", "minimum": low, "maximum": low + span},
        st.decimals(-9, 9, places=3).map(float),
        st.sampled_from([0.01, 0.5, 20.0]),
    ),
    st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        st.integers(0, 3),
        st.integers(0, 9),
    ),
    st.lists(
        st.one_of(st.integers(-9, 9), st.text(max_size=4), st.booleans()),
        min_size=1,
        max_size=3,
    ).map(lambda values: {"enum": values}),
)


def containers(children):
    names = st.text('abcxyz_é"', min_size=1, max_size=4)
    return st.one_of(
        st.builds(
            lambda members, keep: fields(sorted(members)[:keep], **members),
            st.dictionaries(names, children, min_size=1, max_size=3),
            st.integers(0, 2),
        ),
        st.builds(
            lambda items, low: {"type": "array", "items": items, "minItems": low},
            children,
            st.integers(0, 2),
        ),
        st.lists(children, min_size=1, max_size=3).map(
            lambda branches: {"anyOf": branches}
        ),
    )


@settings(max_examples=60, deadline=None)
@given(
    schema=st.recursive(SCALARS, containers, max_leaves=6).map(
        lambda inner: fields(root=inner)
    ),
    seed=st.integers(0, 2**16),
)
def test_random_schemas_yield_valid_finite_actions(schema, seed):
    try:
        guide = COMPILER.compile(schema, 300)
    except Unguidable:
        return
    validator = jsonschema_rs.validator_for(schema, offline=True)
    rng = random.Random(seed)
    for greed in (0.0, 0.5, 1.0):
        action = act(guide, rng, greed)
        text = bytes(action[:-1]).decode()
        assert len(action) <= min(300, guide.max_bytes + 1)
        assert validator.is_valid(json.loads(text)), text


def test_key_order_of_the_schema_does_not_matter():
    schema = SCHEMAS["sdk integer"]
    shuffled = dict(reversed(list(schema.items())))
    assert narrow(schema, 100) == narrow(shuffled, 100)
    assert COMPILER.compile(schema, 99).sha256 == COMPILER.compile(shuffled, 99).sha256


def test_wider_budget_gives_longer_strings():
    sizes = [narrow(SCHEMAS["free text"], bound).max_bytes for bound in (40, 400, 9000)]
    assert sizes == sorted(set(sizes))


def test_only_inherited_metadata_is_left_out():
    typed = fields([], metadata=fields([], a={"type": "boolean"}), b={"type": "null"})
    assert set(narrow(typed, 100).schema["properties"]) == {"metadata", "b"}
    required = fields(metadata=METADATA)
    assert set(narrow(required, 100).schema["properties"]) == {"metadata"}
    open_field = fields([], extra=METADATA)
    assert set(narrow(open_field, 100).schema["properties"]) == {"extra"}


def test_what_was_taken_away_is_said():
    assert narrow(SCHEMAS["sdk integer"], 100).notes == (
        "the inherited metadata property is left out",
    )
    assert "at most one entry" in " ".join(narrow(SCHEMAS["tool call"], 200).notes)


def test_too_small_budget_names_what_is_needed():
    with pytest.raises(CannotNarrow, match="may need 11 bytes, and 5 tokens"):
        narrow(SCHEMAS["sdk integer"], 5)


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        ({"enum": ["ab", None]}, 24),
        ({"type": "integer", "minimum": -5, "maximum": 1234}, 5),
        ({"type": "string", "minLength": 0, "maxLength": 3}, 14),
    ],
)
def test_longest_bounds_the_text(schema, bound):
    assert longest(schema) == bound
