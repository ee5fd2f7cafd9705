"""The Task API of an environment: its five routes, and a page of a catalog.

A route answered with 501 says that there is no task provider, which is conforming. So
is a server older than the Task API (OpenEnv 0.4.2), whose framework answers 404
``{"detail": "Not Found"}`` because it has no such route; any other 404 means that the
server does not know the environment. A page is one ``/task_range``: the complete list
is never fetched for it.
"""

from __future__ import annotations

from typing import Final

from kiln_core.canonical import JsonValue
from kiln_core.drive.concurrency import task_group
from kiln_core.drive.http import Answer, EnvironmentClient, status_error
from kiln_core.errors import TaskApiUnsupported, UsageError
from kiln_core.tasks import (
    TASK_CATALOG_SCHEMA,
    EnvironmentTasks,
    TaskCatalog,
    TaskCatalogReport,
    TaskSelection,
    TaskSplit,
    choose_environment,
    choose_split,
    read_count,
    read_row,
    read_rows,
    read_splits,
    route_segment,
)

__all__ = ["TaskClient", "task_catalog", "task_catalogs"]

STATUS_HINTS: Final = {
    400: "the split has no row of that index",
    404: "the server does not know this environment: name one that it advertises, "
    "or update its OpenEnv",
    422: "the server takes other members: its OpenEnv is of another version",
    500: "the task provider raised, often because it has no such split: "
    "look at the log of the server",
}
NO_ROUTE: Final = "Not Found"
"""What FastAPI, and so OpenEnv, says of a route that it does not have."""


class TaskClient:
    """The Task routes of one environment of a server.

    Every method raises TaskApiUnsupported where there is no task provider,
    TransportError where the exchange fails, HttpStatusError for any other status and
    RemoteProtocolError for an answer of another shape.

    Attributes:
        client: The server.
        environment: A name that it advertises.

    Raises:
        RemoteProtocolError: No route can carry the name.
    """

    def __init__(self, client: EnvironmentClient, environment: str) -> None:
        self.client = client
        self.environment = environment
        self._prefix = "/" + route_segment(environment, client.base_url)

    async def splits(self) -> list[TaskSplit]:
        """List the splits, with every member the provider gives them."""
        answer = await self._ask("splits")
        return read_splits(answer.document, answer.url)

    async def num_tasks(self, split: str) -> int:
        """Count the rows of a split."""
        answer = await self._ask("num_tasks", {"split": split})
        return read_count(answer.document, answer.url)

    async def tasks(self, split: str) -> list[JsonValue]:
        """Fetch all rows of a split, which must be few enough."""
        answer = await self._ask("tasks", {"split": split})
        return read_rows(answer.document, answer.url)

    async def task(self, split: str, index: int) -> JsonValue:
        """Fetch one row.

        Raises:
            UsageError: The index is negative, which some providers count from the end.
        """
        _check_index(index, "index")
        answer = await self._ask("task", {"split": split, "index": index})
        return read_row(answer.document, answer.url)

    async def task_range(
        self, split: str, start: int = 0, stop: int | None = None
    ) -> list[JsonValue]:
        """Fetch the rows from ``start`` to before ``stop``, or to the end.

        Raises:
            UsageError: A bound is negative, or they are in the wrong order.
        """
        _check_index(start, "start")
        question: dict[str, JsonValue] = {"split": split, "start": start}
        if stop is None:
            answer = await self._ask("task_range", question)
            return read_rows(answer.document, answer.url)
        _check_index(stop - start, "stop - start")
        answer = await self._ask("task_range", {**question, "stop": stop})
        return read_rows(answer.document, answer.url, stop - start)

    async def _ask(self, route: str, question: JsonValue | None = None) -> Answer:
        answer = await self.client.ask(f"{self._prefix}/{route}", question)
        if answer.status == 501 or self._lacks_route(answer):
            raise TaskApiUnsupported(
                f"{self.client.base_url} has no {route} for its tasks",
                environment=self.client.base_url,
                http_status=answer.status,
            )
        if not answer.ok:
            raise status_error(answer.url, answer.status, STATUS_HINTS)
        return answer

    def _lacks_route(self, answer: Answer) -> bool:
        """Say whether the framework answered, not the environment.

        A name with a slash matches no route of FastAPI, which decodes it first, so
        there the same words say nothing about the Task API.
        """
        told = answer.document
        return (
            answer.status == 404
            and isinstance(told, dict)
            and told.get("detail") == NO_ROUTE
            and "/" not in self.environment
        )


async def task_catalog(
    client: EnvironmentClient, selection: TaskSelection
) -> TaskCatalog:
    """Return the splits of an environment and, of a selected one, a page of rows.

    Raises:
        UsageError: The server has no such environment, or the provider no such split.
        TransportError: The environment cannot be reached, or an answer is unusable.
        RemoteProtocolError: It is no OpenEnv server, or an answer has another shape.
    """
    inventory = (await client.inspect()).identity.environments
    name = choose_environment(inventory, selection.environment_name, client.base_url)
    provider = TaskClient(client, name)
    try:
        splits = await provider.splits()
    except TaskApiUnsupported:
        return TaskCatalog(
            environment_name=name, task_api="unsupported", splits=[], tasks=[]
        )
    if selection.split is None:
        return TaskCatalog(
            environment_name=name, task_api="available", splits=splits, tasks=[]
        )
    split = choose_split(splits, selection.split, client.base_url)
    try:
        return await _page(provider, splits, split, selection)
    except TaskApiUnsupported:
        # a provider that lists splits and keeps its rows to itself
        return TaskCatalog(
            environment_name=name,
            task_api="unsupported",
            splits=splits,
            selected_split=split,
            tasks=[],
        )


async def task_catalogs(
    clients: list[EnvironmentClient], selection: TaskSelection
) -> TaskCatalogReport:
    """Return the catalogs of several environments, asked concurrently, in their order.

    Raises:
        KilnError: The first failure of any of them.
    """
    found: dict[int, EnvironmentTasks] = {}

    async def ask(index: int) -> None:
        client = clients[index]
        catalog = await task_catalog(client, selection)
        found[index] = EnvironmentTasks(base_url=client.base_url, catalog=catalog)

    # each request has a deadline of its own, and a catalog takes at most five
    async with task_group() as group:
        for index in range(len(clients)):
            group.start_soon(ask, index)
    return TaskCatalogReport(
        schema=TASK_CATALOG_SCHEMA,
        catalogs=[found[index] for index in range(len(clients))],
    )


async def _page(
    provider: TaskClient,
    splits: list[TaskSplit],
    split: str,
    selection: TaskSelection,
) -> TaskCatalog:
    num_tasks = await provider.num_tasks(split)
    start, stop = selection.start, selection.stop(num_tasks)
    # beyond the end there is nothing to ask for
    rows = await provider.task_range(split, start, stop) if start < stop else []
    return TaskCatalog(
        environment_name=provider.environment,
        task_api="available",
        splits=splits,
        selected_split=split,
        num_tasks=num_tasks,
        start=start,
        stop=stop,
        tasks=rows,
    )


def _check_index(value: int, what: str) -> None:
    if value < 0:
        raise UsageError(f"{what} of a task range must not be negative, not {value}")
