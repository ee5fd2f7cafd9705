"""One training job from admission to the adapter folder.

The folder is staged under a name that starts with a dot, which no listing shows, and
renamed when adapter, receipt and manifest are complete and synced: a job that fails or
is cancelled leaves nothing servable.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import jax
import numpy as np

from kiln_core.engine import TrainingJob, TrainingOutcome, TrainingProgress
from kiln_core.errors import Conflict, TrainingError, UsageError
from kiln_core.grpo import GrpoConfig
from kiln_train_jax.adapters import write_adapter
from kiln_train_jax.checkpoint import Checkpoints, binding_of
from kiln_train_jax.lora import Lora, init, resized
from kiln_train_jax.receipt import (
    MANIFEST_FILE,
    RECEIPT_FILE,
    TrainingRecord,
    write_evidence,
)
from kiln_train_jax.rendering import RolloutRenderer
from kiln_train_jax.replaying import TurnReplayer
from kiln_train_jax.rewards import choose_groups, reward_warnings
from kiln_train_jax.smoke import check_adapter
from kiln_train_jax.trainer import GrpoTrainer, StepMetrics, progress_of, step_groups
from kiln_train_jax.units import TrainingUnit, rendered_rollouts, training_units

if TYPE_CHECKING:
    from kiln_core.records import ScoredRollout
    from kiln_train_jax.engine import JaxEngine

__all__ = ["admit_training", "run_job"]

MAX_SEED_BITS: Final = 32
PLANNED_STEPS: Final = 256
"""Steps whose shapes are looked at ahead; later ones fit in, or have their own."""


def admit_training(engine: JaxEngine, config: GrpoConfig) -> None:
    """Check everything about a configuration that cannot change later.

    Raises:
        UsageError: This trainer does not do what it asks for.
        Conflict: The output adapter exists already.
    """
    if config.lora_rank > engine.bank.rank:
        raise UsageError(
            f"lora_rank {config.lora_rank} is over {engine.bank.rank}, the largest "
            "rank this engine serves"
        )
    if (
        config.output_name is not None
        and engine.library.path(config.output_name).exists()
    ):
        raise Conflict(
            f"adapter {config.output_name!r} exists already",
            hint="choose another name, or remove its folder",
        )
    if config.base_adapter is not None:
        _check_shape(engine, config.base_adapter, config)
    resumed = config.resume_checkpoint
    if resumed is not None and not engine.library.path(resumed).is_dir():
        raise UsageError(
            f"there is no checkpoint {resumed!r}",
            hint=f"checkpoints are folders under {engine.library.directory}",
        )


def _check_shape(engine: JaxEngine, name: str, config: GrpoConfig) -> None:
    """Check that training can start from an adapter of another rank or alpha.

    Raises:
        UsageError: It was not allowed, or a part of the adapter would be lost.
    """
    base = engine.library.read(name).config
    if (base.r, base.lora_alpha) == (config.lora_rank, config.lora_alpha):
        return
    found = f"adapter {name!r} has rank {base.r} and alpha {base.lora_alpha:g}"
    asked = f"rank {config.lora_rank} and alpha {config.lora_alpha:g}"
    if not config.allow_adapter_shape_conversion:
        raise UsageError(
            f"{found}, the configuration asks for {asked}",
            hint="ask for its own, or set allow_adapter_shape_conversion",
        )
    if base.r > config.lora_rank:
        raise UsageError(
            f"{found}, which does not fit {asked}",
            hint="a smaller rank would be another policy than the one that acted",
        )


def run_job(
    engine: JaxEngine,
    replayer: TurnReplayer,
    job: TrainingJob,
    report: Callable[[TrainingProgress], None],
    cancelled: Callable[[], bool],
) -> TrainingOutcome:
    """Train an adapter and write its folder.

    Args:
        engine: Whose base is trained on.
        replayer: Recovers the sets that recorded tokens were drawn from.
        job: What to train.
        report: Called after every optimizer step.
        cancelled: Asked before every optimizer step.

    Raises:
        TrainingError: It failed or was cancelled; nothing servable is left.
        Conflict: The output adapter appeared meanwhile.
    """
    config = job.config
    admit_training(engine, config)
    started = time.monotonic()
    base = _starting_adapter(engine, config)
    policy = engine.policy_identity(config.base_adapter)
    renderer = RolloutRenderer(
        engine.folder.template, engine.folder.tokenizer, engine.context_tokens
    )
    units, warnings = _units(replayer, renderer, job)
    trainer = GrpoTrainer(engine.folder.model, base, config)
    checkpoints = Checkpoints(engine.library.directory, binding_of(job, policy))
    history = _train(trainer, units, job, checkpoints, report, cancelled)
    if config.adapter_smoke_test and history:
        check_adapter(engine, trainer.lora, config.adapter_smoke_prompts)
    record = TrainingRecord(
        job=job,
        policy=policy,
        units=[unit for group in units for unit in group],
        skipped_groups=len(job.groups) - len(units),
        history=history,
        agreement=history[0].agreement if history else None,
        started_seconds=started,
        warnings=[*warnings, *trainer.warnings],
        start=base,
        end=trainer.lora,
    )
    return _publish(engine, record)


def _starting_adapter(engine: JaxEngine, config: GrpoConfig) -> Lora:
    fresh = _fresh_adapter(engine, config)
    if config.base_adapter is None:
        return fresh
    base = engine.library.read(config.base_adapter)
    if (base.config.r, base.config.lora_alpha) == (config.lora_rank, config.lora_alpha):
        return base.lora
    return resized(base.lora, fresh)


def _fresh_adapter(engine: JaxEngine, config: GrpoConfig) -> Lora:
    seed = config.seed or 0
    # jax.random.key keeps only 32 bits of a seed, so both halves make the key.
    key = jax.random.fold_in(
        jax.random.key(seed >> MAX_SEED_BITS, impl="threefry2x32"),
        np.uint32(seed & (2**MAX_SEED_BITS - 1)),
    )
    return init(
        engine.folder.config, rank=config.lora_rank, alpha=config.lora_alpha, key=key
    )


def _units(
    replayer: TurnReplayer, renderer: RolloutRenderer, job: TrainingJob
) -> tuple[list[list[TrainingUnit]], list[str]]:
    """Return the units of each group that trains, and what their rewards say.

    Raises:
        TrainingError: None does.
    """
    config = job.config
    for index, group in enumerate(job.groups):
        for rollout in group.completions:
            _check_transform(rollout, index, config)
    rewards = [[c.reward for c in group.completions] for group in job.groups]
    kept, warnings = choose_groups(rewards, config)
    made = [
        training_units(
            job.groups[index],
            index,
            config.advantage_mode,
            replayer,
            config.loss.echo,
            renderer,
        )
        for index in kept
    ]
    units = [group for group in made if group]
    if kept and not units:
        raise TrainingError("no group holds a token that carries a loss")
    rendered = rendered_rollouts(job.groups[index] for index in kept)
    if rendered:
        warnings = [
            *warnings,
            f"{rendered} rollouts have no token ids: the chat template rendered them, "
            "and their probabilities could not be checked",
        ]
    return units, [*warnings, *reward_warnings(rewards, config)]


def _check_transform(rollout: ScoredRollout, index: int, config: GrpoConfig) -> None:
    """Refuse truncated supports and greedy sampling: they have no policy gradient.

    Raises:
        TrainingError: The rollout was sampled so, or has no log-probabilities where
            the configuration needs them.
    """
    tokens = rollout.token_trace
    if tokens is None:
        if config.behavior_policy == "recorded":
            raise TrainingError(
                f"group {index} has no token ids, and behavior_policy recorded needs "
                "their log-probabilities",
                hint="collect it without --no-trace, with a policy that returns them",
            )
        return
    sampling = tokens.sampling
    if (
        sampling.temperature == 0
        or sampling.top_p < 1
        or sampling.top_k
        or (sampling.min_p)
    ):
        raise TrainingError(
            f"group {index} was sampled greedily or from a truncated distribution",
            hint="collect with a temperature above 0, top_p 1, top_k 0 and min_p 0",
        )


def _train(
    trainer: GrpoTrainer,
    units: Sequence[list[TrainingUnit]],
    job: TrainingJob,
    checkpoints: Checkpoints,
    report: Callable[[TrainingProgress], None],
    cancelled: Callable[[], bool],
) -> list[StepMetrics]:
    """Take the steps of a job, from where a checkpoint left off.

    Raises:
        TrainingError: A step failed, or the job was cancelled.
    """
    config = trainer.config
    steps = step_groups(len(units), config, config.seed or 0)
    history: list[StepMetrics] = []
    if config.resume_checkpoint is not None:
        history = checkpoints.resume(trainer, config.resume_checkpoint)
    distinct = {frozenset(chosen): chosen for _, chosen in steps}
    trainer.prepare(
        [unit for index in chosen for unit in units[index]]
        for chosen in list(distinct.values())[:PLANNED_STEPS]
    )
    every = config.checkpoint_interval
    for number, (epoch, chosen) in enumerate(steps[len(history) :], len(history) + 1):
        if cancelled():
            if every is not None and history:
                checkpoints.keep(trainer, history)
            raise TrainingError(f"cancelled after {number - 1} of {len(steps)} steps")
        batch = [unit for index in chosen for unit in units[index]]
        history.append(trainer.step(batch))
        if every is not None and number % every == 0 and number < len(steps):
            checkpoints.keep(trainer, history)
        reward = _mean_reward(batch, job)
        agreement = history[0].agreement
        report(progress_of(history[-1], number, len(steps), epoch, reward, agreement))
    return history


def _mean_reward(units: Sequence[TrainingUnit], job: TrainingJob) -> float:
    """Return the mean reward of the groups of a step."""
    groups = sorted({unit.group for unit in units})
    return float(np.mean([c.reward for g in groups for c in job.groups[g].completions]))


def _publish(engine: JaxEngine, record: TrainingRecord) -> TrainingOutcome:
    config = record.job.config
    target = engine.library.path(str(config.output_name))
    staged = target.parent / f".{target.name}.{record.job.job_id}"
    try:
        staged.mkdir(parents=True)
        adapter = write_adapter(
            staged,
            record.end,
            model_id=engine.served_model_id,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
        )
        write_evidence(staged, record)
        _sync(staged)
        _claim(staged, target)
    except OSError as error:
        raise TrainingError(
            f"adapter {target.name} cannot be written: {error.strerror}"
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return TrainingOutcome(
        adapter_path=target,
        adapter_sha256=adapter.content_sha256,
        receipt_path=target / RECEIPT_FILE,
        manifest_path=target / MANIFEST_FILE,
        steps=len(record.history),
        final_loss=record.history[-1].loss if record.history else 0.0,
        warnings=tuple(record.warnings),
    )


def _claim(staged: Path, target: Path) -> None:
    """Give the folder its name.

    Raises:
        Conflict: The name is taken.
    """
    if target.exists():
        raise Conflict(f"adapter {target.name!r} appeared while it was trained")
    staged.rename(target)
    _sync_directory(target.parent)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_directory(folder)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
