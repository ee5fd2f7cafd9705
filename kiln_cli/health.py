"""``kiln health``: is a server ready?"""

from __future__ import annotations

import click

from kiln_cli.options import json_option, server_options
from kiln_cli.render import document, facts
from kiln_core.canonical import JsonValue

__all__ = ["health"]


@click.command(
    epilog="""\b
Examples:
  kiln health
  kiln health --url http://127.0.0.1:8421 --json
"""
)
@server_options
@json_option
def health(*, url: str, as_json: bool) -> None:
    """Say whether a server is ready; exit 2 when it is not."""
    import anyio

    answer = anyio.run(_health, url)
    if as_json:
        document(answer)
        return
    facts(
        [
            ("status", answer["status"]),
            ("model", answer["model"]),
            ("profile", answer["serving_profile"]),
            ("adapters", ", ".join(answer["adapters_loaded"]) or "none loaded"),
            ("version", answer["version"]),
            ("uptime", f"{answer['uptime_seconds']:.0f} s"),
        ]
    )


async def _health(url: str) -> JsonValue:
    from kiln_cli.rollout import server_credential
    from kiln_core.drive.server import server_client

    async with server_client(url, server_credential(), total_seconds=10.0) as server:
        return await server.get("/health")
