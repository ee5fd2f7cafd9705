"""What an environment says of itself over HTTP: identity, schemas and their digests.

The complete discovery digest binds the raw documents, unknown extension fields
included, and is independent of white space and key order. Older servers lack the
inventory or the OpenAPI route; the absent document enters the digest as null, and the
inventory becomes the metadata name. Fetching is not done here
(``kiln_core.drive.http``).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_core import limits
from kiln_core.canonical import (
    JsonValue,
    Record,
    Sha256,
    convert_record,
    digest_json,
    same_json,
    sorted_json,
)
from kiln_core.errors import (
    IdentityDrift,
    InvalidRecord,
    RemoteProtocolError,
    UsageError,
)
from kiln_core.provenance import check_identity_text

__all__ = [
    "DiscoveryDocuments",
    "EnvironmentIdentity",
    "EnvironmentInspection",
    "EnvironmentSchema",
    "Metadata",
]

CLIENT_PROFILE: Final = "openenv-http/1.x"
IDENTITY_SCHEMA: Final = "kiln.openenv-identity.v1"
DISCOVERY_SCHEMA: Final = "kiln.openenv-discovery.v1"
INSPECTION_SCHEMA: Final = "kiln.openenv-inspection.v1"

Authentication: TypeAlias = Literal["none", "bearer"]


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """The typed part of ``/metadata``; unknown members only enter the digest."""

    name: Annotated[str, Meta(min_length=1)]
    description: str
    readme_content: str | UnsetType | None = UNSET
    version: str | UnsetType | None = UNSET
    author: str | UnsetType | None = UNSET
    documentation_url: str | UnsetType | None = UNSET


class EnvironmentIdentity(Record, frozen=True, kw_only=True):
    """``kiln.openenv-identity.v1``: which environment this is."""

    schema: Literal["kiln.openenv-identity.v1"]
    client_profile: Literal["openenv-http/1.x"]
    base_url: Annotated[str, Meta(min_length=1)]
    websocket_url: Annotated[str, Meta(pattern="^wss?://")]
    authentication: Authentication = "none"
    """How requests were authenticated; never the credential or its name."""
    openapi_version: str | None
    environments: list[str]
    metadata: Metadata
    schema_sha256: Sha256
    """Digest of the raw ``/schema`` document."""
    discovery_sha256: Sha256 | UnsetType = UNSET
    """Complete discovery digest; absent only in legacy artifacts."""


class EnvironmentSchema(Record, frozen=True, kw_only=True):
    """The JSON Schemas an environment publishes, free JSON in canonical order."""

    action: JsonValue
    observation: JsonValue
    state: JsonValue


class EnvironmentInspection(Record, frozen=True, kw_only=True):
    """An identity with its typed schemas."""

    identity: EnvironmentIdentity
    schema: EnvironmentSchema


class InspectionReport(Record, frozen=True, kw_only=True):
    """``kiln.openenv-inspection.v1``: what ``kiln openenv inspect --json`` prints."""

    schema: Literal["kiln.openenv-inspection.v1"]
    environments: list[EnvironmentInspection]


class DiscoveryDocuments(msgspec.Struct, frozen=True, kw_only=True):
    """The raw discovery documents; None where an old server has no such route."""

    metadata: JsonValue
    schema: JsonValue
    environments: JsonValue | None
    openapi: JsonValue | None

    @property
    def sha256(self) -> Sha256:
        """The complete discovery digest."""
        return digest_json(
            {
                "schema": DISCOVERY_SCHEMA,
                "metadata": self.metadata,
                "environment_schema": self.schema,
                "environments": self.environments,
                "openapi": self.openapi,
            }
        )


def environment_url(text: str, *, default_scheme: bool = True) -> str:
    """Return the canonical base URL of an environment.

    Args:
        text: What the user gave.
        default_scheme: Whether ``http://`` is added where no scheme stands.

    Raises:
        UsageError: It is no absolute http(s) URL, or has user information, a query
            or a fragment.
    """
    url = text.strip()
    if default_scheme and "://" not in url:
        url = "http://" + url
    parts = _split_url(url, text)
    named = parts.hostname and not parts.netloc.endswith(":")
    if parts.scheme not in {"http", "https"} or not named:
        raise UsageError(f"environment URL {text!r} is not an http or https URL")
    if parts.username is not None or parts.password is not None:
        raise UsageError("an environment URL must not carry a user name or password")
    if len(url.encode()) > limits.MAX_URL_BYTES:
        raise UsageError(f"environment URL is over {limits.MAX_URL_BYTES} bytes")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def _split_url(url: str, text: str) -> SplitResult:
    # urlsplit drops line breaks in silence, and a backslash is a slash to some peers
    if not url.isprintable() or " " in url or "\\" in url:
        raise UsageError(f"environment URL {text!r} holds characters no URL has")
    if "?" in url or "#" in url:
        raise UsageError(f"environment URL {text!r} must have no query or fragment")
    try:
        parts = urlsplit(url)
        _ = parts.port
        (parts.hostname or "").encode("idna")  # what a resolver would refuse
    except ValueError as error:
        raise UsageError(f"environment URL {text!r} is malformed: {error}") from error
    return parts


def websocket_url(base_url: str) -> str:
    """Return the session URL: same host and path plus ``/ws``."""
    return "ws" + base_url.removeprefix("http") + "/ws"


def inspection(
    base_url: str, documents: DiscoveryDocuments, authentication: Authentication
) -> EnvironmentInspection:
    """Derive an environment's identity and schemas from its raw documents.

    Args:
        base_url: Canonical, from `environment_url`.
        documents: As fetched.
        authentication: How they were fetched.

    Raises:
        RemoteProtocolError: A document has not the shape OpenEnv prescribes.
    """
    metadata = _metadata(base_url, documents.metadata)
    return EnvironmentInspection(
        identity=EnvironmentIdentity(
            schema=IDENTITY_SCHEMA,
            client_profile=CLIENT_PROFILE,
            base_url=base_url,
            websocket_url=websocket_url(base_url),
            authentication=authentication,
            openapi_version=_openapi_version(documents.openapi),
            environments=_inventory(base_url, documents, metadata.name),
            metadata=metadata,
            schema_sha256=digest_json(documents.schema),
            discovery_sha256=documents.sha256,
        ),
        schema=_schema(base_url, documents.schema),
    )


def ensure_unchanged(
    captured: EnvironmentInspection, live: EnvironmentInspection
) -> None:
    """Compare a captured inspection with a live one.

    Raises:
        IdentityDrift: They differ; ``details["changed"]`` lists closed field labels,
            never peer-authored text.
    """
    changed = [
        f"identity.{name}"
        for name in EnvironmentIdentity.__struct_fields__
        if not _same_field(captured.identity, live.identity, name)
    ]
    changed += [
        f"schema.{name}"
        for name in EnvironmentSchema.__struct_fields__
        if not same_json(getattr(captured.schema, name), getattr(live.schema, name))
    ]
    if changed:
        raise IdentityDrift(
            f"environment {captured.identity.base_url} is not the one recorded: "
            f"{', '.join(changed)} changed",
            environment=captured.identity.base_url,
            pointer="/" + changed[0].replace(".", "/"),
            changed=changed,
        )


def _same_field(
    captured: EnvironmentIdentity, live: EnvironmentIdentity, name: str
) -> bool:
    expected = getattr(captured, name)
    if name == "discovery_sha256" and expected is UNSET:
        return True
    return bool(expected == getattr(live, name))


def _metadata(base_url: str, document: JsonValue) -> Metadata:
    try:
        metadata = convert_record(document, Metadata, "/metadata")
        check_identity_text(metadata.name, "the environment's name")
    except (InvalidRecord, ValueError) as error:
        raise _unlike_openenv(base_url, "/metadata", str(error)) from error
    return metadata


def _openapi_version(document: JsonValue) -> str | None:
    """Return the version, None where there is none that an identity can hold.

    The document itself is bound by the discovery digest either way.
    """
    info = document.get("info") if isinstance(document, dict) else None
    version = info.get("version") if isinstance(info, dict) else None
    if not isinstance(version, str):
        return None
    try:
        check_identity_text(version, "the OpenAPI version")
    except ValueError:
        return None
    return version


def _inventory(base_url: str, documents: DiscoveryDocuments, name: str) -> list[str]:
    names = documents.environments
    if names is None:
        return [name]
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise _unlike_openenv(base_url, "/list_environments", "not a list of names")
    if len(names) > limits.MAX_ENVIRONMENT_NAMES:
        raise _unlike_openenv(
            base_url,
            "/list_environments",
            f"more than {limits.MAX_ENVIRONMENT_NAMES} names",
        )
    return names


def _schema(base_url: str, document: JsonValue) -> EnvironmentSchema:
    wanted = EnvironmentSchema.__struct_fields__
    if not isinstance(document, dict) or not set(wanted) <= document.keys():
        raise _unlike_openenv(
            base_url, "/schema", "it must have action, observation and state"
        )
    members: dict[str, Any] = {name: sorted_json(document[name]) for name in wanted}
    return EnvironmentSchema(**members)


def _unlike_openenv(base_url: str, route: str, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"{base_url}{route} is not what OpenEnv prescribes: {why}",
        hint="check that the URL is the base of an OpenEnv server",
        environment=base_url,
        route=route,
    )
