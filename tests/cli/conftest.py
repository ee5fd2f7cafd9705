"""What the tests of the commands share: a runner, servers, a published bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kiln_cli.main import run
from tests.server.running import Running, running
from tests.simulators.environment import Simulator


@dataclass
class Done:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        assert self.out.count("\n") == 1, self.out
        assert self.out.endswith("\n")
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The error document on stdout; there is nothing on stderr then."""
        assert self.json.keys() == {"error"}
        error = self.json["error"]
        assert error.keys() == {"code", "message", "hint", "details"}
        assert self.err == ""
        return error


class Cli:
    """Runs ``kiln`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int | None = 0) -> Done:
        """Run a command.

        Args:
            *arguments: Of the command line.
            code: What it must exit with; None accepts any.
        """
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run([str(argument) for argument in arguments])
        out, err = self._capsys.readouterr()
        done = Done(int(stop.value.code or 0), out, err)
        assert "Traceback" not in err
        assert "unexpectedly" not in out + err, (out, err)
        assert code is None or done.code == code, done
        return done


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("KILN_URL", "KILN_API_TOKEN", "KILN_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def kiln(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("adapters")) as client:
        yield client


@pytest.fixture
def environment() -> Iterator[Simulator]:
    with Simulator().serving_in_thread() as simulator:
        yield simulator


@pytest.fixture
def target(kiln: Running, environment: Simulator) -> list[str]:
    """Where to collect: a small plan on both servers."""
    return [
        *("--environment", environment.url, "--url", kiln.url),
        *("--groups", "3", "--group-size", "4", "--max-steps", "3"),
        *("--thinking", "false"),
    ]


OUTPUTS = (
    "openenv.rollouts.jsonl",
    "openenv.replay.json",
    "openenv.rollout-summary.json",
)


@pytest.fixture
def bundle(cli: Cli, target: list[str], tmp_path: Path) -> Path:
    """A published bundle of untrained rollouts; returns its summary."""
    cli("openenv", "rollout", *target)
    return tmp_path / OUTPUTS[2]


def files_in(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
