"""Output: one JSON document on stdout, or text for people; progress on stderr.

Text of environments and servers is hostile: what a terminal would obey is shown
escaped. Progress never stops the work it tells of.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from kiln_core.canonical import compact

if TYPE_CHECKING:
    from kiln_core.ports import Observer

__all__ = [
    "Interrupted",
    "document",
    "facts",
    "flat",
    "note",
    "plain",
    "progress",
    "say",
    "write_whole",
]

PLAIN_STEPS = 10
"""Plain progress says where it stands this many times."""


class Interrupted(click.Abort):
    """Ctrl-C at a moment when something goes on without us."""

    def __init__(self, hint: str, **details: str) -> None:
        super().__init__()
        self.hint = hint
        self.details = details


def write_whole() -> None:
    """Let the standard streams write all of a text, whatever is in it.

    An unbuffered stream (``PYTHONUNBUFFERED``, ``python -u``) drops the rest of a
    write that a signal cuts short, without an error; a buffered one goes on.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.reconfigure(errors="backslashreplace")
        if isinstance(stream.buffer, io.RawIOBase):
            # its own descriptor object: the stream it stands for stays open after it
            raw = io.FileIO(stream.fileno(), "w", closefd=False)
            buffered = io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=True,
            )
            setattr(sys, name, buffered)


def document(record: Any) -> None:
    """Print the one JSON document of a command, UTF-8 whatever the locale."""
    click.echo(compact(record))


def say(text: str) -> None:
    """Print a line for people."""
    click.echo(plain(text))


def facts(rows: list[tuple[str, object]]) -> None:
    """Print named facts, aligned."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"{name.ljust(width)}  {flat(str(value))}")


def note(text: str) -> None:
    """Tell a person something on stderr, if anybody is there."""
    with suppress(OSError, ValueError):
        click.echo(plain(text), err=True)


def flat(text: str) -> str:
    """Return text as one line, so that none of it can pass for another message."""
    return text.replace("\n", "\\n")


def plain(text: str) -> str:
    """Return text without anything a terminal obeys, line feeds excepted."""
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1]
        for char in text
    )


class PlainProgress:
    """Progress as plain lines, for logs."""

    def __init__(self) -> None:
        self._told = 0
        self._warned: set[str] = set()

    def phase(self, name: str) -> None:
        """Name the phase."""
        self._told = 0
        note(f"{name} ...")

    def rollout(self, completed: int, total: int, episode_return: float) -> None:
        """Say where it stands, a few times."""
        self._tell(completed, total, f"rollouts, last return {episode_return:g}")

    def step(self, completed: int, total: int, loss: float) -> None:
        """Say where training stands, a few times."""
        self._tell(completed, total, f"steps, loss {loss:.4f}")

    def warning(self, text: str) -> None:
        """Print a warning, once."""
        if text not in self._warned:
            self._warned.add(text)
            note(f"Warning: {flat(text)}")

    def _tell(self, completed: int, total: int, what: str) -> None:
        share = completed * PLAIN_STEPS // max(total, 1)
        if share > self._told:
            self._told = share
            note(f"  {completed}/{total} {what}")


class BarProgress:
    """Progress as a bar, for terminals."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._task: Any = None
        self._counted = False
        self._warned: set[str] = set()

    def phase(self, name: str) -> None:
        """Start a bar."""
        self._finish()
        self._task = self._bars.add_task(name, total=None, count="")
        self._counted = False

    def rollout(self, completed: int, total: int, episode_return: float) -> None:
        """Move the bar."""
        self._move(completed, total, f"rollouts, last return {episode_return:g}")

    def step(self, completed: int, total: int, loss: float) -> None:
        """Move the bar."""
        self._move(completed, total, f"steps, loss {loss:.4f}")

    def done(self) -> None:
        """Complete the last bar."""
        self._finish()

    def warning(self, text: str) -> None:
        """Print a warning above the bar, once."""
        if text not in self._warned:
            self._warned.add(text)
            shown = plain(f"Warning: {flat(text)}")
            self._bars.console.print(shown, style="yellow", markup=False)

    def _move(self, completed: int, total: int, what: str) -> None:
        if self._task is None:
            self.phase("working")
        self._counted = True
        count = f"{completed}/{total} {what}"
        self._bars.update(self._task, completed=completed, total=total, count=count)

    def _finish(self) -> None:
        if self._task is not None and not self._counted:
            self._bars.update(self._task, total=1, completed=1)


@contextmanager
def progress(*, as_json: bool) -> Iterator[Observer]:
    """Open the progress display that fits where stderr goes."""
    if as_json or sys.stderr is None:
        from kiln_core.ports import Silent

        yield Silent()
    elif not sys.stderr.isatty():
        yield PlainProgress()
    else:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        with Progress(
            TextColumn("{task.description:>13}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}", markup=False),
            console=Console(stderr=True),
        ) as bars:
            display = BarProgress(bars)
            yield display
            display.done()
