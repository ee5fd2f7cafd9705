from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from kiln_core.canonical import compact, read_record
from kiln_core.contract import (
    OpenEnvTrainingContract,
    PostEvalConfig,
    PreflightCapacity,
    PreflightReceipt,
    PreflightRequest,
    base_or_adapter,
    check_policy_adapter,
    check_preflight,
    check_same_policy,
    materialize_config,
    read_training_config,
)
from kiln_core.errors import AdmissionError, InvalidRecord, PolicyDrift, UsageError
from kiln_core.grpo import BasePerStep, EmaReference, GrpoConfig
from tests.simulators.pure import ADAPTER_POLICY, BASE_POLICY, sha


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        (None, None),
        ("base", None),
        (" BASE ", None),
        ("None", None),
        ("null", None),
        ("first", "first"),
        ("base2", "base2"),
    ],
)
def test_some_names_mean_the_base_model(name: str | None, adapter: str | None) -> None:
    assert base_or_adapter(name) == adapter


@pytest.mark.parametrize("name", ["", "../x", " first", "a/b"])
def test_other_names_must_be_safe(name: str) -> None:
    with pytest.raises(UsageError):
        base_or_adapter(name)


REQUEST = PreflightRequest(adapter="first", output_adapter="second")


def test_rollout_owned_fields_are_forced() -> None:
    request = PreflightRequest(
        adapter="first",
        output_adapter="second",
        training_config=GrpoConfig(
            output_name="other",
            base_adapter="other",
            behavior_policy="recorded",
            auto_load=False,
            lora_rank=17,
        ),
    )
    config = materialize_config(request)
    assert config == GrpoConfig(
        output_name="second",
        base_adapter="first",
        behavior_policy="no_importance_correction",
        auto_load=True,
        lora_rank=17,
    )
    assert materialize_config(PreflightRequest(output_adapter="x")).base_adapter is None


@pytest.mark.parametrize(
    ("auto_load", "gated", "loads"),
    [
        (True, False, True),
        (True, True, False),
        (False, False, False),
        (False, True, False),
    ],
)
def test_gate_defers_loading(auto_load: bool, gated: bool, loads: bool) -> None:
    request = PreflightRequest(output_adapter="x", auto_load=auto_load)
    assert materialize_config(request, gated=gated).auto_load is loads


@pytest.mark.parametrize(
    "request_",
    [
        PreflightRequest(output_adapter=""),
        PreflightRequest(output_adapter="../x"),
        PreflightRequest(output_adapter="base"),
        PreflightRequest(output_adapter="NULL"),
        PreflightRequest(output_adapter="x", adapter="a/b"),
        PreflightRequest(output_adapter="x", training_config=GrpoConfig(lora_rank=8)),
        PreflightRequest(output_adapter="x", training_config=GrpoConfig(lora_rank=0)),
    ],
)
def test_invalid_request_has_no_configuration(request_: PreflightRequest) -> None:
    with pytest.raises(UsageError):
        materialize_config(request_)


CAPACITY = PreflightCapacity(
    checked_unix_ms=1,
    queued_jobs=0,
    max_queued_jobs=1,
    tracked_jobs=0,
    max_tracked_jobs=1,
)


def receipt(**changes: Any) -> PreflightReceipt:
    values: dict[str, Any] = {
        "schema": "kiln.openenv-training-preflight.v1",
        "effective_config": materialize_config(REQUEST),
        "behavior_policy": ADAPTER_POLICY,
        "capacity": CAPACITY,
        "capacity_reserved": False,
    }
    return PreflightReceipt(**(values | changes))


def test_receipt_becomes_the_contract() -> None:
    contract = check_preflight(REQUEST, receipt())
    assert contract == OpenEnvTrainingContract(
        schema="kiln.openenv-training-contract.v1",
        effective_config=materialize_config(REQUEST),
        behavior_policy=ADAPTER_POLICY,
    )
    assert read_record(compact(contract), OpenEnvTrainingContract, "x") == contract
    assert list(msgspec.to_builtins(contract)) == [
        "schema",
        "effective_config",
        "behavior_policy",
    ]


def test_post_evaluation_is_kept_in_the_contract() -> None:
    suite = PostEvalConfig(suite="facts", min_accuracy=0.5, include_baseline=True)
    request = msgspec.structs.replace(REQUEST, post_eval=suite)
    assert check_preflight(request, receipt(post_eval=suite)).post_eval == suite


def full(**changes: int) -> PreflightCapacity:
    return msgspec.structs.replace(CAPACITY, **changes)


CONFIG = materialize_config(REQUEST)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"effective_config": msgspec.structs.replace(CONFIG, lora_rank=20, epochs=3)},
        AdmissionError,
        "lora_rank, epochs differ",
    ),
    (
        {"effective_config": msgspec.structs.replace(CONFIG, auto_load=False)},
        AdmissionError,
        "auto_load differ",
    ),
    ({"post_eval": PostEvalConfig(suite="x")}, AdmissionError, "post evaluation"),
    ({"capacity": full(queued_jobs=1)}, AdmissionError, "queue is full"),
    ({"capacity": full(tracked_jobs=1)}, AdmissionError, "queue is full"),
    ({"capacity": full(max_queued_jobs=0)}, AdmissionError, "queue is full"),
    ({"behavior_policy": UNSET}, AdmissionError, "which policy"),
    ({"behavior_policy": BASE_POLICY}, PolicyDrift, "adapter base, not first"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=str)
def test_receipt_that_does_not_answer_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_preflight(REQUEST, receipt(**change))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema", "kiln.openenv-training-preflight.v2"),
        ("capacity_reserved", True),
        ("capacity_reserved", None),
        ("capacity_reserved", 0),
        ("capacity", {}),
        ("effective_config", {"lora_rank": 0}),
        ("extra", 1),
    ],
)
def test_receipt_fails_closed(name: str, value: Any) -> None:
    document = msgspec.to_builtins(receipt())
    document[name] = value
    with pytest.raises(InvalidRecord):
        read_record(compact(document), PreflightReceipt, "x")


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"output_adapter": 1},
        {"output_adapter": "x", "auto_load": 1},
        {"output_adapter": "x", "training_config": {"colour": 1}},
        {"output_adapter": "x", "extra": 1},
    ],
)
def test_request_fails_closed(document: Any) -> None:
    with pytest.raises(InvalidRecord):
        read_record(compact(document), PreflightRequest, "x")


def test_request_has_the_documented_defaults() -> None:
    request = read_record(b'{"output_adapter":"x"}', PreflightRequest, "x")
    assert (request.adapter, request.auto_load) == ("base", True)
    assert request.training_config == GrpoConfig()
    assert request.post_eval is UNSET


@pytest.mark.parametrize(
    "values",
    [
        {"suite": ""},
        {"suite": "x", "data_scope": "other"},
        {"suite": "x", "min_accuracy": 1.5},
        {"suite": "x", "min_accuracy": 0.5, "data_scope": "train-set-eval"},
        {"suite": "x", "generation": 1},
    ],
)
def test_post_evaluation_is_checked(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecord):
        read_record(compact(values), PostEvalConfig, "x")


def test_train_set_evaluation_is_diagnostic() -> None:
    config = read_record(
        b'{"suite":"x","data_scope":"train-set-eval","generation":{"n":1}}',
        PostEvalConfig,
        "x",
    )
    assert config.min_accuracy is UNSET


def test_policy_must_answer_with_the_adapter_asked_for() -> None:
    check_policy_adapter(BASE_POLICY, None)
    check_policy_adapter(ADAPTER_POLICY, "first")
    for policy, adapter in ((BASE_POLICY, "first"), (ADAPTER_POLICY, None)):
        with pytest.raises(PolicyDrift):
            check_policy_adapter(policy, adapter)


def test_changed_policy_names_what_changed() -> None:
    check_same_policy(ADAPTER_POLICY, ADAPTER_POLICY)
    seen = msgspec.structs.replace(
        ADAPTER_POLICY, base_model_sha256=sha("9"), implementation="other"
    )
    with pytest.raises(PolicyDrift) as caught:
        check_same_policy(ADAPTER_POLICY, seen)
    assert caught.value.details["changed"] == ["base_model_sha256", "implementation"]


def test_training_config_is_read_with_its_alias() -> None:
    assert read_training_config({}) == GrpoConfig()
    config = read_training_config({"reference_policy": {"kind": "ema", "decay": 0.5}})
    assert config.kl_reference_policy == EmaReference(decay=0.5)
    named = read_training_config({"kl_reference_policy": {"kind": "base_per_step"}})
    assert named.kl_reference_policy == BasePerStep()


@pytest.mark.parametrize(
    "value",
    [
        [],
        None,
        {"colour": 1},
        {"optimizer": {"kind": "muon", "lr": 1}},
        {"lora_rank": 8},
        {"reference_policy": {"kind": "none"}},
        {"reference_policy": {"kind": "ema"}, "kl_reference_policy": {"kind": "ema"}},
    ],
)
def test_training_config_is_checked(value: Any) -> None:
    with pytest.raises(UsageError):
        read_training_config(value)
