from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kiln_train_jax.losses import k1_loss, k3_loss, policy_loss

LOGITS = jnp.asarray([0.3, -1.2, 0.8, 0.1])
REFERENCE = jnp.asarray([-0.5, 0.4, 0.2, 0.9])


def logprobs(logits):
    return jax.nn.log_softmax(logits)


def test_policy_gradient_is_the_advantage_times_the_score():
    token, advantage = 2, 0.75
    gradient = jax.grad(
        lambda logits: policy_loss(logprobs(logits)[token], jnp.float32(advantage))
    )(LOGITS)
    score = jax.grad(lambda logits: logprobs(logits)[token])(LOGITS)
    np.testing.assert_allclose(gradient, -advantage * score, rtol=1e-6)


def test_policy_loss_value_is_minus_the_advantage():
    assert policy_loss(jnp.float32(-3.0), jnp.float32(0.5)) == -0.5


@pytest.mark.parametrize("estimator", [k1_loss, k3_loss])
def test_expected_value_is_the_divergence(estimator):
    policy, reference = logprobs(LOGITS), logprobs(REFERENCE)
    exact = float(jnp.sum(jnp.exp(policy) * (policy - reference)))
    expected = float(jnp.sum(jnp.exp(policy) * estimator(policy, reference)))
    assert expected == pytest.approx(exact, abs=1e-6)


def test_expected_k1_gradient_is_the_gradient_of_the_divergence():
    """As a plain loss the k1 estimate has zero expected gradient."""
    reference = logprobs(REFERENCE)

    def divergence(logits):
        policy = logprobs(logits)
        return jnp.sum(jnp.exp(policy) * (policy - reference))

    def estimated(logits):
        weights = jax.lax.stop_gradient(jnp.exp(logprobs(logits)))
        return jnp.sum(weights * k1_loss(logprobs(logits), reference))

    def naive(logits):
        weights = jax.lax.stop_gradient(jnp.exp(logprobs(logits)))
        return jnp.sum(weights * (logprobs(logits) - reference))

    exact = jax.grad(divergence)(LOGITS)
    np.testing.assert_allclose(jax.grad(estimated)(LOGITS), exact, atol=1e-6)
    np.testing.assert_allclose(jax.grad(naive)(LOGITS), np.zeros(4), atol=1e-6)
    assert np.abs(exact).max() > 0.05


def test_k3_is_never_negative_but_for_rounding():
    ratios = jnp.linspace(-5.0, 5.0, 101)
    assert float(k3_loss(ratios, jnp.zeros(101)).min()) >= -1e-7
