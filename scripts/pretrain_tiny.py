"""Pretrain, export and re-check the embedded model `builtin:tiny`.

The model learns two things and nothing else: to copy what a prompt says, and to look
up the value of a named key and answer `{"key":value}`. All text is made of random
letters and digits; nothing in it is about the tasks of the examples, and a filter
keeps their words out even by chance. The data stream is a pure function of the seed
and the step, so `--check` can derive its digest again and re-score the shipped file;
the weights themselves are a file, because another CPU or compiler would not give the
same bits.

    python scripts/pretrain_tiny.py --out kiln_train_jax/models/tiny
    python scripts/pretrain_tiny.py --check kiln_train_jax/models/tiny

Training takes about ten minutes on two free cores, a check one. Muon (Jordan et al.
2024) moves the matrices; embedding and norms get Adam.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import muon

from kiln_core.canonical import digest, pretty, read_json
from kiln_train_jax.attention import FullContext, KeyValue
from kiln_train_jax.config import ModelConfig
from kiln_train_jax.folder import TURN_TEMPLATE, load_folder
from kiln_train_jax.model import Decoder
from kiln_train_jax.tokenizer import byte_document
from kiln_train_jax.weights import SINGLE, to_tensors, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable

SEED: Final = 20261130
STEPS: Final = 1_500
WIDEN_AT: Final = 600
"""Step from which prefixes grow: copying is learnt first, on cheap short ones."""
ROWS: Final = 16
ROW_TOKENS: Final = 80
SHORT_PREFIX: Final = 160
PREFIX_BUCKETS: Final = (160, 320, 640)
LONG_EVERY: Final = 4
LONG_SEGMENTS: Final = (3, 7)
SEGMENT_TOKENS: Final = 512
LONG_ROWS: Final = 8
CONTEXT_TOKENS: Final = 4_096
LEARNING_RATE: Final = 6e-3
ADAM_SHARE: Final = 0.12
GAIN_SHARE: Final = 0.5
"""Of the learning rate, for q and k gains: among many keys a head must be sharp."""
WARM_UP: Final = 40
INITIAL_SCALE: Final = 0.25
"""Of the kernels; block outputs start at zero. Else copying comes 600 steps later."""

SYSTEM, USER, ASSISTANT, TOOL, END = 262, 263, 264, 265, 266
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
FORBIDDEN: Final = (
    "lamp", "colo", "signal", "arm", "bandit", "ticket", "count", "press", "red",
    "green", "blue", "yellow", "pull", "lit",
)  # fmt: skip


class Row(NamedTuple):
    """One training row: ids, and which of them the model must predict."""

    tokens: list[int]
    answers: list[bool]
    is_copy: bool = False


class Batch(NamedTuple):
    """What one step sees."""

    prefix: np.ndarray
    """int32 `[segments, width]`: a system turn, zero padded, in reading order."""
    prefix_length: int
    tokens: np.ndarray
    """int32 `[rows, time]`."""
    positions: np.ndarray
    """int32 `[rows, time]`: behind the prefix and a random gap."""
    answers: np.ndarray
    """bool `[rows, time]`: token t is to be predicted from t - 1."""


def word(rng: random.Random, low: int = 2, high: int = 8) -> str:
    """Return a random word that is no word of the examples."""
    while True:
        length = rng.randint(low, high)
        text = "".join(rng.choice(LETTERS) for _ in range(length))
        if not any(bad in text for bad in FORBIDDEN):
            return text


def value(rng: random.Random) -> str:
    """Return a JSON value: mostly small integers, some words."""
    if rng.random() < 0.65:
        return str(rng.randint(0, rng.choice((9, 9, 99, 999))))
    return f'"{word(rng)}"'


def copy_row(rng: random.Random) -> Row:
    """Say a random string; the answer is that string."""
    alphabet = rng.choice((LETTERS, LETTERS + "0123456789", LETTERS + ' {}":,._-'))
    while True:
        length = rng.randint(6, 34)
        text = "".join(rng.choice(alphabet) for _ in range(length))
        if not any(bad in text for bad in FORBIDDEN):
            return turns([(USER, text, text)])._replace(is_copy=True)


def lookup_row(rng: random.Random, keys: list[str]) -> Row:
    """State some pairs in one or two turns; each answer names one of them."""
    exchanges, kind = [], rng.choice(("json", "is", "colon"))
    for turn in range(rng.choice((1, 1, 2))):
        pairs = [(key, value(rng)) for key in rng.sample(keys, rng.randint(1, 2))]
        key, answer = rng.choice(pairs)
        text = state(rng, kind, pairs)
        role = USER if turn == 0 else TOOL
        exchanges.append((role, text, f'{{"{key}":{answer}}}'))
    return turns(exchanges)


def state(rng: random.Random, kind: str, pairs: list[tuple[str, str]]) -> str:
    """Write pairs as JSON, as sentences or as labelled lines."""
    if kind == "json":
        return "{" + ",".join(f'"{key}":{text}' for key, text in pairs) + "}"
    spoken = [(key, text.strip('"')) for key, text in pairs]
    if kind == "is":
        lead = rng.choice(("", "the ", "The ", f"{word(rng, 2, 5)} "))
        return " ".join(f"{lead}{key} is {text}." for key, text in spoken)
    return " ".join(f"{word(rng, 2, 6)} {key}: {text}" for key, text in spoken)


def turns(exchanges: list[tuple[int, str, str]]) -> Row:
    """Lay out exchanges in the chat format of the model's template."""
    tokens: list[int] = []
    answers: list[bool] = []
    for role, said, answer in exchanges:
        heard = [role, *said.encode(), END, ASSISTANT]
        reply = [*answer.encode(), END]
        tokens += heard + reply
        answers += [False] * len(heard) + [True] * len(reply)
    return Row(tokens, answers)


def junk_system(rng: random.Random, keys: list[str], length: int) -> list[int]:
    """Return a system turn of about `length` tokens: prose and a made-up schema."""
    prose = " ".join(word(rng, 1, 9) for _ in range(rng.randint(4, 24)))
    parts = [f"{prose.capitalize()}. " + '{"properties":{']
    size = len(parts[0])
    while size < length:
        key = rng.choice(keys) if rng.random() < 0.3 else word(rng)
        kind = rng.choice(("integer", "string", "object", "boolean"))
        noise = " ".join(word(rng, 1, 9) for _ in range(rng.randint(0, 6)))
        part = (
            f'"{key}":{{"description":"{noise}","maximum":{rng.randint(0, 99)},'
            f'"title":"{key.title()}","type":"{kind}"}},'
        )
        parts.append(part)
        size += len(part)
    text = "".join(parts).encode()[: length - 2]
    return [SYSTEM, *text, END]


def batch(seed: int, step: int) -> Batch:
    """Derive the batch of one step, a pure function of its arguments."""
    rng = random.Random(f"{seed}:{step}")
    rows, keys = some_rows(rng, ROWS)
    if step < WIDEN_AT:
        shape, reach = (1, SHORT_PREFIX), 800
        length = rng.randint(48, SHORT_PREFIX)
    elif step % LONG_EVERY == 0:
        shape = (rng.choice(LONG_SEGMENTS), SEGMENT_TOKENS)
        length = shape[0] * shape[1]
        reach = CONTEXT_TOKENS - length - ROW_TOKENS
        rows = rows[:LONG_ROWS]
    else:
        length = rng.randint(48, PREFIX_BUCKETS[-1])
        shape = (1, next(size for size in PREFIX_BUCKETS if size >= length))
        reach = CONTEXT_TOKENS - length - ROW_TOKENS
    prefix = np.zeros(shape[0] * shape[1], np.int32)
    prefix[:length] = junk_system(rng, keys, length)
    start = length + rng.randint(0, rng.choice((min(800, reach), reach)))
    return lay_out(rows, prefix.reshape(shape), length, start)


def some_rows(rng: random.Random, count: int) -> tuple[list[Row], list[str]]:
    """Draw rows, 40 % copies and 60 % look-ups, and the keys they use."""
    rows: list[Row] = []
    keys: list[str] = []
    while len(rows) < count:
        own = [word(rng) for _ in range(3)]
        row = copy_row(rng) if rng.random() < 0.4 else lookup_row(rng, own)
        if len(row.tokens) <= ROW_TOKENS:
            rows.append(row)
            keys += own
    return rows, keys


def lay_out(rows: list[Row], prefix: np.ndarray, length: int, start: int) -> Batch:
    """Pad rows into arrays that begin at position `start`."""
    tokens = np.zeros((len(rows), ROW_TOKENS), np.int32)
    answers = np.zeros((len(rows), ROW_TOKENS), bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = row.tokens
        answers[index, : len(row.answers)] = row.answers
    positions = np.tile(np.arange(ROW_TOKENS, dtype=np.int32), (len(rows), 1))
    return Batch(prefix, length, tokens, positions + start, answers)


def data_digest(seed: int, steps: int) -> str:
    """Return the SHA-256 over every batch of the stream, in order."""
    running = hashlib.sha256()
    for step in range(steps):
        for part in batch(seed, step):
            running.update(np.ascontiguousarray(part, np.int32).tobytes())
    return f"sha256:{running.hexdigest()}"


def tiny_config() -> ModelConfig:
    """Return the shape of the model: 822,656 parameters."""
    return ModelConfig(
        model_type="qwen3",
        vocab_size=272,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT_TOKENS,
        eos_token_ids=(END,),
    )


def initial_model() -> Decoder:
    """Return the model before training, from the fixed seed."""
    model = Decoder(tiny_config(), rngs=nnx.Rngs(SEED))
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.kernel[...] *= INITIAL_SCALE
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.kernel[...] *= INITIAL_SCALE
        for linear in (attention.o_proj, mlp.down_proj):
            linear.kernel[...] *= 0.0
    return model


def prefix_memory(model: Decoder, prefix: jax.Array) -> tuple[KeyValue, ...]:
    """Return keys and values of a prefix, each segment read on its own.

    A long prefix is only there to be ignored. Its segments do not see each other and
    pass no gradient, which makes thousands of distractors cheap; their positions are
    the real ones.
    """
    segments, width = prefix.shape
    places = jnp.arange(segments * width, dtype=jnp.int32).reshape(prefix.shape)
    _, memory = model(prefix, places, FullContext())
    if segments == 1:
        return memory

    def joined(part: jax.Array) -> jax.Array:
        _, heads, _, size = part.shape
        long = part.transpose(1, 0, 2, 3).reshape(1, heads, segments * width, size)
        return jax.lax.stop_gradient(long)

    return tuple(KeyValue(joined(key), joined(value)) for key, value in memory)


def answer_logits(model: Decoder, data: dict[str, Any]) -> jax.Array:
    """Return logits `[rows, time, vocab]` of rows behind their shared prefix."""
    memory = prefix_memory(model, data["prefix"])
    context = FullContext(memory, jnp.reshape(data["prefix_length"], (1,)))
    hidden, _ = model(data["tokens"], data["positions"], context)
    return model.logits(hidden)


def loss_of(model: Decoder, data: dict[str, Any]) -> jax.Array:
    """Return the mean cross entropy of the answer tokens."""
    logits = answer_logits(model, data)
    targets, wanted = data["tokens"][:, 1:], data["answers"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets)
    return jnp.sum(losses * wanted) / jnp.sum(wanted)


def schedule(share: float) -> optax.Schedule:
    """Return warm-up, a plateau until half of the steps, then a line to zero."""
    peak, half = LEARNING_RATE * share, STEPS // 2
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, WARM_UP),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, STEPS - half),
        ],
        [WARM_UP, half],
    )


def optimizer_for(state: Any) -> optax.GradientTransformation:
    """Return Muon for kernels, Adam for embedding and norms, faster for q/k gains."""

    def label(path: Any, _leaf: Any) -> str:
        name = jax.tree_util.keystr(path)
        if "kernel" in name:
            return "kernels"
        return "gains" if "q_norm" in name or "k_norm" in name else "rest"

    moves = {
        "kernels": muon(schedule(1.0)),
        "gains": optax.adam(schedule(GAIN_SHARE)),
        "rest": optax.adam(schedule(ADAM_SHARE)),
    }
    labels = jax.tree_util.tree_map_with_path(label, state)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.partition(moves, labels))


def train(report: Callable[[str], None]) -> tuple[Decoder, list[float]]:
    """Train from the fixed seed.

    Args:
        report: Takes a line of progress every 25 steps.

    Returns:
        The model, and the mean loss of every 25 steps.
    """
    graph, state = nnx.split(initial_model())
    optimizer = optimizer_for(state)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(state: Any, moments: Any, data: dict[str, Any]) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(
            lambda state: loss_of(nnx.merge(graph, state), data)
        )(state)
        updates, moments = optimizer.update(grads, moments, state)
        return optax.apply_updates(state, updates), moments, loss

    moments = jax.jit(optimizer.init)(state)
    began, losses, curve = time.perf_counter(), [], []
    for index in range(STEPS):
        state, moments, loss = step(state, moments, batch(SEED, index)._asdict())
        losses.append(loss)
        if index % 25 == 24:
            curve.append(round(float(jnp.mean(jnp.stack(losses[-25:]))), 4))
            seconds = time.perf_counter() - began
            report(f"step {index + 1} loss {curve[-1]:.4f} seconds {seconds:.0f}")
    return nnx.merge(graph, state), curve


SCORE_PROMPTS: Final = (200, 800, 2_000, 4_000)
SCORE_BATCHES: Final = 6
FLOOR: Final = 0.85
"""Least share of entirely right answers, at every prompt length."""


def score(model: Decoder, prompt_tokens: int) -> dict[str, float]:
    """Measure greedy answers behind a prompt of a given length, with fresh text.

    Args:
        model: What to measure.
        prompt_tokens: Length of the system turn.

    Returns:
        Share of fully right answers; of a look-up, the value after the opened key.
    """
    graph, state = nnx.split(model)

    @jax.jit
    def greedy(state: Any, data: dict[str, Any]) -> jax.Array:
        return jnp.argmax(answer_logits(nnx.merge(graph, state), data), axis=-1)

    right: dict[str, list[bool]] = {"copy": [], "lookup": []}
    for index in range(SCORE_BATCHES):
        rng = random.Random(f"score:{prompt_tokens}:{index}")
        rows, keys = some_rows(rng, ROWS)
        prefix = np.array([junk_system(rng, keys, prompt_tokens)], np.int32)
        data = lay_out(rows, prefix, prompt_tokens, prompt_tokens)
        guesses = np.asarray(greedy(state, data._asdict()))
        for row, guess in zip(rows, guesses, strict=True):
            decided = decisions(row)
            kind = "copy" if row.is_copy else "lookup"
            right[kind].append(all(guess[t - 1] == row.tokens[t] for t in decided))
    return {kind: round(float(np.mean(marks)), 4) for kind, marks in right.items()}


def decisions(row: Row) -> list[int]:
    """Return the answer positions that the conversation decides."""
    if row.is_copy:
        return [t for t, wanted in enumerate(row.answers) if wanted]
    decided, behind_colon = [], False
    for t, wanted in enumerate(row.answers):
        if wanted and behind_colon:
            decided.append(t)
        behind_colon = wanted and (behind_colon or row.tokens[t] == ord(":"))
    return decided


def export(model: Decoder, curve: list[float], folder: Path) -> None:
    """Write the model as a Hugging Face folder, with its recipe and receipt."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config()
    texts: dict[str, Any] = {
        "config.json": {
            **{name: getattr(config, name) for name in config.__struct_fields__},
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": END,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
        },
        "generation_config.json": {"do_sample": True, "eos_token_id": END},
        "tokenizer_config.json": {
            "chat_template": TURN_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|end|>",
            "model_max_length": CONTEXT_TOKENS,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "recipe.json": recipe(),
    }
    del texts["config.json"]["eos_token_ids"]
    for name, document in texts.items():
        (folder / name).write_bytes(pretty(document))
    (folder / "tokenizer.json").write_bytes(byte_document())
    path = folder / SINGLE
    write_safetensors(to_tensors(model, dtype=jnp.bfloat16), path)
    receipt = {
        "data_sha256": data_digest(SEED, STEPS),
        "weights_sha256": digest(path.read_bytes()),
        "loss_curve": curve,
        "scores": {
            str(tokens): score(load_folder(str(folder)).model, tokens)
            for tokens in SCORE_PROMPTS
        },
        "versions": {name: version(name) for name in ("jax", "flax", "optax")},
    }
    (folder / "receipt.json").write_bytes(pretty(receipt))


def recipe() -> dict[str, Any]:
    """Return every constant of this script."""
    return {
        name.lower(): value
        for name, value in globals().items()
        if name.isupper() and type(value) in {int, float, tuple}
    }


def check(folder: Path) -> int:
    """Derive the data again and score the shipped file; 0 when all holds."""
    receipt = read_json((folder / "receipt.json").read_bytes(), "receipt.json")
    found = {
        "data_sha256": data_digest(SEED, STEPS),
        "weights_sha256": digest((folder / SINGLE).read_bytes()),
    }
    failed = [name for name in found if found[name] != receipt[name]]
    for tokens in SCORE_PROMPTS:
        shares = score(load_folder(str(folder)).model, tokens)
        print(f"{tokens} prompt tokens: {shares}", flush=True)
        if min(shares.values()) < FLOOR:
            failed.append(f"score at {tokens}")
    print("failed: " + ", ".join(failed) if failed else "all holds")
    return 1 if failed else 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--out", type=Path, help="train and write the folder")
    chosen.add_argument("--check", type=Path, help="check a written folder")
    arguments = parser.parse_args()
    if arguments.check is not None:
        return check(arguments.check)
    model, curve = train(lambda line: print(line, flush=True))
    export(model, curve, arguments.out)
    return check(arguments.out)


if __name__ == "__main__":
    sys.exit(main())
