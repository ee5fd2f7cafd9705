"""``kiln train explain``: told from dataset and receipt alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln_core.canonical import pretty
from tests.cli.conftest import Cli

EXPLAIN = ("train", "explain")


def test_groups_and_notes_are_shown(cli: Cli, bundle: Path) -> None:
    lines = cli(*EXPLAIN).out.splitlines()
    assert sum(line.startswith("line ") for line in lines) > 0
    assert any(line.startswith("with a gradient") for line in lines)
    assert any(line.startswith("- a policy loss near 0") for line in lines)


def test_explanation_is_one_document(cli: Cli, bundle: Path) -> None:
    found = cli(*EXPLAIN, "--json").json
    assert found["schema"] == "kiln.training-explanation.v1"
    assert found["groups"]


def test_receipt_brings_its_configuration(
    cli: Cli, bundle: Path, tmp_path: Path
) -> None:
    receipt = {
        "receipt_type": "kiln_train_receipt",
        "config": {"optimizer": {"kind": "adam_w"}},
        "warnings": ["watch out"],
    }
    (tmp_path / "train_receipt.json").write_bytes(pretty(receipt))
    out = cli(*EXPLAIN, "--receipt", "train_receipt.json").out
    assert "AdamW at a learning rate" in out
    assert "- watch out" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--receipt", "other.json"), "is no training receipt"),
        (("--receipt", "list.json"), "is no training receipt"),
        (("--receipt", "gone.json"), "gone.json"),
        (("--file", "gone.jsonl"), "gone.jsonl"),
        (
            ("--receipt", "good.json", "--training-config", "x.json"),
            "brings its own configuration",
        ),
        (("--receipt", "odd.json"), "invalid training configuration"),
    ],
)
def test_unusable_file_is_told(
    cli: Cli, bundle: Path, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    good = {"receipt_type": "kiln_train_receipt", "config": {}}
    for name, document in (
        ("good.json", good),
        ("odd.json", {**good, "config": {"epochs": 0}}),
        ("other.json", {}),
        ("list.json", []),
    ):
        (tmp_path / name).write_bytes(pretty(document))
    assert said in cli(*EXPLAIN, *flags, code=2).err
