"""``kiln health``: is a server ready?"""

from __future__ import annotations

import click
import msgspec

from kiln_cli.options import json_option, server_options
from kiln_cli.render import document, facts
from kiln_core.canonical import JsonValue

__all__ = ["health"]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of ``GET /health``; later servers may say more."""

    status: str
    model: str
    serving_profile: str
    adapters_loaded: list[str]
    version: str
    uptime_seconds: float


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

    answer, known = anyio.run(_health, url)
    if as_json:
        document(answer)
        return
    facts(
        [
            ("status", known.status),
            ("model", known.model),
            ("profile", known.serving_profile),
            ("adapters", ", ".join(known.adapters_loaded) or "none loaded"),
            ("version", known.version),
            ("uptime", f"{known.uptime_seconds:.0f} s"),
        ]
    )


async def _health(url: str) -> tuple[JsonValue, Health]:
    from kiln_cli.rollout import server_credential
    from kiln_core.drive.server import server_client, typed

    async with server_client(url, server_credential(), total_seconds=10.0) as server:
        answer = await server.get("/health")
    return answer, typed(answer, Health, "health")
