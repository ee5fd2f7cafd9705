"""``kiln health``, ``kiln adapters`` and ``kiln train status``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kiln_core.errors import KilnError, TrainingError
from tests.cli.conftest import Cli
from tests.cli.test_inspect import refused_port, web_server
from tests.server.running import Running, running, until
from tests.server.test_adapters import make_adapter
from tests.simulators.environment import Simulator

ASKING: list[tuple[str, ...]] = [
    ("health",),
    ("adapters", "list"),
    ("adapters", "load", "x"),
    ("adapters", "unload", "x"),
    ("train", "status"),
    ("train", "status", "--job-id", "00000000-0000-0000-0000-000000000000"),
]


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_server_not_there_is_told(cli: Cli, command: tuple[str, ...]) -> None:
    url = f"http://127.0.0.1:{refused_port()}"
    error = cli(*command, "--url", url, "--json", code=2).error
    assert error["code"] == "server_unreachable"
    assert error["message"] == f"the Kiln server at {url} cannot be reached"


OTHERS = [
    *((200, b""), (200, b"hello"), (200, b"{}"), (200, b"[]")),
    *((200, b'{"status":"healthy"}'), (404, b"not here"), (500, b"<html>")),
    *((404, b"{}"), (302, b""), (200, b'{"available":[{"name":1}]}')),
]


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
@pytest.mark.parametrize(("status", "body"), OTHERS)
def test_other_server_is_told(
    cli: Cli, command: tuple[str, ...], status: int, body: bytes
) -> None:
    with web_server(status, body) as url:
        done = cli(*command, "--url", url, code=2)
        assert done.out == ""
        assert done.err.startswith("Error: ")
        assert cli(*command, "--url", url, "--json", code=2).error["message"]


@pytest.mark.parametrize("command", ASKING, ids=" ".join)
def test_environment_is_no_kiln_server(
    cli: Cli, environment: Simulator, command: tuple[str, ...]
) -> None:
    error = cli(*command, "--url", environment.url, "--json", code=2).error
    assert error["code"] in {"policy_failed", "server_refused"}


@pytest.mark.parametrize(
    "url", ["", "x", "ftp://x", "http://", "http://u@x", "http://["]
)
def test_wrong_url_is_usage(cli: Cli, url: str) -> None:
    error = cli("health", "--url", url, "--json", code=2).error
    assert error["code"] == "usage"
    assert "--url" in error["message"]


# Health


def test_health_is_shown(cli: Cli, kiln: Running) -> None:
    done = cli("health", "--url", kiln.url)
    assert done.out.splitlines()[:4] == [
        "status    ready",
        "model     simulated",
        "profile   experimental",
        "adapters  none loaded",
    ]
    assert cli("health", "--url", kiln.url, "--json").json["status"] == "ready"


def test_health_of_a_starting_server_is_not_ready(cli: Cli, tmp_path: Path) -> None:
    with running(tmp_path, wait=False, prepare=lambda e: e.starts.clear()) as kiln:
        done = cli("health", "--url", kiln.url, code=2)
        assert done.err == (
            "Error: the model is still loading\nHint: wait until /health says ready\n"
        )
        error = cli("health", "--url", kiln.url, "--json", code=2).error
        assert error["code"] == "capacity_full"


def test_health_waits_until_ready(cli: Cli, tmp_path: Path) -> None:
    with running(tmp_path, wait=False, prepare=lambda e: e.starts.clear()) as kiln:
        timer = threading.Timer(0.2, kiln.engine.starts.set)
        timer.start()
        assert cli("health", "--url", kiln.url, "--wait", "20")
        timer.join()


def test_health_waits_for_no_other_server(cli: Cli, environment: Simulator) -> None:
    error = cli(
        "health", "--url", environment.url, "--wait", "9999", "--json", code=2
    ).error
    assert "--url is the address of a Kiln server" in error["hint"]


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon", "86401"])
def test_wait_must_end(cli: Cli, seconds: str) -> None:
    assert cli("health", "--wait", seconds, "--json", code=2).error["code"] == "usage"


def test_health_needs_no_token(cli: Cli, tmp_path: Path) -> None:
    with running(tmp_path, api_token="s3cret") as kiln:
        assert cli("health", "--url", kiln.url)


# Adapters


def test_adapters_are_listed_loaded_and_unloaded(cli: Cli, kiln: Running) -> None:
    url = ("--url", kiln.url)
    assert cli("adapters", "list", *url).out == "No adapters.\n"
    make_adapter(kiln.engine.settings.adapter_dir, "one")
    (kiln.engine.settings.adapter_dir / "broken").mkdir()
    lines = cli("adapters", "list", *url).out.splitlines()
    assert lines[0] == "broken  unreadable  adapter 'broken' cannot be loaded"
    assert lines[1].startswith("one  sha256:")
    assert lines[1].endswith("not loaded")
    assert "one is served: sha256:" in cli("adapters", "load", "one", *url).out
    assert cli("adapters", "list", *url, "--json").json["loaded"] == ["one"]
    done = cli("adapters", "unload", "one", *url)
    assert done.out == "one is no longer served; its folder stays.\n"
    error = cli("adapters", "unload", "one", *url, "--json", code=2).error
    assert error["message"] == "the Kiln server refused: adapter 'one' is not loaded"


@pytest.mark.parametrize(
    "name", ["nobody", "../../etc/passwd", "/etc", "", "a b", "é", "x" * 500, "%2e%2e"]
)
@pytest.mark.parametrize("verb", ["load", "unload"])
def test_name_that_is_no_adapter_is_refused(
    cli: Cli, kiln: Running, verb: str, name: str
) -> None:
    error = cli("adapters", verb, name, "--url", kiln.url, "--json", code=2).error
    assert error["code"] == "server_refused"


# Training jobs

GROUP: dict[str, Any] = {
    "messages": [{"role": "user", "content": "2+2?"}],
    "completions": [{"text": "4", "reward": 1.0}, {"text": "5", "reward": 0.0}],
}


def submit(kiln: Running, name: str) -> str:
    body = {"groups": [GROUP], "config": {"output_name": name}}
    return str(kiln.post("/v1/train/grpo", body).json["job_id"])


def test_jobs_are_listed_newest_first(cli: Cli, kiln: Running) -> None:
    assert cli("train", "status", "--url", kiln.url).out == "No training jobs.\n"
    for name in ("one", "two"):
        kiln.finished(submit(kiln, name))
    lines = cli("train", "status", "--url", kiln.url).out.splitlines()
    assert [line.split()[1:4] for line in lines] == [
        ["completed", "100%", "two"],
        ["completed", "100%", "one"],
    ]
    document = cli("train", "status", "--url", kiln.url, "--json").json
    assert [job["adapter_name"] for job in document["jobs"]] == ["two", "one"]


def test_job_is_shown_and_followed(cli: Cli, kiln: Running) -> None:
    kiln.engine.trains.clear()
    job_id = submit(kiln, "one")
    until(lambda: kiln.engine.jobs)
    flags = ("train", "status", "--url", kiln.url, "--job-id", job_id)
    assert "running" in cli(*flags).out
    thread = threading.Timer(0.1, kiln.engine.trains.set)
    thread.start()
    done = cli(*flags, "--follow")
    thread.join()
    assert "completed" in done.out
    assert "training ...\n  1/1 steps, loss" in done.err
    assert cli(*flags, "--json").json["status"]["state"] == "completed"


@pytest.mark.parametrize(
    "error", [TrainingError("it exploded"), KilnError("\x1b[2Jboo")]
)
def test_failed_job_exits_1_with_one_document(
    cli: Cli, kiln: Running, error: KilnError
) -> None:
    kiln.engine.train_error = error
    job_id = submit(kiln, "one")
    kiln.finished(job_id)
    flags = ("train", "status", "--url", kiln.url, "--job-id", job_id)
    told = cli(*flags, "--json", code=1).error
    assert told["code"] == "training_failed"
    assert told["details"]["job"]["status"]["job_id"] == job_id
    done = cli(*flags, code=1)
    assert "failed" in done.out
    assert "\x1b" not in done.out + done.err
    assert "failed" in cli("train", "status", "--url", kiln.url).out


@pytest.mark.parametrize(
    "flags",
    [
        ["--follow"],
        ["--job-id", "x"],
        ["--job-id", ""],
        ["--job-id", "../status"],
        ["--job-id", "a?b#c"],
    ],
)
def test_bad_job_id_asks_nothing(cli: Cli, kiln: Running, flags: list[str]) -> None:
    error = cli("train", "status", "--url", kiln.url, *flags, "--json", code=2).error
    assert error["code"] == "usage"


def test_unknown_job_is_refused(cli: Cli, kiln: Running) -> None:
    job_id = "00000000-0000-0000-0000-000000000000"
    error = cli(
        "train", "status", "--url", kiln.url, "--job-id", job_id, "--json", code=2
    ).error
    assert error["message"] == (
        f"the Kiln server refused: there is no training job '{job_id}'"
    )
