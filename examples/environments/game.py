"""What an environment of the pack is made of, without the SDK and without IO.

A game is a table of functions and types. `deal` makes the first position of a seed, a
position is a frozen value whose `step` returns the next one and a reward, and `play`
answers a text with a move. So rules and players are tested as plain functions, and
`hosting` is the one module that turns a game into an OpenEnv environment.

Everything is decided by the seed and the moves: no clock, no global generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

Reward: TypeAlias = int | float
"""Integers stay integers on the wire, so their types matter."""
Kind: TypeAlias = Literal["arcade", "synthesis", "math"]
T = TypeVar("T")


class IllegalMove(Exception):
    """The move is impossible now and changed nothing.

    The SDK answers any exception of `step` with EXECUTION_ERROR and this text, and
    the session goes on: the policy may correct itself.
    """


class Draws:
    """Random draws that depend on a seed and a path alone.

    Only `Random.random` is used: it is the one method whose sequence Python promises
    to keep between versions, and recorded episodes are replayed years later.

    Args:
        seed: The seed of the episode.
        path: Where in the episode, such as the number of the turn; each path has a
            sequence of its own, so a draw does not depend on how often others drew.
    """

    def __init__(self, seed: int, *path: int) -> None:
        label = seed if not path else "/".join(map(str, (seed, *path)))
        self._random = Random(label)  # noqa: S311 - a game, not a secret

    def chance(self, probability: float) -> bool:
        """Draw true with this probability."""
        return self._random.random() < probability

    def below(self, bound: int) -> int:
        """Draw an integer from 0 up to, not including, the bound."""
        return int(self._random.random() * bound)

    def between(self, lowest: int, highest: int) -> int:
        """Draw an integer of this closed range."""
        return lowest + self.below(highest - lowest + 1)

    def choice(self, items: Sequence[T]) -> T:
        """Draw one item of a sequence that is not empty."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Draw some of the items, each at most once, in a random order."""
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(count)]


def _integer(value: object) -> object:
    # As in JSON Schema: 7 and 7.0 are integers, "7" and true are not. A ValueError
    # would end the session (the SDK cannot write it down), a custom error does not.
    if isinstance(value, bool | str):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


Integer = Annotated[int, BeforeValidator(_integer)]
"""An integer field of a move: exactly what the published schema says it is."""


def compact(schema: dict[str, Any]) -> None:
    """Strip a JSON Schema of a move, in place, to what a policy must know.

    The schema is part of every prompt, so its length is paid for in every forward
    pass. Titles, the class docstring and the SDK's inherited `metadata` say nothing
    about the move; the server still accepts `metadata`.
    """
    schema.pop("title", None)
    schema.pop("description", None)
    properties = schema["properties"]
    properties.pop("metadata", None)
    for member in properties.values():
        member.pop("title", None)


class Move(BaseModel):
    """What a policy does in one step."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=compact)


class View(BaseModel):
    """What a policy is shown."""


class TextView(View):
    """What a policy reads."""

    input_text: str


class ChoiceView(TextView):
    """What a policy reads, and the moves that are legal now, as words."""

    legal_actions: list[str]


class NumberView(TextView):
    """What a policy reads, and the moves that are legal now, as numbers."""

    legal_actions: list[int]


class Facts(BaseModel):
    """What `state` says of an episode beside its progress: never a secret."""


MoveT = TypeVar("MoveT", bound=Move)
MoveT_contra = TypeVar("MoveT_contra", bound=Move, contravariant=True)


class Position(Protocol[MoveT_contra]):
    """One moment of an episode; positions are values and never change."""

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""

    def step(self, move: MoveT_contra) -> tuple[Self, Reward]:
        """Return the next position and the reward.

        Raises:
            IllegalMove: If the rules forbid the move.
        """

    def view(self) -> View:
        """Show the position to the policy."""

    def facts(self) -> Facts:
        """Return what `state` says."""


@dataclass(frozen=True, kw_only=True)
class Game(Generic[MoveT]):
    """An environment of the pack."""

    name: str
    kind: Kind
    description: str
    """Told to the policy; it is part of every prompt."""
    move: type[MoveT]
    deal: Callable[[int, int], Position[MoveT]]
    """First position of a seed and a difficulty."""
    play: Callable[[str], MoveT]
    """Answer the text of a running position: a pure player, good but not perfect."""
    steps: int
    """Steps that are enough for the player at difficulty 1."""
    view: type[View] = TextView
    facts: type[Facts] = Facts
    reward: Literal["integer", "float"] = "integer"
    """Type of every reward on the wire."""
    levels: int = 3
    """Difficulties, from 1; 1 where the reset option does not exist."""
    frozen: bool = False
    """Whether steps after the end repeat the last answer instead of being refused."""

    @property
    def text_first(self) -> bool:
        """Whether observations carry `input_text`."""
        return "input_text" in self.view.model_fields


def read_text(view: View) -> str:
    """Return what a policy reads of a view: its text, or all of it as JSON."""
    text = getattr(view, "input_text", None)
    return text if isinstance(text, str) else view.model_dump_json()
