"""``kiln openenv verify``: is a bundle what it says it is?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kiln_cli.options import bundle_options, json_option
from kiln_cli.render import document, facts, say
from kiln_cli.reports import bundle_report
from kiln_core.canonical import pretty
from kiln_core.errors import UsageError
from kiln_core.legacy import LEGACY_SCHEMAS
from kiln_core.receipt import (
    OUTCOME_SCHEMA,
    BundleContradiction,
    VerificationOutcome,
)

if TYPE_CHECKING:
    from kiln_core.errors import InvalidBundle

__all__ = ["verify"]


@click.command(
    epilog="""\b
Examples:
  kiln openenv verify
  kiln openenv verify --summary run/openenv.rollout-summary.json --json
  kiln openenv verify --dataset moved.jsonl --replay moved.json --report outcome.json
  kiln openenv verify --receipt environment-evaluation/receipt.json
"""
)
@bundle_options
@click.option(
    "--receipt",
    type=click.Path(path_type=Path),
    help="Verify this evaluation receipt and both of its bundles instead.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    help="Also write the outcome, a contradiction included, to this file.",
)
@click.option("--force", is_flag=True, help="Replace an existing report.")
@json_option
def verify(*, as_json: bool, **flags: Any) -> None:
    """Verify a bundle, or an evaluation, offline; exit 1 when it does not hold.

    Digests, canonical bytes, returns, transcripts, seeds and totals are recomputed.
    Nothing is contacted, and nothing is claimed about the environment as it is now.
    """
    from kiln_core.drive.files import check_target, publish_file
    from kiln_core.verify import CHECKS

    if flags["receipt"] is not None:
        from kiln_cli.verify_receipt import verify_receipt

        _refuse_bundle_flags(flags)
        verify_receipt(flags["receipt"], as_json=as_json)
        return
    if flags["report"] is not None:
        check_target(flags["report"], force=flags["force"])
    outcome = _verified(flags)
    if flags["report"] is not None:
        publish_file(flags["report"], pretty(outcome), force=flags["force"])
    report = outcome.report
    assert report is not None  # noqa: S101 - a contradiction was raised
    if as_json:
        document(report)
        return
    for name, _ in CHECKS:
        say(f"ok  {name}")
    facts(
        [
            ("summary", _version(outcome)),
            ("dataset", f"{report.dataset_path} {report.dataset_sha256}"),
            ("replay", f"{report.replay_path} {report.replay_sha256}"),
            ("rollouts", f"{report.rollouts} in {report.groups} groups"),
            ("exchanges", report.environment_exchanges),
            ("with token ids", outcome.traced_rollouts),
            ("collected again", outcome.retried_rollouts),
        ]
    )
    say(
        "The bundle verifies. Nothing was contacted: this says nothing about the "
        "environment as it is now."
    )


def _refuse_bundle_flags(flags: dict[str, Any]) -> None:
    """Refuse what makes no sense beside ``--receipt``.

    Raises:
        UsageError: A flag of a single bundle is given.
    """
    for name in ("dataset", "replay", "report"):
        if flags[name] is not None:
            raise UsageError(
                f"--{name} belongs to a bundle, not to a receipt",
                hint="the bundles of a receipt lie below its directory",
            )


def _verified(flags: dict[str, Any]) -> VerificationOutcome:
    """Verify the files that were named.

    Raises:
        InvalidBundle: They contradict themselves; reported first where asked.
    """
    from kiln_core.drive.files import publish_file, read_bundle
    from kiln_core.errors import InvalidBundle
    from kiln_core.verify import verify_bundle

    files, dataset, replay = read_bundle(
        flags["summary"], flags["dataset"], flags["replay"], whole=False
    )
    try:
        verified = verify_bundle(files)
    except InvalidBundle as error:
        if flags["report"] is not None:
            outcome = pretty(_contradicted(error))
            publish_file(flags["report"], outcome, force=flags["force"])
        raise
    return VerificationOutcome(
        schema=OUTCOME_SCHEMA,
        report=bundle_report(verified, (flags["summary"], dataset, replay)),
        contradiction=None,
        summary_schema=verified.summary.schema,
        traced_rollouts=verified.traced_rollouts,
        retried_rollouts=verified.retried_rollouts,
    )


def _contradicted(error: InvalidBundle) -> VerificationOutcome:
    details = error.details
    return VerificationOutcome(
        schema=OUTCOME_SCHEMA,
        report=None,
        contradiction=BundleContradiction(
            check=details["check"],
            file=details["file"],
            line=details.get("line"),
            pointer=details.get("pointer"),
            message=error.message,
            expected=details.get("expected"),
            found=details.get("found"),
        ),
        summary_schema=None,
        traced_rollouts=None,
        retried_rollouts=None,
    )


def _version(outcome: VerificationOutcome) -> str:
    legacy = " (legacy: it does not say which policy acted)"
    schema = outcome.summary_schema or ""
    return schema + (legacy if schema in LEGACY_SCHEMAS else "")
