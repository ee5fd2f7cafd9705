"""Real servers of the SDK, one trait each: collected from, verified, replayed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kiln_core.discovery import environment_url
from kiln_core.drive.collect import collect
from kiln_core.drive.files import publish_bundle, read_bundle
from kiln_core.drive.http import Credential, environment_client
from kiln_core.drive.replay import ReplayRequest, replay_bundle, require_no_drift
from kiln_core.drive.tasks import TaskClient
from kiln_core.drive.websocket import SessionTimes
from kiln_core.errors import (
    HttpStatusError,
    ReplayDrift,
    SessionRefused,
    UsageError,
)
from kiln_core.manifest import ObservationResult, ProtocolErrorResult, ReplayCandidate
from kiln_core.records import EpisodeTermination
from kiln_core.scripted import ScriptedPolicy
from kiln_core.verify import VerifiedBundle, verify_bundle
from tests.cli.conftest import files_in
from tests.drive.collection import Notes, collection, verified
from tests.drive.test_files import paths, summary_in
from tests.interop.proxy import BearerProxy, bearer_proxy
from tests.interop.words import WORDS

pytestmark = pytest.mark.anyio

TIMES = SessionTimes(exchange_seconds=10)
TOKEN = "a-secret/of+this==test"
EPISODE_ID = "/final_state/episode_id"
ENDS = EpisodeTermination


def text(value: object) -> str:
    return json.JSONEncoder(ensure_ascii=False).encode(value)


def plays(*actions: object) -> ScriptedPolicy:
    """Return a policy that takes these actions, one a turn."""
    return ScriptedPolicy([[text(action)] for action in actions])


@dataclass(frozen=True)
class Case:
    """How a peer is collected from, and what of it cannot repeat."""

    turns: list[list[object]]
    """Per turn, the actions there are."""
    endings: set[EpisodeTermination] = field(default_factory=lambda: {ENDS.DONE})
    template: dict[str, Any] = field(default_factory=dict)
    group_size: int = 4
    drifts: str | None = None
    """Where a replay differs, in every candidate and nowhere else."""


def adds(*amounts: int) -> list[object]:
    return [{"amount": amount} for amount in amounts]


CASES = {
    "counter": Case([[*adds(1, 2, 0)], [*adds(3)]], {ENDS.DONE, ENDS.MAX_STEPS}),
    "bandit": Case([[{"arm": arm} for arm in range(4)]]),
    "words": Case([[{"guess": word} for word in WORDS]], drifts=EPISODE_ID),
    "raising": Case(
        [
            [{"op": "go"}, {"op": "raise"}, {"op": "surrogate"}, {"op": "inside"}],
            [{"op": "end"}, {"op": "refuse"}, {"op": "nonsense"}],
        ],
        {ENDS.DONE, ENDS.PROTOCOL_ERROR, ENDS.INVALID_MODEL_ACTION},
    ),
    "one session": Case([adds(1), adds(3)]),
    "commands": Case(
        [[{"command": {"kind": "move", "to": [1, 2]}, "tags": {"ß": None, "b": 2}}]]
    ),
    "tasks": Case(
        [[{"answer": answer} for answer in range(4, 8)]],
        template={"split": "test", "index": 1},
    ),
    "tools": Case(
        [
            [
                {"tool_name": "add", "arguments": {"a": 1, "b": 2}},
                {"tool_name": "fail", "arguments": {"reason": "on purpose"}},
                {"tool_name": "nowhere"},
            ]
        ],
        {ENDS.MAX_STEPS},
        group_size=2,  # each session of this peer is slow to open
    ),
    "bench": Case([[{"seconds": 0.02}]]),
    "notes": Case([[{"note": "loud"}, {"note": None}]]),
    "production": Case([[{"note": "loud"}, {"note": None}]]),
    "prefixed": Case([adds(1), adds(3)]),
    "bearer": Case([adds(1), adds(3)]),
}


@asynccontextmanager
async def reached(
    name: str, peers: dict[str, str]
) -> AsyncIterator[tuple[str, str | None]]:
    """Yield the URL and the token of a peer."""
    if name != "bearer":
        yield peers[name], None
        return
    async with bearer_proxy(peers["counter"], TOKEN) as proxy:
        yield proxy.url, TOKEN


@pytest.mark.parametrize("name", CASES)
async def test_collect_publish_verify_replay(
    peers: dict[str, str], name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    policy = ScriptedPolicy([[text(a) for a in turn] for turn in case.turns])
    async with reached(name, peers) as (url, token):
        request = collection(
            url,
            token=token,
            template=case.template,
            groups=2,
            group_size=case.group_size,
            capacity_wait_seconds=20,
        )
        bundle = await collect(request, policy, times=TIMES)
        publish_bundle(bundle, paths(tmp_path))
        checked = verify_bundle(read_bundle(summary_in(tmp_path))[0])
        assert checked.summary == bundle.summary
        assert checked.retried_rollouts == 0
        assert {r.termination for r in bundle.summary.rollouts} == case.endings
        waited = bundle.summary.stats.capacity_retry_count
        assert (waited > 0) is (name == "one session")
        await replays(checked, case.drifts, token)


async def replays(
    bundle: VerifiedBundle, drifts: str | None, token: str | None
) -> None:
    """Check that a bundle replays; where it drifts, that this is told and exempt."""
    credentials = (Credential(token),) if token else ()
    request = ReplayRequest(
        bundle=bundle, credentials=credentials, capacity_wait_seconds=20
    )
    outcome = await replay_bundle(request, times=TIMES)
    if drifts is None:
        require_no_drift(outcome)
        assert outcome.report is not None
        assert outcome.report.rollouts == bundle.summary.rollout_count
        return
    assert outcome.report is None
    assert outcome.drifted_candidates == bundle.summary.rollout_count
    with pytest.raises(ReplayDrift) as drift:
        require_no_drift(outcome)
    assert drift.value.details["pointer"] == drifts
    assert f"--ignore-pointer {drifts}" in drift.value.hint
    exempt = ReplayRequest(bundle=bundle, ignored_pointers=(drifts,))
    require_no_drift(await replay_bundle(exempt, times=TIMES))


async def played(
    url: str, *actions: object, notes: Notes | None = None, replay: bool = True
) -> ReplayCandidate:
    """Collect one episode of these actions; return its candidate, replayed once."""
    request = collection(url, group_size=1, max_steps=len(actions))
    bundle = await collect(request, plays(*actions), observer=notes, times=TIMES)
    checked = verified(bundle)
    if replay:
        await replays(checked, None, None)
    return checked.replay.groups[0].candidates[0]


def steps_of(candidate: ReplayCandidate) -> int:
    """How many actions the environment says it received."""
    assert isinstance(candidate.final_state, dict)
    return int(candidate.final_state["step_count"])


def observed(candidate: ReplayCandidate, step: int) -> Any:
    result = candidate.exchanges[step].result
    assert isinstance(result, ObservationResult)
    return result.observation


# Words


async def test_state_may_say_more_than_its_schema(peers: dict[str, str]) -> None:
    """https://github.com/huggingface/OpenEnv/issues/1155"""
    bundle = await collect(
        collection(peers["words"], seed_start=1), plays({"guess": WORDS[0]})
    )
    replay = verified(bundle).replay
    declared = replay.environments[0].schema.state["properties"]  # type: ignore[index,call-overload]  # JSON
    told = replay.groups[0].candidates[0].final_state
    assert declared.keys() == {"episode_id", "step_count"}
    assert isinstance(told, dict)
    assert told.keys() == {"episode_id", "step_count", "word", "guesses"}
    assert told["word"] == WORDS[1]
    assert told["guesses"] == [WORDS[0]] * 3


async def test_input_text_is_the_prompt_verbatim(peers: dict[str, str]) -> None:
    bundle = await collect(
        collection(peers["words"], group_size=1, max_steps=1),
        plays({"guess": WORDS[2]}),
    )
    group = json.loads(bundle.dataset)
    assert group["messages"][1]["content"] == f"Guess one of: {', '.join(WORDS)}"
    said = group["completions"][0]["trajectory"][-1]["content"]
    assert said == f"{WORDS[2]!r} is wrong after 1."


# Raising

RECOVERABLE = {
    "raise": ("EXECUTION_ERROR", "illegal move 1"),
    "silent": ("EXECUTION_ERROR", ""),
    "surrogate": ("EXECUTION_ERROR", "surrogates not allowed"),
    "bytes": ("EXECUTION_ERROR", "invalid utf-8"),
    "inside": ("VALIDATION_ERROR", "Invalid message"),
}


@pytest.mark.parametrize("op", RECOVERABLE)
async def test_error_of_a_step_is_told_and_the_episode_goes_on(
    peers: dict[str, str], op: str
) -> None:
    """The environment may have stepped all the same: its state says so, not we."""
    code, message = RECOVERABLE[op]
    candidate = await played(peers["raising"], {"op": op}, {"op": "end"})
    result = candidate.exchanges[0].result
    assert isinstance(result, ProtocolErrorResult)
    assert (result.error.code, result.continued) == (code, True)
    assert message in result.error.message
    assert candidate.termination is ENDS.DONE
    assert observed(candidate, 1).observation["seen"] == steps_of(candidate) == 2
    assert candidate.episode_return == 2 + PENALTY


PENALTY = collection("http://x").controls.protocol_error_reward


async def test_validator_that_raises_ends_the_session(peers: dict[str, str]) -> None:
    notes = Notes()
    candidate = await played(
        peers["raising"], {"op": "go"}, {"op": "refuse"}, notes=notes
    )
    result = candidate.exchanges[1].result
    assert isinstance(result, ProtocolErrorResult)
    assert (result.error.code, result.continued) == ("SESSION_ERROR", False)
    assert candidate.termination is ENDS.PROTOCOL_ERROR
    assert candidate.final_state is not None
    assert not isinstance(candidate.final_state, dict)
    assert candidate.episode_return == 1 + PENALTY
    assert len(notes.warnings) == 1
    assert "SESSION_ERROR" in notes.warnings[0]


async def test_reset_that_fails_leaves_no_episode(peers: dict[str, str]) -> None:
    notes = Notes()
    request = collection(
        peers["raising"], template={"broken": True}, group_size=1, episode_retries=1
    )
    with pytest.raises(SessionRefused) as caught:
        await collect(request, plays({"op": "go"}), observer=notes, times=TIMES)
    refused = caught.value
    assert refused.details["protocol_code"] == "EXECUTION_ERROR"
    assert refused.details["protocol_message"] == "the level cannot be loaded"
    assert refused.details["attempts"] == 2
    assert "reset options" in refused.hint
    assert len(notes.warnings) == 1


# Commands

MOVE = {"kind": "move", "to": [9, 0]}
SAY = {"kind": "say", "text": "grün"}


def batch(*commands: object) -> dict[str, object]:
    return {"kind": "batch", "commands": list(commands)}


FITS = {
    "tuple": {"command": MOVE},
    "pattern": {"command": SAY},
    "recursion": {"command": batch(batch(MOVE, SAY), batch(batch(SAY)))},
    "alias": {"command": MOVE, "Speed-Limit": 0.75},
    "integral float": {"command": MOVE, "Speed-Limit": 2},
    "nullable": {"command": MOVE, "tags": {"": None, "a/b~c": -3}},
}
UNFIT = {
    "string for an integer": {"command": {"kind": "move", "to": ["1", 2]}},
    "true for an integer": {"command": {"kind": "move", "to": [True, 2]}},
    "tuple too long": {"command": {"kind": "move", "to": [1, 2, 3]}},
    "tuple item too large": {"command": {"kind": "move", "to": [1, 10]}},
    "no tag": {"command": {"to": [1, 2]}},
    "unknown tag": {"command": {"kind": "fly"}},
    "member of another branch": {"command": {**MOVE, "text": "a"}},
    "pattern": {"command": {"kind": "say", "text": "Hi"}},
    "line break after the pattern": {"command": {"kind": "say", "text": "hi\n"}},
    "deep inside": {"command": batch(batch(MOVE, batch()))},
    "name behind the alias": {"command": MOVE, "speed": 1.0},
    "no multiple": {"command": MOVE, "Speed-Limit": 0.8},
    "too many members": {"command": MOVE, "tags": {"a": 1, "b": 2, "c": 3}},
    "wrong value": {"command": MOVE, "tags": {"a": 1.5}},
}


@pytest.mark.parametrize("name", FITS)
async def test_action_of_a_hard_schema_arrives(
    peers: dict[str, str], name: str
) -> None:
    candidate = await played(peers["commands"], FITS[name], FITS[name])
    assert candidate.termination is ENDS.DONE
    assert candidate.exchanges[0].action == FITS[name]
    seen = observed(candidate, 0).observation["seen"]
    assert FITS[name].items() <= seen.items()
    assert observed(candidate, 0).reward == 2**70
    assert observed(candidate, 1).reward is True


@pytest.mark.parametrize("name", UNFIT)
async def test_action_that_the_schema_refuses_is_never_sent(
    peers: dict[str, str], name: str
) -> None:
    actions = FITS["tuple"], UNFIT[name]
    candidate = await played(peers["commands"], *actions, replay=False)
    assert candidate.termination is ENDS.INVALID_MODEL_ACTION
    assert len(candidate.exchanges) == steps_of(candidate) == 1


# Tasks


async def test_reset_options_choose_the_task(peers: dict[str, str]) -> None:
    """https://github.com/huggingface/OpenEnv/pull/1094"""
    async with environment_client(peers["tasks"]) as client:
        task: Any = await TaskClient(client, "tasks").task("train", 4)
    bundle = await collect(
        collection(peers["tasks"], template={"split": "train", "index": 4}),
        plays({"answer": 9}),
    )
    group = verified(bundle).replay.groups[0]
    observation: Any = group.reset_observation
    assert observation.observation["input_text"] == task["question"]
    assert observation.metadata == {"task": task["id"]}
    assert group.reset_payload == {"split": "train", "index": 4, "seed": 0}
    assert bundle.summary.stats.mean_episode_return == 1.0


async def test_task_that_does_not_exist_is_no_episode(peers: dict[str, str]) -> None:
    request = collection(
        peers["tasks"], template={"split": "test", "index": 9}, episode_retries=0
    )
    with pytest.raises(SessionRefused) as refused:
        await collect(request, plays({"answer": 9}), times=TIMES)
    assert refused.value.details["protocol_code"] == "EXECUTION_ERROR"


# Tools


async def test_failing_tool_is_an_observation(peers: dict[str, str]) -> None:
    candidate = await played(
        *(peers["tools"], {"tool_name": "add", "arguments": {"a": 1, "b": 2}}),
        {"type": "call_tool", "tool_name": "fail", "arguments": {"reason": "no"}},
        {"tool_name": "nowhere"},
        {"tool_name": "add", "arguments": {"a": "x"}},
    )
    assert observed(candidate, 0).observation["result"]["data"] == 3
    errors = [observed(candidate, n).observation["error"] for n in range(4)]
    kinds = [error and error["error_type"] for error in errors]
    assert kinds == [None, "execution_error", "tool_not_found", "invalid_args"]
    assert {observed(candidate, n).reward for n in range(4)} == {None}
    assert candidate.termination is ENDS.MAX_STEPS
    assert candidate.episode_return == 0.0


async def test_list_tools_is_outside_the_published_schema(
    peers: dict[str, str],
) -> None:
    """The server would take it; its schema does not allow it, and that decides."""
    candidate = await played(peers["tools"], {"type": "list_tools"})
    assert candidate.termination is ENDS.INVALID_MODEL_ACTION
    assert candidate.exchanges == []


# Bearer


@pytest.fixture
async def proxy(peers: dict[str, str]) -> AsyncIterator[BearerProxy]:
    async with bearer_proxy(peers["counter"], TOKEN) as proxy:
        yield proxy


async def test_every_request_carries_the_token(
    proxy: BearerProxy, tmp_path: Path
) -> None:
    request = collection(proxy.url, token=TOKEN)
    bundle = await collect(request, plays(*adds(1, 3)), times=TIMES)
    publish_bundle(bundle, paths(tmp_path))
    await replays(verified(bundle), None, TOKEN)
    surfaces = {"/health", "/metadata", "/schema", "/list_environments"}
    assert {path for path, _ in proxy.requests} == {
        *(surfaces | {"/openapi.json", "/ws"}),
    }
    assert {sent for _, sent in proxy.requests} == {f"Bearer {TOKEN}"}
    kinds = [frame["type"] for frame in proxy.frames]
    assert kinds.count("reset") == kinds.count("close") == 4
    assert kinds.count("step") == 8
    for written in files_in(tmp_path).values():
        assert TOKEN.encode() not in written
    identity = bundle.summary.environments[0].identity
    assert identity.authentication == "bearer"


async def test_reset_frame_is_what_was_planned(proxy: BearerProxy) -> None:
    """https://github.com/Azure/azure-sdk-for-python/pull/48953"""
    options = {"level": {"b": 1.0, "a": [None, True]}, "ß": 2**70}
    request = collection(proxy.url, token=TOKEN, template=options, seed_start=2**62)
    await collect(request, plays(*adds(1, 3)), times=TIMES)
    sent = [frame for frame in proxy.frames if frame["type"] == "reset"]
    assert sent == [{"type": "reset", "data": {**options, "seed": 2**62}}] * 2


@pytest.mark.parametrize("token", [None, "another"])
async def test_wrong_token_is_said_once_and_not_tried_again(
    proxy: BearerProxy, token: str | None
) -> None:
    with pytest.raises(HttpStatusError) as refused:
        await collect(collection(proxy.url, token=token), plays({"amount": 1}))
    assert refused.value.details["http_status"] == 401
    assert "credential" in refused.value.hint
    assert [path for path, _ in proxy.requests] == ["/health"]


async def test_replay_needs_the_credential_too(proxy: BearerProxy) -> None:
    bundle = await collect(collection(proxy.url, token=TOKEN), plays(*adds(1, 3)))
    request = ReplayRequest(bundle=verified(bundle))
    asked = len(proxy.requests)
    with pytest.raises(UsageError, match="captured with a bearer token"):
        await replay_bundle(request, times=TIMES)
    assert len(proxy.requests) == asked
    wrong = msgspec.structs.replace(request, credentials=(Credential("another"),))
    with pytest.raises(HttpStatusError) as refused:
        await replay_bundle(wrong, times=TIMES)
    assert refused.value.details["http_status"] == 401


# Base path


async def test_base_path_is_kept_on_every_surface(peers: dict[str, str]) -> None:
    url = environment_url(f"{peers['prefixed']}/")
    bundle = await collect(collection(url), plays(*adds(1, 3)))
    identity = bundle.summary.environments[0].identity
    assert identity.base_url == peers["prefixed"]
    assert identity.websocket_url.endswith("/openenv/prefix/ws")


async def test_root_of_a_server_below_a_path_is_no_environment(
    peers: dict[str, str],
) -> None:
    root = peers["prefixed"].removesuffix("/openenv/prefix")
    with pytest.raises(HttpStatusError) as refused:
        await collect(collection(root), plays({"amount": 1}))
    assert refused.value.details["http_status"] == 404
    assert "base URL" in refused.value.hint
