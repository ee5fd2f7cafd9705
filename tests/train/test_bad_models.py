"""Every way a model or an adapter can be wrong ends in one sentence."""

from __future__ import annotations

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from kiln_core.canonical import pretty, read_json
from kiln_core.engine import EngineSettings
from kiln_core.errors import ArtifactError, KilnError, UsageError
from kiln_train_jax.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from kiln_train_jax.bank import AdapterBank
from kiln_train_jax.config import ModelConfig
from kiln_train_jax.folder import load_folder
from kiln_train_jax.library import AdapterLibrary
from kiln_train_jax.plugin import create_engine
from kiln_train_jax.receipt import MANIFEST_FILE
from kiln_train_jax.tokenizer import byte_document
from kiln_train_jax.weights import INDEX, SINGLE, build, read_tensors
from tests.train.parity import config_document, script, write_folder

CASE = "llama-one-kv"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", CASE)


def change(name, **members):
    def apply(folder):
        document = {**read_json((folder / name).read_bytes(), name), **members}
        kept = {key: value for key, value in document.items() if value is not ...}
        (folder / name).write_bytes(pretty(kept))

    return apply


def tensor(name, values):
    def apply(folder):
        tensors = script.seeded_tensors(CASE)
        tensors[name] = values(tensors[name]) if callable(values) else values
        save_file({k: v for k, v in tensors.items() if v is not None}, folder / SINGLE)

    return apply


def write(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def cut(name, size):
    return lambda folder: os.truncate(folder / name, size)


def shards(files):
    def apply(folder):
        (folder / SINGLE).rename(folder / "a.safetensors")
        names = sorted(script.seeded_tensors(CASE))
        weight_map = {n: files[i % len(files)] for i, n in enumerate(names)}
        (folder / INDEX).write_bytes(pretty({"weight_map": weight_map}))

    return apply


def renumbered(folder):
    document = read_json(byte_document(), "tokenizer.json")
    document["model"]["vocab"]["a"] = 5_000
    (folder / "tokenizer.json").write_bytes(pretty(document))


NORM = "model.norm.weight"
ONES = np.ones(32, np.float32)
BAD = {
    "cut header": (cut(SINGLE, 5), "complete safetensors"),
    "cut data": (cut(SINGLE, 9_000), "complete safetensors"),
    "empty weights": (cut(SINGLE, 0), "complete safetensors"),
    "no weights": (lambda f: (f / SINGLE).unlink(), "model.safetensors is missing"),
    "missing tensor": (tensor(NORM, None), "model.norm.weight is missing"),
    "wrong shape": (tensor(NORM, ONES[1:]), r"\[31\].*\[32\]"),
    "wrong axes": (tensor(NORM, ONES[None]), r"\[1, 32\]"),
    "nan": (tensor(NORM, ONES * np.nan), "not finite"),
    "infinity": (tensor(NORM, ONES * np.inf), "not finite"),
    "integers": (tensor(NORM, np.ones(32, np.int32)), "int32"),
    "missing shard": (
        shards(["a.safetensors", "b.safetensors"]),
        "b.safetensors is missing",
    ),
    "parent shard": (shards(["../a.safetensors"]), "outside of the folder"),
    "absolute shard": (shards(["/etc/passwd"]), "outside of the folder"),
    "nested shard": (shards(["x/../../a.safetensors"]), "outside of the folder"),
    "index of nothing": (
        lambda f: (shards(["a"])(f), write(INDEX, b"[]")(f)),
        "is not usable",
    ),
    "index of junk": (
        lambda f: (shards(["a"])(f), write(INDEX, b"\xff\x00")(f)),
        "is not usable",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
    "junk tokenizer": (write("tokenizer.json", b"{}"), "tokenizer.json cannot be used"),
    "list as tokenizer": (write("tokenizer.json", b"[]"), "tokenizer.json cannot"),
    "cut tokenizer": (cut("tokenizer.json", 99), "tokenizer.json cannot be used"),
    "vocabulary too large": (
        change("config.json", vocab_size=200),
        "asks for .200, 32",
    ),
    "id too high": (renumbered, "5001 tokens, the model 272"),
    "junk config": (write("config.json", b"\xff"), "config"),
    "list as config": (write("config.json", b"[]"), "not a JSON object"),
    "unknown architecture": (change("config.json", model_type="gpt2"), "'gpt2'"),
    "no heads": (change("config.json", num_attention_heads=0), "no size"),
    "negative layers": (change("config.json", num_hidden_layers=-1), "no size"),
    "negative width": (change("config.json", head_dim=-2), "no size"),
    "text as heads": (change("config.json", num_attention_heads="x"), "not usable"),
    "rope as text": (change("config.json", rope_parameters="x"), "no object"),
    "theta as text": (
        change("config.json", rope_parameters={"rope_theta": "x"}),
        "not usable",
    ),
    "rope by layer": (
        change("config.json", rope_parameters={"full_attention": {"rope_theta": 1e4}}),
        "by layer",
    ),
    "partial rope": (
        change("config.json", rope_parameters={"partial_rotary_factor": 0.5}),
        "partial rotary",
    ),
    "sliding layer": (
        change("config.json", layer_types=["sliding_attention"]),
        "full attention",
    ),
    "end outside": (change("config.json", eos_token_id=272), "end token 272"),
    "end as text": (change("config.json", eos_token_id="x"), "not usable"),
    "generation end as text": (
        write("generation_config.json", b'{"eos_token_id": ["x"]}'),
        "end token 'x'",
    ),
    "no template": (change("tokenizer_config.json", chat_template=...), "no chat"),
    "junk templates": (
        change("tokenizer_config.json", chat_template=[1, {"name": "default"}]),
        "no chat template",
    ),
    "token as number": (change("tokenizer_config.json", eos_token=7), "eos_token is 7"),
    "token without text": (change("tokenizer_config.json", bos_token={}), "bos_token"),
    "template no text": (write("chat_template.jinja", b"\xff"), "not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_model_ends_in_one_sentence(folder, name):
    damage, words = BAD[name]
    damage(folder)
    settings = EngineSettings(model=str(folder), adapter_dir=folder / "adapters")
    with pytest.raises(KilnError, match=words) as caught:
        create_engine(settings)
    assert "\n" not in str(caught.value)


def test_symlinked_snapshot_loads(folder, tmp_path):
    """A cache keeps blobs elsewhere and links to them."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for place, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(place))
        path.symlink_to(blobs / str(place))
    assert load_folder(str(folder)).config.model_type == "llama"


def test_whole_shards_load(folder):
    shards(["a.safetensors"])(folder)
    expected = script.seeded_tensors(CASE)
    found = read_tensors(folder)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_every_float_width_is_read_exactly(dtype):
    import jax.numpy as jnp

    config = ModelConfig.from_hugging_face(config_document(CASE))
    narrow = {
        name: np.asarray(jnp.asarray(values, dtype))
        for name, values in script.seeded_tensors(CASE).items()
    }
    model = build(config, narrow, dtype=jnp.float32)
    stored = narrow["model.layers.0.mlp.up_proj.weight"].astype(np.float32)
    assert np.array_equal(model.layers[0].mlp.up_proj.kernel[...], stored.T)


@pytest.fixture
def adapter(tmp_path):
    path = tmp_path / "adapter"
    script.export(path)
    return path


def test_adapter_of_another_base_is_refused(adapter):
    other = ModelConfig.from_hugging_face(config_document(CASE))
    with pytest.raises(ArtifactError, match="adapter tensor") as caught:
        read_adapter(adapter, other)
    assert "another base model" in caught.value.hint


def test_adapter_of_deeper_base_is_refused(adapter):
    document = config_document(script.ADAPTED)
    for layers in (1, 3):
        base = ModelConfig.from_hugging_face(
            {**document, "num_hidden_layers": layers, "layer_types": None}
        )
        with pytest.raises(ArtifactError, match=r"missing|no place"):
            read_adapter(adapter, base)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"base_model_sha256": "sha256:" + "0" * 64}, "another base model"),
        ({}, "another base model"),
        ([], "another base model"),
    ],
)
def test_manifest_of_another_base_is_refused(adapter, manifest, words):
    config = ModelConfig.from_hugging_face(config_document(script.ADAPTED))
    base = "sha256:" + "1" * 64
    library = AdapterLibrary(adapter.parent, config, base)
    assert library.content_sha256("adapter")
    (adapter / MANIFEST_FILE).write_bytes(pretty(manifest))
    with pytest.raises(UsageError, match=words):
        library.read("adapter")
    assert words in library.describe("adapter", loaded=False).problem
    (adapter / MANIFEST_FILE).write_bytes(pretty({"base_model_sha256": base}))
    assert library.read("adapter").config.r == 6


def test_rank_over_the_limit_is_refused(adapter):
    config = ModelConfig.from_hugging_face(config_document(script.ADAPTED))
    bank = AdapterBank(config, slots=2, rank=4)
    with pytest.raises(UsageError, match=r"rank 6.*up to 4"):
        bank.load("ours", read_adapter(adapter, config))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut(WEIGHTS_FILE, 40), "complete safetensors"),
        (lambda f: (f / WEIGHTS_FILE).unlink(), "missing"),
        (lambda f: (f / CONFIG_FILE).unlink(), CONFIG_FILE),
        (write(CONFIG_FILE, b"\xff"), CONFIG_FILE),
        (write(CONFIG_FILE, b"[]"), "JSON object"),
        (change(CONFIG_FILE, r=7), "shape"),
        (change(CONFIG_FILE, r=2**70), "of shape"),
        (change(CONFIG_FILE, lora_alpha="x"), "not usable"),
        (change(CONFIG_FILE, lora_alpha=...), "not usable"),
        (change(CONFIG_FILE, target_modules=["q_proj", "q_proj"]), "missing"),
        (change(CONFIG_FILE, target_modules=["../q_proj"]), "not supported"),
    ],
)
def test_bad_adapter_ends_in_one_sentence(adapter, damage, words):
    damage(adapter)
    config = ModelConfig.from_hugging_face(config_document(script.ADAPTED))
    with pytest.raises(KilnError, match=words) as caught:
        read_adapter(adapter, config)
    assert "\n" not in str(caught.value)
