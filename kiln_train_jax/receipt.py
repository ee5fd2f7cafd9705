"""What a finished job leaves beside its adapter: receipt and manifest.

`train_receipt.json` says what was trained, on which bytes, by which mathematics, on
which machine; `adapter_manifest.json` binds the files of the folder to it. Both are
records of the training contract (`docs/training.md`).
"""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import msgspec
import numpy as np
from msgspec import UNSET

from kiln_core.canonical import digest, pretty
from kiln_core.evidence import execution_provenance
from kiln_train_jax.adapters import CONFIG_FILE, WEIGHTS_FILE
from kiln_train_jax.identity import LIBRARIES, backend_name, implementation
from kiln_train_jax.units import rendered_rollouts

if TYPE_CHECKING:
    from pathlib import Path

    from kiln_core.engine import TrainingJob
    from kiln_core.grpo import GrpoConfig
    from kiln_core.provenance import BehaviorPolicyIdentity
    from kiln_train_jax.lora import Lora, Pair
    from kiln_train_jax.trainer import StepMetrics
    from kiln_train_jax.units import TrainingUnit

RECEIPT_FILE: Final = "train_receipt.json"
MANIFEST_FILE: Final = "adapter_manifest.json"
MEASURED: Final = ("loss", "kl", "entropy", "clip_fraction", "agreement")
"""What the receipt tells of every step."""
AUDIT_SCHEMA: Final = "kiln.grpo-policy-audit.v1"


class TrainingRecord(NamedTuple):
    """What a run measured."""

    job: TrainingJob
    policy: BehaviorPolicyIdentity
    """Who the run started from."""
    units: list[TrainingUnit]
    skipped_groups: int
    history: list[StepMetrics]
    agreement: float | None
    """Of the first step: largest |ratio - 1|; None when no step was taken."""
    started_seconds: float
    warnings: list[str]
    start: Lora
    end: Lora


def receipt(record: TrainingRecord) -> dict[str, Any]:
    """Return the receipt of a successful run as free JSON."""
    job, config = record.job, record.job.config
    return {
        "schema_version": 1,
        "receipt_type": "kiln_train_receipt",
        "adapter_name": config.output_name,
        "produced_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "status": "success",
        "failure_reason": None,
        "job_id": job.job_id,
        "kiln": {"implementation": implementation()},
        "model": {
            "served_model_id": record.policy.served_model_id,
            "base_model_sha256": record.policy.base_model_sha256,
        },
        "behavior_policy": msgspec.to_builtins(record.policy),
        "training_data": _training_data(job),
        "grpo": {
            "policy_audit": {
                "schema": AUDIT_SCHEMA,
                "importance_sampling": _importance_sampling(config),
                "kl_reference": msgspec.to_builtins(config.kl_reference_policy),
                "recorded_provenance": _provenance(record.job),
                "first_step_agreement": record.agreement,
            },
            "skipped_groups": record.skipped_groups,
        },
        "echo": _echo(record),
        "no_policy_loss": config.loss.no_policy_loss,
        "rewards": _rewards(job),
        "token_counts": _token_counts(record.units),
        "runtime": _runtime(record),
        "lora_delta_norms": _delta_norms(record.start, record.end),
        "warnings": record.warnings,
        "effective_seed": str(config.seed),
        "config": msgspec.to_builtins(config),
    }


def _importance_sampling(config: GrpoConfig) -> str:
    if config.behavior_policy == "recorded":
        return f"recorded {config.is_level} ratio"
    return "ratio forced to 1"


def _provenance(job: TrainingJob) -> str:
    """Return where the token ids of a corpus come from."""
    rollouts = sum(bool(c.text) for group in job.groups for c in group.completions)
    rendered = rendered_rollouts(job.groups)
    if not rendered:
        return "token trace"
    return "rendered" if rendered == rollouts else "token trace, rendered where absent"


def _training_data(job: TrainingJob) -> dict[str, Any]:
    """Return which corpus was trained on."""
    lineage = None if job.lineage is None else msgspec.to_builtins(job.lineage)
    return {
        "source": job.data_source,
        "sha256": job.corpus_sha256,
        "groups": len(job.groups),
        "openenv": lineage,
    }


def _echo(record: TrainingRecord) -> dict[str, Any]:
    """Return how well environment text was predicted, first and last, in nats."""
    enabled = record.job.config.loss.echo is not None
    measured = enabled and bool(record.history)
    return {
        "enabled": enabled,
        "initial_env_ce": record.history[0].echo if measured else None,
        "final_env_ce": record.history[-1].echo if measured else None,
    }


def _rewards(job: TrainingJob) -> dict[str, float]:
    rewards = [c.reward for group in job.groups for c in group.completions]
    return {
        "min": min(rewards),
        "max": max(rewards),
        "mean": float(np.mean(rewards)),
    }


def _token_counts(units: list[TrainingUnit]) -> dict[str, int]:
    rows = [row for unit in units for row in unit.rows]
    return {
        "action": sum(unit.sampled_tokens for unit in units),
        "env": sum(len(row.observed) for row in rows),
        "context": sum(len(unit.prompt) for unit in units),
    }


def _runtime(record: TrainingRecord) -> dict[str, Any]:
    """Return how it ran: what another machine would need to run it again."""
    return {
        "seconds": round(time.monotonic() - record.started_seconds, 3),
        "steps": len(record.history),
        **{name: [getattr(m, name) for m in record.history] for name in MEASURED},
        "backend": backend_name(),
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "threads": len(os.sched_getaffinity(0)),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libraries": {name: version(name) for name in (*LIBRARIES, "optax")},
        "python": platform.python_version(),
    }


def write_evidence(folder: Path, record: TrainingRecord) -> None:
    """Write receipt and manifest into an adapter folder that holds the adapter."""
    receipt_bytes = pretty(receipt(record))
    (folder / RECEIPT_FILE).write_bytes(receipt_bytes)
    job = record.job
    adapter = record.policy.adapter
    manifest = {
        "schema_version": 1,
        "manifest_type": "kiln_adapter_manifest",
        "adapter_name": job.config.output_name,
        "safetensors_hash": digest((folder / WEIGHTS_FILE).read_bytes()),
        "config_hash": digest((folder / CONFIG_FILE).read_bytes()),
        "receipt_hash": digest(receipt_bytes),
        "files": {
            "adapter_model": WEIGHTS_FILE,
            "adapter_config": CONFIG_FILE,
            "train_receipt": RECEIPT_FILE,
        },
        "parent_adapter": None if adapter is UNSET else msgspec.to_builtins(adapter),
        "base_model_sha256": record.policy.base_model_sha256,
        "execution_provenance": execution_provenance(record.policy),
        "training_precision": "float32",
        "training_data_hash": job.corpus_sha256,
        "training_data_source": job.data_source,
        "openenv_training_data": None
        if job.lineage is None
        else msgspec.to_builtins(job.lineage),
    }
    (folder / MANIFEST_FILE).write_bytes(pretty(manifest))


def _delta_norms(start: Lora, end: Lora) -> dict[str, float]:
    """Return how far each projection's update moved, Frobenius norm of A B."""
    norms: dict[str, float] = {}
    for layer, (before, after) in enumerate(zip(start.layers, end.layers, strict=True)):
        for target, pair in after.items():
            moved = _product(pair) - _product(before[target])
            norms[f"{layer}.{target}"] = float(np.linalg.norm(moved))
    return norms


def _product(pair: Pair) -> np.ndarray:
    product: np.ndarray = np.asarray(pair.down) @ np.asarray(pair.up)
    return product
