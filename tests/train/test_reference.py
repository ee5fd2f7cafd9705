from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kiln_core.grpo import EmaReference, GrpoConfig
from kiln_train_jax.batch import Layout
from kiln_train_jax.lora import Pair
from kiln_train_jax.reference import Reference, held_tokens, weighted_quantile
from tests.train.test_batch import unit_of


def layers(value):
    return ({"q_proj": Pair(np.full((2, 1), value), np.full((1, 2), value))},)


def test_the_base_is_the_reference_unless_another_is_named():
    reference = Reference(GrpoConfig(), layers(1.0))
    reference.advance(1, layers(2.0))
    assert reference.layers is None


def test_a_moving_average_moves_when_it_is_time():
    kind = EmaReference(decay=0.75, refresh_every=2)
    reference = Reference(GrpoConfig(kl_reference_policy=kind), layers(1.0))
    expected, values = 1.0, []
    for step in range(1, 5):
        policy = 1.0 + step
        reference.advance(step, layers(policy))
        if step % 2 == 0:
            expected = 0.75 * expected + 0.25 * policy
        values.append((float(reference.layers[0]["q_proj"].up[0, 0]), expected))
    np.testing.assert_allclose(*zip(*values, strict=True))


def test_decay_zero_is_a_snapshot_bit_for_bit():
    kind = EmaReference(decay=0.0, refresh_every=1)
    reference = Reference(GrpoConfig(kl_reference_policy=kind), layers(1.0))
    policy = layers(np.nextafter(0.1, 1.0))
    reference.advance(1, policy)
    assert reference.layers is policy


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.floats(0, 1),
)
def test_a_weighted_quantile_holds_its_share(values, quantile):
    array = np.asarray(values, np.float32)
    weights = np.full(len(values), 1.0 / len(values), np.float32)
    limit = weighted_quantile(array, weights, quantile)
    assert (array <= limit).mean() >= quantile - 1e-5
    assert (array < limit).mean() <= quantile + 1e-5


def test_the_quantile_is_of_the_step_and_not_of_a_batch():
    units = [unit_of([n] * 100, ([3, 10], 1.0), ([3, 11], -1.0)) for n in (7, 8)]
    batches = Layout(272).batches(units)
    assert len(batches) == 2
    entropies = [np.full(batch.weight.shape, 9.0, np.float32) for batch in batches]
    entropies[0][:2, 0], entropies[1][:2, 0] = [0.1, 0.2], [0.3, 0.4]
    held = held_tokens(batches, entropies, 0.5)
    assert [int((batch.kl_weight > 0).sum()) for batch in held] == [2, 0]
    assert all(batch.weight.sum() > 0 for batch in held)
