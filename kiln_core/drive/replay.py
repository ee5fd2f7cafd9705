"""Exact live replay of a verified bundle.

Every captured environment is revalidated against the live one, then every candidate is
played again: the exact reset object, the captured actions, each answer compared by
value and type, at last the state. A candidate stops at its first drift; the others go
on, so that the outcome tells how much drifted.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from shlex import quote
from typing import Final, Literal

import msgspec
from msgspec import UnsetType

from kiln_core import limits
from kiln_core.actions import ActionSchema
from kiln_core.canonical import JsonValue, Record, canonical_bytes
from kiln_core.compare import VOLATILE, Drift, covers, find_drift, is_volatile
from kiln_core.discovery import ensure_unchanged, environment_url
from kiln_core.drive.acquire import acquire
from kiln_core.drive.concurrency import task_group
from kiln_core.drive.http import (
    Credential,
    EnvironmentClient,
    environment_client,
    inspect_all,
)
from kiln_core.drive.recover import is_lost, recover
from kiln_core.drive.websocket import EnvironmentSession, SessionTimes
from kiln_core.episode import (
    Ask,
    EpisodeGenerator,
    EpisodeSetup,
    Request,
    run_episode,
)
from kiln_core.errors import KilnError, ReplayDrift, UsageError
from kiln_core.limits import Lease, RetainedBudget
from kiln_core.manifest import ObservationResult, ReplayCandidate, ReplayGroup
from kiln_core.ports import Observer, PolicyReply, Silent
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.receipt import REPLAY_RUN_SCHEMA, ReplayRunReport
from kiln_core.records import EpisodeTermination
from kiln_core.session import (
    Close,
    ErrorReceived,
    Event,
    ObservationReceived,
    ReadState,
    Reset,
    Step,
)
from kiln_core.verify import VerifiedBundle

__all__ = ["ReplayOutcome", "ReplayRequest", "replay_bundle", "require_no_drift"]

OUTCOME_SCHEMA: Final = "kiln.openenv-replay-outcome.v1"
EXAMPLE: Final = "/final_state/episode_id"
MAX_SHOWN: Final = 300


class CandidateDrift(Record, frozen=True, kw_only=True):
    """Where a candidate first differed."""

    group_index: int
    candidate_index: int
    pointer: str
    """JSON Pointer relative to the candidate."""
    expected: JsonValue
    found: JsonValue


class ReplayOutcome(Record, frozen=True, kw_only=True):
    """``kiln.openenv-replay-outcome.v1``: what a replay found, also when it drifted."""

    schema: Literal["kiln.openenv-replay-outcome.v1"]
    report: ReplayRunReport | None
    """Exists only on exact success without an exemption."""
    first_drift: CandidateDrift | None
    """Of the first drifted candidate; one that differs in volatile places alone, such
    as a new episode id, comes after all others."""
    drifted_candidates: int
    ignored_pointers: list[str]


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How a bundle is replayed."""

    bundle: VerifiedBundle
    credentials: tuple[Credential | None, ...] = ()
    """Empty, or one per environment of the bundle."""
    concurrency: int = 4
    capacity_wait_seconds: float = 300.0
    ignored_pointers: tuple[str, ...] = ()
    """Pointers relative to a candidate that may differ, with all below them; ``*``
    stands for any index."""
    episode_retries: int = limits.EPISODE_RETRIES
    """Fresh attempts of a candidate whose session was lost."""


class _Drifted(Exception):
    def __init__(self, drift: Drift) -> None:
        super().__init__(drift.pointer)
        self.drift = drift


class _Candidate:
    """The replay of one candidate."""

    def __init__(
        self,
        group: ReplayGroup,
        captured: ReplayCandidate,
        policy: BehaviorPolicyIdentity,
        ignored: frozenset[str],
    ) -> None:
        self.group = group
        self.policy = policy
        self.captured = captured
        self.ignored = ignored
        self.steps = 0
        self._volatile: Drift | None = None

    async def play(
        self,
        generator: EpisodeGenerator,
        session: EnvironmentSession,
        answer: Event,
    ) -> None:
        """Play it to its end.

        Raises:
            _Drifted: An answer differs.
        """
        self._compare(self.group.reset_observation, answer, "/reset_observation")
        next(generator)
        response: Event | PolicyReply | None = answer
        try:
            while True:
                request = generator.send(response)
                response = await self._respond(request, session)
        except StopIteration:
            self._check_finished()

    async def _respond(
        self, request: Request, session: EnvironmentSession
    ) -> Event | PolicyReply | None:
        if isinstance(request, Ask):
            return self._captured_reply(request.step_index)
        if isinstance(request, Close):
            return None
        event = await session.exchange(request)
        if isinstance(request, Step):
            self._compare_step(event)
        elif isinstance(request, ReadState) and not isinstance(
            self.captured.final_state, UnsetType
        ):
            self._compare(self.captured.final_state, event, "/final_state")
        return event

    def _captured_reply(self, step: int) -> PolicyReply:
        exchanges = self.captured.exchanges
        # What the model said when it gave no action was never sent, so there is
        # nothing to replay there: a blank reply ends the episode the same way.
        content = ""
        if step < len(exchanges):
            content = canonical_bytes(exchanges[step].action).decode()
        return PolicyReply(
            content=content,
            total_tokens=0,
            latency_ms=0.0,
            behavior_policy=self.policy,
        )

    def _compare_step(self, event: Event) -> None:
        result = self.captured.exchanges[self.steps].result
        at = f"/exchanges/{self.steps}/result"
        self.steps += 1
        if isinstance(result, ObservationResult):
            self._compare(result.observation, event, f"{at}/observation")
        else:
            self._compare(result.error, event, f"{at}/error")

    def _check_finished(self) -> None:
        if self.steps < len(self.captured.exchanges):
            raise _Drifted(
                Drift(
                    pointer=f"/exchanges/{self.steps}",
                    expected="an exchange",
                    found="the episode is over",
                )
            )
        if self._volatile is not None:
            raise _Drifted(self._volatile)

    def _compare(self, captured: object, event: Event, at: str) -> None:
        expected, found = msgspec.to_builtins(captured), _document(event)
        drift = find_drift(expected, found, at, self.ignored | VOLATILE.keys())
        if drift is not None:
            raise _Drifted(drift)
        # A volatile place says little, so it hides no other difference.
        if self._volatile is None:
            self._volatile = find_drift(expected, found, at, self.ignored)


class _Replay:
    """The state of one replay run."""

    def __init__(
        self, request: ReplayRequest, times: SessionTimes, observer: Observer
    ) -> None:
        self.request = request
        self.replay = request.bundle.replay
        self.times = times
        self.observer = observer
        self.schemas = [
            ActionSchema(captured.schema.action)
            for captured in self.replay.environments
        ]
        self.budget = RetainedBudget()
        self.drifts: list[CandidateDrift] = []
        self.capacity_retries = 0
        self.completed = 0

    async def run(self, clients: list[EnvironmentClient]) -> None:
        """Revalidate every environment, then replay every candidate."""
        self.observer.phase("revalidating")
        live = await inspect_all(clients)
        for captured, found in zip(self.replay.environments, live, strict=True):
            ensure_unchanged(captured, found)
        self.observer.phase("replaying")
        plan = iter([(g, c) for g in self.replay.groups for c in g.candidates])

        async def work() -> None:
            for group, captured in plan:
                await self._candidate(clients[group.environment_index], group, captured)

        async with task_group() as workers:
            for _ in range(
                min(self.request.concurrency, self.request.bundle.summary.rollout_count)
            ):
                workers.start_soon(work)

    async def _candidate(
        self, client: EnvironmentClient, group: ReplayGroup, captured: ReplayCandidate
    ) -> None:
        """Replay a candidate, again from reset when its session is lost.

        Raises:
            KilnError: Its last attempt failed; ``details`` say which candidate.
        """
        attempt = 0
        while True:
            try:
                await self._attempt(client, group, captured)
                break
            except _Drifted as found:
                self.drifts.append(_record(group, captured, found.drift))
                break
            except KilnError as error:
                attempt += 1
                error.details |= {
                    "group_index": group.group_index,
                    "candidate_index": captured.candidate_index,
                    "attempts": attempt,
                }
                if attempt > self.request.episode_retries or not is_lost(error):
                    raise
                self.observer.warning(
                    f"group {group.group_index} candidate {captured.candidate_index}: "
                    f"{error.message}; replaying it again from reset"
                )
                await recover(client, attempt, self.times.recovery_seconds)
        self.completed += 1
        self.observer.rollout(
            self.completed,
            self.request.bundle.summary.rollout_count,
            captured.episode_return,
        )

    async def _attempt(
        self, client: EnvironmentClient, group: ReplayGroup, captured: ReplayCandidate
    ) -> None:
        """Replay a candidate in one session.

        Raises:
            _Drifted: An answer differs.
        """
        candidate = _Candidate(
            group,
            captured,
            self.request.bundle.summary.behavior_policy,
            frozenset(self.request.ignored_pointers),
        )
        # what is exempt from comparison has no bound but this one
        lease = Lease(self.budget)
        try:
            async with acquire(
                client,
                Reset(group.reset_payload),
                self.request.capacity_wait_seconds,
                self.times,
            ) as (session, answer, retries):
                self.capacity_retries += retries
                generator = run_episode(self._setup(group), lease)
                await candidate.play(generator, session, answer)
        finally:
            lease.close()

    def _setup(self, group: ReplayGroup) -> EpisodeSetup:
        summary = self.request.bundle.summary
        return EpisodeSetup(
            inspection=self.replay.environments[group.environment_index],
            action_schema=self.schemas[group.environment_index],
            reset_payload=group.reset_payload,
            max_steps=summary.max_steps,
            max_recoverable_errors=summary.max_recoverable_errors,
            protocol_error_reward=summary.protocol_error_reward,
            thinking=False,
        )

    def report(self) -> ReplayRunReport:
        """Return the report of an exact success."""
        candidates = [c for group in self.replay.groups for c in group.candidates]
        return ReplayRunReport(
            schema=REPLAY_RUN_SCHEMA,
            replay_sha256=self.request.bundle.summary.replay_sha256,
            environments=len(self.replay.environments),
            groups=len(self.replay.groups),
            rollouts=len(candidates),
            environment_exchanges=self.request.bundle.environment_exchanges,
            capacity_retries=self.capacity_retries,
            environment_prefix_only_rollouts=sum(
                c.termination is EpisodeTermination.INVALID_MODEL_ACTION
                for c in candidates
            ),
        )


async def replay_bundle(
    request: ReplayRequest,
    *,
    observer: Observer | None = None,
    times: SessionTimes | None = None,
) -> ReplayOutcome:
    """Replay a verified bundle against its live environments.

    Args:
        request: What to replay, and how.
        observer: Told how it proceeds.
        times: Deadlines of sessions.

    Raises:
        UsageError: The request is out of bounds, or its credentials are not of the
            environments it was captured from; nothing is contacted then.
        IdentityDrift: A live environment is not the captured one.
        TransportError: An environment or session could not be reached to the end.
        ProtocolError: An environment broke the protocol.
        CapacityExhausted: No session became free in time.
    """
    _check_request(request)
    times = times or SessionTimes()
    run = _Replay(request, times, observer or Silent())
    captured = run.replay.environments
    credentials = _aligned(request)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                environment_client(
                    environment_url(
                        environment.identity.base_url, default_scheme=False
                    ),
                    credential,
                    total_seconds=times.http_seconds,
                )
            )
            for environment, credential in zip(captured, credentials, strict=True)
        ]
        await run.run(clients)
    drifts = sorted(
        run.drifts,
        key=lambda d: (is_volatile(d.pointer), d.group_index, d.candidate_index),
    )
    exact = not drifts and not request.ignored_pointers
    return ReplayOutcome(
        schema=OUTCOME_SCHEMA,
        report=run.report() if exact else None,
        first_drift=drifts[0] if drifts else None,
        drifted_candidates=len(drifts),
        ignored_pointers=list(request.ignored_pointers),
    )


def _check_request(request: ReplayRequest) -> None:
    if not 1 <= request.concurrency <= limits.MAX_CONCURRENCY:
        raise UsageError(
            f"concurrency must be 1 to {limits.MAX_CONCURRENCY}, "
            f"not {request.concurrency}"
        )
    if not 0 <= request.episode_retries <= limits.MAX_EPISODE_RETRIES:
        raise UsageError(
            f"episode retries must be 0 to {limits.MAX_EPISODE_RETRIES}, "
            f"not {request.episode_retries}"
        )
    for pointer in request.ignored_pointers:
        if not pointer.startswith("/"):
            raise UsageError(
                f"{pointer!r} is not a JSON Pointer into a candidate",
                hint=f"give one such as {EXAMPLE}",
            )


def _aligned(request: ReplayRequest) -> tuple[Credential | None, ...]:
    """Return a credential or None per environment, of the method that was captured.

    Raises:
        UsageError: They do not align, or one has another method.
    """
    captured = request.bundle.replay.environments
    credentials = request.credentials or (None,) * len(captured)
    if len(credentials) != len(captured):
        raise UsageError(
            f"{len(credentials)} credentials for {len(captured)} environments; "
            "give one per environment, or none"
        )
    for environment, credential in zip(captured, credentials, strict=True):
        identity = environment.identity
        if (credential is None) == (identity.authentication == "none"):
            continue
        needed = "with a bearer token, so its replay needs one"
        if credential is not None:
            needed = "without a credential, so its replay takes none"
        raise UsageError(
            f"{identity.base_url} was captured {needed}",
            hint="give one --credential-env per environment, in order, with '-' for "
            "one that was captured without",
            environment=identity.base_url,
        )
    return credentials


def require_no_drift(outcome: ReplayOutcome) -> None:
    """Raise the first drift of a replay.

    Raises:
        ReplayDrift: There is one.
    """
    drift = outcome.first_drift
    if drift is None:
        return
    hint = None
    for place, reason in VOLATILE.items():
        if covers(place, drift.pointer):
            hint = f"{reason}; exempt it with --ignore-pointer {quote(place)}"
    raise ReplayDrift(
        f"group {drift.group_index} candidate {drift.candidate_index} drifted at "
        f"{drift.pointer}: captured {drift.expected!r}, live {drift.found!r} "
        f"({outcome.drifted_candidates} candidates drifted)",
        hint=hint,
        group_index=drift.group_index,
        candidate_index=drift.candidate_index,
        pointer=drift.pointer,
        expected=drift.expected,
        found=drift.found,
        drifted_candidates=outcome.drifted_candidates,
    )


def _document(event: Event) -> JsonValue:
    if isinstance(event, ObservationReceived):
        return msgspec.to_builtins(event.observation)
    if isinstance(event, ErrorReceived):
        return msgspec.to_builtins(event.error)
    return event.state


def _record(
    group: ReplayGroup, captured: ReplayCandidate, drift: Drift
) -> CandidateDrift:
    return CandidateDrift(
        group_index=group.group_index,
        candidate_index=captured.candidate_index,
        pointer=drift.pointer,
        expected="absent" if drift.expected_absent else _shown(drift.expected),
        found="absent" if drift.found_absent else _shown(drift.found),
    )


def _shown(value: JsonValue) -> JsonValue:
    text = canonical_bytes(value).decode()
    return value if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
