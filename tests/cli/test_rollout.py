"""``kiln openenv rollout``: flags, outputs, and what stops it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest

from kiln_cli.rollout import rollout
from kiln_cli.train import train
from kiln_core import limits
from kiln_core.canonical import digest_json, read_record
from kiln_core.receipt import OpenEnvRolloutSummary
from kiln_core.verify import read_summary
from tests.cli.conftest import OUTPUTS, Cli, files_in
from tests.cli.test_inspect import refused_port, web_server
from tests.server.running import Running, running
from tests.simulators.environment import (
    Simulator,
    document,
    error,
    observation,
    refuses,
    says,
)

ROLLOUT = ("openenv", "rollout")


def test_bundle_is_published_and_shown(
    cli: Cli, target: list[str], tmp_path: Path
) -> None:
    done = cli(*ROLLOUT, *target)
    assert sorted(files_in(tmp_path)) == sorted(OUTPUTS)
    for name in ("policy", "rollouts", "mean return", "dataset", "replay", "summary"):
        assert f"\n{name}" in done.out
    assert "12 in 3 groups" in done.out
    assert done.out.endswith(
        "Check it: kiln openenv verify --summary openenv.rollout-summary.json\n"
    )
    phases = [line for line in done.err.splitlines() if line.endswith("...")]
    assert phases == [
        *("inspecting ...", "collecting ...", "revalidating ...", "deriving ..."),
    ]
    assert "  12/12 rollouts, last return" in done.err


def test_json_is_the_summary_alone(cli: Cli, target: list[str], tmp_path: Path) -> None:
    done = cli(*ROLLOUT, *target, "--json")
    summary = read_record(
        (tmp_path / OUTPUTS[2]).read_bytes(), OpenEnvRolloutSummary, "summary"
    )
    assert done.json == read_json_of(summary)
    assert done.err == ""


def read_json_of(record: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(record)


def test_same_flags_give_the_same_dataset(
    cli: Cli, target: list[str], tmp_path: Path
) -> None:
    cli(*ROLLOUT, *target)
    first = (tmp_path / OUTPUTS[0]).read_bytes()
    cli(*ROLLOUT, *target, "--force", "--concurrency", "9")
    assert (tmp_path / OUTPUTS[0]).read_bytes() == first


def test_outputs_go_where_they_are_told(
    cli: Cli, target: list[str], tmp_path: Path
) -> None:
    (tmp_path / "größe").mkdir()
    names = ["größe/a b.jsonl", "größe/ré.json", "größe/$(x).json"]
    flags = ("--output", "--replay-output", "--summary-output")
    chosen = [part for pair in zip(flags, names, strict=True) for part in pair]
    done = cli(*ROLLOUT, *target, *chosen)
    assert sorted(files_in(tmp_path)) == sorted(names)
    assert "--summary 'größe/$(x).json'" in done.out
    assert cli("openenv", "verify", "--summary", names[2])


def test_no_trace_keeps_no_token_ids(
    cli: Cli, target: list[str], tmp_path: Path
) -> None:
    cli(*ROLLOUT, *target, "--no-trace")
    assert b"prompt_token_ids" not in (tmp_path / OUTPUTS[0]).read_bytes()
    assert "with token ids   0" in cli("openenv", "verify").out


def test_unguided_asks_for_no_schema(
    cli: Cli, target: list[str], kiln: Running
) -> None:
    cli(*ROLLOUT, *target, "--unguided")
    assert all(request.action_schema is None for request in kiln.engine.submitted)


def test_reset_options_reach_the_environment(
    cli: Cli, target: list[str], environment: Simulator, tmp_path: Path
) -> None:
    (tmp_path / "reset.json").write_text('{"level": 3, "seed": 99}')
    cli(*ROLLOUT, *target, "--reset-options", "reset.json", "--seed-start", "7")
    resets = [peer.received[0] for peer in environment.peers]
    assert all('"level":3' in frame for frame in resets)
    assert {frame.partition('"seed":')[2][0] for frame in resets} == {"7", "8", "9"}


def test_thinking_without_effect_is_said_in_one_line(
    cli: Cli, target: list[str]
) -> None:
    done = cli(*ROLLOUT, *target, "--thinking", "true")
    warnings = [line for line in done.err.splitlines() if "Warning" in line]
    assert warnings == ["Warning: thinking has no effect: this policy answers directly"]


def test_thinking_model_is_collected_and_verifies(
    cli: Cli, environment: Simulator, tmp_path: Path
) -> None:
    (tmp_path / "adapters").mkdir()
    with running(tmp_path / "adapters", thinking=True) as kiln:
        cli(
            *(*ROLLOUT, "--environment", environment.url, "--url", kiln.url),
            *("--groups", "2", "--thinking-budget-tokens", "2", "--json"),
        )
    assert b"</think>" in (tmp_path / OUTPUTS[0]).read_bytes()
    assert cli("openenv", "verify")


def test_several_environments_take_turns(
    cli: Cli, kiln: Running, environment: Simulator
) -> None:
    with Simulator().serving_in_thread() as other:
        summary = cli(
            *(*ROLLOUT, "--environment", environment.url, "--environment", other.url),
            *("--url", kiln.url, "--groups", "4", "--group-size", "2", "--json"),
        ).json
    urls = [rollout["environment_url"] for rollout in summary["rollouts"]]
    assert urls == [url for url in (environment.url, other.url) * 2 for _ in range(2)]


# Outputs


@pytest.mark.parametrize("name", OUTPUTS)
def test_existing_output_is_refused_without_force(
    cli: Cli, target: list[str], tmp_path: Path, environment: Simulator, name: str
) -> None:
    (tmp_path / name).write_text("precious")
    error = cli(*ROLLOUT, *target, "--json", code=2).error
    assert error["code"] == "output_exists"
    assert name in error["message"]
    assert "--force" in error["hint"]
    assert files_in(tmp_path) == {name: b"precious"}
    assert environment.requests == []
    cli(*ROLLOUT, *target, "--force")
    assert cli("openenv", "verify")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--output", "missing/x.jsonl"], "directory missing does not exist"),
        (["--summary-output", "folder"], "is a directory"),
        (["--output", "same", "--replay-output", "same"], "need three paths"),
        (["--output", "same", "--replay-output", "folder/../same"], "three paths"),
        (["--output", "file/x"], "file"),
        (["--output", "x" * 300], "too long"),
    ],
)
def test_unusable_output_is_refused_before_anything(
    cli: Cli,
    target: list[str],
    tmp_path: Path,
    environment: Simulator,
    flags: list[str],
    reason: str,
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    error = cli(*ROLLOUT, *target, *flags, "--json", code=2).error
    assert reason in error["message"]
    assert environment.requests == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory_is_refused_before_anything(
    cli: Cli, target: list[str], tmp_path: Path, environment: Simulator
) -> None:
    (tmp_path / "fixed").mkdir(mode=0o500)
    error = cli(*ROLLOUT, *target, "--output", "fixed/x", "--json", code=2).error
    assert error["code"] == "output_unwritable"
    assert environment.requests == []


def test_read_only_directory_is_what_the_system_says(
    cli: Cli,
    target: list[str],
    environment: Simulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    error = cli(*ROLLOUT, *target, "--json", code=2).error
    assert error["code"] == "output_unwritable"
    assert environment.requests == []


# Flags


@pytest.mark.parametrize(
    "flags",
    [
        *(["--groups", "0"], ["--groups", "16385"], ["--group-size", "0"]),
        *(["--group-size", "257"], ["--groups", "16384", "--group-size", "2"]),
        *(["--seed-start", "-1"], ["--seed-start", str(2**63)]),
        *(["--seed-start", str(2**63 - 1), "--groups", "2"], ["--max-steps", "0"]),
        *(["--max-steps", "257"], ["--concurrency", "0"], ["--temperature", "nan"]),
        *(["--temperature", "-1"], ["--temperature", "inf"]),
        *(["--protocol-error-reward", "nan"], ["--max-recoverable-errors", "65"]),
        *(["--capacity-wait-seconds", "0"], ["--episode-retries", "-1"]),
        *(["--max-action-tokens", "0"], ["--max-action-tokens", "16385"]),
        *(["--thinking-budget-tokens", "256"], ["--thinking-budget-tokens", "-1"]),
        *(["--thinking", "false", "--thinking-budget-tokens", "1"],),
        *(["--adapter", "../x"], ["--adapter", ""], ["--url", "nowhere"]),
        *(["--url", "http://u:p@127.0.0.1"], ["--url", "http://127.0.0.1?x"]),
        *(["--url", "http://[::1"], ["--url", "http://127.0.0.1:99999"]),
        *(["--reset-options", "none.json"], ["--reset-options", "list.json"]),
        *(["--reset-options", "nan.json"], ["--reset-options", "folder"]),
        *(["--environment-reset-options", "ok.json"] * 2,),
        ["--reset-options", "ok.json", "--environment-reset-options", "ok.json"],
        *(["--environment", "http://u:p@x"], ["--groups", "1", "--environment", "x"]),
    ],
)
def test_invalid_flag_is_usage_and_contacts_nothing(
    cli: Cli,
    kiln: Running,
    environment: Simulator,
    tmp_path: Path,
    flags: list[str],
) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "nan.json").write_text('{"x": NaN}')
    (tmp_path / "ok.json").write_text('{"x": 1}')
    (tmp_path / "folder").mkdir()
    before = files_in(tmp_path)
    done = cli(
        *(*ROLLOUT, "--environment", environment.url, "--url", kiln.url, "--json"),
        *flags,
        code=2,
    )
    assert done.error["message"]
    assert done.error["code"] in {"usage", "file_unreadable"}
    assert environment.requests == []
    assert files_in(tmp_path) == before


# Servers that fail


def test_server_not_there_is_one_sentence(
    cli: Cli, environment: Simulator, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{refused_port()}"
    done = cli(*ROLLOUT, "--environment", environment.url, "--url", url, code=2)
    assert done.err.splitlines()[-2:] == [
        f"Error: the Kiln server at {url} cannot be reached",
        "Hint: start one with 'kiln serve', or pass its address with --url",
    ]
    assert environment.requests == []
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"status":"healthy"}', b"[1]"])
def test_other_server_as_url_is_told(
    cli: Cli, environment: Simulator, body: bytes
) -> None:
    with web_server(200, body) as url:
        error = cli(
            *(*ROLLOUT, "--environment", environment.url, "--url", url, "--json"),
            code=2,
        ).error
    assert error["code"] == "policy_failed"
    assert "--url is the address of a Kiln server" in error["hint"]


def test_unknown_adapter_contacts_no_environment(
    cli: Cli, target: list[str], environment: Simulator
) -> None:
    error = cli(*ROLLOUT, *target, "--adapter", "nobody", "--json", code=2).error
    assert "adapter 'nobody' is not loaded" in error["message"]
    assert environment.requests == []


def test_token_is_taken_from_the_environment(
    cli: Cli, environment: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapters").mkdir()
    with running(tmp_path / "adapters", api_token="s3cret") as kiln:
        flags = ("--environment", environment.url, "--groups", "1", "--json")
        monkeypatch.setenv("KILN_URL", kiln.url)
        error = cli(*ROLLOUT, *flags, code=2).error
        assert "needs its API token" in error["message"]
        assert "KILN_API_TOKEN" in error["hint"]
        monkeypatch.setenv("KILN_API_TOKEN", "s3cret")
        assert cli(*ROLLOUT, *flags).json


def test_context_overflow_names_the_numbers(
    cli: Cli, environment: Simulator, tmp_path: Path
) -> None:
    (tmp_path / "adapters").mkdir()
    with running(tmp_path / "adapters", context_tokens=500) as kiln:
        error = cli(
            *(*ROLLOUT, "--environment", environment.url, "--url", kiln.url),
            *("--groups", "1", "--json"),
            code=2,
        ).error
    assert error["code"] == "context_overflow"
    assert error["details"]["limit"] == 500


def test_environment_that_drifts_meanwhile_is_no_bundle(
    cli: Cli, target: list[str], environment: Simulator, tmp_path: Path
) -> None:
    changed = False

    async def change(peer: Any, answer: str) -> None:
        nonlocal changed
        if not changed:
            environment.change("/metadata", version="2")
            changed = True
        await peer.send(answer)

    environment.script = {"reset": change}
    error = cli(*ROLLOUT, *target, "--json", code=1).error
    assert error["code"] == "environment_identity_changed"
    assert files_in(tmp_path) == {}


def test_refused_sessions_end_the_collection(
    cli: Cli, target: list[str], environment: Simulator, tmp_path: Path
) -> None:
    environment.script = {"reset": refuses("SESSION_ERROR")}
    error = cli(*ROLLOUT, *target, "--episode-retries", "0", "--json", code=2).error
    assert error["code"] == "environment_session_refused"
    assert files_in(tmp_path) == {}


def test_environment_schema_may_be_unguidable(
    cli: Cli, target: list[str], environment: Simulator
) -> None:
    action = {"type": "object", "not": {"required": ["nothing"]}}
    environment.documents["/schema"] = document(
        {"action": action, "observation": {}, "state": {}}
    )
    done = cli(*ROLLOUT, *target)
    assert "Warning: " in done.err
    assert "cannot guide" in done.err


def test_what_an_outcome_suggests_is_a_warning(
    cli: Cli, target: list[str], environment: Simulator
) -> None:
    environment.script = {"step": refuses("EXECUTION_ERROR", close=False)}
    done = cli(*ROLLOUT, *target, "--max-recoverable-errors", "0")
    warnings = [line for line in done.err.splitlines() if line.startswith("Warning: ")]
    assert len(warnings) == 2
    assert "12 of 12 rollouts ended by an error (EXECUTION_ERROR 12)" in warnings[0]
    assert "rewards have no variance" in warnings[1]
    assert "kiln train sft" in warnings[1]
    done = cli(*ROLLOUT, *target, "--max-recoverable-errors", "0", "--json", "--force")
    assert done.err == ""


# The documented flags

FLAGS: dict[str, tuple[object, bool]] = {
    "--environment": (None, True),
    "--credential-env": (None, True),
    "--url": ("http://localhost:8420", False),
    "--adapter": ("base", False),
    "--groups": (8, False),
    "--group-size": (4, False),
    "--seed-start": (0, False),
    "--reset-options": (None, False),
    "--environment-reset-options": (None, True),
    "--max-steps": (8, False),
    "--concurrency": (4, False),
    "--max-action-tokens": (256, False),
    "--thinking-budget-tokens": (None, False),
    "--temperature": (1.0, False),
    "--thinking": ("true", False),
    "--protocol-error-reward": (-1.0, False),
    "--max-recoverable-errors": (3, False),
    "--capacity-wait-seconds": (300, False),
    "--output": ("openenv.rollouts.jsonl", False),
    "--replay-output": ("openenv.replay.json", False),
    "--summary-output": ("openenv.rollout-summary.json", False),
}
"""Default, and whether it is repeated."""
BEYOND = {"--episode-retries": 2, "--unguided": False, "--force": False}
TRAINING: dict[str, object] = {
    "--output-adapter": None,
    "--lora-rank": None,
    "--auto-load": "true",
    "--training-config": None,
}


@pytest.mark.parametrize(
    ("command", "more"),
    [(rollout, {"--no-trace": False}), (train, TRAINING)],
)
def test_flags_and_defaults_are_the_documented_ones(
    command: click.Command, more: dict[str, object]
) -> None:
    options = {option.opts[0]: option for option in command.params}
    assert options.keys() == {*FLAGS, *BEYOND, *more, "--json"}
    for name, (default, repeated) in FLAGS.items():
        option = options[name]
        assert isinstance(option, click.Option)
        assert (option.to_info_dict()["default"], option.multiple) == (
            default,
            repeated,
        ), name
        assert option.required == (name == "--environment")
    for name, default in {**BEYOND, **more}.items():
        assert options[name].to_info_dict()["default"] == default, name
    assert getattr(options["--thinking"].type, "choices", ()) == ("true", "false")


@pytest.mark.parametrize(
    "flags",
    [
        *(["--output", "same", "--replay-output", "same"],),
        *(["--output", "same", "--summary-output", "./same"],),
        *(["--replay-output", "same", "--summary-output", "same"],),
    ],
)
def test_outputs_must_differ(
    cli: Cli, target: list[str], environment: Simulator, flags: list[str]
) -> None:
    assert cli(*ROLLOUT, *target, *flags, "--json", code=2).error["code"] == "usage"
    assert environment.requests == []


# Files of reset options


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)


def one_too_many(path: Path) -> None:
    path.write_bytes(b" " * (limits.MAX_RESET_OPTIONS_BYTES + 1))


def link(path: Path) -> None:
    (path.parent / "elsewhere.json").write_text("{}")
    path.symlink_to("elsewhere.json")


def to_nothing(path: Path) -> None:
    path.symlink_to("nowhere.json")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


IRREGULAR: dict[str, tuple[Callable[[Path], object], str]] = {
    "a sparse gigabyte": (sparse, "is over 16776192 bytes"),
    "one byte too many": (one_too_many, "is over 16776192 bytes"),
    "a pipe": (os.mkfifo, "is no regular file"),
    "a directory": (Path.mkdir, "is no regular file"),
    "a link": (link, "is a symbolic link"),
    "a broken link": (to_nothing, "is a symbolic link"),
    "a link to a device": (device, "is a symbolic link"),
}


@pytest.mark.parametrize("flag", ["--reset-options", "--environment-reset-options"])
@pytest.mark.parametrize("kind", IRREGULAR)
def test_irregular_reset_options_are_refused_from_metadata(
    cli: Cli,
    target: list[str],
    environment: Simulator,
    tmp_path: Path,
    kind: str,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of it is read, and nothing waits for a writer."""
    make, reason = IRREGULAR[kind]
    path = tmp_path / "options.json"
    make(path)

    def read(*_: object, **__: object) -> NoReturn:
        raise AssertionError("it was read")

    monkeypatch.setattr(os, "fdopen", read)
    error = cli(*ROLLOUT, *target, flag, path, "--json", code=2).error
    assert error["code"] == "usage"
    assert error["message"].endswith(reason)
    assert error["details"]["file"] == str(path)
    assert environment.requests == []


def test_device_named_outright_is_refused(cli: Cli, target: list[str]) -> None:
    flags = ("--reset-options", "/dev/zero", "--json")
    error = cli(*ROLLOUT, *target, *flags, code=2).error
    assert error["message"] == "file /dev/zero is no regular file"


def test_seed_of_the_options_gives_way_to_that_of_the_plan(
    cli: Cli, target: list[str], environment: Simulator, tmp_path: Path
) -> None:
    (tmp_path / "options.json").write_text('{"seed": 99, "level": 2}')
    cli(*ROLLOUT, *target, "--reset-options", "options.json", "--seed-start", "5")
    resets = {peer.received[0] for peer in environment.peers}
    assert resets == {
        f'{{"data":{{"level":2,"seed":{seed}}},"type":"reset"}}' for seed in (5, 6, 7)
    }
    summary = read_summary(Path(OUTPUTS[2]).read_bytes(), "summary")
    assert summary.reset_plan_sha256 == digest_json([{"level": 2}])


def test_dash_is_an_environment_without_options(
    cli: Cli, kiln: Running, environment: Simulator, tmp_path: Path
) -> None:
    (tmp_path / "hard.json").write_text('{"level": 9}')
    with Simulator().serving_in_thread() as other:
        cli(
            *(*ROLLOUT, "--url", kiln.url, "--groups", "2", "--group-size", "1"),
            *("--environment", environment.url, "--environment", other.url),
            *("--environment-reset-options", "-"),
            *("--environment-reset-options", "hard.json", "--thinking", "false"),
        )
    assert environment.peers[0].received[0] == '{"data":{"seed":0},"type":"reset"}'
    assert other.peers[0].received[0] == '{"data":{"level":9,"seed":1},"type":"reset"}'
    summary = read_summary(Path(OUTPUTS[2]).read_bytes(), "summary")
    assert summary.reset_plan_sha256 == digest_json([{}, {"level": 9}])


# Text of environments


def test_hostile_text_of_an_episode_does_not_reach_the_terminal(
    cli: Cli, target: list[str], environment: Simulator
) -> None:
    """Neither of what is collected, nor of an error that ends it."""
    hostile = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m<script>"
    environment.change("/metadata", description=hostile)
    environment.script = {"step": says(observation({"note": hostile}, 1.0, done=True))}
    done = cli(*ROLLOUT, *target)
    assert shown(done.out + done.err)
    for script in (
        {"reset": says(error("EXECUTION_ERROR", hostile))},
        {"step": says(hostile)},
        {"state": says(error("SESSION_ERROR", hostile))},
    ):
        environment.script = script
        flags = ("--force", "--episode-retries", "0")
        done = cli(*ROLLOUT, *target, *flags, code=None)
        assert done.code == 2
        assert shown(done.out + done.err)


def shown(text: str) -> bool:
    """Say whether a terminal would only show a text, not obey it."""
    return all(char.isprintable() or char == "\n" for char in text)
