"""What the published contracts say beyond the export of the structs.

Each entry repeats a rule that a struct checks in code; documents in
``contracts/accepted`` and ``contracts/rejected`` hold the two together. References name
definitions; `kiln_core.schemas` turns them into links.
"""

from __future__ import annotations

from typing import Any, Final

from kiln_core import limits
from kiln_core.evaluation import ALPHA
from kiln_core.evidence import OUTCOMES, EnvironmentEvalOutcome
from kiln_core.failure import RETRYABLE
from kiln_core.provenance import MAX_LOGPROB

__all__ = ["DESCRIPTIONS", "FIELD_RULES", "RULES"]

_SPACE_OR_CONTROL: Final = r"\s\u0000-\u001f\u007f-\u009f"
_CONTROL: Final = r"\u0000-\u001f\u007f-\u009f"
IDENTITY_TEXT: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": limits.MAX_IDENTITY_TEXT_BYTES,
    "pattern": f"^[^{_SPACE_OR_CONTROL}]([^{_CONTROL}]*[^{_SPACE_OR_CONTROL}])?$",
}
"""A name that goes into identities: trimmed, without control characters."""


def _when(member: str, value: str, then: Any, otherwise: Any = None) -> dict[str, Any]:
    rule = {
        "if": {"properties": {member: {"const": value}}, "required": [member]},
        "then": then,
    }
    return rule if otherwise is None else {**rule, "else": otherwise}


def _constant(member: str, value: Any) -> dict[str, Any]:
    return {"properties": {member: {"const": value}}}


def _lacks(*members: str) -> dict[str, Any]:
    """Return a schema that refuses each of these members."""
    return {"not": {"anyOf": [{"required": [member]} for member in members]}}


def _needs(member: str, needed: str) -> dict[str, Any]:
    return {"if": {"required": [member]}, "then": {"required": [needed]}}


ENDING: Final = [
    _when(
        "termination",
        "done",
        _constant("terminal_done", True),  # noqa: FBT003 - a value of JSON
        _constant("terminal_done", False),  # noqa: FBT003 - a value of JSON
    ),
    _when(
        "termination",
        "protocol_error",
        {"required": ["protocol_error_code"]},
        {"not": {"required": ["protocol_error_code"]}},
    ),
]
"""``terminal_done`` and ``protocol_error_code`` follow ``termination``."""


def _outcome_rule(decision: str, outcomes: list[str]) -> dict[str, Any]:
    allowed = {"const": outcomes[0]} if len(outcomes) == 1 else {"enum": outcomes}
    return {
        "if": {
            "properties": {
                "evidence": {
                    "properties": {"decision": {"const": decision}},
                    "required": ["decision"],
                }
            },
            "required": ["evidence"],
        },
        "then": {"properties": {"outcome": allowed}},
    }


def _result(kind: str, **members: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", *members],
        "properties": {"kind": {"const": kind}, **members},
    }


RULES: Final[dict[str, dict[str, Any]]] = {
    "RolloutRecord": {"allOf": ENDING},
    "OpenEnvRolloutProvenanceV1": {"allOf": ENDING},
    "OpenEnvRolloutSummary": {
        "allOf": [_needs("training_submission", "training_contract")]
    },
    "ReplayExchangeResult": {
        "oneOf": [
            _result("observation", observation={"$ref": "Observation"}),
            _result(
                "protocol_error",
                error={"$ref": "ProtocolError"},
                continued={"type": "boolean"},
            ),
        ]
    },
    "EnvironmentEvaluationReceipt": {
        "allOf": [
            _outcome_rule(
                decision.value,
                [o.value for o in EnvironmentEvalOutcome if o in allowed],
            )
            for decision, allowed in OUTCOMES.items()
        ]
    },
    "ActionToken": {
        "allOf": [
            _when(
                "source",
                "forced",
                _constant("behavior_logprob", None),
                {
                    "properties": {
                        "behavior_logprob": {"type": "number", "maximum": MAX_LOGPROB}
                    }
                },
            )
        ]
    },
    "ThinkingBudget": {
        "anyOf": [{"required": ["max_tokens"]}, {"required": ["max_time_ms"]}]
    },
    "PostEvalConfig": {
        "allOf": [_when("data_scope", "train-set-eval", _lacks("min_accuracy"))]
    },
    "OpenEnvRunRequest": {
        "allOf": [
            _when(
                "kind",
                "train",
                {"required": ["output_adapter"]},
                _lacks(
                    "output_adapter", "training_config", "post_eval", "environment_eval"
                ),
            )
        ]
    },
    "OpenEnvRunFailure": {
        "allOf": [
            _when("code", code.value, _constant("retryable", value))
            for code, value in RETRYABLE.items()
        ]
    },
    "OpenEnvRunStatus": {
        "allOf": [
            {
                "if": {"required": ["failure"]},
                "then": _constant("state", "failed"),
            }
        ]
    },
}
"""Keywords that are added to a definition, or that are all of it."""

FIELD_RULES: Final[dict[str, dict[str, Any]]] = {
    "Observation": {"reward": {"type": ["null", "boolean", "integer", "number"]}},
    "EnvironmentEvalEvidence": {"exact_sign_test_alpha": {"const": ALPHA}},
    "RolloutProvenanceV1": {
        "seed": {
            "type": "integer",
            "minimum": 0,
            "maximum": limits.MAX_GENERATION_SEED,
        }
    },
    "RolloutAdapterIdentityV1": {"name": IDENTITY_TEXT},
    "RolloutBehaviorPolicyIdentityV1": {
        "served_model_id": IDENTITY_TEXT,
        "implementation": IDENTITY_TEXT,
    },
    "TurnTokens": {
        "logprobs": {
            "type": "array",
            "items": {"type": ["number", "null"], "maximum": MAX_LOGPROB},
        }
    },
    "OpenEnvRolloutProvenanceV1": {
        "environment_name": IDENTITY_TEXT,
        "openapi_version": IDENTITY_TEXT,
        "protocol_error_code": IDENTITY_TEXT,
    },
}
"""Members whose schema is declared instead of exported."""

DESCRIPTIONS: Final = {
    "EnvironmentIdentity": {
        "authentication": (
            "How requests and the WebSocket upgrade were authenticated; never a "
            "credential or its handle."
        ),
        "discovery_sha256": (
            "Canonical digest of metadata, schema, inventory and OpenAPI; absent only "
            "in legacy artifacts."
        ),
    },
    "OpenEnvRolloutSummary": {
        "reset_plan_sha256": (
            "Digest of the ordered seed-free reset objects, aligned with environments."
        ),
    },
}
"""What members mean where their name does not say it."""
