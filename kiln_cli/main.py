"""The ``kiln`` command: its groups, its exit codes, its error messages.

Exit codes: 0 the claim holds; 1 it was checked and does not hold; 2 it could not be
checked or finished. Commands are imported when they are run, so that help is fast and
an optional package is only needed by the command that uses it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final, NoReturn

import click

from kiln_core import errors
from kiln_core.errors import KilnError, MissingExtra, UsageError

__all__ = ["EXIT_CODES", "exit_code", "kiln", "run"]

EXIT_CODES: Final[dict[type[KilnError], int]] = {
    KilnError: 2,
    errors.ArtifactError: 1,
    errors.DriftError: 1,
    errors.TrainingError: 1,
}
"""Exit code by error class; the nearest ancestor counts."""

INTERRUPTED: Final = 130
"""128 plus SIGINT, as shells report it."""


def exit_code(error_type: type[KilnError]) -> int:
    """Return the exit code of an error class."""
    return next(EXIT_CODES[t] for t in error_type.__mro__ if t in EXIT_CODES)


class LazyGroup(click.Group):
    """A group whose commands are imported when they are needed.

    Args:
        commands: ``module:attribute`` by command name.
        plugins: Entry point group that may add commands.
    """

    def __init__(
        self,
        *args: Any,
        lazy: dict[str, str],
        plugins: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy
        self._plugins = plugins

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name every command, plugins included."""
        return sorted({*self._lazy, *self._entry_points()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command.

        Raises:
            MissingExtra: A package it needs is not installed.
        """
        loader = self._loader(cmd_name)
        if loader is None:
            return None
        try:
            command: click.Command = loader()
        except ImportError as error:
            missing = missing_extra(f"kiln {cmd_name}", error)
            raise missing from error
        return command

    def _loader(self, name: str) -> Callable[[], Any] | None:
        if name in self._lazy:
            module, _, attribute = self._lazy[name].partition(":")
            return lambda: getattr(import_module(module), attribute)
        plugin = self._entry_points().get(name)
        return None if plugin is None else plugin.load

    def _entry_points(self) -> dict[str, Any]:
        if self._plugins is None:
            return {}
        return {entry.name: entry for entry in entry_points(group=self._plugins)}


def missing_extra(what: str, error: ImportError) -> MissingExtra:
    """Return the one sentence for a package that is not installed."""
    package = (error.name or "").partition(".")[0]
    extras = {
        "starlette": "server",
        "hypercorn": "server",
        "prometheus_client": "server",
        "jax": "jax",
        "flax": "jax",
        "optax": "jax",
        "safetensors": "jax",
        "tokenizers": "jax",
        "llguidance": "jax",
        "openenv": "examples",
    }
    extra = extras.get(package, "all")
    return MissingExtra(
        f"{what} needs {package or 'a package'}, which is not installed",
        hint=f"pip install 'kiln-openenv[{extra}]'",
    )


CONTEXT: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 96}


@click.group(
    cls=LazyGroup,
    lazy={
        "adapters": "kiln_cli.adapters:adapters",
        "health": "kiln_cli.health:health",
        "openenv": "kiln_cli.main:openenv",
        "train": "kiln_cli.jobs:train",
    },
    plugins="kiln.commands",
    context_settings=CONTEXT,
    epilog="""\b
Examples:
  kiln serve
  kiln openenv inspect --environment http://127.0.0.1:8000
  kiln openenv train --environment http://127.0.0.1:8000 --output-adapter my-agent
""",
)
@click.version_option(package_name="kiln-openenv")
def kiln() -> None:
    """Train language-model agents on OpenEnv environments, provably."""


@click.group(
    cls=LazyGroup,
    lazy={
        "evaluate": "kiln_cli.evaluate:evaluate",
        "inspect": "kiln_cli.inspect:inspect",
        "replay": "kiln_cli.replay:replay",
        "rollout": "kiln_cli.rollout:rollout",
        "train": "kiln_cli.train:train",
        "verify": "kiln_cli.verify:verify",
    },
)
def openenv() -> None:
    """Collect, verify, replay, train and evaluate on OpenEnv environments."""


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    try:
        code = kiln.main(arguments, prog_name="kiln", standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = INTERRUPTED
    except click.ClickException as error:
        code = _usage(error, as_json=as_json)
    except KilnError as error:
        code = _report(error, as_json=as_json)
    except BrokenPipeError:
        sys.stderr.close()
        code = 2
    except Exception as error:
        # the boundary of the program: people get a sentence, never a traceback
        if os.environ.get("KILN_DEBUG"):
            raise
        code = _report(
            KilnError(
                f"kiln failed unexpectedly: {type(error).__name__}: {error}",
                hint="set KILN_DEBUG=1 for the traceback, and please report it",
            ),
            as_json=as_json,
        )
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: click.ClickException, *, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    hint = "" if context is None else f"see '{context.command_path} --help'"
    return _report(UsageError(error.format_message(), hint=hint), as_json=as_json)


def _report(error: KilnError, *, as_json: bool) -> int:
    if as_json:
        from kiln_core.canonical import compact

        click.echo(compact(error.document()).decode())
    else:
        click.echo(f"Error: {error.message}", err=True)
        if error.hint:
            click.echo(f"Hint: {error.hint}", err=True)
    return exit_code(type(error))
