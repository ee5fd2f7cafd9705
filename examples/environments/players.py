"""Scripted players: policies that play the environments of the pack without a model.

A player reads what a model would read, the text of the last observation, and answers
with one JSON object. It can be told to open with replies of its own, such as an action
that is refused, and shows then that it recovers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from examples.environments.game import Game, Position, Reward, read_text
from kiln_core import (
    BehaviorPolicyIdentity,
    PolicyRequest,
    ScriptedPolicy,
    compact,
    digest_json,
)

if TYPE_CHECKING:
    from kiln_core import ChatMessage

ERROR_KEY = '"openenv_error"'
"""In the feedback turn that follows an error; all other results are observations."""


class Player(ScriptedPolicy):
    """Plays one environment.

    Args:
        game: The environment.
        opening: Replies for the first turns, as of a scripted policy, before it plays.
        reasoning: Reasoning that precedes every reply where thinking is on.
    """

    def __init__(
        self,
        game: Game[Any],
        opening: Sequence[Sequence[str]] = (),
        *,
        reasoning: str | None = None,
    ) -> None:
        super().__init__([*opening, [game.name]], reasoning=reasoning)
        self.game = game

    @cached_property
    def identity(self) -> BehaviorPolicyIdentity:
        """Who this player is: the digest of its description."""
        opening = [list(replies) for replies in self.turns[:-1]]
        return BehaviorPolicyIdentity(
            served_model_id=f"player:{self.game.name}",
            base_model_sha256=digest_json(
                {"player": self.game.name, "opening": opening, "says": self.reasoning}
            ),
            inference_config_sha256=digest_json({"policy": "player"}),
            implementation="kiln/examples-player",
        )

    def content(self, request: PolicyRequest, turn: int) -> str:
        """Return what is answered: the opening, then the game's best move."""
        if turn < len(self.turns) - 1:
            return super().content(request, turn)
        return answer(self.game, last_text(request.messages))


def last_text(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the last observation of a conversation."""
    results = (message.content for message in messages[:0:-2])
    return next(text for text in results if ERROR_KEY not in text)


def answer(game: Game[Any], text: str) -> str:
    """Return the player's move for a text, as the JSON a policy would write."""
    return compact(game.play(text).model_dump()).decode()


def play_through(
    game: Game[Any], seed: int, difficulty: int = 1
) -> tuple[list[Position[Any]], list[Reward]]:
    """Play one episode with the scripted player, without SDK or server.

    Returns:
        The positions from the first to the last, and the reward of each step.
    """
    positions = [game.deal(seed, difficulty)]
    rewards: list[Reward] = []
    while not positions[-1].over:
        move = game.play(read_text(positions[-1].view()))
        position, reward = positions[-1].step(move)
        positions.append(position)
        rewards.append(reward)
    return positions, rewards
