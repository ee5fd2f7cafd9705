"""The engine `jax` of `kiln.engines`: serving from `engine.py`, training from `job.py`.

Both share one base model in memory. Training runs in the caller's thread; the device
loop goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kiln_core.engine import (
    EngineSettings,
    GenerationRequest,
    TrainingJob,
    TrainingOutcome,
    TrainingProgress,
)
from kiln_core.grpo import GrpoConfig
from kiln_train_jax import job as jobs
from kiln_train_jax.engine import JaxEngine
from kiln_train_jax.memory import give_back
from kiln_train_jax.replaying import TurnReplayer
from kiln_train_jax.rows import Rules
from kiln_train_jax.template import CLOSER, OPENER

__all__ = ["JaxPlugin", "create_engine"]


class JaxPlugin(JaxEngine):
    """A model that samples, holds adapters, and trains them."""

    def admit_training(self, config: GrpoConfig) -> None:
        """Check everything about a configuration that cannot change later.

        Raises:
            UsageError: This trainer does not do what it asks for.
            Conflict: The output adapter exists already.
        """
        jobs.admit_training(self, config)

    def train(
        self,
        job: TrainingJob,
        report: Callable[[TrainingProgress], None],
        cancelled: Callable[[], bool],
    ) -> TrainingOutcome:
        """Run a job to its end in this thread, beside serving.

        Raises:
            TrainingError: It failed or was cancelled; nothing servable is left.
        """
        replayer = TurnReplayer(
            self.rules_of_turn,
            self.opens_reasoning,
            self.folder.config.vocab_size,
            self.folder.tokenizer.encode_text,
        )
        try:
            return jobs.run_job(self, replayer, job, report, cancelled)
        finally:
            give_back()

    def rules_of_turn(
        self, schema: Any, max_tokens: int, *, thinking: bool
    ) -> tuple[Rules, str | None]:
        """Return the rules a turn was sampled under, and the digest of its guide.

        Args:
            schema: What guided it; None when nothing did.
            max_tokens: Bound of the turn.
            thinking: Whether its prompt left reasoning open.
        """
        request = GenerationRequest(
            messages=(), seed=0, max_tokens=max_tokens, action_schema=schema
        )
        rules = self._rules(request, thinking=thinking)
        return rules, None if rules.guide is None else rules.guide.sha256

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Say whether a prompt leaves reasoning open for the model to continue."""
        if not self.has_thinking_mode:
            return False
        encode = self.folder.tokenizer.encode_markup
        opened = _last(prompt, encode(OPENER))
        return opened >= 0 and opened > _last(prompt, encode(CLOSER))


def _last(tokens: Sequence[int], run: Sequence[int]) -> int:
    """Return where `run` last begins in `tokens`, -1 where it does not stand."""
    width = len(run)
    for start in range(len(tokens) - width, -1, -1):
        if list(tokens[start : start + width]) == list(run):
            return start
    return -1


def create_engine(settings: EngineSettings) -> JaxPlugin:
    """Create the engine that settings describe.

    Args:
        settings: Which model, where its adapters lie, how many slots.

    Raises:
        FileUnreadable: A file of the model is missing.
        InvalidRecord: A file of the model is not what it should be.
        UsageError: A setting does not fit the model.
    """
    return JaxPlugin(settings)
