"""``kiln openenv evaluate``: paired seeds, gates, exit codes."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from kiln_core.canonical import pretty
from kiln_core.schemas import check_document
from tests.cli.conftest import Cli, files_in
from tests.server.running import Running
from tests.server.test_adapters import make_adapter
from tests.simulators.environment import Simulator

EVALUATE = ("openenv", "evaluate")
BEST = ['{"amount":1}', '{"amount":3}']
WORST = ['{"amount":0}']


@pytest.fixture
def pair(kiln: Running, environment: Simulator) -> list[str]:
    """Flags of a paired evaluation in which ``good`` and ``bad`` are served."""
    for name, script in (("good", BEST), ("bad", WORST * 8)):
        make_adapter(kiln.engine.settings.adapter_dir, name, script)
        kiln.post("/v1/adapters/load", {"name": name})
    return [
        *("--environment", environment.url, "--url", kiln.url, "--thinking", "false"),
        *("--group-size", "1", "--max-steps", "2", "--concurrency", "8"),
    ]


def seeds_of(environment: Simulator) -> set[int]:
    frames = [peer.received[0] for peer in environment.peers]
    return {json.loads(frame)["data"]["seed"] for frame in frames}


GATE = ("--min-mean-improvement", "0.1")


def test_better_candidate_passes_and_both_bundles_verify(
    cli: Cli, pair: list[str], tmp_path: Path
) -> None:
    done = cli(*EVALUATE, *pair, "--candidate", "good", *GATE)
    assert "decision               passed: the candidate is significantly" in done.out
    assert "p = " in done.out
    assert "20 paired seeds, 15 wins or more can pass" in done.err
    for side in ("baseline", "candidate"):
        folder = tmp_path / "environment-evaluation" / side
        assert set(files_in(folder)) == {
            "rollouts.jsonl",
            "replay.json",
            "summary.json",
        }
        assert cli("openenv", "verify", "--summary", folder / "summary.json")
        assert cli("openenv", "replay", "--summary", folder / "summary.json")


def test_receipt_is_the_one_document(cli: Cli, pair: list[str], tmp_path: Path) -> None:
    document = cli(*EVALUATE, *pair, "--candidate", "good", *GATE, "--json").json
    check_document(document, "EnvironmentEvaluationReceipt")
    saved = tmp_path / "environment-evaluation" / "receipt.json"
    assert json.loads(saved.read_bytes()) == document
    assert uuid.UUID(document["run_id"]).version == 4
    assert document["outcome"] == "kept"
    assert document["candidate"]["adapter"] == "good"
    assert "adapter" not in document["baseline"]
    evidence = document["evidence"]
    assert evidence["decision"] == "passed"
    assert evidence["paired_groups"] == 20
    assert evidence["improved_groups"] > 14
    assert evidence["candidate_mean_return"] == 0.75


RECEIPT = "environment-evaluation/receipt.json"
VERIFY = ("openenv", "verify", "--receipt")


def test_receipt_verifies_and_says_how_sure_it_is(
    cli: Cli, pair: list[str], tmp_path: Path
) -> None:
    done = cli(*EVALUATE, *pair, "--candidate", "good", *GATE)
    assert f"kiln openenv verify --receipt {RECEIPT}" in done.out
    shown = cli(*VERIFY, RECEIPT).out
    assert shown.count("ok  ") == 7
    for text in ("tied", "95 % exact", "95 % by seed", "kept", "Nothing was contacted"):
        assert text in shown
    assert [line for line in shown.splitlines() if "95 %" in line] == [
        line for line in done.out.splitlines() if "95 %" in line
    ]
    report = cli(*VERIFY, RECEIPT, "--json").json
    check_document(report, "EvaluationVerification")
    assert report["decision"] == "passed"


def test_tampered_receipt_or_bundle_does_not_verify(
    cli: Cli, pair: list[str], tmp_path: Path
) -> None:
    cli(*EVALUATE, *pair, "--candidate", "good", *GATE)
    path = tmp_path / RECEIPT
    good = path.read_bytes()
    receipt = json.loads(good)
    receipt["evidence"]["tied_groups"] += 1
    path.write_bytes(pretty(receipt))
    error = cli(*VERIFY, RECEIPT, "--json", code=1).json["error"]
    assert error["details"]["pointer"] == "/evidence/tied_groups"
    path.write_bytes(good)
    dataset = path.parent / "candidate" / "rollouts.jsonl"
    dataset.write_bytes(dataset.read_bytes()[:-1] + b" ")
    error = cli(*VERIFY, RECEIPT, "--json", code=1).json["error"]
    assert error["details"]["check"] == "dataset_digest"
    dataset.unlink()
    cli(*VERIFY, RECEIPT, code=2)


def test_flags_of_a_bundle_make_no_sense_beside_a_receipt(
    cli: Cli, tmp_path: Path
) -> None:
    done = cli(*VERIFY, RECEIPT, "--dataset", "x", code=2)
    assert "belongs to a bundle" in done.err


def test_earlier_receipt_never_stands_beside_new_bundles(
    cli: Cli, pair: list[str], tmp_path: Path, environment: Simulator
) -> None:
    cli(*EVALUATE, *pair, "--candidate", "good", *GATE)
    old = (tmp_path / RECEIPT).read_bytes()
    before = len(environment.peers)
    cli(*EVALUATE, *pair, "--candidate", "good", *GATE, code=2)
    assert len(environment.peers) == before
    assert (tmp_path / RECEIPT).read_bytes() == old
    cli(*EVALUATE, *pair, "--candidate", "bad", *GATE, "--force", code=1)
    assert cli(*VERIFY, RECEIPT, "--json").json["outcome"] == "rejected"


@pytest.mark.parametrize(
    ("sides", "flags", "decision", "code"),
    [
        (("base", "bad"), GATE, "rejected", 1),
        (("good", "base"), GATE, "rejected", 1),
        (("good", "good"), ("--min-mean-improvement", "0"), "inconclusive", 1),
        (("base", "good"), ("--min-mean-return", "0.9"), "rejected", 1),
        (("base", "good"), ("--min-mean-return", "0.7"), "passed", 0),
        (("base", "good"), ("--min-mean-improvement", "99"), "rejected", 1),
        (("base", "bad"), (), "diagnostic", 0),
    ],
)
def test_exit_code_is_the_verdict(
    cli: Cli,
    pair: list[str],
    sides: tuple[str, str],
    flags: tuple[str, ...],
    decision: str,
    code: int,
) -> None:
    chosen = ("--baseline", sides[0], "--candidate", sides[1])
    done = cli(*EVALUATE, *pair, *chosen, *flags, "--json", code=code)
    assert done.json["evidence"]["decision"] == decision


def test_both_sides_play_the_same_seeds(
    cli: Cli, pair: list[str], environment: Simulator
) -> None:
    cli(*EVALUATE, *pair, "--candidate", "good", "--groups", "3", "--seed-start", "70")
    assert seeds_of(environment) == {70, 71, 72}
    assert len(environment.peers) == 6


def test_seeds_follow_those_of_training(
    cli: Cli, pair: list[str], bundle: Path, environment: Simulator
) -> None:
    trained = seeds_of(environment)
    environment.peers.clear()
    flags = ("--candidate", "good", "--groups", "2", "--held-out-from", bundle)
    cli(*EVALUATE, *pair, *flags)
    assert seeds_of(environment) == {max(trained) + 1, max(trained) + 2}


@pytest.mark.parametrize(("start", "groups"), [(0, 1), (2, 1), (1, 5)])
def test_overlap_with_training_seeds_is_refused(
    cli: Cli,
    pair: list[str],
    bundle: Path,
    environment: Simulator,
    start: int,
    groups: int,
) -> None:
    asked = len(environment.requests)
    error = cli(
        *(*EVALUATE, *pair, "--candidate", "good", "--held-out-from", bundle),
        *("--seed-start", start, "--groups", groups, "--json"),
        code=2,
    ).error
    assert "overlap the training seeds 0 to 2" in error["message"]
    assert error["hint"] == "use --seed-start 3 or later"
    assert len(environment.requests) == asked


@pytest.mark.parametrize(
    "flags",
    [
        ["--groups", "19", *GATE],
        ["--groups", "19", "--min-mean-return", "0"],
        ["--min-mean-improvement", "-1"],
        ["--min-mean-improvement", "nan"],
        ["--min-mean-return", "nan"],
        ["--min-mean-return", "inf"],
        ["--groups", "0"],
        ["--group-size", "0"],
        ["--seed-start", "-1"],
        ["--seed-start", str(2**63)],
        ["--seed-start", str(2**63 - 1)],
        ["--held-out-from", "none.json"],
        ["--baseline", "../x"],
        ["--output", "file"],
        ["--output", "file/x"],
    ],
)
def test_invalid_flag_is_usage_and_contacts_nothing(
    cli: Cli,
    pair: list[str],
    environment: Simulator,
    tmp_path: Path,
    flags: list[str],
) -> None:
    (tmp_path / "file").write_text("")
    error = cli(*EVALUATE, *pair, "--candidate", "good", *flags, "--json", code=2).error
    assert error["code"] in {"usage", "file_unreadable", "output_unwritable"}
    assert environment.requests == []
    assert files_in(tmp_path) == {"file": b""}


def test_missing_candidate_costs_no_baseline(
    cli: Cli, pair: list[str], environment: Simulator, tmp_path: Path
) -> None:
    error = cli(*EVALUATE, *pair, "--candidate", "nobody", "--json", code=2).error
    assert "'nobody' is not loaded" in error["message"]
    assert environment.requests == []
    assert list(tmp_path.iterdir()) == []


def test_existing_bundle_is_refused_without_force(
    cli: Cli, pair: list[str], tmp_path: Path
) -> None:
    flags = (*EVALUATE, *pair, "--candidate", "good", "--groups", "2")
    cli(*flags)
    before = files_in(tmp_path)
    assert cli(*flags, "--json", code=2).error["code"] == "output_exists"
    assert files_in(tmp_path) == before
    cli(*flags, "--force", "--seed-start", "5")
    assert files_in(tmp_path) != before


def test_environment_that_changed_between_the_sides_publishes_no_pair(
    cli: Cli, pair: list[str], environment: Simulator, tmp_path: Path
) -> None:
    async def change(peer: Any, answer: str) -> None:
        await peer.send(answer.replace('"total":0', f'"total":{peer.index // 2}'))

    environment.script = {"reset": change}
    flags = ("--candidate", "good", "--groups", "2", "--concurrency", "1", "--json")
    error = cli(*EVALUATE, *pair, *flags, code=1).error
    assert error["code"] == "drift"
    assert (
        error["details"]["pointer"] == "/groups/0/reset_observation/observation/total"
    )
    assert list(tmp_path.iterdir()) == []


def test_few_seeds_say_that_they_can_never_pass(cli: Cli, pair: list[str]) -> None:
    done = cli(*EVALUATE, *pair, "--candidate", "good", "--groups", "3")
    assert "3 paired seeds can never reach p < 0.05" in done.err
