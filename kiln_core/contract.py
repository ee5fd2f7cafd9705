"""The admitted training contract, its preflight, and who owns which field.

For every training request the exact configuration is materialised before an
environment is contacted: rollout-owned fields are forced, defaults filled in, and the
identity of the policy sealed. Everything later consumes that contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_core.canonical import Record
from kiln_core.errors import AdmissionError, PolicyDrift, UsageError
from kiln_core.grpo import GrpoConfig, check_grpo_config, check_name
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.records import Count

__all__ = [
    "OpenEnvTrainingContract",
    "PostEvalConfig",
    "PreflightCapacity",
    "PreflightReceipt",
    "PreflightRequest",
    "base_or_adapter",
    "check_preflight",
    "materialize_config",
]

CONTRACT_SCHEMA: Final = "kiln.openenv-training-contract.v1"
PREFLIGHT_SCHEMA: Final = "kiln.openenv-training-preflight.v1"
BASE_NAMES: Final = frozenset({"base", "none", "null"})


class PostEvalConfig(Record, frozen=True, kw_only=True):
    """A static suite to run after training."""

    suite: Annotated[str, Meta(min_length=1)]
    data_scope: Literal["held-out", "train-set-eval"] = "held-out"
    generation: dict[str, Any] | UnsetType = UNSET
    min_accuracy: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    include_baseline: bool = False

    def __post_init__(self) -> None:
        if self.data_scope == "train-set-eval" and self.min_accuracy is not UNSET:
            raise ValueError("train-set-eval is diagnostic and takes no min_accuracy")


class OpenEnvTrainingContract(Record, frozen=True, kw_only=True):
    """``kiln.openenv-training-contract.v1``: what will be trained, sealed."""

    schema: Literal["kiln.openenv-training-contract.v1"]
    effective_config: GrpoConfig
    post_eval: PostEvalConfig | UnsetType = UNSET
    behavior_policy: BehaviorPolicyIdentity | UnsetType = UNSET
    """Absent only in legacy records."""


class PreflightRequest(Record, frozen=True, kw_only=True):
    """Body of ``POST /v1/openenv/training/preflight``."""

    adapter: str = "base"
    output_adapter: str
    training_config: GrpoConfig = msgspec.field(default_factory=GrpoConfig)
    auto_load: bool = True
    post_eval: PostEvalConfig | UnsetType = UNSET


class PreflightCapacity(Record, frozen=True, kw_only=True):
    """The training queue at one instant; nothing is reserved."""

    checked_unix_ms: Count
    queued_jobs: Count
    max_queued_jobs: Count
    tracked_jobs: Count
    max_tracked_jobs: Count


class PreflightReceipt(Record, frozen=True, kw_only=True):
    """``kiln.openenv-training-preflight.v1``."""

    schema: Literal["kiln.openenv-training-preflight.v1"]
    effective_config: GrpoConfig
    post_eval: PostEvalConfig | UnsetType = UNSET
    behavior_policy: BehaviorPolicyIdentity | UnsetType = UNSET
    capacity: PreflightCapacity
    capacity_reserved: Literal[False]


def base_or_adapter(name: str | None) -> str | None:
    """Return None for the base model's names, else the checked adapter name.

    Raises:
        UsageError: The name is no safe path segment.
    """
    if name is None or name.strip().lower() in BASE_NAMES:
        return None
    check_name(name, "adapter")
    return name


def materialize_config(request: PreflightRequest, *, gated: bool = False) -> GrpoConfig:
    """Return the exact configuration a training request stands for.

    Args:
        request: What was asked.
        gated: Whether a paired evaluation decides on loading the adapter.

    Raises:
        UsageError: A name or a combination of fields is invalid.
    """
    adapter = base_or_adapter(request.adapter)
    check_name(request.output_adapter, "output adapter")
    if base_or_adapter(request.output_adapter) is None:
        raise UsageError(f"output adapter {request.output_adapter!r} is the base model")
    config = msgspec.structs.replace(
        request.training_config,
        output_name=request.output_adapter,
        base_adapter=adapter,
        behavior_policy="no_importance_correction",
        auto_load=request.auto_load and not gated,
    )
    check_grpo_config(config)
    return config


def check_preflight(
    request: PreflightRequest, receipt: PreflightReceipt
) -> OpenEnvTrainingContract:
    """Check a server's preflight receipt against our own expectation.

    Returns:
        The contract to seal into the summary.

    Raises:
        AdmissionError: The receipt does not answer the request, or its queue is full.
        PolicyDrift: It names another adapter than the one asked for.
        UsageError: The request itself is invalid.
    """
    expected = materialize_config(request)
    if receipt.effective_config != expected:
        changed = [
            name
            for name in GrpoConfig.__struct_fields__
            if getattr(receipt.effective_config, name) != getattr(expected, name)
        ]
        raise AdmissionError(
            f"the server would train another configuration: {', '.join(changed)} differ"
        )
    if receipt.post_eval != request.post_eval:
        raise AdmissionError("the server would run another post evaluation")
    capacity = receipt.capacity
    if (
        capacity.queued_jobs >= capacity.max_queued_jobs
        or capacity.tracked_jobs >= capacity.max_tracked_jobs
    ):
        raise AdmissionError("the training queue is full", hint="try again later")
    if isinstance(receipt.behavior_policy, UnsetType):
        raise AdmissionError("the server did not say which policy it serves")
    check_policy_adapter(receipt.behavior_policy, base_or_adapter(request.adapter))
    return OpenEnvTrainingContract(
        schema=CONTRACT_SCHEMA,
        effective_config=receipt.effective_config,
        post_eval=receipt.post_eval,
        behavior_policy=receipt.behavior_policy,
    )


def check_contract(
    contract: OpenEnvTrainingContract,
    policy: BehaviorPolicyIdentity | UnsetType,
    adapter: str | None,
    fail: Callable[..., Any],
) -> None:
    """Check that a recorded contract is valid and is that of its collection.

    Args:
        contract: From the summary.
        policy: Who acted; unset in legacy records, where the contract has none either.
        adapter: The behaviour adapter, None for the base model.
        fail: Called for the first contradiction.
    """
    config = contract.effective_config
    pairs = (
        ("behavior_policy", policy, contract.behavior_policy),
        ("effective_config/base_adapter", adapter, config.base_adapter),
        (
            "effective_config/behavior_policy",
            "no_importance_correction",
            config.behavior_policy,
        ),
    )
    for name, expected, found in pairs:
        if expected != found:
            fail(
                "summary_contract",
                f"/training_contract/{name}",
                "the collection says otherwise",
                expected,
                found,
            )
    if config.output_name is None:
        fail(
            "summary_contract",
            "/training_contract/effective_config/output_name",
            "a contract names its adapter",
            "a name",
            None,
        )
    try:
        check_grpo_config(config)
    except UsageError as error:
        fail(
            "summary_contract",
            "/training_contract/effective_config",
            error.message,
            "a valid configuration",
            "another",
        )


def check_policy_adapter(policy: BehaviorPolicyIdentity, adapter: str | None) -> None:
    """Check that a policy identity names the adapter that was asked for.

    Raises:
        PolicyDrift: It does not.
    """
    if policy.adapter_name != adapter:
        raise PolicyDrift(
            f"the policy answered with adapter {policy.adapter_name or 'base'}, "
            f"not {adapter or 'base'}",
            expected=adapter or "base",
            found=policy.adapter_name or "base",
        )


def check_same_policy(
    agreed: BehaviorPolicyIdentity, seen: BehaviorPolicyIdentity
) -> None:
    """Check that a policy is, field by field, the one agreed on.

    Raises:
        PolicyDrift: A field differs; ``details["changed"]`` names each.
    """
    if agreed != seen:
        changed = [
            name
            for name in BehaviorPolicyIdentity.__struct_fields__
            if getattr(agreed, name) != getattr(seen, name)
        ]
        raise PolicyDrift(
            f"the policy changed while collecting: {', '.join(changed)}",
            changed=changed,
        )


def read_training_config(value: object) -> GrpoConfig:
    """Turn a decoded ``--training-config`` document into a configuration.

    Raises:
        UsageError: A field is unknown or has a wrong value; the message names it.
    """
    if isinstance(value, dict) and "reference_policy" in value:
        if "kl_reference_policy" in value:
            raise UsageError("reference_policy is an alias of kl_reference_policy")
        value = {**value, "kl_reference_policy": value["reference_policy"]}
        del value["reference_policy"]
    try:
        config = msgspec.convert(value, GrpoConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"invalid training configuration: {error}") from error
    check_grpo_config(config)
    return config
