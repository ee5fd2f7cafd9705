"""``kiln train grpo``: train an adapter on groups that are recorded already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import UnsetType

from kiln_cli.jobs import follow_job, require_success
from kiln_cli.options import json_option, server_options
from kiln_cli.render import document, note, progress, say
from kiln_cli.rollout import server_credential
from kiln_cli.train import training_config, training_options
from kiln_core import limits
from kiln_core.canonical import read_json
from kiln_core.dataset import read_groups
from kiln_core.errors import UsageError
from kiln_core.grpo import GrpoConfig, check_grpo_config
from kiln_core.selection import selector_for
from kiln_core.training import GrpoRequest, TrainingResponse, read_grpo_request

if TYPE_CHECKING:
    from kiln_core.ports import Observer
    from kiln_core.records import AgenticGroup
    from kiln_core.training import TrainingJobDetail

__all__ = ["grpo"]


@click.command(
    epilog="""\b
Examples:
  kiln train grpo --file openenv.rollouts.jsonl --adapter my-agent
  kiln train grpo --file openenv.rollouts.jsonl --adapter my-agent \\
    --training-config grpo.json --follow
  kiln train grpo --file request.json
"""
)
@click.option(
    "--file",
    "source",
    type=click.Path(path_type=Path),
    required=True,
    help="Dataset of a bundle (.jsonl), or a whole request (.json).",
)
@click.option(
    "--adapter",
    default="default",
    show_default=True,
    help="Name of the trained adapter.",
)
@training_options
@click.option("--follow", is_flag=True, help="Wait until the job is finished.")
@server_options
@json_option
def grpo(*, as_json: bool, **flags: Any) -> None:
    """Train an adapter on the groups of a file, such as a bundle's dataset.

    Training starts from the adapter that acted when the groups were recorded. Groups
    without a gradient are left out as 'kiln openenv train' does; what such a run could
    not submit can be submitted with this command later.
    """
    from kiln_core.drive.concurrency import run

    request = _request(flags)
    with progress(as_json=as_json) as observer:
        response, job = run(_submitted, flags, request, observer)
    if job is not None:
        require_success(job)
    if as_json:
        document(response if job is None else job)
        return
    say(f"Job {response.job_id}: {response.message}, seed {response.effective_seed}")
    if job is None:
        say(f"Follow it: kiln train status --job-id {response.job_id} --follow")
        return
    for warning in job.warnings:
        note(f"Warning: {warning}")
    loaded = "served now" if job.loaded else "not served yet"
    say(f"Adapter {job.status.adapter_name}: {job.adapter_sha256}, {loaded}")


def _request(flags: dict[str, Any]) -> GrpoRequest:
    """Read the request that file and flags name.

    Raises:
        UsageError: The file is of neither kind, or holds nothing to train on.
    """
    from kiln_core.drive.files import read_regular

    source: Path = flags["source"]
    if source.suffix not in {".json", ".jsonl"}:
        raise UsageError(
            f"{source} is neither .json nor .jsonl",
            hint="give a bundle's dataset (.jsonl) or a training request (.json)",
        )
    data = read_regular(source, limits.MAX_ARTIFACT_BYTES, "training file")
    if source.suffix == ".json":
        request = read_grpo_request(
            read_json(data, str(source), limits.MAX_ARTIFACT_DEPTH)
        )
        config = _config(flags, request.config, request.groups)
        return msgspec.structs.replace(request, config=config)
    given = training_config(flags["training_config"], flags["lora_rank"])
    groups = list(read_groups(data, str(source)))
    config = _config(flags, given, groups)
    selector = selector_for(config)
    chosen = [group for group in map(selector.select, groups) if group is not None]
    for warning in selector.record().warnings or []:
        note(f"Warning: {warning}")
    if not chosen:
        raise UsageError(
            f"{source} holds nothing to train on",
            hint="no group has a usable rollout and rewards that differ",
        )
    return GrpoRequest(groups=chosen, config=config)


def _config(
    flags: dict[str, Any], given: GrpoConfig, groups: list[AgenticGroup]
) -> GrpoConfig:
    """Return a configuration with what flags and corpus decide."""
    whole = flags["source"].suffix == ".json"
    rank: int | None = flags["lora_rank"]
    if whole and rank is not None:
        given = msgspec.structs.replace(given, lora_rank=rank, lora_alpha=2.0 * rank)
    chosen = whole and given.output_name is not None
    config = msgspec.structs.replace(
        given,
        output_name=given.output_name if chosen else flags["adapter"],
        base_adapter=_behavior_adapter(groups) or given.base_adapter,
        auto_load=flags["auto_load"] == "true",
    )
    check_grpo_config(config)
    return config


def _behavior_adapter(groups: list[AgenticGroup]) -> str | None:
    """Return the adapter that acted; the server checks that one did throughout."""
    for group in groups:
        openenv = group.completions[0].openenv
        if not isinstance(openenv, UnsetType):
            policy = openenv.behavior_policy
            return None if isinstance(policy, UnsetType) else policy.adapter_name
    return None


async def _submitted(
    flags: dict[str, Any], request: GrpoRequest, observer: Observer
) -> tuple[TrainingResponse, TrainingJobDetail | None]:
    from kiln_core.drive.server import server_client, typed

    async with server_client(flags["url"], server_credential()) as server:
        answer = await server.post("/v1/train/grpo", request)
        response = typed(answer, TrainingResponse, "training response")
        if not flags["follow"]:
            return response, None
        observer.phase("training")
        return response, await follow_job(server, response.job_id, observer)
