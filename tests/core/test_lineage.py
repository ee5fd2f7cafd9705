from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest

from kiln_core.canonical import compact, convert_record
from kiln_core.dataset import read_groups
from kiln_core.errors import InvalidRecord
from kiln_core.lineage import CorpusLineage, OpenEnvTrainingData
from kiln_core.records import AgenticGroup, OpenEnvRolloutProvenance
from tests.core.bundles import DROP, Collection, put
from tests.simulators.pure import sha

GROUPS = list(read_groups(Collection().bundle().dataset))


def lineage(groups: list[AgenticGroup]) -> OpenEnvTrainingData:
    corpus = CorpusLineage()
    for group in groups:
        corpus.add(group)
    return corpus.record()


def independent_plan(groups: list[AgenticGroup]) -> str:
    """The streaming digest of the plan, with another JSON writer."""
    hashed = hashlib.sha256(b"kiln.openenv-group-plan.v1\0")
    for number, group in enumerate(groups, 1):
        one = msgspec.to_builtins(group.completions[0].openenv)
        item = {"schema": "kiln.openenv-group-plan-item.v1", "group_index": number}
        for name in (
            "environment_name",
            "environment_base_url",
            "openapi_version",
            "discovery_sha256",
            "environment_schema_sha256",
            "action_schema_sha256",
            "reset_sha256",
            "seed",
        ):
            item[name] = one.get(name)
        item["rollouts"] = len(group.completions)
        text = json.dumps(item, separators=(",", ":"), ensure_ascii=False).encode()  # noqa: TID251 - the independent one
        hashed.update(len(text).to_bytes(8, "big") + text)
    return "sha256:" + hashed.hexdigest()


def test_plan_digest_is_streamed_over_the_groups() -> None:
    record = lineage(GROUPS)
    assert record.group_plan_sha256 == independent_plan(GROUPS)
    assert record.group_plan_sha256 == (
        "sha256:b463100549b844cca90deb89dcc2fe42fa1c823247b649e72adcd03486df8a9e"
    )
    assert lineage(GROUPS[:3]).group_plan_sha256 == independent_plan(GROUPS[:3])
    assert lineage(GROUPS[::-1]).group_plan_sha256 != record.group_plan_sha256


def test_lineage_names_the_corpus() -> None:
    record = msgspec.to_builtins(lineage(GROUPS))
    rewards = [c.reward for g in GROUPS for c in g.completions]
    assert {k: v for k, v in record.items() if not isinstance(v, (dict, list))} == {
        "schema": "kiln.openenv-training-data.v1",
        "groups": 4,
        "rollouts": 28,
        "unique_seeds": 4,
        "seed_min": "40",
        "seed_max": "43",
        "total_steps": 62,
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "reward_mean": sum(rewards) / 28,
        "group_plan_sha256": record["group_plan_sha256"],
    }
    assert record["terminations"] == {
        "done": 7,
        "max_steps": 7,
        "invalid_model_action": 10,
        "protocol_error": 4,
    }
    urls = [e["environment_base_url"] for e in record["environments"]]
    assert urls == sorted(urls)
    assert [e["groups"] for e in record["environments"]] == [2, 2]
    assert list(record["environments"][0]) == [
        "environment_name",
        "environment_base_url",
        "openapi_version",
        "discovery_sha256",
        "environment_schema_sha256",
        "action_schema_sha256",
        "groups",
        "rollouts",
        "total_steps",
        "terminations",
    ]


def provenance(group: AgenticGroup, index: int) -> OpenEnvRolloutProvenance:
    found = group.completions[index].openenv
    assert isinstance(found, OpenEnvRolloutProvenance)
    return found


def altered(group: AgenticGroup, index: int, **changes: Any) -> AgenticGroup:
    completions = list(group.completions)
    openenv = msgspec.structs.replace(provenance(group, index), **changes)
    completions[index] = msgspec.structs.replace(completions[index], openenv=openenv)
    return msgspec.structs.replace(group, completions=completions)


SHARED: dict[str, Any] = {
    "environment_name": "other",
    "environment_base_url": "http://other",
    "openapi_version": msgspec.UNSET,
    "discovery_sha256": msgspec.UNSET,
    "environment_schema_sha256": sha("7"),
    "action_schema_sha256": sha("7"),
    "reset_sha256": sha("7"),
    "seed": 7,
}


@pytest.mark.parametrize(("name", "value"), SHARED.items())
def test_candidates_of_a_group_agree(name: str, value: Any) -> None:
    with pytest.raises(InvalidRecord, match=f"group 1 disagrees on {name}"):
        lineage([altered(GROUPS[0], 1, **{name: value})])


@pytest.mark.parametrize("place", [(0, 1), (1, 0)])
def test_corpus_has_one_policy(place: tuple[int, int]) -> None:
    number, index = place
    policy: Any = provenance(GROUPS[0], 0).behavior_policy
    other = msgspec.structs.replace(policy, implementation="other")
    for value in (other, msgspec.UNSET):
        groups = list(GROUPS)
        groups[number] = altered(groups[number], index, behavior_policy=value)
        with pytest.raises(InvalidRecord, match=f"group {number + 1} was produced"):
            lineage(groups)


@pytest.mark.parametrize("name", ["environment_name", "environment_schema_sha256"])
def test_endpoint_keeps_its_identity(name: str) -> None:
    changed = GROUPS[2]
    for index in range(len(changed.completions)):
        changed = altered(changed, index, **{name: SHARED[name]})
    with pytest.raises(InvalidRecord, match=f"group 3 disagrees on {name}"):
        lineage([*GROUPS[:2], changed])


def test_ordinary_rollouts_do_not_mix_in() -> None:
    completions = list(GROUPS[0].completions)
    completions[1] = msgspec.structs.replace(completions[1], openenv=msgspec.UNSET)
    mixed = msgspec.structs.replace(GROUPS[0], completions=completions)
    with pytest.raises(InvalidRecord, match="without OpenEnv provenance"):
        lineage([mixed])


def test_empty_corpus_has_no_lineage() -> None:
    with pytest.raises(InvalidRecord, match="no group"):
        CorpusLineage().record()


def test_rewards_without_a_finite_mean_are_refused() -> None:
    group = GROUPS[0]
    for index in (0, 1):
        completions = list(group.completions)
        openenv = msgspec.structs.replace(
            provenance(group, index), episode_return=1.7e308
        )
        completions[index] = msgspec.structs.replace(
            completions[index], openenv=openenv, reward=1.7e308
        )
        group = msgspec.structs.replace(group, completions=completions)
    with pytest.raises(InvalidRecord, match="no finite mean"):
        lineage([group])


CHANGES: list[tuple[str, Any]] = [
    ("/schema", "kiln.openenv-training-data.v2"),
    ("/groups", 0),
    ("/groups", 5),
    ("/rollouts", 3),
    ("/rollouts", 29),
    ("/unique_seeds", 5),
    ("/unique_seeds", 0),
    ("/seed_min", "44"),
    ("/seed_min", "040"),
    ("/seed_min", ""),
    ("/seed_min", "-1"),
    ("/seed_min", "40\n"),
    ("/seed_max", "18446744073709551616"),
    ("/seed_max", 43),
    ("/total_steps", 61),
    ("/terminations/done", 8),
    ("/terminations/extra", 0),
    ("/reward_mean", None),
    ("/environments", []),
    ("/environments/1", DROP),
    ("/environments/0/groups", 3),
    ("/environments/0/environment_base_url", "http://z"),
    ("/environments/0/environment_base_url", "http://127.0.0.1:8002"),
    ("/environments/0/terminations", {"done": 14}),
    ("/extra", 1),
]


@pytest.mark.parametrize(("pointer", "value"), CHANGES, ids=lambda v: repr(v)[:40])
def test_lineage_that_does_not_add_up_is_refused(pointer: str, value: Any) -> None:
    document = msgspec.to_builtins(lineage(GROUPS))
    convert_record(document, OpenEnvTrainingData, "lineage")
    put(document, pointer, value)
    with pytest.raises(InvalidRecord):
        convert_record(document, OpenEnvTrainingData, "lineage")


@pytest.mark.parametrize("name", ["reward_min", "reward_max", "reward_mean"])
def test_lineage_holds_finite_rewards(name: str) -> None:
    with pytest.raises(ValueError, match="rewards"):
        msgspec.structs.replace(lineage(GROUPS), **{name: float("nan")})


def test_lineage_is_written_in_order() -> None:
    record = lineage(GROUPS)
    assert compact(record).startswith(
        b'{"schema":"kiln.openenv-training-data.v1","groups":4,"rollouts":28,'
        b'"unique_seeds":4,"seed_min":"40","seed_max":"43","total_steps":62,'
        b'"terminations":{"done":7,'
    )
