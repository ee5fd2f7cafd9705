from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kiln_core.grpo import AdamW, GrpoConfig, Muon, Sgd
from kiln_train_jax.optimizer import make_optimizer


def first_update(config, gradient):
    parameters = {"leaf": jnp.zeros_like(gradient)}
    optimizer = make_optimizer(config.optimizer, config.effective_learning_rate)
    updates, _ = optimizer.update(
        {"leaf": gradient}, optimizer.init(parameters), parameters
    )
    return updates["leaf"]


def test_muon_orthogonalises_a_matrix():
    """optax hands stacks to Adam silently, so this is shown and not assumed."""
    gradient = jax.random.normal(jax.random.key(0), (16, 8))
    gradient = gradient * jnp.logspace(0, 2, 8)  # singular values far apart
    update = np.asarray(first_update(GrpoConfig(optimizer=Muon()), gradient))
    before = np.linalg.svd(np.asarray(gradient), compute_uv=False)
    after = np.linalg.svd(update, compute_uv=False)
    assert before.max() / before.min() > 20
    assert after.max() / after.min() < 2


@pytest.mark.parametrize(
    ("optimizer", "rate"), [(Muon(), 2e-3), (AdamW(), 1e-5), (Sgd(), 1e-5)]
)
def test_learning_rate_defaults_by_optimizer(optimizer, rate):
    assert GrpoConfig(optimizer=optimizer).effective_learning_rate == rate


def test_adamw_takes_steps_of_its_learning_rate():
    gradient = jnp.asarray([[3.0, -0.01]])
    update = first_update(GrpoConfig(optimizer=AdamW(), learning_rate=0.5), gradient)
    np.testing.assert_allclose(update, [[-0.5, 0.5]], rtol=1e-4)


def test_sgd_follows_the_gradient_and_decays_weights():
    config = GrpoConfig(optimizer=Sgd(weight_decay=0.1), learning_rate=0.5)
    optimizer = make_optimizer(config.optimizer, config.effective_learning_rate)
    parameters = {"leaf": jnp.ones((1, 2))}
    updates, _ = optimizer.update(
        {"leaf": jnp.asarray([[1.0, 2.0]])}, optimizer.init(parameters), parameters
    )
    np.testing.assert_allclose(updates["leaf"], [[-0.55, -1.05]], rtol=1e-6)
