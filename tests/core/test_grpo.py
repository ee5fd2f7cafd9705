from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kiln_core.canonical import compact, read_record
from kiln_core.errors import UsageError
from kiln_core.grpo import (
    AdamW,
    EchoLoss,
    EmaReference,
    GrpoConfig,
    LossConfig,
    Muon,
    NoReference,
    Sgd,
    check_grpo_config,
    check_name,
    effective_seed,
)
from tests.simulators.pure import sha

DEFAULTS: dict[str, Any] = {
    "learning_rate": None,
    "kl_coeff": 0.1,
    "clip_epsilon": 0.2,
    "clip_eps_high": None,
    "cispo_max_weight": 5.0,
    "advantage_mode": "dr_grpo",
    "loss_aggregation": "token_level",
    "kl_estimator": "k1",
    "dynamic_sampling": True,
    "is_level": "token",
    "behavior_policy": "no_importance_correction",
    "kl_reference_policy": {"kind": "base_per_step"},
    "entropy_aware_kl_quantile": None,
    "reward_saturation_threshold": 0.95,
    "reward_low_variance_threshold": 1e-4,
    "reward_filter_var_min": None,
    "reward_filter_var_max": None,
    "reward_filter_min_groups": 1,
    "reward_filter_on_empty": "fail",
    "lora_rank": 16,
    "lora_alpha": 32.0,
    "base_adapter": None,
    "allow_adapter_shape_conversion": False,
    "allow_high_lora_scale": False,
    "output_name": None,
    "auto_load": True,
    "checkpoint_interval": None,
    "resume_checkpoint": None,
    "grad_checkpoint_segments": None,
    "detect_anomaly": False,
    "seed": None,
    "optimizer": {
        "kind": "muon",
        "momentum": 0.95,
        "nesterov": True,
        "ns_iters": 5,
        "weight_decay": 0.0,
    },
    "adapter_smoke_test": False,
    "adapter_smoke_prompts": [],
    "shared_prefix_reference": True,
    "loss": {"echo": None, "opd": None, "no_policy_loss": False},
    "epochs": 1,
    "groups_per_step": 1,
}


def test_every_field_has_the_documented_default() -> None:
    assert msgspec.to_builtins(GrpoConfig()) == DEFAULTS
    assert list(msgspec.to_builtins(GrpoConfig())) == list(DEFAULTS)
    check_grpo_config(GrpoConfig())


def test_parts_have_the_documented_defaults() -> None:
    assert msgspec.to_builtins(AdamW()) == {
        "kind": "adam_w",
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "weight_decay": 0.0,
    }
    assert msgspec.to_builtins(Sgd()) == {"kind": "sgd", "weight_decay": 0.0}
    assert msgspec.to_builtins(EmaReference()) == {
        "kind": "ema",
        "decay": 0.0,
        "refresh_every": 32,
    }
    assert msgspec.to_builtins(NoReference()) == {"kind": "none"}
    assert msgspec.to_builtins(EchoLoss()) == {
        "lambda": 0.05,
        "env_mask_mode": "env_only",
        "warning_filter": True,
    }


@pytest.mark.parametrize(
    ("optimizer", "rate"), [(Muon(), 2e-3), (AdamW(), 1e-5), (Sgd(), 1e-5)]
)
def test_learning_rate_follows_the_optimizer(optimizer: Any, rate: float) -> None:
    assert GrpoConfig(optimizer=optimizer).effective_learning_rate == rate
    assert (
        GrpoConfig(optimizer=optimizer, learning_rate=0.5).effective_learning_rate
        == 0.5
    )


def test_configuration_is_read_as_it_was_written() -> None:
    config = GrpoConfig(
        optimizer=AdamW(beta1=0.5),
        kl_reference_policy=EmaReference(decay=0.9),
        loss=LossConfig(echo=EchoLoss(lambda_=0.1)),
        learning_rate=1e-3,
    )
    assert read_record(compact(config), GrpoConfig, "x") == config
    assert b'"lambda":0.1' in compact(config)


REFUSED: list[dict[str, Any]] = [
    {"learning_rate": 0.0},
    {"learning_rate": -1.0},
    {"kl_coeff": -0.1},
    {"clip_epsilon": 1.0},
    {"clip_epsilon": -0.1},
    {"clip_eps_high": -0.1},
    {"cispo_max_weight": 0.0},
    {"advantage_mode": "other"},
    {"loss_aggregation": "mean"},
    {"kl_estimator": "k2"},
    {"is_level": "group"},
    {"behavior_policy": "other"},
    {"entropy_aware_kl_quantile": 1.5},
    {"reward_low_variance_threshold": -1.0},
    {"reward_filter_var_min": -1.0},
    {"reward_filter_min_groups": 0},
    {"reward_filter_on_empty": "ask"},
    {"lora_rank": 0},
    {"lora_rank": 257},
    {"lora_alpha": 0.0},
    {"checkpoint_interval": 0},
    {"grad_checkpoint_segments": 0},
    {"seed": -1},
    {"seed": 2**63},
    {"epochs": 0},
    {"epochs": 1001},
    {"groups_per_step": 0},
    {"optimizer": {"kind": "lion"}},
    {"optimizer": {"kind": "muon", "ns_iters": 0}},
    {"optimizer": {"kind": "muon", "ns_iters": 21}},
    {"optimizer": {"kind": "muon", "momentum": 1.5}},
    {"optimizer": {"kind": "muon", "beta1": 0.9}},
    {"optimizer": {"kind": "adam_w", "epsilon": 0.0}},
    {"optimizer": {"kind": "sgd", "momentum": 0.9}},
    {"optimizer": {}},
    {"kl_reference_policy": {"kind": "ema", "refresh_every": 0}},
    {"kl_reference_policy": {"kind": "other"}},
    {"loss": {"echo": {"lambda": -1.0}}},
    {"loss": {"echo": {"env_mask_mode": "all"}}},
    {"loss": {"opd": {}}},
    {"loss": {"other": 1}},
    {"adapter_smoke_prompts": [1]},
    {"colour": "red"},
]


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_configuration_outside_its_bounds_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**DEFAULTS, **change}, GrpoConfig)


CROSS: list[tuple[dict[str, Any], str | None]] = [
    ({"kl_reference_policy": NoReference()}, "kl_reference_policy none"),
    ({"kl_reference_policy": NoReference(), "kl_coeff": 0.0}, None),
    ({"kl_reference_policy": NoReference(), "kl_estimator": "none"}, None),
    ({"entropy_aware_kl_quantile": 0.5}, None),
    ({"entropy_aware_kl_quantile": 0.5, "kl_coeff": 0.0}, "entropy_aware"),
    ({"entropy_aware_kl_quantile": 0.5, "kl_estimator": "none"}, "entropy_aware"),
    ({"loss": LossConfig(no_policy_loss=True)}, "no_policy_loss"),
    ({"loss": LossConfig(no_policy_loss=True, echo=EchoLoss())}, None),
    ({"lora_alpha": 32.5}, "lora_alpha / lora_rank"),
    ({"lora_alpha": 1000.0, "allow_high_lora_scale": True}, None),
    ({"lora_rank": 8}, "lora_alpha / lora_rank"),
    ({"reward_filter_var_min": 2.0, "reward_filter_var_max": 1.0}, "exceeds"),
    ({"reward_filter_var_min": 1.0, "reward_filter_var_max": 1.0}, None),
    ({"reward_filter_var_min": 1.0}, None),
    ({"output_name": "../x"}, "output_name"),
    ({"base_adapter": ""}, "base_adapter"),
    ({"output_name": "fine-1.0_x", "base_adapter": "b"}, None),
    ({"learning_rate": float("inf")}, "finite"),
    ({"learning_rate": float("nan")}, "invalid training"),
    ({"reward_saturation_threshold": float("nan")}, "finite"),
    ({"optimizer": Muon(momentum=float("nan"))}, "invalid training"),
    ({"optimizer": Muon(weight_decay=float("inf"))}, "finite"),
    ({"loss": LossConfig(echo=EchoLoss(lambda_=float("inf")))}, "finite"),
    ({"lora_rank": 0}, "lora_rank"),
    ({"lora_rank": -3}, "lora_rank"),
    ({"lora_rank": "8"}, "lora_rank"),
    ({"epochs": 0}, "epochs"),
]


@pytest.mark.parametrize(("change", "complaint"), CROSS, ids=str)
def test_cross_rules(change: dict[str, Any], complaint: str | None) -> None:
    """Also of configurations built in code, which no reader has checked."""
    config = GrpoConfig(**change)
    if complaint is None:
        check_grpo_config(config)
    else:
        with pytest.raises(UsageError, match=complaint):
            check_grpo_config(config)


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "x" * 128, "0", "_", "-"])
def test_safe_name_is_accepted(name: str) -> None:
    if name.strip("-_."):
        check_name(name, "adapter")
    else:
        with pytest.raises(UsageError):
            check_name(name, "adapter")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".x",
        "a/b",
        "a\\b",
        "a b",
        "a\x00",
        "a\n",
        "\u00e9",
        "x" * 129,
        "%2e",
        "a:b",
    ],
)
def test_unsafe_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not a safe name"):
        check_name(name, "adapter")


def test_seed_comes_from_the_corpus_and_never_from_the_clock() -> None:
    digest = sha("f")
    assert effective_seed(GrpoConfig(seed=5), digest) == 5
    assert effective_seed(GrpoConfig(seed=0), digest) == 0
    assert effective_seed(GrpoConfig(), digest) == 2**63 - 1
    assert effective_seed(GrpoConfig(), sha("0")) == 0
    assert effective_seed(GrpoConfig(), sha("1")) == 0x1111111111111111
