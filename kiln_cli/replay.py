"""``kiln openenv replay``: does the environment still behave as recorded?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kiln_cli.options import bundle_options, json_option, tokens_of
from kiln_cli.render import document, facts, note, progress, say
from kiln_core.canonical import pretty

if TYPE_CHECKING:
    from kiln_core.drive.replay import ReplayOutcome

__all__ = ["replay"]


@click.command(
    epilog="""\b
Examples:
  kiln openenv replay
  kiln openenv replay --ignore-pointer /final_state/episode_id
  kiln openenv replay --summary run/openenv.rollout-summary.json --json
"""
)
@bundle_options
@click.option(
    "--credential-env",
    "credential_envs",
    multiple=True,
    metavar="ENV",
    help="Bearer token variable per environment, in order; '-' for a public one.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="Episodes in flight at most.",
)
@click.option(
    "--capacity-wait-seconds",
    type=click.IntRange(1, 3600),
    default=300,
    show_default=True,
    help="How long a full environment is waited for.",
)
@click.option(
    "--episode-retries",
    type=click.IntRange(0, 16),
    default=2,
    show_default=True,
    help="Fresh attempts after a lost session.",
)
@click.option(
    "--ignore-pointer",
    "ignored",
    multiple=True,
    metavar="POINTER",
    help="A place that may differ, relative to a candidate; '*' is any index; "
    "repeatable.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    help="Also write the outcome, drift included, to this file.",
)
@click.option("--force", is_flag=True, help="Replace an existing report.")
@json_option
def replay(*, as_json: bool, **flags: Any) -> None:
    """Replay a bundle against its live environments; exit 1 on drift.

    The bundle is verified offline first. Then discovery, reset observations, every
    answer with its JSON types, and final states must be exactly as captured.
    """
    from kiln_core.drive.concurrency import run
    from kiln_core.drive.files import check_target, publish_file
    from kiln_core.drive.replay import require_no_drift

    if flags["report"] is not None:
        check_target(flags["report"], force=flags["force"])
    with progress(as_json=as_json) as observer:
        outcome = run(_replay, flags, observer)
    if flags["report"] is not None:
        publish_file(flags["report"], pretty(outcome), force=flags["force"])
    require_no_drift(outcome)
    if as_json:
        document(outcome if outcome.report is None else outcome.report)
        return
    _show(outcome)


async def _replay(flags: dict[str, Any], observer: Any) -> ReplayOutcome:
    from kiln_core.drive.files import read_bundle
    from kiln_core.drive.http import Credential
    from kiln_core.drive.replay import ReplayRequest, replay_bundle
    from kiln_core.verify import verify_bundle

    files, _, _ = read_bundle(
        flags["summary"], flags["dataset"], flags["replay"], whole=False
    )
    bundle = verify_bundle(files)
    tokens = tokens_of(flags["credential_envs"], len(bundle.replay.environments))
    return await replay_bundle(
        ReplayRequest(
            bundle=bundle,
            credentials=tuple(Credential(t) if t else None for t in tokens),
            concurrency=flags["concurrency"],
            capacity_wait_seconds=flags["capacity_wait_seconds"],
            ignored_pointers=tuple(flags["ignored"]),
            episode_retries=flags["episode_retries"],
        ),
        observer=observer,
    )


def _show(outcome: ReplayOutcome) -> None:
    report = outcome.report
    if report is None:
        note(f"exempt: {', '.join(outcome.ignored_pointers)}")
        say("No drift outside the exempt places.")
        return
    facts(
        [
            ("rollouts", f"{report.rollouts} in {report.groups} groups"),
            ("exchanges", report.environment_exchanges),
            ("capacity retries", report.capacity_retries),
            ("prefix only", report.environment_prefix_only_rollouts),
        ]
    )
    say("The live environments behave exactly as recorded.")
