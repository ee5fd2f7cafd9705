"""The records of runs on disk: ``<adapter_dir>/.openenv/runs/<run-id>/run.json``.

A record is replaced whole: written beside, synced, renamed, its directory synced, so
that after a crash at any instant the old one or the new one is there. A run that was
not accepted leaves no record. One that is retained no more keeps its directory; its
record is renamed, so that no later start takes it for a retained one.

A lock file keeps a second server off the same directory. The system gives it up with
the process that holds it, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from kiln_core import limits
from kiln_core.canonical import compact, pretty
from kiln_core.drive.files import Disk, make_directory, read_regular, replace_file
from kiln_core.errors import (
    Conflict,
    KilnError,
    LimitError,
    OutputUnwritable,
    RunNotRecorded,
)
from kiln_core.lifecycle import TERMINAL
from kiln_core.restoration import RecordedRun, read_run_record
from kiln_core.run import OpenEnvRunStatus

__all__ = ["RunFiles"]

RECORD: Final = "run.json"
FORGOTTEN: Final = "run.forgotten.json"
"""Where a record goes that is retained no more."""
RUN_ID: Final = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
HEADROOM_BYTES: Final = 16 * limits.KIB
"""Kept free in the record of an unfinished run, so that its failure can be told."""
LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class RunFiles:
    """Writes and finds the records of runs; nothing else writes them.

    Args:
        adapter_dir: Where adapters live.
        disk: The system calls.
    """

    def __init__(self, adapter_dir: Path, disk: Disk | None = None) -> None:
        self.root = adapter_dir / ".openenv" / "runs"
        self._disk = disk or Disk()
        self._lock: int | None = None

    def directory(self, run_id: str) -> Path:
        """Return where the files of a run are."""
        return self.root / run_id

    def lock(self) -> None:
        """Make the directory, and keep every other server off it.

        Raises:
            Conflict: Another one has it.
            OutputUnwritable: It cannot be made or locked.
        """
        make_directory(self.root)
        path = self.root.parent / "lock"
        while self._lock is None:
            try:
                descriptor = os.open(path, LOCK_FLAGS, 0o644)
                self._lock = _locked(descriptor, path)
            except OSError as error:
                if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                    raise Conflict(
                        f"another server uses {self.root.parent}",
                        hint="stop it, or serve with another --adapter-dir",
                    ) from error
                raise OutputUnwritable(
                    f"{path} cannot be locked: {error.strerror}", file=str(path)
                ) from error

    def unlock(self) -> None:
        """Let another server have the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def create(self, status: OpenEnvRunStatus) -> None:
        """Write the record of a new run, durably.

        Raises:
            LimitError: It is too large.
            RunNotRecorded: The disk refused; ``details["remains"]`` says whether it
                may hold the record all the same.
        """
        data = _encoded(status)
        directory = self.directory(status.run_id)
        try:
            self._disk.make_directory(directory)
            replace_file(directory / RECORD, data, disk=self._disk)
        except (OSError, OutputUnwritable) as error:
            remains = not self.withdraw(status.run_id)
            raise RunNotRecorded(
                f"the run cannot be recorded: {_reason(error)}", remains=remains
            ) from error

    def withdraw(self, run_id: str) -> bool:
        """Remove the record of a run that was not accepted; say whether it is gone."""
        directory = self.directory(run_id)
        try:
            with suppress(FileNotFoundError):
                self._disk.unlink(directory / RECORD)
            with suppress(FileNotFoundError):
                self._disk.sync_directory(directory)
        except OSError:
            return False
        with suppress(OSError):
            directory.rmdir()
        return True

    def write(self, status: OpenEnvRunStatus) -> None:
        """Replace the record of a run, durably.

        Its directory is made again where it was removed by hand.

        Raises:
            LimitError: It is too large; the old one stays.
            OutputUnwritable: The disk refused; the old one or the new one is there.
        """
        data = _encoded(status)
        directory = self.directory(status.run_id)
        if directory.is_symlink():
            raise OutputUnwritable(
                f"{directory} is a symbolic link", file=str(directory)
            )
        if not directory.is_dir():
            make_directory(self.root)
            try:
                self._disk.make_directory(directory)
            except OSError as error:
                raise OutputUnwritable(
                    f"directory {directory} cannot be made: {error.strerror}",
                    file=str(directory),
                ) from error
        replace_file(directory / RECORD, data, disk=self._disk)

    def forget(self, run_id: str) -> None:
        """Keep a record from being found again; its directory stays.

        Raises:
            OutputUnwritable: The disk refused.
        """
        directory = self.directory(run_id)
        try:
            with suppress(FileNotFoundError, NotADirectoryError):
                self._disk.rename(directory / RECORD, directory / FORGOTTEN)
                self._disk.sync_directory(directory)
        except OSError as error:
            raise OutputUnwritable(
                f"{directory / RECORD} cannot be renamed: {error.strerror}",
                file=str(directory / RECORD),
            ) from error

    def find(self) -> tuple[list[RecordedRun], list[str]]:
        """Return every record there is, and why other files were ignored."""
        found: list[RecordedRun] = []
        ignored: list[str] = []
        for name in sorted(os.listdir(self.root)):
            try:
                record = self._read(name)
            except KilnError as error:
                ignored.append(error.message)
            else:
                found += [record] if record else []
        return found, ignored

    def _read(self, name: str) -> RecordedRun | None:
        """Return one record, None for a directory without one.

        Raises:
            Conflict: The name is no run's, or holds another run.
            KilnError: The file is no record, a link, or too large.
        """
        directory = self.directory(name)
        path = directory / RECORD
        if not RUN_ID.fullmatch(name) or directory.is_symlink():
            raise Conflict(f"{directory} is no directory of a run")
        for staged in directory.glob(".kiln-*.part"):
            with suppress(OSError):
                staged.unlink()
        if directory.is_dir() and not os.path.lexists(path):
            return None
        data = read_regular(path, limits.MAX_RUN_RECORD_BYTES, "the record")
        record = read_run_record(data, f"the record {path}")
        if record.status.run_id != name:
            raise Conflict(f"{path} is the record of another run")
        return record


def _locked(descriptor: int, path: Path) -> int | None:
    """Lock an opened file; return None when it was replaced meanwhile.

    Raises:
        OSError: It is locked by another process, or cannot be.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except FileNotFoundError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _encoded(status: OpenEnvRunStatus) -> bytes:
    """Return the bytes of a record: for people, unless only for programs they fit.

    Raises:
        LimitError: They do not fit at all.
    """
    finished = status.state in TERMINAL
    limit = limits.MAX_RUN_RECORD_BYTES - (0 if finished else HEADROOM_BYTES)
    data = pretty(status).removesuffix(b"\n")
    if len(data) > limit:
        data = compact(status)
    if len(data) > limit:
        raise LimitError(
            f"the record of the run would be over {limit} bytes",
            hint="give smaller reset options or fewer environments",
            limit_bytes=limit,
        )
    return data


def _reason(error: OSError | OutputUnwritable) -> str:
    if isinstance(error, OutputUnwritable):
        return error.message
    return error.strerror or type(error).__name__
