"""A counter for older releases of the OpenEnv SDK; run by the Python that has one.

It imports nothing of this repository. Serves the application twice, with many sessions
and with one, and prints both ports on one line.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

# the SDK imports it for a web page that is not served here, and does without
sys.modules.setdefault("gradio", None)  # type: ignore[arg-type]  # not imported

import openenv  # noqa: E402
import uvicorn  # noqa: E402
from openenv.core.env_server import (  # noqa: E402
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)
from pydantic import Field, field_validator  # noqa: E402


class Add(Action):
    amount: int = Field(ge=-1, le=3)

    @field_validator("amount")
    @classmethod
    def refuses(cls, value: int) -> int:
        if value < 0:
            raise ValueError("no way back")
        return value


class Total(Observation):
    total: int


class Counter(Environment[Any, Any, Any]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._total = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_ignored: Any
    ) -> Total:
        self._state = State(episode_id=episode_id)
        self._total = 0
        return Total(total=0, metadata={"seed": seed})

    def step(self, action: Add, **_ignored: Any) -> Total:
        if action.amount == 0:
            raise RuntimeError("nothing to add")
        self._state.step_count += 1
        self._total += action.amount
        done = self._total >= 4
        return Total(total=self._total, reward=int(done), done=done)

    @property
    def state(self) -> State:
        return self._state


async def main() -> None:
    assert Path(openenv.__path__[0]).is_relative_to(sys.prefix), openenv.__path__
    servers, listeners = [], []
    for sessions in (64, 1):
        app = create_fastapi_app(Counter, Add, Total, max_concurrent_envs=sessions)
        servers.append(uvicorn.Server(uvicorn.Config(app, log_level="critical")))
        listeners.append(socket.create_server(("127.0.0.1", 0)))
    print(*(listener.getsockname()[1] for listener in listeners), flush=True)
    pairs = zip(servers, listeners, strict=True)
    await asyncio.gather(*(server.serve([listener]) for server, listener in pairs))


if __name__ == "__main__":
    asyncio.run(main())
