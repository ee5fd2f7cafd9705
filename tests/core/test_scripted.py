from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kiln_core.plan import generation_seed
from kiln_core.ports import PolicyRequest
from kiln_core.records import ChatMessage
from kiln_core.scripted import ScriptedPolicy


def request(turn: int = 0, seed: int = 0, *, thinking: bool = False) -> PolicyRequest:
    message = ChatMessage(role="user", content="go")
    return PolicyRequest(
        messages=(message,) * (2 + 2 * turn),
        seed=seed,
        max_tokens=8,
        temperature=1.0,
        thinking=thinking,
        thinking_budget_tokens=None,
        action_schema=None,
    )


def test_turns_are_answered_in_order_and_again() -> None:
    policy = ScriptedPolicy([["a"], ["b"]])
    assert [policy.reply(request(turn)).content for turn in range(5)] == list("ababa")


def test_candidates_and_seeds_answer_differently() -> None:
    policy = ScriptedPolicy([list("abcdefgh")])
    replies = [
        policy.reply(request(seed=generation_seed(7, candidate, 0))).content
        for candidate in range(32)
    ]
    assert len(set(replies)) > 4
    assert replies == [
        policy.reply(request(seed=generation_seed(7, candidate, 0))).content
        for candidate in range(32)
    ]


def test_script_has_an_identity() -> None:
    one, same = ScriptedPolicy([["a"]]).identity, ScriptedPolicy([("a",)]).identity
    assert one == same
    assert one.base_model_sha256 != ScriptedPolicy([["b"]]).identity.base_model_sha256
    thinking = ScriptedPolicy([["a"]], reasoning="hm")
    assert one.base_model_sha256 != thinking.identity.base_model_sha256
    assert one.adapter_name is None


def test_reasoning_only_where_thinking_is_on() -> None:
    policy = ScriptedPolicy([["a"]], reasoning="hm")
    assert policy.reply(request(thinking=True)).reasoning == "hm"
    assert policy.reply(request(thinking=False)).reasoning is None


@pytest.mark.parametrize("turns", [[], [[]], [["a"], []]])
def test_script_needs_a_reply_per_turn(turns: Any) -> None:
    with pytest.raises(ValueError, match="at least one reply"):
        ScriptedPolicy(turns)


def test_it_is_a_policy() -> None:
    async def use() -> None:
        policy = ScriptedPolicy([["a"]], reasoning="hm")
        description = await policy.describe()
        assert description.behavior_policy == policy.identity
        assert description.thinking
        assert not (await ScriptedPolicy([["a"]]).describe()).thinking
        assert (await policy.guide({}, 5)).guide_sha256 is None
        reply = await policy.complete(request())
        assert (reply.content, reply.total_tokens) == ("a", 5)
        assert reply.behavior_policy == policy.identity

    asyncio.run(use())
