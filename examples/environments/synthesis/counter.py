"""Counter: add amounts until the total is exactly 4.

Every step costs 0.25 but the last one, which pays 1.0, so the best return is 0.75
(two steps). Adding 0, or more than is missing, is refused without ending the episode.
Nothing is random: the seed is only recorded in the state. It is the one environment of
the pack without text: the policy reads the observation as JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import Field

from examples.environments.game import (
    Facts,
    Game,
    IllegalMove,
    Integer,
    Move,
    Reward,
    View,
)

TARGET = 4
LARGEST = 3
LAST_STEP_REWARD = 1.0
OTHER_STEP_REWARD = -0.25


class Add(Move):
    """Add an amount to the total. Zero fits the schema and is refused by `step`."""

    amount: Integer = Field(ge=0, le=LARGEST)


class TotalView(View):
    """The total so far."""

    total: int


class TotalFacts(Facts):
    """The total so far."""

    total: int = 0


@dataclass(frozen=True)
class Counter:
    """A total."""

    total: int = 0

    @property
    def over(self) -> bool:
        """Whether the target is reached."""
        return self.total == TARGET

    def step(self, move: Add) -> tuple[Counter, Reward]:
        """Add the amount.

        Raises:
            IllegalMove: If the amount is 0 or more than is missing.
        """
        after = Counter(self.total + move.amount)
        if not self.total < after.total <= TARGET:
            message = f"cannot add {move.amount} to {self.total}"
            raise IllegalMove(message)
        return after, LAST_STEP_REWARD if after.over else OTHER_STEP_REWARD

    def view(self) -> TotalView:
        """Show the total."""
        return TotalView(total=self.total)

    def facts(self) -> TotalFacts:
        """Return the total."""
        return TotalFacts(total=self.total)


def play(text: str) -> Add:
    """Add as much as is possible."""
    found = re.search(r'"total": ?(\d+)', text)
    total = int(found[1]) if found else 0
    return Add(amount=min(LARGEST, TARGET - total))


GAME = Game(
    name="counter",
    kind="synthesis",
    description="Add amounts to reach a total of exactly 4.",
    move=Add,
    deal=lambda _seed, _level: Counter(),
    play=play,
    steps=TARGET,
    view=TotalView,
    facts=TotalFacts,
    reward="float",
    levels=1,
)
