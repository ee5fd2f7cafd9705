"""Summaries of versions 2 to 4 verify, and may claim nothing their version lacked."""

from __future__ import annotations

import msgspec
import pytest

from kiln_core.canonical import digest_json
from kiln_core.errors import InvalidBundle
from kiln_core.legacy import FORBIDDEN, LEGACY_SCHEMAS, REQUIRED
from kiln_core.verify import read_summary
from tests.core.bundles import (
    DROP,
    LEGACY_SOURCES,
    Collection,
    Parts,
    bytes_of,
    legacy_bundle,
    look,
    put,
    verify,
)
from tests.simulators.pure import sha

SUMMARY = "openenv.rollout-summary.json"
REPLAY = "openenv.replay.json"
DATASET = "openenv.rollouts.jsonl"
POLICY = msgspec.to_builtins(Collection().policy)
CONTRACT = legacy_bundle("v4").summary["training_contract"]


def failure(parts: Parts) -> tuple[str, str, str]:
    with pytest.raises(InvalidBundle) as caught:
        verify(parts.seal())
    details = caught.value.details
    return details["check"], details["file"], details["pointer"]


@pytest.mark.parametrize("version", LEGACY_SOURCES)
def test_older_bundle_verifies(version: str) -> None:
    verified = verify(legacy_bundle(version).seal())
    assert verified.summary.schema.endswith(version)
    assert verified.summary.behavior_policy is msgspec.UNSET


def test_every_older_version_has_its_rules() -> None:
    assert set(REQUIRED) == set(FORBIDDEN) == set(LEGACY_SCHEMAS)


FILLED = {
    "reset_plan_sha256": sha("1"),
    "reset_options_sha256": sha("1"),
    "behavior_policy": POLICY,
    "training_contract": CONTRACT,
}


@pytest.mark.parametrize(
    ("version", "member", "value"),
    [
        *((v[-2:], name, DROP) for v, names in REQUIRED.items() for name in names),
        *(
            (v[-2:], name, FILLED[name])
            for v, names in FORBIDDEN.items()
            for name in names
        ),
    ],
)
def test_member_of_another_version_is_refused(
    version: str, member: str, value: object
) -> None:
    parts = legacy_bundle(version)
    put(parts.summary, f"/{member}", value)
    assert failure(parts) == ("summary_version", SUMMARY, f"/{member}")


@pytest.mark.parametrize("version", LEGACY_SOURCES)
@pytest.mark.parametrize(
    ("where", "pointer", "value", "expected"),
    [
        ("summary", "/adapter_label", "other", ("summary_policy", SUMMARY)),
        ("summary", "/surprise", 1, ("summary_record", SUMMARY)),
        ("summary", "/stats/done_count", 99, ("summary_stats", SUMMARY)),
        ("summary", "/seed_start", 41, ("plan", REPLAY)),
        ("replay", "/groups/0/seed", 41, ("plan", REPLAY)),
        ("replay", "/groups/0/reset_payload/target", 5, ("plan", SUMMARY)),
        (
            "replay",
            "/groups/0/candidates/0/episode_return",
            9.0,
            ("replay_return", REPLAY),
        ),
        (
            "dataset",
            "/0/completions/0/openenv/behavior_policy",
            POLICY,
            ("dataset_canonical", DATASET),
        ),
        (
            "dataset",
            "/0/completions/0/openenv/steps",
            3,
            ("dataset_provenance", DATASET),
        ),
        ("dataset", "/0/messages/0/content", "Be bad.", ("dataset_prompt", DATASET)),
    ],
)
def test_older_bundle_is_held_as_strictly(
    version: str,
    where: str,
    pointer: str,
    value: object,
    expected: tuple[str, str],
) -> None:
    parts = legacy_bundle(version)
    put(getattr(parts, where), pointer, value)
    if version == "v2" and pointer.endswith("/target"):
        expected = ("plan", REPLAY)  # the environments no longer share one object
    assert failure(parts)[:2] == expected


def test_version_2_binds_one_reset_object() -> None:
    parts = legacy_bundle("v2")
    parts.summary["reset_options_sha256"] = digest_json({"target": 5})
    assert failure(parts) == ("plan", SUMMARY, "/reset_options_sha256")
    parts = legacy_bundle("v2")
    parts.replay["groups"][1]["reset_payload"]["target"] = 5
    assert failure(parts) == ("plan", REPLAY, "/groups/1/reset_payload")


@pytest.mark.parametrize(
    ("pointer", "value", "place"),
    [
        ("behavior_policy", POLICY, "behavior_policy"),
        ("effective_config/base_adapter", None, "effective_config/base_adapter"),
        ("effective_config/output_name", None, "effective_config/output_name"),
    ],
)
def test_version_4_contract_is_checked(pointer: str, value: object, place: str) -> None:
    parts = legacy_bundle("v4")
    put(parts.summary["training_contract"], f"/{pointer}", value)
    expected = ("summary_contract", SUMMARY, f"/training_contract/{place}")
    assert failure(parts) == expected


@pytest.mark.parametrize("version", LEGACY_SOURCES)
def test_submission_needs_a_contract_in_every_version(version: str) -> None:
    parts = legacy_bundle(version)
    parts.summary["training_submission"] = {"job_id": "j"}
    if version == "v4":
        assert verify(parts.seal())
        del parts.summary["training_contract"]
    assert failure(parts)[:2] == ("summary_record", SUMMARY)


def test_only_legacy_summaries_may_omit_the_discovery_digest() -> None:
    parts = Parts(bytes_of(Collection().bundle()))
    for document in (parts.summary, parts.replay):
        del document["environments"][1]["identity"]["discovery_sha256"]
    pointer = "/environments/1/identity/discovery_sha256"
    assert failure(parts) == ("summary_identity", SUMMARY, pointer)
    assert look(legacy_bundle("v2").summary, "/environments/1/identity")
    assert verify(legacy_bundle("v2").seal())


@pytest.mark.parametrize(
    "schema",
    [
        "kiln.openenv-rollout-summary.v1",
        "kiln.openenv-rollout-summary.v6",
        "kiln.openenv-replay.v1",
        "",
        None,
        5,
        ["kiln.openenv-rollout-summary.v5"],
        DROP,
    ],
)
def test_other_versions_are_not_supported(schema: object) -> None:
    parts = legacy_bundle("v3")
    put(parts.summary, "/schema", schema)
    with pytest.raises(InvalidBundle) as caught:
        read_summary(parts.seal().summary, SUMMARY)
    assert caught.value.details["check"] == "summary_schema"
