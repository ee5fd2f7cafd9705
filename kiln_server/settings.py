"""Settings of a server: environment variables, overridden by command-line flags."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from kiln_core.errors import UsageError
from kiln_core.provenance import check_identity_text

__all__ = ["ServerSettings", "ServingProfile", "is_loopback", "settings_from"]

ServingProfile: TypeAlias = Literal["stable", "maintenance", "experimental"]
"""``stable`` only serves, ``maintenance`` only trains, ``experimental`` does both."""

VARIABLES: Final = {
    "KILN_MODEL_PATH": "model",
    "KILN_SERVED_MODEL_ID": "served_model_id",
    "KILN_ADAPTER_DIR": "adapter_dir",
    "KILN_SERVER_HOST": "host",
    "KILN_SERVER_PORT": "port",
    "KILN_SERVER_SERVING_PROFILE": "serving_profile",
    "KILN_API_TOKEN": "api_token",
    "KILN_ENGINE": "engine",
    "KILN_COMPILE_CACHE_DIR": "compile_cache_dir",
}
"""Which environment variable sets which field."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a server runs."""

    model: str = "builtin:tiny"
    """``builtin:tiny``, ``builtin:random`` or a Hugging Face folder."""
    served_model_id: str | None = None
    adapter_dir: Path = Path("adapters")
    """Where adapters live, one folder each; created when missing."""
    engine: str = "jax"
    """Name of a ``kiln.engines`` entry point."""
    host: str = "127.0.0.1"
    port: int = 8420
    """0 takes a free one."""
    serving_profile: ServingProfile = "experimental"
    api_token: str | None = None
    """Bearer token every route but ``/health`` demands."""
    max_queued_jobs: int = 16
    max_tracked_jobs: int = 128
    """Training jobs kept in memory, finished ones included."""
    compile_cache_dir: Path | None = None

    def __repr__(self) -> str:
        return f"ServerSettings(model={self.model!r}, port={self.port})"


def settings_from(
    environment: Mapping[str, str], flags: Mapping[str, object]
) -> ServerSettings:
    """Merge environment variables and flags.

    Args:
        environment: Such as ``os.environ``.
        flags: By field name; None means "not given".

    Raises:
        UsageError: A value is invalid, or the server would be open to others without
            a token.
    """
    given = {
        field: environment[name]
        for name, field in VARIABLES.items()
        if environment.get(name)
    }
    values: dict[str, object] = {**given}
    values.update({name: value for name, value in flags.items() if value is not None})
    try:
        settings = msgspec.convert(values, ServerSettings, strict=False, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise UsageError(_explained(str(error), given)) from error
    _check(settings)
    return settings


def is_loopback(host: str) -> bool:
    """Say whether an address is of this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check(settings: ServerSettings) -> None:
    if not 0 <= settings.port <= 65_535:
        raise UsageError(f"port must be 0 to 65535, not {settings.port}")
    if settings.served_model_id is not None:
        try:
            check_identity_text(settings.served_model_id, "served model id")
        except ValueError as error:
            raise UsageError(f"invalid server setting: {error}") from error
    token = settings.api_token
    if token and (not token.isascii() or not token.isprintable() or " " in token):
        raise UsageError(
            "the API token must be ASCII without white space",
            hint="set KILN_API_TOKEN to something a header can carry",
        )
    if not is_loopback(settings.host) and not token:
        raise UsageError(
            f"serving on {settings.host or 'every address'} lets others in, so it "
            "needs an API token",
            hint="set KILN_API_TOKEN, or serve on 127.0.0.1",
        )


def _path(wanted: type, value: Any) -> Any:
    if wanted is Path and isinstance(value, str | Path):
        return Path(value)
    raise NotImplementedError


def _explained(reason: str, given: Mapping[str, str]) -> str:
    """Name the variable that holds the value msgspec complains about."""
    place = reason.rpartition("$.")[2].rstrip("`")
    names = {field: name for name, field in VARIABLES.items()}
    source = names[place] if place in given else f"--{place.replace('_', '-')}"
    return f"invalid server setting {source}: {reason.partition(' - at')[0]}"
