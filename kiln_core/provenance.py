"""Who produced a completion: policy identity and ``kiln.rollout-provenance.v1``.

The chat endpoint returns one `RolloutProvenance` with a completion when it is asked
to; the collector keeps its policy identity, and projects the token ids and
log-probabilities into the trace of a rollout (``kiln_core.trace``).
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from kiln_core import limits
from kiln_core.canonical import JsonValue, Record, Sha256, compact, digest_json

__all__ = [
    "ActionToken",
    "AdapterIdentity",
    "BehaviorPolicyIdentity",
    "RolloutProvenance",
    "SamplingParameters",
    "TemplateInvocation",
    "ThinkingBudget",
    "TokenizerIdentity",
]

ROLLOUT_PROVENANCE_SCHEMA: Final = "kiln.rollout-provenance.v1"
SCORED_PAYLOAD_SCHEMA: Final = "kiln.scored-rollout-payload.v1"
MAX_TEMPLATE_MEMBERS = 256
MAX_TEMPLATE_BYTES = limits.MIB
MAX_STOP_BYTES = 16 * limits.KIB
MAX_LOGPROB = 1e-6
"""A log-probability above zero by more than rounding is not one."""

CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f]")

IdentityText: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=limits.MAX_IDENTITY_TEXT_BYTES)
]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]


@lru_cache(maxsize=1024)
def check_identity_text(text: str, what: str) -> None:
    """Check a name that goes into identities.

    Raises:
        ValueError: It is blank, untrimmed, too long, or holds control characters.
    """
    if not text or text != text.strip():
        raise ValueError(f"{what} must be non-empty and trimmed")
    if len(text.encode()) > limits.MAX_IDENTITY_TEXT_BYTES:
        raise ValueError(f"{what} is over {limits.MAX_IDENTITY_TEXT_BYTES} bytes")
    if CONTROL.search(text):
        raise ValueError(f"{what} holds control characters")


class AdapterIdentity(Record, frozen=True, kw_only=True):
    """The LoRA adapter a policy ran with."""

    name: IdentityText
    """Name under which it was loaded."""
    content_sha256: Sha256
    """Digest of its configuration without paths, and of its tensors."""

    def __post_init__(self) -> None:
        check_identity_text(self.name, "adapter name")


class BehaviorPolicyIdentity(Record, frozen=True, kw_only=True):
    """Exactly which policy produced a completion; equality is field by field."""

    served_model_id: IdentityText
    """Name in ``/v1/models``."""
    base_model_sha256: Sha256
    """Digest of the base configuration and weights."""
    adapter: AdapterIdentity | UnsetType = UNSET
    """Absent for the base model."""
    inference_config_sha256: Sha256
    """Digest of the inference runtime envelope; sampling is not in it."""
    implementation: IdentityText
    """Such as ``kiln/0.1.0``."""

    def __post_init__(self) -> None:
        check_identity_text(self.served_model_id, "served model id")
        check_identity_text(self.implementation, "implementation")

    @property
    def adapter_name(self) -> str | None:
        """Name of the adapter, None for the base model."""
        return None if isinstance(self.adapter, UnsetType) else self.adapter.name


class ActionToken(Record, frozen=True, kw_only=True):
    """One generated token."""

    sequence_index: Annotated[int, Meta(ge=0)]
    """Position in ``input_token_ids``."""
    token_id: TokenId
    source: Literal["sampled", "forced"]
    """``forced`` tokens were written by the thinking budget."""
    behavior_logprob: float | None
    """Natural log under the distribution it was sampled from; null when forced."""

    def __post_init__(self) -> None:
        logprob = self.behavior_logprob
        if self.source == "forced":
            if logprob is not None:
                raise ValueError("a forced token has no behavior_logprob")
        elif logprob is None or not math.isfinite(logprob) or logprob > MAX_LOGPROB:
            raise ValueError("a sampled token needs a finite behavior_logprob <= 0")


class TokenizerIdentity(Record, frozen=True, kw_only=True):
    """What turned text into ids."""

    vocab_sha256: Sha256
    config_sha256: Sha256
    chat_template_sha256: Sha256

    @property
    def sha256(self) -> Sha256:
        """One digest over the three."""
        return digest_json(
            {name: getattr(self, name) for name in self.__struct_fields__}
        )


class TemplateInvocation(Record, frozen=True, kw_only=True):
    """What else the chat template was given; members are absent when default."""

    tools: (
        Annotated[list[dict[str, Any]], Meta(max_length=MAX_TEMPLATE_MEMBERS)]
        | UnsetType
    ) = UNSET
    tool_choice: JsonValue | UnsetType = UNSET
    template_kwargs: (
        Annotated[
            dict[
                Annotated[
                    str, Meta(min_length=1, max_length=limits.MAX_IDENTITY_TEXT_BYTES)
                ],
                JsonValue,
            ],
            Meta(max_length=MAX_TEMPLATE_MEMBERS),
        ]
        | UnsetType
    ) = UNSET

    def __post_init__(self) -> None:
        if len(compact(self)) > MAX_TEMPLATE_BYTES:
            raise ValueError("a template invocation is over a mebibyte")


class ThinkingBudget(Record, frozen=True, kw_only=True):
    """A bound after which the close tokens of reasoning are forced."""

    max_tokens: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    max_time_ms: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    close_token_ids: Annotated[list[TokenId], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if self.max_tokens is UNSET and self.max_time_ms is UNSET:
            raise ValueError("a thinking budget needs max_tokens or max_time_ms")


class SamplingParameters(Record, frozen=True, kw_only=True):
    """The sampling transform of a completion."""

    temperature: Annotated[float, Meta(ge=0)]
    top_p: Annotated[float, Meta(ge=0, le=1)]
    top_k: Annotated[int, Meta(ge=0)]
    """0 keeps every token."""
    min_p: Annotated[float, Meta(ge=0, le=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    repetition_penalty: Annotated[float, Meta(gt=0)]
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)]
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)]
    stop: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=256)]
    thinking_budget: ThinkingBudget | UnsetType = UNSET

    def __post_init__(self) -> None:
        if sum(len(text.encode()) for text in self.stop) > MAX_STOP_BYTES:
            raise ValueError(f"stop strings are over {MAX_STOP_BYTES} bytes together")


class RolloutProvenance(Record, frozen=True, kw_only=True):
    """``kiln.rollout-provenance.v1``: everything exact about one completion."""

    schema: Literal["kiln.rollout-provenance.v1"]
    input_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=2**24)]
    """Prompt and completion."""
    prompt_token_count: Annotated[int, Meta(ge=1)]
    prompt_messages_sha256: Sha256
    """Digest of the canonical JSON of the request's ``messages``."""
    scored_payload_sha256: Sha256
    """Digest of text and trajectory, the reward excluded."""
    action_tokens: Annotated[list[ActionToken], Meta(min_length=1)]
    behavior_policy: BehaviorPolicyIdentity
    tokenizer: TokenizerIdentity
    template_invocation: TemplateInvocation | UnsetType = UNSET
    sampling: SamplingParameters
    seed: Annotated[int, Meta(ge=0)]
    """Generation seed, up to 2^64-1."""
    generation_backend: Annotated[str, Meta(min_length=1, max_length=64)]

    def __post_init__(self) -> None:
        if self.prompt_token_count > len(self.input_token_ids):
            raise ValueError("prompt_token_count exceeds input_token_ids")
        if self.seed > limits.MAX_GENERATION_SEED:
            raise ValueError("seed exceeds 2^64-1")
        self._check_action_tokens()

    def _check_action_tokens(self) -> None:
        last = self.prompt_token_count - 1
        close_ids = self._close_token_ids()
        sampled = False
        for token in self.action_tokens:
            index = token.sequence_index
            if not last < index < len(self.input_token_ids):
                raise ValueError("action token indices must increase in the completion")
            if self.input_token_ids[index] != token.token_id:
                raise ValueError(f"action token {index} is not the id in the input")
            if token.source == "forced" and token.token_id not in close_ids:
                raise ValueError("a forced token must be among close_token_ids")
            sampled = sampled or token.source == "sampled"
            last = index
        if not sampled:
            raise ValueError("at least one action token must be sampled")

    def _close_token_ids(self) -> frozenset[int]:
        budget = self.sampling.thinking_budget
        if isinstance(budget, UnsetType):
            return frozenset()
        return frozenset(budget.close_token_ids)


def scored_payload_digest(text: str, trajectory: list[JsonValue]) -> Sha256:
    """Return the digest that binds a completion's text and trajectory."""
    return digest_json(
        {"schema": SCORED_PAYLOAD_SCHEMA, "text": text, "trajectory": trajectory}
    )
