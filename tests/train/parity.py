"""The committed outputs of `transformers` and `peft`, and the weights they are of."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kiln_core.canonical import pretty
from kiln_train_jax.folder import END_OF_TURN, TURN_TEMPLATE
from kiln_train_jax.tokenizer import byte_document
from kiln_train_jax.weights import SINGLE

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "vectors" / "parity"
PROVENANCE = json.loads((VECTORS / "provenance.json").read_text())


def _script():
    path = ROOT / "scripts" / "make_parity_vectors.py"
    spec = importlib.util.spec_from_file_location("make_parity_vectors", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()


@cache
def vectors(case):
    with np.load(VECTORS / f"{case}.npz") as stored:
        return {name: stored[name] for name in stored}


def config_document(case):
    """Return the `config.json` that `transformers` wrote."""
    return json.loads(str(vectors(case)["config"]))


def write_folder(folder, case, **changes):
    """Write a case as a Hugging Face folder with the byte tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(script.seeded_tensors(case), folder / SINGLE)
    document = {**config_document(case), **changes}
    (folder / "config.json").write_bytes(pretty(document))
    (folder / "tokenizer.json").write_bytes(byte_document())
    (folder / "tokenizer_config.json").write_bytes(
        pretty({"chat_template": TURN_TEMPLATE, "eos_token": END_OF_TURN})
    )
    return folder
