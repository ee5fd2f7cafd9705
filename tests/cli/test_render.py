"""What people see: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import gc
import io
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kiln_cli import render
from tests.server.running import ROOT, SECONDS


def on_a_terminal(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run ``kiln`` with stderr on a terminal; return exit code and what it shows."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 65_536):
                shown.append(data)
        except OSError:
            pass  # how Linux ends a terminal that nobody holds any more

    reader = threading.Thread(target=read)
    reader.start()
    done = subprocess.run(
        [sys.executable, "-m", "kiln_cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **variables},
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=SECONDS,
        check=False,
    )
    os.close(theirs)
    reader.join(SECONDS)
    os.close(ours)
    return done.returncode, b"".join(shown).decode(errors="replace")


def test_terminal_shows_bars_and_warnings(target: list[str], tmp_path: Path) -> None:
    flags = ("openenv", "train", "--output-adapter", "agent", *target)
    code, shown = on_a_terminal(tmp_path, *flags, "--thinking", "true")
    assert code == 0
    for phase in ("preflight", "inspecting", "collecting", "revalidating", "training"):
        assert phase in shown
    assert "12/12 rollouts, last return" in shown
    assert "3/3 steps, loss" in shown
    assert "Warning: thinking has no effect" in shown


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_terminal_of_any_encoding_will_do(
    target: list[str], tmp_path: Path, encoding: str
) -> None:
    flags = ("openenv", "rollout", *target, "--groups", "1", "--force")
    code, shown = on_a_terminal(tmp_path, *flags, PYTHONIOENCODING=encoding)
    assert (code, "4/4" in shown) == (0, True)


def test_json_shows_nothing_on_a_terminal(target: list[str], tmp_path: Path) -> None:
    flags = ("openenv", "rollout", *target, "--groups", "1", "--json")
    assert on_a_terminal(tmp_path, *flags) == (0, "")


def test_lines_are_few_and_warnings_come_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = render.PlainProgress()
    display.phase("collecting")
    for done in range(1, 1001):
        display.rollout(done, 1000, -0.5)
        display.warning("odd")
    display.step(0, 0, 0.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert lines[-1] == "  1000/1000 rollouts, last return -0.5"
    assert lines.count("Warning: odd") == 1


def test_text_is_shown_without_what_terminals_obey() -> None:
    assert render.plain("a\x1b[1mb\rc\td\u2028e\nf\u00a0g") == (
        "a\\x1b[1mb\\rc\\td\\u2028e\nf\\xa0g"
    )
    assert render.plain("größe ☃ 雪") == "größe ☃ 雪"


def test_warning_of_many_lines_cannot_pass_for_another_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    render.PlainProgress().warning("odd\nError: all is well\x1b[2J")
    assert capsys.readouterr().err == ("Warning: odd\\nError: all is well\\x1b[2J\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_is_whole_when_a_signal_cuts_a_write_short(unbuffered):
    program = (
        "from kiln_cli.render import document, write_whole; "
        "write_whole(); document({'text': 'x' * 1_000_000})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    begun = process.stdout.read(1)
    time.sleep(0.1)  # the pipe is full by now, and the writer waits in its write
    for number in (signal.SIGSTOP, signal.SIGCONT):
        process.send_signal(number)
        time.sleep(0.1)
    rest, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert len(begun + rest) == len('{"text":""}') + 1_000_000 + 1


def test_stream_made_buffered_stays_open_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    raw = io.FileIO(path, "w")
    unbuffered = io.TextIOWrapper(raw, write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", unbuffered)
        render.write_whole()
        assert sys.stdout is not unbuffered
        render.say("ours")
    gc.collect()
    unbuffered.write("theirs\n")
    unbuffered.close()
    assert path.read_text() == "ours\ntheirs\n"
