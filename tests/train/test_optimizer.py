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


def steps_of(kind, gradients, start, rate=0.1):
    """Return parameters after each of several steps."""
    optimizer = make_optimizer(kind, rate)
    parameters, seen = jnp.asarray(start), []
    state = optimizer.init(parameters)
    for gradient in gradients:
        updates, state = optimizer.update(jnp.asarray(gradient), state, parameters)
        parameters = parameters + updates
        seen.append(np.asarray(parameters))
    return seen


def matrices(count, shape=(6, 3)):
    draw = np.random.default_rng(2)
    return [draw.normal(size=shape).astype(np.float32) for _ in range(count)]


def test_adamw_equals_numpy():
    kind = AdamW(beta1=0.8, beta2=0.95, epsilon=1e-3, weight_decay=0.2)
    start, *gradients = matrices(4)
    w, m, v = start.astype(np.float64), 0.0, 0.0
    for t, found in enumerate(steps_of(kind, gradients, start), 1):
        g = gradients[t - 1].astype(np.float64)
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        step = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3)
        w = w - 0.1 * (step + 0.2 * w)
        np.testing.assert_allclose(found, w, rtol=1e-5, atol=1e-6)


def newton_schulz(matrix, iterations):
    a, b, c = 3.4445, -4.775, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("iterations", [2, 5])
def test_muon_equals_numpy(nesterov, iterations):
    kind = Muon(momentum=0.9, nesterov=nesterov, ns_iters=iterations, weight_decay=0.3)
    start, *gradients = matrices(4)
    w, m = start.astype(np.float64), 0.0
    for t, found in enumerate(steps_of(kind, gradients, start), 1):
        g = gradients[t - 1].astype(np.float64)
        m = 0.9 * m + 0.1 * g
        late = m / (1 - 0.9**t)
        if nesterov:
            late = 0.9 * m / (1 - 0.9 ** (t + 1)) + 0.1 * g / (1 - 0.9**t)
        update = newton_schulz(late, iterations) * np.sqrt(max(1.0, 3 / 6))
        w = w - 0.1 * (update + 0.3 * w)
        np.testing.assert_allclose(found, w, rtol=1e-4, atol=1e-4)


def test_sgd_follows_the_gradient_and_decays_weights():
    config = GrpoConfig(optimizer=Sgd(weight_decay=0.1), learning_rate=0.5)
    optimizer = make_optimizer(config.optimizer, config.effective_learning_rate)
    parameters = {"leaf": jnp.ones((1, 2))}
    updates, _ = optimizer.update(
        {"leaf": jnp.asarray([[1.0, 2.0]])}, optimizer.init(parameters), parameters
    )
    np.testing.assert_allclose(updates["leaf"], [[-0.55, -1.05]], rtol=1e-6)
