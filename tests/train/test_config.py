from __future__ import annotations

import pytest

from kiln_core.errors import InvalidRecord
from kiln_train_jax.config import ModelConfig
from kiln_train_jax.engine import LEAST_CONTEXT, default_context, token_bytes

QWEN = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "eos_token_id": [5, 6],
    "hidden_act": "silu",
    "architectures": ["Qwen3ForCausalLM"],
}


def read(**changes):
    document = {**QWEN, **changes}
    return ModelConfig.from_hugging_face(
        {name: value for name, value in document.items() if value is not ...}
    )


def test_head_dim_is_read_not_derived():
    config = read()
    assert config.head_dim == 32
    assert config.qk_norm
    assert config.eos_token_ids == (5, 6)


def test_llama_defaults_are_filled():
    config = read(model_type="llama", head_dim=..., num_key_value_heads=...)
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    assert not config.qk_norm


def test_rope_theta_may_live_in_rope_parameters():
    nested = {"rope_type": "default", "rope_theta": 5e5}
    assert read(rope_theta=..., rope_parameters=nested).rope_theta == 5e5
    assert read(rope_theta=...).rope_theta == 10_000.0


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"model_type": ...},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
        {"quantization_config": {"bits": 4}},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"vocab_size": ...},
        {"hidden_size": "wide"},
    ],
)
def test_what_would_change_the_forward_is_refused(change):
    with pytest.raises(InvalidRecord):
        read(**change)


def test_default_context_fits_the_memory_of_the_caches():
    small = read(max_position_embeddings=4096)
    assert default_context(small, 16) == 4096
    wide = read(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
    )
    assert token_bytes(wide) == 46_080
    assert default_context(wide, 16) == 2_816
    assert default_context(wide, 1) == 8_192
    assert default_context(wide, 4_096) == LEAST_CONTEXT
