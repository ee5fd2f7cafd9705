"""The decoder: Qwen3 dense and the Llama family in one Flax NNX module.

Per-head q/k RMSNorm where the architecture has it, grouped-query attention without
repeating keys and values, half-split rotary embedding, SwiGLU, tied or untied head.
Serving and training run this one forward; they differ only in the `Context` they pass
(`attention.py`) and the adapter (`lora.py`). It returns hidden states, never a
`[rows, time, vocab]` array: the caller gathers the positions it wants and asks
`logits` for those.

Attribute names follow the Hugging Face tensor names, so that loading is a rule and not
a table (`weights.py`). Kernels are `[in, out]`, the transpose of the stored files.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from kiln_train_jax.lora import Lora, Pair, project

if TYPE_CHECKING:
    from kiln_train_jax.attention import Context, KeyValue
    from kiln_train_jax.config import ModelConfig


class RmsNorm(nnx.Module):
    """Root-mean-square normalisation with a learned gain, computed in float32."""

    def __init__(self, size: int, *, epsilon: float) -> None:
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Normalise the last axis; the dtype stays."""
        wide = inputs.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.epsilon)
        return (wide * scale).astype(inputs.dtype) * self.weight[...]


class Linear(nnx.Module):
    """A projection without bias, with room for a low-rank update."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        values = jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32)
        self.kernel = nnx.Param(values * inputs**-0.5)

    def __call__(
        self, inputs: jax.Array, pair: Pair | None, scale: jax.Array
    ) -> jax.Array:
        """Project `[rows, time, in]` to `[rows, time, out]`."""
        return project(inputs, self.kernel[...], pair, scale)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        hidden, width = config.hidden_size, config.head_dim
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.width = width
        self.q_proj = Linear(hidden, self.heads * width, rngs=rngs)
        self.k_proj = Linear(hidden, self.kv_heads * width, rngs=rngs)
        self.v_proj = Linear(hidden, self.kv_heads * width, rngs=rngs)
        self.o_proj = Linear(self.heads * width, hidden, rngs=rngs)
        if config.qk_norm:
            self.q_norm = RmsNorm(width, epsilon=config.rms_norm_eps)
            self.k_norm = RmsNorm(width, epsilon=config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def __call__(
        self,
        inputs: jax.Array,
        layer: int,
        rotation: Rotation,
        context: Context,
        lora: LayerLora,
    ) -> tuple[jax.Array, KeyValue]:
        """Attend; returns `[rows, time, hidden]` and the layer's keys and values."""
        rows, time, _ = inputs.shape
        group = self.heads // self.kv_heads
        split = (rows, time, self.kv_heads, group, self.width)
        query = self.q_proj(inputs, *lora.of("q_proj")).reshape(split)
        key = self.k_proj(inputs, *lora.of("k_proj")).reshape(*split[:3], self.width)
        value = self.v_proj(inputs, *lora.of("v_proj")).reshape(*split[:3], self.width)
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query = rotation.turn(query.transpose(0, 2, 3, 1, 4)) * self.width**-0.5
        key = rotation.turn(key.transpose(0, 2, 1, 3))
        mixed, memory = context.attend(layer, query, key, value.transpose(0, 2, 1, 3))
        mixed = mixed.transpose(0, 3, 1, 2, 4).reshape(rows, time, -1)
        return self.o_proj(mixed, *lora.of("o_proj")), memory


class Mlp(nnx.Module):
    """The SwiGLU feed-forward block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, rngs=rngs)
        self.up_proj = Linear(hidden, inner, rngs=rngs)
        self.down_proj = Linear(inner, hidden, rngs=rngs)

    def __call__(self, inputs: jax.Array, lora: LayerLora) -> jax.Array:
        """Return `(silu(x Wg) * (x Wu)) Wd`."""
        gate = jax.nn.silu(self.gate_proj(inputs, *lora.of("gate_proj")))
        inner = gate * self.up_proj(inputs, *lora.of("up_proj"))
        return self.down_proj(inner, *lora.of("down_proj"))


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(size, epsilon=epsilon)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = RmsNorm(size, epsilon=epsilon)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(
        self,
        inputs: jax.Array,
        layer: int,
        rotation: Rotation,
        context: Context,
        lora: LayerLora,
    ) -> tuple[jax.Array, KeyValue]:
        """Apply attention and feed-forward, each with its residual."""
        mixed, memory = self.self_attn(
            self.input_layernorm(inputs), layer, rotation, context, lora
        )
        inputs = inputs + mixed
        return inputs + self.mlp(self.post_attention_layernorm(inputs), lora), memory


class Decoder(nnx.Module):
    """A causal language model of the Qwen3 or Llama shape."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.hidden_size)
        values = jax.random.normal(rngs.params(), shape, jnp.float32) * 0.02
        self.embed_tokens = nnx.Param(values)
        self.layers = nnx.List(
            [Block(config, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )
        self.norm = RmsNorm(config.hidden_size, epsilon=config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, rngs=rngs)
        self.config = config

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        context: Context,
        lora: Lora | None = None,
        *,
        segments: int | None = None,
    ) -> tuple[jax.Array, tuple[KeyValue, ...]]:
        """Run the decoder over a feed of tokens.

        Args:
            tokens: int32 `[rows, time]`.
            positions: int32 `[rows, time]`, absolute.
            context: What the tokens may attend to.
            lora: One adapter, or one per row; None is the base model.
            segments: A gradient keeps the activations between so many runs of layers
                and computes those within again (Chen et al. 2016, "Training Deep Nets
                with Sublinear Memory Cost", 1604.06174); None keeps all.

        Returns:
            Hidden states before the final norm, `[rows, time, hidden]`, and the keys
            and values of each layer (updated caches for a cached context).
        """
        hidden = self.embed_tokens[...][tokens]
        rotation = Rotation(positions, self.config)

        def run(
            hidden: jax.Array, layers: range
        ) -> tuple[jax.Array, tuple[KeyValue, ...]]:
            made = []
            for layer in layers:
                hidden, memory = self.layers[layer](
                    hidden, layer, rotation, context, LayerLora(lora, layer)
                )
                made.append(memory)
            return hidden, tuple(made)

        if segments is None:
            return run(hidden, range(len(self.layers)))
        memories: list[KeyValue] = []
        for layers in _split(len(self.layers), segments):
            hidden, made = jax.checkpoint(run, static_argnums=1)(hidden, layers)
            memories += made
        return hidden, tuple(memories)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return float32 logits `[..., vocab]` of hidden states `[..., hidden]`."""
        normed = self.norm(hidden)
        if self.config.tie_word_embeddings:
            kernel = self.embed_tokens[...].T
        else:
            kernel = self.lm_head.kernel[...]
        return (normed @ kernel).astype(jnp.float32)


def _split(layers: int, segments: int) -> list[range]:
    """Return runs of layers as equal as can be, at most one a layer."""
    segments = min(segments, layers)
    cuts = [layers * part // segments for part in range(segments + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


class Rotation:
    """Half-split rotary embedding at given positions.

    Su et al. 2021, "RoFormer", 2104.09864, equation 34, in the half-split layout of
    the Llama and Qwen3 checkpoints. Angles are float32.
    """

    def __init__(self, positions: jax.Array, config: ModelConfig) -> None:
        exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32)
        frequencies = config.rope_theta ** -(exponents / config.head_dim)
        angles = positions.astype(jnp.float32)[..., None] * frequencies
        self.cos, self.sin = jnp.cos(angles), jnp.sin(angles)

    def turn(self, heads: jax.Array) -> jax.Array:
        """Rotate `[rows, ..., time, head_dim]` by each time step's position."""
        middle = (1,) * (heads.ndim - 3)
        rows, time, half = self.cos.shape
        cos = self.cos.reshape(rows, *middle, time, half)
        sin = self.sin.reshape(rows, *middle, time, half)
        left, right = heads[..., :half], heads[..., half:]
        turned = [left * cos - right * sin, right * cos + left * sin]
        return jnp.concatenate(turned, -1).astype(heads.dtype)


class LayerLora:
    """The part of an adapter that belongs to one layer."""

    def __init__(self, lora: Lora | None, layer: int) -> None:
        self._pairs = {} if lora is None else lora.layers[layer]
        self._scale = jnp.float32(0.0) if lora is None else lora.scale

    def of(self, target: str) -> tuple[Pair | None, jax.Array]:
        """Return the factors of `target` (None when untouched) and the scale."""
        return self._pairs.get(target), self._scale
