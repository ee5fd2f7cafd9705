"""The first three environments of the pack over real processes, HTTP and WebSockets.

Frames are compared as text where their JSON types matter: 1, 1.0 and true differ.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from tests.examples.wire import (
    DEADLINE_SECONDS,
    STATE,
    ask,
    converse,
    error,
    get,
    reset,
    session,
    step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
NAMES = ("bandit", "counter", "signals")
LAMPS = {"red": 2, "green": 0, "blue": 3, "gold": 1}

# One complete episode of each environment, and an action that ends it.
EPISODES: dict[str, list[dict[str, int]]] = {
    "bandit": [{"arm": 1}],
    "counter": [{"amount": 1}, {"amount": 3}],
    "signals": [{"lamp": 3}],
}


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.environments", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def serving(*options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a server on a free port; kill it if the test did not stop it."""
    process = command("serve", *options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def announced_url(process: subprocess.Popen[str], name: str) -> str:
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words[:3] == ["serving", name, "on"]
    return words[3]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """Base URL of one running server for each environment."""
    with (
        serving("bandit", "--port", "0") as bandit,
        serving("counter", "--port", "0") as counter,
        serving("signals", "--port", "0") as signals,
    ):
        processes = zip(NAMES, (bandit, counter, signals), strict=True)
        yield {name: announced_url(process, name) for name, process in processes}


@pytest.mark.parametrize("name", NAMES)
def test_discovery_names_the_environment(servers: dict[str, str], name: str):
    metadata = get(f"{servers[name]}/metadata")
    assert metadata["name"] == name
    assert metadata["description"].strip()
    assert get(f"{servers[name]}/list_environments") == [name]


@pytest.mark.parametrize(
    ("name", "field"), [("bandit", "arm"), ("counter", "amount"), ("signals", "lamp")]
)
def test_action_schema_holds_only_the_action(
    servers: dict[str, str], name: str, field: str
):
    assert get(f"{servers[name]}/schema")["action"] == {
        "additionalProperties": False,
        "properties": {field: {"maximum": 3, "minimum": 0, "type": "integer"}},
        "required": [field],
        "type": "object",
    }


def test_state_schema_publishes_own_fields(servers: dict[str, str]):
    for name, field in (("bandit", "arm"), ("counter", "total"), ("signals", "lamp")):
        assert field in get(f"{servers[name]}/schema")["state"]["properties"]


def test_counter_frames_keep_float_rewards(servers: dict[str, str]):
    answers = converse(
        servers["counter"], reset(seed=7), step(amount=1), step(amount=3), STATE
    )
    assert answers == [
        '{"type":"observation","data":{"observation":{"metadata":{},"total":0},'
        '"reward":null,"done":false}}',
        '{"type":"observation","data":{"observation":{"metadata":{},"total":1},'
        '"reward":-0.25,"done":false}}',
        '{"type":"observation","data":{"observation":{"metadata":{},"total":4},'
        '"reward":1.0,"done":true}}',
        '{"type":"state","data":{"episode_id":null,"step_count":2,"seed":7,'
        '"phase":"over","total":4}}',
    ]


def test_bandit_frames_keep_integer_rewards(servers: dict[str, str]):
    answers = converse(
        servers["bandit"],
        *(reset(seed=0), step(arm=2), reset(seed=0), step(arm=1), STATE),
    )
    assert answers == [
        '{"type":"observation","data":{"observation":{"metadata":{},'
        '"input_text":"Pull an arm."},"reward":null,"done":false}}',
        '{"type":"observation","data":{"observation":{"metadata":{},'
        '"input_text":"Arm 2 pays 1."},"reward":1,"done":true}}',
        '{"type":"observation","data":{"observation":{"metadata":{},'
        '"input_text":"Pull an arm."},"reward":null,"done":false}}',
        '{"type":"observation","data":{"observation":{"metadata":{},'
        '"input_text":"Arm 1 pays 0."},"reward":0,"done":true}}',
        '{"type":"state","data":{"episode_id":null,"step_count":1,"seed":0,'
        '"phase":"over","arm":1}}',
    ]


def test_signals_frames_keep_float_rewards(servers: dict[str, str]):
    answers = converse(
        servers["signals"],
        *(reset(seed=3), step(lamp=3), reset(seed=3), step(lamp=0), STATE),
    )
    assert answers == [
        '{"type":"observation","data":{"observation":{"metadata":{},'
        '"input_text":"Ticket 31416 is blue."},"reward":null,"done":false}}',
        '{"type":"observation","data":{"observation":{"metadata":{},'
        '"input_text":"Lamp 3 pressed."},"reward":1.0,"done":true}}',
        '{"type":"observation","data":{"observation":{"metadata":{},'
        '"input_text":"Ticket 31416 is blue."},"reward":null,"done":false}}',
        '{"type":"observation","data":{"observation":{"metadata":{},'
        '"input_text":"Lamp 0 pressed."},"reward":0.0,"done":true}}',
        '{"type":"state","data":{"episode_id":null,"step_count":1,"seed":3,'
        '"phase":"over","ticket":31416,"colour":"blue","lamp":0}}',
    ]


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_gives_identical_frames(servers: dict[str, str], name: str):
    steps = [step(**action) for action in EPISODES[name]]
    for seed in (0, 1, 2**64 - 1):
        frames = [reset(seed=seed), *steps, STATE]
        first = converse(servers[name], *frames)
        assert converse(servers[name], *frames) == first


@pytest.mark.parametrize("name", NAMES)
def test_episode_id_is_echoed_or_null(servers: dict[str, str], name: str):
    answers = converse(
        servers[name], reset(seed=1, episode_id="mine"), STATE, reset(seed=1), STATE
    )
    named, unnamed = (json.loads(text)["data"] for text in answers[1::2])
    assert named.pop("episode_id") == "mine"
    assert unnamed.pop("episode_id") is None
    assert named == unnamed


@pytest.mark.parametrize("name", NAMES)
def test_no_seed_means_seed_zero(servers: dict[str, str], name: str):
    steps = [step(**action) for action in EPISODES[name]]
    without = converse(servers[name], reset(), *steps, STATE)
    assert without == converse(servers[name], reset(seed=0), *steps, STATE)


def test_signals_texts_differ_between_seeds(servers: dict[str, str]):
    answers = converse(servers["signals"], *(reset(seed=seed) for seed in range(100)))
    texts = [json.loads(text)["data"]["observation"]["input_text"] for text in answers]
    assert len(set(texts)) == len(texts)
    assert {text.rstrip(".").split()[-1] for text in texts} == set(LAMPS)


def test_signals_pay_for_one_lamp_a_colour(servers: dict[str, str]):
    for lamp in range(4):
        episodes = [(reset(seed=seed), STATE, step(lamp=lamp)) for seed in range(40)]
        frames = [frame for episode in episodes for frame in episode]
        answers = converse(servers["signals"], *frames)
        for state, result in zip(answers[1::3], answers[2::3], strict=True):
            colour = json.loads(state)["data"]["colour"]
            reward = json.loads(result)["data"]["reward"]
            assert reward == (1.0 if LAMPS[colour] == lamp else 0.0)


def test_bandit_arms_pay_with_their_probabilities(servers: dict[str, str]):
    for arm, probability in enumerate((0.1, 0.1, 0.9, 0.1)):
        episodes = [(reset(seed=seed), step(arm=arm)) for seed in range(400)]
        frames = [frame for episode in episodes for frame in episode]
        answers = converse(servers["bandit"], *frames)
        pays = [json.loads(text)["data"]["reward"] for text in answers[1::2]]
        assert set(pays) == {0, 1}
        assert sum(pays) / len(pays) == pytest.approx(probability, abs=0.05)


def test_interleaved_sessions_do_not_leak(servers: dict[str, str]):
    url = servers["counter"]
    left = [reset(seed=1), step(amount=1), step(amount=2), step(amount=1), STATE]
    right = [reset(seed=2, episode_id="b"), step(amount=3), STATE, reset(seed=4), STATE]

    async def interleave() -> tuple[list[str], list[str]]:
        answers: tuple[list[str], list[str]] = ([], [])
        async with session(url) as first, session(url) as second:
            for one, other in zip(left, right, strict=True):
                answers[0].append(await ask(first, one))
                answers[1].append(await ask(second, other))
        return answers

    assert asyncio.run(interleave()) == (converse(url, *left), converse(url, *right))


@pytest.mark.parametrize("name", NAMES)
def test_step_before_reset_is_refused(servers: dict[str, str], name: str):
    refused, state = converse(servers[name], step(**EPISODES[name][0]), STATE)
    assert error(refused) == {
        "message": "no episode yet: reset first",
        "code": "EXECUTION_ERROR",
    }
    assert json.loads(state)["data"]["phase"] == "idle"


@pytest.mark.parametrize("name", NAMES)
def test_step_after_done_is_refused(servers: dict[str, str], name: str):
    steps = [step(**action) for action in EPISODES[name]]
    answers = converse(servers[name], reset(seed=5), *steps, STATE, steps[0], STATE)
    before, refused, after = answers[-3:]
    assert error(refused) == {
        "message": "the episode is over: reset first",
        "code": "EXECUTION_ERROR",
    }
    assert after == before


def test_refused_amount_can_be_corrected(servers: dict[str, str]):
    """Two refusals fit the schema, the third does not; none changes the episode."""
    answers = converse(
        servers["counter"],
        *(reset(seed=5), step(amount=0), step(amount=3), step(amount=3)),
        *(step(amount=4), STATE, step(amount=1)),
    )
    assert error(answers[1]) == {
        "message": "cannot add 0 to 0",
        "code": "EXECUTION_ERROR",
    }
    assert error(answers[3])["message"] == "cannot add 3 to 3"
    assert error(answers[4])["code"] == "VALIDATION_ERROR"
    assert json.loads(answers[5])["data"]["step_count"] == 1
    assert '"total":4},"reward":1.0,"done":true' in answers[6]


def test_bad_seed_leaves_the_episode_running(servers: dict[str, str]):
    answers = converse(
        servers["counter"],
        *(reset(seed=5), step(amount=1), STATE, reset(seed="five"), STATE),
    )
    assert error(answers[3])["code"] == "VALIDATION_ERROR"
    assert answers[4] == answers[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_server_with_open_session(number: signal.Signals):
    """The one allowed session is told, the port is free, and nothing is printed."""
    with serving("counter", "--port", "0", "--max-sessions", "1") as process:
        url = announced_url(process, "counter")

        async def interrupt() -> None:
            async with session(url) as websocket:
                await ask(websocket, reset(seed=1))
                async with session(url) as surplus:
                    refused = error(await surplus.receive_str())
                assert refused["code"] == "CAPACITY_REACHED"
                assert refused["max_sessions"] == 1
                process.send_signal(number)
                message = await websocket.receive()
                assert message.type is aiohttp.WSMsgType.CLOSE
                assert message.data == aiohttp.WSCloseCode.SERVICE_RESTART

        asyncio.run(interrupt())
        assert finish(process) == (0, "", "")
    with socket.create_server(("127.0.0.1", int(url.rsplit(":", 1)[1]))):
        pass


def test_signal_during_start_is_silent():
    """The port listens before the slow import begins, so that it can be awaited."""
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        address = probe.getsockname()
    with serving("counter", "--port", str(address[1])) as process:
        while process.poll() is None:
            try:
                socket.create_connection(address, DEADLINE_SECONDS).close()
            except ConnectionRefusedError:
                continue
            break
        process.send_signal(signal.SIGTERM)
        assert finish(process) == (0, "", "")


def test_port_in_use_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert finish(command("serve", "counter", "--port", str(port))) == (
            1,
            "",
            f"cannot listen on 127.0.0.1:{port}: Address already in use\n",
        )


@pytest.mark.parametrize(
    "arguments", [("nope",), ("counter", "--port", "65536"), ("--max-sessions", "0")]
)
def test_bad_argument_is_a_usage_error(arguments: tuple[str, ...]):
    code, out, err = finish(command("serve", *arguments))
    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_inventory_is_what_the_servers_say(servers: dict[str, str]):
    code, out, err = finish(command("inventory"))
    assert (code, err) == (0, "")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    for name in NAMES:
        schema = get(f"{servers[name]}/schema")
        assert (
            entries[name]["description"]
            == get(f"{servers[name]}/metadata")["description"]
        )
        properties = schema["action"]["properties"]
        assert entries[name]["action"] == {k: v["type"] for k, v in properties.items()}
        shown = schema["observation"]["properties"]
        assert entries[name]["text_first"] == ("input_text" in shown)
