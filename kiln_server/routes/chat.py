"""``/v1/chat/completions`` and ``/v1/guides``."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from concurrent.futures import Future

import anyio
from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kiln_core import limits
from kiln_core.chat import (
    ChatAnswer,
    ChatRequest,
    ChatUsage,
    GuideRequest,
    chat_choice,
    generation_request,
)
from kiln_core.engine import Generation, GenerationRequest
from kiln_core.errors import CapacityFull, KilnError, UsageError
from kiln_server.bodies import read_body
from kiln_server.problems import answer
from kiln_server.state import ServerState, state_of

__all__ = ["ROUTES"]

MAX_CHAT_BYTES = 16 * limits.MIB
POLL_SECONDS = 0.5
"""How often a waiting request looks whether its client is still there."""


async def completions(request: Request) -> Response:
    """Answer one chat completion.

    Raises:
        KilnError: The request cannot be answered.
        ClientDisconnect: Nobody waits for the answer.
        CancelledError: The server is stopping.
    """
    state = state_of(request)
    counted = state.metrics.chat_requests
    try:
        state.require_serving()
        body = await read_body(request, ChatRequest, limit_bytes=MAX_CHAT_BYTES)
        chat = await _complete(state, request, body)
    except KilnError:
        counted.labels(status="refused").inc()
        raise
    except (ClientDisconnect, asyncio.CancelledError):
        counted.labels(status="cancelled").inc()
        raise
    except Exception:
        counted.labels(status="failed").inc()
        raise
    counted.labels(status="completed").inc()
    return answer(chat)


async def guides(request: Request) -> Response:
    """Say whether a schema can guide decoding."""
    state = state_of(request)
    state.require_serving()
    body = await read_body(request, GuideRequest)
    report = await to_thread.run_sync(
        state.engine.guide, body.action_schema, body.max_tokens
    )
    return answer(report)


async def _complete(
    state: ServerState, request: Request, body: ChatRequest
) -> ChatAnswer:
    wanted = generation_request(
        body,
        seed=secrets.randbits(64),
        served_model_id=state.engine.served_model_id,
    )
    future = await to_thread.run_sync(_submitted, state, wanted)
    generation = await _await_generation(state, request, future)
    prompt, action = len(generation.prompt_token_ids), len(generation.action_token_ids)
    state.metrics.chat_tokens.labels(kind="prompt").inc(prompt)
    state.metrics.chat_tokens.labels(kind="completion").inc(action)
    return ChatAnswer(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        object="chat.completion",
        created=int(time.time()),
        model=wanted.adapter or state.engine.served_model_id,
        choices=[chat_choice(wanted, generation, provenance=body.rollout_provenance)],
        usage=ChatUsage(
            prompt_tokens=prompt,
            completion_tokens=action,
            total_tokens=prompt + action,
        ),
    )


def _submitted(state: ServerState, wanted: GenerationRequest) -> Future[Generation]:
    """Queue a request; a schema that cannot guide it is not quietly left out.

    Raises:
        UsageError: The schema cannot guide decoding.
    """
    if wanted.action_schema is not None:
        report = state.engine.guide(wanted.action_schema, wanted.max_tokens)
        if report.guide_sha256 is None:
            raise UsageError(
                f"response_format cannot be honoured: {report.warning}",
                hint="simplify the schema, raise max_tokens, or leave it out",
            )
    return state.engine.submit(wanted)


async def _await_generation(
    state: ServerState, request: Request, future: Future[Generation]
) -> Generation:
    """Await a generation; free its slot when nobody waits for it any more.

    Raises:
        ClientDisconnect: The client went away.
        CapacityFull: The server is stopping.
        CancelledError: This task was cancelled.
    """
    waiting = asyncio.wrap_future(future)
    try:
        while True:
            with anyio.move_on_after(POLL_SECONDS):
                return await asyncio.shield(waiting)
            if await request.is_disconnected():
                raise ClientDisconnect
            state.require_time()
    except asyncio.CancelledError:
        if future.cancelled():
            raise CapacityFull("the server is stopping") from None
        raise
    finally:
        future.cancel()


ROUTES = [
    Route("/v1/chat/completions", completions, methods=["POST"]),
    Route("/v1/guides", guides, methods=["POST"]),
]
