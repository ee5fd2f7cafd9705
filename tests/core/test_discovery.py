from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from kiln_core.canonical import compact, read_json, read_record
from kiln_core.discovery import (
    DiscoveryDocuments,
    EnvironmentIdentity,
    EnvironmentInspection,
    ensure_unchanged,
    environment_url,
    inspection,
    websocket_url,
)
from kiln_core.errors import IdentityDrift, RemoteProtocolError, UsageError
from tests.simulators.pure import COUNTER, COUNTER_ACTION, documents

URL = "http://127.0.0.1:8001"
OPENAPI: dict[str, Any] = COUNTER.openapi or {}


def inspect(found: DiscoveryDocuments = COUNTER) -> EnvironmentInspection:
    return inspection(URL, found, "none")


def replaced(name: str, value: Any) -> DiscoveryDocuments:
    return msgspec.structs.replace(COUNTER, **{name: value})


def independent(value: Any) -> str:
    """Digest canonical bytes with another writer (no floats in these documents)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)  # noqa: TID251 - the independent one
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_digests_are_of_the_raw_documents() -> None:
    identity = inspect().identity
    assert identity.schema_sha256 == independent(COUNTER.schema)
    assert identity.discovery_sha256 == independent(
        {
            "schema": "kiln.openenv-discovery.v1",
            "metadata": COUNTER.metadata,
            "environment_schema": COUNTER.schema,
            "environments": COUNTER.environments,
            "openapi": COUNTER.openapi,
        }
    )
    assert identity.schema_sha256 == (
        "sha256:98ebcc29f9da9c9685848818210431f46deb35a786130163e7672fcc8730e12f"
    )
    assert identity.discovery_sha256 == (
        "sha256:29e8fddd715959911628a500baf4927868989b7e09c162bfd6f06c03c437304e"
    )


def test_identity_holds_what_the_documents_say() -> None:
    identity = inspect().identity
    assert compact(identity).startswith(
        b'{"schema":"kiln.openenv-identity.v1","client_profile":"openenv-http/1.x",'
        b'"base_url":"http://127.0.0.1:8001","websocket_url":"ws://127.0.0.1:8001/ws",'
        b'"authentication":"none","openapi_version":"1.0.0","environments":["counter"],'
        b'"metadata":{"name":"counter","description":"Play counter.","version":"1",'
        b'"author":null},"schema_sha256":"sha256:'
    )
    assert inspect().schema.action == COUNTER_ACTION
    assert list(inspect().schema.action) == sorted(COUNTER_ACTION)


def test_order_and_white_space_do_not_matter() -> None:
    def shuffled(value: Any) -> Any:
        text = json.dumps(value, indent=3)  # noqa: TID251 - a peer's writer
        parsed = read_json(text, "x")
        if isinstance(parsed, dict):
            return dict(reversed(parsed.items()))
        return parsed

    other = DiscoveryDocuments(
        **{n: shuffled(getattr(COUNTER, n)) for n in COUNTER.__struct_fields__}
    )
    assert inspect(other) == inspect()
    ensure_unchanged(inspect(), inspect(other))


@pytest.mark.parametrize(
    ("name", "extended"),
    [
        ("metadata", {**COUNTER.metadata, "licence": "MIT"}),
        ("schema", {**COUNTER.schema, "x-extra": None}),
        ("openapi", {**OPENAPI, "x-extra": [1]}),
        ("openapi", None),
        ("environments", None),
    ],
)
def test_unknown_extension_changes_the_complete_digest(
    name: str, extended: Any
) -> None:
    captured, live = inspect(), inspect(replaced(name, extended))
    assert live.identity.discovery_sha256 != captured.identity.discovery_sha256
    with pytest.raises(IdentityDrift) as caught:
        ensure_unchanged(captured, live)
    assert "identity.discovery_sha256" in caught.value.details["changed"]


def test_number_types_of_documents_are_part_of_the_digest() -> None:
    one, other = dict(OPENAPI), dict(OPENAPI)
    one["x"], other["x"] = 1, 1.0
    assert replaced("openapi", one).sha256 != replaced("openapi", other).sha256


def test_old_server_lacks_inventory_and_openapi() -> None:
    old = msgspec.structs.replace(COUNTER, environments=None, openapi=None)
    identity = inspect(old).identity
    assert identity.environments == ["counter"]
    assert identity.openapi_version is None
    assert identity.discovery_sha256 == independent(
        {
            "schema": "kiln.openenv-discovery.v1",
            "metadata": COUNTER.metadata,
            "environment_schema": COUNTER.schema,
            "environments": None,
            "openapi": None,
        }
    )


@pytest.mark.parametrize(
    "openapi",
    [
        None,
        [],
        {},
        {"info": 1},
        {"info": {"version": 1}},
        {"info": {"version": ""}},
        {"info": {"version": " 1"}},
        {"info": {"version": "1\x1b[2J"}},
        {"info": {"version": "1" * 257}},
    ],
    ids=lambda v: repr(v)[:40],
)
def test_version_that_no_identity_can_hold_counts_as_none(openapi: Any) -> None:
    assert inspect(replaced("openapi", openapi)).identity.openapi_version is None


@pytest.mark.parametrize(
    ("name", "document", "route"),
    [
        ("metadata", None, "/metadata"),
        ("metadata", [], "/metadata"),
        ("metadata", {"name": "x"}, "/metadata"),
        ("metadata", {"name": "", "description": ""}, "/metadata"),
        ("metadata", {"name": 1, "description": ""}, "/metadata"),
        ("metadata", {"name": " x", "description": ""}, "/metadata"),
        ("metadata", {"name": "x\n", "description": ""}, "/metadata"),
        ("metadata", {"name": "x" * 257, "description": ""}, "/metadata"),
        ("metadata", {"name": "x", "description": None}, "/metadata"),
        ("metadata", {"name": "x", "description": "", "author": 1}, "/metadata"),
        ("schema", None, "/schema"),
        ("schema", {"action": {}, "observation": {}}, "/schema"),
        ("environments", {}, "/list_environments"),
        ("environments", [1], "/list_environments"),
        ("environments", ["x"] * 1025, "/list_environments"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_document_of_another_shape_is_refused(
    name: str, document: Any, route: str
) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        inspect(replaced(name, document))
    assert caught.value.details == {"environment": URL, "route": route}
    assert caught.value.hint


def test_metadata_may_have_more_members_and_omit_optional_ones() -> None:
    found = inspect(replaced("metadata", {"name": "x", "description": "", "a": {}}))
    assert compact(found.identity.metadata) == b'{"name":"x","description":""}'


CHANGED: list[tuple[str, Any, str]] = [
    ("identity.base_url", "http://other", "base_url"),
    ("identity.websocket_url", "ws://other/ws", "websocket_url"),
    ("identity.authentication", "bearer", "authentication"),
    ("identity.openapi_version", None, "openapi_version"),
    ("identity.environments", ["counter", "b"], "environments"),
    ("identity.metadata", None, "metadata"),
    ("identity.schema_sha256", "sha256:" + "0" * 64, "schema_sha256"),
    ("identity.discovery_sha256", "sha256:" + "0" * 64, "discovery_sha256"),
]


@pytest.mark.parametrize(("label", "value", "field"), CHANGED)
def test_changed_identity_is_reported_by_label_alone(
    label: str, value: Any, field: str
) -> None:
    captured = inspect()
    if field == "metadata":
        value = msgspec.structs.replace(captured.identity.metadata, author="secret")
    identity = msgspec.structs.replace(captured.identity, **{field: value})
    live = msgspec.structs.replace(captured, identity=identity)
    with pytest.raises(IdentityDrift) as caught:
        ensure_unchanged(captured, live)
    assert caught.value.details == {
        "environment": URL,
        "pointer": "/" + label.replace(".", "/"),
        "changed": [label],
    }
    assert "secret" not in str(caught.value)


def test_every_field_of_an_identity_is_compared() -> None:
    """The two that are missing are constants of the record."""
    fixed = {"identity.schema", "identity.client_profile"}
    labels = {f"identity.{name}" for name in EnvironmentIdentity.__struct_fields__}
    assert labels == fixed | {label for label, _, _ in CHANGED}


@pytest.mark.parametrize("field", ["action", "observation", "state"])
def test_changed_schema_is_reported(field: str) -> None:
    captured = inspect()
    schema = msgspec.structs.replace(captured.schema, **{field: {"type": 1.0}})
    with pytest.raises(IdentityDrift) as caught:
        ensure_unchanged(captured, msgspec.structs.replace(captured, schema=schema))
    assert caught.value.details["changed"] == [f"schema.{field}"]


def test_legacy_identity_has_no_complete_digest_to_compare() -> None:
    captured = inspect()
    identity = msgspec.structs.replace(captured.identity, discovery_sha256=UNSET)
    ensure_unchanged(msgspec.structs.replace(captured, identity=identity), captured)


def test_inspection_is_read_as_it_was_written() -> None:
    found = inspect(documents("x", True))
    assert read_record(compact(found), EnvironmentInspection, "x") == found


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        (" http://h/ ", "http://h"),
        ("https://H.example/A/b//", "https://h.example/A/b"),
        ("HTTP://Host:80", "http://host:80"),
        ("http://[::1]:90/x", "http://[::1]:90/x"),
        ("127.0.0.1", "http://127.0.0.1"),
    ],
)
def test_url_has_one_form(text: str, url: str) -> None:
    assert environment_url(text) == url
    assert environment_url(url) == url
    assert environment_url(url, default_scheme=False) == url
    assert websocket_url(url).startswith(("ws://", "wss://"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://",
        "https:///x",
        "ftp://h",
        "ws://h",
        "//h",
        "http:/h",
        "http://h:",
        "http://h:99999",
        "http://h:x",
        "http://[::1",
        "http://u@h",
        "http://u:p@h",
        "http://@h",
        "http://h?q",
        "http://h?",
        "http://h#f",
        "http://h#",
        "http://a b",
        "http://a\nb",
        "http://a\tb",
        "http://a\x00",
        "http://h\\@x",
        "http://\udce9",
        "http://" + "h" * 2048,
    ],
    ids=lambda v: repr(v)[:30],
)
def test_url_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        environment_url(text)


def test_absolute_url_may_be_demanded() -> None:
    with pytest.raises(UsageError):
        environment_url("localhost:8000", default_scheme=False)


def test_session_url_keeps_host_path_and_security() -> None:
    assert websocket_url("https://h:1/base") == "wss://h:1/base/ws"
    assert websocket_url("http://h") == "ws://h/ws"


@pytest.mark.parametrize("url", ["http://x..y", f"http://{'a' * 64}.b", "http://.x"])
def test_host_no_resolver_takes_is_refused(url):
    with pytest.raises(UsageError):
        environment_url(url)


def test_long_url_is_refused() -> None:
    with pytest.raises(UsageError, match="over 2048 bytes"):
        environment_url("http://h/" + "a" * 2048)
    assert environment_url("http://h/" + "a" * 2000)
