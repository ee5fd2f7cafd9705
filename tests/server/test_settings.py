"""Settings from environment variables and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kiln_core.errors import UsageError
from kiln_server.settings import VARIABLES, ServerSettings, is_loopback, settings_from


def test_defaults_are_local_and_experimental() -> None:
    settings = settings_from({}, {})
    assert settings == ServerSettings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8420)
    assert settings.serving_profile == "experimental"


EXAMPLES: dict[str, tuple[str, Any]] = {
    "KILN_MODEL_PATH": ("builtin:random", "builtin:random"),
    "KILN_SERVED_MODEL_ID": ("my model", "my model"),
    "KILN_ADAPTER_DIR": ("some/where", Path("some/where")),
    "KILN_SERVER_HOST": ("::1", "::1"),
    "KILN_SERVER_PORT": ("9000", 9000),
    "KILN_SERVER_SERVING_PROFILE": ("stable", "stable"),
    "KILN_API_TOKEN": ("s3cret", "s3cret"),
    "KILN_ENGINE": ("other", "other"),
    "KILN_COMPILE_CACHE_DIR": ("cache", Path("cache")),
}


@pytest.mark.parametrize("variable", VARIABLES)
def test_variable_sets_its_field(variable: str) -> None:
    text, value = EXAMPLES[variable]
    assert getattr(settings_from({variable: text}, {}), VARIABLES[variable]) == value


@pytest.mark.parametrize("variable", VARIABLES)
def test_empty_variable_counts_as_absent(variable: str) -> None:
    assert settings_from({variable: ""}, {}) == ServerSettings()


def test_flag_wins_over_variable() -> None:
    settings = settings_from({"KILN_SERVER_PORT": "9000"}, {"port": 0, "host": None})
    assert (settings.port, settings.host) == (0, "127.0.0.1")
    assert settings_from({}, {"adapter_dir": Path("x")}).adapter_dir == Path("x")


INVALID = [
    ({"KILN_SERVER_PORT": "many"}, {}, "KILN_SERVER_PORT"),
    ({"KILN_SERVER_PORT": "70000"}, {}, "port must be 0 to 65535, not 70000"),
    ({}, {"port": -1}, "port must be 0 to 65535, not -1"),
    ({"KILN_SERVER_SERVING_PROFILE": "fast"}, {}, "KILN_SERVER_SERVING_PROFILE"),
    ({}, {"serving_profile": "fast"}, "--serving-profile"),
    ({"KILN_SERVED_MODEL_ID": " x"}, {}, "served model id"),
    ({"KILN_SERVED_MODEL_ID": "x\ny"}, {}, "served model id"),
    ({}, {"served_model_id": ""}, "served model id"),
    ({"KILN_API_TOKEN": "a b"}, {}, "API token"),
    ({"KILN_API_TOKEN": "tök"}, {}, "API token"),
    ({"KILN_API_TOKEN": "a\nb"}, {}, "API token"),
]


@pytest.mark.parametrize(("environment", "flags", "reason"), INVALID)
def test_invalid_value_is_refused_by_name(
    environment: dict[str, str], flags: dict[str, object], reason: str
) -> None:
    with pytest.raises(UsageError) as caught:
        settings_from(environment, flags)
    assert reason in caught.value.message
    assert environment.get("KILN_API_TOKEN", "\0") not in caught.value.message


OTHERS = ["0.0.0.0", "::", "", "192.0.2.1", "models.example", "0", "127.0.0.1.example"]  # noqa: S104 - that is the point


@pytest.mark.parametrize("host", OTHERS)
def test_address_for_others_needs_a_token(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(UsageError, match="needs an API token"):
        settings_from({}, {"host": host})
    assert settings_from({"KILN_API_TOKEN": "s3cret"}, {"host": host}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert settings_from({}, {"host": host}).host == host


def test_token_is_not_shown() -> None:
    assert "s3cret" not in repr(settings_from({"KILN_API_TOKEN": "s3cret"}, {}))
