"""The chat endpoint's wire form, shared by the server and the HTTP policy.

It is the OpenAI chat completions API with members of Kiln's own: those of every
inference request (`inference.py`), the exact rollout provenance, and a thinking budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_core import limits
from kiln_core.canonical import JsonValue, Record, Sha256, digest_json
from kiln_core.engine import (
    MAX_TOP_LOGPROBS,
    AnswerToken,
    Delta,
    Generation,
    GenerationRequest,
)
from kiln_core.errors import UsageError
from kiln_core.inference import (
    COMMONLY_REFUSED,
    InferenceRequest,
    Refusals,
    Usage,
    refuse_unsupported,
    sampled_as,
)
from kiln_core.provenance import (
    ROLLOUT_PROVENANCE_SCHEMA,
    ActionToken,
    BehaviorPolicyIdentity,
    RolloutProvenance,
    SamplingParameters,
    TemplateInvocation,
    ThinkingBudget,
    scored_payload_digest,
)
from kiln_core.records import ChatMessage
from kiln_core.trace import Span

__all__ = [
    "ChatAnswer",
    "ChatChoice",
    "ChatChunk",
    "ChatRequest",
    "Conversing",
    "GuideRequest",
    "IncomingMessage",
    "PolicyAnswer",
    "chat_choice",
    "conversation_request",
    "delta_choice",
    "generation_request",
    "last_choice",
]

REFUSED: Final[Refusals] = (
    ("tools", ([],), "give the action schema as response_format"),
    ("tool_choice", ("none", "auto"), "give the action schema as response_format"),
    ("functions", ([],), "give the action schema as response_format"),
    ("function_call", ("none", "auto"), "give the action schema as response_format"),
    ("thinking_budget_ms", (), "bound it by thinking_budget_tokens"),
    *COMMONLY_REFUSED,
)
"""Members that are not supported, the values that change nothing, what to do."""


class IncomingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as clients send it: content may be parts or null."""

    role: Annotated[str, Meta(min_length=1)]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: JsonValue = None
    function_call: JsonValue = None


class Conversing(InferenceRequest, frozen=True, kw_only=True):
    """Members of requests that a chat template renders."""

    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    thinking_budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    thinking_budget_ms: int | None = None
    tools: JsonValue = None
    tool_choice: JsonValue = None
    functions: JsonValue = None
    function_call: JsonValue = None


class ChatRequest(Conversing, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[IncomingMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    """Describe every token of the content."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    rollout_provenance: bool = False
    """Return exact token ids, log-probabilities and policy identity."""


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said."""

    role: str
    content: str | None
    """Null when reasoning was never closed."""
    reasoning_content: str | UnsetType = UNSET


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob, frozen=True, kw_only=True):
    """A token of the content, and the likeliest in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a message."""

    content: list[ContentLogprob]
    refusal: None = None


class ChoiceExtras(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished choice carries when it was asked for."""

    logprobs: ChatLogprobs | UnsetType | None = UNSET
    rollout_provenance: RolloutProvenance | UnsetType = UNSET
    prompt_content_spans: list[Span] | UnsetType = UNSET
    """Per message, the prompt positions that hold its content."""
    guide_sha256: Sha256 | UnsetType | None = UNSET


class ChatChoice(ChoiceExtras, frozen=True, kw_only=True):
    """One completion."""

    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a message has grown by."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChunkChoice(ChoiceExtras, frozen=True, kw_only=True):
    """What a choice has grown by; the last one has a reason and the extras."""

    index: int
    delta: MessageDelta
    finish_reason: Literal["stop", "length"] | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class PolicyAnswer(Record, frozen=True, kw_only=True):
    """Answer of ``GET /v1/policy``: who would answer a chat request now."""

    behavior_policy: BehaviorPolicyIdentity
    thinking: bool
    """Whether the model's template has a thinking mode."""
    concurrency: int
    """Requests decoded together."""
    context_tokens: int


class GuideRequest(Record, frozen=True, kw_only=True):
    """Body of ``POST /v1/guides``: can this schema guide decoding?"""

    action_schema: JsonValue
    max_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_ACTION_TOKENS)]


DEFAULT_MAX_TOKENS: Final = 256
Choice = TypeVar("Choice", ChatChoice, ChunkChoice)
OPENING: Final = MessageDelta(role="assistant", content="")
"""What a stream begins every choice with."""


def generation_request(
    request: ChatRequest, seed: int, *, served_model_id: str
) -> GenerationRequest:
    """Turn a chat request into what an engine samples, as its first choice.

    Args:
        request: The body.
        seed: Used where the body names none.
        served_model_id: Name of the base model; any other ``model`` is an adapter.

    Raises:
        UsageError: It asks for something this server does not do.
    """
    if request.top_logprobs and not request.logprobs:
        raise UsageError("top_logprobs needs logprobs true")
    wanted = conversation_request(
        request, request.messages, seed, served_model_id=served_model_id
    )
    if not request.logprobs:
        return wanted
    return msgspec.structs.replace(wanted, top_logprobs=request.top_logprobs or 0)


def conversation_request(
    request: Conversing,
    messages: Sequence[IncomingMessage],
    seed: int,
    *,
    served_model_id: str,
) -> GenerationRequest:
    """Turn messages and the members around them into what an engine samples.

    Args:
        request: The body.
        messages: Of one conversation.
        seed: Used where the body names none.
        served_model_id: Name of the base model; any other ``model`` is an adapter.

    Raises:
        UsageError: It asks for something this server does not do.
    """
    refuse_unsupported(request, REFUSED)
    prompt = GenerationRequest(
        messages=tuple(_message(message) for message in messages),
        seed=seed,
        max_tokens=1,
        thinking=_thinking(request.chat_template_kwargs or {}),
        thinking_budget_tokens=request.thinking_budget_tokens,
    )
    wanted = sampled_as(
        request,
        prompt,
        default_tokens=DEFAULT_MAX_TOKENS,
        served_model_id=served_model_id,
    )
    if request.max_completion_tokens is None:
        return wanted
    return msgspec.structs.replace(wanted, max_tokens=request.max_completion_tokens)


def chat_choice(
    request: GenerationRequest,
    generation: Generation,
    *,
    provenance: bool,
    index: int = 0,
) -> ChatChoice:
    """Turn a generation into a choice of the answer.

    Args:
        request: What was sampled.
        generation: What came.
        provenance: Whether exact ids and identity are included.
        index: Which choice it is.
    """
    reasoning = generation.reasoning_content
    content = generation.content if generation.reasoning_closed else None
    choice = ChatChoice(
        index=index,
        message=AnswerMessage(
            role="assistant",
            content=content,
            reasoning_content=UNSET if reasoning is None else reasoning,
        ),
        finish_reason=generation.finish_reason,
        logprobs=_logprobs(request, generation.answer_tokens),
    )
    return _with_provenance(choice, request, generation) if provenance else choice


def delta_choice(request: GenerationRequest, delta: Delta, index: int) -> ChunkChoice:
    """Turn what a generation has said into a choice of a chunk.

    Args:
        request: What is sampled.
        delta: What it has said since the last one.
        index: Which choice it is.
    """
    return ChunkChoice(
        index=index,
        delta=MessageDelta(
            content=delta.content or UNSET,
            reasoning_content=delta.reasoning or UNSET,
        ),
        logprobs=_logprobs(request, delta.tokens),
    )


def last_choice(
    request: GenerationRequest,
    generation: Generation,
    *,
    provenance: bool,
    index: int,
) -> ChunkChoice:
    """Turn a finished generation into the last chunk of its choice.

    Args:
        request: What was sampled.
        generation: What came; its text was told before.
        provenance: Whether exact ids and identity are included.
        index: Which choice it is.
    """
    choice = ChunkChoice(
        index=index, delta=MessageDelta(), finish_reason=generation.finish_reason
    )
    return _with_provenance(choice, request, generation) if provenance else choice


def rollout_provenance(
    request: GenerationRequest, generation: Generation
) -> RolloutProvenance:
    """Return the ``kiln.rollout-provenance.v1`` of a generation.

    Raises:
        UsageError: No token of it was a decision of the model.
    """
    if all(logprob is None for logprob in generation.logprobs):
        raise UsageError(
            "nothing was sampled, so there is no provenance",
            hint="raise max_tokens above the thinking budget and its close",
        )
    prompt = list(generation.prompt_token_ids)
    budget: ThinkingBudget | UnsetType = UNSET
    if request.thinking_budget_tokens is not None and generation.close_token_ids:
        budget = ThinkingBudget(
            max_tokens=request.thinking_budget_tokens,
            close_token_ids=list(generation.close_token_ids),
        )
    text = generation.content
    template: TemplateInvocation | UnsetType = UNSET
    if generation.close_token_ids:
        # a template with a thinking mode renders another prompt with it and without
        template = TemplateInvocation(
            template_kwargs={"enable_thinking": generation.thinking}
        )
    return RolloutProvenance(
        schema=ROLLOUT_PROVENANCE_SCHEMA,
        input_token_ids=prompt + list(generation.action_token_ids),
        prompt_token_count=len(prompt),
        prompt_messages_sha256=digest_json(
            [{"role": m.role, "content": m.content} for m in request.messages]
        ),
        scored_payload_sha256=scored_payload_digest(text, []),
        action_tokens=[
            ActionToken(
                sequence_index=len(prompt) + index,
                token_id=token_id,
                source="forced" if logprob is None else "sampled",
                behavior_logprob=logprob,
            )
            for index, (token_id, logprob) in enumerate(
                zip(generation.action_token_ids, generation.logprobs, strict=True)
            )
        ],
        behavior_policy=generation.behavior_policy,
        tokenizer=generation.tokenizer,
        template_invocation=template,
        sampling=SamplingParameters(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            max_tokens=request.max_tokens,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            stop=list(request.stop),
            thinking_budget=budget,
        ),
        seed=request.seed,
        generation_backend=generation.backend,
    )


def _with_provenance(
    choice: Choice, request: GenerationRequest, generation: Generation
) -> Choice:
    return msgspec.structs.replace(
        choice,
        rollout_provenance=rollout_provenance(request, generation),
        prompt_content_spans=list(generation.content_spans),
        guide_sha256=generation.guide_sha256,
    )


def _logprobs(
    request: GenerationRequest, tokens: Sequence[AnswerToken]
) -> ChatLogprobs | UnsetType:
    if request.top_logprobs is None:
        return UNSET
    return ChatLogprobs(
        content=[
            ContentLogprob(
                token=token.text,
                logprob=token.logprob,
                bytes=list(token.data),
                top_logprobs=[
                    TokenLogprob(
                        token=other.text,
                        logprob=other.logprob,
                        bytes=list(other.data),
                    )
                    for other in token.top
                ],
            )
            for token in tokens
        ]
    )


def _thinking(kwargs: dict[str, JsonValue]) -> bool:
    unknown = sorted(kwargs.keys() - {"enable_thinking"})
    if unknown:
        raise UsageError(f"not supported: chat_template_kwargs.{unknown[0]}")
    thinking = kwargs.get("enable_thinking")
    if thinking is None:
        return True
    if not isinstance(thinking, bool):
        raise UsageError("chat_template_kwargs.enable_thinking must be true or false")
    return thinking


def _message(message: IncomingMessage) -> ChatMessage:
    if message.tool_calls or message.function_call:
        raise UsageError("not supported: tool calls in messages")
    content = message.content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(parts) != len(content) or not all(isinstance(p, str) for p in parts):
            raise UsageError("only text parts are supported in a message")
        content = "".join(str(part) for part in parts)
    return ChatMessage(role=message.role, content=content or "")
