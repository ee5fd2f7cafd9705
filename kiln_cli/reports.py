"""Reports that more than one command prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kiln_core.receipt import VERIFICATION_SCHEMA, VerificationReport

if TYPE_CHECKING:
    from kiln_core.verify import VerifiedBundle

__all__ = ["bundle_report"]


def bundle_report(
    verified: VerifiedBundle, paths: tuple[Path, Path, Path]
) -> VerificationReport:
    """Return the report of a bundle that verifies.

    Args:
        verified: The bundle.
        paths: Where summary, dataset and replay manifest were found.
    """
    summary_path, dataset, replay = paths
    summary = verified.summary
    return VerificationReport(
        schema=VERIFICATION_SCHEMA,
        summary_path=str(summary_path),
        dataset_path=str(dataset),
        replay_path=str(replay),
        dataset_sha256=summary.dataset_sha256,
        replay_sha256=summary.replay_sha256,
        groups=summary.groups,
        rollouts=summary.rollout_count,
        environment_exchanges=verified.environment_exchanges,
    )
