"""``/health``, ``/v1/models``, ``/v1/policy`` and ``/metrics``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kiln_core.canonical import convert_record
from kiln_core.chat import PolicyAnswer
from kiln_core.errors import KilnError
from kiln_server.metrics import METRICS
from tests.server.running import Running, running, until


def test_health_is_503_until_ready(tmp_path: Path) -> None:
    with running(tmp_path, wait=False, prepare=lambda e: e.starts.clear()) as kiln:
        starting = until(lambda: kiln.get("/health"))
        assert starting.status == 503
        assert starting.json["status"] == "starting"
        assert starting.json["error"]["code"] == "capacity_full"
        assert starting.json["error"]["message"] == "the model is still loading"
        kiln.engine.starts.set()
        until(lambda: kiln.get("/health").status == 200)
        ready = kiln.get("/v1/health").json
    assert ready["status"] == "ready"
    assert "error" not in ready
    assert ready.keys() == {
        *("status", "version", "uptime_seconds", "model", "backend"),
        *("serving_profile", "active_adapter", "adapters_loaded", "scheduler"),
        *("gpu_memory", "training", "checks"),
    }
    assert ready["checks"] == [{"name": "engine", "ok": True, "message": "ready"}]


NOT_READY = [
    ("GET", "/v1/policy"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/guides"),
    ("GET", "/v1/adapters"),
    ("POST", "/v1/adapters/load"),
    ("POST", "/v1/train/grpo"),
]


@pytest.mark.parametrize(("method", "path"), NOT_READY)
def test_requests_before_ready_may_come_again(
    tmp_path: Path, method: str, path: str
) -> None:
    with running(tmp_path, wait=False, prepare=lambda e: e.starts.clear()) as kiln:
        answer = kiln.request(method, path)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json["error"]["hint"] == "wait until /health says ready"


def test_models_and_metrics_answer_before_ready(tmp_path: Path) -> None:
    with running(tmp_path, wait=False, prepare=lambda e: e.starts.clear()) as kiln:
        assert [m["id"] for m in kiln.get("/v1/models").json["data"]] == ["simulated"]
        assert kiln.get("/metrics").status == 200


@pytest.mark.parametrize("error", [KilnError("no device"), RuntimeError("a bug")])
def test_engine_that_cannot_start_ends_the_server(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(engine: object) -> None:
        engine.start_error = error  # type: ignore[attr-defined]  # the simulated engine

    with running(tmp_path, wait=False, prepare=prepare) as kiln:
        until(lambda: kiln.state.failure)
        kiln.stop()
        assert kiln.state.phase == "failed"
    assert "the engine cannot start" in caplog.text


def test_served_model_id_is_the_name(tmp_path: Path) -> None:
    with running(tmp_path, served_model_id="my model") as kiln:
        assert kiln.get("/v1/models").json["data"][0]["id"] == "my model"
        chat = {"model": "my model", "messages": [{"role": "user", "content": "x"}]}
        assert kiln.post("/v1/chat/completions", chat).json["model"] == "my model"


def test_policy_says_who_would_answer(tmp_path: Path) -> None:
    with running(tmp_path, thinking=True, slots=3) as kiln:
        answer = kiln.get("/v1/policy")
        policy = convert_record(answer.json, PolicyAnswer, "policy")
        assert (policy.thinking, policy.concurrency) == (True, 3)
        for base in ("base", "none", "NULL", "Base"):
            assert kiln.get(f"/v1/policy?adapter={base}").json == answer.json


@pytest.mark.parametrize("name", ["nobody", "..%2F..%2Fetc", "%00", "", "a%20b", "é"])
def test_policy_of_an_unknown_adapter_is_refused(kiln: Running, name: str) -> None:
    path = "/v1/policy?adapter=" + name.replace("é", "%C3%A9")
    assert kiln.get(path).status == (404 if name == "nobody" else 400)


# Metrics


def test_every_metric_is_rendered_with_its_help(kiln: Running) -> None:
    text = kiln.get("/metrics").body.decode()
    for name, help_text in METRICS.items():
        base = name.removesuffix("_total")
        assert f"# HELP {name} {help_text}" in text
        assert re.search(rf"^{base}(_total)?(\{{.*\}})? [0-9.]+$", text, re.MULTILINE)
    told = set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
    assert told - {name for name in told if name.endswith("_created")} == set(METRICS)


LABELS = {
    "kiln_chat_requests_total": {
        "status": {"completed", "failed", "cancelled", "refused"}
    },
    "kiln_chat_tokens_total": {"kind": {"prompt", "completion"}},
    "kiln_completion_requests_total": {
        "status": {"completed", "failed", "cancelled", "refused"}
    },
    "kiln_completion_tokens_total": {"kind": {"prompt", "completion"}},
    "kiln_openenv_training_preflights_total": {"status": {"accepted", "rejected"}},
    "kiln_training_jobs_total": {
        "type": {"grpo"},
        "status": {"completed", "failed", "cancelled"},
    },
}


def test_label_sets_are_closed_and_complete(kiln: Running) -> None:
    def found() -> dict[str, dict[str, set[str]]]:
        labels: dict[str, dict[str, set[str]]] = {}
        for line in kiln.get("/metrics").body.decode().splitlines():
            match = re.match(r"(\w+_total)\{(.*)\} ", line)
            if match:
                for name, value in re.findall(r'(\w+)="([^"]*)"', match[2]):
                    labels.setdefault(match[1], {}).setdefault(name, set()).add(value)
        return labels

    assert found() == LABELS
    kiln.post("/v1/chat/completions", {"messages": "no"})
    kiln.post("/v1/openenv/training/preflight", {"output_adapter": "<evil>"})
    assert found() == LABELS


def test_metrics_are_prometheus_text(kiln: Running) -> None:
    assert kiln.get("/metrics").headers["content-type"].startswith("text/plain")
