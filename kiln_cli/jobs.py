"""``kiln train``: the training jobs of a server."""

from __future__ import annotations

from typing import Any

import click

from kiln_cli.options import json_option, server_options
from kiln_cli.render import document, progress
from kiln_cli.rollout import server_credential
from kiln_core.canonical import convert_record
from kiln_core.errors import TrainingError
from kiln_core.training import TrainingJobDetail, TrainingQueue, TrainingStatus

__all__ = ["train"]


@click.group()
def train() -> None:
    """Look at training jobs."""


@train.command(
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
    import anyio

    if job_id is None:
        queue = anyio.run(_queue, url)
        if as_json:
            document(queue)
            return
        for job in queue.jobs:
            click.echo(_line(job))
        if not queue.jobs:
            click.echo("No training jobs.")
        return
    with progress(as_json=as_json) as observer:
        detail = anyio.run(_job, url, job_id, observer if follow else None)
    if as_json:
        document(detail)
    else:
        click.echo(_line(detail.status))
    require_success(detail)


def require_success(detail: TrainingJobDetail) -> None:
    """Require a finished job to have succeeded.

    Raises:
        TrainingError: It failed.
    """
    if detail.status.state == "failed":
        raise TrainingError(
            f"training job {detail.status.job_id} failed: {detail.status.error}",
            hint="the bundle it was given stays published",
        )


async def _queue(url: str) -> TrainingQueue:
    from kiln_core.drive.server import server_client

    async with server_client(url, server_credential()) as server:
        answer = await server.get("/v1/train/status")
    return convert_record(answer, TrainingQueue, "job list")


async def _job(url: str, job_id: str, observer: Any) -> TrainingJobDetail:
    from kiln_cli.train import follow_job
    from kiln_core.drive.server import server_client

    async with server_client(url, server_credential()) as server:
        if observer is not None:
            observer.phase("training")
            detail: TrainingJobDetail = await follow_job(server, job_id, observer)
            return detail
        answer = await server.get(f"/v1/train/jobs/{job_id}")
    return convert_record(answer, TrainingJobDetail, "job")


def _line(job: TrainingStatus) -> str:
    loss = "" if job.current_loss is None else f"  loss {job.current_loss:.4f}"
    error = "" if job.error is None else f"  {job.error}"
    return (
        f"{job.job_id}  {job.state:<9}  {job.progress:4.0%}  "
        f"{job.adapter_name}{loss}{error}"
    )
