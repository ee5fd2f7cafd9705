"""Kiln: provable GRPO training of language-model agents on OpenEnv environments.

Names are loaded when they are first used (PEP 562), so importing the package loads no
network library and compiles no schema.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kiln_core.actions import (
        ActionSchema,
        InvalidAction,
        parse_reply,
    )
    from kiln_core.admission import (
        RunLedger,
        RunLimits,
    )
    from kiln_core.bundle import (
        Bundle,
        BundlePaths,
    )
    from kiln_core.canonical import (
        compact,
        digest,
        digest_json,
        pretty,
        read_json,
        same_json,
    )
    from kiln_core.compare import (
        Drift,
        find_drift,
    )
    from kiln_core.contract import (
        OpenEnvTrainingContract,
        PostEvalConfig,
        PreflightReceipt,
        PreflightRequest,
        check_preflight,
        materialize_config,
    )
    from kiln_core.dataset import (
        read_groups,
    )
    from kiln_core.discovery import (
        EnvironmentIdentity,
        EnvironmentInspection,
        EnvironmentSchema,
        environment_url,
    )
    from kiln_core.drive.collect import (
        CollectionRequest,
        EnvironmentTarget,
        collect,
        select_training,
    )
    from kiln_core.drive.files import (
        publish_bundle,
        read_bundle,
    )
    from kiln_core.drive.http import (
        Credential,
        environment_client,
    )
    from kiln_core.drive.policy import (
        HttpPolicy,
        http_policy,
    )
    from kiln_core.drive.replay import (
        ReplayOutcome,
        ReplayRequest,
        replay_bundle,
    )
    from kiln_core.drive.tasks import (
        TaskClient,
        task_catalog,
        task_catalogs,
    )
    from kiln_core.engine import (
        Engine,
        EngineSettings,
    )
    from kiln_core.episode import (
        Episode,
        EpisodeSetup,
        run_episode,
    )
    from kiln_core.errors import (
        AdapterNotFound,
        AdmissionError,
        ArtifactError,
        CapacityExhausted,
        CapacityFull,
        Conflict,
        ContextOverflow,
        CredentialReflected,
        DriftError,
        EnvironmentFault,
        EpisodeUnfit,
        FileUnreadable,
        HttpStatusError,
        IdempotencyConflict,
        IdentityDrift,
        InvalidActionSchema,
        InvalidBundle,
        InvalidEnvironmentEval,
        InvalidIdempotencyKey,
        InvalidRecord,
        InvalidRunCredential,
        InvalidRunRequest,
        InvalidRunUrl,
        IrregularFile,
        KilnError,
        LimitError,
        LocalProtocolError,
        MalformedJson,
        MissingExtra,
        OutputExists,
        OutputUnwritable,
        PolicyDrift,
        PolicyError,
        ProtocolError,
        QueueFull,
        RemoteProtocolError,
        ReplayDrift,
        RunCapacityFull,
        RunNotCancellable,
        RunNotFound,
        RunNotRecorded,
        ServerRefusal,
        ServerUnreachable,
        SessionLost,
        SessionRefused,
        TaskApiUnsupported,
        TrainingError,
        TrainingEvidenceInvalid,
        TransportError,
        UsageError,
    )
    from kiln_core.evaluation import (
        EnvironmentEvalConfig,
        EnvironmentEvalDecision,
        EnvironmentEvalEvidence,
        EnvironmentEvalGate,
        check_paired,
        evaluate_pairs,
        least_passing_wins,
        paired_differences,
        sign_test_p_value,
    )
    from kiln_core.evidence import (
        EnvironmentEvalOutcome,
        EnvironmentEvaluationReceipt,
        EvaluatedSide,
        EvaluationVerification,
        PolicyIdentity,
        evaluated_policy,
        outcome_of,
        seal_evaluation,
    )
    from kiln_core.explain import (
        TrainingExplanation,
        explain_training,
    )
    from kiln_core.failure import (
        FailureCode,
        FailureStage,
        OpenEnvRunFailure,
        classify_failure,
    )
    from kiln_core.grpo import (
        AdamW,
        EchoLoss,
        GrpoConfig,
        LossConfig,
        Muon,
        Sgd,
    )
    from kiln_core.intervals import (
        improvement_interval,
        win_rate_interval,
    )
    from kiln_core.lineage import (
        CorpusLineage,
        OpenEnvTrainingData,
    )
    from kiln_core.manifest import (
        Observation,
        OpenEnvReplayManifest,
    )
    from kiln_core.plan import (
        CollectionControls,
        generation_seed,
        reset_templates,
    )
    from kiln_core.ports import (
        Observer,
        Policy,
        PolicyDescription,
        PolicyReply,
        PolicyRequest,
    )
    from kiln_core.provenance import (
        BehaviorPolicyIdentity,
        RolloutProvenance,
    )
    from kiln_core.receipt import (
        BundleContradiction,
        OpenEnvArtifactDownloadReceipt,
        OpenEnvRolloutSummary,
        OpenEnvTrainingSelection,
        ReplayRunReport,
        RolloutRecord,
        RolloutStats,
        VerificationOutcome,
        VerificationReport,
    )
    from kiln_core.records import (
        AgenticGroup,
        ChatMessage,
        EpisodeTermination,
        OpenEnvRolloutProvenance,
        ScoredRollout,
        TurnSegment,
    )
    from kiln_core.run import (
        OpenEnvRunList,
        OpenEnvRunRequest,
        OpenEnvRunStatus,
        RunState,
    )
    from kiln_core.run_request import (
        RunRequestDraft,
        read_run_request,
    )
    from kiln_core.schemas import (
        check_document,
        published,
    )
    from kiln_core.scripted import (
        ScriptedPolicy,
    )
    from kiln_core.selection import (
        TrainingSelector,
    )
    from kiln_core.tasks import (
        TaskCatalog,
        TaskCatalogReport,
        TaskSelection,
        task_selection,
    )
    from kiln_core.trace import (
        RolloutTrace,
    )
    from kiln_core.verify import (
        BundleBytes,
        VerifiedBundle,
        verify_bundle,
    )
    from kiln_core.verify_receipt import (
        EvaluationBytes,
        VerifiedEvaluation,
        verify_evaluation,
    )

__all__ = [
    "ActionSchema",
    "AdamW",
    "AdapterNotFound",
    "AdmissionError",
    "AgenticGroup",
    "ArtifactError",
    "BehaviorPolicyIdentity",
    "Bundle",
    "BundleBytes",
    "BundleContradiction",
    "BundlePaths",
    "CapacityExhausted",
    "CapacityFull",
    "ChatMessage",
    "CollectionControls",
    "CollectionRequest",
    "Conflict",
    "ContextOverflow",
    "CorpusLineage",
    "Credential",
    "CredentialReflected",
    "Drift",
    "DriftError",
    "EchoLoss",
    "Engine",
    "EngineSettings",
    "EnvironmentEvalConfig",
    "EnvironmentEvalDecision",
    "EnvironmentEvalEvidence",
    "EnvironmentEvalGate",
    "EnvironmentEvalOutcome",
    "EnvironmentEvaluationReceipt",
    "EnvironmentFault",
    "EnvironmentIdentity",
    "EnvironmentInspection",
    "EnvironmentSchema",
    "EnvironmentTarget",
    "Episode",
    "EpisodeSetup",
    "EpisodeTermination",
    "EpisodeUnfit",
    "EvaluatedSide",
    "EvaluationBytes",
    "EvaluationVerification",
    "FailureCode",
    "FailureStage",
    "FileUnreadable",
    "GrpoConfig",
    "HttpPolicy",
    "HttpStatusError",
    "IdempotencyConflict",
    "IdentityDrift",
    "InvalidAction",
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
    "LossConfig",
    "MalformedJson",
    "MissingExtra",
    "Muon",
    "Observation",
    "Observer",
    "OpenEnvArtifactDownloadReceipt",
    "OpenEnvReplayManifest",
    "OpenEnvRolloutProvenance",
    "OpenEnvRolloutSummary",
    "OpenEnvRunFailure",
    "OpenEnvRunList",
    "OpenEnvRunRequest",
    "OpenEnvRunStatus",
    "OpenEnvTrainingContract",
    "OpenEnvTrainingData",
    "OpenEnvTrainingSelection",
    "OutputExists",
    "OutputUnwritable",
    "Policy",
    "PolicyDescription",
    "PolicyDrift",
    "PolicyError",
    "PolicyIdentity",
    "PolicyReply",
    "PolicyRequest",
    "PostEvalConfig",
    "PreflightReceipt",
    "PreflightRequest",
    "ProtocolError",
    "QueueFull",
    "RemoteProtocolError",
    "ReplayDrift",
    "ReplayOutcome",
    "ReplayRequest",
    "ReplayRunReport",
    "RolloutProvenance",
    "RolloutRecord",
    "RolloutStats",
    "RolloutTrace",
    "RunCapacityFull",
    "RunLedger",
    "RunLimits",
    "RunNotCancellable",
    "RunNotFound",
    "RunNotRecorded",
    "RunRequestDraft",
    "RunState",
    "ScoredRollout",
    "ScriptedPolicy",
    "ServerRefusal",
    "ServerUnreachable",
    "SessionLost",
    "SessionRefused",
    "Sgd",
    "TaskApiUnsupported",
    "TaskCatalog",
    "TaskCatalogReport",
    "TaskClient",
    "TaskSelection",
    "TrainingError",
    "TrainingEvidenceInvalid",
    "TrainingExplanation",
    "TrainingSelector",
    "TransportError",
    "TurnSegment",
    "UsageError",
    "VerificationOutcome",
    "VerificationReport",
    "VerifiedBundle",
    "VerifiedEvaluation",
    "check_document",
    "check_paired",
    "check_preflight",
    "classify_failure",
    "collect",
    "compact",
    "digest",
    "digest_json",
    "environment_client",
    "environment_url",
    "evaluate_pairs",
    "evaluated_policy",
    "explain_training",
    "find_drift",
    "generation_seed",
    "http_policy",
    "improvement_interval",
    "least_passing_wins",
    "materialize_config",
    "outcome_of",
    "paired_differences",
    "parse_reply",
    "pretty",
    "publish_bundle",
    "published",
    "read_bundle",
    "read_groups",
    "read_json",
    "read_run_request",
    "replay_bundle",
    "reset_templates",
    "run_episode",
    "same_json",
    "seal_evaluation",
    "select_training",
    "sign_test_p_value",
    "task_catalog",
    "task_catalogs",
    "task_selection",
    "verify_bundle",
    "verify_evaluation",
    "win_rate_interval",
]

_HOMES = {
    "actions": "ActionSchema InvalidAction parse_reply",
    "admission": "RunLedger RunLimits",
    "bundle": "Bundle BundlePaths",
    "canonical": "compact digest digest_json pretty read_json same_json",
    "compare": "Drift find_drift",
    "contract": (
        "OpenEnvTrainingContract PostEvalConfig PreflightReceipt "
        "PreflightRequest check_preflight materialize_config"
    ),
    "dataset": "read_groups",
    "discovery": (
        "EnvironmentIdentity EnvironmentInspection EnvironmentSchema environment_url"
    ),
    "drive.collect": "CollectionRequest EnvironmentTarget collect select_training",
    "drive.files": "publish_bundle read_bundle",
    "drive.http": "Credential environment_client",
    "drive.policy": "HttpPolicy http_policy",
    "drive.replay": "ReplayOutcome ReplayRequest replay_bundle",
    "drive.tasks": "TaskClient task_catalog task_catalogs",
    "engine": "Engine EngineSettings",
    "episode": "Episode EpisodeSetup run_episode",
    "errors": (
        "AdapterNotFound AdmissionError ArtifactError CapacityExhausted "
        "CapacityFull Conflict ContextOverflow CredentialReflected DriftError "
        "EnvironmentFault EpisodeUnfit FileUnreadable HttpStatusError "
        "IdempotencyConflict IdentityDrift InvalidActionSchema InvalidBundle "
        "InvalidEnvironmentEval InvalidIdempotencyKey InvalidRecord "
        "InvalidRunCredential InvalidRunRequest InvalidRunUrl IrregularFile "
        "KilnError LimitError LocalProtocolError MalformedJson MissingExtra "
        "OutputExists OutputUnwritable PolicyDrift PolicyError ProtocolError "
        "QueueFull RemoteProtocolError ReplayDrift RunCapacityFull "
        "RunNotCancellable RunNotFound RunNotRecorded ServerRefusal "
        "ServerUnreachable SessionLost SessionRefused TaskApiUnsupported "
        "TrainingError TrainingEvidenceInvalid TransportError UsageError"
    ),
    "evaluation": (
        "EnvironmentEvalConfig EnvironmentEvalDecision EnvironmentEvalEvidence "
        "EnvironmentEvalGate check_paired evaluate_pairs least_passing_wins "
        "paired_differences sign_test_p_value"
    ),
    "evidence": (
        "EnvironmentEvalOutcome EnvironmentEvaluationReceipt EvaluatedSide "
        "EvaluationVerification PolicyIdentity evaluated_policy outcome_of "
        "seal_evaluation"
    ),
    "explain": "TrainingExplanation explain_training",
    "failure": "FailureCode FailureStage OpenEnvRunFailure classify_failure",
    "grpo": "AdamW EchoLoss GrpoConfig LossConfig Muon Sgd",
    "intervals": "improvement_interval win_rate_interval",
    "lineage": "CorpusLineage OpenEnvTrainingData",
    "manifest": "Observation OpenEnvReplayManifest",
    "plan": "CollectionControls generation_seed reset_templates",
    "ports": "Observer Policy PolicyDescription PolicyReply PolicyRequest",
    "provenance": "BehaviorPolicyIdentity RolloutProvenance",
    "receipt": (
        "BundleContradiction OpenEnvArtifactDownloadReceipt "
        "OpenEnvRolloutSummary OpenEnvTrainingSelection ReplayRunReport "
        "RolloutRecord RolloutStats VerificationOutcome VerificationReport"
    ),
    "records": (
        "AgenticGroup ChatMessage EpisodeTermination OpenEnvRolloutProvenance "
        "ScoredRollout TurnSegment"
    ),
    "run": "OpenEnvRunList OpenEnvRunRequest OpenEnvRunStatus RunState",
    "run_request": "RunRequestDraft read_run_request",
    "schemas": "check_document published",
    "scripted": "ScriptedPolicy",
    "selection": "TrainingSelector",
    "tasks": "TaskCatalog TaskCatalogReport TaskSelection task_selection",
    "trace": "RolloutTrace",
    "verify": "BundleBytes VerifiedBundle verify_bundle",
    "verify_receipt": "EvaluationBytes VerifiedEvaluation verify_evaluation",
}
"""Which names a module defines."""


def __getattr__(name: str) -> Any:
    """Load a public name.

    Raises:
        AttributeError: There is none of that name.
    """
    for module, names in _HOMES.items():
        if name in names.split():
            value = getattr(import_module(f"kiln_core.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
