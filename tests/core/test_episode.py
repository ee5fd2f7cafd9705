"""Every way an episode ends, through the real session machine and a pure server."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from kiln_core.actions import ActionSchema
from kiln_core.canonical import compact
from kiln_core.episode import Ask, Episode, EpisodeSetup, run_episode
from kiln_core.errors import (
    EpisodeUnfit,
    LimitError,
    PolicyError,
    RemoteProtocolError,
    SessionRefused,
)
from kiln_core.limits import Lease, RetainedBudget
from kiln_core.manifest import Observation, ProtocolErrorResult
from kiln_core.records import EpisodeTermination
from kiln_core.session import ObservationReceived, ReadState, Reset, StateReceived
from tests.simulators.pure import (
    COUNTER_ACTION,
    COUNTER_INSPECTION,
    PureServer,
    ToyPolicy,
    error_frame,
    observation_frame,
    play,
)

SETUP = EpisodeSetup(
    inspection=COUNTER_INSPECTION,
    action_schema=ActionSchema(COUNTER_ACTION),
    reset_payload={"seed": 3},
    max_steps=4,
    max_recoverable_errors=2,
    protocol_error_reward=-0.5,
    thinking=False,
)


def amount(number: int) -> str:
    return f'{{"amount":{number}}}'


def episode(
    *replies: Any, overrides: dict[str, Any] | None = None, **changes: Any
) -> Episode:
    setup = msgspec.structs.replace(SETUP, **changes)
    return play(setup, PureServer(overrides=overrides or {}), ToyPolicy(replies))


def kinds(found: Episode) -> list[str]:
    return [segment.kind for segment in found.trajectory]


def harness(found: Episode) -> Any:
    return json.loads(found.trajectory[-1].content)


def test_done_ends_an_episode() -> None:
    found = episode(amount(3), amount(2))
    assert found.termination is EpisodeTermination.DONE
    assert found.episode_return == 0.0 + 1.0
    assert found.protocol_error_code is UNSET
    assert found.final_state == {"episode_id": None, "step_count": 2}
    assert kinds(found) == ["action", "observation"] * 2
    assert [e.step_index for e in found.exchanges] == [0, 1]
    assert all(s.warning_prefix_len is UNSET for s in found.trajectory)


def test_horizon_ends_an_episode() -> None:
    found = episode(amount(0))
    assert found.termination is EpisodeTermination.MAX_STEPS
    assert len(found.exchanges) == 4
    assert found.final_state is not UNSET
    assert found.episode_return == 4.0


def test_done_on_the_last_step_is_done() -> None:
    found = episode(amount(1), amount(1), amount(1), amount(1))
    assert len(found.exchanges) == 4
    assert found.termination is EpisodeTermination.DONE


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("  ", "MODEL_ACTION_NO_OUTPUT"),
        ("", "MODEL_ACTION_NO_OUTPUT"),
        ("no idea", "INVALID_MODEL_ACTION"),
        ("[1]", "INVALID_MODEL_ACTION"),
        (amount(99), "ACTION_SCHEMA_VALIDATION_FAILED"),
        ("{}", "ACTION_SCHEMA_VALIDATION_FAILED"),
    ],
)
def test_reply_that_is_no_action_ends_an_episode_unsent(reply: str, code: str) -> None:
    server = PureServer()
    found = play(SETUP, server, ToyPolicy([amount(0), reply]))
    assert found.termination is EpisodeTermination.INVALID_MODEL_ACTION
    assert len(found.exchanges) == 1
    assert found.episode_return == 1 - 0.5
    assert found.trajectory[-2].content == reply
    assert harness(found)["openenv_harness_error"]["code"] == code
    assert harness(found)["done"] is True
    last = found.trajectory[-1]
    assert last.warning_prefix_len == len(last.content.encode())
    assert found.final_state is not UNSET
    assert [json.loads(text)["type"] for text in server.received] == [
        "reset",
        "step",
        "state",
        "close",
    ]


def test_invalid_first_action_has_no_exchange() -> None:
    found = episode("nothing")
    assert found.exchanges == []
    assert found.episode_return == -0.5
    assert found.final_state == {"episode_id": None, "step_count": 0}
    assert kinds(found) == ["action", "observation"]


def test_recoverable_error_goes_on() -> None:
    found = episode(amount(8), amount(3), amount(2))
    assert found.termination is EpisodeTermination.DONE
    assert found.recoverable_protocol_errors == 1
    assert found.episode_return == -0.5 + 0.0 + 1.0
    first = found.exchanges[0].result
    assert isinstance(first, ProtocolErrorResult)
    assert first.continued
    told = json.loads(found.trajectory[1].content)
    assert (told["recoverable"], told["done"]) == (True, False)
    assert told["openenv_error"]["code"] == "EXECUTION_ERROR"
    assert found.trajectory[1].warning_prefix_len == len(
        found.trajectory[1].content.encode()
    )


def test_one_recoverable_error_too_many_ends_it() -> None:
    found = episode(amount(8))
    assert found.termination is EpisodeTermination.PROTOCOL_ERROR
    assert found.protocol_error_code == "EXECUTION_ERROR"
    assert found.recoverable_protocol_errors == 3
    assert len(found.exchanges) == 3
    assert found.final_state is not UNSET
    assert json.loads(found.trajectory[-1].content)["recoverable"] is False


def test_without_a_budget_the_first_recoverable_error_ends_it() -> None:
    found = episode(amount(8), max_recoverable_errors=0)
    assert found.termination is EpisodeTermination.PROTOCOL_ERROR
    assert found.recoverable_protocol_errors == 1
    assert found.final_state is not UNSET


def test_recoverable_error_on_the_last_step_is_the_horizon() -> None:
    found = episode(amount(0), amount(0), amount(0), amount(8))
    assert found.termination is EpisodeTermination.MAX_STEPS
    assert len(found.exchanges) == 4
    last = found.exchanges[-1].result
    assert isinstance(last, ProtocolErrorResult)
    assert last.continued


@pytest.mark.parametrize("code", ["SESSION_ERROR", "FACTORY_ERROR", "CAPACITY_REACHED"])
def test_terminal_code_ends_session_and_episode(code: str) -> None:
    server = PureServer(overrides={"step 2": error_frame(code)})
    found = play(SETUP, server, ToyPolicy([amount(0)]))
    assert found.termination is EpisodeTermination.PROTOCOL_ERROR
    assert found.protocol_error_code == code
    assert found.recoverable_protocol_errors == 0
    assert found.final_state is UNSET
    assert found.episode_return == 1 - 0.5
    assert json.loads(server.received[-1])["type"] == "close"
    assert '"state"' not in server.received[-2]


def test_null_state_is_a_state() -> None:
    found = episode(amount(4), overrides={"state": {"type": "state", "data": None}})
    assert found.final_state is None


@pytest.mark.parametrize("code", ["EXECUTION_ERROR", "SESSION_ERROR"])
def test_error_at_reset_leaves_no_episode(code: str) -> None:
    with pytest.raises(SessionRefused) as caught:
        episode(amount(1), overrides={"reset": error_frame(code, "m" * 5000)})
    assert caught.value.details["protocol_code"] == code
    assert len(caught.value.details["protocol_message"]) == 512


def test_done_at_reset_is_no_episode() -> None:
    with pytest.raises(EpisodeUnfit, match="done at reset"):
        episode(overrides={"reset": observation_frame({}, None, True)})


@pytest.mark.parametrize("code", ["EXECUTION_ERROR", "SESSION_ERROR"])
def test_error_at_state_breaks_the_protocol(code: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        episode(amount(4), overrides={"state": error_frame(code)})
    assert caught.value.details["protocol_code"] == code


@pytest.mark.parametrize(
    "frame",
    [
        observation_frame({}, "1", False),
        observation_frame({}, 1, False, extra=1),
        '{"type":"observation","data":{"observation":{},"reward":NaN,"done":false}}',
        '{"type":"observation","data":{"observation":{},"reward":1e400,"done":false}}',
        {"type": "state", "data": {}},
        "late",
    ],
    ids=range(6),
)
def test_bad_answer_aborts(frame: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        episode(amount(0), overrides={"step 1": frame})


def test_reset_reward_does_not_count() -> None:
    found = episode(
        amount(4), overrides={"reset": observation_frame({"x": 1}, 100.0, False)}
    )
    assert found.episode_return == 0.0


def test_rewards_of_every_type_count() -> None:
    rewards = [True, 2**60 + 1, None, 0.25]
    frames = {
        f"step {i + 1}": observation_frame({}, r, False) for i, r in enumerate(rewards)
    }
    found = episode(amount(0), overrides=frames)
    assert found.episode_return == 1.0 + float(2**60 + 1) + 0.0 + 0.25
    observed = [e.result.observation.reward for e in found.exchanges]  # type: ignore[union-attr]  # all observations
    assert [type(r) for r in observed] == [bool, int, type(None), float]


def test_return_that_overflows_is_unfit() -> None:
    """Each reward is finite; the sum of two is not."""
    frames = {f"step {i}": observation_frame({}, 1.7e308, False) for i in (1, 2, 3, 4)}
    with pytest.raises(EpisodeUnfit, match="no finite return"):
        episode(amount(0), overrides=frames)


def test_policy_reads_the_whole_conversation() -> None:
    policy = ToyPolicy([amount(0), amount(8), amount(0), amount(0)])
    found = play(SETUP, PureServer(), policy)
    assert [ask.step_index for ask in policy.asked] == [0, 1, 2, 3]
    last = policy.asked[-1].messages
    assert [m.role for m in last] == ["system", "user", *["assistant", "tool"] * 3]
    assert [m.content for m in last[2:]] == [s.content for s in found.trajectory[:6]]
    assert found.messages == list(last[:2])


THINKING = msgspec.structs.replace(SETUP, thinking=True)


@pytest.mark.parametrize(
    ("reply", "content", "termination"),
    [
        (("hm", amount(4)), 'hm</think>{"amount":4}', EpisodeTermination.DONE),
        (("", amount(4)), '</think>{"amount":4}', EpisodeTermination.DONE),
        (("hm", None), "hm", EpisodeTermination.INVALID_MODEL_ACTION),
        (("", None), "", EpisodeTermination.INVALID_MODEL_ACTION),
        (("hm", ""), "hm</think>", EpisodeTermination.INVALID_MODEL_ACTION),
        (amount(4), '</think>{"amount":4}', EpisodeTermination.DONE),
        (
            ("a</think>b", amount(4)),
            'a</think>b</think>{"amount":4}',
            EpisodeTermination.INVALID_MODEL_ACTION,
        ),
    ],
)
def test_reasoning_stays_in_the_action_segment(
    reply: Any, content: str, termination: EpisodeTermination
) -> None:
    found = play(THINKING, PureServer(), ToyPolicy([reply]))
    assert found.trajectory[0].content == content
    assert found.termination is termination


def test_unclosed_reasoning_is_no_output() -> None:
    found = play(THINKING, PureServer(), ToyPolicy([("on and on", None)]))
    assert harness(found)["openenv_harness_error"]["code"] == "MODEL_ACTION_NO_OUTPUT"


def test_close_tag_is_text_without_thinking() -> None:
    schema = ActionSchema({"type": "object"})
    setup = msgspec.structs.replace(SETUP, action_schema=schema, max_steps=1)
    reply = '{"amount":1,"note":"a</think>b"}'
    found = play(setup, PureServer(), ToyPolicy([("unused", reply)]))
    assert found.trajectory[0].content == reply
    assert found.exchanges[0].action == {"amount": 1, "note": "a</think>b"}


def test_tokens_and_latency_are_summed() -> None:
    found = episode(amount(3), amount(2))
    assert found.model_latency_ms == 1.5 + 2.5
    assert found.model_tokens == sum(r.total_tokens for r in found.replies)
    assert episode("x").model_latency_ms == 1.5


@pytest.mark.parametrize("tokens", [True, False])
def test_everything_retained_is_charged(tokens: bool) -> None:
    budget = RetainedBudget()
    lease = Lease(budget)
    found = play(SETUP, PureServer(), ToyPolicy([amount(8), "x"], tokens=tokens), lease)
    retained = [found.reset_observation, *found.trajectory, *found.exchanges]
    expected = sum(len(compact(piece)) for piece in retained)
    expected += len(compact(found.final_state))
    if tokens:
        samples = [r.sample for r in found.replies]
        expected += sum(len(compact(s.provenance)) for s in samples if s)
    assert lease.used_bytes == budget.used_bytes == expected
    lease.close()
    assert budget.used_bytes == 0


def test_budget_stops_an_episode_and_gives_back() -> None:
    whole = RetainedBudget()
    play(SETUP, PureServer(), ToyPolicy([amount(0)], tokens=False), Lease(whole))
    kept = set()
    for limit in range(0, whole.used_bytes, 37):
        budget = RetainedBudget(limit)
        lease = Lease(budget)
        with pytest.raises(LimitError) as caught:
            play(SETUP, PureServer(), ToyPolicy([amount(0)], tokens=False), lease)
        kept.add(str(caught.value).partition(" would")[0])
        lease.close()
        assert budget.used_bytes == 0
    assert kept == {
        "keeping a reset observation",
        "keeping an action",
        "keeping an exchange",
        "keeping an observation",
        "keeping a final state",
    }


@pytest.mark.parametrize("reply", ["\ud800", amount(1) + "\udfff"])
def test_reply_that_is_no_unicode_text_is_refused(reply: str) -> None:
    with pytest.raises(PolicyError):
        play(SETUP, PureServer(), _Fixed(reply))


class _Fixed(ToyPolicy):
    """Answers what no honest policy would."""

    def __init__(self, reply: str = "{}", **changes: Any) -> None:
        super().__init__(["{}"], tokens=False)
        self.changes = {"content": reply, **changes}

    def reply(self, ask: Ask) -> Any:
        return msgspec.structs.replace(super().reply(ask), **self.changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"total_tokens": -1},
        {"latency_ms": -0.5},
        {"latency_ms": float("nan")},
        {"latency_ms": float("inf")},
    ],
)
def test_cost_that_is_no_count_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        play(SETUP, PureServer(), _Fixed(**changes))


def test_nul_and_controls_in_a_reply_are_kept() -> None:
    found = episode('{"amount":1}\x00')
    assert found.trajectory[0].content == '{"amount":1}\x00'
    assert found.termination is EpisodeTermination.INVALID_MODEL_ACTION


OUT_OF_TURN = [
    (0, ReadState()),
    (0, StateReceived(1)),
    (1, StateReceived(1)),
    (1, None),
    (2, StateReceived(1)),
    (2, None),
    (3, None),
]


@pytest.mark.parametrize(("sent", "response"), OUT_OF_TURN)
def test_driver_that_answers_out_of_turn_is_a_bug(sent: int, response: Any) -> None:
    generator = run_episode(SETUP, Lease(RetainedBudget()))
    server, policy = PureServer(), ToyPolicy([amount(4)])
    frames = [server.handle('{"type":"reset","data":{}}')]
    request = next(generator)
    for _ in range(sent):
        if isinstance(request, Ask):
            request = generator.send(policy.reply(request))
        else:
            frame = json.loads(frames[-1] or "")
            if not isinstance(request, Reset):
                frame = observation_frame({}, 0, True)
            observation = msgspec.convert(frame["data"], type=Observation)
            request = generator.send(ObservationReceived(observation))
    with pytest.raises(TypeError, match="out of turn"):
        generator.send(response)


def test_episode_ends_with_a_goodbye() -> None:
    server = PureServer()
    play(SETUP, server, ToyPolicy(["x"]))
    assert server.received[-1] == '{"type":"close"}'
