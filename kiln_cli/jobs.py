"""``kiln train status``: the training jobs of a server."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import click
import msgspec

from kiln_cli.options import json_option, server_options
from kiln_cli.render import document, progress, say
from kiln_cli.rollout import server_credential
from kiln_core.errors import PolicyError, TrainingError, UsageError
from kiln_core.training import TrainingJobDetail, TrainingQueue, TrainingStatus

if TYPE_CHECKING:
    from kiln_core.drive.server import ServerClient
    from kiln_core.ports import Observer

__all__ = ["follow_job", "require_success", "status"]

POLL_SECONDS = 0.5


@click.command(
    epilog="""\b
Examples:
  kiln train status
  kiln train status --job-id ID --follow
"""
)
@click.option("--job-id", metavar="ID", help="One job, whole.")
@click.option("--follow", is_flag=True, help="Wait until the job is finished.")
@server_options
@json_option
def status(*, job_id: str | None, follow: bool, url: str, as_json: bool) -> None:
    """Show training jobs, newest first; exit 1 when the asked one failed."""
    from kiln_core.drive.concurrency import run

    if job_id is None and not follow:
        _show_queue(run(_queue, url), as_json=as_json)
        return
    job_id = _checked(job_id)
    with progress(as_json=as_json) as observer:
        detail = run(_job, url, job_id, observer if follow else None)
    if not as_json:
        say(_line(detail.status))
    require_success(detail)
    if as_json:
        document(detail)


async def follow_job(
    server: ServerClient, job_id: str, observer: Observer
) -> TrainingJobDetail:
    """Poll a job until it is finished.

    Raises:
        KilnError: The server failed.
    """
    import anyio

    told = 0
    while True:
        detail = await _detail(server, job_id)
        if detail.step > told:
            told = detail.step
            observer.step(detail.step, detail.steps, detail.status.current_loss or 0.0)
        if detail.status.finished_unix_ms is not None:
            return detail
        await anyio.sleep(POLL_SECONDS)


def require_success(detail: TrainingJobDetail, **details: object) -> None:
    """Require a finished job to have succeeded.

    Args:
        detail: The job.
        **details: More facts for the error.

    Raises:
        TrainingError: It failed.
    """
    if detail.status.state == "failed":
        raise TrainingError(
            f"training job {detail.status.job_id} failed: {detail.status.error}",
            hint="the bundle it was given stays published",
            job=msgspec.to_builtins(detail),
            **details,
        )


async def _queue(url: str) -> TrainingQueue:
    from kiln_core.drive.server import server_client, typed

    async with server_client(url, server_credential()) as server:
        return typed(await server.get("/v1/train/status"), TrainingQueue, "job list")


async def _job(url: str, job_id: str, observer: Observer | None) -> TrainingJobDetail:
    from kiln_core.drive.server import server_client

    async with server_client(url, server_credential()) as server:
        if observer is None:
            return await _detail(server, job_id)
        observer.phase("training")
        return await follow_job(server, job_id, observer)


async def _detail(server: ServerClient, job_id: str) -> TrainingJobDetail:
    from kiln_core.drive.server import typed

    answer = await server.get(f"/v1/train/jobs/{_checked(job_id)}")
    detail = typed(answer, TrainingJobDetail, "training job")
    if detail.status.job_id != job_id:
        raise PolicyError(f"the server answered with another job than {job_id}")
    return detail


def _checked(job_id: str | None) -> str:
    """Return a job id that is one, so that no other route can be reached with it.

    Raises:
        UsageError: It is none.
    """
    if job_id is None:
        raise UsageError("--follow needs --job-id")
    try:
        return str(uuid.UUID(job_id))
    except ValueError as error:
        raise UsageError(
            f"{job_id!r} is not the id of a training job",
            hint="kiln train status lists them",
        ) from error


def _show_queue(queue: TrainingQueue, *, as_json: bool) -> None:
    if as_json:
        document(queue)
        return
    for job in queue.jobs:
        say(_line(job))
    if not queue.jobs:
        say("No training jobs.")


def _line(job: TrainingStatus) -> str:
    loss = "" if job.current_loss is None else f"  loss {job.current_loss:.4f}"
    error = "" if job.error is None else f"  {job.error}"
    return (
        f"{job.job_id}  {job.state:<9}  {job.progress:4.0%}  "
        f"{job.adapter_name}{loss}{error}"
    )
