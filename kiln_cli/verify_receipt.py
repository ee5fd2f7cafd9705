"""``kiln openenv verify --receipt``: does the evidence of an evaluation hold?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kiln_cli.evaluate import show_evaluation, side_paths
from kiln_cli.render import document, say
from kiln_cli.reports import bundle_report
from kiln_core import limits
from kiln_core.canonical import digest
from kiln_core.evidence import VERIFICATION_SCHEMA, EvaluationVerification

if TYPE_CHECKING:
    from kiln_core.verify import BundleBytes

__all__ = ["verify_receipt"]


def verify_receipt(receipt: Path, *, as_json: bool) -> None:
    """Verify an evaluation receipt with the bundles below its directory.

    Args:
        receipt: ``receipt.json``, beside ``baseline`` and ``candidate``.
        as_json: Whether one JSON document is printed.
    """
    from kiln_core.drive.files import read_bundle, read_regular
    from kiln_core.verify_receipt import (
        RECEIPT_CHECKS,
        EvaluationBytes,
        verify_evaluation,
    )

    data = read_regular(receipt, limits.MAX_ARTIFACT_BYTES, "receipt")
    sides: list[tuple[BundleBytes, tuple[Path, Path, Path]]] = []
    for side in ("baseline", "candidate"):
        summary = Path(side_paths(receipt.parent, side).summary)
        files, dataset, replay = read_bundle(summary, None, None)
        sides.append((files, (summary, dataset, replay)))
    verified = verify_evaluation(
        EvaluationBytes(
            receipt=data,
            baseline=sides[0][0],
            candidate=sides[1][0],
            receipt_name=str(receipt),
        )
    )
    if as_json:
        document(
            EvaluationVerification(
                schema=VERIFICATION_SCHEMA,
                receipt_path=str(receipt),
                receipt_sha256=digest(data),
                baseline=bundle_report(verified.baseline, sides[0][1]),
                candidate=bundle_report(verified.candidate, sides[1][1]),
                decision=verified.receipt.evidence.decision,
                outcome=verified.receipt.outcome,
            )
        )
        return
    for name, _ in RECEIPT_CHECKS:
        say(f"ok  {name}")
    show_evaluation(
        verified.receipt,
        verified.baseline.summary.rollouts,
        verified.candidate.summary.rollouts,
    )
    say("The receipt verifies. Nothing was contacted.")
