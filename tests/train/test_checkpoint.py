from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from kiln_core.errors import TrainingError
from kiln_core.grpo import EmaReference, GrpoConfig, Muon
from kiln_train_jax.checkpoint import Binding, Checkpoint, Checkpoints
from kiln_train_jax.library import AdapterLibrary
from kiln_train_jax.trainer import GrpoTrainer, StepMetrics
from tests.train.small import leaves, small_adapter, small_model, small_unit

DIGEST = "sha256:" + "0" * 64
BINDING = Binding(
    adapter_name="agent",
    corpus_sha256=DIGEST,
    config_sha256=DIGEST,
    policy_sha256=DIGEST,
)
METRICS = StepMetrics(0.1 + 0.2, 1e-9, 0.0, 1.5, 0.0, 1e-7)
NAME = "agent-checkpoint-step-00000001.kiln-checkpoint"


@pytest.fixture
def written(tmp_path):
    checkpoints = Checkpoints(tmp_path, BINDING)
    arrays = [np.float32([np.nextafter(0.1, 1)]), np.int32(3)]
    assert checkpoints.write(Checkpoint(arrays, [METRICS], ["told"])) == NAME
    return checkpoints


def test_what_is_read_is_what_was_written(written, tmp_path):
    found = written.read(NAME)
    assert [array.dtype for array in found.arrays] == [np.float32, np.int32]
    assert found.arrays[0][0] == np.float32(np.nextafter(0.1, 1))
    assert (found.history, found.warnings) == ([METRICS], ["told"])
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_checkpoint_is_no_adapter_and_never_changes(written, tmp_path):
    library = AdapterLibrary(tmp_path, small_model().config, DIGEST)
    assert library.list(()) == ()
    before = (tmp_path / NAME / "arrays.npz").read_bytes()
    written.write(Checkpoint([np.float32([9.0])], [METRICS], []))
    assert (tmp_path / NAME / "arrays.npz").read_bytes() == before


@pytest.mark.parametrize(
    "field", ["adapter_name", "corpus_sha256", "config_sha256", "policy_sha256"]
)
def test_another_run_is_refused_by_name(written, tmp_path, field):
    other = replace(BINDING, **{field: "sha256:" + "1" * 64})
    with pytest.raises(TrainingError, match=f"another run: {field} differs"):
        Checkpoints(tmp_path, other).read(NAME)


def test_damage_is_noticed(written, tmp_path):
    path = tmp_path / NAME / "arrays.npz"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(TrainingError, match="is damaged"):
        written.read(NAME)
    (tmp_path / NAME / "checkpoint.json").write_text("{")
    with pytest.raises(TrainingError, match="cannot be read"):
        written.read(NAME)
    with pytest.raises(TrainingError, match="cannot be read"):
        written.read("missing")


def test_a_full_disk_leaves_the_last_good_checkpoint(written, tmp_path, monkeypatch):
    def full(*_args, **_names):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kiln_train_jax.checkpoint.np.savez", full)
    with pytest.raises(TrainingError, match="No space left on device"):
        written.write(Checkpoint([], [METRICS] * 2, []))
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert written.read(NAME).warnings == ["told"]


def test_resuming_is_exact(tmp_path):
    """Adapter, momentum and a moving reference: the same bits as without a break."""
    model = small_model()
    start = small_adapter(model)
    unit = small_unit(model, start)
    config = GrpoConfig(
        kl_reference_policy=EmaReference(decay=0.5, refresh_every=2),
        optimizer=Muon(),
        learning_rate=0.01,
    )
    whole = GrpoTrainer(model, start, config)
    metrics = [whole.step([unit]) for _ in range(4)]
    broken = GrpoTrainer(model, start, config)
    history = [broken.step([unit]) for _ in range(2)]
    name = Checkpoints(tmp_path, BINDING).keep(broken, history)
    later = GrpoTrainer(model, start, config)
    history = Checkpoints(tmp_path, BINDING).resume(later, name)
    history += [later.step([unit]) for _ in range(2)]
    assert history == metrics
    for one, other in zip(leaves(whole.lora), leaves(later.lora), strict=True):
        np.testing.assert_array_equal(one, other)
    other = GrpoTrainer(model, small_adapter(model, rank=3), config)
    with pytest.raises(TrainingError, match="do not fit"):
        Checkpoints(tmp_path, BINDING).resume(other, name)
