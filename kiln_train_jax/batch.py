"""From recorded groups to padded arrays.

A rollout becomes one row as long as each turn's prompt extends the ids before it; a
turn that does not (templates that drop old reasoning) starts a new row, and no action
is dropped. Only sampled ids carry a policy loss; forced ids stand in no denominator.

A step's prompts mostly agree: candidates of a group share all of theirs, and groups of
one environment its system message. What all rows share is computed once, and equal rows
become one row with the sum of their weights. Where that would cost more than keeping
groups apart, they are kept apart and their gradients added.

Shapes are rounded up to few sizes, so that a corpus meets few compiled programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UnsetType

from kiln_core.errors import TrainingError
from kiln_core.records import AgenticGroup, ScoredRollout
from kiln_core.trace import TokenTrace
from kiln_train_jax.advantages import group_advantages
from kiln_train_jax.guide import mask_words
from kiln_train_jax.replaying import TurnReplayer

__all__ = ["Batch", "TrainingRow", "TrainingUnit", "step_batches", "training_units"]

SMALLEST: Final = 8


class SampledToken(NamedTuple):
    """One id that carries a policy loss."""

    position: int
    """Index in the row of the id that predicts it."""
    token: int
    mask: np.ndarray
    """int32 `[words]`: the set it was drawn from."""
    logprob: float
    """Recorded, under that set."""


class TrainingRow(NamedTuple):
    """One sequence of ids behind the shared prompt."""

    rollout: tuple[int, int]
    """Group and candidate; a rollout whose prompt does not grow has several rows."""

    tokens: list[int]
    """The last prompt id, then everything after it."""
    sampled: list[SampledToken]
    observed: list[int]
    """Indices in the row of environment ids (what ECHO may train)."""
    advantage: float
    temperature: float

    @property
    def content(self) -> tuple[Any, ...]:
        """What makes two rows equal but for who earned what."""
        sampled = tuple(
            (s.position, s.token, s.mask.tobytes(), s.logprob) for s in self.sampled
        )
        return tuple(self.tokens), sampled, tuple(self.observed), self.temperature


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


class Batch(NamedTuple):
    """Padded arrays of rows behind one shared prefix."""

    prefix: np.ndarray
    """int32 `[prefix]`."""
    prefix_length: np.ndarray
    """int32 scalar: how many of them are real."""
    tokens: np.ndarray
    """int32 `[rows, time]`."""
    position: np.ndarray
    """int32 `[rows, sampled]`: where each sampled id is predicted."""
    target: np.ndarray
    """int32 `[rows, sampled]`."""
    mask: np.ndarray
    """int32 `[rows, sampled, words]`."""
    behavior: np.ndarray
    """float32 `[rows, sampled]`: recorded log-probabilities."""
    weight: np.ndarray
    """float32 `[rows, sampled]`: share of the step's mean, 0 where padded."""
    gain: np.ndarray
    """float32 `[rows, sampled]`: share times advantage."""
    temperature: np.ndarray
    """float32 `[rows]`."""
    observed_position: np.ndarray
    """int32 `[rows, observed]`: where each environment id is predicted."""
    observed_target: np.ndarray
    """int32 `[rows, observed]`."""
    observed_weight: np.ndarray
    """float32 `[rows, observed]`."""


def training_units(
    group: AgenticGroup,
    index: int,
    mode: Literal["dr_grpo", "vanilla"],
    replayer: TurnReplayer,
) -> list[TrainingUnit]:
    """Turn a recorded group into units of rows.

    Args:
        group: With token ids in its traces.
        index: Its place in the corpus.
        mode: Advantage mode.
        replayer: Recovers the sets that tokens were drawn from.

    Raises:
        TrainingError: It has no token ids, or they contradict themselves.
    """
    shared = group.prompt_token_ids
    if isinstance(shared, UnsetType):
        raise TrainingError(
            f"group {index} has no token ids",
            hint="collect it without --no-trace, with a policy that returns them",
        )
    rewards = [completion.reward for completion in group.completions]
    advantages = group_advantages(rewards, mode)
    by_prompt: dict[tuple[int, ...], list[TrainingRow]] = {}
    for candidate, completion in enumerate(group.completions):
        name, advantage = (index, candidate), float(advantages[candidate])
        for prompt, row in _rows(group, shared, completion, replayer):
            row = row._replace(rollout=name, advantage=advantage)  # noqa: PLW2901 - named
            by_prompt.setdefault(tuple(prompt), []).append(row)
    return [
        TrainingUnit(list(prompt), rows, index) for prompt, rows in by_prompt.items()
    ]


def step_batches(
    units: Sequence[TrainingUnit], vocabulary: int, *, per_sample: bool, echo: bool
) -> list[Batch]:
    """Lay out the units of one optimizer step.

    Args:
        units: In order.
        vocabulary: Number of token ids.
        per_sample: Whether every rollout weighs the same, instead of every token.
        echo: Whether environment ids are weighted, each row's to a sum of 1 over the
            rows that have any.

    Returns:
        Batches whose weights together sum to 1 over all sampled ids.
    """
    shares = _Shares(units, per_sample=per_sample, echo=echo)
    together = [_Pack.of(_common_prefix(units), units, shares)]
    apart = [_Pack.of(len(unit.prompt), [unit], shares) for unit in units]
    cheaper = min(together, apart, key=lambda packs: sum(pack.cost for pack in packs))
    return [pack.batch(vocabulary) for pack in cheaper]


class _Shares:
    """How much each id of a step weighs."""

    def __init__(
        self, units: Sequence[TrainingUnit], *, per_sample: bool, echo: bool
    ) -> None:
        rows = [row for unit in units for row in unit.rows]
        self._sampled: Counter[tuple[int, int]] = Counter()
        for row in rows:
            self._sampled[row.rollout] += len(row.sampled)
        self._rollouts = sum(count > 0 for count in self._sampled.values())
        self._observing = sum(bool(row.observed) for row in rows)
        self._per_sample = per_sample
        self._echo = echo

    def sampled(self, row: TrainingRow) -> float:
        """Return the share of each sampled id of a row."""
        if self._per_sample:
            return 1.0 / max(self._rollouts * self._sampled[row.rollout], 1)
        return 1.0 / max(self._sampled.total(), 1)

    def observed(self, row: TrainingRow) -> float:
        """Return the share of each environment id of a row."""
        if not self._echo:
            return 0.0
        return 1.0 / max(self._observing * len(row.observed), 1)


class _Line:
    """A row as it is laid out: equal rows are one line with added weights."""

    def __init__(self, tail: list[int], row: TrainingRow) -> None:
        self.tokens = tail + row.tokens
        self.row = row
        self.offset = len(tail)
        self.weight = self.gain = self.observed_weight = 0.0

    def add(self, row: TrainingRow, shares: _Shares) -> None:
        """Add the weights of an equal row."""
        share = shares.sampled(row)
        self.weight += share
        self.gain += share * row.advantage
        self.observed_weight += shares.observed(row)


class _Pack:
    """Lines behind one prefix."""

    def __init__(self, prefix: list[int], lines: list[_Line]) -> None:
        self.prefix = prefix
        self.lines = lines

    @classmethod
    def of(cls, shared: int, units: Sequence[TrainingUnit], shares: _Shares) -> _Pack:
        """Lay out units behind their first ``shared`` prompt ids."""
        lines: dict[Any, _Line] = {}
        for unit in units:
            tail = unit.prompt[shared:]
            for row in unit.rows:
                key = (tuple(tail), *row.content)
                line = lines.setdefault(key, _Line(tail, row))
                line.add(row, shares)
        return cls(units[0].prompt[:shared], list(lines.values()))

    @property
    def cost(self) -> int:
        """Ids the model must run, padding included."""
        longest = max(len(line.tokens) for line in self.lines)
        lines = bucket(len(self.lines), smallest=1)
        return bucket(len(self.prefix)) + lines * bucket(longest)

    def batch(self, vocabulary: int) -> Batch:
        """Return the padded arrays."""
        rows = [line.row for line in self.lines]
        batch = _Sizes(
            rows=bucket(len(rows), smallest=1),
            prefix=bucket(len(self.prefix)),
            time=bucket(max(len(line.tokens) for line in self.lines)),
            sampled=bucket(max(len(row.sampled) for row in rows), smallest=1),
            observed=bucket(max(len(row.observed) for row in rows), smallest=1),
            words=mask_words(vocabulary),
        ).empty(len(self.prefix))
        batch.prefix[: len(self.prefix)] = self.prefix
        for at, line in enumerate(self.lines):
            _fill(batch, at, line)
        return batch


class _Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The padded shape of a batch."""

    rows: int
    prefix: int
    time: int
    sampled: int
    observed: int
    words: int

    def empty(self, prefix_length: int) -> Batch:
        """Return zeroed arrays; the mask of a padded place allows everything."""
        drawn, seen = (self.rows, self.sampled), (self.rows, self.observed)
        return Batch(
            prefix=np.zeros(self.prefix, np.int32),
            prefix_length=np.asarray(prefix_length, np.int32),
            tokens=np.zeros((self.rows, self.time), np.int32),
            position=np.zeros(drawn, np.int32),
            target=np.zeros(drawn, np.int32),
            mask=np.full((*drawn, self.words), -1, np.int32),
            behavior=np.zeros(drawn, np.float32),
            weight=np.zeros(drawn, np.float32),
            gain=np.zeros(drawn, np.float32),
            temperature=np.ones(self.rows, np.float32),
            observed_position=np.zeros(seen, np.int32),
            observed_target=np.zeros(seen, np.int32),
            observed_weight=np.zeros(seen, np.float32),
        )


def bucket(size: int, smallest: int = SMALLEST) -> int:
    """Round up to two significant binary digits, so that waste is at most a third."""
    size = max(size, smallest)
    step = 1 << max(size.bit_length() - 2, 0)
    return -(-size // step) * step


def _fill(batch: Batch, at: int, line: _Line) -> None:
    row = line.row
    batch.tokens[at, : len(line.tokens)] = line.tokens
    batch.temperature[at] = row.temperature
    for index, sampled in enumerate(row.sampled):
        batch.position[at, index] = line.offset + sampled.position
        batch.target[at, index] = sampled.token
        batch.mask[at, index] = sampled.mask
        batch.behavior[at, index] = sampled.logprob
    batch.weight[at, : len(row.sampled)] = line.weight
    batch.gain[at, : len(row.sampled)] = line.gain
    for index, position in enumerate(row.observed):
        batch.observed_position[at, index] = line.offset + position - 1
        batch.observed_target[at, index] = row.tokens[position]
    batch.observed_weight[at, : len(row.observed)] = line.observed_weight


def _common_prefix(units: Sequence[TrainingUnit]) -> int:
    """Return how many leading prompt ids all units share."""
    first, *others = [unit.prompt for unit in units]
    shared = len(first)
    for prompt in others:
        agree = zip(first[:shared], prompt, strict=False)
        shared = next(
            (i for i, (one, other) in enumerate(agree) if one != other),
            min(shared, len(prompt)),
        )
    return shared


def _rows(
    group: AgenticGroup,
    shared: list[int],
    rollout: ScoredRollout,
    replayer: TurnReplayer,
) -> Iterator[tuple[list[int], TrainingRow]]:
    """Yield the rows of a rollout, each with the prompt it stands behind.

    Whose they are and what they earned is for the caller to say.

    Raises:
        TrainingError: It has no token ids.
    """
    trace = rollout.trace
    if isinstance(trace, UnsetType) or trace.tokens is None:
        raise TrainingError("a rollout has no token ids")
    builder = _RowBuilder(shared, trace.tokens)
    for turn in trace.tokens.turns:
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
        builder.extend(prompt, turn.observation_spans)
        builder.act(turn.action_token_ids, turn.logprobs, masks)
    yield from builder.finish()


class _RowBuilder:
    """Grows one row turn by turn."""

    def __init__(self, shared: list[int], trace: TokenTrace) -> None:
        self.before = list(shared)
        self._shared = shared
        self._trace = trace
        self.start(shared)

    def start(self, prompt: list[int]) -> None:
        """Begin a row; it stands behind the shared prompt where it extends it."""
        extends = prompt[: len(self._shared)] == self._shared
        self._prompt = self._shared if extends else prompt
        self.before = list(self._prompt)
        self._offset = len(self._prompt) - 1
        self._sampled: list[SampledToken] = []
        self._observed: list[int] = []

    def extend(self, prompt: list[int], spans: Sequence[tuple[int, int]]) -> None:
        """Append what came back from the environment, and the next opening."""
        known = len(self.before)
        self.before = list(prompt)
        for start, stop in spans:
            first = max(start, known)
            self._observed += [i - self._offset for i in range(first, stop)]

    def act(
        self,
        action: Sequence[int],
        logprobs: Sequence[float | None],
        masks: dict[int, np.ndarray],
    ) -> None:
        """Append an action; its sampled ids carry a loss."""
        base = len(self.before) - self._offset
        self.before += action
        for index, (token, logprob) in enumerate(zip(action, logprobs, strict=True)):
            if logprob is not None:
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
                advantage=0.0,
                temperature=self._trace.sampling.temperature,
            )
            yield self._prompt[:-1], row
