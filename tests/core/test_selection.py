from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from kiln_core.actions import InvalidAction
from kiln_core.canonical import canonical_bytes, compact
from kiln_core.grpo import EchoLoss, GrpoConfig, LossConfig
from kiln_core.receipt import OpenEnvTrainingSelection
from kiln_core.records import AgenticGroup, ChatMessage, ScoredRollout, TurnSegment
from kiln_core.selection import (
    TrainingSelector,
    harness_code,
    selector_for,
    without_output,
)

PROMPT = [ChatMessage(role="user", content="go")]


def ended(code: str | None, *, warned: bool = True) -> ScoredRollout:
    content = "observation"
    if code is not None:
        content = canonical_bytes(InvalidAction(code, "why").document()).decode()
    last = TurnSegment(
        role="tool",
        content=content,
        kind="observation",
        warning_prefix_len=len(content.encode()) if warned and code else UNSET,
    )
    action = TurnSegment(role="assistant", content="x", kind="action")
    return ScoredRollout(text="x", reward=0.0, trajectory=[action, last])


def rollout(reward: float, code: str | None = None) -> ScoredRollout:
    return msgspec.structs.replace(ended(code), reward=reward)


def group(*completions: ScoredRollout) -> AgenticGroup:
    return AgenticGroup(messages=PROMPT, completions=list(completions))


SILENT = "MODEL_ACTION_NO_OUTPUT"


@pytest.mark.parametrize(
    ("candidate", "silent"),
    [
        (ended(SILENT), True),
        (ended("INVALID_MODEL_ACTION"), False),
        (ended("ACTION_SCHEMA_VALIDATION_FAILED"), False),
        (ended(None), False),
        (ended(SILENT, warned=False), False),
        (ScoredRollout(text="", reward=0.0), False),
        (
            msgspec.structs.replace(
                ended(SILENT), trajectory=ended(SILENT).segments[:1]
            ),
            False,
        ),
    ],
)
def test_only_replies_without_output_are_silent(
    candidate: ScoredRollout, silent: bool
) -> None:
    """An environment that prints such an error is still an environment."""
    assert without_output(candidate) is silent


@pytest.mark.parametrize(
    ("document", "code"),
    [
        ({"openenv_harness_error": {"code": "A", "message": ""}, "done": True}, "A"),
        ({"done": True, "openenv_harness_error": {"message": "", "code": "A"}}, "A"),
        ({"openenv_harness_error": {"code": "A", "message": ""}, "done": False}, None),
        ({"openenv_harness_error": {"code": "A", "message": ""}, "done": 1}, None),
        ({"openenv_harness_error": {"code": "A", "message": ""}}, None),
        ({"openenv_harness_error": {"code": "A"}, "done": True}, None),
        ({"openenv_harness_error": {"code": 1, "message": ""}, "done": True}, None),
        ({"openenv_harness_error": "A", "done": True}, None),
        ({"openenv_error": {"code": "A", "message": ""}, "done": True}, None),
        ([], None),
        (None, None),
    ],
)
def test_harness_error_has_one_shape(document: Any, code: str | None) -> None:
    assert harness_code(compact(document).decode()) == code


@pytest.mark.parametrize("text", ["", "x", "{", '{"done":true,"done":true}', "[" * 500])
def test_other_text_has_no_code(text: str) -> None:
    assert harness_code(text) is None


def warnings(record: OpenEnvTrainingSelection) -> list[str]:
    assert isinstance(record.warnings, list)
    return record.warnings


def test_silent_rollouts_are_dropped_alone() -> None:
    selector = TrainingSelector()
    chosen = selector.select(group(rollout(1.0), rollout(0.0, SILENT), rollout(0.5)))
    assert chosen is not None
    assert [c.reward for c in chosen.completions] == [1.0, 0.5]
    assert chosen.messages == PROMPT
    record = selector.record()
    assert record.no_output_rollouts_discarded == 1
    assert (record.groups_submitted, record.rollouts_submitted) == (1, 2)
    assert len(warnings(record)) == 1


def test_group_of_silent_rollouts_is_skipped() -> None:
    selector = TrainingSelector()
    assert selector.select(group(rollout(0.0, SILENT), rollout(1.0, SILENT))) is None
    record = selector.record()
    assert record.no_usable_output_groups_skipped == 1
    assert record.no_output_rollouts_discarded == 2
    assert record.no_reward_gradient_groups_skipped == 0
    assert len(warnings(record)) == 3


@pytest.mark.parametrize(
    "rewards", [(1.0, 1.0), (0.0, -0.0), (5.0,), (0.1 + 0.2, 0.30000000000000004)]
)
def test_group_of_equal_rewards_is_skipped(rewards: tuple[float, ...]) -> None:
    selector = TrainingSelector()
    assert selector.select(group(*map(rollout, rewards))) is None
    assert selector.record().no_reward_gradient_groups_skipped == 1


def test_equality_is_of_doubles_before_any_cast() -> None:
    """In float32 these two are one number."""
    assert TrainingSelector().select(group(rollout(1.0), rollout(1.0 + 1e-12)))


def test_rewards_that_are_equal_without_the_silent_one_are_skipped() -> None:
    selector = TrainingSelector()
    assert (
        selector.select(group(rollout(1.0), rollout(1.0), rollout(0.0, SILENT))) is None
    )


def test_other_losses_keep_equal_rewards() -> None:
    selector = TrainingSelector(keep_equal_rewards=True)
    assert selector.select(group(rollout(1.0), rollout(1.0)))
    assert selector.select(group(rollout(1.0, SILENT))) is None
    assert selector.record().groups_submitted == 1


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (GrpoConfig(), False),
        (GrpoConfig(dynamic_sampling=False), True),
        (GrpoConfig(loss=LossConfig(echo=EchoLoss())), True),
    ],
)
def test_configuration_says_whether_equal_rewards_are_kept(
    config: GrpoConfig, kept: bool
) -> None:
    chosen = selector_for(config).select(group(rollout(1.0), rollout(1.0)))
    assert (chosen is not None) == kept


def test_clean_selection_has_no_warning() -> None:
    selector = TrainingSelector()
    selector.select(group(rollout(1.0), rollout(0.0)))
    assert selector.record().warnings is UNSET


def test_empty_selection_says_what_to_do() -> None:
    record = TrainingSelector().record()
    assert record.groups_submitted == 0
    assert "nothing is left to train on" in warnings(record)[0]
