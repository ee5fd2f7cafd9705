"""Files: bounded reading without following links, and atomic publication.

A bundle is published by staging all three files beside their destinations, syncing
each, renaming dataset, then replay manifest, then summary, and syncing the directories.
The summary is the commit mark: a crash at any instant leaves either no summary or a
complete bundle. Replacing a bundle removes its old summary first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from kiln_core import limits
from kiln_core.bundle import Bundle, BundlePaths
from kiln_core.errors import (
    FileUnreadable,
    IrregularFile,
    OutputExists,
    OutputUnwritable,
    UsageError,
)
from kiln_core.receipt import OpenEnvRolloutSummary
from kiln_core.verify import BundleBytes, read_summary

__all__ = [
    "Disk",
    "check_outputs",
    "check_target",
    "locate_bundle",
    "make_directory",
    "publish_bundle",
    "publish_file",
    "read_bundle",
    "read_regular",
    "regular_pieces",
    "replace_file",
    "withdraw",
]

READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
PIECE_BYTES: Final = limits.MIB
CREATE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NO_HARD_LINKS: Final = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
)
"""What file systems without hard links answer."""


class Disk:
    """The system calls of publication, in one place so that tests can fail each."""

    @contextmanager
    def lock(self, directory: Path) -> Iterator[None]:
        """Keep other publications out of a directory, where the system can."""
        with ExitStack() as opened:
            with suppress(OSError):
                descriptor = os.open(directory, DIRECTORY_FLAGS)
                opened.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    def stage(self, path: Path, data: bytes) -> None:
        """Create a new file, write it whole and sync it."""
        descriptor = os.open(path, CREATE_FLAGS, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            self.write(file.fileno(), data)
            self.sync(file.fileno())

    def write(self, descriptor: int, data: bytes) -> None:
        """Write all of ``data``."""
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        """Flush a file to the device."""
        os.fsync(descriptor)

    def make_directory(self, path: Path) -> None:
        """Create a directory, so that its name lasts."""
        path.mkdir()
        self.sync_directory(path.parent)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, replacing the target."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a staged file its name; fails where the name is taken."""
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Flush a directory, so that renames in it last.

        Raises:
            OSError: The device refused.
        """
        descriptor = os.open(path, DIRECTORY_FLAGS)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # EINVAL: this file system cannot sync a directory, and need not
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(descriptor)


def read_regular(path: Path, limit_bytes: int, what: str) -> bytes:
    """Read a regular file that is no symbolic link, its size checked first.

    Args:
        path: The file.
        limit_bytes: Its bound.
        what: Names it in errors.

    Raises:
        FileUnreadable: It is missing or not permitted.
        IrregularFile: It is a link or no regular file, or over the bound.
    """
    # one read of the whole file, so that it is never in memory twice
    return b"".join(_read(path, limit_bytes, what, limit_bytes + 1))


def regular_pieces(
    path: Path, limit_bytes: int, what: str
) -> Callable[[], Iterator[bytes]]:
    """Return what reads a regular file in pieces, from its start at each call.

    Args:
        path: The file.
        limit_bytes: Its bound.
        what: Names it in errors.

    Raises:
        FileUnreadable: It is missing or not permitted.
        IrregularFile: It is a link or no regular file, or over the bound.
    """
    for _ in _read(path, limit_bytes, what, 0):
        pass
    return partial(_read, path, limit_bytes, what, PIECE_BYTES)


def _read(path: Path, limit_bytes: int, what: str, piece_bytes: int) -> Iterator[bytes]:
    """Yield a file in pieces; in none when pieces are empty.

    Raises:
        FileUnreadable: It is missing or not permitted.
        IrregularFile: It is a link or no regular file, or over the bound.
    """
    try:
        descriptor = os.open(path, READ_FLAGS)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise IrregularFile(
                f"{what} {path} is a symbolic link", file=str(path)
            ) from error
        failure = _unreadable(path, what, error)
        raise failure from error
    try:
        yield from _read_opened(descriptor, path, limit_bytes, what, piece_bytes)
    except OSError as error:
        failure = _unreadable(path, what, error)
        raise failure from error
    finally:
        os.close(descriptor)


def _read_opened(
    descriptor: int, path: Path, limit_bytes: int, what: str, piece_bytes: int
) -> Iterator[bytes]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise IrregularFile(f"{what} {path} is no regular file", file=str(path))
    size = status.st_size
    if size <= limit_bytes:
        size = 0
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            while size <= limit_bytes and (piece := file.read(piece_bytes)):
                size += len(piece)
                yield piece
    if size > limit_bytes:
        raise IrregularFile(
            f"{what} {path} is over {limit_bytes} bytes",
            file=str(path),
            limit_bytes=limit_bytes,
        )


def locate_bundle(
    summary_path: Path,
    summary: OpenEnvRolloutSummary,
    dataset: Path | None = None,
    replay: Path | None = None,
) -> tuple[Path, Path]:
    """Return where dataset and replay manifest of a summary are.

    An override wins; else the recorded file name beside the summary; else the recorded
    path.

    Args:
        summary_path: The summary file.
        summary: Its content.
        dataset: Override.
        replay: Override.
    """
    return (
        dataset or _beside(summary_path, summary.output_path),
        replay or _beside(summary_path, summary.replay_output_path),
    )


def read_bundle(
    summary_path: Path,
    dataset: Path | None = None,
    replay: Path | None = None,
    *,
    whole: bool = True,
) -> tuple[BundleBytes, Path, Path]:
    """Read the three files of a bundle.

    Args:
        summary_path: The summary file.
        dataset: Overrides where the dataset is.
        replay: Overrides where the replay manifest is.
        whole: Whether the dataset is read now, or in pieces when it is verified.

    Returns:
        The bytes, and the paths of dataset and replay manifest.

    Raises:
        FileUnreadable: One is missing or not permitted.
        IrregularFile: One is a link, no regular file, or too large.
        InvalidBundle: The summary is no summary, so the others cannot be found.
    """
    limit = limits.MAX_ARTIFACT_BYTES
    summary_bytes = read_regular(summary_path, limit, "summary")
    summary = read_summary(summary_bytes, str(summary_path))
    dataset_path, replay_path = locate_bundle(summary_path, summary, dataset, replay)
    files = BundleBytes(
        summary=summary_bytes,
        dataset=(read_regular if whole else regular_pieces)(
            dataset_path, limit, "dataset"
        ),
        replay=read_regular(replay_path, limit, "replay manifest"),
        summary_name=str(summary_path),
        dataset_name=str(dataset_path),
        replay_name=str(replay_path),
        read=(summary_bytes, summary),
    )
    return files, dataset_path, replay_path


def check_outputs(paths: BundlePaths, *, force: bool) -> None:
    """Check, before anything is spent, that a bundle can be published.

    Raises:
        UsageError: Two paths are one.
        OutputExists: A file is there and ``force`` is not given.
        OutputUnwritable: A directory is missing or not writable.
    """
    targets = [Path(p) for p in (paths.dataset, paths.replay, paths.summary)]
    for target in targets:
        check_target(target, force=force)
    places = {(os.path.realpath(target.parent), target.name) for target in targets}
    if len(places) != len(targets):
        raise UsageError("dataset, replay manifest and summary need three paths")


def make_directory(path: Path) -> None:
    """Make a directory and those above it, unless it is there.

    Raises:
        OutputUnwritable: It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputUnwritable(
            f"directory {path} cannot be made: {error.strerror}", file=str(path)
        ) from error


def publish_bundle(
    bundle: Bundle, paths: BundlePaths, *, force: bool = False, disk: Disk | None = None
) -> None:
    """Write a bundle so that its summary appears last.

    Args:
        bundle: What to write.
        paths: Where; the same paths the summary records.
        force: Whether existing files are replaced.
        disk: The system calls.

    Raises:
        OutputExists: A file is there and ``force`` is not given.
        OutputUnwritable: The disk refused; no partial file is left.
    """
    check_outputs(paths, force=force)
    disk = disk or Disk()
    # Two that replace the same bundle must not end up with files of both.
    with disk.lock(Path(paths.summary).parent):
        _publish(
            [
                (Path(paths.dataset), bundle.dataset),
                (Path(paths.replay), bundle.replay),
                (Path(paths.summary), bundle.summary_bytes),
            ],
            force=force,
            disk=disk,
        )


def publish_file(
    path: Path, data: bytes, *, force: bool = False, disk: Disk | None = None
) -> None:
    """Write one file atomically.

    Raises:
        OutputExists: It is there and ``force`` is not given.
        OutputUnwritable: The disk refused; no partial file is left.
    """
    check_target(path, force=force)
    if force:
        replace_file(path, data, disk=disk)
    else:
        _publish([(path, data)], force=False, disk=disk or Disk())


def replace_file(path: Path, data: bytes, *, disk: Disk | None = None) -> None:
    """Replace a file atomically; readers see the old bytes or the new, whole.

    Raises:
        OutputUnwritable: The disk refused, or cannot say that the new bytes will last.
    """
    disk = disk or Disk()
    staged = _staging_name(path)
    try:
        disk.stage(staged, data)
        disk.rename(staged, path)
        disk.sync_directory(path.parent)
    except BaseException as error:
        _discard([staged], disk)
        if isinstance(error, OSError):
            failure = _unwritable(path, error)
            raise failure from error
        raise


def _publish(files: Sequence[tuple[Path, bytes]], *, force: bool, disk: Disk) -> None:
    staged: list[Path] = []
    placed: list[Path] = []
    target = files[0][0]
    try:
        for target, data in files:
            staged.append(_staging_name(target))
            disk.stage(staged[-1], data)
        if force:
            withdraw(files[-1][0], disk=disk)
        for temporary, (target, _) in zip(staged, files, strict=True):
            linked = _place(temporary, target, force=force, disk=disk)
            placed.append(target)
            if linked:
                disk.unlink(temporary)
            disk.sync_directory(target.parent)
    except BaseException as error:
        # Also when interrupted, so that only a crash leaves staged files. The commit
        # mark goes first; when an interrupt leaves open whether it is set, all stays.
        undecided = len(placed) == len(files) - 1 and not isinstance(error, OSError)
        _discard([*reversed([] if undecided else placed), *staged], disk)
        if isinstance(error, FileExistsError):
            raise OutputExists(f"{target} exists already", file=str(target)) from error
        if isinstance(error, OSError):
            raise _unwritable(target, error) from error
        raise


def _discard(paths: Sequence[Path], disk: Disk) -> None:
    for path in paths:
        with suppress(OSError):
            disk.unlink(path)


def withdraw(mark: Path, *, disk: Disk | None = None) -> None:
    """Remove an old commit mark before what it stands for changes.

    Raises:
        OutputUnwritable: The disk refused.
    """
    disk = disk or Disk()
    try:
        if os.path.lexists(mark):
            disk.unlink(mark)
            disk.sync_directory(mark.parent)
    except OSError as error:
        failure = _unwritable(mark, error)
        raise failure from error


def _place(temporary: Path, target: Path, *, force: bool, disk: Disk) -> bool:
    """Give a staged file its name; return whether it still has its first one too.

    Raises:
        OSError: The name is taken, or the disk refused.
    """
    if not force:
        try:
            disk.link(temporary, target)
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            if os.path.lexists(target):
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        else:
            return True
    disk.rename(temporary, target)
    return False


def check_target(target: Path, *, force: bool) -> None:
    """Check, before anything is spent, that a file can be published.

    Raises:
        OutputExists: It is there and ``force`` is not given.
        OutputUnwritable: Its directory is missing or not writable.
    """
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        _check_directory(target)
        return
    except (OSError, ValueError) as error:
        failure = _unwritable(target, error)
        raise failure from error
    # Replacing a link replaces the link itself; a device must not be replaced.
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise OutputUnwritable(f"{target} is {kind}", file=str(target))
    if not force:
        raise OutputExists(f"{target} exists already", file=str(target))
    _check_directory(target)


def _check_directory(target: Path) -> None:
    if not target.parent.is_dir():
        raise OutputUnwritable(
            f"directory {target.parent} does not exist", file=str(target)
        )
    # it is opened too, to be synced
    if not os.access(target.parent, os.R_OK | os.W_OK | os.X_OK):
        raise OutputUnwritable(
            f"directory {target.parent} is not writable", file=str(target)
        )


def _staging_name(target: Path) -> Path:
    # not made from the target's name, which may be as long as names can be
    return target.parent / f".kiln-{secrets.token_hex(8)}.part"


def _unreadable(path: Path, what: str, error: Exception) -> FileUnreadable:
    return FileUnreadable(
        f"{what} {path} cannot be read: {_reason(error)}",
        hint="check the path and its permissions",
        file=str(path),
    )


def _unwritable(path: Path, error: Exception) -> OutputUnwritable:
    return OutputUnwritable(
        f"{path} cannot be written: {_reason(error)}", file=str(path)
    )


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _beside(summary_path: Path, recorded: str) -> Path:
    beside = summary_path.parent / Path(recorded).name
    return beside if os.path.lexists(beside) else Path(recorded)
