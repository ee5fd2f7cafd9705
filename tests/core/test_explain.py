"""Why a corpus trains, or not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kiln_core.canonical import compact, read_record
from kiln_core.dataset import read_groups
from kiln_core.explain import TrainingExplanation, explain_training
from kiln_core.grpo import AdamW, EchoLoss, GrpoConfig, LossConfig
from kiln_core.records import AgenticGroup, ChatMessage, ScoredRollout
from tests.core.bundles import Collection

GROUPS = list(read_groups(Collection().bundle().dataset))


def plain(*rewards: float) -> AgenticGroup:
    return AgenticGroup(
        messages=[ChatMessage(role="user", content="go")],
        completions=[ScoredRollout(text="x", reward=reward) for reward in rewards],
    )


def explained(
    *groups: AgenticGroup, receipt: dict[str, Any] | None = None, **config: Any
) -> TrainingExplanation:
    found = explain_training(groups, GrpoConfig(**config), receipt)
    assert read_record(compact(found), TrainingExplanation, "x") == found
    return found


def test_recorded_groups_are_told_one_by_one() -> None:
    found = explained(*GROUPS)
    assert [group.line for group in found.groups] == [1, 2, 3, 4]
    assert [group.environment for group in found.groups] == ["counter", "lamps"] * 2
    assert [group.seed for group in found.groups] == [40, 41, 42, 43]
    assert found.groups[0].without_output == 1
    counted = (found.training_groups, found.equal_reward_groups, found.unusable_groups)
    assert sum(counted) == 4


def test_equal_rewards_are_named_with_their_value() -> None:
    found = explained(plain(1.0, 1.0), plain(0.0, 1.0), plain(0.5, 0.5))
    assert [g.verdict for g in found.groups] == ["equal_rewards", "trains"] + [
        "equal_rewards"
    ]
    assert (found.training_groups, found.equal_reward_groups) == (1, 2)
    assert found.notes[0].startswith("2 of 3 groups are skipped")
    assert "(0.5, 1)" in found.notes[0]


def test_many_values_are_cut() -> None:
    found = explained(*(plain(value, value) for value in (1.0, 2.0, 3.0, 4.0)))
    assert "(1, 2, 3 and others)" in found.notes[1]
    assert "kiln train sft" in found.notes[0]


def test_other_losses_keep_equal_rewards() -> None:
    found = explained(plain(1.0, 1.0), loss=LossConfig(echo=EchoLoss()))
    assert found.groups[0].verdict == "trains"


def test_group_without_any_answer_is_unusable() -> None:
    mute = msgspec.structs.replace(
        GROUPS[0],
        completions=[
            c for c in GROUPS[0].completions if "NO_OUTPUT" in c.segments[-1].content
        ],
    )
    found = explained(mute)
    assert found.groups[0].verdict == "no_usable_output"
    assert found.groups[0].without_output == len(mute.completions)
    assert any("raise --max-action-tokens" in note for note in found.notes)


def test_environment_that_contributes_nothing_is_named() -> None:
    flat = [
        msgspec.structs.replace(group, completions=group.completions[:1])
        for group in (GROUPS[1], GROUPS[3])
    ]
    found = explained(GROUPS[0], *flat)
    assert any("environment lamps contributes nothing" in note for note in found.notes)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "a policy loss near 0 is no fault"),
        ({"optimizer": AdamW()}, "AdamW at a learning rate of 1e-05"),
        ({"groups_per_step": 4}, "1 groups make 1 optimizer steps"),
    ],
)
def test_configuration_that_changes_nothing_is_named(
    config: dict[str, Any], said: str
) -> None:
    found = explained(plain(0.0, 1.0), **config)
    assert any(said in note for note in found.notes)


def test_sound_configuration_gets_no_complaint() -> None:
    found = explained(plain(0.0, 1.0), epochs=20, optimizer=AdamW(), learning_rate=1e-3)
    assert len(found.notes) == 1
    recorded = explained(plain(0.0, 1.0), epochs=20, behavior_policy="recorded")
    assert recorded.notes == []


def test_receipt_tells_what_happened() -> None:
    receipt = {
        "lora_delta_norms": {"0.q_proj": 0.0},
        "grpo": {"policy_audit": {"first_step_agreement": 2.4e-7}},
        "warnings": ["something"],
    }
    notes = explained(plain(0.0, 1.0), epochs=20, receipt=receipt).notes
    assert "exactly as it started" in notes[1]
    assert "2.4e-07" in notes[2]
    assert notes[3] == "something"
    moved = {"lora_delta_norms": {"0.q_proj": 0.1}}
    assert len(explained(plain(0.0, 1.0), epochs=20, receipt=moved).notes) == 1


def test_empty_corpus_is_explained_too() -> None:
    found = explained()
    assert (found.groups, found.reward_mean) == ([], 0.0)
