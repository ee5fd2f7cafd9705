"""Ids that were sampled are the ids that are kept and trained, whatever text says."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import numpy as np

from kiln_core.dataset import read_groups
from kiln_core.drive.collect import collect
from kiln_core.ports import PolicyReply, PolicyRequest
from kiln_core.provenance import ActionToken
from kiln_core.records import ChatMessage
from kiln_core.scripted import ScriptedPolicy
from kiln_core.trace import TurnSample
from kiln_train_jax.units import training_units
from tests.drive.collection import QUICK, adds, collection, verified
from tests.simulators.environment import Simulator
from tests.simulators.pure import END, ROLE, toy_sample

MERGED = 300
"""One id for the bytes ``am``; its two bytes are ids too."""
PAIR = b"am"
MASK = np.full(10, -1, np.int32)


def encode(text: str) -> list[int]:
    """Return the ids a tokenizer makes of text: it always merges."""
    ids: list[int] = []
    for index, part in enumerate(text.encode().split(PAIR)):
        ids += [MERGED] * (index > 0) + list(part)
    return ids


def sampled(turn: int, text: str) -> list[int]:
    """Return the ids a model drew for a text: two bytes in the first turn."""
    return encode(text) if turn else list(text.encode())


def rendered(messages: tuple[ChatMessage, ...]) -> tuple[list[int], Any]:
    """Return a prompt in which earlier actions are the ids that were drawn."""
    ids: list[int] = []
    spans = []
    turn = 0
    for message in messages:
        ids.append(ROLE)
        start = len(ids)
        if message.role == "assistant":
            ids += sampled(turn, message.content)
            turn += 1
        else:
            ids += encode(message.content)
        spans.append((start, len(ids)))
        ids.append(END)
    return [*ids, ROLE], tuple(spans)


class MergingPolicy(ScriptedPolicy):
    """Draws one text as other ids than encoding it again would give."""

    async def complete(self, request: PolicyRequest) -> PolicyReply:
        reply = self.reply(request)
        assert reply.content is not None
        turn = (len(request.messages) - 2) // 2
        prompt, spans = rendered(request.messages)
        action = [*sampled(turn, reply.content), END]
        toy = toy_sample(
            request.messages,
            reply.content,
            policy=self.identity,
            max_tokens=request.max_tokens,
        )
        provenance = msgspec.structs.replace(
            toy.provenance,
            input_token_ids=prompt + action,
            prompt_token_count=len(prompt),
            action_tokens=[
                ActionToken(
                    sequence_index=len(prompt) + index,
                    token_id=token,
                    source="sampled",
                    behavior_logprob=-0.5,
                )
                for index, token in enumerate(action)
            ],
        )
        sample = TurnSample(provenance=provenance, content_spans=spans)
        return msgspec.structs.replace(reply, sample=sample)


class OpenReplayer:
    """Allows every token everywhere."""

    def masks(self, group: Any, guide: Any, sampling: Any, turn: Any) -> Any:
        _, action, logprobs = turn
        return {i: MASK for i in range(len(action)) if logprobs[i] is not None}


def test_sampled_ids_survive_to_the_trainer() -> None:
    """F7: https://github.com/huggingface/trl/issues/5224

    Also https://github.com/volcengine/verl/issues/3960 and
    https://github.com/huggingface/trl/pull/6250: a text has many encodings; only the
    one that was drawn has the recorded log-probabilities.
    """

    async def collected() -> Any:
        async with Simulator().serving() as server:
            policy = MergingPolicy(adds(1, 1, 2).turns)
            return await collect(collection(server.url), policy, times=QUICK)

    bundle = anyio.run(collected)
    verified(bundle)
    (group,) = read_groups(bundle.dataset)
    text = '{"amount": 1}'
    split = [*text.encode(), END]
    assert [*encode(text), END] != split
    rows = {}
    for unit in training_units(group, 0, "dr_grpo", OpenReplayer()):
        rows |= {row.rollout: (unit.prompt, row) for row in unit.rows}
    for candidate, completion in enumerate(group.completions):
        tokens = completion.trace.tokens
        turns = tokens.turns
        assert len(turns) == 3
        assert turns[0].action_token_ids == split
        assert turns[1].action_token_ids == [*encode(text), END]
        known = list(group.prompt_token_ids)
        drawn: list[int] = []
        environment: set[int] = set()
        for turn in turns:
            # a later prompt extends the exact earlier ids
            assert turn.prompt_prefix == len(known)
            known += turn.prompt_token_ids
            for start, stop in turn.observation_spans:
                environment.update(range(start, stop))
            # the mask is as long as the ids, at every turn
            assert len(turn.logprobs) == len(turn.action_token_ids)
            drawn += range(len(known), len(known) + len(turn.action_token_ids))
            known += turn.action_token_ids
        prompt, row = rows[0, candidate]
        assert prompt + row.tokens == known
        # everything drawn is trained, and nothing of the environment's text
        trained = [len(prompt) + s.position + 1 for s in row.sampled]
        assert trained == drawn
        assert [s.token for s in row.sampled] == [known[i] for i in drawn]
        assert environment
        assert not environment & set(trained)
        assert {len(prompt) + place for place in row.observed} == environment
