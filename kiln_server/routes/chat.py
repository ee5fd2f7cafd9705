"""``/v1/chat/completions`` and ``/v1/guides``."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from anyio import to_thread
from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kiln_core import limits
from kiln_core.chat import (
    OPENING,
    ChatAnswer,
    ChatChunk,
    ChatRequest,
    ChunkChoice,
    GuideRequest,
    chat_choice,
    delta_choice,
    generation_request,
    last_choice,
)
from kiln_core.engine import Delta, Generation, GenerationRequest
from kiln_core.inference import requests_for, usage_of
from kiln_server.bodies import read_body
from kiln_server.events import EventStream
from kiln_server.generating import Live, counted, generate
from kiln_server.problems import answer
from kiln_server.state import ServerState, state_of

__all__ = ["ROUTES"]

MAX_CHAT_BYTES = 16 * limits.MIB


async def completions(request: Request) -> Response:
    """Answer a conversation."""
    return await counted(_completions(request), state_of(request).metrics.chat_requests)


async def guides(request: Request) -> Response:
    """Say whether a schema can guide decoding."""
    state = state_of(request)
    state.require_serving()
    body = await read_body(request, GuideRequest)
    report = await to_thread.run_sync(
        state.engine.guide, body.action_schema, body.max_tokens
    )
    return answer(report)


async def _completions(request: Request) -> Response:
    state = state_of(request)
    state.require_serving()
    body = await read_body(request, ChatRequest, limit_bytes=MAX_CHAT_BYTES)
    first = generation_request(
        body,
        seed=secrets.randbits(64),
        served_model_id=state.engine.served_model_id,
    )
    wanted = requests_for([first], body.choices)
    if body.stream:
        live = await Live.submit(state, wanted)
        chunks = _chunks(state, body, wanted, live)
        return EventStream(chunks, live.give_up, state.metrics.chat_requests)
    generations = await generate(state, request, wanted)
    usage = usage_of(generations, body.choices)
    record = ChatAnswer(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        object="chat.completion",
        created=int(time.time()),
        model=first.adapter or state.engine.served_model_id,
        choices=[
            chat_choice(asked, said, provenance=body.rollout_provenance, index=index)
            for index, (asked, said) in enumerate(zip(wanted, generations, strict=True))
        ],
        usage=usage,
    )
    state.metrics.count_tokens(state.metrics.chat_tokens, usage)
    return answer(record)


async def _chunks(
    state: ServerState,
    body: ChatRequest,
    wanted: tuple[GenerationRequest, ...],
    live: Live,
) -> AsyncGenerator[ChatChunk, None]:
    """Yield the chunks of a streamed answer: an opening, what is said, the usage."""
    head = ChatChunk(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        object="chat.completion.chunk",
        created=int(time.time()),
        model=wanted[0].adapter or state.engine.served_model_id,
        choices=[],
        usage=None if body.streams_usage else UNSET,
    )
    for index in range(len(wanted)):
        yield replace(head, choices=[ChunkChoice(index=index, delta=OPENING)])
    ended: dict[int, Generation] = {}
    async with aclosing(live.events()) as events:
        async for index, what in events:
            if isinstance(what, Delta):
                choice = delta_choice(wanted[index], what, index)
            else:
                ended[index] = what
                choice = last_choice(
                    wanted[index],
                    what,
                    provenance=body.rollout_provenance,
                    index=index,
                )
            yield replace(head, choices=[choice])
    usage = usage_of([ended[index] for index in sorted(ended)], body.choices)
    state.metrics.count_tokens(state.metrics.chat_tokens, usage)
    if body.streams_usage:
        yield replace(head, usage=usage)


ROUTES = [
    Route("/v1/chat/completions", completions, methods=["POST"]),
    Route("/v1/guides", guides, methods=["POST"]),
]
