"""``kiln serve`` as a process: how it starts, how it is refused, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kiln_cli.main import run
from tests.server.running import SECONDS, kiln_environment, process, until
from tests.simulators.engine import ENTRY_POINT, FAILS, HOLDS, entry_point

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x"}]}
SIGNALS = [signal.SIGINT, signal.SIGTERM]
ENDING = [*SIGNALS, signal.SIGHUP]


def serve(tmp_path: Path, *flags: str, **variables: str) -> tuple[int, str, str]:
    """Run ``kiln serve`` to its end; return exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "kiln_cli", "serve", *flags],
        cwd=tmp_path,
        env=kiln_environment(tmp_path, KILN_ENGINE=ENTRY_POINT) | variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_announces_its_address_and_serves(tmp_path: Path) -> None:
    with process(tmp_path, "--adapter-dir", "here/are/adapters") as kiln:
        kiln.wait_until_ready()
        assert kiln.post(CHAT, BODY).status == 200
        assert (tmp_path / "here/are/adapters").is_dir()
        assert kiln.end(signal.SIGTERM) == (0, "", "")


def test_announcement_can_be_json(tmp_path: Path) -> None:
    with process(tmp_path, "--json", announced=False) as kiln:
        assert kiln.process.stdout is not None
        said = json.loads(kiln.process.stdout.readline())
        assert said.keys() == {"url", "model", "serving_profile"}
        assert said["url"].startswith("http://127.0.0.1:")
        assert kiln.end(signal.SIGTERM) == (0, "", "")


def test_signal_ends_a_waiting_request_and_the_server(tmp_path: Path) -> None:
    answers: list[Any] = []
    with process(tmp_path, **{HOLDS: "answers"}) as kiln:
        kiln.wait_until_ready()
        thread = threading.Thread(target=lambda: answers.append(kiln.post(CHAT, BODY)))
        thread.start()
        idle = socket.create_connection(("127.0.0.1", kiln.port))  # never asks
        partial = socket.create_connection(("127.0.0.1", kiln.port))  # never finishes
        partial.sendall(b"POST /v1/guides HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        until(lambda: kiln.get("/health").json["training"])
        assert kiln.end(signal.SIGTERM) == (0, "", "")
        thread.join()
        idle.close()
        partial.close()
    assert answers[0].status == 503
    assert answers[0].message == "the server is stopping"


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_ends_a_running_job(
    tmp_path: Path, number: int, groups: list[dict[str, Any]]
) -> None:
    with process(tmp_path, **{HOLDS: "trains"}) as kiln:
        kiln.wait_until_ready()
        body = {"groups": groups, "config": {"output_name": "new"}}
        # the corpus was collected with four slots, which are part of who acted
        for group in body["groups"]:  # type: ignore[attr-defined]  # the groups
            for completion in group["completions"]:
                policy = kiln.get("/v1/policy").json["behavior_policy"]
                completion["openenv"]["behavior_policy"] = policy
        assert kiln.post("/v1/train/grpo", body).status == 200
        until(lambda: kiln.metric("kiln_training_active") == 1)
        assert kiln.end(number) == (0, "", "")
    assert list((tmp_path / "adapters").iterdir()) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_the_model_loads_ends_cleanly(tmp_path: Path, number: int) -> None:
    with process(tmp_path, **{HOLDS: "starts"}) as kiln:
        until(lambda: kiln.get("/health").status == 503)
        assert kiln.end(number) == (0, "", "")


def test_second_signal_changes_nothing(tmp_path: Path) -> None:
    with process(tmp_path) as kiln:
        kiln.wait_until_ready()
        for _ in range(3):
            kiln.process.send_signal(signal.SIGINT)
        assert kiln.end(signal.SIGINT) == (0, "", "")


def test_hang_up_ends_the_server_unless_told_otherwise(tmp_path: Path) -> None:
    with process(tmp_path) as kiln:
        kiln.wait_until_ready()
        assert kiln.end(signal.SIGHUP) == (0, "", "")


@pytest.mark.parametrize("as_json", [False, True])
def test_port_in_use_is_one_sentence(tmp_path: Path, *, as_json: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = ["--port", str(port), *(["--json"] if as_json else [])]
        code, out, err = serve(tmp_path, *flags)
    message = f"cannot serve on 127.0.0.1:{port}: Address already in use"
    hint = "choose another --port, or stop what uses it"
    if as_json:
        assert json.loads(out)["error"]["message"] == message
        assert err == ""
    else:
        assert (out, err) == ("", f"Error: {message}\nHint: {hint}\n")
    assert code == 2


BAD_SETTINGS: list[tuple[list[str], dict[str, str], str]] = [
    (["--host", "::"], {}, "needs an API token"),
    (["--host", "no.such.host.invalid"], {"KILN_API_TOKEN": "x"}, "cannot serve"),
    (["--host", "a" * 70 + ".b"], {"KILN_API_TOKEN": "x"}, "cannot serve"),
    (["--host", "192.0.2.1"], {"KILN_API_TOKEN": "x"}, "Cannot assign"),
    (["--port", "70000"], {}, "port must be"),
    (["--port", "x"], {}, "'x' is not a valid integer"),
    (["--engine", "magic"], {}, "there is no engine 'magic'"),
    (["--adapter-dir", "file/x"], {}, "cannot be made"),
    (["--adapter-dir", "file"], {}, "cannot be made"),
    (["--serving-profile", "fast"], {}, "'fast' is not one of"),
    ([], {"KILN_SERVER_PORT": "many"}, "KILN_SERVER_PORT"),
    ([], {"KILN_SERVER_SERVING_PROFILE": "fast"}, "KILN_SERVER_SERVING_PROFILE"),
    ([], {FAILS: "create"}, "cannot be created"),
]


@pytest.mark.parametrize(("flags", "variables", "reason"), BAD_SETTINGS)
def test_bad_setting_is_refused_before_serving(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    variables: dict[str, str],
    reason: str,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(entry_point(tmp_path / "plugin"))
    defaults = {"KILN_SERVER_PORT": "0", "KILN_ENGINE": ENTRY_POINT}
    for name, value in {**defaults, **variables}.items():
        monkeypatch.setenv(name, value)
    handlers = {number: signal.getsignal(number) for number in ENDING}
    try:
        with pytest.raises(SystemExit) as stop:
            run(["serve", *flags])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.startswith("Error: ")
    assert reason in err.splitlines()[0]


def test_engine_that_cannot_start_ends_with_its_reason(tmp_path: Path) -> None:
    with process(tmp_path, **{FAILS: "start"}) as kiln:
        _, err = kiln.process.communicate(timeout=SECONDS)
        assert kiln.process.returncode == 2
    assert err == (
        "ERROR kiln.server: the engine cannot start: this simulator cannot start\n"
    )


@pytest.mark.parametrize(
    ("missing", "reason", "hint"),
    [
        ("hypercorn", "kiln serve needs hypercorn", "kiln-openenv[server]"),
        ("starlette", "kiln serve needs starlette", "kiln-openenv[server]"),
        ("jax", "engine jax needs jax", "kiln-openenv[jax]"),
    ],
)
def test_missing_extra_names_the_install(
    tmp_path: Path, missing: str, reason: str, hint: str
) -> None:
    blocker = tmp_path / "blocker"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(
        f"import sys\nsys.modules[{missing!r}] = None\n"
    )
    path = f"{blocker}{os.pathsep}{kiln_environment(tmp_path)['PYTHONPATH']}"
    flags = ["--port", "0", "--json"]
    code, out, err = serve(tmp_path, *flags, PYTHONPATH=path, KILN_ENGINE="jax")
    error = json.loads(out)["error"]
    assert (code, error["code"], err) == (2, "missing_extra", "")
    assert reason in error["message"]
    assert error["message"].endswith(", which is not installed")
    assert hint in error["hint"]


def test_closed_stdout_does_not_stop_the_server(tmp_path: Path) -> None:
    """As in ``kiln serve | head -1``."""
    with process(tmp_path) as kiln:
        assert kiln.process.stdout is not None
        kiln.process.stdout.close()
        kiln.wait_until_ready()
        assert kiln.post(CHAT, BODY).status == 200
        kiln.process.stdout = None
        assert kiln.end(signal.SIGTERM)[0] == 0


def test_killed_server_frees_its_port_and_leaves_adapters_whole(
    tmp_path: Path,
) -> None:
    with process(tmp_path) as kiln:
        kiln.wait_until_ready()
        port = kiln.port
        kiln.end(signal.SIGKILL)
    with process(tmp_path, "--port", str(port)) as again:
        again.wait_until_ready()


def test_ipv6_loopback_is_announced_in_brackets(tmp_path: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    child = subprocess.Popen(
        [sys.executable, "-m", "kiln_cli", "serve", "--port", "0", "--host", "::1"],
        cwd=tmp_path,
        env=kiln_environment(tmp_path, KILN_ENGINE=ENTRY_POINT),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    assert child.wait(SECONDS) == 0
    child.stdout.close()
    assert "http://[::1]:" in line
