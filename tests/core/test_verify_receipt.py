"""A receipt of a paired evaluation verifies; one with a lie in it never does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kiln_core import verify_receipt
from kiln_core.canonical import digest, pretty
from kiln_core.errors import InvalidBundle, UsageError
from kiln_core.evaluation import EnvironmentEvalConfig, evaluate_pairs
from kiln_core.evidence import (
    EnvironmentEvalOutcome,
    EvaluatedSide,
    evaluated_policy,
    outcome_of,
    seal_evaluation,
)
from kiln_core.verify import BundleBytes
from kiln_core.verify_receipt import (
    RECEIPT_CHECKS,
    EvaluationBytes,
    verify_evaluation,
)
from tests.core.bundles import (
    CONTROLS,
    DROP,
    Collection,
    Parts,
    bytes_of,
    legacy_bundle,
    put,
)
from tests.simulators.pure import ADAPTER_POLICY, COUNTER_INSPECTION, sha

RUN = "0b9a4c1e-6f0d-4c58-9a57-3f1d2e4b5a69"
GROUPS, SIZE = 20, 1
SEEDS = msgspec.structs.replace(CONTROLS, groups=GROUPS, group_size=SIZE)
BETTER = {"counter": [('{"amount":3}', '{"amount":2}')]}
WORSE = {"counter": [('{"amount":8}', "no")]}


def side(scripts: Any = BETTER, **changes: Any) -> Collection:
    return Collection(
        controls=changes.pop("controls", SEEDS),
        inspections=(COUNTER_INSPECTION,),
        tokens=False,
        scripts=scripts,
        **changes,
    )


BASELINE = side(WORSE).bundle()
CANDIDATE = side(policy=ADAPTER_POLICY).bundle()
CONFIG = msgspec.convert(
    {
        "groups": GROUPS,
        "group_size": SIZE,
        "seed_start": SEEDS.seed_start,
        "gate": {"min_mean_improvement": 0.1},
    },
    EnvironmentEvalConfig,
)


def receipt_document(baseline: Any = BASELINE, candidate: Any = CANDIDATE) -> Any:
    evidence = evaluate_pairs(
        baseline.summary.rollouts, candidate.summary.rollouts, CONFIG
    )
    one, other = (
        EvaluatedSide(
            policy=bundle.summary.behavior_policy,
            summary_sha256=digest(bundle.summary_bytes),
        )
        for bundle in (baseline, candidate)
    )
    outcome = outcome_of(evidence.decision, served=False)
    receipt = seal_evaluation(RUN, CONFIG, (one, other), evidence, outcome)
    return msgspec.to_builtins(receipt)


RECEIPT = receipt_document()


def files(
    receipt: Any = None,
    baseline: BundleBytes | None = None,
    candidate: BundleBytes | None = None,
) -> EvaluationBytes:
    return EvaluationBytes(
        receipt=pretty(RECEIPT if receipt is None else receipt),
        baseline=baseline or bytes_of(BASELINE),
        candidate=candidate or bytes_of(CANDIDATE),
    )


def relinked(baseline: BundleBytes, candidate: BundleBytes) -> EvaluationBytes:
    """Return files whose receipt binds these summaries."""
    receipt = msgspec.json.decode(pretty(RECEIPT))
    receipt["baseline_summary_sha256"] = digest(baseline.summary)
    receipt["candidate_summary_sha256"] = digest(candidate.summary)
    return files(receipt, baseline, candidate)


def failure(evaluation: EvaluationBytes) -> tuple[str, str]:
    with pytest.raises(InvalidBundle) as caught:
        verify_evaluation(evaluation)
    details = caught.value.details
    assert details["file"]
    return details["check"], details["pointer"]


def test_receipt_verifies_with_its_bundles() -> None:
    verified = verify_evaluation(files())
    assert verified.receipt.evidence.decision == "passed"
    assert verified.receipt.outcome is EnvironmentEvalOutcome.KEPT
    assert verified.candidate.summary.adapter == "first"
    assert len(RECEIPT_CHECKS) == 7


@pytest.mark.parametrize("outcome", ["kept", "promoted", "error"])
def test_what_became_of_a_passed_candidate_is_the_receipts_to_tell(
    outcome: str,
) -> None:
    verify_evaluation(files({**RECEIPT, "outcome": outcome}))


LIES: list[tuple[str, Any, str, str]] = [
    ("/schema", "kiln.openenv-environment-evaluation.v2", "receipt_record", "/schema"),
    ("/run_id", "", "receipt_record", "/run_id"),
    ("/surprise", 1, "receipt_record", ""),
    ("/outcome", "rejected", "receipt_record", ""),
    ("/outcome", "diagnostic", "receipt_record", ""),
    ("/verdict", "", "receipt_record", "/verdict"),
    (
        "/baseline_summary_sha256",
        sha("1"),
        "receipt_digest",
        "/baseline_summary_sha256",
    ),
    (
        "/candidate_summary_sha256",
        sha("1"),
        "receipt_digest",
        "/candidate_summary_sha256",
    ),
    ("/baseline/adapter", "x", "receipt_policy", "/baseline/adapter"),
    ("/candidate/adapter", DROP, "receipt_policy", "/candidate/adapter"),
    (
        "/candidate/adapter_content_revision",
        sha("1"),
        "receipt_policy",
        "/candidate/adapter_content_revision",
    ),
    (
        "/candidate/execution_provenance_sha256",
        sha("1"),
        "receipt_policy",
        "/candidate/execution_provenance_sha256",
    ),
    (
        "/baseline/execution_provenance_sha256",
        DROP,
        "receipt_policy",
        "/baseline/execution_provenance_sha256",
    ),
    ("/seed_start", 41, "receipt_plan", "/seed_start"),
    ("/config/seed_start", 41, "receipt_plan", "/config/seed_start"),
    ("/config/groups", 19, "receipt_plan", "/config/groups"),
    ("/config/group_size", 2, "receipt_plan", "/config/group_size"),
    (
        "/config/gate/min_mean_improvement",
        99.0,
        "receipt_evidence",
        "/evidence/decision",
    ),
    ("/config/gate/min_mean_return", 99.0, "receipt_evidence", "/evidence/decision"),
    ("/config/gate", DROP, "receipt_evidence", "/evidence/decision"),
    *(
        (f"/evidence/{name}", value, "receipt_evidence", f"/evidence/{name}")
        for name, value in (
            ("paired_groups", 21),
            ("paired_episodes", 21),
            ("baseline_mean_return", 0.5),
            ("candidate_mean_return", 0.5),
            ("mean_return_improvement", 0.5),
            ("improved_groups", 19),
            ("regressed_groups", 1),
            ("tied_groups", 1),
            ("exact_sign_test_p_value", 0.04),
            ("reason", "trust me"),
        )
    ),
    (
        "/evidence/exact_sign_test_alpha",
        0.1,
        "receipt_record",
        "/evidence",
    ),
    ("/evidence/minimum_paired_groups", 5, "receipt_record", ""),
]


@pytest.mark.parametrize(("pointer", "value", "check", "place"), LIES, ids=str)
def test_lie_in_a_receipt_is_noticed_where_it_is(
    pointer: str, value: Any, check: str, place: str
) -> None:
    receipt = msgspec.json.decode(pretty(RECEIPT))
    put(receipt, pointer, value)
    found = failure(files(receipt))
    assert found[0] == check
    if place:
        assert found[1].startswith(place)


def test_every_member_of_the_evidence_has_a_lie() -> None:
    told = {row[0].split("/")[2] for row in LIES if row[0].startswith("/evidence/")}
    assert told | {"policy_version", "decision"} == set(RECEIPT["evidence"])


def test_free_members_are_the_run_and_the_verdict() -> None:
    verify_evaluation(files({**RECEIPT, "run_id": "another", "verdict": "words"}))
    config = {k: v for k, v in RECEIPT["config"].items() if k != "seed_start"}
    verify_evaluation(files({**RECEIPT, "config": config}))


def test_decision_of_another_kind_is_noticed() -> None:
    receipt = msgspec.json.decode(pretty(RECEIPT))
    receipt["evidence"]["decision"] = "diagnostic"
    receipt["outcome"] = "diagnostic"
    assert failure(files(receipt)) == ("receipt_evidence", "/evidence/decision")


def test_tampered_bundle_is_no_evidence() -> None:
    parts = Parts(bytes_of(CANDIDATE))
    put(parts.replay, "/groups/0/candidates/0/episode_return", 99.0)
    sealed = parts.seal()
    assert failure(relinked(bytes_of(BASELINE), sealed))[0] == "replay_return"


def test_swapped_sides_are_noticed() -> None:
    swapped = relinked(bytes_of(CANDIDATE), bytes_of(BASELINE))
    assert failure(swapped)[0] == "receipt_policy"


def test_sides_with_other_controls_are_no_pair() -> None:
    warm = msgspec.structs.replace(SEEDS, temperature=0.5)
    other = side(policy=ADAPTER_POLICY, controls=warm).bundle()
    found = failure(relinked(bytes_of(BASELINE), bytes_of(other)))
    assert found == ("receipt_pairing", "/temperature")


def test_sides_with_other_resets_are_no_pair() -> None:
    templates = {"counter": {"target": 5}}
    other = side(policy=ADAPTER_POLICY, templates=templates).bundle()
    check, pointer = failure(relinked(bytes_of(BASELINE), bytes_of(other)))
    assert check == "receipt_pairing"
    assert pointer.startswith("/groups/0/reset_payload")


def test_legacy_summary_names_no_policy() -> None:
    old = legacy_bundle("v3").seal()
    assert failure(relinked(old, bytes_of(CANDIDATE))) == (
        "receipt_policy",
        "/baseline",
    )


def test_sides_with_other_seeds_are_no_pair() -> None:
    fewer = msgspec.structs.replace(SEEDS, seed_start=SEEDS.seed_start + 1)
    other = side(policy=ADAPTER_POLICY, controls=fewer).bundle()
    assert failure(relinked(bytes_of(BASELINE), bytes_of(other))) == (
        "receipt_pairing",
        "/seed_start",
    )


def test_returns_too_large_to_compare_are_no_evidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def overflow(*_: Any) -> None:
        raise UsageError("the returns are too large to be compared")

    monkeypatch.setattr(verify_receipt, "evaluate_pairs", overflow)
    assert failure(files()) == ("receipt_evidence", "/evidence")


def test_provenance_digest_tells_policies_apart() -> None:
    digests = {
        evaluated_policy(policy).execution_provenance_sha256
        for policy in (BASELINE.summary.behavior_policy, ADAPTER_POLICY)
    }
    assert len(digests) == 2
