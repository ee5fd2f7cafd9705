"""`kiln_core/run_request.py`: what may be asked for, and what means the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from kiln_core import limits
from kiln_core.canonical import compact, read_record
from kiln_core.contract import OpenEnvTrainingContract
from kiln_core.errors import (
    InvalidEnvironmentEval,
    InvalidIdempotencyKey,
    InvalidRunCredential,
    InvalidRunRequest,
    InvalidRunUrl,
)
from kiln_core.provenance import AdapterIdentity, BehaviorPolicyIdentity
from kiln_core.run import OpenEnvRunRequest
from kiln_core.run_request import (
    RunRequestDraft,
    changed_members,
    contract_matches,
    evaluation_controls,
    preflight_of,
    read_run_request,
    run_controls,
    seal_contract,
)

encoder = msgspec.json.Encoder()
URL = "http://127.0.0.1:8990"
ROLLOUT: dict[str, Any] = {"environment_urls": [URL]}
TRAIN: dict[str, Any] = {**ROLLOUT, "kind": "train", "output_adapter": "next"}
EVALUATED = {**TRAIN, "environment_eval": {}}
POLICY = BehaviorPolicyIdentity(
    served_model_id="tiny",
    base_model_sha256="sha256:" + "0" * 64,
    inference_config_sha256="sha256:" + "1" * 64,
    implementation="kiln/test",
)


def written(document: object) -> bytes:
    return msgspec.json.format(encoder.encode(document))


def draft(document: object) -> RunRequestDraft:
    return read_run_request(written(document))


def asked(document: object) -> OpenEnvRunRequest:
    request = draft(document).accepted()
    assert read_record(compact(request), OpenEnvRunRequest, "request") == request
    return request


def refused(document: object) -> InvalidRunRequest:
    with pytest.raises(InvalidRunRequest) as caught:
        draft(document).accepted()
    return caught.value


# Normalisation


def test_every_default_is_filled_in() -> None:
    assert msgspec.to_builtins(asked(ROLLOUT)) == {
        "kind": "rollout",
        "environment_urls": [URL],
        "credential_ids": [],
        "adapter": "base",
        "groups": 8,
        "group_size": 4,
        "seed_start": 0,
        "reset_options": {},
        "environment_reset_options": [],
        "max_steps": 8,
        "concurrency": 4,
        "max_action_tokens": 256,
        "temperature": 1.0,
        "thinking": True,
        "protocol_error_reward": -1.0,
        "max_recoverable_errors": 3,
        "capacity_wait_seconds": 300,
        "auto_load": True,
    }


def test_evaluation_defaults_are_filled_in() -> None:
    document = {**TRAIN, "seed_start": 5, "environment_eval": {"gate": {}}}
    assert msgspec.to_builtins(asked(document).environment_eval) == {
        "groups": 20,
        "group_size": 1,
        "seed_start": 13,
        "gate": {"min_mean_improvement": 0.0},
    }


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alias of environments": (ROLLOUT, {"environments": [URL]}),
    "spelling of a URL": (ROLLOUT, {"environment_urls": [" HTTP://127.0.0.1:8990/ "]}),
    "defaults": (ROLLOUT, {**ROLLOUT, "groups": 8, "thinking": True}),
    "integer for a number": (ROLLOUT, {**ROLLOUT, "temperature": 1}),
    "null for an optional": (
        ROLLOUT,
        {**ROLLOUT, "idempotency_key": None, "post_eval": None},
    ),
    "null handles": (ROLLOUT, {**ROLLOUT, "credential_ids": [None]}),
    "base model": (ROLLOUT, {**ROLLOUT, "adapter": " None "}),
    "order of keys": (
        {**ROLLOUT, "reset_options": {"a": 1, "b": {"c": 1, "d": 2}}},
        {**ROLLOUT, "reset_options": {"b": {"d": 2, "c": 1}, "a": 1}},
    ),
    "training defaults": (TRAIN, {**TRAIN, "training_config": {}}),
    "reference policy": (
        {**TRAIN, "training_config": {"kl_reference_policy": {"kind": "ema"}}},
        {**TRAIN, "training_config": {"reference_policy": {"kind": "ema"}}},
    ),
    "evaluation": (
        EVALUATED,
        {
            **TRAIN,
            "environment_eval": {
                "groups": 20,
                "group_size": 1,
                "seed_start": 8,
                "gate": None,
            },
        },
    ),
    "gate": (
        {**TRAIN, "environment_eval": {"gate": {}}},
        {
            **TRAIN,
            "environment_eval": {
                "gate": {"min_mean_improvement": 0, "min_mean_return": None}
            },
        },
    ),
    "order of generation keys": (
        {**TRAIN, "post_eval": {"suite": "s", "generation": {"a": 1, "b": 2}}},
        {**TRAIN, "post_eval": {"generation": {"b": 2, "a": 1}, "suite": "s"}},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_two_ways_to_say_the_same(case: str) -> None:
    one, other = map(asked, SAME[case])
    assert compact(one) == compact(other)
    assert changed_members(one, other) == []


@pytest.mark.parametrize(
    ("one", "other", "member"),
    [
        ({"reset_options": {"a": 1}}, {"reset_options": {"a": 1.0}}, "reset_options"),
        ({"reset_options": {"a": 1}}, {"reset_options": {"a": True}}, "reset_options"),
        ({"seed_start": 1}, {}, "seed_start"),
        ({"thinking_budget_tokens": 0}, {}, "thinking_budget_tokens"),
        ({"idempotency_key": "k"}, {}, "idempotency_key"),
    ],
)
def test_what_does_not_mean_the_same(
    one: dict[str, Any], other: dict[str, Any], member: str
) -> None:
    pair = [asked({**ROLLOUT, **part}) for part in (one, other)]
    assert changed_members(*pair) == [member]


def test_normalising_again_changes_nothing() -> None:
    for document in (ROLLOUT, TRAIN, {**EVALUATED, "adapter": "old"}):
        once = asked(document)
        assert compact(asked(msgspec.to_builtins(once))) == compact(once)


# Refusals


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"a":1,"a":2}', b"\xff", b"null"])
def test_body_that_is_no_object(data: bytes) -> None:
    with pytest.raises(InvalidRunRequest):
        read_run_request(data)


def test_body_over_the_bound() -> None:
    fits = written(ROLLOUT).ljust(limits.MAX_RUN_REQUEST_BYTES)
    assert read_run_request(fits).accepted()
    with pytest.raises(InvalidRunRequest, match="over 1048576 bytes"):
        read_run_request(fits + b" ")


@pytest.mark.parametrize("key", ["", "a b", "a\n", "é", "x" * 129, 7, [], "a/b"])
def test_key_that_is_no_token(key: object) -> None:
    """It is refused before anything else, so also beside other faults."""
    with pytest.raises(InvalidIdempotencyKey) as caught:
        draft({"idempotency_key": key})
    assert caught.value.code == "openenv_invalid_idempotency_key"


@pytest.mark.parametrize("key", ["a", "A-z_0.9:", "x" * 128])
def test_key_that_is_a_token(key: str) -> None:
    assert draft({**ROLLOUT, "idempotency_key": key}).idempotency_key == key
    assert draft({"idempotency_key": key}).idempotency_key == key


REFUSED: dict[str, tuple[dict[str, Any], type[InvalidRunRequest], str]] = {
    "unknown member": ({**ROLLOUT, "grups": 2}, InvalidRunRequest, "`grups`"),
    "unknown inner member": (
        {**TRAIN, "training_config": {"lerning_rate": 1}},
        InvalidRunRequest,
        "`lerning_rate`",
    ),
    "wrong type": ({**ROLLOUT, "groups": "8"}, InvalidRunRequest, "/groups"),
    "true for a number": ({**ROLLOUT, "groups": True}, InvalidRunRequest, "/groups"),
    "alias and name": (
        {**ROLLOUT, "environments": [URL]},
        InvalidRunRequest,
        "environments is an alias",
    ),
    "inner alias and name": (
        {
            **TRAIN,
            "training_config": {
                "reference_policy": {"kind": "none"},
                "kl_reference_policy": {"kind": "none"},
            },
        },
        InvalidRunRequest,
        "reference_policy is an alias",
    ),
    "null for a default": ({**ROLLOUT, "groups": None}, InvalidRunRequest, "/groups"),
    "no environment": ({}, InvalidRunRequest, "environment_urls"),
    "empty environments": ({"environments": []}, InvalidRunUrl, "environment_urls"),
    "no URL": ({"environments": ["nonsense"]}, InvalidRunUrl, "no"),
    "another scheme": ({"environments": ["ftp://h"]}, InvalidRunUrl, "http"),
    "user": ({"environments": ["http://u:pw@h"]}, InvalidRunUrl, "user name"),
    "query": ({"environments": ["http://h/?q=pw"]}, InvalidRunUrl, "query"),
    "user and query": ({"environments": ["http://u:pw@h?pw"]}, InvalidRunUrl, "query"),
    "malformed port": ({"environments": ["http://u:pw@h:x"]}, InvalidRunUrl, "h:x"),
    "handle": ({**ROLLOUT, "credential_ids": ["-"]}, InvalidRunCredential, "/0"),
    "handles": (
        {**ROLLOUT, "credential_ids": ["a", None]},
        InvalidRunCredential,
        "2 credential_ids for 1",
    ),
    "adapter": ({**ROLLOUT, "adapter": "../x"}, InvalidRunRequest, "safe name"),
    "both resets": (
        {**ROLLOUT, "reset_options": {"a": 1}, "environment_reset_options": [{}]},
        InvalidRunRequest,
        "not both",
    ),
    "resets": (
        {**ROLLOUT, "environment_reset_options": [{}, {}]},
        InvalidRunRequest,
        "2 reset options for 1",
    ),
    "rollout that trains": (
        {**ROLLOUT, "output_adapter": "a"},
        InvalidRunRequest,
        "takes no output_adapter",
    ),
    "rollout that evaluates": (
        {**ROLLOUT, "environment_eval": {}},
        InvalidRunRequest,
        "takes no environment_eval",
    ),
    "rollout with a suite": (
        {**ROLLOUT, "post_eval": {"suite": "s"}},
        InvalidRunRequest,
        "takes no post_eval",
    ),
    "training without a name": (
        {**ROLLOUT, "kind": "train"},
        InvalidRunRequest,
        "needs output_adapter",
    ),
    "unsafe name": ({**TRAIN, "output_adapter": ".a"}, InvalidRunRequest, "safe name"),
    "base as a name": ({**TRAIN, "output_adapter": "Base"}, InvalidRunRequest, "base"),
    "training rule": (
        {**TRAIN, "training_config": {"lora_rank": 1, "lora_alpha": 64}},
        InvalidRunRequest,
        "lora_alpha",
    ),
    "more environments than groups": (
        {"environments": [URL] * 9},
        InvalidRunRequest,
        "groups must be 9",
    ),
    "rollouts": (
        {**ROLLOUT, "groups": 16384, "group_size": 2},
        InvalidRunRequest,
        "16384",
    ),
    "last seed": (
        {**ROLLOUT, "seed_start": limits.MAX_SEED, "groups": 2},
        InvalidRunRequest,
        "2^63-1",
    ),
    "budget without thinking": (
        {**ROLLOUT, "thinking": False, "thinking_budget_tokens": 1},
        InvalidRunRequest,
        "thinking",
    ),
    "budget": (
        {**ROLLOUT, "max_action_tokens": 4, "thinking_budget_tokens": 4},
        InvalidRunRequest,
        "budget",
    ),
    "suite": (
        {
            **TRAIN,
            "post_eval": {
                "suite": "s",
                "data_scope": "train-set-eval",
                "min_accuracy": 0.5,
            },
        },
        InvalidRunRequest,
        "min_accuracy",
    ),
    "evaluation of itself": (
        {**EVALUATED, "adapter": "next"},
        InvalidEnvironmentEval,
        "must differ",
    ),
    "evaluation type": (
        {**TRAIN, "environment_eval": {"groups": 0}},
        InvalidEnvironmentEval,
        "/environment_eval/groups",
    ),
    "unknown gate": (
        {**TRAIN, "environment_eval": {"gate": {"min": 1}}},
        InvalidEnvironmentEval,
        "`min`",
    ),
    "gate of 19": (
        {**TRAIN, "environment_eval": {"groups": 19, "gate": {}}},
        InvalidEnvironmentEval,
        "at least 20",
    ),
    "negative improvement": (
        {**TRAIN, "environment_eval": {"gate": {"min_mean_improvement": -1}}},
        InvalidEnvironmentEval,
        "min_mean_improvement",
    ),
    "two owners of promotion": (
        {
            **TRAIN,
            "environment_eval": {"gate": {}},
            "post_eval": {"suite": "s", "min_accuracy": 0.5},
        },
        InvalidEnvironmentEval,
        "exclude each other",
    ),
    "fewer held-out groups than environments": (
        {
            **TRAIN,
            "environment_urls": [URL] * 2,
            "environment_eval": {"groups": 1},
        },
        InvalidEnvironmentEval,
        "groups must be 2",
    ),
    "held-out rollouts": (
        {**TRAIN, "environment_eval": {"groups": 16384, "group_size": 2}},
        InvalidEnvironmentEval,
        "16384",
    ),
    "no seed left": (
        {**EVALUATED, "groups": 1, "seed_start": limits.MAX_SEED},
        InvalidEnvironmentEval,
        "no seed is left",
    ),
    "too few seeds left": (
        {**EVALUATED, "groups": 1, "seed_start": limits.MAX_SEED - 19},
        InvalidEnvironmentEval,
        "2^63-1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    document, kind, message = REFUSED[case]
    error = refused(document)
    assert type(error) is kind
    assert message in error.message
    assert "pw" not in str(error.document())


def test_request_without_an_object_for_evaluation() -> None:
    assert "/environment_eval" in refused({**TRAIN, "environment_eval": 3}).message
    document = {**TRAIN, "environment_eval": {"gate": 3}}
    assert "/environment_eval/gate" in refused(document).message
    assert "/post_eval" in refused({**TRAIN, "post_eval": 3}).message
    assert "/training_config" in refused({**TRAIN, "training_config": 3}).message


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("member", ["min_mean_return", "min_mean_improvement"])
def test_thresholds_are_finite(text: str, member: str) -> None:
    document = {**TRAIN, "environment_eval": {"gate": {member: "value"}}}
    data = written(document).replace(b'"value"', text.encode())
    with pytest.raises(InvalidRunRequest):
        read_run_request(data).accepted()


ORDER = [
    ({"environment_urls": ["ftp://h"]}, InvalidRunUrl),
    ({"credential_ids": ["a", "b"]}, InvalidRunCredential),
    ({"adapter": "a/b"}, InvalidRunRequest),
    (
        {"environment_eval": {"groups": 19, "gate": {}}},
        InvalidEnvironmentEval,
    ),
    ({"seed_start": limits.MAX_SEED}, InvalidRunRequest),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_first_check_in_order_refuses(first: int) -> None:
    document: dict[str, Any] = {**ROLLOUT, "kind": "train", "output_adapter": "next"}
    for part, _ in reversed(ORDER[first:]):
        document |= part
    assert type(refused(document)) is ORDER[first][1]


@given(
    start=st.integers(0, 60),
    groups=st.integers(1, 30),
    held_out=st.integers(0, 120),
    evaluated=st.integers(1, 30),
)
def test_held_out_seeds_are_disjoint(
    start: int, groups: int, held_out: int, evaluated: int
) -> None:
    document = {
        **TRAIN,
        "seed_start": start,
        "groups": groups,
        "environment_eval": {"seed_start": held_out, "groups": evaluated},
    }
    trained = set(range(start, start + groups))
    if trained & set(range(held_out, held_out + evaluated)):
        assert isinstance(refused(document), InvalidEnvironmentEval)
    else:
        assert asked(document)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [*OpenEnvRunRequest.__struct_fields__, "gate", "suite", "x"]
                ),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    )
)
def test_any_document_is_read_or_refused(document: object) -> None:
    try:
        request = draft(document).accepted()
    except InvalidRunRequest:
        return
    assert compact(asked(msgspec.to_builtins(request))) == compact(request)


# What a request stands for


def test_controls_of_both_collections() -> None:
    request = asked(
        {
            **TRAIN,
            "concurrency": 3,
            "thinking_budget_tokens": 7,
            "environment_eval": {"group_size": 2},
        }
    )
    controls = run_controls(request)
    assert (controls.groups, controls.thinking_budget_tokens) == (8, 7)
    held_out = evaluation_controls(request, request.environment_eval)  # type: ignore[arg-type]  # it is there
    assert (held_out.groups, held_out.group_size, held_out.seed_start) == (20, 2, 8)
    assert (controls.concurrency, held_out.concurrency) == (3, 2)


def test_gate_takes_over_loading() -> None:
    for evaluation, loads in (({}, True), ({"gate": {}}, False)):
        request = asked({**TRAIN, "environment_eval": evaluation})
        contract = seal_contract(request, behavior_policy=POLICY)
        assert contract.effective_config.auto_load is loads
        assert contract_matches(request, contract)


def sealed(document: dict[str, Any], **changes: Any) -> OpenEnvTrainingContract:
    return seal_contract(asked(document), **changes)


WITH_ADAPTER = msgspec.structs.replace(
    POLICY, adapter=AdapterIdentity(name="old", content_sha256="sha256:" + "2" * 64)
)
OTHER_CONTRACTS: dict[str, OpenEnvTrainingContract] = {
    "another configuration": sealed(
        {**TRAIN, "training_config": {"kl_coeff": 0.2}}, behavior_policy=POLICY
    ),
    "another name": sealed({**TRAIN, "output_adapter": "o"}, behavior_policy=POLICY),
    "another suite": sealed(
        {**TRAIN, "post_eval": {"suite": "s"}}, behavior_policy=POLICY
    ),
    "another adapter": sealed(TRAIN, behavior_policy=WITH_ADAPTER),
    "no auto_load": sealed({**TRAIN, "auto_load": False}, behavior_policy=POLICY),
}


@pytest.mark.parametrize("case", OTHER_CONTRACTS)
def test_contract_of_another_request(case: str) -> None:
    assert not contract_matches(asked(TRAIN), OTHER_CONTRACTS[case])


def test_contract_of_a_request() -> None:
    request = asked({**TRAIN, "adapter": "old", "post_eval": {"suite": "s"}})
    assert contract_matches(request, seal_contract(request))
    contract = seal_contract(request, behavior_policy=WITH_ADAPTER)
    assert contract_matches(request, contract)
    assert not contract_matches(request, UNSET)
    rollout = asked(ROLLOUT)
    assert contract_matches(rollout, UNSET)
    assert not contract_matches(rollout, contract)


def test_contract_of_a_request_that_is_no_longer_valid() -> None:
    request = msgspec.structs.replace(asked(TRAIN), output_adapter="base")
    assert not contract_matches(request, sealed(TRAIN))


def test_preflight_of_a_request() -> None:
    request = msgspec.structs.replace(asked(TRAIN), training_config=UNSET)
    assert preflight_of(request) == preflight_of(asked(TRAIN))
