"""The adapters in an engine's memory: names, slots, and who is using them.

Slot 0 is the base model. A slot is given up only when no request runs on it, so an
adapter can be unloaded, or replaced under its name, while answers are being written.
The device arrays are immutable: a change makes new ones, and the device loop picks
them up at its next call.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from kiln_core.errors import AdapterNotFound, CapacityFull, UsageError
from kiln_train_jax.adapters import into_bank
from kiln_train_jax.lora import empty_bank

if TYPE_CHECKING:
    from kiln_train_jax.adapters import Adapter
    from kiln_train_jax.config import ModelConfig
    from kiln_train_jax.lora import Lora


class Seat(NamedTuple):
    """Where an adapter lies."""

    slot: int
    content_sha256: str | None
    """None for the base model."""


BASE = Seat(0, None)


class AdapterBank:
    """Adapters by name and slot; safe to use from several threads."""

    def __init__(self, config: ModelConfig, *, slots: int, rank: int) -> None:
        """Allocate an empty bank.

        Args:
            config: Shape of the base model.
            slots: Slots including the base's.
            rank: Largest rank an adapter may have.
        """
        self.rank = rank
        self.arrays: Lora = empty_bank(config, slots=slots, rank=rank)
        self._seats: dict[str, Seat] = {}
        self._users = [0] * slots
        self._retired: set[int] = set()
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Compile the change of a slot, so that no load keeps requests waiting."""
        into_bank(self.arrays, 1, None)

    def names(self) -> frozenset[str]:
        """Return the names of loaded adapters."""
        with self._lock:
            return frozenset(self._seats)

    def seat(self, name: str | None) -> Seat:
        """Return where an adapter lies.

        Raises:
            AdapterNotFound: It is not loaded.
        """
        with self._lock:
            return self._seat(name)

    def acquire(self, name: str | None) -> Seat:
        """Return where an adapter lies, and keep it there until `release`.

        Raises:
            AdapterNotFound: It is not loaded.
        """
        with self._lock:
            seat = self._seat(name)
            self._users[seat.slot] += 1
            return seat

    def release(self, slot: int) -> None:
        """Give back one use of a slot."""
        with self._lock:
            self._users[slot] -= 1
            self._retired -= {s for s in self._retired if not self._users[s]}

    def load(self, name: str, adapter: Adapter) -> None:
        """Make an adapter servable; an older one of that name is replaced.

        Raises:
            UsageError: Its rank is over the bank's.
            CapacityFull: Every slot is taken.
        """
        if adapter.config.r > self.rank:
            raise UsageError(
                f"adapter {name!r} has rank {adapter.config.r}, this engine holds "
                f"ranks up to {self.rank}",
                hint="train it with a smaller lora_rank",
            )
        with self._lock:
            known = self._seats.get(name)
            if known is not None and known.content_sha256 == adapter.content_sha256:
                return
            slot = self._free_slot()
            self.arrays = into_bank(self.arrays, slot, adapter.lora)
            self._seats[name] = Seat(slot, adapter.content_sha256)
            if known is not None:
                self._retire(known.slot)

    def unload(self, name: str) -> None:
        """Free an adapter's slot, at once or when its last request ends.

        Raises:
            AdapterNotFound: It is not loaded.
        """
        with self._lock:
            seat = self._seat(name)
            del self._seats[name]
            self._retire(seat.slot)

    def _seat(self, name: str | None) -> Seat:
        if name is None:
            return BASE
        seat = self._seats.get(name)
        if seat is None:
            raise AdapterNotFound(f"adapter {name!r} is not loaded")
        return seat

    def _retire(self, slot: int) -> None:
        if self._users[slot]:
            self._retired.add(slot)

    def _free_slot(self) -> int:
        taken = {seat.slot for seat in self._seats.values()} | self._retired
        free = [slot for slot in range(1, len(self._users)) if slot not in taken]
        if not free:
            raise CapacityFull(
                f"all {len(self._users) - 1} adapter slots are taken",
                hint="unload an adapter that is not needed",
            )
        return free[0]
