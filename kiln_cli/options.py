"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kiln_core import limits
from kiln_core.canonical import JsonValue, read_json
from kiln_core.discovery import environment_url
from kiln_core.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from kiln_core.bundle import BundlePaths
    from kiln_core.drive.http import EnvironmentClient
    from kiln_core.plan import CollectionControls

__all__ = [
    "ON_OFF",
    "bundle_options",
    "collection_options",
    "environment_options",
    "json_option",
    "output_options",
    "plan_options",
    "seed_option",
    "server_options",
    "stacked",
    "trace_option",
]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
ON_OFF = click.Choice(["true", "false"])
CREDENTIAL_NAME = re.compile(r"\A[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
DEFAULT_URL = "http://localhost:8420"

seed_option = click.option(
    "--seed-start", type=int, default=0, show_default=True, help="First group's seed."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document."
)


def stacked(*decorators: Callable[[Any], Any]) -> Callable[[CommandT], CommandT]:
    """Return one decorator of several, in the order that help lists them."""

    def decorate(command: CommandT) -> CommandT:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


server_options = stacked(
    click.option(
        "--url",
        default=DEFAULT_URL,
        envvar="KILN_URL",
        show_envvar=True,
        show_default=True,
        help="Address of the Kiln server.",
    ),
)

environment_options = stacked(
    click.option(
        "--environment",
        "environments",
        multiple=True,
        required=True,
        metavar="URL",
        help="Base URL of an OpenEnv server; repeat for several.",
    ),
    click.option(
        "--credential-env",
        "credential_envs",
        multiple=True,
        metavar="ENV",
        help="Environment variable with the bearer token of the environment in the "
        "same position; '-' for a public one.",
    ),
)

CONTROL_OPTIONS = (
    ("max-steps", int, 8, "Environment steps of an episode at most."),
    ("concurrency", int, 4, "Episodes in flight at most."),
    ("max-action-tokens", int, 256, "Tokens of one turn at most."),
    ("temperature", float, 1.0, "Sampling temperature."),
    ("protocol-error-reward", float, -1.0, "Reward of each error, also recovered."),
    ("max-recoverable-errors", int, 3, "Errors an episode may recover from."),
    ("capacity-wait-seconds", int, 300, "How long a full environment is waited for."),
    ("episode-retries", int, 2, "Fresh attempts after a lost session."),
)


def _numbers(
    table: tuple[tuple[str, type, Any, str], ...],
) -> Callable[[CommandT], CommandT]:
    return stacked(
        *(
            click.option(
                f"--{name}", type=kind, default=default, show_default=True, help=text
            )
            for name, kind, default, text in table
        )
    )


def plan_options(groups: int, group_size: int) -> Callable[[CommandT], CommandT]:
    """Return the options of a plan, with the defaults of a command."""
    return _numbers(
        (
            ("groups", int, groups, "Groups to collect; each has one seed."),
            ("group-size", int, group_size, "Candidates of each group."),
        )
    )


collection_options = stacked(
    _numbers(CONTROL_OPTIONS),
    click.option(
        "--thinking-budget-tokens",
        type=int,
        help="Reasoning tokens of a turn at most.  [default: no bound]",
    ),
    click.option(
        "--thinking",
        type=ON_OFF,
        default="true",
        show_default=True,
        help="Let a model that can reason do so.",
    ),
    click.option(
        "--reset-options",
        type=click.Path(path_type=Path),
        help="JSON file with reset options for every environment.",
    ),
    click.option(
        "--environment-reset-options",
        multiple=True,
        metavar="FILE",
        help="JSON file with reset options of the environment in the same position; "
        "'-' for none.",
    ),
    click.option("--unguided", is_flag=True, help="Do not guide decoding by schema."),
)
trace_option = click.option(
    "--no-trace",
    is_flag=True,
    help="Do not keep token ids; training renders the text, and checks no probability.",
)

output_options = stacked(
    click.option(
        "--output",
        type=click.Path(path_type=Path),
        default="openenv.rollouts.jsonl",
        show_default=True,
        help="Dataset file.",
    ),
    click.option(
        "--replay-output",
        type=click.Path(path_type=Path),
        default="openenv.replay.json",
        show_default=True,
        help="Replay manifest file.",
    ),
    click.option(
        "--summary-output",
        type=click.Path(path_type=Path),
        default="openenv.rollout-summary.json",
        show_default=True,
        help="Summary file.",
    ),
    click.option("--force", is_flag=True, help="Replace existing files."),
)

bundle_options = stacked(
    click.option(
        "--summary",
        type=click.Path(path_type=Path),
        default="openenv.rollout-summary.json",
        show_default=True,
        help="Summary file of the bundle.",
    ),
    click.option(
        "--dataset",
        type=click.Path(path_type=Path),
        help="Where the dataset is, if not beside the summary.",
    ),
    click.option(
        "--replay",
        type=click.Path(path_type=Path),
        help="Where the replay manifest is, if not beside the summary.",
    ),
)


def bundle_paths(flags: dict[str, Any]) -> BundlePaths:
    """Return the output paths of a collection.

    Raises:
        UsageError: The summary could not record one.
    """
    from kiln_core.bundle import BundlePaths

    return BundlePaths(
        dataset=recordable(flags["output"]),
        replay=recordable(flags["replay_output"]),
        summary=recordable(flags["summary_output"]),
    )


def recordable(path: Path) -> Path:
    """Return a path that JSON can hold.

    Raises:
        UsageError: Its name is not UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"path {str(path)!r} is not UTF-8, so no summary can name it",
            hint="choose another path",
        ) from error
    return path


def controls_of(flags: dict[str, Any]) -> CollectionControls:
    """Return the controls that flags name.

    Raises:
        UsageError: A value has the wrong type.
    """
    from kiln_core.plan import CollectionControls, controls_from

    names = CollectionControls.__struct_fields__
    values = {name: flags[name] for name in names if name in flags}
    values["thinking"] = flags["thinking"] == "true"
    return controls_from(values)


def environment_urls(flags: dict[str, Any]) -> list[str]:
    """Return the canonical environment URLs.

    Raises:
        UsageError: One is invalid, or there are too many.
    """
    urls = [environment_url(text) for text in flags["environments"]]
    if len(urls) > limits.MAX_ENVIRONMENTS:
        raise UsageError(f"at most {limits.MAX_ENVIRONMENTS} environments")
    return urls


@asynccontextmanager
async def environment_clients(
    flags: dict[str, Any],
) -> AsyncIterator[list[EnvironmentClient]]:
    """Open a client for each environment, in their order.

    Raises:
        UsageError: A URL or a credential is unusable.
    """
    from kiln_core.drive.http import Credential, environment_client

    urls = environment_urls(flags)
    tokens = tokens_of(flags["credential_envs"], len(urls))
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                environment_client(url, Credential(token) if token else None)
            )
            for url, token in zip(urls, tokens, strict=True)
        ]


def tokens_of(names: tuple[str, ...], environments: int) -> list[str | None]:
    """Resolve credential variables, one per environment.

    Raises:
        UsageError: They do not align, a name is invalid, or a variable is not set.
    """
    if not names:
        return [None] * environments
    if len(names) != environments:
        raise UsageError(
            f"{len(names)} --credential-env for {environments} environments",
            hint="repeat it in environment order, with '-' for a public one",
        )
    return [None if name == "-" else _token(name) for name in names]


def templates_of(flags: dict[str, Any], environments: int) -> list[dict[str, Any]]:
    """Read the reset options, one object per environment.

    Raises:
        UsageError: A file is unusable, or files and environments do not align.
    """
    from kiln_core.plan import reset_templates

    shared_file: Path | None = flags["reset_options"]
    shared = read_options(shared_file) if shared_file is not None else {}
    aligned = [
        {} if name == "-" else read_options(Path(name))
        for name in flags["environment_reset_options"]
    ]
    return reset_templates(shared, aligned, environments)


def read_options(
    path: Path, limit_bytes: int = limits.MAX_RESET_OPTIONS_BYTES
) -> JsonValue:
    """Read a JSON file that a user wrote.

    Raises:
        UsageError: It is missing, too large, or not strict JSON.
    """
    from kiln_core.drive.files import read_regular

    try:
        return read_json(read_regular(path, limit_bytes, "file"), str(path))
    except ArtifactError as error:
        raise UsageError(error.message, file=str(path)) from error


def _token(name: str) -> str:
    if not CREDENTIAL_NAME.match(name):
        raise UsageError(
            f"--credential-env {name!r} is not the name of an environment variable"
        )
    token = os.environ.get(name, "").strip()
    if not token:
        raise UsageError(f"environment variable {name} is not set")
    return token
