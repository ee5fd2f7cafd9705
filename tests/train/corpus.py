"""A corpus sampled by a real engine, for the tests of the trainer."""

from __future__ import annotations

from msgspec.structs import replace

from kiln_core.canonical import canonical_bytes
from kiln_core.chat import rollout_provenance
from kiln_core.engine import GenerationRequest, TrainingJob
from kiln_core.grpo import GrpoConfig
from kiln_core.records import AgenticGroup, ChatMessage, ScoredRollout, TurnSegment
from kiln_core.trace import (
    TRACE_SCHEMA,
    RolloutTrace,
    TurnSample,
    prompt_token_ids,
    token_trace,
)
from kiln_core.training import corpus_digest

SCHEMA = {
    "additionalProperties": False,
    "properties": {"lamp": {"maximum": 3, "minimum": 0, "type": "integer"}},
    "required": ["lamp"],
    "type": "object",
}
RIGHT = '{"lamp":2}'


def request(number, candidate, **changes):
    system = f"Press a lamp.\n{canonical_bytes(SCHEMA).decode()}"
    plain = GenerationRequest(
        messages=(
            ChatMessage(role="system", content=system),
            ChatMessage(role="user", content=f"ticket {number}"),
        ),
        seed=number * 1_000 + candidate,
        max_tokens=32,
        thinking=False,
        action_schema=SCHEMA,
    )
    return replace(plain, **changes)


def sampled_group(engine, number, size=6, **changes):
    """Sample one group; the right lamp earns 1."""
    requests = [request(number, candidate, **changes) for candidate in range(size)]
    futures = [engine.submit(each) for each in requests]
    rollouts, prompt = [], None
    for each, future in zip(requests, futures, strict=True):
        generation = future.result()
        sample = TurnSample(
            provenance=rollout_provenance(each, generation),
            content_spans=generation.content_spans,
            guide_sha256=generation.guide_sha256,
        )
        prompt = prompt_token_ids([sample])
        text = generation.content
        if generation.reasoning_content is not None:
            text = f"{generation.reasoning_content}</think>{text}"
        rollouts.append(
            ScoredRollout(
                text=text,
                reward=float(generation.content == RIGHT),
                trajectory=[TurnSegment(role="assistant", content=text, kind="action")],
                trace=RolloutTrace(
                    schema=TRACE_SCHEMA,
                    attempt=0,
                    guide_sha256=generation.guide_sha256,
                    tokens=token_trace([sample], [False]),
                ),
            )
        )
    return AgenticGroup(
        messages=list(requests[0].messages),
        completions=rollouts,
        prompt_token_ids=prompt,
    )


def job_of(groups, name, **config):
    return TrainingJob(
        job_id=name,
        groups=tuple(groups),
        corpus_sha256=corpus_digest(list(groups)),
        lineage=None,
        data_source="inline",
        config=GrpoConfig(output_name=name, seed=7, **config),
    )
