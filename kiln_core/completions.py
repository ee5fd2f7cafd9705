"""The wire form of plain completions, and of many conversations in one request.

``POST /v1/completions`` is the OpenAI API of that name: the prompt is taken as it is,
text or token ids, and no chat template is applied. ``POST /v1/completions/batch`` takes
conversations and answers each as if it had been asked alone.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_core.canonical import JsonValue
from kiln_core.chat import Conversing, IncomingMessage
from kiln_core.engine import (
    MAX_TOP_LOGPROBS,
    AnswerToken,
    Delta,
    Generation,
    GenerationRequest,
    TokenChoice,
)
from kiln_core.errors import UsageError
from kiln_core.inference import (
    COMMONLY_REFUSED,
    MAX_CHOICES,
    InferenceRequest,
    Refusals,
    Usage,
    refuse_unsupported,
    sampled_as,
)

__all__ = [
    "BATCH_REFUSED",
    "COMPLETIONS_REFUSED",
    "BatchAnswer",
    "BatchCompletion",
    "BatchRequest",
    "CompletionAnswer",
    "CompletionChoice",
    "CompletionRequest",
    "batch_completion",
    "completion_choice",
    "completion_delta",
    "completion_requests",
]

DEFAULT_MAX_TOKENS: Final = 16
"""As in the OpenAI API."""
COMPLETIONS_REFUSED: Final[Refusals] = (
    ("echo", (False,), "the prompt is known to who sent it"),
    ("best_of", (1,), "ask for n and choose"),
    ("suffix", ("",), "models are not trained to fill in"),
    ("rollout_provenance", (False,), "ask the chat endpoint for it"),
    *COMMONLY_REFUSED,
)
"""Members that are not supported, the values that change nothing, what to do."""
BATCH_REFUSED: Final[Refusals] = (
    ("stream", (False,), "a batch is answered whole"),
    ("logprobs", (False,), "ask the chat endpoint for them"),
    ("rollout_provenance", (False,), "ask the chat endpoint for it"),
)
"""Members of chat requests that a batch does not have."""


class CompletionRequest(InferenceRequest, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: JsonValue
    """A text, a list of texts, token ids, or a list of lists of those."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: JsonValue = None
    best_of: JsonValue = None
    suffix: JsonValue = None
    rollout_provenance: JsonValue = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a text, token by token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]
    """Characters of the text before each token."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, or what it has grown by."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``POST /v1/completions``, and each event where it is streamed."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class BatchRequest(Conversing, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions/batch``."""

    prompts: Annotated[
        list[Annotated[list[IncomingMessage], Meta(min_length=1)]],
        Meta(min_length=1, max_length=MAX_CHOICES),
    ]
    """Conversations, each a list of messages."""
    logprobs: JsonValue = None
    rollout_provenance: JsonValue = None


class BatchCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of a batch."""

    prompt_index: int
    completion_index: int
    text: str | None
    """Null when reasoning was never closed."""
    reasoning_content: str | UnsetType = UNSET
    finish_reason: Literal["stop", "length"]


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``POST /v1/completions/batch``."""

    id: str
    object: str
    created: int
    model: str
    completions: list[BatchCompletion]
    usage: Usage


def completion_requests(
    request: CompletionRequest, seed: int, *, served_model_id: str
) -> tuple[GenerationRequest, ...]:
    """Return what an engine samples, one request a prompt.

    Args:
        request: The body.
        seed: Used where the body names none.
        served_model_id: Name of the base model; any other ``model`` is an adapter.

    Raises:
        UsageError: It asks for something this server does not do.
    """
    refuse_unsupported(request, COMPLETIONS_REFUSED)
    return tuple(
        sampled_as(
            request,
            GenerationRequest(
                messages=(),
                prompt=prompt,
                seed=seed,
                max_tokens=1,
                thinking=False,
                top_logprobs=request.logprobs,
            ),
            default_tokens=DEFAULT_MAX_TOKENS,
            served_model_id=served_model_id,
        )
        for prompt in _prompts(request.prompt)
    )


def completion_choice(
    request: GenerationRequest, generation: Generation, index: int
) -> CompletionChoice:
    """Turn a generation into a choice of the answer.

    Args:
        request: What was sampled.
        generation: What came.
        index: Which choice it is.
    """
    return CompletionChoice(
        index=index,
        text=generation.content,
        logprobs=_logprobs(request, generation.answer_tokens, 0),
        finish_reason=generation.finish_reason,
    )


def completion_delta(
    request: GenerationRequest, delta: Delta, index: int, offset: int
) -> CompletionChoice:
    """Turn what a generation has said into a choice of an event.

    Args:
        request: What is sampled.
        delta: What it has said since the last one.
        index: Which choice it is.
        offset: Characters it had said before.
    """
    return CompletionChoice(
        index=index,
        text=delta.content,
        logprobs=_logprobs(request, delta.tokens, offset),
        finish_reason=None,
    )


def batch_completion(
    generation: Generation, prompt_index: int, completion_index: int
) -> BatchCompletion:
    """Turn a generation into an item of a batch.

    Args:
        generation: What came.
        prompt_index: Which conversation it answers.
        completion_index: Which of its completions it is.
    """
    reasoning = generation.reasoning_content
    return BatchCompletion(
        prompt_index=prompt_index,
        completion_index=completion_index,
        text=generation.content if generation.reasoning_closed else None,
        reasoning_content=UNSET if reasoning is None else reasoning,
        finish_reason=generation.finish_reason,
    )


def _prompts(prompt: JsonValue) -> list[str | tuple[int, ...]]:
    """Tell the four forms of a prompt apart.

    Raises:
        UsageError: It is none of them, or too many.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise UsageError("prompt must be a text, texts, token ids, or lists of those")
    if all(type(part) is int for part in prompt):
        return [tuple(prompt)]
    if len(prompt) > MAX_CHOICES:
        raise UsageError(f"at most {MAX_CHOICES} prompts can be sent in one request")
    return [_prompt(part) for part in prompt]


def _prompt(part: JsonValue) -> str | tuple[int, ...]:
    if isinstance(part, str):
        return part
    if isinstance(part, list) and all(type(token) is int for token in part):
        return tuple(part)
    raise UsageError("prompt must be a text, texts, token ids, or lists of those")


def _logprobs(
    request: GenerationRequest, tokens: Sequence[AnswerToken], offset: int
) -> CompletionLogprobs | None:
    if request.top_logprobs is None:
        return None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(decoder.decode(token.data))
    top = [{_name(other): other.logprob for other in token.top} for token in tokens]
    return CompletionLogprobs(
        tokens=[_name(token) for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=top if request.top_logprobs else None,
        text_offset=offsets,
    )


def _name(token: TokenChoice) -> str:
    """Return a token's text; where that is no text, its bytes, as OpenAI names them."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        pass
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
