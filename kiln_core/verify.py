"""Offline verification of a bundle: an ordered tuple of named checks.

Bytes in, a verified bundle out, or the first contradiction with its file, JSON Pointer,
what was expected and what was found. No check contacts anything: success claims
nothing about the environment as it is now. Dataset lines must be canonical byte for
byte; replay manifest and summary, which other implementations may write, are read
strictly and compared by value. Reading files is not done here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Final, NoReturn

import msgspec
from msgspec import UNSET, UnsetType

from kiln_core import limits
from kiln_core.canonical import (
    JsonValue,
    Measured,
    encoded_again,
    read_json,
    read_record,
    same_json,
    same_member,
)
from kiln_core.capture import outline, read_capture
from kiln_core.contract import check_contract
from kiln_core.crosscheck import CrossCheck
from kiln_core.dataset import fail_in, read_groups
from kiln_core.difference import first_difference
from kiln_core.discovery import websocket_url
from kiln_core.errors import (
    InvalidBundle,
    InvalidRecord,
    MalformedJson,
    UsageError,
)
from kiln_core.legacy import LEGACY_SCHEMAS, LegacyRolloutSummary, check_version
from kiln_core.manifest import OpenEnvReplayManifest
from kiln_core.plan import check_controls, check_plan, recorded_controls
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.receipt import (
    SUMMARY_SCHEMA,
    OpenEnvRolloutSummary,
    RolloutRecord,
    rollout_stats,
)

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
    dataset: bytes | Callable[[], Iterable[bytes]]
    """The dataset, or what reads it from its start in pieces; it is read twice."""
    replay: bytes
    summary_name: str = "openenv.rollout-summary.json"
    dataset_name: str = "openenv.rollouts.jsonl"
    replay_name: str = "openenv.replay.json"
    read: tuple[bytes, OpenEnvRolloutSummary] | None = None
    """A summary that was read to find the other two, after its bytes."""

    def summary_record(self) -> OpenEnvRolloutSummary:
        """Return the summary, read unless these very bytes were."""
        if self.read is not None and self.read[0] is self.summary:
            return self.read[1]
        return read_summary(self.summary, self.summary_name)

    def dataset_pieces(self) -> Measured:
        """Return the dataset in pieces, measured while they are taken."""
        dataset = self.dataset
        return Measured((dataset,) if isinstance(dataset, bytes) else dataset())


class VerifiedBundle(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A bundle of which every check holds."""

    summary: OpenEnvRolloutSummary
    replay_bytes: bytes
    environment_exchanges: int
    retried_rollouts: int
    """Rollouts that needed more than one attempt."""
    traced_rollouts: int
    """Rollouts that carry token ids."""

    @cached_property
    def replay(self) -> OpenEnvReplayManifest:
        """The whole replay manifest, decoded when it is first asked for."""
        return read_record(self.replay_bytes, OpenEnvReplayManifest, "replay manifest")


class _Versioned(msgspec.Struct):
    schema: JsonValue = None


class _Evidence:
    """What the checks have established so far; each relies on those before it."""

    summary: OpenEnvRolloutSummary
    replay: OpenEnvReplayManifest
    """With outlines of its groups."""
    dataset: CrossCheck
    pieces: Measured | None
    """The dataset as it was read last; None where it was in memory all along."""

    def __init__(self, files: BundleBytes) -> None:
        self.files = files


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
        replay_bytes=files.replay,
        environment_exchanges=sum(record.steps for record in evidence.dataset.records),
        retried_rollouts=evidence.dataset.retried,
        traced_rollouts=evidence.dataset.traced,
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
    evidence.summary = evidence.files.summary_record()


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
    dataset, replay = files.dataset_pieces(), Measured((files.replay,))
    for check, file, data, size, sha256 in (
        (
            "dataset_digest",
            files.dataset_name,
            dataset,
            summary.dataset_bytes,
            summary.dataset_sha256,
        ),
        (
            "replay_digest",
            files.replay_name,
            replay,
            summary.replay_bytes,
            summary.replay_sha256,
        ),
    ):
        fail = fail_in(file)
        for _ in data:
            pass
        if data.size_bytes != size:
            fail(
                check,
                "",
                "its size is not the one in the summary",
                size,
                data.size_bytes,
            )
        if data.sha256 != sha256:
            fail(
                check,
                "",
                "its digest is not the one in the summary",
                sha256,
                data.sha256,
            )


def _check_replay_record(evidence: _Evidence) -> None:
    files, name = evidence.files, evidence.files.replay_name
    whole = isinstance(files.dataset, bytes)
    evidence.pieces = None if whole else files.dataset_pieces()
    evidence.dataset = CrossCheck(
        evidence.summary,
        read_groups(evidence.pieces or files.dataset_pieces(), files.dataset_name),
        (files.summary_name, files.dataset_name, files.replay_name),
    )
    outlines = []
    try:
        capture = read_capture(files.replay, name)
        for index in range(len(capture)):
            group = capture.group(index)
            evidence.dataset.add(group)
            outlines.append(outline(group))
    except (MalformedJson, InvalidRecord) as error:
        raise _invalid(error, "replay_record", name) from error
    evidence.replay = capture.head.manifest(outlines)


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
    evidence.dataset.finish_episodes()


def _check_dataset(evidence: _Evidence) -> None:
    evidence.dataset.finish()
    # a file that is read again may have become another
    found, expected = evidence.pieces, evidence.summary.dataset_sha256
    if found is not None and found.sha256 != expected:
        fail_in(evidence.files.dataset_name)(
            "dataset_digest",
            "",
            "it changed while it was read",
            expected,
            found.sha256,
        )


def _check_records(evidence: _Evidence) -> None:
    fail = fail_in(evidence.files.summary_name)
    recorded, derived = evidence.summary.rollouts, evidence.dataset.records
    if len(recorded) != len(derived):
        fail(
            "summary_rollouts",
            "/rollouts",
            "the bundle holds another number",
            len(derived),
            len(recorded),
        )
    if encoded_again(derived) != encoded_again(recorded):
        _check_outcomes(derived, recorded, fail)
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


def _check_outcomes(
    derived: list[RolloutRecord],
    recorded: list[RolloutRecord],
    fail: Callable[..., NoReturn],
) -> None:
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
