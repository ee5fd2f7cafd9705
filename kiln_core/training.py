"""The training endpoints' wire form, shared by the server and its clients."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_core.canonical import (
    JsonValue,
    Record,
    Sha256,
    compact,
    digest,
    printable,
    split_path,
)
from kiln_core.contract import PostEvalConfig
from kiln_core.errors import InvalidRecord, UsageError
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
    "read_grpo_request",
]

TrainingState = Literal["queued", "running", "completed", "failed"]


class GrpoRequest(Record, frozen=True, kw_only=True):
    """Body of ``POST /v1/train/grpo``."""

    groups: Annotated[list[AgenticGroup], Meta(min_length=1)]
    config: GrpoConfig = msgspec.field(default_factory=GrpoConfig)
    post_eval: PostEvalConfig | UnsetType = UNSET


def read_grpo_request(value: JsonValue) -> GrpoRequest:
    """Turn a decoded body into a request; other clients' names become ours.

    ``agentic_groups`` stands for ``groups``, ``rollouts`` for ``completions``; message
    content may be null or a list of text parts; ``kind`` of a segment is ``context``
    where it is left out.

    Raises:
        UsageError: It is no such request; the message names the member.
    """
    if isinstance(value, dict):
        value = _renamed(value, "agentic_groups", "groups")
        if isinstance(value.get("groups"), list):
            value["groups"] = [_read_group(group) for group in value["groups"]]
        config = value.get("config")
        if isinstance(config, dict):
            renamed = _renamed(config, "reference_policy", "kl_reference_policy")
            value["config"] = renamed
    try:
        return msgspec.convert(value, GrpoRequest)
    except msgspec.ValidationError as error:
        reason, pointer = split_path(str(error))
        raise UsageError(
            f"invalid request at {pointer or 'its root'}: {printable(reason)}",
            pointer=pointer,
        ) from error


def _renamed(value: dict[str, JsonValue], alias: str, name: str) -> dict[str, Any]:
    """Return a copy with an alias under its own name.

    Raises:
        UsageError: Both are given.
    """
    if alias in value and name in value:
        raise UsageError(f"{alias} is another name of {name}: give one of them")
    return {name if key == alias else key: member for key, member in value.items()}


def _read_group(group: JsonValue) -> JsonValue:
    if not isinstance(group, dict):
        return group
    group = _renamed(group, "rollouts", "completions")
    if isinstance(group.get("messages"), list):
        group["messages"] = [_read_message(message) for message in group["messages"]]
    if isinstance(group.get("completions"), list):
        group["completions"] = [_read_rollout(item) for item in group["completions"]]
    return group


def _read_message(message: JsonValue) -> JsonValue:
    if not isinstance(message, dict) or "content" not in message:
        return message
    content = message["content"]
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) != len(content) or not all(isinstance(t, str) for t in texts):
            raise UsageError("only text parts are supported in a message")
        content = "".join(str(text) for text in texts)
    return {**message, "content": "" if content is None else content}


def _read_rollout(rollout: JsonValue) -> JsonValue:
    segments = rollout.get("trajectory") if isinstance(rollout, dict) else None
    if not isinstance(rollout, dict) or not isinstance(segments, list):
        return rollout
    filled = [
        {"kind": "context", **segment} if isinstance(segment, dict) else segment
        for segment in segments
    ]
    return {**rollout, "trajectory": filled}


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
    kl: float
    """Mean log ratio to the reference, in nats."""
    entropy: float
    """Mean entropy of the sampled distributions, in nats."""
    clip_fraction: float
    agreement: float
    """Largest |ratio - 1| between recorded and recomputed probabilities, so far."""
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
