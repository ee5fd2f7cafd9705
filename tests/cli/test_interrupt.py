"""Signals at every phase of ``train``: no partial file, no process, no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import OUTPUTS, Cli, files_in
from tests.server.running import ROOT, SECONDS, Running, until
from tests.simulators.environment import Simulator, hang_up

Phase = Callable[[Running, Simulator], Callable[[], Any]]
"""Holds the servers at a phase; returns what becomes true when it is reached."""


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``kiln`` as a process group of its own."""
    child = subprocess.Popen(
        [sys.executable, "-m", "kiln_cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def preflight(kiln: Running, environment: Simulator) -> Callable[[], Any]:
    asked: list[object] = []
    admit = kiln.engine.admit_training

    def wait(config: Any) -> None:
        asked.append(config)
        kiln.engine.trains.wait()
        admit(config)

    kiln.engine.trains.clear()
    kiln.engine.admit_training = wait  # type: ignore[method-assign]  # held here
    return lambda: asked


def inspecting(kiln: Running, environment: Simulator) -> Callable[[], Any]:
    environment.documents["/schema"].seconds = SECONDS
    return lambda: "/schema" in environment.paths


def connecting(kiln: Running, environment: Simulator) -> Callable[[], Any]:
    environment.script = {"reset": hang_up}
    return lambda: any(peer.received for peer in environment.peers)


def asking(kiln: Running, environment: Simulator) -> Callable[[], Any]:
    kiln.engine.answers.clear()
    return lambda: kiln.engine.submitted


def stepping(kiln: Running, environment: Simulator) -> Callable[[], Any]:
    environment.script = {"step": hang_up}
    return lambda: any(peer.actions for peer in environment.peers)


def revalidating(kiln: Running, environment: Simulator) -> Callable[[], Any]:
    def slow(number: int) -> dict[str, Any]:
        environment.documents["/schema"].seconds = SECONDS
        return {}

    environment.script = slow
    return lambda: environment.paths.count("/schema") == 2


def training(kiln: Running, environment: Simulator) -> Callable[[], Any]:
    kiln.engine.trains.clear()
    return lambda: kiln.engine.jobs


BEFORE: list[Phase] = [
    *(preflight, inspecting, connecting, asking, stepping, revalidating),
]


@pytest.mark.parametrize("phase", BEFORE)
def test_interrupt_before_publication_leaves_nothing(
    kiln: Running,
    environment: Simulator,
    target: list[str],
    tmp_path: Path,
    phase: Phase,
) -> None:
    reached = phase(kiln, environment)
    with started(
        tmp_path, "openenv", "train", "--output-adapter", "agent", *target
    ) as child:
        until(reached)
        os.killpg(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=SECONDS)
    assert child.returncode == 130
    assert out == ""
    assert err.rstrip().endswith("interrupted")
    assert "Traceback" not in err
    assert files_in(tmp_path) == {}
    until(lambda: kiln.engine.busy == 0)
    until(lambda: all(peer.ended.is_set() for peer in environment.peers))
    assert kiln.engine.jobs == []


def submitted(folder: Path) -> bool:
    summary = folder / OUTPUTS[2]
    return summary.exists() and b"training_submission" in summary.read_bytes()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_interrupt_while_training_keeps_the_bundle(
    cli: Cli,
    kiln: Running,
    environment: Simulator,
    target: list[str],
    tmp_path: Path,
    number: int,
    code: int,
) -> None:
    reached = training(kiln, environment)
    flags = ("openenv", "train", "--output-adapter", "agent", *target, "--json")
    with started(tmp_path, *flags) as child:
        until(reached)
        until(lambda: submitted(tmp_path))
        child.send_signal(number)
        out, _ = child.communicate(timeout=SECONDS)
    assert child.returncode == code
    error = json.loads(out)["error"]
    (job,) = kiln.engine.jobs
    assert error["code"] == "interrupted"
    assert error["details"] == {"summary": OUTPUTS[2], "job_id": job.job_id}
    assert f"kiln train status --job-id {job.job_id} --follow" in error["hint"]
    assert sorted(files_in(tmp_path)) == sorted(OUTPUTS)
    assert cli("openenv", "verify")
    kiln.engine.trains.set()
    assert kiln.finished(job.job_id)["status"]["state"] == "completed"


@pytest.mark.parametrize("phase", [asking, training])
def test_killed_program_leaves_no_half_bundle(
    cli: Cli,
    kiln: Running,
    environment: Simulator,
    target: list[str],
    tmp_path: Path,
    phase: Phase,
) -> None:
    reached = phase(kiln, environment)
    with started(
        tmp_path, "openenv", "train", "--output-adapter", "agent", *target
    ) as child:
        until(reached)
        child.kill()
        child.wait(SECONDS)
    # what was being written under another name stays; nobody takes it for a bundle
    left = {name for name in files_in(tmp_path) if not name.endswith(".part")}
    assert left in (set(), set(OUTPUTS))
    if left:
        assert cli("openenv", "verify")
    until(lambda: all(peer.ended.is_set() for peer in environment.peers))
    kiln.engine.answers.set()
    kiln.engine.trains.set()
    until(lambda: kiln.engine.busy == 0)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("rollout", []),
        ("evaluate", ["--candidate", "base"]),
    ],
)
def test_interrupted_collection_is_one_document(
    kiln: Running,
    environment: Simulator,
    target: list[str],
    tmp_path: Path,
    command: str,
    flags: list[str],
) -> None:
    reached = asking(kiln, environment)
    with started(tmp_path, "openenv", command, *target, *flags, "--json") as child:
        until(reached)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=SECONDS)
    assert child.returncode == 130
    assert json.loads(out)["error"]["code"] == "interrupted"
    assert err.strip() == ""
    assert files_in(tmp_path) == {}


def test_second_interrupt_is_no_traceback(
    kiln: Running, environment: Simulator, target: list[str], tmp_path: Path
) -> None:
    reached = asking(kiln, environment)
    with started(tmp_path, "openenv", "rollout", *target) as child:
        until(reached)
        for _ in range(3):
            child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=SECONDS)
    assert child.returncode in {130, -signal.SIGINT}
    assert "Error" not in err.replace("Traceback", "")
    assert files_in(tmp_path) == {}
