"""The whole way with nothing simulated.

An environment of the OpenEnv SDK and ``kiln serve`` with a real model, each a process
of its own; everything else is public commands, each a process too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import ROOT, Client, until
from tests.server.test_chat import REFUSED, body

START_SECONDS = 300.0
"""A cold start compiles every program, maybe beside other tests."""
PLAN = (
    *("--groups", "4", "--group-size", "4", "--max-steps", "3", "--concurrency", "8"),
    *("--max-action-tokens", "48", "--thinking", "false"),
)


class Kiln(Client):
    """A running server, its process, and a directory for commands."""

    folder: Path
    process: subprocess.Popen[str]
    environment: str

    def command(self, *arguments: object, code: int = 0) -> Any:
        """Run ``kiln ... --json`` in the directory and return its document."""
        done = subprocess.run(
            [sys.executable, "-m", "kiln_cli", *map(str, arguments), "--json"],
            cwd=self.folder,
            env=variables(KILN_URL=self.url),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, ""), done
        return json.loads(done.stdout)

    def openenv(self, name: str, *arguments: object, code: int = 0) -> Any:
        where = ("--environment", self.environment)
        return self.command("openenv", name, *where, *PLAN, *arguments, code=code)

    def chat(self, **members: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "go"}], **members}
        answer = self.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        return answer.json["choices"][0]


def variables(**more: str) -> dict[str, str]:
    kept = {name: v for name, v in os.environ.items() if not name.startswith("KILN_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


@contextmanager
def server(
    folder: Path, *arguments: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server that prints its address; yield the address and the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments, "--port", "0"],
        cwd=folder,
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def kiln(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kiln]:
    folder = tmp_path_factory.mktemp("run")
    with (
        server(folder, "examples.environments", "serve", "counter") as (env_url, _),
        server(folder, "kiln_cli", "serve", "--model", "builtin:random") as (url, own),
    ):
        kiln = Kiln(int(url.rpartition(":")[2]))
        kiln.folder, kiln.process, kiln.environment = folder, own, env_url
        until(lambda: kiln.get("/health").status == 200, START_SECONDS)
        yield kiln


@pytest.fixture(scope="module")
def trained(kiln: Kiln) -> Any:
    """What ``train`` printed; inference was answered meanwhile."""
    answered = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.1):
            answered.append(kiln.chat(max_tokens=4))

    config = kiln.folder / "grpo.json"
    config.write_text('{"epochs": 3, "groups_per_step": 2, "kl_coeff": 0.0}')
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        document = kiln.openenv(
            *("train", "--output-adapter", "agent", "--training-config", config)
        )
    finally:
        stop.set()
        thread.join()
    assert answered
    return document


def test_adapter_is_trained_and_served(kiln: Kiln, trained: Any) -> None:
    job = trained["job"]
    assert (job["status"]["state"], job["status"]["error"]) == ("completed", None)
    assert job["loaded"] is True
    assert job["logprob_agreement"] < 1e-3
    groups = trained["summary"]["training_selection"]["groups_submitted"]
    assert job["steps"] == 3 * -(-groups // 2)
    folder = kiln.folder / "adapters" / "agent"
    assert {path.name for path in folder.iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors"),
        *("train_receipt.json", "adapter_manifest.json"),
    }
    receipt = json.loads((folder / "train_receipt.json").read_bytes())
    data = job["status"]["training_data"]
    assert receipt["training_data"]["sha256"] == data["admitted_corpus_sha256"]
    contract = trained["summary"]["training_contract"]
    assert receipt["behavior_policy"] == contract["behavior_policy"]
    assert kiln.command("adapters", "list")["loaded"] == ["agent"]
    said = kiln.chat(adapter="agent", rollout_provenance=True, max_tokens=4)
    identity = said["rollout_provenance"]["behavior_policy"]["adapter"]
    assert identity == {"name": "agent", "content_sha256": job["adapter_sha256"]}


def test_bundle_verifies_and_replays(kiln: Kiln, trained: Any) -> None:
    report = kiln.command("openenv", "verify")
    assert report["dataset_sha256"] == trained["summary"]["dataset_sha256"]
    replay = kiln.command("openenv", "replay", "--concurrency", "8")
    assert replay["environment_exchanges"] == report["environment_exchanges"]


def test_same_command_gives_the_same_dataset(kiln: Kiln, trained: Any) -> None:
    names = ("--output", "--replay-output", "--summary-output")
    outputs = [part for name in names for part in (name, name.strip("-"))]
    again = kiln.openenv("rollout", *outputs, "--concurrency", "1")
    assert again["dataset_sha256"] == trained["summary"]["dataset_sha256"]


def test_sides_are_compared_on_held_out_seeds(kiln: Kiln, trained: Any) -> None:
    document = kiln.openenv(
        *("evaluate", "--candidate", "agent", "--groups", "3", "--group-size", "2"),
        *("--held-out-from", "openenv.rollout-summary.json"),
    )
    assert document["seed_start"] == 4
    assert document["evidence"]["paired_groups"] == 3
    receipt = "environment-evaluation/receipt.json"
    report = kiln.command("openenv", "verify", "--receipt", receipt)
    assert report["outcome"] == document["outcome"] == "diagnostic"


def test_reasoning_is_collected_with_the_default_flags(kiln: Kiln) -> None:
    summary = kiln.openenv(
        *("rollout", "--thinking", "true", "--thinking-budget-tokens", "12"),
        *("--groups", "1", "--force"),
    )
    assert summary["thinking"] is True
    assert b"</think>" in (kiln.folder / "openenv.rollouts.jsonl").read_bytes()
    assert kiln.command("openenv", "verify")


def test_same_request_gives_the_same_tokens_at_any_load(kiln: Kiln) -> None:
    def ids(seed: int) -> Any:
        said = kiln.chat(seed=seed, max_tokens=24, rollout_provenance=True)
        found = said["rollout_provenance"]
        return found["input_token_ids"], found["action_tokens"]

    seeds = [0, 1, 2**63, 2**64 - 1]
    alone = [ids(seed) for seed in seeds]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ids, seeds * 2))
    assert together == alone * 2


def test_bad_requests_are_refused_by_a_real_engine_too(kiln: Kiln) -> None:
    for name, (members, _) in REFUSED.items():
        answer = kiln.post("/v1/chat/completions", body(**members))
        assert answer.status == (
            404 if name in {"unknown adapter", "unknown model"} else 400
        ), name
        assert answer.message


def test_training_on_a_changed_bundle_is_refused(kiln: Kiln, trained: Any) -> None:
    line = (kiln.folder / "openenv.rollouts.jsonl").read_bytes().splitlines()[0]
    group = json.loads(line)
    for completion in group["completions"]:
        completion["reward"] += 1.0
    body = {"groups": [group], "config": {"output_name": "forged"}}
    answer = kiln.post("/v1/train/grpo", body)
    assert answer.status == 400
    assert "reward" in answer.message


def test_server_ends_cleanly(kiln: Kiln) -> None:
    kiln.process.send_signal(signal.SIGTERM)
    out, err = kiln.process.communicate(timeout=START_SECONDS)
    assert (kiln.process.returncode, out, err) == (0, "", "")
