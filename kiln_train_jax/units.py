"""From recorded groups to rows of ids, each with what carries a loss in it.

A rollout becomes one row as long as each turn's prompt extends the ids before it; a
turn that does not (templates that drop old reasoning) starts a new row, and no action
is dropped. Only sampled ids carry a policy loss; forced ids stand in no denominator.

Environment text is what the trace's spans say, harness warnings excluded. ECHO counts
the warnings in its denominator all the same, and may train them: they are found by
their own ids in the prompt that followed.

Rollouts without token ids are rendered by the chat template (`rendering.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType

from kiln_core.errors import TrainingError
from kiln_core.grpo import EchoLoss
from kiln_core.records import AgenticGroup, ScoredRollout
from kiln_train_jax.advantages import group_advantages
from kiln_train_jax.rendering import RenderedRollout, RolloutRenderer
from kiln_train_jax.replaying import TurnReplayer

__all__ = [
    "SampledToken",
    "TrainingRow",
    "TrainingUnit",
    "rendered_rollouts",
    "training_units",
]

EVERYTHING: Final = np.full(1, -1, np.int32)
"""The mask of an unknown set: the whole vocabulary, broadcast."""


class SampledToken(NamedTuple):
    """One id that carries a policy loss."""

    position: int
    """Index in the row of the id that predicts it."""
    token: int
    mask: np.ndarray
    """int32 `[words]`: the set it was drawn from."""
    logprob: float | None
    """Recorded, under that set; None where nothing was."""


class TrainingRow(NamedTuple):
    """One sequence of ids behind the shared prompt."""

    rollout: tuple[int, int]
    """Group and candidate; a rollout whose prompt does not grow has several rows."""

    tokens: list[int]
    """The last prompt id, then everything after it."""
    sampled: list[SampledToken]
    observed: list[int]
    """Indices in the row of the environment ids that ECHO trains."""
    observation_tokens: int
    """Environment ids of the row, harness warnings included."""
    advantage: float
    temperature: float

    @property
    def content(self) -> tuple[Any, ...]:
        """What makes two rows equal but for who earned what."""
        sampled = tuple(
            (s.position, s.token, s.mask.tobytes(), s.logprob) for s in self.sampled
        )
        seen = tuple(self.observed), self.observation_tokens
        return tuple(self.tokens), sampled, seen, self.temperature


class TrainingUnit(NamedTuple):
    """Rows that share a prompt."""

    prompt: list[int]
    """All but the last id of the shared prompt."""
    rows: list[TrainingRow]
    group: int
    """Index of the group in the corpus."""

    @property
    def sampled_tokens(self) -> int:
        """Ids that carry a policy loss."""
        return sum(len(row.sampled) for row in self.rows)


def training_units(
    group: AgenticGroup,
    index: int,
    mode: Literal["dr_grpo", "vanilla"],
    replayer: TurnReplayer,
    echo: EchoLoss | None = None,
    renderer: RolloutRenderer | None = None,
) -> list[TrainingUnit]:
    """Turn a recorded group into units of rows.

    Args:
        group: Recorded.
        index: Its place in the corpus.
        mode: Advantage mode.
        replayer: Recovers the sets that tokens were drawn from, and finds warnings.
        echo: What of the environment's text is trained; None is nothing.
        renderer: Gives token ids to rollouts without them; None refuses those.

    Raises:
        TrainingError: A rollout has no token ids, or they contradict themselves.
    """
    rewards = [completion.reward for completion in group.completions]
    advantages = group_advantages(rewards, mode)
    by_prompt: dict[tuple[int, ...], list[TrainingRow]] = {}
    for candidate, completion in enumerate(group.completions):
        name, advantage = (index, candidate), float(advantages[candidate])
        if completion.token_trace is not None:
            rows = _rows(group, completion, replayer, echo)
        elif renderer is not None:
            title = f"rollout {candidate} of group {index}"
            rows = _rendered_rows(renderer.render(group, completion, title), echo)
        else:
            raise TrainingError(
                f"group {index} has no token ids",
                hint="collect it without --no-trace, with a policy that returns them",
            )
        for prompt, row in rows:
            row = row._replace(rollout=name, advantage=advantage)  # noqa: PLW2901 - named
            by_prompt.setdefault(tuple(prompt), []).append(row)
    return [
        TrainingUnit(list(prompt), rows, index) for prompt, rows in by_prompt.items()
    ]


def rendered_rollouts(groups: Iterable[AgenticGroup]) -> int:
    """Return how many rollouts of groups acted and carry no token ids."""
    return sum(
        bool(rollout.text) and rollout.token_trace is None
        for group in groups
        for rollout in group.completions
    )


def _trains_warnings(echo: EchoLoss | None) -> bool:
    """Say whether harness warnings are trained like the environment's text."""
    return echo is not None and (
        echo.env_mask_mode == "full_obs" or not echo.warning_filter
    )


def _rendered_rows(
    rollout: RenderedRollout, echo: EchoLoss | None
) -> Iterator[tuple[list[int], TrainingRow]]:
    """Yield the rows of a rendered rollout, each with the prompt it stands behind."""
    builder = _RowBuilder(rollout.opening, temperature=1.0)
    for turn in rollout.turns:
        if turn.prompt[: len(builder.before)] != builder.before:
            yield from builder.finish()
            builder.start(turn.prompt)
        builder.extend(turn.prompt)
        builder.observe([seen.text for seen in turn.seen], trained=True)
        warnings = [seen.warning for seen in turn.seen]
        builder.observe(warnings, trained=_trains_warnings(echo))
        everything = dict.fromkeys(range(len(turn.action)), EVERYTHING)
        builder.act(turn.action, [None] * len(turn.action), everything)
    yield from builder.finish()


def _rows(
    group: AgenticGroup,
    rollout: ScoredRollout,
    replayer: TurnReplayer,
    echo: EchoLoss | None,
) -> Iterator[tuple[list[int], TrainingRow]]:
    """Yield the rows of a rollout, each with the prompt it stands behind.

    Whose they are and what they earned is for the caller to say.

    Raises:
        TrainingError: It has no token ids, or its group has none.
    """
    trace, shared = rollout.trace, group.prompt_token_ids
    if (
        isinstance(trace, UnsetType)
        or trace.tokens is None
        or isinstance(shared, UnsetType)
    ):
        raise TrainingError("a rollout has no token ids")
    builder = _RowBuilder(shared, trace.tokens.sampling.temperature)
    warnings = _warnings(rollout) if echo is not None else {}
    trained = _trains_warnings(echo)
    for index, turn in enumerate(trace.tokens.turns):
        prompt = builder.before[: turn.prompt_prefix] + turn.prompt_token_ids
        masks = replayer.masks(
            group,
            trace.guide_sha256,
            trace.tokens.sampling,
            (prompt, turn.action_token_ids, turn.logprobs),
        )
        if turn.prompt_prefix < len(builder.before):
            yield from builder.finish()
            builder.start(prompt)
        builder.extend(prompt)
        builder.observe(turn.observation_spans, trained=True)
        if index in warnings:
            span = replayer.find(warnings[index], prompt, turn.prompt_prefix)
            builder.observe([span], trained=trained)
        builder.act(turn.action_token_ids, turn.logprobs, masks)
    yield from builder.finish()


def _warnings(rollout: ScoredRollout) -> dict[int, str]:
    """Return the harness text that each turn of a rollout was shown, by turn."""
    shown = [part for part in rollout.segments if part.kind == "observation"]
    return {
        turn: part.content
        for turn, part in enumerate(shown, 1)
        if part.warning_prefix_len is not UNSET
    }


class _RowBuilder:
    """Grows one row turn by turn."""

    def __init__(self, shared: list[int], temperature: float) -> None:
        self.before = list(shared)
        self._shared = shared
        self._temperature = temperature
        self.start(shared)

    def start(self, prompt: list[int]) -> None:
        """Begin a row; it stands behind the shared prompt where it extends it."""
        extends = prompt[: len(self._shared)] == self._shared
        self._prompt = self._shared if extends else prompt
        self.before = list(self._prompt)
        self._offset = len(self._prompt) - 1
        self._sampled: list[SampledToken] = []
        self._observed: list[int] = []
        self._known = len(self.before)
        self._observation_tokens = 0

    def extend(self, prompt: list[int]) -> None:
        """Append what came back from the environment, and the next opening."""
        self._known = len(self.before)
        self.before = list(prompt)

    def observe(self, spans: Sequence[tuple[int, int]], *, trained: bool) -> None:
        """Count the environment's text in what was appended."""
        for start, stop in spans:
            places = range(max(start, self._known), stop)
            self._observation_tokens += len(places)
            if trained:
                self._observed += [place - self._offset for place in places]

    def act(
        self,
        action: Sequence[int],
        logprobs: Sequence[float | None],
        masks: dict[int, np.ndarray],
    ) -> None:
        """Append an action; ids with a set to be drawn from carry a loss."""
        base = len(self.before) - self._offset
        self.before += action
        for index, (token, logprob) in enumerate(zip(action, logprobs, strict=True)):
            if index in masks:
                self._sampled.append(
                    SampledToken(base + index - 1, token, masks[index], logprob)
                )

    def finish(self) -> Iterator[tuple[list[int], TrainingRow]]:
        """Yield the row, unless nothing was sampled in it."""
        if self._sampled or self._observed:
            row = TrainingRow(
                rollout=(0, 0),
                tokens=self.before[self._offset :],
                sampled=self._sampled,
                observed=self._observed,
                observation_tokens=self._observation_tokens,
                advantage=0.0,
                temperature=self._temperature,
            )
            yield self._prompt[:-1], row
