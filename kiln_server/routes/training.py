"""``/v1/train/*`` and ``/v1/openenv/training/preflight``."""

from __future__ import annotations

import time

import msgspec
from anyio import to_thread
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kiln_core import limits
from kiln_core.contract import (
    PREFLIGHT_SCHEMA,
    PreflightCapacity,
    PreflightReceipt,
    PreflightRequest,
    base_or_adapter,
    check_same_policy,
    materialize_config,
)
from kiln_core.errors import KilnError, QueueFull, UsageError
from kiln_core.grpo import check_grpo_config, check_name
from kiln_core.training import (
    GrpoRequest,
    TrainingDataProvenance,
    TrainingJobDetail,
    TrainingQueue,
    TrainingResponse,
    admit_corpus,
    read_grpo_request,
)
from kiln_server.bodies import read_body
from kiln_server.problems import answer
from kiln_server.state import ServerState, state_of

__all__ = ["ROUTES"]

MAX_CORPUS_BYTES = limits.MAX_ARTIFACT_BYTES + limits.MIB
"""A whole dataset, its configuration and the commas between its lines."""


async def preflight(request: Request) -> Response:
    """Say exactly what a training request would do; nothing is reserved.

    Raises:
        KilnError: It would be rejected.
    """
    state = state_of(request)
    try:
        body = await read_body(request, PreflightRequest)
        receipt = await to_thread.run_sync(_preflight, state, body)
    except KilnError:
        state.metrics.preflights.labels(status="rejected").inc()
        raise
    state.metrics.preflights.labels(status="accepted").inc()
    return answer(receipt)


async def submit(request: Request) -> Response:
    """Queue a GRPO job."""
    state = state_of(request)
    state.require_training()
    body = await read_body(
        request, GrpoRequest, limit_bytes=MAX_CORPUS_BYTES, reader=read_grpo_request
    )
    return answer(await to_thread.run_sync(_submit, state, body))


async def statuses(request: Request) -> Response:
    """List every tracked job, newest first."""
    jobs = state_of(request).jobs.details()
    return answer(TrainingQueue(jobs=[job.status for job in jobs]))


async def status(request: Request) -> Response:
    """Return a job's status."""
    return answer(_detail(request).status)


async def job(request: Request) -> Response:
    """Return everything about a job."""
    return answer(_detail(request))


async def cancel(request: Request) -> Response:
    """Cancel a job at its next step."""
    found = _detail(request)
    return answer(state_of(request).jobs.cancel(found.status.job_id).status)


def _detail(request: Request) -> TrainingJobDetail:
    try:
        return state_of(request).jobs.detail(request.path_params["job_id"])
    except UsageError as error:
        raise HTTPException(404, error.message) from error


def _preflight(state: ServerState, body: PreflightRequest) -> PreflightReceipt:
    """Check in the documented order.

    Names and configuration, suite, adapter, profile, whether new jobs are taken, what
    the engine can train, who would act, the queue.

    Raises:
        QueueFull: The queue is full.
    """
    config = materialize_config(body)
    _refuse_post_eval(body.post_eval)
    state.require_ready()
    identity = state.engine.policy_identity(config.base_adapter)
    state.require_training()
    state.require_serving()
    state.jobs.require_open()
    state.engine.admit_training(config)
    capacity = PreflightCapacity(
        checked_unix_ms=time.time_ns() // 1_000_000,
        queued_jobs=state.jobs.queued,
        max_queued_jobs=state.jobs.max_queued,
        tracked_jobs=state.jobs.tracked,
        max_tracked_jobs=state.jobs.max_tracked,
    )
    if capacity.queued_jobs >= capacity.max_queued_jobs:
        raise QueueFull("the training queue is full")
    return PreflightReceipt(
        schema=PREFLIGHT_SCHEMA,
        effective_config=config,
        post_eval=body.post_eval,
        behavior_policy=identity,
        capacity=capacity,
        capacity_reserved=False,
    )


def _submit(state: ServerState, body: GrpoRequest) -> TrainingResponse:
    config = body.config
    if config.output_name is None:
        raise UsageError("a training request needs config.output_name")
    check_name(config.output_name, "output adapter")
    check_grpo_config(config)
    _refuse_post_eval(body.post_eval)
    state.engine.admit_training(config)
    data = admit_corpus(body.groups, "inline")
    _check_policy(state, data, base_or_adapter(config.base_adapter))
    detail = state.jobs.submit(body, data)
    return TrainingResponse(
        job_id=detail.status.job_id,
        state="queued",
        effective_seed=detail.status.effective_seed,
        message=f"training adapter {config.output_name} on {data.rows} groups",
    )


def _check_policy(
    state: ServerState, data: TrainingDataProvenance, adapter: str | None
) -> None:
    """Require the corpus to come from exactly the policy that training starts from."""
    lineage = data.openenv
    if isinstance(lineage, msgspec.UnsetType) or isinstance(
        lineage.behavior_policy, msgspec.UnsetType
    ):
        return
    check_same_policy(lineage.behavior_policy, state.engine.policy_identity(adapter))


def _refuse_post_eval(post_eval: object) -> None:
    if post_eval is not msgspec.UNSET:
        raise UsageError("post_eval names a suite, and none is installed here")


ROUTES = [
    Route("/v1/openenv/training/preflight", preflight, methods=["POST"]),
    Route("/v1/train/grpo", submit, methods=["POST"]),
    Route("/v1/train/agentic", submit, methods=["POST"]),
    Route("/v1/train/status", statuses),
    Route("/v1/train/status/{job_id}", status),
    Route("/v1/train/jobs/{job_id}", job),
    Route("/v1/train/queue/{job_id}", cancel, methods=["DELETE"]),
]
