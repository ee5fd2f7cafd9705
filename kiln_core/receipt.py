"""The rollout summary ``kiln.openenv-rollout-summary.v5`` and its statistics.

The summary is the commit mark of a bundle: it binds dataset and replay manifest by
digest and size, names every control, and repeats each rollout's outcome. The reports
of verification and live replay stand here too, since they are read beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from kiln_core import limits
from kiln_core.canonical import END, JsonValue, Record, Sha256, total
from kiln_core.contract import OpenEnvTrainingContract
from kiln_core.discovery import EnvironmentInspection
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.records import Count, EpisodeTermination, Seed, Steps, check_termination

__all__ = [
    "BundleContradiction",
    "OpenEnvArtifactDownloadReceipt",
    "OpenEnvRolloutSummary",
    "OpenEnvTrainingSelection",
    "ReplayRunReport",
    "RolloutRecord",
    "RolloutStats",
    "VerificationOutcome",
    "VerificationReport",
    "rollout_stats",
]

SUMMARY_SCHEMA: Final = "kiln.openenv-rollout-summary.v5"
VERIFICATION_SCHEMA: Final = "kiln.openenv-verification.v1"
OUTCOME_SCHEMA: Final = "kiln.openenv-verification-outcome.v1"
REPLAY_RUN_SCHEMA: Final = "kiln.openenv-replay-run.v1"

Text = Annotated[str, Meta(min_length=1)]
ArtifactBytes = Annotated[int, Meta(ge=1, le=limits.MAX_ARTIFACT_BYTES)]
SelectedCount = Annotated[int, Meta(ge=0, le=limits.MAX_ROLLOUTS)]
Milliseconds = Annotated[float, Meta(ge=0)]
RunId = Annotated[
    str,
    Meta(
        pattern="^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}"
        "-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}" + END
    ),
]
"""A UUID (RFC 9562) as text."""


class RolloutRecord(Record, frozen=True, kw_only=True):
    """One rollout's outcome, as the summary repeats it."""

    group_index: Count
    candidate_index: Count
    environment_name: Text
    environment_url: Text
    seed: Seed
    steps: Steps
    episode_return: float
    terminal_done: bool
    termination: EpisodeTermination
    protocol_error_code: Text | UnsetType = UNSET
    recoverable_protocol_errors: Count
    capacity_retries: Count
    model_tokens: Count
    model_latency_ms: Milliseconds

    def __post_init__(self) -> None:
        check_termination(
            self.termination, self.terminal_done, self.protocol_error_code
        )


class RolloutStats(Record, frozen=True, kw_only=True):
    """Totals over all rollouts of a collection."""

    mean_episode_return: float
    min_episode_return: float | None
    max_episode_return: float | None
    done_count: Count
    max_steps_count: Count
    invalid_model_action_count: Count
    protocol_error_count: Count
    recoverable_protocol_error_count: Count
    capacity_retry_count: Count
    total_environment_steps: Count
    total_model_tokens: Count
    """Prompt and completion tokens."""
    mean_model_latency_ms: Milliseconds
    """Mean over episodes of an episode's total."""


class OpenEnvTrainingSelection(Record, frozen=True, kw_only=True):
    """Which part of the corpus carries a gradient and was submitted."""

    groups_submitted: SelectedCount
    rollouts_submitted: SelectedCount
    no_output_rollouts_discarded: SelectedCount
    no_usable_output_groups_skipped: SelectedCount
    no_reward_gradient_groups_skipped: SelectedCount
    warnings: list[str] | UnsetType = UNSET


class OpenEnvRolloutSummary(Record, frozen=True, kw_only=True):
    """``openenv.rollout-summary.json``, version 5."""

    schema: Literal["kiln.openenv-rollout-summary.v5"]
    kiln_url: Text
    """Where the policy was asked, or ``in-process``."""
    adapter: str | None
    """Behaviour adapter; null for the base model."""
    adapter_label: Text
    behavior_policy: BehaviorPolicyIdentity
    environments: Annotated[
        list[EnvironmentInspection],
        Meta(min_length=1, max_length=limits.MAX_ENVIRONMENTS),
    ]
    groups: Annotated[int, Meta(ge=1, le=limits.MAX_GROUPS)]
    group_size: Annotated[int, Meta(ge=1, le=limits.MAX_GROUP_SIZE)]
    rollout_count: Annotated[int, Meta(ge=1, le=limits.MAX_ROLLOUTS)]
    seed_start: Seed
    max_steps: Annotated[int, Meta(ge=1, le=limits.MAX_STEPS)]
    concurrency: Annotated[int, Meta(ge=1, le=limits.MAX_CONCURRENCY)]
    max_action_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_ACTION_TOKENS)]
    thinking_budget_tokens: (
        Annotated[int, Meta(ge=0, le=limits.MAX_ACTION_TOKENS - 1)] | UnsetType
    ) = UNSET
    temperature: Annotated[float, Meta(ge=0)]
    thinking: bool
    """The effective value: true only where the model has a thinking mode."""
    protocol_error_reward: float
    max_recoverable_errors: Annotated[int, Meta(ge=0, le=limits.MAX_RECOVERABLE_ERRORS)]
    capacity_wait_seconds: Annotated[
        int, Meta(ge=1, le=limits.MAX_CAPACITY_WAIT_SECONDS)
    ]
    reset_plan_sha256: Sha256
    """Digest of the seed-free reset objects, one per environment, in order."""
    output_path: Text
    replay_output_path: Text
    summary_output_path: Text
    dataset_sha256: Sha256
    dataset_bytes: ArtifactBytes
    replay_sha256: Sha256
    replay_bytes: ArtifactBytes
    stats: RolloutStats
    rollouts: Annotated[list[RolloutRecord], Meta(min_length=1)]
    training_selection: OpenEnvTrainingSelection | UnsetType = UNSET
    training_contract: OpenEnvTrainingContract | UnsetType = UNSET
    training_submission: dict[str, Any] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.training_submission is not UNSET and self.training_contract is UNSET:
            raise ValueError("training_submission needs training_contract")


class VerificationReport(Record, frozen=True, kw_only=True):
    """``kiln.openenv-verification.v1``: exists only on success."""

    schema: Literal["kiln.openenv-verification.v1"]
    summary_path: Text
    dataset_path: Text
    replay_path: Text
    dataset_sha256: Sha256
    replay_sha256: Sha256
    groups: Annotated[int, Meta(ge=1)]
    rollouts: Annotated[int, Meta(ge=1)]
    environment_exchanges: Count


class BundleContradiction(Record, frozen=True, kw_only=True):
    """Where a bundle first contradicted itself."""

    check: str
    """Which check failed."""
    file: str
    line: int | None
    """1-based line of the dataset."""
    pointer: str | None
    """JSON Pointer in the file, or in the line."""
    message: str
    expected: JsonValue = None
    found: JsonValue = None


class VerificationOutcome(Record, frozen=True, kw_only=True):
    """``kiln.openenv-verification-outcome.v1``: what verification found, either way."""

    schema: Literal["kiln.openenv-verification-outcome.v1"]
    report: VerificationReport | None
    """Exists only on success."""
    contradiction: BundleContradiction | None
    summary_schema: str | None
    """Version of the summary; the rest is null when the bundle does not verify."""
    traced_rollouts: Count | None
    """Rollouts that carry token ids."""
    retried_rollouts: Count | None
    """Rollouts that needed more than one attempt."""


class ReplayRunReport(Record, frozen=True, kw_only=True):
    """``kiln.openenv-replay-run.v1``: exists only on exact success."""

    schema: Literal["kiln.openenv-replay-run.v1"]
    replay_sha256: Sha256
    environments: Annotated[int, Meta(ge=1)]
    groups: Annotated[int, Meta(ge=1)]
    rollouts: Annotated[int, Meta(ge=1)]
    environment_exchanges: Count
    capacity_retries: Count
    environment_prefix_only_rollouts: Count
    """Candidates whose last reply was no action and so was never sent."""


class OpenEnvArtifactDownloadReceipt(Record, frozen=True, kw_only=True):
    """``kiln.openenv-artifact-download.v1``: one artifact of a run, saved and checked.

    It names no server, whose URL may hold credentials.
    """

    schema: Literal["kiln.openenv-artifact-download.v1"]
    run_id: RunId
    kind: Text
    source_url: Annotated[
        str, Meta(pattern=r"^/v1/openenv/runs/[0-9a-fA-F-]{36}/artifacts/[^/?#]+$")
    ]
    output_path: Text
    sha256: Sha256
    bytes: Annotated[int, Meta(ge=0, le=limits.MAX_ARTIFACT_BYTES)]


def rollout_stats(rollouts: Sequence[RolloutRecord]) -> RolloutStats:
    """Total a collection; sums run left to right so that they can be repeated."""
    returns = [rollout.episode_return for rollout in rollouts]
    endings = [rollout.termination for rollout in rollouts]
    episodes = max(len(rollouts), 1)
    return RolloutStats(
        mean_episode_return=total(returns) / episodes,
        min_episode_return=min(returns, default=None),
        max_episode_return=max(returns, default=None),
        done_count=endings.count(EpisodeTermination.DONE),
        max_steps_count=endings.count(EpisodeTermination.MAX_STEPS),
        invalid_model_action_count=endings.count(
            EpisodeTermination.INVALID_MODEL_ACTION
        ),
        protocol_error_count=endings.count(EpisodeTermination.PROTOCOL_ERROR),
        recoverable_protocol_error_count=sum(
            rollout.recoverable_protocol_errors for rollout in rollouts
        ),
        capacity_retry_count=sum(rollout.capacity_retries for rollout in rollouts),
        total_environment_steps=sum(rollout.steps for rollout in rollouts),
        total_model_tokens=sum(rollout.model_tokens for rollout in rollouts),
        mean_model_latency_ms=total(rollout.model_latency_ms for rollout in rollouts)
        / episodes,
    )
