"""The math families: exact answers, integer rewards, problems that differ."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.environments.math.question import Question, same
from examples.environments.math.terms import coefficients_of, polynomial
from examples.environments.players import play_through
from examples.environments.registry import GAMES

MATH = tuple(name for name, game in GAMES.items() if game.kind == "math")


def question(name: str, seed: int, level: int) -> Question:
    dealt = GAMES[name].deal(seed, level)
    assert isinstance(dealt, Question)
    return dealt


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text)]


@pytest.mark.parametrize("name", MATH)
@given(seed=st.integers(0, 2**64), level=st.integers(1, 3))
def test_solver_and_generator_agree(name: str, seed: int, level: int):
    """They compute the answer in different ways, and both find the same."""
    positions, rewards = play_through(GAMES[name], seed, level)
    assert rewards == [1]
    assert type(rewards[0]) is int
    assert positions[-1].view().input_text == "Right."


@pytest.mark.parametrize("name", MATH)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_every_kind_of_problem_is_drawn(name: str, level: int):
    kinds = {question(name, seed, level).kind for seed in range(120)}
    assert len(kinds) >= 4


@pytest.mark.parametrize("name", MATH)
def test_problems_and_answers_vary(name: str):
    asked = [question(name, seed, 2) for seed in range(100)]
    assert len({each.text for each in asked}) >= 60
    assert len({each.answer for each in asked}) >= 9


@pytest.mark.parametrize("name", MATH)
def test_wrong_answer_pays_zero_and_tells_the_right_one(name: str):
    asked = question(name, 3, 1)
    wrong = {"answer": "99999/1" if "/" in str(asked.answer) else "nobody"}
    if isinstance(asked.answer, int):
        wrong = {"answer": asked.answer + 1}  # type: ignore[dict-item]  # a number
    after, reward = asked.step(GAMES[name].move.model_validate(wrong))
    assert (after.over, reward) == (True, 0)
    assert type(reward) is int
    assert after.view().input_text == f"Wrong: the answer is {asked.answer}."


@pytest.mark.parametrize(
    ("given_answer", "answer", "right"),
    [
        (7, 7, True),
        (-7, 7, False),
        ("2/4", "1/2", True),
        ("0/9", "0/1", True),
        ("1/3", "1/2", False),
        ("YES", "yes", True),
        ("Ada", "Ben", False),
        ("7", 7, False),
        (None, 0, False),
    ],
)
def test_answers_are_compared_exactly(given_answer: Any, answer: Any, right: bool):
    assert same(given_answer, answer) is right


def test_measure_converts_through_units():
    play = GAMES["measure"].play
    assert play("How many min are 7 day 15 h 28 min?").answer == 11_008
    assert play("How many cm are 3 m 45 cm?").answer == 345
    text = "How many minutes is it from 23:50 to 00:15 on the next day?"
    assert play(text).answer == 25


@pytest.mark.parametrize(
    ("coefficients", "text"),
    [
        ((4, -3, 1), "x^2 - 3x + 4"),
        ((0, -1, 0, -2), "-2x^3 - x"),
        ((-7,), "-7"),
        ((1, 0), "1"),
        ((0, 0), "0"),
    ],
)
def test_polynomials_are_written_as_people_do(coefficients: Any, text: str):
    assert polynomial(coefficients) == text


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=6))
def test_polynomials_are_read_as_written(coefficients: list[int]):
    padding = [0] * (6 - len(coefficients))
    assert coefficients_of(polynomial(coefficients)) == coefficients + padding


def test_algebra_solves_by_hand_checked_examples():
    play = GAMES["algebra"].play
    assert play("Solve 7(x - 1) = 2x + 53.").answer == 12
    assert play("Solve 3x + 4 = -5.").answer == -3
    assert play("Given 2x + y = 7 and x - y = 2, what is x?").answer == 3
    assert play("What is the larger root of x^2 - x - 6 = 0?").answer == 3
    assert play("Which number comes next: 2, 6, 18, 54, 162?").answer == 486
    assert play("Which number comes next: 1, 4, 9, 16, 25?").answer == 36


def test_change_solves_by_hand_checked_examples():
    play = GAMES["change"].play
    assert play("What is the derivative of 2x^3 - 4x + 1 at x = 2?").answer == 20
    text = "What is the integral of 12x^2 from x = 0 to x = 2?"
    assert play(text).answer == 32
    text = "What is the average rate of change of x^2 from x = 1 to x = 3?"
    assert play(text).answer == 4
    text = "A stock of 5 is multiplied by 2 every year and then shrinks by 1. "
    assert play(f"{text}What is it after 3 years?").answer == 33


def test_space_solves_by_hand_checked_examples():
    play = GAMES["space"].play
    text = (
        "A right triangle has a leg 5 and the hypotenuse 13. How long is the other leg?"
    )
    assert play(text).answer == 12
    text = (
        "What is twice the area of the triangle with corners (0, 0), (4, 0) and (0, 3)?"
    )
    assert play(text).answer == 12
    text = "A box of 3 by 3 by 3 unit cubes is painted outside. How many cubes have "
    assert play(f"{text}exactly two painted faces?").answer == 12
    text = "The point (3, -2) is turned anticlockwise by 90 degrees about (0, 0). "
    assert play(f"{text}What is its new x coordinate?").answer == 2


def test_discrete_solves_by_hand_checked_examples():
    play = GAMES["discrete"].play
    assert play("How many teams of 2 can be made of 5 people?").answer == 10
    text = "In how many different orders can the letters of NOON be written?"
    assert play(text).answer == 6
    assert play("What is the least common multiple of 4 and 6?").answer == 12
    text = (
        "How many of the numbers from 1 to 20 are divisible by 2 or 7, but not by both?"
    )
    assert play(text).answer == 10


def test_chance_solves_by_hand_checked_examples():
    play = GAMES["chance"].play
    text = "2 dice are thrown. What is the probability of exactly 7 in sum?"
    assert play(text).answer == "1/6"
    text = "A fair coin is tossed 3 times. What is the probability of exactly 2 heads?"
    assert play(text).answer == "3/8"


def test_evidence_solves_by_hand_checked_examples():
    play = GAMES["evidence"].play
    text = (
        "Of 1000 people 1 % are ill. A test is positive for 90 % of the ill and for "
        "10 % of the others. "
    )
    asked = "Of those with a positive test, how many in 100 are ill, rounded down?"
    assert play(text + asked).answer == 8
    assert play("What is the median of 3, 13, 1?").answer == 3


def test_reason_solves_by_hand_checked_examples():
    play = GAMES["reason"].play
    text = "Ada is taller than Ben. Cleo is taller than Ada. Who is the shortest?"
    assert play(text).answer == "Ben"
    text = "Today is Monday. Which day was it 8 days ago?"
    assert play(text).answer == "Sunday"
    text = "All fens are mips. All mips are wugs. Is it certain that all wugs are fens"
    assert play(f"{text}, yes or no?").answer == "no"


def test_unknown_question_has_no_answer():
    with pytest.raises(LookupError, match="no solver knows"):
        GAMES["algebra"].play("What is love?")
