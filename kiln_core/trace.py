"""``kiln.rollout-trace.v1``: the exact token ids of a rollout.

The trace is what the trainer uses instead of tokenizing text again. A turn's prompt is
written as how much of it repeats what came before, and the rest; the prompt that all
candidates of a group share stands once in the group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kiln_core import limits
from kiln_core.canonical import Record, Sha256
from kiln_core.errors import PolicyDrift, PolicyError
from kiln_core.provenance import MAX_LOGPROB, RolloutProvenance, TokenId

__all__ = [
    "RolloutTrace",
    "SamplingTransform",
    "TokenTrace",
    "TurnSample",
    "TurnTokens",
]

TRACE_SCHEMA: Final = "kiln.rollout-trace.v1"

MIN_LOGPROB: Final = -sys.float_info.max

Span: TypeAlias = tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]
"""Half-open range ``[start, stop)`` of token positions."""


class SamplingTransform(Record, frozen=True, kw_only=True, gc=False):
    """How the sampled distribution was derived from the model's."""

    temperature: Annotated[float, Meta(ge=0)]
    top_p: Annotated[float, Meta(ge=0, le=1)]
    top_k: Annotated[int, Meta(ge=0)]
    min_p: Annotated[float, Meta(ge=0, le=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    """Bound of a turn; the grammar of a guide depends on it."""


class TurnTokens(Record, frozen=True, kw_only=True, gc=False):
    """The token ids of one policy turn."""

    prompt_prefix: Annotated[int, Meta(ge=0)]
    """Leading prompt ids equal to the previous turn's prompt and action.

    For the first turn: to the group's ``prompt_token_ids``.
    """
    prompt_token_ids: list[TokenId]
    """The rest of the prompt."""
    action_token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    """Everything generated, the stop token included."""
    logprobs: list[float | None]
    """Per action id; null where grammar or thinking budget forced it."""
    observation_spans: list[Span]
    """Prompt positions of environment text, harness warnings excluded."""

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.action_token_ids):
            raise ValueError("logprobs and action_token_ids differ in length")
        for logprob in self.logprobs:
            # also false for what is not a number
            if logprob is not None and not MIN_LOGPROB <= logprob <= MAX_LOGPROB:
                raise ValueError("a log-probability must be finite and <= 0")
        prompt_length = self.prompt_prefix + len(self.prompt_token_ids)
        last = 0
        for start, stop in self.observation_spans:
            if not last <= start <= stop <= prompt_length:
                raise ValueError("observation_spans must be ordered, in the prompt")
            last = stop


class TokenTrace(Record, frozen=True, kw_only=True, gc=False):
    """The ids of every turn, and what they were sampled with."""

    tokenizer_sha256: Sha256
    sampling: SamplingTransform
    turns: Annotated[list[TurnTokens], Meta(max_length=limits.MAX_STEPS)]


class RolloutTrace(Record, frozen=True, kw_only=True, gc=False):
    """Our own member of a scored rollout."""

    schema: Literal["kiln.rollout-trace.v1"]
    attempt: Annotated[int, Meta(ge=0, le=limits.MAX_EPISODE_RETRIES)]
    """0 unless earlier attempts lost their session."""
    guide_sha256: Sha256 | None
    """Digest of the narrowed grammar that guided decoding; null when unguided."""
    tokens: TokenTrace | None
    """Null when the policy returned none, or ``--no-trace``."""


def turn_tokens(
    provenance: RolloutProvenance, previous: list[int], observations: list[Span]
) -> TurnTokens:
    """Project a completion's provenance into a turn of the trace.

    Args:
        provenance: What the chat endpoint returned with the completion.
        previous: Prompt and action ids of the turn before; the group's prompt ids
            for the first turn.
        observations: Prompt positions of environment text that came since.
    """
    prompt = provenance.input_token_ids[: provenance.prompt_token_count]
    action = provenance.input_token_ids[provenance.prompt_token_count :]
    logprobs: list[float | None] = [None] * len(action)
    for token in provenance.action_tokens:
        index = token.sequence_index - provenance.prompt_token_count
        # Grammar-forced tokens are "sampled" with log-probability exactly 0 on the
        # endpoint; a set of one token carries no decision, so the trace says null.
        logprob = token.behavior_logprob
        logprobs[index] = None if logprob == 0.0 else logprob
    prefix = _shared_prefix(previous, prompt)
    return TurnTokens(
        prompt_prefix=prefix,
        prompt_token_ids=prompt[prefix:],
        action_token_ids=action,
        logprobs=logprobs,
        observation_spans=observations,
    )


def _shared_prefix(left: list[int], right: list[int]) -> int:
    if right[: len(left)] == left:
        return len(left)
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


class TurnSample(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy returned with one turn, before it is projected."""

    provenance: RolloutProvenance
    content_spans: tuple[Span, ...]
    """Per message of the request, the prompt positions that hold its content."""
    guide_sha256: Sha256 | None = None


def token_trace(
    samples: Sequence[TurnSample], observed: Sequence[bool]
) -> TokenTrace | None:
    """Project the turns of an episode into a trace.

    Args:
        samples: One per turn, in order.
        observed: Per turn, whether its result was environment text (not a harness
            or protocol error).

    Returns:
        None when there was no turn.

    Raises:
        PolicyDrift: Tokenizer or sampling changed between two turns.
        PolicyError: The place of the environment's text lies outside the prompt.
    """
    if not samples:
        return None
    first = samples[0].provenance
    previous = first.input_token_ids[: first.prompt_token_count]
    turns = []
    for index, sample in enumerate(samples):
        _check_sample(sample, first)
        # Turn t answers messages [system, user, action 0, result 0, ...], so the only
        # new environment text is its last message; turn 0 has just the prompt.
        new = [sample.content_spans[-1]] if index and observed[index - 1] else []
        turns.append(turn_tokens(sample.provenance, previous, new))
        previous = sample.provenance.input_token_ids
    sampling = first.sampling
    return TokenTrace(
        tokenizer_sha256=first.tokenizer.sha256,
        sampling=SamplingTransform(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
        ),
        turns=turns,
    )


def _check_sample(sample: TurnSample, first: RolloutProvenance) -> None:
    seen = sample.provenance
    if (seen.tokenizer, seen.sampling) != (first.tokenizer, first.sampling):
        raise PolicyDrift("the policy changed tokenizer or sampling within an episode")
    start, stop = sample.content_spans[-1] if sample.content_spans else (0, -1)
    if not 0 <= start <= stop <= seen.prompt_token_count:
        raise PolicyError("the policy placed a message outside its prompt")


def check_tokens(
    tokens: TokenTrace,
    observed: Sequence[bool],
    shared_prompt_tokens: int,
    at: str,
    fail: Callable[..., Any],
) -> None:
    """Check what can be known of a trace without its tokenizer.

    Args:
        tokens: The trace.
        observed: Per turn of the trajectory, whether its result was environment text.
        shared_prompt_tokens: Length of the group's ``prompt_token_ids``.
        at: JSON Pointer of the trace's tokens.
        fail: Called for the first contradiction.
    """
    if len(tokens.turns) != len(observed):
        fail(
            "dataset_trace",
            f"{at}/turns",
            "the trajectory has other turns",
            len(observed),
            len(tokens.turns),
        )
    available = shared_prompt_tokens
    if tokens.turns:
        first = f"{at}/turns/0"
        _check_first_prompt(tokens.turns[0], shared_prompt_tokens, first, fail)
    for index, turn in enumerate(tokens.turns):
        if turn.prompt_prefix > available:
            fail(
                "dataset_trace",
                f"{at}/turns/{index}/prompt_prefix",
                "it repeats more than came before",
                available,
                turn.prompt_prefix,
            )
        if turn.observation_spans and not (index and observed[index - 1]):
            fail(
                "dataset_trace",
                f"{at}/turns/{index}/observation_spans",
                "no environment text came before this turn",
                [],
                turn.observation_spans,
            )
        available = (
            turn.prompt_prefix + len(turn.prompt_token_ids) + len(turn.action_token_ids)
        )


def _check_first_prompt(
    turn: TurnTokens, shared_prompt_tokens: int, at: str, fail: Callable[..., Any]
) -> None:
    for name, expected, found in (
        ("prompt_prefix", shared_prompt_tokens, turn.prompt_prefix),
        ("prompt_token_ids", [], turn.prompt_token_ids),
    ):
        if found != expected:
            fail(
                "dataset_trace",
                f"{at}/{name}",
                "the first prompt is the group's",
                expected,
                found,
            )


def prompt_token_ids(samples: Sequence[TurnSample]) -> list[int] | None:
    """Return the ids of the first turn's prompt, None when there was no turn."""
    if not samples:
        return None
    first = samples[0].provenance
    return first.input_token_ids[: first.prompt_token_count]
