"""``kiln adapters``: which adapters a server has, and which it serves."""

from __future__ import annotations

import click

from kiln_cli.options import json_option, server_options
from kiln_cli.render import document
from kiln_core.canonical import JsonValue

__all__ = ["adapters"]


@click.group()
def adapters() -> None:
    """List, load and unload LoRA adapters."""


@adapters.command(name="list", epilog="\b\nExamples:\n  kiln adapters list\n")
@server_options
@json_option
def list_(*, url: str, as_json: bool) -> None:
    """List adapter folders, loaded or not."""
    import anyio

    answer = anyio.run(_request, url, "GET", "/v1/adapters", None)
    if as_json:
        document(answer)
        return
    for info in answer["available"]:
        state = "loaded" if info["loaded"] else info["problem"] or "not loaded"
        click.echo(f"{info['name']}  {info['content_sha256']}  {state}")
    if not answer["available"]:
        click.echo("No adapters.")


@adapters.command(epilog="\b\nExamples:\n  kiln adapters load my-agent\n")
@click.argument("name")
@server_options
@json_option
def load(*, name: str, url: str, as_json: bool) -> None:
    """Serve the adapter NAME."""
    import anyio

    answer = anyio.run(_request, url, "POST", "/v1/adapters/load", {"name": name})
    if as_json:
        document(answer)
    else:
        click.echo(f"{answer['name']} is served: {answer['content_sha256']}")


@adapters.command(epilog="\b\nExamples:\n  kiln adapters unload my-agent\n")
@click.argument("name")
@server_options
@json_option
def unload(*, name: str, url: str, as_json: bool) -> None:
    """Stop serving the adapter NAME; its folder stays."""
    import anyio

    answer = anyio.run(_request, url, "POST", "/v1/adapters/unload", {"name": name})
    if as_json:
        document(answer)
    else:
        click.echo(f"{name} is no longer served; its folder stays.")


async def _request(
    url: str, method: str, path: str, body: dict[str, str] | None
) -> JsonValue:
    from kiln_cli.rollout import server_credential
    from kiln_core.drive.server import server_client

    async with server_client(url, server_credential()) as server:
        return await server.request(method, path, body=body)
