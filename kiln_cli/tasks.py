"""``kiln openenv tasks``: splits and rows of environments that list their tasks."""

from __future__ import annotations

from typing import Any, Final

import click
from msgspec import UNSET

from kiln_cli.options import (
    environment_clients,
    environment_options,
    json_option,
)
from kiln_cli.render import document, facts, note, say
from kiln_core import limits
from kiln_core.canonical import canonical_bytes, printable
from kiln_core.tasks import (
    EnvironmentTasks,
    TaskCatalog,
    TaskCatalogReport,
    TaskSelection,
    TaskSplit,
    task_selection,
)

__all__ = ["tasks"]

MAX_SHOWN: Final = 200
"""Characters of one row or split that people are shown."""
TASK_API: Final = {
    "available": "available",
    "unsupported": "unsupported (rollouts need none)",
}


@click.command(
    epilog="""\b
Examples:
  kiln openenv tasks --environment http://127.0.0.1:8000
  kiln openenv tasks --environment http://127.0.0.1:8000 \\
    --split train --start 100 --limit 25 --json
"""
)
@environment_options
@click.option(
    "--environment-name",
    metavar="NAME",
    help="Which environment of the server, in any case.  [default: the only one]",
)
@click.option(
    "--split",
    metavar="NAME",
    help="Which split to show rows of, in any case.  [default: list splits only]",
)
@click.option(
    "--start", type=int, default=0, show_default=True, help="First row, from 0."
)
@click.option(
    "--limit",
    type=int,
    default=limits.TASK_PAGE,
    show_default=True,
    help=f"Rows at most, up to {limits.MAX_TASK_PAGE}.",
)
@json_option
def tasks(*, as_json: bool, **flags: Any) -> None:
    """List splits of dataset-backed environments, and a page of one.

    Rows are shown and nothing else: no rollout reads them. What a session plays is
    decided by its reset options and seed.
    """
    from kiln_core.drive.concurrency import run

    names = ("environment_name", "split", "start", "limit")
    selection = task_selection(**{name: flags[name] for name in names})
    report = run(_tasks, flags, selection)
    if as_json:
        document(report)
        return
    for index, environment in enumerate(report.catalogs):
        if index:
            say("")
        _show(environment)


async def _tasks(flags: dict[str, Any], selection: TaskSelection) -> TaskCatalogReport:
    from kiln_core.drive.tasks import task_catalogs

    async with environment_clients(flags) as clients:
        return await task_catalogs(clients, selection)


def _show(environment: EnvironmentTasks) -> None:
    catalog = environment.catalog
    rows: list[tuple[str, object]] = [
        ("environment", printable(catalog.environment_name)),
        ("url", environment.base_url),
        ("task API", TASK_API[catalog.task_api]),
    ]
    rows += [("split", _split(split)) for split in catalog.splits]
    facts(rows)
    if catalog.num_tasks is not UNSET:
        _show_page(catalog)
    elif catalog.task_api == "available" and catalog.splits:
        note("Hint: name a split with --split to see its rows")


def _split(split: TaskSplit) -> str:
    extra = {k: v for k, v in split.items() if k not in {"name", "type"}}
    words = [printable(split["name"]), f"({printable(split['type'])})"]
    return " ".join([*words, _one_line(extra)] if extra else words)


def _show_page(catalog: TaskCatalog) -> None:
    start, stop = catalog.start or 0, catalog.stop or 0
    missing = max(0, stop - start) - len(catalog.tasks)
    if missing:
        note(f"Warning: the provider left out {missing} rows of this page")
    last = start + len(catalog.tasks) - 1
    total = f"{catalog.num_tasks} in {printable(str(catalog.selected_split))}"
    if last < start:
        say(f"No rows from {start} on, of {total}.")
        return
    say(f"Rows {start} to {last} of {total}:")
    for index, row in enumerate(catalog.tasks, start):
        say(f"{str(index).rjust(len(str(last)))}  {_one_line(row)}")


def _one_line(value: Any) -> str:
    return printable(canonical_bytes(value).decode(), MAX_SHOWN)
