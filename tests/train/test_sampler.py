from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kiln_train_jax.guide import mask_of
from kiln_train_jax.sampler import Draw, draw_tokens, masked_logprobs

VOCABULARY = 45
LOGITS = np.random.default_rng(0).normal(size=VOCABULARY).astype(np.float32) * 2


def draw_of(rows=1, allowed=range(VOCABULARY), **changes):
    fields = {
        "mask": np.tile(mask_of(list(allowed), VOCABULARY), (rows, 1)),
        "seed": np.tile(np.array([[1, 2]], np.uint32), (rows, 1)),
        "position": np.arange(rows, dtype=np.int32),
        "temperature": np.ones(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
    }
    for name, value in changes.items():
        fields[name] = np.full_like(fields[name], value)
    return Draw(**fields)


def reference(logits, allowed, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return the log-probabilities of the kept tokens, in numpy."""
    scaled = np.full(VOCABULARY, -np.inf)
    scaled[list(allowed)] = logits[list(allowed)].astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    order = order[: top_k or VOCABULARY]
    order = [token for token in order if np.isfinite(scaled[token])]
    weights = np.exp(scaled[order] - scaled[order].max())
    weights /= weights.sum()
    before = np.cumsum(weights) - weights
    kept = [
        token
        for token, weight, below in zip(order, weights, before, strict=True)
        if below < top_p and weight >= min_p * weights[0]
    ]
    total = np.log(np.exp(scaled[kept]).sum())
    return {int(token): scaled[token] - total for token in kept}


@pytest.mark.parametrize(
    "transform",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("allowed", [range(VOCABULARY), [3, 8, 31, 32, 44]])
def test_logprobs_are_of_the_sampled_distribution(transform, allowed):
    draw = draw_of(allowed=allowed, **transform)
    found = np.asarray(masked_logprobs(LOGITS[None], draw))[0]
    expected = reference(LOGITS, allowed, **transform)
    assert set(np.flatnonzero(found > -1e20).tolist()) == set(expected)
    for token, logprob in expected.items():
        assert found[token] == pytest.approx(logprob, abs=1e-5)


def test_one_allowed_token_has_logprob_zero():
    tokens, logprobs = draw_tokens(LOGITS[None], draw_of(allowed=[7]))
    assert int(tokens[0]) == 7
    assert float(logprobs[0]) == 0.0


def test_zero_temperature_takes_the_largest():
    tokens, logprobs = draw_tokens(LOGITS[None], draw_of(temperature=0.0))
    assert int(tokens[0]) == int(LOGITS.argmax())
    assert float(logprobs[0]) == 0.0


def test_frequencies_follow_the_logprobs():
    rows = 4000
    draw = draw_of(rows=rows, allowed=[1, 2, 3, 4])
    tokens, logprobs = jax.jit(draw_tokens)(np.tile(LOGITS, (rows, 1)), draw)
    expected = reference(LOGITS, [1, 2, 3, 4])
    for token, logprob in expected.items():
        share = float(np.mean(np.asarray(tokens) == token))
        assert share == pytest.approx(np.exp(logprob), abs=0.03)
    assert float(logprobs[0]) == pytest.approx(expected[int(tokens[0])], abs=1e-5)


@pytest.mark.parametrize("seed", [(0, 1), (1, 0), (2**32 - 1, 0), (0, 2**32 - 1)])
def test_both_halves_of_the_seed_matter(seed):
    rows = 32
    base = draw_of(rows=rows)
    other = base._replace(seed=np.tile(np.array([seed], np.uint32), (rows, 1)))
    logits = jnp.zeros((rows, VOCABULARY))
    assert not np.array_equal(
        draw_tokens(logits, base)[0], draw_tokens(logits, other)[0]
    )


def test_cuts_of_a_neighbour_change_no_bit():
    plain = draw_of(rows=2)
    cut = plain._replace(
        top_k=np.array([0, 3], np.int32), top_p=np.array([1.0, 0.5], np.float32)
    )
    logits = np.tile(LOGITS, (2, 1))
    step = jax.jit(masked_logprobs)
    assert np.array_equal(step(logits, plain)[0], step(logits, cut)[0])
