"""Which prefix blocks are in the pool, and which is given up next.

A block is `BLOCK` consecutive prompt tokens, computed by the one prefill program at a
multiple of `BLOCK`. Its keys and values are a function of the adapter and of all
tokens up to its end, so its name is a hash chain over those: equal names, equal bits.
A block that is found is copied; one that is not is computed by the same program from
the same bits before it. Hit, miss and eviction therefore cannot be told apart.

Only the bookkeeping is here; the copying is in `programs.py`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class PrefixIndex:
    """Pool entries by block name, least recently used first."""

    def __init__(self, blocks: int) -> None:
        self._entries: OrderedDict[bytes, int] = OrderedDict()
        self._blocks = blocks
        self.hits = 0
        self.misses = 0

    def find(self, name: bytes) -> int | None:
        """Return the pool entry of a block, None if it must be computed."""
        entry = self._entries.get(name)
        if entry is None:
            self.misses += 1
            return None
        self._entries.move_to_end(name)
        self.hits += 1
        return entry

    def claim(self, name: bytes) -> int:
        """Return the entry a new block goes to, the least recently used if full."""
        if len(self._entries) < self._blocks:
            entry = len(self._entries)
        else:
            _, entry = self._entries.popitem(last=False)
        self._entries[name] = entry
        return entry

    def clear(self) -> None:
        """Forget every block."""
        self._entries.clear()


def root_name(adapter_sha256: str | None) -> bytes:
    """Return the name before the first block: who computes it."""
    return hashlib.sha256((adapter_sha256 or "base").encode()).digest()


def block_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the name of the block of `tokens` that follows the block `before`."""
    data = np.asarray(tokens, "<u4").tobytes()
    return hashlib.sha256(before + data).digest()
