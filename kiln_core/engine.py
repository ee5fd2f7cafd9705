"""The engine port: what a server needs of whatever samples and trains.

An engine is found by entry point (``kiln.engines``) and never imported by a frontend.
It runs its device loop on threads of its own: `Engine.submit` returns at once with a
future, so that an event loop can await it, and training runs in the caller's thread
beside serving.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from kiln_core.canonical import JsonValue, Sha256
from kiln_core.grpo import GrpoConfig
from kiln_core.lineage import OpenEnvTrainingData
from kiln_core.provenance import BehaviorPolicyIdentity, TokenizerIdentity
from kiln_core.records import AgenticGroup, ChatMessage
from kiln_core.trace import Span

__all__ = [
    "MAX_TOP_LOGPROBS",
    "AdapterInfo",
    "AnswerToken",
    "Delta",
    "Engine",
    "EngineSettings",
    "Generation",
    "GenerationRequest",
    "GuideReport",
    "TokenChoice",
    "TrainingJob",
    "TrainingOutcome",
    "TrainingProgress",
]


MAX_TOP_LOGPROBS: Final = 20
"""Alternatives that can be asked for at each token."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is created."""

    model: str = "builtin:tiny"
    """``builtin:tiny``, ``builtin:random``, or the path of a Hugging Face folder or a
    GGUF file."""
    served_model_id: str | None = None
    """Name in ``/v1/models``; None takes the model's own."""
    adapter_dir: Path
    """Where adapters live, one folder each."""
    slots: int = 16
    """Requests decoded together."""
    max_queued_requests: int = 1024
    context_tokens: int | None = None
    """Longest prompt and action together; None takes the model's own."""
    compile_cache_dir: Path | None = None
    """Persistent compilation cache; None uses the user's cache folder."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to sample; the same request always gives the same tokens."""

    messages: tuple[ChatMessage, ...]
    prompt: str | tuple[int, ...] | None = None
    """Taken as it is, text or token ids, where there are no messages."""
    seed: int
    """0 to 2^64-1."""
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    adapter: str | None = None
    """None is the base model."""
    thinking: bool = True
    """Takes effect only where the template has a thinking mode."""
    thinking_budget_tokens: int | None = None
    action_schema: JsonValue | None = None
    """JSON Schema the text after any reasoning must satisfy; None leaves it free."""
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    """0 to `MAX_TOP_LOGPROBS`: describe every token of the answer, each with so many of
    the likeliest in its place. Changes nothing about what is sampled."""


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A token, and how likely it was where it stands."""

    token_id: int
    text: str
    """Such as U+FFFD for part of a character."""
    data: bytes
    """Its own bytes."""
    logprob: float
    """In nats, under the distribution that was sampled from."""


class AnswerToken(TokenChoice, frozen=True, kw_only=True):
    """A token of the answer."""

    top: tuple[TokenChoice, ...]
    """Likeliest first; only tokens that could be drawn, so one where it was forced."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a generation has said since the last one; whole characters only."""

    reasoning: str = ""
    content: str = ""
    """Nothing that may still turn out to begin a stop string."""
    tokens: tuple[AnswerToken, ...] = ()
    """Those of the content, where ``top_logprobs`` asks for them."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled completion and everything exact about it."""

    content: str
    """Text after any reasoning, without stop token or stop string."""
    reasoning_content: str | None
    """Reasoning without opener and close tokens; None without a thinking mode."""
    reasoning_closed: bool
    """Whether the close of reasoning was generated (or no reasoning was opened)."""
    finish_reason: Literal["stop", "length"]
    prompt_token_ids: tuple[int, ...]
    action_token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """Per action id, in nats, under the distribution it was sampled from.

    Exactly 0.0 where the grammar left one choice; None where the thinking budget forced
    the token. Values are float32, written as their shortest decimal.
    """
    content_spans: tuple[Span, ...]
    """Per message, the prompt positions that hold its content."""
    close_token_ids: tuple[int, ...]
    """Ids that close reasoning in this model; empty without a thinking mode."""
    thinking: bool
    """Whether a thinking mode was in effect."""
    guide_sha256: Sha256 | None
    """Digest of the narrowed grammar; None when unguided."""
    behavior_policy: BehaviorPolicyIdentity
    tokenizer: TokenizerIdentity
    backend: str
    """Such as ``jax-cpu``."""
    answer_tokens: tuple[AnswerToken, ...] = ()
    """Tokens of the content, where ``top_logprobs`` asks for them."""


class GuideReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an action schema can guide decoding."""

    guide_sha256: Sha256 | None
    """None when it cannot: the environment is then played unguided."""
    warning: str | None = None
    """Why not, or what was narrowed away."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter folder."""

    name: str
    loaded: bool
    has_config: bool
    has_weights: bool
    size_bytes: int
    content_sha256: Sha256 | None
    """Digest of configuration and tensors; None when it cannot be read."""
    problem: str | None = None
    """Why it cannot be loaded."""


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """One GRPO job as the server hands it to an engine."""

    job_id: str
    groups: tuple[AgenticGroup, ...]
    corpus_sha256: Sha256
    """Digest of the admitted corpus: canonical lines of ``groups``."""
    lineage: OpenEnvTrainingData | None
    """None for a corpus without OpenEnv provenance."""
    data_source: str
    """Such as ``inline`` or a path."""
    config: GrpoConfig
    """Materialised; ``output_name`` and ``seed`` are set."""


class TrainingProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job stands after an optimizer step."""

    step: int
    steps: int
    epoch: int
    loss: float
    mean_reward: float
    kl: float
    """Mean log ratio to the reference, in nats; 0 without a KL term."""
    entropy: float
    """Mean entropy of the distributions that ids were drawn from, in nats."""
    clip_fraction: float
    """Share of the step's ids whose importance ratio was clipped."""
    logprob_agreement: float
    """Largest |ratio - 1| between recorded and recomputed probabilities, so far."""


class TrainingOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished job left behind."""

    adapter_path: Path
    adapter_sha256: Sha256
    receipt_path: Path
    manifest_path: Path
    steps: int
    final_loss: float
    warnings: tuple[str, ...] = ()


class Engine(Protocol):
    """A model that samples, holds adapters, and trains them."""

    served_model_id: str
    slots: int
    context_tokens: int
    has_thinking_mode: bool

    @property
    def ready(self) -> bool:
        """Whether every program a request may meet is compiled."""

    def start(self) -> None:
        """Start the device loop and compile ahead; returns when ready."""

    def stop(self) -> None:
        """Fail what is queued, finish what runs, and end every thread."""

    def submit(
        self,
        request: GenerationRequest,
        listener: Callable[[Delta], None] | None = None,
    ) -> Future[Generation]:
        """Queue a request; cancelling the future frees its slot.

        Args:
            request: What to sample.
            listener: Told what is said while it is said; what it was told is, put
                together, the generation's text. It is called in a thread of the engine,
                before the future is done, and must return at once.

        Raises:
            AdapterNotFound: The adapter is not loaded.
            UsageError: A value is out of range.
            QueueFull: The queue is full.
            ContextOverflow: Prompt and action cannot fit.
        """

    def guide(self, action_schema: JsonValue, max_tokens: int) -> GuideReport:
        """Say whether a schema can guide decoding within ``max_tokens``."""

    def policy_identity(self, adapter: str | None) -> BehaviorPolicyIdentity:
        """Return who would answer now.

        Raises:
            UsageError: The adapter does not exist or cannot be loaded.
        """

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """List adapter folders by name."""

    def load_adapter(self, name: str) -> AdapterInfo:
        """Make an adapter servable.

        Raises:
            UsageError: There is no such adapter, or it does not fit the model.
            CapacityFull: Every adapter slot is taken.
        """

    def unload_adapter(self, name: str) -> None:
        """Free an adapter's slot.

        Raises:
            AdapterNotFound: It is not loaded.
        """

    def admit_training(self, config: GrpoConfig) -> None:
        """Check everything about a configuration that cannot change later.

        Raises:
            UsageError: This engine cannot train that way.
            Conflict: The output adapter exists already.
        """

    def train(
        self,
        job: TrainingJob,
        report: Callable[[TrainingProgress], None],
        cancelled: Callable[[], bool],
    ) -> TrainingOutcome:
        """Run a job to its end in this thread, beside serving.

        Raises:
            TrainingError: It failed or was cancelled; nothing servable is left.
        """
