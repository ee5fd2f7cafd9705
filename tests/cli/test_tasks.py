"""``kiln openenv tasks``: splits and pages, for people and for machines."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Cli
from tests.cli.test_inspect import refused_port, web_server
from tests.simulators.environment import Document, Simulator, document, redirect
from tests.simulators.tasks import provided, rows

TASKS = ("openenv", "tasks", "--environment")


def test_splits_are_shown_with_their_types(cli: Cli, environment: Simulator) -> None:
    provided(environment)
    done = cli(*TASKS, environment.url)
    assert done.out.splitlines() == [
        "environment  counter",
        f"url          {environment.url}",
        "task API     available",
        "split        train (train)",
        'split        Hard/odd % (curriculum) {"level":3}',
    ]
    assert done.err == "Hint: name a split with --split to see its rows\n"


def test_page_is_one_line_a_row(cli: Cli, environment: Simulator) -> None:
    provider = provided(environment)
    done = cli(
        *(*TASKS, environment.url, "--split", "Train", "--start", "9", "--limit", "2")
    )
    assert done.out.splitlines()[-3:] == [
        "Rows 9 to 10 of 120 in train:",
        ' 9  {"id":"row-9","index":9}',
        '10  {"id":"row-10","index":10}',
    ]
    assert provider.routes == ["splits", "num_tasks", "task_range"]


def test_default_page_has_fifty_rows(cli: Cli, environment: Simulator) -> None:
    provided(environment)
    report = cli(*TASKS, environment.url, "--split", "train", "--json").json
    (found,) = report["catalogs"]
    assert report["schema"] == "kiln.openenv-task-catalog.v1"
    assert found["base_url"] == environment.url
    assert found["catalog"]["tasks"] == rows(50)
    assert list(found["catalog"]) == [
        *("environment_name", "task_api", "splits", "selected_split"),
        *("num_tasks", "start", "stop", "tasks"),
    ]
    assert (found["catalog"]["start"], found["catalog"]["stop"]) == (0, 50)


def test_largest_page(cli: Cli, environment: Simulator) -> None:
    provided(environment, rows={"train": rows(300)})
    done = cli(*TASKS, environment.url, "--split", "train", "--limit", "200", "--json")
    assert len(done.json["catalogs"][0]["catalog"]["tasks"]) == 200


def test_page_beyond_the_end_says_so(cli: Cli, environment: Simulator) -> None:
    provided(environment)
    done = cli(*TASKS, environment.url, "--split", "train", "--start", "500")
    assert done.out.splitlines()[-1] == "No rows from 500 on, of 120 in train."
    assert done.err == ""


def test_rows_left_out_are_told(cli: Cli, environment: Simulator) -> None:
    provided(environment, broken={"task_range": document({"tasks": [1]})})
    done = cli(*TASKS, environment.url, "--split", "train")
    assert done.err == "Warning: the provider left out 49 rows of this page\n"
    assert done.out.splitlines()[-2:] == ["Rows 0 to 0 of 120 in train:", "0  1"]


def test_absent_provider_is_no_failure(cli: Cli, environment: Simulator) -> None:
    done = cli(*TASKS, environment.url)
    assert done.out.splitlines()[-1] == (
        "task API     unsupported (rollouts need none)"
    )
    environment.documents["/counter/splits"] = document({"detail": "no"}, 501)
    report = cli(*TASKS, environment.url, "--split", "train", "--json").json
    assert report["catalogs"][0]["catalog"] == {
        "environment_name": "counter",
        "task_api": "unsupported",
        "splits": [],
        "tasks": [],
    }


def test_hostile_rows_do_not_reach_the_terminal(
    cli: Cli, environment: Simulator
) -> None:
    hostile = "\x1b[2J\x07\r\x9b31m\u202e\u2028\nurl  http://evil"
    provided(
        environment,
        splits=[{"name": hostile, "type": hostile, hostile: hostile}],
        rows={hostile: [hostile, {hostile: "x" * 10_000}]},
    )
    done = cli(*TASKS, environment.url, "--split", hostile)
    assert all(char.isprintable() or char == "\n" for char in done.out)
    assert not any(line.startswith("url  http://evil") for line in done.out.split("\n"))
    assert max(len(line) for line in done.out.splitlines()) < 1_000
    report = cli(*TASKS, environment.url, "--split", hostile, "--json").json
    assert report["catalogs"][0]["catalog"]["tasks"][0] == hostile


def test_several_keep_their_order(cli: Cli, environment: Simulator) -> None:
    with Simulator().serving_in_thread() as other:
        provided(other, name="another")
        both = (*TASKS, other.url, "--environment", environment.url)
        report = cli(*both, "--json").json
        shown = cli(*both).out
    found = [
        (c["catalog"]["environment_name"], c["catalog"]["task_api"])
        for c in report["catalogs"]
    ]
    assert found == [("another", "available"), ("counter", "unsupported")]
    assert "\n\nenvironment  counter\n" in shown


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--split", "dev"], "has no split 'dev'; it has 'train', 'Hard/odd %'"),
        (["--environment-name", "x"], "has no environment 'x'; it has 'counter'"),
        (["--split", ""], "the split must be"),
        (["--environment-name", "x" * 257], "the environment name must be"),
        (["--start", "-1"], "a page starts at 0"),
        (["--start", str(2**63)], "a page starts at 0"),
        (["--limit", "0"], "a page has 1 to 200 rows, not 0"),
        (["--limit", "201"], "a page has 1 to 200 rows, not 201"),
        (["--limit", "many"], "'many' is not a valid integer"),
    ],
)
def test_wrong_flag_is_usage(
    cli: Cli, environment: Simulator, flags: list[str], reason: str
) -> None:
    provided(environment)
    error = cli(*TASKS, environment.url, *flags, "--json", code=2).error
    assert error["code"] == "usage"
    assert reason in error["message"]
    if "has no" not in reason:
        assert environment.requests == []


@pytest.mark.parametrize(
    ("broken", "code", "reason"),
    [
        ({"splits": document({"splits": []})}, "environment_protocol_error", "list"),
        ({"splits": document({}, 500)}, "http_status", "status 500"),
        ({"splits": document({}, 404)}, "http_status", "status 404"),
        ({"splits": redirect("http://127.0.0.1:1")}, "http_status", "status 307"),
        (
            {"num_tasks": document({"num_tasks": True})},
            "environment_protocol_error",
            "num_tasks",
        ),
        (
            {"task_range": Document(b'{"tasks":[NaN]}')},
            "environment_protocol_error",
            "JSON",
        ),
        (
            {"task_range": Document(b" " * 2_097_153)},
            "environment_unavailable",
            "2097152 bytes",
        ),
    ],
)
def test_broken_provider_is_one_sentence(
    cli: Cli,
    environment: Simulator,
    broken: dict[str, Document],
    code: str,
    reason: str,
) -> None:
    provided(environment, broken=broken)
    done = cli(*TASKS, environment.url, "--split", "train", "--json", code=2)
    assert done.error["code"] == code
    assert reason in done.error["message"]
    assert done.error["hint"]
    assert cli(*TASKS, environment.url, "--split", "train", code=2).out == ""


def test_nothing_there_and_something_else_there(cli: Cli) -> None:
    error = cli(*TASKS, f"http://127.0.0.1:{refused_port()}", "--json", code=2).error
    assert error["code"] == "environment_unavailable"
    with web_server(200, b"<html>hello</html>") as url:
        error = cli(*TASKS, url, "--json", code=2).error
    assert "no OpenEnv server" in error["message"]


def test_credential_is_sent_and_not_shown(
    cli: Cli, environment: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENV_TOKEN", "s3cret")
    provider = provided(environment)
    command = (*TASKS, environment.url, "--credential-env", "ENV_TOKEN", "--json")
    done = cli(*command, "--split", "train")
    sent = {r.headers.get("Authorization") for r in environment.requests}
    assert sent == {"Bearer s3cret"}
    assert "s3cret" not in done.out
    provider.rows["train"] = ["you sent s3cret"]
    done = cli(*command, "--split", "train", code=2)
    assert done.error["code"] == "credential_reflected"
    assert "s3cret" not in done.out


def test_missing_environment_is_usage(cli: Cli) -> None:
    error = cli("openenv", "tasks", "--json", code=2).error
    assert "--environment" in error["message"]
