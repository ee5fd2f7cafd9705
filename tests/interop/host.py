"""Serve several peers in one process, since importing the SDK is slow.

Arguments are ``peer:sessions`` or ``peer:sessions:folder``, where the folder holds the
certificate and the key of a server that speaks TLS; prints the ports in their order on
one line.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from importlib import import_module
from pathlib import Path


async def main(wanted: list[str]) -> None:
    sys.modules.setdefault("gradio", None)  # type: ignore[arg-type]  # not imported
    uvicorn = import_module("uvicorn")
    peers = import_module("tests.interop.peers").PEERS
    servers, listeners = [], []
    for word in wanted:
        name, sessions, *folder = word.split(":")
        tls = {}
        for path in map(Path, folder):
            tls["ssl_certfile"] = path / "server.pem"
            tls["ssl_keyfile"] = path / "server.key"
        config = uvicorn.Config(
            peers[name](int(sessions)),
            log_level="critical",
            timeout_graceful_shutdown=1,
            **tls,
        )
        servers.append(uvicorn.Server(config))
        listeners.append(socket.create_server(("127.0.0.1", 0)))
    print(*(listener.getsockname()[1] for listener in listeners), flush=True)
    pairs = zip(servers, listeners, strict=True)
    await asyncio.gather(*(server.serve([listener]) for server, listener in pairs))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
