"""Reading what a run is asked for: strictly, in a written order, normalised.

A request is an object of known members. Aliases are resolved and every default is
filled in, the seeds of a paired evaluation included, so that two requests mean the same
exactly when their records are equal. The order of the checks is that of the codes:

1. one JSON object within the bound, the form of its idempotency key;
2. (the caller looks the key up: a retained one answers before anything else counts)
3. types, bounds and unknown members;
4. environment URLs, credential handles, adapter name, reset options;
5. what only a train run takes; the paired evaluation;
6. the bounds of the collection; the training configuration.

Whether a credential, an adapter or a suite exists is the server's to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kiln_core import limits
from kiln_core.canonical import (
    JsonValue,
    printable,
    read_json,
    same_json,
    sorted_json,
    split_path,
)
from kiln_core.contract import (
    CONTRACT_SCHEMA,
    OpenEnvTrainingContract,
    PreflightRequest,
    base_or_adapter,
    materialize_config,
)
from kiln_core.discovery import environment_url
from kiln_core.errors import (
    InvalidEnvironmentEval,
    InvalidIdempotencyKey,
    InvalidRunCredential,
    InvalidRunRequest,
    InvalidRunUrl,
    KilnError,
    MalformedJson,
    UsageError,
)
from kiln_core.evaluation import MINIMUM_PAIRED_GROUPS, EnvironmentEvalConfig
from kiln_core.failure import scrubbed
from kiln_core.grpo import GrpoConfig
from kiln_core.plan import (
    CollectionControls,
    check_controls,
    reset_templates,
    seed_intervals_overlap,
)
from kiln_core.run import OpenEnvRunRequest

__all__ = [
    "RunRequestDraft",
    "contract_matches",
    "evaluation_controls",
    "preflight_of",
    "read_run_request",
    "run_controls",
    "seal_contract",
]

KEY: Final = re.compile("[A-Za-z0-9._:-]{1,128}")
EVALUATION_DEFAULTS: Final = {"groups": 20, "group_size": 1}
GATE_DEFAULTS: Final = {"min_mean_improvement": 0.0}
OPTIONAL: Final = (
    "idempotency_key",
    "thinking_budget_tokens",
    "output_adapter",
    "training_config",
    "post_eval",
    "environment_eval",
)
"""Members that may be null, which says the same as leaving them out."""
PLACES: Final[tuple[tuple[str, type[InvalidRunRequest]], ...]] = (
    ("/environment_urls", InvalidRunUrl),
    ("/credential_ids", InvalidRunCredential),
    ("/environment_eval", InvalidEnvironmentEval),
)
"""What a member with a wrong type or bound is refused with."""

ResultT = TypeVar("ResultT")


class _Typed(OpenEnvRunRequest, frozen=True, kw_only=True):
    """A request whose types are checked and whose rules are not yet."""

    def __post_init__(self) -> None:
        pass


class RunRequestDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose key is known, valid or not."""

    idempotency_key: str | None
    request: OpenEnvRunRequest | None
    """Normalised; None where it is invalid."""
    refusal: KilnError | None
    """Why it is."""

    def accepted(self) -> OpenEnvRunRequest:
        """Return the request, once its key was looked up.

        Raises:
            InvalidRunRequest: It is invalid; the message names the member.
        """
        if self.request is None:
            assert self.refusal is not None  # noqa: S101 - one of the two is there
            raise self.refusal
        return self.request


def read_run_request(data: bytes) -> RunRequestDraft:
    """Read the body of ``POST /v1/openenv/runs``.

    Args:
        data: One strict JSON object.

    Raises:
        InvalidRunRequest: It is none, or too large.
        InvalidIdempotencyKey: Its key is no opaque token.
    """
    if len(data) > limits.MAX_RUN_REQUEST_BYTES:
        raise InvalidRunRequest(
            f"a run request is over {limits.MAX_RUN_REQUEST_BYTES} bytes"
        )
    try:
        document = read_json(data, "the run request")
    except MalformedJson as error:
        raise InvalidRunRequest(error.message) from error
    if not isinstance(document, dict):
        raise InvalidRunRequest("a run request is a JSON object")
    key = document.get("idempotency_key")
    if key is not None and not (isinstance(key, str) and KEY.fullmatch(key)):
        raise InvalidIdempotencyKey(
            "idempotency_key is not 1 to 128 characters of A-Z a-z 0-9 . _ : -"
        )
    try:
        return RunRequestDraft(
            idempotency_key=key, request=_normalised(document), refusal=None
        )
    except InvalidRunRequest as error:
        return RunRequestDraft(idempotency_key=key, request=None, refusal=error)


def run_controls(request: OpenEnvRunRequest) -> CollectionControls:
    """Return the controls of a run's collection."""
    budget = request.thinking_budget_tokens
    return CollectionControls(
        groups=request.groups,
        group_size=request.group_size,
        seed_start=request.seed_start,
        max_steps=request.max_steps,
        concurrency=request.concurrency,
        max_action_tokens=request.max_action_tokens,
        thinking_budget_tokens=None if isinstance(budget, UnsetType) else budget,
        temperature=request.temperature,
        thinking=request.thinking,
        protocol_error_reward=request.protocol_error_reward,
        max_recoverable_errors=request.max_recoverable_errors,
        capacity_wait_seconds=request.capacity_wait_seconds,
    )


def evaluation_controls(
    request: OpenEnvRunRequest, config: EnvironmentEvalConfig
) -> CollectionControls:
    """Return the controls of both sides of a run's paired evaluation.

    Args:
        request: The run's.
        config: Its evaluation, normalised.
    """
    assert not isinstance(config.seed_start, UnsetType)  # noqa: S101 - reading fills it
    return msgspec.structs.replace(
        run_controls(request),
        groups=config.groups,
        group_size=config.group_size,
        seed_start=config.seed_start,
        concurrency=min(request.concurrency, config.group_size),
    )


def preflight_of(request: OpenEnvRunRequest) -> PreflightRequest:
    """Return the preflight that a train run stands for."""
    assert not isinstance(request.output_adapter, UnsetType)  # noqa: S101 - a train run
    config = request.training_config
    return PreflightRequest(
        adapter=request.adapter,
        output_adapter=request.output_adapter,
        training_config=GrpoConfig() if isinstance(config, UnsetType) else config,
        auto_load=request.auto_load,
        post_eval=request.post_eval,
    )


def gated(request: OpenEnvRunRequest) -> bool:
    """Say whether a paired evaluation decides on loading the adapter."""
    config = request.environment_eval
    return not isinstance(config, UnsetType) and config.gate is not UNSET


def seal_contract(request: OpenEnvRunRequest, **sealed: Any) -> OpenEnvTrainingContract:
    """Materialise the training contract of a train run.

    Args:
        request: Normalised.
        **sealed: ``behavior_policy``; left out only for records of version 4.

    Raises:
        UsageError: The configuration is invalid.
    """
    config = materialize_config(preflight_of(request), gated=gated(request))
    return OpenEnvTrainingContract(
        schema=CONTRACT_SCHEMA,
        effective_config=config,
        post_eval=request.post_eval,
        **sealed,
    )


def contract_matches(
    request: OpenEnvRunRequest, contract: OpenEnvTrainingContract | UnsetType
) -> bool:
    """Say whether a sealed contract is that of a request.

    A rollout has none. A train run has one with the configuration its request stands
    for, the same post evaluation, and a policy of the request's adapter; records that
    were sealed from version 4 name no policy.
    """
    if request.kind == "rollout" or isinstance(contract, UnsetType):
        return request.kind == "rollout" and contract is UNSET
    try:
        expected = seal_contract(request, behavior_policy=contract.behavior_policy)
        adapter = base_or_adapter(request.adapter)
    except UsageError:
        return False
    policy = contract.behavior_policy
    named = isinstance(policy, UnsetType) or policy.adapter_name == adapter
    return named and same_json(
        msgspec.to_builtins(contract), msgspec.to_builtins(expected)
    )


def _normalised(document: dict[str, JsonValue]) -> OpenEnvRunRequest:
    """Return the record of a request, every default filled in.

    Raises:
        InvalidRunRequest: A rule is broken.
    """
    typed = _typed(_without_aliases(document))
    urls = [_refusing(InvalidRunUrl, _url, url) for url in typed.environment_urls]
    changes: dict[str, Any] = {
        "environment_urls": urls,
        "credential_ids": _credentials(typed),
        "adapter": _refusing(InvalidRunRequest, base_or_adapter, typed.adapter)
        or "base",
        **_resets(typed),
    }
    if typed.kind == "train" and typed.training_config is UNSET:
        changes["training_config"] = GrpoConfig()
    values = {name: getattr(typed, name) for name in typed.__struct_fields__}
    try:
        request = OpenEnvRunRequest(**{**values, **changes})
    except ValueError as error:
        raise InvalidRunRequest(str(error)) from error
    request = _with_evaluation(request)
    _refusing(InvalidRunRequest, check_controls, run_controls(request), len(urls))
    if request.kind == "train":
        _refusing(InvalidRunRequest, seal_contract, request)
    return request


def _without_aliases(document: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Resolve aliases, and the defaults whose records demand a value."""
    values = {
        name: value
        for name, value in document.items()
        if value is not None or name not in OPTIONAL
    }
    _rename(values, "environments", "environment_urls")
    config = values.get("training_config")
    if isinstance(config, dict):
        values["training_config"] = config = dict(config)
        _rename(config, "reference_policy", "kl_reference_policy")
    post_eval = values.get("post_eval")
    if isinstance(post_eval, dict):
        values["post_eval"] = sorted_json(_present(post_eval))
    evaluation = values.get("environment_eval")
    if isinstance(evaluation, dict):
        evaluation = {**EVALUATION_DEFAULTS, **_present(evaluation)}
        if isinstance(evaluation.get("gate"), dict):
            evaluation["gate"] = {**GATE_DEFAULTS, **_present(evaluation["gate"])}
        values["environment_eval"] = evaluation
    return values


def _present(document: dict[str, JsonValue]) -> dict[str, JsonValue]:
    return {name: value for name, value in document.items() if value is not None}


def _rename(values: dict[str, JsonValue], alias: str, name: str) -> None:
    """Resolve one alias.

    Raises:
        InvalidRunRequest: Both names are there.
    """
    if alias in values:
        if name in values:
            raise InvalidRunRequest(f"{alias} is an alias of {name}; give one of them")
        values[name] = values.pop(alias)


def _typed(values: dict[str, JsonValue]) -> _Typed:
    """Check types, bounds and names.

    Raises:
        InvalidRunRequest: One is wrong; ``details["pointer"]`` says where.
    """
    try:
        return msgspec.convert(values, _Typed)
    except msgspec.ValidationError as error:
        reason, pointer = split_path(str(error))
        refusal = next(
            (kind for place, kind in PLACES if pointer.startswith(place)),
            InvalidRunRequest,
        )
        raise refusal(
            f"the run request is invalid at {pointer or 'its root'}: "
            f"{printable(reason)}",
            pointer=pointer,
        ) from error


def _url(text: str) -> str:
    return environment_url(text, default_scheme=False)


def _credentials(typed: OpenEnvRunRequest) -> list[str | None]:
    """Return one handle per environment, or none at all.

    Raises:
        InvalidRunCredential: They do not align.
    """
    handles = typed.credential_ids
    if handles and len(handles) != len(typed.environment_urls):
        raise InvalidRunCredential(
            f"{len(handles)} credential_ids for {len(typed.environment_urls)} "
            "environments"
        )
    return list(handles) if any(handle is not None for handle in handles) else []


def _resets(typed: OpenEnvRunRequest) -> dict[str, Any]:
    """Return both forms of reset options, with their keys in canonical order."""
    _refusing(
        InvalidRunRequest,
        reset_templates,
        typed.reset_options,
        list(typed.environment_reset_options),
        len(typed.environment_urls),
    )
    return {
        "reset_options": sorted_json(typed.reset_options),
        "environment_reset_options": sorted_json(typed.environment_reset_options),
    }


def _with_evaluation(request: OpenEnvRunRequest) -> OpenEnvRunRequest:
    """Fill in where held-out seeds start, and check the paired evaluation.

    Raises:
        InvalidEnvironmentEval: A rule is broken.
    """
    config = request.environment_eval
    if isinstance(config, UnsetType):
        return request
    if isinstance(config.seed_start, UnsetType):
        start = request.seed_start + request.groups
        if start > limits.MAX_SEED:
            raise InvalidEnvironmentEval("no seed is left for the evaluation")
        config = msgspec.structs.replace(config, seed_start=start)
    for broken, message in _evaluation_rules(request, config):
        if broken:
            raise InvalidEnvironmentEval(message)
    _refusing(
        InvalidEnvironmentEval,
        check_controls,
        evaluation_controls(request, config),
        len(request.environment_urls),
    )
    return msgspec.structs.replace(request, environment_eval=config)


def _evaluation_rules(
    request: OpenEnvRunRequest, config: EnvironmentEvalConfig
) -> tuple[tuple[bool, str], ...]:
    assert not isinstance(config.seed_start, UnsetType)  # noqa: S101 - filled in before
    has_gate = config.gate is not UNSET
    post_eval = request.post_eval
    has_floor = (
        not isinstance(post_eval, UnsetType) and post_eval.min_accuracy is not UNSET
    )
    return (
        (
            request.output_adapter == request.adapter,
            "output_adapter must differ from the behaviour adapter, "
            "or there is nothing to compare with",
        ),
        (
            seed_intervals_overlap(
                request.seed_start, request.groups, config.seed_start, config.groups
            ),
            "environment_eval uses seeds of the training interval",
        ),
        (
            has_gate and has_floor,
            "environment_eval.gate and post_eval.min_accuracy exclude each other: "
            "one of them decides on promotion",
        ),
        (
            has_gate and config.groups < MINIMUM_PAIRED_GROUPS,
            f"environment_eval.gate needs at least {MINIMUM_PAIRED_GROUPS} groups",
        ),
    )


def _refusing(
    refusal: type[InvalidRunRequest],
    check: Callable[..., ResultT],
    *values: Any,
) -> ResultT:
    """Call a check of the core, and refuse in the words of a run request."""
    try:
        return check(*values)
    except UsageError as error:
        failure = refusal(scrubbed(error.message), hint=error.hint or None)
        raise failure from error


def changed_members(left: OpenEnvRunRequest, right: OpenEnvRunRequest) -> list[str]:
    """Return the names of the members in which two normalised requests differ."""
    one, other = msgspec.to_builtins(left), msgspec.to_builtins(right)
    return [
        name
        for name in OpenEnvRunRequest.__struct_fields__
        if not same_json(one.get(name), other.get(name))
    ]
