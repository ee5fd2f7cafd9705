"""Token ids of rollouts that were recorded without them.

Prompt and trajectory are rendered with the chat template once. An action's ids are
those of its content, reasoning included, the template's opener and closing markup
excluded; the environment's are those of observation content, harness warnings apart.
A template that leaves out or rewrites an action (old reasoning, mostly) is asked again
for each prefix of the conversation, and the action is encoded behind it: no action is
dropped.

Nothing here knows how a token was sampled: there is no log-probability, and the whole
vocabulary stands for the set it was drawn from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import UnsetType

from kiln_core.errors import TrainingError
from kiln_core.records import TurnSegment
from kiln_train_jax.template import CLOSER, Message, Rendering, as_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiln_core.records import AgenticGroup, ScoredRollout
    from kiln_core.trace import Span
    from kiln_train_jax.template import ChatTemplate
    from kiln_train_jax.tokenizer import Tokenizer

__all__ = ["RenderedRollout", "RenderedTurn", "RolloutRenderer"]


class Seen(NamedTuple):
    """Positions of what came back from a step."""

    warning: Span
    """Of harness text before it, often empty."""
    text: Span
    """Of the environment's own."""


class RenderedTurn(NamedTuple):
    """An action and everything before it."""

    prompt: list[int]
    action: list[int]
    """Empty for what came back after the last action."""
    seen: list[Seen]
    """What came back since the action before."""


class RenderedRollout(NamedTuple):
    """A rollout as token ids."""

    opening: list[int]
    """What the candidates of a group share."""
    turns: list[RenderedTurn]


class RolloutRenderer:
    """Renders rollouts without token ids.

    Args:
        template: Of the model that is trained.
        tokenizer: Of the same model.
        context_tokens: Longest row.
    """

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, context_tokens: int
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens

    def render(
        self, group: AgenticGroup, rollout: ScoredRollout, name: str
    ) -> RenderedRollout:
        """Return the token ids of a rollout.

        Args:
            group: Whose prompt it answers.
            rollout: Without token ids.
            name: What an error calls it.

        Raises:
            TrainingError: It is longer than the context, or the template changes text
                that a harness warning stands in.
            UsageError: The template refuses the conversation, or it has tool calls.
        """
        segments = _segments(rollout)
        opening = [as_message(message) for message in group.messages]
        messages = opening + [Message(_role(s), s.content) for s in segments]
        thinking = any(s.kind == "action" and CLOSER in s.content for s in segments)
        whole = self._template.render(
            messages, add_generation_prompt=False, enable_thinking=thinking
        )
        self._check_length(len(whole.tokens), name)
        kept = all(
            self._keeps(whole.tokens, span, segment.content)
            for span, segment in zip(whole.spans[len(opening) :], segments, strict=True)
            if segment.kind == "action"
        )
        if kept:
            return self._once(whole, segments, len(opening))
        return self._by_prefix(messages, segments, thinking=thinking, name=name)

    def _once(
        self, whole: Rendering, segments: Sequence[TurnSegment], before: int
    ) -> RenderedRollout:
        """Cut one rendering of everything into turns."""
        tokens, spans = whole
        turns: list[RenderedTurn] = []
        seen: list[Seen] = []
        for span, segment in zip(spans[before:], segments, strict=True):
            if segment.kind == "action":
                start, stop = span
                turns.append(RenderedTurn(tokens[:start], tokens[start:stop], seen))
                seen = []
            elif segment.kind == "observation":
                seen.append(self._seen(tokens, span, segment))
        if seen:
            turns.append(RenderedTurn(tokens, [], seen))
        start = spans[before][0] if segments else len(tokens)
        return RenderedRollout(tokens[: max(start, 1)], turns)

    def _by_prefix(
        self,
        messages: Sequence[Message],
        segments: Sequence[TurnSegment],
        *,
        thinking: bool,
        name: str,
    ) -> RenderedRollout:
        """Render what came before each action, and encode the action behind it."""
        before = len(messages) - len(segments)
        turns: list[RenderedTurn] = []
        since = opening = 0
        for index, segment in enumerate(segments):
            if segment.kind != "action":
                continue
            tokens, spans = self._template.render(
                messages[: before + index], enable_thinking=thinking
            )
            if not turns:
                opening = spans[before][0] if index else len(tokens)
            seen = [
                self._seen(tokens, spans[before + place], segments[place])
                for place in range(since, index)
                if segments[place].kind == "observation"
            ]
            action = self._encode(segment.content)
            self._check_length(len(tokens) + len(action), name)
            turns.append(RenderedTurn(tokens, action, seen))
            since = index + 1
        return RenderedRollout(turns[0].prompt[: max(opening, 1)], turns)

    def _keeps(self, tokens: list[int], span: Span, content: str) -> bool:
        """Say whether a rendering holds an action as it was said."""
        start, stop = span
        said = tokens[start:stop]
        if CLOSER not in content:
            return said == self._tokenizer.encode_text(content.strip())
        thought, _, answer = content.partition(CLOSER)
        first = self._tokenizer.encode_text(thought.strip())
        last = self._tokenizer.encode_text(answer.strip())
        if not first or not last:
            return False  # then the span misses the closer
        return said[: len(first)] == first and said[-len(last) :] == last

    def _encode(self, content: str) -> list[int]:
        """Return the ids of an action; the close of reasoning is the model's own."""
        encode = self._tokenizer.encode_text
        if CLOSER not in content or not self._template.thinking:
            return encode(content)
        thought, _, answer = content.partition(CLOSER)
        close = self._tokenizer.encode_markup(CLOSER)
        return [*encode(thought), *close, *encode(answer)]

    def _seen(self, tokens: list[int], span: Span, segment: TurnSegment) -> Seen:
        """Return where an observation stands, its warning prefix apart.

        Raises:
            TrainingError: The template changes what the prefix is counted in.
        """
        start, stop = span
        if isinstance(segment.warning_prefix_len, UnsetType):
            return Seen((start, start), span)
        core = segment.content.strip()
        if tokens[start:stop] != self._tokenizer.encode_text(core):
            raise TrainingError(
                "the chat template changes an observation that begins with a warning",
                hint="its warning_prefix_len cannot be found in the rendered text",
            )
        left = segment.content.partition(core)[0] if core else ""
        inside = max(segment.warning_prefix_len - len(left.encode()), 0)
        characters = len(core.encode()[:inside].decode(errors="ignore"))
        ends = [end for _, end in self._tokenizer.offsets(core)]
        cut = start + sum(end <= characters for end in ends)
        return Seen((start, cut), (cut, stop))

    def _check_length(self, length: int, name: str) -> None:
        if length > self._context_tokens:
            raise TrainingError(
                f"{name} has {length} tokens, the context of this engine is "
                f"{self._context_tokens}",
                hint="leave it out, or serve with a longer context",
            )


def _segments(rollout: ScoredRollout) -> list[TurnSegment]:
    """Return the trajectory; a rollout without one said its text."""
    if rollout.segments or not rollout.text:
        return rollout.segments
    return [TurnSegment(role="assistant", content=rollout.text, kind="action")]


def _role(segment: TurnSegment) -> str:
    return "assistant" if segment.kind == "action" else segment.role
