"""``kiln.openenv-environment-evaluation.v1``: a paired evaluation, sealed.

The receipt binds both summaries by digest, both policies by their content, and the
evidence that the two bundles give; anyone can derive it again from the files
(`kiln_core.verify_receipt`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_core.canonical import Record, Sha256, digest_json
from kiln_core.evaluation import (
    EnvironmentEvalConfig,
    EnvironmentEvalDecision,
    EnvironmentEvalEvidence,
)
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.receipt import VerificationReport
from kiln_core.records import Seed

__all__ = [
    "EnvironmentEvalOutcome",
    "EnvironmentEvaluationReceipt",
    "EvaluatedSide",
    "EvaluationVerification",
    "PolicyIdentity",
    "evaluated_policy",
    "execution_provenance",
    "outcome_of",
    "seal_evaluation",
]

VERIFICATION_SCHEMA: Final = "kiln.openenv-evaluation-verification.v1"
EVALUATION_SCHEMA: Final = "kiln.openenv-environment-evaluation.v1"


class EnvironmentEvalOutcome(StrEnum):
    """What became of the candidate."""

    DIAGNOSTIC = "diagnostic"
    PROMOTED = "promoted"
    """It passed and is served."""
    KEPT = "kept"
    """It passed, and nobody asked to serve it."""
    REJECTED = "rejected"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"
    """It passed and could not be loaded."""


OUTCOMES: Final = {
    EnvironmentEvalDecision.DIAGNOSTIC: frozenset({EnvironmentEvalOutcome.DIAGNOSTIC}),
    EnvironmentEvalDecision.PASSED: frozenset(
        {
            EnvironmentEvalOutcome.PROMOTED,
            EnvironmentEvalOutcome.KEPT,
            EnvironmentEvalOutcome.ERROR,
        }
    ),
    EnvironmentEvalDecision.REJECTED: frozenset({EnvironmentEvalOutcome.REJECTED}),
    EnvironmentEvalDecision.INCONCLUSIVE: frozenset(
        {EnvironmentEvalOutcome.INCONCLUSIVE}
    ),
}
"""Which outcomes a decision allows."""


class PolicyIdentity(Record, frozen=True, kw_only=True):
    """Which policy played one side of an evaluation."""

    adapter: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET
    """Absent for the base model."""
    adapter_content_revision: Sha256 | UnsetType = UNSET
    execution_provenance_sha256: Sha256 | UnsetType = UNSET
    """Digest over base model, inference configuration and adapter."""


class EnvironmentEvaluationReceipt(Record, frozen=True, kw_only=True):
    """``kiln.openenv-environment-evaluation.v1``: a paired evaluation, sealed."""

    schema: Literal["kiln.openenv-environment-evaluation.v1"]
    run_id: Annotated[str, Meta(min_length=1)]
    config: EnvironmentEvalConfig
    seed_start: Seed
    baseline: PolicyIdentity
    candidate: PolicyIdentity
    baseline_summary_sha256: Sha256
    candidate_summary_sha256: Sha256
    evidence: EnvironmentEvalEvidence
    outcome: EnvironmentEvalOutcome
    verdict: Annotated[str, Meta(min_length=1)]
    """The outcome in a sentence."""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES[self.evidence.decision]:
            raise ValueError(
                f"outcome {self.outcome} contradicts decision {self.evidence.decision}"
            )


class EvaluationVerification(Record, frozen=True, kw_only=True):
    """``kiln.openenv-evaluation-verification.v1``: exists only on success."""

    schema: Literal["kiln.openenv-evaluation-verification.v1"]
    receipt_path: str
    receipt_sha256: Sha256
    baseline: VerificationReport
    candidate: VerificationReport
    decision: EnvironmentEvalDecision
    outcome: EnvironmentEvalOutcome


VERDICTS: Final = {
    EnvironmentEvalOutcome.DIAGNOSTIC: "no gate was set; nothing was decided",
    EnvironmentEvalOutcome.PROMOTED: "the candidate passed the gate and is served",
    EnvironmentEvalOutcome.KEPT: "the candidate passed the gate; it is not served",
    EnvironmentEvalOutcome.REJECTED: "the candidate failed the gate",
    EnvironmentEvalOutcome.INCONCLUSIVE: "the evidence does not decide",
    EnvironmentEvalOutcome.ERROR: "the candidate passed the gate and cannot be served",
}
"""An outcome in a sentence; the reason of the decision follows it."""


def execution_provenance(policy: BehaviorPolicyIdentity) -> Sha256:
    """Return the digest of everything that decides a policy's answers.

    That is base model, inference configuration and adapter content.
    """
    adapter = policy.adapter
    return digest_json(
        {
            "base_model": policy.base_model_sha256,
            "inference_config": policy.inference_config_sha256,
            "adapter": None
            if isinstance(adapter, UnsetType)
            else adapter.content_sha256,
        }
    )


def evaluated_policy(policy: BehaviorPolicyIdentity) -> PolicyIdentity:
    """Return how a receipt names the policy of a collection."""
    adapter = policy.adapter
    provenance = execution_provenance(policy)
    if isinstance(adapter, UnsetType):
        return PolicyIdentity(execution_provenance_sha256=provenance)
    return PolicyIdentity(
        adapter=adapter.name,
        adapter_content_revision=adapter.content_sha256,
        execution_provenance_sha256=provenance,
    )


def outcome_of(
    decision: EnvironmentEvalDecision, *, served: bool
) -> EnvironmentEvalOutcome:
    """Return what became of a candidate that nothing went wrong with.

    Args:
        decision: What the evidence says.
        served: Whether a candidate that passed is served for it.
    """
    if decision is EnvironmentEvalDecision.PASSED:
        kept = EnvironmentEvalOutcome.KEPT
        return EnvironmentEvalOutcome.PROMOTED if served else kept
    return EnvironmentEvalOutcome(decision.value)


class EvaluatedSide(msgspec.Struct, frozen=True, kw_only=True):
    """One side of an evaluation."""

    policy: BehaviorPolicyIdentity
    summary_sha256: Sha256


def seal_evaluation(
    run_id: str,
    config: EnvironmentEvalConfig,
    sides: tuple[EvaluatedSide, EvaluatedSide],
    evidence: EnvironmentEvalEvidence,
    outcome: EnvironmentEvalOutcome,
) -> EnvironmentEvaluationReceipt:
    """Return the receipt of a paired evaluation.

    Args:
        run_id: UUID of the run, or a fresh one.
        config: With its ``seed_start``.
        sides: Baseline and candidate.
        evidence: From `kiln_core.evaluation.evaluate_pairs`.
        outcome: One that the decision allows.
    """
    baseline, candidate = sides
    assert not isinstance(config.seed_start, UnsetType)  # noqa: S101 - callers fill it
    return EnvironmentEvaluationReceipt(
        schema=EVALUATION_SCHEMA,
        run_id=run_id,
        config=config,
        seed_start=config.seed_start,
        baseline=evaluated_policy(baseline.policy),
        candidate=evaluated_policy(candidate.policy),
        baseline_summary_sha256=baseline.summary_sha256,
        candidate_summary_sha256=candidate.summary_sha256,
        evidence=evidence,
        outcome=outcome,
        verdict=f"{VERDICTS[outcome]}: {evidence.reason}",
    )
