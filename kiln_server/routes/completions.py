"""``/v1/completions`` and ``/v1/completions/batch``."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kiln_core import limits
from kiln_core.chat import conversation_request
from kiln_core.completions import (
    BATCH_REFUSED,
    BatchAnswer,
    BatchRequest,
    CompletionAnswer,
    CompletionChoice,
    CompletionRequest,
    batch_completion,
    completion_choice,
    completion_delta,
    completion_requests,
)
from kiln_core.engine import Delta, Generation, GenerationRequest
from kiln_core.inference import refuse_unsupported, requests_for, usage_of
from kiln_server.bodies import read_body
from kiln_server.events import EventStream
from kiln_server.generating import Live, counted, generate
from kiln_server.problems import answer
from kiln_server.state import ServerState, state_of

__all__ = ["ROUTES"]

MAX_COMPLETIONS_BYTES = 16 * limits.MIB


async def completions(request: Request) -> Response:
    """Continue prompts as they are."""
    counter = state_of(request).metrics.completion_requests
    return await counted(_completions(request), counter)


async def batch(request: Request) -> Response:
    """Answer many conversations, each as if it were asked alone."""
    counter = state_of(request).metrics.completion_requests
    return await counted(_batch(request), counter)


async def _completions(request: Request) -> Response:
    state = state_of(request)
    state.require_serving()
    body = await read_body(
        request, CompletionRequest, limit_bytes=MAX_COMPLETIONS_BYTES
    )
    prompts = completion_requests(
        body, secrets.randbits(64), served_model_id=state.engine.served_model_id
    )
    wanted = requests_for(prompts, body.choices)
    head = CompletionAnswer(
        id=f"cmpl-{uuid.uuid4().hex}",
        object="text_completion",
        created=int(time.time()),
        model=wanted[0].adapter or state.engine.served_model_id,
        choices=[],
    )
    if body.stream:
        live = await Live.submit(state, wanted)
        events = _events(state, body, wanted, head, live)
        return EventStream(events, live.give_up, state.metrics.completion_requests)
    generations = await generate(state, request, wanted)
    usage = usage_of(generations, body.choices)
    state.metrics.count_tokens(state.metrics.completion_tokens, usage)
    choices = [
        completion_choice(asked, said, index)
        for index, (asked, said) in enumerate(zip(wanted, generations, strict=True))
    ]
    return answer(replace(head, choices=choices, usage=usage))


async def _events(
    state: ServerState,
    body: CompletionRequest,
    wanted: tuple[GenerationRequest, ...],
    head: CompletionAnswer,
    live: Live,
) -> AsyncGenerator[CompletionAnswer, None]:
    """Yield the events of a streamed answer: what is said, then the usage."""
    head = replace(head, usage=None if body.streams_usage else UNSET)
    offsets = [0] * len(wanted)
    ended: dict[int, Generation] = {}
    async with aclosing(live.events()) as events:
        async for index, what in events:
            if isinstance(what, Delta):
                choice = completion_delta(wanted[index], what, index, offsets[index])
                offsets[index] += len(what.content)
            else:
                ended[index] = what
                choice = CompletionChoice(
                    index=index,
                    text="",
                    logprobs=None,
                    finish_reason=what.finish_reason,
                )
            yield replace(head, choices=[choice])
    usage = usage_of([ended[index] for index in sorted(ended)], body.choices)
    state.metrics.count_tokens(state.metrics.completion_tokens, usage)
    if body.streams_usage:
        yield replace(head, usage=usage)


async def _batch(request: Request) -> Response:
    state = state_of(request)
    state.require_serving()
    body = await read_body(request, BatchRequest, limit_bytes=MAX_COMPLETIONS_BYTES)
    refuse_unsupported(body, BATCH_REFUSED)
    seed = secrets.randbits(64)
    model = state.engine.served_model_id
    prompts = [
        conversation_request(body, messages, seed, served_model_id=model)
        for messages in body.prompts
    ]
    wanted = requests_for(prompts, body.choices)
    generations = await generate(state, request, wanted)
    usage = usage_of(generations, body.choices)
    state.metrics.count_tokens(state.metrics.completion_tokens, usage)
    record = BatchAnswer(
        id=f"batch-{uuid.uuid4().hex}",
        object="batch.completion",
        created=int(time.time()),
        model=wanted[0].adapter or model,
        completions=[
            batch_completion(generation, *divmod(index, body.choices))
            for index, generation in enumerate(generations)
        ],
        usage=usage,
    )
    return answer(record)


ROUTES = [
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/completions/batch", batch, methods=["POST"]),
]
