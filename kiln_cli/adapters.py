"""``kiln adapters``: which adapters a server has, and which it serves."""

from __future__ import annotations

from typing import TypeVar

import click
import msgspec

from kiln_cli.options import json_option, server_options
from kiln_cli.render import document, say
from kiln_core.engine import AdapterInfo

__all__ = ["adapters"]

T = TypeVar("T", bound=msgspec.Struct)


class AdapterList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/adapters``."""

    active: str | None
    loaded: list[str]
    available: list[AdapterInfo]


class Unloaded(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``POST /v1/adapters/unload``."""

    unloaded: str


@click.group(epilog="\b\nExamples:\n  kiln adapters list\n")
def adapters() -> None:
    """List, load and unload LoRA adapters."""


@adapters.command(name="list", epilog="\b\nExamples:\n  kiln adapters list\n")
@server_options
@json_option
def list_(*, url: str, as_json: bool) -> None:
    """List adapter folders, loaded or not."""
    from kiln_core.drive.concurrency import run

    answer = run(_request, url, "/v1/adapters", None, AdapterList)
    if as_json:
        document(answer)
        return
    for info in answer.available:
        state = "loaded" if info.loaded else info.problem or "not loaded"
        say(f"{info.name}  {info.content_sha256 or 'unreadable'}  {state}")
    if not answer.available:
        say("No adapters.")


@adapters.command(epilog="\b\nExamples:\n  kiln adapters load my-agent\n")
@click.argument("name")
@server_options
@json_option
def load(*, name: str, url: str, as_json: bool) -> None:
    """Serve the adapter NAME."""
    from kiln_core.drive.concurrency import run

    answer = run(_request, url, "/v1/adapters/load", name, AdapterInfo)
    if as_json:
        document(answer)
    else:
        say(f"{answer.name} is served: {answer.content_sha256}")


@adapters.command(epilog="\b\nExamples:\n  kiln adapters unload my-agent\n")
@click.argument("name")
@server_options
@json_option
def unload(*, name: str, url: str, as_json: bool) -> None:
    """Stop serving the adapter NAME; its folder stays."""
    from kiln_core.drive.concurrency import run

    answer = run(_request, url, "/v1/adapters/unload", name, Unloaded)
    if as_json:
        document(answer)
    else:
        say(f"{answer.unloaded} is no longer served; its folder stays.")


async def _request(url: str, path: str, name: str | None, answer_type: type[T]) -> T:
    """Ask for a list, or for something to be done with one adapter."""
    from kiln_cli.rollout import server_credential
    from kiln_core.drive.server import server_client, typed

    async with server_client(url, server_credential()) as server:
        if name is None:
            answer = await server.get(path)
        else:
            answer = await server.post(path, {"name": name})
    return typed(answer, answer_type, "answer")
