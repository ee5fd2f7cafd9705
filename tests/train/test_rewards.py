from __future__ import annotations

import pytest

from kiln_core.errors import TrainingError
from kiln_core.grpo import EchoLoss, GrpoConfig, LossConfig
from kiln_train_jax.rewards import choose_groups, reward_warnings

REWARDS = [[1.0, 1.0], [0.0, 1.0], [0.0, 0.2], [0.0, 0.0]]
"""Variances 0, 0.25, 0.01 and 0."""


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, [1, 2]),
        ({"dynamic_sampling": False}, [0, 1, 2, 3]),
        ({"loss": LossConfig(echo=EchoLoss())}, [0, 1, 2, 3]),
        ({"reward_filter_var_min": 0.1}, [1]),
        ({"reward_filter_var_max": 0.1}, [2]),
        ({"dynamic_sampling": False, "reward_filter_var_max": 0.1}, [0, 2, 3]),
        ({"reward_filter_var_min": 0.25, "reward_filter_var_max": 0.25}, [1]),
    ],
)
def test_groups_are_chosen_by_their_variance(fields, kept):
    assert choose_groups(REWARDS, GrpoConfig(**fields)) == (kept, [])


@pytest.mark.parametrize(
    ("policy", "kept"), [("train-all", [0, 1, 2, 3]), ("skip", [])]
)
def test_too_few_groups_are_a_warning_where_the_configuration_says_so(policy, kept):
    config = GrpoConfig(reward_filter_min_groups=3, reward_filter_on_empty=policy)
    choice = choose_groups(REWARDS, config)
    assert choice.kept == kept
    assert choice.warnings[0].startswith("2 of 4 groups are left by their rewards")


@pytest.mark.parametrize(
    ("rewards", "fields", "message"),
    [
        (REWARDS, {"reward_filter_min_groups": 3}, "2 of 4 .* asks for 3"),
        ([[1.0, 1.0]], {}, "all rewards are equal"),
        (REWARDS, {"reward_filter_var_min": 9.0}, "0 or out of bounds"),
    ],
)
def test_too_few_groups_fail(rewards, fields, message):
    with pytest.raises(TrainingError, match=message):
        choose_groups(rewards, GrpoConfig(**fields))


def test_saturated_and_flat_rewards_are_told():
    warnings = reward_warnings([[1.0, 1.0], [0.99, 1.0]], GrpoConfig())
    assert "mean reward 0.9975 is at reward_saturation_threshold 0.95" in warnings[0]
    assert "2 of 2 groups have a reward variance below" in warnings[1]
    assert not reward_warnings([[0.0, 1.0]], GrpoConfig())
