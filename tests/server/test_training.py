"""Preflight, submission and the life of training jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kiln_core.canonical import convert_record, digest
from kiln_core.contract import PreflightReceipt, PreflightRequest, check_preflight
from kiln_core.errors import TrainingError
from kiln_core.grpo import GrpoConfig, effective_seed
from kiln_core.training import TrainingJobDetail, TrainingQueue, TrainingResponse
from tests.server.running import Answer, Running, running, until
from tests.server.test_adapters import make_adapter, say
from tests.simulators.engine import WEIGHTS

PREFLIGHT = "/v1/openenv/training/preflight"
GRPO = "/v1/train/grpo"

Groups = list[dict[str, Any]]


def submit(kiln: Running, groups: Groups, name: str = "new", **config: Any) -> Answer:
    return kiln.post(
        GRPO, {"groups": groups, "config": {"output_name": name, **config}}
    )


def job_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return convert_record(answer.json, TrainingResponse, "response").job_id


# Preflight


def test_preflight_returns_the_exact_configuration(kiln: Running) -> None:
    request = PreflightRequest(
        output_adapter="new",
        training_config=GrpoConfig(lora_rank=8, lora_alpha=16.0),
        auto_load=False,
    )
    answer = kiln.post(
        PREFLIGHT,
        {
            "output_adapter": "new",
            "training_config": {"lora_rank": 8, "lora_alpha": 16, "auto_load": True},
            "auto_load": False,
        },
    )
    assert answer.status == 200
    receipt = convert_record(answer.json, PreflightReceipt, "receipt")
    contract = check_preflight(request, receipt)
    assert contract.effective_config.output_name == "new"
    assert contract.effective_config.auto_load is False
    assert receipt.capacity_reserved is False
    assert receipt.capacity.max_queued_jobs == 16
    assert (
        answer.json["behavior_policy"]
        == (kiln.get("/v1/policy").json["behavior_policy"])
    )
    assert kiln.metric('kiln_openenv_training_preflights_total{status="accepted"}') == 1


BAD_PREFLIGHTS: list[tuple[dict[str, Any], int, str]] = [
    ({"output_adapter": "../x"}, 400, "not a safe name"),
    ({"output_adapter": ""}, 400, "not a safe name"),
    ({"output_adapter": None}, 400, "/output_adapter"),
    ({"adapter": "a/b"}, 400, "not a safe name"),
    ({"adapter": "nobody"}, 400, "there is no adapter 'nobody'"),
    ({"more": 1}, 400, "unknown field"),
    ({"training_config": {"lora_rank": 0}}, 400, "/training_config/lora_rank"),
    ({"training_config": {"surprise": 0}}, 400, "surprise"),
    ({"training_config": {"optimizer": {"kind": "lion"}}}, 400, "lion"),
    ({"training_config": {"optimizer": {"kind": "sgd", "x": 1}}}, 400, "`x`"),
    ({"training_config": {"lora_alpha": 99.0}}, 400, "lora_alpha / lora_rank"),
    ({"training_config": {"loss": {"opd": {}}}}, 400, "/training_config/loss/opd"),
    ({"training_config": {"is_level": "cispo"}}, 400, "is_level cispo"),
    ({"training_config": {"lora_rank": 65}}, 400, "over 64"),
    ({"post_eval": {"suite": "arithmetic"}}, 400, "suite"),
    ({"output_adapter": "taken"}, 409, "exists already"),
]


@pytest.mark.parametrize(("members", "status", "reason"), BAD_PREFLIGHTS)
def test_preflight_rejects_and_counts(
    kiln: Running, tmp_path: Path, members: dict[str, Any], status: int, reason: str
) -> None:
    make_adapter(tmp_path, "taken")
    answer = kiln.post(PREFLIGHT, {"output_adapter": "new", **members})
    assert (answer.status, reason in answer.message) == (status, True), answer.message
    assert kiln.metric('kiln_openenv_training_preflights_total{status="rejected"}') == 1


def test_preflight_checks_in_the_documented_order(tmp_path: Path) -> None:
    """Each fault is told only when those before it are mended."""
    faults: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"output_adapter": "a/b"}, {"output_adapter": "taken"}, "safe name"),
        (
            {"training_config": {"lora_alpha": 99.0, "is_level": "cispo"}},
            {"training_config": {"is_level": "cispo"}},
            "lora_alpha",
        ),
        ({"post_eval": {"suite": "x"}}, {"post_eval": None}, "suite"),
        ({"adapter": "nobody"}, {"adapter": "base"}, "no adapter"),
    ]
    request: dict[str, Any] = {}
    for wrong, _, _ in faults:
        request |= wrong
    with running(tmp_path, serving_profile="stable") as kiln:
        make_adapter(tmp_path, "taken")
        for _, mended, reason in faults:
            assert reason in kiln.post(PREFLIGHT, request).message
            request |= mended
            request = {k: v for k, v in request.items() if v is not None}
        assert "profile stable" in kiln.post(PREFLIGHT, request).message
    with running(tmp_path) as kiln:
        assert "cispo" in kiln.post(PREFLIGHT, request).message
        del request["training_config"]
        assert "exists already" in kiln.post(PREFLIGHT, request).message


def test_preflight_reserves_and_changes_nothing(kiln: Running, tmp_path: Path) -> None:
    for _ in range(3):
        assert kiln.post(PREFLIGHT, {"output_adapter": "new"}).status == 200
    assert list(tmp_path.iterdir()) == []
    assert kiln.get("/v1/train/status").json == {"jobs": []}


# Submission


def test_job_trains_an_adapter_and_serves_it(
    kiln: Running, tmp_path: Path, groups: Groups, dataset: bytes
) -> None:
    answer = submit(kiln, groups)
    response = convert_record(answer.json, TrainingResponse, "response")
    assert response.state == "queued"
    assert response.effective_seed == str(effective_seed(GrpoConfig(), digest(dataset)))
    detail = convert_record(kiln.finished(response.job_id), TrainingJobDetail, "detail")
    status = detail.status
    assert (status.state, status.error, status.progress) == ("completed", None, 1.0)
    assert (detail.step, detail.steps) == (3, 3)
    assert [point.epoch for point in detail.loss_history] == [0, 0, 0]
    assert status.current_loss == detail.loss_history[-1].loss
    assert status.training_data.rows == 3
    assert status.training_data.admitted_corpus_sha256 == digest(dataset)
    assert status.training_data.openenv
    assert (detail.adapter_path, detail.loaded) == ("new", True)
    assert (tmp_path / "new" / WEIGHTS).read_text() == digest(dataset)
    assert kiln.get("/v1/adapters").json["loaded"] == ["new"]
    assert say(kiln, adapter="new").startswith("{")
    assert kiln.metric('kiln_training_jobs_total{status="completed",type="grpo"}') == 1
    until(lambda: kiln.metric("kiln_training_active") == 0)
    seen = kiln.get(f"/v1/train/status/{response.job_id}").json
    assert seen == kiln.get("/v1/train/status").json["jobs"][0]
    assert kiln.engine.jobs[0].config.seed == int(response.effective_seed)


def test_agentic_is_the_same_route(kiln: Running, groups: Groups) -> None:
    body = {"groups": groups, "config": {"output_name": "new", "auto_load": False}}
    detail = kiln.finished(job_of(kiln.post("/v1/train/agentic", body)))
    assert detail["status"]["state"] == "completed"
    assert detail["loaded"] is False
    assert kiln.get("/v1/adapters").json["loaded"] == []


def _nothing(groups: Groups) -> None:
    groups.clear()


def _mixed(groups: Groups) -> None:
    for completion in groups[1]["completions"]:
        del completion["openenv"], completion["trace"]


def _mixed_group(groups: Groups) -> None:
    del groups[1]["completions"][0]["openenv"]


def _reward(groups: Groups) -> None:
    groups[0]["completions"][0]["reward"] += 1.0


def _seed(groups: Groups) -> None:
    groups[0]["completions"][0]["openenv"]["seed"] += 1


def _schema(groups: Groups) -> None:
    for completion in groups[1]["completions"]:
        completion["openenv"]["action_schema_sha256"] = digest(b"another")


def _member(groups: Groups) -> None:
    groups[0]["surprise"] = 1


def _empty_group(groups: Groups) -> None:
    groups[0]["completions"] = []


def _huge_group(groups: Groups) -> None:
    groups[0]["completions"] *= 65


def _policy(groups: Groups, *, only: int | None = None) -> None:
    for index, group in enumerate(groups):
        for completion in group["completions"]:
            if only in {None, index}:
                policy = completion["openenv"]["behavior_policy"]
                policy["base_model_sha256"] = digest(b"another")


def _two_policies(groups: Groups) -> None:
    _policy(groups, only=1)


SPOILED: list[tuple[Callable[[Groups], None], int, str]] = [
    (_nothing, 400, "/groups"),
    (_mixed, 400, "mix"),
    (_mixed_group, 400, "OpenEnv"),
    (_reward, 400, "reward"),
    (_seed, 400, "disagrees on"),
    (_schema, 400, "disagrees on"),
    (_member, 400, "surprise"),
    (_empty_group, 400, "/groups/0/completions"),
    (_huge_group, 400, "/groups/0/completions"),
    (_two_policies, 400, "policy"),
    (_policy, 409, "base_model_sha256"),
]


@pytest.mark.parametrize(("spoil", "status", "reason"), SPOILED)
def test_spoiled_corpus_is_not_admitted(
    kiln: Running,
    groups: Groups,
    spoil: Callable[[Groups], None],
    status: int,
    reason: str,
) -> None:
    spoil(groups)
    answer = submit(kiln, groups)
    assert (answer.status, reason in answer.message) == (status, True), answer.message
    assert kiln.get("/v1/train/status").json == {"jobs": []}


def test_corpus_of_a_reloaded_adapter_is_another_policy(
    kiln: Running, tmp_path: Path, groups: Groups
) -> None:
    make_adapter(tmp_path, "actor")
    answer = submit(kiln, groups, base_adapter="actor")
    assert answer.status == 409
    assert answer.json["error"]["code"] == "policy_drift"


@pytest.mark.parametrize(
    ("config", "status", "reason"),
    [
        ({"output_name": None}, 400, "output_name"),
        ({"output_name": "a/../b"}, 400, "not a safe name"),
        ({"output_name": ".x"}, 400, "not a safe name"),
        ({"base_adapter": "nobody"}, 400, "no adapter"),
        ({"base_adapter": "../x"}, 400, "not a safe name"),
        ({"lora_alpha": 99.0}, 400, "lora_alpha"),
        ({"is_level": "cispo"}, 400, "cispo"),
        ({"seed": -1}, 400, "seed"),
        ({"output_name": "taken"}, 409, "exists already"),
    ],
)
def test_bad_configuration_is_not_admitted(
    kiln: Running,
    tmp_path: Path,
    groups: Groups,
    config: dict[str, Any],
    status: int,
    reason: str,
) -> None:
    make_adapter(tmp_path, "taken")
    answer = submit(kiln, groups, **config)
    assert (answer.status, reason in answer.message) == (status, True), answer.message


def test_ordinary_corpus_is_admitted(kiln: Running) -> None:
    group = {
        "messages": [{"role": "user", "content": "2+2?"}],
        "completions": [
            {"text": "4", "reward": 1.0},
            {"text": "5", "reward": 0.0},
        ],
    }
    detail = kiln.finished(job_of(submit(kiln, [group])))
    assert detail["status"]["state"] == "completed"
    assert "openenv" not in detail["status"]["training_data"]


# The queue


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Running]:
    """A server with room for two jobs, which wait before their first step."""
    with running(
        tmp_path,
        max_queued_jobs=2,
        max_tracked_jobs=4,
        prepare=lambda engine: engine.trains.clear(),
    ) as client:
        yield client


def states(kiln: Running) -> list[tuple[str, str]]:
    """Return adapter and state of every job, newest first."""
    jobs = convert_record(kiln.get("/v1/train/status").json, TrainingQueue, "jobs").jobs
    return [(job.adapter_name, job.state) for job in jobs]


def run_first(kiln: Running, groups: Groups) -> str:
    """Submit a job and wait until it is at work."""
    job_id = job_of(submit(kiln, groups, "first"))
    until(lambda: states(kiln)[-1][1] == "running")
    return job_id


def test_jobs_run_one_by_one_in_order(held: Running, groups: Groups) -> None:
    ids = [run_first(held, groups)]
    ids += [job_of(submit(held, groups, name)) for name in ("second", "third")]
    assert states(held) == [
        ("third", "queued"),
        ("second", "queued"),
        ("first", "running"),
    ]
    assert held.metric("kiln_training_queued") == 2
    assert held.metric("kiln_training_active") == 1
    health = held.get("/health").json["training"]
    assert health == {"queued": 2, "unfinished": 3}
    held.engine.trains.set()
    for job_id in ids:
        assert held.finished(job_id)["status"]["state"] == "completed"
    assert [job.config.output_name for job in held.engine.jobs] == [
        *("first", "second", "third"),
    ]


def test_full_queue_says_when_to_come_back(held: Running, groups: Groups) -> None:
    run_first(held, groups)
    for name in ("second", "third"):
        submit(held, groups, name)
    for answer in (
        submit(held, groups, "fourth"),
        held.post(PREFLIGHT, {"output_adapter": "fourth"}),
    ):
        assert answer.status == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.message == "the training queue is full"


def test_adapter_in_training_cannot_be_trained_again(
    held: Running, groups: Groups
) -> None:
    job_id = run_first(held, groups)
    answer = submit(held, groups, "first")
    assert answer.status == 409
    assert job_id in answer.message
    held.engine.trains.set()
    held.finished(job_id)
    assert "exists already" in submit(held, groups, "first").message


def test_concurrent_submissions_take_one_name_once(
    held: Running, groups: Groups
) -> None:
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda: answers.append(submit(held, groups, "same")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status for answer in answers) == [200, 409, 409, 409, 409, 409]


def test_oldest_finished_jobs_are_forgotten(held: Running, groups: Groups) -> None:
    held.engine.trains.set()
    ids = []
    for index in range(6):
        ids.append(job_of(submit(held, groups, f"job-{index}")))
        held.finished(ids[-1])
    assert [name for name, _ in states(held)] == ["job-5", "job-4", "job-3", "job-2"]
    assert held.get(f"/v1/train/jobs/{ids[0]}").status == 404


def test_finished_job_keeps_no_corpus(kiln: Running, groups: Groups) -> None:
    kiln.finished(job_of(submit(kiln, groups)))
    (job,) = kiln.state.jobs._jobs.values()
    assert job.groups == ()


# Cancelling and failing


def test_running_job_is_cancelled_at_its_next_step(
    held: Running, tmp_path: Path, groups: Groups
) -> None:
    job_id = run_first(held, groups)
    assert held.request("DELETE", f"/v1/train/queue/{job_id}").status == 200
    detail = held.finished(job_id)
    assert detail["status"]["state"] == "failed"
    assert "cancelled" in detail["status"]["error"]
    assert list(tmp_path.iterdir()) == []
    assert held.metric('kiln_training_jobs_total{status="cancelled",type="grpo"}') == 1
    again = held.request("DELETE", f"/v1/train/queue/{job_id}")
    assert (again.status, "is finished" in again.message) == (409, True)


def test_queued_job_is_cancelled_at_once(held: Running, groups: Groups) -> None:
    run_first(held, groups)
    job_id = job_of(submit(held, groups, "second"))
    answer = held.request("DELETE", f"/v1/train/queue/{job_id}")
    assert answer.json["state"] == "failed"
    assert answer.json["error"] == "cancelled before it started"
    assert states(held) == [("second", "failed"), ("first", "running")]
    assert held.get("/health").json["training"] == {"queued": 0, "unfinished": 1}


@pytest.mark.parametrize("path", ["jobs", "status"])
@pytest.mark.parametrize("name", ["nobody", "..", "%2e%2e%2f", "x" * 5_000])
def test_unknown_job_is_404(kiln: Running, path: str, name: str) -> None:
    assert kiln.get(f"/v1/train/{path}/{name}").status == 404
    assert kiln.request("DELETE", f"/v1/train/queue/{name}").status == 404


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TrainingError("the gradient exploded"), "the gradient exploded"),
        (RuntimeError("secret detail"), "failed unexpectedly; see the log"),
        (MemoryError(), "failed unexpectedly; see the log"),
    ],
)
def test_failing_job_leaves_the_server_up(
    kiln: Running, groups: Groups, error: Exception, told: str
) -> None:
    kiln.engine.train_error = error
    detail = kiln.finished(job_of(submit(kiln, groups)))
    assert (detail["status"]["state"], detail["status"]["error"]) == ("failed", told)
    assert kiln.get("/v1/adapters").json["available"] == []
    assert kiln.metric('kiln_training_jobs_total{status="failed",type="grpo"}') == 1
    until(lambda: kiln.metric("kiln_training_active") == 0)
    kiln.engine.train_error = None
    detail = kiln.finished(job_of(submit(kiln, groups)))
    assert detail["status"]["state"] == "completed"


def test_diverged_job_fails_and_can_still_be_read(
    kiln: Running, groups: Groups
) -> None:
    whole = kiln.state.jobs._report

    def report(job: Any, progress: Any) -> None:
        whole(job, progress.__class__(**{**fields(progress), "loss": float("nan")}))

    def fields(progress: Any) -> dict[str, Any]:
        return {name: getattr(progress, name) for name in progress.__struct_fields__}

    kiln.state.jobs._report = report  # type: ignore[method-assign]  # a bad step
    detail = kiln.finished(job_of(submit(kiln, groups)))
    assert detail["status"]["state"] == "failed"
    assert "no finite loss" in detail["status"]["error"]


def test_adapter_that_cannot_be_loaded_is_still_trained(
    kiln: Running, tmp_path: Path, groups: Groups
) -> None:
    for name in ("a", "b", "c"):
        make_adapter(tmp_path, name)
        kiln.post("/v1/adapters/load", {"name": name})
    detail = kiln.finished(job_of(submit(kiln, groups)))
    assert detail["status"]["state"] == "completed"
    assert detail["loaded"] is False
    assert detail["status"]["error"].startswith("trained, but not loaded: ")


# Profiles


def test_stable_serves_and_refuses_training(tmp_path: Path, groups: Groups) -> None:
    with running(tmp_path, serving_profile="stable") as kiln:
        assert say(kiln)
        for answer in (
            submit(kiln, groups),
            kiln.post(PREFLIGHT, {"output_adapter": "new"}),
        ):
            assert answer.status == 409
            assert "profile stable" in answer.message


def test_maintenance_trains_and_refuses_inference(
    tmp_path: Path, groups: Groups
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    with running(tmp_path, serving_profile="maintenance") as kiln:
        for answer in (
            kiln.post("/v1/chat/completions", chat),
            kiln.get("/v1/policy"),
            kiln.post("/v1/adapters/load", {"name": "x"}),
            kiln.post(PREFLIGHT, {"output_adapter": "new"}),
        ):
            assert answer.status == 409
            assert "profile maintenance" in answer.message
        detail = kiln.finished(job_of(submit(kiln, groups, auto_load=False)))
        assert detail["status"]["state"] == "completed"


def test_inference_is_answered_while_a_job_trains(
    held: Running, groups: Groups
) -> None:
    job_id = run_first(held, groups)
    started = time.monotonic()
    for _ in range(10):
        assert say(held)
    assert held.get("/health").status == 200
    assert time.monotonic() - started < 2
    assert states(held) == [("first", "running")]
    held.engine.trains.set()
    held.finished(job_id)


# The end


def test_stop_cancels_running_and_queued_jobs(
    held: Running, tmp_path: Path, groups: Groups
) -> None:
    run_first(held, groups)
    submit(held, groups, "second")
    held.stop()
    details = [job.detail for job in held.state.jobs._jobs.values()]
    assert [detail.status.state for detail in details] == ["failed", "failed"]
    assert all("cancelled" in str(detail.status.error) for detail in details)
    assert list(tmp_path.iterdir()) == []
