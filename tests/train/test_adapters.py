from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from kiln_core.canonical import pretty, read_json
from kiln_core.errors import ArtifactError, CapacityFull, UsageError
from kiln_train_jax.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    into_bank,
    read_adapter,
    write_adapter,
)
from kiln_train_jax.bank import AdapterBank
from kiln_train_jax.lora import TARGETS, Lora, empty_bank, init, select_one


def make(engine, name, seed, *, rank=4, targets=TARGETS, size=0.3):
    """Write an adapter that really changes the model."""
    config = engine.folder.config
    key = jax.random.key(seed)
    lora = jax.eval_shape(
        lambda: init(config, rank=rank, alpha=8.0, key=key, targets=targets)
    )
    stream = np.random.default_rng(seed)
    noisy = jax.tree.map(
        lambda leaf: (size * stream.normal(size=leaf.shape)).astype(np.float32),
        lora.layers,
    )
    folder = engine.library.directory / name
    folder.mkdir(parents=True, exist_ok=True)
    lora = Lora(noisy, np.float32(8.0 / rank))
    return write_adapter(
        folder, lora, model_id=engine.served_model_id, rank=rank, alpha=8.0
    )


@pytest.fixture
def adapter_folder(engine):
    make(engine, "plain", 1)
    return engine.library.directory / "plain"


def test_folder_is_what_peft_reads(engine, adapter_folder):
    config = read_json((adapter_folder / CONFIG_FILE).read_bytes(), "config")
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == "builtin:random"
    assert sorted(config["target_modules"]) == sorted(TARGETS)
    tensors = load_file(adapter_folder / WEIGHTS_FILE)
    prefix = "base_model.model.model.layers.0."
    assert tensors[prefix + "self_attn.k_proj.lora_A.weight"].shape == (4, 64)
    assert tensors[prefix + "self_attn.k_proj.lora_B.weight"].shape == (32, 4)
    assert tensors[prefix + "mlp.down_proj.lora_A.weight"].shape == (4, 128)
    assert len(tensors) == 2 * 7 * 2


def test_adapter_round_trips(engine, adapter_folder):
    written = make(engine, "plain", 1)
    again = read_adapter(adapter_folder, engine.folder.config)
    assert again.content_sha256 == written.content_sha256
    assert float(again.lora.scale) == 2.0
    for one, other in zip(
        jax.tree.leaves(written.lora), jax.tree.leaves(again.lora), strict=True
    ):
        assert np.array_equal(one, other)


def test_content_digest_ignores_the_name_of_the_base(engine, adapter_folder):
    config = engine.folder.config
    before = read_adapter(adapter_folder, config).content_sha256
    path = adapter_folder / CONFIG_FILE
    document = read_json(path.read_bytes(), "config")
    path.write_bytes(pretty({**document, "base_model_name_or_path": "elsewhere"}))
    assert read_adapter(adapter_folder, config).content_sha256 == before
    path.write_bytes(pretty({**document, "lora_alpha": 9.0}))
    assert read_adapter(adapter_folder, config).content_sha256 != before


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "IA3"},
        {"bias": "all"},
        {"use_dora": True},
        {"use_rslora": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 2}},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"]},
        {"r": 8},
        {"r": 0},
        {"r": "four"},
    ],
)
def test_unsupported_adapter_is_refused(engine, adapter_folder, change):
    path = adapter_folder / CONFIG_FILE
    document = read_json(path.read_bytes(), "config")
    path.write_bytes(pretty({**document, **change}))
    with pytest.raises(ArtifactError):
        read_adapter(adapter_folder, engine.folder.config)


@pytest.mark.parametrize("kind", ["shape", "nan", "missing", "truncated"])
def test_damaged_tensors_are_refused(engine, adapter_folder, kind):
    path = adapter_folder / WEIGHTS_FILE
    tensors = load_file(path)
    name = min(tensors)
    if kind == "shape":
        tensors[name] = tensors[name][:, 1:]
    elif kind == "nan":
        tensors[name] = tensors[name] * np.nan
    elif kind == "missing":
        del tensors[name]
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ArtifactError):
        read_adapter(adapter_folder, engine.folder.config)


def test_bank_slot_holds_the_adapter_and_zeros(engine):
    config = engine.folder.config
    adapter = make(engine, "narrow", 2, rank=2, targets=("q_proj", "up_proj"))
    bank = into_bank(empty_bank(config, slots=3, rank=4), 1, adapter.lora)
    one = select_one(bank, jnp.int32(1))
    assert float(one.scale) == 4.0
    pair, own = one.layers[1]["q_proj"], adapter.lora.layers[1]["q_proj"]
    assert np.array_equal(pair.down[:, :2], own.down)
    assert np.array_equal(pair.up[:2], own.up)
    assert not np.any(pair.down[:, 2:])
    assert not np.any(one.layers[0]["k_proj"].down)
    for leaf in jax.tree.leaves((select_one(bank, jnp.int32(0)), select_one(bank, 2))):
        assert not np.any(leaf)


def test_adapters_of_one_batch_do_not_mix(engine, request_for):
    """Base and two adapters together answer as each does alone."""
    names = [None]
    for seed, name in enumerate(("left", "right"), start=3):
        make(engine, name, seed)
        engine.load_adapter(name)
        names.append(name)
    requests = [request_for(n, adapter=names[n % 3], max_tokens=12) for n in range(12)]
    alone = [engine.submit(request).result() for request in requests]
    together = [future.result() for future in map(engine.submit, requests)]
    for one, other in zip(alone, together, strict=True):
        assert one.action_token_ids == other.action_token_ids
        assert one.logprobs == other.logprobs
    same = [replace(requests[0], adapter=name) for name in names]
    answers = {engine.submit(request).result().logprobs for request in same}
    assert len(answers) == 3
    for name in ("left", "right"):
        engine.unload_adapter(name)


def test_identity_names_the_adapter_and_its_content(engine):
    content = make(engine, "known", 5).content_sha256
    identity = engine.policy_identity("known")
    assert (identity.adapter.name, identity.adapter.content_sha256) == (
        "known",
        content,
    )
    assert identity.base_model_sha256 == engine.policy_identity(None).base_model_sha256
    with pytest.raises(UsageError, match="no adapter 'nobody'"):
        engine.policy_identity("nobody")


def test_listing_tells_what_is_loaded_and_what_is_broken(engine):
    make(engine, "good", 6)
    (engine.library.directory / "broken").mkdir(exist_ok=True)
    (engine.library.directory / ".hidden").mkdir(exist_ok=True)
    engine.load_adapter("good")
    found = {info.name: info for info in engine.adapters()}
    assert found["good"].loaded
    assert found["good"].size_bytes > 1000
    assert found["broken"].problem
    assert not found["broken"].has_config
    assert ".hidden" not in found
    with pytest.raises(UsageError, match="broken"):
        engine.load_adapter("broken")
    engine.unload_adapter("good")
    with pytest.raises(UsageError, match="not loaded"):
        engine.unload_adapter("good")


@pytest.mark.parametrize("name", ["../x", ".x", "", "a/b"])
def test_unsafe_name_is_refused(engine, name):
    with pytest.raises(UsageError, match="safe name"):
        engine.load_adapter(name)


def test_bank_refuses_what_it_cannot_hold(engine):
    adapter = make(engine, "plain", 1)
    with pytest.raises(UsageError, match="rank 4"):
        AdapterBank(engine.folder.config, slots=2, rank=2).load("a", adapter)
    bank = AdapterBank(engine.folder.config, slots=2, rank=4)
    bank.load("a", adapter)
    with pytest.raises(CapacityFull):
        bank.load("b", adapter)


def test_slot_in_use_is_not_reused(engine):
    one, two = make(engine, "one", 7), make(engine, "two", 8)
    bank = AdapterBank(engine.folder.config, slots=2, rank=4)
    bank.load("one", one)
    seat = bank.acquire("one")
    bank.unload("one")
    with pytest.raises(CapacityFull):
        bank.load("two", two)
    bank.release(seat.slot)
    bank.load("two", two)
    assert bank.seat("two").slot == seat.slot
