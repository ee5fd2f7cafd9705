"""The environments of the pack, and what a program can learn of them before serving.

A new environment is a module with a `GAME`, and one line here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from examples.environments.arcade import (
    cartpole,
    connect4,
    g2048,
    lights_out,
    mastermind,
    maze,
    minesweeper,
    snake,
    sokoban,
    tictactoe,
    wordle,
)
from examples.environments.game import Game, Kind
from examples.environments.math import (
    algebra,
    chance,
    change,
    discrete,
    evidence,
    measure,
    reason,
    space,
)
from examples.environments.synthesis import (
    bandit,
    bandit_open,
    counter,
    grid,
    signals,
)

MODULES = (
    *(counter, bandit, bandit_open, signals, grid),
    *(cartpole, snake, g2048, connect4, maze, wordle, minesweeper),
    *(sokoban, tictactoe, lights_out, mastermind),
    *(measure, algebra, change, space, discrete, chance, evidence, reason),
)

GAMES: dict[str, Game[Any]] = {module.GAME.name: module.GAME for module in MODULES}
"""The pack by name, in the order of its documentation."""


class Entry(NamedTuple):
    """What the inventory says of one environment."""

    name: str
    kind: Kind
    description: str
    text_first: bool
    """Whether observations carry `input_text`."""
    action: dict[str, str]
    """JSON type of each field of an action."""
    reward: str
    """Type of its rewards: `integer` or `float`."""
    difficulties: list[int]
    """Values of the reset option `difficulty`; empty where there is no such option."""
    legal_actions: bool
    """Whether observations list the legal actions."""
    after_end: str
    """What a step after the end gives: `refused`, or the last answer `repeated`."""
    steps: int
    """Steps that are enough for the scripted player at the least difficulty."""


def entry(game: Game[Any]) -> Entry:
    """Return the inventory's entry for a game."""
    fields = game.move.model_json_schema()["properties"]
    return Entry(
        name=game.name,
        kind=game.kind,
        description=game.description,
        text_first=game.text_first,
        action={name: field["type"] for name, field in fields.items()},
        reward=game.reward,
        difficulties=list(range(1, game.levels + 1)) if game.levels > 1 else [],
        legal_actions="legal_actions" in game.view.model_fields,
        after_end="repeated" if game.frozen else "refused",
        steps=game.steps,
    )


def inventory() -> list[dict[str, Any]]:
    """Return the entries of the whole pack as plain values."""
    return [entry(game)._asdict() for game in GAMES.values()]
