"""``kiln openenv rollout``: collect a bundle with the policy of a Kiln server."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

import click
from msgspec import UnsetType

from kiln_cli.options import (
    bundle_paths,
    collection_options,
    controls_of,
    environment_options,
    environment_urls,
    json_option,
    output_options,
    plan_options,
    seed_option,
    server_options,
    templates_of,
    tokens_of,
    trace_option,
)
from kiln_cli.render import document, facts, note, progress, say
from kiln_core.advice import collection_advice
from kiln_core.contract import OpenEnvTrainingContract, base_or_adapter
from kiln_core.plan import check_controls

if TYPE_CHECKING:
    from kiln_core.bundle import Bundle
    from kiln_core.drive.collect import CollectionRequest
    from kiln_core.drive.http import Credential
    from kiln_core.ports import Observer
    from kiln_core.receipt import OpenEnvRolloutSummary

__all__ = ["collect_bundle", "collection_request", "rollout", "server_credential"]


@click.command(
    epilog="""\b
Examples:
  kiln openenv rollout --environment http://127.0.0.1:8000
  kiln openenv rollout --environment http://127.0.0.1:8000 --groups 20 --seed-start 1000
"""
)
@environment_options
@server_options
@click.option("--adapter", default="base", show_default=True, help="Who acts.")
@seed_option
@plan_options(groups=8, group_size=4)
@collection_options
@trace_option
@output_options
@json_option
def rollout(*, as_json: bool, **flags: Any) -> None:
    """Collect groups of rollouts and publish them as a bundle of three files."""
    from kiln_core.drive.concurrency import run
    from kiln_core.drive.files import check_outputs

    request = collection_request(flags, bundle_paths(flags), flags["adapter"])
    check_outputs(request.paths, force=flags["force"])
    with progress(as_json=as_json) as observer:
        bundle = run(_rollout, flags, request, observer)
    if as_json:
        document(bundle.summary)
        return
    show_bundle(bundle.summary)


def collection_request(
    flags: dict[str, Any],
    paths: Any,
    adapter: str,
    contract: OpenEnvTrainingContract | None = None,
) -> CollectionRequest:
    """Build a collection request from flags; contacts nothing.

    Args:
        flags: Of the collection options.
        paths: Where the bundle goes.
        adapter: Who acts.
        contract: Sealed into the summary.

    Raises:
        UsageError: A flag is invalid.
    """
    from kiln_core.drive.collect import CollectionRequest, EnvironmentTarget
    from kiln_core.drive.http import Credential

    urls = environment_urls(flags)
    tokens = tokens_of(flags["credential_envs"], len(urls))
    controls = controls_of(flags)
    check_controls(controls, len(urls))
    return CollectionRequest(
        environments=tuple(
            EnvironmentTarget(
                base_url=url, credential=Credential(token) if token else None
            )
            for url, token in zip(urls, tokens, strict=True)
        ),
        controls=controls,
        reset_templates=tuple(templates_of(flags, len(urls))),
        adapter=base_or_adapter(adapter),
        guided=not flags["unguided"],
        keep_tokens=not flags.get("no_trace", False),
        paths=paths,
        training_contract=contract,
    )


async def _rollout(
    flags: dict[str, Any], request: CollectionRequest, observer: Observer
) -> Bundle:
    """Collect and publish; an interrupt waits while the files are written."""
    from kiln_core.drive.files import publish_bundle

    bundle = await collect_bundle(flags["url"], request, observer)
    publish_bundle(bundle, request.paths, force=flags["force"])
    return bundle


async def collect_bundle(
    url: str, request: CollectionRequest, observer: Observer
) -> Bundle:
    """Collect with the policy of the server at ``url``."""
    from kiln_core.drive.collect import collect
    from kiln_core.drive.policy import http_policy

    async with http_policy(url, request.adapter, server_credential()) as policy:
        return await collect(request, policy, observer=observer)


def server_credential() -> Credential | None:
    """Return the API token of the server, from ``KILN_API_TOKEN``."""
    from kiln_core.drive.http import Credential

    token = os.environ.get("KILN_API_TOKEN")
    return Credential(token) if token else None


def show_bundle(summary: OpenEnvRolloutSummary) -> None:
    """Show what was collected, and how to check it."""
    stats, policy = summary.stats, summary.behavior_policy
    urls = [found.identity.base_url for found in summary.environments]
    endings = (
        f"{stats.done_count} done, {stats.max_steps_count} max_steps, "
        f"{stats.invalid_model_action_count} invalid_model_action, "
        f"{stats.protocol_error_count} protocol_error"
    )
    facts(
        [
            ("environments", ", ".join(urls)),
            ("policy", f"{policy.served_model_id}, {summary.adapter_label}"),
            ("rollouts", f"{summary.rollout_count} in {summary.groups} groups"),
            (
                "mean return",
                f"{stats.mean_episode_return:.4f} "
                f"({stats.min_episode_return:g} to {stats.max_episode_return:g})",
            ),
            ("endings", endings),
            ("dataset", f"{summary.output_path} {summary.dataset_sha256}"),
            ("replay", f"{summary.replay_output_path} {summary.replay_sha256}"),
            ("summary", summary.summary_output_path),
            *_selected(summary),
        ]
    )
    for warning in collection_advice(summary):
        note(f"Warning: {warning}")
    path = shlex.quote(summary.summary_output_path)
    say(f"Check it: kiln openenv verify --summary {path}")


def _selected(summary: OpenEnvRolloutSummary) -> list[tuple[str, object]]:
    selection = summary.training_selection
    if isinstance(selection, UnsetType):
        return []
    chosen = f"{selection.rollouts_submitted} in {selection.groups_submitted} groups"
    return [("trainable", chosen)]
