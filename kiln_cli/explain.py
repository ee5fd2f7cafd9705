"""``kiln train explain``: why did this corpus train, or not?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import UnsetType

from kiln_cli import train as training
from kiln_cli.options import json_option
from kiln_cli.render import document, facts, say
from kiln_core import limits
from kiln_core.canonical import read_json
from kiln_core.contract import read_training_config
from kiln_core.dataset import read_groups
from kiln_core.errors import UsageError
from kiln_core.explain import explain_training

if TYPE_CHECKING:
    from kiln_core.explain import GroupExplanation, TrainingExplanation

__all__ = ["explain"]

RECEIPT_TYPE = "kiln_train_receipt"
VERDICTS = {
    "trains": "trains",
    "equal_rewards": "skipped: equal rewards",
    "no_usable_output": "skipped: no final answer",
}


@click.command(
    epilog="""\b
Examples:
  kiln train explain
  kiln train explain --file openenv.rollouts.jsonl \\
    --receipt adapters/my-agent/train_receipt.json
"""
)
@click.option(
    "--file",
    "source",
    type=click.Path(path_type=Path),
    default="openenv.rollouts.jsonl",
    show_default=True,
    help="Dataset of a bundle.",
)
@click.option(
    "--receipt",
    type=click.Path(path_type=Path),
    help="train_receipt.json of the adapter; its configuration is taken.",
)
@click.option(
    "--training-config",
    type=click.Path(path_type=Path),
    help="JSON file with any field of the GRPO configuration.",
)
@json_option
def explain(
    *, source: Path, receipt: Path | None, training_config: Path | None, as_json: bool
) -> None:
    """Say which groups carry a gradient, and why a run may change nothing.

    Everything is told from the dataset and the receipt; nothing is contacted.
    """
    from kiln_core.drive.files import read_regular

    data = read_regular(source, limits.MAX_ARTIFACT_BYTES, "dataset")
    written = None if receipt is None else _receipt(receipt)
    explained = explain_training(
        read_groups(data, str(source)), _config(written, training_config), written
    )
    if as_json:
        document(explained)
        return
    _show(explained)


def _config(written: dict[str, Any] | None, path: Path | None) -> Any:
    if written is None:
        return training.training_config(path, None)
    if path is not None:
        raise UsageError("a receipt brings its own configuration")
    return read_training_config(written.get("config"))


def _receipt(path: Path) -> dict[str, Any]:
    """Read a training receipt.

    Raises:
        UsageError: The file is none.
    """
    from kiln_core.drive.files import read_regular

    data = read_regular(path, limits.MAX_TRAINER_EVIDENCE_BYTES, "receipt")
    receipt = read_json(data, str(path), limits.MAX_ARTIFACT_DEPTH)
    if not isinstance(receipt, dict) or receipt.get("receipt_type") != RECEIPT_TYPE:
        raise UsageError(
            f"{path} is no training receipt",
            hint="it lies in the folder of the adapter: train_receipt.json",
        )
    return receipt


def _show(explained: TrainingExplanation) -> None:
    for group in explained.groups:
        say(_line(group))
    facts(
        [
            ("groups", len(explained.groups)),
            ("with a gradient", explained.training_groups),
            ("equal rewards", explained.equal_reward_groups),
            ("no final answer", explained.unusable_groups),
            ("mean reward", f"{explained.reward_mean:.4f}"),
        ]
    )
    for note in explained.notes:
        say(f"- {note}")


def _line(group: GroupExplanation) -> str:
    name = "" if isinstance(group.environment, UnsetType) else f"  {group.environment}"
    seed = "" if isinstance(group.seed, UnsetType) else f"  seed {group.seed}"
    spread = f"{group.reward_min:g} to {group.reward_max:g}"
    return (
        f"line {group.line:>4}{name}{seed}  {group.rollouts} rollouts  "
        f"{spread:<16}  {VERDICTS[group.verdict]}"
    )
