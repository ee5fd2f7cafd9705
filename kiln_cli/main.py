"""The ``kiln`` command: its groups, its exit codes, its error messages.

Exit codes: 0 the claim holds; 1 it was checked and does not hold; 2 it could not be
checked or finished; 128 and the signal's number it was interrupted. Commands are
imported when they are run, so that help is fast and an optional package is only needed
by the command that uses it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any, Final, NoReturn, TextIO

import click

from kiln_cli.render import Interrupted, document, flat, note, write_whole
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
UNFINISHED: Final = EXIT_CODES[KilnError]

EXTRAS: Final = {
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
"""Which extra brings a package."""

SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
"""They end a command like Ctrl-C does, so that nothing is left half done."""
FROM_SIGNAL: Final = 128
"""Added to the number of the signal that ended a program, as shells report it."""


def exit_code(error_type: type[KilnError]) -> int:
    """Return the exit code of an error class."""
    return next(EXIT_CODES[t] for t in error_type.__mro__ if t in EXIT_CODES)


class LazyGroup(click.Group):
    """A group whose commands are imported when they are needed.

    Args:
        lazy: ``module:attribute`` and one line of help, by command name.
        plugins: Entry point group that may add commands.
    """

    def __init__(
        self,
        *args: Any,
        lazy: dict[str, tuple[str, str]],
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
        """Import a command; one that cannot be imported says so when it is run."""
        loader = self._loader(cmd_name)
        if loader is None:
            return None
        try:
            command: click.Command = loader()
        except ImportError as error:
            return _unavailable(cmd_name, missing_extra(f"kiln {cmd_name}", error))
        return command

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the list of commands; only plugins are imported for it."""
        rows = [(name, self._short_help(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _short_help(self, ctx: click.Context, name: str) -> str:
        if name in self._lazy:
            return self._lazy[name][1]
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(limit=80)

    def _loader(self, name: str) -> Callable[[], Any] | None:
        if name in self._lazy:
            module, _, attribute = self._lazy[name][0].partition(":")
            return lambda: getattr(import_module(module), attribute)
        plugin = self._entry_points().get(name)
        return None if plugin is None else plugin.load

    def _entry_points(self) -> dict[str, Any]:
        if self._plugins is None:
            return {}
        from importlib.metadata import entry_points

        return {entry.name: entry for entry in entry_points(group=self._plugins)}


def missing_extra(what: str, error: ImportError) -> MissingExtra:
    """Return the one sentence for a package that is not installed."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package, "all")
    return MissingExtra(
        f"{what} needs {package or 'a package'}, which is not installed",
        hint=f"pip install 'kiln-openenv[{extra}]'",
    )


def _unavailable(name: str, missing: MissingExtra) -> click.Command:
    def refuse(arguments: tuple[str, ...]) -> NoReturn:
        raise missing

    return click.Command(
        name,
        callback=refuse,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        short_help=f"Not available: {missing.message}.",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
    )


CONTEXT: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 96}


@click.group(
    cls=LazyGroup,
    lazy={
        "adapters": (
            "kiln_cli.adapters:adapters",
            "List, load and unload LoRA adapters.",
        ),
        "health": ("kiln_cli.health:health", "Say whether a server is ready."),
        "openenv": (
            "kiln_cli.main:openenv",
            "Collect, verify, replay, train and evaluate.",
        ),
        "train": ("kiln_cli.main:train", "Submit training jobs and look at them."),
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
        "explain": ("kiln_cli.explain:explain", "Say why a corpus trains, or not."),
        "grpo": ("kiln_cli.grpo:grpo", "Train an adapter on recorded groups."),
        "status": ("kiln_cli.jobs:status", "Show training jobs, newest first."),
    },
    epilog="""\b
Examples:
  kiln train grpo --file openenv.rollouts.jsonl --adapter my-agent
  kiln train status
""",
)
def train() -> None:
    """Submit training jobs and look at them."""


@click.group(
    cls=LazyGroup,
    lazy={
        "evaluate": (
            "kiln_cli.evaluate:evaluate",
            "Compare two policies on the same held-out seeds.",
        ),
        "inspect": (
            "kiln_cli.inspect:inspect",
            "Show identity, schemas and digests of environments.",
        ),
        "replay": (
            "kiln_cli.replay:replay",
            "Replay a bundle against its live environments.",
        ),
        "rollout": (
            "kiln_cli.rollout:rollout",
            "Collect groups of rollouts and publish them as a bundle.",
        ),
        "tasks": (
            "kiln_cli.tasks:tasks",
            "List splits of dataset-backed environments, and a page of one.",
        ),
        "train": (
            "kiln_cli.train:train",
            "Collect a bundle and train an adapter on those bytes.",
        ),
        "verify": ("kiln_cli.verify:verify", "Verify a bundle offline."),
    },
    epilog="""\b
Examples:
  kiln openenv inspect --environment http://127.0.0.1:8000
  kiln openenv verify
""",
)
def openenv() -> None:
    """Collect, verify, replay, train and evaluate on OpenEnv environments."""


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    write_whole()
    command = _CommandLine(arguments)
    with command.signals():
        code = command.run()
        code = command.flushed(code)
    sys.exit(code)


def _flush(stream: TextIO | None) -> bool:
    """Write out what a stream buffers; return whether it went anywhere."""
    if stream is None:
        return True
    try:
        stream.flush()
    except (OSError, ValueError):
        # Nothing can be told there; without a place to go, the interpreter would
        # complain about it once more when it ends.
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
        return False
    return True


class _CommandLine:
    """One run of the program: its arguments, and what ended it."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self.as_json = "--json" in arguments
        self.signal = int(signal.SIGINT)

    def run(self) -> int:
        """Run it and return the exit code; every failure becomes one sentence."""
        try:
            code = kiln.main(self.arguments, prog_name="kiln", standalone_mode=False)
        except SystemExit as stop:
            # click ends the program, with 1, when nobody reads its output any more
            return UNFINISHED if stop.code else 0
        except (click.Abort, KeyboardInterrupt) as stop:
            return self._interrupted(stop)
        except click.exceptions.NoArgsIsHelpError as error:
            return self._no_command(error)
        except click.ClickException as error:
            return self._report(_usage(error))
        except KilnError as error:
            return self._report(error)
        except ImportError as error:
            return self._report(missing_extra(f"kiln {self._command}", error))
        except Exception as error:
            # the boundary of the program: people get a sentence, never a traceback
            if os.environ.get("KILN_DEBUG"):
                raise
            return self._report(_unexpected(error))
        return code if isinstance(code, int) else 0

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Let a request to terminate act like Ctrl-C."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in before.items():
            if handler is signal.SIG_DFL:
                signal.signal(number, self._terminate)
        try:
            yield
        finally:
            for number, handler in before.items():
                if signal.getsignal(number) == self._terminate:
                    signal.signal(number, handler)

    def flushed(self, code: int) -> int:
        """Write out what is buffered; return the exit code.

        An answer nobody received is a failure; what stderr tells of the work is not
        the work.
        """
        if not _flush(sys.stdout):
            code = code or UNFINISHED
        _flush(sys.stderr)
        return code

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    def _interrupted(self, stop: BaseException) -> int:
        hint, details = "", {}
        if isinstance(stop, Interrupted):
            hint, details = stop.hint, stop.details
        error = KilnError("interrupted", hint=hint, **details)
        self._tell(error, code="interrupted")
        return FROM_SIGNAL + self.signal

    def _no_command(self, error: click.UsageError) -> int:
        if self.as_json:
            return self._report(UsageError("a command is missing"))
        note(error.format_message())
        return UNFINISHED

    def _report(self, error: KilnError) -> int:
        self._tell(error)
        return exit_code(type(error))

    def _tell(self, error: KilnError, code: str | None = None) -> None:
        if self.as_json:
            told = error.document()
            told["error"]["code"] = code or error.code
            with suppress(OSError):
                document(told)
            return
        note(flat(error.message if code else f"Error: {_placed(error)}"))
        if error.hint:
            note(flat(f"Hint: {error.hint}"))

    @property
    def _command(self) -> str:
        words = (word for word in self.arguments if not word.startswith("-"))
        return next(words, "")


def _placed(error: KilnError) -> str:
    """Return the message, and the file it is about."""
    file = error.details.get("file")
    if file is None or str(file) in error.message:
        return error.message
    return f"{file}: {error.message}"


def _usage(error: click.ClickException) -> UsageError:
    context = getattr(error, "ctx", None)
    hint = "" if context is None else f"see '{context.command_path} --help'"
    return UsageError(error.format_message().replace("\n", " "), hint=hint)


def _unexpected(error: Exception) -> KilnError:
    return KilnError(
        f"kiln failed unexpectedly: {type(error).__name__}: {error}",
        hint="set KILN_DEBUG=1 for the traceback, and please report it",
    )
