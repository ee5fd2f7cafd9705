from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kiln_train_jax.batch import Layout
from kiln_train_jax.shapes import MAX_PROGRAMS, ShapePlan, Sizes, bucket
from kiln_train_jax.units import SampledToken, TrainingRow, TrainingUnit

sizes = st.builds(
    lambda *each: Sizes(*(bucket(size, 8) for size in each)),
    *(st.integers(1, 600) for _ in Sizes._fields),
)


@given(st.integers(1, 5_000))
def test_buckets_waste_at_most_half_and_are_few(size):
    rounded = bucket(size, 8)
    assert size <= rounded <= max(8, size + size // 2)
    assert bucket(rounded, 8) == rounded


@given(st.lists(sizes, min_size=1, max_size=40))
def test_a_plan_holds_every_step_in_few_shapes(needed):
    plan = ShapePlan(needed)
    assert 1 <= len(plan.shapes) <= MAX_PROGRAMS
    for each in needed:
        assert plan.of(each) in plan.shapes
        assert plan.of(each).holds(each)
    assert plan.shapes == ShapePlan(reversed(needed)).shapes


def test_shapes_far_apart_stay_apart():
    small, large = Sizes(8, 32, 32, 8, 1), Sizes(64, 32, 512, 64, 1)
    assert ShapePlan([small] * 20 + [large]).shapes == (small, large)
    assert ShapePlan([small, large] * 3).of(small) == small


def test_what_was_not_planned_has_a_shape_of_its_own():
    assert ShapePlan([Sizes(8, 32, 32, 8, 1)]).of(Sizes(9, 9, 9, 9, 9)) == (9,) * 5


def test_steps_of_a_multi_turn_corpus_share_their_shapes():
    """Another length at every step was another program at every step."""
    draw = np.random.default_rng(0)
    mask = np.full(9, -1, np.int32)
    steps = []
    for group in range(24):
        rows = []
        for candidate in range(8):
            turns = int(draw.integers(1, 9))
            tokens = draw.integers(0, 99, 40 * turns).tolist()
            sampled = [SampledToken(40 * t, 1, mask, -1.0) for t in range(turns)]
            rows.append(
                TrainingRow((group, candidate), tokens, sampled, [], 0, 0.5, 1.0)
            )
        steps.append([TrainingUnit([1, 2, 3], rows, group)])
    layout = Layout(272)
    alone = {batch.tokens.shape for step in steps for batch in layout.batches(step)}
    plan = layout.plan(steps)
    planned = {
        batch.tokens.shape for step in steps for batch in layout.batches(step, plan)
    }
    assert len(alone) > len(planned)
    assert len(planned) <= MAX_PROGRAMS
