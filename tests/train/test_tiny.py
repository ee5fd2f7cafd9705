"""The embedded model: its data, its file, and what it can do at once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from msgspec.structs import replace
from tokenizers import Tokenizer as HuggingFaceTokenizer

from kiln_core.canonical import digest, read_json
from kiln_train_jax.folder import load_folder
from kiln_train_jax.model import Decoder
from kiln_train_jax.template import Message

ROOT = Path(__file__).parents[2]
TINY = ROOT / "kiln_train_jax" / "models" / "tiny"


@pytest.fixture(scope="module")
def script():
    path = ROOT / "scripts" / "pretrain_tiny.py"
    spec = importlib.util.spec_from_file_location("pretrain_tiny", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny():
    return load_folder("builtin:tiny")


def test_folder_is_small_and_opens_in_plain_loaders():
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 2_000_000
    config = read_json((TINY / "config.json").read_bytes(), "config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    loaded = HuggingFaceTokenizer.from_file(str(TINY / "tokenizer.json"))
    assert loaded.encode("<|user|>a").ids == [263, 97]


def test_receipt_names_the_shipped_weights():
    receipt = read_json((TINY / "receipt.json").read_bytes(), "receipt.json")
    weights = (TINY / "model.safetensors").read_bytes()
    assert receipt["weights_sha256"] == digest(weights)


def test_recipe_is_the_script(script):
    shipped = read_json((TINY / "recipe.json").read_bytes(), "recipe.json")
    assert shipped == {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in script.recipe().items()
    }


def test_model_has_the_stated_shape(tiny):
    _, state = nnx.split(tiny.model)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 822_656
    assert tiny.config.max_position_embeddings >= 4_096
    assert not tiny.template.thinking


def test_data_is_a_pure_function_of_seed_and_step(script):
    assert script.data_digest(1, 3) == script.data_digest(1, 3)
    assert script.data_digest(1, 3) != script.data_digest(2, 3)


@pytest.mark.parametrize("step", [0, 601, 604, 1_201])
def test_data_says_nothing_about_the_examples(script, step):
    data = script.batch(script.SEED, step)
    for ids in (data.prefix.ravel(), *data.tokens):
        text = bytes(token for token in ids.tolist() if token < 256).decode().lower()
        assert not [word for word in script.FORBIDDEN if word in text]


def test_data_is_laid_out_as_the_template_writes_it(script, tiny):
    row = script.turns([(script.USER, "k is 4.", '{"k":4}'), (script.TOOL, "x", "y")])
    messages = [
        Message("user", "k is 4."),
        Message("assistant", '{"k":4}'),
        Message("tool", "x"),
        Message("assistant", "y"),
    ]
    rendering = tiny.template.render(messages, add_generation_prompt=False)
    assert row.tokens == rendering.tokens


def test_positions_reach_the_whole_context(script):
    last = [script.batch(script.SEED, step).positions.max() for step in range(600, 700)]
    assert max(last) > 3_900
    assert max(last) < 4_096


def test_muon_orthogonalises_every_kernel(script):
    """optax hands what is not a matrix to Adam without a word."""
    config = replace(script.tiny_config(), num_hidden_layers=1)
    state = nnx.state(Decoder(config, rngs=nnx.Rngs(0)))
    optimizer = script.optimizer_for(state)
    stream = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda leaf: stream.normal(size=leaf.shape).astype(np.float32), state
    )
    update = jax.jit(optimizer.update)
    moments = optimizer.init(state)
    for _ in range(2):  # the first step of the warm-up has rate zero
        updates, moments = update(grads, moments, state)
    kernels = [
        np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates)
        if "kernel" in jax.tree_util.keystr(path)
    ]
    assert len(kernels) == 7
    for kernel in kernels:
        values = np.linalg.svd(kernel, compute_uv=False)
        assert values[0] / np.quantile(values, 0.1) < 2.5


@pytest.mark.parametrize("prompt_tokens", [200, 2_000])
def test_shipped_model_reads_and_copies(script, tiny, prompt_tokens):
    shares = script.score(tiny.model, prompt_tokens)
    assert min(shares.values()) >= script.FLOOR


def test_named_answer_is_followed_at_once(script, tiny):
    """A smoke test of reading; it is solved without training and proves no more."""
    system = "Answer with one JSON object for this schema: {'properties':{'pick':{}}}"
    graph, state = nnx.split(tiny.model)

    @jax.jit
    def last_logits(state, tokens):
        model = nnx.merge(graph, state)
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        hidden, _ = model(tokens, places, script.FullContext())
        return model.logits(hidden[0, -1])

    right = 0
    for wanted in range(8):
        prompt = tiny.template.render(
            [Message("system", system), Message("user", f"The pick is {wanted}. Go.")]
        )
        tokens = [*prompt.tokens, *b'{"pick":']
        digits = last_logits(state, np.array([tokens], np.int32))[48:56]
        right += int(digits.argmax()) == wanted
    assert right >= 7
