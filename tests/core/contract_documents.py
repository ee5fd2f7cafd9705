"""Documents the contracts accept and reject: ``python -m tests.core.contract_documents``.

Accepted documents are cut from a golden bundle or written here; rejected ones are an
accepted one and a single change (one operation of RFC 6902). Both are written as JSON
lines below ``contracts/``, for implementers in any language, and judged by
``tests/core/test_contracts.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kiln_core.canonical import compact
from kiln_core.contract import PreflightRequest, materialize_config
from kiln_core.failure import FailureCode
from kiln_core.records import ChatMessage
from kiln_core.schemas import published
from tests.simulators.pure import ADAPTER_POLICY, TOKENIZER, sha, toy_sample

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = ROOT / "contracts"
BUNDLE = ROOT / "tests" / "vectors" / "bundle-prompt-1"
RUN = "0b9a4c1e-6f0d-4c58-9a57-3f1d2e4b5a69"

Case = tuple[str, str, str, Any]
"""Accepted document, operation, pointer, value."""


def golden() -> dict[str, Any]:
    """Return documents of a bundle, cut to one environment and one rollout."""
    summary = msgspec.json.decode(
        (BUNDLE / "openenv.rollout-summary.json").read_bytes()
    )
    replay = msgspec.json.decode((BUNDLE / "openenv.replay.json").read_bytes())
    with (BUNDLE / "openenv.rollouts.jsonl").open("rb") as lines:
        group = msgspec.json.decode(lines.readline())
    candidates = replay["groups"][0]["candidates"]
    replay["groups"] = replay["groups"][:1]
    replay["groups"][0]["candidates"] = [shortest(candidates)]
    failed = next(
        e
        for c in candidates
        for e in c["exchanges"]
        if e["result"]["kind"] == "protocol_error"
    )
    for document in (summary, replay):
        document["environments"] = document["environments"][:1]
    summary["rollouts"] = summary["rollouts"][:1]
    group["completions"] = [
        min(group["completions"], key=lambda c: len(compact(c))),
    ]
    return {"summary": summary, "replay": replay, "group": group, "failed": failed}


def shortest(candidates: list[Any]) -> Any:
    """Return the candidate with the fewest exchanges, but at least one."""
    played = [candidate for candidate in candidates if candidate["exchanges"]]
    return min(played, key=lambda candidate: len(compact(candidate)))


def openenv_documents() -> dict[str, dict[str, Any]]:
    parts = golden()
    summary, replay = parts["summary"], parts["replay"]
    environment = summary["environments"][0]
    group = replay["groups"][0]
    candidate = group["candidates"][0]
    record = summary["rollouts"][0]
    evaluation = {
        "schema": "kiln.openenv-environment-evaluation.v1",
        "run_id": RUN,
        "config": {
            "groups": 20,
            "group_size": 1,
            "seed_start": 0,
            "gate": {"min_mean_improvement": 0.0, "min_mean_return": 0.5},
        },
        "seed_start": 2**63 - 1,
        "baseline": {},
        "candidate": {
            "adapter": "a",
            "adapter_content_revision": sha("1"),
            "execution_provenance_sha256": sha("2"),
        },
        "baseline_summary_sha256": sha("3"),
        "candidate_summary_sha256": sha("4"),
        "evidence": {
            "policy_version": "paired_return_sign_test_v1",
            "paired_groups": 20,
            "paired_episodes": 20,
            "minimum_paired_groups": 20,
            "baseline_mean_return": 0.25,
            "candidate_mean_return": 1,
            "mean_return_improvement": 0.75,
            "improved_groups": 15,
            "regressed_groups": 5,
            "tied_groups": 0,
            "exact_sign_test_p_value": 0.04138946533203125,
            "exact_sign_test_alpha": 0.05,
            "decision": "passed",
            "reason": "the candidate is significantly better",
        },
        "outcome": "promoted",
        "verdict": "promoted",
    }
    contract = control_plane_documents()["OpenEnvTrainingContract"]["plain"]
    submitted = {
        **summary,
        "training_contract": contract,
        "training_submission": {"job_id": "j", "state": "queued"},
    }
    return {
        "OpenEnvArtifactDownloadReceipt": {
            "plain": {
                "schema": "kiln.openenv-artifact-download.v1",
                "run_id": RUN,
                "kind": "summary",
                "source_url": f"/v1/openenv/runs/{RUN}/artifacts/summary",
                "output_path": "summary.json",
                "sha256": sha("0"),
                "bytes": 0,
            }
        },
        "Metadata": {
            "plain": environment["identity"]["metadata"],
            "unknown members": {"name": "n", "description": "", "extra": {"a": [1]}},
            "nulls": {
                "name": "n",
                "description": "d",
                "readme_content": None,
                "version": None,
                "author": None,
                "documentation_url": None,
            },
        },
        "EnvironmentIdentity": {
            "plain": environment["identity"],
            "legacy": {
                key: value
                for key, value in environment["identity"].items()
                if key not in {"authentication", "discovery_sha256"}
            },
            "no openapi": {**environment["identity"], "openapi_version": None},
        },
        "EnvironmentSchema": {"plain": environment["schema"]},
        "EnvironmentInspection": {"plain": environment},
        "ProtocolError": {
            "plain": parts["failed"]["result"]["error"],
            "capacity": {
                "code": "CAPACITY_REACHED",
                "message": "",
                "active_sessions": 1,
                "max_sessions": 1,
                "errors": [{"any": "thing"}],
                "factory_name": "f",
            },
        },
        "Observation": {
            "plain": group["reset_observation"],
            **{
                f"reward {kind}": {"observation": {}, "reward": reward, "done": True}
                for kind, reward in (
                    ("null", None),
                    ("boolean", True),
                    ("integer", 2**70),
                    ("float", 1e-7),
                )
            },
            "metadata": {"observation": 1, "reward": 0, "done": False, "metadata": []},
        },
        "EpisodeTermination": {"plain": "max_steps"},
        "RolloutRecord": {
            "plain": record,
            "protocol error": {
                **record,
                "termination": "protocol_error",
                "terminal_done": False,
                "protocol_error_code": "SESSION_ERROR",
            },
            "max steps": {**record, "termination": "max_steps", "terminal_done": False},
            "largest seed": {**record, "seed": 2**63 - 1, "steps": 256},
        },
        "RolloutStats": {
            "plain": summary["stats"],
            "empty": {
                **summary["stats"],
                "min_episode_return": None,
                "max_episode_return": None,
            },
        },
        "OpenEnvTrainingSelection": {
            "plain": {
                "groups_submitted": 16384,
                "rollouts_submitted": 0,
                "no_output_rollouts_discarded": 0,
                "no_usable_output_groups_skipped": 0,
                "no_reward_gradient_groups_skipped": 0,
                "warnings": ["w"],
            }
        },
        "OpenEnvRolloutSummary": {"plain": summary, "submitted": submitted},
        "ReplayExchange": {
            "plain": candidate["exchanges"][0],
            "error": parts["failed"],
        },
        "ReplayCandidate": {"plain": candidate},
        "ReplayGroup": {"plain": group},
        "OpenEnvReplayManifest": {"plain": replay},
        "EnvironmentEvalGate": {"plain": evaluation["config"]["gate"]},
        "EnvironmentEvalConfig": {"plain": evaluation["config"]},
        "PolicyIdentity": {"plain": evaluation["candidate"], "base": {}},
        "EnvironmentEvalDecision": {"plain": "inconclusive"},
        "EnvironmentEvalOutcome": {"plain": "kept"},
        "EnvironmentEvalEvidence": {"plain": evaluation["evidence"]},
        "EnvironmentEvaluationReceipt": {
            "plain": evaluation,
            **{
                f"{decision}, {outcome}": {
                    **evaluation,
                    "evidence": {**evaluation["evidence"], "decision": decision},
                    "outcome": outcome,
                }
                for decision, outcome in (
                    ("diagnostic", "diagnostic"),
                    ("passed", "kept"),
                    ("passed", "error"),
                    ("rejected", "rejected"),
                    ("inconclusive", "inconclusive"),
                )
            },
        },
        "VerificationReport": {"plain": verification_report()},
        "ReplayRunReport": {
            "plain": {
                "schema": "kiln.openenv-replay-run.v1",
                "replay_sha256": sha("0"),
                "environments": 1,
                "groups": 1,
                "rollouts": 1,
                "environment_exchanges": 0,
                "capacity_retries": 0,
                "environment_prefix_only_rollouts": 0,
            }
        },
    }


def verification_report() -> dict[str, Any]:
    return {
        "schema": "kiln.openenv-verification.v1",
        "summary_path": "s",
        "dataset_path": "d",
        "replay_path": "r",
        "dataset_sha256": sha("0"),
        "replay_sha256": sha("1"),
        "groups": 1,
        "rollouts": 1,
        "environment_exchanges": 0,
    }


def inference_documents() -> dict[str, dict[str, Any]]:
    group = golden()["group"]
    rollout = group["completions"][0]
    trace = rollout["trace"]
    sample = toy_sample(
        [ChatMessage(role="user", content="go")], "abcd", policy=ADAPTER_POLICY
    )
    provenance = msgspec.to_builtins(sample.provenance)
    provenance["template_invocation"] = {
        "tools": [{"name": "t"}],
        "tool_choice": "auto",
        "template_kwargs": {"enable_thinking": True},
    }
    tokens = provenance["action_tokens"]
    policy = provenance["behavior_policy"]
    return {
        "RolloutAdapterIdentityV1": {"plain": policy["adapter"]},
        "RolloutBehaviorPolicyIdentityV1": {
            "plain": policy,
            "base": {k: v for k, v in policy.items() if k != "adapter"},
        },
        "ActionToken": {
            "sampled": next(t for t in tokens if t["source"] == "sampled"),
            "forced": next(t for t in tokens if t["source"] == "forced"),
        },
        "TokenizerIdentity": {"plain": msgspec.to_builtins(TOKENIZER)},
        "TemplateInvocation": {"plain": provenance["template_invocation"], "empty": {}},
        "ThinkingBudget": {
            "tokens": {"max_tokens": 0, "close_token_ids": [1]},
            "time": {"max_time_ms": 5, "close_token_ids": [2**32 - 1]},
        },
        "SamplingParameters": {"plain": provenance["sampling"]},
        "RolloutProvenanceV1": {
            "plain": provenance,
            "largest seed": {**provenance, "seed": 2**64 - 1},
        },
        "ChatMessage": {
            "plain": group["messages"][0],
            "tool": {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": 1}],
                "name": "n",
                "tool_call_id": "t",
            },
        },
        "TurnSegment": {
            "plain": rollout["trajectory"][0],
            "warning": {
                "role": "tool",
                "content": "w",
                "kind": "observation",
                "warning_prefix_len": 1,
            },
        },
        "OpenEnvRolloutProvenanceV1": {
            "plain": rollout["openenv"],
            "legacy": {
                key: value
                for key, value in rollout["openenv"].items()
                if key not in {"behavior_policy", "discovery_sha256", "openapi_version"}
            },
        },
        "SamplingTransform": {"plain": trace["tokens"]["sampling"]},
        "TurnTokens": {"plain": trace["tokens"]["turns"][0]},
        "TokenTrace": {"plain": trace["tokens"]},
        "RolloutTrace": {
            "plain": trace,
            "no tokens": {**trace, "tokens": None, "guide_sha256": sha("1")},
        },
        "ScoredRollout": {"plain": rollout, "bare": {"text": "", "reward": 1.5}},
        "AgenticGroup": {"plain": group},
    }


def control_plane_documents() -> dict[str, dict[str, Any]]:
    request = PreflightRequest(adapter="first", output_adapter="second")
    config = msgspec.to_builtins(materialize_config(request))
    policy = msgspec.to_builtins(ADAPTER_POLICY)
    post_eval = {"suite": "s", "data_scope": "held-out", "min_accuracy": 0.5}
    contract = {
        "schema": "kiln.openenv-training-contract.v1",
        "effective_config": config,
        "post_eval": post_eval,
        "behavior_policy": policy,
    }
    counts = {"done": 1, "max_steps": 0, "invalid_model_action": 0, "protocol_error": 0}
    share = {
        "environment_name": "counter",
        "environment_base_url": "http://h",
        "openapi_version": "1.0.0",
        "discovery_sha256": sha("1"),
        "environment_schema_sha256": sha("2"),
        "action_schema_sha256": sha("3"),
        "groups": 1,
        "rollouts": 1,
        "total_steps": 2,
        "terminations": counts,
    }
    data = {
        "schema": "kiln.openenv-training-data.v1",
        "groups": 1,
        "rollouts": 1,
        "unique_seeds": 1,
        "seed_min": "18446744073709551615",
        "seed_max": "18446744073709551615",
        "total_steps": 2,
        "terminations": counts,
        "reward_min": 1.0,
        "reward_max": 1.0,
        "reward_mean": 1.0,
        "group_plan_sha256": sha("4"),
        "behavior_policy": policy,
        "environments": [share],
    }
    source = {
        "source": "inline",
        "admitted_corpus_sha256": sha("5"),
        "rows": 1,
        "openenv": data,
    }
    capacity = {
        "checked_unix_ms": 1,
        "queued_jobs": 0,
        "max_queued_jobs": 4,
        "tracked_jobs": 0,
        "max_tracked_jobs": 64,
    }
    response = {
        "job_id": "j",
        "state": "queued",
        "effective_seed": "7",
        "message": "queued",
    }
    return {
        "Muon": {"plain": config["optimizer"]},
        "AdamW": {"plain": {"kind": "adam_w", "beta1": 0.9}},
        "Sgd": {"plain": {"kind": "sgd"}},
        "BasePerStep": {"plain": {"kind": "base_per_step"}},
        "NoReference": {"plain": {"kind": "none"}},
        "EmaReference": {"plain": {"kind": "ema", "decay": 0.5, "refresh_every": 1}},
        "EchoLoss": {"plain": {"lambda": 0.05, "env_mask_mode": "full_obs"}},
        "LossConfig": {"plain": {"echo": {"lambda": 0.05}, "opd": None}},
        "GrpoConfig": {"plain": config, "defaults": {}},
        "PostEvalConfig": {
            "plain": post_eval,
            "diagnostic": {"suite": "s", "data_scope": "train-set-eval"},
        },
        "OpenEnvTrainingContract": {"plain": contract},
        "OpenEnvTrainingPreflightRequest": {
            "plain": {"adapter": "base", "output_adapter": "second", "auto_load": True}
        },
        "OpenEnvTrainingPreflightCapacity": {"plain": capacity},
        "OpenEnvTrainingPreflightReceipt": {
            "plain": {
                "schema": "kiln.openenv-training-preflight.v1",
                "effective_config": config,
                "behavior_policy": policy,
                "capacity": capacity,
                "capacity_reserved": False,
            }
        },
        "TerminationCounts": {"plain": counts},
        "TrainingEnvironment": {"plain": share},
        "OpenEnvTrainingData": {"plain": data},
        "TrainingDataProvenance": {"plain": source},
        "TrainingResponse": {"plain": response},
        "OpenEnvInspection": {
            "plain": {
                "schema": "kiln.openenv-inspection.v1",
                "environments": golden()["summary"]["environments"],
            }
        },
        **task_documents(),
        **run_documents(contract, response, source),
        "EvaluationVerification": {
            "plain": {
                "schema": "kiln.openenv-evaluation-verification.v1",
                "receipt_path": "receipt.json",
                "receipt_sha256": sha("6"),
                "baseline": verification_report(),
                "candidate": verification_report(),
                "decision": "passed",
                "outcome": "kept",
            }
        },
        **explanation_documents(),
        "BundleContradiction": {"plain": contradiction()},
        "VerificationOutcome": {
            "holds": {
                "schema": "kiln.openenv-verification-outcome.v1",
                "report": verification_report(),
                "contradiction": None,
                "summary_schema": "kiln.openenv-rollout-summary.v5",
                "traced_rollouts": 1,
                "retried_rollouts": 0,
            },
            "fails": {
                "schema": "kiln.openenv-verification-outcome.v1",
                "report": None,
                "contradiction": contradiction(),
                "summary_schema": None,
                "traced_rollouts": None,
                "retried_rollouts": None,
            },
        },
    }


def explanation_documents() -> dict[str, dict[str, Any]]:
    group = {
        "line": 1,
        "environment": "counter",
        "seed": 0,
        "rollouts": 2,
        "without_output": 0,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "verdict": "trains",
    }
    return {
        "GroupExplanation": {"plain": group},
        "TrainingExplanation": {
            "plain": {
                "schema": "kiln.training-explanation.v1",
                "groups": [group],
                "training_groups": 1,
                "equal_reward_groups": 0,
                "unusable_groups": 0,
                "reward_mean": 0.5,
                "notes": ["n"],
            }
        },
    }


def contradiction() -> dict[str, Any]:
    return {
        "check": "dataset_digest",
        "file": "openenv.rollouts.jsonl",
        "line": None,
        "pointer": "",
        "message": "its size is not the one in the summary",
        "expected": 1,
        "found": 2,
    }


def task_documents() -> dict[str, dict[str, Any]]:
    """Return catalogs of task providers."""
    page = {
        "environment_name": "counter",
        "task_api": "available",
        "splits": [{"level": 3, "name": "train", "type": "curriculum"}],
        "selected_split": "train",
        "num_tasks": 120,
        "start": 118,
        "stop": 120,
        "tasks": [{"id": 118}, None],
    }
    absent = {
        "environment_name": "counter",
        "task_api": "unsupported",
        "splits": [],
        "tasks": [],
    }
    environment = {"base_url": "http://127.0.0.1:8000", "catalog": page}
    return {
        "OpenEnvTaskCatalog": {"page": page, "unsupported": absent},
        "OpenEnvEnvironmentTasks": {"plain": environment},
        "OpenEnvTaskCatalogReport": {
            "plain": {
                "schema": "kiln.openenv-task-catalog.v1",
                "catalogs": [environment],
            }
        },
    }


def run_documents(
    contract: dict[str, Any], response: dict[str, Any], source: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    stats = golden()["summary"]["stats"]
    progress = {
        "groups_completed": 0,
        "groups_total": 8,
        "rollouts_completed": 0,
        "rollouts_total": 32,
    }
    request = {"environment_urls": ["http://h"]}
    train = {
        "kind": "train",
        "environment_urls": ["http://h", "http://g"],
        "idempotency_key": "experiment:counter.17_a-b",
        "credential_ids": ["production-arcade", None],
        "output_adapter": "second",
        "seed_start": 2**63 - 1,
        "post_eval": {"suite": "s"},
        "environment_eval": {"groups": 20, "group_size": 1},
    }
    failure = {
        "schema": "kiln.openenv-run-failure.v1",
        "code": "environment_unavailable",
        "stage": "discovery",
        "retryable": False,
        "message": "m",
        "hint": "h",
        "occurred_unix_ms": 1,
        "http_status": 404,
    }
    artifact = {
        "kind": "dataset",
        "url": f"/v1/openenv/runs/{RUN}/artifacts/dataset",
        "sha256": sha("1"),
        "bytes": 1,
    }
    admission = {"max_active_runs": 4, "sequence": 1, "queue_position": 1}
    training = {
        "job_id": "j",
        "state": "running",
        "progress": 0.5,
        "current_loss": 1.0,
        "training_data": source,
        "gate_outcome": "kept",
    }
    evaluation = {
        "state": "skipped",
        "seed_start": 8,
        "groups": 20,
        "group_size": 1,
        "baseline": {},
        "candidate": {"adapter": "second"},
        "progress": progress,
        "baseline_stats": stats,
    }
    post = {
        "job_id": "e",
        "suite_name": "s",
        "state": "running",
        "examples_completed": 1,
        "examples_total": 2,
        "headline_accuracy": 0.5,
    }
    status = {
        "schema": "kiln.openenv-run.v5",
        "run_id": RUN,
        "kind": "rollout",
        "state": "queued",
        "request": request,
        "submitted_unix_ms": 1,
        "admission": admission,
        "progress": progress,
    }
    complete = {
        **status,
        "kind": "train",
        "state": "failed",
        "request": train,
        "finished_unix_ms": 2,
        "rollout_stats": stats,
        "environments": [golden()["summary"]["environments"][0]["identity"]],
        "artifacts": [artifact],
        "training_job_id": "j",
        "training_contract": contract,
        "training_submission": response,
        "training": training,
        "post_evaluations": [post],
        "warnings": ["w"],
        "environment_evaluation": evaluation,
        "failure": failure,
        "error": "m",
    }
    return {
        "FailureCode": {"plain": "internal_error"},
        "FailureStage": {"plain": "orchestration"},
        "OpenEnvRunFailure": {
            "plain": failure,
            "retryable": {**failure, "retryable": True, "http_status": 503},
            "wire code": {
                **failure,
                "code": "environment_protocol_error",
                "protocol_code": "SESSION_ERROR",
            },
        },
        "RunState": {"plain": "revalidating"},
        "OpenEnvRunRequest": {"plain": request, "train": train},
        "RunAdmission": {
            "plain": admission,
            "admitted": {
                "max_active_runs": 4,
                "sequence": 1,
                "admitted_unix_ms": 1,
                "queue_wait_ms": 0,
            },
        },
        "RunProgress": {"plain": progress},
        "RunArtifact": {"plain": artifact},
        "OpenEnvTrainingStatus": {"plain": training},
        "OpenEnvPostEvalStatus": {"plain": post},
        "EnvironmentEvalProgress": {"plain": {**progress, "state": "baseline"}},
        "OpenEnvEnvironmentEvalStatus": {"plain": evaluation},
        "OpenEnvRunStatus": {"plain": status, "complete": complete},
        "OpenEnvRunList": {
            "plain": {"schema": "kiln.openenv-run-list.v5", "runs": [status]}
        },
    }


ACCEPTED = {
    "kiln-openenv-v1": openenv_documents,
    "kiln-inference-v1": inference_documents,
    "kiln-control-plane-v1": control_plane_documents,
}

SHA_LIES = ["sha256:" + "A" * 64, sha("0") + "\n", sha("0")[:-1], "0" * 64]
CONDITIONS: dict[str, list[Case]] = {
    "RolloutRecord": [
        ("plain", "replace", "/terminal_done", False),
        ("plain", "replace", "/termination", "max_steps"),
        ("plain", "add", "/protocol_error_code", "SESSION_ERROR"),
        ("protocol error", "remove", "/protocol_error_code", None),
        ("protocol error", "replace", "/terminal_done", True),
        ("max steps", "add", "/protocol_error_code", "SESSION_ERROR"),
        ("largest seed", "replace", "/seed", 2**63),
        ("largest seed", "replace", "/steps", 257),
    ],
    "OpenEnvRolloutProvenanceV1": [
        ("plain", "replace", "/terminal_done", True),
        ("plain", "add", "/protocol_error_code", "SESSION_ERROR"),
        ("plain", "replace", "/environment_name", " counter"),
        ("plain", "replace", "/environment_name", "coun\nter"),
    ],
    "OpenEnvRolloutSummary": [
        ("submitted", "remove", "/training_contract", None),
        ("plain", "add", "/training_submission", {}),
        ("plain", "replace", "/schema", "kiln.openenv-rollout-summary.v4"),
        ("plain", "replace", "/rollouts", []),
        ("plain", "replace", "/environments", []),
        ("plain", "add", "/thinking_budget_tokens", 16384),
        ("plain", "replace", "/dataset_bytes", 0),
        ("plain", "replace", "/replay_bytes", 268435457),
        ("plain", "replace", "/seed_start", 2**63),
    ],
    "ReplayExchange": [
        ("plain", "replace", "/result/kind", "protocol_error"),
        ("plain", "add", "/result/continued", True),
        ("error", "remove", "/result/continued", None),
        ("error", "replace", "/result/kind", "other"),
        ("error", "add", "/result/observation", {}),
    ],
    "Observation": [
        ("plain", "replace", "/reward", "1"),
        ("plain", "replace", "/reward", [1]),
    ],
    "EnvironmentEvalEvidence": [
        ("plain", "replace", "/exact_sign_test_alpha", 0.01),
        ("plain", "replace", "/minimum_paired_groups", 19),
        ("plain", "replace", "/exact_sign_test_p_value", 1.5),
    ],
    "EnvironmentEvaluationReceipt": [
        (case, "replace", "/outcome", outcome)
        for case, outcomes in (
            ("plain", ("diagnostic", "rejected", "inconclusive")),
            ("diagnostic, diagnostic", ("promoted", "error")),
            ("rejected, rejected", ("kept", "inconclusive")),
            ("inconclusive, inconclusive", ("promoted", "rejected")),
        )
        for outcome in outcomes
    ],
    "OpenEnvArtifactDownloadReceipt": [
        ("plain", "replace", "/run_id", RUN + "\n"),
        ("plain", "replace", "/source_url", "http://u:p@h/v1/openenv/runs/x"),
        ("plain", "replace", "/bytes", 268435457),
        *(("plain", "replace", "/sha256", lie) for lie in SHA_LIES),
    ],
    "ActionToken": [
        ("forced", "replace", "/behavior_logprob", -1.0),
        ("sampled", "replace", "/behavior_logprob", None),
        ("sampled", "replace", "/behavior_logprob", 0.5),
    ],
    "ThinkingBudget": [("tokens", "remove", "/max_tokens", None)],
    "TurnTokens": [
        ("plain", "replace", "/logprobs/0", 0.5),
        ("plain", "replace", "/observation_spans", [[1]]),
        ("plain", "replace", "/observation_spans", [[1, 2, 3]]),
    ],
    "RolloutProvenanceV1": [("largest seed", "replace", "/seed", 2**64)],
    "PostEvalConfig": [("diagnostic", "add", "/min_accuracy", 0.5)],
    "GrpoConfig": [
        ("plain", "remove", "/optimizer/kind", None),
        ("plain", "replace", "/optimizer/kind", "adam"),
        ("plain", "remove", "/kl_reference_policy/kind", None),
        ("plain", "replace", "/learning_rate", 0.0),
        ("plain", "replace", "/clip_epsilon", 1.0),
        ("plain", "replace", "/lora_rank", 0),
        ("plain", "replace", "/loss/opd", {}),
    ],
    "OpenEnvTrainingData": [
        ("plain", "replace", "/seed_min", "01"),
        ("plain", "replace", "/seed_min", "1\n"),
    ],
    "OpenEnvRunRequest": [
        ("train", "remove", "/output_adapter", None),
        ("train", "replace", "/kind", "rollout"),
        ("plain", "add", "/output_adapter", "a"),
        ("plain", "add", "/training_config", {}),
        ("plain", "add", "/post_eval", {"suite": "s"}),
        ("plain", "add", "/environment_eval", {"groups": 20, "group_size": 1}),
        ("train", "replace", "/idempotency_key", "a b"),
        ("train", "replace", "/idempotency_key", "a\n"),
        ("train", "replace", "/idempotency_key", "x" * 129),
        ("train", "replace", "/credential_ids/0", "-"),
        ("plain", "replace", "/environment_urls", []),
    ],
    "OpenEnvRunFailure": [
        ("wire code", "replace", "/retryable", True),
        ("wire code", "replace", "/protocol_code", "session_error"),
        *(
            ("plain", "replace", "/code", code.value)
            for code in FailureCode
            if code in {FailureCode.RUN_INTERRUPTED, FailureCode.COLLECTION_FAILED}
        ),
    ],
    "OpenEnvRunStatus": [("complete", "replace", "/state", "completed")],
}
"""Broken rules that are more than one member's type."""

WRONG = {
    "string": 7,
    "integer": "1",
    "number": "1",
    "boolean": 0,
    "object": [],
    "array": {},
    "null": "x",
}


def rejected(contract: str) -> Iterator[tuple[str, Case]]:
    """Yield definition and case of everything a contract must reject."""
    definitions = published()[f"{contract}.schema.json"]["$defs"]
    for name, documents in ACCEPTED[contract]().items():
        case, document = next(iter(documents.items()))
        for broken in CONDITIONS.get(name, []):
            yield name, broken
        if not isinstance(document, dict):
            yield name, (case, "replace", "", "other")
            continue
        schema = definitions[name]
        if schema.get("additionalProperties") is False:
            yield name, (case, "add", "/surprise", 1)
        for member, rule in schema["properties"].items():
            if member not in document:
                continue
            if member in schema.get("required", []) and member != "kind":
                yield name, (case, "remove", f"/{member}", None)
            if (wrong := broken_member(rule)) is not None:
                yield name, (case, "replace", f"/{member}", wrong)


def broken_member(rule: dict[str, Any]) -> Any:
    """Return a value that a member's own schema refuses; None where none is."""
    if "const" in rule or "enum" in rule:
        return "other"
    if "$ref" in rule:
        return 7
    if "anyOf" in rule:
        return "x"
    if "minimum" in rule:
        return rule["minimum"] - 1
    kind = rule.get("type")
    if isinstance(kind, list):
        return {} if "object" not in kind else None
    return WRONG.get(kind or "")


def lines(contract: str) -> tuple[bytes, bytes]:
    """Return both files of a contract."""
    accepted = [
        {"definition": name, "case": case, "document": document}
        for name, documents in ACCEPTED[contract]().items()
        for case, document in documents.items()
    ]
    refused = [
        {
            "definition": name,
            "case": case,
            "patch": [
                {"op": op, "path": path}
                if op == "remove"
                else {"op": op, "path": path, "value": value}
            ],
        }
        for name, (case, op, path, value) in rejected(contract)
    ]
    return (
        b"".join(compact(line) + b"\n" for line in accepted),
        b"".join(compact(line) + b"\n" for line in refused),
    )


def main() -> None:
    """Write the documents."""
    for contract in ACCEPTED:
        for folder, data in zip(("accepted", "rejected"), lines(contract), strict=True):
            (CONTRACTS / folder / f"{contract}.jsonl").write_bytes(data)


if __name__ == "__main__":
    sys.exit(main())
