"""``kiln openenv verify``: is a bundle what it says it is?"""

from __future__ import annotations

from pathlib import Path

import click

from kiln_cli.options import bundle_options, json_option
from kiln_cli.render import document, facts, say
from kiln_core.receipt import VERIFICATION_SCHEMA, VerificationReport

__all__ = ["verify"]


@click.command(
    epilog="""\b
Examples:
  kiln openenv verify
  kiln openenv verify --summary run/openenv.rollout-summary.json --json
"""
)
@bundle_options
@json_option
def verify(
    *, summary: Path, dataset: Path | None, replay: Path | None, as_json: bool
) -> None:
    """Verify a bundle offline; exit 1 when it does not hold.

    Digests, canonical bytes, returns, transcripts, seeds and totals are recomputed.
    Nothing is contacted, and nothing is claimed about the environment as it is now.
    """
    from kiln_core.drive.files import read_bundle
    from kiln_core.verify import CHECKS, verify_bundle

    files, dataset_path, replay_path = read_bundle(summary, dataset, replay)
    verified = verify_bundle(files)
    report = VerificationReport(
        schema=VERIFICATION_SCHEMA,
        summary_path=str(summary),
        dataset_path=str(dataset_path),
        replay_path=str(replay_path),
        dataset_sha256=verified.summary.dataset_sha256,
        replay_sha256=verified.summary.replay_sha256,
        groups=verified.summary.groups,
        rollouts=verified.summary.rollout_count,
        environment_exchanges=verified.environment_exchanges,
    )
    if as_json:
        document(report)
        return
    for name, _ in CHECKS:
        say(f"ok  {name}")
    facts(
        [
            ("dataset", f"{report.dataset_path} {report.dataset_sha256}"),
            ("replay", f"{report.replay_path} {report.replay_sha256}"),
            ("rollouts", f"{report.rollouts} in {report.groups} groups"),
            ("exchanges", report.environment_exchanges),
            ("with token ids", verified.traced_rollouts),
            ("collected again", verified.retried_rollouts),
        ]
    )
    say(
        "The bundle verifies. Nothing was contacted: this says nothing about the "
        "environment as it is now."
    )
