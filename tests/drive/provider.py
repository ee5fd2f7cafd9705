"""The counter of the examples with a task provider, served by the real SDK."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from examples.environments.hosting import environment_type, serve_type
from examples.environments.registry import GAMES

NAME = "Counter 100%"
ROWS = {
    "train": [{"index": index, "target": 4} for index in range(120)],
    "hard": ["only", 2, None],
}


class TaskedCounter(environment_type(GAMES["counter"])):
    """A counter that lists rows which no episode reads."""

    def list_splits(self) -> list[Any]:
        return ["train", {"name": "hard", "type": "curriculum", "level": 3}, "dev"]

    def list_tasks(self, split: str) -> list[Any]:
        return ROWS[split]

    def num_tasks(self, split: str) -> int:
        return len(ROWS[split])

    def get_task(self, split: str, index: int) -> Any:
        return ROWS[split][index]

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[Any]:
        return ROWS[split][start:stop]


def create_app(max_sessions: int) -> FastAPI:
    return serve_type(TaskedCounter, max_sessions, NAME)
