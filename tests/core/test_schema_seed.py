"""The structs against the published schema, field by field."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import msgspec
import pytest
from msgspec import inspect

import kiln_core
from kiln_core import discovery, evaluation, evidence, manifest, receipt
from kiln_core.canonical import END, Record, read_record
from kiln_core.errors import InvalidRecord
from tests.core.bundles import DROP, Parts, bytes_of, put, small_collection
from tests.core.schema_seed import (
    CLOSED,
    ENUMS,
    FIELD_COUNTS,
    MAX_SEED,
    OBJECTS,
    SHA256,
)
from tests.simulators.pure import sha

STRUCTS: dict[str, type[msgspec.Struct]] = {
    struct.__name__: struct
    for struct in (
        discovery.Metadata,
        discovery.EnvironmentIdentity,
        discovery.EnvironmentSchema,
        discovery.EnvironmentInspection,
        manifest.ProtocolError,
        manifest.Observation,
        receipt.RolloutRecord,
        receipt.RolloutStats,
        receipt.OpenEnvTrainingSelection,
        receipt.OpenEnvRolloutSummary,
        manifest.ReplayExchange,
        manifest.ReplayCandidate,
        manifest.ReplayGroup,
        manifest.OpenEnvReplayManifest,
        evaluation.EnvironmentEvalGate,
        evaluation.EnvironmentEvalConfig,
        evaluation.EnvironmentEvalEvidence,
        evidence.EnvironmentEvaluationReceipt,
        evidence.PolicyIdentity,
        receipt.VerificationReport,
        receipt.OpenEnvArtifactDownloadReceipt,
        receipt.ReplayRunReport,
    )
}
ENUM_HOMES = {
    "EpisodeTermination": receipt,
    "EnvironmentEvalDecision": evaluation,
    "EnvironmentEvalOutcome": evidence,
}
CONSTANT_BY_CODE = {("EnvironmentEvalEvidence", "exact_sign_test_alpha")}
"""A constant number cannot be a Literal; the struct checks it itself."""

RUN = "0b9a4c1e-6f0d-4c58-9a57-3f1d2e4b5a69"

PRIMITIVES = {
    inspect.BoolType: "boolean",
    inspect.NoneType: "null",
    inspect.AnyType: "any",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "string",
}
ORDER = ["string", "null", "boolean", "integer", "number"]


def described(info: inspect.Type) -> tuple[str, dict[str, Any]]:
    """Return a type and its constraints in the words of the published page."""
    if isinstance(info, inspect.Metadata):
        return described(info.type)
    if isinstance(info, inspect.UnionType):
        return described_union(info)
    if isinstance(info, inspect.LiteralType):
        values = list(info.values)
        return ("any", {"const": values[0]}) if len(values) == 1 else enum(values)
    if isinstance(info, inspect.EnumType):
        return info.cls.__name__, {}
    if isinstance(info, inspect.StructType):
        return info.cls.__name__, {}
    if isinstance(info, inspect.DictType):
        return "object", {}
    if isinstance(info, inspect.ListType):
        return described_list(info)
    if isinstance(info, inspect.StrType) and info.pattern == SHA256:
        assert info.max_length == 71
        return "Sha256", {}
    return PRIMITIVES[type(info)], constraints(info)


def enum(values: list[Any]) -> tuple[str, dict[str, Any]]:
    return "string", {"enum": sorted(values)}


def described_union(info: inspect.UnionType) -> tuple[str, dict[str, Any]]:
    members = [part for part in info.types if not isinstance(part, inspect.CustomType)]
    members = [part for part in members if "Unset" not in type(part).__name__]
    if {getattr(part, "cls", None) for part in members} == {
        manifest.ObservationResult,
        manifest.ProtocolErrorResult,
    }:
        return "ReplayExchangeResult", {}
    if len(members) == 1:
        return described(members[0])
    names = [described(part)[0] for part in members]
    if set(names) == {"null", "boolean", "integer", "number"}:
        return "null | boolean | integer | number", {}
    return " | ".join(sorted(names, key=lambda n: n == "null")), {}


def described_list(info: inspect.ListType) -> tuple[str, dict[str, Any]]:
    item = described(info.item_type)[0]
    limits = {"minItems": info.min_length, "maxItems": info.max_length}
    found = {key: value for key, value in limits.items() if value is not None}
    return ("array" if item == "any" else f"array<{item}>"), found


def constraints(info: Any) -> dict[str, Any]:
    names = {
        "ge": "minimum",
        "le": "maximum",
        "min_length": "minLength",
        "max_length": "maxLength",
        "pattern": "pattern",
        "gt": "exclusiveMinimum",
        "lt": "exclusiveMaximum",
    }
    found = {
        word: getattr(info, name)
        for name, word in names.items()
        if getattr(info, name, None) is not None
    }
    if "pattern" in found:
        found["pattern"] = found["pattern"].replace(END, "$")
    return found


def test_transcription_has_every_published_field() -> None:
    assert {name: len(fields) for name, (_, fields) in OBJECTS.items()} == FIELD_COUNTS


def test_every_definition_is_implemented() -> None:
    assert set(OBJECTS) | set(ENUMS) == set(STRUCTS) | set(ENUM_HOMES)


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_struct_has_exactly_the_published_fields(name: str) -> None:
    closed, fields = OBJECTS[name]
    struct = STRUCTS[name]
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    assert info.forbid_unknown_fields == (closed == CLOSED)
    found = [(f.encode_name, f.required) for f in info.fields]
    assert found == [(field, required) for field, required, _, _ in fields]


@pytest.mark.parametrize(
    ("name", "row"),
    [(name, row) for name in sorted(STRUCTS) for row in range(FIELD_COUNTS[name])],
)
def test_field_has_the_published_type_and_bounds(name: str, row: int) -> None:
    field, _, published, limits = OBJECTS[name][1][row]
    info = inspect.type_info(STRUCTS[name])
    assert isinstance(info, inspect.StructType)
    if (name, field) in CONSTANT_BY_CODE:
        return
    limits = dict(limits)
    if "enum" in limits:
        limits["enum"] = sorted(limits["enum"])
    default = limits.pop("default", None)
    assert described(info.fields[row].type) == (published, limits)
    if default is not None:
        assert info.fields[row].default == default


@pytest.mark.parametrize("name", sorted(ENUM_HOMES))
def test_enumeration_has_the_published_values(name: str) -> None:
    members = getattr(ENUM_HOMES[name], name)
    assert [member.value for member in members] == ENUMS[name]


def own_records() -> list[type[msgspec.Struct]]:
    """Return every record of the pure core."""
    waiting: list[type[msgspec.Struct]] = [Record]
    found: list[type[msgspec.Struct]] = []
    while waiting:
        children = waiting.pop().__subclasses__()
        waiting += children
        found += [c for c in children if c.__module__.startswith("kiln_core.")]
    return found


def test_every_record_has_an_exported_schema_of_one_name() -> None:
    """``contracts/`` is generated from the structs."""
    for module in pkgutil.iter_modules(kiln_core.__path__):
        if module.name != "drive":
            importlib.import_module(f"kiln_core.{module.name}")
    records = own_records()
    assert len(records) > 60
    names = [record.__name__ for record in records]
    assert len(set(names)) == len(names)
    _, components = msgspec.json.schema_components(records)
    for record in records:
        assert components[record.__name__]["additionalProperties"] is False


def test_every_record_is_described_field_by_field() -> None:
    """House style: one line of meaning per class."""
    for record in own_records():
        assert (record.__doc__ or "").strip(), record


def test_exported_schema_is_closed_where_the_published_one_is() -> None:
    _, components = msgspec.json.schema_components(list(STRUCTS.values()))
    for name in STRUCTS:
        extra = components[name].get("additionalProperties", True)
        assert extra is (OBJECTS[name][0] != CLOSED), name


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    """One valid document per definition that a small bundle shows."""
    parts = Parts(bytes_of(small_collection(contract=True).bundle()))
    summary, replay = parts.summary, parts.replay
    candidate = replay["groups"][0]["candidates"][1]
    error = next(
        e["result"]["error"]
        for e in candidate["exchanges"]
        if e["result"]["kind"] == "protocol_error"
    )
    return {
        "OpenEnvRolloutSummary": summary,
        "OpenEnvReplayManifest": replay,
        "RolloutRecord": summary["rollouts"][0],
        "RolloutStats": summary["stats"],
        "OpenEnvTrainingSelection": summary["training_selection"],
        "EnvironmentInspection": summary["environments"][0],
        "EnvironmentIdentity": summary["environments"][0]["identity"],
        "EnvironmentSchema": summary["environments"][0]["schema"],
        "Metadata": summary["environments"][0]["identity"]["metadata"],
        "ReplayGroup": replay["groups"][0],
        "ReplayCandidate": candidate,
        "ReplayExchange": candidate["exchanges"][0],
        "Observation": replay["groups"][0]["reset_observation"],
        "ProtocolError": {**error, "active_sessions": 1, "max_sessions": 1},
        "EnvironmentEvalGate": {"min_mean_improvement": 0.0},
        "EnvironmentEvalConfig": {"groups": 20, "group_size": 1, "seed_start": 0},
        "EnvironmentEvalEvidence": evidence_document(),
        "EnvironmentEvaluationReceipt": evaluation_document(),
        "PolicyIdentity": {
            "adapter": "a",
            "adapter_content_revision": sha("1"),
            "execution_provenance_sha256": sha("2"),
        },
        "OpenEnvArtifactDownloadReceipt": {
            "schema": "kiln.openenv-artifact-download.v1",
            "run_id": RUN,
            "kind": "summary",
            "source_url": f"/v1/openenv/runs/{RUN}/artifacts/summary",
            "output_path": "summary.json",
            "sha256": sha("0"),
            "bytes": 0,
        },
        "VerificationReport": {
            "schema": "kiln.openenv-verification.v1",
            "summary_path": "s",
            "dataset_path": "d",
            "replay_path": "r",
            "dataset_sha256": sha("0"),
            "replay_sha256": sha("0"),
            "groups": 1,
            "rollouts": 1,
            "environment_exchanges": 0,
        },
        "ReplayRunReport": {
            "schema": "kiln.openenv-replay-run.v1",
            "replay_sha256": sha("0"),
            "environments": 1,
            "groups": 1,
            "rollouts": 1,
            "environment_exchanges": 0,
            "capacity_retries": 0,
            "environment_prefix_only_rollouts": 0,
        },
    }


def evaluation_document(
    decision: str = "passed", outcome: str = "promoted"
) -> dict[str, Any]:
    return {
        "schema": "kiln.openenv-environment-evaluation.v1",
        "run_id": RUN,
        "config": {"groups": 20, "group_size": 1},
        "seed_start": 0,
        "baseline": {},
        "candidate": {"adapter": "a"},
        "baseline_summary_sha256": sha("1"),
        "candidate_summary_sha256": sha("2"),
        "evidence": {**evidence_document(), "decision": decision},
        "outcome": outcome,
        "verdict": "better",
    }


def evidence_document() -> dict[str, Any]:
    return {
        "policy_version": "paired_return_sign_test_v1",
        "paired_groups": 20,
        "paired_episodes": 20,
        "minimum_paired_groups": 20,
        "baseline_mean_return": 0.0,
        "candidate_mean_return": 1.0,
        "mean_return_improvement": 1.0,
        "improved_groups": 20,
        "regressed_groups": 0,
        "tied_groups": 0,
        "exact_sign_test_p_value": 0.0,
        "exact_sign_test_alpha": 0.05,
        "decision": "passed",
        "reason": "better",
    }


def accepted(name: str, document: Any) -> bool:
    try:
        read_record(msgspec.json.encode(document), STRUCTS[name], name)  # noqa: TID251 - input
    except InvalidRecord:
        return False
    return True


def breaking(required: bool, published: str, limits: dict[str, Any]) -> list[Any]:
    """Return values that the published field refuses."""
    values: list[Any] = [DROP] if required else []
    values += [limits["minimum"] - 1] if "minimum" in limits else []
    values += [limits["maximum"] + 1] if "maximum" in limits else []
    if "const" in limits or "enum" in limits:
        values += ["other", 1, None]
    elif published == "Sha256":
        values += ["sha256:" + "A" * 64, sha("0")[:-1], sha("0") + "\n", "0" * 64, 7]
    elif published == "integer":
        values += [1.0, "1", True, None]
    elif published == "number":
        values += ["1", True, None]
    elif published == "boolean":
        values += [0, "true", None]
    elif published.startswith("string"):
        values += [7, []] + ([""] if "minLength" in limits else [])
        values += [None] if "null" not in published else []
    elif published == "object" or published in OBJECTS:
        values += [[], "x", None]
    elif published.startswith("array"):
        values += [{}, "x", None] + ([[]] if limits.get("minItems") else [])
    return values


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_documents_are_judged_as_published(
    documents: dict[str, Any], name: str
) -> None:
    good = documents[name]
    assert accepted(name, good)
    assert accepted(name, {**good, "surprise": 1}) is (OBJECTS[name][0] != CLOSED)
    assert not accepted(name, [good])
    for field, required, published, limits in OBJECTS[name][1]:
        if field not in good:
            continue
        for value in breaking(required, published, limits):
            bad = dict(good)
            put(bad, f"/{field}", value)
            assert not accepted(name, bad), (field, value)


def test_seed_bound_is_exact(documents: dict[str, Any]) -> None:
    group = documents["ReplayGroup"]
    assert accepted("ReplayGroup", {**group, "seed": MAX_SEED})
    assert not accepted("ReplayGroup", {**group, "seed": MAX_SEED + 1})


@pytest.mark.parametrize(
    ("termination", "terminal_done", "code", "valid"),
    [
        ("done", True, None, True),
        ("done", False, None, False),
        ("done", True, "SESSION_ERROR", False),
        ("max_steps", False, None, True),
        ("max_steps", True, None, False),
        ("max_steps", False, "SESSION_ERROR", False),
        ("invalid_model_action", False, None, True),
        ("invalid_model_action", True, None, False),
        ("invalid_model_action", False, "SESSION_ERROR", False),
        ("protocol_error", False, "SESSION_ERROR", True),
        ("protocol_error", False, None, False),
        ("protocol_error", True, "SESSION_ERROR", False),
        ("gave_up", False, None, False),
    ],
)
def test_rollout_record_keeps_its_conditional_rules(
    documents: dict[str, Any],
    termination: str,
    terminal_done: bool,
    code: str | None,
    valid: bool,
) -> None:
    document = {
        **documents["RolloutRecord"],
        "termination": termination,
        "terminal_done": terminal_done,
    }
    if code is not None:
        document["protocol_error_code"] = code
    assert accepted("RolloutRecord", document) is valid


ALLOWED = {
    "diagnostic": {"diagnostic"},
    "passed": {"promoted", "kept", "error"},
    "rejected": {"rejected"},
    "inconclusive": {"inconclusive"},
}


@pytest.mark.parametrize("decision", ENUMS["EnvironmentEvalDecision"])
@pytest.mark.parametrize("outcome", ENUMS["EnvironmentEvalOutcome"])
def test_outcome_follows_the_decision(decision: str, outcome: str) -> None:
    document = evaluation_document(decision, outcome)
    valid = outcome in ALLOWED[decision]
    assert accepted("EnvironmentEvaluationReceipt", document) is valid


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", RUN + "\n"),
        ("run_id", RUN[:-1]),
        ("run_id", "0" * 36),
        ("source_url", f"/v1/openenv/runs/{RUN}/artifacts/"),
        ("source_url", f"http://u:p@h/v1/openenv/runs/{RUN}/artifacts/summary"),
        ("source_url", f"/v1/openenv/runs/{RUN}/artifacts/summary?x=1"),
        ("source_url", f"/v1/openenv/runs/{RUN}/artifacts/a/b"),
    ],
)
def test_download_receipt_names_one_artifact_of_one_run(
    documents: dict[str, Any], field: str, value: str
) -> None:
    document = documents["OpenEnvArtifactDownloadReceipt"]
    assert not accepted("OpenEnvArtifactDownloadReceipt", {**document, field: value})


def test_submission_needs_a_contract(documents: dict[str, Any]) -> None:
    summary = {**documents["OpenEnvRolloutSummary"], "training_submission": {"a": 1}}
    assert accepted("OpenEnvRolloutSummary", summary)
    del summary["training_contract"]
    assert not accepted("OpenEnvRolloutSummary", summary)


@pytest.mark.parametrize("alpha", [0.05, 0.050000001, 0.01, 1, "0.05", None])
def test_alpha_is_a_constant(alpha: Any) -> None:
    document = {**evidence_document(), "exact_sign_test_alpha": alpha}
    assert accepted("EnvironmentEvalEvidence", document) is (alpha == 0.05)


@pytest.mark.parametrize(
    ("result", "valid"),
    [
        ({"kind": "observation", "observation": 0}, True),
        ({"kind": "observation"}, False),
        ({"kind": "observation", "observation": 0, "continued": True}, False),
        ({"kind": "protocol_error", "error": 0, "continued": True}, True),
        ({"kind": "protocol_error", "error": 0}, False),
        ({"kind": "protocol_error", "error": 0, "continued": 1}, False),
        ({"kind": "other", "observation": 0}, False),
        ({"observation": 0}, False),
    ],
)
def test_exchange_result_is_one_of_two(
    documents: dict[str, Any], result: dict[str, Any], valid: bool
) -> None:
    fill = {"observation": "Observation", "error": "ProtocolError"}
    filled = {k: documents[fill[k]] if k in fill else v for k, v in result.items()}
    exchange = {**documents["ReplayExchange"], "result": filled}
    assert accepted("ReplayExchange", exchange) is valid


@pytest.mark.parametrize("pattern", ["http://x", "ws:/x", "ftp://ws://", ""])
def test_websocket_url_has_its_scheme(documents: dict[str, Any], pattern: str) -> None:
    identity = documents["EnvironmentIdentity"]
    assert not accepted("EnvironmentIdentity", {**identity, "websocket_url": pattern})
    assert accepted("EnvironmentIdentity", {**identity, "websocket_url": "wss://h"})


def test_omitted_authentication_means_none(documents: dict[str, Any]) -> None:
    identity = dict(documents["EnvironmentIdentity"])
    del identity["authentication"]
    del identity["discovery_sha256"]
    record = msgspec.convert(identity, discovery.EnvironmentIdentity)
    assert record.authentication == "none"
    assert record.discovery_sha256 is msgspec.UNSET
