"""Serve several environments in one process, since importing the SDK is slow.

Arguments are ``name:sessions:port``, the name being an example or, with a dot, a
module; prints the URLs in their order on one line.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from functools import partial
from importlib import import_module


async def main(wanted: list[str]) -> None:
    sys.modules.setdefault("gradio", None)  # type: ignore[arg-type]  # not imported
    uvicorn = import_module("uvicorn")
    hosting = import_module("examples.environments.hosting")
    registry = import_module("examples.environments.registry")
    servers, listeners = [], []
    for word in wanted:
        name, sessions, port = word.split(":")
        create_app = (
            import_module(name).create_app
            if "." in name
            else partial(hosting.create_app, registry.GAMES[name])
        )
        config = uvicorn.Config(
            create_app(max_sessions=int(sessions)),
            log_level="critical",
            timeout_graceful_shutdown=1,
        )
        servers.append(uvicorn.Server(config))
        listeners.append(socket.create_server(("127.0.0.1", int(port))))
    print(*(f"http://127.0.0.1:{s.getsockname()[1]}" for s in listeners), flush=True)
    pairs = zip(servers, listeners, strict=True)
    await asyncio.gather(*(server.serve([listener]) for server, listener in pairs))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
