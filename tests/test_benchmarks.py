"""The results that are checked in, the page made of them, and what they are made with."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from benchmarks import __main__ as runner
from benchmarks import harness
from benchmarks.floor import bare, floor_of
from benchmarks.made_bundle import SHAPES, made_bundle
from benchmarks.report import PAGE, SECTIONS, page
from kiln_core.dataset import read_groups
from kiln_core.manifest import OpenEnvReplayManifest
from kiln_core.records import AgenticGroup
from kiln_core.verify import BundleBytes, verify_bundle

ROOT = Path(__file__).resolve().parent.parent


def test_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == page(harness.results())


def test_every_benchmark_has_results_a_section_and_a_script() -> None:
    names = [result.name for result in harness.results()]
    prefixes = [prefix for prefix, _, _ in SECTIONS]
    assert set(prefixes) == set(runner.NAMES)
    for prefix in prefixes:
        assert (ROOT / "benchmarks" / f"{prefix}.py").is_file()
        assert any(name.startswith(prefix) for name in names)
    assert all(name.startswith(tuple(prefixes)) for name in names)


def test_results_tell_the_machine_but_not_which() -> None:
    for result in harness.results():
        text = (harness.RESULTS / f"{result.name}.json").read_text()
        assert not re.search(r'"[^"]*(?:/\w+/|\\\\|://)[^"]*"', text)
        assert result.cpu.cores >= 1
        assert result.cpu.python.startswith("3.")
        assert len(result.samples.ours) >= harness.ROUNDS
        assert result.load >= 0


def test_missing_peer_is_reported_as_missing() -> None:
    result = harness.result(
        "verify_x",
        "MB/s",
        harness.Samples([3.0, 1.0, 2.0], []),
        "a peer",
        harness.Target(bar=1, goal=2),
        ("no-such-library",),
    )
    assert (result.ours, result.ratio) == (2.0, None)
    assert result.versions == {"no-such-library": "missing"}
    assert harness.line(result) == "verify_x: 2 MB/s; a peer is missing"
    assert "| a peer, missing | - |" in page([result])


def test_pairs_are_measured_in_turns() -> None:
    calls: list[str] = []

    def side(name: str, figure: float) -> float:
        calls.append(name)
        return figure

    samples = harness.interleaved(lambda: side("a", 1.0), lambda: side("b", 4.0), 5)
    assert calls == ["a", "b"] * 6
    result = harness.result(
        "x", "s", samples, "b", harness.Target(bar=1, goal=1, higher_is_better=False)
    )
    assert result.ratio == 0.25
    assert harness.line(result).startswith("x: 1 s, 0.25x b (4)")
    assert harness.against(7.0, lambda: 1.0).peer == [7.0]


def test_saved_result_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    result = harness.result(
        "x", "s", harness.Samples([1.0], [2.0]), "b", harness.Target(bar=1, goal=1)
    )
    harness.save(result)
    assert harness.results() == [result]


@pytest.mark.parametrize("name", SHAPES)
def test_every_made_shape_verifies(name: str) -> None:
    bundle = made_bundle(SHAPES[name], 10_000)
    files = BundleBytes(
        summary=bundle.summary_bytes, dataset=bundle.dataset, replay=bundle.replay
    )
    traced = verify_bundle(files).traced_rollouts
    assert traced == SHAPES[name].tokens * bundle.summary.rollout_count
    floor_of(bundle.dataset, bundle.replay)()


def test_floor_decodes_the_same_members_without_checks() -> None:
    bundle = made_bundle(SHAPES["short_turns_traced"], 10_000)
    encode = msgspec.json.Encoder().encode
    group = next(read_groups(bundle.dataset))
    line = bundle.dataset.splitlines()[0]
    assert encode(msgspec.json.decode(line, type=bare(AgenticGroup))) == encode(group)
    for record in (AgenticGroup, OpenEnvReplayManifest):
        assert not hasattr(bare(record), "__post_init__")
    lie = bundle.dataset.replace(b'"reward":', b'"reward": ', 1)
    with pytest.raises(ValueError, match="not canonical"):
        floor_of(lie, bundle.replay)()
