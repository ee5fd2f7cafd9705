from __future__ import annotations

import jax
import numpy as np
import pytest

from kiln_core.errors import TrainingError
from kiln_core.grpo import GrpoConfig, NoReference, Sgd
from kiln_train_jax.lora import Pair, init
from kiln_train_jax.replaying import TurnReplayer
from kiln_train_jax.sampler import allowed
from kiln_train_jax.trainer import GrpoTrainer, step_groups
from kiln_train_jax.units import training_units
from tests.train.corpus import sampled_group

CONFIG = GrpoConfig(kl_coeff=0.0, optimizer=Sgd(), learning_rate=0.1)


@pytest.fixture(scope="module")
def groups(engine):
    return [sampled_group(engine, number) for number in range(3)]


@pytest.fixture(scope="module")
def units(engine, groups):
    replayer = TurnReplayer(
        engine.rules_of_turn,
        engine.opens_reasoning,
        engine.folder.config.vocab_size,
        engine.folder.tokenizer.encode_text,
    )
    return [
        unit
        for index, group in enumerate(groups)
        for unit in training_units(group, index, "dr_grpo", replayer)
    ]


def adapter(engine, scale=0.02):
    """An adapter that is not a no-op: B is not zero."""
    lora = init(engine.folder.config, rank=4, alpha=8.0, key=jax.random.key(3))
    layers = tuple(
        {
            name: Pair(
                pair.down,
                scale * jax.random.normal(jax.random.key(i), pair.up.shape),
            )
            for i, (name, pair) in enumerate(layer.items())
        }
        for layer in lora.layers
    )
    return lora._replace(layers=layers)


def trained(engine, units, config=CONFIG, lora=None):
    trainer = GrpoTrainer(
        engine.folder.model,
        lora or init(engine.folder.config, rank=4, alpha=8.0, key=jax.random.key(1)),
        config,
    )
    metrics = trainer.step(units)
    return trainer, metrics


def leaves(lora):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(lora.layers)]


def test_first_step_reproduces_the_recorded_probabilities(engine, units):
    _, metrics = trained(engine, units)
    assert metrics.agreement <= 1e-5


def test_a_changed_logprob_is_noticed(engine, units):
    row = units[0].rows[0]
    sampled = [row.sampled[0]._replace(logprob=row.sampled[0].logprob + 0.01)]
    bent = units[0]._replace(
        rows=[row._replace(sampled=sampled + row.sampled[1:]), *units[0].rows[1:]]
    )
    with pytest.raises(TrainingError, match="not those of this policy"):
        trained(engine, [bent])


def test_another_adapter_than_the_recorded_one_is_noticed(engine, units):
    with pytest.raises(TrainingError, match="not those of this policy"):
        trained(engine, units, lora=adapter(engine, scale=1.0))


def test_base_weights_stay_bit_equal(engine, units):
    from flax import nnx

    def state():
        return [
            np.array(leaf) for leaf in jax.tree.leaves(nnx.state(engine.folder.model))
        ]

    before = state()
    trained(engine, units)
    for one, other in zip(before, state(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_equal_rewards_move_nothing(engine, units):
    flat = [
        unit._replace(rows=[row._replace(advantage=0.0) for row in unit.rows])
        for unit in units
    ]
    start = init(engine.folder.config, rank=4, alpha=8.0, key=jax.random.key(1))
    trainer, metrics = trained(engine, flat, lora=start)
    assert metrics.loss == 0.0
    for one, other in zip(leaves(start), leaves(trainer.lora), strict=True):
        np.testing.assert_array_equal(one, other)


def test_loss_and_gradient_equal_a_plain_numpy_version(engine, units):
    """Ten lines over a full forward without shared prompts, against the packed step."""
    from flax import nnx

    from kiln_train_jax.attention import FullContext
    from kiln_train_jax.lora import Lora

    start = adapter(engine)
    graph, parameters = nnx.split(engine.folder.model)
    total = sum(unit.sampled_tokens for unit in units)

    def plain(layers):
        model = nnx.merge(graph, parameters)
        loss = 0.0
        for unit in units:
            for row in unit.rows:
                tokens = np.asarray([unit.prompt + row.tokens], np.int32)
                places = np.arange(tokens.shape[1], dtype=np.int32)[None]
                hidden, _ = model(
                    tokens, places, FullContext(), Lora(layers, start.scale)
                )
                for sampled in row.sampled:
                    logits = model.logits(
                        hidden[0, len(unit.prompt) + sampled.position]
                    )
                    open_set = allowed(sampled.mask[None], logits.shape[-1])[0]
                    chosen = jax.nn.log_softmax(
                        jax.numpy.where(open_set, logits, -1e30)
                    )[sampled.token]
                    loss -= row.advantage * chosen / total
        return loss

    expected = jax.grad(plain)(start.layers)
    trainer = GrpoTrainer(engine.folder.model, start, CONFIG)
    trainer._first = False  # this adapter did not sample the corpus
    trainer.step(units)
    for before, after, gradient in zip(
        leaves(start), leaves(trainer.lora), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(
            after - before, -0.1 * np.asarray(gradient), rtol=2e-3, atol=2e-7
        )


def test_groups_apart_or_together_give_one_gradient(engine, units):
    """Sharing a system message is an economy, not another loss."""
    together, first = trained(engine, units)
    trainer = GrpoTrainer(
        engine.folder.model,
        init(engine.folder.config, rank=4, alpha=8.0, key=jax.random.key(1)),
        CONFIG,
    )
    whole = sum(unit.sampled_tokens for unit in units)
    gradients = []
    for unit in units:
        (batch,) = trainer.layout.batches([unit])
        share = unit.sampled_tokens / whole
        scaled = batch._replace(weight=batch.weight * share, gain=batch.gain * share)
        _, gradient = trainer._gradient(
            trainer.layers, trainer.scale, trainer._parameters, None, scaled
        )
        gradients.append(gradient)
    expected = jax.tree.map(lambda *parts: -0.1 * sum(parts), *gradients)
    start = leaves(trainer.lora)
    for before, after, change in zip(
        start, leaves(together.lora), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(
            after - before, np.asarray(change), rtol=2e-3, atol=2e-7
        )
    assert np.isfinite(first.loss)


def test_divergence_pulls_towards_the_base(engine, units):
    config = GrpoConfig(
        kl_coeff=1.0, kl_estimator="k3", optimizer=Sgd(), learning_rate=0.5
    )
    flat = [
        unit._replace(rows=[row._replace(advantage=0.0) for row in unit.rows])
        for unit in units
    ]
    trainer = GrpoTrainer(engine.folder.model, adapter(engine, scale=0.05), config)
    trainer._first = False
    losses = [trainer.step(flat).loss for _ in range(5)]
    assert losses[0] > 0.0
    assert losses[-1] < losses[0]


def test_without_reference_no_divergence_is_computed(engine, units):
    config = GrpoConfig(
        kl_coeff=0.0, kl_reference_policy=NoReference(), optimizer=Sgd()
    )
    _, metrics = trained(engine, units, config)
    assert metrics.kl == 0.0


def test_two_runs_give_the_same_bits(engine, units):
    one, _ = trained(engine, units, GrpoConfig())
    other, _ = trained(engine, units, GrpoConfig())
    for left, right in zip(leaves(one.lora), leaves(other.lora), strict=True):
        np.testing.assert_array_equal(left, right)


def test_later_epochs_are_shuffled_by_seed_alone():
    config = GrpoConfig(epochs=3, groups_per_step=2)
    steps = step_groups(5, config, 11)
    assert steps == step_groups(5, config, 11)
    assert steps != step_groups(5, config, 12)
    assert [epoch for epoch, _ in steps] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [g for epoch, chosen in steps if epoch == 1 for g in chosen] == list(
        range(5)
    )
    for wanted in (2, 3):
        taken = [g for epoch, chosen in steps if epoch == wanted for g in chosen]
        assert sorted(taken) == list(range(5))
