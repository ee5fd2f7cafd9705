"""The plan of a collection: controls, rotation, reset objects and seeds.

Everything a collection will do is known before it starts, so a plan is a value that can
be checked, hashed and repeated. Group ``g`` plays environment ``g mod n`` with seed
``seed_start + g``; every candidate and turn has a generation seed of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import UnsetType

from kiln_core import limits
from kiln_core.canonical import (
    JsonValue,
    Record,
    Sha256,
    canonical_bytes,
    digest_json,
    same_json,
    sorted_json,
)
from kiln_core.errors import UsageError
from kiln_core.legacy import SUMMARY_V2, LegacyRolloutSummary
from kiln_core.manifest import OpenEnvReplayManifest, ReplayGroup
from kiln_core.receipt import OpenEnvRolloutSummary

__all__ = [
    "CollectionControls",
    "check_controls",
    "effective_reset",
    "generation_seed",
    "reset_plan_digest",
    "reset_templates",
    "seed_intervals_overlap",
]

CANDIDATE_MULTIPLIER: Final = 0x9E3779B97F4A7C15
STEP_MULTIPLIER: Final = 0xBF58476D1CE4E5B9
U64: Final = 2**64 - 1


class CollectionControls(Record, frozen=True, kw_only=True):
    """Every control of a collection that the summary records."""

    groups: int = 8
    group_size: int = 4
    """Candidates of each group."""
    seed_start: int = 0
    """Seed of the first group; the others follow by one."""
    max_steps: int = 8
    """Environment exchanges of an episode at most."""
    concurrency: int = 4
    """Episodes in flight at most."""
    max_action_tokens: int = 256
    thinking_budget_tokens: int | None = None
    temperature: float = 1.0
    thinking: bool = True
    protocol_error_reward: float = -1.0
    max_recoverable_errors: int = 3
    capacity_wait_seconds: int = 300
    episode_retries: int = limits.EPISODE_RETRIES
    """Fresh attempts of a candidate whose session was lost."""


def check_controls(controls: CollectionControls, environments: int) -> None:
    """Check every bound and cross rule of the controls.

    Args:
        controls: What to check.
        environments: How many environments take part.

    Raises:
        UsageError: A value is out of bounds; the message names it.
    """
    ranges = (
        ("number of environments", environments, 1, limits.MAX_ENVIRONMENTS),
        ("groups", controls.groups, max(environments, 1), limits.MAX_GROUPS),
        ("group size", controls.group_size, 1, limits.MAX_GROUP_SIZE),
        ("seed start", controls.seed_start, 0, limits.MAX_SEED),
        ("max steps", controls.max_steps, 1, limits.MAX_STEPS),
        ("concurrency", controls.concurrency, 1, limits.MAX_CONCURRENCY),
        ("max action tokens", controls.max_action_tokens, 1, limits.MAX_ACTION_TOKENS),
        (
            "max recoverable errors",
            controls.max_recoverable_errors,
            0,
            limits.MAX_RECOVERABLE_ERRORS,
        ),
        (
            "capacity wait seconds",
            controls.capacity_wait_seconds,
            1,
            limits.MAX_CAPACITY_WAIT_SECONDS,
        ),
        ("episode retries", controls.episode_retries, 0, limits.MAX_EPISODE_RETRIES),
    )
    for what, value, low, high in ranges:
        if not low <= value <= high:
            raise UsageError(f"{what} must be {low} to {high}, not {value}")
    _check_cross_rules(controls)


def _check_cross_rules(controls: CollectionControls) -> None:
    if controls.groups * controls.group_size > limits.MAX_ROLLOUTS:
        raise UsageError(
            f"groups times group size must be at most {limits.MAX_ROLLOUTS}, "
            f"not {controls.groups * controls.group_size}"
        )
    if controls.seed_start + controls.groups - 1 > limits.MAX_SEED:
        raise UsageError("the last group's seed would exceed 2^63-1")
    if not (math.isfinite(controls.temperature) and controls.temperature >= 0):
        raise UsageError("temperature must be finite and not negative")
    if not math.isfinite(controls.protocol_error_reward):
        raise UsageError("protocol error reward must be finite")
    budget = controls.thinking_budget_tokens
    if budget is None:
        return
    if not controls.thinking:
        raise UsageError("a thinking budget needs thinking on")
    if not 0 <= budget < controls.max_action_tokens:
        raise UsageError("thinking budget must be below max action tokens")


def recorded_controls(summary: OpenEnvRolloutSummary) -> CollectionControls:
    """Return the controls a summary records."""
    budget = summary.thinking_budget_tokens
    return CollectionControls(
        groups=summary.groups,
        group_size=summary.group_size,
        seed_start=summary.seed_start,
        max_steps=summary.max_steps,
        concurrency=summary.concurrency,
        max_action_tokens=summary.max_action_tokens,
        thinking_budget_tokens=None if isinstance(budget, UnsetType) else budget,
        temperature=summary.temperature,
        thinking=summary.thinking,
        protocol_error_reward=summary.protocol_error_reward,
        max_recoverable_errors=summary.max_recoverable_errors,
        capacity_wait_seconds=summary.capacity_wait_seconds,
    )


def reset_templates(
    shared: JsonValue, aligned: list[JsonValue], environments: int
) -> list[dict[str, JsonValue]]:
    """Return the seed-free reset object of each environment.

    Args:
        shared: One object for all environments.
        aligned: One object per environment, or empty.
        environments: How many environments take part.

    Raises:
        UsageError: Both are given, they do not align, or one is no object or too
            large.
    """
    if aligned and shared:
        raise UsageError("give shared reset options or one per environment, not both")
    if aligned and len(aligned) != environments:
        raise UsageError(
            f"{len(aligned)} reset options for {environments} environments; "
            "give one per environment"
        )
    templates = []
    for options in aligned or [shared] * environments:
        if not isinstance(options, dict):
            raise UsageError("reset options must be a JSON object")
        if len(canonical_bytes(options)) > limits.MAX_RESET_OPTIONS_BYTES:
            raise UsageError(
                f"reset options are over {limits.MAX_RESET_OPTIONS_BYTES} bytes"
            )
        seed_free = {key: value for key, value in options.items() if key != "seed"}
        templates.append(sorted_json(seed_free))
    return templates


def reset_plan_digest(templates: list[dict[str, JsonValue]]) -> Sha256:
    """Return the digest of the ordered seed-free reset objects."""
    return digest_json(templates)


def effective_reset(template: dict[str, JsonValue], seed: int) -> dict[str, JsonValue]:
    """Return the reset object of a group: its template plus ``seed``."""
    reset: dict[str, JsonValue] = sorted_json({**template, "seed": seed})
    return reset


def generation_seed(seed: int, candidate_index: int, step_index: int) -> int:
    """Return the sampling seed of one turn, an unsigned 64-bit integer.

    It depends on neither the group index nor the adapter, so both sides of a paired
    evaluation share it.
    """
    candidate = (candidate_index * CANDIDATE_MULTIPLIER) & U64
    step = (step_index * STEP_MULTIPLIER) & U64
    return seed ^ candidate ^ step


def seed_intervals_overlap(
    one_start: int, one_groups: int, other_start: int, other_groups: int
) -> bool:
    """Say whether two half-open seed intervals share a seed."""
    return (
        one_start < other_start + other_groups and other_start < one_start + one_groups
    )


def controls_from(values: dict[str, object]) -> CollectionControls:
    """Build controls from named values, types checked.

    Raises:
        UsageError: A value has the wrong type or name.
    """
    try:
        return msgspec.convert(values, CollectionControls)
    except msgspec.ValidationError as error:
        raise UsageError(f"invalid collection control: {error}") from error


def check_plan(
    summary: OpenEnvRolloutSummary,
    replay: OpenEnvReplayManifest,
    in_summary: Callable[..., Any],
    in_replay: Callable[..., Any],
) -> None:
    """Check that a manifest was played to the plan of its summary.

    Args:
        summary: Holds the plan, and the digest of its reset objects.
        replay: What was played.
        in_summary: Called for the first contradiction there.
        in_replay: Called for the first contradiction there.
    """
    if summary.rollout_count != summary.groups * summary.group_size:
        in_summary(
            "plan",
            "/rollout_count",
            "it is groups times group size",
            summary.groups * summary.group_size,
            summary.rollout_count,
        )
    if len(replay.groups) != summary.groups:
        in_replay(
            "plan",
            "/groups",
            "the summary has another number",
            summary.groups,
            len(replay.groups),
        )
    templates: dict[int, JsonValue] = {}
    for index, group in enumerate(replay.groups):
        _check_group_plan(group, index, summary, in_replay)
        template = {k: v for k, v in group.reset_payload.items() if k != "seed"}
        known = templates.setdefault(group.environment_index, template)
        if not same_json(known, template):
            in_replay(
                "plan",
                f"/groups/{index}/reset_payload",
                "one environment has one reset object",
                known,
                template,
            )
    _check_reset_digest(
        summary, [templates[i] for i in sorted(templates)], in_summary, in_replay
    )


def _check_reset_digest(
    summary: OpenEnvRolloutSummary,
    templates: list[JsonValue],
    in_summary: Callable[..., Any],
    in_replay: Callable[..., Any],
) -> None:
    name, found = "reset_plan_sha256", reset_plan_digest(templates)
    if isinstance(summary, LegacyRolloutSummary) and summary.schema == SUMMARY_V2:
        name, found = "reset_options_sha256", digest_json(templates[0])
        for index, template in enumerate(templates):
            if not same_json(templates[0], template):
                in_replay(
                    "plan",
                    f"/groups/{index}/reset_payload",
                    "version 2 has one reset object for all environments",
                    templates[0],
                    template,
                )
    if found != getattr(summary, name):
        in_summary(
            "plan",
            f"/{name}",
            "the manifest has another plan",
            found,
            getattr(summary, name),
        )


def _check_group_plan(
    group: ReplayGroup,
    index: int,
    summary: OpenEnvRolloutSummary,
    fail: Callable[..., Any],
) -> None:
    at = f"/groups/{index}"
    seed = summary.seed_start + index
    environment = index % len(summary.environments)
    for name, expected, found in (
        ("group_index", index, group.group_index),
        ("environment_index", environment, group.environment_index),
        ("seed", seed, group.seed),
        ("reset_payload/seed", seed, group.reset_payload.get("seed")),
        ("candidates", summary.group_size, len(group.candidates)),
        ("reset_observation/done", False, group.reset_observation.done),
    ):
        if not same_json(expected, found):
            fail("plan", f"{at}/{name}", "the plan says otherwise", expected, found)
    for place, candidate in enumerate(group.candidates):
        if candidate.candidate_index != place:
            fail(
                "plan",
                f"{at}/candidates/{place}/candidate_index",
                "candidates must be contiguous",
                place,
                candidate.candidate_index,
            )
