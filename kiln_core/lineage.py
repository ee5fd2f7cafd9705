"""``kiln.openenv-training-data.v1``: what a corpus is, derived line by line.

Trainer admission and the trainer itself both read a corpus through `CorpusLineage`,
so that a receipt names the exact corpus, its plan, its environments and its rewards.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_core import limits
from kiln_core.canonical import END, Record, Sha256, compact, total
from kiln_core.errors import InvalidRecord
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.records import (
    AgenticGroup,
    Count,
    EpisodeTermination,
    OpenEnvRolloutProvenance,
)

__all__ = ["CorpusLineage", "OpenEnvTrainingData", "TerminationCounts"]

TRAINING_DATA_SCHEMA: Final = "kiln.openenv-training-data.v1"
GROUP_PLAN_PREFIX: Final = b"kiln.openenv-group-plan.v1\0"
GROUP_PLAN_ITEM_SCHEMA: Final = "kiln.openenv-group-plan-item.v1"

Positive = Annotated[int, Meta(ge=1)]
DecimalText = Annotated[str, Meta(pattern="^(0|[1-9][0-9]*)" + END, max_length=20)]
SHARED_FIELDS: Final = (
    "environment_name",
    "environment_base_url",
    "openapi_version",
    "discovery_sha256",
    "environment_schema_sha256",
    "action_schema_sha256",
    "reset_sha256",
    "seed",
)
"""Provenance members that all candidates of a group share."""
ENDPOINT_FIELDS: Final = SHARED_FIELDS[:6]
"""Provenance members that one endpoint keeps over a corpus."""


class TerminationCounts(Record, frozen=True, kw_only=True):
    """Episodes by how they ended."""

    done: Count = 0
    max_steps: Count = 0
    invalid_model_action: Count = 0
    protocol_error: Count = 0


class TrainingEnvironment(Record, frozen=True, kw_only=True):
    """One endpoint's share of a corpus."""

    environment_name: str
    environment_base_url: str
    openapi_version: str | UnsetType = UNSET
    discovery_sha256: Sha256 | UnsetType = UNSET
    environment_schema_sha256: Sha256
    action_schema_sha256: Sha256
    groups: Positive
    rollouts: Positive
    total_steps: Count
    terminations: TerminationCounts


class OpenEnvTrainingData(Record, frozen=True, kw_only=True):
    """The lineage of an admitted corpus."""

    schema: Literal["kiln.openenv-training-data.v1"]
    groups: Positive
    rollouts: Positive
    unique_seeds: Positive
    seed_min: DecimalText
    """Decimal text, so that no reader rounds it."""
    seed_max: DecimalText
    total_steps: Count
    terminations: TerminationCounts
    reward_min: float
    reward_max: float
    reward_mean: float
    group_plan_sha256: Sha256
    behavior_policy: BehaviorPolicyIdentity | UnsetType = UNSET
    environments: Annotated[list[TrainingEnvironment], Meta(min_length=1)]
    """Sorted by base URL."""

    def __post_init__(self) -> None:
        urls = [environment.environment_base_url for environment in self.environments]
        endings = list(TerminationCounts.__struct_fields__)
        rules = (
            (self.rollouts >= self.groups, "there are fewer rollouts than groups"),
            (self.unique_seeds <= self.groups, "there are more seeds than groups"),
            (_seed(self.seed_min) <= _seed(self.seed_max), "seed_min exceeds seed_max"),
            (urls == sorted(set(urls)), "environments must be sorted by unique URL"),
            (
                all(map(math.isfinite, (self.reward_min, self.reward_max))),
                "rewards must be finite",
            ),
            (math.isfinite(self.reward_mean), "rewards have no finite mean"),
            (
                sum(getattr(self.terminations, name) for name in endings)
                == self.rollouts,
                "terminations do not add up to rollouts",
            ),
            (
                all(
                    sum(getattr(part, name) for part in self.environments)
                    == getattr(self, name)
                    for name in ("groups", "rollouts", "total_steps")
                ),
                "environments do not add up to the corpus",
            ),
            (
                all(
                    sum(getattr(part.terminations, name) for part in self.environments)
                    == getattr(self.terminations, name)
                    for name in endings
                ),
                "environments do not add up to the terminations",
            ),
        )
        for holds, message in rules:
            if not holds:
                raise ValueError(message)


class _Share:
    """Running totals of one endpoint."""

    def __init__(self, first: OpenEnvRolloutProvenance) -> None:
        self.first = first
        self.groups = 0
        self.rollouts = 0
        self.steps = 0
        self.endings = dict.fromkeys(EpisodeTermination, 0)

    def add(self, candidates: list[OpenEnvRolloutProvenance]) -> None:
        self.groups += 1
        self.rollouts += len(candidates)
        self.steps += sum(candidate.steps for candidate in candidates)
        for candidate in candidates:
            self.endings[candidate.termination] += 1

    def record(self) -> TrainingEnvironment:
        return TrainingEnvironment(
            **{name: getattr(self.first, name) for name in ENDPOINT_FIELDS},
            groups=self.groups,
            rollouts=self.rollouts,
            total_steps=self.steps,
            terminations=_counts(self.endings),
        )


class CorpusLineage:
    """Checks a corpus group by group and derives its lineage.

    Feed groups in file order through `add`, then take `record`.
    """

    def __init__(self) -> None:
        self._plan = hashlib.sha256(GROUP_PLAN_PREFIX)
        self._shares: dict[str, _Share] = {}
        self._rewards: list[float] = []
        self._seeds: set[int] = set()
        self._policy: BehaviorPolicyIdentity | UnsetType = UNSET
        self._groups = 0

    def add(self, group: AgenticGroup) -> None:
        """Take the next group.

        Raises:
            InvalidRecord: It mixes ordinary and OpenEnv rollouts, its candidates
                disagree, or it contradicts an earlier group.
        """
        candidates = [
            completion.openenv
            for completion in group.completions
            if not isinstance(completion.openenv, UnsetType)
        ]
        where = f"group {self._groups + 1}"
        if len(candidates) != len(group.completions):
            raise InvalidRecord(f"{where} holds rollouts without OpenEnv provenance")
        self._check_agreement(candidates, where)
        first = candidates[0]
        share = self._shares.setdefault(first.environment_base_url, _Share(first))
        self._check_same(share.first, first, ENDPOINT_FIELDS, where)
        if self._groups == 0:
            self._policy = first.behavior_policy
        self._groups += 1
        share.add(candidates)
        self._seeds.add(first.seed)
        self._rewards.extend(completion.reward for completion in group.completions)
        self._extend_plan(first, len(candidates))

    def record(self) -> OpenEnvTrainingData:
        """Return the lineage of all groups so far.

        Raises:
            InvalidRecord: There was no group, or the rewards have no finite mean.
        """
        if not self._groups:
            raise InvalidRecord("the corpus holds no group")
        shares = [self._shares[url] for url in sorted(self._shares)]
        endings = {
            ending: sum(share.endings[ending] for share in shares)
            for ending in EpisodeTermination
        }
        mean = total(self._rewards) / len(self._rewards)
        if not math.isfinite(mean):
            raise InvalidRecord("the rewards of the corpus have no finite mean")
        return OpenEnvTrainingData(
            schema=TRAINING_DATA_SCHEMA,
            groups=self._groups,
            rollouts=len(self._rewards),
            unique_seeds=len(self._seeds),
            seed_min=str(min(self._seeds)),
            seed_max=str(max(self._seeds)),
            total_steps=sum(share.steps for share in shares),
            terminations=_counts(endings),
            reward_min=min(self._rewards),
            reward_max=max(self._rewards),
            reward_mean=mean,
            group_plan_sha256="sha256:" + self._plan.hexdigest(),
            behavior_policy=self._policy,
            environments=[share.record() for share in shares],
        )

    def _check_agreement(
        self, candidates: list[OpenEnvRolloutProvenance], where: str
    ) -> None:
        first = candidates[0]
        for candidate in candidates[1:]:
            self._check_same(first, candidate, SHARED_FIELDS, where)
        for candidate in candidates:
            expected = self._policy if self._groups else first.behavior_policy
            if candidate.behavior_policy != expected:
                raise InvalidRecord(f"{where} was produced by another policy")

    @staticmethod
    def _check_same(
        one: OpenEnvRolloutProvenance,
        other: OpenEnvRolloutProvenance,
        names: tuple[str, ...],
        where: str,
    ) -> None:
        for name in names:
            if getattr(one, name) != getattr(other, name):
                raise InvalidRecord(f"{where} disagrees on {name}")

    def _extend_plan(self, first: OpenEnvRolloutProvenance, rollouts: int) -> None:
        item = {"schema": GROUP_PLAN_ITEM_SCHEMA, "group_index": self._groups}
        for name in SHARED_FIELDS:
            value = getattr(first, name)
            item[name] = None if value is UNSET else value
        item["rollouts"] = rollouts
        data = compact(item)
        self._plan.update(len(data).to_bytes(8, "big") + data)


def _seed(text: str) -> int:
    # the pattern lets a final line feed through, as patterns do
    if not text.isdecimal() or int(text) > limits.MAX_GENERATION_SEED:
        raise ValueError("a seed must be decimal text of an unsigned 64-bit integer")
    return int(text)


def _counts(endings: dict[EpisodeTermination, int]) -> TerminationCounts:
    return msgspec.convert(
        {ending.value: count for ending, count in endings.items()}, TerminationCounts
    )
