"""The error tree of Kiln, drawn by whose fault a failure is.

::

    KilnError
      UsageError                 the caller: wrong value, wrong combination
        MissingExtra             an optional part of Kiln is not installed
        OutputExists             a file would be overwritten
        FileUnreadable           a named file is missing or cannot be read
        OutputUnwritable         a result cannot be written where it should go
        InvalidRunRequest        a run was asked for that cannot be
          InvalidRunUrl          an environment URL of it
          InvalidRunCredential   its credential handles
          InvalidIdempotencyKey  its idempotency key
          InvalidEnvironmentEval  its paired evaluation
        RunNotFound              no such run is retained
        AdapterNotFound          no such adapter is loaded
      ArtifactError              bytes at rest do not say what they must
        MalformedJson            not one strict JSON document
        InvalidRecord            JSON, but not the record it claims to be
        IrregularFile            a symbolic link, a device, or too large
        InvalidBundle            a verification check failed
      ProtocolError              the OpenEnv session
        LocalProtocolError       we broke the order; a bug of the driver
        RemoteProtocolError      the peer did; the session is poisoned
      EnvironmentFault           the environment said so, by a typed wire error
        CapacityExhausted        no session became free in time
        SessionRefused           the environment ended a session before an episode
        EpisodeUnfit             it cannot be used for groups (done at reset, ...)
        InvalidActionSchema      its action schema cannot be compiled safely
        TaskApiUnsupported       it has no task provider, or is older than that
      TransportError             the edge: refused, timeout, redirect, size
        HttpStatusError          an HTTP answer that is not the expected one
        CredentialReflected      a peer sent the configured bearer token back
        SessionLost              a WebSocket died in the middle of an episode
        CapacityAtUpgrade        the upgrade was refused: the server is full
      DriftError                 what was captured is not what is there now
        IdentityDrift            discovery changed
        ReplayDrift              an exchange changed
        PolicyDrift              the model behind the policy changed
      LimitError                 a bound of ``kiln_core.limits`` would be crossed
        ContextOverflow          a prompt does not fit the model
      PolicyError                the model or its server failed to answer
        ServerUnreachable        no Kiln server answers at that URL
      AdmissionError             a server refused work
        Conflict                 the state does not allow it
          IdempotencyConflict    a key is bound to another request
          RunNotCancellable      a run has ended already
        CapacityFull             retry later
          RunCapacityFull        no more runs can be tracked
          QueueFull              as much waits already as may wait
        ServerRefusal            a Kiln server answered a request with an error
      TrainingError              a training job failed
        TrainingEvidenceInvalid  what it left behind contradicts itself
      RunNotRecorded             the record of a run cannot be written

The core knows neither HTTP statuses nor exit codes: each frontend holds one table
and looks a class up along its method resolution order.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

__all__ = [
    "AdapterNotFound",
    "AdmissionError",
    "ArtifactError",
    "CapacityAtUpgrade",
    "CapacityExhausted",
    "CapacityFull",
    "Conflict",
    "ContextOverflow",
    "CredentialReflected",
    "DriftError",
    "EnvironmentFault",
    "EpisodeUnfit",
    "FileUnreadable",
    "HttpStatusError",
    "IdempotencyConflict",
    "IdentityDrift",
    "InvalidActionSchema",
    "InvalidBundle",
    "InvalidEnvironmentEval",
    "InvalidIdempotencyKey",
    "InvalidRecord",
    "InvalidRunCredential",
    "InvalidRunRequest",
    "InvalidRunUrl",
    "IrregularFile",
    "KilnError",
    "LimitError",
    "LocalProtocolError",
    "MalformedJson",
    "MissingExtra",
    "OutputExists",
    "OutputUnwritable",
    "PolicyDrift",
    "PolicyError",
    "ProtocolError",
    "QueueFull",
    "RemoteProtocolError",
    "ReplayDrift",
    "RunCapacityFull",
    "RunNotCancellable",
    "RunNotFound",
    "RunNotRecorded",
    "ServerRefusal",
    "ServerUnreachable",
    "SessionLost",
    "SessionRefused",
    "TaskApiUnsupported",
    "TrainingError",
    "TrainingEvidenceInvalid",
    "TransportError",
    "UsageError",
]


class KilnError(Exception):
    """Root of everything Kiln raises on purpose.

    Attributes:
        code: Stable lower-case identifier; one per class.
        retryable: Whether the same request may succeed later without a change.
        hint: What to do about it, one sentence, possibly empty.
        details: JSON-ready facts: ``file``, ``pointer``, ``expected`` and so on.
    """

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""

    def __init__(
        self, message: str, *, hint: str | None = None, **details: Any
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.details = {k: v for k, v in details.items() if v is not None}

    def document(self) -> dict[str, Any]:
        """Return the JSON body every frontend reports for this error."""
        return {
            "error": {
                "code": self.code,
                "message": _json_ready(self.message),
                "hint": _json_ready(self.hint),
                "details": _json_ready(self.details),
            }
        }


def _json_ready(value: Any) -> Any:
    """Return a detail as JSON can hold it; reporting an error must never fail."""
    if isinstance(value, dict):
        return {_json_ready(str(key)): _json_ready(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_ready(part) for part in value]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value).encode(errors="backslashreplace").decode()


class UsageError(KilnError):
    """The caller asked for something that cannot be."""

    code = "usage"


class MissingExtra(UsageError):
    """An optional dependency group is not installed."""

    code = "missing_extra"


class OutputExists(UsageError):
    """A file of that name is there already and would be lost."""

    code = "output_exists"
    default_hint = "choose another path, or pass --force to replace it"


class FileUnreadable(UsageError):
    """A file the caller named is missing, not regular, or not permitted."""

    code = "file_unreadable"


class OutputUnwritable(UsageError):
    """A result cannot be written where it should go."""

    code = "output_unwritable"
    default_hint = "choose a directory that exists, is writable and has space"


class InvalidRunRequest(UsageError):
    """A run was asked for that cannot be; the message names the field."""

    code = "openenv_invalid_request"


class InvalidRunUrl(InvalidRunRequest):
    """An environment URL of a run is none, or holds what it must not."""

    code = "openenv_invalid_url"


class InvalidRunCredential(InvalidRunRequest):
    """The credential handles of a run are malformed or do not align."""

    code = "openenv_invalid_credential"
    default_hint = "give no handle, or one per environment with null for public ones"


class InvalidIdempotencyKey(InvalidRunRequest):
    """An idempotency key is no opaque token."""

    code = "openenv_invalid_idempotency_key"
    default_hint = "use 1 to 128 of letters, digits, '.', '_', ':' and '-'"


class InvalidEnvironmentEval(InvalidRunRequest):
    """The paired evaluation a run asks for cannot be made."""

    code = "openenv_invalid_environment_eval"


class RunNotFound(UsageError):
    """No run of that id is retained."""

    code = "openenv_run_not_found"
    default_hint = "list the retained runs; older ones are forgotten"


class AdapterNotFound(UsageError):
    """No adapter of that name is loaded."""

    code = "adapter_not_found"
    default_hint = "load it with 'kiln adapters load', see 'kiln adapters list'"


class ArtifactError(KilnError):
    """Bytes at rest are not what they claim to be."""

    code = "artifact_invalid"


class MalformedJson(ArtifactError):
    """Not exactly one strict JSON document."""

    code = "malformed_json"


class InvalidRecord(ArtifactError):
    """Well-formed JSON that is not the record it should be."""

    code = "invalid_record"


class IrregularFile(ArtifactError):
    """A file is a symbolic link, not a regular file, or over its bound."""

    code = "irregular_file"


class InvalidBundle(ArtifactError):
    """An offline verification check failed; ``details["check"]`` names it."""

    code = "invalid_bundle"
    default_hint = (
        "restore the three files exactly as they were published, or collect again"
    )


class ProtocolError(KilnError):
    """The OpenEnv session protocol was broken."""

    code = "protocol_error"


class LocalProtocolError(ProtocolError):
    """Kiln itself broke the lock-step order of a session."""

    code = "local_protocol_error"


class RemoteProtocolError(ProtocolError):
    """The environment broke the protocol; its session is poisoned for good."""

    code = "environment_protocol_error"


class EnvironmentFault(KilnError):
    """The environment reported a fault of its own."""

    code = "environment_fault"


class CapacityExhausted(EnvironmentFault):
    """No session became free within the capacity wait."""

    code = "environment_capacity_exhausted"
    retryable = True
    default_hint = (
        "another client or a long candidate held all sessions: lower --concurrency, "
        "raise --capacity-wait-seconds, raise the session limit of the environment, or "
        "end the sessions that other clients hold, MCP included"
    )


class SessionRefused(EnvironmentFault):
    """A terminal wire error came before the first observation."""

    code = "environment_session_refused"


class EpisodeUnfit(EnvironmentFault):
    """Episodes of this environment cannot form GRPO groups."""

    code = "environment_unfit"
    default_hint = "look at what its reset and its rewards are for these reset options"


class InvalidActionSchema(EnvironmentFault):
    """The advertised action schema cannot be compiled, or not safely."""

    code = "environment_action_schema_invalid"
    default_hint = (
        "publish a self-contained JSON Schema within the documented bounds, whose "
        "patterns run in linear time"
    )


class TaskApiUnsupported(EnvironmentFault):
    """An environment has no task provider; it can be collected from all the same."""

    code = "environment_task_api_unsupported"
    default_hint = "nothing is wrong: rollouts and training need no Task API"


class TransportError(KilnError):
    """A network exchange did not complete."""

    code = "environment_unavailable"
    retryable = True


class HttpStatusError(TransportError):
    """An HTTP answer had another status than the protocol demands."""

    code = "http_status"


class CredentialReflected(TransportError):
    """A peer returned the bearer token it was sent."""

    code = "credential_reflected"
    retryable = False
    default_hint = "revoke that token, and have the environment echo no headers"


class SessionLost(TransportError):
    """A WebSocket session ended by timeout, reset or restart."""

    code = "session_lost"


class CapacityAtUpgrade(TransportError):
    """The WebSocket upgrade was refused with 503: the server is full."""

    code = "environment_at_capacity"


class DriftError(KilnError):
    """What was recorded is not what is observed now."""

    code = "drift"


class IdentityDrift(DriftError):
    """Discovery of an environment differs from the recorded identity."""

    code = "environment_identity_changed"
    default_hint = (
        "pin or stabilise the deployment, inspect it again, and start a new run with a "
        "new idempotency key; nothing of this attempt is published"
    )


class ReplayDrift(DriftError):
    """A live exchange differs from the captured one."""

    code = "replay_drift"
    default_hint = (
        "check that the same environment build, task data and reset semantics are "
        "deployed at the captured URL; the same schemas do not mean the same behaviour"
    )


class PolicyDrift(DriftError):
    """The policy that answered is not the policy that was agreed on."""

    code = "policy_drift"
    default_hint = "keep base model, runtime and adapter unchanged while collecting"


class LimitError(KilnError):
    """A documented bound would be crossed."""

    code = "limit_exceeded"


class ContextOverflow(LimitError):
    """A prompt and its action do not fit the model's context."""

    code = "context_overflow"
    default_hint = (
        "lower --max-steps or --max-action-tokens, or use a model of longer context"
    )


class PolicyError(KilnError):
    """The model server failed to answer a request."""

    code = "policy_failed"
    retryable = True


class ServerUnreachable(PolicyError):
    """No Kiln server answers at the URL."""

    code = "server_unreachable"
    default_hint = "start one with 'kiln serve', or pass its address with --url"


class AdmissionError(KilnError):
    """A server refused work it was asked to do."""

    code = "refused"


class Conflict(AdmissionError):
    """The present state does not allow the request."""

    code = "conflict"


class IdempotencyConflict(Conflict):
    """An idempotency key is bound to another request."""

    code = "openenv_run_idempotency_conflict"
    default_hint = "use a new key for a new attempt, or send the same request again"


class RunNotCancellable(Conflict):
    """A run has ended already."""

    code = "openenv_run_not_cancellable"


class CapacityFull(AdmissionError):
    """There is no room, or no model, for it at the moment."""

    code = "capacity_full"
    retryable = True


class RunCapacityFull(CapacityFull):
    """Every tracked run is unfinished, and there is no room for another."""

    code = "openenv_run_capacity_full"
    default_hint = "wait until a run has ended, or cancel one"


class QueueFull(CapacityFull):
    """A bounded queue has no place left."""

    code = "queue_full"
    default_hint = "retry when others have finished"


class ServerRefusal(AdmissionError):
    """A Kiln server answered with an error; ``details["server_code"]`` is its code."""

    code = "server_refused"


class TrainingError(KilnError):
    """A training job failed."""

    code = "training_failed"


class TrainingEvidenceInvalid(TrainingError):
    """Receipt or manifest of a finished job contradict themselves or the run."""

    code = "training_evidence_invalid"


class RunNotRecorded(KilnError):
    """The record of a new run cannot be written, so the run does not exist."""

    code = "openenv_run_create_failed"
    default_hint = "check the disk of the adapter directory, then send it again"
