"""The chat endpoint's wire form, shared by the server and the HTTP policy.

It is the OpenAI chat completions API with a few members of Kiln's own: the adapter, the
exact rollout provenance, seeds up to 2^64-1, and a thinking budget. Unknown members of
a request are ignored, as clients of that API expect; those that would change the result
and are not supported are refused, unless they have the value that changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_core import limits
from kiln_core.canonical import JsonValue, Record, Sha256, digest_json
from kiln_core.contract import base_or_adapter
from kiln_core.engine import Generation, GenerationRequest
from kiln_core.errors import UsageError
from kiln_core.provenance import (
    MAX_STOP_BYTES,
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
    "ChatRequest",
    "GuideRequest",
    "PolicyAnswer",
    "chat_choice",
    "generation_request",
]


MAX_STOPS: Final = 256
REFUSED: Final[tuple[tuple[str, tuple[JsonValue, ...], str], ...]] = (
    ("stream", (False,), "this server answers whole completions"),
    ("n", (1,), "ask once per completion"),
    ("tools", ([],), "give the action schema as response_format"),
    ("tool_choice", ("none", "auto"), "give the action schema as response_format"),
    ("functions", ([],), "give the action schema as response_format"),
    ("function_call", ("none", "auto"), "give the action schema as response_format"),
    ("logprobs", (False,), "ask for rollout_provenance instead"),
    ("top_logprobs", (0,), "ask for rollout_provenance instead"),
    ("logit_bias", ({},), ""),
    ("frequency_penalty", (0,), ""),
    ("presence_penalty", (0,), ""),
    ("repetition_penalty", (1,), ""),
    ("min_tokens", (0,), ""),
    ("ignore_eos", (False,), ""),
    ("stop_token_ids", ([],), "name stop strings as stop"),
    ("thinking_budget_ms", (), "bound it by thinking_budget_tokens"),
)
"""Members that are not supported, the values that change nothing, what to do."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The ``json_schema`` member of a response format."""

    schema: dict[str, JsonValue] | bool
    name: str = "action"
    strict: bool | None = True


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer must look like."""

    type: Literal["text", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class IncomingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as clients send it: content may be parts or null."""

    role: Annotated[str, Meta(min_length=1)]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: JsonValue = None
    function_call: JsonValue = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[IncomingMessage], Meta(min_length=1)]
    model: str | None = None
    adapter: str | None = None
    """LoRA adapter by name; null is the base model."""
    stream: bool | None = None
    n: int | None = None
    seed: int | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    rollout_provenance: bool = False
    """Return exact token ids, log-probabilities and policy identity."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    thinking_budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    thinking_budget_ms: int | None = None
    response_format: ResponseFormat | None = None
    tools: JsonValue = None
    tool_choice: JsonValue = None
    functions: JsonValue = None
    function_call: JsonValue = None
    logprobs: JsonValue = None
    top_logprobs: JsonValue = None
    logit_bias: JsonValue = None
    frequency_penalty: JsonValue = None
    presence_penalty: JsonValue = None
    repetition_penalty: JsonValue = None
    min_tokens: JsonValue = None
    ignore_eos: JsonValue = None
    stop_token_ids: JsonValue = None


class ChatUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said."""

    role: str
    content: str | None
    """Null when reasoning was never closed."""
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion."""

    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]
    rollout_provenance: RolloutProvenance | UnsetType = UNSET
    prompt_content_spans: list[Span] | UnsetType = UNSET
    """Per message, the prompt positions that hold its content."""
    guide_sha256: Sha256 | UnsetType | None = UNSET


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


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


DEFAULT_MAX_TOKENS = 256
T = TypeVar("T")


def generation_request(
    request: ChatRequest, seed: int, *, served_model_id: str
) -> GenerationRequest:
    """Turn a chat request into what an engine samples.

    Args:
        request: The body.
        seed: Used where the body names none.
        served_model_id: Name of the base model; any other ``model`` is an adapter.

    Raises:
        UsageError: It asks for something this server does not do.
    """
    _refuse_unsupported(request)
    chosen = request.seed if request.seed is not None else seed
    if not 0 <= chosen <= limits.MAX_GENERATION_SEED:
        raise UsageError("seed must be 0 to 2^64-1")
    return GenerationRequest(
        messages=tuple(_message(message) for message in request.messages),
        seed=chosen,
        max_tokens=request.max_completion_tokens
        or request.max_tokens
        or DEFAULT_MAX_TOKENS,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=_or(request.top_k, 0),
        min_p=_or(request.min_p, 0.0),
        adapter=_adapter(request, served_model_id),
        thinking=_thinking(request.chat_template_kwargs or {}),
        thinking_budget_tokens=request.thinking_budget_tokens,
        action_schema=_schema(request.response_format),
        stop=_stop(request.stop),
    )


def chat_choice(
    request: GenerationRequest, generation: Generation, *, provenance: bool
) -> ChatChoice:
    """Turn a generation into a choice of the answer.

    Args:
        request: What was sampled.
        generation: What came.
        provenance: Whether exact ids and identity are included.
    """
    reasoning = generation.reasoning_content
    content = generation.content if generation.reasoning_closed else None
    choice = ChatChoice(
        index=0,
        message=AnswerMessage(
            role="assistant",
            content=content,
            reasoning_content=UNSET if reasoning is None else reasoning,
        ),
        finish_reason=generation.finish_reason,
    )
    if not provenance:
        return choice
    return msgspec.structs.replace(
        choice,
        rollout_provenance=rollout_provenance(request, generation),
        prompt_content_spans=list(generation.content_spans),
        guide_sha256=generation.guide_sha256,
    )


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


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _adapter(request: ChatRequest, served_model_id: str) -> str | None:
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


def _refuse_unsupported(request: ChatRequest) -> None:
    for name, harmless, instead in REFUSED:
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise UsageError(f"not supported: {name}", hint=instead)
