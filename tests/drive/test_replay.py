"""`kiln_core/drive/replay.py`: the same frames again, and where the answers differ."""

from __future__ import annotations

import json
from typing import Any

import anyio
import msgspec
import pytest

from kiln_core.canonical import compact, pretty
from kiln_core.drive import recover as recovering
from kiln_core.drive.collect import CollectionRequest, collect
from kiln_core.drive.http import Credential, environment_client
from kiln_core.drive.replay import (
    ReplayOutcome,
    ReplayRequest,
    _Replay,
    replay_bundle,
    require_no_drift,
)
from kiln_core.drive.websocket import SessionTimes
from kiln_core.errors import (
    CapacityExhausted,
    CredentialReflected,
    IdentityDrift,
    KilnError,
    LimitError,
    RemoteProtocolError,
    ReplayDrift,
    SessionLost,
    TransportError,
    UsageError,
)
from kiln_core.ports import Policy
from kiln_core.scripted import ScriptedPolicy
from kiln_core.verify import VerifiedBundle
from tests.drive.collection import QUICK, Notes, adds, collection, verified
from tests.simulators.environment import (
    Handler,
    Peer,
    Script,
    Simulator,
    both,
    closes,
    drop,
    error,
    late,
    observation,
    plain,
    raw_observation,
    refuses,
    says,
    silent,
    state,
)

pytestmark = pytest.mark.anyio

TOKEN = "s3cret/token+A=="


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(recovering, "PAUSE_MAX_SECONDS", 0.02)


async def capture(
    request: CollectionRequest, policy: Policy | None = None
) -> VerifiedBundle:
    with anyio.fail_after(10):
        bundle = await collect(request, policy or adds(1, 3), times=QUICK)
    return verified(bundle)


async def again(bundle: VerifiedBundle, **members: Any) -> ReplayOutcome:
    with anyio.fail_after(10):
        request = ReplayRequest(bundle=bundle, **members)
        return await replay_bundle(request, times=QUICK)


async def replayed(
    now: Script, then: Script | None = None, **controls: Any
) -> tuple[ReplayOutcome, list[Peer]]:
    """Collect with one script, replay with another; return what came of it."""
    async with Simulator(then or {}).serving() as server:
        bundle = await capture(collection(server.url, **controls))
        captured = len(server.peers)
        server.script = now
        outcome = await again(bundle)
        assert await server.all_ended()
        return outcome, server.peers[captured:]


def pointer_of(outcome: ReplayOutcome) -> str:
    assert outcome.report is None
    assert outcome.first_drift is not None
    return outcome.first_drift.pointer


# Exact


async def test_exact_replay_sends_the_same_frames() -> None:
    async with Simulator().serving() as server:
        request = collection(
            server.url, groups=3, group_size=2, template={"a": [1, 1.0, True, 2**70]}
        )
        bundle = await capture(request)
        captured = {tuple(peer.received) for peer in server.peers}
        before = len(server.peers)
        outcome = await again(bundle)
        assert {tuple(peer.received) for peer in server.peers[before:]} == captured
        assert await server.all_ended()
    report = outcome.report
    assert report is not None
    assert (report.groups, report.rollouts) == (3, 6)
    assert report.environment_exchanges == 12
    assert (report.capacity_retries, report.environment_prefix_only_rollouts) == (0, 0)
    assert report.replay_sha256 == bundle.summary.replay_sha256
    assert (outcome.first_drift, outcome.drifted_candidates) == (None, 0)
    require_no_drift(outcome)


@pytest.mark.parametrize("reward", ["1", "1.0", "true", "null", "-0.0", str(2**70)])
async def test_reward_of_every_type_is_exact(reward: str) -> None:
    script = {"step": says(raw_observation(reward, done=True))}
    outcome, _ = await replayed(script, script)
    assert outcome.report is not None


@pytest.mark.parametrize(
    "handler",
    [
        refuses("SESSION_ERROR"),
        refuses("CAPACITY_REACHED"),
        refuses("EXECUTION_ERROR", close=False),
        says(error("VALIDATION_ERROR", errors=[{"b": 1, "a": [1.0, None]}])),
        says(observation({"input_text": "x"})),
        says(observation({"metadata": {"z": 1, "a": 2}}, 2**70)),
    ],
)
async def test_every_kind_of_answer_is_exact(handler: Handler) -> None:
    script = {"step 2": handler}
    outcome, _ = await replayed(script, script)
    assert outcome.report is not None


async def test_replay_of_reasoning_sends_the_action_alone() -> None:
    policy = ScriptedPolicy(adds(1, 3).turns, reasoning='{"amount":2}')
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url, thinking=True), policy)
        outcome = await again(bundle)
        assert outcome.report is not None
        assert server.peers[-1].actions == [{"amount": 1}, {"amount": 3}]


@pytest.mark.parametrize(
    ("turns", "exchanges"),
    [([["nothing"]], 0), ([['{"amount":1}'], ['{"amount":9}']], 1), ([[" "]], 0)],
)
async def test_episode_the_model_broke_off_is_a_prefix(
    turns: list[list[str]], exchanges: int
) -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url), ScriptedPolicy(turns))
        outcome = await again(bundle)
        assert server.peers[-1].commands == [
            "reset",
            *["step"] * exchanges,
            "state",
            "close",
        ]
    assert outcome.report is not None
    assert outcome.report.environment_prefix_only_rollouts == 2
    assert outcome.report.environment_exchanges == 2 * exchanges


async def test_candidates_are_replayed_concurrently() -> None:
    outcome, peers = await replayed(
        {"step": late(0.02)}, groups=2, group_size=4, concurrency=8
    )
    assert outcome.report is not None
    assert len(peers) == 8


async def test_replay_on_a_one_session_server() -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url, group_size=4))
        server.max_sessions = 1
        outcome = await again(bundle)
    assert outcome.report is not None
    assert outcome.report.capacity_retries == server.turned_away > 0


async def test_observer_is_told() -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
        notes = Notes()
        await replay_bundle(ReplayRequest(bundle=bundle), observer=notes, times=QUICK)
    assert notes.phases == ["revalidating", "replaying"]
    assert notes.rollouts == 2


# Drift


def step_frame(**changes: object) -> str:
    data: dict[str, object] = {
        "observation": {"metadata": {}, "total": 1},
        "reward": -0.25,
        "done": False,
    }
    return json.JSONEncoder().encode({"type": "observation", "data": data | changes})


STEP = "/exchanges/0/result/observation"

DRIFTS: dict[str, tuple[Script, str, object, object]] = {
    "reset observation": (
        {"reset": says(observation({"metadata": {}, "total": 5}))},
        "/reset_observation/observation/total",
        0,
        5,
    ),
    "reset reward": (
        {"reset": says(observation({"metadata": {}, "total": 0}, 0.0))},
        "/reset_observation/reward",
        None,
        0.0,
    ),
    "reset metadata": (
        {
            "reset": says(
                '{"type":"observation","data":{"observation":{"metadata":{},'
                '"total":0},"reward":null,"done":false,"metadata":null}}'
            )
        },
        "/reset_observation/metadata",
        "absent",
        None,
    ),
    "reset done": (
        {"reset": says(observation({"metadata": {}, "total": 0}, done=True))},
        "/reset_observation/done",
        False,
        True,
    ),
    "reset refused": (
        {"reset": refuses("EXECUTION_ERROR", close=False)},
        "/reset_observation/code",
        "absent",
        "EXECUTION_ERROR",
    ),
    "factory": (
        {"open": refuses("FACTORY_ERROR")},
        "/reset_observation/code",
        "absent",
        "FACTORY_ERROR",
    ),
    "value": (
        {"step 1": says(step_frame(observation={"metadata": {}, "total": 2}))},
        f"{STEP}/observation/total",
        1,
        2,
    ),
    "member gone": (
        {"step 1": says(step_frame(observation={"total": 1}))},
        f"{STEP}/observation/metadata",
        {},
        "absent",
    ),
    "member more": (
        {"step 1": says(step_frame(observation={"metadata": {}, "total": 1, "x": 1}))},
        f"{STEP}/observation/x",
        "absent",
        1,
    ),
    "type of a member": (
        {"step 1": says(step_frame(observation={"metadata": {}, "total": 1.0}))},
        f"{STEP}/observation/total",
        1,
        1.0,
    ),
    "reward": (
        {"step 1": says(step_frame(reward=0.25))},
        f"{STEP}/reward",
        -0.25,
        0.25,
    ),
    "done": ({"step 1": says(step_frame(done=True))}, f"{STEP}/done", False, True),
    "error for an observation": (
        {"step 1": refuses("EXECUTION_ERROR", close=False)},
        f"{STEP}/code",
        "absent",
        "EXECUTION_ERROR",
    ),
    "second step": (
        {"step 2": says(step_frame(reward=7))},
        "/exchanges/1/result/observation/done",
        True,
        False,
    ),
    "state": (
        {
            "state": says(
                state(
                    {
                        "episode_id": None,
                        "step_count": 2,
                        "seed": 0,
                        "phase": "over",
                        "total": 5,
                    }
                )
            )
        },
        "/final_state/total",
        4,
        5,
    ),
    "state refused": (
        {"state": refuses("EXECUTION_ERROR", close=False)},
        "/final_state/code",
        "absent",
        "EXECUTION_ERROR",
    ),
}


@pytest.mark.parametrize("kind", DRIFTS)
async def test_drift_is_told_with_its_place(kind: str) -> None:
    script, pointer, expected, found = DRIFTS[kind]
    outcome, _ = await replayed(script)
    assert pointer_of(outcome) == pointer
    drift = outcome.first_drift
    assert drift is not None
    assert compact([drift.expected, drift.found]) == compact([expected, found])
    assert outcome.drifted_candidates == 2
    with pytest.raises(ReplayDrift) as caught:
        require_no_drift(outcome)
    error = caught.value
    assert error.message.startswith(f"group 0 candidate 0 drifted at {pointer}: ")
    assert "(2 candidates drifted)" in error.message
    assert error.details["pointer"] == pointer
    assert error.hint


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("1", "1.0"),
        ("1.0", "1"),
        ("1", "true"),
        ("true", "1"),
        ("0", "false"),
        ("0", "null"),
        ("0.0", "-0.0"),
        ("false", "null"),
        (str(2**70), str(2.0**70)),
        ("9007199254740993", "9007199254740992"),
        ("0.1", "0.10000000000000002"),
    ],
)
async def test_reward_of_another_type_is_drift(then: str, now: str) -> None:
    outcome, _ = await replayed(
        {"step": says(raw_observation(now, done=True))},
        {"step": says(raw_observation(then, done=True))},
    )
    assert pointer_of(outcome) == f"{STEP}/reward"


async def test_drift_at_reset_sends_no_action() -> None:
    """https://github.com/huggingface/OpenEnv/pull/1127: told at reset, not at step 1."""

    async def forgetful(peer: Peer, answer: str) -> None:
        await peer.send(observation({"metadata": {}, "total": peer.index}))

    outcome, peers = await replayed({"reset": forgetful})
    assert pointer_of(outcome) == "/reset_observation/observation/total"
    assert [peer.commands for peer in peers] == [["reset", "close"]] * 2


async def test_candidate_stops_at_its_first_drift() -> None:
    outcome, peers = await replayed({"step 1": says(step_frame(reward=9))})
    assert pointer_of(outcome) == f"{STEP}/reward"
    assert [peer.commands for peer in peers] == [["reset", "step", "close"]] * 2


async def test_answer_after_the_end_is_drift_too() -> None:
    """The captured episode ended by an error that the live one has not."""
    outcome, _ = await replayed({}, {"step 2": refuses("SESSION_ERROR")})
    assert pointer_of(outcome) == "/exchanges/1/result/error/code"


async def test_other_text_of_an_error_is_drift() -> None:
    outcome, _ = await replayed(
        {"step 1": says(error("EXECUTION_ERROR", "other"))},
        {"step 1": says(error("EXECUTION_ERROR", "one"))},
        max_steps=1,
    )
    assert pointer_of(outcome) == "/exchanges/0/result/error/message"


async def test_drifted_candidates_are_counted_and_the_first_is_told() -> None:
    """First by place, not by time."""

    async def by_group(peer: Peer, answer: str) -> None:
        seed = json.loads(peer.received[0])["data"]["seed"]
        if seed == 0:
            await plain(peer, answer)
        else:
            await late(0.05 if seed == 1 else 0)(peer, step_frame(reward=seed))

    outcome, peers = await replayed({"step 1": by_group}, groups=4, group_size=2)
    assert len(peers) == 8
    assert outcome.drifted_candidates == 6
    assert outcome.first_drift is not None
    assert (outcome.first_drift.group_index, outcome.first_drift.found) == (1, 1)


async def test_shown_values_are_bounded_and_inert() -> None:
    text = "\x1b[31m\n" + "x" * 100_000
    outcome, _ = await replayed({"step 1": says(step_frame(observation=text))})
    with pytest.raises(ReplayDrift) as caught:
        require_no_drift(outcome)
    assert len(caught.value.message) < 1_500
    assert "\x1b" not in caught.value.message
    assert "\n" not in caught.value.message


# Exemptions


async def new_id(peer: Peer, answer: str) -> None:
    frame = json.loads(answer)
    frame["data"]["episode_id"] = f"id-{peer.index}"
    await peer.send(json.JSONEncoder().encode(frame))


async def other_total(peer: Peer, answer: str) -> None:
    frame = json.loads(answer)
    frame["data"] |= {"episode_id": f"id-{peer.index}", "total": 9}
    await peer.send(json.JSONEncoder().encode(frame))


async def test_new_episode_id_is_drift_with_a_way_out() -> None:
    async with Simulator({"state": new_id}).serving() as server:
        bundle = await capture(collection(server.url))
        outcome = await again(bundle)
        assert pointer_of(outcome) == "/final_state/episode_id"
        with pytest.raises(ReplayDrift) as caught:
            require_no_drift(outcome)
        assert "--ignore-pointer /final_state/episode_id" in caught.value.hint

        exempt = await again(bundle, ignored_pointers=("/final_state/episode_id",))
    assert (exempt.report, exempt.first_drift) == (None, None)
    assert exempt.ignored_pointers == ["/final_state/episode_id"]
    require_no_drift(exempt)


async def test_new_episode_id_hides_no_other_drift_of_its_candidate() -> None:
    outcome, _ = await replayed({"state": other_total}, {"state": new_id})
    assert pointer_of(outcome) == "/final_state/total"


async def test_new_episode_id_hides_no_other_drift_of_another_candidate() -> None:
    async def mixed(peer: Peer, answer: str) -> None:
        last = json.loads(peer.received[0])["data"]["seed"] == 2
        await (other_total if last else new_id)(peer, answer)

    outcome, _ = await replayed({"state": mixed}, {"state": new_id}, groups=3)
    assert pointer_of(outcome) == "/final_state/total"
    assert outcome.drifted_candidates == 6


def validation_error(version: str, message: str = "too large") -> Handler:
    problem = {
        "type": "less_than_equal",
        "loc": ["amount"],
        "msg": message,
        "url": f"https://errors.pydantic.dev/{version}/v/less_than_equal",
    }
    return says(error("VALIDATION_ERROR", errors=[{"url": "same"}, problem]))


ERROR_URL = "/exchanges/*/result/error/errors/*/url"


async def test_new_pydantic_is_drift_with_a_way_out() -> None:
    """The address of an error's page holds pydantic's version: exact all the same."""
    script = {"step 1": validation_error("2.13"), "step 3": validation_error("2.13")}
    async with Simulator(script).serving() as server:
        bundle = await capture(collection(server.url, max_steps=4), adds(1, 1, 1, 1))
        server.script = {moment: validation_error("2.14") for moment in script}
        outcome = await again(bundle)
        assert pointer_of(outcome) == "/exchanges/0/result/error/errors/1/url"
        with pytest.raises(ReplayDrift) as caught:
            require_no_drift(outcome)
        assert f"--ignore-pointer '{ERROR_URL}'" in caught.value.hint
        assert "pydantic" in caught.value.hint
        exempt = await again(bundle, ignored_pointers=(ERROR_URL,))
        assert exempt.drifted_candidates == 0
        require_no_drift(exempt)

        # it hides no other difference: of the same answer, or of a later one
        server.script = {moment: validation_error("2.14", "x") for moment in script}
        assert pointer_of(await again(bundle)).endswith("/errors/1/msg")
        server.script = {
            "step 1": validation_error("2.14"),
            "step 3": validation_error("2.14", "x"),
        }
        outcome = await again(bundle)
        assert outcome.first_drift is not None
        assert outcome.first_drift.pointer == "/exchanges/2/result/error/errors/1/msg"


@pytest.mark.parametrize(
    ("ignored", "exempt"),
    [
        (("/final_state",), True),
        (("/final_state/total",), False),
        (("/final_state/total", "/final_state/episode_id"), True),
        (("/final_state/tot",), False),
        (("/final",), False),
        (("/exchanges",), False),
    ],
)
async def test_exemption_covers_what_is_below_it(
    ignored: tuple[str, ...], exempt: bool
) -> None:
    async with Simulator({"state": new_id}).serving() as server:
        bundle = await capture(collection(server.url))
        server.script = {"state": other_total}
        outcome = await again(bundle, ignored_pointers=ignored)
    assert (outcome.drifted_candidates == 0) == exempt
    assert outcome.report is None


@pytest.mark.parametrize("done", ["/exchanges", "/exchanges/1/result/observation/done"])
async def test_exemption_of_the_end_of_an_episode(done: str) -> None:
    """The live episode goes on where the captured one ended: nothing more is sent."""
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
        server.script = {
            "step 2": says(
                observation({"metadata": {}, "total": 4}, 1.0),
            )
        }
        outcome = await again(bundle, ignored_pointers=(done,))
        assert server.peers[-1].commands == ["reset", "step", "step", "state", "close"]
    assert outcome.drifted_candidates == 0


async def test_live_episode_that_ends_early_is_drift_despite_an_exemption() -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
        server.script = {"step 1": says(step_frame(done=True))}
        ignored = (f"{STEP}/done", "/final_state")
        outcome = await again(bundle, ignored_pointers=ignored)
    assert pointer_of(outcome) == "/exchanges/1"


@pytest.mark.parametrize("pointer", ["", "final_state", "$.a", "#/a"])
async def test_exemption_must_be_a_pointer(pointer: str) -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
        requests = len(server.requests)
        with pytest.raises(UsageError, match="JSON Pointer") as caught:
            await again(bundle, ignored_pointers=(pointer,))
        assert caught.value.hint
        assert len(server.requests) == requests


# What cannot be replayed


@pytest.mark.parametrize("concurrency", [0, -1, 257])
async def test_concurrency_is_bounded(concurrency: int) -> None:
    """Without a worker nothing is replayed, which is no exact success."""
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
        with pytest.raises(UsageError, match="concurrency"):
            await again(bundle, concurrency=concurrency)


@pytest.mark.parametrize(
    ("route", "change"), [("/openapi.json", {"x": 1}), ("/schema", {"state": True})]
)
async def test_environment_of_another_identity_is_not_replayed(
    route: str, change: dict[str, object]
) -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
        sessions = len(server.peers)
        server.change(route, **change)
        with pytest.raises(IdentityDrift) as caught:
            await again(bundle)
        assert len(server.peers) == sessions
    assert "identity.discovery_sha256" in caught.value.details["changed"]


async def test_environment_that_is_gone() -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
    with pytest.raises(TransportError) as caught:
        await again(bundle)
    assert "server is running" in caught.value.hint


LOSSES: dict[str, Script] = {
    "dropped at open": {"open": drop},
    "dropped at reset": {"reset": drop},
    "dropped at a step": {"step 2": drop},
    "restart": {"step 1": closes(1012)},
    "internal error": {"step 1": closes(1011)},
    "state": {"state": closes(1000)},
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_lost_session_is_replayed_again(loss: str) -> None:
    """A transport failure says nothing about the environment's behaviour."""
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url, groups=2))
        captured = len(server.peers)
        server.script = lambda n: LOSSES[loss] if n < captured + 2 else {}
        notes = Notes()
        with anyio.fail_after(10):
            outcome = await replay_bundle(
                ReplayRequest(bundle=bundle, concurrency=1), observer=notes, times=QUICK
            )
        assert len(server.peers) == captured + 4 + 2
        assert await server.all_ended()
    assert outcome.report is not None
    assert (outcome.report.rollouts, outcome.drifted_candidates) == (4, 0)
    assert outcome.report.capacity_retries == 0
    assert notes.rollouts == 4
    assert len(notes.warnings) == 2
    assert "replaying it again from reset" in notes.warnings[0]


@pytest.mark.parametrize("retries", [0, 1])
async def test_spent_attempts_end_a_replay(retries: int) -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url, group_size=1))
        server.script = {"step 1": drop}
        with pytest.raises(SessionLost) as caught:
            await again(bundle, episode_retries=retries)
        assert len(server.peers) == 1 + 1 + retries
    assert caught.value.details["attempts"] == retries + 1
    assert caught.value.details["group_index"] == 0
    assert caught.value.details["candidate_index"] == 0


async def test_reflected_credential_ends_a_replay_at_once() -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url, token=TOKEN, group_size=1))
        server.script = {"step 1": says(observation(TOKEN))}
        with pytest.raises(CredentialReflected):
            await again(bundle, credentials=(Credential(TOKEN),))
        assert len(server.peers) == 2


@pytest.mark.parametrize("retries", [-1, 17])
async def test_episode_retries_are_bounded(retries: int) -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
        with pytest.raises(UsageError, match="episode retries must be 0 to 16"):
            await again(bundle, episode_retries=retries)


async def test_exempt_data_is_bounded_too() -> None:
    """What need not be equal may be of any size, in as many sessions as there are."""
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url, group_size=8, concurrency=8))
        server.script = {"step 1": says(observation("x" * 200_000))}
        ignored = ("/exchanges", "/final_state")
        run = _Replay(
            ReplayRequest(bundle=bundle, concurrency=8, ignored_pointers=ignored),
            QUICK,
            Notes(),
        )
        run.budget.limit_bytes = 1_000_000
        async with environment_client(server.url) as client:
            with pytest.raises(LimitError, match="retained-data budget"):
                await run.run([client])
        assert run.budget.used_bytes == 0


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (silent, SessionLost),
        (drop, SessionLost),
        (closes(1012), SessionLost),
        (says("{}"), RemoteProtocolError),
        (both(plain, plain), RemoteProtocolError),
    ],
)
async def test_lost_or_broken_session_is_no_drift(
    handler: Handler, expected: type[KilnError]
) -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
        server.script = {"step 1": handler}
        with pytest.raises(expected):
            await again(bundle, episode_retries=0)
        assert await server.all_ended()


async def test_no_capacity_in_time_is_a_typed_failure() -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
        server.max_sessions = 0
        with pytest.raises(CapacityExhausted):
            await again(bundle, capacity_wait_seconds=0.1)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://[::1", "http://u:p@127.1"])
async def test_recorded_url_that_is_none(url: str) -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
    environment = bundle.replay.environments[0]
    identity = msgspec.structs.replace(environment.identity, base_url=url)
    replay = msgspec.structs.replace(
        bundle.replay,
        environments=[msgspec.structs.replace(environment, identity=identity)],
    )
    with pytest.raises(UsageError):
        await again(msgspec.structs.replace(bundle, replay_bytes=pretty(replay)))


async def test_cancelled_replay_leaves_no_session() -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
        server.script = {"step 1": silent}
        with anyio.move_on_after(0.1) as scope:
            await replay_bundle(
                ReplayRequest(bundle=bundle), times=SessionTimes(exchange_seconds=5)
            )
        assert scope.cancelled_caught
        assert await server.all_ended()


# Credentials


async def test_credential_may_be_another_one() -> None:
    """Tokens rotate; the method must be the same."""
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url, token=TOKEN))
        before = len(server.requests)
        outcome = await again(bundle, credentials=(Credential("rotated"),))
        assert outcome.report is not None
        sent = {r.headers.get("Authorization") for r in server.requests[before:]}
        assert sent == {"Bearer rotated"}


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_credential_of_another_method_connects_nothing(
    token: str | None,
) -> None:
    """None where there was one, or one where there was none: nothing is sent."""
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url, token=token))
        before = len(server.requests)
        other = Credential(TOKEN) if token is None else None
        for credentials in ((other,), () if other is None else (other,)):
            with pytest.raises(UsageError) as caught:
                await again(bundle, credentials=credentials)
        assert len(server.requests) == before
    assert server.url in caught.value.message
    assert "--credential-env" in caught.value.hint


async def test_changed_method_of_the_live_side_is_drift() -> None:
    """The client cannot differ any more, so identity is compared as a whole."""
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url, token=TOKEN))
        server.change("/metadata", version="2")
        with pytest.raises(IdentityDrift) as caught:
            await again(bundle, credentials=(Credential("other"),))
    assert "identity.metadata" in caught.value.details["changed"]


async def test_credentials_must_align() -> None:
    async with Simulator().serving() as server:
        bundle = await capture(collection(server.url))
        with pytest.raises(UsageError, match="2 credentials for 1 environments"):
            await again(bundle, credentials=(None, None))


async def test_groups_go_to_their_own_environment() -> None:
    async with Simulator().serving() as one, Simulator().serving() as other:
        bundle = await capture(collection(one.url, other.url, groups=3, group_size=1))
        outcome = await again(bundle)
        assert outcome.report is not None
        assert outcome.report.environments == 2
        assert (len(one.peers), len(other.peers)) == (4, 2)
