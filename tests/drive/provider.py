"""The counter of the examples with a task provider, served by the real SDK."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from openenv.core.env_server import create_fastapi_app

from examples.environments.counter import (
    Counter,
    CounterAction,
    CounterObservation,
    CounterState,
)

NAME = "Counter 100%"
ROWS = {
    "train": [{"index": index, "target": 4} for index in range(120)],
    "hard": ["only", 2, None],
}


class TaskedCounter(Counter):
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
    return create_fastapi_app(
        TaskedCounter,
        CounterAction,
        CounterObservation,
        max_concurrent_envs=max_sessions,
        env_name=NAME,
        state_cls=CounterState,
    )
