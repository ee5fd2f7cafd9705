"""Telling a caller what a row says while it says it, and what its tokens were.

A delta holds whole characters only, nothing that may become a stop text, and no token
whose characters are not told yet; the deltas of a generation, put together, are its
text. Reasoning and answer are told apart, close tokens left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kiln_core.engine import AnswerToken, Delta, TokenChoice
from kiln_train_jax.text import GrowingText, StopSearch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kiln_core.engine import Generation
    from kiln_train_jax.rows import Row

__all__ = ["AnswerStream", "Vocabulary", "answer_tokens", "shortest"]


class Vocabulary:
    """Token ids as text and as bytes."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        data_of: Callable[[int], bytes],
    ) -> None:
        self.decode = decode
        self._data_of = data_of

    def token(self, row: Row, index: int) -> AnswerToken:
        """Describe one token of a row's action.

        Args:
            row: It drew the token, or was forced to it.
            index: Place of the token in the action.
        """
        token = row.action_token(index)
        logprob = row.logprobs[index] or 0.0
        top = dict(row.tops.get(index, ()))
        if token in top:
            top[token] = logprob  # of the draw itself: one number for one thing
        elif index not in row.tops and row.top_logprobs:
            top = {token: logprob}  # nothing else was possible
        ranked = sorted(top.items(), key=lambda entry: -entry[1])
        data = self._data_of(token)
        return AnswerToken(
            token_id=token,
            text=data.decode(errors="replace"),
            data=data,
            logprob=shortest(logprob),
            top=tuple(self._choice(*entry) for entry in ranked),
        )

    def _choice(self, token: int, logprob: float) -> TokenChoice:
        data = self._data_of(token)
        return TokenChoice(
            token_id=token,
            text=data.decode(errors="replace"),
            data=data,
            logprob=shortest(logprob),
        )


class AnswerStream:
    """Follows one row and tells its caller.

    Args:
        listener: Told every delta.
        vocabulary: Of the model.
        stop_texts: Of the request.
    """

    def __init__(
        self,
        listener: Callable[[Delta], None],
        vocabulary: Vocabulary,
        stop_texts: Sequence[str],
    ) -> None:
        self._listener = listener
        self._vocabulary = vocabulary
        self._reasoning = GrowingText(vocabulary.decode)
        self._content = GrowingText(vocabulary.decode)
        self._stops = StopSearch(stop_texts)
        self._told_reasoning = self._told_content = self._told_tokens = 0
        self._read = 0
        """Tokens of the action that were looked at."""

    def follow(self, row: Row) -> None:
        """Tell what a row that goes on has said."""
        if row.finish_reason is not None:
            return  # `finish` tells the rest, without stop token and stop text
        self._read_reasoning(row)
        visible = self._read_content(row)
        reasoning = self._reasoning.settled[self._told_reasoning :]
        content = self._content.settled[self._told_content : visible]
        tokens: list[AnswerToken] = []
        if row.top_logprobs is not None and content:
            start = row.answer_start or 0
            ends = self._content.ends
            while self._told_tokens < len(ends) and ends[self._told_tokens] <= visible:
                tokens.append(self._vocabulary.token(row, start + self._told_tokens))
                self._told_tokens += 1
        self._told_reasoning += len(reasoning)
        self._told_content += len(content)
        self._tell(reasoning, content, tokens)

    def finish(self, generation: Generation) -> None:
        """Tell what is left of a finished generation."""
        reasoning = generation.reasoning_content or ""
        self._tell(
            reasoning[self._told_reasoning :],
            generation.content[self._told_content :],
            generation.answer_tokens[self._told_tokens :],
        )

    def _tell(
        self, reasoning: str, content: str, tokens: Sequence[AnswerToken]
    ) -> None:
        if reasoning or content or tokens:
            self._listener(
                Delta(reasoning=reasoning, content=content, tokens=tuple(tokens))
            )

    def _read_reasoning(self, row: Row) -> None:
        closing = len(row.rules.close_ids)
        if not row.rules.thinking:
            return
        if row.answer_start is None:
            # the last tokens may be the beginning of the close
            stop = len(row.logprobs) - (closing - 1)
        else:
            stop = row.answer_start - closing
        for index in range(self._read, stop):
            self._reasoning.append(row.action_token(index))
        self._read = max(self._read, stop)

    def _read_content(self, row: Row) -> int:
        """Read the answer on; return how much of it can be told."""
        if row.answer_start is None:
            return 0
        self._read = max(self._read, row.answer_start)
        for index in range(self._read, len(row.logprobs)):
            self._stops.advance(self._content.append(row.action_token(index)))
        self._read = len(row.logprobs)
        return len(self._content.settled) - self._stops.held


def answer_tokens(row: Row, vocabulary: Vocabulary) -> tuple[AnswerToken, ...]:
    """Describe the tokens of a finished row's answer.

    The stop token is left out, and so are tokens behind the beginning of a stop text.
    """
    if row.answer_start is None or row.top_logprobs is None:
        return ()
    count = len(row.logprobs)
    if count and row.action_token(count - 1) in row.rules.stop_ids:
        count -= 1
    indices = range(row.answer_start, count)
    if row.answer_stop is not None:
        text = GrowingText(vocabulary.decode)
        for index in indices:
            text.append(row.action_token(index))
        unsettled = [len(text.settled)] * (len(indices) - len(text.starts))
        starts = [*text.starts, *unsettled]
        ends = [*text.ends, *(length + 1 for length in unsettled)]
        inside = [
            start < row.answer_stop or end <= row.answer_stop
            for start, end in zip(starts, ends, strict=True)
        ]
        indices = indices[: sum(inside)]
    return tuple(vocabulary.token(row, index) for index in indices)


def shortest(logprob: float) -> float:
    """Return a float32 as the double its shortest decimal names."""
    return float(str(np.float32(logprob)))
