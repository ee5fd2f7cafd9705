"""``kiln openenv evaluate``: is an adapter better, on paired held-out seeds?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kiln_cli.options import (
    collection_options,
    environment_options,
    json_option,
    plan_options,
    server_options,
)
from kiln_cli.render import document, facts, note, progress
from kiln_cli.rollout import collect_bundle, collection_request
from kiln_core.bundle import BundlePaths
from kiln_core.canonical import convert_record, read_record
from kiln_core.errors import UsageError
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
    return BundlePaths(
        dataset=output / side / "rollouts.jsonl",
        replay=output / side / "replay.json",
        summary=output / side / "summary.json",
    )


def _config(flags: dict[str, Any]) -> EnvironmentEvalConfig:
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
    config = convert_record(values, EnvironmentEvalConfig, "the evaluation")
    if isinstance(config.gate, EnvironmentEvalGate) and config.groups < 20:
        raise UsageError("a gate needs at least 20 groups")
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
    from kiln_core.drive.files import check_outputs, make_directory

    for request in requests:
        make_directory(Path(request.paths.summary).parent)
        check_outputs(request.paths, force=force)


def _announce(config: EnvironmentEvalConfig) -> None:
    wins = least_passing_wins(config.groups)
    if wins is None:
        note(f"{config.groups} paired seeds can never reach p < 0.05.")
    else:
        note(f"With {config.groups} paired seeds, {wins} wins or more can pass.")


async def _both(
    flags: dict[str, Any], requests: list[CollectionRequest], observer: Observer
) -> list[Bundle]:
    """Collect both sides, baseline first, and check that they are paired."""
    from kiln_core.drive.files import publish_bundle

    bundles: list[Bundle] = []
    for request in requests:
        bundle = await collect_bundle(flags["url"], request, observer)
        if bundles:
            check_paired(_manifest(bundles[0]), _manifest(bundle))
        publish_bundle(bundle, request.paths, force=flags["force"])
        bundles.append(bundle)
    return bundles


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
