"""What the three environments share: phases of an episode, draws, a short schema.

The SDK checks neither that a step follows a reset nor that it precedes the end, so
`require_running` does. Rewards and rules are in the environments themselves.
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from openenv.core.env_server import State


class StepError(Exception):
    """The step is impossible now and changed nothing.

    The SDK answers any exception of `step` with EXECUTION_ERROR and this text, and
    the session goes on: the policy may correct itself.
    """


class EpisodeState(State):
    """State of one episode. `episode_id` is the caller's, or null."""

    seed: int | None = None
    phase: Literal["idle", "running", "over"] = "idle"


def require_running(state: EpisodeState) -> None:
    """Check that an episode is running.

    Raises:
        StepError: Before the first reset, and after the end of the episode.
    """
    if state.phase == "idle":
        message = "no episode yet: reset first"
        raise StepError(message)
    if state.phase == "over":
        message = "the episode is over: reset first"
        raise StepError(message)


class Draws:
    """Random draws that depend on the seed alone.

    Only `Random.random` is used: it is the one method whose sequence Python promises
    to keep between versions, and recorded episodes are replayed years later.
    """

    def __init__(self, seed: int) -> None:
        """Begin the sequence of a seed."""
        self._random = Random(seed)  # noqa: S311 - a game, not a secret

    def chance(self, probability: float) -> bool:
        """Draw true with this probability."""
        return self._random.random() < probability

    def below(self, bound: int) -> int:
        """Draw an integer from 0 up to, not including, the bound."""
        return int(self._random.random() * bound)


def compact(schema: dict[str, Any]) -> None:
    """Strip a JSON Schema of an action, in place, to what a policy must know.

    The schema is part of every prompt, so its length is paid for in every forward
    pass. Titles, the class docstring and the SDK's inherited `metadata` say nothing
    about the action; the server still accepts `metadata`.
    """
    schema.pop("title", None)
    schema.pop("description", None)
    properties = schema["properties"]
    properties.pop("metadata", None)
    for member in properties.values():
        member.pop("title", None)
