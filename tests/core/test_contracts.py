"""The published contracts: what they say, and that three judges agree on documents."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastjsonschema
import jsonschema_rs
import msgspec
import pytest

from kiln_core import schemas
from kiln_core.canonical import Record, compact, pretty, read_record
from kiln_core.errors import InvalidRecord, UsageError
from kiln_core.schemas import CONTRACTS, NAMES, check_document, draft07, published
from tests.core.bundles import DROP, put
from tests.core.contract_documents import ACCEPTED, lines
from tests.core.schema_seed import CLOSED, ENUMS, OBJECTS, SHA256

FOLDER = Path(__file__).resolve().parents[2] / "contracts"
DOCUMENTS = published()
OPENENV = DOCUMENTS["kiln-openenv-v1.schema.json"]
STRUCTS = {
    NAMES.get(cls, cls.__name__): cls for part in CONTRACTS for cls in part.definitions
}
REGISTRY = jsonschema_rs.Registry(
    [(document["$id"], document) for document in DOCUMENTS.values()]
)


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_checked_in_document_is_what_the_structs_say(name: str) -> None:
    assert (FOLDER / name).read_bytes() == pretty(DOCUMENTS[name])


@pytest.mark.parametrize("contract", sorted(ACCEPTED))
def test_checked_in_examples_are_what_the_script_makes(contract: str) -> None:
    for folder, data in zip(("accepted", "rejected"), lines(contract), strict=True):
        assert (FOLDER / folder / f"{contract}.jsonl").read_bytes() == data


def test_head_of_the_artifact_contract_is_the_published_one() -> None:
    head = {key: value for key, value in OPENENV.items() if key != "$defs"}
    assert head == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://ericflo.github.io/kiln/contracts/kiln-openenv-v1.schema.json",
        "title": "Kiln OpenEnv rollout, evaluation, and artifact contract",
        "$ref": "#/$defs/OpenEnvRolloutSummary",
    }


def test_artifact_contract_defines_exactly_what_is_published() -> None:
    others = {"Sha256", "OpenEnvTrainingContract", "ReplayExchangeResult"}
    assert set(OPENENV["$defs"]) == set(OBJECTS) | set(ENUMS) | others
    assert OPENENV["$defs"]["Sha256"] == {"type": "string", "pattern": SHA256}
    assert OPENENV["$defs"]["OpenEnvTrainingContract"] == {
        "$ref": "kiln-control-plane-v1.schema.json#/$defs/OpenEnvTrainingContract"
    }
    for name, values in ENUMS.items():
        definition = dict(OPENENV["$defs"][name])
        definition.pop("description")
        assert definition == {"type": "string", "enum": values}


REFERENCES = {
    "Sha256": "#/$defs/Sha256",
    "BehaviorPolicyIdentity": (
        "kiln-inference-v1.schema.json#/$defs/RolloutBehaviorPolicyIdentityV1"
    ),
    "OpenEnvTrainingContract": "#/$defs/OpenEnvTrainingContract",
    "ReplayExchangeResult": "#/$defs/ReplayExchangeResult",
    **{name: f"#/$defs/{name}" for name in (*OBJECTS, *ENUMS)},
}


def spelled(published_type: str) -> dict[str, Any]:
    """Return the schema of a type as the published page words it."""
    if published_type == "any":
        return {}
    if published_type in REFERENCES:
        return {"$ref": REFERENCES[published_type]}
    if published_type.startswith("array<"):
        item = published_type.removeprefix("array<").removesuffix(">")
        return {"type": "array", "items": spelled(item)}
    kinds = published_type.split(" | ")
    return {"type": kinds if len(kinds) > 1 else kinds[0]}


@pytest.mark.parametrize(
    ("name", "row"),
    [(name, row) for name in sorted(OBJECTS) for row in range(len(OBJECTS[name][1]))],
)
def test_member_is_published_field_for_field(name: str, row: int) -> None:
    field, required, published_type, limits = OBJECTS[name][1][row]
    definition = OPENENV["$defs"][name]
    found = dict(definition["properties"][field])
    found.pop("description", None)
    assert found == spelled(published_type) | limits
    assert (field in definition.get("required", [])) is required


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_object_is_closed_where_it_is_published_closed(name: str) -> None:
    definition = OPENENV["$defs"][name]
    assert list(definition["properties"]) == [row[0] for row in OBJECTS[name][1]]
    closed = definition.get("additionalProperties") is False
    assert closed is (OBJECTS[name][0] == CLOSED)


def references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from references(item)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            else:
                yield from references(value)


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_every_reference_leads_to_a_definition(name: str) -> None:
    jsonschema_rs.meta.validate(DOCUMENTS[name])
    found = set(references(DOCUMENTS[name]))
    assert found
    for link in found:
        file, _, pointer = link.partition("#/$defs/")
        assert pointer in DOCUMENTS[file or name]["$defs"], link


def test_definitions_have_one_home_and_names_no_compiler_confuses() -> None:
    """fastjsonschema makes one function of names that differ only in their marks."""
    names = [name for document in DOCUMENTS.values() for name in document["$defs"]]
    once = set(names) - {"Sha256", "OpenEnvTrainingContract"}
    assert len(names) == len(once) + 3 + 2
    assert len({re.sub(r"\W", "_", name).lower() for name in once}) == len(once)


def public_records() -> set[str]:
    """Return the records that have a schema name of their own, or are in one."""
    waiting: list[type[msgspec.Struct]] = [Record]
    found = set()
    while waiting:
        children = waiting.pop().__subclasses__()
        waiting += children
        for child in children:
            kind = child.__annotations__.get("schema")
            if child.__module__.startswith("kiln_core.") and kind:
                found.add(NAMES.get(child, child.__name__))
    return found


NOT_PUBLISHED = {
    "LegacyRolloutSummary": "read, never written",
    "ReplayOutcome": "written by the edge",
}


def test_every_record_with_a_schema_name_is_published() -> None:
    assert public_records() - set(STRUCTS) - set(NOT_PUBLISHED) == set()


def rows(folder: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (contract, msgspec.json.decode(line))
        for contract in sorted(ACCEPTED)
        for line in (FOLDER / folder / f"{contract}.jsonl").read_bytes().splitlines()
    ]


ACCEPTED_ROWS = rows("accepted")
BASES = {(row["definition"], row["case"]): row["document"] for _, row in ACCEPTED_ROWS}


def patched(row: dict[str, Any]) -> Any:
    """Apply the one operation of a rejected row (RFC 6902 section 4)."""
    document = copy.deepcopy(BASES[row["definition"], row["case"]])
    [operation] = row["patch"]
    if operation["path"] == "":
        return operation["value"]
    put(document, operation["path"], operation.get("value", DROP))
    return document


def struct_accepts(definition: str, document: Any) -> bool:
    cls: Any = STRUCTS[definition]
    try:
        if issubclass(cls, msgspec.Struct):
            read_record(compact(document), cls, definition)
        else:
            msgspec.convert(document, cls)
    except (InvalidRecord, msgspec.ValidationError):
        return False
    return True


def fastjsonschema_accepts(definition: str, document: Any) -> bool:
    try:
        check_document(document, definition)
    except InvalidRecord:
        return False
    return True


def jsonschema_rs_accepts(definition: str, document: Any) -> bool:
    home = next(d for d in DOCUMENTS.values() if definition in d["$defs"])
    schema = {
        "$schema": schemas.DIALECT,
        "$ref": f"{home['$id']}#/$defs/{definition}",
    }
    judge = jsonschema_rs.validator_for(schema, registry=REGISTRY, offline=True)
    return judge.is_valid(document)


JUDGES = (struct_accepts, fastjsonschema_accepts, jsonschema_rs_accepts)


def verdicts(definition: str, document: Any) -> tuple[bool, ...]:
    return tuple(judge(definition, document) for judge in JUDGES)


def title(row: tuple[str, dict[str, Any]]) -> str:
    case = row[1]
    patch = case.get("patch", [{}])[0]
    words = (patch.get("op", ""), patch.get("path", ""), str(patch.get("value", "")))
    text = " ".join((case["definition"], case["case"], *words))
    return re.sub(r"[^\w/ ,.-]", "?", text)[:100]


@pytest.mark.parametrize("row", ACCEPTED_ROWS, ids=title)
def test_accepted_document_is_accepted_by_all(row: tuple[str, dict[str, Any]]) -> None:
    definition, document = row[1]["definition"], row[1]["document"]
    assert verdicts(definition, document) == (True, True, True)


@pytest.mark.parametrize("row", rows("rejected"), ids=title)
def test_rejected_document_is_rejected_by_all(row: tuple[str, dict[str, Any]]) -> None:
    assert verdicts(row[1]["definition"], patched(row[1])) == (False, False, False)


def test_every_definition_has_both_kinds_of_documents() -> None:
    for folder in ("accepted", "rejected"):
        found = {row["definition"] for _, row in rows(folder)}
        assert found == set(STRUCTS), folder


STRICTER_STRUCTS: dict[str, tuple[str, str, str, Any]] = {
    "a float in an integer member": ("RolloutRecord", "plain", "/steps", 1.0),
    "a sum over members": ("TerminationCounts", "plain", "/done", 1.0),
    "lengths that must agree": ("TurnTokens", "plain", "/logprobs", []),
    "two members that must be equal": ("ScoredRollout", "plain", "/reward", 99.5),
    "bytes, where a schema counts characters": (
        "RolloutAdapterIdentityV1",
        "plain",
        "/name",
        "\u00e9" * 129,
    ),
    "a total over a list": ("OpenEnvTrainingData", "plain", "/rollouts", 2),
    "a bound on bytes": ("OpenEnvRunFailure", "plain", "/message", "x" * 4097),
    "an index into a list": (
        "RolloutProvenanceV1",
        "plain",
        "/prompt_token_count",
        2**20,
    ),
    "a number beyond 64-bit floats": ("Observation", "plain", "/reward", 10**400),
}
"""Where a struct refuses what no schema expresses; nothing differs the other way."""


@pytest.mark.parametrize("why", STRICTER_STRUCTS)
def test_struct_is_stricter_only_where_listed(why: str) -> None:
    definition, case, pointer, value = STRICTER_STRUCTS[why]
    document = copy.deepcopy(BASES[definition, case])
    put(document, pointer, value)
    assert verdicts(definition, document) == (False, True, True)
    assert why in (FOLDER / "README.md").read_text()


def test_second_judge_says_where_without_the_value() -> None:
    document = copy.deepcopy(BASES["OpenEnvRolloutSummary", "plain"])
    put(document, "/rollouts/0/seed", "secret")
    with pytest.raises(InvalidRecord) as caught:
        check_document(document, "OpenEnvRolloutSummary")
    assert caught.value.details["pointer"] == "/rollouts/0/seed"
    assert "secret" not in str(caught.value)
    with pytest.raises(UsageError):
        check_document({}, "Nothing")


def test_draft07_rendering_fetches_nothing() -> None:
    schema = {"$ref": "https://127.0.0.1:9/x.json"}
    with pytest.raises(UsageError):
        fastjsonschema.compile(schema, handlers=schemas._NoRetrieval())
    document = draft07("OpenEnvRolloutSummary")
    assert document["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert all(link.startswith("#/definitions/") for link in references(document))
