"""Counter: add amounts until the total is exactly 4.

Every step costs 0.25 but the last one, which pays 1.0, so the best return is 0.75
(two steps). Adding 0, or more than is missing, is refused without ending the episode.
Nothing is random: the seed is only recorded in the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openenv.core.env_server import (
    Action,
    Environment,
    Observation,
    create_fastapi_app,
)
from openenv.core.env_server.types import EnvironmentMetadata
from pydantic import ConfigDict, Field

from examples.environments import DESCRIPTIONS
from examples.environments.episode import (
    EpisodeState,
    StepError,
    compact,
    require_running,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

NAME = "counter"

TARGET = 4
LAST_STEP_REWARD = 1.0
OTHER_STEP_REWARD = -0.25


class CounterAction(Action):
    """Add an amount to the total. Zero fits the schema and is refused by `step`."""

    model_config = ConfigDict(json_schema_extra=compact)

    amount: int = Field(ge=0, le=3)


class CounterObservation(Observation):
    """The total so far."""

    total: int


class CounterState(EpisodeState):
    """The episode and its total."""

    total: int = 0


class Counter(Environment[CounterAction, CounterObservation, CounterState]):
    """Environment of one session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        """Begin idle."""
        super().__init__()
        self._state = CounterState()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_ignored: Any
    ) -> CounterObservation:
        """Start at zero; no seed means seed 0."""
        self._state = CounterState(
            seed=0 if seed is None else seed, episode_id=episode_id, phase="running"
        )
        return CounterObservation(total=0)

    def step(
        self, action: CounterAction, timeout_s: float | None = None, **_ignored: Any
    ) -> CounterObservation:
        """Add the amount.

        Raises:
            StepError: If no episode is running, or the amount is 0 or too large.
        """
        del timeout_s
        state = self._state
        require_running(state)
        total = state.total + action.amount
        if not state.total < total <= TARGET:
            message = f"cannot add {action.amount} to {state.total}"
            raise StepError(message)
        done = total == TARGET
        self._state = state.model_copy(
            update={
                "step_count": state.step_count + 1,
                "phase": "over" if done else "running",
                "total": total,
            }
        )
        reward = LAST_STEP_REWARD if done else OTHER_STEP_REWARD
        return CounterObservation(total=total, reward=reward, done=done)

    @property
    def state(self) -> CounterState:
        """The episode as it stands."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Name and description; both go into the prompt."""
        return EnvironmentMetadata(
            name=NAME, description=DESCRIPTIONS[NAME], version="1"
        )


def create_app(max_sessions: int) -> FastAPI:
    """Build the application that serves this environment."""
    return create_fastapi_app(
        Counter,
        CounterAction,
        CounterObservation,
        max_concurrent_envs=max_sessions,
        env_name=NAME,
        state_cls=CounterState,
    )
