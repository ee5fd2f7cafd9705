"""Text that grows token by token: settled characters, and stop texts in them.

A token may end in the middle of a character, and its bytes then decode to U+FFFD until
the rest has come. `GrowingText` calls text settled once it ends between characters;
what is settled never changes. `StopSearch` follows several stop texts through it and
says how much of its end may be the beginning of one, so that a stream can hold it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"


class GrowingText:
    """The text of a list of ids that only grows, decoded in short windows.

    Attributes:
        settled: Text that will not change.
        starts, ends: Per id, the settled length before and after its characters; ids
            that are not settled yet have none.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.settled = ""
        self.starts: list[int] = []
        self.ends: list[int] = []
        self._decode = decode
        self._window: list[int] = []
        self._known = 0
        """Leading ids of the window whose text is settled."""
        self._known_text = ""
        self._rest = ""

    @property
    def pending(self) -> str:
        """Text behind the settled one, as it reads now."""
        return self._rest

    def append(self, token: int) -> str:
        """Take the next id; return what became settled."""
        self._window.append(token)
        text = self._decode(self._window)
        added = text[len(self._known_text) :]
        if not added or added.endswith(UNFINISHED):
            self._rest = added
            return ""
        new = len(self._window) - self._known
        self.starts += [len(self.settled)] * new
        self.settled += added
        self.ends += [len(self.settled)] * new
        # some decoders write an id differently where a text begins: keep one group
        self._window = self._window[self._known :]
        self._known, self._rest = new, ""
        self._known_text = self._decode(self._window)
        return added


class StopSearch:
    """Several texts, looked for in text that grows (Knuth, Morris, Pratt 1977).

    Args:
        texts: What to look for; none is empty.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._borders = [_borders(text) for text in texts]
        self._matched = [0] * len(texts)
        self._length = 0

    @property
    def held(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        return max(self._matched, default=0)

    def advance(self, settled: str, pending: str = "") -> int | None:
        """Follow new text; return where the first stop text begins, if one came.

        Args:
            settled: What follows the text so far.
            pending: What stands behind it now, but may still change.
        """
        found = []
        for number, text in enumerate(self._texts):
            borders, matched = self._borders[number], self._matched[number]
            for place, character in enumerate(settled + pending):
                matched = _step(text, borders, matched, character)
                if matched == len(text):
                    found.append(self._length + place + 1 - matched)
                    break
                if place + 1 == len(settled):
                    self._matched[number] = matched
        self._length += len(settled)
        return min(found, default=None)


def _step(text: str, borders: Sequence[int], matched: int, character: str) -> int:
    """Return how much of `text` the end matches after one more character."""
    while matched and text[matched] != character:
        matched = borders[matched - 1]
    return matched + (text[matched] == character)


def _borders(text: str) -> list[int]:
    """Return, per prefix, its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in text[1:]:
        borders.append(_step(text, borders, borders[-1], character))
    return borders
