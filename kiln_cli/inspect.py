"""``kiln openenv inspect``: what an environment says of itself."""

from __future__ import annotations

from typing import Any

import click

from kiln_cli.options import (
    environment_clients,
    environment_options,
    json_option,
)
from kiln_cli.render import document, facts
from kiln_core.canonical import canonical_bytes
from kiln_core.discovery import (
    INSPECTION_SCHEMA,
    EnvironmentInspection,
    InspectionReport,
)

__all__ = ["inspect"]


@click.command(
    epilog="""\b
Examples:
  kiln openenv inspect --environment http://127.0.0.1:8000
  kiln openenv inspect --environment http://127.0.0.1:8000 --json
"""
)
@environment_options
@json_option
def inspect(*, as_json: bool, **flags: Any) -> None:
    """Show identity, schemas and digests of environments."""
    from kiln_core.actions import ActionSchema
    from kiln_core.drive.concurrency import run

    found = run(_inspect, flags)
    for inspection in found:
        ActionSchema(inspection.schema.action)  # one that cannot be used is said now
    if as_json:
        document(InspectionReport(schema=INSPECTION_SCHEMA, environments=found))
        return
    for inspection in found:
        _show(inspection)


async def _inspect(flags: dict[str, Any]) -> list[EnvironmentInspection]:
    from kiln_core.drive.http import inspect_all

    async with environment_clients(flags) as clients:
        return await inspect_all(clients)


def _show(inspection: EnvironmentInspection) -> None:
    identity = inspection.identity
    facts(
        [
            ("environment", identity.metadata.name),
            ("description", identity.metadata.description),
            ("url", identity.base_url),
            ("authentication", identity.authentication),
            ("environments", ", ".join(identity.environments)),
            ("discovery", identity.discovery_sha256),
            ("schema", identity.schema_sha256),
            ("action schema", canonical_bytes(inspection.schema.action).decode()),
        ]
    )
