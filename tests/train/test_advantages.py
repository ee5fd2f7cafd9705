from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln_train_jax.advantages import group_advantages

rewards = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8)


@given(rewards, st.floats(-100, 100))
def test_shifting_all_rewards_changes_no_advantage(values, shift):
    plain = group_advantages(values, "dr_grpo")
    moved = group_advantages([value + shift for value in values], "dr_grpo")
    if len(set(values)) == len({value + shift for value in values}):
        np.testing.assert_allclose(plain, moved, atol=1e-3)


@pytest.mark.parametrize("mode", ["dr_grpo", "vanilla"])
def test_equal_rewards_give_exactly_zero(mode):
    # eight times 0.1 has a float32 standard deviation of 7e-9, not 0
    assert not group_advantages([0.1] * 8, mode).any()


def test_vanilla_divides_by_the_standard_deviation():
    values = [0.0, 1.0, 1.0, 4.0]
    exact = np.asarray(values)
    expected = (exact - exact.mean()) / (exact.std() + 1e-8)
    np.testing.assert_allclose(group_advantages(values, "vanilla"), expected, rtol=1e-6)


def test_advantages_are_float32_with_zero_mean():
    advantages = group_advantages([0.0, 0.0, 1.0], "dr_grpo")
    assert advantages.dtype == np.float32
    assert abs(float(advantages.sum())) < 1e-6
