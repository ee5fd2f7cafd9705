from __future__ import annotations

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from kiln_core.errors import TrainingError, UsageError
from kiln_core.grpo import EchoLoss
from kiln_core.records import AgenticGroup, ChatMessage, ScoredRollout, TurnSegment
from kiln_train_jax.folder import TURN_TEMPLATE
from kiln_train_jax.rendering import RolloutRenderer
from kiln_train_jax.units import training_units
from tests.train.corpus import job_of, sampled_group
from tests.train.test_template import BYTES, QWEN_LIKE, template

ECHO = EchoLoss()
WARNING = "Caution ✗: "


def act(content):
    return TurnSegment(role="assistant", content=content, kind="action")


def see(content, warning=UNSET):
    return TurnSegment(
        role="user", content=content, kind="observation", warning_prefix_len=warning
    )


def group_of(*trajectories, rewards=(1.0, 0.0)):
    rollouts = [
        ScoredRollout(
            text="<TURN_BREAK>".join(s.content for s in t if s.kind == "action"),
            reward=reward,
            trajectory=list(t),
        )
        for t, reward in zip(trajectories, rewards, strict=False)
    ]
    prompt = [ChatMessage(role="user", content="Press a lamp.")]
    return AgenticGroup(messages=prompt, completions=rollouts)


def units(group, source=TURN_TEMPLATE, echo=ECHO, context=4_096):
    renderer = RolloutRenderer(template(source), BYTES, context)
    return training_units(group, 0, "dr_grpo", None, echo, renderer)


def trained_texts(unit, row):
    """The texts of the runs of ids that carry a policy loss, by position."""
    ids = unit.prompt + row.tokens
    places = [len(unit.prompt) + s.position + 1 for s in row.sampled]
    assert [ids[place] for place in places] == [s.token for s in row.sampled]
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return [BYTES.decode([ids[p] for p in run]) for run in runs]


def observed_text(row):
    return BYTES.decode([row.tokens[place] for place in row.observed])


def test_actions_and_observations_are_the_contents_and_nothing_else():
    group = group_of([act('{"lamp":1}'), see("dark"), act('{"lamp":2}'), see("lit")])
    (unit,) = units(group)
    (row,) = unit.rows
    assert trained_texts(unit, row) == ['{"lamp":1}', '{"lamp":2}']
    assert observed_text(row) == "darklit"
    assert not {s.position + 1 for s in row.sampled} & set(row.observed)
    assert {s.logprob for s in row.sampled} == {None}


def test_candidates_share_the_prompt_and_get_their_advantages():
    (unit,) = units(group_of([act("1")], [act("2")]))
    assert [row.advantage for row in unit.rows] == [0.5, -0.5]
    assert BYTES.decode(unit.prompt).startswith("<|user|>")


@pytest.mark.parametrize(
    ("echo", "text"),
    [
        (ECHO, "dark"),
        (EchoLoss(warning_filter=False), f"{WARNING}dark"),
        (EchoLoss(env_mask_mode="full_obs"), f"{WARNING}dark"),
    ],
)
def test_a_warning_prefix_is_counted_and_trained_only_when_asked(echo, text):
    """The prefix is counted in UTF-8 bytes."""
    seen = see(f"{WARNING}dark", len(WARNING.encode()))
    (unit,) = units(group_of([act("1"), seen, act("2")]), echo=echo)
    (row,) = unit.rows
    assert BYTES.decode([row.tokens[p] for p in sorted(row.observed)]) == text
    assert row.observation_tokens == len(f"{WARNING}dark".encode())


def test_reasoning_is_trained_without_its_opener():
    """The last turn's reasoning is kept by the template: one rendering does."""
    (unit,) = units(group_of([act("\nfirst look\n</think>\n\n2")]), QWEN_LIKE)
    (row,) = unit.rows
    assert "".join(trained_texts(unit, row)).startswith("first look")
    assert BYTES.decode(unit.prompt + row.tokens[:1]).endswith("<think>\n")


def test_no_action_is_dropped_where_a_template_drops_old_reasoning():
    said = ["a thought\n</think>\n\n1", "another\n</think>\n\n2"]
    made = units(group_of([act(said[0]), see("dark"), act(said[1])]), QWEN_LIKE)
    rows = [(unit, row) for unit in made for row in unit.rows]
    assert [text for pair in rows for text in trained_texts(*pair)] == said


def test_a_rollout_without_a_trajectory_said_its_text():
    bare = group_of([act("1")], [act("2")])
    bare = replace(
        bare, completions=[replace(c, trajectory=UNSET) for c in bare.completions]
    )
    (unit,) = units(bare)
    assert [trained_texts(unit, row) for row in unit.rows] == [["1"], ["2"]]


def test_planted_markers_stay_text():
    (unit,) = units(group_of([act("<|end|><|user|>")]))
    (row,) = unit.rows
    assert len(row.sampled) == len("<|end|><|user|>")


def test_a_row_longer_than_the_context_is_named():
    with pytest.raises(TrainingError, match=r"rollout 1 of group 0 has \d+ tokens"):
        units(group_of([act("1")], [act("2" * 90)]), context=64)


def test_a_prompt_with_tool_calls_is_refused_like_a_request():
    asked = ChatMessage(role="user", content="Press a lamp.", tool_calls=[{"id": "1"}])
    with pytest.raises(UsageError, match="tool_calls in messages are not supported"):
        units(replace(group_of([act("1")]), messages=[asked]))


def untraced(group):
    return replace(
        group,
        prompt_token_ids=UNSET,
        completions=[replace(c, trace=UNSET) for c in group.completions],
    )


def test_an_untraced_corpus_trains_and_the_receipt_says_so(engine):
    groups = [untraced(sampled_group(engine, 40 + n, size=8)) for n in range(2)]
    job = job_of(groups, "untraced", learning_rate=5e-3, kl_coeff=0.0)
    outcome = engine.train(job, lambda _: None, lambda: False)
    receipt = outcome.receipt_path.read_text()
    assert '"recorded_provenance": "rendered"' in receipt
    assert any("have no token ids" in warning for warning in outcome.warnings)


def test_recorded_ratios_need_recorded_probabilities(engine):
    group = untraced(sampled_group(engine, 45, size=8))
    job = job_of([group], "unrecorded", behavior_policy="recorded")
    with pytest.raises(TrainingError, match="needs their log-probabilities"):
        engine.train(job, lambda _: None, lambda: False)
