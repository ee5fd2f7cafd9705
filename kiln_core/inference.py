"""What the chat and the completions endpoint have in common.

Both are the OpenAI API with members of Kiln's own: the adapter, seeds up to 2^64-1,
top-k and min-p. Unknown members of a request are ignored, as clients of that API
expect; those that would change the result and are not supported are refused, unless
they have the value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from kiln_core import limits
from kiln_core.canonical import JsonValue
from kiln_core.contract import base_or_adapter
from kiln_core.engine import Generation, GenerationRequest
from kiln_core.errors import UsageError
from kiln_core.provenance import MAX_STOP_BYTES

__all__ = [
    "COMMONLY_REFUSED",
    "MAX_CHOICES",
    "MAX_STOPS",
    "InferenceRequest",
    "Usage",
    "choice_seed",
    "or_default",
    "refuse_unsupported",
    "requests_for",
    "sampled_as",
    "usage_of",
]

MAX_CHOICES: Final = 128
"""Completions of one request: prompts times ``n``."""
MAX_STOPS: Final = 256
SEED_STRIDE: Final = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio; odd, so that no two choices share a seed."""
Refusals = tuple[tuple[str, tuple[JsonValue, ...], str], ...]
COMMONLY_REFUSED: Final[Refusals] = (
    ("logit_bias", ({},), ""),
    ("frequency_penalty", (0,), ""),
    ("presence_penalty", (0,), ""),
    ("repetition_penalty", (1,), ""),
    ("min_tokens", (0,), ""),
    ("ignore_eos", (False,), ""),
    ("stop_token_ids", ([],), "name stop strings as stop"),
)
"""Members that no endpoint supports, harmless values, what to do instead."""
T = TypeVar("T")


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The ``json_schema`` member of a response format."""

    schema: dict[str, JsonValue] | bool
    name: str = "action"
    strict: bool | None = True


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer must look like."""

    type: Literal["text", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is streamed."""

    include_usage: bool | None = None
    """End the stream with a chunk that has no choice but the usage."""


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Members that every request for completions may have."""

    model: str | None = None
    adapter: str | None = None
    """LoRA adapter by name; null is the base model."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """Completions of each prompt."""
    seed: int | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    response_format: ResponseFormat | None = None
    logit_bias: JsonValue = None
    frequency_penalty: JsonValue = None
    presence_penalty: JsonValue = None
    repetition_penalty: JsonValue = None
    min_tokens: JsonValue = None
    ignore_eos: JsonValue = None
    stop_token_ids: JsonValue = None

    @property
    def choices(self) -> int:
        """Completions of each prompt."""
        return or_default(self.n, 1)

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts: each prompt once, the completions together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def sampled_as(
    request: InferenceRequest,
    template: GenerationRequest,
    *,
    default_tokens: int,
    served_model_id: str,
) -> GenerationRequest:
    """Return a generation request with everything the common members say.

    Args:
        request: The body.
        template: With the prompt, and the seed where the body names none.
        default_tokens: Bound of a completion where the body names none.
        served_model_id: Name of the base model; any other ``model`` is an adapter.

    Raises:
        UsageError: A value is out of range, or two contradict each other.
    """
    seed = or_default(request.seed, template.seed)
    if not 0 <= seed <= limits.MAX_GENERATION_SEED:
        raise UsageError("seed must be 0 to 2^64-1")
    return msgspec.structs.replace(
        template,
        seed=seed,
        max_tokens=or_default(request.max_tokens, default_tokens),
        temperature=or_default(request.temperature, 1.0),
        top_p=or_default(request.top_p, 1.0),
        top_k=or_default(request.top_k, 0),
        min_p=or_default(request.min_p, 0.0),
        adapter=_adapter(request, served_model_id),
        action_schema=_schema(request.response_format),
        stop=_stop(request.stop),
    )


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of ``n`` choices; the first has the request's own.

    It is ``seed + choice * 0x9E3779B97F4A7C15`` modulo 2^64.

    Args:
        seed: Of the request.
        choice: Counted from 0.
    """
    return (seed + choice * SEED_STRIDE) % (limits.MAX_GENERATION_SEED + 1)


def requests_for(
    prompts: Sequence[GenerationRequest], choices: int
) -> tuple[GenerationRequest, ...]:
    """Return every completion asked for: prompt by prompt, choice by choice.

    Each prompt is answered as if it were asked alone.

    Args:
        prompts: One request a prompt.
        choices: Completions of each.

    Raises:
        UsageError: They are too many.
    """
    if len(prompts) * choices > MAX_CHOICES:
        raise UsageError(
            f"{len(prompts)} prompts with n {choices} are more than {MAX_CHOICES} "
            "completions",
            hint="send several requests",
        )
    return tuple(
        msgspec.structs.replace(prompt, seed=choice_seed(prompt.seed, choice))
        for prompt in prompts
        for choice in range(choices)
    )


def usage_of(generations: Sequence[Generation], choices: int) -> Usage:
    """Count the tokens of an answer.

    Args:
        generations: Prompt by prompt, choice by choice.
        choices: Completions of each prompt.
    """
    prompt = sum(len(g.prompt_token_ids) for g in generations[::choices])
    completion = sum(len(g.action_token_ids) for g in generations)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
    )


def refuse_unsupported(request: msgspec.Struct, refused: Refusals) -> None:
    """Refuse members that would change the result and are not supported.

    Args:
        request: The body.
        refused: Names, the values that change nothing, what to do instead.

    Raises:
        UsageError: One has another value.
    """
    for name, harmless, instead in refused:
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise UsageError(f"not supported: {name}", hint=instead)


def or_default(value: T | None, default: T) -> T:
    """Return a value, or what stands for null."""
    return default if value is None else value


def _adapter(request: InferenceRequest, served_model_id: str) -> str | None:
    """Return which adapter answers: ``adapter``, or a ``model`` that is not the base.

    Raises:
        UsageError: The two contradict each other.
    """
    adapter = base_or_adapter(request.adapter)
    if request.model is None or request.model == served_model_id:
        return adapter
    model = base_or_adapter(request.model)
    if adapter is not None and model != adapter:
        raise UsageError(
            f"model {request.model!r} and adapter {request.adapter!r} contradict",
            hint="name the adapter in one of them",
        )
    return model


def _schema(wanted: ResponseFormat | None) -> JsonValue | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        raise UsageError("response_format json_schema needs its json_schema member")
    return wanted.json_schema.schema


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(texts) or sum(len(text.encode()) for text in texts) > MAX_STOP_BYTES:
        raise UsageError(
            f"stop strings must not be empty, nor over {MAX_STOP_BYTES} bytes together"
        )
    return texts
