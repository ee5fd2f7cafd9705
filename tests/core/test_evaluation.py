from __future__ import annotations

import time
from fractions import Fraction
from math import comb
from typing import Any

import msgspec
import pytest

from kiln_core.canonical import compact, read_record
from kiln_core.errors import DriftError, IdentityDrift, UsageError
from kiln_core.evaluation import (
    ALPHA,
    EnvironmentEvalConfig,
    EnvironmentEvalDecision,
    EnvironmentEvalEvidence,
    EnvironmentEvalGate,
    check_paired,
    evaluate_pairs,
    least_passing_wins,
    sign_test_p_value,
)
from kiln_core.receipt import RolloutRecord
from kiln_core.records import EpisodeTermination
from tests.core.bundles import CONTROLS, Collection, bytes_of, verify
from tests.simulators.pure import ADAPTER_POLICY

CHECK_VALUES = [
    (15, 5, 0.04138946533203125),
    (14, 6, 0.11531829833984375),
    (6, 0, 0.03125),
    (5, 0, 0.0625),
    (0, 0, 1.0),
    (1, 0, 1.0),
    (1, 1, 1.0),
    (10, 10, 1.0),
    (20, 0, 2 / 2**20),
]


@pytest.mark.parametrize(("improved", "regressed", "p"), CHECK_VALUES)
def test_p_value_is_exact(improved: int, regressed: int, p: float) -> None:
    assert sign_test_p_value(improved, regressed) == p
    assert sign_test_p_value(regressed, improved) == p


def independent(wins: int, losses: int) -> float:
    n = wins + losses
    tail = sum(comb(n, k) for k in range(min(wins, losses) + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**n)))


def test_p_value_agrees_with_its_definition_up_to_60() -> None:
    for n in range(61):
        for wins in range(n + 1):
            assert sign_test_p_value(wins, n - wins) == independent(wins, n - wins)


@pytest.mark.parametrize(
    ("pairs", "wins"),
    [
        (0, None),
        (1, None),
        (5, None),
        (6, 6),
        (7, 7),
        (8, 8),
        (9, 8),
        (19, 15),
        (20, 15),
    ],
)
def test_least_passing_wins_are_the_documented(pairs: int, wins: int | None) -> None:
    assert least_passing_wins(pairs) == wins


def test_least_passing_wins_are_least() -> None:
    for pairs in range(1, 200):
        wins = least_passing_wins(pairs)
        if wins is None:
            assert sign_test_p_value(pairs, 0) >= ALPHA
        else:
            assert sign_test_p_value(wins, pairs - wins) < ALPHA
            assert sign_test_p_value(wins - 1, pairs - wins + 1) >= ALPHA


def test_largest_evaluation_is_counted_quickly() -> None:
    started = time.process_time()
    assert least_passing_wins(16_384) == 8_318
    assert sign_test_p_value(8_192, 8_192) == 1.0
    assert 0 < sign_test_p_value(8_318, 8_066) < ALPHA
    assert sign_test_p_value(16_384, 0) == 0.0
    assert time.process_time() - started < 20


def record(
    seed: int, value: float, candidate: int = 0, url: str = "http://h"
) -> RolloutRecord:
    return RolloutRecord(
        group_index=seed,
        candidate_index=candidate,
        environment_name="e",
        environment_url=url,
        seed=seed,
        steps=1,
        episode_return=value,
        terminal_done=True,
        termination=EpisodeTermination.DONE,
        recoverable_protocol_errors=0,
        capacity_retries=0,
        model_tokens=0,
        model_latency_ms=0.0,
    )


def side(values: list[float]) -> list[RolloutRecord]:
    return [record(seed, value) for seed, value in enumerate(values)]


def evaluated(
    baseline: list[float], candidate: list[float], gate: Any = msgspec.UNSET
) -> EnvironmentEvalEvidence:
    config = EnvironmentEvalConfig(groups=len(baseline), group_size=1, gate=gate)
    return evaluate_pairs(side(baseline), side(candidate), config)


def test_evidence_counts_each_seed_once() -> None:
    evidence = evaluated([0.0] * 20, [1.0] * 15 + [-1.0] * 4 + [0.0])
    assert msgspec.to_builtins(evidence) == {
        "policy_version": "paired_return_sign_test_v1",
        "paired_groups": 20,
        "paired_episodes": 20,
        "minimum_paired_groups": 20,
        "baseline_mean_return": 0.0,
        "candidate_mean_return": 0.55,
        "mean_return_improvement": 0.55,
        "improved_groups": 15,
        "regressed_groups": 4,
        "tied_groups": 1,
        "exact_sign_test_p_value": sign_test_p_value(15, 4),
        "exact_sign_test_alpha": 0.05,
        "decision": "diagnostic",
        "reason": "no promotion gate was configured",
    }
    assert read_record(compact(evidence), EnvironmentEvalEvidence, "x") == evidence


def test_episodes_of_a_seed_are_averaged_first() -> None:
    """Four episodes per seed are still one pair."""
    baseline = [record(s, 0.0, c) for s in range(3) for c in range(4)]
    candidate = [record(s, float(c == s), c) for s in range(3) for c in range(4)]
    config = EnvironmentEvalConfig(groups=3, group_size=4)
    evidence = evaluate_pairs(baseline, candidate, config)
    assert (evidence.paired_groups, evidence.paired_episodes) == (3, 12)
    assert evidence.improved_groups == 3
    assert evidence.exact_sign_test_p_value == 0.25


def test_same_returns_in_another_order_tie() -> None:
    """Their float sums differ in the last bit."""
    returns = [0.1, 0.2, 0.3]
    baseline = [record(1, value, c) for c, value in enumerate(returns)]
    candidate = [record(1, value, c) for c, value in enumerate(returns[::-1])]
    config = EnvironmentEvalConfig(groups=1, group_size=3)
    assert evaluate_pairs(baseline, candidate, config).tied_groups == 1


def test_same_seed_at_two_endpoints_is_two_pairs() -> None:
    both = [record(1, 0.0), record(1, 1.0, url="http://i")]
    config = EnvironmentEvalConfig(groups=2, group_size=1)
    assert evaluate_pairs(both, both, config).paired_groups == 2


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [
        ([record(1, 0.0)], [record(2, 0.0)]),
        ([record(1, 0.0)], []),
        ([record(1, 0.0), record(2, 0.0)], [record(1, 0.0)]),
        ([record(1, 0.0)], [record(1, 0.0), record(1, 0.0, 1)]),
        ([record(1, 0.0)], [record(1, 0.0, url="http://i")]),
        ([record(1, 0.0), record(1, 0.0)], [record(1, 0.0), record(1, 1.0, 1)]),
        ([record(1, 0.0), record(1, 0.0, 1)], [record(1, 0.0), record(1, 1.0)]),
    ],
)
def test_unpaired_or_doubled_episodes_are_refused(
    baseline: list[RolloutRecord], candidate: list[RolloutRecord]
) -> None:
    with pytest.raises(UsageError):
        evaluate_pairs(
            baseline, candidate, EnvironmentEvalConfig(groups=1, group_size=1)
        )


def test_returns_beyond_comparison_are_refused() -> None:
    with pytest.raises(UsageError, match="too large"):
        evaluated([-1.7e308], [1.7e308])


GATE = EnvironmentEvalGate(min_mean_improvement=0.0)
D = EnvironmentEvalDecision
DECISIONS: list[tuple[str, list[float], list[float], Any, D]] = [
    ("no gate", [0.0] * 20, [1.0] * 20, msgspec.UNSET, D.DIAGNOSTIC),
    ("19 groups", [0.0] * 19, [1.0] * 19, GATE, D.INCONCLUSIVE),
    ("19 groups, all worse", [1.0] * 19, [0.0] * 19, GATE, D.INCONCLUSIVE),
    ("all better", [0.0] * 20, [1.0] * 20, GATE, D.PASSED),
    ("15 of 20", [0.0] * 20, [1.0] * 15 + [-1.0] * 5, GATE, D.PASSED),
    ("14 of 20", [0.0] * 20, [1.0] * 14 + [-1.0] * 6, GATE, D.INCONCLUSIVE),
    ("6 of 6 and ties", [0.0] * 20, [1.0] * 6 + [0.0] * 14, GATE, D.PASSED),
    ("5 of 5 and ties", [0.0] * 20, [1.0] * 5 + [0.0] * 15, GATE, D.INCONCLUSIVE),
    ("all ties", [0.0] * 20, [0.0] * 20, GATE, D.INCONCLUSIVE),
    ("all worse", [1.0] * 20, [0.0] * 20, GATE, D.REJECTED),
    (
        "significantly worse with a better mean",
        [0.0] * 20,
        [100.0] * 4 + [-1.0] * 16,
        GATE,
        D.REJECTED,
    ),
    (
        "slightly worse mean",
        [0.0] * 20,
        [1.0] * 10 + [-1.5] * 10,
        GATE,
        D.REJECTED,
    ),
    (
        "below the floor",
        [0.0] * 20,
        [1.0] * 20,
        EnvironmentEvalGate(min_mean_return=1.5, min_mean_improvement=0.0),
        D.REJECTED,
    ),
    (
        "at the floor",
        [0.0] * 20,
        [1.0] * 20,
        EnvironmentEvalGate(min_mean_return=1.0, min_mean_improvement=1.0),
        D.PASSED,
    ),
    (
        "below the wanted improvement",
        [0.0] * 20,
        [1.0] * 20,
        EnvironmentEvalGate(min_mean_improvement=1.25),
        D.REJECTED,
    ),
]


@pytest.mark.parametrize(
    ("baseline", "candidate", "gate", "decision"),
    [row[1:] for row in DECISIONS],
    ids=[row[0] for row in DECISIONS],
)
def test_first_rule_that_speaks_decides(
    baseline: list[float], candidate: list[float], gate: Any, decision: D
) -> None:
    evidence = evaluated(baseline, candidate, gate)
    assert evidence.decision is decision
    assert evidence.reason


@pytest.mark.parametrize(
    "values",
    [
        {"min_mean_improvement": float("nan")},
        {"min_mean_improvement": float("inf")},
        {"min_mean_improvement": -0.1},
        {"min_mean_improvement": 0.0, "min_mean_return": float("nan")},
        {"min_mean_improvement": 0.0, "min_mean_return": float("-inf")},
    ],
)
def test_gate_thresholds_are_finite(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        EnvironmentEvalGate(**values)


def manifests(**changes: Any) -> tuple[Any, Any]:
    baseline = verify(bytes_of(Collection().bundle())).replay
    candidate = Collection(policy=ADAPTER_POLICY).bundle()
    return baseline, msgspec.structs.replace(
        verify(bytes_of(candidate)).replay, **changes
    )


def test_collections_of_two_policies_are_paired() -> None:
    check_paired(*manifests())


def regrouped(index: int, **changes: Any) -> tuple[Any, Any]:
    baseline, candidate = manifests()
    groups = list(candidate.groups)
    groups[index] = msgspec.structs.replace(groups[index], **changes)
    return baseline, msgspec.structs.replace(candidate, groups=groups)


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"group_index": 7}, "/groups/1/group_index"),
        ({"environment_index": 0}, "/groups/1/environment_index"),
        ({"seed": 5}, "/groups/1/seed"),
        ({"reset_payload": {"seed": 41.0}}, "/groups/1/reset_payload"),
    ],
)
def test_another_plan_is_not_paired(change: dict[str, Any], pointer: str) -> None:
    with pytest.raises(DriftError) as caught:
        check_paired(*regrouped(1, **change))
    assert caught.value.details["pointer"] == pointer


def test_another_reset_observation_is_not_paired() -> None:
    baseline, _ = manifests()
    reset = baseline.groups[1].reset_observation
    other = msgspec.structs.replace(reset, observation={"input_text": "other"})
    with pytest.raises(DriftError) as caught:
        check_paired(*regrouped(1, reset_observation=other))
    assert caught.value.details["pointer"].startswith(
        "/groups/1/reset_observation/observation/"
    )


def test_missing_candidate_is_not_paired() -> None:
    baseline, _ = manifests()
    with pytest.raises(DriftError) as caught:
        check_paired(*regrouped(2, candidates=baseline.groups[2].candidates[:-1]))
    assert caught.value.details["pointer"] == "/groups/2/candidates"


@pytest.mark.parametrize(
    ("name", "value"), [("protocol_error_reward", -1.0), ("max_steps", 5)]
)
def test_another_bound_is_not_paired(name: str, value: Any) -> None:
    with pytest.raises(DriftError) as caught:
        check_paired(*manifests(**{name: value}))
    assert caught.value.details["pointer"] == f"/{name}"


def test_another_number_of_groups_or_environments_is_not_paired() -> None:
    baseline, candidate = manifests()
    fewer = msgspec.structs.replace(candidate, groups=candidate.groups[:-1])
    with pytest.raises(DriftError):
        check_paired(baseline, fewer)
    one = msgspec.structs.replace(candidate, environments=candidate.environments[:1])
    with pytest.raises(DriftError):
        check_paired(baseline, one)


def test_another_environment_is_not_paired() -> None:
    baseline, candidate = manifests()
    swapped = msgspec.structs.replace(
        candidate, environments=candidate.environments[::-1]
    )
    with pytest.raises(IdentityDrift):
        check_paired(baseline, swapped)


def test_evaluation_of_a_policy_against_itself_ties() -> None:
    controls = msgspec.structs.replace(CONTROLS, groups=20, group_size=1)
    records = Collection(controls=controls).bundle().summary.rollouts
    config = EnvironmentEvalConfig(groups=20, group_size=1, gate=GATE)
    evidence = evaluate_pairs(records, records, config)
    assert (evidence.tied_groups, evidence.decision) == (20, D.INCONCLUSIVE)
