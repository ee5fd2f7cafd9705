"""Every environment of the pack as plain functions: no SDK, no server."""

from __future__ import annotations

import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from examples.environments.game import Draws, IllegalMove, read_text
from examples.environments.players import Player, answer, last_text, play_through
from examples.environments.registry import GAMES, inventory
from kiln_core.canonical import digest_json
from kiln_core.ports import PolicyRequest
from kiln_core.records import ChatMessage

ROOT = Path(__file__).parents[2]
NAMES = tuple(GAMES)
MATH = tuple(name for name in NAMES if GAMES[name].kind == "math")
SEEDS = range(8)

# Against a perfect opponent a draw is all there is.
LOST = {("tictactoe", 3)}
# The best arm does not pay every time, strong opponents win now and then.
UNSURE = {
    ("bandit", 1): 0.7,
    ("bandit_open", 1): 0.7,
    ("connect4", 2): 0.7,
    ("connect4", 3): 0.5,
    ("tictactoe", 2): 0.3,
}
LEVELS = [(name, level) for name in NAMES for level in range(1, GAMES[name].levels + 1)]
QUICK = [pair for pair in LEVELS if pair not in {("sokoban", 3), ("mastermind", 3)}]

# Digests of an episode with seed 7 on the first two difficulties: texts and rewards.
EPISODES = {
    "counter": "34184b48a7b2",
    "bandit": "a5e5e92532fc",
    "bandit_open": "a5e5e92532fc",
    "signals": "1b3697c0933f",
    "grid": "8e4ac54c03f2",
    "cartpole": "d719578522b1",
    "snake": "f32feb209eae",
    "g2048": "16b96e0c30bc",
    "connect4": "d1a594c77c5d",
    "maze": "1999c9889460",
    "wordle": "75695f5e63f9",
    "minesweeper": "9e7b938f511a",
    "sokoban": "a4eecd562690",
    "tictactoe": "0bf0422e9676",
    "lights_out": "7906fd746f2e",
    "mastermind": "d0193afecb80",
    "measure": "26edd9de5e0c",
    "algebra": "c657adf61d33",
    "change": "36f170b8ea85",
    "space": "ff2d305bdd28",
    "discrete": "f9d225acccb9",
    "chance": "8c45ad526fa7",
    "evidence": "183656f6e68c",
    "reason": "0541f8d9a302",
}


def told(name: str, seed: int, level: int = 1) -> tuple[list[str], list[Any]]:
    """Play an episode; return everything the policy read, and the rewards."""
    positions, rewards = play_through(GAMES[name], seed, level)
    return [read_text(position.view()) for position in positions], rewards


def test_pack_is_the_promised_one():
    kinds = [GAMES[name].kind for name in NAMES]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "synthesis": 5,
        "arcade": 11,
        "math": 8,
    }
    assert [name for name in NAMES if not GAMES[name].text_first] == ["counter"]


def test_inventory_says_what_programs_need():
    entries = {entry["name"]: entry for entry in inventory()}
    assert tuple(entries) == NAMES
    assert entries["grid"]["action"] == {"direction": "string", "distance": "integer"}
    assert entries["connect4"] == {
        "name": "connect4",
        "kind": "arcade",
        "description": GAMES["connect4"].description,
        "text_first": True,
        "action": {"column": "integer"},
        "reward": "integer",
        "difficulties": [1, 2, 3],
        "legal_actions": True,
        "after_end": "refused",
        "steps": 21,
    }
    for name in MATH:
        assert list(entries[name]["action"]) == ["answer"]
        assert entries[name]["action"]["answer"] in {"integer", "string"}
        assert (entries[name]["after_end"], entries[name]["steps"]) == ("repeated", 1)


def test_rules_do_not_import_the_sdk():
    code = "import sys, examples.environments.players; print('openenv' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "False\n"


@pytest.mark.parametrize("name", NAMES)
def test_moves_say_what_they_are(name: str):
    move = GAMES[name].move
    assert move.__doc__
    schema = move.model_json_schema()
    assert schema["additionalProperties"] is False
    assert (
        set(schema["required"]) == set(schema["properties"]) == set(move.model_fields)
    )
    assert {field["type"] for field in schema["properties"].values()} <= {
        "integer",
        "string",
    }


@pytest.mark.parametrize(("name", "level"), QUICK)
def test_seed_decides_the_episode(name: str, level: int):
    for seed in (0, 2**64 - 1):
        assert told(name, seed, level) == told(name, seed, level)


@pytest.mark.parametrize("name", NAMES)
def test_episodes_stay_what_they_were(name: str):
    """In any process and any later version, or recorded bundles do not replay.

    A digest that has to change is a change of the environment for its users.
    """
    heard: list[Any] = []
    for level in range(1, min(GAMES[name].levels, 2) + 1):
        texts, rewards = told(name, 7, level)
        heard += [*texts, repr(rewards)]
    assert digest_json(heard)[7:19] == EPISODES[name]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "counter"])
def test_seeds_differ(name: str):
    episodes = [told(name, seed) for seed in range(24)]
    assert any(episode != episodes[0] for episode in episodes)


@pytest.mark.parametrize("name", [name for name in NAMES if GAMES[name].levels > 1])
def test_difficulties_differ(name: str):
    episodes = [[told(name, seed, level) for seed in range(3)] for level in (1, 2)]
    assert episodes[0] != episodes[1]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in LEVELS
    ],
)
def test_player_earns_a_positive_return(name: str, level: int):
    returns = [sum(told(name, seed, level)[1]) for seed in SEEDS]
    if (name, level) in LOST:
        assert returns == [0] * len(SEEDS)
        return
    won = sum(value > 0 for value in returns) / len(SEEDS)
    assert won >= UNSURE.get((name, level), 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_published_steps_are_enough(name: str):
    lengths = [len(told(name, seed)[1]) for seed in SEEDS]
    assert max(lengths) <= GAMES[name].steps


@pytest.mark.parametrize(("name", "level"), QUICK)
def test_texts_are_short_and_plain(name: str, level: int):
    texts, _ = told(name, 1, level)
    for text in texts:
        assert 0 < len(text) <= 400
        assert set(text) <= set(string.printable)


@pytest.mark.parametrize("name", NAMES)
def test_rewards_keep_one_type(name: str):
    kind = {"integer": int, "float": float}[GAMES[name].reward]
    for seed in SEEDS:
        _, rewards = told(name, seed)
        assert {type(reward) for reward in rewards} == {kind}


@pytest.mark.parametrize(("name", "level"), QUICK)
def test_positions_are_values(name: str, level: int):
    """A step leaves the position it started from as it was."""
    game = GAMES[name]
    position = game.deal(5, level)
    before, text = position.facts(), read_text(position.view())
    move = game.play(text)
    assert position.step(move) == position.step(move)
    assert (position.facts(), read_text(position.view())) == (before, text)


@pytest.mark.parametrize("name", NAMES)
def test_facts_fill_the_published_state(name: str):
    game = GAMES[name]
    for position in play_through(game, 4)[0]:
        assert type(position.facts()) is game.facts
        assert type(position.view()) is game.view
    game.facts()  # the state before the first reset


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("wordle", "word"),
        ("mastermind", "code"),
        *zip(MATH, ["answer"] * 8, strict=True),
    ],
)
def test_state_tells_secrets_only_at_the_end(name: str, secret: str):
    *running, last = play_through(GAMES[name], 2)[0]
    assert {getattr(position.facts(), secret) for position in running} == {None}
    assert getattr(last.facts(), secret) is not None


LISTING = [name for name in NAMES if "legal_actions" in GAMES[name].view.model_fields]


@pytest.mark.parametrize("name", LISTING)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**63), level=st.integers(1, 3), data=st.data())
def test_listed_actions_are_the_legal_ones(name: str, seed: int, level: int, data: Any):
    """Any walk of listed actions is accepted; every other action is refused."""
    game = GAMES[name]
    ((field, schema),) = game.move.model_json_schema()["properties"].items()
    every = schema.get("enum") or range(schema["minimum"], schema["maximum"] + 1)
    position = game.deal(seed, level)
    for _ in range(12):
        if position.over:
            assert position.view().legal_actions == []
            break
        legal = position.view().legal_actions
        assert legal
        for value in set(every) - set(legal):
            with pytest.raises(IllegalMove):
                position.step(game.move.model_validate({field: value}))
        chosen = data.draw(st.sampled_from(legal))
        position, _ = position.step(game.move.model_validate({field: chosen}))


@pytest.mark.parametrize("value", ["7", "seven", True, False, None, 1.5, [1], {}])
def test_integer_fields_take_integers_alone(value: Any):
    with pytest.raises(ValidationError):
        GAMES["bandit_open"].move.model_validate({"arm": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wordle", "crane\n"),
        ("wordle", "Crane"),
        ("mastermind", "ab"),
        ("minesweeper", "open B9"),
        ("chance", "1/0"),
        ("chance", "0.5"),
        ("reason", "yes no"),
    ],
)
def test_strings_match_their_whole_pattern(name: str, value: str):
    (field,) = GAMES[name].move.model_fields
    with pytest.raises(ValidationError):
        GAMES[name].move.model_validate({field: value})


def test_integral_floats_are_integers_as_in_json_schema():
    move = GAMES["bandit_open"].move.model_validate({"arm": 2.0})
    assert repr(move) == "OpenPull(arm=2)"


@given(seed=st.integers(-(2**70), 2**70), path=st.lists(st.integers(0, 99), max_size=3))
def test_draws_depend_on_seed_and_path(seed: int, path: list[int]):
    draws, again = Draws(seed, *path), Draws(seed, *path)
    items = list(range(7))
    assert sorted(draws.sample(items, 7)) == items
    assert again.sample(items, 7) == Draws(seed, *path).sample(items, 7)
    assert 3 <= draws.between(3, 5) <= 5
    assert draws.choice(items) in items


def test_draws_stay_what_they_were():
    """Recorded episodes are replayed by later versions."""
    assert [
        Draws(7).below(1000),
        Draws(7, 1).below(1000),
        Draws(7, 1, 2).below(1000),
    ] == [
        323,
        55,
        335,
    ]


def request(*contents: str, thinking: bool = False) -> PolicyRequest:
    roles = ("system", "user", *("assistant", "tool") * len(contents))
    return PolicyRequest(
        messages=tuple(
            ChatMessage(role=role, content=content)
            for role, content in zip(roles, ("rules", *contents), strict=False)
        ),
        seed=1,
        max_tokens=8,
        temperature=1.0,
        thinking=thinking,
        thinking_budget_tokens=None,
        action_schema=None,
    )


def test_player_answers_the_last_observation():
    player = Player(GAMES["signals"], reasoning="hm")
    reply = player.reply(request("Ticket 1 is red.", thinking=True))
    assert (reply.content, reply.reasoning) == ('{"lamp":2}', "hm")
    assert reply.behavior_policy == player.identity
    assert player.reply(request("Ticket 1 is red.")).reasoning is None


def test_player_opens_as_told_and_looks_past_errors():
    player = Player(GAMES["signals"], [["bad"]])
    error = (
        '{"done":false,"openenv_error":{"code":"EXECUTION_ERROR"},"recoverable":true}'
    )
    assert player.reply(request("Ticket 1 is red.")).content == "bad"
    after = player.reply(request("Ticket 1 is red.", "bad", error))
    assert after.content == '{"lamp":2}'
    assert last_text(request("one", "act", "two").messages) == "two"


def test_players_have_identities():
    players = [Player(game) for game in GAMES.values()]
    assert len({player.identity.base_model_sha256 for player in players}) == len(NAMES)
    assert Player(GAMES["bandit"]).identity == Player(GAMES["bandit"]).identity
    assert Player(GAMES["bandit"], [["x"]]).identity != Player(GAMES["bandit"]).identity


def test_answers_are_json_objects():
    assert answer(GAMES["counter"], '{"total":2}') == '{"amount":2}'
    assert answer(GAMES["wordle"], "The word begins with z.") == '{"word":"zebra"}'
