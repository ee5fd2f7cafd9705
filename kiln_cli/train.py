"""``kiln openenv train``: preflight, collect, publish, submit, follow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kiln_cli.jobs import require_success
from kiln_cli.options import (
    ON_OFF,
    bundle_paths,
    collection_options,
    environment_options,
    json_option,
    output_options,
    plan_options,
    read_options,
    seed_option,
    server_options,
)
from kiln_cli.render import document, note, progress
from kiln_cli.rollout import (
    collect_bundle,
    collection_request,
    server_credential,
    show_bundle,
)
from kiln_core import limits
from kiln_core.canonical import JsonValue, convert_record, pretty
from kiln_core.contract import (
    OpenEnvTrainingContract,
    PreflightReceipt,
    PreflightRequest,
    check_preflight,
    materialize_config,
    read_training_config,
)
from kiln_core.dataset import read_groups
from kiln_core.errors import UsageError
from kiln_core.grpo import GrpoConfig
from kiln_core.records import AgenticGroup
from kiln_core.selection import TrainingSelector
from kiln_core.training import GrpoRequest, TrainingJobDetail, TrainingResponse

if TYPE_CHECKING:
    from kiln_core.bundle import Bundle
    from kiln_core.drive.collect import CollectionRequest
    from kiln_core.drive.server import ServerClient
    from kiln_core.ports import Observer

__all__ = ["follow_job", "train", "training_config"]

POLL_SECONDS = 0.5


@click.command(
    epilog="""\b
Examples:
  kiln openenv train --environment http://127.0.0.1:8000 --output-adapter my-agent
  kiln openenv train --environment http://127.0.0.1:8000 --output-adapter my-agent \\
    --groups 64 --group-size 8 --training-config grpo.json
"""
)
@environment_options
@server_options
@click.option("--adapter", default="base", show_default=True, help="Who acts.")
@click.option("--output-adapter", required=True, help="Name of the trained adapter.")
@click.option("--lora-rank", type=int, help="LoRA rank; alpha is twice that.")
@click.option(
    "--training-config",
    type=click.Path(path_type=Path),
    help="JSON file with any field of the GRPO configuration.",
)
@click.option(
    "--auto-load",
    type=ON_OFF,
    default="true",
    show_default=True,
    help="Serve the adapter once it is trained.",
)
@seed_option
@plan_options(groups=8, group_size=4)
@collection_options
@output_options
@json_option
def train(*, as_json: bool, **flags: Any) -> None:
    """Collect a bundle and train an adapter on exactly those bytes.

    A preflight settles the configuration first: a rejection contacts no environment
    and writes no file. Groups whose rewards are equal carry no gradient and are not
    submitted; the bundle keeps them.
    """
    import anyio

    from kiln_core.drive.files import check_outputs

    preflight = _preflight_request(flags)
    materialize_config(preflight)
    request = collection_request(flags, bundle_paths(flags), flags["adapter"])
    check_outputs(request.paths, force=flags["force"])
    with progress(as_json=as_json) as observer:
        bundle, job = anyio.run(_train, flags, preflight, request, observer)
    if as_json:
        document({"summary": bundle.summary, "job": job})
    else:
        _show(bundle, job)
    if job is not None:
        require_success(job)


def training_config(path: Path | None, lora_rank: int | None) -> GrpoConfig:
    """Read the GRPO configuration that flags name.

    Raises:
        UsageError: The file is unusable or a field invalid.
    """
    values: JsonValue = {}
    if path is not None:
        values = read_options(path, limits.MAX_TRAINING_CONFIG_BYTES)
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold a JSON object")
    if lora_rank is not None:
        values = {"lora_alpha": 2.0 * lora_rank, **values, "lora_rank": lora_rank}
    return read_training_config(values)


async def follow_job(server: ServerClient, job_id: str, observer: Observer) -> Any:
    """Poll a job until it is finished.

    Raises:
        KilnError: The server failed.
    """
    import anyio

    while True:
        detail = convert_record(
            await server.get(f"/v1/train/jobs/{job_id}"), TrainingJobDetail, "job"
        )
        if detail.steps:
            loss = detail.status.current_loss or 0.0
            observer.rollout(detail.step, detail.steps, loss)
        if detail.status.finished_unix_ms is not None:
            return detail
        await anyio.sleep(POLL_SECONDS)


def _preflight_request(flags: dict[str, Any]) -> PreflightRequest:
    return PreflightRequest(
        adapter=flags["adapter"],
        output_adapter=flags["output_adapter"],
        training_config=training_config(flags["training_config"], flags["lora_rank"]),
        auto_load=flags["auto_load"] == "true",
    )


async def _train(
    flags: dict[str, Any],
    preflight: PreflightRequest,
    request: CollectionRequest,
    observer: Observer,
) -> tuple[Bundle, TrainingJobDetail | None]:
    from kiln_core.drive.files import publish_bundle
    from kiln_core.drive.server import server_client

    async with server_client(flags["url"], server_credential()) as server:
        observer.phase("preflight")
        contract = await _admitted(server, preflight)
        request = msgspec.structs.replace(request, training_contract=contract)
        bundle = await collect_bundle(flags["url"], request, observer)
        publish_bundle(bundle, request.paths, force=flags["force"])
        groups = _selected(bundle, contract)
        if not groups:
            return bundle, None
        observer.phase("training")
        bundle = await _submit(server, bundle, contract, groups, request)
        submission = bundle.summary.training_submission
        assert isinstance(submission, dict)  # noqa: S101 - set by _submit
        job = await follow_job(server, str(submission["job_id"]), observer)
    return bundle, job


async def _admitted(
    server: ServerClient, preflight: PreflightRequest
) -> OpenEnvTrainingContract:
    answer = await server.post("/v1/openenv/training/preflight", preflight)
    return check_preflight(
        preflight, convert_record(answer, PreflightReceipt, "preflight receipt")
    )


def _selected(bundle: Bundle, contract: OpenEnvTrainingContract) -> list[AgenticGroup]:
    selector = TrainingSelector(
        keep_equal_rewards=contract.effective_config.loss.echo is not None
    )
    chosen = (selector.select(group) for group in read_groups(bundle.dataset))
    return [group for group in chosen if group is not None]


async def _submit(
    server: ServerClient,
    bundle: Bundle,
    contract: OpenEnvTrainingContract,
    groups: list[AgenticGroup],
    request: CollectionRequest,
) -> Bundle:
    """Submit the selected groups and write the submission into the summary."""
    from kiln_core.drive.files import replace_file

    answer = await server.post(
        "/v1/train/grpo",
        GrpoRequest(
            groups=groups,
            config=contract.effective_config,
            post_eval=contract.post_eval,
        ),
    )
    response = convert_record(answer, TrainingResponse, "training response")
    summary = msgspec.structs.replace(
        bundle.summary, training_submission=msgspec.to_builtins(response)
    )
    replace_file(Path(request.paths.summary), pretty(summary))
    return msgspec.structs.replace(bundle, summary=summary)


def _show(bundle: Bundle, job: TrainingJobDetail | None) -> None:
    show_bundle(bundle.summary)
    selection = bundle.summary.training_selection
    if not isinstance(selection, msgspec.UnsetType):
        for warning in selection.warnings or []:
            note(f"Warning: {warning}")
    if job is None:
        click.echo("Nothing was trained, and no adapter was made.")
        return
    if job.status.state == "completed":
        loaded = "served now" if job.loaded else "not served yet"
        click.echo(
            f"Adapter {job.status.adapter_name}: {job.step} steps, "
            f"{job.adapter_sha256}, {loaded}"
        )
