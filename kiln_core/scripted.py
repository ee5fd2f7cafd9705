"""A policy that follows a script: for tests, interoperability and first steps.

It needs no model, and it has an identity all the same: the digest of its description.
Turn ``t`` of an episode answers with one of the replies of ``turns[t mod len]``, chosen
by the turn's generation seed, so candidates of a group differ and a collection repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

from kiln_core.canonical import JsonValue, digest_json
from kiln_core.engine import GuideReport
from kiln_core.ports import PolicyDescription, PolicyReply, PolicyRequest
from kiln_core.provenance import BehaviorPolicyIdentity

__all__ = ["ScriptedPolicy"]

IMPLEMENTATION: Final = "kiln/scripted"


class ScriptedPolicy:
    """Answers from a list of replies.

    Args:
        turns: Per turn, the replies it may give, at least one each.
        reasoning: Reasoning that precedes every reply where thinking is on; None for a
            policy without a thinking mode.
    """

    def __init__(
        self, turns: Sequence[Sequence[str]], *, reasoning: str | None = None
    ) -> None:
        if not turns or not all(turns):
            raise ValueError("a script needs at least one reply per turn")
        self.turns = tuple(tuple(replies) for replies in turns)
        self.reasoning = reasoning

    @cached_property
    def identity(self) -> BehaviorPolicyIdentity:
        """Who this script is."""
        description: JsonValue = {
            "policy": "scripted",
            "turns": [list(replies) for replies in self.turns],
            "reasoning": self.reasoning,
        }
        return BehaviorPolicyIdentity(
            served_model_id="scripted",
            base_model_sha256=digest_json(description),
            inference_config_sha256=digest_json({"policy": "scripted"}),
            implementation=IMPLEMENTATION,
        )

    async def describe(self) -> PolicyDescription:
        """Say who answers."""
        return PolicyDescription(
            kiln_url="in-process",
            behavior_policy=self.identity,
            thinking=self.reasoning is not None,
            concurrency=256,
        )

    async def guide(self, action_schema: JsonValue, max_tokens: int) -> GuideReport:
        """Decline: a script is not decoded."""
        return GuideReport(guide_sha256=None)

    async def complete(self, request: PolicyRequest) -> PolicyReply:
        """Answer one turn."""
        return self.reply(request)

    def content(self, request: PolicyRequest, turn: int) -> str:
        """Return what is answered; a subclass may decide by what it reads.

        Args:
            request: The turn.
            turn: Its number in the episode, from 0.
        """
        replies = self.turns[turn % len(self.turns)]
        # The seed's high bits differ between candidates, its low ones often do not.
        return replies[(request.seed >> 32 ^ request.seed) % len(replies)]

    def reply(self, request: PolicyRequest) -> PolicyReply:
        """Answer one turn at once."""
        # messages are system, user, then an action and a result per turn
        turn = (len(request.messages) - 2) // 2
        content = self.content(request, turn)
        # a script has no tokens; what is new to it, in characters, stands for them
        new = request.messages[-1 if turn else 0 :]
        read = sum(len(message.content) for message in new)
        return PolicyReply(
            content=content,
            reasoning=self.reasoning if request.thinking else None,
            total_tokens=read + len(content),
            latency_ms=0.0,
            behavior_policy=self.identity,
        )
