"""``GrpoConfig``: every knob of native GRPO, its default and its validity.

The names, defaults and cross rules are those of the training contract
(``docs/training.md``). Two fields are Kiln's own: ``epochs`` and ``groups_per_step``,
since small models need several passes in larger steps. The mathematics is in
``kiln_train_jax``; both frontends and the trainer must agree on this module.

References: DeepSeekMath (Shao et al. 2024, arXiv 2402.03300) for group-relative
advantages, Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) for the unnormalised form,
GSPO (Zheng et al. 2025, arXiv 2507.18071) for sequence-level ratios.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, field

from kiln_core import limits
from kiln_core.canonical import Record
from kiln_core.errors import UsageError

__all__ = [
    "AdamW",
    "EchoLoss",
    "GrpoConfig",
    "LossConfig",
    "Muon",
    "Sgd",
    "check_grpo_config",
    "check_name",
]

PositiveInt: TypeAlias = Annotated[int, Meta(ge=1)]
UnitInterval: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]

MUON_LEARNING_RATE = 2e-3
ADAM_LEARNING_RATE = 1e-5
MAX_LORA_SCALE = 2.0
MAX_LORA_RANK = 256
MAX_NAME_BYTES = 128


class Muon(Record, frozen=True, kw_only=True, tag_field="kind", tag="muon"):
    """Momentum orthogonalised by Newton-Schulz iteration (Jordan et al. 2024)."""

    momentum: UnitInterval = 0.95
    nesterov: bool = True
    ns_iters: Annotated[int, Meta(ge=1, le=20)] = 5
    weight_decay: NonNegative = 0.0


class AdamW(Record, frozen=True, kw_only=True, tag_field="kind", tag="adam_w"):
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    beta1: UnitInterval = 0.9
    beta2: UnitInterval = 0.999
    epsilon: Annotated[float, Meta(gt=0)] = 1e-8
    weight_decay: NonNegative = 0.0


class Sgd(Record, frozen=True, kw_only=True, tag_field="kind", tag="sgd"):
    """Plain gradient descent."""

    weight_decay: NonNegative = 0.0


class BasePerStep(
    Record, frozen=True, kw_only=True, tag_field="kind", tag="base_per_step"
):
    """The KL reference is the model without the adapter."""


class NoReference(Record, frozen=True, kw_only=True, tag_field="kind", tag="none"):
    """There is no KL reference."""


class EmaReference(Record, frozen=True, kw_only=True, tag_field="kind", tag="ema"):
    """The KL reference is a moving average of the policy."""

    decay: UnitInterval = 0.0
    refresh_every: PositiveInt = 32


class EchoLoss(Record, frozen=True, kw_only=True):
    """Cross entropy on environment tokens beside the policy loss."""

    lambda_: NonNegative = field(default=0.05, name="lambda")
    env_mask_mode: Literal["env_only", "full_obs"] = "env_only"
    warning_filter: bool = True


class LossConfig(Record, frozen=True, kw_only=True):
    """Auxiliary losses."""

    echo: EchoLoss | None = None
    opd: None = None
    no_policy_loss: bool = False


class GrpoConfig(Record, frozen=True, kw_only=True):
    """A complete GRPO configuration; every field has a default."""

    learning_rate: Annotated[float, Meta(gt=0)] | None = None
    """Null takes the optimizer's default: Muon 2e-3, AdamW and SGD 1e-5."""
    kl_coeff: NonNegative = 0.1
    clip_epsilon: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    clip_eps_high: NonNegative | None = None
    """Null clips symmetrically."""
    cispo_max_weight: Annotated[float, Meta(gt=0)] = 5.0
    advantage_mode: Literal["dr_grpo", "vanilla"] = "dr_grpo"
    loss_aggregation: Literal["token_level", "per_sample"] = "token_level"
    kl_estimator: Literal["k1", "k3", "none"] = "k1"
    dynamic_sampling: bool = True
    """Skip groups whose rewards are all equal."""
    is_level: Literal["token", "sequence", "cispo"] = "token"
    behavior_policy: Literal["no_importance_correction", "recorded"] = (
        "no_importance_correction"
    )
    kl_reference_policy: BasePerStep | NoReference | EmaReference = field(
        default_factory=BasePerStep
    )
    entropy_aware_kl_quantile: UnitInterval | None = None
    reward_saturation_threshold: float = 0.95
    reward_low_variance_threshold: NonNegative = 1e-4
    reward_filter_var_min: NonNegative | None = None
    reward_filter_var_max: NonNegative | None = None
    reward_filter_min_groups: PositiveInt = 1
    reward_filter_on_empty: Literal["fail", "train-all", "skip"] = "fail"
    lora_rank: Annotated[int, Meta(ge=1, le=MAX_LORA_RANK)] = 16
    lora_alpha: Annotated[float, Meta(gt=0)] = 32.0
    base_adapter: str | None = None
    """Adapter to start from; null starts from the base model."""
    allow_adapter_shape_conversion: bool = False
    allow_high_lora_scale: bool = False
    output_name: str | None = None
    auto_load: bool = True
    checkpoint_interval: PositiveInt | None = None
    """Optimizer steps between checkpoints."""
    resume_checkpoint: str | None = None
    grad_checkpoint_segments: PositiveInt | None = None
    detect_anomaly: bool = False
    seed: Annotated[int, Meta(ge=0, le=limits.MAX_SEED)] | None = None
    """Null derives the seed from the corpus digest."""
    optimizer: Muon | AdamW | Sgd = field(default_factory=Muon)
    adapter_smoke_test: bool = False
    adapter_smoke_prompts: list[str] = field(default_factory=list)
    shared_prefix_reference: bool = True
    loss: LossConfig = field(default_factory=LossConfig)
    epochs: Annotated[int, Meta(ge=1, le=1_000)] = 1
    """Passes over the corpus (Kiln's own)."""
    groups_per_step: PositiveInt = 1
    """Groups whose gradients one optimizer step sums (Kiln's own)."""

    @property
    def effective_learning_rate(self) -> float:
        """The learning rate, the optimizer's default where none is given."""
        if self.learning_rate is not None:
            return self.learning_rate
        if isinstance(self.optimizer, Muon):
            return MUON_LEARNING_RATE
        return ADAM_LEARNING_RATE


def check_grpo_config(config: GrpoConfig) -> None:
    """Check the rules that no single field expresses.

    Raises:
        UsageError: A rule is broken; the message names the fields.
    """
    _check_ranges(config)
    kl_off = config.kl_coeff == 0 or config.kl_estimator == "none"
    no_reference = isinstance(config.kl_reference_policy, NoReference)
    rules = (
        (
            no_reference and not kl_off,
            "kl_reference_policy none needs kl_coeff 0 or kl_estimator none",
        ),
        (
            config.entropy_aware_kl_quantile is not None and kl_off,
            "entropy_aware_kl_quantile needs the KL term on",
        ),
        (
            config.loss.no_policy_loss and config.loss.echo is None,
            "loss.no_policy_loss needs loss.echo",
        ),
        (
            config.lora_alpha / config.lora_rank > MAX_LORA_SCALE
            and not config.allow_high_lora_scale,
            f"lora_alpha / lora_rank is over {MAX_LORA_SCALE}; "
            "set allow_high_lora_scale to accept it",
        ),
        (
            _inverted(config.reward_filter_var_min, config.reward_filter_var_max),
            "reward_filter_var_min exceeds reward_filter_var_max",
        ),
        (
            not _all_finite(msgspec.to_builtins(config)),
            "numbers of a GRPO configuration must be finite",
        ),
    )
    for broken, message in rules:
        if broken:
            raise UsageError(f"invalid training configuration: {message}")
    for what, name in (
        ("output_name", config.output_name),
        ("base_adapter", config.base_adapter),
    ):
        if name is not None:
            check_name(name, what)


def check_name(name: str, what: str) -> None:
    """Check that an adapter name is one safe path segment.

    Raises:
        UsageError: It is empty, too long, starts with a dot, or holds anything but
            ASCII letters, digits, ``.``, ``_`` and ``-``.
    """
    plain = (
        name.isascii()
        and name.replace("_", "").replace("-", "").replace(".", "").isalnum()
    )
    if not plain or name.startswith(".") or len(name) > MAX_NAME_BYTES:
        raise UsageError(
            f"{what} {name!r} is not a safe name",
            hint="use letters, digits, '.', '_' and '-', not starting with a dot",
        )


def _inverted(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and low > high


def _all_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_all_finite(member) for member in value.values())
    return not isinstance(value, float) or math.isfinite(value)


def _check_ranges(config: GrpoConfig) -> None:
    # a configuration that was built in code has passed no reader
    try:
        msgspec.convert(msgspec.to_builtins(config), GrpoConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"invalid training configuration: {error}") from error


def effective_seed(config: GrpoConfig, corpus_sha256: str) -> int:
    """Return the seed of a run: the configured one, else one from the corpus digest.

    Args:
        config: The configuration.
        corpus_sha256: Digest of the admitted corpus; never the clock.
    """
    if config.seed is not None:
        return config.seed
    return int(corpus_sha256.removeprefix("sha256:")[:16], 16) & limits.MAX_SEED
