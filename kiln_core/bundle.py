"""The three-file bundle: from finished episodes to bytes and digests.

Each candidate is projected as soon as it ends into its dataset, replay and summary
forms, and the episode itself is dropped. A group is checked for one prompt and one
reset observation before it is accepted: without them relative advantages would mean
nothing. Writing the files is not done here (``kiln_core.drive.files``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kiln_core.artifact import Artifact, group_piece, manifest_pieces
from kiln_core.canonical import (
    JsonValue,
    Sha256,
    digest_json,
    encoded_again,
    pretty,
)
from kiln_core.contract import OpenEnvTrainingContract
from kiln_core.difference import first_difference
from kiln_core.discovery import CLIENT_PROFILE, EnvironmentInspection
from kiln_core.errors import EpisodeUnfit, PolicyDrift, UsageError
from kiln_core.manifest import (
    REPLAY_SCHEMA,
    Observation,
    OpenEnvReplayManifest,
    ReplayCandidate,
    ReplayGroup,
    wire_observation,
)
from kiln_core.plan import CollectionControls, reset_plan_digest
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.receipt import (
    SUMMARY_SCHEMA,
    OpenEnvRolloutSummary,
    OpenEnvTrainingSelection,
    RolloutRecord,
    rollout_stats,
)
from kiln_core.records import (
    ROLLOUT_SCHEMA,
    AgenticGroup,
    ChatMessage,
    EpisodeTermination,
    OpenEnvRolloutProvenance,
    ScoredRollout,
    joined_actions,
    observed_turns,
)
from kiln_core.trace import TRACE_SCHEMA, RolloutTrace, prompt_token_ids, token_trace

if TYPE_CHECKING:
    from kiln_core.episode import Episode

__all__ = [
    "Bundle",
    "BundlePaths",
    "Candidate",
    "CollectedGroup",
    "CollectionFacts",
    "GroupSetting",
    "assemble_group",
    "derive_bundle",
    "project_candidate",
]


T = TypeVar("T")


class BundlePaths(msgspec.Struct, frozen=True, kw_only=True):
    """Where the three files go, as the summary records it."""

    dataset: PurePath = PurePath("openenv.rollouts.jsonl")
    replay: PurePath = PurePath("openenv.replay.json")
    summary: PurePath = PurePath("openenv.rollout-summary.json")

    def __post_init__(self) -> None:
        for path in (self.dataset, self.replay, self.summary):
            try:
                str(path).encode()
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"output path {str(path)!r} is not UTF-8, so no summary can name it"
                ) from error


class GroupSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What the candidates of a group share."""

    group_index: int
    environment_index: int
    inspection: EnvironmentInspection
    seed: int
    reset_payload: dict[str, JsonValue]
    action_schema_sha256: Sha256
    behavior_policy: BehaviorPolicyIdentity
    guide_sha256: Sha256 | None
    keep_tokens: bool
    """Whether token ids are retained (``--no-trace`` turns it off)."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A finished candidate in the three forms it is published in."""

    candidate_index: int
    messages: list[ChatMessage]
    reset_observation: Observation
    prompt_token_ids: list[int] | None
    rollout: ScoredRollout
    replay: ReplayCandidate
    record: RolloutRecord


class CollectedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A complete group: its dataset line, and its part of replay and summary."""

    line: bytes
    """Canonical JSON and a line feed."""
    replay: bytes
    """As it stands in the manifest."""
    records: list[RolloutRecord]


class CollectionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a summary that is not derived from the groups."""

    kiln_url: str
    behavior_policy: BehaviorPolicyIdentity
    environments: list[EnvironmentInspection]
    controls: CollectionControls
    thinking: bool
    """The effective value."""
    reset_templates: list[dict[str, JsonValue]]
    paths: BundlePaths
    training_selection: OpenEnvTrainingSelection | None = None
    training_contract: OpenEnvTrainingContract | None = None


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of a bundle and the summary that binds them."""

    dataset: bytes
    replay: bytes
    summary: OpenEnvRolloutSummary

    @property
    def summary_bytes(self) -> bytes:
        """The summary file."""
        summary = Artifact("the summary")
        summary.write(pretty(self.summary))
        return summary.getvalue()


def project_candidate(
    setting: GroupSetting,
    episode: Episode,
    *,
    candidate_index: int,
    attempt: int,
    capacity_retries: int,
) -> Candidate:
    """Project a finished episode into its three published forms.

    Args:
        setting: What the group shares.
        episode: The episode.
        candidate_index: 0-based place in the group.
        attempt: How many sessions were lost before this one.
        capacity_retries: How often a full environment was met.

    Raises:
        PolicyDrift: A turn was guided by another grammar than agreed on, or its
            tokenizer or sampling changed.
        PolicyError: A turn's token ids contradict themselves.
    """
    samples = [reply.sample for reply in episode.replies if reply.sample is not None]
    for sample in samples:
        if sample.guide_sha256 != setting.guide_sha256:
            raise PolicyDrift(
                "a turn was guided by another grammar than the one agreed on",
                expected=setting.guide_sha256,
                found=sample.guide_sha256,
            )
    complete = setting.keep_tokens and len(samples) == len(episode.replies)
    done = episode.termination is EpisodeTermination.DONE
    rollout = ScoredRollout(
        text=joined_actions(episode.trajectory),
        reward=episode.episode_return,
        trajectory=episode.trajectory,
        openenv=_provenance(setting, episode),
        trace=RolloutTrace(
            schema=TRACE_SCHEMA,
            attempt=attempt,
            guide_sha256=setting.guide_sha256,
            tokens=(
                token_trace(samples, observed_turns(episode.trajectory))
                if complete
                else None
            ),
        ),
    )
    replay = ReplayCandidate(
        candidate_index=candidate_index,
        exchanges=episode.exchanges,
        final_state=episode.final_state,
        episode_return=episode.episode_return,
        terminal_done=done,
        termination=episode.termination,
        recoverable_protocol_errors=episode.recoverable_protocol_errors,
        capacity_retries=capacity_retries,
        model_tokens=episode.model_tokens,
        model_latency_ms=episode.model_latency_ms,
    )
    return Candidate(
        candidate_index=candidate_index,
        messages=episode.messages,
        reset_observation=episode.reset_observation,
        prompt_token_ids=prompt_token_ids(samples) if complete else None,
        rollout=rollout,
        replay=replay,
        record=rollout_record(setting.group_index, setting.inspection, rollout, replay),
    )


def rollout_record(
    group_index: int,
    inspection: EnvironmentInspection,
    rollout: ScoredRollout,
    replay: ReplayCandidate,
) -> RolloutRecord:
    """Derive a rollout's line in the summary from its other two forms."""
    assert not isinstance(rollout.openenv, UnsetType)  # noqa: S101 - set above
    return RolloutRecord(
        group_index=group_index,
        candidate_index=replay.candidate_index,
        environment_name=inspection.identity.metadata.name,
        environment_url=inspection.identity.base_url,
        seed=rollout.openenv.seed,
        steps=len(replay.exchanges),
        episode_return=replay.episode_return,
        terminal_done=replay.terminal_done,
        termination=replay.termination,
        protocol_error_code=rollout.openenv.protocol_error_code,
        recoverable_protocol_errors=replay.recoverable_protocol_errors,
        capacity_retries=replay.capacity_retries,
        model_tokens=replay.model_tokens,
        model_latency_ms=replay.model_latency_ms,
    )


def assemble_group(
    setting: GroupSetting, candidates: Sequence[Candidate]
) -> CollectedGroup:
    """Join the candidates of a group, in order of their index.

    Raises:
        EpisodeUnfit: Their reset observations differ, so the environment is not
            deterministic for a seed.
        PolicyDrift: They share the prompt but not its token ids.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.candidate_index)
    first = ordered[0]
    for candidate in ordered[1:]:
        _check_same_reset(setting, first, candidate)
    ids = first.prompt_token_ids
    group = AgenticGroup(
        messages=first.messages,
        completions=[candidate.rollout for candidate in ordered],
        prompt_token_ids=UNSET if ids is None else ids,
    )
    return CollectedGroup(
        # its parts were checked when they came, and every return is finite
        line=encoded_again(group) + b"\n",
        replay=group_piece(
            ReplayGroup(
                group_index=setting.group_index,
                environment_index=setting.environment_index,
                seed=setting.seed,
                reset_payload=setting.reset_payload,
                reset_observation=first.reset_observation,
                candidates=[candidate.replay for candidate in ordered],
            )
        ),
        records=[candidate.record for candidate in ordered],
    )


def derive_bundle(facts: CollectionFacts, groups: Sequence[CollectedGroup]) -> Bundle:
    """Derive the bytes of all three files.

    Args:
        facts: What is not in the groups.
        groups: In order of their index.

    Raises:
        EpisodeUnfit: The returns have no finite mean.
        LimitError: A file would be over its bound.
    """
    dataset = Artifact("the dataset")
    dataset.write_all(group.line for group in groups)
    manifest = OpenEnvReplayManifest(
        schema=REPLAY_SCHEMA,
        client_profile=CLIENT_PROFILE,
        dataset_sha256=dataset.sha256,
        protocol_error_reward=facts.controls.protocol_error_reward,
        max_steps=facts.controls.max_steps,
        environments=facts.environments,
        groups=[],
    )
    replay = Artifact("the replay manifest")
    replay.write_all(manifest_pieces(manifest, (group.replay for group in groups)))
    records = [record for group in groups for record in group.records]
    if not math.isfinite(rollout_stats(records).mean_episode_return):
        raise EpisodeUnfit("the returns of a collection have no finite mean")
    bundle = Bundle(
        dataset=dataset.getvalue(),
        replay=replay.getvalue(),
        summary=_summary(facts, records, dataset, replay),
    )
    _ = bundle.summary_bytes  # refused here, before anything is published
    return bundle


def _summary(
    facts: CollectionFacts,
    records: list[RolloutRecord],
    dataset: Artifact,
    replay: Artifact,
) -> OpenEnvRolloutSummary:
    controls, policy = facts.controls, facts.behavior_policy
    budget = controls.thinking_budget_tokens
    return OpenEnvRolloutSummary(
        schema=SUMMARY_SCHEMA,
        kiln_url=facts.kiln_url,
        adapter=policy.adapter_name,
        adapter_label=policy.adapter_name or "base",
        behavior_policy=policy,
        environments=facts.environments,
        groups=controls.groups,
        group_size=controls.group_size,
        rollout_count=len(records),
        seed_start=controls.seed_start,
        max_steps=controls.max_steps,
        concurrency=controls.concurrency,
        max_action_tokens=controls.max_action_tokens,
        thinking_budget_tokens=UNSET if budget is None else budget,
        temperature=controls.temperature,
        thinking=facts.thinking,
        protocol_error_reward=controls.protocol_error_reward,
        max_recoverable_errors=controls.max_recoverable_errors,
        capacity_wait_seconds=controls.capacity_wait_seconds,
        reset_plan_sha256=reset_plan_digest(facts.reset_templates),
        output_path=str(facts.paths.dataset),
        replay_output_path=str(facts.paths.replay),
        summary_output_path=str(facts.paths.summary),
        dataset_sha256=dataset.sha256,
        dataset_bytes=dataset.size_bytes,
        replay_sha256=replay.sha256,
        replay_bytes=replay.size_bytes,
        stats=rollout_stats(records),
        rollouts=records,
        training_selection=_or_unset(facts.training_selection),
        training_contract=_or_unset(facts.training_contract),
    )


def _or_unset(value: T | None) -> T | UnsetType:
    return UNSET if value is None else value


def _provenance(setting: GroupSetting, episode: Episode) -> OpenEnvRolloutProvenance:
    identity = setting.inspection.identity
    return OpenEnvRolloutProvenance(
        schema=ROLLOUT_SCHEMA,
        environment_name=identity.metadata.name,
        environment_base_url=identity.base_url,
        openapi_version=_or_unset(identity.openapi_version),
        discovery_sha256=identity.discovery_sha256,
        environment_schema_sha256=identity.schema_sha256,
        action_schema_sha256=setting.action_schema_sha256,
        behavior_policy=setting.behavior_policy,
        reset_sha256=digest_json(setting.reset_payload),
        seed=setting.seed,
        steps=len(episode.exchanges),
        episode_return=episode.episode_return,
        terminal_done=episode.termination is EpisodeTermination.DONE,
        termination=episode.termination,
        protocol_error_code=episode.protocol_error_code,
    )


def _check_same_reset(
    setting: GroupSetting, first: Candidate, other: Candidate
) -> None:
    pointer = first_difference(
        wire_observation(first.reset_observation),
        wire_observation(other.reset_observation),
    )
    if pointer is not None or first.messages != other.messages:
        raise EpisodeUnfit(
            f"group {setting.group_index}: candidates {first.candidate_index} and "
            f"{other.candidate_index} got different reset observations for seed "
            f"{setting.seed}, first at {pointer or '/'}",
            hint="the environment must be deterministic for the reset seed: without "
            "one start for all candidates, relative advantages mean nothing",
            group_index=setting.group_index,
            pointer=pointer,
        )
    if first.prompt_token_ids != other.prompt_token_ids:
        raise PolicyDrift(
            f"group {setting.group_index}: the same prompt was tokenized differently"
        )
