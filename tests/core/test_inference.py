"""What chat and completions have in common."""

from __future__ import annotations

import pytest

from kiln_core.completions import CompletionRequest, completion_requests
from kiln_core.errors import UsageError
from kiln_core.inference import MAX_CHOICES, choice_seed, requests_for


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_choices_have_different_seeds_and_the_first_the_request_s(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(MAX_CHOICES)]
    assert seeds[0] == seed
    assert len(set(seeds)) == MAX_CHOICES
    assert all(0 <= value < 2**64 for value in seeds)


def test_seeds_are_the_documented_ones() -> None:
    assert choice_seed(1, 1) == 0x9E3779B97F4A7C16
    assert choice_seed(2**64 - 1, 2) == (2 * 0x9E3779B97F4A7C15 - 1) % 2**64


def test_neighbouring_requests_share_no_seed() -> None:
    seeds = [choice_seed(seed, index) for seed in range(100) for index in range(100)]
    assert len(set(seeds)) == len(seeds)


def test_prompts_and_choices_are_bounded_together() -> None:
    body = CompletionRequest(prompt=["a"] * 64, n=2)
    prompts = completion_requests(body, 1, served_model_id="toy")
    assert len(requests_for(prompts, 2)) == MAX_CHOICES
    with pytest.raises(UsageError, match="more than 128"):
        requests_for(prompts, 3)
