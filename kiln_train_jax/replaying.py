"""Replaying a recorded turn through the sampler's own machine.

The trainer must renormalise each sampled token over exactly the set it was drawn from.
It does not keep those sets: it walks the recorded ids through the `Row` that drew them,
with the same grammar from the same schema, and reads the set at every draw. A record
that the machine cannot follow was not sampled this way, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kiln_core.canonical import read_json
from kiln_core.errors import KilnError, MalformedJson, TrainingError
from kiln_core.prompt import schema_text
from kiln_core.records import AgenticGroup
from kiln_core.trace import SamplingTransform
from kiln_train_jax.guide import mask_words
from kiln_train_jax.rows import Row, Rules, Sampling

__all__ = ["TurnReplayer"]


class RulesOfTurn(Protocol):
    """Returns the rules of a generation, and the digest of its guide."""

    def __call__(
        self, schema: Any, max_tokens: int, *, thinking: bool
    ) -> tuple[Rules, str | None]: ...


class TurnReplayer:
    """Recovers the allowed sets of recorded turns.

    Args:
        rules_for: Returns the rules a turn was sampled under.
        opens_reasoning: Says whether a prompt leaves reasoning open.
        vocabulary: Number of token ids.
        encode: Returns the ids of plain text, as the template writes it.
    """

    def __init__(
        self,
        rules_for: RulesOfTurn,
        opens_reasoning: Callable[[Sequence[int]], bool],
        vocabulary: int,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self._rules_for = rules_for
        self._opens_reasoning = opens_reasoning
        self._words = mask_words(vocabulary)
        self._encode = encode

    def find(self, text: str, prompt: Sequence[int], start: int) -> tuple[int, int]:
        """Return where a message's text stands last in a prompt, after `start`.

        The template encodes what a message says apart from its own markup, its outer
        white space left out.

        Args:
            text: What the message says.
            prompt: Token ids.
            start: Where to begin.

        Raises:
            TrainingError: It is not there.
        """
        ids = list(self._encode(text.strip()))
        for at in range(len(prompt) - len(ids), start - 1, -1):
            if list(prompt[at : at + len(ids)]) == ids:
                return at, at + len(ids)
        raise TrainingError("a harness message does not stand in the next prompt")

    def masks(
        self,
        group: AgenticGroup,
        guide_sha256: str | None,
        sampling: SamplingTransform,
        turn: tuple[Sequence[int], Sequence[int], Sequence[float | None]],
    ) -> dict[int, np.ndarray]:
        """Return the allowed set of every sampled token of a turn.

        Args:
            group: Its prompt holds the schema.
            guide_sha256: What guided the turn; None when nothing did.
            sampling: How it was sampled.
            turn: Prompt ids, action ids, and log-probabilities.

        Returns:
            int32 `[words]` bit masks by index in the action.

        Raises:
            TrainingError: The turn cannot have been sampled as recorded.
        """
        prompt, action, logprobs = turn
        schema = None if guide_sha256 is None else _schema(group)
        rules, digest = self._rules_for(
            schema, sampling.max_tokens, thinking=self._opens_reasoning(prompt)
        )
        if digest != guide_sha256:
            raise TrainingError(
                "the grammar of the recorded schema is not the one that guided the "
                "corpus",
                expected=guide_sha256,
                found=digest,
            )
        transform = Sampling(
            0, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
        )
        try:
            return self._walk(prompt, action, logprobs, rules, transform)
        except TrainingError:
            raise
        except KilnError as error:
            raise TrainingError(
                f"a recorded turn left its grammar: {error.message}"
            ) from error

    def _walk(
        self,
        prompt: Sequence[int],
        action: Sequence[int],
        logprobs: Sequence[float | None],
        rules: Rules,
        sampling: Sampling,
    ) -> dict[int, np.ndarray]:
        row = Row(prompt, sampling, rules, lambda _: "")
        masks: dict[int, np.ndarray] = {}
        while len(row.action) < len(action):
            index = len(row.action)
            if row.finish_reason is not None:
                break
            if logprobs[index] is not None:
                words = np.zeros(self._words, np.int32)
                row.write_mask(words)
                if not _has(words, action[index]):
                    raise TrainingError(f"token {index} of a turn was not allowed")
                masks[index] = words
            row.take(action[index], 0.0)
        if row.action != list(action):
            raise TrainingError("a recorded turn differs where the grammar forces it")
        return masks


def _schema(group: AgenticGroup) -> Any:
    text = schema_text(group.messages)
    try:
        return read_json(text, "the schema in the prompt")
    except MalformedJson as error:
        raise TrainingError(
            "the prompt of a guided group holds no action schema"
        ) from error


def _has(words: np.ndarray, token: int) -> bool:
    return bool(words[token // 32] >> (token % 32) & 1)
