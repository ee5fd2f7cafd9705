from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from kiln_core.canonical import pretty
from kiln_core.errors import FileUnreadable, InvalidRecord
from kiln_train_jax.config import ModelConfig
from kiln_train_jax.folder import END_OF_TURN, TURN_TEMPLATE, load_folder
from kiln_train_jax.model import Decoder
from kiln_train_jax.tokenizer import byte_document
from kiln_train_jax.weights import (
    INDEX,
    SINGLE,
    build,
    read_tensors,
    tensors_digest,
    to_tensors,
    write_safetensors,
)

DOCUMENT = {
    "model_type": "qwen3",
    "vocab_size": 272,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
CONFIG = ModelConfig.from_hugging_face(DOCUMENT)


@pytest.fixture(scope="module")
def tensors():
    model = Decoder(CONFIG, rngs=nnx.Rngs(4))
    return {k: np.asarray(v) for k, v in to_tensors(model, dtype=jnp.float32).items()}


@pytest.fixture
def folder(tmp_path, tensors):
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_bytes(pretty(DOCUMENT))
    (tmp_path / "tokenizer.json").write_bytes(byte_document())
    (tmp_path / "tokenizer_config.json").write_bytes(
        pretty({"chat_template": TURN_TEMPLATE, "eos_token": END_OF_TURN})
    )
    return tmp_path


def test_tensor_names_and_shapes_are_hugging_face(tensors):
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert shapes["model.embed_tokens.weight"] == (272, 16)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (24, 16)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (12,)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (16, 24)
    assert shapes["model.norm.weight"] == (16,)
    assert shapes["lm_head.weight"] == (272, 16)
    assert len(shapes) == 3 + 2 * 11


def test_weights_round_trip(folder, tensors):
    model = build(CONFIG, read_tensors(folder), dtype=jnp.float32)
    again = to_tensors(model, dtype=jnp.float32)
    assert all(np.array_equal(tensors[name], again[name]) for name in tensors)


def test_bf16_file_is_read_as_float32(tmp_path, tensors):
    halved = {name: jnp.asarray(t, jnp.bfloat16) for name, t in tensors.items()}
    write_safetensors(halved, tmp_path / SINGLE)
    model = build(CONFIG, read_tensors(tmp_path), dtype=jnp.float32)
    _, state = nnx.split(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}


def test_shards_are_joined(tmp_path, tensors):
    names = sorted(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (tmp_path / INDEX).write_bytes(pretty({"weight_map": weight_map}))
    joined = read_tensors(tmp_path)
    assert tensors_digest(DOCUMENT, joined) == tensors_digest(DOCUMENT, tensors)


def test_shard_outside_of_the_folder_is_refused(tmp_path):
    (tmp_path / INDEX).write_bytes(pretty({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(InvalidRecord, match="outside"):
        read_tensors(tmp_path)


def test_digest_sees_every_bit(tensors):
    base = tensors_digest(DOCUMENT, tensors)
    changed = {**tensors, "model.norm.weight": tensors["model.norm.weight"] * 1.0001}
    assert tensors_digest(DOCUMENT, changed) != base
    assert tensors_digest({**DOCUMENT, "rope_theta": 2e4}, tensors) != base


def test_folder_loads_whole(folder):
    loaded = load_folder(str(folder))
    assert loaded.served_model_id == folder.name
    assert loaded.end_id == 266
    assert not loaded.template.thinking
    assert loaded.base_sha256 == load_folder(str(folder)).base_sha256


def damage(folder, tensors, kind):
    path = folder / SINGLE
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
        return
    changed = dict(tensors)
    if kind == "missing":
        del changed["model.norm.weight"]
    elif kind == "left over":
        changed["model.extra.weight"] = np.ones(3, np.float32)
    elif kind == "shape":
        changed["model.norm.weight"] = np.ones(3, np.float32)
    elif kind == "nan":
        changed["model.norm.weight"] = tensors["model.norm.weight"] * np.nan
    elif kind == "integers":
        changed["model.norm.weight"] = np.ones(16, np.int32)
    save_file(changed, path)


@pytest.mark.parametrize(
    "kind", ["truncated", "missing", "left over", "shape", "nan", "integers"]
)
def test_damaged_weights_are_refused(folder, tensors, kind):
    damage(folder, tensors, kind)
    with pytest.raises(InvalidRecord):
        load_folder(str(folder))


@pytest.mark.parametrize(
    "name", [SINGLE, "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileUnreadable, match=name):
        load_folder(str(folder))


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileUnreadable, match="nowhere"):
        load_folder(str(tmp_path / "nowhere"))


def test_missing_template_is_refused(folder):
    (folder / "tokenizer_config.json").write_bytes(pretty({"eos_token": END_OF_TURN}))
    with pytest.raises(InvalidRecord, match="chat template"):
        load_folder(str(folder))


def test_missing_end_token_is_refused(folder):
    (folder / "tokenizer_config.json").write_bytes(
        pretty({"chat_template": TURN_TEMPLATE})
    )
    with pytest.raises(InvalidRecord, match="end token"):
        load_folder(str(folder))
