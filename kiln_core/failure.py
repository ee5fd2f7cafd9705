"""``kiln.openenv-run-failure.v1``: why a run failed, for programs.

A failure names a closed stage and a closed code; its ``retryable`` says whether a new
run may succeed once the hint was followed, never that this one resumes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from kiln_core import limits
from kiln_core.canonical import END, Record

__all__ = ["FailureCode", "FailureStage", "OpenEnvRunFailure"]

FAILURE_SCHEMA: Final = "kiln.openenv-run-failure.v1"


class FailureStage(StrEnum):
    """Where in its life a run failed."""

    RESTORATION = "restoration"
    ADMISSION = "admission"
    DISCOVERY = "discovery"
    COLLECTION = "collection"
    IDENTITY_VERIFICATION = "identity_verification"
    ARTIFACT_PUBLICATION = "artifact_publication"
    TRAINING_SUBMISSION = "training_submission"
    TRAINING = "training"
    POST_EVALUATION = "post_evaluation"
    ENVIRONMENT_EVALUATION = "environment_evaluation"
    ORCHESTRATION = "orchestration"


class FailureCode(StrEnum):
    """What failed."""

    RUN_ADMISSION_FAILED = "run_admission_failed"
    RUN_INTERRUPTED = "run_interrupted"
    PERSISTED_CONTRACT_INVALID = "persisted_contract_invalid"
    ENVIRONMENT_UNAVAILABLE = "environment_unavailable"
    ENVIRONMENT_CAPACITY_EXHAUSTED = "environment_capacity_exhausted"
    ENVIRONMENT_PROTOCOL_ERROR = "environment_protocol_error"
    ENVIRONMENT_IDENTITY_CHANGED = "environment_identity_changed"
    COLLECTION_FAILED = "collection_failed"
    ARTIFACT_PUBLICATION_FAILED = "artifact_publication_failed"
    TRAINING_SUBMISSION_FAILED = "training_submission_failed"
    TRAINING_FAILED = "training_failed"
    TRAINING_EVIDENCE_INVALID = "training_evidence_invalid"
    POST_EVALUATION_FAILED = "post_evaluation_failed"
    ENVIRONMENT_EVALUATION_FAILED = "environment_evaluation_failed"
    INTERNAL_ERROR = "internal_error"


RETRYABLE: Final = {
    FailureCode.RUN_ADMISSION_FAILED: True,
    FailureCode.RUN_INTERRUPTED: True,
    FailureCode.PERSISTED_CONTRACT_INVALID: False,
    FailureCode.ENVIRONMENT_CAPACITY_EXHAUSTED: True,
    FailureCode.ENVIRONMENT_PROTOCOL_ERROR: False,
    FailureCode.ENVIRONMENT_IDENTITY_CHANGED: True,
    FailureCode.COLLECTION_FAILED: True,
    FailureCode.ARTIFACT_PUBLICATION_FAILED: False,
    FailureCode.TRAINING_SUBMISSION_FAILED: True,
    FailureCode.TRAINING_FAILED: False,
    FailureCode.TRAINING_EVIDENCE_INVALID: False,
    FailureCode.POST_EVALUATION_FAILED: False,
    FailureCode.ENVIRONMENT_EVALUATION_FAILED: True,
    FailureCode.INTERNAL_ERROR: False,
}
"""Whether a code is retryable; ``environment_unavailable`` depends on what happened."""


class OpenEnvRunFailure(Record, frozen=True, kw_only=True):
    """Why a run failed."""

    schema: Literal["kiln.openenv-run-failure.v1"]
    code: FailureCode
    stage: FailureStage
    retryable: bool
    """Whether a new run, with a new key, may succeed after the hint."""
    message: str
    hint: str
    occurred_unix_ms: Annotated[int, Meta(ge=0)]
    protocol_code: Annotated[str, Meta(pattern="^[A-Z_]+" + END)] | UnsetType = UNSET
    """Wire code, where the environment gave one."""
    http_status: Annotated[int, Meta(ge=0, le=65_535)] | UnsetType = UNSET
    """Status, where an HTTP peer gave one."""

    def __post_init__(self) -> None:
        if len(self.message.encode()) > limits.MAX_FAILURE_MESSAGE_BYTES:
            raise ValueError("message is over 4 KiB")
        if RETRYABLE.get(self.code, self.retryable) != self.retryable:
            raise ValueError(f"retryable contradicts code {self.code}")
