"""Seconds of one whole GRPO step, sampling included, against TRL's ``GRPOTrainer``.

Identical float32 weights from one folder, four completions a prompt, LoRA of rank 8 on
every linear layer, temperature 1, no KL term. A step of ours samples through the
serving engine, takes the optimizer step on the very ids and probabilities that were
sampled, and puts the new adapter where the next step samples from. Rewards are what
either side's random model said, counted the same way.

The peer's clock runs from one end of a step to the next, and stands still while ours is
measured in between. It has the better of one and two threads.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import jax

from benchmarks.harness import Result, Samples, Target, installed, result
from benchmarks.model_folder import write_model
from kiln_core.engine import EngineSettings, Generation, GenerationRequest
from kiln_core.grpo import AdamW, GrpoConfig, NoReference
from kiln_train_jax.adapters import Adapter, AdapterConfig
from kiln_train_jax.advantages import group_advantages
from kiln_train_jax.lora import TARGETS, init
from kiln_train_jax.plugin import JaxPlugin
from kiln_train_jax.trainer import GrpoTrainer
from kiln_train_jax.units import SampledToken, TrainingRow, TrainingUnit

SHAPES: Final = ((8, 64, 1 / 1.5, 1 / 2.5), (64, 128, 1 / 1.2, 1 / 1.8))
"""Completions a step, new tokens each, bar and goal of the ratio of seconds."""
PER_PROMPT: Final = 4
PROMPT_TOKENS: Final = 64
RANK: Final = 8
LEARNING_RATE: Final = 1e-5
WARM, ROUNDS = 3, 6
"""Steps before and while measuring; every second one with two threads of torch."""
LIBRARIES: Final = ("jax", "torch", "transformers", "trl", "peft")
PEER: Final = "TRL GRPOTrainer"

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def measure() -> Iterator[Result]:
    """Yield seconds a step for every shape."""
    with tempfile.TemporaryDirectory() as directory:
        folder = write_model(Path(directory))
        for completions, tokens, bar, goal in SHAPES:
            ours = _Kiln(folder, completions, tokens)
            try:
                yield result(
                    f"grpo_step_{completions}x{tokens}",
                    "s",
                    _samples(ours, folder),
                    PEER,
                    Target(bar=bar, goal=goal, higher_is_better=False),
                    LIBRARIES,
                )
            finally:
                ours.engine.stop()


def _samples(ours: _Kiln, folder: Path) -> Samples:
    if installed("trl") is None:
        for _ in range(WARM):
            ours.step()
        return Samples([ours.step() for _ in range(ROUNDS)], [])
    mine, theirs = [], []
    for own, other in _beside_trl(ours, folder):
        mine.append(own)
        theirs.append(other)
    mine, theirs = mine[WARM:], theirs[WARM:]
    by_threads = theirs[::2], theirs[1::2]
    return Samples(mine, min(by_threads, key=statistics.median))


def _reward(tokens: tuple[int, ...] | list[int]) -> float:
    """Return the share of even ids: it varies, and either side can be paid it."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def _prompt(number: int) -> tuple[int, ...]:
    """Return printable text as the embedded tokenizer has it: one id a byte."""
    return tuple(32 + (7 * number + place) % 90 for place in range(PROMPT_TOKENS))


class _Kiln:
    """Sampling and training on one engine, as the server does it."""

    def __init__(self, folder: Path, completions: int, tokens: int) -> None:
        settings = EngineSettings(
            model=str(folder),
            adapter_dir=folder / "adapters",
            slots=completions,
            context_tokens=1_024,
        )
        self.engine = JaxPlugin(settings)
        self.engine.start()
        self.completions, self.tokens = completions, tokens
        rules, _ = self.engine.rules_of_turn(None, tokens, thinking=False)
        self._mask = rules.free_mask
        self._seeds, self._steps = count(), count()
        config = GrpoConfig(
            lora_rank=RANK,
            lora_alpha=float(RANK),
            kl_coeff=0.0,
            kl_reference_policy=NoReference(),
            learning_rate=LEARNING_RATE,
            optimizer=AdamW(),
        )
        lora = init(
            self.engine.folder.config,
            rank=RANK,
            alpha=RANK,
            key=jax.random.key(0, impl="threefry2x32"),
        )
        self._trainer = GrpoTrainer(self.engine.folder.model, lora, config)
        self._serve()

    def step(self) -> float:
        """Sample, train and serve what was trained; return the seconds."""
        started = time.perf_counter()
        futures = [
            self.engine.submit(
                GenerationRequest(
                    messages=(),
                    prompt=_prompt(number // PER_PROMPT),
                    adapter="trained",
                    seed=next(self._seeds),
                    max_tokens=self.tokens,
                )
            )
            for number in range(self.completions)
        ]
        said = [future.result() for future in futures]
        groups = range(0, self.completions, PER_PROMPT)
        units = [
            self._unit(said[first : first + PER_PROMPT], index)
            for index, first in enumerate(groups)
        ]
        self._trainer.step(units)
        self._serve()
        return time.perf_counter() - started

    def _unit(self, group: list[Generation], index: int) -> TrainingUnit:
        rewards = [_reward(each.action_token_ids) for each in group]
        advantages = group_advantages(rewards, "dr_grpo")
        prompt = list(group[0].prompt_token_ids)
        rows = [
            TrainingRow(
                rollout=(index, candidate),
                tokens=[prompt[-1], *each.action_token_ids],
                sampled=[
                    SampledToken(place, token, self._mask, logprob)
                    for place, (token, logprob) in enumerate(
                        zip(each.action_token_ids, each.logprobs, strict=True)
                    )
                    if logprob is not None
                ],
                observed=[],
                observation_tokens=0,
                advantage=float(advantages[candidate]),
                temperature=1.0,
            )
            for candidate, each in enumerate(group)
        ]
        return TrainingUnit(prompt[:-1], rows, index)

    def _serve(self) -> None:
        config = AdapterConfig(
            base_model_name_or_path=self.engine.served_model_id,
            r=RANK,
            lora_alpha=float(RANK),
            target_modules=list(TARGETS),
        )
        revision = f"{next(self._steps):064x}"
        self.engine.bank.load("trained", Adapter(config, self._trainer.lora, revision))


def _beside_trl(ours: _Kiln, folder: Path) -> list[tuple[float, float]]:
    """Train with TRL, and take a step of ours between its steps; return both times."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    pairs: list[tuple[float, float]] = []

    class Between(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = self.started or time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = time.perf_counter() - self.started
            pairs.append((ours.step(), seconds))
            torch.set_num_threads(1 + len(pairs) % 2)
            self.started = time.perf_counter()

    def paid(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [_reward(tokens) for tokens in completion_ids]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.decode(_prompt(n)) for n in range(ours.completions)]
    with tempfile.TemporaryDirectory() as output:
        options = GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=ours.completions,
            num_generations=PER_PROMPT,
            max_completion_length=ours.tokens,
            max_steps=WARM + ROUNDS,
            learning_rate=LEARNING_RATE,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            loss_type="dr_grpo",
            scale_rewards=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=str(folder),
            reward_funcs=paid,
            args=options,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=RANK, lora_alpha=RANK, target_modules="all-linear"
            ),
            callbacks=[Between()],
        )
        trainer.train()
    return pairs
