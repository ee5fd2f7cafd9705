"""The main job, end to end: a language model learns on a real OpenEnv server.

    make demo

Starts the `signals` environment and a Kiln server, then drives only public commands:
inspect, train (collect, publish, train an adapter), verify, replay, evaluate on paired
held-out seeds. Ends with a table, where the files are, and how to check them.
Takes about a minute on two cores and leaves no process behind, also on Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = Path("demo-output")
TRAINING = {
    "optimizer": {"kind": "muon"},
    "learning_rate": 3e-3,
    "lora_rank": 16,
    "lora_alpha": 32.0,
    "kl_coeff": 0.0,
    "epochs": 8,
    "groups_per_step": 8,
}
"""The recipe: small models need several passes in larger steps."""
GROUPS, GROUP_SIZE = 64, 8
HELD_OUT_GROUPS, HELD_OUT_SIZE = 20, 4
STOP_SECONDS = 10
READY_SECONDS = "120"


def main() -> int:
    """Run the tour and return its exit code."""
    started = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    seed_start = int(os.environ.get("KILN_DEMO_SEED", "0"))
    if OUTPUT.exists():
        shutil.rmtree(OUTPUT)
    OUTPUT.mkdir()
    try:
        environment, evidence = run(seed_start)
    except StepFailed as failed:
        print(f"\nThe demo stopped: {failed}", file=sys.stderr)
        return 1
    table(environment, evidence, time.monotonic() - started)
    return 0 if evidence["evaluation"]["evidence"]["decision"] == "passed" else 1


def run(seed_start: int) -> tuple[str, dict[str, Any]]:
    """Start both servers, take the tour, stop them; return what was reported."""
    serve_signals = ["examples.environments", "serve", "signals", "--port", "0"]
    adapters = str(OUTPUT / "adapters")
    with ExitStack() as stack:
        say("Starting the OpenEnv environment 'signals' and a Kiln server")
        environment = stack.enter_context(
            server([sys.executable, "-m", *serve_signals])
        )
        url = stack.enter_context(
            server([*KILN, "serve", "--port", "0", "--adapter-dir", adapters])
        )
        kiln("health", "--url", url, "--wait", READY_SECONDS)
        return environment, tour(environment, url, seed_start)


def tour(environment: str, url: str, seed_start: int) -> dict[str, Any]:
    """Drive the public commands; return what they reported."""
    target = ["--environment", environment]
    bundle = [
        "--output",
        str(OUTPUT / "openenv.rollouts.jsonl"),
        "--replay-output",
        str(OUTPUT / "openenv.replay.json"),
        "--summary-output",
        str(OUTPUT / "openenv.rollout-summary.json"),
    ]
    summary = ["--summary", str(OUTPUT / "openenv.rollout-summary.json")]
    config = OUTPUT / "training-config.json"
    config.write_text(json.dumps(TRAINING, indent=2) + "\n")  # noqa: TID251 - user file

    say("Discovering the environment")
    inspection = kiln("openenv", "inspect", *target)
    say(
        f"Collecting {GROUPS} groups of {GROUP_SIZE} rollouts, publishing the bundle, "
        "and training a LoRA adapter on exactly those bytes"
    )
    trained = kiln(
        "openenv",
        "train",
        *target,
        "--url",
        url,
        "--output-adapter",
        "signals-agent",
        "--groups",
        str(GROUPS),
        "--group-size",
        str(GROUP_SIZE),
        "--seed-start",
        str(seed_start),
        "--concurrency",
        "16",
        "--max-action-tokens",
        "32",
        "--thinking",
        "false",
        "--training-config",
        str(config),
        *bundle,
    )
    say("Verifying the bundle offline")
    verification = kiln("openenv", "verify", *summary)
    say("Replaying every exchange against the live environment")
    replay = kiln("openenv", "replay", *summary, "--concurrency", "16")
    say(f"Proving it on {HELD_OUT_GROUPS} paired held-out seeds")
    evaluation = kiln(
        "openenv",
        "evaluate",
        *target,
        "--url",
        url,
        "--baseline",
        "base",
        "--candidate",
        "signals-agent",
        "--groups",
        str(HELD_OUT_GROUPS),
        "--group-size",
        str(HELD_OUT_SIZE),
        "--held-out-from",
        summary[1],
        "--min-mean-improvement",
        "0",
        "--concurrency",
        "16",
        "--max-action-tokens",
        "32",
        "--thinking",
        "false",
        "--output",
        str(OUTPUT / "environment-evaluation"),
        accept=(0, 1),
    )
    say("The adapter is served")
    adapters = kiln("adapters", "list", "--url", url)
    return {
        "inspection": inspection,
        "trained": trained,
        "verification": verification,
        "replay": replay,
        "evaluation": evaluation,
        "adapters": adapters,
    }


def table(environment: str, evidence: dict[str, Any], seconds: float) -> None:
    """Print what was shown, and how to check it."""
    identity = evidence["inspection"]["environments"][0]["identity"]
    proof = evidence["evaluation"]["evidence"]
    summary = evidence["trained"]["summary"]
    job = evidence["trained"]["job"]
    rows = [
        ("environment", f"{identity['metadata']['name']} at {environment}"),
        ("discovery", identity["discovery_sha256"]),
        ("dataset", summary["dataset_sha256"]),
        ("adapter", job["adapter_sha256"]),
        ("base mean return", f"{proof['baseline_mean_return']:.3f}"),
        ("trained mean return", f"{proof['candidate_mean_return']:.3f}"),
        (
            "held-out seeds",
            f"{proof['improved_groups']} wins, "
            f"{proof['regressed_groups']} losses, "
            f"{proof['tied_groups']} ties",
        ),
        ("exact p", f"{proof['exact_sign_test_p_value']:.3g}"),
        ("decision", f"{proof['decision']}: {proof['reason']}"),
        ("time", f"{seconds:.0f} s"),
        ("files", str(OUTPUT)),
    ]
    print()
    for name, value in rows:
        print(f"  {name:<20} {value}")
    print("\nCheck it yourself:")
    print(f"  kiln openenv verify --summary {OUTPUT}/openenv.rollout-summary.json")
    for side in ("baseline", "candidate"):
        print(
            "  kiln openenv verify --summary "
            f"{OUTPUT}/environment-evaluation/{side}/summary.json"
        )
    print(f"  less {OUTPUT}/adapters/signals-agent/train_receipt.json")


class StepFailed(Exception):
    """A command of the tour failed."""


KILN = [sys.executable, "-m", "kiln_cli"]


def kiln(*arguments: str, accept: tuple[int, ...] = (0,)) -> Any:
    """Run a public command with `--json` and return its document.

    Raises:
        StepFailed: It exited with a code that is not accepted, or printed no document.
    """
    shown = " ".join(["kiln", *arguments])
    print(f"  $ {shown}", flush=True)
    done = subprocess.run(
        [*KILN, *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    command = f"kiln {' '.join(arguments[:2])}"
    try:
        document = json.loads(done.stdout)
    except ValueError:
        raise StepFailed(f"{command}: exit {done.returncode}, no document") from None
    if done.returncode not in accept:
        message = document.get("error", {}).get("message", f"exit {done.returncode}")
        raise StepFailed(f"{command}: {message}")
    return document


@contextmanager
def server(command: list[str]) -> Iterator[str]:
    """Run a server that prints its address; yield the address, stop it at the end.

    Raises:
        StepFailed: It did not start.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise StepFailed(f"{' '.join(command[1:])} did not start")
        yield line.split()[-1]
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def say(text: str) -> None:
    """Announce a step."""
    print(f"\n{text}", flush=True)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
