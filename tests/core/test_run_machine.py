"""Every sequence of creations, retries, cancellations, restarts and clocks.

The ledger and the files of a store, against a model of plain dictionaries.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from msgspec import UNSET

from kiln_core.admission import (
    RunLedger,
    RunLimits,
    active_runs,
    admit_next,
    find_run,
    insert_run,
    listed_runs,
    queued_runs,
    retained_run,
    with_run,
)
from kiln_core.canonical import pretty
from kiln_core.errors import (
    IdempotencyConflict,
    RunCapacityFull,
    RunNotCancellable,
    RunNotFound,
)
from kiln_core.lifecycle import (
    TERMINAL,
    moved_run,
    published_run,
    request_cancel,
    run_failed_with,
)
from kiln_core.restoration import read_run_record, restore_runs
from kiln_core.run import RunState
from kiln_core.run_request import RunRequestDraft
from tests.core.runs import NOW, STATS, drafted, run_id

KEYS = (None, "a", "b", "c")
SHAPES: tuple[dict[str, Any], ...] = ({}, {"groups": 9}, {"temperature": 0})
TTL_MS = 50_000
DONE = {str(state) for state in TERMINAL}


class Runs(RuleBasedStateMachine):
    """``model`` is by id: key, shape, state, submitted, finished, sequence."""

    ids = Bundle("ids")

    @initialize(active=st.integers(1, 2), tracked=st.integers(1, 4))
    def start(self, active: int, tracked: int) -> None:
        self.limits = RunLimits(
            max_active_runs=active,
            max_tracked_runs=tracked,
            tracked_run_ttl_seconds=TTL_MS // 1000,
        )
        self.now = NOW
        self.ledger = RunLedger()
        self.files: dict[str, bytes] = {}
        self.model: dict[str, dict[str, Any]] = {}
        self.sequence = 0

    # what the store does with a status

    def keep(self, *changed: Any) -> None:
        for status in changed:
            self.ledger = with_run(self.ledger, status)
            self.files[status.run_id] = pretty(status)

    def bound(self, key: str | None) -> str | None:
        """Return the id of the run that owns a key, by the model."""
        for found, run in self.model.items():
            if key is not None and run["key"] == key and not self.too_old(run):
                return found
        return None

    def too_old(self, run: dict[str, Any]) -> bool:
        return run["finished"] is not None and self.now - run["finished"] > TTL_MS

    # rules

    @rule(target=ids, key=st.sampled_from(KEYS), shape=st.integers(0, 2))
    def create(self, key: str | None, shape: int) -> str:
        draft = drafted(**({"idempotency_key": key} if key else {}), **SHAPES[shape])
        owner = self.bound(key)
        if owner is not None:
            self.create_again(owner, draft, shape)
            return owner
        assert retained_run(self.ledger, draft, self.limits, self.now) is None
        return self.create_new(draft, key, shape)

    def create_again(self, owner: str, draft: RunRequestDraft, shape: int) -> None:
        before = self.ledger
        try:
            known = retained_run(self.ledger, draft, self.limits, self.now)
            insertion = insert_run(
                self.ledger, draft.accepted(), run_id(), self.limits, self.now
            )
        except IdempotencyConflict:
            assert self.model[owner]["shape"] != shape
        else:
            assert self.model[owner]["shape"] == shape
            assert known == insertion.status == find_run(self.ledger, owner)
            assert insertion.replayed
            assert insertion.ledger is before

    def create_new(self, draft: RunRequestDraft, key: str | None, shape: int) -> str:
        kept = {i: r for i, r in self.model.items() if not self.too_old(r)}
        finished = sorted(
            (i for i, run in kept.items() if run["state"] in DONE),
            key=lambda i: (kept[i]["submitted"], kept[i]["sequence"]),
        )
        excess = max(len(kept) - self.limits.max_tracked_runs + 1, 0)
        fresh = run_id()
        try:
            insertion = insert_run(
                self.ledger, draft.accepted(), fresh, self.limits, self.now
            )
        except RunCapacityFull:
            assert len(finished) < excess
            return fresh
        assert len(finished) >= excess
        for forgotten in finished[:excess]:
            del kept[forgotten]
        assert set(insertion.forgotten) == set(self.model) - set(kept)
        for forgotten in insertion.forgotten:
            del self.files[forgotten]
        self.sequence += 1
        self.model = kept
        self.model[fresh] = {
            "key": key,
            "shape": shape,
            "state": "queued",
            "submitted": self.now,
            "finished": None,
            "sequence": self.sequence,
        }
        self.ledger = insertion.ledger
        self.keep(insertion.status)
        return fresh

    @rule()
    def admit(self) -> None:
        waiting = [i for i, run in self.model.items() if run["state"] == "queued"]
        active = [
            i for i, r in self.model.items() if r["state"] not in {*DONE, "queued"}
        ]
        status = admit_next(self.ledger, self.limits, self.now)
        if not waiting or len(active) >= self.limits.max_active_runs:
            assert status is None
            return
        assert status is not None
        assert status.run_id == min(waiting, key=lambda i: self.model[i]["sequence"])
        assert status.admission.queue_wait_ms == max(
            self.now - self.model[status.run_id]["submitted"], 0
        )
        self.keep(status)
        run = self.model[status.run_id]
        run |= {"state": "discovering", "begun": max(self.now, run["submitted"])}

    @rule(found=ids, fails=st.booleans())
    def finish(self, found: str, fails: bool) -> None:
        run = self.model.get(found)
        if run is None or run["state"] != "discovering":
            return
        status = self.ledger.runs[found]
        if fails:
            status = run_failed_with(status, OSError(), self.now)
        else:
            for state in (RunState.COLLECTING, RunState.REVALIDATING):
                status = moved_run(status, state)
            status = published_run(status, [], STATS, self.now)
        self.keep(status)
        run["state"] = "failed" if fails else "rollout_ready"
        run["finished"] = max(self.now, run["begun"])

    @rule(found=ids)
    def cancel(self, found: str) -> None:
        run = self.model.get(found)
        try:
            status = request_cancel(find_run(self.ledger, found), self.now)
        except RunNotFound:
            assert run is None
            return
        except RunNotCancellable:
            assert run is not None
            assert run["state"] in DONE
            return
        assert run is not None
        self.keep(status)
        if run["state"] == "queued":
            run |= {
                "state": "cancelled",
                "finished": max(self.now, run["submitted"]),
            }

    @rule(by=st.sampled_from((-70_000, -1, 1, 1000, TTL_MS, TTL_MS + 1)))
    def clock(self, by: int) -> None:
        self.now += by

    @rule()
    def restart(self) -> None:
        """The files are all that is left; their order is that of a directory."""
        records = [read_run_record(data, "r") for data in sorted(self.files.values())]
        for record in records:
            assert record.version == 5
        restoration = restore_runs(records, self.limits, self.now)
        for found, run in list(self.model.items()):
            if run["state"] == "discovering":
                run["state"] = "failed"
                run["finished"] = max(self.now, run["begun"])
            if self.too_old(run):
                del self.model[found]
        self.ledger = restoration.ledger
        for status in restoration.changed:
            self.files[status.run_id] = pretty(status)
        for forgotten in restoration.forgotten:
            del self.files[forgotten]
        assert set(self.files) == set(self.model)
        assert restoration.resumed == len(queued_runs(self.ledger))

    # what always holds

    @invariant()
    def ledger_is_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        shown = {
            status.run_id: {
                "state": str(status.state),
                "submitted": status.submitted_unix_ms,
                "sequence": status.admission.sequence,
                "finished": status.finished_unix_ms,
            }
            for status in listed_runs(self.ledger).runs
        }
        assert shown == {
            found: {
                "state": run["state"],
                "submitted": run["submitted"],
                "sequence": run["sequence"],
                "finished": UNSET if run["finished"] is None else run["finished"],
            }
            for found, run in self.model.items()
        }

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "model"):
            return
        assert len(self.ledger.runs) <= self.limits.max_tracked_runs
        assert len(active_runs(self.ledger)) <= self.limits.max_active_runs
        positions = [
            find_run(self.ledger, status.run_id).admission.queue_position
            for status in queued_runs(self.ledger)
        ]
        assert positions == list(range(1, len(positions) + 1))
        keys = [
            status.request.idempotency_key
            for status in self.ledger.runs.values()
            if status.request.idempotency_key is not UNSET
        ]
        assert len(set(keys)) == len(keys)


Runs.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_runs = Runs.TestCase
