"""Paired held-out evaluation: pairing, the exact sign test, the decision.

Baseline and candidate play the same seeds. Each seed group counts once, by the mean
return of its episodes, so replications within a seed do not inflate significance. Ties
are dropped; the p-value is exact, from integers (Dixon and Mood 1946, "The statistical
sign test", JASA 41).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum
from fractions import Fraction
from itertools import islice
from typing import Annotated, Final, Literal, NoReturn

from msgspec import UNSET, Meta, UnsetType

from kiln_core import limits
from kiln_core.canonical import Record, same_json, total
from kiln_core.difference import first_difference
from kiln_core.discovery import ensure_unchanged
from kiln_core.errors import DriftError, UsageError
from kiln_core.manifest import (
    OpenEnvReplayManifest,
    ReplayGroup,
    wire_observation,
)
from kiln_core.receipt import RolloutRecord
from kiln_core.records import Count, Seed

__all__ = [
    "EnvironmentEvalConfig",
    "EnvironmentEvalDecision",
    "EnvironmentEvalEvidence",
    "EnvironmentEvalGate",
    "check_paired",
    "evaluate_pairs",
    "least_passing_wins",
    "paired_differences",
    "sign_test_p_value",
]

POLICY_VERSION: Final = "paired_return_sign_test_v1"
MINIMUM_PAIRED_GROUPS: Final = 20
ALPHA: Final = 0.05


class EnvironmentEvalDecision(StrEnum):
    """What the evidence says."""

    DIAGNOSTIC = "diagnostic"
    """No gate was asked for."""
    PASSED = "passed"
    REJECTED = "rejected"
    INCONCLUSIVE = "inconclusive"


class EnvironmentEvalGate(Record, frozen=True, kw_only=True):
    """Point thresholds of a promotion gate."""

    min_mean_return: float | UnsetType = UNSET
    min_mean_improvement: Annotated[float, Meta(ge=0)]

    def __post_init__(self) -> None:
        floor = self.min_mean_return
        if not isinstance(floor, UnsetType) and not math.isfinite(floor):
            raise ValueError("min_mean_return must be finite")
        if not (
            math.isfinite(self.min_mean_improvement) and self.min_mean_improvement >= 0
        ):
            raise ValueError("min_mean_improvement must be finite and not negative")


class EnvironmentEvalConfig(Record, frozen=True, kw_only=True):
    """How a paired evaluation is made."""

    groups: Annotated[int, Meta(ge=1, le=limits.MAX_GROUPS)]
    group_size: Annotated[int, Meta(ge=1, le=limits.MAX_GROUP_SIZE)]
    seed_start: Seed | UnsetType = UNSET
    gate: EnvironmentEvalGate | UnsetType = UNSET


class EnvironmentEvalEvidence(Record, frozen=True, kw_only=True):
    """The statistics of a paired evaluation."""

    policy_version: Literal["paired_return_sign_test_v1"]
    paired_groups: Annotated[int, Meta(ge=1)]
    paired_episodes: Annotated[int, Meta(ge=1)]
    minimum_paired_groups: Literal[20]
    baseline_mean_return: float
    candidate_mean_return: float
    mean_return_improvement: float
    improved_groups: Count
    regressed_groups: Count
    tied_groups: Count
    exact_sign_test_p_value: Annotated[float, Meta(ge=0, le=1)]
    exact_sign_test_alpha: float
    decision: EnvironmentEvalDecision
    reason: Annotated[str, Meta(min_length=1)]

    def __post_init__(self) -> None:
        if self.exact_sign_test_alpha != ALPHA:
            raise ValueError(f"exact_sign_test_alpha must be {ALPHA}")


def sign_test_p_value(improved: int, regressed: int) -> float:
    """Return the two-sided exact p-value of a sign test.

    Args:
        improved: Pairs that got better.
        regressed: Pairs that got worse; ties are in neither.
    """
    trials = improved + regressed
    fewer = min(improved, regressed)
    return float(_two_sided(next(islice(_tails(trials), fewer, None)), trials))


def least_passing_wins(pairs: int) -> int | None:
    """Return the fewest wins among ``pairs`` untied pairs that reach significance.

    None when not even winning all of them would.
    """
    alpha = Fraction(ALPHA)
    sequences = 2**pairs * alpha.numerator
    too_many_losses = next(
        losses
        for losses, tail in enumerate(_tails(pairs))
        if 2 * tail * alpha.denominator >= sequences
    )
    return pairs - too_many_losses + 1 if too_many_losses else None


def _tails(trials: int) -> Iterator[int]:
    """Yield how many of ``2**trials`` sequences have at most 0, 1, 2, ... heads."""
    ways = tail = 1
    heads = 0
    while True:
        yield tail
        heads += 1
        ways = ways * (trials - heads + 1) // heads
        tail += ways


def _two_sided(tail: int, trials: int) -> Fraction:
    return min(Fraction(1), Fraction(2 * tail, 2**trials))


def check_paired(
    baseline: OpenEnvReplayManifest, candidate: OpenEnvReplayManifest
) -> None:
    """Check that two collections differ in nothing but the policy.

    Raises:
        DriftError: Environments, resets, seeds, reset observations or candidates
            differ; ``details["pointer"]`` says where.
    """
    for one, other in zip(baseline.environments, candidate.environments, strict=False):
        ensure_unchanged(one, other)
    if len(baseline.groups) != len(candidate.groups) or len(
        baseline.environments
    ) != len(candidate.environments):
        raise DriftError("baseline and candidate hold another number of groups")
    for name in ("protocol_error_reward", "max_steps"):
        if not same_json(getattr(baseline, name), getattr(candidate, name)):
            _refuse_pair(f"/{name}")
    for index, (left, right) in enumerate(
        zip(baseline.groups, candidate.groups, strict=True)
    ):
        _check_paired_groups(left, right, f"/groups/{index}")


def _check_paired_groups(left: ReplayGroup, right: ReplayGroup, at: str) -> None:
    for name in ("group_index", "environment_index", "seed", "reset_payload"):
        if not same_json(getattr(left, name), getattr(right, name)):
            _refuse_pair(f"{at}/{name}")
    pointer = first_difference(
        wire_observation(left.reset_observation),
        wire_observation(right.reset_observation),
    )
    if pointer is not None:
        _refuse_pair(f"{at}/reset_observation{pointer}")
    if [c.candidate_index for c in left.candidates] != [
        c.candidate_index for c in right.candidates
    ]:
        _refuse_pair(f"{at}/candidates")


def evaluate_pairs(
    baseline: Sequence[RolloutRecord],
    candidate: Sequence[RolloutRecord],
    config: EnvironmentEvalConfig,
) -> EnvironmentEvalEvidence:
    """Compare two paired collections seed by seed.

    Args:
        baseline: Records of the baseline summary.
        candidate: Records of the candidate summary.
        config: Holds the gate, if any.

    Raises:
        UsageError: The two do not cover the same seeds equally often, one episode
            stands twice, or the returns are too large.
    """
    left, right = _returns_by_seed(baseline), _returns_by_seed(candidate)
    if {seed: len(r) for seed, r in left.items()} != {
        seed: len(r) for seed, r in right.items()
    }:
        raise UsageError("baseline and candidate do not cover the same seeds")
    signs = [_sign(_mean(left[seed]), _mean(right[seed])) for seed in left]
    improved, regressed = signs.count(1), signs.count(-1)
    means = _mean_return(baseline), _mean_return(candidate)
    if not math.isfinite(means[1] - means[0]):
        raise UsageError("the returns are too large to be compared")
    p_value = sign_test_p_value(improved, regressed)
    decision, reason = _decide(config.gate, len(left), improved, regressed, means)
    return EnvironmentEvalEvidence(
        policy_version=POLICY_VERSION,
        paired_groups=len(left),
        paired_episodes=len(baseline),
        minimum_paired_groups=MINIMUM_PAIRED_GROUPS,
        baseline_mean_return=means[0],
        candidate_mean_return=means[1],
        mean_return_improvement=means[1] - means[0],
        improved_groups=improved,
        regressed_groups=regressed,
        tied_groups=signs.count(0),
        exact_sign_test_p_value=p_value,
        exact_sign_test_alpha=ALPHA,
        decision=decision,
        reason=reason,
    )


def paired_differences(
    baseline: Sequence[RolloutRecord], candidate: Sequence[RolloutRecord]
) -> list[float]:
    """Return by how much each seed's mean return improved, in the order of seeds.

    Args:
        baseline: Records of the baseline summary.
        candidate: Records of the candidate summary, of the same seeds.

    Raises:
        UsageError: One episode stands twice.
    """
    left, right = _returns_by_seed(baseline), _returns_by_seed(candidate)
    return [float(_mean(right[seed]) - _mean(left[seed])) for seed in left]


def _decide(
    gate: EnvironmentEvalGate | UnsetType,
    groups: int,
    improved: int,
    regressed: int,
    means: tuple[float, float],
) -> tuple[EnvironmentEvalDecision, str]:
    """Apply the decision order of the gate; the first rule that speaks decides."""
    if isinstance(gate, UnsetType):
        return EnvironmentEvalDecision.DIAGNOSTIC, "no promotion gate was configured"
    significant = sign_test_p_value(improved, regressed) < ALPHA
    floor = gate.min_mean_return
    improvement = means[1] - means[0]
    rules = (
        (
            groups < MINIMUM_PAIRED_GROUPS,
            EnvironmentEvalDecision.INCONCLUSIVE,
            f"a gate needs at least {MINIMUM_PAIRED_GROUPS} paired groups",
        ),
        (
            significant and regressed > improved,
            EnvironmentEvalDecision.REJECTED,
            "the candidate is significantly worse",
        ),
        (
            not isinstance(floor, UnsetType) and means[1] < floor,
            EnvironmentEvalDecision.REJECTED,
            "the candidate's mean return is below the floor",
        ),
        (
            improvement < gate.min_mean_improvement,
            EnvironmentEvalDecision.REJECTED,
            "the mean improvement is below the threshold",
        ),
        (
            significant and improved > regressed,
            EnvironmentEvalDecision.PASSED,
            "the candidate is significantly better",
        ),
    )
    for applies, decision, reason in rules:
        if applies:
            return decision, reason
    return (
        EnvironmentEvalDecision.INCONCLUSIVE,
        "the difference is not significant",
    )


def _returns_by_seed(
    records: Sequence[RolloutRecord],
) -> dict[tuple[str, int], list[float]]:
    returns: dict[tuple[str, int], list[float]] = {}
    seen = set()
    for record in records:
        episode = (record.environment_url, record.seed, record.candidate_index)
        if episode in seen:
            raise UsageError(f"seed {record.seed} stands twice in one collection")
        seen.add(episode)
        seed = (record.environment_url, record.seed)
        returns.setdefault(seed, []).append(record.episode_return)
    return returns


def _sign(baseline: Fraction, candidate: Fraction) -> int:
    return (candidate > baseline) - (candidate < baseline)


def _mean(returns: list[float]) -> Fraction:
    # Exact, so that equal returns in another order tie.
    return sum((Fraction(value) for value in returns), Fraction(0)) / len(returns)


def _mean_return(records: Sequence[RolloutRecord]) -> float:
    return total(record.episode_return for record in records) / max(len(records), 1)


def _refuse_pair(pointer: str) -> NoReturn:
    raise DriftError(
        f"baseline and candidate are not paired: they differ at {pointer}",
        hint="the environment changed between the two collections, or ignores seeds",
        pointer=pointer,
    )
