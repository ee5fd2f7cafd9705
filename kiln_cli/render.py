"""Output: one JSON document on stdout, or text for people; progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from kiln_core.canonical import compact
from kiln_core.ports import Observer, Silent

__all__ = ["document", "facts", "note", "progress"]

PLAIN_STEPS = 10
"""Plain progress says where it stands this many times."""


def document(record: Any) -> None:
    """Print the one JSON document of a command."""
    click.echo(compact(record).decode())


def facts(rows: list[tuple[str, object]]) -> None:
    """Print named facts, aligned."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name.ljust(width)}  {value}")


def note(text: str) -> None:
    """Tell a person something on stderr."""
    click.echo(text, err=True)


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
        share = completed * PLAIN_STEPS // max(total, 1)
        if share > self._told or completed == total:
            self._told = share
            note(f"  {completed}/{total} rollouts, last return {episode_return:g}")

    def warning(self, text: str) -> None:
        """Print a warning, once."""
        if text not in self._warned:
            self._warned.add(text)
            note(f"Warning: {text}")


class BarProgress:
    """Progress as a bar, for terminals."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._task: Any = None
        self._warned: set[str] = set()

    def phase(self, name: str) -> None:
        """Start a bar."""
        self._finish()
        self._task = self._bars.add_task(name, total=None)

    def rollout(self, completed: int, total: int, episode_return: float) -> None:
        """Move the bar."""
        self._bars.update(self._task, completed=completed, total=total)

    def warning(self, text: str) -> None:
        """Print a warning above the bar, once."""
        if text not in self._warned:
            self._warned.add(text)
            self._bars.console.print(f"Warning: {text}", style="yellow", markup=False)

    def _finish(self) -> None:
        if self._task is not None:
            self._bars.update(self._task, total=1, completed=1)


@contextmanager
def progress(*, as_json: bool) -> Iterator[Observer]:
    """Open the progress display that fits where stderr goes."""
    if as_json:
        yield Silent()
    elif not sys.stderr.isatty():
        yield PlainProgress()
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        with Progress(
            TextColumn("{task.description:>13}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=Console(stderr=True),
        ) as bars:
            yield BarProgress(bars)
