"""Bundles made without any IO, and the tools to take them apart.

`collect` plays a whole collection in one thread. The default one has two environments
and shows all four terminations, recoverable errors that go on and that end the episode,
a reply without output, one that is no JSON and one the schema refuses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kiln_core.actions import ActionSchema
from kiln_core.bundle import (
    Bundle,
    BundlePaths,
    Candidate,
    CollectedGroup,
    CollectionFacts,
    GroupSetting,
    assemble_group,
    derive_bundle,
    project_candidate,
)
from kiln_core.canonical import compact, digest, digest_json, pretty
from kiln_core.contract import (
    CONTRACT_SCHEMA,
    OpenEnvTrainingContract,
    PreflightRequest,
    materialize_config,
)
from kiln_core.dataset import read_groups
from kiln_core.discovery import EnvironmentInspection
from kiln_core.episode import EpisodeSetup
from kiln_core.plan import CollectionControls, effective_reset
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.selection import TrainingSelector
from kiln_core.verify import BundleBytes, VerifiedBundle, verify_bundle
from tests.simulators.pure import (
    ADAPTER_POLICY,
    BASE_POLICY,
    COUNTER_INSPECTION,
    LAMPS_INSPECTION,
    Answer,
    PureServer,
    ToyPolicy,
    counter_answer,
    lamp_answer,
    play,
    sha,
)

Reply = str | tuple[str, str | None]

COUNTER_SCRIPTS: tuple[tuple[Reply, ...], ...] = (
    ('{"amount":3}', '```json\n{"amount": 2}\n```'),  # done
    ('{"amount":0}', '{"amount":8}', '{"amount":1}', '{"amount":0}'),  # max_steps
    ('{"amount":8}', '{"amount":8}', '{"amount":8}'),  # protocol_error, recoverable
    ('{"amount":1}', '{"amount":9}'),  # protocol_error, terminal
    ('{"amount":2}', "I give up"),  # invalid: no JSON
    ('{"amount":99}',),  # invalid: schema
    ("  ",),  # invalid: no output
)
LAMP_SCRIPTS: tuple[tuple[Reply, ...], ...] = (
    ('{"lamp":"green"}', '{"lamp":"red"}', '{"lamp":"blue"}', '{"lamp":"green"}'),
    ('{"lamp":"red"}', '{"lamp":"red"}', '{"lamp":"red"}', '{"lamp":"red"}'),
    ('{"lamp":"blue"}', "{}"),
    ('{"lamp":"green"}', '{"lamp":"green"}'),
)
ANSWERS: dict[str, Answer] = {"counter": counter_answer, "lamps": lamp_answer}
SCRIPTS = {"counter": COUNTER_SCRIPTS, "lamps": LAMP_SCRIPTS}
TEMPLATES = {"counter": {"target": 4, "deep": {"b": [1, 1.0], "a": None}}, "lamps": {}}
CONTROLS = CollectionControls(
    groups=4,
    group_size=7,
    seed_start=40,
    max_steps=4,
    concurrency=3,
    max_action_tokens=64,
    max_recoverable_errors=2,
    protocol_error_reward=-0.5,
)


def thinking_reply(reply: Reply, step: int) -> Reply:
    """Return a reply with reasoning before it; blank ones never close theirs."""
    assert isinstance(reply, str)
    if not reply.strip():
        return ("I cannot stop thinking", None)
    return ("" if step else 'Let me see: {"amount":1}. ', reply)


class Collection:
    """A pure collection: what it asks, who plays, what comes out."""

    def __init__(
        self,
        *,
        controls: CollectionControls = CONTROLS,
        inspections: Sequence[EnvironmentInspection] = (
            COUNTER_INSPECTION,
            LAMPS_INSPECTION,
        ),
        thinking: bool = False,
        tokens: bool = True,
        policy: BehaviorPolicyIdentity = BASE_POLICY,
        guide: str | None = None,
        contract: bool = False,
        scripts: Mapping[str, Sequence[Sequence[Reply]]] = SCRIPTS,
        templates: Mapping[str, Any] = TEMPLATES,
    ) -> None:
        self.controls = controls
        self.inspections = tuple(inspections)
        self.thinking = thinking
        self.tokens = tokens
        self.policy = policy
        self.guide = guide
        self.contract = contract
        self.scripts = scripts
        self.templates = templates
        self.schemas = [ActionSchema(i.schema.action) for i in self.inspections]

    def name(self, group_index: int) -> str:
        """Return which environment a group plays."""
        index = group_index % len(self.inspections)
        return self.inspections[index].identity.metadata.name

    def setting(self, group_index: int) -> GroupSetting:
        """Return what the candidates of a group share."""
        index = group_index % len(self.inspections)
        seed = self.controls.seed_start + group_index
        return GroupSetting(
            group_index=group_index,
            environment_index=index,
            inspection=self.inspections[index],
            seed=seed,
            reset_payload=effective_reset(self.templates[self.name(group_index)], seed),
            action_schema_sha256=self.schemas[index].sha256,
            behavior_policy=self.policy,
            guide_sha256=self.guide,
            keep_tokens=self.tokens,
        )

    def setup(self, setting: GroupSetting) -> EpisodeSetup:
        """Return what determines an episode of a group."""
        return EpisodeSetup(
            inspection=setting.inspection,
            action_schema=self.schemas[setting.environment_index],
            reset_payload=setting.reset_payload,
            max_steps=self.controls.max_steps,
            max_recoverable_errors=self.controls.max_recoverable_errors,
            protocol_error_reward=self.controls.protocol_error_reward,
            thinking=self.thinking,
        )

    def candidate(self, group_index: int, candidate_index: int) -> Candidate:
        """Play one candidate."""
        setting = self.setting(group_index)
        scripts = self.scripts[self.name(group_index)]
        replies = list(scripts[(candidate_index + group_index // 2) % len(scripts)])
        if self.thinking:
            replies = [thinking_reply(r, step) for step, r in enumerate(replies)]
        episode = play(
            self.setup(setting),
            PureServer(answer=ANSWERS[self.name(group_index)]),
            ToyPolicy(
                replies,
                policy=self.policy,
                max_tokens=self.controls.max_action_tokens,
                guide=self.guide,
            ),
        )
        return project_candidate(
            setting,
            episode,
            candidate_index=candidate_index,
            attempt=candidate_index % 2,
            capacity_retries=candidate_index // 3,
        )

    def group(self, group_index: int) -> CollectedGroup:
        """Play one group."""
        size = self.controls.group_size
        # completion order is nobody's business
        order = [(index * 3 + group_index) % size for index in range(size)]
        if len(set(order)) != size:
            order = list(range(size))[::-1]
        return assemble_group(
            self.setting(group_index),
            [self.candidate(group_index, index) for index in order],
        )

    def facts(self, groups: Sequence[CollectedGroup]) -> CollectionFacts:
        """Return what the summary holds beside the groups."""
        names = [i.identity.metadata.name for i in self.inspections]
        selector = TrainingSelector()
        for group in groups:
            for decoded in read_groups(group.line):
                selector.select(decoded)
        request = PreflightRequest(
            adapter=self.policy.adapter_name or "base", output_adapter="second"
        )
        contract = OpenEnvTrainingContract(
            schema=CONTRACT_SCHEMA,
            effective_config=materialize_config(request),
            behavior_policy=self.policy,
        )
        return CollectionFacts(
            kiln_url="in-process",
            behavior_policy=self.policy,
            environments=list(self.inspections),
            controls=self.controls,
            thinking=self.thinking,
            reset_templates=[self.templates[name] for name in names],
            paths=BundlePaths(),
            training_contract=contract if self.contract else None,
            training_selection=selector.record() if self.contract else None,
        )

    def bundle(self) -> Bundle:
        """Play everything."""
        groups = [self.group(index) for index in range(self.controls.groups)]
        return derive_bundle(self.facts(groups), groups)


def bytes_of(bundle: Bundle) -> BundleBytes:
    """Return a bundle as verification takes it."""
    return BundleBytes(
        summary=bundle.summary_bytes, dataset=bundle.dataset, replay=bundle.replay
    )


def small_collection(**changes: Any) -> Collection:
    """Return a collection of one group of two."""
    controls = msgspec.structs.replace(CONTROLS, groups=1, group_size=2)
    return Collection(controls=controls, inspections=(COUNTER_INSPECTION,), **changes)


VARIANTS: dict[str, Callable[[], Collection]] = {
    "plain": Collection,
    "thinking": lambda: Collection(thinking=True),
    "adapter with contract": lambda: Collection(policy=ADAPTER_POLICY, contract=True),
    "without tokens": lambda: Collection(tokens=False),
    "guided": lambda: Collection(guide=sha("9")),
    "one group of two": small_collection,
}


class Parts:
    """A bundle as plain JSON that can be changed and sealed again.

    Sealing recomputes sizes and digests, so that what a change breaks is the thing
    itself and not its digest.
    """

    def __init__(self, files: BundleBytes) -> None:
        decode = msgspec.json.decode
        self.dataset = [decode(line) for line in files.dataset.splitlines()]
        self.replay = decode(files.replay)
        self.summary = decode(files.summary)

    def copy(self) -> Parts:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def seal(self, *, keep: Sequence[str] = ()) -> BundleBytes:
        """Return the files; members of the summary named in ``keep`` stay."""
        dataset = b"".join(compact(line) + b"\n" for line in self.dataset)
        return self.seal_bytes(dataset, keep=keep)

    def seal_bytes(
        self,
        dataset: bytes,
        replay: bytes | None = None,
        *,
        keep: Sequence[str] = (),
        write: Callable[[Any], bytes] = pretty,
    ) -> BundleBytes:
        """Return the files around given bytes."""
        if "replay.dataset_sha256" not in keep:
            self.replay["dataset_sha256"] = digest(dataset)
        replay = write(self.replay) if replay is None else replay
        sealed = {
            "dataset_sha256": digest(dataset),
            "dataset_bytes": len(dataset),
            "replay_sha256": digest(replay),
            "replay_bytes": len(replay),
        }
        self.summary |= {k: v for k, v in sealed.items() if k not in keep}
        return BundleBytes(summary=write(self.summary), dataset=dataset, replay=replay)


ONE_RESET = {"counter": {"target": 4}, "lamps": {"target": 4}}
"""One reset object for all environments, as version 2 had it."""
ONE_ROUND = msgspec.structs.replace(CONTROLS, groups=2, group_size=5)
LEGACY_SOURCES: dict[str, Callable[[], Collection]] = {
    "v2": lambda: Collection(controls=ONE_ROUND, tokens=False, templates=ONE_RESET),
    "v3": lambda: Collection(controls=ONE_ROUND, tokens=False, thinking=True),
    "v4": lambda: Collection(
        controls=ONE_ROUND, tokens=False, policy=ADAPTER_POLICY, contract=True
    ),
}
"""Collections from which bundles of older summary versions are made."""


def legacy_bundle(version: str) -> Parts:
    """Return a bundle as an older version wrote it, open to changes."""
    parts = Parts(bytes_of(LEGACY_SOURCES[version]().bundle()))
    summary = parts.summary
    summary["schema"] = f"kiln.openenv-rollout-summary.{version}"
    del summary["behavior_policy"]
    if version == "v4":
        del summary["training_contract"]["behavior_policy"]
    for line in parts.dataset:
        for rollout in line["completions"]:
            del rollout["openenv"]["behavior_policy"]
    if version == "v2":
        summary["reset_options_sha256"] = digest_json(ONE_RESET["counter"])
        del summary["reset_plan_sha256"]
        _without_discovery_digest(parts)
    return parts


def _without_discovery_digest(parts: Parts) -> None:
    for environment in (*parts.summary["environments"], *parts.replay["environments"]):
        del environment["identity"]["discovery_sha256"]
        del environment["identity"]["authentication"]
    for line in parts.dataset:
        for rollout in line["completions"]:
            del rollout["openenv"]["discovery_sha256"]
            del rollout["trace"]


def verify(files: BundleBytes) -> VerifiedBundle:
    """Verify."""
    return verify_bundle(files)


class _Drop:
    """Stands for no value; its name is the same in every process."""

    def __repr__(self) -> str:
        return "DROP"


DROP = _Drop()


def put(document: Any, pointer: str, value: Any) -> None:
    """Set, or with `DROP` remove, the member a JSON Pointer names."""
    *path, last = pointer.split("/")[1:]
    for token in path:
        document = document[int(token) if isinstance(document, list) else token]
    key = int(last) if isinstance(document, list) else last
    if value is DROP:
        del document[key]
    elif isinstance(document, list) and key == len(document):
        document.append(value)
    else:
        document[key] = value


def look(document: Any, pointer: str) -> Any:
    """Return the member a JSON Pointer names."""
    for token in pointer.split("/")[1:]:
        document = document[int(token) if isinstance(document, list) else token]
    return document
