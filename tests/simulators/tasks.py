"""A task provider for the simulator, with the statuses and words of the SDK's server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tests.simulators.environment import Document, Request, Simulator, document

ROUTES = ("splits", "num_tasks", "task_range", "tasks", "task")


def rows(count: int) -> list[Any]:
    return [{"id": f"row-{index}", "index": index} for index in range(count)]


@dataclass
class Provider:
    """Splits and rows, and what a test changes about them.

    Attributes:
        splits: As the provider gives them.
        rows: By name of a split.
        name: What the environment is called in a route, in any case.
        broken: What routes answer instead of the truth.
    """

    splits: list[Any] = field(
        default_factory=lambda: [
            {"name": "train", "type": "train"},
            {"name": "Hard/odd %", "type": "curriculum", "level": 3},
        ]
    )
    rows: dict[str, list[Any]] = field(
        default_factory=lambda: {"train": rows(120), "Hard/odd %": rows(2)}
    )
    name: str = "counter"
    broken: dict[str, Document] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def __call__(self, request: Request) -> Document | None:
        """Answer a Task route; None for any other."""
        segment, _, route = request.raw_path.lstrip("/").rpartition("/")
        method = "GET" if route == "splits" else "POST"
        if route not in ROUTES or request.method != method:
            return None
        if unquote(segment).lower() != self.name.lower():
            detail = f"unknown environment {unquote(segment)!r}"
            return document({"detail": detail}, 404)
        question = json.loads(request.body or b"{}")
        self.asked.append((route, question))
        if route in self.broken:
            return self.broken[route]
        answers: dict[str, Callable[[dict[str, Any]], Document]] = {
            "splits": lambda _: document(self.splits),
            "num_tasks": lambda q: document({"num_tasks": len(self.rows[q["split"]])}),
            "tasks": lambda q: document(
                {"tasks": self.rows[q["split"]], "env_name": self.name}
            ),
            "task": self._task,
            "task_range": lambda q: document(
                {"tasks": self.rows[q["split"]][q.get("start") : q.get("stop")]}
            ),
        }
        try:
            return answers[route](question)
        except KeyError:
            return Document(b"Internal Server Error", 500)

    @property
    def routes(self) -> list[str]:
        """Routes asked so far."""
        return [route for route, _ in self.asked]

    def _task(self, question: dict[str, Any]) -> Document:
        try:
            return document({"task": self.rows[question["split"]][question["index"]]})
        except IndexError:
            return document({"detail": "Invalid task index"}, 400)


def provided(simulator: Simulator, **changes: Any) -> Provider:
    """Give a simulator a task provider and return it."""
    provider = Provider(**changes)
    simulator.provider = provider
    simulator.documents["/list_environments"] = document([provider.name])
    return provider
