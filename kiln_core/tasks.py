"""Catalogs of dataset-backed environments: what may be asked, what may be answered.

An environment with a task provider lists named splits and the rows of each. Rows are
discovery and nothing else: OpenEnv has no operation that selects one for a session, so
nothing here reaches a reset, a dataset or a replay. Split types are an open vocabulary
and members a provider adds are kept; every answer is of a stranger and is checked.
Fetching is not done here (``kiln_core.drive.tasks``).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NoReturn, TypeAlias
from urllib.parse import quote

from msgspec import UNSET, Meta, UnsetType

from kiln_core import limits
from kiln_core.canonical import JsonValue, Record, printable, sorted_json
from kiln_core.errors import InvalidRecord, RemoteProtocolError, UsageError

__all__ = [
    "EnvironmentTasks",
    "TaskCatalog",
    "TaskCatalogReport",
    "TaskSelection",
    "choose_environment",
    "choose_split",
    "read_count",
    "read_row",
    "read_rows",
    "read_splits",
    "route_segment",
    "task_selection",
]

TASK_CATALOG_SCHEMA: Final = "kiln.openenv-task-catalog.v1"

TaskSplit: TypeAlias = dict[str, JsonValue]
"""``name`` and ``type``, both text, and whatever the provider adds."""
Count: TypeAlias = Annotated[int, Meta(ge=0)]

MAX_NAMED: Final = 8
"""Names that a refusal lists."""


class TaskSelection(Record, frozen=True, kw_only=True):
    """What of a catalog is wanted; from `task_selection`, which checks it."""

    environment_name: str | None = None
    """Which of the advertised environments; None where there is only one."""
    split: str | None = None
    """Which split to show rows of; None lists the splits alone."""
    start: int = 0
    """First row of the page, from 0."""
    limit: int = limits.TASK_PAGE
    """Rows of the page at most."""

    def stop(self, num_tasks: int) -> int:
        """Return the end of the page, exclusive; before ``start`` it is beyond it."""
        return min(self.start + self.limit, num_tasks)


class TaskCatalog(Record, frozen=True, kw_only=True):
    """What the task provider of one environment answered."""

    environment_name: str
    """As the environment advertises it, whatever the spelling asked for."""
    task_api: Literal["available", "unsupported"]
    """``unsupported`` is conforming and says nothing about rollouts."""
    splits: list[TaskSplit]
    """In the order of the provider, its own members included."""
    selected_split: str | UnsetType = UNSET
    """As the provider spells it; absent when only splits were asked for."""
    num_tasks: Count | UnsetType = UNSET
    """Rows of the selected split, as the provider counts them."""
    start: Count | UnsetType = UNSET
    """First row of the page, from 0."""
    stop: Count | UnsetType = UNSET
    """The smaller of ``start`` plus limit and ``num_tasks``."""
    tasks: Annotated[list[JsonValue], Meta(max_length=limits.MAX_TASK_PAGE)]
    """Rows of the page: arbitrary JSON of a stranger, in canonical order."""


class EnvironmentTasks(Record, frozen=True, kw_only=True):
    """One environment's catalog."""

    base_url: Annotated[str, Meta(min_length=1)]
    """Canonical base URL."""
    catalog: TaskCatalog


class TaskCatalogReport(Record, frozen=True, kw_only=True):
    """``kiln.openenv-task-catalog.v1``: what ``kiln openenv tasks --json`` prints."""

    schema: Literal["kiln.openenv-task-catalog.v1"]
    catalogs: list[EnvironmentTasks]
    """In the order in which the environments were given."""


def task_selection(
    *,
    environment_name: str | None = None,
    split: str | None = None,
    start: int = 0,
    limit: int = limits.TASK_PAGE,
) -> TaskSelection:
    """Return a checked selection.

    Raises:
        UsageError: A name is empty or too long, or the page is none.
    """
    _check_wanted(environment_name, "environment name")
    _check_wanted(split, "split")
    if not 0 <= start <= limits.MAX_TASK_COUNT:
        raise UsageError(f"a page starts at 0 to {limits.MAX_TASK_COUNT}, not {start}")
    if not 1 <= limit <= limits.MAX_TASK_PAGE:
        raise UsageError(f"a page has 1 to {limits.MAX_TASK_PAGE} rows, not {limit}")
    return TaskSelection(
        environment_name=environment_name, split=split, start=start, limit=limit
    )


def choose_environment(names: list[str], wanted: str | None, base_url: str) -> str:
    """Return the advertised environment to ask.

    Args:
        names: The inventory of the server.
        wanted: In any case; None where exactly one is advertised.
        base_url: Names the server in errors.

    Raises:
        UsageError: There is none of that name, or none was named and there are several.
    """
    if wanted is not None:
        return _choose(names, wanted, f"{base_url} has no environment {wanted!r}")
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1:
        return distinct[0]
    raise UsageError(
        f"{base_url} advertises {len(distinct)} environments: {_listed(distinct)}",
        hint="name one of them with --environment-name",
        environment=base_url,
    )


def choose_split(splits: list[TaskSplit], wanted: str, base_url: str) -> str:
    """Return the name of a split as its provider spells it.

    Raises:
        UsageError: There is none of that name.
    """
    names = [str(split["name"]) for split in splits]
    return _choose(names, wanted, f"{base_url} has no split {wanted!r}")


def route_segment(name: str, base_url: str) -> str:
    """Return an advertised environment name as one segment of a URL path.

    Raises:
        RemoteProtocolError: No segment can carry it.
    """
    # a dot segment would be resolved away, percent-encoded or not (RFC 3986 6.2.2.3)
    if not _is_name(name) or name in {".", ".."}:
        raise RemoteProtocolError(
            f"{base_url} advertises an environment name that no route can carry: "
            f"{printable(name, 64)!r}",
            hint="give the environment a name of 1 to "
            f"{limits.MAX_TASK_NAME_BYTES} bytes",
            environment=base_url,
        )
    return quote(name, safe="")


def read_splits(answer: JsonValue, url: str) -> list[TaskSplit]:
    """Return the splits of an answer to ``/splits``.

    Raises:
        RemoteProtocolError: It is no list of objects with a name and a type.
    """
    if not isinstance(answer, list):
        _refuse(url, "not a list of splits")
    if len(answer) > limits.MAX_TASK_SPLITS:
        _refuse(url, f"more than {limits.MAX_TASK_SPLITS} splits")
    for index, split in enumerate(answer):
        if not isinstance(split, dict) or not isinstance(split.get("type"), str):
            _refuse(url, f"split {index} is no object with a type")
        name = split.get("name")
        if not isinstance(name, str) or not _is_name(name):
            _refuse(
                url,
                f"the name of split {index} is no text of 1 to "
                f"{limits.MAX_TASK_NAME_BYTES} bytes",
            )
    splits: list[TaskSplit] = _ordered(answer, url)
    return splits


def read_count(answer: JsonValue, url: str) -> int:
    """Return the count of an answer to ``/num_tasks``.

    Raises:
        RemoteProtocolError: It holds no number of rows.
    """
    count = _member(answer, "num_tasks", url)
    # JSON's true is an int to Python, and 3.0 is no count
    if type(count) is not int or not 0 <= count <= limits.MAX_TASK_COUNT:
        _refuse(url, f"num_tasks is no integer from 0 to {limits.MAX_TASK_COUNT}")
    return count


def read_rows(
    answer: JsonValue, url: str, most: int = limits.MAX_TASK_COLLECTION
) -> list[JsonValue]:
    """Return the rows of an answer to ``/tasks`` or ``/task_range``.

    Args:
        answer: The document.
        url: Names it in errors.
        most: Rows that were asked for; fewer are accepted, since a provider of
            streamed data may preview.

    Raises:
        RemoteProtocolError: It holds no list of rows, or too many.
    """
    rows = _member(answer, "tasks", url)
    if not isinstance(rows, list):
        _refuse(url, "tasks is no list")
    if len(rows) > min(most, limits.MAX_TASK_COLLECTION):
        _refuse(
            url,
            f"{len(rows)} rows, which is more than the "
            f"{min(most, limits.MAX_TASK_COLLECTION)} it may hold",
        )
    ordered: list[JsonValue] = _ordered(rows, url)
    return ordered


def read_row(answer: JsonValue, url: str) -> JsonValue:
    """Return the row of an answer to ``/task``.

    Raises:
        RemoteProtocolError: It holds none.
    """
    return _ordered(_member(answer, "task", url), url)


def _check_wanted(name: str | None, what: str) -> None:
    if name is not None and not _is_name(name):
        raise UsageError(
            f"the {what} must be UTF-8 text of 1 to {limits.MAX_TASK_NAME_BYTES} bytes"
        )


def _is_name(name: str) -> bool:
    try:
        return 1 <= len(name.encode()) <= limits.MAX_TASK_NAME_BYTES
    except UnicodeEncodeError:  # the command line carries bytes that are no UTF-8
        return False


def _choose(names: list[str], wanted: str, refusal: str) -> str:
    distinct = list(dict.fromkeys(names))
    if wanted in distinct:
        return wanted
    alike = [name for name in distinct if name.casefold() == wanted.casefold()]
    if len(alike) == 1:
        return alike[0]
    if alike:
        raise UsageError(
            f"{printable(wanted)!r} may be any of {_listed(alike)}",
            hint="spell it exactly",
        )
    raise UsageError(f"{refusal}; it has {_listed(distinct)}", hint="name one of these")


def _listed(names: list[str]) -> str:
    shown = [repr(printable(name, 64)) for name in names[:MAX_NAMED]]
    more = len(names) - len(shown)
    return (", ".join(shown) or "none") + (f" and {more} more" if more else "")


def _member(answer: JsonValue, name: str, url: str) -> JsonValue:
    if not isinstance(answer, dict) or name not in answer:
        _refuse(url, f"not an object with {name}")
    return answer[name]


def _ordered(value: JsonValue, url: str) -> JsonValue:
    try:
        return sorted_json(value)
    except InvalidRecord as error:
        _refuse(url, error.message, error)


def _refuse(url: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise RemoteProtocolError(
        f"{url} is not what OpenEnv's Task API prescribes: {why}",
        hint="correct the task provider of the environment; rollouts need none",
        environment=url,
    ) from cause
