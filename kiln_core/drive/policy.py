"""The policy behind a Kiln server's chat endpoint.

Every turn asks for exact rollout provenance, sends its own generation seed, and checks
that what came back is of this very request. No more
requests are in flight than the server decodes together, and time spent queueing is not
charged to the deadline of an action. The HTTP client runs in this process's event loop;
the model runs elsewhere, so sockets to environments stay served.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from msgspec import UnsetType

from kiln_core import limits
from kiln_core.canonical import JsonValue, digest_json, same_json
from kiln_core.chat import ChatAnswer, GuideRequest, PolicyAnswer
from kiln_core.drive.http import Credential
from kiln_core.drive.server import NOT_KILN, ServerClient, server_client, typed
from kiln_core.engine import GuideReport
from kiln_core.errors import PolicyError
from kiln_core.ports import PolicyDescription, PolicyReply, PolicyRequest
from kiln_core.provenance import RolloutProvenance, SamplingParameters
from kiln_core.trace import TurnSample

__all__ = ["HttpPolicy", "http_policy"]

FULL_WAIT_SECONDS = 600.0
"""How long a full server is waited for."""


class HttpPolicy:
    """Answers turns through a Kiln server; use `http_policy`."""

    def __init__(self, server: ServerClient, adapter: str | None) -> None:
        self._server = server
        self._adapter = adapter
        self._slots = anyio.CapacityLimiter(1)

    async def describe(self) -> PolicyDescription:
        """Say who would answer now.

        Raises:
            ServerUnreachable: Nothing answers.
            ServerRefusal: There is no such adapter.
        """
        query = {} if self._adapter is None else {"adapter": self._adapter}
        answer = typed(
            await self._server.get("/v1/policy", **query), PolicyAnswer, "policy"
        )
        self._slots.total_tokens = max(answer.concurrency, 1)
        return PolicyDescription(
            kiln_url=self._server.url,
            behavior_policy=answer.behavior_policy,
            thinking=answer.thinking,
            concurrency=answer.concurrency,
        )

    async def guide(self, action_schema: JsonValue, max_tokens: int) -> GuideReport:
        """Say whether decoding can be guided by a schema.

        Raises:
            ServerRefusal: The server does not know the request.
        """
        body = GuideRequest(action_schema=action_schema, max_tokens=max_tokens)
        document = await self._server.post("/v1/guides", body)
        return typed(document, GuideReport, "guide report")

    async def complete(self, request: PolicyRequest) -> PolicyReply:
        """Answer one turn.

        Raises:
            ContextOverflow: The prompt does not fit.
            PolicyError: The server failed, or returned no rollout provenance, or one
                of another request than this.
            CapacityFull: It stayed full too long.
        """
        body = _chat_body(request, self._adapter)
        async with self._slots:
            started = time.monotonic()
            document = await self._server.post_when_free(
                "/v1/chat/completions", body, FULL_WAIT_SECONDS
            )
            latency_ms = (time.monotonic() - started) * 1000
        answer = typed(document, ChatAnswer, "completion")
        if not answer.choices:
            raise PolicyError("the server returned no completion")
        choice = answer.choices[0]
        provenance, spans = choice.rollout_provenance, choice.prompt_content_spans
        if not provenance or not spans or len(spans) != len(request.messages):
            raise PolicyError(
                "the server returned no rollout provenance",
                hint="collection needs a Kiln server",
            )
        _check_provenance(provenance, request, self._adapter)
        _check_usage(answer, provenance)
        reasoning = choice.message.reasoning_content
        return PolicyReply(
            content=choice.message.content,
            reasoning=reasoning or None,
            total_tokens=answer.usage.total_tokens,
            latency_ms=round(latency_ms, 3),
            behavior_policy=provenance.behavior_policy,
            sample=TurnSample(
                provenance=provenance,
                content_spans=tuple(spans),
                guide_sha256=choice.guide_sha256 or None,
            ),
        )


@asynccontextmanager
async def http_policy(
    url: str, adapter: str | None, credential: Credential | None = None
) -> AsyncIterator[HttpPolicy]:
    """Open the policy of a Kiln server.

    Args:
        url: The server's base URL.
        adapter: Which adapter answers; None is the base model.
        credential: The server's API token.
    """
    async with server_client(
        url,
        credential,
        client="openenv",
        total_seconds=limits.CONTROL_PLANE_SECONDS,
    ) as server:
        yield HttpPolicy(server, adapter)


def _check_provenance(
    provenance: RolloutProvenance, request: PolicyRequest, adapter: str | None
) -> None:
    """Check that a provenance is that of the request it came in answer to.

    A server, or a proxy in between, that answers another request than the one it was
    sent would otherwise be believed: its log-probabilities are trained on.

    Raises:
        PolicyError: It is not; ``details["field"]`` says in what.
    """
    template = provenance.template_invocation
    thinking: JsonValue = request.thinking
    if not isinstance(template, UnsetType) and not isinstance(
        template.template_kwargs, UnsetType
    ):
        thinking = template.template_kwargs.get("enable_thinking", request.thinking)
    budget = provenance.sampling.thinking_budget
    claims: tuple[tuple[str, JsonValue, JsonValue], ...] = (
        ("seed", request.seed, provenance.seed),
        (
            "prompt_messages_sha256",
            digest_json(
                [{"role": m.role, "content": m.content} for m in request.messages]
            ),
            provenance.prompt_messages_sha256,
        ),
        ("behavior_policy.adapter", adapter, provenance.behavior_policy.adapter_name),
        ("template_invocation.enable_thinking", request.thinking, thinking),
        ("sampling", _sampling(request), _stated(provenance.sampling)),
        (
            "sampling.thinking_budget",
            request.thinking_budget_tokens,
            None if isinstance(budget, UnsetType) else _or_none(budget.max_tokens),
        ),
    )
    for field, expected, found in claims:
        if not same_json(expected, found):
            raise PolicyError(
                f"the server's rollout provenance is of another request: its {field} "
                "is not what was asked",
                hint=NOT_KILN,
                field=field,
                expected=expected,
                found=found,
            )


def _sampling(request: PolicyRequest) -> dict[str, JsonValue]:
    """Return the sampling transform that a request asks for, nothing else changed."""
    return {
        "temperature": float(request.temperature),
        "max_tokens": request.max_tokens,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": [],
    }


def _stated(sampling: SamplingParameters) -> dict[str, JsonValue]:
    names = (name for name in sampling.__struct_fields__ if name != "thinking_budget")
    return {name: getattr(sampling, name) for name in names}


def _or_none(value: int | UnsetType) -> int | None:
    return None if isinstance(value, UnsetType) else value


def _check_usage(answer: ChatAnswer, provenance: RolloutProvenance) -> None:
    """Check that the counted tokens are those whose ids came.

    Raises:
        PolicyError: They are not.
    """
    prompt = provenance.prompt_token_count
    counted = (prompt, len(provenance.input_token_ids) - prompt)
    usage = answer.usage
    if (usage.prompt_tokens, usage.completion_tokens) != counted or (
        usage.total_tokens != sum(counted)
    ):
        raise PolicyError(
            "the server counted other tokens than it returned",
            hint=NOT_KILN,
            expected=list(counted),
            found=[usage.prompt_tokens, usage.completion_tokens, usage.total_tokens],
        )


def _chat_body(request: PolicyRequest, adapter: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": m.role, "content": m.content} for m in request.messages],
        "adapter": adapter,
        "stream": False,
        "n": 1,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "rollout_provenance": True,
        "chat_template_kwargs": {"enable_thinking": request.thinking},
        "thinking_budget_tokens": request.thinking_budget_tokens,
        "thinking_budget_ms": None,
    }
    if request.action_schema is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {
                "name": "action",
                "strict": True,
                "schema": request.action_schema,
            },
        }
    return body
