from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from kiln_core.canonical import compact
from kiln_core.errors import Conflict, TrainingError, UsageError
from kiln_core.grpo import GrpoConfig
from kiln_train_jax.adapters import read_adapter
from kiln_train_jax.lora import init
from kiln_train_jax.smoke import check_adapter
from tests.train.corpus import RIGHT, job_of, request, sampled_group

FAST = {"learning_rate": 5e-3, "kl_coeff": 0.0, "groups_per_step": 4, "epochs": 3}


@pytest.fixture(scope="module")
def groups(engine):
    return [sampled_group(engine, number, size=8) for number in range(12)]


def run(engine, job, cancelled=lambda: False):
    reports = []
    outcome = engine.train(job, reports.append, cancelled)
    return outcome, reports


def right_share(engine, adapter, tries=48):
    futures = [
        engine.submit(request(900 + n, 0, adapter=adapter)) for n in range(tries)
    ]
    return np.mean([future.result().content == RIGHT for future in futures])


@pytest.fixture(scope="module")
def outcome(engine, groups):
    return run(engine, job_of(groups, "learner", **FAST))


def test_training_makes_the_rewarded_action_likelier(engine, outcome):
    engine.load_adapter("learner")
    assert right_share(engine, "learner") > right_share(engine, None) + 0.2
    engine.unload_adapter("learner")


def test_training_beside_changes_no_bit_of_an_answer(engine, groups, outcome):
    """The job's programs are compiled already, so that its steps run beside these."""
    wanted = [request(number, 3) for number in range(5)]
    wanted += [request(number, 4, action_schema=None) for number in range(5)]

    def answers():
        made = [future.result() for future in map(engine.submit, wanted)]
        return [(one.action_token_ids, one.logprobs) for one in made]

    alone = answers()
    first = threading.Event()
    job = job_of(groups, "beside", **FAST)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(engine.train, job, lambda _: first.set(), lambda: False)
        first.wait(60)
        while True:
            assert answers() == alone
            if training.done():
                break
        assert training.result().adapter_sha256 == outcome[0].adapter_sha256


def test_every_step_is_reported(outcome):
    made, reports = outcome
    assert [report.step for report in reports] == list(range(1, made.steps + 1))
    assert reports[-1].epoch == 3
    assert all(report.logprob_agreement <= 1e-5 for report in reports)
    assert all(0 < report.entropy < np.log(4) for report in reports)
    assert {report.clip_fraction for report in reports} == {0.0}


def test_receipt_and_manifest_bind_the_files(outcome):
    folder = outcome[0].adapter_path
    receipt_bytes = (folder / "train_receipt.json").read_bytes()
    manifest = json.loads((folder / "adapter_manifest.json").read_bytes())
    receipt = json.loads(receipt_bytes)

    def digest(name):
        return "sha256:" + sha256((folder / name).read_bytes()).hexdigest()

    assert manifest["receipt_hash"] == digest("train_receipt.json")
    assert manifest["safetensors_hash"] == digest("adapter_model.safetensors")
    assert manifest["config_hash"] == digest("adapter_config.json")
    assert receipt["status"] == "success"
    assert receipt["adapter_name"] == "learner"
    assert receipt["training_data"]["sha256"] == manifest["training_data_hash"]
    assert receipt["grpo"]["policy_audit"]["first_step_agreement"] <= 1e-5
    assert all(norm > 0 for norm in receipt["lora_delta_norms"].values())


def test_same_corpus_and_config_give_the_same_adapter(engine, groups, outcome):
    again, _ = run(engine, job_of(groups, "learner-again", **FAST))
    one, other = (
        (o.adapter_path / "adapter_model.safetensors").read_bytes()
        for o in (outcome[0], again)
    )
    assert one == other


def test_training_goes_on_from_an_adapter(engine, groups, outcome):
    engine.load_adapter("learner")
    more = [
        sampled_group(engine, 40 + number, size=8, adapter="learner")
        for number in range(4)
    ]
    job = job_of(more, "learner-2", **{**FAST, "epochs": 1}, base_adapter="learner")
    if all(len({c.reward for c in group.completions}) == 1 for group in more):
        pytest.skip("the adapter answers every ticket rightly")
    made, reports = run(engine, job)
    engine.unload_adapter("learner")
    manifest = json.loads(made.manifest_path.read_bytes())
    assert manifest["parent_adapter"]["name"] == "learner"
    assert reports[0].logprob_agreement <= 1e-5
    read_adapter(made.adapter_path, engine.folder.config)
    shape = {
        "lora_rank": 24,
        "lora_alpha": 24.0,
        "allow_adapter_shape_conversion": True,
    }
    converted, reports = run(
        engine,
        job_of(
            more,
            "learner-3",
            **{**FAST, "epochs": 1, **shape},
            base_adapter="learner",
            adapter_smoke_test=True,
        ),
    )
    assert reports[0].logprob_agreement <= 1e-5
    adapter = read_adapter(converted.adapter_path, engine.folder.config)
    assert (adapter.config.r, adapter.config.lora_alpha) == (24, 24.0)
    assert float(adapter.lora.scale) == 1.0
    added = adapter.lora.layers[0]["q_proj"].up[16:]
    assert np.abs(added).max() > 0


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"lora_rank": 24}, "rank 16 and alpha 32, the configuration asks for rank 24"),
        ({"lora_alpha": 16.0}, "asks for rank 16 and alpha 16"),
        (
            {
                "lora_rank": 8,
                "lora_alpha": 16.0,
                "allow_adapter_shape_conversion": True,
            },
            "does not fit rank 8",
        ),
    ],
)
def test_another_shape_than_the_base_adapter_is_refused(
    engine, outcome, shape, message
):
    """An alpha that is not the adapter's would be another policy once it is written."""
    with pytest.raises(UsageError, match=message):
        engine.admit_training(GrpoConfig(base_adapter="learner", **shape))


def test_too_little_reward_variance_may_skip_training(engine, groups):
    config = {**FAST, "reward_filter_var_min": 9.0, "reward_filter_on_empty": "skip"}
    made, reports = run(engine, job_of(groups, "skipped", **config))
    assert (made.steps, made.final_loss, reports) == (0, 0.0, [])
    assert "nothing is trained" in made.warnings[0]
    receipt = json.loads(made.receipt_path.read_bytes())
    assert receipt["grpo"]["skipped_groups"] == len(groups)
    assert set(receipt["lora_delta_norms"].values()) == {0.0}


def test_smoke_test_refuses_an_adapter_that_does_nothing_or_is_broken(engine):
    fresh = init(engine.folder.config, rank=2, alpha=2.0, key=jax.random.key(0))
    with pytest.raises(TrainingError, match="answers exactly as the base does"):
        check_adapter(engine, fresh, ["Say a word.", "And another."])
    broken = fresh._replace(scale=np.float32(np.nan))
    with pytest.raises(TrainingError, match=r"after 'Hello\.' is not finite"):
        check_adapter(engine, broken, [])


TRAIN = """
import sys
from pathlib import Path
from kiln_core.canonical import convert_record, read_json
from kiln_core.engine import EngineSettings
from kiln_core.records import AgenticGroup
from kiln_train_jax.plugin import JaxPlugin
from tests.train.corpus import job_of

corpus, folder = map(Path, sys.argv[1:])
groups = [
    convert_record(read_json(line, "group"), AgenticGroup, "group")
    for line in corpus.read_bytes().splitlines()
]
engine = JaxPlugin(EngineSettings(model="builtin:random", adapter_dir=folder))
job = job_of(groups, "fresh", kl_coeff=0.0, groups_per_step=2, epochs=2)
print(engine.train(job, lambda _: None, lambda: False).adapter_sha256)
"""


@pytest.mark.slow
def test_two_fresh_processes_write_the_same_adapter(groups, tmp_path):
    corpus = tmp_path / "groups.jsonl"
    corpus.write_bytes(b"".join(compact(group) + b"\n" for group in groups[:4]))
    digests = {
        subprocess.run(
            [sys.executable, "-c", TRAIN, str(corpus), str(tmp_path / str(number))],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for number in range(2)
    }
    assert len(digests) == 1
    assert digests.pop().startswith("sha256:")


def test_cancelled_job_leaves_nothing(engine, groups, tmp_path):
    calls = []

    def cancelled():
        calls.append(1)
        return len(calls) > 2

    with pytest.raises(TrainingError, match="cancelled after 2"):
        run(engine, job_of(groups, "dropped", **FAST), cancelled)
    assert not (engine.library.directory / "dropped").exists()
    assert not list(engine.library.directory.glob(".dropped*"))


def test_a_cancelled_job_resumes_to_the_same_adapter(engine, groups, outcome):
    calls = []

    def cancelled():
        calls.append(1)
        return len(calls) > 5

    config = {**FAST, "checkpoint_interval": 2}
    with pytest.raises(TrainingError, match="cancelled after 5"):
        run(engine, job_of(groups, "broken-off", **config), cancelled)
    kept = sorted(path.name for path in engine.library.directory.glob("broken-off*"))
    assert [name[-25:] for name in kept] == [
        f"-{step:08d}.kiln-checkpoint" for step in (2, 4, 5)
    ]
    config["resume_checkpoint"] = kept[-1]
    made, reports = run(engine, job_of(groups, "broken-off", **config))
    assert reports[0].step == 6
    one, other = (
        (o.adapter_path / "adapter_model.safetensors").read_bytes()
        for o in (outcome[0], made)
    )
    assert one == other
    with pytest.raises(TrainingError, match="another run: adapter_name differs"):
        run(engine, job_of(groups, "stranger", **config))


def test_existing_adapter_is_never_replaced(engine, groups, outcome):
    with pytest.raises(Conflict, match="exists already"):
        run(engine, job_of(groups, "learner", **FAST))


def test_equal_rewards_train_nothing(engine, groups):
    flat = [
        replace(group, completions=[replace(c, reward=1.0) for c in group.completions])
        for group in groups
    ]
    with pytest.raises(TrainingError, match="no group carries a gradient"):
        run(engine, job_of(flat, "flat", **FAST))


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}]
)
def test_truncated_distributions_are_refused(engine, sampling):
    group = sampled_group(engine, 70, size=2, **sampling)
    with pytest.raises(TrainingError, match="truncated"):
        run(engine, job_of([group], "truncated", **FAST))


def test_another_temperature_is_reproduced(engine):
    groups = [sampled_group(engine, 80 + n, size=8, temperature=1.7) for n in range(3)]
    _, reports = run(engine, job_of(groups, "warm", **{**FAST, "epochs": 1}))
    assert reports[0].logprob_agreement <= 1e-5


def test_reasoning_is_reproduced(engine):
    """Free reasoning, forced close tokens, then the grammar."""
    groups = [
        sampled_group(
            engine,
            90 + n,
            size=6,
            thinking=True,
            thinking_budget_tokens=5,
            max_tokens=48,
        )
        for n in range(2)
    ]
    _, reports = run(engine, job_of(groups, "thinker", **{**FAST, "epochs": 1}))
    assert reports[0].logprob_agreement <= 1e-5


def test_an_action_its_grammar_forbids_is_refused(engine, groups):
    completion = groups[0].completions[0]
    turn = completion.trace.tokens.turns[0]
    ids = list(turn.action_token_ids)
    at = next(i for i, logprob in enumerate(turn.logprobs) if logprob is not None)
    ids[at] = ord("9")
    tokens = replace(
        completion.trace.tokens, turns=[replace(turn, action_token_ids=ids)]
    )
    bent = replace(completion, trace=replace(completion.trace, tokens=tokens))
    group = replace(groups[0], completions=[bent, *groups[0].completions[1:]])
    with pytest.raises(TrainingError, match="not allowed"):
        run(engine, job_of([group], "bent", **FAST))


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(resume_checkpoint="missing"),
        GrpoConfig(resume_checkpoint="../outside"),
        GrpoConfig(lora_rank=200, lora_alpha=200.0),
    ],
)
def test_what_this_trainer_cannot_do_is_refused_at_once(engine, config):
    with pytest.raises(UsageError):
        engine.admit_training(config)
