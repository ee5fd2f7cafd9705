"""Every environment of the pack on the real SDK, over sockets, and through Kiln.

One process serves them all. Each is held to the same conversation; a few of different
kinds are in the fast lane, the whole pack in the slow one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from examples.environments.players import Player, answer, play_through
from examples.environments.registry import GAMES, inventory
from kiln_core.drive.collect import collect
from kiln_core.drive.replay import ReplayRequest, replay_bundle
from kiln_core.drive.websocket import SessionTimes
from kiln_core.manifest import Observation
from kiln_core.prompt import observation_text
from tests.drive.collection import collection, verified
from tests.drive.servers import real_servers
from tests.examples.wire import STATE, ask, converse, error, get, reset, session, step

TIMES = SessionTimes(exchange_seconds=10, recovery_seconds=1.0)
FAST = {"counter", "bandit_open", "grid", "connect4", "wordle", "algebra", "chance"}
ENTRIES = {entry["name"]: entry for entry in inventory()}

PACK = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in GAMES
]
MATH = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name, game in GAMES.items()
    if game.kind == "math"
]

# Values that are not of a field's type, some of which lax validation would accept.
WRONG = {
    "integer": ["7", "seven", True, None, 1.5, [1]],
    "string": [7, True, None, ["up"], {}],
}


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """Base URL of every environment; one process serves them all."""
    with real_servers(tuple(f"{name}:8:0" for name in GAMES)) as (server,):
        yield dict(zip(GAMES, server.urls, strict=True))


def seen(text: str) -> str:
    """Return what a policy reads of an observation frame."""
    frame = json.loads(text)
    assert frame["type"] == "observation", text
    data = frame["data"]
    return observation_text(
        Observation(
            observation=data["observation"], reward=data["reward"], done=data["done"]
        )
    )


def move(name: str, text: str) -> dict[str, Any]:
    action: dict[str, Any] = json.loads(answer(GAMES[name], text))
    return step(**action)


def episode(url: str, name: str, **options: Any) -> tuple[list[str], list[str]]:
    """Play one episode on a socket; return its answers, and what comes after the end."""

    async def run() -> tuple[list[str], list[str]]:
        async with session(url) as websocket:
            answers = [await ask(websocket, reset(**options))]
            while not json.loads(answers[-1])["data"]["done"]:
                frame = move(name, seen(answers[-1]))
                answers.append(await ask(websocket, frame))
            after = [await ask(websocket, each) for each in (STATE, frame, STATE)]
            return answers, after

    return asyncio.run(run())


@pytest.mark.parametrize("name", PACK)
def test_server_publishes_what_the_inventory_says(urls: dict[str, str], name: str):
    schema, entry = get(f"{urls[name]}/schema"), ENTRIES[name]
    metadata = get(f"{urls[name]}/metadata")
    assert (metadata["name"], metadata["description"]) == (name, entry["description"])
    assert get(f"{urls[name]}/list_environments") == [name]
    fields = schema["action"]["properties"]
    assert {field: rule["type"] for field, rule in fields.items()} == entry["action"]
    shown = schema["observation"]["properties"]
    assert ("input_text" in shown) is entry["text_first"]
    assert ("legal_actions" in shown) is entry["legal_actions"]
    assert set(GAMES[name].facts.model_fields) <= set(schema["state"]["properties"])


@pytest.mark.parametrize("name", PACK)
def test_server_plays_what_the_rules_say(urls: dict[str, str], name: str):
    """Frames of a socket equal the pure episode, and repeat byte for byte."""
    answers, _ = episode(urls[name], name, seed=11)
    assert episode(urls[name], name, seed=11)[0] == answers
    positions, rewards = play_through(GAMES[name], 11)
    data = [json.loads(text)["data"] for text in answers]
    assert [repr(each["reward"]) for each in data] == ["None", *map(repr, rewards)]
    assert [each["done"] for each in data] == [position.over for position in positions]
    views = [json.loads(position.view().model_dump_json()) for position in positions]
    assert [each["observation"] for each in data] == [
        {"metadata": {}, **view} for view in views
    ]


@pytest.mark.parametrize("name", PACK)
def test_state_is_honest(urls: dict[str, str], name: str):
    options = {"seed": 6, "episode_id": "mine"}
    answers, (state, _, _) = episode(urls[name], name, **options)
    told = json.loads(state)["data"]
    positions, _ = play_through(GAMES[name], 6)
    assert told == {
        "episode_id": "mine",
        "step_count": len(answers) - 1,
        "seed": 6,
        "phase": "over",
        **({"difficulty": 1} if GAMES[name].levels > 1 else {}),
        **json.loads(positions[-1].facts().model_dump_json()),
    }


@pytest.mark.parametrize("name", PACK)
def test_step_after_the_end_changes_nothing(urls: dict[str, str], name: str):
    answers, (before, extra, after) = episode(urls[name], name, seed=2)
    assert after == before
    if GAMES[name].frozen:
        assert extra == answers[-1]
    else:
        assert error(extra) == {
            "message": "the episode is over: reset first",
            "code": "EXECUTION_ERROR",
        }


@pytest.mark.parametrize("name", MATH)
def test_other_answer_after_the_end_gets_the_same_frame(
    urls: dict[str, str], name: str
):
    field = ENTRIES[name]["action"]["answer"]
    answers = {"integer": (5, 6), "string": ("abc", "xyz")}[field]
    if name == "chance":
        answers = ("1/2", "1/3")
    frames = [
        reset(seed=1),
        step(answer=answers[0]),
        STATE,
        step(answer=answers[1]),
        STATE,
    ]
    _, first, state, second, later = converse(urls[name], *frames)
    assert (second, later) == (first, state)


@pytest.mark.parametrize("name", PACK)
def test_wrong_type_is_refused_and_corrected(urls: dict[str, str], name: str):
    """Raw frames that no client with a schema would send; the socket goes on."""

    async def run() -> None:
        async with session(urls[name]) as websocket:
            first = await ask(websocket, reset(seed=3))
            state = await ask(websocket, STATE)
            right = move(name, seen(first))
            for field, kind in ENTRIES[name]["action"].items():
                for value in WRONG[kind]:
                    wrong = step(**{**right["data"], field: value})
                    refused = error(await ask(websocket, wrong))
                    assert refused["code"] == "VALIDATION_ERROR", (field, value)
            for data in ({}, {**right["data"], "other": 1}):
                refused = error(await ask(websocket, step(**data)))
                assert refused["code"] == "VALIDATION_ERROR"
            assert await ask(websocket, STATE) == state
            seen(await ask(websocket, right))

    asyncio.run(run())


@pytest.mark.parametrize("difficulty", [0, 4, "2", True, 1.0, None])
def test_difficulty_that_is_none_leaves_the_episode(
    urls: dict[str, str], difficulty: Any
):
    frames = [reset(seed=1), STATE, reset(seed=2, difficulty=difficulty), STATE]
    _, before, refused, after = converse(urls["algebra"], *frames)
    assert error(refused) == {
        "message": "difficulty is a whole number from 1 to 3",
        "code": "EXECUTION_ERROR",
    }
    assert after == before


def test_difficulty_is_told_by_state(urls: dict[str, str]):
    _, state = converse(urls["connect4"], reset(seed=1, difficulty=3), STATE)
    assert json.loads(state)["data"]["difficulty"] == 3


def test_arm_out_of_range_is_corrected_on_the_same_socket(urls: dict[str, str]):
    frames = [reset(seed=0), step(arm=99), STATE, step(arm=2)]
    _, refused, state, paid = converse(urls["bandit_open"], *frames)
    assert error(refused) == {
        "message": "there is no arm 99: arms are 0 to 3",
        "code": "EXECUTION_ERROR",
    }
    assert json.loads(state)["data"]["step_count"] == 0
    assert '"reward":1,"done":true' in paid


@pytest.mark.parametrize("name", PACK)
def test_collection_verifies_and_replays(urls: dict[str, str], name: str):
    game = GAMES[name]
    request = collection(
        urls[name],
        template={"difficulty": 1} if game.levels > 1 else {},
        groups=3,
        group_size=2,
        max_steps=game.steps,
        seed_start=20,
    )

    async def run() -> None:
        bundle = await collect(request, Player(game), times=TIMES)
        assert bundle.summary.stats.done_count == 6
        assert bundle.summary.stats.mean_episode_return > 0
        checked = verified(bundle)
        outcome = await replay_bundle(ReplayRequest(bundle=checked), times=TIMES)
        assert outcome.report is not None
        assert outcome.report.rollouts == 6

    asyncio.run(run())


def test_player_recovers_from_a_refused_opening(urls: dict[str, str]):
    """An error only the server can see, a corrective turn, and an exact replay."""
    request = collection(urls["bandit_open"], max_steps=3)
    policy = Player(GAMES["bandit_open"], [['{"arm":99}']])

    async def run() -> None:
        bundle = await collect(request, policy, times=TIMES)
        assert bundle.summary.stats.done_count == 2
        assert {r.recoverable_protocol_errors for r in bundle.summary.rollouts} == {1}
        outcome = await replay_bundle(
            ReplayRequest(bundle=verified(bundle)), times=TIMES
        )
        assert outcome.report is not None

    asyncio.run(run())


def test_sessions_of_one_server_do_not_mix(urls: dict[str, str]):
    """Two games interleaved step by step are the two games alone."""

    async def run() -> list[list[str]]:
        async with session(urls["connect4"]) as one, session(urls["connect4"]) as two:
            texts = [
                await ask(socket, reset(seed=seed, difficulty=2))
                for socket, seed in ((one, 3), (two, 4))
            ]
            heard: list[list[str]] = [[texts[0]], [texts[1]]]
            while any(not json.loads(h[-1])["data"]["done"] for h in heard):
                for socket, mine in zip((one, two), heard, strict=True):
                    if not json.loads(mine[-1])["data"]["done"]:
                        frame = move("connect4", seen(mine[-1]))
                        mine.append(await ask(socket, frame))
            return heard

    for seed, mine in zip((3, 4), asyncio.run(run()), strict=True):
        alone, _ = episode(urls["connect4"], "connect4", seed=seed, difficulty=2)
        assert mine == alone
