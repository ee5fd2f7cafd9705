"""Large valid bundles of several shapes, made in memory by the episode generator."""

from __future__ import annotations

import random
from typing import Any, Final

import msgspec

from kiln_core.actions import ActionSchema
from kiln_core.bundle import (
    Bundle,
    BundlePaths,
    CollectedGroup,
    CollectionFacts,
    GroupSetting,
    assemble_group,
    derive_bundle,
    project_candidate,
)
from kiln_core.discovery import DiscoveryDocuments, inspection
from kiln_core.episode import Ask, Episode, EpisodeSetup, run_episode
from kiln_core.limits import Lease, RetainedBudget
from kiln_core.manifest import Observation
from kiln_core.plan import CollectionControls, effective_reset
from kiln_core.ports import PolicyReply
from kiln_core.provenance import (
    ROLLOUT_PROVENANCE_SCHEMA,
    ActionToken,
    RolloutProvenance,
    SamplingParameters,
    ThinkingBudget,
    TokenizerIdentity,
)
from kiln_core.scripted import ScriptedPolicy
from kiln_core.session import ObservationReceived, Reset, StateReceived, Step
from kiln_core.trace import TurnSample

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "x": {"type": "integer", "minimum": 0, "maximum": 10**6},
        "metadata": {"type": "object", "additionalProperties": True},
    },
    "required": ["note", "x"],
    "additionalProperties": False,
}
DOCUMENTS: Final = DiscoveryDocuments(
    metadata={"name": "made", "description": "An environment in memory."},
    schema={"action": SCHEMA, "observation": {}, "state": {}},
    environments=["made"],
    openapi=None,
)
POLICY: Final = ScriptedPolicy([["{}"]]).identity
DIGEST: Final = "sha256:" + "5" * 64
VOCABULARY: Final = 150_000
MAX_TOKENS: Final = 16_384
WORDS: Final = (
    "the", "agent", "moved", "and", "found", "a", "key:", '"red"', "caf\u00e9", "wall\n"
)  # fmt: skip


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a group of a made bundle looks like."""

    candidates: int
    steps: int
    words: int
    """Of an observation's text."""
    cells: int = 0
    """Integers of an observation's board."""
    reasoning_words: int = 0
    """Of a turn; 0 makes a bundle without thinking."""
    tokens: bool = False
    """Whether turns carry token ids and log-probabilities."""


SHAPES: Final = {
    "large_observations": Shape(candidates=4, steps=4, words=2_000, cells=2_000),
    "short_turns": Shape(candidates=8, steps=64, words=3),
    "short_turns_traced": Shape(candidates=8, steps=64, words=3, tokens=True),
    "one_turn_traced": Shape(candidates=8, steps=1, words=12, tokens=True),
    "thinking_traced": Shape(
        candidates=8, steps=8, words=30, reasoning_words=300, tokens=True
    ),
}


def made_bundle(shape: Shape, size_bytes: int) -> Bundle:
    """Return a bundle whose dataset and manifest are about ``size_bytes`` together."""
    found = inspection("http://127.0.0.1:1", DOCUMENTS, "none")
    schema = ActionSchema(found.schema.action)
    groups: list[CollectedGroup] = []
    rng = random.Random(1)
    total = 0.0
    while total < size_bytes:
        groups.append(_group(shape, found, schema, len(groups), rng))
        total += len(groups[-1].line) + len(groups[-1].replay)
    return derive_bundle(
        CollectionFacts(
            kiln_url="in-process",
            behavior_policy=POLICY,
            environments=[found],
            controls=CollectionControls(
                groups=len(groups),
                group_size=shape.candidates,
                max_steps=shape.steps,
                max_action_tokens=MAX_TOKENS,
            ),
            thinking=shape.reasoning_words > 0,
            reset_templates=[{}],
            paths=BundlePaths(),
        ),
        groups,
    )


def _group(
    shape: Shape, found: Any, schema: ActionSchema, index: int, rng: random.Random
) -> CollectedGroup:
    setting = GroupSetting(
        group_index=index,
        environment_index=0,
        inspection=found,
        seed=index,
        reset_payload=effective_reset({}, index),
        action_schema_sha256=schema.sha256,
        behavior_policy=POLICY,
        guide_sha256=None,
        keep_tokens=shape.tokens,
    )
    start = _observation(shape, rng)
    prompt = _ids(90, rng)
    candidates = [
        project_candidate(
            setting,
            _episode(shape, setting, schema, start, prompt, rng),
            candidate_index=candidate,
            attempt=0,
            capacity_retries=0,
        )
        for candidate in range(shape.candidates)
    ]
    return assemble_group(setting, candidates)


def _episode(
    shape: Shape,
    setting: GroupSetting,
    schema: ActionSchema,
    start: Observation,
    prompt: list[int],
    rng: random.Random,
) -> Episode:
    generator = run_episode(
        EpisodeSetup(
            inspection=setting.inspection,
            action_schema=schema,
            reset_payload=setting.reset_payload,
            max_steps=shape.steps,
            max_recoverable_errors=3,
            protocol_error_reward=-1.0,
            thinking=shape.reasoning_words > 0,
        ),
        Lease(RetainedBudget()),
    )
    ids = list(prompt)
    request: Any = next(generator)
    try:
        while True:
            if isinstance(request, Ask):
                response: Any = _reply(shape, ids, rng)
            elif isinstance(request, Reset):
                response = ObservationReceived(start)
            elif isinstance(request, Step):
                ids += _ids(4 + shape.words, rng) if shape.tokens else []
                response = ObservationReceived(_observation(shape, rng))
            else:
                response = StateReceived({"step_count": shape.steps})
            request = generator.send(response)
    except StopIteration as stop:
        episode: Episode = stop.value
        return episode


def _observation(shape: Shape, rng: random.Random) -> Observation:
    data: dict[str, Any] = {"total": rng.randrange(1000)}
    if shape.cells:
        data["board"] = [rng.randrange(10) for _ in range(shape.cells)]
    data["text"] = _text(shape.words, rng)
    return Observation(
        observation=dict(sorted(data.items())), reward=rng.random(), done=False
    )


def _reply(shape: Shape, ids: list[int], rng: random.Random) -> PolicyReply:
    reasoning = _text(shape.reasoning_words, rng) if shape.reasoning_words else None
    content = f'{{"note":"go {rng.choice(WORDS[:6])}","x":{rng.randrange(10**6)}}}'
    sample = None
    if shape.tokens:
        action = _ids(8 + shape.reasoning_words, rng)
        sample = _sample(list(ids), action, rng)
        ids += action
    return PolicyReply(
        content=content,
        reasoning=reasoning,
        total_tokens=len(ids),
        latency_ms=rng.random(),
        behavior_policy=POLICY,
        sample=sample,
    )


def _sample(prompt: list[int], action: list[int], rng: random.Random) -> TurnSample:
    return TurnSample(
        provenance=RolloutProvenance(
            schema=ROLLOUT_PROVENANCE_SCHEMA,
            input_token_ids=prompt + action,
            prompt_token_count=len(prompt),
            prompt_messages_sha256=DIGEST,
            scored_payload_sha256=DIGEST,
            action_tokens=[
                ActionToken(
                    sequence_index=len(prompt) + index,
                    token_id=token,
                    source="sampled",
                    # zero, forced by the grammar, is null in the trace
                    behavior_logprob=-_float32(rng) if rng.random() < 0.8 else 0.0,
                )
                for index, token in enumerate(action)
            ],
            behavior_policy=POLICY,
            tokenizer=TokenizerIdentity(
                vocab_sha256=DIGEST, config_sha256=DIGEST, chat_template_sha256=DIGEST
            ),
            sampling=SamplingParameters(
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                max_tokens=MAX_TOKENS,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                stop=[],
                thinking_budget=ThinkingBudget(max_tokens=8, close_token_ids=[1]),
            ),
            seed=0,
            generation_backend="made",
        ),
        content_spans=((len(prompt) - 4, len(prompt) - 1),),
    )


def _float32(rng: random.Random) -> float:
    """Return a number with as many digits as a shortest float32 has."""
    return float(f"{rng.expovariate(1):.8g}")


def _ids(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _text(words: int, rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=words))
