"""Every term of the loss against a plain numpy version, values and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kiln_core.errors import TrainingError
from kiln_core.grpo import (
    EchoLoss,
    EmaReference,
    GrpoConfig,
    LossConfig,
    NoReference,
    Sgd,
)
from kiln_train_jax.lora import Lora
from kiln_train_jax.objective import Scores, Terms, loss_of
from kiln_train_jax.trainer import GrpoTrainer
from tests.train.small import (
    leaves,
    logprobs,
    plain_logits,
    small_adapter,
    small_model,
    small_unit,
)

OFF = {"kl_coeff": 0.0, "optimizer": Sgd(), "learning_rate": 1.0}
RECORDED = {**OFF, "behavior_policy": "recorded"}
HELD = {**OFF, "kl_coeff": 0.7}


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def start(model):
    return small_adapter(model)


def plain_row(config, share, advantage, lp, behavior, reference):
    """Return a row's loss and its slope by each log-probability, in float64."""
    d = lp - (behavior if config.behavior_policy == "recorded" else lp)
    if config.is_level == "sequence":
        d = np.full_like(d, d.mean())
    ratio = np.exp(np.minimum(d, np.log(10.0)))
    if config.is_level == "cispo":
        slope = -share * advantage * np.minimum(ratio, config.cispo_max_weight)
        loss = slope * lp
    else:
        high = config.clip_eps_high or config.clip_epsilon
        bound = 1 + high if advantage > 0 else 1 - config.clip_epsilon
        cut = (ratio > bound) if advantage > 0 else (ratio < bound)
        loss = -share * advantage * np.where(cut, bound, ratio)
        flat = cut | (d > np.log(10.0)) | (advantage == 0)
        slope = np.where(flat, 0.0, -share * advantage * ratio)
        if config.is_level == "sequence":
            slope = np.full_like(slope, slope.mean())
    r = lp - reference
    if config.kl_coeff and config.kl_estimator == "k1":
        loss, slope = (part + config.kl_coeff * share * r for part in (loss, slope))
    if config.kl_coeff and config.kl_estimator == "k3":
        loss = loss + config.kl_coeff * share * (np.exp(-r) - 1 + r)
        slope = slope + config.kl_coeff * share * (1 - np.exp(-r))
    return loss.sum(), slope


def plain(config, unit, scored):
    """Return the loss, and its slope by each row's log-probabilities."""
    loss, slopes = 0.0, []
    for row, (lp, reference) in zip(unit.rows, scored, strict=True):
        by_row = config.loss_aggregation == "per_sample"
        ids = len(row.sampled)
        share = 1 / (len(unit.rows) * ids) if by_row else 1 / unit.sampled_tokens
        behavior = np.asarray([one.logprob for one in row.sampled])
        value, slope = plain_row(config, share, row.advantage, lp, behavior, reference)
        loss += value
        slopes.append(slope)
    return loss, slopes


CASES = {
    "ratio 1": ({**OFF}, 0.0),
    "ratio 1, recorded otherwise": ({**OFF}, 5e-4),
    "ratio 1 of sequences": ({**OFF, "is_level": "sequence"}, 0.0),
    "ratio 1 as a weight": ({**OFF, "is_level": "cispo"}, 0.0),
    "a weight below 1": (
        {**OFF, "is_level": "cispo", "cispo_max_weight": 0.5},
        0.0,
    ),
    "token": ({**RECORDED}, 0.5),
    "token, asymmetric": ({**RECORDED, "clip_eps_high": 0.9}, 0.5),
    "token, no room": ({**RECORDED, "clip_epsilon": 0.0}, 0.5),
    "token, truncated": ({**RECORDED, "clip_eps_high": 20.0}, 4.0),
    "token, by rollout": ({**RECORDED, "loss_aggregation": "per_sample"}, 0.5),
    "sequence": ({**RECORDED, "is_level": "sequence"}, 0.5),
    "sequence, by rollout": (
        {**RECORDED, "is_level": "sequence", "loss_aggregation": "per_sample"},
        0.5,
    ),
    "cispo": ({**RECORDED, "is_level": "cispo", "cispo_max_weight": 1.3}, 0.8),
    "k1": ({**HELD}, 0.0),
    "k3": ({**HELD, "kl_estimator": "k3"}, 0.0),
    "no estimate": ({**HELD, "kl_estimator": "none"}, 0.0),
    "no reference": (
        {**HELD, "kl_estimator": "none", "kl_reference_policy": NoReference()},
        0.0,
    ),
}

STEPS = {
    "reference without sharing": ({**HELD, "shared_prefix_reference": False}, 0.0),
    "checkpointed": ({**HELD, "grad_checkpoint_segments": 1}, 0.0),
}


@pytest.fixture(scope="module")
def scored(model, start):
    """Log-probabilities of each row under the policy and the base, float64."""
    unit = small_unit(model, start)
    return [
        tuple(
            np.asarray(logprobs(model, lora, unit.prompt, row), np.float64)
            for lora in (start, None)
        )
        for row in unit.rows
    ]


@pytest.mark.parametrize("case", CASES)
def test_loss_and_slope_equal_numpy(model, start, scored, case):
    fields, noise = CASES[case]
    config = GrpoConfig(**fields)
    unit = small_unit(model, start, noise=noise)
    terms = Terms.of(config)
    trainer = GrpoTrainer(model, start, config)
    (batch,) = trainer.layout.batches([unit])
    policy, base = (
        Scores(jnp.asarray(padded(batch, part)), batch.weight * 0.0, batch.weight)
        for part in zip(*scored, strict=True)
    )
    (loss, _), slope = jax.value_and_grad(
        lambda sampled: loss_of(terms, policy._replace(sampled=sampled), base, batch),
        has_aux=True,
    )(policy.sampled)
    value, slopes = plain(config, unit, scored)
    assert float(loss) == pytest.approx(value, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(slope, padded(batch, slopes), rtol=1e-3, atol=1e-6)
    assert np.abs(slope).max() > 1e-3 or "no" in case


def padded(batch, rows):
    """Return what each row says of its sampled ids as one array."""
    values = np.zeros(batch.weight.shape, np.float32)
    for at, row in enumerate(rows):
        values[at, : len(row)] = row
    return values


@pytest.mark.parametrize("case", ["ratio 1", "token", *STEPS])
def test_a_step_carries_the_slope_to_the_adapter(model, start, scored, case):
    """The slope of numpy through a plain forward, against the packed step."""
    fields, noise = {**CASES, **STEPS}[case]
    config = GrpoConfig(**fields)
    unit = small_unit(model, start, noise=noise)
    trainer = GrpoTrainer(model, start, config)
    metrics = trainer.step([unit])
    loss, slopes = plain(config, unit, scored)

    def weighted(layers):
        lora = Lora(layers, start.scale)
        return sum(
            jnp.sum(logprobs(model, lora, unit.prompt, row) * slope)
            for row, slope in zip(unit.rows, slopes, strict=True)
        )

    gradient = jax.grad(weighted)(start.layers)
    assert metrics.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
    for before, after, wanted in zip(
        leaves(start), leaves(trainer.lora), jax.tree.leaves(gradient), strict=True
    ):
        np.testing.assert_allclose(before - after, wanted, rtol=1e-3, atol=2e-6)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) > 1e-3


def test_slopes_of_the_plain_version_are_its_differences(model, start, scored):
    """The numpy slopes are themselves checked, where the ratio moves with the policy."""
    for case in ("token", "token, truncated", "sequence", "sequence, by rollout"):
        fields, noise = CASES[case]
        config, unit = GrpoConfig(**fields), small_unit(model, start, noise=noise)
        _, slopes = plain(config, unit, scored)
        for at, (lp, reference) in enumerate(scored):
            for place in range(len(lp)):
                step = np.zeros_like(lp)
                step[place] = 1e-6
                values = []
                for moved in (lp + step, lp - step):
                    around = [*scored[:at], (moved, reference), *scored[at + 1 :]]
                    values.append(plain(config, unit, around)[0])
                difference = (values[0] - values[1]) / 2e-6
                assert difference == pytest.approx(slopes[at][place], abs=1e-7)


def test_zero_variance_gives_zero_gradient(model, start):
    unit = small_unit(model, start, noise=0.5, advantages=(0.0, 0.0, 0.0))
    trainer = GrpoTrainer(model, start, GrpoConfig(**RECORDED))
    metrics = trainer.step([unit])
    assert (metrics.loss, metrics.clip_fraction) == (0.0, 0.0)
    for before, after in zip(leaves(start), leaves(trainer.lora), strict=True):
        np.testing.assert_array_equal(before, after)


def test_ids_that_carry_no_loss_change_nothing(model, start):
    """Ids behind the last sampled one, and padding, have no gradient."""
    unit = small_unit(model, start)
    longer = unit._replace(
        rows=[row._replace(tokens=[*row.tokens, 7, 8, 9]) for row in unit.rows]
    )
    one, other = (GrpoTrainer(model, start, GrpoConfig(**OFF)) for _ in range(2))
    one.step([unit])
    other.step([longer])
    for left, right in zip(leaves(one.lora), leaves(other.lora), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-7)


def test_clip_fraction_entropy_and_agreement_are_measured(model, start):
    unit = small_unit(model, start, noise=0.5)
    metrics = GrpoTrainer(model, start, GrpoConfig(**RECORDED)).step([unit])
    ratios, cut = [], 0
    for row in unit.rows:
        lp = np.asarray(logprobs(model, start, unit.prompt, row))
        row_ratios = np.exp(lp - [one.logprob for one in row.sampled])
        up = row.advantage > 0
        cut += (row_ratios > 1.2).sum() if up else (row_ratios < 0.8).sum()
        ratios.extend(row_ratios)
    assert metrics.clip_fraction == pytest.approx(cut / unit.sampled_tokens)
    assert 0 < metrics.clip_fraction < 1
    assert metrics.agreement == pytest.approx(np.abs(np.subtract(ratios, 1)).max())
    assert 0 < metrics.entropy < np.log(7)


def test_recorded_ratios_may_come_from_an_earlier_policy(model, start):
    trainer = GrpoTrainer(model, start, GrpoConfig(**RECORDED))
    trainer.step([small_unit(model, start, noise=0.5)])
    assert "differ by up to" in trainer.warnings[0]
    forced = GrpoTrainer(model, start, GrpoConfig(**OFF))
    with pytest.raises(TrainingError, match="not those of this policy"):
        forced.step([small_unit(model, start, noise=0.5)])


def env_loss(model, lora, unit):
    """Return the plain value of ECHO: lambda / |O| a row, mean over rows."""
    seen = [row for row in unit.rows if row.observation_tokens]
    total = 0.0
    for row in seen:
        lps = jax.nn.log_softmax(plain_logits(model, lora, unit.prompt, row))
        for place in row.observed:
            lp = lps[len(unit.prompt) + place - 1, row.tokens[place]]
            total -= lp / row.observation_tokens / len(seen)
    return total


def test_echo_equals_numpy_and_stands_alone(model, start):
    unit = small_unit(model, start)
    loss = LossConfig(echo=EchoLoss(lambda_=0.4), no_policy_loss=True)
    trainer = GrpoTrainer(model, start, GrpoConfig(**OFF, loss=loss))
    metrics = trainer.step([unit])
    value, gradient = jax.value_and_grad(
        lambda layers: 0.4 * env_loss(model, Lora(layers, start.scale), unit)
    )(start.layers)
    assert metrics.loss == pytest.approx(float(value), rel=1e-5)
    assert metrics.echo == pytest.approx(float(value) / 0.4, rel=1e-5)
    for before, after, wanted in zip(
        leaves(start), leaves(trainer.lora), jax.tree.leaves(gradient), strict=True
    ):
        np.testing.assert_allclose(before - after, wanted, rtol=1e-3, atol=2e-6)


def test_echo_without_environment_text_is_exactly_zero(model, start):
    unit = small_unit(model, start)
    silent = unit._replace(
        rows=[row._replace(observed=[], observation_tokens=0) for row in unit.rows]
    )
    with_echo = GrpoConfig(**OFF, loss=LossConfig(echo=EchoLoss()))
    one, other = (GrpoTrainer(model, start, c) for c in (with_echo, GrpoConfig(**OFF)))
    measured, plain = one.step([silent]), other.step([silent])
    assert (measured.echo, measured.loss) == (0.0, plain.loss)
    for left, right in zip(leaves(one.lora), leaves(other.lora), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-7)


def test_a_snapshot_reference_follows_the_policy(model, start):
    kind = EmaReference(decay=0.0, refresh_every=2)
    config = GrpoConfig(**{**HELD, "learning_rate": 0.1}, kl_reference_policy=kind)
    trainer = GrpoTrainer(model, start, config)
    unit = small_unit(model, start)
    distances = [abs(trainer.step([unit]).kl) for _ in range(4)]
    assert [distance < 1e-6 for distance in distances] == [True, False, True, False]


def test_entropy_quantile_holds_the_surer_tokens(model, start):
    unit = small_unit(model, start, advantages=(0.0, 0.0, 0.0))
    moved = {}
    for quantile in (None, 1.0, 0.5):
        config = GrpoConfig(**HELD, entropy_aware_kl_quantile=quantile)
        trainer = GrpoTrainer(model, start, config)
        moved[quantile] = trainer.step([unit]).loss
    assert moved[1.0] == moved[None]
    assert abs(moved[0.5]) < abs(moved[None])


def test_the_first_number_that_is_not_finite_is_named(start):
    model = small_model()
    unit = small_unit(model, start)
    model.embed_tokens[...] = model.embed_tokens[...].at[39].set(np.nan)
    rows = list(unit.rows)
    rows[1] = rows[1]._replace(tokens=[*rows[1].tokens[:2], 39, *rows[1].tokens[3:]])
    bad = unit._replace(rows=rows)
    watched = GrpoTrainer(model, start, GrpoConfig(**OFF, detect_anomaly=True))
    named = r"step 1: .* sampled token 0 \(id \d+\) of group 0, rollout 1 is nan"
    with pytest.raises(TrainingError, match=named):
        watched.step([bad])
    with pytest.raises(TrainingError, match="the loss is not finite"):
        GrpoTrainer(model, start, GrpoConfig(**OFF)).step([bad])


def test_an_update_that_overflows_is_named_and_not_taken(model, start):
    unit = small_unit(model, start, advantages=(100.0, -50.0, -50.0))
    config = GrpoConfig(**{**OFF, "learning_rate": 3e38}, detect_anomaly=True)
    trainer = GrpoTrainer(model, start, config)
    with pytest.raises(TrainingError, match=r"update of layer 0 \w+ lora_"):
        trainer.step([unit])
    for before, after in zip(leaves(start), leaves(trainer.lora), strict=True):
        np.testing.assert_array_equal(before, after)


def test_checkpointing_changes_memory_and_not_the_gradient():
    model = small_model(num_hidden_layers=3)
    start = small_adapter(model, size=0.1)
    unit = small_unit(model, start)
    rows = [
        row._replace(rollout=(0, n), tokens=[*row.tokens, *([7 + n] * 80)])
        for n in range(8)
        for row in unit.rows
    ]
    unit = unit._replace(rows=rows)
    sizes, moved = [], []
    for segments in (None, 2):
        config = GrpoConfig(**OFF, grad_checkpoint_segments=segments)
        trainer = GrpoTrainer(model, start, config)
        (batch,) = trainer.layout.batches([unit])
        compiled = trainer._gradient.lower(
            start.layers, start.scale, trainer._parameters, None, batch
        ).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        _, gradient = compiled(
            start.layers, start.scale, trainer._parameters, None, batch
        )
        moved.append([np.asarray(leaf) for leaf in jax.tree.leaves(gradient)])
    assert max(sizes[1:]) < sizes[0]
    for plain, *others in zip(*moved, strict=True):
        for other in others:
            np.testing.assert_allclose(plain, other, atol=1e-6)
