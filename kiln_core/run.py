"""Server-owned runs: what is asked, and what their record says (``run.json`` v5).

These are the records; performing a run is the server's. A request is kept in its
normalised form, every default filled in, so that two requests mean the same exactly
when their canonical bytes are equal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_core import limits
from kiln_core.canonical import END, Record, Sha256
from kiln_core.contract import OpenEnvTrainingContract, PostEvalConfig
from kiln_core.discovery import EnvironmentIdentity
from kiln_core.evaluation import EnvironmentEvalConfig, EnvironmentEvalEvidence
from kiln_core.evidence import EnvironmentEvalOutcome, PolicyIdentity
from kiln_core.failure import OpenEnvRunFailure
from kiln_core.grpo import GrpoConfig
from kiln_core.receipt import RolloutStats, RunId
from kiln_core.records import Count, Seed
from kiln_core.training import TrainingDataProvenance, TrainingResponse

__all__ = [
    "OpenEnvRunList",
    "OpenEnvRunRequest",
    "OpenEnvRunStatus",
    "RunState",
]

RUN_SCHEMA: Final = "kiln.openenv-run.v5"
RUN_LIST_SCHEMA: Final = "kiln.openenv-run-list.v5"

Positive = Annotated[int, Meta(ge=1)]
Progress = Annotated[float, Meta(ge=0, le=1)]
CredentialId = Annotated[
    str, Meta(pattern="^(?!-$)[A-Za-z0-9_-]+" + END, min_length=1, max_length=64)
]
"""Handle of a configured credential; never the credential."""


class RunState(StrEnum):
    """Where a run is in its life."""

    QUEUED = "queued"
    DISCOVERING = "discovering"
    COLLECTING = "collecting"
    REVALIDATING = "revalidating"
    SUBMITTING = "submitting"
    TRAINING_QUEUED = "training_queued"
    TRAINING_RUNNING = "training_running"
    POST_EVALUATING = "post_evaluating"
    ENVIRONMENT_EVALUATING = "environment_evaluating"
    ROLLOUT_READY = "rollout_ready"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class OpenEnvRunRequest(Record, frozen=True, kw_only=True):
    """Body of ``POST /v1/openenv/runs``, normalised."""

    kind: Literal["rollout", "train"] = "rollout"
    idempotency_key: (
        Annotated[
            str, Meta(pattern="^[A-Za-z0-9._:-]+" + END, min_length=1, max_length=128)
        ]
        | UnsetType
    ) = UNSET
    """Opaque token of one experiment attempt; it is public, so never a secret."""
    environment_urls: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        Meta(min_length=1, max_length=limits.MAX_ENVIRONMENTS),
    ]
    credential_ids: Annotated[
        list[CredentialId | None], Meta(max_length=limits.MAX_ENVIRONMENTS)
    ] = msgspec.field(default_factory=list)
    """Empty, or one per URL; null for a public slot."""
    adapter: str = "base"
    groups: Annotated[int, Meta(ge=1, le=limits.MAX_GROUPS)] = 8
    group_size: Annotated[int, Meta(ge=1, le=limits.MAX_GROUP_SIZE)] = 4
    seed_start: Seed = 0
    reset_options: dict[str, Any] = msgspec.field(default_factory=dict)
    environment_reset_options: Annotated[
        list[dict[str, Any]], Meta(max_length=limits.MAX_ENVIRONMENTS)
    ] = msgspec.field(default_factory=list)
    """Empty, or one per URL."""
    max_steps: Annotated[int, Meta(ge=1, le=limits.MAX_STEPS)] = 8
    concurrency: Annotated[int, Meta(ge=1, le=limits.MAX_CONCURRENCY)] = 4
    max_action_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_ACTION_TOKENS)] = 256
    thinking_budget_tokens: (
        Annotated[int, Meta(ge=0, le=limits.MAX_ACTION_TOKENS - 1)] | UnsetType
    ) = UNSET
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    thinking: bool = True
    protocol_error_reward: float = -1.0
    max_recoverable_errors: Annotated[
        int, Meta(ge=0, le=limits.MAX_RECOVERABLE_ERRORS)
    ] = 3
    capacity_wait_seconds: Annotated[
        int, Meta(ge=1, le=limits.MAX_CAPACITY_WAIT_SECONDS)
    ] = 300
    output_adapter: str | UnsetType = UNSET
    """Required for a train run, forbidden for a rollout run."""
    training_config: GrpoConfig | UnsetType = UNSET
    auto_load: bool = True
    post_eval: PostEvalConfig | UnsetType = UNSET
    environment_eval: EnvironmentEvalConfig | UnsetType = UNSET

    def __post_init__(self) -> None:
        trains = {
            "output_adapter": self.output_adapter,
            "training_config": self.training_config,
            "post_eval": self.post_eval,
            "environment_eval": self.environment_eval,
        }
        if self.kind == "train":
            if self.output_adapter is UNSET:
                raise ValueError("a train run needs output_adapter")
            return
        for name, value in trains.items():
            if value is not UNSET:
                raise ValueError(f"a rollout run takes no {name}")


class RunAdmission(Record, frozen=True, kw_only=True):
    """A run's place in the first-in, first-out queue."""

    max_active_runs: Positive
    sequence: Positive
    """Order of admission, stable over restarts."""
    queue_position: Positive | UnsetType = UNSET
    """1 is next; absent once admitted."""
    admitted_unix_ms: Count | UnsetType = UNSET
    queue_wait_ms: Count | UnsetType = UNSET


class RunProgress(Record, frozen=True, kw_only=True):
    """How much of a collection is done."""

    groups_completed: Count
    groups_total: Count
    rollouts_completed: Count
    rollouts_total: Count


class RunArtifact(Record, frozen=True, kw_only=True):
    """One file of a run that can be downloaded."""

    kind: Annotated[str, Meta(min_length=1)]
    url: Annotated[str, Meta(pattern="^/v1/openenv/runs/")]
    sha256: Sha256
    bytes: Annotated[int, Meta(ge=0, le=limits.MAX_ARTIFACT_BYTES)]


class OpenEnvTrainingStatus(Record, frozen=True, kw_only=True):
    """The training job of a run."""

    job_id: str
    state: Literal["queued", "running", "completed", "failed"]
    progress: Progress
    current_loss: float | UnsetType = UNSET
    epoch: Count | UnsetType = UNSET
    adapter_path: str | UnsetType = UNSET
    training_data: TrainingDataProvenance | UnsetType = UNSET
    linked_eval_job_ids: list[str] = msgspec.field(default_factory=list)
    post_eval_verdict: str | UnsetType = UNSET
    gate_outcome: (
        Literal["promoted", "kept", "regression", "demoted", "inconclusive", "error"]
        | UnsetType
    ) = UNSET
    error: str | UnsetType = UNSET


class OpenEnvPostEvalStatus(Record, frozen=True, kw_only=True):
    """One static evaluation job of a run."""

    job_id: str
    suite_name: str
    state: Literal["queued", "running", "completed", "failed", "cancelled"]
    examples_completed: Count
    examples_total: Count
    headline_accuracy: Progress | UnsetType = UNSET
    error: str | UnsetType = UNSET


class EnvironmentEvalProgress(Record, frozen=True, kw_only=True):
    """How much of a paired evaluation is done."""

    state: Literal["baseline", "candidate", "completed"] | UnsetType = UNSET
    groups_completed: Count
    groups_total: Count
    rollouts_completed: Count
    rollouts_total: Count


class OpenEnvEnvironmentEvalStatus(Record, frozen=True, kw_only=True):
    """The paired evaluation of a run."""

    state: Literal[
        "pending",
        "skipped",
        "collecting_baseline",
        "collecting_candidate",
        "completed",
        "failed",
        "cancelled",
    ]
    seed_start: Seed
    groups: Annotated[int, Meta(ge=1, le=limits.MAX_GROUPS)]
    group_size: Annotated[int, Meta(ge=1, le=limits.MAX_GROUP_SIZE)]
    baseline: PolicyIdentity
    candidate: PolicyIdentity
    progress: EnvironmentEvalProgress
    baseline_stats: RolloutStats | UnsetType = UNSET
    candidate_stats: RolloutStats | UnsetType = UNSET
    evidence: EnvironmentEvalEvidence | UnsetType = UNSET
    outcome: EnvironmentEvalOutcome | UnsetType = UNSET
    verdict: str | UnsetType = UNSET


class OpenEnvRunStatus(Record, frozen=True, kw_only=True):
    """``kiln.openenv-run.v5``: the durable record of a run, and its public status."""

    schema: Literal["kiln.openenv-run.v5"]
    run_id: RunId
    kind: Literal["rollout", "train"]
    state: RunState
    request: OpenEnvRunRequest
    submitted_unix_ms: Count
    admission: RunAdmission
    finished_unix_ms: Count | UnsetType = UNSET
    progress: RunProgress
    rollout_stats: RolloutStats | UnsetType = UNSET
    environments: list[EnvironmentIdentity] | UnsetType = UNSET
    artifacts: list[RunArtifact] | UnsetType = UNSET
    training_job_id: str | UnsetType = UNSET
    training_contract: OpenEnvTrainingContract | UnsetType = UNSET
    training_submission: TrainingResponse | UnsetType = UNSET
    training: OpenEnvTrainingStatus | UnsetType = UNSET
    post_evaluations: list[OpenEnvPostEvalStatus] = msgspec.field(default_factory=list)
    warnings: list[str] | UnsetType = UNSET
    environment_evaluation: OpenEnvEnvironmentEvalStatus | UnsetType = UNSET
    failure: OpenEnvRunFailure | UnsetType = UNSET
    error: str | UnsetType = UNSET
    """The failure's message, for older clients."""

    def __post_init__(self) -> None:
        if self.failure is not UNSET and self.state is not RunState.FAILED:
            raise ValueError("only a failed run carries a failure")


class OpenEnvRunList(Record, frozen=True, kw_only=True):
    """``kiln.openenv-run-list.v5``: the tracked runs, newest first."""

    schema: Literal["kiln.openenv-run-list.v5"]
    runs: list[OpenEnvRunStatus]
