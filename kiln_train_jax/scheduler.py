"""The device loop: one thread that owns the caches and serves every request.

Requests wait in a bounded queue, take a slot, and leave it when they finish or when
their caller gives up. Each turn of the loop feeds every row that has several tokens
pending, one feed each, then runs one decode step for all rows that have one. What a
request computes depends on itself alone (`rows.py`, `programs.py`); the scheduler only
decides when.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from kiln_core.errors import KilnError, PolicyError, QueueFull
from kiln_train_jax.prefix import PrefixIndex, block_name, root_name
from kiln_train_jax.programs import AT, BLOCK, HEAD, Caches
from kiln_train_jax.sampler import IMPOSSIBLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from kiln_core.engine import Generation
    from kiln_train_jax.bank import AdapterBank, Seat
    from kiln_train_jax.programs import Programs
    from kiln_train_jax.rows import Feed, Row

IDLE_SECONDS: Final = 0.5
"""Longest sleep of an idle loop; a submission wakes it at once."""


class Ticket:
    """One admitted request: how to make its row, and whom to tell."""

    def __init__(
        self,
        make_row: Callable[[], Row],
        finish: Callable[[Row], Generation],
        future: Future[Generation],
        *,
        seat: Seat,
        follow: Callable[[Row], None] | None = None,
    ) -> None:
        """Bind a request to its caller.

        Args:
            make_row: Builds the row, forced tokens included.
            finish: Turns a finished row into the answer.
            future: Its owner may cancel it at any time.
            seat: The acquired adapter; released when the request ends.
            follow: Told whenever the row has moved on.
        """
        self.make_row = make_row
        self.finish = finish
        self.future = future
        self.follow = follow
        self.adapter_slot = seat.slot
        self.root = root_name(seat.content_sha256)


class _Active:
    """A row in a slot, and the name of the last prefix block it has."""

    def __init__(self, ticket: Ticket, row: Row) -> None:
        self.ticket = ticket
        self.row = row
        self.block = ticket.root


class Scheduler:
    """Admits, feeds, decodes and completes requests on a thread of its own."""

    def __init__(
        self,
        programs: Programs,
        bank: AdapterBank,
        make_caches: Callable[[], Caches],
        *,
        slots: int,
        blocks: int,
        max_queued_requests: int,
    ) -> None:
        """Prepare; `start` follows.

        Args:
            programs: The compiled programs.
            bank: Adapters by slot.
            make_caches: Returns fresh device state.
            slots: Requests decoded together.
            blocks: Prefix blocks in the pool.
            max_queued_requests: Bound on requests without a slot.
        """
        self._programs = programs
        self._bank = bank
        self._make_caches = make_caches
        self._caches = make_caches()
        self._index = PrefixIndex(blocks)
        self._active: list[_Active | None] = [None] * slots
        self._lengths = np.zeros(slots, np.int32)
        self._queue: deque[Ticket] = deque()
        self._max_queued = max_queued_requests
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def prefix_counts(self) -> tuple[int, int]:
        """Prefix blocks found in the pool, and computed, so far."""
        return self._index.hits, self._index.misses

    def start(self) -> None:
        """Start the loop thread."""
        self._thread = threading.Thread(target=self._run, name="kiln-device-loop")
        self._thread.daemon = True
        self._thread.start()

    def stop(self) -> None:
        """Fail what waits, finish what runs, end the thread."""
        with self._wake:
            self._stopping = True
            waiting, self._queue = list(self._queue), deque()
            self._wake.notify()
        for ticket in waiting:
            _fail(ticket, PolicyError("the engine is stopping"))
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def submit(self, ticket: Ticket) -> None:
        """Queue a request.

        Raises:
            QueueFull: The queue is full.
            PolicyError: The engine is stopping.
        """
        with self._wake:
            if self._stopping:
                raise PolicyError("the engine is stopping")
            if len(self._queue) >= self._max_queued:
                self._forget_abandoned()
            if len(self._queue) >= self._max_queued:
                raise QueueFull(
                    f"{len(self._queue)} requests are waiting already",
                    limit=self._max_queued,
                )
            self._queue.append(ticket)
            self._wake.notify()

    def _forget_abandoned(self) -> None:
        """Take requests whose callers gave up out of the queue."""
        for ticket in list(self._queue):
            if ticket.future.cancelled():
                self._queue.remove(ticket)
                self._bank.release(ticket.adapter_slot)

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._admit()
                self._drop_abandoned()
                self._feed_rows()
                self._decode_rows()
            except Exception as error:  # noqa: BLE001 - the loop outlives any request
                self._fail_all(error)

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False ends the loop."""
        with self._wake:
            while not self._queue and not any(self._active):
                if self._stopping:
                    return False
                self._wake.wait(IDLE_SECONDS)
        return True

    def _admit(self) -> None:
        """Give free slots to waiting requests, first come first served."""
        for slot in range(len(self._active)):
            while self._active[slot] is None:
                with self._wake:
                    if not self._queue:
                        return
                    ticket = self._queue.popleft()
                self._seat(slot, ticket)

    def _seat(self, slot: int, ticket: Ticket) -> None:
        """Put a request into a slot, unless it ended before it began."""
        if ticket.future.cancelled():
            self._bank.release(ticket.adapter_slot)
            return
        try:
            active = _Active(ticket, ticket.make_row())
        except KilnError as error:
            self._bank.release(ticket.adapter_slot)
            _fail(ticket, error)
            return
        if active.row.finish_reason is not None:
            self._complete(active)
            return
        self._active[slot] = active
        self._lengths[slot] = 0

    def _drop_abandoned(self) -> None:
        for slot, active in enumerate(self._active):
            if active is not None and active.ticket.future.cancelled():
                self._leave(slot, active)

    def _feed_rows(self) -> None:
        """Give every row with several pending tokens one feed."""
        for slot, active in enumerate(self._active):
            if active is None:
                continue
            feed = active.row.next_feed()
            if feed.is_block:
                feed = self._skip_known_blocks(slot, active, feed)
            if feed.length == 1:
                continue
            try:
                self._feed(slot, active, feed)
            except KilnError as error:
                self._leave(slot, active)
                _fail(active.ticket, error)

    def _skip_known_blocks(self, slot: int, active: _Active, feed: Feed) -> Feed:
        """Copy every prefix block the pool has; return the feed after those."""
        row, first, entries = active.row, feed.start, []
        while feed.is_block:
            name = block_name(active.block, feed.tokens)
            entry = self._index.find(name)
            if entry is None:
                break
            entries.append(entry)
            active.block = name
            row.fed += BLOCK
            feed = row.next_feed()
        if entries:
            self._caches = self._programs.load(self._caches, slot, first, entries)
            self._lengths[slot] = row.fed
        return feed

    def _feed(self, slot: int, active: _Active, feed: Feed) -> None:
        """Run one feed; keep its block, or take the token it drew."""
        packed = self._programs.packed(1, feed.length)
        self._fill(packed[0], slot, active, feed)
        self._caches, drawn, logits = self._programs.feed(
            self._caches, self._bank.arrays, packed
        )
        active.row.fed += len(feed.tokens)
        self._lengths[slot] = active.row.fed
        if feed.is_block:
            active.block = block_name(active.block, feed.tokens)
            entry = self._index.claim(active.block)
            self._caches = self._programs.store(self._caches, slot, feed.start, entry)
        elif feed.draws:
            if active.row.top_logprobs:
                _note_top(active.row, self._programs.top(logits, packed)[0])
            self._take(slot, active, np.asarray(drawn)[0])

    def _decode_rows(self) -> None:
        """Run one decode step for every row that has one token pending."""
        packed = self._programs.packed(len(self._active), 1)
        packed[:, AT["start"]] = self._lengths
        ready: list[tuple[int, _Active]] = []
        for slot, active in enumerate(self._active):
            if active is None:
                continue
            feed = active.row.next_feed()
            if feed.length != 1:
                continue
            try:
                self._fill(packed[slot], slot, active, feed)
            except KilnError as error:
                self._leave(slot, active)
                _fail(active.ticket, error)
            else:
                ready.append((slot, active))
        if not ready:
            return
        longest = max(int(self._lengths[slot]) for slot, _ in ready) + 1
        self._caches, drawn, logits = self._programs.decode(
            self._caches, self._bank.arrays, packed, longest
        )
        asking = [slot for slot, active in ready if active.row.top_logprobs]
        tops = self._programs.top(logits, packed) if asking else ()
        results = np.asarray(drawn)
        for slot, active in ready:
            active.row.fed += 1
            self._lengths[slot] = active.row.fed
            if slot in asking:
                _note_top(active.row, tops[slot])
            self._take(slot, active, results[slot])

    def _fill(self, packed: np.ndarray, slot: int, active: _Active, feed: Feed) -> None:
        """Write one row of a packed argument.

        Raises:
            PolicyError: The grammar allows nothing.
        """
        row, sampling = active.row, active.row.sampling
        packed[:HEAD] = (
            slot,
            feed.start,
            len(feed.tokens),
            active.ticket.adapter_slot,
            _signed(sampling.seed >> 32),
            _signed(sampling.seed & 0xFFFFFFFF),
            sampling.top_k,
            *np.array(
                [sampling.temperature, sampling.top_p, sampling.min_p], np.float32
            ).view(np.int32),
        )
        words = packed[HEAD : HEAD + self._programs.words]
        if feed.draws:
            row.write_mask(words)
        else:
            words[:] = -1
        packed[HEAD + len(words) : HEAD + len(words) + len(feed.tokens)] = feed.tokens

    def _take(self, slot: int, active: _Active, drawn: np.ndarray) -> None:
        """Hand a drawn token to its row, and finish the row if it ended."""
        try:
            active.row.take(int(drawn[0]), _logprob_of(drawn))
        except KilnError as error:
            self._leave(slot, active)
            _fail(active.ticket, error)
            return
        if active.row.finish_reason is not None:
            self._active[slot] = None
            self._complete(active)
        elif active.ticket.follow is not None:
            active.ticket.follow(active.row)

    def _complete(self, active: _Active) -> None:
        ticket = active.ticket
        self._bank.release(ticket.adapter_slot)
        try:
            generation = ticket.finish(active.row)
        except Exception as error:  # noqa: BLE001 - of this request, not of the others
            _fail(ticket, _told(error))
            return
        if ticket.future.set_running_or_notify_cancel():
            ticket.future.set_result(generation)

    def _leave(self, slot: int, active: _Active) -> None:
        self._active[slot] = None
        self._caches = self._programs.clear(self._caches, slot)
        self._bank.release(active.ticket.adapter_slot)

    def _fail_all(self, error: Exception) -> None:
        """Fail every running request and start over with fresh device state."""
        for slot, active in enumerate(self._active):
            if active is not None:
                self._active[slot] = None
                self._bank.release(active.ticket.adapter_slot)
                _fail(active.ticket, _told(error))
        self._index.clear()
        self._caches = self._make_caches()
        self._lengths[:] = 0


def _note_top(row: Row, likeliest: np.ndarray) -> None:
    """Keep the likeliest tokens of the draw that is about to be taken.

    Args:
        row: About to take it.
        likeliest: int32 `[n, 2]`: token and log-probability bits, likeliest first.
    """
    if row.sampling.temperature == 0.0:
        likeliest = likeliest[:1].copy()
        likeliest[:, 1] = 0  # the distribution has one token
    logprobs = np.ascontiguousarray(likeliest[:, 1]).view(np.float32)
    kept = zip(likeliest[:, 0].tolist(), logprobs.tolist(), strict=True)
    possible = [entry for entry in kept if entry[1] > IMPOSSIBLE]
    row.tops[len(row.logprobs)] = tuple(possible[: row.top_logprobs])


def _logprob_of(drawn: np.ndarray) -> float:
    """Return the log-probability of what was drawn.

    Raises:
        PolicyError: Nothing could be drawn.
    """
    logprob = float(drawn[1:].view(np.float32)[0])
    if math.isnan(logprob):
        raise PolicyError(
            "the model computed numbers that are not finite",
            hint="its adapter, or the model itself, holds values too large",
        )
    return logprob


def _told(error: Exception) -> KilnError:
    """Return any failure of the loop as an error of ours."""
    failure = PolicyError(f"the device loop failed: {error}")
    failure.__cause__ = error
    return failure


def _fail(ticket: Ticket, error: KilnError) -> None:
    """Tell a caller, unless it has given up."""
    if ticket.future.set_running_or_notify_cancel():
        ticket.future.set_exception(error)


def _signed(half: int) -> int:
    """Return 32 bits as the int32 that has them."""
    return half - (1 << 32) if half >= 1 << 31 else half
