"""Signals: press the lamp that belongs to a ticket's colour, once.

The mapping from colour to lamp is fixed and arbitrary. No text tells it: only the
reward, 1.0 for the right lamp and 0.0 for another, so a policy starts at chance and
has to learn it. The seed draws the colour and a ticket number, which means nothing but
makes the texts of other seeds new.
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

NAME = "signals"

LAMPS = {"red": 2, "green": 0, "blue": 3, "gold": 1}
FIRST_TICKET = 10_000
TICKETS = 90_000


class SignalsAction(Action):
    """Press a lamp."""

    model_config = ConfigDict(json_schema_extra=compact)

    lamp: int = Field(ge=0, le=len(LAMPS) - 1)


class SignalsObservation(Observation):
    """What the policy reads."""

    input_text: str


class SignalsState(EpisodeState):
    """The episode, its ticket and the lamp pressed; not the right lamp."""

    ticket: int | None = None
    colour: str | None = None
    lamp: int | None = None


class Signals(Environment[SignalsAction, SignalsObservation, SignalsState]):
    """Environment of one session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        """Begin idle."""
        super().__init__()
        self._state = SignalsState()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_ignored: Any
    ) -> SignalsObservation:
        """Draw a ticket and its colour; no seed means seed 0."""
        state = SignalsState(
            seed=0 if seed is None else seed, episode_id=episode_id, phase="running"
        )
        draws = Draws(state.seed or 0)
        ticket = FIRST_TICKET + draws.below(TICKETS)
        colour = tuple(LAMPS)[draws.below(len(LAMPS))]
        self._state = state.model_copy(update={"ticket": ticket, "colour": colour})
        return SignalsObservation(input_text=f"Ticket {ticket} is {colour}.")

    def step(
        self, action: SignalsAction, timeout_s: float | None = None, **_ignored: Any
    ) -> SignalsObservation:
        """Press the lamp and end the episode."""
        del timeout_s
        state = self._state
        require_running(state)
        right = state.colour is not None and LAMPS[state.colour] == action.lamp
        self._state = state.model_copy(
            update={"step_count": 1, "phase": "over", "lamp": action.lamp}
        )
        return SignalsObservation(
            input_text=f"Lamp {action.lamp} pressed.", reward=float(right), done=True
        )

    @property
    def state(self) -> SignalsState:
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
        Signals,
        SignalsAction,
        SignalsObservation,
        max_concurrent_envs=max_sessions,
        env_name=NAME,
        state_cls=SignalsState,
    )
