"""``kiln openenv verify`` and ``replay`` on good and on spoiled bundles."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kiln_cli.main import run
from kiln_core.canonical import pretty
from kiln_core.schemas import check_document
from tests.cli.conftest import OUTPUTS, Cli, files_in
from tests.server.running import Running, running
from tests.simulators.environment import (
    Simulator,
    default_documents,
    drop,
    observation,
    says,
    state,
)

VERIFY = ("openenv", "verify")
REPLAY = ("openenv", "replay")


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Simulator, dict[str, bytes]]]:
    """A live environment and the files of a bundle that was collected on it."""
    folder = tmp_path_factory.mktemp("recorded")
    adapters = tmp_path_factory.mktemp("adapters")
    with (
        Simulator().serving_in_thread() as simulator,
        running(adapters) as kiln,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(folder)
        where = ("--environment", simulator.url, "--url", kiln.url)
        plan = ("--groups", "3", "--max-steps", "3", "--thinking", "false")
        with pytest.raises(SystemExit) as stop:
            run(["openenv", "rollout", *where, *plan, "--json"])
        assert stop.value.code == 0
        yield simulator, files_in(folder)


@pytest.fixture
def environment(recorded: tuple[Simulator, dict[str, bytes]]) -> Iterator[Simulator]:
    """The environment of the bundle, which a test may change."""
    simulator = recorded[0]
    yield simulator
    simulator.script = {}
    simulator.documents = default_documents()


@pytest.fixture
def bundle(
    recorded: tuple[Simulator, dict[str, bytes]],
    environment: Simulator,
    tmp_path: Path,
) -> Path:
    for name, data in recorded[1].items():
        (tmp_path / name).write_bytes(data)
    return tmp_path / OUTPUTS[2]


def test_verdict_lists_the_checks(cli: Cli, bundle: Path) -> None:
    done = cli(*VERIFY)
    lines = done.out.splitlines()
    assert sum(line.startswith("ok  ") for line in lines) >= 9
    assert lines[-1].startswith("The bundle verifies. Nothing was contacted")
    assert done.err == ""


def test_verification_opens_no_socket_and_needs_no_credential(
    cli: Cli, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("verification opened a socket")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, forbidden)
    for name in list(os.environ):
        if "TOKEN" in name or "CREDENTIAL" in name:
            monkeypatch.delenv(name)
    assert "Nothing was contacted" in cli(*VERIFY).out


def test_everything_written_matches_its_contract(
    cli: Cli, bundle: Path, environment: Simulator, tmp_path: Path
) -> None:
    check_document(cli(*VERIFY, "--json").json, "VerificationReport")
    check_document(cli(*REPLAY, "--json").json, "ReplayRunReport")
    cli(*VERIFY, "--report", "outcome.json")
    inspected = cli("openenv", "inspect", "--environment", environment.url, "--json")
    check_document(inspected.json, "OpenEnvInspection")
    for name, definition in (
        ("outcome.json", "VerificationOutcome"),
        (OUTPUTS[1], "OpenEnvReplayManifest"),
        (OUTPUTS[2], "OpenEnvRolloutSummary"),
    ):
        check_document(json.loads((tmp_path / name).read_bytes()), definition)
    for line in (tmp_path / OUTPUTS[0]).read_bytes().splitlines():
        check_document(json.loads(line), "AgenticGroup")


def test_outcome_is_kept_on_success(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    report = cli(*VERIFY, "--report", "outcome.json", "--json").json
    outcome = json.loads((tmp_path / "outcome.json").read_bytes())
    assert outcome["schema"] == "kiln.openenv-verification-outcome.v1"
    assert outcome["report"] == report
    assert outcome["contradiction"] is None
    assert outcome["traced_rollouts"] == 12
    again = cli(*VERIFY, "--report", "outcome.json", code=2)
    assert "outcome.json" in again.err
    assert cli(*VERIFY, "--report", "outcome.json", "--force").code == 0


def test_outcome_tells_the_contradiction(
    cli: Cli, bundle: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / OUTPUTS[0]
    dataset.write_bytes(dataset.read_bytes() + b"\n")
    error = cli(*VERIFY, "--report", "outcome.json", "--json", code=1).json["error"]
    outcome = json.loads((tmp_path / "outcome.json").read_bytes())
    assert outcome["report"] is None
    found = outcome["contradiction"]
    assert found["check"] == error["details"]["check"] == "dataset_digest"
    assert found["message"] == error["message"]


def test_report_is_one_document(cli: Cli, bundle: Path) -> None:
    report = cli(*VERIFY, "--json").json
    assert report["schema"] == "kiln.openenv-verification.v1"
    assert (report["groups"], report["rollouts"]) == (3, 12)


def test_bundle_verifies_anywhere(
    cli: Cli, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "elsewhere" / "größe"
    moved.mkdir(parents=True)
    for name in OUTPUTS:
        (tmp_path / name).rename(moved / name)
    assert cli(*VERIFY, "--summary", moved / OUTPUTS[2])
    monkeypatch.chdir(moved)
    assert cli(*VERIFY)
    (moved / OUTPUTS[0]).rename(moved / "other.jsonl")
    assert cli(*VERIFY, "--dataset", "other.jsonl")
    assert cli(*VERIFY, code=2)


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_flipped_byte_names_file_and_place(
    cli: Cli, bundle: Path, tmp_path: Path, name: str, share: float
) -> None:
    whole = (tmp_path / name).read_bytes()
    place = min(int(len(whole) * share), len(whole) - 2)
    spoiled = bytearray(whole)
    spoiled[place] ^= 1
    (tmp_path / name).write_bytes(spoiled)
    done = cli(*VERIFY, code=1)
    assert done.err.startswith(f"Error: {name}")
    error = cli(*VERIFY, "--json", code=1).error
    assert error["code"] == "invalid_bundle"
    assert error["details"]["file"] == name
    assert error["details"]["check"]
    assert error["hint"]


def test_changed_reward_names_line_or_pointer(
    cli: Cli, bundle: Path, tmp_path: Path
) -> None:
    """A forger who also mends the digests is found further down."""
    summary = json.loads(bundle.read_bytes())
    summary["rollouts"][3]["episode_return"] += 1.0
    bundle.write_bytes(pretty(summary))
    error = cli(*VERIFY, "--json", code=1).error
    assert error["details"]["pointer"] == "/rollouts/3/episode_return"
    assert error["details"]["expected"] != error["details"]["found"]


def _schema(summary: Any) -> None:
    summary["schema"] = "kiln.openenv-rollout-summary.v9"


def _missing(summary: Any) -> None:
    del summary["stats"]


def _extra(summary: Any) -> None:
    summary["surprise"] = 1


@pytest.mark.parametrize("spoil", [_schema, _missing, _extra])
def test_other_summary_is_refused(cli: Cli, bundle: Path, spoil: Any) -> None:
    summary = json.loads(bundle.read_bytes())
    spoil(summary)
    bundle.write_bytes(pretty(summary))
    error = cli(*VERIFY, "--json", code=1).error
    assert error["code"] == "invalid_bundle"
    assert error["details"]["check"] in {"summary_schema", "summary_record"}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff", b"NaN", b'{"schema":1,"schema":2}']
)
def test_file_that_is_no_summary_is_refused(
    cli: Cli, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / OUTPUTS[2]).write_bytes(content)
    assert cli(*VERIFY, "--json", code=1).error["details"]["file"] == OUTPUTS[2]


@pytest.mark.parametrize("name", OUTPUTS)
def test_missing_file_could_not_be_checked(
    cli: Cli, bundle: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).unlink()
    error = cli(*VERIFY, "--json", code=2).error
    assert error["code"] == "file_unreadable"
    assert name in error["message"]


@pytest.mark.parametrize("name", OUTPUTS)
def test_link_is_not_followed(
    cli: Cli, bundle: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).rename(tmp_path / "real")
    (tmp_path / name).symlink_to("real")
    error = cli(*VERIFY, "--json", code=1).error
    assert error["code"] == "irregular_file"
    assert "symbolic link" in error["message"]


def test_directory_is_no_bundle(cli: Cli, tmp_path: Path) -> None:
    error = cli(*VERIFY, "--summary", tmp_path, "--json", code=None).error
    assert "is no regular file" in error["message"]


def test_verify_writes_nothing(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    before = files_in(tmp_path)
    cli(*VERIFY)
    assert files_in(tmp_path) == before


# Replay


def test_unchanged_environment_replays_exactly(cli: Cli, bundle: Path) -> None:
    done = cli(*REPLAY)
    assert done.out.endswith("The live environments behave exactly as recorded.\n")
    assert "12 in 3 groups" in done.out
    report = cli(*REPLAY, "--json").json
    assert report["schema"] == "kiln.openenv-replay-run.v1"
    assert report["rollouts"] == 12


def test_drift_is_told_with_its_pointer(
    cli: Cli, bundle: Path, environment: Simulator, tmp_path: Path
) -> None:
    async def another(peer: Any, answer: str) -> None:
        await peer.send(observation({"metadata": {}, "total": 2}, 0.5))

    environment.script = {"step 1": another}
    done = cli(*REPLAY, code=1)
    assert done.out == ""
    assert "drifted at /exchanges/0/result" in done.err
    flags = ("--report", "outcome.json", "--json")
    error = cli(*REPLAY, *flags, code=1).error
    assert error["code"] == "replay_drift"
    assert error["details"]["pointer"].startswith("/exchanges/0/result")
    outcome = json.loads((tmp_path / "outcome.json").read_bytes())
    assert outcome["schema"] == "kiln.openenv-replay-outcome.v1"
    assert outcome["report"] is None
    assert outcome["first_drift"]["pointer"] == error["details"]["pointer"]


def test_new_episode_ids_can_be_exempted(
    cli: Cli, bundle: Path, environment: Simulator
) -> None:
    async def numbered(peer: Any, answer: str) -> None:
        told = json.loads(answer)["data"]
        await peer.send(state({**told, "episode_id": f"another-{peer.index}"}))

    environment.script = {"state": numbered}
    error = cli(*REPLAY, "--json", code=1).error
    assert "--ignore-pointer /final_state/episode_id" in error["hint"]
    flags = ("--ignore-pointer", "/final_state/episode_id")
    outcome = cli(*REPLAY, *flags, "--json").json
    assert outcome["schema"] == "kiln.openenv-replay-outcome.v1"
    assert outcome["ignored_pointers"] == ["/final_state/episode_id"]
    assert "No drift outside the exempt places." in cli(*REPLAY, *flags).out


def test_changed_identity_is_drift(
    cli: Cli, bundle: Path, environment: Simulator
) -> None:
    environment.change("/metadata", version="2")
    error = cli(*REPLAY, "--json", code=1).error
    assert error["code"] == "environment_identity_changed"
    assert "identity.metadata" in error["details"]["changed"]


def test_environment_gone_could_not_be_checked(
    cli: Cli, kiln: Running, tmp_path: Path
) -> None:
    with Simulator().serving_in_thread() as environment:
        flags = ("--environment", environment.url, "--url", kiln.url, "--groups", "1")
        cli("openenv", "rollout", *flags)
    error = cli(*REPLAY, "--json", code=2).error
    assert error["code"] == "environment_unavailable"
    assert environment.url in error["message"]


def test_invalid_bundle_is_not_replayed(
    cli: Cli, bundle: Path, environment: Simulator, tmp_path: Path
) -> None:
    asked = len(environment.requests)
    with (tmp_path / OUTPUTS[0]).open("ab") as file:
        file.write(b"\n")
    assert cli(*REPLAY, "--json", code=1).error["code"] == "invalid_bundle"
    assert len(environment.requests) == asked


@pytest.mark.parametrize(
    "flags",
    [
        *(["--concurrency", "0"], ["--concurrency", "257"]),
        *(["--capacity-wait-seconds", "0"], ["--credential-env", "UNSET_VARIABLE"]),
        ["--credential-env", "-", "--credential-env", "-"],
    ],
)
def test_bad_flag_is_usage(cli: Cli, bundle: Path, flags: list[str]) -> None:
    assert cli(*REPLAY, *flags, "--json", code=2).error["code"] == "usage"


def test_protected_bundle_needs_a_credential_before_any_connection(
    cli: Cli,
    target: list[str],
    environment: Simulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ENV_TOKEN", "s3cret")
    cli("openenv", "rollout", *target, "--credential-env", "ENV_TOKEN")
    asked = len(environment.requests)
    for flags in ((), ("--credential-env", "-")):
        done = cli(*REPLAY, *flags, code=2)
        assert done.err.splitlines()[0].startswith(
            f"Error: {environment.url} was captured with a bearer token"
        )
        assert "--credential-env" in done.err.splitlines()[1]
    assert len(environment.requests) == asked
    monkeypatch.setenv("ENV_TOKEN", "rotated")
    assert cli(*REPLAY, "--credential-env", "ENV_TOKEN", "--json").json["rollouts"]
    assert environment.requests[-1].headers["Authorization"] == "Bearer rotated"


def test_public_bundle_sends_no_credential(
    cli: Cli, bundle: Path, environment: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENV_TOKEN", "s3cret")
    asked = len(environment.requests)
    error = cli(*REPLAY, "--credential-env", "ENV_TOKEN", "--json", code=2).error
    assert (error["code"], len(environment.requests)) == ("usage", asked)
    assert "captured without a credential" in error["message"]


@pytest.mark.parametrize("name", OUTPUTS)
def test_tampered_bundle_opens_no_socket(
    cli: Cli, bundle: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline verification is complete before anything is contacted."""
    path = bundle.parent / name
    path.write_bytes(path.read_bytes().replace(b"counter", b"counted", 1))
    opened: list[object] = []

    def refuse(self: object, address: object) -> None:
        opened.append(address)
        raise OSError

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    assert cli(*REPLAY, "--json", code=1).error["code"] == "invalid_bundle"
    assert opened == []


def test_lost_sessions_are_no_drift_and_are_tried_again(
    cli: Cli, bundle: Path, environment: Simulator
) -> None:
    captured = len(environment.peers)
    environment.script = lambda n: {"step": drop} if n == captured else {}
    done = cli(*REPLAY)
    assert done.err.count("replaying it again from reset") == 1
    environment.script = {"step": drop}
    error = cli(*REPLAY, "--episode-retries", "0", "--json", code=2).error
    assert error["code"] == "session_lost"


def test_hostile_text_of_a_drift_does_not_reach_the_terminal(
    cli: Cli, bundle: Path, environment: Simulator
) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\nError: all is well"
    environment.script = {"reset": says(observation({hostile: hostile, "total": 0}))}
    done = cli(*REPLAY, code=1)
    assert "drifted at /reset_observation/observation/" in done.err
    assert all(char.isprintable() or char == "\n" for char in done.out + done.err)
    errors = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("Error: group 0 candidate 0 drifted at ")
