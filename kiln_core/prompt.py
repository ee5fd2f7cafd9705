"""The text a policy reads: system prompt, observations, errors.

Verification regenerates every prompt, so a released version is never changed: a new one
is appended to ``SYSTEM_PROMPTS`` and old bundles go on verifying for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET

from kiln_core.canonical import JsonValue, canonical_bytes
from kiln_core.discovery import EnvironmentInspection
from kiln_core.manifest import Observation, ProtocolError, observation_lines
from kiln_core.records import ChatMessage, TurnSegment

__all__ = [
    "error_text",
    "initial_messages",
    "observation_text",
    "result_segment",
    "segment_messages",
]

RESET_LABEL: Final = "Reset result"
STEP_LABEL: Final = "Step result"


def system_text_1(inspection: EnvironmentInspection) -> str:
    """Return version 1 of the system prompt.

    The schema is shown without annotations that only tools read, since a prompt's
    length is most of what a small model costs.
    """
    metadata = inspection.identity.metadata
    schema = canonical_bytes(model_schema(inspection.schema.action)).decode()
    return (
        f'You act in the environment "{metadata.name}". {metadata.description}\n'
        "Answer each message with exactly one JSON object that satisfies this JSON "
        f"Schema, without Markdown or comments:\n{schema}"
    )


SYSTEM_PROMPTS: Final[tuple[Callable[[EnvironmentInspection], str], ...]] = (
    system_text_1,
)
"""Every released version, oldest first; the last is used for new collections."""


def initial_messages(
    inspection: EnvironmentInspection,
    reset_observation: Observation,
    version: int = len(SYSTEM_PROMPTS),
) -> list[ChatMessage]:
    """Return the prompt of an episode: a system and a user message.

    Args:
        inspection: The environment.
        reset_observation: What ``reset`` answered.
        version: 1-based prompt version.
    """
    return first_messages(SYSTEM_PROMPTS[version - 1](inspection), reset_observation)


def first_messages(system: str, reset_observation: Observation) -> list[ChatMessage]:
    """Return the prompt of an episode whose system text is known."""
    return [
        ChatMessage(role="system", content=system),
        ChatMessage(
            role="user", content=observation_text(reset_observation, RESET_LABEL)
        ),
    ]


def observation_text(observation: Observation, label: str = STEP_LABEL) -> str:
    """Return one observation as `observation_texts` does."""
    return observation_texts([observation], label)[0]


def observation_texts(
    observations: Sequence[Observation], label: str = STEP_LABEL
) -> list[str]:
    """Return observations as the policy reads them.

    A non-blank ``input_text`` string in the observation is the decision prompt,
    verbatim and alone; otherwise a label and the complete wire observation.
    """
    prompts = [_decision_prompt(one.observation) for one in observations]
    others = [
        one for one, prompt in zip(observations, prompts, strict=True) if prompt is None
    ]
    wires = iter(observation_lines(others))
    head = f"{label} as JSON: observation, reward, done, optional metadata\n"
    return [
        head + next(wires).decode() if prompt is None else prompt for prompt in prompts
    ]


def _decision_prompt(observation: JsonValue) -> str | None:
    if isinstance(observation, dict):
        text = observation.get("input_text")
        if isinstance(text, str) and text.strip():
            return text
    return None


def error_text(error: ProtocolError, *, continued: bool) -> str:
    """Return a protocol error as the feedback turn that retains it."""
    return canonical_bytes(
        {
            "openenv_error": msgspec.to_builtins(error),
            "recoverable": continued,
            "done": not continued,
        }
    ).decode()


def result_segment(text: str, *, harness: bool) -> TurnSegment:
    """Return the turn that tells what came of an action.

    Args:
        text: What the policy reads.
        harness: Whether all of it is harness text, so that no byte is ever trained.
    """
    return TurnSegment(
        role="tool",
        content=text,
        kind="observation",
        warning_prefix_len=len(text.encode()) if harness else UNSET,
    )


def schema_text(messages: list[ChatMessage]) -> str:
    """Return the action schema that a prompt shows, as compact JSON.

    It stands on the last line of the system message in every version, so that a
    dataset alone says what guided it.
    """
    return messages[0].content.rpartition("\n")[2]


def segment_messages(trajectory: list[TurnSegment]) -> list[ChatMessage]:
    """Return a trajectory as chat messages."""
    return [
        ChatMessage(role=segment.role, content=segment.content)
        for segment in trajectory
    ]


def model_schema(schema: JsonValue) -> JsonValue:
    """Return an action schema without titles and the SDK's inherited ``metadata``.

    Every OpenEnv action inherits an open ``metadata`` object that carries nothing a
    policy decides; a property that merely has that name but another shape stays.
    """
    if not isinstance(schema, dict):
        return schema
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    kept = {name for name in names if isinstance(name, str)}
    shown = {key: _model_member(key, member, kept) for key, member in schema.items()}
    if isinstance(shown.get("title"), str):
        del shown["title"]
    return shown


def _model_member(key: str, member: Any, required: set[str]) -> Any:
    if key in {"properties", "$defs", "definitions", "patternProperties"}:
        if not isinstance(member, dict):
            return member
        return {
            name: model_schema(part)
            for name, part in member.items()
            if key != "properties"
            or name in required
            or not is_inherited_metadata(name, part)
        }
    if key in {"allOf", "anyOf", "oneOf", "prefixItems"} and isinstance(member, list):
        return [model_schema(part) for part in member]
    if key in {"items", "additionalProperties", "not", "if", "then", "else"}:
        return model_schema(member)
    return member


def is_inherited_metadata(name: str, schema: JsonValue) -> bool:
    """Say whether a property is the open metadata object every SDK action has."""
    return (
        name == "metadata"
        and isinstance(schema, dict)
        and schema.get("type") == "object"
        and schema.get("additionalProperties") is True
        and "properties" not in schema
    )
