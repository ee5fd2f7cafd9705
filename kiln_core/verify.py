"""Offline verification of a bundle: an ordered tuple of named checks.

Bytes in, a verified bundle out, or the first contradiction with its file, JSON Pointer,
what was expected and what was found. No check contacts anything: success claims
nothing about the environment as it is now. Dataset lines must be canonical byte for
byte; replay manifest and summary, which other implementations may write, are read
strictly and compared by value. Reading files is not done here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec
from msgspec import UNSET, UnsetType

from kiln_core import limits
from kiln_core.actions import ActionSchema
from kiln_core.bundle import rollout_record
from kiln_core.canonical import (
    JsonValue,
    digest,
    digest_json,
    first_difference,
    read_json,
    read_record,
    same_json,
    same_member,
)
from kiln_core.contract import check_contract
from kiln_core.dataset import TraceLedger, fail_in, read_groups
from kiln_core.discovery import websocket_url
from kiln_core.errors import (
    InvalidActionSchema,
    InvalidBundle,
    InvalidRecord,
    MalformedJson,
    UsageError,
)
from kiln_core.legacy import LEGACY_SCHEMAS, LegacyRolloutSummary, check_version
from kiln_core.manifest import OpenEnvReplayManifest, ReplayGroup
from kiln_core.plan import check_controls, check_plan, recorded_controls
from kiln_core.prompt import SYSTEM_PROMPTS, initial_messages
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.receipt import (
    SUMMARY_SCHEMA,
    OpenEnvRolloutSummary,
    OpenEnvTrainingSelection,
    RolloutRecord,
    rollout_stats,
)
from kiln_core.records import AgenticGroup
from kiln_core.selection import TrainingSelector, selector_for
from kiln_core.transcript import RolloutContext, check_episode, check_rollout

__all__ = [
    "CHECKS",
    "BundleBytes",
    "VerifiedBundle",
    "read_summary",
    "verify_bundle",
]


READERS: Final[dict[str, type[OpenEnvRolloutSummary]]] = {
    SUMMARY_SCHEMA: OpenEnvRolloutSummary,
    **dict.fromkeys(LEGACY_SCHEMAS, LegacyRolloutSummary),
}
"""The record of every summary version that is still read."""


class BundleBytes(msgspec.Struct, frozen=True, kw_only=True):
    """The three files as read, with the names that errors use."""

    summary: bytes
    dataset: bytes
    replay: bytes
    summary_name: str = "openenv.rollout-summary.json"
    dataset_name: str = "openenv.rollouts.jsonl"
    replay_name: str = "openenv.replay.json"


class VerifiedBundle(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of which every check holds."""

    summary: OpenEnvRolloutSummary
    replay: OpenEnvReplayManifest
    environment_exchanges: int
    retried_rollouts: int
    """Rollouts that needed more than one attempt."""
    traced_rollouts: int
    """Rollouts that carry token ids."""


class _Versioned(msgspec.Struct):
    schema: JsonValue = None


class _Evidence:
    """What the checks have established so far; each relies on those before it."""

    summary: OpenEnvRolloutSummary
    replay: OpenEnvReplayManifest
    traces: TraceLedger

    def __init__(self, files: BundleBytes) -> None:
        self.files = files
        self.records: list[RolloutRecord] = []


def verify_bundle(files: BundleBytes) -> VerifiedBundle:
    """Run every check in order.

    Args:
        files: The three files.

    Raises:
        InvalidBundle: A check fails; ``details`` name check, file and pointer.
    """
    evidence = _Evidence(files)
    for _, check in CHECKS:
        check(evidence)
    return VerifiedBundle(
        summary=evidence.summary,
        replay=evidence.replay,
        environment_exchanges=sum(record.steps for record in evidence.records),
        retried_rollouts=evidence.traces.retried,
        traced_rollouts=evidence.traces.traced,
    )


def read_summary(data: bytes, file: str) -> OpenEnvRolloutSummary:
    """Read a summary of a supported version.

    Raises:
        InvalidBundle: It is none.
    """
    try:
        schema = _version(data)
        if not isinstance(schema, str) or schema not in READERS:
            fail_in(file)(
                "summary_schema",
                "/schema",
                "this summary version is not supported",
                SUMMARY_SCHEMA,
                schema,
            )
        return read_record(data, READERS[schema], file)
    except (MalformedJson, InvalidRecord) as error:
        invalid = _invalid(error, "summary_record", file)
        raise invalid from error


def _version(data: bytes) -> JsonValue:
    """Return what a document says its schema is; it is read strictly afterwards."""
    try:
        return msgspec.json.decode(data, type=_Versioned).schema
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        document = read_json(data, "the summary", limits.MAX_ARTIFACT_DEPTH)
        return document.get("schema") if isinstance(document, dict) else None


def _check_summary_record(evidence: _Evidence) -> None:
    evidence.summary = read_summary(evidence.files.summary, evidence.files.summary_name)


def _check_policy(evidence: _Evidence) -> None:
    summary = evidence.summary
    fail = fail_in(evidence.files.summary_name)
    check_version(summary, fail)
    policy: BehaviorPolicyIdentity | UnsetType = summary.behavior_policy
    if not isinstance(policy, UnsetType) and policy.adapter_name != summary.adapter:
        fail(
            "summary_policy",
            "/adapter",
            "the policy identity names another adapter",
            policy.adapter_name,
            summary.adapter,
        )
    if summary.adapter_label != (summary.adapter or "base"):
        fail(
            "summary_policy",
            "/adapter_label",
            "it must name the adapter",
            summary.adapter or "base",
            summary.adapter_label,
        )
    contract = summary.training_contract
    if not isinstance(contract, UnsetType):
        check_contract(contract, policy, summary.adapter, fail)


def _check_controls(evidence: _Evidence) -> None:
    summary = evidence.summary
    fail = fail_in(evidence.files.summary_name)
    try:
        check_controls(recorded_controls(summary), len(summary.environments))
    except UsageError as error:
        fail("summary_controls", "", error.message, "controls in bounds", "others")
    for index, environment in enumerate(summary.environments):
        expected = websocket_url(environment.identity.base_url)
        if environment.identity.websocket_url != expected:
            fail(
                "summary_identity",
                f"/environments/{index}/identity/websocket_url",
                "sessions are below the base URL",
                expected,
                environment.identity.websocket_url,
            )
        known = environment.identity.discovery_sha256 is not UNSET
        if not known and not isinstance(summary, LegacyRolloutSummary):
            fail(
                "summary_identity",
                f"/environments/{index}/identity/discovery_sha256",
                "only a legacy summary may omit it",
                "present",
                "absent",
            )


def _check_digests(evidence: _Evidence) -> None:
    files, summary = evidence.files, evidence.summary
    for check, file, data, size, sha256 in (
        (
            "dataset_digest",
            files.dataset_name,
            files.dataset,
            summary.dataset_bytes,
            summary.dataset_sha256,
        ),
        (
            "replay_digest",
            files.replay_name,
            files.replay,
            summary.replay_bytes,
            summary.replay_sha256,
        ),
    ):
        fail = fail_in(file)
        if len(data) != size:
            fail(check, "", "its size is not the one in the summary", size, len(data))
        if digest(data) != sha256:
            fail(
                check,
                "",
                "its digest is not the one in the summary",
                sha256,
                digest(data),
            )


def _check_replay_record(evidence: _Evidence) -> None:
    name = evidence.files.replay_name
    try:
        evidence.replay = read_record(
            evidence.files.replay, OpenEnvReplayManifest, name
        )
    except (MalformedJson, InvalidRecord) as error:
        raise _invalid(error, "replay_record", name) from error


def _check_links(evidence: _Evidence) -> None:
    summary, replay = evidence.summary, evidence.replay
    fail = fail_in(evidence.files.replay_name)
    for name in ("dataset_sha256", "protocol_error_reward", "max_steps"):
        expected, found = getattr(summary, name), getattr(replay, name)
        if not same_json(expected, found):
            fail(
                "replay_link", f"/{name}", "the summary says otherwise", expected, found
            )
    captured = msgspec.to_builtins(summary.environments)
    played = msgspec.to_builtins(replay.environments)
    pointer = first_difference(captured, played)
    if pointer is not None:
        fail(
            "replay_link",
            f"/environments{pointer}",
            "the summary has another identity or schema",
            [e.identity.base_url for e in summary.environments],
            [e.identity.base_url for e in replay.environments],
        )


def _check_plan(evidence: _Evidence) -> None:
    check_plan(
        evidence.summary,
        evidence.replay,
        fail_in(evidence.files.summary_name),
        fail_in(evidence.files.replay_name),
    )


def _check_episodes(evidence: _Evidence) -> None:
    fail = fail_in(evidence.files.replay_name)
    for index, group in enumerate(evidence.replay.groups):
        for place, candidate in enumerate(group.candidates):
            at = f"/groups/{index}/candidates/{place}"
            check_episode(candidate, evidence.summary, at, fail)


def _check_dataset(evidence: _Evidence) -> None:
    files, replay = evidence.files, evidence.replay
    evidence.traces = TraceLedger(evidence.summary)
    schemas = _action_schemas(evidence)
    selector = _selector(evidence.summary)
    count = 0
    for count, group in enumerate(read_groups(files.dataset, files.dataset_name), 1):
        if count <= len(replay.groups):
            _check_group(evidence, group, replay.groups[count - 1], schemas)
            if selector is not None:
                selector.select(group)
    if count != len(replay.groups):
        fail_in(files.dataset_name)(
            "dataset_groups",
            "",
            "the manifest has another number of groups",
            len(replay.groups),
            count,
        )
    recorded = evidence.summary.training_selection
    if selector is not None and not isinstance(recorded, UnsetType):
        fail = fail_in(evidence.files.summary_name)
        _check_selection(recorded, selector.record(), fail)


def _check_group(
    evidence: _Evidence,
    group: AgenticGroup,
    captured: ReplayGroup,
    schemas: list[ActionSchema],
) -> None:
    fail = fail_in(evidence.files.dataset_name, captured.group_index + 1)
    inspection = evidence.summary.environments[captured.environment_index]
    prompts = [
        initial_messages(inspection, captured.reset_observation, version + 1)
        for version in range(len(SYSTEM_PROMPTS))
    ]
    if group.messages not in prompts:
        fail(
            "dataset_prompt",
            "/messages",
            "no prompt version gives these messages for the captured reset",
            [message.content for message in prompts[-1]],
            [message.content for message in group.messages],
        )
    if len(group.completions) != len(captured.candidates):
        fail(
            "dataset_groups",
            "/completions",
            "the manifest has another number",
            len(captured.candidates),
            len(group.completions),
        )
    shared = group.prompt_token_ids
    reset_sha256 = digest_json(captured.reset_payload)
    for index, (rollout, candidate) in enumerate(
        zip(group.completions, captured.candidates, strict=True)
    ):
        context = RolloutContext(
            summary=evidence.summary,
            inspection=inspection,
            action_schema=schemas[captured.environment_index],
            group=captured,
            reset_sha256=reset_sha256,
            candidate=candidate,
            shared_prompt_tokens=0 if isinstance(shared, UnsetType) else len(shared),
        )
        check_rollout(rollout, context, f"/completions/{index}", fail)
        evidence.records.append(
            rollout_record(captured.group_index, inspection, rollout, candidate)
        )
    evidence.traces.add(captured.environment_index, group, fail)


def _action_schemas(evidence: _Evidence) -> list[ActionSchema]:
    schemas = []
    for index, inspection in enumerate(evidence.summary.environments):
        try:
            schemas.append(ActionSchema(inspection.schema.action))
        except InvalidActionSchema as error:
            raise InvalidBundle(
                f"{evidence.files.summary_name}: {error.message}",
                check="summary_record",
                file=evidence.files.summary_name,
                pointer=f"/environments/{index}/schema/action",
            ) from error
    return schemas


def _selector(summary: OpenEnvRolloutSummary) -> TrainingSelector | None:
    """Return what repeats the recorded selection; None where none is recorded."""
    if summary.training_selection is UNSET:
        return None
    contract = summary.training_contract
    if isinstance(contract, UnsetType):
        return TrainingSelector()
    return selector_for(contract.effective_config)


def _check_selection(
    recorded: OpenEnvTrainingSelection,
    expected: OpenEnvTrainingSelection,
    fail: Callable[..., NoReturn],
) -> None:
    for name in recorded.__struct_fields__:
        wanted, found = getattr(expected, name), getattr(recorded, name)
        if name != "warnings" and wanted != found:
            fail(
                "summary_selection",
                f"/training_selection/{name}",
                "the dataset gives another selection",
                wanted,
                found,
            )


def _check_records(evidence: _Evidence) -> None:
    fail = fail_in(evidence.files.summary_name)
    recorded, derived = evidence.summary.rollouts, evidence.records
    if len(recorded) != len(derived):
        fail(
            "summary_rollouts",
            "/rollouts",
            "the bundle holds another number",
            len(derived),
            len(recorded),
        )
    for index, (expected, found) in enumerate(zip(derived, recorded, strict=True)):
        for name in RolloutRecord.__struct_fields__:
            wanted, got = getattr(expected, name), getattr(found, name)
            if not same_member(wanted, got):
                fail(
                    "summary_rollouts",
                    f"/rollouts/{index}/{name}",
                    "dataset and manifest say otherwise",
                    wanted,
                    got,
                )
    expected_stats = rollout_stats(derived)
    for name in expected_stats.__struct_fields__:
        wanted = getattr(expected_stats, name)
        got = getattr(evidence.summary.stats, name)
        if not _finite(wanted) or not same_json(wanted, got):
            fail(
                "summary_stats",
                f"/stats/{name}",
                "the rollouts give another total",
                wanted,
                got,
            )


CHECKS: Final[tuple[tuple[str, Callable[[_Evidence], None]], ...]] = (
    ("summary is a supported record", _check_summary_record),
    ("version, policy, adapter and contract agree", _check_policy),
    ("controls and identities are in bounds", _check_controls),
    ("digests and sizes match the bytes", _check_digests),
    ("replay manifest is a record", _check_replay_record),
    ("replay manifest links to dataset and summary", _check_links),
    ("plan, seeds and resets are those of the summary", _check_plan),
    ("every episode follows the rules", _check_episodes),
    ("every dataset line agrees with the manifest", _check_dataset),
    ("outcomes and totals agree", _check_records),
)
"""What verification establishes, in order; each relies on those before it."""


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _invalid(
    error: MalformedJson | InvalidRecord, check: str, file: str
) -> InvalidBundle:
    return InvalidBundle(
        error.message, check=check, file=file, pointer=error.details.get("pointer")
    )
