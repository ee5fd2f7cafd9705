"""Wordle: find a five-letter word in six guesses.

Each guess is answered letter by letter: `G` right letter and place, `Y` letter
elsewhere, `-` letter not (or not so often) in the word. Any five letters may be
guessed. Finding the word pays 1, running out pays 0. Difficulty 1 draws from the first
words of the list and tells the first letter, 2 draws from the whole list, 3 adds the
rule of hard mode: a guess that ignores an answer is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from pydantic import Field

from examples.environments.arcade.words import WORDS
from examples.environments.game import (
    Draws,
    Facts,
    Game,
    IllegalMove,
    Move,
    Reward,
    TextView,
)

GUESSES = 6
EASY_WORDS = 120
EASY, HARD = 1, 3


class Guess(Move):
    """Guess a word of five lower-case letters."""

    word: str = Field(pattern="^[a-z]{5}$")


class WordleFacts(Facts):
    """The guesses with their answers; the word when the episode is over."""

    guesses: tuple[str, ...] = ()
    word: str | None = None


@dataclass(frozen=True)
class Wordle:
    """A secret word and the guesses so far."""

    word: str
    level: int
    guesses: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether the last guess was the word."""
        return self.guesses[-1:] == (self.word,)

    @property
    def over(self) -> bool:
        """Whether the word is found or no guess is left."""
        return self.found or len(self.guesses) == GUESSES

    def step(self, move: Guess) -> tuple[Wordle, Reward]:
        """Guess the word.

        Raises:
            IllegalMove: In hard mode, if the guess ignores an earlier answer.
        """
        if self.level == HARD:
            self._check_hints(move.word)
        after = replace(self, guesses=(*self.guesses, move.word))
        return after, int(after.found)

    def _check_hints(self, word: str) -> None:
        for guess in self.guesses:
            answer = score(self.word, guess)
            kept = (
                a != "G" or b == c for a, b, c in zip(answer, guess, word, strict=True)
            )
            shown = Counter(c for a, c in zip(answer, guess, strict=True) if a != "-")
            if not all(kept) or shown - Counter(word):
                message = f"hard mode: use what {guess} {answer} tells"
                raise IllegalMove(message)

    def lines(self) -> list[str]:
        """Return the guesses with their answers."""
        return [f"{guess} {score(self.word, guess)}" for guess in self.guesses]

    def view(self) -> TextView:
        """Show the guesses and their answers."""
        heading = f"Guess {len(self.guesses) + 1} of {GUESSES}."
        if self.level == EASY:
            heading += f" The word begins with {self.word[0]}."
        if self.over:
            heading = "Found." if self.found else f"The word was {self.word}."
        return TextView(input_text="\n".join([heading, *self.lines()]))

    def facts(self) -> WordleFacts:
        """Return the guesses, and the word at the end."""
        return WordleFacts(
            guesses=tuple(self.lines()), word=self.word if self.over else None
        )


def score(word: str, guess: str) -> str:
    """Return the answer to a guess.

    A letter is answered `Y` only as often as the word has it beside its right places,
    from the left.
    """
    pairs = list(zip(word, guess, strict=True))
    rest = Counter(letter for letter, guessed in pairs if letter != guessed)
    answer = ""
    for letter, guessed in pairs:
        if letter == guessed:
            answer += "G"
        elif rest[guessed]:
            rest[guessed] -= 1
            answer += "Y"
        else:
            answer += "-"
    return answer


def deal(seed: int, level: int) -> Wordle:
    """Draw a word."""
    words = WORDS[:EASY_WORDS] if level == EASY else WORDS
    return Wordle(Draws(seed).choice(words), level)


def play(text: str) -> Guess:
    """Guess, of the listed words that explain every answer, the most ordinary one."""
    first = re.search(r"begins with (\w)", text)
    words = [word for word in WORDS if word.startswith(first[1] if first else "")]
    for guess, answer in re.findall(r"^([a-z]{5}) ([GY-]{5})$", text, re.MULTILINE):
        words = [word for word in words if score(word, guess) == answer]
    letters = Counter("".join(words))
    return Guess(word=max(words, key=lambda word: sum(letters[c] for c in set(word))))


GAME = Game(
    name="wordle",
    kind="arcade",
    description=(
        "Guess the five-letter word. G: right letter, Y: letter elsewhere, -: none."
    ),
    move=Guess,
    deal=deal,
    play=play,
    steps=GUESSES,
    facts=WordleFacts,
)
