"""``/health``, ``/v1/models``, ``/v1/policy`` and ``/metrics``."""

from __future__ import annotations

import time
from importlib.metadata import version

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kiln_core.chat import PolicyAnswer
from kiln_core.contract import base_or_adapter
from kiln_core.errors import AdapterNotFound, CapacityFull, KilnError
from kiln_server.problems import answer
from kiln_server.state import ServerState, state_of

__all__ = ["ROUTES"]


async def health(request: Request) -> Response:
    """Say whether the server is ready; 503 while it is not."""
    state = state_of(request)
    ready = state.phase == "ready"
    loaded = await to_thread.run_sync(_loaded, state) if ready else []
    document = {
        "status": state.phase,
        "version": version("kiln-openenv"),
        "uptime_seconds": round(time.monotonic() - state.started, 3),
        "model": state.engine.served_model_id,
        "backend": state.settings.engine,
        "serving_profile": state.settings.serving_profile,
        "active_adapter": None,
        "adapters_loaded": loaded,
        "scheduler": {"slots": state.engine.slots},
        "gpu_memory": None,
        "training": {"queued": state.jobs.queued, "unfinished": state.jobs.tracked},
        "checks": [
            {"name": "engine", "ok": ready, "message": state.failure or state.phase},
        ],
    }
    if ready:
        return answer(document)
    return answer({**document, **_not_ready(state)}, 503)


async def models(request: Request) -> Response:
    """List the base model and every loaded adapter, as OpenAI clients expect."""
    state = state_of(request)
    names = [state.engine.served_model_id]
    if state.engine.ready:
        names += await to_thread.run_sync(_loaded, state)
    data = [{"id": name, "object": "model", "owned_by": "kiln"} for name in names]
    return answer({"object": "list", "data": data})


async def policy(request: Request) -> Response:
    """Say exactly who would answer a chat request now.

    Raises:
        AdapterNotFound: The adapter is not served.
    """
    state = state_of(request)
    state.require_serving()
    adapter = base_or_adapter(request.query_params.get("adapter"))
    engine = state.engine
    if adapter is not None and adapter not in await to_thread.run_sync(_loaded, state):
        raise AdapterNotFound(f"adapter {adapter!r} is not loaded")
    identity = await to_thread.run_sync(engine.policy_identity, adapter)
    return answer(
        PolicyAnswer(
            behavior_policy=identity,
            thinking=engine.has_thinking_mode,
            concurrency=engine.slots,
            context_tokens=engine.context_tokens,
        )
    )


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus text form."""
    state = state_of(request)
    state.metrics.training_queued.set(state.jobs.queued)
    if state.engine.ready:
        loaded = await to_thread.run_sync(_loaded, state)
        state.metrics.adapters_loaded.set(len(loaded))
    body, media_type = state.metrics.render()
    return Response(body, media_type=media_type)


def _not_ready(state: ServerState) -> dict[str, object]:
    """Return the error that a client which only knows errors can tell."""
    if state.phase == "stopping":
        return CapacityFull("the server is stopping").document()
    try:
        state.require_ready()
    except KilnError as error:
        return error.document()
    return {}


def _loaded(state: ServerState) -> list[str]:
    return [info.name for info in state.engine.adapters() if info.loaded]


ROUTES = [
    Route("/health", health),
    Route("/v1/health", health),
    Route("/v1/models", models),
    Route("/v1/policy", policy),
    Route("/metrics", metrics),
]
