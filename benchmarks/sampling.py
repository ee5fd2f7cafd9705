"""New tokens per second with log-probabilities on, against transformers' ``generate``.

Identical float32 weights from one folder, prompts of one length, temperature 1. What
stops early counts only what it said, on both sides. The peer gets the better of one and
two threads, which wait without spinning, as they would on a machine that is shared.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Result, Target, installed, interleaved, result
from benchmarks.model_folder import write_model
from kiln_core.engine import EngineSettings, GenerationRequest
from kiln_train_jax.plugin import JaxPlugin

SHAPES: Final = ((8, 64, 2.0, 2.0), (64, 128, 2.0, 2.0))
"""Requests at a time, new tokens each, bar and goal."""
PROMPT_TOKENS: Final = 64
LIBRARIES: Final = ("jax", "torch", "transformers")
PEER: Final = "transformers generate"
THREADS: Final = (1, 2)
"""Of torch; ours has XLA's, one for each core."""

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def measure() -> Iterator[Result]:
    """Yield tokens per second for every shape."""
    with tempfile.TemporaryDirectory() as directory:
        folder = write_model(Path(directory))
        peer = _Transformers(folder) if installed("transformers") else None
        for requests, tokens, bar, goal in SHAPES:
            ours = _Kiln(folder, requests)
            try:
                yield _result(ours, peer, requests, tokens, Target(bar=bar, goal=goal))
            finally:
                ours.engine.stop()


def _result(
    ours: _Kiln, peer: _Transformers | None, requests: int, tokens: int, target: Target
) -> Result:
    def rate(generate: Callable[[int, int], int]) -> float:
        started = time.perf_counter()
        said = generate(requests, tokens)
        return said / (time.perf_counter() - started)

    def best() -> float:
        return max(
            (rate(partial(peer.generate, threads)) for threads in THREADS if peer),
            default=0.0,
        )

    samples = interleaved(lambda: rate(ours.generate), best)
    if peer is None:
        samples.peer.clear()
    return result(
        f"sampling_{requests}x{tokens}", "tokens/s", samples, PEER, target, LIBRARIES
    )


def _prompt(number: int) -> tuple[int, ...]:
    return tuple((7 * number + place) % 256 for place in range(PROMPT_TOKENS))


class _Kiln:
    def __init__(self, folder: Path, slots: int) -> None:
        settings = EngineSettings(
            model=str(folder),
            adapter_dir=folder / "adapters",
            slots=slots,
            context_tokens=1_024,
        )
        self.engine = JaxPlugin(settings)
        self.engine.start()
        self._asked = 0

    def generate(self, requests: int, tokens: int) -> int:
        futures = []
        for number in range(requests):
            self._asked += 1
            request = GenerationRequest(
                messages=(),
                prompt=_prompt(number),
                seed=self._asked,
                max_tokens=tokens,
            )
            futures.append(self.engine.submit(request))
        return sum(len(future.result().action_token_ids) for future in futures)


class _Transformers:
    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch: Any = torch
        load: Any = AutoModelForCausalLM.from_pretrained
        self._model = load(folder, dtype=torch.float32).eval()

    def generate(self, threads: int, requests: int, tokens: int) -> int:
        torch = self._torch
        torch.set_num_threads(threads)
        prompts = torch.tensor([_prompt(number) for number in range(requests)])
        with torch.inference_mode():
            answer = self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tokens,
                output_logits=True,
                return_dict_in_generate=True,
            )
            said = answer.sequences[:, PROMPT_TOKENS:]
            logprobs = torch.stack(answer.logits, dim=1).log_softmax(-1)
            logprobs.gather(-1, said[..., None])
        ends = said == self._model.generation_config.eos_token_id
        # what stands behind the first end of a row is filling
        return int((ends.cumsum(-1) - ends.long() == 0).sum())
