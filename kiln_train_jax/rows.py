"""One request on its way through the engine: what it has, what it needs next.

A row is a pure machine. It says which tokens to feed by which program (`next_feed`)
and which tokens may follow (`write_mask`), and it is told what was drawn (`take`). The
sequence of programs depends on its own tokens alone:

* whole blocks of the prompt, then the rest of it, in the smallest feed that holds it;
* after a drawn token, that token and the forced run behind it in one feed, or a decode
  step if nothing was forced.

Forced runs skip the model: the tokens a grammar leaves no choice about have
log-probability exactly 0.0; those a thinking budget imposes have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kiln_train_jax.programs import BLOCK, FEEDS
from kiln_train_jax.text import GrowingText, StopSearch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kiln_train_jax.guide import Guide, GuideState


class Feed(NamedTuple):
    """The next tokens a row gives to the model."""

    tokens: Sequence[int]
    start: int
    length: int
    """Feed length of the program; 1 is the decode step."""
    is_block: bool
    """Whether it is a whole prefix block, which the pool may already hold."""
    draws: bool
    """Whether the drawn token is wanted."""


class Sampling(NamedTuple):
    """The sampling transform of a request."""

    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float


class Rules(NamedTuple):
    """What bounds a generation, fixed at admission."""

    max_tokens: int
    stop_ids: frozenset[int]
    end_id: int
    """The stop token a finished grammar is closed with."""
    free_mask: np.ndarray
    """int32 `[words]`: what may be said where no grammar rules."""
    stop_texts: tuple[str, ...] = ()
    guide: Guide | None = None
    thinking: bool = False
    """Whether the prompt left reasoning open."""
    thinking_budget: int | None = None
    close_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None
    """How many of the likeliest tokens are kept at each draw; None: nobody asks."""


class Row:
    """The state of one request."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        rules: Rules,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """Take the prompt and everything that is forced before the first draw.

        Args:
            prompt: Token ids.
            sampling: How tokens are drawn.
            rules: What bounds the generation.
            decode: Text of token ids, for stop texts.

        Raises:
            PolicyError: The grammar allows nothing.
        """
        self.sampling = sampling
        self.rules = rules
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.logprobs: list[float | None] = []
        self.fed = 0
        self.finish_reason: Literal["stop", "length"] | None = None
        self.answer_start: int | None = None
        """Index in the action where the answer begins; None while reasoning."""
        self.answer_stop: int | None = None
        """Characters of the answer before a stop text, if one ended it."""
        self.tops: dict[int, tuple[tuple[int, float], ...]] = {}
        """By index in the action: the likeliest tokens there, where that was asked."""
        self._text = GrowingText(decode)
        self._stops = StopSearch(rules.stop_texts)
        self._state: GuideState | None = None
        if not rules.thinking:
            self._begin_answer()
        elif rules.thinking_budget == 0:
            self._close_reasoning()
        self.boundary = BLOCK * ((len(self.tokens) - 1) // BLOCK)

    @property
    def top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are wanted at each draw."""
        return self.rules.top_logprobs

    def action_token(self, index: int) -> int:
        """Return one token of the action."""
        return self.tokens[self.prompt_length + index]

    @property
    def action(self) -> list[int]:
        """Token ids generated so far."""
        return self.tokens[self.prompt_length :]

    def next_feed(self) -> Feed:
        """Return what to feed next; a function of this row alone."""
        pending = len(self.tokens) - self.fed
        if self.fed < self.boundary or pending > BLOCK:
            tokens = self.tokens[self.fed : self.fed + BLOCK]
            return Feed(tokens, self.fed, BLOCK, self.fed < self.boundary, draws=False)
        length = 1 if pending == 1 else next(n for n in FEEDS if n >= pending)
        tokens = self.tokens[self.fed :]
        return Feed(tokens, self.fed, length, is_block=False, draws=True)

    def write_mask(self, words: np.ndarray) -> None:
        """Write which tokens may be drawn next, int32 `[words]`.

        Raises:
            PolicyError: The grammar allows nothing.
        """
        if self._state is None:
            words[:] = self.rules.free_mask
        else:
            self._state.write_mask(words)

    def take(self, token: int, logprob: float) -> None:
        """Accept a drawn token and everything that is forced behind it.

        Args:
            token: Its id.
            logprob: Of the distribution it was drawn from, float32.

        Raises:
            PolicyError: The grammar was left, or allows nothing.
        """
        self._append(token, logprob)
        if token in self.rules.stop_ids:
            self.finish_reason = "stop"
        elif self.answer_start is None:
            self._think(token)
        else:
            self._answer(token)
        self._check_length()

    def _answer(self, token: int) -> None:
        """Go on behind a drawn token of the answer."""
        if self._state is not None:
            self._state.consume([token])
        if not self._stopped_by(token):
            self._follow_grammar()

    def _think(self, token: int) -> None:
        """Leave reasoning when it is closed, or when its budget is spent."""
        closing = self.rules.close_ids
        if token == closing[-1] and tuple(self.action[-len(closing) :]) == closing:
            self._begin_answer()
        elif len(self.logprobs) == self.rules.thinking_budget:
            self._close_reasoning()

    def _close_reasoning(self) -> None:
        for token in self.rules.close_ids:
            self._append(token, None)
        self._begin_answer()

    def _begin_answer(self) -> None:
        self.answer_start = len(self.logprobs)
        if self.rules.guide is not None:
            self._state = self.rules.guide.start()
            self._follow_grammar()
        self._check_length()

    def _follow_grammar(self) -> None:
        """Append what the grammar leaves no choice about."""
        if self._state is None:
            return
        for token in self._state.take_forced():
            self._append(token, 0.0)
            if self._stopped_by(token):
                return
        if self._state.finished:
            self._append(self.rules.end_id, 0.0)
            self.finish_reason = "stop"

    def _stopped_by(self, token: int) -> bool:
        """Say whether the answer, with this token at its end, has a stop text."""
        if not self.rules.stop_texts:
            return False
        settled = self._text.append(token)
        self.answer_stop = self._stops.advance(settled, self._text.pending)
        if self.answer_stop is None:
            return False
        self.finish_reason = "stop"
        return True

    def _append(self, token: int, logprob: float | None) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def _check_length(self) -> None:
        """End a generation that reached its bound; forced tokens over it go."""
        over = len(self.logprobs) - self.rules.max_tokens
        if over > 0:
            del self.tokens[-over:], self.logprobs[-over:]
            self.finish_reason = "length"
        elif over == 0 and self.finish_reason is None:
            self.finish_reason = "length"
