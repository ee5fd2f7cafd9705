"""The demo as a person runs it: it succeeds, and leaves nothing behind when stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEMO = [sys.executable, str(ROOT / "examples" / "demo.py")]
SERVERS = ("kiln_cli serve", "examples.environments serve")

pytestmark = pytest.mark.slow


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def children_in(folder):
    """Return the command lines of servers whose working directory is ``folder``."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            here = (process / "cwd").resolve() == folder
        except OSError:
            continue
        if here and any(server in command for server in SERVERS):
            found.append(command)
    return found


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return condition()


def test_demo_proves_a_gain_and_cleans_up(tmp_path):
    done = subprocess.run(
        DEMO,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "trained mean return" in done.stdout
    assert "Check it yourself" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    output = tmp_path / "demo-output"
    for summary in (
        output / "openenv.rollout-summary.json",
        output / "environment-evaluation" / "baseline" / "summary.json",
        output / "environment-evaluation" / "candidate" / "summary.json",
    ):
        check = subprocess.run(
            [sys.executable, "-m", "kiln_cli", "openenv", "verify"]
            + ["--summary", str(summary), "--json"],
            cwd="/",
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert check.returncode == 0, check.stdout
        assert json.loads(check.stdout)["schema"] == "kiln.openenv-verification.v1"
    receipt = output / "adapters" / "signals-agent" / "train_receipt.json"
    assert json.loads(receipt.read_text())["status"] == "success"
    assert wait_for(lambda: not children_in(tmp_path), 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_demo_leaves_no_process(tmp_path, number):
    process = subprocess.Popen(
        DEMO,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert wait_for(lambda: len(children_in(tmp_path)) >= 2, 60)
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert wait_for(lambda: not children_in(tmp_path), 15)
