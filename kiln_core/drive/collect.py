"""Collection: inspect, plan, roll out, revalidate, derive.

Groups are laid out in order and candidates run up to ``concurrency`` at once, also
across groups, since the whole plan is known; the result is ordered by index, never by
completion. A candidate whose session is lost is collected again from reset with the
same seeds; when its attempts are used up the whole collection fails and nothing is
published. Publication is ``kiln_core.drive.files.publish_bundle``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from kiln_core.actions import ActionSchema
from kiln_core.artifact import Artifact
from kiln_core.bundle import (
    Bundle,
    Candidate,
    CollectedGroup,
    CollectionFacts,
    GroupSetting,
    assemble_group,
    derive_bundle,
    project_candidate,
)
from kiln_core.canonical import JsonValue, canonical_bytes, encoded_again
from kiln_core.contract import (
    OpenEnvTrainingContract,
    check_policy_adapter,
    check_same_policy,
)
from kiln_core.dataset import read_groups
from kiln_core.discovery import EnvironmentInspection, ensure_unchanged
from kiln_core.drive.acquire import acquire
from kiln_core.drive.concurrency import task_group
from kiln_core.drive.http import (
    EnvironmentClient,
    environment_client,
    inspect_all,
)
from kiln_core.drive.recover import is_lost, recover
from kiln_core.drive.request import CollectionRequest, EnvironmentTarget
from kiln_core.drive.websocket import EnvironmentSession, SessionTimes
from kiln_core.episode import Ask, Episode, EpisodeGenerator, EpisodeSetup, run_episode
from kiln_core.errors import (
    ContextOverflow,
    InvalidActionSchema,
    KilnError,
    PolicyError,
    SessionRefused,
    TransportError,
    UsageError,
)
from kiln_core.limits import Lease, RetainedBudget
from kiln_core.plan import (
    check_controls,
    effective_reset,
    generation_seed,
)
from kiln_core.ports import (
    Observer,
    Policy,
    PolicyDescription,
    PolicyReply,
    PolicyRequest,
    Silent,
)
from kiln_core.prompt import model_schema
from kiln_core.receipt import OpenEnvTrainingSelection
from kiln_core.selection import selector_for
from kiln_core.session import Close, Event, Reset

__all__ = ["CollectionRequest", "EnvironmentTarget", "collect", "select_training"]


class _Stage(msgspec.Struct, frozen=True, kw_only=True):
    """What inspection established for one environment."""

    index: int
    client: EnvironmentClient
    inspection: EnvironmentInspection
    action_schema: ActionSchema
    guide_sha256: str | None
    guide_schema: JsonValue | None
    """What the model reads is what guides it, so a dataset alone says both."""


class _Running:
    """A group under way: what its candidates share, and those that are finished."""

    def __init__(self, setting: GroupSetting, lease: Lease) -> None:
        self.setting = setting
        self.lease = lease
        self.finished: list[tuple[Candidate, Lease]] = []


async def collect(
    request: CollectionRequest,
    policy: Policy,
    *,
    observer: Observer | None = None,
    budget: RetainedBudget | None = None,
    times: SessionTimes | None = None,
) -> Bundle:
    """Collect a bundle; nothing is written.

    Args:
        request: What to collect.
        policy: Who acts.
        observer: Told how it proceeds.
        budget: Bound of what is kept in memory.
        times: Deadlines of sessions.

    Raises:
        UsageError: A control is out of bounds.
        TransportError: An environment or a session failed for good.
        ProtocolError: An environment broke the protocol.
        EnvironmentFault: No capacity in time, or episodes unfit for groups.
        DriftError: An environment or the policy changed meanwhile.
        LimitError: The budget or a file bound would be exceeded.
        PolicyError: The policy failed.
    """
    check_controls(request.controls, len(request.environments))
    if len(request.reset_templates) != len(request.environments):
        raise UsageError(
            f"{len(request.reset_templates)} reset objects for "
            f"{len(request.environments)} environments; give one per environment"
        )
    run = _Collection(request, policy, observer or Silent(), budget, times)
    async with run.clients() as clients:
        run.observer.phase("inspecting")
        stages = await run.inspect(clients)
        run.observer.phase("collecting")
        groups = await run.roll_out(stages)
        run.observer.phase("revalidating")
        await run.revalidate(stages)
    run.observer.phase("deriving")
    return run.derive(stages, groups)


class _Collection:
    """The state of one collection."""

    description: PolicyDescription

    def __init__(
        self,
        request: CollectionRequest,
        policy: Policy,
        observer: Observer,
        budget: RetainedBudget | None,
        times: SessionTimes | None,
    ) -> None:
        self.request = request
        self.controls = request.controls
        self.policy = policy
        self.observer = observer
        self.budget = budget or RetainedBudget()
        self.times = times or SessionTimes()
        self.completed = 0
        self.dataset = Artifact("the dataset")
        self.replay = Artifact("the replay manifest")

    @property
    def thinking(self) -> bool:
        """Whether thinking takes effect."""
        return self.controls.thinking and self.description.thinking

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[list[EnvironmentClient]]:
        """Open a client per environment."""
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(
                    environment_client(
                        target.base_url,
                        target.credential,
                        total_seconds=self.times.http_seconds,
                    )
                )
                for target in self.request.environments
            ]

    async def inspect(self, clients: list[EnvironmentClient]) -> list[_Stage]:
        """Learn who acts and where, and decide once whether decoding is guided."""
        self.description = await self.policy.describe()
        self._check_policy()
        if self.controls.thinking and not self.description.thinking:
            self.observer.warning(
                "thinking has no effect: this policy answers directly"
            )
        inspections = await inspect_all(clients)
        return [
            await self._stage(index, clients[index], found)
            for index, found in enumerate(inspections)
        ]

    async def roll_out(self, stages: list[_Stage]) -> list[CollectedGroup]:
        """Play every candidate of every group."""
        groups: dict[int, CollectedGroup] = {}
        plan = self._plan(stages)

        async def work() -> None:
            for running, candidate_index in plan:
                setting = running.setting
                stage = stages[setting.environment_index]
                finished = await self._candidate(stage, setting, candidate_index)
                running.finished.append(finished)
                if len(running.finished) == self.controls.group_size:
                    groups[setting.group_index] = self._group(running)

        async with task_group() as workers:
            for _ in range(min(self.controls.concurrency, self._rollouts)):
                workers.start_soon(work)
        return [groups[index] for index in sorted(groups)]

    def _plan(self, stages: list[_Stage]) -> Iterator[tuple[_Running, int]]:
        """Yield every candidate in order; a group begins with its first."""
        for group_index in range(self.controls.groups):
            setting = self._setting(stages, group_index)
            lease = Lease(self.budget)
            lease.charge(len(canonical_bytes(setting.reset_payload)), "a reset object")
            running = _Running(setting, lease)
            for candidate_index in range(self.controls.group_size):
                yield running, candidate_index

    async def revalidate(self, stages: list[_Stage]) -> None:
        """Require every discovery surface and the policy to be as they were."""
        live = await inspect_all([stage.client for stage in stages])
        for stage, found in zip(stages, live, strict=True):
            ensure_unchanged(stage.inspection, found)
        after = await self.policy.describe()
        check_same_policy(self.description.behavior_policy, after.behavior_policy)

    def derive(self, stages: list[_Stage], groups: Sequence[CollectedGroup]) -> Bundle:
        """Derive the bytes of the bundle."""
        contract = self.request.training_contract
        controls = self.controls
        if not self.thinking:
            controls = msgspec.structs.replace(controls, thinking_budget_tokens=None)
        return derive_bundle(
            CollectionFacts(
                kiln_url=self.description.kiln_url,
                behavior_policy=self.description.behavior_policy,
                environments=[stage.inspection for stage in stages],
                controls=controls,
                thinking=self.thinking,
                reset_templates=list(self.request.reset_templates),
                paths=self.request.paths,
                training_contract=contract,
                training_selection=(
                    None if contract is None else select_training(contract, groups)
                ),
            ),
            groups,
        )

    @property
    def _rollouts(self) -> int:
        return self.controls.groups * self.controls.group_size

    def _check_policy(self) -> None:
        identity = self.description.behavior_policy
        check_policy_adapter(identity, self.request.adapter)
        contract = self.request.training_contract
        if contract is not None and not isinstance(
            contract.behavior_policy, msgspec.UnsetType
        ):
            check_same_policy(contract.behavior_policy, identity)

    async def _stage(
        self, index: int, client: EnvironmentClient, found: EnvironmentInspection
    ) -> _Stage:
        try:
            schema = ActionSchema(found.schema.action)
        except InvalidActionSchema as error:
            error.details.setdefault("environment", client.base_url)
            raise
        guide, shown = None, model_schema(schema.document)
        if self.request.guided:
            report = await self.policy.guide(shown, self.controls.max_action_tokens)
            guide = report.guide_sha256
            if report.warning is not None:
                self.observer.warning(f"{client.base_url}: {report.warning}")
        return _Stage(
            index=index,
            client=client,
            inspection=found,
            action_schema=schema,
            guide_sha256=guide,
            guide_schema=shown if guide else None,
        )

    def _setting(self, stages: list[_Stage], group_index: int) -> GroupSetting:
        stage = stages[group_index % len(stages)]
        seed = self.controls.seed_start + group_index
        return GroupSetting(
            group_index=group_index,
            environment_index=stage.index,
            inspection=stage.inspection,
            seed=seed,
            reset_payload=effective_reset(
                self.request.reset_templates[stage.index], seed
            ),
            action_schema_sha256=stage.action_schema.sha256,
            behavior_policy=self.description.behavior_policy,
            guide_sha256=stage.guide_sha256,
            keep_tokens=self.request.keep_tokens,
        )

    async def _candidate(
        self, stage: _Stage, setting: GroupSetting, candidate_index: int
    ) -> tuple[Candidate, Lease]:
        """Play one candidate, again from reset when its session is lost.

        Raises:
            KilnError: Its last attempt failed; ``details`` say which candidate.
        """
        attempt = 0
        while True:
            lease = Lease(self.budget)
            try:
                episode, retries = await self._attempt(
                    stage, setting, candidate_index, lease
                )
                break
            except KilnError as error:
                lease.close()
                attempt += 1
                error.details |= {
                    "group_index": setting.group_index,
                    "candidate_index": candidate_index,
                    "attempts": attempt,
                }
                if isinstance(error, ContextOverflow):
                    overflow = _located(error)
                    raise overflow from error
                if not self._again(error, attempt):
                    raise
                self.observer.warning(
                    f"group {setting.group_index} candidate {candidate_index}: "
                    f"{error.message}; collecting it again from reset"
                )
                await recover(stage.client, attempt, self.times.recovery_seconds)
        if episode.protocol_error_code == "SESSION_ERROR":
            self.observer.warning(
                f"{stage.client.base_url} ended episodes with SESSION_ERROR: directly "
                "after a step that is very often the model's action, which a validator "
                "of the environment refused by raising"
            )
        self.completed += 1
        self.observer.rollout(self.completed, self._rollouts, episode.episode_return)
        candidate = project_candidate(
            setting,
            episode,
            candidate_index=candidate_index,
            attempt=attempt,
            capacity_retries=retries,
        )
        lease.settle(_size_bytes(candidate.rollout, candidate.replay), "a candidate")
        return candidate, lease

    def _again(self, error: KilnError, attempts: int) -> bool:
        """Say whether a lost session, or one refused before it began, is retried."""
        return attempts <= self.controls.episode_retries and (
            is_lost(error) or isinstance(error, SessionRefused)
        )

    async def _attempt(
        self, stage: _Stage, setting: GroupSetting, candidate_index: int, lease: Lease
    ) -> tuple[Episode, int]:
        """Play an episode in one session; return it and the capacity retries."""
        generator = run_episode(self._episode_setup(stage, setting), lease)
        reset = next(generator)
        assert isinstance(reset, Reset)  # noqa: S101 - what an episode starts with
        async with acquire(
            stage.client, reset, self.controls.capacity_wait_seconds, self.times
        ) as (session, answer, retries):
            episode = await self._play(
                generator, session, answer, setting.seed, candidate_index, stage
            )
        return episode, retries

    async def _play(
        self,
        generator: EpisodeGenerator,
        session: EnvironmentSession,
        answer: Event,
        seed: int,
        candidate_index: int,
        stage: _Stage,
    ) -> Episode:
        response: Event | PolicyReply | None = answer
        try:
            while True:
                request = generator.send(response)
                if isinstance(request, Ask):
                    response = await session.pumped(
                        self._asker(request, seed, candidate_index, stage)
                    )
                elif isinstance(request, Close):
                    response = None
                else:
                    response = await session.exchange(request)
        except StopIteration as stop:
            episode: Episode = stop.value
            return episode

    def _asker(
        self, ask: Ask, seed: int, candidate_index: int, stage: _Stage
    ) -> Callable[[], Awaitable[PolicyReply]]:
        controls = self.controls
        request = PolicyRequest(
            messages=ask.messages,
            seed=generation_seed(seed, candidate_index, ask.step_index),
            max_tokens=controls.max_action_tokens,
            temperature=controls.temperature,
            thinking=self.thinking,
            thinking_budget_tokens=(
                controls.thinking_budget_tokens if self.thinking else None
            ),
            action_schema=stage.guide_schema,
        )

        async def ask_policy() -> PolicyReply:
            try:
                reply = await self.policy.complete(request)
            except ContextOverflow as error:
                error.details["turn"] = ask.step_index
                raise
            except TransportError as error:
                # not the environment's fault, so no reason to collect again
                raise PolicyError(error.message, hint=error.hint) from error
            check_same_policy(self.description.behavior_policy, reply.behavior_policy)
            return reply

        return ask_policy

    def _episode_setup(self, stage: _Stage, setting: GroupSetting) -> EpisodeSetup:
        return EpisodeSetup(
            inspection=stage.inspection,
            action_schema=stage.action_schema,
            reset_payload=setting.reset_payload,
            max_steps=self.controls.max_steps,
            max_recoverable_errors=self.controls.max_recoverable_errors,
            protocol_error_reward=self.controls.protocol_error_reward,
            thinking=self.thinking,
        )

    def _group(self, running: _Running) -> CollectedGroup:
        group = assemble_group(
            running.setting, [candidate for candidate, _ in running.finished]
        )
        for _, lease in running.finished:
            lease.close()
        running.lease.close()
        running.finished.clear()
        self.dataset.reserve(len(group.line))
        self.replay.reserve(len(group.replay))
        self.budget.charge(
            len(group.line) + len(group.replay) + _size_bytes(*group.records), "a group"
        )
        return group


def _size_bytes(*records: object) -> int:
    """Return what records take, whose parts were checked when they came."""
    return sum(len(encoded_again(record)) for record in records)


def select_training(
    contract: OpenEnvTrainingContract, groups: Sequence[CollectedGroup]
) -> OpenEnvTrainingSelection:
    """Return what of a collection a contract would train on."""
    selector = selector_for(contract.effective_config)
    for group in groups:
        for decoded in read_groups(group.line):
            selector.select(decoded)
    return selector.record()


def _located(error: ContextOverflow) -> ContextOverflow:
    """Return an overflow that says where in the collection it happened."""
    facts = error.details
    return ContextOverflow(
        f"group {facts['group_index']} candidate {facts['candidate_index']} turn "
        f"{facts.get('turn', 0)}: {error.message}",
        **facts,
    )
