"""The rules of the games, by tables of positions that people can check."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.environments.arcade import (
    cartpole,
    connect4,
    g2048,
    lights_out,
    mastermind,
    maze,
    minesweeper,
    snake,
    sokoban,
    tictactoe,
    wordle,
)
from examples.environments.arcade.words import WORDS
from examples.environments.game import IllegalMove
from examples.environments.registry import GAMES
from examples.environments.synthesis import bandit, grid


def move(name: str, *values: Any) -> Any:
    """Return a move of a game from the values of its fields."""
    fields = GAMES[name].move.model_fields
    return GAMES[name].move.model_validate(dict(zip(fields, values, strict=True)))


@pytest.mark.parametrize("arm", [-1, 4, 99])
def test_open_bandit_refuses_arms_that_are_not_there(arm: int):
    with pytest.raises(IllegalMove, match=f"no arm {arm}"):
        GAMES["bandit_open"].deal(0, 1).step(move("bandit_open", arm))


def test_open_bandit_pays_like_the_bandit():
    for seed in range(40):
        for arm in range(4):
            closed = GAMES["bandit"].deal(seed, 1).step(move("bandit", arm))
            assert closed == bandit.Bandit(seed).step(move("bandit_open", arm))


FIELD = ("..#", "o..", "..G")


@pytest.mark.parametrize(
    ("direction", "distance", "at", "reward"),
    [
        ("east", 1, (0, 1), -0.1),
        ("south", 2, (1, 0), -1.0),
        ("east", 2, None, None),
        ("north", 1, None, None),
    ],
)
def test_grid_walks_cell_by_cell(direction: str, distance: int, at: Any, reward: Any):
    start = grid.Grid(FIELD)
    if at is None:
        with pytest.raises(IllegalMove, match=direction):
            start.step(move("grid", direction, distance))
        return
    after, paid = start.step(move("grid", direction, distance))
    assert (after.at, paid) == (at, reward)
    assert after.over is (reward == -1.0)


def test_grid_goal_ends_the_walk_early():
    after, paid = grid.Grid(FIELD, at=(2, 0)).step(move("grid", "east", 3))
    assert (after.at, paid, after.over) == ((2, 2), 1.0, True)


def test_grid_wind_blows_unless_blocked():
    start = grid.Grid(("...", "...", "..G"), wind="south")
    after, _ = start.step(move("grid", "east", 1))
    assert after.at == (1, 1)
    blocked, _ = grid.Grid(("...", ".#.", "..G"), wind="south").step(
        move("grid", "east", 1)
    )
    assert blocked.at == (0, 1)


@given(st.floats(-0.5, 0.5))
def test_series_are_sine_and_cosine(angle: float):
    sine, cosine = cartpole.sine_cosine(angle)
    assert sine == pytest.approx(math.sin(angle), abs=1e-15)
    assert cosine == pytest.approx(math.cos(angle), abs=1e-15)


def test_pole_falls_when_only_pushed_one_way():
    position, pays = cartpole.deal(1, 1), []
    while not position.over:
        position, paid = position.step(move("cartpole", 1))
        pays.append(paid)
    assert position.fallen
    assert 6 <= len(pays) <= 12
    assert pays == [1] * (len(pays) - 1) + [0]


def test_cart_pole_moves_as_published():
    """First step of the reference dynamics from rest: 10 N on 1.1 kg."""
    still = cartpole.CartPole(30, 0.0, 0.0, 0.0, 0.0)
    after, _ = still.step(move("cartpole", 1))
    assert after.x_speed == pytest.approx(0.195122, abs=1e-6)
    assert after.angle_speed == pytest.approx(-0.292683, abs=1e-6)


SNAKE = snake.Snake(0, 1, ((2, 2), (2, 1), (2, 0)), (2, 3))


def test_snake_grows_by_eating():
    after, paid = SNAKE.step(move("snake", "right"))
    assert (paid, len(after.body), after.eaten) == (1, 4, 1)
    assert after.food not in after.body


def test_snake_may_follow_its_tail_but_not_bite_itself():
    curled = snake.Snake(0, 1, ((1, 0), (0, 0), (0, 1), (1, 1)), (4, 4))
    after, paid = curled.step(move("snake", "right"))
    assert (after.over, paid) == (False, 0)
    longer = snake.Snake(0, 1, ((1, 0), (0, 0), (0, 1), (1, 1), (2, 1)), (4, 4))
    after, paid = longer.step(move("snake", "right"))
    assert (after.crashed, paid) == (True, -1)


def test_snake_dies_at_the_wall_and_cannot_turn_back():
    with pytest.raises(IllegalMove, match="turn back"):
        SNAKE.step(move("snake", "left"))
    edge = snake.Snake(0, 1, ((0, 2), (1, 2), (2, 2)), (4, 4))
    after, paid = edge.step(move("snake", "up"))
    assert (after.over, paid) == (True, -1)


def test_snake_starves_in_the_end():
    position, ways = SNAKE, ["up", "right", "down", "left"]
    position = snake.Snake(0, 1, ((2, 2), (2, 1), (3, 1)), (4, 4))
    for turn in range(26):
        position, paid = position.step(move("snake", ways[turn % 4]))
        assert paid == 0
    assert position.starved
    assert position.over


@pytest.mark.parametrize(
    ("row", "after", "points"),
    [
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),
        ((2, 2, 4, 8), (4, 4, 8, 0), 4),
        ((0, 2, 0, 2), (4, 0, 0, 0), 4),
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),
        ((2, 0, 0, 0), (2, 0, 0, 0), 0),
    ],
)
def test_2048_merges_once_a_slide(row: Any, after: Any, points: int):
    rest = ((0,) * 4,) * 3
    assert g2048.slide((row, *rest), "left") == ((after, *rest), points)


@given(st.lists(st.sampled_from([0, 2, 4, 8]), min_size=16, max_size=16))
def test_2048_slides_alike_in_all_directions(tiles: list[int]):
    board = tuple(tuple(tiles[at : at + 4]) for at in (0, 4, 8, 12))
    mirrored = tuple(row[::-1] for row in board)
    turned = tuple(zip(*board, strict=True))
    left, points = g2048.slide(board, "left")
    assert g2048.slide(mirrored, "right") == (tuple(r[::-1] for r in left), points)
    assert g2048.slide(turned, "up") == (tuple(zip(*left, strict=True)), points)
    assert g2048.slide(turned[::-1], "down") == (
        tuple(zip(*left, strict=True))[::-1],
        points,
    )
    assert sum(map(sum, left)) == sum(tiles)


def test_2048_refuses_a_slide_that_moves_nothing():
    stuck = g2048.Tiles(0, 32, ((2, 4, 2, 4), (4, 2, 4, 2), (2, 4, 2, 4), (4, 2, 4, 0)))
    assert stuck.view().legal_actions == ["right", "down"]
    with pytest.raises(IllegalMove, match="nothing moves"):
        stuck.step(move("g2048", "left"))


EMPTY = ("",) * 7


@pytest.mark.parametrize(
    ("columns", "column", "won"),
    [
        (("X", "X", "X", "X", "", "", ""), 3, True),
        (("XXXX", "", "", "", "", "", ""), 0, True),
        (("X", "OX", "OOX", "OOOX", "", "", ""), 3, True),
        (("OOOX", "OOX", "OX", "X", "", "", ""), 0, True),
        (("X", "X", "O", "X", "X", "", ""), 3, False),
    ],
)
def test_connect4_sees_four_in_a_line(columns: Any, column: int, won: bool):
    assert connect4.wins(columns, column) is won


def test_connect4_refuses_a_full_column():
    full = connect4.Connect4(0, 1, ("XOXOXO", *EMPTY[1:]))
    assert full.view().legal_actions == [1, 2, 3, 4, 5, 6]
    with pytest.raises(IllegalMove, match="column 0 is full"):
        full.step(move("connect4", 0))


@pytest.mark.parametrize("level", [2, 3])
def test_connect4_opponents_block_and_win(level: int):
    threat = connect4.Connect4(0, level, ("X", "X", "", "", "", "", ""))
    after, paid = threat.step(move("connect4", 2))
    assert (after.columns[3], paid) == ("O", 0)
    lost = connect4.Connect4(0, level, ("OOO", "X", "X", "", "", "", "X"))
    after, paid = lost.step(move("connect4", 6))
    assert (after.winner, paid) == ("O", -1)


@pytest.mark.parametrize(
    ("board", "who"),
    [
        ("XXX......", "X"),
        ("O..O..O..", "O"),
        ("X...X...X", "X"),
        ("..O.O.O..", "O"),
        ("XOXXOOOXX", None),
    ],
)
def test_tictactoe_sees_three_in_a_line(board: str, who: str | None):
    assert tictactoe.winner(board) == who


def test_tictactoe_is_a_draw_between_the_perfect():
    assert tictactoe.value("." * 9, "X") == 0
    with pytest.raises(IllegalMove, match="cell 4 is taken"):
        tictactoe.TicTacToe(0, 1, "....O....").step(move("tictactoe", 4))


@pytest.mark.parametrize("level", [2, 3])
def test_tictactoe_opponents_block(level: int):
    after, _ = tictactoe.TicTacToe(0, level, "X...O....").step(move("tictactoe", 1))
    assert after.board[2] == "O"


@pytest.mark.parametrize("level", [1, 2, 3])
def test_mazes_are_perfect(level: int):
    """As many openings as rooms less one, and all rooms are reached."""
    for seed in range(20):
        dealt = maze.deal(seed, level)
        rooms = dealt.size**2
        assert "".join(dealt.plan).count(".") == 2 * rooms - 1
        reached, edge = {(1, 1)}, [(1, 1)]
        while edge:
            row, column = edge.pop()
            for place in (
                (row + 1, column),
                (row - 1, column),
                (row, column + 1),
                (row, column - 1),
            ):
                if dealt.plan[place[0]][place[1]] == "." and place not in reached:
                    reached.add(place)
                    edge.append(place)
        assert len(reached) == 2 * rooms - 1


@pytest.mark.parametrize(
    ("word", "guess", "answer"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "nacre", "YYYYG"),
        ("apple", "paper", "YYGY-"),
        ("abbey", "babes", "YYGG-"),
        ("those", "geese", "---GG"),
        ("dread", "added", "YY-YG"),
    ],
)
def test_wordle_answers_letter_by_letter(word: str, guess: str, answer: str):
    assert wordle.score(word, guess) == answer


def test_wordle_words_are_words():
    assert len(WORDS) == len(set(WORDS)) >= 500
    assert all(len(w) == 5 and w.isascii() and w.islower() for w in WORDS)


def test_wordle_hard_mode_holds_to_its_hints():
    start = wordle.Wordle("crane", 3)
    after, _ = start.step(move("wordle", "cargo"))
    with pytest.raises(IllegalMove, match="hard mode"):
        after.step(move("wordle", "slept"))
    with pytest.raises(IllegalMove, match="hard mode"):
        after.step(move("wordle", "crust"))
    assert after.step(move("wordle", "crane"))[1] == 1
    easy, _ = wordle.Wordle("crane", 2).step(move("wordle", "cargo"))
    assert easy.step(move("wordle", "slept"))[1] == 0


def test_wordle_ends_after_six_guesses():
    position = wordle.Wordle("crane", 2)
    for _ in range(6):
        position, paid = position.step(move("wordle", "slept"))
        assert paid == 0
    assert position.over
    assert position.view().input_text.startswith("The word was crane.")


MINES = minesweeper.Minesweeper(0, 1, mines=frozenset({(0, 0), (3, 3)}))


def test_minesweeper_opens_around_empty_cells():
    after, paid = MINES.step(move("minesweeper", "open D1"))
    assert after.rows() == ["#100", "1100", "0011", "001#"]
    assert (paid, after.over, after.exploded) == (14, True, False)


def test_minesweeper_counts_one_by_one():
    after, paid = MINES.step(move("minesweeper", "open B2"))
    assert (paid, after.rows()) == (1, ["####", "#1##", "####", "####"])
    after, paid = after.step(move("minesweeper", "open A1"))
    assert (paid, after.over, after.rows()[0]) == (0, True, "*###")


def test_minesweeper_flags_protect():
    flagged, paid = MINES.step(move("minesweeper", "flag A1"))
    assert (paid, flagged.rows()[0]) == (0, "F###")
    with pytest.raises(IllegalMove, match="is flagged"):
        flagged.step(move("minesweeper", "open A1"))
    again, _ = flagged.step(move("minesweeper", "flag A1"))
    assert again == MINES


@pytest.mark.parametrize("text", ["open E1", "open A5", "flag H8"])
def test_minesweeper_refuses_cells_off_the_board(text: str):
    with pytest.raises(IllegalMove, match="no cell"):
        MINES.step(move("minesweeper", text))


@given(st.integers(0, 2**63), st.integers(1, 3), st.data())
def test_first_cell_is_never_a_mine(seed: int, level: int, data: Any):
    size = minesweeper.SIZES[level]
    first = data.draw(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))
    mines = minesweeper.lay(seed, level, first)
    assert len(mines) == minesweeper.MINES[level]
    assert not mines.intersection([first, *minesweeper.neighbours(first, size)])


BOARD = "0 of 1 boxes placed.\n#####\n#@$.#\n#   #\n#####"


def test_sokoban_pushes_onto_the_goal():
    start = sokoban.read(BOARD)
    assert start.legal() == ["right", "down"]
    after, paid = start.step(move("sokoban", "right"))
    assert (paid, after.over, after.rows()[1]) == (1, True, "# @*#")


def test_sokoban_does_not_pull_or_push_through_walls():
    start = sokoban.read(BOARD.replace("@$.", "$@."))
    with pytest.raises(IllegalMove, match="cannot go left"):
        start.step(move("sokoban", "left"))
    with pytest.raises(IllegalMove, match="cannot go up"):
        start.step(move("sokoban", "up"))
    after, _ = start.step(move("sokoban", "right"))
    assert after.rows()[1] == "#$ +#"
    assert sokoban.solve(start) == []


def test_sokoban_box_that_leaves_its_goal_costs():
    start = sokoban.read("\n#####\n#@* #\n#.$ #\n#####")
    assert start.placed == 1
    assert start.step(move("sokoban", "right"))[1] == -1


@pytest.mark.parametrize("level", [1, 2])
def test_sokoban_boards_can_be_solved(level: int):
    for seed in range(20):
        board = sokoban.deal(seed, level)
        assert board.placed == 0
        assert 0 < len(sokoban.solve(board)) <= board.left


@pytest.mark.parametrize(
    ("light", "lit"),
    [(0, "**.*....."), (4, ".*.***.*."), (8, ".....*.**"), (5, "..*.**..*")],
)
def test_press_switches_a_cross(light: int, lit: str):
    after = lights_out.press((False,) * 9, 3, light)
    assert "".join(".*"[state] for state in after) == lit


@given(st.integers(0, 2**63), st.integers(1, 3))
def test_lights_can_be_switched_off_in_the_presses(seed: int, level: int):
    dealt = lights_out.deal(seed, level)
    solution = lights_out.solve(dealt.lit, dealt.size)
    assert 0 < len(solution) <= lights_out.PRESSES[level]
    for light in solution:
        dealt, paid = dealt.step(move("lights_out", light))
    assert (dealt.over, paid) == (True, 1)


def test_lights_out_ends_when_presses_run_out():
    position = lights_out.Lights((True,) * 9, 2)
    with pytest.raises(IllegalMove, match="no light 9"):
        position.step(move("lights_out", 9))
    for _ in range(2):
        position, paid = position.step(move("lights_out", 0))
    assert (position.over, paid) == (True, 0)
    assert position.view().input_text.startswith("No press is left.")


@pytest.mark.parametrize(
    ("code", "guess", "black", "white"),
    [
        ("abcd", "abcd", 4, 0),
        ("abcd", "dcba", 0, 4),
        ("aabb", "abab", 2, 2),
        ("aabc", "aaaa", 2, 0),
        ("abcc", "ccef", 0, 2),
    ],
)
def test_mastermind_counts_pegs(code: str, guess: str, black: int, white: int):
    assert mastermind.pegs(code, guess) == (black, white)
    assert mastermind.pegs(guess, code) == (black, white)


@pytest.mark.parametrize("code", ["abcd", "abe"])
def test_mastermind_refuses_codes_of_other_games(code: str):
    with pytest.raises(IllegalMove, match="3 letters of abcd"):
        mastermind.deal(0, 1).step(move("mastermind", code))


def test_mastermind_ends_after_its_guesses():
    position = mastermind.Mastermind("aaa", "abcd")
    for _ in range(10):
        position, paid = position.step(move("mastermind", "bbb"))
    assert (position.over, paid) == (True, 0)


@pytest.mark.parametrize("name", ["maze", "grid", "connect4"])
def test_procedural_boards_differ(name: str):
    texts = [GAMES[name].deal(seed, 3).view().input_text for seed in range(8)]
    assert any(one != other for one, other in pairwise(texts))
