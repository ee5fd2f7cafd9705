"""Cart-pole: keep a pole upright on a cart by pushing the cart left or right.

The dynamics are those of Barto, Sutton and Anderson, "Neuronlike adaptive elements that
can solve difficult learning control problems" (1983), integrated with Euler steps of
20 ms. Each step that leaves the pole within 12 degrees and the cart within 2.4 m pays
1; the step that does not pays 0 and ends the episode. A difficulty sets how many steps
have to be survived and how far from upright the pole begins.
"""

from __future__ import annotations

import re
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

GRAVITY = 9.8
CART_MASS = 1.0
POLE_MASS = 0.1
TOTAL_MASS = CART_MASS + POLE_MASS
HALF_LENGTH = 0.5
FORCE = 10.0
STEP_SECONDS = 0.02
WIDEST = 2.4
STEEPEST = 12 * 3.141592653589793 / 180
DEGREES = 180 / 3.141592653589793

STEPS = {1: 30, 2: 100, 3: 200}
SPREADS = {1: 0.05, 2: 0.05, 3: 0.1}


class Push(Move):
    """Push the cart: 0 to the left, 1 to the right."""

    push: Integer = Field(ge=0, le=1)


class CartPoleFacts(Facts):
    """Place and speed of cart and pole, in metres, radians and seconds."""

    x: float = 0.0
    x_speed: float = 0.0
    angle: float = 0.0
    angle_speed: float = 0.0


@dataclass(frozen=True)
class CartPole:
    """A cart, its pole, and how long it has to stay up."""

    goal: int
    x: float
    x_speed: float
    angle: float
    angle_speed: float
    taken: int = 0

    @property
    def fallen(self) -> bool:
        """Whether the pole leans too far or the cart left the track."""
        return abs(self.x) > WIDEST or abs(self.angle) > STEEPEST

    @property
    def over(self) -> bool:
        """Whether the pole fell or stood long enough."""
        return self.fallen or self.taken == self.goal

    def step(self, move: Push) -> tuple[CartPole, Reward]:
        """Push for one time step."""
        sine, cosine = sine_cosine(self.angle)
        force = FORCE if move.push else -FORCE
        swing = POLE_MASS * HALF_LENGTH * self.angle_speed * self.angle_speed * sine
        drive = (force + swing) / TOTAL_MASS
        inertia = HALF_LENGTH * (4 / 3 - POLE_MASS * cosine * cosine / TOTAL_MASS)
        turn = (GRAVITY * sine - cosine * drive) / inertia
        pull = drive - POLE_MASS * HALF_LENGTH * turn * cosine / TOTAL_MASS
        after = replace(
            self,
            x=self.x + STEP_SECONDS * self.x_speed,
            x_speed=self.x_speed + STEP_SECONDS * pull,
            angle=self.angle + STEP_SECONDS * self.angle_speed,
            angle_speed=self.angle_speed + STEP_SECONDS * turn,
            taken=self.taken + 1,
        )
        return after, 0 if after.fallen else 1

    def view(self) -> TextView:
        """Tell the four numbers."""
        heading = f"Step {self.taken} of {self.goal}."
        if self.over:
            heading = f"The pole {'fell' if self.fallen else 'stood'}."
        return TextView(
            input_text=(
                f"{heading} Cart {self.x:+.3f} m, {self.x_speed:+.3f} m/s; pole "
                f"{self.angle * DEGREES:+.2f} deg, "
                f"{self.angle_speed * DEGREES:+.2f} deg/s."
            )
        )

    def facts(self) -> CartPoleFacts:
        """Return the four numbers in full."""
        return CartPoleFacts(
            x=self.x,
            x_speed=self.x_speed,
            angle=self.angle,
            angle_speed=self.angle_speed,
        )


def sine_cosine(angle: float) -> tuple[float, float]:
    """Return sine and cosine of an angle below 0.5 radians, from their series.

    Libraries differ in the last bit of `math.sin`; sums and products do not, so an
    episode replays exactly on any machine.
    """
    square = angle * angle
    sine, cosine = 1.0, 1.0
    for order in (12, 10, 8, 6, 4, 2):
        sine = 1 - square * sine / (order * (order + 1))
        cosine = 1 - square * cosine / ((order - 1) * order)
    return angle * sine, cosine


def deal(seed: int, level: int) -> CartPole:
    """Begin near upright and near rest."""
    draws, spread = Draws(seed), SPREADS[level]
    x, x_speed, angle, angle_speed = (
        draws.between(-10_000, 10_000) / 10_000 * spread for _ in range(4)
    )
    return CartPole(STEPS[level], x, x_speed, angle, angle_speed)


def play(text: str) -> Push:
    """Push where the pole falls, a little corrected for place and speed."""
    numbers = (float(number) for number in re.findall(r"[+-][\d.]+(?= )", text))
    x, x_speed, angle, angle_speed = numbers
    lean = angle + 0.3 * angle_speed + 0.6 * x + 1.5 * x_speed
    return Push(push=int(lean > 0))


GAME = Game(
    name="cartpole",
    kind="arcade",
    description="Keep the pole upright: push the cart left (0) or right (1).",
    move=Push,
    deal=deal,
    play=play,
    steps=STEPS[1],
    facts=CartPoleFacts,
)
