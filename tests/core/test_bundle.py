from __future__ import annotations

from pathlib import PurePath
from typing import Any

import msgspec
import pytest

from kiln_core import limits
from kiln_core.bundle import (
    BundlePaths,
    Candidate,
    assemble_group,
    derive_bundle,
    project_candidate,
)
from kiln_core.canonical import compact, digest, read_json
from kiln_core.dataset import read_groups
from kiln_core.errors import (
    EpisodeUnfit,
    LimitError,
    PolicyDrift,
    PolicyError,
    UsageError,
)
from kiln_core.manifest import Observation
from kiln_core.trace import RolloutTrace
from tests.core.bundles import (
    CONTROLS,
    VARIANTS,
    Collection,
    bytes_of,
    small_collection,
    verify,
)
from tests.simulators.pure import ADAPTER_POLICY, PureServer, ToyPolicy, play, sha


@pytest.mark.parametrize("variant", VARIANTS)
def test_derived_bundle_verifies(variant: str) -> None:
    verify(bytes_of(VARIANTS[variant]().bundle()))


def test_bundle_shows_every_ending() -> None:
    """The other tests of this suite rely on it."""
    stats = Collection().bundle().summary.stats
    counts = msgspec.to_builtins(stats)
    assert {k: v for k, v in counts.items() if k.endswith("_count")} == {
        "done_count": 7,
        "max_steps_count": 7,
        "invalid_model_action_count": 10,
        "protocol_error_count": 4,
        "recoverable_protocol_error_count": 8,
        "capacity_retry_count": 20,
    }


def test_bytes_do_not_depend_on_the_order_of_completion() -> None:
    collection = small_collection()
    candidates = [collection.candidate(0, index) for index in range(2)]
    setting = collection.setting(0)
    one = assemble_group(setting, candidates)
    other = assemble_group(setting, candidates[::-1])
    assert one == other
    facts = collection.facts([one])
    assert derive_bundle(facts, [one]) == derive_bundle(facts, [other])


def test_collecting_again_gives_the_same_bytes() -> None:
    one, other = (bytes_of(Collection().bundle()) for _ in range(2))
    assert one == other


def test_files_are_compact_lines_and_pretty_documents() -> None:
    bundle = small_collection().bundle()
    files = bytes_of(bundle)
    assert files.dataset.endswith(b"}\n")
    assert b"\n" not in files.dataset[:-1]
    assert files.replay.startswith(b'{\n  "schema": "kiln.openenv-replay.v1",\n')
    assert files.summary.startswith(
        b'{\n  "schema": "kiln.openenv-rollout-summary.v5",\n'
    )
    assert files.summary.endswith(b"\n}\n")
    assert bundle.summary.dataset_sha256 == digest(files.dataset)
    assert bundle.summary.dataset_bytes == len(files.dataset)
    assert bundle.summary.replay_sha256 == digest(files.replay)
    assert bundle.summary.replay_bytes == len(files.replay)
    assert b"\xe2\x80\xa8" in bytes_of(Collection().bundle()).dataset


def test_line_has_the_documented_members_in_order() -> None:
    line = read_json(small_collection().bundle().dataset.splitlines()[0], "line")
    assert list(line) == ["messages", "completions", "prompt_token_ids"]
    assert list(line["completions"][0]) == [
        "text",
        "reward",
        "trajectory",
        "openenv",
        "trace",
    ]
    assert list(line["completions"][0]["trajectory"][0]) == ["role", "content", "kind"]
    plain = read_json(small_collection(tokens=False).bundle().dataset, "line")
    assert list(plain) == ["messages", "completions"]
    assert plain["completions"][0]["trace"]["tokens"] is None


def with_reset(candidate: Candidate, observation: Any) -> Candidate:
    reset = Observation(observation=observation, reward=None, done=False)
    return msgspec.structs.replace(candidate, reset_observation=reset)


@pytest.mark.parametrize(
    ("observation", "pointer"),
    [
        ({"total": 1, "seed": 0}, "/observation/total"),
        ({"total": 0.0, "seed": 0}, "/observation/total"),
        ({"total": 0}, "/observation/seed"),
        ([], "/observation"),
    ],
)
def test_environment_that_ignores_the_seed_is_unfit(
    observation: Any, pointer: str
) -> None:
    """F2: https://github.com/huggingface/OpenEnv/issues/1102"""
    collection = small_collection()
    first, second = (collection.candidate(0, index) for index in range(2))
    with pytest.raises(EpisodeUnfit) as caught:
        assemble_group(collection.setting(0), [first, with_reset(second, observation)])
    assert caught.value.details == {"group_index": 0, "pointer": pointer}
    assert pointer in str(caught.value)


def test_same_reset_in_another_key_order_is_the_same() -> None:
    collection = small_collection()
    first, second = (collection.candidate(0, index) for index in range(2))
    other = with_reset(second, {"total": 0, "seed": 0})
    assert assemble_group(collection.setting(0), [first, other])


def test_prompt_tokenized_two_ways_is_drift() -> None:
    collection = small_collection()
    first, second = (collection.candidate(0, index) for index in range(2))
    other = msgspec.structs.replace(second, prompt_token_ids=[1])
    with pytest.raises(PolicyDrift):
        assemble_group(collection.setting(0), [first, other])


def projected(guide: str | None = None, **changes: Any) -> Candidate:
    collection = small_collection()
    setting = msgspec.structs.replace(collection.setting(0), **changes)
    policy = ToyPolicy(['{"amount":4}'], guide=guide)
    episode = play(collection.setup(setting), PureServer(), policy)
    return project_candidate(
        setting, episode, candidate_index=0, attempt=0, capacity_retries=0
    )


def test_turn_guided_otherwise_than_agreed_is_drift() -> None:
    assert projected(sha("1"), guide_sha256=sha("1"))
    for guide, agreed in ((None, sha("1")), (sha("1"), None), (sha("1"), sha("2"))):
        with pytest.raises(PolicyDrift):
            projected(guide, guide_sha256=agreed)


def test_tokens_are_kept_whole_or_not_at_all() -> None:
    collection = small_collection()
    setting = collection.setting(0)
    policy = ToyPolicy(['{"amount":2}', '{"amount":2}'])
    episode = play(collection.setup(setting), PureServer(), policy)
    bare = msgspec.structs.replace(episode.replies[1], sample=None)
    partial = msgspec.structs.replace(episode, replies=[episode.replies[0], bare])
    candidate = project_candidate(
        setting, partial, candidate_index=0, attempt=0, capacity_retries=0
    )
    assert candidate.prompt_token_ids is None
    assert isinstance(candidate.rollout.trace, RolloutTrace)
    assert candidate.rollout.trace.tokens is None


def test_policy_that_misplaces_content_is_at_fault() -> None:
    collection = small_collection()
    setting = collection.setting(0)
    episode = play(collection.setup(setting), PureServer(), ToyPolicy(["x"]))
    reply = episode.replies[0]
    assert reply.sample is not None
    sample = msgspec.structs.replace(reply.sample, content_spans=((0, 10**6),))
    broken = msgspec.structs.replace(reply, sample=sample)
    with pytest.raises(PolicyError):
        project_candidate(
            setting,
            msgspec.structs.replace(episode, replies=[broken]),
            candidate_index=0,
            attempt=0,
            capacity_retries=0,
        )


def test_adapter_is_named_in_the_summary() -> None:
    summary = Collection(policy=ADAPTER_POLICY, contract=True).bundle().summary
    assert (summary.adapter, summary.adapter_label) == ("first", "first")
    base = Collection().bundle().summary
    assert (base.adapter, base.adapter_label) == (None, "base")
    assert base.training_contract is msgspec.UNSET


def test_thinking_budget_is_recorded_when_given() -> None:
    controls = msgspec.structs.replace(CONTROLS, thinking_budget_tokens=9)
    summary = Collection(controls=controls, thinking=True).bundle().summary
    assert summary.thinking_budget_tokens == 9
    assert b"thinking_budget_tokens" not in Collection().bundle().summary_bytes


def test_returns_without_a_finite_mean_are_unfit() -> None:
    collection = small_collection()
    group = collection.group(0)
    records = [
        msgspec.structs.replace(record, episode_return=1.7e308)
        for record in group.records
    ]
    huge = msgspec.structs.replace(group, records=records)
    with pytest.raises(EpisodeUnfit, match="no finite mean"):
        derive_bundle(collection.facts([group]), [huge])


def test_file_over_its_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    collection = small_collection(tokens=False)
    group = collection.group(0)
    facts = collection.facts([group])
    bundle = derive_bundle(facts, [group])
    assert len(bundle.dataset) < len(bundle.replay)
    for data, what in (
        (bundle.dataset, "the dataset"),
        (bundle.replay, "the replay manifest"),
    ):
        monkeypatch.setattr(limits, "MAX_ARTIFACT_BYTES", len(data) - 1)
        with pytest.raises(LimitError, match=what):
            derive_bundle(facts, [group])
    monkeypatch.setattr(limits, "MAX_ARTIFACT_BYTES", 3)
    with pytest.raises(LimitError, match="the summary"):
        _ = bundle.summary_bytes


def test_path_that_no_summary_can_name_is_refused() -> None:
    with pytest.raises(UsageError, match="not UTF-8"):
        BundlePaths(summary=PurePath("caf\udce9.json"))
    BundlePaths(dataset=PurePath("caf\u00e9.jsonl"))


def test_dataset_lines_read_back_to_the_same_bytes() -> None:
    bundle = Collection(thinking=True).bundle()
    groups = list(read_groups(bundle.dataset))
    assert b"".join(compact(group) + b"\n" for group in groups) == bundle.dataset
    assert len(groups) == 4
