"""A Hugging Face folder of random weights that both sides of a benchmark load."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from shutil import copy
from typing import Final

import msgspec
import numpy as np
from safetensors.numpy import save_file

from kiln_train_jax.config import ModelConfig
from kiln_train_jax.weights import random_tensors

SEED: Final = 7
COPIED: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_model(folder: Path) -> Path:
    """Write a model of the shape and the vocabulary of ``builtin:tiny``.

    Its weights are random, so that what it says rarely ends by itself.

    Args:
        folder: Where; it must exist.
    """
    with as_file(files("kiln_train_jax") / "models" / "tiny") as tiny:
        document = msgspec.json.decode((tiny / "config.json").read_bytes())
        for name in COPIED:
            copy(tiny / name, folder / name)
    document["torch_dtype"] = "float32"
    (folder / "config.json").write_bytes(msgspec.json.encode(document))  # noqa: TID251 - of the peer's format
    tensors = random_tensors(ModelConfig.from_hugging_face(document), seed=SEED)
    save_file(
        {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder
