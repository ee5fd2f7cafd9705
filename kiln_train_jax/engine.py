"""The JAX engine: the port of `kiln_core.engine`, put together.

A caller's thread renders the prompt, compiles the guide and takes the adapter's seat;
the device loop does the rest (`scheduler.py`) and answers through a future. Everything
that can be wrong with a request is found before it is queued.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from kiln_core import limits
from kiln_core.canonical import digest_json
from kiln_core.engine import MAX_TOP_LOGPROBS, Generation, GuideReport
from kiln_core.errors import ContextOverflow, UsageError
from kiln_train_jax.attention import CHUNK, cache_length
from kiln_train_jax.bank import AdapterBank, Seat
from kiln_train_jax.folder import load_folder
from kiln_train_jax.guide import Guide, GuideCompiler, Unguidable, mask_of
from kiln_train_jax.identity import backend_name, inference_config, policy_identity
from kiln_train_jax.library import AdapterLibrary
from kiln_train_jax.memory import give_back
from kiln_train_jax.programs import BLOCK, FEEDS, Caches, Programs, empty_caches
from kiln_train_jax.rows import Row, Rules, Sampling
from kiln_train_jax.scheduler import Scheduler, Ticket
from kiln_train_jax.telling import (
    AnswerStream,
    Vocabulary,
    answer_tokens,
    shortest,
)
from kiln_train_jax.template import CLOSER, Rendering, as_message

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiln_core.canonical import JsonValue
    from kiln_core.engine import (
        AdapterInfo,
        Delta,
        EngineSettings,
        GenerationRequest,
    )
    from kiln_core.provenance import BehaviorPolicyIdentity
    from kiln_train_jax.config import ModelConfig

ADAPTER_SLOTS: Final = 9
"""Slots of the bank: the base model and eight adapters."""
ADAPTER_RANK: Final = 32
"""Largest rank that can be served."""
CACHE_BYTES: Final = 2_048 * limits.MIB
"""What the caches of all slots may take, where no context is asked for."""
LEAST_CONTEXT: Final = 1_024
"""Tokens a slot holds all the same, or as many as the model has."""
POOL_BYTES: Final = 256 * limits.MIB
"""Bound on the prefix pool."""
POOL_BLOCKS: Final = 512
DTYPE: Final = jnp.float32


class JaxEngine:
    """A model that samples and holds adapters."""

    def __init__(self, settings: EngineSettings) -> None:
        """Load the model; `start` compiles and begins to serve.

        Args:
            settings: Which model, where its adapters lie, how many slots.

        Raises:
            FileUnreadable: A file of the model is missing.
            InvalidRecord: A file of the model is not what it should be.
            UsageError: The context is longer than the model's.
        """
        self._settings = settings
        self.folder = load_folder(settings.model, dtype=DTYPE)
        config = self.folder.config
        self.served_model_id = settings.served_model_id or self.folder.served_model_id
        self.slots = settings.slots
        self.context_tokens = settings.context_tokens or default_context(
            config, self.slots
        )
        if self.context_tokens > config.max_position_embeddings:
            raise UsageError(
                f"context_tokens {self.context_tokens} is over the model's "
                f"{config.max_position_embeddings}"
            )
        self.has_thinking_mode = self.folder.template.thinking
        self.library = AdapterLibrary(
            settings.adapter_dir, config, self.folder.base_sha256
        )
        self.bank = AdapterBank(config, slots=ADAPTER_SLOTS, rank=ADAPTER_RANK)
        self._guides = GuideCompiler(self.folder.tokenizer, stop_id=self.folder.end_id)
        self._cache_tokens = cache_length(self.context_tokens, max(FEEDS))
        self._inference_sha256 = digest_json(
            inference_config(
                self.folder,
                slots=self.slots,
                cache_tokens=self._cache_tokens,
                rank=ADAPTER_RANK,
                dtype=DTYPE,
            )
        )
        self._vocabulary = Vocabulary(
            self.folder.tokenizer.decode, self._guides.token_bytes
        )
        self._close_ids = tuple(self.folder.tokenizer.encode_markup(CLOSER))
        self._free_mask = self._speakable()
        self._scheduler: Scheduler | None = None
        self._stopped: Future[None] = Future()
        """Done when the engine was told to end."""

    @property
    def ready(self) -> bool:
        """Whether every program a request may meet is compiled."""
        return self._scheduler is not None

    @property
    def prefix_counts(self) -> tuple[int, int]:
        """Prefix blocks copied, and computed, since the start."""
        return (0, 0) if self._scheduler is None else self._scheduler.prefix_counts

    def start(self) -> None:
        """Compile ahead and start the device loop; returns when ready, or stopped.

        XLA cannot be interrupted, so it compiles in a thread that a stop leaves behind.
        """
        _use_compilation_cache(self._settings.compile_cache_dir)
        compiled: Future[Scheduler] = Future()

        def compile_ahead() -> None:
            try:
                compiled.set_result(self._new_scheduler())
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                compiled.set_exception(error)

        threading.Thread(target=compile_ahead, name="kiln-compile", daemon=True).start()
        awaited: list[Future[Any]] = [compiled, self._stopped]
        wait(awaited, return_when=FIRST_COMPLETED)
        if self._stopped.done():
            return
        scheduler = compiled.result()
        give_back()
        scheduler.start()
        self._scheduler = scheduler

    def _new_scheduler(self) -> Scheduler:
        self.bank.warm()
        blocks = self._pool_blocks()
        caches = self._empty_caches(blocks)
        return Scheduler(
            Programs(self.folder.model, caches, self.bank.arrays, self._stopped.done),
            self.bank,
            lambda: self._empty_caches(blocks),
            slots=self.slots,
            blocks=blocks,
            max_queued_requests=self._settings.max_queued_requests,
        )

    def stop(self) -> None:
        """Fail what is queued, finish what runs, and end the device loop for good."""
        if not self._stopped.done():
            self._stopped.set_result(None)
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.stop()

    def submit(
        self,
        request: GenerationRequest,
        listener: Callable[[Delta], None] | None = None,
    ) -> Future[Generation]:
        """Queue a request; cancelling the future frees its slot.

        Args:
            request: What to sample.
            listener: Told what is said while it is said.

        Raises:
            AdapterNotFound: The adapter is not loaded.
            UsageError: A value is out of range, or the engine is not started.
            QueueFull: The queue is full.
            ContextOverflow: Prompt and action cannot fit.
        """
        _check_ranges(request)
        if self._scheduler is None:
            raise UsageError("the engine is not started")
        prompt = self._render(request)
        self._check_context(prompt, request)
        thinking = request.thinking and self.has_thinking_mode
        thinking = thinking and request.prompt is None
        rules = self._rules(request, thinking=thinking)
        sampling = Sampling(
            request.seed,
            request.temperature,
            request.top_p,
            request.top_k,
            request.min_p,
        )
        seat = self.bank.acquire(request.adapter)
        decode = self.folder.tokenizer.decode
        stream: AnswerStream | None = None
        if listener is not None:
            stream = AnswerStream(listener, self._vocabulary, request.stop)

        def finish(row: Row) -> Generation:
            identity = self._policy(request.adapter, seat)
            generation = self._generation(row, prompt, identity)
            if stream is not None:
                stream.finish(generation)
            return generation

        ticket = Ticket(
            lambda: Row(prompt.tokens, sampling, rules, decode),
            finish,
            Future(),
            seat=seat,
            follow=None if stream is None else stream.follow,
        )
        try:
            self._scheduler.submit(ticket)
        except BaseException:
            self.bank.release(seat.slot)
            raise
        return ticket.future

    def guide(self, action_schema: JsonValue, max_tokens: int) -> GuideReport:
        """Say whether a schema can guide decoding within `max_tokens`.

        Args:
            action_schema: JSON Schema of the action.
            max_tokens: Bound on one generation.
        """
        try:
            guide = self._guides.compile(action_schema, max_tokens)
        except Unguidable as error:
            return GuideReport(
                guide_sha256=None,
                warning=f"the action schema cannot guide decoding: {error}",
            )
        return GuideReport(
            guide_sha256=guide.sha256, warning="; ".join(guide.notes) or None
        )

    def policy_identity(self, adapter: str | None) -> BehaviorPolicyIdentity:
        """Return who would answer now.

        Raises:
            UsageError: The adapter does not exist or cannot be loaded.
        """
        if adapter is None:
            seat = Seat(0, None)
        elif adapter in self.bank.names():
            seat = self.bank.seat(adapter)
        else:
            seat = Seat(0, self.library.content_sha256(adapter))
        return self._policy(adapter, seat)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """List adapter folders by name."""
        return self.library.list(self.bank.names())

    def load_adapter(self, name: str) -> AdapterInfo:
        """Make an adapter servable.

        Raises:
            UsageError: There is no such adapter, or it does not fit the model.
            CapacityFull: Every adapter slot is taken.
        """
        self.bank.load(name, self.library.read(name))
        return self.library.describe(name, loaded=True)

    def unload_adapter(self, name: str) -> None:
        """Free an adapter's slot.

        Raises:
            AdapterNotFound: It is not loaded.
        """
        self.bank.unload(name)

    def _render(self, request: GenerationRequest) -> Rendering:
        if request.prompt is not None:
            return Rendering(self._raw(request), ())
        messages = [as_message(message) for message in request.messages]
        return self.folder.template.render(messages, enable_thinking=request.thinking)

    def _raw(self, request: GenerationRequest) -> list[int]:
        """Return the ids of a prompt that no template wrote.

        Raises:
            UsageError: It is empty, or holds ids that stand for no token.
        """
        if request.messages:
            raise UsageError("a request has messages or a prompt, not both")
        tokenizer = self.folder.tokenizer
        if isinstance(request.prompt, str):
            tokens = tokenizer.encode_markup(request.prompt)
        else:
            tokens = list(request.prompt or ())
        if not tokens:
            raise UsageError("the prompt is empty")
        for token in tokens:
            if not 0 <= token < tokenizer.vocab_size or not tokenizer.has(token):
                raise UsageError(f"{token} is no token id of {self.served_model_id}")
        return tokens

    def _check_context(self, prompt: Rendering, request: GenerationRequest) -> None:
        """Check that prompt and action fit.

        Raises:
            ContextOverflow: They do not.
        """
        needed = len(prompt.tokens) + request.max_tokens
        if needed > self.context_tokens:
            raise ContextOverflow(
                f"a prompt of {len(prompt.tokens)} tokens and an action of up to "
                f"{request.max_tokens} need {needed}, the context has "
                f"{self.context_tokens}",
                tokens=needed,
                limit=self.context_tokens,
            )

    def _rules(self, request: GenerationRequest, *, thinking: bool) -> Rules:
        guide: Guide | None = None
        if request.action_schema is not None:
            try:
                guide = self._guides.compile(request.action_schema, request.max_tokens)
            except Unguidable:
                guide = None  # `guide` has told the caller why
        return Rules(
            max_tokens=request.max_tokens,
            stop_ids=self.folder.stop_ids,
            end_id=self.folder.end_id,
            free_mask=self._free_mask,
            stop_texts=request.stop,
            guide=guide,
            thinking=thinking,
            thinking_budget=request.thinking_budget_tokens if thinking else None,
            close_ids=self._close_ids,
            top_logprobs=request.top_logprobs,
        )

    def _policy(self, name: str | None, seat: Seat) -> BehaviorPolicyIdentity:
        adapter = None
        if name is not None and seat.content_sha256 is not None:
            adapter = (name, seat.content_sha256)
        return policy_identity(
            self.folder, self._inference_sha256, self.served_model_id, adapter
        )

    def _generation(
        self, row: Row, prompt: Rendering, identity: BehaviorPolicyIdentity
    ) -> Generation:
        """Turn a finished row into the answer."""
        rules = row.rules
        reasoning, content = self._texts(row)
        return Generation(
            content=content,
            reasoning_content=reasoning if rules.thinking else None,
            reasoning_closed=row.answer_start is not None,
            finish_reason=row.finish_reason or "length",
            prompt_token_ids=tuple(prompt.tokens),
            action_token_ids=tuple(row.action),
            logprobs=tuple(
                None if logprob is None else shortest(logprob)
                for logprob in row.logprobs
            ),
            content_spans=prompt.spans,
            close_token_ids=self._close_ids if self.has_thinking_mode else (),
            thinking=rules.thinking,
            guide_sha256=rules.guide.sha256 if rules.guide is not None else None,
            behavior_policy=identity,
            tokenizer=self.folder.tokenizer_identity,
            backend=backend_name(),
            answer_tokens=answer_tokens(row, self._vocabulary),
        )

    def _texts(self, row: Row) -> tuple[str, str]:
        """Return the reasoning and the answer of a finished row as text."""
        action = row.action
        if action and action[-1] in row.rules.stop_ids:
            action = action[:-1]
        decode = self.folder.tokenizer.decode
        if row.answer_start is None:
            return decode(action), ""
        close = len(self._close_ids) if row.rules.thinking else 0
        answer = decode(action[row.answer_start :])[: row.answer_stop]
        return decode(action[: row.answer_start - close]), answer

    def _speakable(self) -> np.ndarray:
        """Return the mask of free speech: text, the close of reasoning, the end."""
        tokenizer = self.folder.tokenizer
        kept = {
            token
            for token in range(tokenizer.vocab_size)
            if tokenizer.has(token) and token not in tokenizer.special_ids
        }
        spoken = kept | self.folder.stop_ids | set(self._close_ids)
        return mask_of(sorted(spoken), tokenizer.vocab_size)

    def _pool_blocks(self) -> int:
        """Return how many prefix blocks the pool holds: at least one full context."""
        block_bytes = token_bytes(self.folder.config) * BLOCK
        fitting = min(POOL_BYTES // block_bytes, POOL_BLOCKS)
        return max(fitting, self.context_tokens // BLOCK)

    def _empty_caches(self, blocks: int) -> Caches:
        return empty_caches(
            self.folder.config,
            slots=self.slots,
            cache_tokens=self._cache_tokens,
            blocks=blocks,
            dtype=DTYPE,
        )


def token_bytes(config: ModelConfig) -> int:
    """Return how many bytes the keys and values of one position take."""
    width = config.num_key_value_heads * config.head_dim
    return 2 * config.num_hidden_layers * width * int(np.dtype(DTYPE).itemsize)


def default_context(config: ModelConfig, slots: int) -> int:
    """Return a context whose caches fit `CACHE_BYTES`, in whole chunks."""
    fitting = CACHE_BYTES // (slots * token_bytes(config)) // CHUNK * CHUNK
    return min(config.max_position_embeddings, max(fitting, LEAST_CONTEXT))


def _check_ranges(request: GenerationRequest) -> None:
    """Check the numbers of a request.

    Raises:
        UsageError: One is out of range; the message names it.
    """
    budget, top = request.thinking_budget_tokens, request.top_logprobs
    rules = (
        ("seed", 0 <= request.seed <= limits.MAX_GENERATION_SEED),
        ("max_tokens", request.max_tokens >= 1),
        ("temperature", 0.0 <= request.temperature < float("inf")),
        ("top_p", 0.0 < request.top_p <= 1.0),
        ("top_k", 0 <= request.top_k < 2**31),
        ("min_p", 0.0 <= request.min_p <= 1.0),
        ("thinking_budget_tokens", budget is None or budget >= 0),
        ("stop", all(request.stop)),
        ("top_logprobs", top is None or 0 <= top <= MAX_TOP_LOGPROBS),
    )
    for name, valid in rules:
        if not valid:
            raise UsageError(f"{name} is out of range")


def _use_compilation_cache(folder: Path | None) -> None:
    """Keep compiled programs on disk, so that only the first start compiles."""
    default = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    target = folder or Path(default) / "kiln" / "xla"
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home costs a compilation, nothing else
    update: Callable[[str, object], None] = jax.config.update
    update("jax_compilation_cache_dir", str(target))
    update("jax_persistent_cache_min_compile_time_secs", 0)
    update("jax_persistent_cache_min_entry_size_bytes", -1)


def create_engine(settings: EngineSettings) -> JaxEngine:
    """Create the engine; the entry point `jax` of `kiln.engines`.

    Args:
        settings: Which model, where its adapters lie, how many slots.

    Raises:
        FileUnreadable: A file of the model is missing.
        InvalidRecord: A file of the model is not what it should be.
        UsageError: A setting does not fit the model.
    """
    return JaxEngine(settings)
