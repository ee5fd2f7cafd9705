"""Checkpoints of a run: everything a later process needs to go on exactly.

A checkpoint is a folder `<adapter>-checkpoint-step-<step>.kiln-checkpoint` beside the
adapters. It holds the arrays of adapter, optimizer and KL reference, and a document
that binds them to corpus, configuration and policy. It is staged, synced and renamed,
and never changed: a crash leaves the last good one. Nothing serves it.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import msgspec
import numpy as np

from kiln_core.canonical import (
    Record,
    Sha256,
    convert_record,
    digest,
    digest_json,
    pretty,
    read_json,
)
from kiln_core.errors import KilnError, TrainingError
from kiln_train_jax.library import CHECKPOINT_SUFFIX
from kiln_train_jax.trainer import GrpoTrainer, StepMetrics

if TYPE_CHECKING:
    from pathlib import Path

    from kiln_core.engine import TrainingJob
    from kiln_core.provenance import BehaviorPolicyIdentity

__all__ = ["Binding", "Checkpoint", "Checkpoints", "binding_of"]

DOCUMENT_FILE: Final = "checkpoint.json"
ARRAYS_FILE: Final = "arrays.npz"


class Binding(Record, frozen=True, kw_only=True):
    """What a run must have in common with the one that is resumed."""

    adapter_name: str
    corpus_sha256: Sha256
    config_sha256: Sha256
    """Of the configuration without `resume_checkpoint`."""
    policy_sha256: Sha256
    """Of the identity that training started from."""


class _Document(Record, frozen=True, kw_only=True):
    """`checkpoint.json`."""

    schema: str = "kiln.grpo-checkpoint.v1"
    step: int
    binding: Binding
    arrays_sha256: Sha256
    history: list[dict[str, float]]
    """Metrics of every step so far."""
    warnings: list[str]


class Checkpoint(NamedTuple):
    """The state of a run after a step."""

    arrays: list[np.ndarray]
    """Leaves of adapter, optimizer state and KL reference, in order."""
    history: list[StepMetrics]
    """Of every step so far."""
    warnings: list[str]


def binding_of(job: TrainingJob, policy: BehaviorPolicyIdentity) -> Binding:
    """Return what binds the checkpoints of a job."""
    config = msgspec.structs.replace(job.config, resume_checkpoint=None)
    return Binding(
        adapter_name=str(job.config.output_name),
        corpus_sha256=job.corpus_sha256,
        config_sha256=digest_json(msgspec.to_builtins(config)),
        policy_sha256=digest_json(msgspec.to_builtins(policy)),
    )


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: Where adapters lie.
        binding: What the run is.
    """

    def __init__(self, directory: Path, binding: Binding) -> None:
        self._directory = directory
        self._binding = binding

    def keep(self, trainer: GrpoTrainer, history: list[StepMetrics]) -> str:
        """Publish the state of a trainer after its steps so far; return its name.

        Raises:
            TrainingError: It cannot be written, or another run's has its name.
        """
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state)]
        return self.write(Checkpoint(arrays, history, trainer.warnings))

    def resume(self, trainer: GrpoTrainer, name: str) -> list[StepMetrics]:
        """Bring a trainer to a checkpoint; return the metrics of the steps before.

        Raises:
            TrainingError: It is missing, damaged, or another run's.
        """
        found = self.read(name)
        trainer.restore(_restored(found.arrays, trainer.state), len(found.history))
        trainer.warnings += found.warnings
        return found.history

    def write(self, checkpoint: Checkpoint) -> str:
        """Publish a checkpoint and return its name; one that is there stays.

        Raises:
            TrainingError: It cannot be written, or another run's has its name.
        """
        step = len(checkpoint.history)
        adapter = self._binding.adapter_name
        name = f"{adapter}-checkpoint-step-{step:08d}{CHECKPOINT_SUFFIX}"
        target = self._directory / name
        if target.exists():
            self._check(_document(target), name)
            return name
        staged = self._directory / f".{name}.{os.getpid()}"
        try:
            staged.mkdir(parents=True)
            self._fill(staged, checkpoint)
            staged.rename(target)
            _sync(self._directory)
        except OSError as error:
            raise TrainingError(
                f"checkpoint {name} cannot be written: {error.strerror}"
            ) from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return name

    def read(self, name: str) -> Checkpoint:
        """Read a checkpoint of this run.

        Raises:
            TrainingError: It is missing, damaged, or another run's.
        """
        folder = self._directory / name
        document = _document(folder)
        self._check(document, name)
        try:
            content = (folder / ARRAYS_FILE).read_bytes()
        except OSError as error:
            raise TrainingError(f"checkpoint {name} cannot be read") from error
        if digest(content) != document.arrays_sha256:
            raise TrainingError(f"checkpoint {name} is damaged: its digest differs")
        with np.load(folder / ARRAYS_FILE, allow_pickle=False) as stored:
            arrays = [stored[f"{index:05d}"] for index in range(len(stored.files))]
        history = [StepMetrics(**metrics) for metrics in document.history]
        return Checkpoint(arrays, history, list(document.warnings))

    def _fill(self, folder: Path, checkpoint: Checkpoint) -> None:
        names = {f"{i:05d}": leaf for i, leaf in enumerate(checkpoint.arrays)}
        with (folder / ARRAYS_FILE).open("wb") as file:
            np.savez(file, **names)  # type: ignore[arg-type]  # names are no option
        document = _Document(
            step=len(checkpoint.history),
            binding=self._binding,
            arrays_sha256=digest((folder / ARRAYS_FILE).read_bytes()),
            history=[metrics._asdict() for metrics in checkpoint.history],
            warnings=checkpoint.warnings,
        )
        (folder / DOCUMENT_FILE).write_bytes(pretty(document))
        for path in (folder / ARRAYS_FILE, folder / DOCUMENT_FILE, folder):
            _sync(path)

    def _check(self, document: _Document, name: str) -> None:
        """Check that a checkpoint is of this run.

        Raises:
            TrainingError: It is not; the message names the first difference.
        """
        ours, theirs = (
            msgspec.to_builtins(binding)
            for binding in (self._binding, document.binding)
        )
        for field, value in ours.items():
            if theirs[field] != value:
                raise TrainingError(
                    f"checkpoint {name} is of another run: {field} differs",
                    expected=value,
                    found=theirs[field],
                    hint="resume with the same corpus, configuration and adapter name",
                )


def _restored(arrays: list[np.ndarray], like: Any) -> Any:
    """Return a tree shaped like another, with stored leaves.

    Raises:
        TrainingError: The leaves do not fit.
    """
    leaves, structure = jax.tree.flatten(like)
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
    if shapes != [(array.shape, str(array.dtype)) for array in arrays]:
        raise TrainingError("a checkpoint's arrays do not fit this run")
    return jax.tree.unflatten(structure, [jax.numpy.asarray(a) for a in arrays])


def _document(folder: Path) -> _Document:
    """Read what a checkpoint says of itself.

    Raises:
        TrainingError: It cannot be read.
    """
    try:
        content = read_json((folder / DOCUMENT_FILE).read_bytes(), DOCUMENT_FILE)
        return convert_record(content, _Document, DOCUMENT_FILE)
    except (OSError, KilnError) as error:
        raise TrainingError(f"checkpoint {folder.name} cannot be read") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
