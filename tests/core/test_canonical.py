"""Byte vectors of the one writer, refusals of the one reader, and round trips."""

from __future__ import annotations

import hashlib
import json
import math
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln_core import limits
from kiln_core.canonical import (
    Record,
    Sha256,
    canonical_bytes,
    compact,
    convert_record,
    digest,
    digest_json,
    encoded_again,
    lines_again,
    nests_deeper,
    pretty,
    printable,
    read_json,
    read_record,
    same_json,
    same_member,
    sorted_json,
    split_path,
    total,
)
from kiln_core.errors import InvalidRecord, MalformedJson

VECTORS: list[tuple[Any, bytes]] = [
    (None, b"null"),
    (True, b"true"),
    (False, b"false"),
    (0, b"0"),
    (-1, b"-1"),
    (2**63, b"9223372036854775808"),
    (2**64, b"18446744073709551616"),
    (2**70, b"1180591620717411303424"),
    (-(2**70), b"-1180591620717411303424"),
    (0.0, b"0.0"),
    (-0.0, b"-0.0"),
    (1.0, b"1.0"),
    (0.05, b"0.05"),
    (0.1 + 0.2, b"0.30000000000000004"),
    (1e15, b"1000000000000000.0"),
    (1e16, b"1e16"),
    (1e21, b"1e21"),
    (1.5e300, b"1.5e300"),
    (1e-4, b"0.0001"),
    (1e-5, b"0.00001"),
    (1e-6, b"1e-6"),
    (1.5e-6, b"1.5e-6"),
    (1e-7, b"1e-7"),
    (5e-324, b"5e-324"),
    (1.7976931348623157e308, b"1.7976931348623157e308"),
    ("", b'""'),
    ("/", b'"/"'),
    ("\u00e9\u2028\U0001f600", '"\u00e9\u2028\U0001f600"'.encode()),
    ('"\\\b\t\n\f\r', b'"\\"\\\\\\b\\t\\n\\f\\r"'),
    ("\x00\x1b\x1f\x7f", b'"\\u0000\\u001b\\u001f\x7f"'),
    ([], b"[]"),
    ([1, 1.0, True], b"[1,1.0,true]"),
    ({}, b"{}"),
    ({"b": 1, "a": {"d": 2, "c": 3}}, b'{"a":{"c":3,"d":2},"b":1}'),
    (
        {"\U00010000": 1, "\uffff": 2, "a": 3, "B": 4, "": 5},
        '{"":5,"B":4,"a":3,"\uffff":2,"\U00010000":1}'.encode(),
    ),
]


@pytest.mark.parametrize(("value", "expected"), VECTORS, ids=lambda v: repr(v)[:40])
def test_value_has_these_canonical_bytes(value: Any, expected: bytes) -> None:
    assert canonical_bytes(value) == expected
    assert same_json(read_json(expected, "x"), value)


DIGESTS = [
    (
        {},
        "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    ),
    (
        {"b": [1, 1.0, True, None], "a": "\u00e9"},
        "sha256:"
        + hashlib.sha256('{"a":"é","b":[1,1.0,true,null]}'.encode()).hexdigest(),
    ),
    (
        [],
        "sha256:4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945",
    ),
]


@pytest.mark.parametrize(("value", "expected"), DIGESTS)
def test_digest_is_of_canonical_bytes(value: Any, expected: Sha256) -> None:
    assert digest_json(value) == expected
    assert digest(canonical_bytes(value)) == expected


def test_digest_agrees_with_an_independent_writer() -> None:
    value = {"z": [1, {"y": None, "x": "t\u00e9xt"}], "a": True}
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)  # noqa: TID251 - the independent one
    assert digest_json(value) == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


SAME_NUMBER = [1, 1.0, True]


@pytest.mark.parametrize("left", SAME_NUMBER, ids=repr)
@pytest.mark.parametrize("right", SAME_NUMBER, ids=repr)
def test_one_as_three_types_is_three_values(left: Any, right: Any) -> None:
    assert same_json(left, right) is (type(left) is type(right))
    assert (digest_json(left) == digest_json(right)) is (type(left) is type(right))


def test_negative_zero_is_not_zero() -> None:
    assert not same_json(-0.0, 0.0)
    assert not same_json(0, 0.0)
    assert not same_json(False, 0)


REFUSED: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("blank", b"  \n"),
    ("NaN", b"NaN"),
    ("NaN inside", b'{"a":[NaN]}'),
    ("Infinity", b"Infinity"),
    ("-Infinity", b"[-Infinity]"),
    ("overflow", b"1e999"),
    ("overflow inside", b'{"a":-1e400}'),
    ("duplicate key", b'{"a":1,"a":1}'),
    ("duplicate key inside", b'[{"a":{"b":1,"c":2,"b":3}}]'),
    ("duplicate key by escape", b'{"a":1,"\\u0061":2}'),
    ("lone surrogate", b'"\\ud800"'),
    ("lone low surrogate", b'"\\udc00x"'),
    ("lone surrogate key", b'{"\\ud800":1}'),
    ("swapped surrogates", b'"\\udc00\\ud800"'),
    ("invalid utf-8", b'"\xff"'),
    ("overlong utf-8", b'"\xc0\xaf"'),
    ("surrogate in utf-8", b'"\xed\xa0\x80"'),
    ("trailing data", b"{} {}"),
    ("trailing comma", b"[1,]"),
    ("trailing nul", b"{}\x00"),
    ("byte order mark", b"\xef\xbb\xbf{}"),
    ("utf-16", '{"a":1}'.encode("utf-16")),
    ("control character", b'"\n"'),
    ("single quotes", b"{'a':1}"),
    ("bare key", b"{a:1}"),
    ("comment", b"{} // x"),
    ("hexadecimal", b"0x10"),
    ("leading zero", b"01"),
    ("plus sign", b"+1"),
    ("bare point", b".5"),
    ("point at end", b"5."),
    ("unended", b'{"a":'),
    ("huge integer", b"1" * 4301),
    ("deep", b"[" * 129 + b"]" * 129),
    ("very deep", b"[" * 100_000 + b"]" * 100_000),
    ("deep objects", b'{"a":' * 5_000 + b"1" + b"}" * 5_000),
]


@pytest.mark.parametrize(
    "document", [text for _, text in REFUSED], ids=[name for name, _ in REFUSED]
)
def test_reader_refuses(document: bytes) -> None:
    with pytest.raises(MalformedJson, match=r"^the document "):
        read_json(document, "the document")


def test_reader_refuses_text_with_lone_surrogates() -> None:
    with pytest.raises(MalformedJson):
        read_json('"\ud800"', "x")


@pytest.mark.parametrize("digits", [1, 20, 309, 4300])
def test_integers_are_exact_to_4300_digits(digits: int) -> None:
    text = b"9" * digits
    assert canonical_bytes(read_json(text, "x")) == text
    negative = b"-" + text[:4299]
    assert canonical_bytes(read_json(negative, "x")) == negative


def test_integer_that_could_not_be_read_again_is_refused() -> None:
    with pytest.raises(InvalidRecord):
        sorted_json(-(10**4299))


def test_reader_accepts_the_deepest_allowed() -> None:
    depth = limits.MAX_JSON_DEPTH
    value = read_json("[" * depth + "]" * depth, "x")
    assert not nests_deeper(value, depth)
    assert nests_deeper(value, depth - 1)
    assert read_json("[" * 5 + "]" * 5, "x", max_depth=5)
    with pytest.raises(MalformedJson, match="nests deeper than 4 levels"):
        read_json("[" * 5 + "]" * 5, "x", max_depth=4)


def test_peer_text_in_errors_is_short_and_printable() -> None:
    key = "\x1b[2J" + "k" * 100_000
    text = '{"a":{"' + "\\u001b[2J" + "k" * 100_000 + '":1}}'
    with pytest.raises(MalformedJson) as caught:
        read_json('{"K":1,"K":2}'.replace("K", "\\u001b" + "k" * 1000), "frame")
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()

    class Closed(Record, frozen=True, kw_only=True):
        a: dict[str, str]

    class Inner(Record, frozen=True, kw_only=True):
        b: int = 0

    for record, document in ((Closed, text), (Inner, text)):
        with pytest.raises(InvalidRecord) as invalid:
            convert_record(read_json(document, "x"), record, "x")
        assert len(str(invalid.value)) < 400
        assert str(invalid.value).isprintable()
    assert printable(key, 10) == "\\x1b[2Jkkk..."


UNWRITABLE: list[Any] = [
    math.nan,
    math.inf,
    [None, -math.inf],
    {"a": {"b": (1, math.nan)}},
    "\ud800",
    {"\ud800": 1},
    10**4300,
    {1: 2},
    {(1, 2): 3},
    object(),
]


@pytest.mark.parametrize("value", UNWRITABLE, ids=range(len(UNWRITABLE)))
def test_writer_refuses(value: Any) -> None:
    with pytest.raises(InvalidRecord):
        canonical_bytes(value)
    if not (isinstance(value, dict) and 1 in value):
        with pytest.raises(InvalidRecord):
            compact(value)


def test_writer_refuses_nesting_without_end() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    for write in (canonical_bytes, compact):
        with pytest.raises(InvalidRecord):
            write(value)


def test_decoded_record_is_encoded_again_or_refused() -> None:
    record = Reading(zulu=1, free=[None])
    assert encoded_again(record) == compact(record)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRecord, match="too deep"):
        encoded_again(Reading(zulu=1, free=deep))


class Reading(Record, frozen=True, kw_only=True):
    zulu: int
    alpha: float | None = None
    free: Any = None


def test_records_keep_declared_order_and_pretty_form() -> None:
    record = Reading(zulu=1, alpha=2.0, free={"b": 1})
    assert compact(record) == b'{"zulu":1,"alpha":2.0,"free":{"b":1}}'
    assert pretty(record) == (
        b'{\n  "zulu": 1,\n  "alpha": 2.0,\n  "free": {\n    "b": 1\n  }\n}\n'
    )


def test_records_with_nan_are_refused() -> None:
    with pytest.raises(InvalidRecord, match="not finite"):
        pretty(Reading(zulu=1, alpha=math.nan))


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        (b'{"zulu":"1"}', "/zulu"),
        (b'{"zulu":1.0}', "/zulu"),
        (b'{"zulu":true}', "/zulu"),
        (b'{"zulu":1,"alpha":"x"}', "/alpha"),
        (b"{}", ""),
        (b'{"zulu":1,"other":2}', ""),
        (b"[]", ""),
        (b"null", ""),
    ],
)
def test_invalid_record_names_its_place(document: bytes, pointer: str) -> None:
    with pytest.raises(InvalidRecord) as caught:
        read_record(document, Reading, "reading", file="f.json")
    assert caught.value.details == {"pointer": pointer, "file": "f.json"}
    with pytest.raises(InvalidRecord) as converted:
        convert_record(msgspec.json.decode(document), Reading, "reading")
    assert converted.value.details == {"pointer": pointer}


@pytest.mark.parametrize(
    "document",
    [
        b'{"zulu":1,"alpha":null,"free":{"b":1,"a":2}}',
        b'{"zulu":1,"alpha":null,"free":{"b":1,"a":2}}\n',
        b'{\n  "zulu": 1,\n  "alpha": null,\n  "free": {\n    "b": 1,\n    "a": 2\n  }\n}\n',
        b' { "free" : { "a":2 , "b":1 } , "zulu": 1 } ',
        b'{"zulu":1,"free":{"b":1,"a":2.0e0}}'.replace(b"2.0e0", b"2"),
    ],
)
def test_record_may_be_written_in_any_strict_form(document: bytes) -> None:
    record = read_record(document, Reading, "x")
    assert record.zulu == 1
    assert same_json(record.free, {"a": 2, "b": 1})


@pytest.mark.parametrize(
    "document",
    [
        b'{"zulu":1,"zulu":1}',
        b'{"zulu":1,"free":{"a":1,"a":1}}',
        b'{"zulu":1,"free":[{"a":1,"b":2,"a":1}]}',
        b'{"zulu":1} {}',
        b'{"zulu":1,"free":"\\ud800"}',
        b'{"zulu":1,"alpha":1e999}',
        b'{"zulu":1,"free":1e999}',
        b'{"zulu":1,"free":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"zulu":1,"free":' + b"[" * 950 + b"]" * 950 + b"}",
        b'{"zulu":1,"free":' + b"[" * 9500 + b"]" * 9500 + b"}",
    ],
    ids=lambda d: d[:40].decode(errors="replace"),
)
def test_record_reader_is_strict(document: bytes) -> None:
    with pytest.raises(MalformedJson):
        read_record(document, Reading, "x")


def test_record_may_nest_a_whole_document_from_outside() -> None:
    depth = limits.MAX_JSON_DEPTH
    document = b'{"zulu":1,"free":' + b"[" * depth + b"]" * depth + b"}"
    assert read_record(document, Reading, "x").zulu == 1


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@given(json_values)
def test_reading_what_was_written_gives_the_same_bytes(value: Any) -> None:
    data = canonical_bytes(value)
    again = read_json(data, "x")
    assert canonical_bytes(again) == data
    assert canonical_bytes(sorted_json(value)) == data
    assert compact(sorted_json(value)) == data
    assert json.loads(data) == value


def test_absent_members_are_the_same_only_as_absent_ones() -> None:
    assert same_member(msgspec.UNSET, msgspec.UNSET)
    assert not same_member(msgspec.UNSET, None)
    assert not same_member(0, msgspec.UNSET)
    assert same_member([1.0], [1.0])
    assert not same_member([1.0], [1])


def test_sum_runs_left_to_right() -> None:
    assert total([1e16, 1.0, -1e16]) == 0.0
    assert total([]) == 0.0
    assert total([0.1] * 10) == 0.9999999999999999


@pytest.mark.parametrize(
    ("message", "split"),
    [
        ("Expected `int` - at `$.a`", ("Expected `int`", "/a")),
        ("bad - at `$.a[3].b`", ("bad", "/a/3/b")),
        ("bad - at `$[...].b`", ("bad", "/.../b")),
        ("bad - at `key in $.a`", ("bad", "/a")),
        ("bad", ("bad", "")),
        ("bad - at `elsewhere`", ("bad - at `elsewhere`", "")),
        (
            "unknown field `x` - at `$.evil` - at `$.real`",
            ("unknown field `x` - at `$.evil`", "/real"),
        ),
    ],
)
def test_place_is_split_from_a_message(message: str, split: tuple[str, str]) -> None:
    assert split_path(message) == split


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("sha256:" + "0" * 64, True),
        ("sha256:" + "f" * 64, True),
        ("sha256:" + "F" * 64, False),
        ("sha256:" + "0" * 63, False),
        ("sha256:" + "0" * 65, False),
        ("sha256:" + "0" * 64 + "\n", False),
        ("\nsha256:" + "0" * 64, False),
        ("SHA256:" + "0" * 64, False),
        ("0" * 64, False),
        ("", False),
    ],
)
def test_digest_text_has_one_form(text: str, valid: bool) -> None:
    try:
        msgspec.convert(text, Sha256)
    except msgspec.ValidationError:
        assert not valid
    else:
        assert valid


def test_hostile_documents_are_refused_quickly() -> None:
    started = time.process_time()
    keys = ",".join(f'"{index}":0' for index in range(100_000))
    assert len(read_json("{" + keys + "}", "x")) == 100_000
    with pytest.raises(MalformedJson):
        read_json("{" + keys + ',"7":1}', "x")
    assert time.process_time() - started < 20


def test_lines_are_what_each_value_is_encoded_as() -> None:
    values = [{"b": "\n\r\u2028", "a": 1.0}, [], "x", None]
    assert lines_again(values, free=True) == [canonical_bytes(one) for one in values]
    assert lines_again(values, free=False) == [encoded_again(one) for one in values]
    assert lines_again([], free=True) == []
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRecord, match="too deep"):
        lines_again([deep], free=False)
