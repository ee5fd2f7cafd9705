"""The published artifact schema, transcribed as data.

Per definition: whether the object is closed, and its fields in order as
``(name, required, type, constraints)``. The published bound of seeds,
9223372036854776000, went through a double; the bound meant is 2^63-1.
"""

from __future__ import annotations

from typing import Any

MAX_SEED = 2**63 - 1
SHA256 = "^sha256:[0-9a-f]{64}$"
MIB_256 = 268435456

Field = tuple[str, bool, str, dict[str, Any]]

CLOSED = "closed"
OPEN = "open"

ENUMS: dict[str, list[str]] = {
    "EpisodeTermination": [
        "done",
        "max_steps",
        "invalid_model_action",
        "protocol_error",
    ],
    "EnvironmentEvalDecision": ["diagnostic", "passed", "rejected", "inconclusive"],
    "EnvironmentEvalOutcome": [
        "diagnostic",
        "promoted",
        "kept",
        "rejected",
        "inconclusive",
        "error",
    ],
}

AT_LEAST_0 = {"minimum": 0}
AT_LEAST_1 = {"minimum": 1}
TEXT = {"minLength": 1}
SEED = {"minimum": 0, "maximum": MAX_SEED}
SELECTED = {"minimum": 0, "maximum": 16384}

OBJECTS: dict[str, tuple[str, list[Field]]] = {
    "OpenEnvArtifactDownloadReceipt": (
        CLOSED,
        [
            ("schema", True, "any", {"const": "kiln.openenv-artifact-download.v1"}),
            (
                "run_id",
                True,
                "string",
                {
                    "pattern": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}"
                    "-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
                },
            ),
            ("kind", True, "string", TEXT),
            (
                "source_url",
                True,
                "string",
                {"pattern": "^/v1/openenv/runs/[0-9a-fA-F-]{36}/artifacts/[^/?#]+$"},
            ),
            ("output_path", True, "string", TEXT),
            ("sha256", True, "Sha256", {}),
            ("bytes", True, "integer", {"minimum": 0, "maximum": MIB_256}),
        ],
    ),
    "Metadata": (
        OPEN,
        [
            ("name", True, "string", TEXT),
            ("description", True, "string", {}),
            ("readme_content", False, "string | null", {}),
            ("version", False, "string | null", {}),
            ("author", False, "string | null", {}),
            ("documentation_url", False, "string | null", {}),
        ],
    ),
    "EnvironmentIdentity": (
        CLOSED,
        [
            ("schema", True, "any", {"const": "kiln.openenv-identity.v1"}),
            ("client_profile", True, "any", {"const": "openenv-http/1.x"}),
            ("base_url", True, "string", TEXT),
            ("websocket_url", True, "string", {"pattern": "^wss?://"}),
            (
                "authentication",
                False,
                "string",
                {"enum": ["none", "bearer"], "default": "none"},
            ),
            ("openapi_version", True, "string | null", {}),
            ("environments", True, "array<string>", {}),
            ("metadata", True, "Metadata", {}),
            ("schema_sha256", True, "Sha256", {}),
            ("discovery_sha256", False, "Sha256", {}),
        ],
    ),
    "EnvironmentSchema": (
        CLOSED,
        [
            ("action", True, "any", {}),
            ("observation", True, "any", {}),
            ("state", True, "any", {}),
        ],
    ),
    "EnvironmentInspection": (
        CLOSED,
        [
            ("identity", True, "EnvironmentIdentity", {}),
            ("schema", True, "EnvironmentSchema", {}),
        ],
    ),
    "ProtocolError": (
        CLOSED,
        [
            (
                "code",
                True,
                "string",
                {
                    "enum": [
                        "INVALID_JSON",
                        "UNKNOWN_TYPE",
                        "VALIDATION_ERROR",
                        "EXECUTION_ERROR",
                        "CAPACITY_REACHED",
                        "FACTORY_ERROR",
                        "SESSION_ERROR",
                    ]
                },
            ),
            ("message", True, "string", {}),
            ("errors", False, "array", {}),
            ("active_sessions", False, "integer", AT_LEAST_0),
            ("max_sessions", False, "integer", AT_LEAST_0),
            ("factory_name", False, "string", {}),
        ],
    ),
    "Observation": (
        CLOSED,
        [
            ("observation", True, "any", {}),
            ("reward", True, "null | boolean | integer | number", {}),
            ("done", True, "boolean", {}),
            ("metadata", False, "any", {}),
        ],
    ),
    "RolloutRecord": (
        CLOSED,
        [
            ("group_index", True, "integer", AT_LEAST_0),
            ("candidate_index", True, "integer", AT_LEAST_0),
            ("environment_name", True, "string", TEXT),
            ("environment_url", True, "string", TEXT),
            ("seed", True, "integer", SEED),
            ("steps", True, "integer", {"minimum": 0, "maximum": 256}),
            ("episode_return", True, "number", {}),
            ("terminal_done", True, "boolean", {}),
            ("termination", True, "EpisodeTermination", {}),
            ("protocol_error_code", False, "string", TEXT),
            ("recoverable_protocol_errors", True, "integer", AT_LEAST_0),
            ("capacity_retries", True, "integer", AT_LEAST_0),
            ("model_tokens", True, "integer", AT_LEAST_0),
            ("model_latency_ms", True, "number", AT_LEAST_0),
        ],
    ),
    "RolloutStats": (
        CLOSED,
        [
            ("mean_episode_return", True, "number", {}),
            ("min_episode_return", True, "number | null", {}),
            ("max_episode_return", True, "number | null", {}),
            ("done_count", True, "integer", AT_LEAST_0),
            ("max_steps_count", True, "integer", AT_LEAST_0),
            ("invalid_model_action_count", True, "integer", AT_LEAST_0),
            ("protocol_error_count", True, "integer", AT_LEAST_0),
            ("recoverable_protocol_error_count", True, "integer", AT_LEAST_0),
            ("capacity_retry_count", True, "integer", AT_LEAST_0),
            ("total_environment_steps", True, "integer", AT_LEAST_0),
            ("total_model_tokens", True, "integer", AT_LEAST_0),
            ("mean_model_latency_ms", True, "number", AT_LEAST_0),
        ],
    ),
    "OpenEnvTrainingSelection": (
        CLOSED,
        [
            ("groups_submitted", True, "integer", SELECTED),
            ("rollouts_submitted", True, "integer", SELECTED),
            ("no_output_rollouts_discarded", True, "integer", SELECTED),
            ("no_usable_output_groups_skipped", True, "integer", SELECTED),
            ("no_reward_gradient_groups_skipped", True, "integer", SELECTED),
            ("warnings", False, "array<string>", {}),
        ],
    ),
    "OpenEnvRolloutSummary": (
        CLOSED,
        [
            ("schema", True, "any", {"const": "kiln.openenv-rollout-summary.v5"}),
            ("kiln_url", True, "string", TEXT),
            ("adapter", True, "string | null", {}),
            ("adapter_label", True, "string", TEXT),
            ("behavior_policy", True, "BehaviorPolicyIdentity", {}),
            (
                "environments",
                True,
                "array<EnvironmentInspection>",
                {"minItems": 1, "maxItems": 64},
            ),
            ("groups", True, "integer", {"minimum": 1, "maximum": 16384}),
            ("group_size", True, "integer", {"minimum": 1, "maximum": 256}),
            ("rollout_count", True, "integer", {"minimum": 1, "maximum": 16384}),
            ("seed_start", True, "integer", SEED),
            ("max_steps", True, "integer", {"minimum": 1, "maximum": 256}),
            ("concurrency", True, "integer", {"minimum": 1, "maximum": 256}),
            ("max_action_tokens", True, "integer", {"minimum": 1, "maximum": 16384}),
            (
                "thinking_budget_tokens",
                False,
                "integer",
                {"minimum": 0, "maximum": 16383},
            ),
            ("temperature", True, "number", AT_LEAST_0),
            ("thinking", True, "boolean", {}),
            ("protocol_error_reward", True, "number", {}),
            ("max_recoverable_errors", True, "integer", {"minimum": 0, "maximum": 64}),
            ("capacity_wait_seconds", True, "integer", {"minimum": 1, "maximum": 3600}),
            ("reset_plan_sha256", True, "Sha256", {}),
            ("output_path", True, "string", TEXT),
            ("replay_output_path", True, "string", TEXT),
            ("summary_output_path", True, "string", TEXT),
            ("dataset_sha256", True, "Sha256", {}),
            ("dataset_bytes", True, "integer", {"minimum": 1, "maximum": MIB_256}),
            ("replay_sha256", True, "Sha256", {}),
            ("replay_bytes", True, "integer", {"minimum": 1, "maximum": MIB_256}),
            ("stats", True, "RolloutStats", {}),
            ("rollouts", True, "array<RolloutRecord>", {"minItems": 1}),
            ("training_selection", False, "OpenEnvTrainingSelection", {}),
            ("training_contract", False, "OpenEnvTrainingContract", {}),
            ("training_submission", False, "object", {}),
        ],
    ),
    "ReplayExchange": (
        CLOSED,
        [
            ("step_index", True, "integer", AT_LEAST_0),
            ("action", True, "object", {}),
            ("result", True, "ReplayExchangeResult", {}),
        ],
    ),
    "ReplayCandidate": (
        CLOSED,
        [
            ("candidate_index", True, "integer", AT_LEAST_0),
            ("exchanges", True, "array<ReplayExchange>", {"maxItems": 256}),
            ("final_state", False, "any", {}),
            ("episode_return", True, "number", {}),
            ("terminal_done", True, "boolean", {}),
            ("termination", True, "EpisodeTermination", {}),
            ("recoverable_protocol_errors", True, "integer", AT_LEAST_0),
            ("capacity_retries", True, "integer", AT_LEAST_0),
            ("model_tokens", True, "integer", AT_LEAST_0),
            ("model_latency_ms", True, "number", AT_LEAST_0),
        ],
    ),
    "ReplayGroup": (
        CLOSED,
        [
            ("group_index", True, "integer", AT_LEAST_0),
            ("environment_index", True, "integer", AT_LEAST_0),
            ("seed", True, "integer", SEED),
            ("reset_payload", True, "object", {}),
            ("reset_observation", True, "Observation", {}),
            (
                "candidates",
                True,
                "array<ReplayCandidate>",
                {"minItems": 1, "maxItems": 256},
            ),
        ],
    ),
    "OpenEnvReplayManifest": (
        CLOSED,
        [
            ("schema", True, "any", {"const": "kiln.openenv-replay.v1"}),
            ("client_profile", True, "any", {"const": "openenv-http/1.x"}),
            ("dataset_sha256", True, "Sha256", {}),
            ("protocol_error_reward", True, "number", {}),
            ("max_steps", True, "integer", {"minimum": 1, "maximum": 256}),
            (
                "environments",
                True,
                "array<EnvironmentInspection>",
                {"minItems": 1, "maxItems": 64},
            ),
            (
                "groups",
                True,
                "array<ReplayGroup>",
                {"minItems": 1, "maxItems": 16384},
            ),
        ],
    ),
    "EnvironmentEvalGate": (
        CLOSED,
        [
            ("min_mean_return", False, "number", {}),
            ("min_mean_improvement", True, "number", AT_LEAST_0),
        ],
    ),
    "EnvironmentEvalConfig": (
        CLOSED,
        [
            ("groups", True, "integer", {"minimum": 1, "maximum": 16384}),
            ("group_size", True, "integer", {"minimum": 1, "maximum": 256}),
            ("seed_start", False, "integer", SEED),
            ("gate", False, "EnvironmentEvalGate", {}),
        ],
    ),
    "PolicyIdentity": (
        CLOSED,
        [
            ("adapter", False, "string", TEXT),
            ("adapter_content_revision", False, "Sha256", {}),
            ("execution_provenance_sha256", False, "Sha256", {}),
        ],
    ),
    "EnvironmentEvalEvidence": (
        CLOSED,
        [
            ("policy_version", True, "any", {"const": "paired_return_sign_test_v1"}),
            ("paired_groups", True, "integer", AT_LEAST_1),
            ("paired_episodes", True, "integer", AT_LEAST_1),
            ("minimum_paired_groups", True, "any", {"const": 20}),
            ("baseline_mean_return", True, "number", {}),
            ("candidate_mean_return", True, "number", {}),
            ("mean_return_improvement", True, "number", {}),
            ("improved_groups", True, "integer", AT_LEAST_0),
            ("regressed_groups", True, "integer", AT_LEAST_0),
            ("tied_groups", True, "integer", AT_LEAST_0),
            (
                "exact_sign_test_p_value",
                True,
                "number",
                {"minimum": 0, "maximum": 1},
            ),
            ("exact_sign_test_alpha", True, "any", {"const": 0.05}),
            ("decision", True, "EnvironmentEvalDecision", {}),
            ("reason", True, "string", TEXT),
        ],
    ),
    "EnvironmentEvaluationReceipt": (
        CLOSED,
        [
            (
                "schema",
                True,
                "any",
                {"const": "kiln.openenv-environment-evaluation.v1"},
            ),
            ("run_id", True, "string", TEXT),
            ("config", True, "EnvironmentEvalConfig", {}),
            ("seed_start", True, "integer", SEED),
            ("baseline", True, "PolicyIdentity", {}),
            ("candidate", True, "PolicyIdentity", {}),
            ("baseline_summary_sha256", True, "Sha256", {}),
            ("candidate_summary_sha256", True, "Sha256", {}),
            ("evidence", True, "EnvironmentEvalEvidence", {}),
            ("outcome", True, "EnvironmentEvalOutcome", {}),
            ("verdict", True, "string", TEXT),
        ],
    ),
    "VerificationReport": (
        CLOSED,
        [
            ("schema", True, "any", {"const": "kiln.openenv-verification.v1"}),
            ("summary_path", True, "string", TEXT),
            ("dataset_path", True, "string", TEXT),
            ("replay_path", True, "string", TEXT),
            ("dataset_sha256", True, "Sha256", {}),
            ("replay_sha256", True, "Sha256", {}),
            ("groups", True, "integer", AT_LEAST_1),
            ("rollouts", True, "integer", AT_LEAST_1),
            ("environment_exchanges", True, "integer", AT_LEAST_0),
        ],
    ),
    "ReplayRunReport": (
        CLOSED,
        [
            ("schema", True, "any", {"const": "kiln.openenv-replay-run.v1"}),
            ("replay_sha256", True, "Sha256", {}),
            ("environments", True, "integer", AT_LEAST_1),
            ("groups", True, "integer", AT_LEAST_1),
            ("rollouts", True, "integer", AT_LEAST_1),
            ("environment_exchanges", True, "integer", AT_LEAST_0),
            ("capacity_retries", True, "integer", AT_LEAST_0),
            ("environment_prefix_only_rollouts", True, "integer", AT_LEAST_0),
        ],
    ),
}

FIELD_COUNTS = {
    "OpenEnvArtifactDownloadReceipt": 7,
    "Metadata": 6,
    "EnvironmentIdentity": 10,
    "EnvironmentSchema": 3,
    "EnvironmentInspection": 2,
    "ProtocolError": 6,
    "Observation": 4,
    "RolloutRecord": 14,
    "RolloutStats": 12,
    "OpenEnvTrainingSelection": 6,
    "OpenEnvRolloutSummary": 32,
    "ReplayExchange": 3,
    "ReplayCandidate": 10,
    "ReplayGroup": 6,
    "OpenEnvReplayManifest": 7,
    "EnvironmentEvalGate": 2,
    "EnvironmentEvalConfig": 4,
    "PolicyIdentity": 3,
    "EnvironmentEvalEvidence": 14,
    "EnvironmentEvaluationReceipt": 11,
    "VerificationReport": 9,
    "ReplayRunReport": 8,
}
"""As the published page counts them: a check of the transcription."""
