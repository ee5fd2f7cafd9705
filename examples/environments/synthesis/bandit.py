"""Bandit: pull one of four arms, once.

Arm 2 pays 1 with probability 0.9, every other arm with probability 0.1; otherwise the
arm pays 0. The best arm never changes: the seed drives only the draws, one for each
arm, so a seed and an arm always give the same reward. Rewards are integers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field

from examples.environments.game import (
    Draws,
    Facts,
    Game,
    IllegalMove,
    Integer,
    Move,
    Reward,
    TextView,
)

PAY_PROBABILITIES = (0.1, 0.1, 0.9, 0.1)
BEST_ARM = 2


class Pull(Move):
    """Pull an arm."""

    arm: Integer = Field(ge=0, le=len(PAY_PROBABILITIES) - 1)


class OpenPull(Move):
    """Pull an arm, of which the schema does not say how many there are."""

    arm: Integer


class BanditFacts(Facts):
    """The arm pulled."""

    arm: int | None = None


@dataclass(frozen=True)
class Bandit:
    """A row of arms, and what the one that was pulled paid."""

    seed: int
    arm: int | None = None
    paid: int = 0

    @property
    def over(self) -> bool:
        """Whether an arm was pulled."""
        return self.arm is not None

    def step(self, move: Pull | OpenPull) -> tuple[Bandit, Reward]:
        """Pull the arm and end the episode.

        Raises:
            IllegalMove: If there is no such arm, which `bandit_open` does not prevent.
        """
        if not 0 <= move.arm < len(PAY_PROBABILITIES):
            message = f"there is no arm {move.arm}: arms are 0 to 3"
            raise IllegalMove(message)
        # Every arm draws, so what one arm pays does not depend on the arm pulled.
        draws = Draws(self.seed)
        pays = [draws.chance(probability) for probability in PAY_PROBABILITIES]
        reward = int(pays[move.arm])
        return replace(self, arm=move.arm, paid=reward), reward

    def view(self) -> TextView:
        """Offer the arms, or say what was paid."""
        if self.arm is None:
            return TextView(input_text="Pull an arm.")
        return TextView(input_text=f"Arm {self.arm} pays {self.paid}.")

    def facts(self) -> BanditFacts:
        """Return the arm pulled."""
        return BanditFacts(arm=self.arm)


GAME = Game(
    name="bandit",
    kind="synthesis",
    description="Pull the arm that pays best.",
    move=Pull,
    deal=lambda seed, _level: Bandit(seed),
    play=lambda _text: Pull(arm=BEST_ARM),
    steps=1,
    facts=BanditFacts,
    levels=1,
)
