"""The training endpoints' wire form, shared by the server and its clients."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_core.canonical import Record, Sha256, compact, digest
from kiln_core.contract import PostEvalConfig
from kiln_core.errors import InvalidRecord
from kiln_core.grpo import GrpoConfig
from kiln_core.lineage import CorpusLineage, OpenEnvTrainingData
from kiln_core.records import AgenticGroup

__all__ = [
    "GrpoRequest",
    "TrainingDataProvenance",
    "TrainingJobDetail",
    "TrainingResponse",
    "TrainingStatus",
    "admit_corpus",
]

TrainingState = Literal["queued", "running", "completed", "failed"]


class GrpoRequest(Record, frozen=True, kw_only=True):
    """Body of ``POST /v1/train/grpo``."""

    groups: Annotated[list[AgenticGroup], Meta(min_length=1)]
    config: GrpoConfig = msgspec.field(default_factory=GrpoConfig)
    post_eval: PostEvalConfig | UnsetType = UNSET


class TrainingResponse(Record, frozen=True, kw_only=True):
    """Answer of a submission."""

    job_id: str
    state: Literal["queued"]
    effective_seed: str
    """Decimal text, so that no reader rounds it."""
    message: str


class TrainingDataProvenance(Record, frozen=True, kw_only=True):
    """What a job trains on."""

    source: str
    admitted_corpus_sha256: Sha256
    """Digest of the canonical lines of the groups, in order."""
    rows: int
    openenv: OpenEnvTrainingData | UnsetType = UNSET


class LossPoint(Record, frozen=True, kw_only=True):
    """One optimizer step of a job."""

    epoch: int
    progress: float
    loss: float
    mean_reward: float
    elapsed_secs: float


class TrainingStatus(Record, frozen=True, kw_only=True):
    """A job as ``GET /v1/train/status/{job_id}`` tells it."""

    job_id: str
    state: TrainingState
    progress: float
    current_loss: float | None = None
    adapter_name: str
    effective_seed: str
    started_at: int | None = None
    """Unix milliseconds."""
    elapsed_secs: float = 0.0
    submitted_unix_ms: int
    finished_unix_ms: int | None = None
    job_type: Literal["grpo"] = "grpo"
    training_data: TrainingDataProvenance
    error: str | None = None


class TrainingJobDetail(Record, frozen=True, kw_only=True):
    """A job as ``GET /v1/train/jobs/{job_id}`` tells it."""

    status: TrainingStatus
    epoch: int = 0
    step: int = 0
    steps: int = 0
    adapter_path: str | None = None
    """Folder name of the adapter, relative to the adapter directory."""
    adapter_sha256: Sha256 | None = None
    auto_load: bool = True
    loaded: bool = False
    loss_history: list[LossPoint] = msgspec.field(default_factory=list)
    logprob_agreement: float | None = None
    """Largest |ratio - 1| between recorded and recomputed probabilities."""
    warnings: list[str] = msgspec.field(default_factory=list)
    config: GrpoConfig


class TrainingQueue(Record, frozen=True, kw_only=True):
    """Answer of ``GET /v1/train/status``: every tracked job, newest first."""

    jobs: list[TrainingStatus]


def admit_corpus(groups: list[AgenticGroup], source: str) -> TrainingDataProvenance:
    """Check a corpus and say exactly what it is.

    Args:
        groups: In order.
        source: Where they came from, such as ``inline``.

    Raises:
        InvalidRecord: Groups mix OpenEnv and ordinary rollouts or contradict each
            other.
    """
    openenv = [c.openenv is not UNSET for group in groups for c in group.completions]
    lineage: OpenEnvTrainingData | UnsetType = UNSET
    if any(openenv):
        if not all(openenv):
            raise InvalidRecord("the corpus mixes OpenEnv and ordinary rollouts")
        corpus = CorpusLineage()
        for group in groups:
            corpus.add(group)
        lineage = corpus.record()
    return TrainingDataProvenance(
        source=source,
        admitted_corpus_sha256=corpus_digest(groups),
        rows=len(groups),
        openenv=lineage,
    )


def corpus_digest(groups: list[AgenticGroup]) -> Sha256:
    """Return the digest of the canonical lines of groups, in order."""
    return digest(b"".join(compact(group) + b"\n" for group in groups))
