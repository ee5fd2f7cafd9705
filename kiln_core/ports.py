"""What the core needs of a policy, and what it tells an observer.

A policy answers one turn at a time. Where it runs (a Kiln server, a script, another
OpenAI-compatible server) is its own business; the collector only relies on what stands
here. Implementations live at the edge and in frontends.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kiln_core.canonical import JsonValue
from kiln_core.engine import GuideReport
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.records import ChatMessage
from kiln_core.trace import TurnSample

__all__ = [
    "Observer",
    "Policy",
    "PolicyDescription",
    "PolicyReply",
    "PolicyRequest",
]


class PolicyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to answer."""

    messages: tuple[ChatMessage, ...]
    seed: int
    """Generation seed, 0 to 2^64-1."""
    max_tokens: int
    temperature: float
    thinking: bool
    thinking_budget_tokens: int | None
    action_schema: JsonValue | None
    """Guides decoding; None leaves the reply free."""


class PolicyReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one turn."""

    content: str | None
    """Text after any reasoning; None when reasoning was never closed."""
    reasoning: str | None = None
    """Reasoning text; None from a policy that does not reason."""
    total_tokens: int
    """Prompt and completion tokens."""
    latency_ms: float
    behavior_policy: BehaviorPolicyIdentity
    sample: TurnSample | None = None
    """Exact token ids; None from a policy that knows none."""


class PolicyDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Who a policy is, asked before and after collecting."""

    kiln_url: str
    """Where it is served, or ``in-process``."""
    behavior_policy: BehaviorPolicyIdentity
    thinking: bool
    """Whether it has a thinking mode."""
    concurrency: int
    """Requests it can work on at once."""


class Policy(Protocol):
    """Answers turns."""

    async def describe(self) -> PolicyDescription:
        """Say who would answer now."""

    async def guide(self, action_schema: JsonValue, max_tokens: int) -> GuideReport:
        """Say whether decoding can be guided by a schema."""

    async def complete(self, request: PolicyRequest) -> PolicyReply:
        """Answer one turn."""


class Observer(Protocol):
    """Is told how a collection proceeds; must return quickly and never raise."""

    def phase(self, name: str) -> None:
        """Enter a phase: inspecting, collecting, revalidating, publishing."""

    def rollout(self, completed: int, total: int, episode_return: float) -> None:
        """One more rollout is complete."""

    def step(self, completed: int, total: int, loss: float) -> None:
        """One more optimizer step is done."""

    def warning(self, text: str) -> None:
        """Something deserves attention but does not stop the work."""


class Silent:
    """An observer that says nothing."""

    def phase(self, name: str) -> None:
        """Ignore a phase."""

    def rollout(self, completed: int, total: int, episode_return: float) -> None:
        """Ignore a rollout."""

    def step(self, completed: int, total: int, loss: float) -> None:
        """Ignore a step."""

    def warning(self, text: str) -> None:
        """Ignore a warning."""
