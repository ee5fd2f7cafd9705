"""Take a session of an environment and keep it until killed; says ``held`` when it has.

Run as a program, so that a test can stop it: its socket stays open and answers nothing.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp


async def main(url: str) -> None:
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as socket:
        await socket.send_str('{"type":"reset"}')
        await socket.receive_str()
        print("held", flush=True)
        await socket.receive()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
