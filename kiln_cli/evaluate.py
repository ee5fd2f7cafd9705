"""``kiln openenv evaluate``: is an adapter better, on paired held-out seeds?"""

from __future__ import annotations

import os
import shlex
import uuid
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import UnsetType

from kiln_cli.options import (
    collection_options,
    environment_options,
    json_option,
    plan_options,
    recordable,
    server_options,
    trace_option,
)
from kiln_cli.render import document, facts, note, progress, say
from kiln_cli.rollout import (
    collect_bundle,
    collection_request,
    server_credential,
)
from kiln_core.bundle import BundlePaths
from kiln_core.canonical import convert_record, digest, pretty, read_record
from kiln_core.errors import InvalidRecord, OutputUnwritable, UsageError
from kiln_core.evaluation import (
    EnvironmentEvalConfig,
    EnvironmentEvalDecision,
    EnvironmentEvalGate,
    check_paired,
    evaluate_pairs,
    least_passing_wins,
    paired_differences,
)
from kiln_core.evidence import (
    EnvironmentEvaluationReceipt,
    EvaluatedSide,
    PolicyIdentity,
    outcome_of,
    seal_evaluation,
)
from kiln_core.intervals import improvement_interval, win_rate_interval
from kiln_core.manifest import OpenEnvReplayManifest
from kiln_core.plan import seed_intervals_overlap
from kiln_core.receipt import RolloutRecord
from kiln_core.verify import read_summary

if TYPE_CHECKING:
    from kiln_core.bundle import Bundle
    from kiln_core.drive.collect import CollectionRequest
    from kiln_core.ports import Observer

__all__ = ["RECEIPT_NAME", "evaluate", "show_evaluation", "side_paths"]

RECEIPT_NAME = "receipt.json"
HELD_OUT_SEED = 1_000_000
"""First held-out seed where nothing says what was trained on."""
FAILED = 1


@click.command(
    epilog="""\b
Examples:
  kiln openenv evaluate --environment http://127.0.0.1:8000 \\
    --candidate my-agent --held-out-from openenv.rollout-summary.json
  kiln openenv evaluate --environment http://127.0.0.1:8000 \\
    --baseline base --candidate my-agent --min-mean-improvement 0.1
"""
)
@environment_options
@server_options
@click.option("--baseline", default="base", show_default=True, help="Adapter to beat.")
@click.option("--candidate", required=True, help="Adapter that should be better.")
@click.option("--seed-start", type=int, help="First held-out seed.")
@click.option(
    "--held-out-from",
    type=click.Path(path_type=Path),
    help="Summary of the training bundle: evaluation seeds follow its seeds and may "
    "not overlap them.",
)
@click.option("--min-mean-improvement", type=float, help="Gate on this improvement.")
@click.option("--min-mean-return", type=float, help="Gate on this mean return.")
@plan_options(groups=20, group_size=4)
@collection_options
@trace_option
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default="environment-evaluation",
    show_default=True,
    help="Directory of both bundles and the receipt.",
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@json_option
def evaluate(*, as_json: bool, **flags: Any) -> None:
    """Compare two policies on the same held-out seeds by an exact sign test.

    Both sides play identical resets, seeds and generation seeds. Both bundles are kept,
    and a receipt that binds them (kiln openenv verify --receipt). Exit 0 when the
    candidate passed the gate or none was set, 1 when it was rejected or the evidence is
    inconclusive.
    """
    from kiln_core.drive.concurrency import run
    from kiln_core.drive.files import publish_file

    config = _config(flags)
    flags["seed_start"] = _seed_start(flags, config.groups)
    config = msgspec.structs.replace(config, seed_start=flags["seed_start"])
    receipt_path = recordable(flags["output"]) / RECEIPT_NAME
    requests = [
        collection_request(flags, side_paths(flags["output"], side), flags[side])
        for side in ("baseline", "candidate")
    ]
    _prepare(requests, receipt_path, force=flags["force"])
    if not as_json:
        _announce(config)
    with progress(as_json=as_json) as observer:
        bundles = run(_both, flags, requests, receipt_path, observer)
    receipt = _receipt(config, bundles)
    publish_file(receipt_path, pretty(receipt), force=flags["force"])
    if as_json:
        document(receipt)
    else:
        show_evaluation(receipt, *(bundle.summary.rollouts for bundle in bundles))
        facts([("receipt", receipt_path)])
        say(f"Check it: kiln openenv verify --receipt {shlex.quote(str(receipt_path))}")
    _exit(receipt.evidence.decision)


def _exit(decision: EnvironmentEvalDecision) -> None:
    if decision in {
        EnvironmentEvalDecision.REJECTED,
        EnvironmentEvalDecision.INCONCLUSIVE,
    }:
        raise click.exceptions.Exit(FAILED)


def side_paths(output: Path, side: str) -> BundlePaths:
    """Return where one side's bundle goes."""
    folder = recordable(output) / side
    return BundlePaths(
        dataset=folder / "rollouts.jsonl",
        replay=folder / "replay.json",
        summary=folder / "summary.json",
    )


def _config(flags: dict[str, Any]) -> EnvironmentEvalConfig:
    """Return the evaluation that flags name.

    Raises:
        UsageError: One is invalid, or there are too few groups for a gate.
    """
    improvement, floor = flags["min_mean_improvement"], flags["min_mean_return"]
    gated = improvement is not None or floor is not None
    values: dict[str, Any] = {
        "groups": flags["groups"],
        "group_size": flags["group_size"],
    }
    if flags["seed_start"] is not None:
        values["seed_start"] = flags["seed_start"]
    if gated:
        values["gate"] = {"min_mean_improvement": improvement or 0.0}
        if floor is not None:
            values["gate"]["min_mean_return"] = floor
    try:
        config = convert_record(values, EnvironmentEvalConfig, "the evaluation")
    except InvalidRecord as error:
        raise UsageError(error.message) from error
    if isinstance(config.gate, EnvironmentEvalGate) and config.groups < 20:
        raise UsageError(
            f"a gate needs at least 20 groups, not {config.groups}",
            hint="raise --groups, or leave the --min options out",
        )
    return config


def _seed_start(flags: dict[str, Any], groups: int) -> int:
    given: int | None = flags["seed_start"]
    training: Path | None = flags["held_out_from"]
    if training is None:
        return HELD_OUT_SEED if given is None else given
    from kiln_core import limits
    from kiln_core.drive.files import read_regular

    summary = read_summary(
        read_regular(training, limits.MAX_ARTIFACT_BYTES, "summary"), str(training)
    )
    after = summary.seed_start + summary.groups
    start = after if given is None else given
    if seed_intervals_overlap(start, groups, summary.seed_start, summary.groups):
        raise UsageError(
            f"evaluation seeds {start} to {start + groups - 1} overlap the training "
            f"seeds {summary.seed_start} to {after - 1}",
            hint=f"use --seed-start {after} or later",
        )
    return start


def _prepare(
    requests: list[CollectionRequest], receipt: PurePath, *, force: bool
) -> None:
    """Check that bundles and receipt can be published; nothing is made yet.

    Raises:
        OutputUnwritable: A directory cannot be made, or written.
    """
    from kiln_core.drive.files import check_outputs, check_target

    if Path(receipt).parent.is_dir():
        check_target(Path(receipt), force=force)
    for request in requests:
        folder = Path(request.paths.summary).parent
        if folder.is_dir():
            check_outputs(request.paths, force=force)
            continue
        there = next(path for path in folder.absolute().parents if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise OutputUnwritable(f"directory {folder} cannot be made in {there}")


def _announce(config: EnvironmentEvalConfig) -> None:
    wins = least_passing_wins(config.groups)
    if wins is None:
        note(f"{config.groups} paired seeds can never reach p < 0.05.")
    else:
        note(f"With {config.groups} paired seeds, {wins} wins or more can pass.")


async def _both(
    flags: dict[str, Any],
    requests: list[CollectionRequest],
    receipt: PurePath,
    observer: Observer,
) -> list[Bundle]:
    """Collect both sides, baseline first, and publish them once they are paired.

    Publishing later leaves no pair of which one half is of an earlier run; an earlier
    receipt goes before the bundles that it binds.
    """
    from kiln_core.drive.files import make_directory, publish_bundle, withdraw

    await _require_policies(flags["url"], requests)
    bundles: list[Bundle] = []
    for request in requests:
        observer.phase(f"adapter {request.adapter or 'base'}")
        bundles.append(await collect_bundle(flags["url"], request, observer))
    check_paired(_manifest(bundles[0]), _manifest(bundles[1]))
    if flags["force"]:
        withdraw(Path(receipt))
    for request, bundle in zip(requests, bundles, strict=True):
        make_directory(Path(request.paths.summary).parent)
        publish_bundle(bundle, request.paths, force=flags["force"])
    return bundles


async def _require_policies(url: str, requests: list[CollectionRequest]) -> None:
    """Ask for both policies first: a missing candidate costs no baseline."""
    from kiln_core.drive.policy import http_policy

    for request in requests:
        async with http_policy(url, request.adapter, server_credential()) as policy:
            await policy.describe()


def _manifest(bundle: Bundle) -> OpenEnvReplayManifest:
    return read_record(bundle.replay, OpenEnvReplayManifest, "replay manifest")


def _receipt(
    config: EnvironmentEvalConfig, bundles: list[Bundle]
) -> EnvironmentEvaluationReceipt:
    """Seal an evaluation that no server run owns, so under a fresh run id."""
    evidence = evaluate_pairs(
        bundles[0].summary.rollouts, bundles[1].summary.rollouts, config
    )
    baseline, candidate = (
        EvaluatedSide(
            policy=bundle.summary.behavior_policy,
            summary_sha256=digest(bundle.summary_bytes),
        )
        for bundle in bundles
    )
    outcome = outcome_of(evidence.decision, served=False)
    run_id = str(uuid.uuid4())
    return seal_evaluation(run_id, config, (baseline, candidate), evidence, outcome)


def show_evaluation(
    receipt: EnvironmentEvaluationReceipt,
    baseline: Sequence[RolloutRecord],
    candidate: Sequence[RolloutRecord],
) -> None:
    """Show the evidence of a receipt, with how sure it is."""
    evidence = receipt.evidence
    low, high = win_rate_interval(evidence.improved_groups, evidence.regressed_groups)
    differences = paired_differences(baseline, candidate)
    least, most = improvement_interval(differences, receipt.candidate_summary_sha256)
    facts(
        [
            ("baseline", _policy(receipt.baseline)),
            ("candidate", _policy(receipt.candidate)),
            ("baseline mean return", f"{evidence.baseline_mean_return:.4f}"),
            ("candidate mean return", f"{evidence.candidate_mean_return:.4f}"),
            (
                "improvement",
                f"{evidence.mean_return_improvement:+.4f} "
                f"(95 % by seed: {least:+.4f} to {most:+.4f})",
            ),
            (
                "paired seeds",
                f"{evidence.improved_groups} better, "
                f"{evidence.regressed_groups} worse, {evidence.tied_groups} tied",
            ),
            ("win rate", f"95 % exact: {low:.3f} to {high:.3f} of untied seeds"),
            ("exact sign test", f"p = {evidence.exact_sign_test_p_value:.6g}"),
            ("decision", f"{evidence.decision.value}: {evidence.reason}"),
            ("outcome", f"{receipt.outcome.value}: {receipt.verdict}"),
        ]
    )


def _policy(policy: PolicyIdentity) -> str:
    if isinstance(policy.adapter, UnsetType):
        return "base"
    return f"{policy.adapter} {policy.adapter_content_revision}"
