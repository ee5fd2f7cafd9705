"""Make the vectors that hold our numerics to those of `transformers` and `peft`.

python scripts/make_parity_vectors.py --export FOLDER
python scripts/make_parity_vectors.py --make tests/vectors/parity --exported FOLDER

The first runs in the environment of this package and writes an adapter as we export it;
the second runs where torch, transformers and peft are installed, loads that adapter
with `peft`, and writes the vectors. Neither is needed for the tests: weights come from
a fixed seed of numpy's frozen generator on both sides, so only outputs are stored.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

VOCABULARY: Final = 272
PROMPT: Final = 8
"""Tokens whose states are stored."""
GREEDY: Final = 64
CLEAR: Final = 2e-3
"""Least distance of the two best logits along the greedy path."""

SHAPE: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
CASES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-tied-wide": {
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope": 1e6,
    },
    "qwen3-one-kv": {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 8},
    "qwen3-all-kv": {"model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 12},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "rope": 1e5},
    "llama-one-kv": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 16},
    "llama-all-kv": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope": 5e5,
    },
}
"""By name, what differs from `SHAPE`; `rope` is the rotary base."""

ADAPTED: Final = "qwen3-tied-wide"
"""The case that adapters are tried on."""
ADAPTERS: Final[dict[str, dict[str, Any]]] = {
    "theirs": {
        "seed": 71,
        "r": 4,
        "lora_alpha": 24,
        "target_modules": ["down_proj", "k_proj", "o_proj", "q_proj"],
    },
    "ours": {
        "seed": 72,
        "r": 6,
        "lora_alpha": 3,
        "target_modules": [
            "down_proj",
            "gate_proj",
            "k_proj",
            "o_proj",
            "q_proj",
            "up_proj",
            "v_proj",
        ],
    },
}
"""`theirs` is written by `peft`, `ours` by this package."""

TEXTS: Final = (
    "Hello world, it's 12345 o'clock!",
    "  two  spaces\tand\n\n new lines \r\n",
    "caf\u00e9 na\u00efve \u0130stanbul cafe\u0301 \u4e16\u754c 3.14159",
    '{"answer": 42, "why": "don\'t"}',
    "hello   ",
    "",
)
"""Texts whose token ids are stored for every pre-tokenizer."""

Shapes = dict[str, tuple[int, ...]]


def shape_of(case: str) -> dict[str, Any]:
    """Return the numbers of a case, head width included."""
    shape = {**SHAPE, **CASES[case]}
    shape.setdefault("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    return shape


def tensor_shapes(shape: dict[str, Any]) -> Shapes:
    """Return the shape of every tensor by its Hugging Face name, in order."""
    vocabulary, hidden = shape["vocab_size"], shape["hidden_size"]
    found: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(shape["num_hidden_layers"]):
        for module, sizes in projections(shape).items():
            found[f"model.layers.{layer}.{module}.weight"] = sizes
        norms = ["input_layernorm", "post_attention_layernorm"]
        for norm in norms:
            found[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        if shape["model_type"] == "qwen3":
            for norm in ("q_norm", "k_norm"):
                name = f"model.layers.{layer}.self_attn.{norm}.weight"
                found[name] = (shape["head_dim"],)
    found["model.norm.weight"] = (hidden,)
    if not shape["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocabulary, hidden)
    return found


def projections(shape: dict[str, Any]) -> Shapes:
    """Return `(out, in)` of each projection of a layer."""
    hidden, inner, width = (
        shape[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    queries = shape["num_attention_heads"] * width
    keys = shape["num_key_value_heads"] * width
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def seeded_tensors(case: str) -> dict[str, np.ndarray]:
    """Return the float32 weights of a case."""
    stream, shape = np.random.RandomState(1 + list(CASES).index(case)), shape_of(case)
    tensors = {}
    for name, sizes in tensor_shapes(shape).items():
        values = stream.standard_normal(sizes)
        if len(sizes) == 1:
            values = 1 + 0.3 * values
        elif name != "model.embed_tokens.weight":
            values *= 1.4 * sizes[1] ** -0.5
        elif shape["tie_word_embeddings"]:
            values *= 0.2  # or every token would predict itself
        tensors[name] = values.astype(np.float32)
    return tensors


def adapter_tensors(name: str) -> dict[str, np.ndarray]:
    """Return the float32 factors of an adapter by their PEFT names."""
    about = ADAPTERS[name]
    stream = np.random.RandomState(about["seed"])
    shape, tensors = shape_of(ADAPTED), {}
    for layer in range(shape["num_hidden_layers"]):
        for module, (outputs, inputs) in projections(shape).items():
            if module.partition(".")[2] not in about["target_modules"]:
                continue
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            down = stream.standard_normal((about["r"], inputs)) * inputs**-0.5
            up = stream.standard_normal((outputs, about["r"])) * 0.5
            tensors[f"{prefix}.lora_A.weight"] = down.astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = up.astype(np.float32)
    return tensors


def prompt_tokens() -> np.ndarray:
    """Return the prompt of every case, int64 `[1, PROMPT]`."""
    return np.random.RandomState(99).randint(0, VOCABULARY, (1, PROMPT))


def small_vocabulary() -> tuple[list[str], list[str]]:
    """Return tokens and merges of a byte-level vocabulary with a few words."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = [value for value in range(256) if value not in printable]
    spelled = {value: chr(value) for value in printable}
    spelled |= {value: chr(256 + place) for place, value in enumerate(spare)}
    tokens, merges = [spelled[value] for value in range(256)], []
    for word in (" world", "Hello", "it's", "123", "45", "answer", "  ", "\n\n", "3.1"):
        letters = [spelled[value] for value in word.encode()]
        whole = letters[0]
        for letter in letters[1:]:
            if f"{whole} {letter}" not in merges:
                merges.append(f"{whole} {letter}")
                tokens.append(whole + letter)
            whole += letter
    # A token no merge leads to: only `ignore_merges` finds it.
    return [*tokens, "hello"], merges


def export(folder: Path) -> None:
    """Write the adapter `ours` with this package."""
    from kiln_train_jax.adapters import write_adapter
    from kiln_train_jax.lora import Lora, Pair

    about, tensors = ADAPTERS["ours"], adapter_tensors("ours")
    layers: list[dict[str, Pair]] = [{} for _ in range(SHAPE["num_hidden_layers"])]
    for name in tensors:
        stem, kind = name.removesuffix(".weight").rsplit(".", 1)
        if kind == "lora_A":
            pair = (tensors[f"{stem}.{half}.weight"].T for half in ("lora_A", "lora_B"))
            layers[int(stem.split(".")[4])][stem.rsplit(".", 1)[1]] = Pair(*pair)
    folder.mkdir(parents=True, exist_ok=True)
    scale = np.float32(about["lora_alpha"] / about["r"])
    write_adapter(
        folder,
        Lora(tuple(layers), scale),
        model_id=ADAPTED,
        rank=about["r"],
        alpha=about["lora_alpha"],
    )


def torch_model(case: str) -> Any:
    """Return a case as `transformers` has it, in float32.

    Raises:
        SystemExit: It names its tensors otherwise than we do.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    shape = shape_of(case)
    kind = {"qwen3": Qwen3Config, "llama": LlamaConfig}[shape.pop("model_type")]
    rope = {"rope_type": "default", "rope_theta": shape.pop("rope", 1e4)}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = kind(**shape, **ends, rope_parameters=rope, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).eval()
    tensors = seeded_tensors(case)
    state = {name: torch.from_numpy(values) for name, values in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise SystemExit(f"{case}: {missing} missing, {unexpected} unexpected")
    model.tie_weights()
    return model


def case_vectors(case: str) -> dict[str, np.ndarray]:
    """Return the outputs of one case: states of every layer, logits, greedy tokens."""
    import torch

    model, tokens = torch_model(case), torch.from_numpy(prompt_tokens())
    kept: list[Any] = []
    for layer in model.model.layers:  # hidden_states would hold the last one normed
        layer.register_forward_hook(lambda _module, _given, out: kept.append(out))
    with torch.no_grad():
        output = model(tokens)
        embedded = model.model.embed_tokens(tokens)
    states = [part[0] if isinstance(part, tuple) else part for part in kept]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        config = (Path(folder) / "config.json").read_text()
    return {
        "config": np.array(config),
        "embedding": embedded[0].numpy(),
        "states": np.stack([state.reshape(PROMPT, -1).numpy() for state in states]),
        "logits": output.logits[0].numpy(),
        "greedy": greedy_tokens(model, tokens),
    }


def greedy_tokens(model: Any, tokens: Any) -> np.ndarray:
    """Return the greedy continuation.

    Raises:
        SystemExit: It holds a near tie, which rounding could decide either way.
    """
    import torch

    with torch.no_grad():
        whole = model.generate(tokens, max_new_tokens=GREEDY, do_sample=False)
        logits = model(whole).logits[0, PROMPT - 1 : -1]
    best = torch.topk(logits, 2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    if whole.shape[1] != PROMPT + GREEDY or gap < CLEAR:
        raise SystemExit(f"the greedy path is too short or has a near tie: {gap}")
    return np.asarray(whole[0, PROMPT:].numpy(), np.int32)


def adapter_vectors(exported: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return logits under both adapters, and what `peft` wrote and found.

    Raises:
        SystemExit: `peft` names factors otherwise than we do.
    """
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.numpy import load_file

    tokens, logits, found = torch.from_numpy(prompt_tokens()), {}, {}
    about = {key: value for key, value in ADAPTERS["theirs"].items() if key != "seed"}
    wanted = LoraConfig(task_type="CAUSAL_LM", **about)
    model = get_peft_model(torch_model(ADAPTED), wanted).eval()
    factors = {
        name.replace(".weight", ".default.weight"): torch.from_numpy(values)
        for name, values in adapter_tensors("theirs").items()
    }
    _, unexpected = model.load_state_dict(factors, strict=False)
    if unexpected:
        raise SystemExit(f"peft does not know {unexpected}")
    with torch.no_grad():
        logits["theirs"] = model(tokens).logits[0].numpy()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = load_file(Path(folder) / "adapter_model.safetensors")
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
    found["theirs"] = {
        "adapter_config": {
            **config,
            "base_model_name_or_path": ADAPTED,
            "target_modules": sorted(config["target_modules"]),  # from a set
        },
        "tensors": {name: list(values.shape) for name, values in written.items()},
    }
    model = PeftModel.from_pretrained(torch_model(ADAPTED), str(exported)).eval()
    result = model.load_adapter(str(exported), adapter_name="again")
    with torch.no_grad():
        logits["ours"] = model(tokens).logits[0].numpy()
    weights = (exported / "adapter_model.safetensors").read_bytes()
    found["ours"] = {
        "missing_keys": len(
            [key for key in result.missing_keys if "lora_" in key and "again" in key]
        ),
        "unexpected_keys": len(result.unexpected_keys),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    return logits, found


def token_ids() -> dict[str, list[list[int]]]:
    """Return the ids of every text under each pre-tokenizer of `transformers`."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import GPT2Tokenizer, Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tokens, merges = small_vocabulary()
    vocabulary = {token: place for place, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    smollm = Tokenizer(models.BPE(vocabulary, pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    smollm.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    llama = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    llama.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TikTokenConverter("").pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    kinds = {"gpt-2": GPT2Tokenizer, "qwen2": Qwen2Tokenizer}
    built = {
        name: kind(vocab=vocabulary, merges=pairs).backend_tokenizer
        for name, kind in kinds.items()
    }
    return {
        name: [each.encode(text, add_special_tokens=False).ids for text in TEXTS]
        for name, each in {**built, "smollm": smollm, "llama-bpe": llama}.items()
    }


def make(folder: Path, exported: Path) -> None:
    """Write the vectors and where they come from."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        np.savez_compressed(folder / f"{case}.npz", **case_vectors(case))
    logits, found = adapter_vectors(exported)
    np.savez_compressed(folder / "adapters.npz", **logits)
    libraries = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")
    provenance = {
        "script": "scripts/make_parity_vectors.py",
        "versions": {name: version(name) for name in libraries},
        "adapters": found,
        "token_ids": token_ids(),
    }
    text = json.dumps(provenance, indent=1, sort_keys=True, default=sorted)  # noqa: TID251 - runs where this package is not installed
    (folder / "provenance.json").write_text(text + "\n")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--export", type=Path, help="write our adapter here, and stop")
    parser.add_argument("--make", type=Path, help="write the vectors here")
    parser.add_argument("--exported", type=Path, help="what --export wrote")
    arguments = parser.parse_args()
    if arguments.export is not None:
        export(arguments.export)
    elif arguments.make is not None and arguments.exported is not None:
        make(arguments.make, arguments.exported)
    else:
        parser.error("give --export, or --make and --exported")
    return 0


if __name__ == "__main__":
    sys.exit(main())
