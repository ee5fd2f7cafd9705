"""The runs of a server: what is retained in memory is what stands on disk.

Every change is decided by the core, written, and only then seen by others. Changes are
made one after the other in a worker thread, so the event loop never waits for a disk,
and one that was begun is finished even when whoever asked for it has gone. Looking at
runs needs no lock: the ledger is a value that is replaced whole.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
import msgspec
from anyio import to_thread
from msgspec import UNSET, UnsetType

from kiln_core.admission import (
    RunLedger,
    RunLimits,
    admit_next,
    find_run,
    insert_run,
    listed_runs,
    projected,
    retained_run,
    with_run,
    without_runs,
)
from kiln_core.canonical import printable
from kiln_core.contract import OpenEnvTrainingContract
from kiln_core.errors import OutputUnwritable, RunNotRecorded
from kiln_core.lifecycle import request_cancel
from kiln_core.restoration import Restoration, restore_runs
from kiln_core.run import OpenEnvRunList, OpenEnvRunRequest, OpenEnvRunStatus
from kiln_core.run_request import RunRequestDraft
from kiln_server.run_files import RunFiles

__all__ = ["CreatedRun", "RunStore", "Transition"]

ResultT = TypeVar("ResultT")
Transition = Callable[[OpenEnvRunStatus, int], OpenEnvRunStatus]
"""From a status and the time in Unix milliseconds to the next status."""

log = logging.getLogger("kiln.runs")


class CreatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a request for a run gave."""

    status: OpenEnvRunStatus
    replayed: bool
    """Whether its key was bound to this run already."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class RunStore:
    """Retains runs, in memory and on disk alike.

    Args:
        files: Where they are recorded.
        limits: How many there may be.
        clock_ms: The time in Unix milliseconds; may go backwards.
    """

    def __init__(
        self,
        files: RunFiles,
        limits: RunLimits,
        *,
        clock_ms: Callable[[], int] = _now_ms,
    ) -> None:
        self.files = files
        self.limits = limits
        self.ledger = RunLedger()
        """The retained runs as they are now; never changed in place."""
        self._clock_ms = clock_ms
        self._changing = threading.Lock()
        self._turns = anyio.CapacityLimiter(1)
        self._unaccepted: set[str] = set()
        """Runs that were not accepted and whose record may stand all the same."""

    async def open(self) -> Restoration:
        """Take the directory and restore what it holds, before anything is served.

        Raises:
            Conflict: Another server has it, or two runs own one key.
            OutputUnwritable: The disk refused.
        """
        return await self._in_turn(self._open)

    async def close(self) -> None:
        """Give the directory up."""
        await self._in_turn(self.files.unlock)

    def retained(self, draft: RunRequestDraft) -> OpenEnvRunStatus | None:
        """Return the run a request's key is bound to, before the request is validated.

        Raises:
            IdempotencyConflict: It is bound to another request.
        """
        return retained_run(self.ledger, draft, self.limits, self._clock_ms())

    def find(self, run_id: str) -> OpenEnvRunStatus:
        """Return one run.

        Raises:
            RunNotFound: None of that id is retained.
        """
        return find_run(self.ledger, run_id)

    def listing(self) -> OpenEnvRunList:
        """Return every retained run, newest first."""
        return listed_runs(self.ledger)

    async def create(
        self,
        request: OpenEnvRunRequest,
        contract: OpenEnvTrainingContract | UnsetType = UNSET,
    ) -> CreatedRun:
        """Queue a run and record it, or return the one its key is bound to.

        Args:
            request: Validated.
            contract: Sealed; that of a train run.

        Raises:
            IdempotencyConflict: The key is bound to another request.
            RunCapacityFull: As many runs as may be are unfinished.
            LimitError: The record would be too large.
            RunNotRecorded: The disk refused; there is no such run.
        """
        return await self._in_turn(self._create, request, contract)

    async def admit(self) -> OpenEnvRunStatus | None:
        """Give the head of the queue a slot; None where none waits or is free.

        Raises:
            OutputUnwritable: The disk refused; it goes on waiting.
        """
        return await self._in_turn(self._admit)

    async def cancel(self, run_id: str) -> OpenEnvRunStatus:
        """Cancel a queued run, or note the request on an active one.

        Raises:
            RunNotFound: None of that id is retained.
            RunNotCancellable: It has ended.
            OutputUnwritable: The disk refused; nothing changed.
        """
        return await self.update(run_id, request_cancel)

    async def update(
        self, run_id: str, transition: Transition, *, durable: bool = True
    ) -> OpenEnvRunStatus:
        """Change a run.

        Args:
            run_id: A retained one.
            transition: Given the run as it is now, so that no change is lost.
            durable: Whether it is recorded now, or with the next change that is;
                for progress, and for the end of a run whose disk is broken.

        Returns:
            The run as it is shown.

        Raises:
            RunNotFound: None of that id is retained.
            Conflict: The transition is not allowed.
            LimitError: The record would be too large; nothing changed.
            OutputUnwritable: The disk refused; nothing changed.
        """
        change = partial(self._update, durable=durable)
        return await self._in_turn(change, run_id, transition)

    async def _in_turn(
        self, change: Callable[..., ResultT], *values: object
    ) -> ResultT:
        return await to_thread.run_sync(
            partial(self._alone, change, *values), limiter=self._turns
        )

    def _alone(self, change: Callable[..., ResultT], *values: object) -> ResultT:
        # the limiter orders; a caller that was cancelled leaves it, its thread goes on
        with self._changing:
            return change(*values)

    def _open(self) -> Restoration:
        self.files.lock()
        try:
            found, ignored = self.files.find()
            for why in ignored:
                log.warning("ignored: %s", printable(why))
            restoration = restore_runs(found, self.limits, self._clock_ms())
            for status in restoration.changed:
                self.files.write(status)
            for run_id in restoration.forgotten:
                self.files.forget(run_id)
        except BaseException:
            self.files.unlock()
            raise
        self.ledger = restoration.ledger
        return restoration

    def _create(
        self,
        request: OpenEnvRunRequest,
        contract: OpenEnvTrainingContract | UnsetType,
    ) -> CreatedRun:
        insertion = insert_run(
            self.ledger,
            request,
            str(uuid.uuid4()),
            self.limits,
            self._clock_ms(),
            contract,
        )
        if not insertion.replayed:
            self._withdraw_unaccepted()
            self._forget(insertion.forgotten)
            try:
                self.files.create(insertion.status)
            except RunNotRecorded as error:
                if error.details["remains"]:
                    self._unaccepted.add(insertion.status.run_id)
                raise
            self.ledger = insertion.ledger
        return CreatedRun(status=insertion.status, replayed=insertion.replayed)

    def _withdraw_unaccepted(self) -> None:
        """Remove what a broken disk may have kept, before a key is bound again.

        Raises:
            RunNotRecorded: It is broken still.
        """
        for run_id in tuple(self._unaccepted):
            if not self.files.withdraw(run_id):
                raise RunNotRecorded("the disk fails to remove an earlier record")
            self._unaccepted.discard(run_id)

    def _forget(self, forgotten: tuple[str, ...]) -> None:
        """Let runs go, on disk first.

        Raises:
            RunNotRecorded: The disk refused.
        """
        for run_id in forgotten:
            try:
                self.files.forget(run_id)
            except OutputUnwritable as error:
                raise RunNotRecorded(error.message) from error
            self.ledger = without_runs(self.ledger, {run_id})

    def _admit(self) -> OpenEnvRunStatus | None:
        status = admit_next(self.ledger, self.limits, self._clock_ms())
        if status is not None:
            self.files.write(status)
            self.ledger = with_run(self.ledger, status)
        return status

    def _update(
        self, run_id: str, transition: Transition, *, durable: bool
    ) -> OpenEnvRunStatus:
        before = find_run(self.ledger, run_id)
        status = transition(before, self._clock_ms())
        if durable:
            self.files.write(status)
        self.ledger = with_run(self.ledger, status)
        return projected(self.ledger, status)
