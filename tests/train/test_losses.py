from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kiln_train_jax.losses import (
    cispo_loss,
    clipped,
    entropy,
    k1_loss,
    k3_loss,
    policy_loss,
    sequence_log_ratio,
    token_log_ratio,
)

LOGITS = jnp.asarray([0.3, -1.2, 0.8, 0.1])
REFERENCE = jnp.asarray([-0.5, 0.4, 0.2, 0.9])


def logprobs(logits):
    return jax.nn.log_softmax(logits)


def test_policy_gradient_is_the_advantage_times_the_score():
    token, advantage = 2, jnp.float32(0.75)

    def surrogate(logits):
        lp = logprobs(logits)[token]
        ratio = jnp.exp(token_log_ratio(lp, jax.lax.stop_gradient(lp)))
        return policy_loss(ratio, advantage, 0.8, 1.2)

    score = jax.grad(lambda logits: logprobs(logits)[token])(LOGITS)
    assert surrogate(LOGITS) == -0.75
    np.testing.assert_allclose(jax.grad(surrogate)(LOGITS), -0.75 * score, rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 2.0, -2.4, 0.0),
        (1.1, 2.0, -2.2, -2.0),
        (0.1, 2.0, -0.2, -2.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 2.0),
        (1.2, 2.0, -2.4, -2.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_only_a_gain_is_clipped(ratio, advantage, loss, slope):
    """A ratio on the bound is not yet clipped."""
    args = (jnp.float32(advantage), 0.8, 1.2)
    value, gradient = jax.value_and_grad(policy_loss)(jnp.float32(ratio), *args)
    assert value == pytest.approx(loss)
    assert gradient == pytest.approx(slope)
    if advantage:
        assert bool(clipped(jnp.float32(ratio), *args)) == (slope == 0.0)


def test_a_ratio_is_truncated_before_it_overflows():
    ratio = jnp.exp(token_log_ratio(jnp.float32(-1.0), jnp.float32(-300.0)))
    assert ratio == pytest.approx(10.0)
    assert jnp.exp(token_log_ratio(jnp.float32(-300.0), jnp.float32(0.0))) == 0.0


def test_a_sequence_ratio_divides_by_its_own_length_once():
    policy = jnp.asarray([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0]])
    behavior = jnp.asarray([[-1.5, -2.5, 0.0], [-1.0, -1.3, -1.0]])
    real = jnp.asarray([[True, True, False], [True, True, True]])
    found = sequence_log_ratio(policy, behavior, real)
    np.testing.assert_allclose(found[:, 0], [0.5, 0.1], rtol=1e-5)
    assert (found == found[:, :1]).all()
    slope = jax.grad(lambda p: sequence_log_ratio(p, behavior, real)[0].sum())(policy)
    np.testing.assert_allclose(slope[0], [1.5, 1.5, 0.0])


def test_a_cispo_weight_is_bounded_above_alone_and_has_no_gradient():
    ratio = jnp.asarray([0.01, 1.0, 7.0])
    loss, slope = jax.vjp(
        lambda lp: cispo_loss(lp, ratio * jnp.exp(lp + 2.0), 2.0, 5.0),
        jnp.full(3, -2.0),
    )
    np.testing.assert_allclose(loss, [0.04, 4.0, 20.0], rtol=1e-6)
    np.testing.assert_allclose(slope(jnp.ones(3))[0], [-0.02, -2.0, -10.0], rtol=1e-6)


def test_entropy_is_of_the_open_set_alone():
    logits = jnp.asarray([[0.0, 0.0, -1e30], [5.0, -1e30, -1e30]])
    np.testing.assert_allclose(entropy(logits), [np.log(2), 0.0], atol=1e-7)


def test_expected_k3_gradient_is_that_of_the_other_divergence():
    """As DeepSeekMath differentiates it: KL(reference || policy), the same minimum."""
    reference = logprobs(REFERENCE)

    def other(logits):
        return jnp.sum(jnp.exp(reference) * (reference - logprobs(logits)))

    def estimated(logits):
        weights = jax.lax.stop_gradient(jnp.exp(logprobs(logits)))
        return jnp.sum(weights * k3_loss(logprobs(logits), reference))

    np.testing.assert_allclose(
        jax.grad(estimated)(LOGITS), jax.grad(other)(LOGITS), atol=1e-6
    )


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
