"""A large valid bundle, made in memory by driving the episode generator."""

from __future__ import annotations

from typing import Any

from kiln_core.actions import ActionSchema
from kiln_core.bundle import (
    BundlePaths,
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
from kiln_core.ports import PolicyRequest
from kiln_core.scripted import ScriptedPolicy
from kiln_core.session import ObservationReceived, Reset, StateReceived, Step
from kiln_core.verify import BundleBytes

SCHEMA = {
    "type": "object",
    "properties": {"note": {"type": "string"}},
    "required": ["note"],
    "additionalProperties": False,
}
DOCUMENTS = DiscoveryDocuments(
    metadata={"name": "made", "description": "An environment in memory."},
    schema={"action": SCHEMA, "observation": {}, "state": {}},
    environments=["made"],
    openapi=None,
)
STEPS, CANDIDATES = 16, 8
POLICY = ScriptedPolicy([['{"note":"%s"}' % ("note " * 20)]])


def large_bundle(size_bytes: int) -> BundleBytes:
    """Return a bundle whose dataset is about ``size_bytes``."""
    found = inspection("http://127.0.0.1:1", DOCUMENTS, "none")
    schema = ActionSchema(found.schema.action)
    groups, total, index = [], 0, 0
    while total < size_bytes:
        setting = _setting(found, schema, index)
        candidates = [
            project_candidate(
                setting,
                _episode(setting, schema),
                candidate_index=candidate,
                attempt=0,
                capacity_retries=0,
            )
            for candidate in range(CANDIDATES)
        ]
        groups.append(assemble_group(setting, candidates))
        total += len(groups[-1].line)
        index += 1
    bundle = derive_bundle(
        CollectionFacts(
            kiln_url="in-process",
            behavior_policy=POLICY.identity,
            environments=[found],
            controls=CollectionControls(
                groups=len(groups), group_size=CANDIDATES, max_steps=STEPS
            ),
            thinking=False,
            reset_templates=[{}],
            paths=BundlePaths(),
        ),
        groups,
    )
    return BundleBytes(
        summary=bundle.summary_bytes, dataset=bundle.dataset, replay=bundle.replay
    )


def _setting(found: Any, schema: ActionSchema, index: int) -> GroupSetting:
    return GroupSetting(
        group_index=index,
        environment_index=0,
        inspection=found,
        seed=index,
        reset_payload=effective_reset({}, index),
        action_schema_sha256=schema.sha256,
        behavior_policy=POLICY.identity,
        guide_sha256=None,
        keep_tokens=True,
    )


def _episode(setting: GroupSetting, schema: ActionSchema) -> Episode:
    generator = run_episode(
        EpisodeSetup(
            inspection=setting.inspection,
            action_schema=schema,
            reset_payload=setting.reset_payload,
            max_steps=STEPS,
            max_recoverable_errors=3,
            protocol_error_reward=-1.0,
            thinking=False,
        ),
        Lease(RetainedBudget()),
    )
    request: Any = next(generator)
    try:
        while True:
            request = generator.send(_response(request, setting.seed))
    except StopIteration as stop:
        episode: Episode = stop.value
        return episode


def _response(request: Any, seed: int) -> Any:
    if isinstance(request, Reset | Step):
        data = {"board": list(range(64)), "seed": seed, "text": "state " * 30}
        return ObservationReceived(Observation(observation=data, reward=1, done=False))
    if isinstance(request, Ask):
        turn = PolicyRequest(
            messages=request.messages,
            seed=seed,
            max_tokens=64,
            temperature=1.0,
            thinking=False,
            thinking_budget_tokens=None,
            action_schema=None,
        )
        return POLICY.reply(turn)
    return StateReceived({"steps": STEPS})
