"""Offline verification of an evaluation receipt and the two bundles it binds.

Both bundles are verified in full; then everything the receipt says is derived from
them again: digests, policies, plan, pairing, statistics and decision. What became of
the candidate afterwards is the one thing that only the receipt tells, within what its
decision allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

import msgspec
from msgspec import UnsetType

from kiln_core.canonical import digest, read_record, same_member
from kiln_core.dataset import fail_in
from kiln_core.errors import (
    DriftError,
    InvalidBundle,
    InvalidRecord,
    MalformedJson,
    UsageError,
)
from kiln_core.evaluation import check_paired, evaluate_pairs
from kiln_core.evidence import (
    EnvironmentEvaluationReceipt,
    PolicyIdentity,
    evaluated_policy,
)
from kiln_core.plan import CollectionControls, recorded_controls
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.verify import BundleBytes, VerifiedBundle, verify_bundle

__all__ = [
    "RECEIPT_CHECKS",
    "EvaluationBytes",
    "VerifiedEvaluation",
    "verify_evaluation",
]


class EvaluationBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt and its two bundles as read."""

    receipt: bytes
    baseline: BundleBytes
    candidate: BundleBytes
    receipt_name: str = "receipt.json"


class VerifiedEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of which every check holds."""

    receipt: EnvironmentEvaluationReceipt
    baseline: VerifiedBundle
    candidate: VerifiedBundle


class _Evidence:
    """What the checks have established so far; each relies on those before it."""

    receipt: EnvironmentEvaluationReceipt
    baseline: VerifiedBundle
    candidate: VerifiedBundle

    def __init__(self, files: EvaluationBytes) -> None:
        self.files = files
        self.fail: Callable[..., NoReturn] = fail_in(files.receipt_name)


def verify_evaluation(files: EvaluationBytes) -> VerifiedEvaluation:
    """Run every check in order.

    Args:
        files: The receipt and both bundles.

    Raises:
        InvalidBundle: A check fails; ``details`` name check, file and pointer.
    """
    evidence = _Evidence(files)
    for _, check in RECEIPT_CHECKS:
        check(evidence)
    return VerifiedEvaluation(
        receipt=evidence.receipt,
        baseline=evidence.baseline,
        candidate=evidence.candidate,
    )


def _check_record(evidence: _Evidence) -> None:
    files = evidence.files
    try:
        evidence.receipt = read_record(
            files.receipt, EnvironmentEvaluationReceipt, files.receipt_name
        )
    except (MalformedJson, InvalidRecord) as error:
        raise InvalidBundle(
            error.message,
            check="receipt_record",
            file=files.receipt_name,
            pointer=error.details.get("pointer"),
        ) from error


def _check_digests(evidence: _Evidence) -> None:
    files, receipt = evidence.files, evidence.receipt
    for name, bundle, expected in (
        ("baseline", files.baseline, receipt.baseline_summary_sha256),
        ("candidate", files.candidate, receipt.candidate_summary_sha256),
    ):
        found = digest(bundle.summary)
        if found != expected:
            evidence.fail(
                "receipt_digest",
                f"/{name}_summary_sha256",
                "the summary has another digest",
                found,
                expected,
            )


def _check_bundles(evidence: _Evidence) -> None:
    evidence.baseline = verify_bundle(evidence.files.baseline)
    evidence.candidate = verify_bundle(evidence.files.candidate)


def _check_policies(evidence: _Evidence) -> None:
    for name in ("baseline", "candidate"):
        policy: BehaviorPolicyIdentity | UnsetType
        policy = getattr(evidence, name).summary.behavior_policy
        if isinstance(policy, UnsetType):
            evidence.fail(
                "receipt_policy",
                f"/{name}",
                "a legacy summary does not say which policy acted",
                "a policy",
                "absent",
            )
        expected, found = evaluated_policy(policy), getattr(evidence.receipt, name)
        for member in PolicyIdentity.__struct_fields__:
            wanted, got = getattr(expected, member), getattr(found, member)
            if wanted != got:
                evidence.fail(
                    "receipt_policy",
                    f"/{name}/{member}",
                    "the summary names another policy",
                    wanted,
                    got,
                )


def _check_plan(evidence: _Evidence) -> None:
    receipt = evidence.receipt
    left, right = (
        recorded_controls(side.summary)
        for side in (evidence.baseline, evidence.candidate)
    )
    for member in CollectionControls.__struct_fields__:
        if not same_member(getattr(left, member), getattr(right, member)):
            evidence.fail(
                "receipt_pairing",
                f"/{member}",
                "the two sides were collected with other controls",
                getattr(left, member),
                getattr(right, member),
            )
    for pointer, expected, found in (
        ("config/groups", left.groups, receipt.config.groups),
        ("config/group_size", left.group_size, receipt.config.group_size),
        ("config/seed_start", left.seed_start, receipt.config.seed_start),
        ("seed_start", left.seed_start, receipt.seed_start),
    ):
        if not isinstance(found, UnsetType) and expected != found:
            evidence.fail(
                "receipt_plan",
                f"/{pointer}",
                "the bundles were collected with another",
                expected,
                found,
            )


def _check_pairing(evidence: _Evidence) -> None:
    try:
        check_paired(evidence.baseline.replay, evidence.candidate.replay)
    except DriftError as error:
        pointer = error.details.get("pointer", "")
        evidence.fail(
            "receipt_pairing", pointer, error.message, "paired sides", "others"
        )


def _check_statistics(evidence: _Evidence) -> None:
    receipt = evidence.receipt
    try:
        expected = evaluate_pairs(
            evidence.baseline.summary.rollouts,
            evidence.candidate.summary.rollouts,
            receipt.config,
        )
    except UsageError as error:
        evidence.fail(
            "receipt_evidence", "/evidence", error.message, "comparable", "others"
        )
    for member in expected.__struct_fields__:
        wanted, found = getattr(expected, member), getattr(receipt.evidence, member)
        if not same_member(wanted, found):
            evidence.fail(
                "receipt_evidence",
                f"/evidence/{member}",
                "the two bundles give another",
                wanted,
                found,
            )


RECEIPT_CHECKS: Final[tuple[tuple[str, Callable[[_Evidence], None]], ...]] = (
    ("receipt is a record", _check_record),
    ("receipt binds both summaries", _check_digests),
    ("both bundles verify", _check_bundles),
    ("policies are those of the summaries", _check_policies),
    ("plan and seeds are those of the receipt", _check_plan),
    ("both sides played the same episodes", _check_pairing),
    ("statistics and decision follow from the returns", _check_statistics),
)
"""What verification of a receipt establishes, in order."""
