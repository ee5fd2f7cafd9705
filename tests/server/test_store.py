"""`kiln_server/store.py` and ``run_files.py``: what is accepted survives everything."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

import kiln_core
from kiln_core import limits
from kiln_core.admission import RunLimits, queued_runs
from kiln_core.canonical import compact, pretty, read_json
from kiln_core.drive.files import Disk
from kiln_core.errors import (
    Conflict,
    IdempotencyConflict,
    KilnError,
    LimitError,
    OutputUnwritable,
    RunCapacityFull,
    RunNotCancellable,
    RunNotFound,
    RunNotRecorded,
)
from kiln_core.lifecycle import (
    TERMINAL,
    cancel_requested,
    moved_run,
    progressed_run,
    run_failed_with,
)
from kiln_core.restoration import read_run_record
from kiln_core.run import OpenEnvRunStatus, RunState
from kiln_server.run_files import RunFiles
from kiln_server.store import CreatedRun, RunStore
from tests.core.runs import NOW, asked, drafted, queued, run_id, walked
from tests.drive.test_files import Crash, ScriptedDisk

ROOT = Path(kiln_core.__file__).parents[1]
LIMITS = RunLimits(max_active_runs=1, max_tracked_runs=3, tracked_run_ttl_seconds=10)
ResultT = TypeVar("ResultT")


class Shim(ScriptedDisk):
    def make_directory(self, path: Path) -> None:
        self.call("mkdir")
        path.mkdir()
        self.sync_directory(path.parent)


class Clock:
    def __init__(self) -> None:
        self.now_ms = NOW

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture(autouse=True)
def closes_every_descriptor() -> Iterator[None]:
    anyio.run(warm)
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


async def warm() -> None:
    await anyio.to_thread.run_sync(int)


def using(
    directory: Path,
    act: Callable[[RunStore], Awaitable[ResultT]],
    *,
    disk: Disk | None = None,
    bounds: RunLimits = LIMITS,
    clock: Callable[[], int] | None = None,
) -> ResultT:
    """Open a store, do something with it, and close it as a crash would."""

    async def run() -> ResultT:
        files = RunFiles(directory, Disk())
        store = RunStore(files, bounds, clock_ms=clock or Clock())
        await store.open()
        files._disk = disk or files._disk
        try:
            return await act(store)
        finally:
            files.unlock()

    return anyio.run(run)


def record(directory: Path, found: str) -> Path:
    return directory / ".openenv" / "runs" / found / "run.json"


def records(directory: Path) -> dict[str, OpenEnvRunStatus]:
    return {
        path.parent.name: read_run_record(path.read_bytes(), "r").status
        for path in (directory / ".openenv" / "runs").glob("*/run.json")
    }


async def create(store: RunStore, **members: Any) -> OpenEnvRunStatus:
    return (await store.create(asked(**members))).status


# What is written


def test_record_is_pretty_and_whole(tmp_path: Path) -> None:
    status = using(tmp_path, create)
    path = record(tmp_path, status.run_id)
    assert path.read_bytes() == pretty(status).removesuffix(b"\n")
    assert os.listdir(path.parent) == ["run.json"]
    skeleton = read_json(path.read_bytes(), "r")
    assert skeleton["admission"] == {
        "max_active_runs": 1,
        "sequence": 1,
        "queue_position": 1,
    }


def test_order_of_a_creation(tmp_path: Path) -> None:
    """The directory lasts before the record is named, and the name before it counts."""
    disk = Shim()
    using(tmp_path, create, disk=disk)
    assert disk.calls == [
        "mkdir",
        "sync directory",
        "create",
        "write",
        "sync",
        "rename run.json",
        "sync directory",
    ]


def test_order_of_a_change(tmp_path: Path) -> None:
    using(tmp_path, create)
    disk = Shim()
    using(tmp_path, lambda store: store.admit(), disk=disk)
    named = ["rename run.json", "sync directory"]
    assert disk.calls == ["create", "write", "sync", *named]


def test_order_of_a_creation_that_forgets(tmp_path: Path) -> None:
    """What is forgotten has lasted so before its key can be bound again."""
    prepared(tmp_path, "eviction")
    disk = Shim()
    using(tmp_path, one_eviction, disk=disk)
    assert disk.calls[:3] == ["rename run.forgotten.json", "sync directory", "mkdir"]


def test_order_of_a_withdrawal(tmp_path: Path) -> None:
    disk = Shim(7, lambda: OSError(errno.EIO, "io"))

    async def act(store: RunStore) -> None:
        with pytest.raises(RunNotRecorded):
            await create(store)

    using(tmp_path, act, disk=disk)
    assert disk.calls[6:] == [
        "sync directory",
        "unlink staged",
        "unlink staged",
        "sync directory",
    ]
    assert os.listdir(tmp_path / ".openenv" / "runs") == []


def test_run_is_seen_only_once_it_is_recorded(tmp_path: Path) -> None:
    seen: list[int] = []

    async def act(store: RunStore) -> None:
        class Watching(Disk):
            def sync_directory(self, path: Path) -> None:
                super().sync_directory(path)
                seen.append(len(store.listing().runs))

        store.files._disk = Watching()
        await create(store)
        seen.append(len(store.listing().runs))

    using(tmp_path, act)
    assert seen == [0, 0, 1]


def test_writing_leaves_the_event_loop_free(tmp_path: Path) -> None:
    loops: list[bool] = []

    async def act(store: RunStore) -> None:
        here = threading.get_ident()

        class Watching(Disk):
            def write(self, descriptor: int, data: bytes) -> None:
                loops.append(threading.get_ident() == here)
                super().write(descriptor, data)

        store.files._disk = Watching()
        status = await create(store)
        await store.admit()
        await store.cancel(status.run_id)

    using(tmp_path, act)
    assert loops == [False] * 3


def test_changes_are_made_one_after_the_other(tmp_path: Path) -> None:
    async def act(store: RunStore) -> None:
        status = await create(store, groups=200, group_size=1)
        await store.admit()

        def step(before: OpenEnvRunStatus, _: int) -> OpenEnvRunStatus:
            done = before.progress.groups_completed + 1
            return progressed_run(before, done, done)

        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(store.update, status.run_id, step)
        assert store.find(status.run_id).progress.groups_completed == 50

    using(tmp_path, act)


def test_change_that_nobody_waits_for_is_finished(tmp_path: Path) -> None:
    """A client that goes away neither halves a change nor hides it."""
    begun, go = threading.Event(), threading.Event()

    class Slow(Disk):
        def write(self, descriptor: int, data: bytes) -> None:
            begun.set()
            assert go.wait(10)
            super().write(descriptor, data)

    async def act(store: RunStore) -> int:
        import asyncio

        task = asyncio.create_task(create(store))
        await anyio.to_thread.run_sync(begun.wait)
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await create(store)
        return len(store.listing().runs)

    assert using(tmp_path, act, disk=Slow()) == 2
    assert len(records(tmp_path)) == 2


def test_progress_may_wait_for_the_next_record(tmp_path: Path) -> None:
    async def act(store: RunStore) -> None:
        status = await create(store)
        await store.admit()
        written = record(tmp_path, status.run_id).read_bytes()
        await store.update(
            status.run_id, lambda s, _: progressed_run(s, 1, 4), durable=False
        )
        assert store.find(status.run_id).progress.groups_completed == 1
        assert record(tmp_path, status.run_id).read_bytes() == written
        await store.cancel(status.run_id)
        noted = records(tmp_path)[status.run_id]
        assert noted.progress.groups_completed == 1
        assert cancel_requested(noted)

    using(tmp_path, act)


# Creating and cancelling


def test_hundred_identical_creations_are_one_run(tmp_path: Path) -> None:
    async def act(store: RunStore) -> list[CreatedRun]:
        created: list[CreatedRun] = []

        async def one() -> None:
            created.append(await store.create(asked(idempotency_key="k")))

        async with anyio.create_task_group() as group:
            for _ in range(100):
                group.start_soon(one)
        return created

    created = using(tmp_path, act)
    assert len({answer.status.run_id for answer in created}) == 1
    assert sum(not answer.replayed for answer in created) == 1
    assert len(records(tmp_path)) == 1


def test_hundred_that_differ_are_one_run_and_conflicts(tmp_path: Path) -> None:
    async def act(store: RunStore) -> list[str]:
        outcomes: list[str] = []

        async def one(seed: int) -> None:
            try:
                await store.create(asked(idempotency_key="k", seed_start=seed))
            except IdempotencyConflict:
                outcomes.append("conflict")
            else:
                outcomes.append("created")

        async with anyio.create_task_group() as group:
            for seed in range(100):
                group.start_soon(one, seed)
        return outcomes

    outcomes = using(tmp_path, act)
    assert sorted(outcomes) == ["conflict"] * 99 + ["created"]
    assert len(records(tmp_path)) == 1


def test_key_survives_a_restart(tmp_path: Path) -> None:
    first = using(tmp_path, lambda store: create(store, idempotency_key="k"))

    async def again(store: RunStore) -> None:
        known = store.retained(drafted(idempotency_key="k"))
        assert known == first
        created = await store.create(asked(idempotency_key="k"))
        assert (created.status, created.replayed) == (first, True)
        with pytest.raises(IdempotencyConflict):
            store.retained(drafted(idempotency_key="k", groups=9))

    using(tmp_path, again)


def test_life_of_a_run(tmp_path: Path) -> None:
    async def act(store: RunStore) -> None:
        status = await create(store)
        waiting = await create(store)
        admitted = await store.admit()
        assert admitted is not None
        assert admitted.run_id == status.run_id
        assert store.find(waiting.run_id).admission.queue_position == 1
        assert await store.admit() is None
        ended = await store.update(
            status.run_id, lambda s, now: run_failed_with(s, OSError(), now)
        )
        assert records(tmp_path)[status.run_id] == ended
        cancelled = await store.cancel(waiting.run_id)
        assert cancelled.state is RunState.CANCELLED
        with pytest.raises(RunNotCancellable):
            await store.cancel(waiting.run_id)
        with pytest.raises(RunNotFound):
            await store.cancel(run_id())
        with pytest.raises(Conflict):
            await store.update(
                status.run_id, lambda s, _: moved_run(s, RunState.COLLECTING)
            )
        await store.close()

    using(tmp_path, act)


def test_full_store(tmp_path: Path) -> None:
    async def act(store: RunStore) -> None:
        for _ in range(3):
            await create(store)
        with pytest.raises(RunCapacityFull):
            await create(store)

    using(tmp_path, act)
    assert len(records(tmp_path)) == 3


def test_forgotten_run_keeps_its_directory_and_loses_its_key(tmp_path: Path) -> None:
    clock = Clock()

    async def act(store: RunStore) -> tuple[str, str]:
        old = await create(store, idempotency_key="k")
        await store.cancel(old.run_id)
        clock.now_ms += 10_001
        new = await create(store, idempotency_key="k", groups=9)
        return old.run_id, new.run_id

    old, new = using(tmp_path, act, clock=clock)
    assert set(records(tmp_path)) == {new}
    assert os.listdir(record(tmp_path, old).parent) == ["run.forgotten.json"]
    clock.now_ms -= 99_999  # a clock that goes backwards brings nothing back

    async def again(store: RunStore) -> list[str]:
        return list(store.ledger.runs)

    roomy = msgspec.structs.replace(LIMITS, max_tracked_runs=99)
    assert using(tmp_path, again, clock=clock, bounds=roomy) == [new]


# Restarting


def put(directory: Path, status: OpenEnvRunStatus) -> Path:
    path = record(directory, status.run_id)
    path.parent.mkdir(parents=True)
    path.write_bytes(pretty(status))
    return path


async def shown(store: RunStore) -> list[OpenEnvRunStatus]:
    return store.listing().runs


def test_restart_fails_the_active_and_resumes_the_queue(tmp_path: Path) -> None:
    async def act(store: RunStore) -> list[str]:
        runs = [await create(store) for _ in range(3)]
        await store.admit()
        return [status.run_id for status in runs]

    ids = using(tmp_path, act)
    for _ in range(2):  # a second restart finds what the first left

        async def again(store: RunStore) -> None:
            queue = [status.run_id for status in queued_runs(store.ledger)]
            assert queue == ids[1:]
            failed = store.find(ids[0])
            assert failed.failure is not UNSET
            assert failed.failure.code == "run_interrupted"
            assert records(tmp_path)[ids[0]] == failed

        using(tmp_path, again)


def test_what_expired_meanwhile_is_not_found_again(tmp_path: Path) -> None:
    ended = walked(RunState.CANCELLED)
    path = put(tmp_path, ended)
    clock = Clock()
    clock.now_ms += 10_002
    assert using(tmp_path, shown, clock=clock) == []
    assert not path.exists()
    clock.now_ms = NOW
    assert using(tmp_path, shown, clock=clock) == []


def make_link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def make_linked_directory(path: Path) -> None:
    path.parent.rename(path.parents[3] / "elsewhere")
    path.parent.symlink_to(path.parents[3] / "elsewhere")


def make_another_runs(path: Path) -> None:
    path.write_bytes(pretty(queued()))


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "strict JSON"),
    "half": (lambda p: p.write_bytes(p.read_bytes()[:99]), "strict JSON"),
    "of another kind": (lambda p: p.write_bytes(b"{}"), "no record of a run"),
    "of a later version": (
        lambda p: p.write_bytes(p.read_bytes().replace(b"run.v5", b"run.v6")),
        "no record of a run",
    ),
    "of another run": (make_another_runs, "another run"),
    "oversized": (
        lambda p: os.truncate(p, limits.MAX_RUN_RECORD_BYTES + 1),
        "is over",
    ),
    "symbolic link": (make_link, "symbolic link"),
    "linked directory": (make_linked_directory, "no directory of a run"),
    "fifo": (lambda p: (p.unlink(), os.mkfifo(p)), "no regular file"),
    "directory": (lambda p: (p.unlink(), p.mkdir()), "no regular file"),
    "other name": (
        lambda p: p.parent.rename(p.parents[1] / "notes"),
        "no directory of a run",
    ),
    "file as directory": (
        lambda p: (p.unlink(), p.parent.rmdir(), p.parent.touch()),
        "cannot be read",
    ),
    "name that is no text": (
        lambda p: p.parent.rename(os.fsdecode(bytes(p.parents[1]) + b"/\xff")),
        "no directory of a run",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_file_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    good, bad = queued(), queued()
    put(tmp_path, good)
    make, why = FOREIGN[kind]
    make(put(tmp_path, bad))
    before = sorted(os.listdir(tmp_path / ".openenv" / "runs"))
    with caplog.at_level(logging.WARNING):
        [found] = using(tmp_path, shown)
    assert found.run_id == good.run_id
    assert why in caplog.text
    assert sorted(os.listdir(tmp_path / ".openenv" / "runs")) == before


def test_directory_without_a_record_is_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = record(tmp_path, run_id())
    path.parent.mkdir(parents=True)
    stale = path.with_name(".kiln-0123.part")
    stale.write_bytes(b"{")
    assert using(tmp_path, shown) == []
    assert not stale.exists()
    assert caplog.text == ""


def test_duplicate_key_keeps_the_server_from_starting(tmp_path: Path) -> None:
    paths = [put(tmp_path, queued(idempotency_key="k")) for _ in range(2)]
    with pytest.raises(Conflict, match="one idempotency key"):
        using(tmp_path, shown)
    paths[0].unlink()
    assert len(using(tmp_path, shown)) == 1


@pytest.mark.parametrize("part", ["run", "runs"])
def test_directory_removed_by_hand_is_made_again(tmp_path: Path, part: str) -> None:
    async def act(store: RunStore) -> None:
        status = await create(store)
        path = record(tmp_path, status.run_id)
        path.unlink()
        path.parent.rmdir()
        if part == "runs":
            path.parents[1].rmdir()
        admitted = await store.admit()
        assert admitted == records(tmp_path)[status.run_id]

    using(tmp_path, act)


def test_directory_that_cannot_be_made_again(tmp_path: Path) -> None:
    async def act(store: RunStore) -> None:
        status = await create(store)
        path = record(tmp_path, status.run_id)
        path.unlink()
        path.parent.rmdir()
        store.files._disk = Shim(1, lambda: OSError(errno.ENOSPC, "full"))
        with pytest.raises(OutputUnwritable, match="cannot be made: full"):
            await store.admit()
        assert store.find(status.run_id) == status
        assert await store.admit() is not None

    using(tmp_path, act)


def test_directory_replaced_by_a_link_is_not_followed(tmp_path: Path) -> None:
    async def act(store: RunStore) -> None:
        status = await create(store)
        path = record(tmp_path, status.run_id)
        make_linked_directory(path)
        before = path.read_bytes()
        with pytest.raises(OutputUnwritable, match="symbolic link"):
            await store.admit()
        assert path.read_bytes() == before
        assert store.find(status.run_id) == status

    using(tmp_path, act)


def test_terminal_run_whose_directory_was_removed_can_be_forgotten(
    tmp_path: Path,
) -> None:
    clock = Clock()

    async def act(store: RunStore) -> None:
        status = await create(store)
        await store.cancel(status.run_id)
        path = record(tmp_path, status.run_id)
        path.unlink()
        path.parent.rmdir()
        clock.now_ms += 10_001
        await create(store)
        assert len(store.listing().runs) == 1

    using(tmp_path, act, clock=clock)


# The lock


def test_second_server_is_refused(tmp_path: Path) -> None:
    async def act(store: RunStore) -> None:
        other = RunStore(RunFiles(tmp_path), LIMITS)
        with pytest.raises(Conflict, match="another server uses"):
            await other.open()
        store.files.unlock()
        await other.open()
        await other.close()
        await other.close()

    using(tmp_path, act)


def test_lock_of_a_killed_server_is_free(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; "
        "from kiln_server.run_files import RunFiles; "
        "RunFiles(Path(sys.argv[1])).lock(); print('locked', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(Conflict):
            using(tmp_path, shown)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert using(tmp_path, shown) == []


WORKER = """
import sys, anyio
from pathlib import Path
from kiln_core.admission import RunLimits
from kiln_server.run_files import RunFiles
from kiln_server.store import RunStore
from tests.core.runs import asked

async def main():
    limits = RunLimits(max_tracked_runs=10_000)
    store = RunStore(RunFiles(Path(sys.argv[1])), limits)
    await store.open()
    print("open", flush=True)
    while True:
        created = await store.create(asked())
        print(created.status.run_id, flush=True)
        admitted = await store.admit()
        if admitted:
            print("admitted", admitted.run_id, flush=True)

anyio.run(main)
"""


def test_kill_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    accepted: list[str] = []
    admitted: set[str] = set()
    bounds = msgspec.structs.replace(LIMITS, max_tracked_runs=10_000)
    for lines in (1, 2, 3, 7, 20):
        with subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as process:
            assert process.stdout is not None
            told = [process.stdout.readline() for _ in range(lines)]
            process.kill()
            told += process.stdout.readlines()
            process.wait(10)
        whole = [line.split() for line in told if line.endswith("\n")]
        accepted += [words[0] for words in whole if len(words[0]) == 36]
        admitted |= {words[1] for words in whole if words[0] == "admitted"}
        after = using(tmp_path, survivors, bounds=bounds)
        assert set(accepted) <= set(after)
        assert len(after) <= len(accepted) + 5  # recorded, and killed before told
        for found in admitted:
            assert after[found].state is RunState.FAILED
        states = {status.state for status in after.values()}
        assert states <= {RunState.FAILED, RunState.QUEUED}
    assert len(accepted) >= 20
    assert admitted


def test_lock_file_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a file that has lost its name keeps nobody out, so it is taken anew."""
    files, calls = RunFiles(tmp_path), []

    def removing(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        path = tmp_path / ".openenv" / "lock"
        if len(calls) < 3:
            path.unlink()
        if len(calls) == 2:
            path.touch()

    monkeypatch.setattr("kiln_server.run_files.fcntl.flock", removing)
    files.lock()
    files.unlock()
    assert len(calls) == 3


@pytest.mark.parametrize("kind", ["link", "directory", "file"])
def test_lock_that_cannot_be(tmp_path: Path, kind: str) -> None:
    if kind == "file":
        (tmp_path / ".openenv").touch()
    else:
        (tmp_path / ".openenv").mkdir()
        lock = tmp_path / ".openenv" / "lock"
        if kind == "link":
            lock.symlink_to(tmp_path / "elsewhere")
        else:
            lock.mkdir()
    with pytest.raises(OutputUnwritable):
        using(tmp_path, shown)
    assert not (tmp_path / "elsewhere").exists()


# Bounds


def test_record_that_is_too_large_pretty_is_written_compact(tmp_path: Path) -> None:
    many = {"reset_options": {"a": [[0]] * 150_000}}
    status = using(tmp_path, lambda store: create(store, **many))
    assert record(tmp_path, status.run_id).read_bytes() == compact(status)
    [found] = using(tmp_path, shown)
    assert found == status


def test_record_that_is_too_large_is_no_run(tmp_path: Path) -> None:
    huge = msgspec.structs.replace(
        asked(), reset_options={"a": "x" * limits.MAX_RUN_RECORD_BYTES}
    )

    async def act(store: RunStore) -> None:
        with pytest.raises(LimitError, match="would be over"):
            await store.create(huge)
        assert store.listing().runs == []

    using(tmp_path, act)
    assert os.listdir(tmp_path / ".openenv" / "runs") == []


def test_failure_fits_into_the_largest_record(tmp_path: Path) -> None:
    async def act(store: RunStore) -> None:
        status = await create(store)
        await store.admit()
        room = limits.MAX_RUN_RECORD_BYTES - 17 * limits.KIB
        filled = len(compact(store.find(status.run_id)))
        words = ["w" * (room - filled)]
        await store.update(
            status.run_id, lambda s, _: msgspec.structs.replace(s, warnings=words)
        )
        with pytest.raises(LimitError):
            await store.update(
                status.run_id,
                lambda s, _: msgspec.structs.replace(s, warnings=words * 2),
            )
        long = KilnError("é" * 9999, hint="h" * 9999)
        await store.update(status.run_id, lambda s, now: run_failed_with(s, long, now))

    using(tmp_path, act)
    [failed] = using(tmp_path, shown)
    assert failed.state is RunState.FAILED


# A disk that fails, and a machine that stops


async def one_creation(store: RunStore) -> OpenEnvRunStatus:
    return await create(store, idempotency_key="new")


async def one_admission(store: RunStore) -> OpenEnvRunStatus | None:
    return await store.admit()


async def one_progress(store: RunStore) -> OpenEnvRunStatus:
    [active] = [s for s in store.listing().runs if s.state is RunState.QUEUED][-1:]
    return await store.update(
        active.run_id, lambda s, _: msgspec.structs.replace(s, warnings=["w"])
    )


async def one_eviction(store: RunStore) -> OpenEnvRunStatus:
    return await create(store, idempotency_key="evicts")


CHANGES: dict[str, Callable[[RunStore], Awaitable[Any]]] = {
    "creation": one_creation,
    "admission": one_admission,
    "update": one_progress,
    "eviction": one_eviction,
}


def prepared(directory: Path, change: str) -> dict[str, OpenEnvRunStatus]:
    """Leave one queued run, and for an eviction as many others as may be."""
    put(directory, queued(idempotency_key="first"))
    if change == "eviction":
        for _ in range(2):
            put(directory, walked(RunState.CANCELLED))
    return using(directory, survivors)


async def survivors(store: RunStore) -> dict[str, OpenEnvRunStatus]:
    return {status.run_id: status for status in store.listing().runs}


def expected_after(
    before: dict[str, OpenEnvRunStatus], found: dict[str, OpenEnvRunStatus]
) -> None:
    """Check that each old run is whole, and at most one is new, changed or evicted."""
    gone = set(before) - set(found)
    assert all(before[i].state is RunState.CANCELLED for i in gone)
    assert len(gone) <= 1
    changed = [i for i in found if i in before and found[i] != before[i]]
    assert len(changed) <= 1
    new = set(found) - set(before)
    assert len(new) <= 1
    for i in new:
        assert found[i].state is RunState.QUEUED


def calls_of(directory: Path, change: str) -> int:
    prepared(directory, change)
    disk = Shim()
    using(directory, CHANGES[change], disk=disk)
    return len(disk.calls)


@pytest.mark.parametrize("change", CHANGES)
def test_crash_at_every_call(tmp_path: Path, change: str) -> None:
    total = calls_of(tmp_path / "count", change)
    assert total >= 4
    for number in range(1, total + 1):
        directory = tmp_path / str(number)
        before = prepared(directory, change)
        with pytest.raises(Crash):
            using(directory, CHANGES[change], disk=Shim(number))
        for _ in range(2):
            after = using(directory, survivors)
            expected_after(before, after)
        # whatever was lost, the same request again is one run
        if change == "creation":
            again = using(directory, one_creation)
            found = using(directory, survivors)
            assert set(found) == {*before, again.run_id}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_failure_at_every_call(
    tmp_path: Path, change: str, for_ever: bool, number: int
) -> None:
    total = calls_of(tmp_path / "count", change)
    for place in range(1, total + 1):
        directory = tmp_path / str(place)
        before = prepared(directory, change)

        async def act(store: RunStore, before: Any = before) -> None:
            known = await survivors(store)
            with pytest.raises((OutputUnwritable, RunNotRecorded)) as caught:
                await CHANGES[change](store)
            assert caught.value.details.get("file") or caught.value.hint
            after = await survivors(store)
            # in memory nothing new is there; at most a finished run is forgotten
            assert all(known[i] == after[i] for i in after)
            expected_after(before, after)

        failing = Shim(
            place, lambda: OSError(number, os.strerror(number)), for_ever=for_ever
        )
        using(directory, act, disk=failing)
        left = using(directory, survivors)
        expected_after(before, left)
        if not for_ever:
            assert len(left) <= len(before)  # a refused creation left nothing


def test_record_of_a_refused_run_cannot_bind_its_key_twice(tmp_path: Path) -> None:
    """The disk fails from the rename on, and later works again."""
    failing = Shim(7, lambda: OSError(errno.EIO, "io"), for_ever=True)

    async def act(store: RunStore) -> str:
        for _ in range(2):  # the second fails to withdraw the first
            with pytest.raises(RunNotRecorded):
                await one_creation(store)
        assert len(records(tmp_path)) == 1
        store.files._disk = Disk()
        return (await one_creation(store)).run_id

    created = using(tmp_path, act, disk=failing)
    assert set(records(tmp_path)) == {created}
    assert set(using(tmp_path, survivors)) == {created}


def test_crash_while_restoring(tmp_path: Path) -> None:
    runs = [walked(RunState.COLLECTING), walked(RunState.TRAINING_RUNNING)]
    for number in range(1, 99):
        directory = tmp_path / str(number)
        for status in runs:
            put(directory, status)
        files = RunFiles(directory, Shim(number))
        store = RunStore(files, LIMITS, clock_ms=Clock())
        try:
            anyio.run(store.open)
        except Crash:
            assert files._lock is None
        else:
            files.unlock()
            break
        found = using(directory, survivors)
        assert {status.state for status in found.values()} == {RunState.FAILED}
    assert number == 11


class Flaky(Shim):
    """Fails at any of some calls."""

    def __init__(self, failing: frozenset[int]) -> None:
        super().__init__()
        self.failing = failing

    def call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) in self.failing:
            raise OSError(errno.EIO, "Input/output error")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.sampled_from(["a", "b"]), st.integers(8, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.tuples(st.just("admit")),
        st.tuples(st.just("clock"), st.sampled_from([1, 10_001, -20_000])),
        st.tuples(st.just("restart")),
    ),
    max_size=25,
)


@settings(max_examples=100)
@given(steps=STEPS, failing=st.frozensets(st.integers(1, 60), max_size=25))
def test_flaky_disk_neither_loses_a_run_nor_binds_a_key_twice(
    steps: list[tuple[Any, ...]], failing: frozenset[int]
) -> None:
    """Whatever fails, the next start succeeds, with every unfinished accepted run."""
    clock, disk = Clock(), Flaky(failing)
    accepted: list[str] = []
    with tempfile.TemporaryDirectory() as name:

        async def perform(store: RunStore, what: str, *values: Any) -> None:
            if what == "create":
                key, groups = values
                request = asked(idempotency_key=key, groups=groups)
                created = await store.create(request)
                accepted.append(created.status.run_id)
            elif what == "cancel" and values[0] < len(accepted):
                await store.cancel(accepted[values[0]])
            elif what == "admit":
                await store.admit()
            elif what == "clock":
                clock.now_ms += values[0]

        async def run_steps(store: RunStore) -> set[str]:
            while steps:
                what, *values = steps.pop(0)
                if what == "restart":
                    break
                with suppress(KilnError):
                    await perform(store, what, *values)
            for status in store.ledger.runs.values():
                assert store.find(status.run_id).run_id == status.run_id
            return {
                status.run_id
                for status in store.ledger.runs.values()
                if status.state not in TERMINAL
            }

        while True:
            last = not steps
            unfinished = using(Path(name), run_steps, disk=disk, clock=clock)
            assert unfinished <= set(using(Path(name), survivors, clock=clock))
            if last:
                break
