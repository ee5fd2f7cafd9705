"""``kiln train grpo``: groups that are recorded already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kiln_core.canonical import pretty
from tests.cli.conftest import Cli
from tests.server.running import Running

GRPO = ("train", "grpo")


@pytest.fixture
def dataset(bundle: Path) -> Path:
    """The dataset of a published bundle."""
    return bundle.parent / "openenv.rollouts.jsonl"


def test_dataset_of_a_bundle_is_trained_on(
    cli: Cli, kiln: Running, dataset: Path
) -> None:
    url = ("--url", kiln.url)
    done = cli(*GRPO, "--file", dataset, "--adapter", "again", "--follow", *url)
    assert "training adapter again" in done.out
    assert "Adapter again: sha256:" in done.out
    assert "again" in cli("adapters", "list", *url).out


def test_submission_alone_names_the_job(cli: Cli, kiln: Running, dataset: Path) -> None:
    flags = ("--file", dataset, "--url", kiln.url, "--json")
    response = cli(*GRPO, *flags).json
    assert response["state"] == "queued"
    job = ("train", "status", "--job-id", response["job_id"], "--url", kiln.url)
    detail = cli(*job, "--follow", "--json").json
    assert detail["status"]["adapter_name"] == "default"


def test_whole_request_keeps_its_own_names(
    cli: Cli, kiln: Running, dataset: Path, tmp_path: Path
) -> None:
    groups = [json.loads(line) for line in dataset.read_bytes().splitlines()]
    for group in groups:
        group["rollouts"] = group.pop("completions")
    body = {"agentic_groups": groups, "config": {"output_name": "mine"}}
    (tmp_path / "request.json").write_bytes(pretty(body))
    flags = ("--file", "request.json", "--url", kiln.url, "--lora-rank", "4")
    flags = (*flags, "--follow", "--json")
    detail = cli(*GRPO, *flags).json
    assert detail["status"]["adapter_name"] == "mine"
    assert (detail["config"]["lora_rank"], detail["config"]["lora_alpha"]) == (4, 8.0)


def test_configuration_and_flags_reach_the_server(
    cli: Cli, kiln: Running, dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "grpo.json").write_text('{"kl_coeff": 0.0, "epochs": 2}')
    flags = ("--training-config", "grpo.json", "--lora-rank", "8", "--auto-load")
    where = ("--file", dataset, "--adapter", "tuned", "--url", kiln.url)
    detail = cli(*GRPO, *where, *flags, "false", "--follow", "--json").json
    config = detail["config"]
    assert (config["kl_coeff"], config["epochs"], config["lora_rank"]) == (0.0, 2, 8)
    assert (config["auto_load"], detail["loaded"]) == (False, False)
    assert config["base_adapter"] is None


def test_server_that_refuses_is_told(cli: Cli, kiln: Running, dataset: Path) -> None:
    where = ("--file", dataset, "--url", kiln.url, "--adapter", "taken")
    cli(*GRPO, *where, "--follow")
    error = cli(*GRPO, *where, "--json", code=2).error
    assert error["code"] == "server_refused"
    assert "exists already" in error["message"]


@pytest.mark.parametrize(
    ("name", "data", "code", "said"),
    [
        ("x.txt", b"", 2, "neither .json nor .jsonl"),
        ("x.jsonl", b"", 2, "holds nothing to train on"),
        ("x.jsonl", b"{}\n", 1, "is not a group of rollouts"),
        ("x.jsonl", b"\n", 1, "is not a group of rollouts"),
        ("x.json", b"", 1, "JSON"),
        ("x.json", b"[]", 2, "invalid request"),
        ("x.json", b'{"groups":[]}', 2, "/groups"),
        ("x.json", b'{"groups":[{}],"agentic_groups":[]}', 2, "give one of them"),
        ("x.json", b'{"groups":[{"messages":[]}]}', 2, "invalid request at /groups"),
        ("x.json", b'{"groups":[1],"config":{"epochs":0}}', 2, "invalid request"),
    ],
)
def test_unusable_file_is_told_before_anything_is_sent(
    cli: Cli,
    kiln: Running,
    tmp_path: Path,
    name: str,
    data: bytes,
    code: int,
    said: Any,
) -> None:
    (tmp_path / name).write_bytes(data)
    done = cli(*GRPO, "--file", name, "--url", kiln.url, code=code)
    assert said in done.err
    assert cli("train", "status", "--url", kiln.url).out == "No training jobs.\n"


def test_missing_or_linked_file_is_told(cli: Cli, tmp_path: Path) -> None:
    assert "gone.jsonl" in cli(*GRPO, "--file", "gone.jsonl", code=2).err
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    cli(*GRPO, "--file", "link.jsonl", code=1)
