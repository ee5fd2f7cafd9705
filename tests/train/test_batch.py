from __future__ import annotations

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from kiln_core.errors import TrainingError
from kiln_core.grpo import EchoLoss
from kiln_core.records import AgenticGroup, ChatMessage, ScoredRollout, TurnSegment
from kiln_core.trace import (
    TRACE_SCHEMA,
    RolloutTrace,
    SamplingTransform,
    TokenTrace,
    TurnTokens,
)
from kiln_train_jax.batch import Layout
from kiln_train_jax.replaying import TurnReplayer
from kiln_train_jax.units import (
    SampledToken,
    TrainingRow,
    TrainingUnit,
    training_units,
)

WORDS = 9
OPEN = np.full(WORDS, -1, np.int32)


class OpenReplayer:
    """Allows every token everywhere."""

    def masks(self, group, guide_sha256, sampling, turn):
        _, action, logprobs = turn
        return {i: OPEN for i in range(len(action)) if logprobs[i] is not None}

    find = TurnReplayer.find

    def _encode(self, text):
        return [ord(letter) for letter in text]


def turn(prefix, prompt, action, logprobs, spans=()):
    return TurnTokens(
        prompt_prefix=prefix,
        prompt_token_ids=prompt,
        action_token_ids=action,
        logprobs=logprobs,
        observation_spans=list(spans),
    )


def rollout(reward, turns):
    sampling = SamplingTransform(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=16
    )
    tokens = TokenTrace(
        tokenizer_sha256="sha256:" + "0" * 64, sampling=sampling, turns=turns
    )
    trace = RolloutTrace(
        schema=TRACE_SCHEMA, attempt=0, guide_sha256=None, tokens=tokens
    )
    return ScoredRollout(text="", reward=reward, trace=trace)


def group(*rollouts, prompt=(1, 2, 3)):
    return AgenticGroup(
        messages=[ChatMessage(role="user", content="?")],
        completions=list(rollouts),
        prompt_token_ids=list(prompt),
    )


def units(*rollouts):
    return training_units(group(*rollouts), 0, "dr_grpo", OpenReplayer())


def test_turns_that_extend_the_ids_share_a_row():
    first = turn(3, [], [10, 11], [-0.5, None])
    second = turn(5, [20, 21], [12], [-0.25], [(5, 7)])
    (unit,) = units(rollout(1.0, [first, second]), rollout(0.0, [first]))
    row = unit.rows[0]
    assert unit.prompt == [1, 2]
    assert row.tokens == [3, 10, 11, 20, 21, 12]
    assert [(s.position, s.token) for s in row.sampled] == [(0, 10), (4, 12)]
    assert row.observed == [3, 4]
    assert row.advantage == pytest.approx(0.5)


def test_a_turn_that_drops_earlier_ids_starts_a_new_row():
    """Templates that drop old reasoning do so; no action is lost."""
    first = turn(3, [], [10, 11], [-0.5, -0.5])
    second = turn(3, [30], [12], [-0.25])
    (unit,) = units(rollout(1.0, [first, second]), rollout(0.0, [first]))
    assert [row.tokens for row in unit.rows] == [[3, 10, 11], [3, 30, 12], [3, 10, 11]]
    assert [len(row.sampled) for row in unit.rows] == [2, 1, 2]


def test_forced_ids_carry_no_loss():
    (unit,) = units(
        rollout(1.0, [turn(3, [], [10, 11, 12], [None, -1.0, None])]),
        rollout(0.0, [turn(3, [], [10], [-1.0])]),
    )
    assert unit.sampled_tokens == 2


def test_weights_sum_to_one_over_sampled_ids():
    made = units(
        rollout(1.0, [turn(3, [], [10, 11, 12], [-1.0, -1.0, -1.0])]),
        rollout(0.0, [turn(3, [], [10], [-1.0])]),
    )
    (by_token,) = Layout(272).batches(made)
    (by_row,) = Layout(272, per_sample=True).batches(made)
    assert by_token.weight.sum() == pytest.approx(1.0)
    assert by_token.weight.max() == pytest.approx(0.25)
    assert by_row.weight.sum() == pytest.approx(1.0)
    assert by_row.weight.max() == pytest.approx(0.5)


def test_environment_ids_are_weighted_within_their_row():
    second = turn(4, [20, 21], [12], [-0.25], [(4, 6)])
    made = units(
        rollout(1.0, [turn(3, [], [10], [-0.5]), second]),
        rollout(0.0, [turn(3, [], [10], [-0.5])]),
    )
    (batch,) = Layout(272, echo=True).batches(made)
    assert batch.observed_weight.sum() == pytest.approx(1.0)
    assert set(batch.observed_target[batch.observed_weight > 0]) == {20, 21}
    (silent,) = Layout(272).batches(made)
    assert not silent.observed_weight.any()


def test_a_group_without_token_ids_needs_a_renderer():
    bare = replace(group(rollout(1.0, [])), prompt_token_ids=UNSET)
    with pytest.raises(TrainingError, match="no token ids"):
        training_units(bare, 3, "dr_grpo", OpenReplayer())


def unit_of(prompt, *rows):
    made = []
    for place, (tokens, advantage) in enumerate(rows):
        sampled = [SampledToken(0, tokens[1], OPEN, -1.0)]
        made.append(TrainingRow((0, place), tokens, sampled, [], 0, advantage, 1.0))
    return TrainingUnit(prompt, made, 0)


def test_equal_rows_become_one_with_added_weights():
    unit = unit_of([1, 2], ([3, 10], 0.5), ([3, 10], 0.5), ([3, 11], -1.0))
    (batch,) = Layout(272).batches([unit])
    assert (batch.weight > 0).sum() == 2
    assert batch.weight.sum() == pytest.approx(1.0)
    assert batch.gain[0, 0] == pytest.approx(1 / 3)
    assert batch.gain[1, 0] == pytest.approx(-1 / 3)


def test_groups_with_one_system_message_share_it():
    system = list(range(100, 200))
    units = [unit_of([*system, n], ([3, 10], 1.0), ([3, 11], -1.0)) for n in (7, 8)]
    (batch,) = Layout(272).batches(units)
    assert batch.prefix[: batch.prefix_length].tolist() == system
    assert batch.tokens[:4, :3].tolist() == [
        [7, 3, 10],
        [7, 3, 11],
        [8, 3, 10],
        [8, 3, 11],
    ]
    assert batch.position[0, 0] == 1


def test_groups_without_a_common_prompt_are_kept_apart():
    units = [
        unit_of([n] * 100, ([3, 10], 1.0), ([3, 11], -1.0), ([3, 12], 0.0))
        for n in (7, 8)
    ]
    batches = Layout(272).batches(units)
    assert [int(batch.prefix_length) for batch in batches] == [100, 100]
    assert sum(batch.weight.sum() for batch in batches) == pytest.approx(1.0)


WARNED = [
    TurnSegment(role="assistant", content="?", kind="action"),
    TurnSegment(role="tool", content="seen", kind="observation"),
    TurnSegment(role="assistant", content="?", kind="action"),
    TurnSegment(
        role="tool", content=" bad\n", kind="observation", warning_prefix_len=5
    ),
    TurnSegment(role="assistant", content="?", kind="action"),
]
BAD = [ord(letter) for letter in "bad"]


def warned_units(echo):
    turns = [
        turn(3, [], [10], [-0.5]),
        turn(4, [20, 21, 30], [11], [-0.5], [(4, 6)]),
        turn(8, [31, *BAD, 32], [12], [-0.5]),
    ]
    first = replace(rollout(1.0, turns), trajectory=WARNED)
    other = rollout(0.0, [turn(3, [], [10], [-0.5])])
    return training_units(group(first, other), 0, "dr_grpo", OpenReplayer(), echo)


@pytest.mark.parametrize(
    ("echo", "trained"),
    [
        (EchoLoss(), {20, 21}),
        (EchoLoss(env_mask_mode="full_obs"), {20, 21, *BAD}),
        (EchoLoss(warning_filter=False), {20, 21, *BAD}),
    ],
)
def test_warnings_are_counted_and_trained_only_when_asked(echo, trained):
    """A row weighs lambda / |O| an id, |O| counted before warnings are left out."""
    made = warned_units(echo)
    row = made[0].rows[0]
    assert row.observation_tokens == 5
    assert {row.tokens[place] for place in row.observed} == trained
    (batch,) = Layout(272, echo=True).batches(made)
    weighted = batch.observed_weight > 0
    assert set(batch.observed_target[weighted]) == trained
    np.testing.assert_allclose(batch.observed_weight[weighted], 1 / 5)


def test_a_warning_that_is_not_in_the_prompt_is_refused():
    with pytest.raises(TrainingError, match="does not stand in the next prompt"):
        OpenReplayer().find("missing", [1, 2, 3], 0)


def test_equal_rows_of_unlike_sign_stay_apart_where_a_clip_may_act():
    unit = unit_of([1, 2], ([3, 10], 0.5), ([3, 10], -0.5), ([3, 10], 0.25))
    (batch,) = Layout(272, signed=True).batches([unit])
    np.testing.assert_allclose(batch.gain[:2, 0], [0.25, -1 / 6], rtol=1e-6)
    (merged,) = Layout(272).batches([unit])
    assert (merged.weight > 0).sum() == 1
    assert merged.rollout[0].tolist() == [0, 0]
