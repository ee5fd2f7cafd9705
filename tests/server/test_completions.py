"""``/v1/completions`` and ``/v1/completions/batch`` over real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kiln_core.inference import choice_seed
from tests.server.running import Running, running
from tests.server.test_chat import CHAT, MESSAGES, guided

COMPLETIONS, BATCH = "/v1/completions", "/v1/completions/batch"
OTHERS = [{"role": "user", "content": "else?"}]


def test_plain_completion_is_openai_shaped(kiln: Running) -> None:
    answer = kiln.post(COMPLETIONS, {"prompt": "Once", "seed": 1}).json
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason"}
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert answer["usage"]["prompt_tokens"] == 4
    assert kiln.metric('kiln_completion_requests_total{status="completed"}') == 1
    assert kiln.metric('kiln_completion_tokens_total{kind="prompt"}') == 4
    (asked,) = kiln.engine.submitted
    assert (asked.prompt, asked.messages, asked.max_tokens) == ("Once", (), 16)
    assert asked.thinking is False


def test_prompts_are_answered_as_if_asked_alone(kiln: Running) -> None:
    common = {"seed": 5, "n": 2, "temperature": 0.5, "stop": "x"}
    several = kiln.post(COMPLETIONS, {"prompt": ["a", "b"], **common}).json
    alone = [kiln.post(COMPLETIONS, {"prompt": p, **common}).json for p in ("a", "b")]
    texts = [choice["text"] for choice in several["choices"]]
    assert texts == [choice["text"] for one in alone for choice in one["choices"]]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    for count in several["usage"]:
        assert several["usage"][count] == sum(one["usage"][count] for one in alone)
    asked = kiln.engine.submitted[:4]
    assert sorted(request.seed for request in asked) == sorted(
        [5, 5, choice_seed(5, 1), choice_seed(5, 1)]
    )


@pytest.mark.parametrize("prompt", [[97, 98], [[97, 98]], "ab", ["ab"]])
def test_texts_and_token_ids_are_prompts(kiln: Running, prompt: Any) -> None:
    answer = kiln.post(COMPLETIONS, {"prompt": prompt}).json
    assert answer["usage"]["prompt_tokens"] == 2


def test_logprobs_of_a_text(kiln: Running) -> None:
    (choice,) = kiln.post(COMPLETIONS, {"prompt": "a", "logprobs": 2}).json["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == list(range(len(choice["text"])))
    assert len(found["token_logprobs"]) == len(found["top_logprobs"])
    assert found["top_logprobs"][0][found["tokens"][0]] == found["token_logprobs"][0]
    (choice,) = kiln.post(COMPLETIONS, {"prompt": "a", "logprobs": 0}).json["choices"]
    assert choice["logprobs"]["top_logprobs"] is None


def test_part_of_a_character_is_named_by_its_bytes(
    kiln: Running, tmp_path: Path
) -> None:
    from tests.server.test_adapters import make_adapter

    make_adapter(tmp_path, "odd", ["é!"])
    kiln.post("/v1/adapters/load", {"name": "odd"})
    asked = {"prompt": "a", "logprobs": 0, "model": "odd"}
    found = kiln.post(COMPLETIONS, asked).json["choices"][0]["logprobs"]
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert found["text_offset"] == [0, 0, 1]


def test_completion_can_be_guided(kiln: Running) -> None:
    asked = {"prompt": "a", "response_format": guided(), "max_tokens": 64}
    (choice,) = kiln.post(COMPLETIONS, asked).json["choices"]
    assert choice["text"].startswith('{"arm":')


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no prompt": (COMPLETIONS, {}, "prompt"),
    "null": (COMPLETIONS, {"prompt": None}, "prompt must be"),
    "empty list": (COMPLETIONS, {"prompt": []}, "prompt must be"),
    "empty text": (COMPLETIONS, {"prompt": ""}, "prompt is empty"),
    "number": (COMPLETIONS, {"prompt": 3}, "prompt must be"),
    "mixed": (COMPLETIONS, {"prompt": ["a", 3]}, "prompt must be"),
    "truth": (COMPLETIONS, {"prompt": [True]}, "prompt must be"),
    "nested": (COMPLETIONS, {"prompt": [[["a"]]]}, "prompt must be"),
    "no such token": (COMPLETIONS, {"prompt": [10**9]}, "no token id"),
    "many": (COMPLETIONS, {"prompt": ["a"] * 129}, "at most 128"),
    "many together": (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "more than 128"),
    "echo": (COMPLETIONS, {"prompt": "a", "echo": True}, "not supported: echo"),
    "best of": (COMPLETIONS, {"prompt": "a", "best_of": 2}, "not supported: best_of"),
    "suffix": (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "not supported: suffix"),
    "provenance": (
        COMPLETIONS,
        {"prompt": "a", "rollout_provenance": True},
        "not supported: rollout_provenance",
    ),
    "bias": (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 2}}, "logit_bias"),
    "logprobs": (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "/logprobs"),
    "no prompts": (BATCH, {}, "prompts"),
    "no conversation": (BATCH, {"prompts": []}, "/prompts"),
    "no message": (BATCH, {"prompts": [[]]}, "/prompts/0"),
    "streamed": (BATCH, {"prompts": [OTHERS], "stream": True}, "not supported: stream"),
    "tools": (BATCH, {"prompts": [OTHERS], "tools": [{}]}, "not supported: tools"),
    "batched logprobs": (BATCH, {"prompts": [OTHERS], "logprobs": True}, "logprobs"),
    "batched many": (BATCH, {"prompts": [OTHERS] * 43, "n": 3}, "more than 128"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_request_is_refused_in_one_sentence(kiln: Running, name: str) -> None:
    path, wanted, reason = REFUSED[name]
    answer = kiln.post(path, wanted)
    assert answer.status == 400
    assert reason in answer.message
    assert not kiln.engine.submitted
    assert kiln.metric('kiln_completion_requests_total{status="refused"}') == 1


def test_batch_is_what_its_conversations_are_alone(kiln: Running) -> None:
    common = {"seed": 2, "n": 2, "response_format": guided()}
    answer = kiln.post(BATCH, {"prompts": [MESSAGES, OTHERS], **common}).json
    alone = [
        kiln.post(CHAT, {"messages": messages, **common}).json
        for messages in (MESSAGES, OTHERS)
    ]
    assert answer["object"] == "batch.completion"
    places = [(c["prompt_index"], c["completion_index"]) for c in answer["completions"]]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [c["text"] for c in answer["completions"]] == [
        choice["message"]["content"] for one in alone for choice in one["choices"]
    ]
    for count in answer["usage"]:
        assert answer["usage"][count] == sum(one["usage"][count] for one in alone)


def test_batch_tells_reasoning_apart(tmp_path: Path) -> None:
    with running(tmp_path, thinking=True) as kiln:
        asked = {"prompts": [MESSAGES], "max_completion_tokens": 64}
        (item,) = kiln.post(BATCH, asked).json["completions"]
        assert item["reasoning_content"] in {"left", "right"}
        (item,) = kiln.post(BATCH, {**asked, "max_completion_tokens": 1}).json[
            "completions"
        ]
        assert (item["text"], item["finish_reason"]) == (None, "length")


def test_profile_that_only_trains_completes_nothing(tmp_path: Path) -> None:
    with running(tmp_path, serving_profile="maintenance") as kiln:
        assert kiln.post(COMPLETIONS, {"prompt": "a"}).status == 409
        assert kiln.post(BATCH, {"prompts": [OTHERS]}).status == 409
