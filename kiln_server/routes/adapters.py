"""``/v1/adapters``: list, load, unload."""

from __future__ import annotations

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kiln_core.canonical import Record
from kiln_core.engine import AdapterInfo
from kiln_core.grpo import check_name
from kiln_server.bodies import read_body
from kiln_server.problems import answer
from kiln_server.state import state_of

__all__ = ["ROUTES"]


class AdapterName(Record, frozen=True, kw_only=True):
    """Body of load and unload."""

    name: str


async def list_adapters(request: Request) -> Response:
    """List adapter folders, whether servable or not."""
    state = state_of(request)
    state.require_ready()
    available = await to_thread.run_sync(state.engine.adapters)
    loaded = [info.name for info in available if info.loaded]
    return answer({"active": None, "loaded": loaded, "available": list(available)})


async def load(request: Request) -> Response:
    """Make an adapter servable."""
    state = state_of(request)
    state.require_serving()
    name = (await read_body(request, AdapterName)).name
    check_name(name, "adapter")
    info: AdapterInfo = await to_thread.run_sync(state.engine.load_adapter, name)
    return answer(info)


async def unload(request: Request) -> Response:
    """Free an adapter's slot."""
    state = state_of(request)
    state.require_serving()
    name = (await read_body(request, AdapterName)).name
    check_name(name, "adapter")
    await to_thread.run_sync(state.engine.unload_adapter, name)
    return answer({"unloaded": name})


ROUTES = [
    Route("/v1/adapters", list_adapters),
    Route("/v1/adapters/load", load, methods=["POST"]),
    Route("/v1/adapters/unload", unload, methods=["POST"]),
]
