"""Runs for tests: requests, statuses in every state, records of older versions."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from kiln_core.admission import RunLedger, RunLimits, admit_next, insert_run, with_run
from kiln_core.canonical import read_record
from kiln_core.failure import FailureCode, FailureStage, run_failure
from kiln_core.lifecycle import (
    cancelled_run,
    completed_run,
    evaluating_run,
    failed_run,
    moved_run,
    published_run,
    submitted_run,
    trained_run,
)
from kiln_core.provenance import BehaviorPolicyIdentity
from kiln_core.receipt import RolloutStats
from kiln_core.run import (
    OpenEnvPostEvalStatus,
    OpenEnvRunRequest,
    OpenEnvRunStatus,
    OpenEnvTrainingStatus,
    RunArtifact,
    RunState,
)
from kiln_core.run_request import RunRequestDraft, read_run_request, seal_contract
from kiln_core.training import TrainingResponse
from tests.core.contract_documents import openenv_documents

URL = "http://127.0.0.1:8990"
NOW = 1_700_000_000_000
POLICY = BehaviorPolicyIdentity(
    served_model_id="tiny",
    base_model_sha256="sha256:" + "0" * 64,
    inference_config_sha256="sha256:" + "1" * 64,
    implementation="kiln/test",
)
EVERYTHING: dict[str, Any] = {
    "kind": "train",
    "output_adapter": "next",
    "post_eval": {"suite": "s"},
    "environment_eval": {},
}
STATS = read_record(
    msgspec.json.format(
        msgspec.json.Encoder().encode(openenv_documents()["RolloutStats"]["plain"])
    ),
    RolloutStats,
    "stats",
)
RESPONSE = TrainingResponse(
    job_id="job", state="queued", effective_seed="7", message="queued"
)
TRAINING = OpenEnvTrainingStatus(job_id="job", state="running", progress=0.5)
POST = OpenEnvPostEvalStatus(
    job_id="e", suite_name="s", state="queued", examples_completed=0, examples_total=9
)


def drafted(**members: Any) -> RunRequestDraft:
    document = {"environments": [URL], **members}
    return read_run_request(msgspec.json.Encoder().encode(document))


def asked(**members: Any) -> OpenEnvRunRequest:
    return drafted(**members).accepted()


def run_id() -> str:
    return str(uuid.uuid4())


def artifact(status: OpenEnvRunStatus, kind: str = "summary") -> RunArtifact:
    return RunArtifact(
        kind=kind,
        url=f"/v1/openenv/runs/{status.run_id}/artifacts/{kind}",
        sha256="sha256:" + "3" * 64,
        bytes=1,
    )


def queued(now_ms: int = NOW, **members: Any) -> OpenEnvRunStatus:
    request = asked(**members)
    contract = {}
    if request.kind == "train":
        contract = {"contract": seal_contract(request, behavior_policy=POLICY)}
    return insert_run(
        RunLedger(), request, run_id(), RunLimits(), now_ms, **contract
    ).status


def walked(state: RunState, **members: Any) -> OpenEnvRunStatus:
    """Return a run that was asked for everything and has come as far as a state."""
    rollout = {"kind": "rollout"}
    default = rollout if state is RunState.ROLLOUT_READY else EVERYTHING
    status = queued(**(members or default))
    if state is RunState.QUEUED:
        return status
    if state is RunState.CANCELLED:
        return cancelled_run(status, NOW + 1)
    admitted = admit_next(with_run(RunLedger(), status), RunLimits(), NOW + 5)
    assert admitted is not None
    status = admitted
    for step in (RunState.COLLECTING, RunState.REVALIDATING):
        if status.state is state:
            return status
        status = moved_run(status, step)
    if status.state is state:
        return status
    if state is RunState.FAILED:
        return failed_run(
            status,
            run_failure(
                FailureCode.COLLECTION_FAILED, FailureStage.COLLECTION, "m", NOW + 9
            ),
        )
    status = published_run(status, [artifact(status)], STATS, NOW + 10, ["w"])
    if status.state is state:
        return status
    status = submitted_run(status, RESPONSE, [artifact(status)])
    if status.state is state:
        return status
    status = trained_run(status, TRAINING)
    if status.state is state:
        return status
    status = evaluating_run(status, post_evaluations=[POST])
    if status.state is state:
        return status
    evaluation = status.environment_evaluation
    assert not isinstance(evaluation, msgspec.UnsetType)
    status = evaluating_run(
        status, msgspec.structs.replace(evaluation, state="collecting_baseline")
    )
    return status if status.state is state else completed_run(status, NOW + 20)
