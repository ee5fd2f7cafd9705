"""``kiln openenv train``: preflight, collect, publish, submit, follow."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kiln_cli.jobs import follow_job, require_success
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
    stacked,
)
from kiln_cli.render import Interrupted, document, note, progress, say
from kiln_cli.rollout import (
    collect_bundle,
    collection_request,
    server_credential,
    show_bundle,
)
from kiln_core import limits
from kiln_core.canonical import JsonValue, pretty
from kiln_core.contract import (
    OpenEnvTrainingContract,
    PreflightReceipt,
    PreflightRequest,
    check_preflight,
    materialize_config,
    read_training_config,
)
from kiln_core.dataset import read_groups
from kiln_core.errors import KilnError, UsageError
from kiln_core.grpo import MAX_LORA_RANK, GrpoConfig
from kiln_core.records import AgenticGroup
from kiln_core.selection import selector_for
from kiln_core.training import GrpoRequest, TrainingJobDetail, TrainingResponse

if TYPE_CHECKING:
    from kiln_core.bundle import Bundle
    from kiln_core.drive.collect import CollectionRequest
    from kiln_core.drive.server import ServerClient
    from kiln_core.ports import Observer

__all__ = ["train", "training_config", "training_options"]

FORCED: Final = {
    "output_name": "--output-adapter",
    "base_adapter": "--adapter",
    "auto_load": "--auto-load",
    "behavior_policy": "the contract",
}
"""Fields of a configuration that are not the file's to choose, and who chooses."""

training_options = stacked(
    click.option(
        "--lora-rank",
        type=click.IntRange(1, MAX_LORA_RANK),
        help="LoRA rank; alpha is twice that unless the file says otherwise.",
    ),
    click.option(
        "--training-config",
        type=click.Path(path_type=Path),
        help="JSON file with any field of the GRPO configuration.",
    ),
    click.option(
        "--auto-load",
        type=ON_OFF,
        default="true",
        show_default=True,
        help="Serve the adapter once it is trained.",
    ),
)


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
@training_options
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
    from kiln_core.drive.concurrency import run
    from kiln_core.drive.files import check_outputs

    preflight = _preflight_request(flags)
    config = materialize_config(preflight)
    request = collection_request(flags, bundle_paths(flags), flags["adapter"])
    _check_trainable(request)
    check_outputs(request.paths, force=flags["force"])
    left = _LeftBehind()
    with left.told(), progress(as_json=as_json) as observer:
        for warning in _overruled(preflight.training_config, config):
            observer.warning(warning)
        bundle, job = run(_train, flags, preflight, request, observer, left)
    if not as_json:
        _show(bundle, job)
    if job is not None:
        require_success(job, **left.details())
    if as_json:
        document({"summary": bundle.summary, "job": job})


class _LeftBehind:
    """What stays when a run is interrupted or fails."""

    summary: str | None = None
    dataset: str | None = None
    job_id: str | None = None

    def details(self) -> dict[str, str]:
        """Return it as facts of an error."""
        facts = {"summary": self.summary, "job_id": self.job_id}
        return {name: value for name, value in facts.items() if value is not None}

    def hint(self) -> str:
        """Return what to do with it."""
        if self.job_id is not None:
            follow = f"kiln train status --job-id {self.job_id} --follow"
            return f"the bundle is published; see what became of the job: {follow}"
        if self.summary is not None:
            file = shlex.quote(str(self.dataset))
            return (
                f"the bundle is published: {self.summary}; correct what was refused, "
                f"or wait, and submit it with kiln train grpo --file {file}"
            )
        return ""

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell of it however the run ends.

        Raises:
            Interrupted: By Ctrl-C.
            KilnError: It failed.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(self.hint(), **self.details()) from None
        except KilnError as error:
            error.details.update(self.details())
            if self.summary is not None:
                error.hint = "; ".join(filter(None, (error.hint, self.hint())))
            raise


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


def _check_trainable(request: CollectionRequest) -> None:
    if request.controls.temperature == 0:
        raise UsageError(
            "nothing can be learnt from rollouts at temperature 0",
            hint="collect at a temperature above 0",
        )


def _overruled(given: GrpoConfig, effective: GrpoConfig) -> Iterator[str]:
    """Yield a warning per field of a file that something else decides."""
    default = GrpoConfig()
    for name, who in FORCED.items():
        chosen = getattr(given, name)
        if chosen not in {getattr(default, name), getattr(effective, name)}:
            yield f"{name} of the training configuration is ignored: {who} decides"


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
    left: _LeftBehind,
) -> tuple[Bundle, TrainingJobDetail | None]:
    from kiln_core.drive.files import publish_bundle
    from kiln_core.drive.server import server_client

    async with server_client(flags["url"], server_credential()) as server:
        observer.phase("preflight")
        contract = await _admitted(server, preflight)
        request = msgspec.structs.replace(request, training_contract=contract)
        bundle = await collect_bundle(flags["url"], request, observer)
        publish_bundle(bundle, request.paths, force=flags["force"])
        left.summary = str(request.paths.summary)
        left.dataset = str(request.paths.dataset)
        groups = _selected(bundle, contract)
        if not groups:
            return bundle, None
        observer.phase("training")
        response = await _submit(server, contract, groups)
        left.job_id = response.job_id
        bundle = _record(bundle, response, request)
        job = await follow_job(server, response.job_id, observer)
    return bundle, job


async def _admitted(
    server: ServerClient, preflight: PreflightRequest
) -> OpenEnvTrainingContract:
    from kiln_core.drive.server import typed

    answer = await server.post("/v1/openenv/training/preflight", preflight)
    return check_preflight(
        preflight, typed(answer, PreflightReceipt, "preflight receipt")
    )


def _selected(bundle: Bundle, contract: OpenEnvTrainingContract) -> list[AgenticGroup]:
    selector = selector_for(contract.effective_config)
    chosen = (selector.select(group) for group in read_groups(bundle.dataset))
    return [group for group in chosen if group is not None]


async def _submit(
    server: ServerClient, contract: OpenEnvTrainingContract, groups: list[AgenticGroup]
) -> TrainingResponse:
    from kiln_core.drive.server import typed

    answer = await server.post(
        "/v1/train/grpo",
        GrpoRequest(
            groups=groups,
            config=contract.effective_config,
            post_eval=contract.post_eval,
        ),
    )
    return typed(answer, TrainingResponse, "training response")


def _record(
    bundle: Bundle, response: TrainingResponse, request: CollectionRequest
) -> Bundle:
    """Write the submission into the summary."""
    from kiln_core.drive.files import replace_file

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
        say("Nothing was trained, and no adapter was made.")
        return
    for warning in job.warnings:
        note(f"Warning: {warning}")
    if job.status.state != "completed":
        return
    loaded = "served now" if job.loaded else "not served yet"
    say(
        f"Adapter {job.status.adapter_name}: {job.step} steps, "
        f"{job.adapter_sha256}, {loaded}"
    )
    if job.status.error is not None:
        note(f"Warning: {job.status.error}")
    url = bundle.summary.environments[0].identity.base_url
    path = shlex.quote(bundle.summary.summary_output_path)
    say(
        f"Prove it: kiln openenv evaluate --environment {url} "
        f"--candidate {job.status.adapter_name} --held-out-from {path}"
    )
