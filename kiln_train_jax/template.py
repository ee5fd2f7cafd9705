"""A chat template rendered to token ids, foreign text kept inert.

The template is hostile until shown otherwise: it comes with a model, and runs in a
metered sandbox (`sandbox.py`). So are the messages: they are tokenised as plain text,
and special tokens come only from what the template itself writes. To tell the two apart
in the rendered string, every content is wrapped in marks that nobody can guess (fresh
random ones a rendering) before the template sees it, and the marks are cut out again
before anything is encoded. White space at the edges of a content stays outside of the
marks, so a template that trims still trims; an assistant turn's reasoning and answer
are marked apart, so a template that drops old reasoning still finds the `</think>`.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import jinja2
from msgspec import UNSET

from kiln_core.canonical import canonical_bytes, digest
from kiln_core.errors import InvalidRecord, UsageError
from kiln_train_jax.sandbox import MeteredEnvironment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kiln_core.records import ChatMessage
    from kiln_train_jax.tokenizer import Tokenizer

OPENER: Final = "<think>"
CLOSER: Final = "</think>"
FAILURES: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What compiling or rendering a template may end in."""
ROLES: Final = frozenset({"system", "user", "assistant", "tool"})


class Message(NamedTuple):
    """One chat message as a template sees it."""

    role: str
    content: str


def as_message(message: ChatMessage) -> Message:
    """Return a chat message as the template takes it.

    Raises:
        UsageError: It carries tool calls.
    """
    if message.tool_calls is not UNSET:
        raise UsageError("tool_calls in messages are not supported")
    return Message(message.role, message.content)


class Rendering(NamedTuple):
    """A prompt as token ids."""

    tokens: list[int]
    spans: tuple[tuple[int, int], ...]
    """Per message `[start, stop)` of its content in `tokens`, edges of white space
    excluded; empty where the template left it out or there is none."""


class ChatTemplate:
    """A compiled chat template, and what its model can do."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, variables: Mapping[str, str]
    ) -> None:
        """Compile a template and probe it for a thinking mode.

        Args:
            source: The jinja2 text.
            tokenizer: Encodes both what it writes and what it is given.
            variables: `bos_token`, `eos_token` and the like.

        Raises:
            InvalidRecord: The template does not compile or cannot render a plain turn.
        """
        self.source = source
        self.sha256 = digest(source.encode())
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._environment = MeteredEnvironment()
        self._environment.filters["tojson"] = self._environment.metered(_to_json)
        self._environment.globals["raise_exception"] = _refuse
        self._environment.globals["strftime_now"] = _epoch
        try:
            self._template = self._environment.from_string(source)
        except (SyntaxError, *FAILURES) as error:
            raise InvalidRecord(f"the chat template is invalid: {error}") from error
        self.thinking = self._opens_reasoning()
        """Whether the model has a thinking mode: the template opens one on request."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> Rendering:
        """Render messages to token ids.

        Args:
            messages: The conversation so far.
            add_generation_prompt: End with the opening of an assistant turn.
            enable_thinking: Ask the template for reasoning; without effect on a
                template that has no thinking mode.

        Raises:
            UsageError: A role is unknown, there is no message, or the template refuses
                the conversation.
        """
        self._check(messages)
        nonce = _fresh_nonce(messages)
        marked = [
            {"role": message.role, "content": _mark(message, index, nonce)}
            for index, message in enumerate(messages)
        ]
        try:
            text = self._text(
                marked,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=enable_thinking and self.thinking,
            )
        except FAILURES as error:
            raise UsageError(f"the chat template refused: {error}") from error
        return self._encode(text, nonce, len(messages))

    def _check(self, messages: Sequence[Message]) -> None:
        if not messages:
            raise UsageError("messages is empty")
        for message in messages:
            if message.role not in ROLES:
                raise UsageError(
                    f"role {message.role!r} is unknown",
                    hint=f"one of {', '.join(sorted(ROLES))}",
                )

    def _text(self, messages: list[dict[str, str]], **flags: bool) -> str:
        variables = {"messages": messages, **self._variables, **flags}
        return self._environment.render(self._template, variables)

    def _encode(self, text: str, nonce: str, count: int) -> Rendering:
        """Cut the marks out, encode each piece by its kind, note the spans."""
        tokens: list[int] = []
        spans: list[tuple[int, int] | None] = [None] * count
        pieces = re.split(f"({nonce}\\d+[<>])", text)
        inside: int | None = None
        for piece in pieces:
            if piece.startswith(nonce):
                index = int(piece[len(nonce) : -1])
                inside = index if piece.endswith("<") else None
            elif inside is None:
                tokens += self._tokenizer.encode_markup(piece)
            else:
                start = len(tokens)
                tokens += self._tokenizer.encode_text(piece)
                known = spans[inside]
                spans[inside] = (known[0] if known else start, len(tokens))
        return Rendering(tokens, _filled(spans))

    def _opens_reasoning(self) -> bool:
        """Probe a one-turn prompt: does asking for thought leave reasoning open?

        Raises:
            InvalidRecord: The template cannot render one user turn.
        """
        turn = [{"role": "user", "content": "x"}]
        try:
            text = self._text(turn, add_generation_prompt=True, enable_thinking=True)
        except FAILURES as error:
            raise InvalidRecord(f"the chat template does not work: {error}") from error
        opened = text.rfind(OPENER)
        return opened >= 0 and CLOSER not in text[opened:]


def _filled(spans: list[tuple[int, int] | None]) -> tuple[tuple[int, int], ...]:
    """Give messages without content an empty span where the one before ended."""
    filled: list[tuple[int, int]] = []
    for span in spans:
        last = filled[-1][1] if filled else 0
        filled.append((last, last) if span is None else span)
    return tuple(filled)


def _mark(message: Message, index: int, nonce: str) -> str:
    """Wrap what a message says; reasoning and answer of an assistant apart."""
    if message.role == "assistant" and CLOSER in message.content:
        thought, _, answer = message.content.partition(CLOSER)
        parts = [_wrap(part, index, nonce) for part in (thought, answer)]
        return CLOSER.join(parts)
    return _wrap(message.content, index, nonce)


def _wrap(text: str, index: int, nonce: str) -> str:
    """Put marks around a text, its outer white space left outside."""
    core = text.strip()
    if not core:
        return text
    before, _, after = text.partition(core)
    return f"{before}{nonce}{index}<{core}{nonce}{index}>{after}"


def _fresh_nonce(messages: Sequence[Message]) -> str:
    """Return a mark that occurs in no message, bound to one rendering."""
    while True:
        nonce = f"\ue000{secrets.token_hex(16)}:"
        if not any(nonce in message.content for message in messages):
            return nonce


def _to_json(value: Any, **_options: Any) -> str:
    """Stand in for the `tojson` filter templates expect (no HTML escapes)."""
    return canonical_bytes(value).decode()


def _refuse(message: str) -> NoReturn:
    """Let a template refuse a conversation.

    Raises:
        TemplateError: Always; jinja2's own, so that one handler serves both.
    """
    raise jinja2.TemplateError(message)


def _epoch(pattern: str) -> str:
    """Give templates a date that never changes: prompts must be reproducible."""
    return datetime.fromtimestamp(0, UTC).strftime(pattern)
