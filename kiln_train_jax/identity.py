"""Who answers: digests of the model, its adapter and its runtime.

Two engines with equal identities sample equal tokens for equal requests. Everything
that decides the bits of a program is in `inference_config_sha256`: library versions,
the device, dtypes, compiler flags, thread count, slot count, feed lengths, cache
length and pseudo-random generator, tokenizer and template.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

import jax
from msgspec import UNSET

from kiln_core.provenance import AdapterIdentity, BehaviorPolicyIdentity
from kiln_train_jax.attention import CHUNK
from kiln_train_jax.programs import BLOCK, FEEDS

if TYPE_CHECKING:
    from kiln_core.canonical import Sha256
    from kiln_train_jax.folder import ModelFolder

LIBRARIES: Final = ("jax", "jaxlib", "flax", "llguidance", "tokenizers", "jinja2")
DISTRIBUTION: Final = "kiln-openenv"


def implementation() -> str:
    """Return the name and version of this program."""
    try:
        return f"kiln/{version(DISTRIBUTION)}"
    except PackageNotFoundError:
        return "kiln/source"


def backend_name() -> str:
    """Return the generation backend, such as `jax-cpu`."""
    return f"jax-{jax.default_backend()}"


def inference_config(
    folder: ModelFolder, *, slots: int, cache_tokens: int, rank: int, dtype: Any
) -> dict[str, Any]:
    """Return everything about the runtime that may change a bit of an answer.

    Args:
        folder: The model.
        slots: Requests decoded together.
        cache_tokens: Length of a slot's cache.
        rank: Rank of the adapter bank.
        dtype: Of parameters and caches.
    """
    setting: Any = jax.config
    return {
        "adapter_rank": rank,
        "attention_chunk": CHUNK,
        "cache_tokens": cache_tokens,
        "device": jax.devices()[0].device_kind,
        "dtype": str(jax.numpy.dtype(dtype)),
        "feeds": [1, *FEEDS],
        "libraries": {name: version(name) for name in LIBRARIES},
        "matmul_precision": setting.jax_default_matmul_precision,
        "prefix_block": BLOCK,
        "prng": {
            "implementation": "threefry2x32",
            "partitionable": setting.jax_threefry_partitionable,
        },
        "slots": slots,
        "threads": len(os.sched_getaffinity(0)),
        "tokenizer": folder.tokenizer_identity.sha256,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def policy_identity(
    folder: ModelFolder,
    inference_config_sha256: Sha256,
    served_model_id: str,
    adapter: tuple[str, Sha256] | None,
) -> BehaviorPolicyIdentity:
    """Return the identity of the base model or of an adapter.

    Args:
        folder: The model.
        inference_config_sha256: Digest of `inference_config`.
        served_model_id: Name in `/v1/models`.
        adapter: Name and content digest; None is the base.
    """
    return BehaviorPolicyIdentity(
        served_model_id=served_model_id,
        base_model_sha256=folder.base_sha256,
        adapter=UNSET
        if adapter is None
        else AdapterIdentity(name=adapter[0], content_sha256=adapter[1]),
        inference_config_sha256=inference_config_sha256,
        implementation=implementation(),
    )
