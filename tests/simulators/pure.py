"""An OpenEnv environment and a policy without sockets, clocks or models.

`PureServer` answers text frames with text frames; `play` drives one episode of the core
through `kiln_core.session` against it. Policies answer from a script and carry exact
token ids of a toy tokenizer, one id per UTF-8 byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kiln_core.discovery import DiscoveryDocuments, environment_url, inspection
from kiln_core.episode import Ask, Episode, EpisodeSetup, run_episode
from kiln_core.limits import Lease, RetainedBudget
from kiln_core.ports import PolicyReply
from kiln_core.provenance import (
    ROLLOUT_PROVENANCE_SCHEMA,
    ActionToken,
    AdapterIdentity,
    BehaviorPolicyIdentity,
    RolloutProvenance,
    SamplingParameters,
    ThinkingBudget,
    TokenizerIdentity,
    scored_payload_digest,
)
from kiln_core.records import ChatMessage
from kiln_core.session import Event, Session
from kiln_core.trace import TurnSample

COUNTER_ACTION = {
    "title": "CounterAction",
    "type": "object",
    "properties": {
        "amount": {"type": "integer", "minimum": 0, "maximum": 9, "title": "Amount"},
        "metadata": {"type": "object", "additionalProperties": True},
    },
    "required": ["amount"],
    "additionalProperties": False,
}
LAMP_ACTION = {
    "type": "object",
    "properties": {"lamp": {"enum": ["red", "green", "blue"]}},
    "required": ["lamp"],
    "additionalProperties": False,
}


def documents(
    name: str, action: Any, *, extra: Mapping[str, Any] | None = None
) -> DiscoveryDocuments:
    """Return the raw discovery documents of a server."""
    return DiscoveryDocuments(
        metadata={
            "name": name,
            "description": f"Play {name}.",
            "version": "1",
            "author": None,
            **(extra or {}),
        },
        schema={
            "action": action,
            "observation": {"type": "object"},
            "state": {"type": "object"},
            "reset_observation": {"type": "object"},
        },
        environments=[name],
        openapi={"openapi": "3.1.0", "info": {"title": name, "version": "1.0.0"}},
    )


COUNTER = documents("counter", COUNTER_ACTION)
LAMPS = documents("lamps", LAMP_ACTION)
COUNTER_INSPECTION = inspection(
    environment_url("http://127.0.0.1:8001"), COUNTER, "none"
)
LAMPS_INSPECTION = inspection(environment_url("http://127.0.0.1:8002"), LAMPS, "none")


def observation_frame(
    observation: Any, reward: Any, done: Any, **more: Any
) -> dict[str, Any]:
    """Return an observation frame."""
    data = {"observation": observation, "reward": reward, "done": done, **more}
    return {"type": "observation", "data": data}


def error_frame(code: str, message: str = "no", **more: Any) -> dict[str, Any]:
    """Return an error frame."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def counter_answer(seed: int, actions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Answer as a counter: amounts add up to four, 8 is illegal, 9 breaks it.

    Rewards come in every JSON type that the wire allows.
    """
    amounts = [action["amount"] for action in actions if action["amount"] < 8]
    if not actions:
        return observation_frame({"total": 0, "seed": seed % 2}, None, False)
    last = actions[-1]["amount"]
    if last == 8:
        return error_frame(
            "EXECUTION_ERROR", "illegal amount", errors=[{"b": 1, "a": [1.0]}]
        )
    if last == 9:
        return error_frame("SESSION_ERROR", "it broke")
    reward = [1, 0.25, True, None, False, 2**60 + 1][last % 6]
    total = sum(amounts)
    more = {"metadata": {"z": 1, "a": None}} if last == 3 else {}
    return observation_frame({"total": total, "far": 1e16}, reward, total >= 4, **more)


def lamp_answer(seed: int, actions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Answer as a lamp chooser that speaks through ``input_text``."""
    text = f"Ticket {seed}: which lamp? <tool>&</think>\u2028 \u00e9"
    if not actions:
        return observation_frame({"input_text": text, "ticket": seed}, 0.0, False)
    right = ("red", "green", "blue")[seed % 3]
    reward = 1.0 if actions[-1]["lamp"] == right else -0.0
    return observation_frame(
        {"input_text": f"again, {seed}"}, reward, len(actions) >= 2 and reward > 0
    )


Answer = Callable[[int, Sequence[dict[str, Any]]], dict[str, Any]]


@dataclass
class PureServer:
    """One session of a server; deterministic by seed."""

    answer: Answer = counter_answer
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Frames by moment: ``reset``, ``step 1``, ``state``."""
    seed: int = 0
    actions: list[dict[str, Any]] = field(default_factory=list)
    received: list[str] = field(default_factory=list)

    def handle(self, text: str) -> str | None:
        """Take one text frame; return the answering frame."""
        self.received.append(text)
        frame = json.loads(text)
        kind = frame["type"]
        if kind == "close":
            return None
        if kind == "reset":
            self.seed, self.actions = frame["data"].get("seed", 0), []
        if kind == "step":
            self.actions.append(frame["data"])
        moment = f"step {len(self.actions)}" if kind == "step" else kind
        if moment in self.overrides:
            return _text(self.overrides[moment])
        if kind == "state":
            state = {"step_count": len(self.actions), "episode_id": None}
            return _text({"type": "state", "data": state})
        return _text(self.answer(self.seed, self.actions))


def _text(frame: Any) -> str:
    if isinstance(frame, str):
        return frame
    return json.dumps(frame)  # noqa: TID251 - the other side of the wire


def sha(letter: str) -> str:
    """Return a made-up digest."""
    return "sha256:" + letter * 64


BASE_POLICY = BehaviorPolicyIdentity(
    served_model_id="toy",
    base_model_sha256=sha("a"),
    inference_config_sha256=sha("b"),
    implementation="kiln/test",
)
ADAPTER_POLICY = BehaviorPolicyIdentity(
    served_model_id="toy",
    base_model_sha256=sha("a"),
    adapter=AdapterIdentity(name="first", content_sha256=sha("c")),
    inference_config_sha256=sha("b"),
    implementation="kiln/test",
)
TOKENIZER = TokenizerIdentity(
    vocab_sha256=sha("d"), config_sha256=sha("e"), chat_template_sha256=sha("f")
)
ROLE, END = 256, 257
"""Ids of the toy tokenizer beyond its bytes: a message begins, a message ends."""


def render(
    messages: Sequence[ChatMessage],
) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Return the ids of a prompt, and where each message's content stands."""
    ids: list[int] = []
    spans = []
    for message in messages:
        ids.append(ROLE)
        start = len(ids)
        ids += message.content.encode()
        spans.append((start, len(ids)))
        ids.append(END)
    return [*ids, ROLE], tuple(spans)


def toy_sample(
    messages: Sequence[ChatMessage],
    content: str,
    *,
    seed: int = 0,
    policy: BehaviorPolicyIdentity = BASE_POLICY,
    max_tokens: int = 64,
    guide: str | None = None,
) -> TurnSample:
    """Return the exact ids of a turn; every third is forced by grammar or budget."""
    prompt, spans = render(messages)
    action = [*content.encode(), END]
    tokens = [
        ActionToken(
            sequence_index=len(prompt) + index,
            token_id=token,
            source="forced" if forced else "sampled",
            behavior_logprob=None if forced else -0.125 * (index % 3),
        )
        for index, token in enumerate(action)
        for forced in [token == END and index > 0 and index % 2 == 0]
    ]
    return TurnSample(
        provenance=RolloutProvenance(
            schema=ROLLOUT_PROVENANCE_SCHEMA,
            input_token_ids=prompt + action,
            prompt_token_count=len(prompt),
            prompt_messages_sha256=sha("1"),
            scored_payload_sha256=scored_payload_digest(content, []),
            action_tokens=tokens,
            behavior_policy=policy,
            tokenizer=TOKENIZER,
            sampling=SamplingParameters(
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                max_tokens=max_tokens,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                stop=[],
                thinking_budget=ThinkingBudget(max_tokens=8, close_token_ids=[END]),
            ),
            seed=seed,
            generation_backend="toy",
        ),
        content_spans=spans,
        guide_sha256=guide,
    )


@dataclass
class ToyPolicy:
    """Answers turn ``t`` with ``replies[t]``, the last for ever.

    A reply is text, or a pair of reasoning and text; text None means that reasoning
    was never closed.
    """

    replies: Sequence[str | tuple[str, str | None]]
    policy: BehaviorPolicyIdentity = BASE_POLICY
    tokens: bool = True
    max_tokens: int = 64
    guide: str | None = None
    asked: list[Ask] = field(default_factory=list)

    def reply(self, ask: Ask) -> PolicyReply:
        """Answer one turn."""
        self.asked.append(ask)
        chosen = self.replies[min(ask.step_index, len(self.replies) - 1)]
        reasoning, content = chosen if isinstance(chosen, tuple) else (None, chosen)
        said = (reasoning or "") + (content or "")
        sample = toy_sample(
            ask.messages,
            said,
            policy=self.policy,
            max_tokens=self.max_tokens,
            guide=self.guide,
        )
        return PolicyReply(
            content=content,
            reasoning=reasoning,
            total_tokens=len(sample.provenance.input_token_ids),
            latency_ms=1.5 + ask.step_index,
            behavior_policy=self.policy,
            sample=sample if self.tokens else None,
        )


def play(
    setup: EpisodeSetup,
    server: PureServer,
    policy: ToyPolicy,
    lease: Lease | None = None,
) -> Episode:
    """Drive one episode to its end."""
    session = Session()
    generator = run_episode(setup, lease or Lease(RetainedBudget()))
    response: Event | PolicyReply | None = None
    request = next(generator)
    while True:
        if isinstance(request, Ask):
            response = policy.reply(request)
        else:
            answer = server.handle(session.send(request))
            response = None if answer is None else session.receive(answer)
        try:
            request = generator.send(response)
        except StopIteration as stop:
            episode: Episode = stop.value
            return episode
