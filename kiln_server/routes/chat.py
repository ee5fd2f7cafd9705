"""``/v1/chat/completions`` and ``/v1/guides``."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from concurrent.futures import Future

import anyio
import msgspec
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
from kiln_core.contract import base_or_adapter
from kiln_core.engine import Generation
from kiln_core.errors import CapacityFull, KilnError
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
    """
    state = state_of(request)
    state.require_serving()
    body = await read_body(request, ChatRequest, limit_bytes=MAX_CHAT_BYTES)
    try:
        chat = await _complete(state, request, body)
    except KilnError:
        state.metrics.chat_requests.labels(status="refused").inc()
        raise
    except ClientDisconnect:
        state.metrics.chat_requests.labels(status="cancelled").inc()
        return Response(status_code=499)
    state.metrics.chat_requests.labels(status="completed").inc()
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
    wanted = generation_request(body, seed=secrets.randbits(64))
    wanted = msgspec.structs.replace(wanted, adapter=base_or_adapter(wanted.adapter))
    future = await to_thread.run_sync(state.engine.submit, wanted)
    generation = await _await_generation(request, future)
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


async def _await_generation(request: Request, future: Future[Generation]) -> Generation:
    """Await a generation; free its slot when the client goes away.

    Raises:
        ClientDisconnect: It went away.
        CapacityFull: The engine stopped.
        CancelledError: This task was cancelled.
    """
    waiting = asyncio.wrap_future(future)
    try:
        while True:
            with anyio.move_on_after(POLL_SECONDS):
                return await asyncio.shield(waiting)
            if await request.is_disconnected():
                raise ClientDisconnect
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
