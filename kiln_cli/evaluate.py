"""``kiln openenv evaluate``: is an adapter better, on paired held-out seeds?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kiln_cli.options import (
    collection_options,
    environment_options,
    json_option,
    plan_options,
    recordable,
    server_options,
    trace_option,
)
from kiln_cli.render import document, facts, note, progress
from kiln_cli.rollout import (
    collect_bundle,
    collection_request,
    server_credential,
)
from kiln_core.bundle import BundlePaths
from kiln_core.canonical import convert_record, read_record
from kiln_core.errors import InvalidRecord, OutputUnwritable, UsageError
from kiln_core.evaluation import (
    EnvironmentEvalConfig,
    EnvironmentEvalDecision,
    EnvironmentEvalEvidence,
    EnvironmentEvalGate,
    check_paired,
    evaluate_pairs,
    least_passing_wins,
)
from kiln_core.manifest import OpenEnvReplayManifest
from kiln_core.plan import seed_intervals_overlap
from kiln_core.verify import read_summary

if TYPE_CHECKING:
    from kiln_core.bundle import Bundle
    from kiln_core.drive.collect import CollectionRequest
    from kiln_core.ports import Observer

__all__ = ["evaluate"]

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
    help="Directory of both bundles.",
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@json_option
def evaluate(*, as_json: bool, **flags: Any) -> None:
    """Compare two policies on the same held-out seeds by an exact sign test.

    Both sides play identical resets, seeds and generation seeds; both bundles are
    kept and verify on their own. Exit 0 when the candidate passed the gate or none
    was set, 1 when it was rejected or the evidence is inconclusive.
    """
    import anyio

    config = _config(flags)
    flags["seed_start"] = _seed_start(flags, config.groups)
    requests = [
        collection_request(flags, side_paths(flags["output"], side), flags[side])
        for side in ("baseline", "candidate")
    ]
    _prepare(requests, force=flags["force"])
    if not as_json:
        _announce(config)
    with progress(as_json=as_json) as observer:
        bundles = anyio.run(_both, flags, requests, observer)
    evidence = evaluate_pairs(
        bundles[0].summary.rollouts, bundles[1].summary.rollouts, config
    )
    if as_json:
        document(
            {
                "config": config,
                "seed_start": flags["seed_start"],
                "baseline_summary": str(requests[0].paths.summary),
                "candidate_summary": str(requests[1].paths.summary),
                "evidence": evidence,
            }
        )
    else:
        _show(evidence, requests)
    _exit(evidence.decision)


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


def _prepare(requests: list[CollectionRequest], *, force: bool) -> None:
    """Check that both bundles can be published; nothing is made yet.

    Raises:
        OutputUnwritable: A directory cannot be made, or written.
    """
    from kiln_core.drive.files import check_outputs

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
    flags: dict[str, Any], requests: list[CollectionRequest], observer: Observer
) -> list[Bundle]:
    """Collect both sides, baseline first, and publish them once they are paired.

    Publishing later leaves no pair of which one half is of an earlier run.
    """
    from kiln_core.drive.files import make_directory, publish_bundle

    await _require_policies(flags["url"], requests)
    bundles: list[Bundle] = []
    for request in requests:
        observer.phase(f"adapter {request.adapter or 'base'}")
        bundles.append(await collect_bundle(flags["url"], request, observer))
    check_paired(_manifest(bundles[0]), _manifest(bundles[1]))
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


def _show(evidence: EnvironmentEvalEvidence, requests: list[CollectionRequest]) -> None:
    facts(
        [
            ("baseline mean return", f"{evidence.baseline_mean_return:.4f}"),
            ("candidate mean return", f"{evidence.candidate_mean_return:.4f}"),
            ("improvement", f"{evidence.mean_return_improvement:+.4f}"),
            (
                "paired seeds",
                f"{evidence.improved_groups} better, "
                f"{evidence.regressed_groups} worse, {evidence.tied_groups} tied",
            ),
            ("exact sign test", f"p = {evidence.exact_sign_test_p_value:.6g}"),
            ("decision", f"{evidence.decision.value}: {evidence.reason}"),
            ("baseline", requests[0].paths.summary),
            ("candidate", requests[1].paths.summary),
        ]
    )
