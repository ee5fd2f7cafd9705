"""The smoke test of a trained adapter: it speaks, and it is not the base.

Each prompt is continued greedily by a few tokens with the adapter, before anything is
published. Every logit must be finite, the answer must not be empty, and some logit of
some prompt must differ from the base's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kiln_core.errors import TrainingError
from kiln_train_jax.attention import FullContext
from kiln_train_jax.shapes import bucket
from kiln_train_jax.template import Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiln_train_jax.engine import JaxEngine
    from kiln_train_jax.lora import Lora

__all__ = ["check_adapter"]

PROMPTS: Final = ("Hello.",)
"""Continued where the configuration names no prompts."""
NEW_TOKENS: Final = 8
SMALLEST: Final = 64


def check_adapter(engine: JaxEngine, lora: Lora, prompts: Sequence[str]) -> None:
    """Continue prompts with an adapter.

    Args:
        engine: Whose base it belongs to.
        lora: 2-D leaves.
        prompts: What users say; empty takes a greeting.

    Raises:
        TrainingError: A logit is not finite, an answer is empty, or the adapter changes
            nothing.
    """
    graph, parameters = nnx.split(engine.folder.model)
    last = jax.jit(_last_logits, static_argnums=0)
    changed = False
    for prompt in prompts or PROMPTS:
        rendered = engine.folder.template.render([Message("user", prompt)])
        tokens = list(rendered.tokens)
        room = bucket(len(tokens) + NEW_TOKENS, SMALLEST)
        start = len(tokens)
        base = np.asarray(last(graph, parameters, _padded(tokens, room), start, None))
        for place in range(start, start + NEW_TOKENS):
            fed = _padded(tokens, room)
            logits = np.asarray(last(graph, parameters, fed, place, lora))
            _check_finite(logits, prompt)
            changed |= place == start and bool((logits != base).any())
            tokens.append(int(logits.argmax()))
            if tokens[-1] in engine.folder.stop_ids:
                break
        if tokens[start] in engine.folder.stop_ids:
            raise TrainingError(f"smoke test: the adapter does not answer {prompt!r}")
    if not changed:
        raise TrainingError("smoke test: the adapter answers exactly as the base does")


def _last_logits(
    graph: Any, parameters: Any, tokens: jax.Array, length: int, lora: Lora | None
) -> jax.Array:
    """Return the logits behind the first `length` of `tokens` `[1, time]`."""
    model = nnx.merge(graph, parameters)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    hidden, _ = model(tokens, places, FullContext(), lora)
    logits: jax.Array = model.logits(hidden[0, length - 1])
    return logits


def _padded(tokens: Sequence[int], room: int) -> np.ndarray:
    padded = np.zeros((1, room), np.int32)
    padded[0, : len(tokens)] = tokens
    return padded


def _check_finite(logits: np.ndarray, prompt: str) -> None:
    """Check logits.

    Raises:
        TrainingError: One is not finite.
    """
    if not np.isfinite(logits).all():
        raise TrainingError(f"smoke test: a logit after {prompt!r} is not finite")
