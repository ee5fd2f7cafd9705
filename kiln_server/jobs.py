"""The training queue: one job at a time, in a thread of its own, beside serving.

A job that fails says why and leaves nothing servable; it never takes the server down.
Jobs live in memory, bounded; the oldest finished ones are forgotten first.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import deque
from typing import Final

import msgspec

from kiln_core.engine import (
    Engine,
    TrainingJob,
    TrainingOutcome,
    TrainingProgress,
)
from kiln_core.errors import (
    CapacityFull,
    Conflict,
    KilnError,
    QueueFull,
    TrainingError,
    UsageError,
)
from kiln_core.grpo import effective_seed
from kiln_core.records import AgenticGroup
from kiln_core.training import (
    GrpoRequest,
    LossPoint,
    TrainingDataProvenance,
    TrainingJobDetail,
    TrainingStatus,
)
from kiln_server.metrics import Metrics

__all__ = ["TrainingQueueService"]

MAX_LOSS_POINTS: Final = 2_000

log = logging.getLogger("kiln.training")


class _Job:
    """One job and how far it is."""

    def __init__(self, request: GrpoRequest, detail: TrainingJobDetail) -> None:
        self.groups: tuple[AgenticGroup, ...] = tuple(request.groups)
        """Let go when it is finished: a corpus may be large, and 128 are tracked."""
        self.detail = detail
        self.cancelled = threading.Event()

    def update(self, **changes: object) -> None:
        self.detail = msgspec.structs.replace(self.detail, **changes)

    def update_status(self, **changes: object) -> None:
        self.update(status=msgspec.structs.replace(self.detail.status, **changes))

    @property
    def finished(self) -> bool:
        return self.detail.status.finished_unix_ms is not None

    def finish(self, **changes: object) -> None:
        self.groups = ()
        self.update_status(**changes, finished_unix_ms=_now_ms())


class TrainingQueueService:
    """Accepts, runs, lists and cancels training jobs.

    Args:
        engine: Runs the jobs.
        metrics: Counts them.
        max_queued: Jobs waiting at most.
        max_tracked: Jobs remembered at most.
    """

    def __init__(
        self, engine: Engine, metrics: Metrics, *, max_queued: int, max_tracked: int
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.max_queued = max_queued
        self.max_tracked = max_tracked
        self._jobs: dict[str, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, name="kiln-training", daemon=True
        )

    def start(self) -> None:
        """Start the worker thread."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel everything and end the worker thread."""
        with self._changed:
            self._stopping = True
            for job in self._jobs.values():
                job.cancelled.set()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def queued(self) -> int:
        """Jobs waiting now."""
        return len(self._waiting)

    @property
    def tracked(self) -> int:
        """Jobs remembered that count against the bound: those not finished."""
        with self._changed:
            return sum(not job.finished for job in self._jobs.values())

    def require_open(self) -> None:
        """Refuse new jobs once the server is stopping.

        Raises:
            CapacityFull: It is.
        """
        if self._stopping:
            raise CapacityFull("the server is stopping")

    def submit(
        self, request: GrpoRequest, data: TrainingDataProvenance
    ) -> TrainingJobDetail:
        """Queue a job.

        Args:
            request: Its configuration is complete and admitted.
            data: What its corpus is.

        Raises:
            QueueFull: There is no place left.
            CapacityFull: The server is stopping.
            Conflict: A job for that adapter is unfinished.
        """
        name = str(request.config.output_name)
        with self._changed:
            self.require_open()
            if len(self._waiting) >= self.max_queued:
                raise QueueFull("the training queue is full")
            for other in self._jobs.values():
                status = other.detail.status
                if status.adapter_name == name and not other.finished:
                    raise Conflict(f"job {status.job_id} is training adapter {name}")
            self._forget_oldest()
            job = _Job(request, _new_detail(request, data, name))
            self._jobs[job.detail.status.job_id] = job
            self._waiting.append(job)
            self._changed.notify_all()
            return job.detail

    def details(self) -> list[TrainingJobDetail]:
        """Return every remembered job, newest first."""
        with self._changed:
            return [job.detail for job in reversed(self._jobs.values())]

    def detail(self, job_id: str) -> TrainingJobDetail:
        """Return one job.

        Raises:
            UsageError: There is no such job.
        """
        return self._job(job_id).detail

    def cancel(self, job_id: str) -> TrainingJobDetail:
        """Cancel a job at its next step.

        Raises:
            UsageError: There is no such job.
            Conflict: It is finished.
        """
        job = self._job(job_id)
        with self._changed:
            if job.finished:
                raise Conflict(f"job {job_id} is finished")
            job.cancelled.set()
            if job in self._waiting:
                self._waiting.remove(job)
                self._finish_failed(job, "cancelled before it started", "cancelled")
            return job.detail

    def _job(self, job_id: str) -> _Job:
        with self._changed:
            job = self._jobs.get(job_id)
        if job is None:
            raise UsageError(f"there is no training job {job_id!r}")
        return job

    def _forget_oldest(self) -> None:
        while len(self._jobs) >= self.max_tracked:
            finished = [job_id for job_id, job in self._jobs.items() if job.finished]
            if not finished:
                raise QueueFull("too many unfinished training jobs")
            del self._jobs[finished[0]]

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    for job in self._waiting:
                        self._finish_failed(job, "the server stopped", "cancelled")
                    return
                job = self._waiting.popleft()
            self._work(job)

    def _work(self, job: _Job) -> None:
        self.metrics.training_active.set(1)
        job.update_status(state="running", started_at=_now_ms())
        try:
            outcome = self._train(job)
            self._finish(job, outcome)
        except KilnError as error:
            status = "cancelled" if job.cancelled.is_set() else "failed"
            self._finish_failed(job, error.message, status)
        except Exception:
            # the boundary of a job: a bug in it must not end the queue
            log.exception("training job %s failed", job.detail.status.job_id)
            self._finish_failed(job, "failed unexpectedly; see the log", "failed")
        finally:
            self.metrics.training_active.set(0)

    def _train(self, job: _Job) -> TrainingOutcome:
        status = job.detail.status
        data = status.training_data
        return self.engine.train(
            TrainingJob(
                job_id=status.job_id,
                groups=job.groups,
                corpus_sha256=data.admitted_corpus_sha256,
                lineage=data.openenv or None,
                data_source=data.source,
                config=msgspec.structs.replace(
                    job.detail.config, seed=int(status.effective_seed)
                ),
            ),
            lambda progress: self._report(job, progress),
            job.cancelled.is_set,
        )

    def _report(self, job: _Job, progress: TrainingProgress) -> None:
        """Note a step.

        Raises:
            TrainingError: The training diverged.
        """
        measured = (progress.loss, progress.mean_reward, progress.logprob_agreement)
        if not all(map(math.isfinite, measured)):
            raise TrainingError(
                f"step {progress.step} gave no finite loss",
                hint="lower learning_rate",
            )
        status = job.detail.status
        elapsed = (_now_ms() - (status.started_at or 0)) / 1000
        fraction = progress.step / max(progress.steps, 1)
        point = LossPoint(
            epoch=progress.epoch,
            progress=fraction,
            loss=progress.loss,
            mean_reward=progress.mean_reward,
            kl=progress.kl,
            entropy=progress.entropy,
            clip_fraction=progress.clip_fraction,
            agreement=progress.logprob_agreement,
            elapsed_secs=elapsed,
        )
        job.update(
            step=progress.step,
            steps=progress.steps,
            epoch=progress.epoch,
            logprob_agreement=progress.logprob_agreement,
            loss_history=[*job.detail.loss_history, point][-MAX_LOSS_POINTS:],
        )
        job.update_status(
            progress=fraction, current_loss=progress.loss, elapsed_secs=elapsed
        )

    def _finish(self, job: _Job, outcome: TrainingOutcome) -> None:
        loaded = False
        if job.detail.auto_load:
            try:
                loaded = self.engine.load_adapter(outcome.adapter_path.name).loaded
            except KilnError as error:
                # The adapter is trained and on disk: only serving it failed.
                job.update_status(error=f"trained, but not loaded: {error.message}")
        job.update(
            adapter_path=outcome.adapter_path.name,
            adapter_sha256=outcome.adapter_sha256,
            loaded=loaded,
            warnings=list(outcome.warnings),
        )
        self.metrics.jobs.labels(type="grpo", status="completed").inc()
        job.finish(state="completed", progress=1.0)

    def _finish_failed(self, job: _Job, message: str, status: str) -> None:
        if status == "cancelled" and "cancel" not in message:
            message = f"cancelled: {message}"
        self.metrics.jobs.labels(type="grpo", status=status).inc()
        job.finish(state="failed", error=message)


def _new_detail(
    request: GrpoRequest, data: TrainingDataProvenance, name: str
) -> TrainingJobDetail:
    seed = effective_seed(request.config, data.admitted_corpus_sha256)
    return TrainingJobDetail(
        status=TrainingStatus(
            job_id=str(uuid.uuid4()),
            state="queued",
            progress=0.0,
            adapter_name=name,
            effective_seed=str(seed),
            submitted_unix_ms=_now_ms(),
            training_data=data,
        ),
        auto_load=request.config.auto_load,
        config=request.config,
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
