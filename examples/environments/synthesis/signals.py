"""Signals: press the lamp that belongs to a ticket's colour, once.

The mapping from colour to lamp is fixed and arbitrary. No text tells it: only the
reward, 1.0 for the right lamp and 0.0 for another, so a policy starts at chance and
has to learn it. The seed draws the colour and a ticket number, which means nothing but
makes the texts of other seeds new.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field

from examples.environments.game import (
    Draws,
    Facts,
    Game,
    Integer,
    Move,
    Reward,
    TextView,
)

LAMPS = {"red": 2, "green": 0, "blue": 3, "gold": 1}
FIRST_TICKET = 10_000
TICKETS = 90_000


class Press(Move):
    """Press a lamp."""

    lamp: Integer = Field(ge=0, le=len(LAMPS) - 1)


class SignalsFacts(Facts):
    """The ticket and the lamp pressed; not the right lamp."""

    ticket: int | None = None
    colour: str | None = None
    lamp: int | None = None


@dataclass(frozen=True)
class Signals:
    """A ticket, and the lamp pressed for it."""

    ticket: int
    colour: str
    lamp: int | None = None

    @property
    def over(self) -> bool:
        """Whether a lamp was pressed."""
        return self.lamp is not None

    def step(self, move: Press) -> tuple[Signals, Reward]:
        """Press the lamp and end the episode."""
        return replace(self, lamp=move.lamp), float(LAMPS[self.colour] == move.lamp)

    def view(self) -> TextView:
        """Show the ticket, or say what was pressed."""
        if self.lamp is None:
            return TextView(input_text=f"Ticket {self.ticket} is {self.colour}.")
        return TextView(input_text=f"Lamp {self.lamp} pressed.")

    def facts(self) -> SignalsFacts:
        """Return ticket, colour and lamp."""
        return SignalsFacts(ticket=self.ticket, colour=self.colour, lamp=self.lamp)


def deal(seed: int, _level: int) -> Signals:
    """Draw a ticket and its colour."""
    draws = Draws(seed)
    ticket = FIRST_TICKET + draws.below(TICKETS)
    return Signals(ticket, tuple(LAMPS)[draws.below(len(LAMPS))])


def play(text: str) -> Press:
    """Press the lamp of the colour, which this player was told."""
    return Press(lamp=LAMPS[text.rstrip(".").split()[-1]])


GAME = Game(
    name="signals",
    kind="synthesis",
    description="Press the lamp of the ticket's colour.",
    move=Press,
    deal=deal,
    play=play,
    steps=1,
    facts=SignalsFacts,
    reward="float",
    levels=1,
)
