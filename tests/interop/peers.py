"""Environments of the real OpenEnv SDK, each with one trait that clients meet outside.

Every function of ``PEERS`` builds the application of one; ``tests.interop.host`` serves
them. Importing this module imports the SDK, which takes seconds: tests do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)
from openenv.core.env_server.types import EnvironmentMetadata
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.applications import Starlette
from starlette.routing import Mount

from examples.environments.hosting import create_app
from examples.environments.registry import GAMES
from tests.interop.words import WORDS

PREFIX = "/openenv/prefix"


class Peer(Environment[Any, Any, Any]):
    """What the peers share: sessions at once, a name, a state that counts steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    NAME: ClassVar[str]
    STATE: ClassVar[type[State]] = State

    def __init__(self) -> None:
        super().__init__()
        self._state = self.STATE()

    def begin(self, **members: Any) -> None:
        self._state = self.STATE(**members)

    def count(self) -> int:
        self._state.step_count += 1
        return self._state.step_count

    @property
    def state(self) -> State:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(
            name=self.NAME, description=f"The {self.NAME} peer.", version="1"
        )


def serve(
    peer: type[Peer],
    action: type[Action],
    observation: type[Observation],
    sessions: int,
    **more: Any,
) -> FastAPI:
    return create_fastapi_app(
        peer,
        action,
        observation,
        max_concurrent_envs=sessions,
        env_name=peer.NAME,
        **more,
    )


class Echo(Observation):
    """Says what arrived."""

    seen: Any = None


# Words: a text game with state of its own that the schema does not tell


class Guess(Action):
    guess: str = Field(min_length=1, max_length=40)


class Text(Observation):
    input_text: str


class WordsState(State):
    """Not told to the SDK, so `/schema` lacks both members."""

    word: str = ""
    guesses: list[str] = []


class Words(Peer):
    """Guess the word; the seed chooses it. Every episode draws a new id."""

    NAME = "words"
    STATE = WordsState

    def reset(self, seed: int | None = None, **_ignored: Any) -> Text:
        word = WORDS[(seed or 0) % len(WORDS)]
        self.begin(episode_id=str(uuid4()), word=word)
        return Text(input_text=f"Guess one of: {', '.join(WORDS)}")

    def step(self, action: Guess, **_ignored: Any) -> Text:
        turn = self.count()
        self._state.guesses = [*self._state.guesses, action.guess]
        right = action.guess == self._state.word
        text = f"{action.guess!r} is {'right' if right else 'wrong'} after {turn}."
        reward = 1.0 if right else -0.25
        return Text(input_text=text, reward=reward, done=right or turn == 3)


def words(sessions: int) -> FastAPI:
    return serve(Words, Guess, Text, sessions)


# Raising: every way in which a step fails on a real server


class Op(Action):
    op: Literal[
        "go", "raise", "silent", "refuse", "surrogate", "bytes", "inside", "end"
    ]

    @field_validator("op")
    @classmethod
    def refuses(cls, value: str) -> str:
        if value == "refuse":
            raise ValueError("no such luck")
        return value


class Raising(Peer):
    NAME = "raising"

    def reset(self, broken: bool = False, **_ignored: Any) -> Echo:
        if broken:
            raise RuntimeError("the level cannot be loaded")
        self.begin()
        return Echo(seen=0)

    def step(self, action: Op, **_ignored: Any) -> Echo:
        turn = self.count()
        if action.op == "raise":
            raise RuntimeError(f"illegal move {turn}")
        if action.op == "silent":
            raise RuntimeError
        if action.op == "inside":
            Op.model_validate({"op": "unknown"})
        unserialisable = {"surrogate": "\ud800", "bytes": b"\xff"}
        seen: Any = unserialisable.get(action.op, turn)
        return Echo(seen=seen, reward=turn, done=action.op == "end")


def raising(sessions: int) -> FastAPI:
    return serve(Raising, Op, Echo, sessions)


# Commands: a schema with most of what Draft 2020-12 and pydantic can say


class Move(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["move"]
    to: tuple[Annotated[int, Field(ge=0, le=9)], Annotated[int, Field(ge=0, le=9)]]


class Say(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["say"]
    text: str = Field(pattern="^[a-zäöü]+$", max_length=8)


class Batch(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["batch"]
    commands: list[Command] = Field(min_length=1, max_length=3)


Command = Annotated[Move | Say | Batch, Field(discriminator="kind")]


class Ordered(Action):
    command: Command
    speed: float = Field(default=1.0, alias="Speed-Limit", gt=0, multiple_of=0.25)
    tags: dict[str, int | None] = Field(default_factory=dict, max_length=2)


class Commands(Peer):
    NAME = "commands"

    def reset(self, **_ignored: Any) -> Echo:
        self.begin()
        return Echo()

    def step(self, action: Ordered, **_ignored: Any) -> Echo:
        turn = self.count()
        seen = action.model_dump(by_alias=True, exclude={"metadata"})
        return Echo(seen=seen, reward=2**70 if turn == 1 else True, done=turn == 2)


def commands(sessions: int) -> FastAPI:
    return serve(Commands, Ordered, Echo, sessions)


# Tasks: a data set with the Task API


class Answer(Action):
    answer: int


class Tasks(Peer):
    NAME = "tasks"
    SIZES = {"train": 5, "test": 2}

    def list_splits(self) -> list[Any]:
        return ["train", {"name": "test", "type": "test", "held_out": True}]

    def num_tasks(self, split: str) -> int:
        return self.SIZES[split]

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        if not 0 <= index < self.SIZES[split]:
            raise IndexError(index)
        return {"id": f"{split}-{index}", "question": f"{index} + {len(split)} = ?"}

    def get_task_range(
        self, split: str, start: int | None = None, stop: int | None = None
    ) -> list[dict[str, Any]]:
        return self.list_tasks(split)[start:stop]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return [self.get_task(split, index) for index in range(self.SIZES[split])]

    def reset(self, split: str = "train", index: int = 0, **_ignored: Any) -> Text:
        self.begin()
        task = self.get_task(split, index)
        self._sum = index + len(split)
        return Text(input_text=task["question"], metadata={"task": task["id"]})

    def step(self, action: Answer, **_ignored: Any) -> Text:
        self.count()
        right = action.answer == self._sum
        return Text(input_text=f"{self._sum}", reward=int(right), done=True)


def tasks(sessions: int) -> FastAPI:
    return serve(Tasks, Answer, Text, sessions)


# Tools: MCP; failures are observations, nothing is ever rewarded or done


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server: FastMCP[None] = FastMCP("tools")

        @server.tool()
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @server.tool()
        def fail(reason: str) -> str:
            """Fail."""
            raise RuntimeError(reason)

        super().__init__(server)
        self._state = State()

    def reset(self, **_ignored: Any) -> Observation:
        self._state = State()
        return Observation()

    def _step_impl(self, action: Action, *_: Any, **_ignored: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="tools", description="The tools peer.")


def tools(sessions: int) -> FastAPI:
    return create_fastapi_app(
        Tools,
        CallToolAction,
        CallToolObservation,
        max_concurrent_envs=sessions,
        env_name="tools",
    )


# Bench: all sessions share one thread, and a step takes a while


class Work(Action):
    seconds: float = Field(ge=0, le=1)


class Bench(Peer):
    NAME = "bench"
    REQUIRES_SINGLE_THREAD_EXECUTOR = True
    at_once = 0
    threads: ClassVar[set[int]] = set()

    def reset(self, **_ignored: Any) -> Echo:
        self.begin()
        return Echo()

    def step(self, action: Work, **_ignored: Any) -> Echo:
        Bench.at_once += 1
        Bench.threads.add(threading.get_ident())
        time.sleep(action.seconds)
        seen = {"at_once": Bench.at_once, "threads": len(Bench.threads)}
        Bench.at_once -= 1
        return Echo(seen=seen, reward=1, done=self.count() == 2)


def bench(sessions: int) -> FastAPI:
    return serve(Bench, Work, Echo, sessions)


# Notes: metadata where an observation has some


class Note(Action):
    note: str | None


class Notes(Peer):
    NAME = "notes"

    def reset(self, **_ignored: Any) -> Echo:
        self.begin()
        return Echo(metadata={"level": 1})

    def step(self, action: Note, **_ignored: Any) -> Echo:
        metadata = {} if action.note is None else {"note": action.note, "by": [None]}
        return Echo(metadata=metadata, reward=0.0, done=self.count() == 2)


def notes(sessions: int) -> FastAPI:
    return serve(Notes, Note, Echo, sessions)


def prefixed(sessions: int) -> Starlette:
    """Serve under a base path; nothing at all is at the root."""
    return Starlette(routes=[Mount(PREFIX, create_app(GAMES["counter"], sessions))])


def production(sessions: int) -> FastAPI:
    """Serve without the HTTP routes that simulate: `/reset`, `/step`, `/state`."""
    return serve(Notes, Note, Echo, sessions, mode="production")


PEERS: dict[str, Callable[[int], Any]] = {
    "counter": partial(create_app, GAMES["counter"]),
    "bandit": partial(create_app, GAMES["bandit"]),
    "words": words,
    "raising": raising,
    "commands": commands,
    "tasks": tasks,
    "tools": tools,
    "bench": bench,
    "notes": notes,
    "prefixed": prefixed,
    "production": production,
}
