"""Bandit: pull one of four arms, once.

Arm 2 pays 1 with probability 0.9, every other arm with probability 0.1; otherwise the
arm pays 0. The best arm never changes: the seed drives only the draws, one for each
arm, so a seed and an arm always give the same reward. Rewards are integers.
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
    Draws,
    EpisodeState,
    compact,
    require_running,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

NAME = "bandit"

PAY_PROBABILITIES = (0.1, 0.1, 0.9, 0.1)


class BanditAction(Action):
    """Pull an arm."""

    model_config = ConfigDict(json_schema_extra=compact)

    arm: int = Field(ge=0, le=len(PAY_PROBABILITIES) - 1)


class BanditObservation(Observation):
    """What the policy reads."""

    input_text: str


class BanditState(EpisodeState):
    """The episode and the arm pulled in it."""

    arm: int | None = None


class Bandit(Environment[BanditAction, BanditObservation, BanditState]):
    """Environment of one session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        """Begin idle."""
        super().__init__()
        self._state = BanditState()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_ignored: Any
    ) -> BanditObservation:
        """Offer the arms; no seed means seed 0."""
        self._state = BanditState(
            seed=0 if seed is None else seed, episode_id=episode_id, phase="running"
        )
        return BanditObservation(input_text="Pull an arm.")

    def step(
        self, action: BanditAction, timeout_s: float | None = None, **_ignored: Any
    ) -> BanditObservation:
        """Pull the arm and end the episode."""
        del timeout_s
        state = self._state
        require_running(state)
        # Every arm draws, so what one arm pays does not depend on the arm pulled.
        draws = Draws(state.seed or 0)
        pays = [draws.chance(probability) for probability in PAY_PROBABILITIES]
        reward = int(pays[action.arm])
        self._state = state.model_copy(
            update={"step_count": 1, "phase": "over", "arm": action.arm}
        )
        text = f"Arm {action.arm} pays {reward}."
        return BanditObservation(input_text=text, reward=reward, done=True)

    @property
    def state(self) -> BanditState:
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
        Bandit,
        BanditAction,
        BanditObservation,
        max_concurrent_envs=max_sessions,
        env_name=NAME,
        state_cls=BanditState,
    )
