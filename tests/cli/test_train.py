"""``kiln openenv train``: preflight, selection, submission, following."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from kiln_core.contract import materialize_config
from kiln_core.dataset import read_groups
from kiln_core.errors import TrainingError
from tests.cli.conftest import OUTPUTS, Cli, files_in
from tests.cli.test_inspect import refused_port
from tests.server.running import Running, running, until
from tests.server.test_adapters import make_adapter
from tests.simulators.environment import Simulator

TRAIN = ("openenv", "train", "--output-adapter", "agent")


def summary_of(folder: Path) -> Any:
    return json.loads((folder / OUTPUTS[2]).read_bytes())


def test_adapter_is_trained_on_exactly_the_published_bytes(
    cli: Cli, target: list[str], kiln: Running, tmp_path: Path
) -> None:
    done = cli(*TRAIN, *target)
    assert "Adapter agent: 3 steps, sha256:" in done.out
    assert ", served now\n" in done.out
    assert "trainable     12 in 3 groups" in done.out
    assert "Prove it: kiln openenv evaluate" in done.out
    assert "  3/3 steps, loss" in done.err
    assert done.err.splitlines()[0] == "preflight ..."
    (job,) = kiln.engine.jobs
    assert tuple(read_groups((tmp_path / OUTPUTS[0]).read_bytes())) == job.groups
    summary = summary_of(tmp_path)
    contract = summary["training_contract"]
    assert contract["effective_config"]["output_name"] == "agent"
    assert summary["training_submission"]["job_id"] == job.job_id
    assert summary["training_selection"]["groups_submitted"] == 3
    assert cli("openenv", "verify")
    assert kiln.get("/v1/adapters").json["loaded"] == ["agent"]


def test_json_is_summary_and_job(cli: Cli, target: list[str], tmp_path: Path) -> None:
    done = cli(*TRAIN, *target, "--json")
    assert done.err == ""
    assert done.json.keys() == {"summary", "job"}
    assert done.json["summary"] == summary_of(tmp_path)
    assert done.json["job"]["status"]["state"] == "completed"


def test_what_is_submitted_is_the_receipt(
    cli: Cli, target: list[str], kiln: Running, tmp_path: Path
) -> None:
    """Configuration, policy and post_eval go through unchanged."""
    (tmp_path / "grpo.json").write_text('{"epochs": 2, "kl_coeff": 0.0, "seed": 5}')
    cli(*TRAIN, *target, "--training-config", "grpo.json", "--auto-load", "false")
    contract = summary_of(tmp_path)["training_contract"]
    config = kiln.engine.jobs[0].config
    assert contract["effective_config"] == as_json(config)
    assert (config.epochs, config.kl_coeff, config.auto_load) == (2, 0.0, False)
    assert (
        contract["behavior_policy"] == (kiln.get("/v1/policy").json["behavior_policy"])
    )
    assert "post_eval" not in contract
    assert kiln.get("/v1/adapters").json["loaded"] == []


def as_json(record: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(record)


def test_training_goes_on_from_an_adapter(
    cli: Cli, target: list[str], kiln: Running, tmp_path: Path
) -> None:
    make_adapter(kiln.engine.settings.adapter_dir, "actor", ['{"amount":1}'])
    kiln.post("/v1/adapters/load", {"name": "actor"})
    cli(*TRAIN, *target, "--adapter", "actor")
    assert kiln.engine.jobs[0].config.base_adapter == "actor"
    assert summary_of(tmp_path)["adapter"] == "actor"
    assert cli("openenv", "verify")


# Preflight


REJECTED: list[tuple[list[str], str]] = [
    (["--output-adapter", "taken"], "exists already"),
    (["--output-adapter", "../x"], "not a safe name"),
    (["--output-adapter", ""], "not a safe name"),
    (["--adapter", "nobody"], "no adapter 'nobody'"),
    (["--adapter", "a/b"], "not a safe name"),
    (["--lora-rank", "65"], "over 64"),
    (["--lora-rank", "0"], "'--lora-rank': 0 is not in the range"),
    (["--lora-rank", "257"], "'--lora-rank': 257 is not in the range"),
    (["--temperature", "0"], "temperature 0"),
    (["--training-config", "none.json"], "cannot be read"),
    (["--training-config", "folder"], "no regular file"),
    (["--training-config", "list.json"], "must hold a JSON object"),
    (["--training-config", "broken.json"], "JSON"),
    (["--training-config", "nan.json"], "nan.json"),
    (["--training-config", "twice.json"], "duplicate key"),
    (["--training-config", "unknown.json"], "surprise"),
    (["--training-config", "type.json"], "epochs"),
    (["--training-config", "lion.json"], "lion"),
    (["--training-config", "key.json"], "momentum"),
    (["--training-config", "cispo.json"], "is_level cispo"),
    (["--training-config", "scale.json"], "lora_alpha / lora_rank"),
    (["--training-config", "huge.json"], "is over"),
]
FILES = {
    "list.json": "[]",
    "broken.json": "{",
    "nan.json": '{"kl_coeff": NaN}',
    "twice.json": '{"epochs": 1, "epochs": 2}',
    "unknown.json": '{"surprise": 1}',
    "type.json": '{"epochs": "many"}',
    "lion.json": '{"optimizer": {"kind": "lion"}}',
    "key.json": '{"optimizer": {"kind": "sgd", "momentum": 0.9}}',
    "cispo.json": '{"is_level": "cispo"}',
    "scale.json": '{"lora_rank": 1, "lora_alpha": 3}',
    "huge.json": '{"output_name": "' + "x" * 1_100_000 + '"}',
}


@pytest.mark.parametrize(("flags", "reason"), REJECTED)
def test_rejection_contacts_no_environment_and_writes_nothing(
    cli: Cli,
    target: list[str],
    kiln: Running,
    environment: Simulator,
    tmp_path: Path,
    flags: list[str],
    reason: str,
) -> None:
    make_adapter(kiln.engine.settings.adapter_dir, "taken")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    before = files_in(tmp_path)
    done = cli(*TRAIN, *target, *flags, "--json", code=2)
    assert reason in done.error["message"]
    assert environment.requests == []
    assert environment.peers == []
    assert files_in(tmp_path) == before
    assert kiln.engine.submitted == []


def test_rejection_leaves_an_old_bundle_as_it_is(
    cli: Cli, target: list[str], tmp_path: Path, bundle: Path
) -> None:
    before = files_in(tmp_path)
    cli(*TRAIN, *target, "--force", "--lora-rank", "65", code=2)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("profile", ["stable", "maintenance"])
def test_profile_without_both_rejects(
    cli: Cli, environment: Simulator, tmp_path: Path, profile: str
) -> None:
    (tmp_path / "adapters").mkdir()
    with running(tmp_path / "adapters", serving_profile=profile) as kiln:
        error = cli(
            *(*TRAIN, "--environment", environment.url, "--url", kiln.url, "--json"),
            code=2,
        ).error
    assert f"profile {profile}" in error["message"]
    assert environment.requests == []


def test_server_not_there_contacts_no_environment(
    cli: Cli, environment: Simulator, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{refused_port()}"
    done = cli(
        *(*TRAIN, "--environment", environment.url, "--url", url, "--json"), code=2
    )
    assert done.error["code"] == "server_unreachable"
    assert environment.requests == []
    assert files_in(tmp_path) == {}


def test_server_that_would_train_otherwise_is_not_trusted(
    cli: Cli,
    target: list[str],
    environment: Simulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kiln_server.routes import training

    def other(body: Any) -> Any:
        config = materialize_config(body)
        return config.__class__(
            **{**{n: getattr(config, n) for n in config.__struct_fields__}, "epochs": 9}
        )

    monkeypatch.setattr(training, "materialize_config", other)
    error = cli(*TRAIN, *target, "--json", code=2).error
    assert "another configuration: epochs differ" in error["message"]
    assert environment.requests == []


def test_forced_fields_of_a_file_are_overruled_and_said(
    cli: Cli, target: list[str], kiln: Running, tmp_path: Path
) -> None:
    """So the effective configuration of a receipt can be given again."""
    (tmp_path / "grpo.json").write_text(
        '{"output_name": "other", "auto_load": false, "base_adapter": null,'
        ' "behavior_policy": "recorded"}'
    )
    done = cli(*TRAIN, *target, "--training-config", "grpo.json")
    warned = [line for line in done.err.splitlines() if "is ignored" in line]
    assert warned == [
        "Warning: output_name of the training configuration is ignored: "
        "--output-adapter decides",
        "Warning: auto_load of the training configuration is ignored: "
        "--auto-load decides",
        "Warning: behavior_policy of the training configuration is ignored: "
        "the contract decides",
    ]
    assert kiln.engine.jobs[0].config.output_name == "agent"


def test_lora_rank_sets_alpha_unless_the_file_does(
    cli: Cli, target: list[str], kiln: Running, tmp_path: Path
) -> None:
    cli(*TRAIN, *target, "--lora-rank", "4")
    (tmp_path / "grpo.json").write_text('{"lora_rank": 32, "lora_alpha": 6.0}')
    flags = ("--training-config", "grpo.json", "--lora-rank", "8", "--force")
    cli(*TRAIN, *target, *flags, "--output-adapter", "second")
    chosen = [(j.config.lora_rank, j.config.lora_alpha) for j in kiln.engine.jobs]
    assert chosen == [(4, 8.0), (8, 6.0)]


# Selection


def constant(environment: Simulator) -> None:
    """Make every reward equal: no action is ever accepted."""
    action = {
        "type": "object",
        "properties": {"amount": {"const": 0}},
        "required": ["amount"],
    }
    environment.change("/schema", action=action)


def test_nothing_trainable_is_no_failure(
    cli: Cli, target: list[str], kiln: Running, environment: Simulator, tmp_path: Path
) -> None:
    constant(environment)
    done = cli(*TRAIN, *target)
    assert done.out.endswith("Nothing was trained, and no adapter was made.\n")
    assert "Warning: 3 groups had equal rewards and were skipped" in done.err
    assert "nothing is left to train on" in done.err
    assert kiln.engine.jobs == []
    assert kiln.get("/v1/adapters").json["available"] == []
    assert "training_submission" not in summary_of(tmp_path)
    assert cli("openenv", "verify")
    document = cli(*TRAIN, *target, "--force", "--json").json
    assert document["job"] is None
    selection = document["summary"]["training_selection"]
    assert selection["groups_submitted"] == 0
    assert selection["no_reward_gradient_groups_skipped"] == 3


def test_groups_without_a_gradient_are_kept_but_not_submitted(
    cli: Cli, target: list[str], kiln: Running, tmp_path: Path
) -> None:
    cli(*TRAIN, *target, "--group-size", "2", "--groups", "8")
    groups = list(read_groups((tmp_path / OUTPUTS[0]).read_bytes()))
    unequal = [g for g in groups if len({c.reward for c in g.completions}) > 1]
    assert 0 < len(unequal) < 8
    assert list(kiln.engine.jobs[0].groups) == unequal
    selection = summary_of(tmp_path)["training_selection"]
    assert selection["no_reward_gradient_groups_skipped"] == 8 - len(unequal)


# Jobs that fail


def test_failed_job_is_one_document_and_keeps_the_bundle(
    cli: Cli, target: list[str], kiln: Running, tmp_path: Path
) -> None:
    kiln.engine.train_error = TrainingError("the gradient exploded")
    error = cli(*TRAIN, *target, "--json", code=1).error
    assert error["code"] == "training_failed"
    assert "the gradient exploded" in error["message"]
    assert error["details"]["summary"] == OUTPUTS[2]
    assert error["details"]["job"]["status"]["state"] == "failed"
    assert cli("openenv", "verify")
    done = cli(*TRAIN, *target, "--force", code=1)
    assert "mean return" in done.out
    assert done.err.splitlines()[-1] == "Hint: the bundle it was given stays published"


def test_cancelled_job_is_a_failure(cli: Cli, target: list[str], kiln: Running) -> None:
    kiln.engine.trains.clear()

    def cancel() -> None:
        until(lambda: kiln.engine.jobs)
        kiln.request("DELETE", f"/v1/train/queue/{kiln.engine.jobs[0].job_id}")

    thread = threading.Thread(target=cancel)
    thread.start()
    error = cli(*TRAIN, *target, "--json", code=1).error
    thread.join()
    assert "cancelled" in error["message"]


def test_adapter_that_could_not_be_loaded_is_a_warning(
    cli: Cli, target: list[str], kiln: Running
) -> None:
    for name in ("a", "b", "c"):
        make_adapter(kiln.engine.settings.adapter_dir, name)
        kiln.post("/v1/adapters/load", {"name": name})
    done = cli(*TRAIN, *target)
    assert "not served yet" in done.out
    assert "Warning: trained, but not loaded: all 3 adapter slots" in done.err


def test_server_dying_midway_keeps_the_bundle(
    cli: Cli, target: list[str], kiln: Running, tmp_path: Path
) -> None:
    kiln.engine.trains.clear()

    def kill() -> None:
        until(lambda: kiln.engine.jobs)
        kiln.stop()

    thread = threading.Thread(target=kill)
    thread.start()
    done = cli(*TRAIN, *target, code=None)
    thread.join()
    # the last poll may still be told that the stopping server cancelled the job
    assert done.code in {1, 2}
    assert OUTPUTS[2] in done.out + done.err or "bundle" in done.err
    assert summary_of(tmp_path)["training_submission"]
    assert cli("openenv", "verify")


def test_server_dying_while_collecting_publishes_nothing(
    cli: Cli, target: list[str], kiln: Running, tmp_path: Path
) -> None:
    kiln.engine.answers.clear()

    def kill() -> None:
        until(lambda: kiln.engine.submitted)
        kiln.state.engine.answers.set()  # type: ignore[attr-defined]  # the simulator
        kiln.stop()

    thread = threading.Thread(target=kill)
    thread.start()
    error = cli(*TRAIN, *target, "--json", code=2).error
    thread.join()
    assert error["code"] in {"server_unreachable", "capacity_full"}
    assert files_in(tmp_path) == {}


def test_queue_that_filled_meanwhile_keeps_the_bundle(
    cli: Cli, target: list[str], kiln: Running, environment: Simulator
) -> None:
    async def fill(peer: Any, answer: str) -> None:
        kiln.state.jobs.max_queued = 0
        await peer.send(answer)

    environment.script = {"reset": fill}
    done = cli(*TRAIN, *target, "--json", code=2)
    assert done.error["code"] == "capacity_full"
    assert done.error["details"]["summary"] == OUTPUTS[2]
    assert f"kiln train grpo --file {OUTPUTS[0]}" in done.error["hint"]
    assert cli("openenv", "verify")
    kiln.state.jobs.max_queued = 4
    flags = ("--file", OUTPUTS[0], "--adapter", "later", "--url", kiln.url)
    assert "Adapter later" in cli("train", "grpo", *flags, "--follow").out


def test_policy_that_changed_before_submission_is_drift(
    cli: Cli,
    target: list[str],
    kiln: Running,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kiln_core.errors import PolicyDrift
    from kiln_server.routes import training

    def drifted(*_: object) -> None:
        raise PolicyDrift("the policy changed")

    monkeypatch.setattr(training, "check_same_policy", drifted)
    error = cli(*TRAIN, *target, "--json", code=1).error
    assert error["code"] == "policy_drift"
