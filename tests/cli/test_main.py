"""The program itself: help, exit codes, and that failures are told properly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from kiln_cli import main
from kiln_core import errors
from kiln_core.errors import KilnError
from tests.cli.conftest import Cli
from tests.server.running import ROOT, SECONDS, Running


def commands(
    group: click.Group = main.kiln, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command with its path."""
    with click.Context(group, **main.CONTEXT) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield (*path, name), command
            if isinstance(command, click.Group):
                yield from commands(command, (*path, name))


ALL = dict(commands())
LEAVES = {p: c for p, c in ALL.items() if not isinstance(c, click.Group)}

EXPECTED = {
    *("serve", "health", "openenv inspect", "openenv rollout", "openenv train"),
    *("openenv verify", "openenv replay", "openenv evaluate", "openenv tasks"),
    *("train explain", "train grpo", "train status"),
    *("adapters list", "adapters load", "adapters unload"),
}


def python(
    *arguments: str, folder: Path | None = None, **more: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a fresh interpreter."""
    options = {"capture_output": True, "text": True, "timeout": SECONDS, **more}
    variables = options.pop("env", {})
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        check=False,
        **options,
    )


def test_every_command_is_there() -> None:
    assert {" ".join(path) for path in LEAVES} == EXPECTED


# Help


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_shows_every_option_with_its_text(cli: Cli, path: tuple[str, ...]) -> None:
    command = ALL[path]
    text = cli(*path, "--help").out
    assert text == cli(*path, "-h").out
    assert command.help
    assert "Raises:" not in text
    assert "Args:" not in text
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.name
            assert any(name in text for name in option.opts)
            assert " ".join(option.help.split()).split(".")[0][:20] in " ".join(
                text.split()
            )
    if path in LEAVES:
        assert f"kiln {' '.join(path)}" in text.partition("Examples:")[2]


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_can_answer_as_json(path: tuple[str, ...]) -> None:
    assert "as_json" in {parameter.name for parameter in LEAVES[path].params}


def test_lists_say_what_the_commands_say() -> None:
    for path, command in ALL.items():
        parent = main.kiln if len(path) == 1 else ALL[path[:-1]]
        if isinstance(parent, main.LazyGroup):
            with click.Context(parent, **main.CONTEXT) as context:
                shown = parent._short_help(context, path[-1]).rstrip(".").lower()
            whole = " ".join((command.help or "").split()).lower()
            assert shown.split()[0] == whole.split()[0]


def test_only_collections_without_training_may_drop_token_ids() -> None:
    having = {
        path[-1]
        for path, command in LEAVES.items()
        if "no_trace" in {parameter.name for parameter in command.params}
    }
    assert having == {"rollout", "evaluate"}


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from kiln_cli.main import run\n"
        "try:\n    run(['--help'])\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'aiohttp', 'jax', 'starlette', 'hypercorn', 'rich', 'anyio'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = python("-c", code)
    assert done.stderr == "[]\n"
    assert "openenv" in done.stdout


def test_version_is_shown(cli: Cli) -> None:
    assert cli("--version").out.startswith("kiln, version ")


def test_module_runs_as_a_program(tmp_path: Path) -> None:
    done = python("-m", "kiln_cli", "openenv", "verify", "--json", folder=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "file_unreadable"
    assert done.stderr == ""


@pytest.mark.parametrize("path", [(), ("openenv",), ("adapters",), ("train",)])
def test_missing_command_shows_the_help(cli: Cli, path: tuple[str, ...]) -> None:
    done = cli(*path, code=2)
    assert done.out == ""
    assert done.err.startswith("Usage: kiln")
    assert "Error" not in done.err


# Exit codes


def every_error(root: type[KilnError] = KilnError) -> list[type[KilnError]]:
    return [root, *(e for sub in root.__subclasses__() for e in every_error(sub))]


def test_every_error_has_an_exit_code() -> None:
    doubted = (errors.ArtifactError, errors.DriftError, errors.TrainingError)
    for error in every_error():
        assert main.exit_code(error) == (1 if issubclass(error, doubted) else 2)


# Failures as JSON


def raising(error: BaseException) -> click.Command:
    @click.command()
    @click.option("--json", "as_json", is_flag=True)
    def command(as_json: bool) -> None:
        raise error

    return command


def run_failing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, *flags: str
) -> Any:
    monkeypatch.setattr(main.kiln, "get_command", lambda *_: raising(error))
    with pytest.raises(SystemExit) as stop:
        main.run(["fail", *flags])
    out, err = cli._capsys.readouterr()
    return stop.value.code, out, err


@pytest.mark.parametrize("error", every_error())
def test_every_error_is_one_document(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: type[KilnError]
) -> None:
    failure = error("it broke", file="f", pointer="/a")
    code, out, err = run_failing(cli, monkeypatch, failure, "--json")
    assert json.loads(out) == failure.document()
    assert (out.count("\n"), err, code) == (1, "", main.exit_code(error))


def test_error_is_a_sentence_and_a_hint(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = KilnError("it broke", hint="mend it")
    code, out, err = run_failing(cli, monkeypatch, failure)
    assert (code, out, err) == (2, "", "Error: it broke\nHint: mend it\n")


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), click.Abort()])
def test_interrupt_is_told_either_way(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    code, out, err = run_failing(cli, monkeypatch, stop)
    assert (code, out, err.strip()) == (130, "", "interrupted")
    code, out, err = run_failing(cli, monkeypatch, stop, "--json")
    assert (code, err.strip()) == (130, "")
    assert json.loads(out)["error"] == {
        "code": "interrupted",
        "message": "interrupted",
        "hint": "",
        "details": {},
    }


def test_bug_is_a_sentence_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run_failing(cli, monkeypatch, ZeroDivisionError("oops"), "--json")
    error = json.loads(out)["error"]
    assert (code, error["code"], err) == (2, "internal_error", "")
    assert "ZeroDivisionError: oops" in error["message"]
    assert "KILN_DEBUG" in error["hint"]


def test_debugging_shows_the_traceback(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILN_DEBUG", "1")
    monkeypatch.setattr(
        main.kiln, "get_command", lambda *_: raising(ZeroDivisionError())
    )
    with pytest.raises(ZeroDivisionError):
        main.run(["fail"])


USAGE: list[tuple[list[str], str]] = [
    (["nope", "--json"], "No such command 'nope'"),
    (["openenv", "nope", "--json"], "No such command 'nope'"),
    (["openenv", "rollout", "--json"], "Missing option '--environment'"),
    (["openenv", "train", "--environment", "x", "--json"], "--output-adapter"),
    (["openenv", "rollout", "--groups", "x", "--json"], "'x' is not a valid integer"),
    (["openenv", "rollout", "--thinking", "x", "--json"], "'x' is not one of"),
    (["openenv", "rollout", "--nope", "--json"], "No such option '--nope'"),
    (["openenv", "verify", "extra", "--json"], "extra"),
    (["adapters", "load", "--json"], "Missing argument 'NAME'"),
    (["openenv", "train", "--json", "--no-trace"], "--no-trace"),
]


@pytest.mark.parametrize(("arguments", "reason"), USAGE)
def test_wrong_usage_is_one_document(
    cli: Cli, arguments: list[str], reason: str
) -> None:
    error = cli(*arguments, code=2).error
    assert error["code"] == "usage"
    assert reason in error["message"]
    assert "\n" not in error["message"]
    assert error["hint"].startswith("see 'kiln")


@pytest.mark.parametrize(("arguments", "reason"), USAGE)
def test_wrong_usage_is_a_sentence(cli: Cli, arguments: list[str], reason: str) -> None:
    done = cli(*(a for a in arguments if a != "--json"), code=2)
    assert done.out == ""
    assert done.err.startswith("Error: ")
    assert reason in done.err


# Hostile text and streams


def test_terminal_codes_are_shown_not_obeyed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = KilnError("peer said \x1b[2J\x07\u202e", hint="\x9b31m")
    _, _, err = run_failing(cli, monkeypatch, failure)
    assert err == "Error: peer said \\x1b[2J\\x07\\u202e\nHint: \\x9b31m\n"


def test_unicode_and_lone_surrogates_can_be_told(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = KilnError("größe ☃ \udcff")
    _, out, _ = run_failing(cli, monkeypatch, failure, "--json")
    assert json.loads(out)["error"]["message"] == "größe ☃ \\udcff"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_locale_gets_utf8_json_and_readable_text(encoding: str) -> None:
    variables = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    for flags in ([], ["--json"]):
        done = python(
            *("-m", "kiln_cli", "openenv", "verify", "--summary", "größe☃.json"),
            *flags,
            env=variables,
            text=False,
        )
        assert done.returncode == 2
        assert b"Traceback" not in done.stderr
        if flags:
            message = json.loads(done.stdout.decode())["error"]["message"]
            assert "größe☃.json" in message
        else:
            assert done.stderr.startswith(b"Error: summary gr")


def test_path_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    done = python(
        *("-m", "kiln_cli", "openenv", "rollout", "--environment", "http://x"),
        *("--output", os.fsdecode(b"\xff.jsonl"), "--json"),
        folder=tmp_path,
    )
    assert done.returncode == 2
    assert "is not UTF-8" in json.loads(done.stdout)["error"]["message"]


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    kiln = f"{sys.executable} -m kiln_cli"
    return subprocess.run(
        ["bash", "-c", f'set -o pipefail\nkiln() {{ {kiln} "$@"; }}\n{script}'],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_closed_pipe_is_no_traceback(bundle: Path) -> None:
    done = shell("kiln openenv verify | true", bundle.parent)
    assert (done.returncode, done.stderr) == (2, "")
    done = shell("kiln openenv verify --json | true", bundle.parent)
    assert (done.returncode, done.stderr) == (2, "")


def test_full_device_is_no_traceback(bundle: Path) -> None:
    done = shell("kiln openenv verify --json > /dev/full", bundle.parent)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_closed_streams_do_not_change_the_verdict(bundle: Path) -> None:
    assert shell("kiln openenv verify >&-", bundle.parent).returncode == 0
    assert shell("kiln openenv verify 2>&-", bundle.parent).returncode == 0
    assert shell("kiln openenv verify >&- 2>&- <&-", bundle.parent).returncode == 0


def test_progress_into_a_closed_pipe_does_not_stop_the_work(
    kiln: Running, target: list[str], tmp_path: Path
) -> None:
    line = " ".join(target)
    done = shell(f"kiln openenv rollout {line} --json 2> >(true)", tmp_path)
    assert done.returncode == 0
    done = shell(f"kiln openenv rollout {line} --force 2> >(true)", tmp_path)
    assert done.returncode == 0
    assert "mean return" in done.stdout


# Plugins


def test_command_that_cannot_be_imported_hurts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    metadata = tmp_path / "plugin" / "broken-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: broken\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[kiln.commands]\nbroken = no_such_package.cli:broken\n"
    )
    monkeypatch.syspath_prepend(metadata.parent)
    text = cli("--help").out
    assert "Not available: kiln broken needs no_such_package" in text
    assert "openenv" in text
    error = cli("broken", "--flag", "x", "--json", code=2).error
    assert error["code"] == "missing_extra"
    assert error["hint"].startswith("pip install 'kiln-openenv[")


@pytest.mark.parametrize(("package", "extra"), [("aiohttp", "all"), ("anyio", "all")])
def test_missing_package_names_the_install(
    tmp_path: Path, package: str, extra: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules[{package!r}] = None\n"
    )
    done = python(
        *("-m", "kiln_cli", "openenv", "inspect", "--environment", "http://x"),
        "--json",
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (2, "missing_extra")
    assert package in error["message"]
    assert error["hint"] == f"pip install 'kiln-openenv[{extra}]'"


def test_signal_handlers_are_given_back(cli: Cli) -> None:
    before = [signal.getsignal(number) for number in main.SIGNALS]
    cli("--version")
    assert [signal.getsignal(number) for number in main.SIGNALS] == before
