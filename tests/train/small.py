"""A model of a few thousand parameters and rows for it, to test the trainer's numbers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kiln_train_jax.attention import MASKED, FullContext
from kiln_train_jax.config import ModelConfig
from kiln_train_jax.lora import Lora, Pair, init
from kiln_train_jax.model import Decoder
from kiln_train_jax.units import SampledToken, TrainingRow, TrainingUnit

VOCABULARY = 40
TEMPERATURE = 1.3
ROOM = 24


def small_model(**changes):
    config = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
    }
    return Decoder(ModelConfig(**{**config, **changes}), rngs=nnx.Rngs(1))


def small_adapter(model, rank=2, size=0.3):
    """Return an adapter that is no no-op."""
    lora = init(model.config, rank=rank, alpha=2.0 * rank, key=jax.random.key(3))
    layers = tuple(
        {
            target: Pair(
                pair.down, size * jax.random.normal(jax.random.key(i), pair.up.shape)
            )
            for i, (target, pair) in enumerate(layer.items())
        }
        for layer in lora.layers
    )
    return lora._replace(layers=layers)


def _mask(tokens):
    allowed = np.zeros(64, bool)
    allowed[tokens] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def _all_logits(graph, parameters, tokens, lora):
    model = nnx.merge(graph, parameters)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    hidden, _ = model(tokens, places, FullContext(), lora)
    return model.logits(hidden[0])


def plain_logits(model, lora, prompt, row):
    """Run a row plainly, behind its prompt: float32 `[time, vocab]`."""
    tokens = np.zeros((1, ROOM), np.int32)
    tokens[0, : len(prompt) + len(row.tokens)] = prompt + row.tokens
    return _all_logits(*nnx.split(model), tokens, lora)


def logprobs(model, lora, prompt, row):
    """Score a row plainly: no shared prompt, no packing."""
    places = np.asarray([len(prompt) + one.position for one in row.sampled])
    masks = np.stack([one.mask for one in row.sampled])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    logits = plain_logits(model, lora, prompt, row)[places] / row.temperature
    logits = jnp.where(bits[:, :VOCABULARY].astype(bool), logits, MASKED)
    chosen = np.asarray([one.token for one in row.sampled])
    return jax.nn.log_softmax(logits)[np.arange(len(chosen)), chosen]


def small_unit(model, lora, *, noise=0.0, advantages=(1.0, -0.5, -0.5)):
    """Return three rollouts of one prompt, recorded with or without error."""
    draw = np.random.default_rng(5)
    prompt = [1, 2, 3, 4]
    rows = []
    for place, advantage in enumerate(advantages):
        tokens = [5, *draw.integers(6, 36, 4 + 2 * place).tolist()]
        sampled = [
            SampledToken(
                at,
                tokens[at + 1],
                _mask([tokens[at + 1], *draw.integers(0, 36, 6)]),
                0.0,
            )
            for at in range(0, len(tokens) - 1, 1 + place % 2)
        ]
        observed = [2, 3] if place else []
        row = TrainingRow(
            (0, place), tokens, sampled, observed, 3 * place, advantage, TEMPERATURE
        )
        found = np.asarray(logprobs(model, lora, prompt, row))
        found = found + noise * draw.normal(size=found.shape)
        sampled = [
            one._replace(logprob=float(lp))
            for one, lp in zip(sampled, found, strict=True)
        ]
        rows.append(row._replace(sampled=sampled))
    return TrainingUnit(prompt, rows, 0)


def leaves(lora: Lora):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(lora.layers)]
