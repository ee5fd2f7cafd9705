from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kiln_core.canonical import digest
from kiln_core.dataset import read_groups
from kiln_core.errors import InvalidRecord, UsageError
from kiln_core.records import AgenticGroup, ChatMessage, ScoredRollout
from kiln_core.training import admit_corpus, corpus_digest, read_grpo_request
from tests.core.bundles import Collection

DATASET = Collection().bundle().dataset
GROUPS = list(read_groups(DATASET))
ORDINARY = AgenticGroup(
    messages=[ChatMessage(role="user", content="go")],
    completions=[ScoredRollout(text="x", reward=1.0)],
)


def test_admitted_corpus_is_the_bytes_of_its_lines() -> None:
    admitted = admit_corpus(GROUPS, "inline")
    assert admitted.admitted_corpus_sha256 == corpus_digest(GROUPS) == digest(DATASET)
    assert (admitted.source, admitted.rows) == ("inline", 4)
    assert admitted.openenv is not msgspec.UNSET
    assert admitted.openenv.rollouts == 28


def test_ordinary_corpus_has_no_lineage() -> None:
    assert admit_corpus([ORDINARY], "inline").openenv is msgspec.UNSET


def test_mixed_corpus_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="mixes"):
        admit_corpus([GROUPS[0], ORDINARY], "inline")


def request_document() -> dict[str, Any]:
    return {"groups": [msgspec.to_builtins(ORDINARY)], "config": {"output_name": "a"}}


def test_request_is_read_under_the_names_of_other_clients() -> None:
    plain = read_grpo_request(request_document())
    other = request_document()
    [group] = other.pop("groups")
    group["rollouts"] = group.pop("completions")
    group["messages"][0]["content"] = [{"type": "text", "text": "g"}, {"text": "o"}]
    other["agentic_groups"] = [group]
    other["config"]["reference_policy"] = {"kind": "base_per_step"}
    assert read_grpo_request(other) == plain


def test_content_may_be_null_and_kind_left_out() -> None:
    document = request_document()
    document["groups"][0]["messages"][0]["content"] = None
    document["groups"][0]["completions"][0]["trajectory"] = [
        {"role": "assistant", "content": "x"}
    ]
    [group] = read_grpo_request(document).groups
    assert group.messages[0].content == ""
    assert group.completions[0].segments[0].kind == "context"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(agentic_groups=[]), "agentic_groups is another name"),
        (lambda d: d["groups"][0].update(rollouts=[]), "rollouts is another name"),
        (
            lambda d: d["config"].update(
                reference_policy={"kind": "none"}, kl_reference_policy={"kind": "none"}
            ),
            "reference_policy is another name",
        ),
        (
            lambda d: d["groups"][0]["messages"][0].update(
                content=[{"type": "image_url"}]
            ),
            "only text parts",
        ),
        (lambda d: d["groups"][0]["messages"][0].pop("content"), "/groups/0/messages"),
        (lambda d: d["groups"][0].update(messages=5), "/groups/0/messages"),
        (lambda d: d["groups"][0].update(completions=[5]), "/groups/0/completions"),
        (lambda d: d["groups"].append(5), "/groups/1"),
        (lambda d: d["groups"][0].update(messages=[5]), "/groups/0/messages"),
        (
            lambda d: d["groups"][0]["completions"][0].update(trajectory=[5]),
            "/trajectory/0",
        ),
        (lambda d: d.update(groups=5), "/groups"),
        (lambda d: d.update(config=5), "/config"),
        (lambda d: d.update(surprise=5), "surprise"),
        (lambda d: d.pop("groups"), "groups"),
    ],
)
def test_request_that_is_none_is_refused_with_its_place(change: Any, said: str) -> None:
    document = request_document()
    change(document)
    with pytest.raises(UsageError, match=said):
        read_grpo_request(document)


def test_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(UsageError, match="its root"):
        read_grpo_request([1])
