"""``kiln health``: is a server ready?"""

from __future__ import annotations

import click
import msgspec

from kiln_cli.options import json_option, server_options
from kiln_cli.render import document, facts
from kiln_core.canonical import JsonValue
from kiln_core.errors import CapacityFull, ServerUnreachable

__all__ = ["health"]

POLL_SECONDS = 0.5


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
  kiln health --wait 120
  kiln health --url http://127.0.0.1:8421 --json
"""
)
@server_options
@click.option(
    "--wait",
    "wait_seconds",
    type=click.IntRange(0, 86_400),
    default=0,
    show_default=True,
    help="Seconds to wait for it to become ready.",
)
@json_option
def health(*, url: str, wait_seconds: int, as_json: bool) -> None:
    """Say whether a server is ready; exit 2 when it is not."""
    from kiln_core.drive.concurrency import run

    answer, known = run(_health, url, wait_seconds)
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


async def _health(url: str, wait_seconds: int) -> tuple[JsonValue, Health]:
    """Ask until the server is ready or the wait is over.

    Raises:
        CapacityFull: It is still starting.
        ServerUnreachable: Nothing answers yet.
        PolicyError: Another server does, which waiting will not change.
    """
    import anyio

    from kiln_cli.rollout import server_credential
    from kiln_core.drive.server import server_client, typed

    async with server_client(url, server_credential(), total_seconds=10.0) as server:
        deadline = anyio.current_time() + wait_seconds
        while True:
            try:
                answer = await server.get("/health")
                return answer, typed(answer, Health, "health")
            except (ServerUnreachable, CapacityFull):
                if anyio.current_time() >= deadline:
                    raise
            await anyio.sleep(POLL_SECONDS)
