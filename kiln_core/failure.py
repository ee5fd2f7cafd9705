"""``kiln.openenv-run-failure.v1``: why a run failed, for programs.

A failure names a closed stage and a closed code; its ``retryable`` says whether a new
run may succeed once the hint was followed, never that this one resumes.

An error is classified by its class, along its method resolution order, and where it has
causes by theirs: invalid evidence first, then a capacity wait that expired, then the
first error whose class says what failed, else what the stage suggests. What a message
may not say, it does not: user information and queries of URLs, bearer tokens, and the
words of an exception that is not Kiln's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from kiln_core import errors, limits
from kiln_core.canonical import END, Record
from kiln_core.errors import KilnError

__all__ = [
    "FailureCode",
    "FailureStage",
    "OpenEnvRunFailure",
    "classify_failure",
    "run_failure",
    "shortened",
]

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


RETRYABLE_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""

CODES: Final[dict[type[KilnError], FailureCode | None]] = {
    errors.KilnError: None,
    errors.UsageError: FailureCode.PERSISTED_CONTRACT_INVALID,
    errors.OutputExists: FailureCode.ARTIFACT_PUBLICATION_FAILED,
    errors.OutputUnwritable: FailureCode.ARTIFACT_PUBLICATION_FAILED,
    errors.ProtocolError: FailureCode.ENVIRONMENT_PROTOCOL_ERROR,
    errors.LocalProtocolError: FailureCode.INTERNAL_ERROR,
    errors.EnvironmentFault: FailureCode.ENVIRONMENT_PROTOCOL_ERROR,
    errors.CapacityExhausted: FailureCode.ENVIRONMENT_CAPACITY_EXHAUSTED,
    errors.EpisodeUnfit: FailureCode.COLLECTION_FAILED,
    errors.TransportError: FailureCode.ENVIRONMENT_UNAVAILABLE,
    errors.CredentialReflected: FailureCode.ENVIRONMENT_PROTOCOL_ERROR,
    errors.CapacityAtUpgrade: FailureCode.ENVIRONMENT_CAPACITY_EXHAUSTED,
    errors.IdentityDrift: FailureCode.ENVIRONMENT_IDENTITY_CHANGED,
    errors.TrainingError: FailureCode.TRAINING_FAILED,
    errors.TrainingEvidenceInvalid: FailureCode.TRAINING_EVIDENCE_INVALID,
    errors.RunNotRecorded: FailureCode.RUN_ADMISSION_FAILED,
}
"""What failed, by class; the nearest ancestor counts, and None says nothing."""

COLLECTING: Final = frozenset(
    {
        FailureStage.DISCOVERY,
        FailureStage.COLLECTION,
        FailureStage.IDENTITY_VERIFICATION,
    }
)
"""Stages where an error of ours that says nothing else is one of collecting."""

FALLBACKS: Final = {
    FailureStage.RESTORATION: FailureCode.RUN_INTERRUPTED,
    FailureStage.ADMISSION: FailureCode.RUN_ADMISSION_FAILED,
    FailureStage.DISCOVERY: FailureCode.ENVIRONMENT_UNAVAILABLE,
    FailureStage.COLLECTION: FailureCode.COLLECTION_FAILED,
    FailureStage.IDENTITY_VERIFICATION: FailureCode.ENVIRONMENT_UNAVAILABLE,
    FailureStage.ARTIFACT_PUBLICATION: FailureCode.ARTIFACT_PUBLICATION_FAILED,
    FailureStage.TRAINING_SUBMISSION: FailureCode.TRAINING_SUBMISSION_FAILED,
    FailureStage.TRAINING: FailureCode.TRAINING_FAILED,
    FailureStage.POST_EVALUATION: FailureCode.POST_EVALUATION_FAILED,
    FailureStage.ENVIRONMENT_EVALUATION: FailureCode.ENVIRONMENT_EVALUATION_FAILED,
    FailureStage.ORCHESTRATION: FailureCode.INTERNAL_ERROR,
}
"""What failed where the error does not say."""

HINTS: Final = {
    FailureCode.RUN_ADMISSION_FAILED: "start a new run with a new key",
    FailureCode.RUN_INTERRUPTED: (
        "the server was restarted; start a new run with a new key"
    ),
    FailureCode.PERSISTED_CONTRACT_INVALID: (
        "correct the request, then start a new run with a new key"
    ),
    FailureCode.ENVIRONMENT_UNAVAILABLE: (
        "check that the environment is up and reachable from the server"
    ),
    FailureCode.ENVIRONMENT_CAPACITY_EXHAUSTED: (
        "lower concurrency, raise capacity_wait_seconds, or free sessions of the "
        "environment"
    ),
    FailureCode.ENVIRONMENT_PROTOCOL_ERROR: "look at the log of the environment",
    FailureCode.ENVIRONMENT_IDENTITY_CHANGED: (
        "pin or stabilise the environment deployment, inspect it and start anew"
    ),
    FailureCode.COLLECTION_FAILED: (
        "follow the message, then start a new run with a new key"
    ),
    FailureCode.ARTIFACT_PUBLICATION_FAILED: (
        "check space and permissions of the adapter directory"
    ),
    FailureCode.TRAINING_SUBMISSION_FAILED: (
        "the bundle is kept: submit it with 'kiln train grpo', or start a new run"
    ),
    FailureCode.TRAINING_FAILED: "look at the training job and its configuration",
    FailureCode.TRAINING_EVIDENCE_INVALID: (
        "do not trust this adapter; look at the receipt and the server's log"
    ),
    FailureCode.POST_EVALUATION_FAILED: "look at the evaluation job and its suite",
    FailureCode.ENVIRONMENT_EVALUATION_FAILED: (
        "the adapter was trained and is not promoted; evaluate it again"
    ),
    FailureCode.INTERNAL_ERROR: "look at the server's log and report it",
}
"""What to do, where the error gives no hint of its own."""

CAPACITY_REACHED: Final = "CAPACITY_REACHED"
CUT: Final = "..."
WIRE_CODE: Final = re.compile("[A-Z_]+")
URL_USER: Final = re.compile(r"""(://)[^\s"'<>]*@""")
URL_QUERY: Final = re.compile(r"""(\w+://[^\s?#"'<>]*)[?#][^\s"'<>]*""")
BEARER: Final = re.compile(r"(?i)(bearer\s+)[^\s\"',;]+")


def run_failure(
    code: FailureCode,
    stage: FailureStage,
    message: str,
    now_ms: int,
    **details: Any,
) -> OpenEnvRunFailure:
    """Return the failure of something that raised no error.

    Args:
        code: Any but ``environment_unavailable``, whose retryability depends.
        stage: Where.
        message: Cut to 4 KiB.
        now_ms: When, in Unix milliseconds.
        **details: ``hint``, where the one of the code does not do.
    """
    return OpenEnvRunFailure(
        schema=FAILURE_SCHEMA,
        code=code,
        stage=stage,
        retryable=RETRYABLE[code],
        message=shortened(message),
        occurred_unix_ms=max(now_ms, 0),
        **{"hint": HINTS[code], **details},
    )


def classify_failure(
    error: BaseException,
    stage: FailureStage,
    now_ms: int,
    secrets: Sequence[str] = (),
) -> OpenEnvRunFailure:
    """Say, for programs, why a run failed.

    Args:
        error: What ended it, causes included.
        stage: Where it was.
        now_ms: When, in Unix milliseconds.
        secrets: Tokens the run was configured with; removed from every text.
    """
    chain = list(_chain(error))
    code, source = _deciding(chain, stage)
    facts = {} if source is None else _evidence(source, code)
    told = next((link for link in chain if isinstance(link, KilnError)), None)
    hint = next((link.hint for link in (source, told) if link and link.hint), "")
    status = facts.get("http_status")
    return OpenEnvRunFailure(
        schema=FAILURE_SCHEMA,
        code=code,
        stage=stage,
        retryable=RETRYABLE.get(code, status is None or status in RETRYABLE_STATUSES),
        message=shortened(scrubbed(_message(told, error), secrets)),
        hint=shortened(scrubbed(hint, secrets)) or HINTS[code],
        occurred_unix_ms=max(now_ms, 0),
        **facts,
    )


def shortened(text: str, limit_bytes: int = limits.MAX_FAILURE_MESSAGE_BYTES) -> str:
    """Cut text to a number of UTF-8 bytes, between characters, and mark the cut."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= limit_bytes:
        return data.decode()
    return data[: limit_bytes - len(CUT)].decode(errors="ignore") + CUT


def scrubbed(text: str, secrets: Sequence[str] = ()) -> str:
    """Return text without tokens and without the private parts of URLs."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "[removed]")
    text = URL_USER.sub(r"\1", text)
    text = URL_QUERY.sub(r"\1", text)
    return BEARER.sub(r"\1[removed]", text)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what a group of it holds, and every cause; each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
        if link.__cause__ is not None:
            waiting.append(link.__cause__)


def _deciding(
    chain: Sequence[BaseException], stage: FailureStage
) -> tuple[FailureCode, KilnError | None]:
    """Return the code, and the error that says so, None for one that does not say."""
    known = [(_code(link), link) for link in chain if isinstance(link, KilnError)]
    for first in (
        FailureCode.TRAINING_EVIDENCE_INVALID,
        FailureCode.ENVIRONMENT_CAPACITY_EXHAUSTED,
    ):
        for code, link in known:
            if code is first:
                return code, link
    for code, link in known:
        if code is not None:
            return code, link
    if known and stage in COLLECTING:
        faulty = isinstance(known[0][1], errors.ArtifactError)
        return (
            # the only bytes at rest of a collection are the answers of its peers
            FailureCode.ENVIRONMENT_PROTOCOL_ERROR
            if faulty
            else FailureCode.COLLECTION_FAILED
        ), None
    return FALLBACKS[stage], None


def _code(error: KilnError) -> FailureCode | None:
    """Return what the class of an error says failed."""
    if (
        isinstance(error, (errors.EnvironmentFault, errors.ProtocolError))
        and error.details.get("protocol_code") == CAPACITY_REACHED
    ):
        return FailureCode.ENVIRONMENT_CAPACITY_EXHAUSTED
    return next(CODES[t] for t in type(error).__mro__ if t in CODES)


def _evidence(source: KilnError, code: FailureCode) -> dict[str, Any]:
    """Return wire code and HTTP status, where an environment gave them."""
    if not code.value.startswith("environment_"):
        return {}
    facts: dict[str, Any] = {}
    wire, status = (
        source.details.get("protocol_code"),
        source.details.get("http_status"),
    )
    if isinstance(wire, str) and WIRE_CODE.fullmatch(wire):
        facts["protocol_code"] = wire
    if isinstance(status, int) and 0 <= status <= 65_535:
        facts["http_status"] = status
    return facts


def _message(told: KilnError | None, error: BaseException) -> str:
    """Return what may be said: words of ours, of anything else only its class."""
    if told is not None:
        return told.message
    return f"failed unexpectedly ({type(error).__name__}); the server's log has more"
