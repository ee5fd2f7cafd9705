"""The published contracts: JSON Schemas of every record that leaves Kiln.

A published document is the export of the structs plus a declared table of what structs
cannot express: conditional rules, constant numbers, text without white space at its
ends. Names of definitions are those of the contract, not always those of our classes.
The dialect is draft 2020-12; `draft07` is the same in one document for fastjsonschema,
which knows no later draft, as a second and independent judge beside the structs.

Writing ``contracts/`` is not done here (``scripts/export_contracts.py``).
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final, Literal

import msgspec

from kiln_core import (
    contract,
    discovery,
    evaluation,
    evidence,
    explain,
    failure,
    grpo,
    lineage,
    manifest,
    provenance,
    receipt,
    records,
    run,
    tasks,
    trace,
    training,
)
from kiln_core.canonical import END, JsonValue
from kiln_core.errors import InvalidRecord, UsageError
from kiln_core.schema_rules import DESCRIPTIONS, FIELD_RULES, RULES

__all__ = ["CONTRACTS", "check_document", "draft07", "published"]

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
DRAFT_07: Final = "http://json-schema.org/draft-07/schema#"
ID_BASE: Final = "https://ericflo.github.io/kiln/contracts/"
SHA256: Final = {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """One published document."""

    file: str
    title: str
    root: str
    """Definition that the whole document stands for."""
    definitions: tuple[type, ...]
    """Records and enumerations it defines, in order."""


NAMES: Final[dict[type, str]] = {
    provenance.BehaviorPolicyIdentity: "RolloutBehaviorPolicyIdentityV1",
    provenance.AdapterIdentity: "RolloutAdapterIdentityV1",
    provenance.RolloutProvenance: "RolloutProvenanceV1",
    records.OpenEnvRolloutProvenance: "OpenEnvRolloutProvenanceV1",
    contract.PreflightRequest: "OpenEnvTrainingPreflightRequest",
    contract.PreflightReceipt: "OpenEnvTrainingPreflightReceipt",
    contract.PreflightCapacity: "OpenEnvTrainingPreflightCapacity",
    discovery.InspectionReport: "OpenEnvInspection",
    tasks.TaskCatalog: "OpenEnvTaskCatalog",
    tasks.EnvironmentTasks: "OpenEnvEnvironmentTasks",
    tasks.TaskCatalogReport: "OpenEnvTaskCatalogReport",
}
"""Definitions that are published under another name than their class."""

CONTRACTS: Final = (
    Contract(
        file="kiln-openenv-v1.schema.json",
        title="Kiln OpenEnv rollout, evaluation, and artifact contract",
        root="OpenEnvRolloutSummary",
        definitions=(
            receipt.OpenEnvArtifactDownloadReceipt,
            discovery.Metadata,
            discovery.EnvironmentIdentity,
            discovery.EnvironmentSchema,
            discovery.EnvironmentInspection,
            manifest.ProtocolError,
            manifest.Observation,
            records.EpisodeTermination,
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
            evidence.PolicyIdentity,
            evaluation.EnvironmentEvalDecision,
            evidence.EnvironmentEvalOutcome,
            evaluation.EnvironmentEvalEvidence,
            evidence.EnvironmentEvaluationReceipt,
            receipt.VerificationReport,
            receipt.ReplayRunReport,
        ),
    ),
    Contract(
        file="kiln-inference-v1.schema.json",
        title="Kiln rollout, provenance, and trace contract",
        root="AgenticGroup",
        definitions=(
            provenance.AdapterIdentity,
            provenance.BehaviorPolicyIdentity,
            provenance.ActionToken,
            provenance.TokenizerIdentity,
            provenance.TemplateInvocation,
            provenance.ThinkingBudget,
            provenance.SamplingParameters,
            provenance.RolloutProvenance,
            records.ChatMessage,
            records.TurnSegment,
            records.OpenEnvRolloutProvenance,
            trace.SamplingTransform,
            trace.TurnTokens,
            trace.TokenTrace,
            trace.RolloutTrace,
            records.ScoredRollout,
            records.AgenticGroup,
        ),
    ),
    Contract(
        file="kiln-control-plane-v1.schema.json",
        title="Kiln training, run, and evidence contract",
        root="OpenEnvRunStatus",
        definitions=(
            grpo.Muon,
            grpo.AdamW,
            grpo.Sgd,
            grpo.BasePerStep,
            grpo.NoReference,
            grpo.EmaReference,
            grpo.EchoLoss,
            grpo.LossConfig,
            grpo.GrpoConfig,
            contract.PostEvalConfig,
            contract.OpenEnvTrainingContract,
            contract.PreflightRequest,
            contract.PreflightCapacity,
            contract.PreflightReceipt,
            lineage.TerminationCounts,
            lineage.TrainingEnvironment,
            lineage.OpenEnvTrainingData,
            training.TrainingDataProvenance,
            training.TrainingResponse,
            discovery.InspectionReport,
            tasks.TaskCatalog,
            tasks.EnvironmentTasks,
            tasks.TaskCatalogReport,
            failure.FailureCode,
            failure.FailureStage,
            failure.OpenEnvRunFailure,
            run.RunState,
            run.OpenEnvRunRequest,
            run.RunAdmission,
            run.RunProgress,
            run.RunArtifact,
            run.OpenEnvTrainingStatus,
            run.OpenEnvPostEvalStatus,
            run.EnvironmentEvalProgress,
            run.OpenEnvEnvironmentEvalStatus,
            run.OpenEnvRunStatus,
            run.OpenEnvRunList,
            receipt.BundleContradiction,
            receipt.VerificationOutcome,
            evidence.EvaluationVerification,
            explain.GroupExplanation,
            explain.TrainingExplanation,
        ),
    ),
)
COMPOSED: Final = {
    "ReplayExchangeResult": {manifest.ObservationResult, manifest.ProtocolErrorResult}
}
"""Definitions that the table of rules gives, and the classes they stand for."""


ALIASES: Final = ("OpenEnvTrainingContract",)
"""Definitions the artifact contract repeats as a link to their home."""


def published() -> dict[str, dict[str, Any]]:
    """Return every published document by its file name."""
    return {part.file: _document(part) for part in CONTRACTS}


@functools.cache
def draft07(definition: str) -> dict[str, Any]:
    """Return one definition with all it needs as a single draft-07 document.

    Args:
        definition: Published name.

    Raises:
        UsageError: There is none of that name.
    """
    everything = _everything()
    if definition not in everything:
        raise UsageError(f"the contracts define no {definition}")
    definitions: dict[str, Any] = {}
    waiting = [definition]
    while waiting:
        name = waiting.pop()
        if name not in definitions:
            definitions[name] = everything[name]
            waiting += _referred(everything[name])
    return {
        "$schema": DRAFT_07,
        "allOf": [{"$ref": f"#/definitions/{definition}"}],
        "definitions": definitions,
    }


@functools.cache
def _everything() -> dict[str, Any]:
    """Return every definition of every document in draft-07 words."""
    return {
        name: _relocated(schema)
        for document in published().values()
        for name, schema in document["$defs"].items()
        if not _is_alias(name, schema)
    }


def _referred(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from _referred(item)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                yield value.rpartition("/")[2]
            else:
                yield from _referred(value)


def check_document(document: JsonValue, definition: str) -> None:
    """Check a document against its published schema, beside the structs.

    Args:
        document: Decoded JSON.
        definition: Published name.

    Raises:
        InvalidRecord: It does not match; ``details["pointer"]`` says where.
        UsageError: There is no such definition.
    """
    import fastjsonschema

    try:
        _compiled(definition)(document)
    except fastjsonschema.JsonSchemaValueException as error:
        pointer = "".join(f"/{token}" for token in error.path[1:])
        invalid = InvalidRecord(
            f"the document is no {definition} at {pointer or 'its root'}: "
            f"rule {error.rule!r} is broken",
            pointer=pointer,
        )
        raise invalid from error


class _NoRetrieval(dict[str, Any]):
    """Handles every URL scheme by refusing it, so that nothing is ever fetched."""

    def __contains__(self, scheme: object) -> bool:
        return True

    def __getitem__(self, scheme: str) -> Any:
        raise UsageError("a contract refers to another document")


@functools.cache
def _compiled(definition: str) -> Callable[[JsonValue], Any]:
    import fastjsonschema

    compiled: Callable[[JsonValue], Any] = fastjsonschema.compile(
        draft07(definition),
        handlers=_NoRetrieval(),
        use_default=False,
        use_formats=False,
    )
    return compiled


def _document(part: Contract) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    for name, schema in _exported().items():
        if _home(name) is part:
            definitions[name] = _linked(schema, part)
    if part is CONTRACTS[0]:
        definitions |= {name: _linked(RULES[name], part) for name in COMPOSED}
        definitions |= {name: {"$ref": _elsewhere(name)} for name in ALIASES}
    return {
        "$schema": DIALECT,
        "$id": ID_BASE + part.file,
        "title": part.title,
        "$ref": f"#/$defs/{part.root}",
        "$defs": {"Sha256": SHA256, **definitions},
    }


@functools.cache
def _exported() -> dict[str, dict[str, Any]]:
    """Return the definition of every record, references still local."""
    classes = [cls for part in CONTRACTS for cls in part.definitions]
    _, components = msgspec.json.schema_components(classes, ref_template="{name}")
    literals = {
        frozenset(values): values for cls in classes for values in _literals(cls)
    }
    found = {}
    for cls in classes:
        schema = _rewritten(components[cls.__name__], literals)
        schema.pop("title")
        if issubclass(cls, Enum):  # members in declared order
            schema["enum"] = [member.value for member in cls]
        name = NAMES.get(cls, cls.__name__)
        for member, rule in FIELD_RULES.get(name, {}).items():
            schema["properties"][member] = rule
        for member, text in DESCRIPTIONS.get(name, {}).items():
            schema["properties"][member]["description"] = text
        found[name] = schema | RULES.get(name, {})
    return found


def _rewritten(schema: Any, literals: dict[frozenset[Any], tuple[Any, ...]]) -> Any:
    """Return an exported schema in the words of the contract."""
    if isinstance(schema, list):
        return [_rewritten(item, literals) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {**schema, "$ref": _published_name(schema["$ref"])}
    if str(schema.get("pattern", "")).startswith("^sha256:"):
        return {"$ref": "Sha256"}
    schema = {
        key: _rewritten(value, literals)
        for key, value in schema.items()
        if key != "discriminator"
    }
    if "pattern" in schema:
        schema["pattern"] = schema["pattern"].replace(END, "$")
    return _simplified(schema, literals)


def _simplified(
    schema: dict[str, Any], literals: dict[frozenset[Any], tuple[Any, ...]]
) -> dict[str, Any]:
    values = schema.get("enum")
    if isinstance(values, list) and len(values) == 1:
        schema = {"const": values[0]} | _without(schema, "enum")
    elif isinstance(values, list):
        ordered = list(literals.get(frozenset(values), values))
        schema = {"type": "string", "enum": ordered} | _without(schema, "enum")
    choices = schema.get("anyOf")
    if isinstance(choices, list):
        if all(choice.keys() == {"type"} for choice in choices):
            kinds = [choice["type"] for choice in choices]
            schema = {"type": kinds} | _without(schema, "anyOf")
        elif {choice.get("$ref") for choice in choices} == _RESULTS:
            schema = {"$ref": "ReplayExchangeResult"}
    return schema


_RESULTS: Final = {cls.__name__ for cls in COMPOSED["ReplayExchangeResult"]}


def _without(schema: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != key}


def _literals(cls: type) -> Iterator[tuple[Any, ...]]:
    """Yield the values of every `Literal` in a class's annotations, in order."""
    waiting = list(typing.get_type_hints(cls, include_extras=True).values())
    while waiting:
        annotation = waiting.pop()
        if typing.get_origin(annotation) is Literal:
            yield typing.get_args(annotation)
        else:
            waiting += typing.get_args(annotation)


def _published_name(class_name: str) -> str:
    for cls, name in NAMES.items():
        if cls.__name__ == class_name:
            return name
    return class_name


@functools.cache
def _home(name: str) -> Contract | None:
    """Return the document that defines a name; None for what all repeat."""
    for part in CONTRACTS:
        if name in {NAMES.get(cls, cls.__name__) for cls in part.definitions}:
            return part
    return CONTRACTS[0] if name in COMPOSED else None


def _reference(name: str, here: Contract) -> str:
    local = _home(name) in {None, here} or (here is CONTRACTS[0] and name in ALIASES)
    return f"#/$defs/{name}" if local else _elsewhere(name)


def _elsewhere(name: str) -> str:
    home = _home(name)
    assert home is not None  # noqa: S101 - only Sha256 has none
    return f"{home.file}#/$defs/{name}"


def _linked(schema: Any, here: Contract) -> Any:
    """Return a schema whose references lead to the documents that define them."""
    return _mapped(schema, lambda name: _reference(name, here))


def _relocated(schema: Any) -> Any:
    local = _mapped(schema, lambda link: f"#/definitions/{link.rpartition('/')[2]}")
    return _tuples_as_items(local)


def _tuples_as_items(schema: Any) -> Any:
    """Return a schema whose tuples are written as draft-07 has them."""
    if isinstance(schema, list):
        return [_tuples_as_items(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _tuples_as_items(value) for key, value in schema.items()}
    if "prefixItems" in schema:
        schema["items"] = schema.pop("prefixItems")
        schema["additionalItems"] = False
    return schema


def _mapped(schema: Any, link: Callable[[str], str]) -> Any:
    if isinstance(schema, list):
        return [_mapped(item, link) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: link(value)
        if key == "$ref" and isinstance(value, str)
        else _mapped(value, link)
        for key, value in schema.items()
    }


def _is_alias(name: str, schema: dict[str, Any]) -> bool:
    """Say whether a definition only points at the one of the same name elsewhere."""
    return str(schema.get("$ref", "")).endswith(f"#/$defs/{name}")
