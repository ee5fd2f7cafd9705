from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kiln_train_jax.attention import (
    CHUNK,
    BatchContext,
    FullContext,
    KeyValue,
    RowContext,
    cache_length,
)
from kiln_train_jax.config import ModelConfig
from kiln_train_jax.lora import TARGETS, Lora, Pair, init, project, select_rows
from kiln_train_jax.model import Decoder


def config_of(**changes):
    fields = {
        "model_type": "qwen3",
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    }
    return ModelConfig(**{**fields, **changes})


SHAPES = {
    "qwen3": {},
    "llama": {"model_type": "llama"},
    "untied": {"tie_word_embeddings": False},
    "one kv head": {"num_key_value_heads": 1},
    "all kv heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 16},
}


def decoder(**changes):
    model = Decoder(config_of(**changes), rngs=nnx.Rngs(1))
    for layer in model.layers:  # gains of one would hide a wrong norm
        layer.input_layernorm.weight[...] *= 1.3
        if model.config.qk_norm:
            layer.self_attn.q_norm.weight[...] *= 0.7
    return model


@nnx.jit
def forward(model, tokens, positions, context, lora=None):
    return model(tokens, positions, context, lora)


def tokens_of(rows, time):
    values = jax.random.randint(jax.random.key(3), (rows, time), 0, 40)
    return values.astype(jnp.int32)


def places(rows, time, start=0):
    return jnp.tile(jnp.arange(start, start + time, dtype=jnp.int32), (rows, 1))


def empty_caches(config, slots, length):
    shape = (slots, config.num_key_value_heads, length, config.head_dim)
    return tuple(
        KeyValue(jnp.zeros(shape), jnp.zeros(shape))
        for _ in range(config.num_hidden_layers)
    )


def numpy_forward(model, tokens):
    """Return logits of one sequence, written out from the papers in numpy."""
    config = model.config
    tensor = lambda leaf: np.asarray(leaf[...], np.float64)  # noqa: E731

    def norm(x, gain):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * tensor(gain)

    def rotate(x):
        half = config.head_dim // 2
        speeds = config.rope_theta ** -(np.arange(half) / half)
        angles = np.arange(len(tokens))[:, None] * speeds
        left, right = x[:, :half], x[:, half:]
        return np.concatenate(
            [
                left * np.cos(angles) - right * np.sin(angles),
                right * np.cos(angles) + left * np.sin(angles),
            ],
            -1,
        )

    x = tensor(model.embed_tokens)[np.asarray(tokens)]
    group = config.num_attention_heads // config.num_key_value_heads
    for layer in model.layers:
        attention, width = layer.self_attn, config.head_dim
        h = norm(x, layer.input_layernorm.weight)
        q, k, v = (
            h @ tensor(p.kernel)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        heads = []
        for head in range(config.num_attention_heads):
            at, kv = slice(head * width, (head + 1) * width), head // group
            of = slice(kv * width, (kv + 1) * width)
            query, key = q[:, at], k[:, of]
            if config.qk_norm:
                query = norm(query, attention.q_norm.weight)
                key = norm(key, attention.k_norm.weight)
            scores = rotate(query) @ rotate(key).T / np.sqrt(width)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, of])
        x = x + np.concatenate(heads, -1) @ tensor(attention.o_proj.kernel)
        h = norm(x, layer.post_attention_layernorm.weight)
        gate = h @ tensor(layer.mlp.gate_proj.kernel)
        inner = gate / (1 + np.exp(-gate)) * (h @ tensor(layer.mlp.up_proj.kernel))
        x = x + inner @ tensor(layer.mlp.down_proj.kernel)
    head = (
        tensor(model.embed_tokens).T
        if config.tie_word_embeddings
        else tensor(model.lm_head.kernel)
    )
    return norm(x, model.norm.weight) @ head


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_equals_numpy(shape):
    model, tokens = decoder(**SHAPES[shape]), tokens_of(1, 9)
    hidden, _ = forward(model, tokens, places(1, 9), FullContext())
    expected = numpy_forward(model, tokens[0])
    np.testing.assert_allclose(model.logits(hidden)[0], expected, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_and_decode_equal_full_forward(shape):
    model, tokens = decoder(**SHAPES[shape]), tokens_of(1, 12)
    full, _ = forward(model, tokens, places(1, 12), FullContext())
    caches = empty_caches(model.config, 3, cache_length(12, 8))
    hidden, caches = forward(
        model,
        tokens[:, :8],
        places(1, 8),
        RowContext(caches, jnp.int32(1), jnp.int32(0)),
    )
    np.testing.assert_allclose(hidden, full[:, :8], rtol=2e-6, atol=2e-6)
    for position in range(8, 12):
        rows = jnp.tile(tokens[:, position], 3)[:, None]
        starts = jnp.array([0, position, 0], jnp.int32)
        hidden, caches = forward(
            model,
            rows,
            starts[:, None],
            BatchContext(caches, starts, jnp.int32(position + 1)),
        )
        np.testing.assert_allclose(
            hidden[1, 0], full[0, position], rtol=2e-6, atol=2e-6
        )


def test_shared_prompt_equals_repeated_prompt():
    model, tokens = decoder(), tokens_of(4, 11)
    prompt, rest = tokens[:1, :6], tokens[:, 6:]
    whole = jnp.concatenate([jnp.tile(prompt, (4, 1)), rest], 1)
    expected, _ = forward(model, whole, places(4, 11), FullContext())
    padded = jnp.concatenate([prompt, jnp.zeros((1, 3), jnp.int32)], 1)
    _, memory = forward(model, padded, places(1, 9), FullContext())
    context = FullContext(memory, jnp.array([6], jnp.int32))
    hidden, _ = forward(model, rest, places(4, 5, start=6), context)
    np.testing.assert_allclose(hidden, expected[:, 6:], atol=2e-6)


def test_right_padding_changes_nothing():
    model, tokens = decoder(), tokens_of(2, 10)
    short, _ = forward(model, tokens[:, :7], places(2, 7), FullContext())
    long, _ = forward(model, tokens, places(2, 10), FullContext())
    np.testing.assert_allclose(long[:, :7], short, atol=2e-6)


def test_neighbours_and_longer_chunks_change_no_bit():
    """A row must not feel how long its neighbours are, nor which chunks are read."""
    model = decoder()
    length = 3 * CHUNK
    caches = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(5), leaf.shape),
        empty_caches(model.config, 3, length),
    )

    @jax.jit
    def step(tokens, starts, longest):
        context = BatchContext(caches, starts, longest)
        return model(tokens, starts[:, None], context)[0]

    row = jnp.array([[7]], jnp.int32)
    alone = step(jnp.tile(row, (3, 1)), jnp.array([40, 1, 1], jnp.int32), 41)
    beside = step(
        jnp.array([[7], [8], [9]], jnp.int32), jnp.array([40, 300, 700], jnp.int32), 701
    )
    assert np.array_equal(alone[0], beside[0])


def test_adapter_of_zeros_is_the_base_bit_for_bit():
    model, tokens = decoder(), tokens_of(2, 6)
    lora = init(model.config, rank=4, alpha=8.0, key=jax.random.key(0))
    nothing = jax.tree.map(jnp.zeros_like, lora)
    # one program: another may fuse, and round, differently on another processor
    base, _ = forward(model, tokens, places(2, 6), FullContext(), nothing)
    adapted, _ = forward(model, tokens, places(2, 6), FullContext(), lora)
    assert np.array_equal(base, adapted)
    plain, _ = forward(model, tokens, places(2, 6), FullContext())
    np.testing.assert_allclose(adapted, plain, rtol=0, atol=5e-6)


def test_gradient_of_masked_time_is_zero():
    model, tokens = decoder(), tokens_of(1, 8)
    graph, state = nnx.split(model)

    def loss(state):
        hidden, _ = nnx.merge(graph, state)(tokens, places(1, 8), FullContext())
        return jnp.sum(hidden[:, 3] ** 2)

    later = set(np.asarray(tokens[0, 4:]).tolist()) - set(
        np.asarray(tokens[0, :4]).tolist()
    )
    grads = jax.jit(jax.grad(loss))(state).embed_tokens[...]
    assert later
    assert not np.any(np.asarray(grads)[sorted(later)])


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_moves_the_output(target):
    model, tokens = decoder(), tokens_of(1, 5)
    key = jax.random.key(2)
    lora = init(model.config, rank=2, alpha=2.0, key=key, targets=(target,))
    moved = jax.tree.map(lambda leaf: leaf + 0.1, lora)
    base, _ = forward(model, tokens, places(1, 5), FullContext())
    adapted, _ = forward(model, tokens, places(1, 5), FullContext(), moved)
    assert float(jnp.abs(base - adapted).max()) > 1e-4


def test_projection_rows_equal_one_adapter():
    key = jax.random.key(0)
    inputs = jax.random.normal(key, (3, 5, 8))
    kernel = jax.random.normal(key, (8, 6))
    down, up = jax.random.normal(key, (3, 8, 2)), jax.random.normal(key, (3, 2, 6))
    bank = Lora(({"q_proj": Pair(down, up)},), jnp.array([0.0, 1.0, 2.0]))
    for slots in ([2, 0, 1], [0, 0, 0], [1, 1, 2]):
        chosen = select_rows(bank, jnp.array(slots, jnp.int32))
        rows = project(inputs, kernel, chosen.layers[0]["q_proj"], chosen.scale)
        for row, slot in enumerate(slots):
            own = Pair(down[slot], up[slot]), bank.scale[slot]
            one = project(inputs[row : row + 1], kernel, *own)
            np.testing.assert_allclose(rows[row], one[0], rtol=1e-5, atol=1e-5)


def test_other_slots_and_places_change_no_bit():
    """A row's update depends on its adapter alone, not on where anything lies."""
    stream = np.random.default_rng(0)
    draw = lambda *shape: stream.normal(size=shape).astype(np.float32)  # noqa: E731
    inputs, kernel = draw(4, 1, 24), draw(24, 40)
    down, up = draw(3, 24, 8), draw(3, 8, 40)
    down[0], up[0], scale = 0, 0, np.array([0, 2, 3], np.float32)

    @jax.jit
    def outputs(down, up, scale, rows):
        bank = select_rows(Lora(({"q_proj": Pair(down, up)},), scale), rows)
        return project(inputs, kernel, bank.layers[0]["q_proj"], bank.scale)

    mixed = outputs(down, up, scale, jnp.array([1, 2, 0, 1], jnp.int32))
    alone = outputs(down, up, scale, jnp.array([1, 0, 0, 0], jnp.int32))
    base = outputs(down, up, scale, jnp.zeros(4, jnp.int32))
    moved = [np.stack([part[0], part[2], part[1]]) for part in (down, up)]
    swapped = outputs(*moved, scale[[0, 2, 1]], jnp.array([2, 1, 0, 2], jnp.int32))
    assert np.array_equal(mixed[0], alone[0])
    assert np.array_equal(mixed[2], base[2])
    assert np.array_equal(alone[1:], base[1:])
    assert np.array_equal(mixed, swapped)
    assert not np.array_equal(mixed[0], base[0])
