"""Games as environments of the OpenEnv SDK: phases, identity, state, application.

The SDK checks neither that a step follows a reset nor that it precedes the end; this
module does, for every game alike. Rules and rewards are the games' own. It is the only
module of the pack that imports the SDK, which takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from openenv.core.env_server import (
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)
from openenv.core.env_server.types import EnvironmentMetadata
from pydantic import create_model

from examples.environments.game import Game, IllegalMove, Position, Reward

if TYPE_CHECKING:
    from fastapi import FastAPI


class EpisodeState(State):
    """State of one episode. `episode_id` is the caller's, or null."""

    seed: int | None = None
    phase: Literal["idle", "running", "over"] = "idle"


class LevelState(EpisodeState):
    """State of one episode of a game with difficulties."""

    difficulty: int = 1


class Hosted(Environment[Any, Any, Any]):
    """Environment of one session; a subclass for each game fills the class fields."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    game: ClassVar[Game[Any]]
    action_type: ClassVar[type[Action]]
    observation_type: ClassVar[type[Observation]]
    state_type: ClassVar[type[EpisodeState]]

    def __init__(self) -> None:
        """Begin idle."""
        super().__init__()
        self._state = self.state_type()
        self._position: Position[Any] | None = None
        self._last: Observation | None = None

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        difficulty: object = 1,
        **_ignored: Any,
    ) -> Observation:
        """Deal the first position; no seed means seed 0.

        Raises:
            IllegalMove: If the game has no such difficulty; the episode before, if
                any, goes on.
        """
        level = self._level(difficulty)
        start = self.state_type(seed=0 if seed is None else seed, episode_id=episode_id)
        if self.game.levels > 1:
            start = start.model_copy(update={"difficulty": level})
        position = self.game.deal(start.seed or 0, level)
        self._enter(start, position)
        return self._observe(position)

    def step(
        self, action: Action, timeout_s: float | None = None, **_ignored: Any
    ) -> Observation:
        """Take one step.

        Raises:
            IllegalMove: If no episode is running, or the rules forbid the move.
        """
        del timeout_s
        if self._position is None:
            raise IllegalMove("no episode yet: reset first")
        if self._position.over:
            if self.game.frozen and self._last is not None:
                return self._last
            raise IllegalMove("the episode is over: reset first")
        position, reward = self._position.step(action)
        counted = {"step_count": self._state.step_count + 1}
        self._enter(self._state.model_copy(update=counted), position)
        self._last = self._observe(position, reward)
        return self._last

    @property
    def state(self) -> EpisodeState:
        """The episode as it stands."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Name and description; both go into the prompt."""
        return EnvironmentMetadata(
            name=self.game.name, description=self.game.description, version="1"
        )

    def _level(self, difficulty: object) -> int:
        levels = self.game.levels
        if levels == 1:
            return 1  # as any reset option that does not exist
        if type(difficulty) is not int or not 1 <= difficulty <= levels:
            message = f"difficulty is a whole number from 1 to {levels}"
            raise IllegalMove(message)
        return difficulty

    def _enter(self, state: EpisodeState, position: Position[Any]) -> None:
        self._position = position
        phase = "over" if position.over else "running"
        self._state = state.model_copy(
            update={"phase": phase, **dict(position.facts())}
        )

    def _observe(
        self, position: Position[Any], reward: Reward | None = None
    ) -> Observation:
        return self.observation_type(
            reward=reward, done=position.over, **dict(position.view())
        )


def environment_type(game: Game[Any]) -> type[Hosted]:
    """Return the environment class of a game, with its published types."""
    title = game.name.title().replace("_", "")
    progress = LevelState if game.levels > 1 else EpisodeState
    members = {
        "__doc__": game.description,
        "game": game,
        "action_type": create_model(f"{title}Action", __base__=(game.move, Action)),
        "observation_type": create_model(
            f"{title}Observation", __base__=(game.view, Observation)
        ),
        "state_type": create_model(f"{title}State", __base__=(game.facts, progress)),
    }
    return type(title, (Hosted,), members)


def serve_type(hosted: type[Hosted], max_sessions: int, name: str) -> FastAPI:
    """Build the application that serves an environment class under a name."""
    return create_fastapi_app(
        hosted,
        hosted.action_type,
        hosted.observation_type,
        max_concurrent_envs=max_sessions,
        env_name=name,
        state_cls=hosted.state_type,
    )


def create_app(game: Game[Any], max_sessions: int) -> FastAPI:
    """Build the application that serves a game."""
    return serve_type(environment_type(game), max_sessions, game.name)
