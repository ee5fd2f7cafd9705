"""An engine without a model: deterministic completions, real adapter folders.

It implements the port of ``kiln_core.engine`` in memory. What it says satisfies the
schema it is given and depends on the request's seed and messages alone; token ids are
bytes, log-probabilities follow from how many choices there were. Training writes an
adapter folder that remembers the best rollout, so an adapter really does better.

It is told out a character at a time where somebody listens. Tests hold it at a moment
(``answers``, ``speaks``, ``trains``, ``starts``) and make it fail (``start_error``,
``speak_error``, ``train_error``). In a process of its own it is found like any other
engine, through an entry point that `entry_point` writes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from kiln_core.canonical import JsonValue, canonical_bytes, digest, digest_json
from kiln_core.engine import (
    AdapterInfo,
    AnswerToken,
    Delta,
    EngineSettings,
    Generation,
    GenerationRequest,
    GuideReport,
    TokenChoice,
    TrainingJob,
    TrainingOutcome,
    TrainingProgress,
)
from kiln_core.errors import (
    AdapterNotFound,
    CapacityFull,
    Conflict,
    ContextOverflow,
    KilnError,
    QueueFull,
    TrainingError,
    UsageError,
)
from kiln_core.grpo import GrpoConfig, check_name
from kiln_core.provenance import (
    AdapterIdentity,
    BehaviorPolicyIdentity,
    TokenizerIdentity,
)
from kiln_core.records import ChatMessage

ENTRY_POINT = "simulator"
HOLDS = "KILN_SIMULATOR_HOLDS"
"""Environment variable: words among ``answers trains starts``."""
FAILS = "KILN_SIMULATOR_FAILS"
"""Environment variable: words among ``create start train``."""

START, END, THINK, CLOSE = 256, 257, 258, 259
MARKUP = {START: "<|start|>", END: "<|end|>", THINK: "<think>", CLOSE: "</think>"}
TOKENIZER = TokenizerIdentity(
    vocab_sha256=digest(b"simulated vocabulary"),
    config_sha256=digest(b"simulated configuration"),
    chat_template_sha256=digest(b"simulated template"),
)
MAX_RANK = 64
ADAPTER_SLOTS = 3
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


Listener = Callable[[Delta], None]


class Unsupported(Exception):
    """A schema this simulator cannot speak."""


class SimulatedEngine:
    """The engine.

    Attributes:
        answers, speaks, trains, starts: Set: goes on; cleared: waits at that moment,
            ``speaks`` after the first character.
        start_error, speak_error, train_error: Raised at that moment.
        submitted: Requests so far.
        busy: Requests that hold a slot now.
        most_busy: The most at once.
    """

    def __init__(self, settings: EngineSettings, *, thinking: bool = False) -> None:
        self.settings = settings
        self.served_model_id = settings.served_model_id or "simulated"
        self.slots = settings.slots
        self.context_tokens = settings.context_tokens or 16_384
        self.has_thinking_mode = thinking
        self.answers, self.trains, self.starts = (_open(), _open(), _open())
        self.speaks = _open()
        self.start_error: Exception | None = None
        self.speak_error: Exception | None = None
        self.train_error: Exception | None = None
        self.submitted: list[GenerationRequest] = []
        self.jobs: list[TrainingJob] = []
        self.busy = self.most_busy = 0
        self._loaded: dict[str, tuple[str, list[str]]] = {}
        self._ready = False
        self._stopping = False
        self._changed = threading.Condition()
        self._queue: deque[
            tuple[GenerationRequest, Future[Generation], Listener | None]
        ] = deque()
        self._threads: list[threading.Thread] = []

    # Life

    @property
    def ready(self) -> bool:
        return self._ready

    def start(self) -> None:
        while not self.starts.wait(0.01):
            if self._stopping:
                return
        if self.start_error is not None:
            raise self.start_error
        for index in range(self.slots):
            thread = threading.Thread(target=self._slot, name=f"simulated-{index}")
            thread.start()
            self._threads.append(thread)
        self._ready = True

    def stop(self) -> None:
        with self._changed:
            self._stopping, self._ready = True, False
            for _, future, _ in self._queue:
                future.cancel()
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # Sampling

    def submit(
        self, request: GenerationRequest, listener: Listener | None = None
    ) -> Future[Generation]:
        self._check(request)
        future: Future[Generation] = Future()
        with self._changed:
            if len(self._queue) >= self.settings.max_queued_requests:
                raise QueueFull("the request queue is full")
            self.submitted.append(request)
            self._queue.append((request, future, listener))
            self._changed.notify()
        return future

    def _check(self, request: GenerationRequest) -> None:
        if not self._ready:
            raise UsageError("the engine is not started")
        if request.adapter is not None and request.adapter not in self._loaded:
            raise AdapterNotFound(f"adapter {request.adapter!r} is not loaded")
        roles = {message.role for message in request.messages}
        if not roles <= {"system", "user", "assistant", "tool"}:
            raise UsageError("a role is unknown")
        prompt, _ = self._prompt(request)
        if len(prompt) + request.max_tokens > self.context_tokens:
            raise ContextOverflow(
                f"a prompt of {len(prompt)} tokens and an action of up to "
                f"{request.max_tokens} do not fit {self.context_tokens}",
                tokens=len(prompt) + request.max_tokens,
                limit=self.context_tokens,
            )

    def _slot(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                request, future, listener = self._queue.popleft()
                self.busy += 1
                self.most_busy = max(self.busy, self.most_busy)
            self._answer(request, future, listener)
            with self._changed:
                self.busy -= 1

    def _answer(
        self,
        request: GenerationRequest,
        future: Future[Generation],
        listener: Listener | None,
    ) -> None:
        if not self._goes_on(self.answers, future):
            return
        try:
            generation = self.generate(request)
            if listener is not None and not self._speak(generation, future, listener):
                return
        except Exception as error:
            with suppress(InvalidStateError):
                future.set_exception(error)
            return
        with suppress(InvalidStateError):
            future.set_result(generation)

    def _goes_on(self, event: threading.Event, future: Future[Generation]) -> bool:
        while not event.wait(0.01):
            if future.cancelled() or self._stopping:
                future.cancel()
                return False
        return True

    def _speak(
        self, generation: Generation, future: Future[Generation], listener: Listener
    ) -> bool:
        """Tell a generation a character at a time; False when nobody listens."""
        for character in generation.reasoning_content or "":
            listener(Delta(reasoning=character))
            if not self._goes_on(self.speaks, future):
                return False
        tokens = list(generation.answer_tokens)
        for character in generation.content:
            size = len(character.encode())
            said, tokens = tokens[:size], tokens[size:]
            listener(Delta(content=character, tokens=tuple(said)))
            if not self._goes_on(self.speaks, future):
                return False
            if self.speak_error is not None:
                raise self.speak_error
        return True

    def _prompt(
        self, request: GenerationRequest
    ) -> tuple[list[int], list[tuple[int, int]]]:
        if request.prompt is None:
            return render(request.messages, thinking=self._thinks(request))
        raw = request.prompt
        tokens = list(raw.encode() if isinstance(raw, str) else raw)
        if not tokens or not all(0 <= token <= CLOSE for token in tokens):
            raise UsageError("the prompt is empty, or holds no token id")
        return tokens, []

    def _thinks(self, request: GenerationRequest) -> bool:
        return request.thinking and self.has_thinking_mode

    def generate(self, request: GenerationRequest) -> Generation:
        """Sample a request; equal requests give equal completions."""
        thinking = self._thinks(request)
        prompt, spans = self._prompt(request)
        tokens: list[int] = []
        logprobs: list[float | None] = []
        reasoning: str | None = None
        draw = _random(request)
        if thinking:
            reasoning = draw.choice(["left", "right"])
            budget = request.thinking_budget_tokens
            cut = reasoning if budget is None else reasoning[:budget]
            _say(tokens, logprobs, cut, 2)
            tokens.append(CLOSE)
            logprobs.append(0.0 if cut == reasoning else None)
            reasoning = cut
        start = len(tokens)
        for text, choices in self._pieces(request, draw):
            _say(tokens, logprobs, text, choices)
        tokens.append(END)
        logprobs.append(0.0 if request.action_schema is not None else -0.25)
        complete = len(tokens) <= request.max_tokens
        tokens, logprobs = tokens[: request.max_tokens], logprobs[: request.max_tokens]
        closed = not thinking or len(tokens) >= start
        content = bytes(t for t in tokens[start:] if t < START).decode(errors="replace")
        for stop in request.stop:
            content = content.partition(stop)[0]
        return Generation(
            content=content,
            reasoning_content=reasoning,
            reasoning_closed=closed,
            finish_reason="stop" if complete else "length",
            prompt_token_ids=tuple(prompt),
            action_token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            content_spans=tuple(spans),
            close_token_ids=(CLOSE,) if self.has_thinking_mode else (),
            thinking=thinking,
            guide_sha256=(
                None
                if request.action_schema is None
                else digest_json(request.action_schema)
            ),
            behavior_policy=self.policy_identity(request.adapter),
            tokenizer=TOKENIZER,
            backend="simulated",
            answer_tokens=_described(request, content, logprobs[start:]),
        )

    def _pieces(
        self, request: GenerationRequest, draw: random.Random
    ) -> Iterator[tuple[str, int]]:
        turn = sum(message.role == "assistant" for message in request.messages)
        script = self._loaded[request.adapter][1] if request.adapter else []
        if turn < len(script):
            yield script[turn], 1
        elif request.action_schema is not None:
            yield from speak(request.action_schema, draw)
        else:
            yield draw.choice(["yes", "no", "perhaps", "<think>"]), 4

    def guide(self, action_schema: JsonValue, max_tokens: int) -> GuideReport:
        try:
            text = "".join(t for t, _ in speak(action_schema, _seeded(0)))
        except Unsupported as error:
            return GuideReport(guide_sha256=None, warning=f"cannot guide: {error}")
        if len(text.encode()) + 1 > max_tokens:
            return GuideReport(guide_sha256=None, warning="cannot guide: too short")
        return GuideReport(guide_sha256=digest_json(action_schema))

    # Adapters

    def policy_identity(self, adapter: str | None) -> BehaviorPolicyIdentity:
        identity = BehaviorPolicyIdentity(
            served_model_id=self.served_model_id,
            base_model_sha256=digest(b"simulated base"),
            inference_config_sha256=digest_json({"slots": self.slots}),
            implementation="kiln/simulated",
        )
        if adapter is None:
            return identity
        sha256 = self._loaded.get(adapter, (None,))[0] or self._read(adapter)[0]
        return BehaviorPolicyIdentity(
            served_model_id=identity.served_model_id,
            base_model_sha256=identity.base_model_sha256,
            adapter=AdapterIdentity(name=adapter, content_sha256=sha256),
            inference_config_sha256=identity.inference_config_sha256,
            implementation=identity.implementation,
        )

    def adapters(self) -> tuple[AdapterInfo, ...]:
        folders = sorted(
            path
            for path in self.settings.adapter_dir.iterdir()
            if path.is_dir() and not path.name.startswith(".")
        )
        return tuple(self._info(path) for path in folders)

    def load_adapter(self, name: str) -> AdapterInfo:
        loaded = self._read(name)
        if name not in self._loaded and len(self._loaded) >= ADAPTER_SLOTS:
            raise CapacityFull(f"all {ADAPTER_SLOTS} adapter slots are taken")
        self._loaded[name] = loaded
        return self._info(self.settings.adapter_dir / name)

    def unload_adapter(self, name: str) -> None:
        if self._loaded.pop(name, None) is None:
            raise AdapterNotFound(f"adapter {name!r} is not loaded")

    def _info(self, folder: Path) -> AdapterInfo:
        try:
            sha256, problem = self._read(folder.name)[0], None
        except UsageError as error:
            sha256, problem = None, error.message
        return AdapterInfo(
            name=folder.name,
            loaded=folder.name in self._loaded,
            has_config=(folder / CONFIG).is_file(),
            has_weights=(folder / WEIGHTS).is_file(),
            size_bytes=sum(path.stat().st_size for path in folder.iterdir()),
            content_sha256=sha256,
            problem=problem,
        )

    def _read(self, name: str) -> tuple[str, list[str]]:
        check_name(name, "adapter")
        folder = self.settings.adapter_dir / name
        if not folder.is_dir():
            raise UsageError(f"there is no adapter {name!r}")
        try:
            config = (folder / CONFIG).read_bytes()
            weights = (folder / WEIGHTS).read_bytes()
            return digest(config + weights), json.loads(config)["script"]
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"adapter {name!r} cannot be loaded") from error

    # Training

    def admit_training(self, config: GrpoConfig) -> None:
        if config.is_level != "token":
            raise UsageError(f"cannot train with is_level {config.is_level}")
        if config.lora_rank > MAX_RANK:
            raise UsageError(f"lora_rank {config.lora_rank} is over {MAX_RANK}")
        name = str(config.output_name)
        if (self.settings.adapter_dir / name).exists():
            raise Conflict(f"adapter {name!r} exists already")
        if config.base_adapter is not None:
            self._read(config.base_adapter)

    def train(
        self,
        job: TrainingJob,
        report: Callable[[TrainingProgress], None],
        cancelled: Callable[[], bool],
    ) -> TrainingOutcome:
        self.jobs.append(job)
        self.admit_training(job.config)
        steps = job.config.epochs * len(job.groups)
        loss = 0.0
        for step in range(1, steps + 1):
            while not (going := self.trains.wait(0.01)) and not cancelled():
                pass
            if cancelled() or not going:
                raise TrainingError(f"cancelled after {step - 1} of {steps} steps")
            if self.train_error is not None:
                raise self.train_error
            loss = 1.0 / step
            report(
                TrainingProgress(
                    step=step,
                    steps=steps,
                    epoch=(step - 1) // len(job.groups),
                    loss=loss,
                    mean_reward=_mean_reward(job),
                    kl=0.0,
                    entropy=1.0,
                    clip_fraction=0.0,
                    logprob_agreement=1e-7,
                )
            )
        return self._publish(job, steps, loss)

    def _publish(self, job: TrainingJob, steps: int, loss: float) -> TrainingOutcome:
        target = self.settings.adapter_dir / str(job.config.output_name)
        staged = target.parent / f".{target.name}.{job.job_id}"
        staged.mkdir()
        best = max(
            (rollout for group in job.groups for rollout in group.completions),
            key=lambda rollout: rollout.reward,
        )
        script = [part.content for part in best.segments if part.kind == "action"]
        config = canonical_bytes({"r": job.config.lora_rank, "script": script})
        (staged / CONFIG).write_bytes(config)
        (staged / WEIGHTS).write_bytes(job.corpus_sha256.encode())
        for name in ("train_receipt.json", "adapter_manifest.json"):
            (staged / name).write_bytes(
                canonical_bytes({"sha256": job.corpus_sha256, "job_id": job.job_id})
            )
        staged.rename(target)
        return TrainingOutcome(
            adapter_path=target,
            adapter_sha256=self._read(target.name)[0],
            receipt_path=target / "train_receipt.json",
            manifest_path=target / "adapter_manifest.json",
            steps=steps,
            final_loss=loss,
        )


# What it says


def render(
    messages: tuple[ChatMessage, ...], *, thinking: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a prompt as ids, and where each message's content stands."""
    tokens: list[int] = []
    spans = []
    for message in messages:
        tokens += [START, *message.role.encode(), 10]
        start = len(tokens)
        tokens += message.content.encode()
        spans.append((start, len(tokens)))
        tokens.append(END)
    tokens += [START, *b"assistant\n"]
    return ([*tokens, THINK] if thinking else tokens), spans


def speak(schema: JsonValue, draw: random.Random) -> Iterator[tuple[str, int]]:
    """Yield a valid value in pieces, each with how many choices there were.

    Raises:
        Unsupported: The schema uses something this simulator does not know.
    """
    yield from _value(schema, draw, schema, 0)


def _value(
    schema: JsonValue, draw: random.Random, root: JsonValue, depth: int
) -> Iterator[tuple[str, int]]:
    if depth > 16:
        raise Unsupported("it nests too deep")
    if schema is True or schema == {}:
        yield "null", 1
        return
    if not isinstance(schema, dict):
        raise Unsupported("false")
    if unknown := schema.keys() & {"allOf", "not", "if", "pattern", "multipleOf"}:
        raise Unsupported(sorted(unknown)[0])
    if "$ref" in schema:
        yield from _value(_target(schema["$ref"], root), draw, root, depth + 1)
        return
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        yield from _value(draw.choice(branches), draw, root, depth + 1)
        return
    if "const" in schema:
        yield _text(schema["const"]), 1
        return
    if "enum" in schema:
        yield _text(draw.choice(schema["enum"])), len(schema["enum"])
        return
    yield from _typed(schema, draw, root, depth)


def _typed(
    schema: dict[str, Any], draw: random.Random, root: JsonValue, depth: int
) -> Iterator[tuple[str, int]]:
    kind = schema.get("type", "object")
    kind = draw.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        yield from _object(schema, draw, root, depth)
    elif kind == "array":
        count = schema.get("minItems", draw.randint(0, schema.get("maxItems", 2)))
        yield "[", 1
        for index in range(count):
            yield "," if index else "", 1
            yield from _value(schema.get("items", True), draw, root, depth + 1)
        yield "]", 1
    elif kind in {"integer", "number"}:
        low = math.ceil(schema.get("minimum", schema.get("exclusiveMinimum", -4) + 1))
        high = math.floor(
            schema.get("maximum", schema.get("exclusiveMaximum", low + 8) - 1)
        )
        if low > high:
            raise Unsupported("no integer fits")
        yield str(draw.randint(low, high)), high - low + 1
    elif kind == "string":
        least = schema.get("minLength", 0)
        most = schema.get("maxLength", least + 6)
        letters = "abcdefgh"
        word = "".join(draw.choice(letters) for _ in range(draw.randint(least, most)))
        yield _text(word), 8
    elif kind == "boolean":
        yield draw.choice(["true", "false"]), 2
    elif kind == "null":
        yield "null", 1
    else:
        raise Unsupported(f"type {kind}")


def _object(
    schema: dict[str, Any], draw: random.Random, root: JsonValue, depth: int
) -> Iterator[tuple[str, int]]:
    required = schema.get("required", [])
    first = True
    yield "{", 1
    for name, part in schema.get("properties", {}).items():
        if name not in required and draw.random() < 0.5:
            continue
        yield ("" if first else ",") + _text(name) + ":", 1
        yield from _value(part, draw, root, depth + 1)
        first = False
    yield "}", 1


def _target(reference: str, root: JsonValue) -> JsonValue:
    if not reference.startswith("#/"):
        raise Unsupported(reference)
    for token in reference[2:].split("/"):
        root = root[token]
    return root


def _text(value: JsonValue) -> str:
    return canonical_bytes(value).decode()


def _described(
    request: GenerationRequest, content: str, logprobs: list[float | None]
) -> tuple[AnswerToken, ...]:
    """Describe the bytes of the content; where one was a choice, so was another."""
    if request.top_logprobs is None:
        return ()
    described = []
    for byte, logprob in zip(content.encode(), logprobs, strict=False):
        choice = {
            "token_id": byte,
            "text": bytes([byte]).decode(errors="replace"),
            "data": bytes([byte]),
            "logprob": logprob or 0.0,
        }
        other = {**choice, "token_id": 63, "text": "?", "data": b"?", "logprob": -9.0}
        both = [TokenChoice(**choice), *([TokenChoice(**other)] if logprob else [])]
        top = tuple(both[: request.top_logprobs])
        described.append(AnswerToken(**choice, top=top))
    return tuple(described)


def _say(
    tokens: list[int], logprobs: list[float | None], text: str, choices: int
) -> None:
    """Append text: its first byte was a choice, the others follow from it."""
    for index, byte in enumerate(text.encode()):
        tokens.append(byte)
        free = choices > 1 and index == 0
        logprobs.append(float(f"{-math.log(choices):.6g}") if free else 0.0)


def _random(request: GenerationRequest) -> random.Random:
    said = [[message.role, message.content] for message in request.messages]
    key: list[JsonValue] = [str(request.seed), request.adapter, said]
    if not request.messages:
        key.append(str(request.prompt))
    whole = canonical_bytes(key)
    seed = int.from_bytes(hashlib.sha256(whole).digest())
    return _seeded(0 if request.temperature == 0 else seed)


def _seeded(seed: int) -> random.Random:
    return random.Random(seed)


def _mean_reward(job: TrainingJob) -> float:
    rewards = [rollout.reward for group in job.groups for rollout in group.completions]
    return sum(rewards) / len(rewards)


def _open() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


# In a process of its own


def create_engine(settings: EngineSettings) -> SimulatedEngine:
    """Create the engine that environment variables describe."""
    fails = os.environ.get(FAILS, "").split()
    if "create" in fails:
        raise UsageError("this simulator cannot be created")
    engine = SimulatedEngine(settings, thinking="thinking" in settings.model)
    for moment in os.environ.get(HOLDS, "").split():
        getattr(engine, moment).clear()
    if "start" in fails:
        engine.start_error = KilnError("this simulator cannot start")
    if "train" in fails:
        engine.train_error = TrainingError("this simulator cannot train")
    return engine


def entry_point(folder: Path) -> Path:
    """Write the metadata of a distribution that offers this engine.

    Args:
        folder: To be put on ``PYTHONPATH`` beside the repository.
    """
    metadata = folder / "kiln_simulator-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: kiln-simulator\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[kiln.engines]\n{ENTRY_POINT} = {__name__}:create_engine\n"
    )
    return folder
