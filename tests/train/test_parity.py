"""Numerics against vectors made once with `transformers` and `peft`."""

from __future__ import annotations

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from kiln_core.canonical import pretty
from kiln_core.engine import EngineSettings, GenerationRequest
from kiln_core.records import ChatMessage
from kiln_train_jax.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    into_bank,
    read_adapter,
)
from kiln_train_jax.attention import (
    BatchContext,
    FullContext,
    KeyValue,
    RowContext,
    cache_length,
)
from kiln_train_jax.config import ModelConfig
from kiln_train_jax.folder import load_folder
from kiln_train_jax.lora import empty_bank, select_rows
from kiln_train_jax.model import LayerLora, Rotation
from kiln_train_jax.plugin import JaxPlugin
from kiln_train_jax.weights import build
from tests.train.parity import (
    PROVENANCE,
    config_document,
    script,
    vectors,
    write_folder,
)

CASES = list(script.CASES)
TOKENS = jnp.asarray(script.prompt_tokens(), jnp.int32)
PLACES = jnp.arange(script.PROMPT, dtype=jnp.int32)[None]


@pytest.fixture(scope="module")
def models():
    return {
        case: build(
            ModelConfig.from_hugging_face(config_document(case)),
            script.seeded_tensors(case),
            dtype=jnp.float32,
        )
        for case in CASES
    }


def forward(model, tokens, positions, context, lora=None):
    graph, state = nnx.split(model)
    return _forward(graph, state, tokens, positions, context, lora)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph, state, *fed):
    return nnx.merge(graph, state)(*fed)


def close(ours, theirs, tolerance):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


def states(model):
    """Return the embedded tokens, and what every layer puts out."""
    hidden = model.embed_tokens[...][TOKENS]
    kept, rotation = [hidden], Rotation(PLACES, model.config)
    for layer, block in enumerate(model.layers):
        none = LayerLora(None, layer)
        hidden, _ = block(hidden, layer, rotation, FullContext(), none)
        kept.append(hidden)
    return kept


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_that_of_transformers(models, case):
    expected, model = vectors(case), models[case]
    embedded, *layers = states(model)
    close(embedded[0], expected["embedding"], 1e-6)
    for ours, theirs in zip(layers, expected["states"], strict=True):
        close(ours[0], theirs, 1e-4)
    close(model.logits(layers[-1])[0], expected["logits"], 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_greedy_path_is_that_of_transformers(models, case):
    """Prefill, then one token at a time from the caches, as the engine does."""
    model, config = models[case], models[case].config
    length = cache_length(script.PROMPT + script.GREEDY, script.PROMPT)
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    caches = tuple(KeyValue(jnp.zeros(shape), jnp.zeros(shape)) for _ in model.layers)
    zero = jnp.int32(0)
    hidden, caches = forward(model, TOKENS, PLACES, RowContext(caches, zero, zero))
    graph, state = nnx.split(model)
    found, hiddens = [], [hidden[0]]
    for position in range(script.PROMPT, script.PROMPT + script.GREEDY):
        found.append(int(jnp.argmax(model.logits(hidden[0, -1]))))
        starts = jnp.array([position], jnp.int32)
        context = BatchContext(caches, starts, starts[0] + 1)
        token = jnp.array([[found[-1]]], jnp.int32)
        hidden, caches = _forward(graph, state, token, starts[:, None], context)
        hiddens.append(hidden[0])
    assert found == vectors(case)["greedy"].tolist()
    whole = jnp.concatenate([TOKENS, jnp.array([found], jnp.int32)], 1)
    places = jnp.arange(whole.shape[1], dtype=jnp.int32)[None]
    full, _ = forward(model, whole, places, FullContext())
    scale = float(jnp.abs(full).max())
    close(jnp.concatenate(hiddens), full[0], 2e-6 * max(scale, 1.0))


def test_flat_rope_theta_is_the_nested_one(models):
    document = config_document("llama-all-kv")
    theta = document.pop("rope_parameters")["rope_theta"]
    flat = ModelConfig.from_hugging_face({**document, "rope_theta": theta})
    assert flat == models["llama-all-kv"].config
    assert flat.rope_theta == 5e5


def write_theirs(folder):
    """Write an adapter folder as `peft` did: its configuration, its names."""
    tensors = script.adapter_tensors("theirs")
    save_file(tensors, folder / WEIGHTS_FILE)
    document = PROVENANCE["adapters"]["theirs"]["adapter_config"]
    (folder / CONFIG_FILE).write_bytes(pretty(document))
    return tensors


def test_names_and_shapes_are_those_peft_wrote(tmp_path):
    shapes = {name: list(t.shape) for name, t in write_theirs(tmp_path).items()}
    assert shapes == PROVENANCE["adapters"]["theirs"]["tensors"]


def test_exported_adapter_is_the_one_peft_loaded(tmp_path):
    script.export(tmp_path)
    found = PROVENANCE["adapters"]["ours"]
    weights = (tmp_path / WEIGHTS_FILE).read_bytes()
    assert hashlib.sha256(weights).hexdigest() == found["weights_sha256"]
    assert (found["missing_keys"], found["unexpected_keys"]) == (0, 0)
    written = load_file(tmp_path / WEIGHTS_FILE)
    for name, tensor in script.adapter_tensors("ours").items():
        assert np.array_equal(written.pop(name), tensor)
    assert not written


def test_two_adapters_in_one_batch_are_those_of_peft(models, tmp_path):
    """Rows of the base and both adapters side by side, alpha over rank of 6 and 1/2."""
    model = models[script.ADAPTED]
    (tmp_path / "theirs").mkdir()
    write_theirs(tmp_path / "theirs")
    script.export(tmp_path / "ours")
    bank = empty_bank(model.config, slots=3, rank=8)
    for slot, name in enumerate(("theirs", "ours"), start=1):
        adapter = read_adapter(tmp_path / name, model.config)
        bank = into_bank(bank, slot, adapter.lora)
    rows = select_rows(bank, jnp.array([2, 0, 1], jnp.int32))
    tokens, places = jnp.tile(TOKENS, (3, 1)), jnp.tile(PLACES, (3, 1))
    hidden, _ = forward(model, tokens, places, FullContext(), rows)
    ours, base, theirs = model.logits(hidden)
    expected = vectors("adapters")
    close(ours, expected["ours"], 1e-4)
    close(theirs, expected["theirs"], 1e-4)
    close(base, vectors(script.ADAPTED)["logits"], 1e-4)


@pytest.mark.slow
def test_folder_written_by_transformers_is_served(tmp_path):
    """Through the engine, with both adapters loaded; greedy is the model's own."""
    source = write_folder(tmp_path / "parity-model", script.ADAPTED)
    (tmp_path / "adapters" / "theirs").mkdir(parents=True)
    write_theirs(tmp_path / "adapters" / "theirs")
    script.export(tmp_path / "adapters" / "ours")
    engine = JaxPlugin(
        EngineSettings(
            model=str(source),
            adapter_dir=tmp_path / "adapters",
            compile_cache_dir=tmp_path / "xla",
            slots=3,
        )
    )
    engine.start()
    try:
        for name in ("theirs", "ours"):
            engine.load_adapter(name)
        futures = {name: engine.submit(question(name)) for name in ADAPTERS}
        answers = {name: future.result() for name, future in futures.items()}
    finally:
        engine.stop()
    folder = load_folder(str(source))
    for name, answer in answers.items():
        lora = name and read_adapter(tmp_path / "adapters" / name, folder.config).lora
        check_greedy(folder, lora, answer)


ADAPTERS = (None, "theirs", "ours")


def question(adapter):
    return GenerationRequest(
        messages=(ChatMessage(role="user", content="hi"),),
        seed=1,
        max_tokens=12,
        temperature=0.0,
        adapter=adapter,
        thinking=False,
    )


def check_greedy(folder, lora, answer):
    """Check an answer against one full forward over prompt and answer."""
    prompt, action = answer.prompt_token_ids, answer.action_token_ids
    whole = jnp.array([[*prompt, *action]], jnp.int32)
    places = jnp.arange(whole.shape[1], dtype=jnp.int32)[None]
    hidden, _ = jax.jit(folder.model)(whole, places, FullContext(), lora)
    logits = np.array(folder.model.logits(hidden)[0, len(prompt) - 1 : -1])
    special = folder.tokenizer.special_ids - folder.stop_ids
    logits[:, sorted(special)] = -np.inf
    logits[:, folder.tokenizer.size :] = -np.inf
    assert logits.argmax(-1).tolist() == list(action)
