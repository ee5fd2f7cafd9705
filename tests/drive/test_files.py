"""`kiln_core/drive/files.py`: what a crash, a full disk or a rival can leave behind."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import anyio
import msgspec
import pytest

from kiln_core.bundle import Bundle, BundlePaths
from kiln_core.drive.collect import collect
from kiln_core.drive.files import (
    Disk,
    check_outputs,
    locate_bundle,
    make_directory,
    publish_bundle,
    publish_file,
    read_bundle,
    read_regular,
    replace_file,
)
from kiln_core.errors import (
    FileUnreadable,
    InvalidBundle,
    IrregularFile,
    KilnError,
    OutputExists,
    OutputUnwritable,
    UsageError,
)
from kiln_core.verify import verify_bundle
from tests.drive.collection import QUICK, adds, collection
from tests.simulators.environment import Simulator

NAMES = (
    "openenv.rollouts.jsonl",
    "openenv.replay.json",
    "openenv.rollout-summary.json",
)


def collected(seed: int) -> Bundle:
    async def run() -> Bundle:
        async with Simulator().serving() as server:
            request = collection(server.url, seed_start=seed)
            return await collect(request, adds(1, 3), times=QUICK)

    return anyio.run(run)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return collected(0)


@pytest.fixture(scope="module")
def other() -> Bundle:
    return collected(100)


@pytest.fixture(autouse=True)
def closes_every_descriptor() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def paths(directory: Path) -> BundlePaths:
    dataset, replay, summary = (directory / name for name in NAMES)
    return BundlePaths(dataset=dataset, replay=replay, summary=summary)


def summary_in(directory: Path) -> Path:
    return directory / NAMES[2]


def published(directory: Path) -> Bundle | None:
    """Return which bundle is there, None without a summary; verify it."""
    summary = summary_in(directory)
    if not os.path.lexists(summary):
        return None
    files, _, _ = read_bundle(summary)
    verified = verify_bundle(files)
    return Bundle(dataset=files.dataset, replay=files.replay, summary=verified.summary)


def leftovers(directory: Path) -> list[str]:
    return sorted(set(os.listdir(directory)) - set(NAMES))


def shown(error: KilnError) -> KilnError:
    """Return an error that names its file and says what to do."""
    assert error.hint
    assert error.details["file"] in error.message or "directory" in error.message
    return error


# Reading


def read(path: Path, limit: int = 10) -> bytes:
    return read_regular(path, limit, "dataset")


def test_regular_file_of_exactly_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    assert read(path) == b"0123456789"


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    assert read(tmp_path / "f") == b""


def make_link(path: Path) -> None:
    (path.parent / "target").write_bytes(b"secret")
    path.symlink_to("target")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


IRREGULAR: dict[str, tuple[Callable[[Path], object], str]] = {
    "symbolic link": (make_link, "is a symbolic link"),
    "dangling link": (lambda p: p.symlink_to("nowhere"), "is a symbolic link"),
    "link to itself": (lambda p: p.symlink_to(p.name), "is a symbolic link"),
    "directory": (Path.mkdir, "is no regular file"),
    "fifo": (os.mkfifo, "is no regular file"),
    "oversized": (lambda p: p.write_bytes(b"x" * 11), "is over 10 bytes"),
    "huge and sparse": (
        lambda p: (p.touch(), os.truncate(p, 2**40)),
        "is over 10 bytes",
    ),
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_irregular_file_is_refused(tmp_path: Path, kind: str) -> None:
    make, message = IRREGULAR[kind]
    path = tmp_path / "f"
    make(path)
    with pytest.raises(IrregularFile, match=message) as caught:
        read(path)
    assert caught.value.details["file"] == str(path)


def test_device_is_refused() -> None:
    with pytest.raises(IrregularFile, match="no regular file"):
        read(Path("/dev/zero"))


UNREADABLE: dict[str, Callable[[Path], Path]] = {
    "missing": lambda d: d / "f",
    "below a missing directory": lambda d: d / "no" / "f",
    "below a file": lambda d: (d / "file").touch() or d / "file" / "f",
    "name too long": lambda d: d / ("x" * 300),
    "NUL in the name": lambda d: d / "a\0b",
    "unix socket": lambda d: make_socket(d / "s") or d / "s",
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_file_is_a_typed_failure(tmp_path: Path, kind: str) -> None:
    with pytest.raises(FileUnreadable, match=r"dataset .* cannot be read") as caught:
        read(UNREADABLE[kind](tmp_path))
    shown(caught.value)


def test_forbidden_file_is_a_typed_failure(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is forbidden to root")
    path = tmp_path / "f"
    path.touch(0o000)
    with pytest.raises(FileUnreadable, match="Permission denied"):
        read(path)


def test_device_that_fails_while_reading(tmp_path: Path) -> None:
    """/proc/self/mem is regular, opens, and answers a read with EIO."""
    with pytest.raises(FileUnreadable, match="Input/output error"):
        read_regular(Path("/proc/self/mem"), 10, "dataset")


# Finding the files of a bundle


def test_bundle_that_was_moved(tmp_path: Path, bundle: Bundle) -> None:
    """The recorded name beside the summary wins over the recorded path."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    placed = paths(first)
    summary = msgspec.structs.replace(
        bundle.summary,
        output_path=str(placed.dataset),
        replay_output_path=str(placed.replay),
    )
    moved = msgspec.structs.replace(bundle, summary=summary)
    publish_bundle(moved, placed)
    first.rename(second)
    _, dataset, replay = read_bundle(summary_in(second))
    assert (dataset, replay) == (second / NAMES[0], second / NAMES[1])
    verify_bundle(read_bundle(summary_in(second))[0])


def test_override_wins_then_beside_then_recorded(
    tmp_path: Path, bundle: Bundle
) -> None:
    recorded = tmp_path / "elsewhere" / "data.jsonl"
    summary = msgspec.structs.replace(bundle.summary, output_path=str(recorded))
    place = tmp_path / "summary.json"
    assert locate_bundle(place, summary)[0] == recorded
    (tmp_path / "data.jsonl").touch()
    assert locate_bundle(place, summary)[0] == tmp_path / "data.jsonl"
    override = tmp_path / "override"
    assert locate_bundle(place, summary, dataset=override)[0] == override


def test_link_beside_the_summary_is_refused_not_passed_over(
    tmp_path: Path, bundle: Bundle
) -> None:
    publish_bundle(bundle, paths(tmp_path))
    (tmp_path / NAMES[0]).rename(tmp_path / "real")
    (tmp_path / NAMES[0]).symlink_to("real")
    with pytest.raises(IrregularFile, match="symbolic link"):
        read_bundle(summary_in(tmp_path))


@pytest.mark.parametrize(
    "recorded", ["", ".", "..", "/", "a\0b", "x" * 300, "/dev/zero", "/proc/self/mem"]
)
def test_hostile_recorded_path_is_a_typed_failure(
    tmp_path: Path, bundle: Bundle, recorded: str
) -> None:
    hostile = msgspec.structs.replace(
        bundle,
        summary=msgspec.structs.replace(bundle.summary, output_path=recorded),
    )
    summary_in(tmp_path).write_bytes(hostile.summary_bytes)
    with pytest.raises((FileUnreadable, IrregularFile, InvalidBundle)):
        read_bundle(summary_in(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff", b'{"schema":"kiln.other"}', b"nonsense"]
)
def test_summary_that_is_none(tmp_path: Path, content: bytes) -> None:
    summary_in(tmp_path).write_bytes(content)
    with pytest.raises(InvalidBundle) as caught:
        read_bundle(summary_in(tmp_path))
    assert caught.value.details["file"] == str(summary_in(tmp_path))


# Checking outputs before anything is spent


def test_free_places_pass(tmp_path: Path) -> None:
    check_outputs(paths(tmp_path), force=False)
    check_outputs(paths(tmp_path), force=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", NAMES)
def test_existing_file_needs_force(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(OutputExists, match="exists already") as caught:
        check_outputs(paths(tmp_path), force=False)
    assert "--force" in shown(caught.value).hint
    check_outputs(paths(tmp_path), force=True)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Path.mkdir, "is a directory"),
        (os.mkfifo, "is no regular file"),
    ],
)
def test_what_must_not_be_replaced(
    tmp_path: Path, make: Callable[[Path], object], message: str, force: bool
) -> None:
    make(summary_in(tmp_path))
    with pytest.raises(OutputUnwritable, match=message) as caught:
        check_outputs(paths(tmp_path), force=force)
    shown(caught.value)


def test_device_is_never_replaced(tmp_path: Path) -> None:
    place = msgspec.structs.replace(paths(tmp_path), dataset=Path("/dev/null"))
    with pytest.raises(OutputUnwritable, match="no regular file"):
        check_outputs(place, force=True)


@pytest.mark.parametrize("force", [False, True])
def test_link_is_replaced_itself_or_not_at_all(
    tmp_path: Path, bundle: Bundle, force: bool
) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    summary_in(tmp_path).symlink_to(target)
    if force:
        publish_bundle(bundle, paths(tmp_path), force=True)
        assert published(tmp_path) is not None
        assert not summary_in(tmp_path).is_symlink()
    else:
        with pytest.raises(OutputExists):
            publish_bundle(bundle, paths(tmp_path))
    assert target.read_bytes() == b"precious"


PLACES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing directory": (lambda d: d / "no", "does not exist"),
    "file as directory": (
        lambda d: (d / "file").touch() or d / "file",
        "Not a directory",
    ),
    "name too long": (lambda d: d / ("x" * 300), "File name too long"),
    "NUL in the name": (lambda d: d / "a\0b", "null"),
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("force", [False, True])
def test_unusable_place(tmp_path: Path, kind: str, force: bool) -> None:
    make, message = PLACES[kind]
    with pytest.raises(OutputUnwritable, match=message) as caught:
        check_outputs(paths(make(tmp_path)), force=force)
    shown(caught.value)


def test_unwritable_directory(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is forbidden to root")
    tmp_path.chmod(0o500)
    with pytest.raises(OutputUnwritable, match="not writable"):
        check_outputs(paths(tmp_path), force=False)


def test_three_files_need_three_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path, target_is_directory=True)
    same = tmp_path / "a"
    for again in (
        same,
        tmp_path / "sub" / ".." / "a",
        tmp_path / "alias" / "a",
        tmp_path / "." / "a",
    ):
        place = BundlePaths(dataset=same, replay=tmp_path / "b", summary=again)
        with pytest.raises(UsageError, match="three paths"):
            check_outputs(place, force=True)


def test_relative_and_absolute_path_of_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = BundlePaths(dataset=Path("a"), replay=tmp_path / "a", summary=Path("s"))
    with pytest.raises(UsageError, match="three paths"):
        check_outputs(place, force=True)


@pytest.mark.parametrize("length", [200, 255])
def test_name_as_long_as_names_can_be(
    tmp_path: Path, bundle: Bundle, length: int
) -> None:
    """What the check lets pass can be published: staging needs no longer name."""
    place = BundlePaths(
        dataset=tmp_path / ("d" * length),
        replay=tmp_path / ("r" * length),
        summary=tmp_path / ("s" * length),
    )
    check_outputs(place, force=False)
    publish_bundle(bundle, place)
    publish_bundle(bundle, place, force=True)
    replace_file(Path(place.summary), bundle.summary_bytes)


def test_directory_is_made(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(OutputUnwritable, match="cannot be made") as caught:
        make_directory(tmp_path / "file" / "c")
    shown(caught.value)


# Publishing


class Crash(BaseException):
    """The machine stops: nothing runs after it, no clean-up either."""


class ScriptedDisk(Disk):
    """Counts the system calls, writes them down, and lets one of them fail.

    Args:
        fail_at: Which call, from 1.
        failure: What it raises; a `Crash` makes every later call raise too.
        for_ever: Whether every later call fails as well.
        then: Runs instead of a failure, before the call.
    """

    def __init__(
        self,
        fail_at: int = 0,
        failure: Callable[[], BaseException] = Crash,
        *,
        for_ever: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        self.fail_at = fail_at
        self.failure = failure
        self.for_ever = for_ever
        self.then = then
        self.calls: list[str] = []

    def call(self, name: str) -> None:
        self.calls.append(name)
        number = len(self.calls)
        if self.then is not None:
            if number == self.fail_at:
                self.then()
        elif number == self.fail_at or (
            0 < self.fail_at < number and (self.for_ever or self.failure is Crash)
        ):
            raise self.failure()

    def lock(self, directory: Path) -> AbstractContextManager[None]:  # type: ignore[override]  # same protocol
        return nullcontext()

    def stage(self, path: Path, data: bytes) -> None:
        self.call("create")
        super().stage(path, data)

    def write(self, descriptor: int, data: bytes) -> None:
        half = len(data) // 2
        super().write(descriptor, data[:half])
        self.call("write")
        super().write(descriptor, data[half:])

    def sync(self, descriptor: int) -> None:
        self.call("sync")
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self.call(f"rename {target.name}")
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self.call(f"link {target.name}")
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self.call(f"unlink {path.name if path.name in NAMES else 'staged'}")
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self.call("sync directory")
        super().sync_directory(path)


STAGED = ["create", "write", "sync"] * 3


def test_order_of_a_fresh_publication(tmp_path: Path, bundle: Bundle) -> None:
    """All are durable before the first has its name, and the summary is last."""
    disk = ScriptedDisk()
    publish_bundle(bundle, paths(tmp_path), disk=disk)
    named = [[f"link {name}", "unlink staged", "sync directory"] for name in NAMES]
    assert disk.calls == STAGED + [call for calls in named for call in calls]
    assert published(tmp_path) == bundle
    assert leftovers(tmp_path) == []


def test_order_of_a_replacement(tmp_path: Path, bundle: Bundle, other: Bundle) -> None:
    """The old commit mark goes before anything it stands for."""
    publish_bundle(bundle, paths(tmp_path))
    disk = ScriptedDisk()
    publish_bundle(other, paths(tmp_path), force=True, disk=disk)
    named = [[f"rename {name}", "sync directory"] for name in NAMES]
    assert disk.calls == [
        *STAGED,
        f"unlink {NAMES[2]}",
        "sync directory",
        *(call for calls in named for call in calls),
    ]
    assert published(tmp_path) == other
    assert leftovers(tmp_path) == []


def test_files_of_a_bundle_may_lie_apart(tmp_path: Path, bundle: Bundle) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    place = BundlePaths(
        dataset=tmp_path / "a" / "d",
        replay=tmp_path / "b" / "r",
        summary=tmp_path / "c" / "s",
    )
    synced: list[Path] = []

    class Watching(Disk):
        def sync_directory(self, path: Path) -> None:
            synced.append(path)
            super().sync_directory(path)

    publish_bundle(bundle, place, disk=Watching())
    assert synced == [tmp_path / "a", tmp_path / "b", tmp_path / "c"]


def test_files_are_readable_by_others_as_the_umask_says(
    tmp_path: Path, bundle: Bundle
) -> None:
    old = os.umask(0o027)
    try:
        publish_bundle(bundle, paths(tmp_path))
    finally:
        os.umask(old)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in NAMES}
    assert modes == {0o640}


def calls_of(tmp_path: Path, bundle: Bundle, *, force: bool) -> int:
    """Return how many system calls a publication takes that succeeds."""
    tmp_path.mkdir()
    if force:
        publish_bundle(bundle, paths(tmp_path))
    disk = ScriptedDisk()
    publish_bundle(bundle, paths(tmp_path), force=force, disk=disk)
    return len(disk.calls)


def every_call(
    tmp_path: Path, bundle: Bundle, *, force: bool
) -> Iterator[tuple[int, Path]]:
    """Yield each call's number with a directory, with an old bundle under force."""
    total = calls_of(tmp_path / "dry", bundle, force=force)
    assert total == (9 + 9 if not force else 9 + 2 + 6)
    for number in range(1, total + 1):
        directory = tmp_path / str(number)
        directory.mkdir()
        if force:
            publish_bundle(bundle, paths(directory))
        yield number, directory


@pytest.mark.parametrize("force", [False, True])
def test_crash_at_any_call(
    tmp_path: Path, bundle: Bundle, other: Bundle, force: bool
) -> None:
    """Either no summary or a complete bundle: the old one, or the new one."""
    seen: list[str] = []
    for number, directory in every_call(tmp_path, bundle, force=force):
        with pytest.raises(Crash):
            publish_bundle(
                other, paths(directory), force=force, disk=ScriptedDisk(number)
            )
        found = published(directory)
        seen.append(
            {None: "none", bundle.dataset: "old"}.get(found and found.dataset, "new")
        )
        assert all(name.endswith(".part") for name in leftovers(directory))
        # And a second run repairs it.
        publish_bundle(other, paths(directory), force=True)
        assert published(directory) == other
    assert seen == sorted(seen, key=["old", "none", "new"].index)
    assert seen[-1] == "new"
    assert ("old" in seen) == force


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_disk_that_refuses_any_call_once(
    tmp_path: Path, bundle: Bundle, other: Bundle, force: bool, code: int
) -> None:
    """A typed failure, no file of it, no staged file."""
    for number, directory in every_call(tmp_path, bundle, force=force):
        disk = ScriptedDisk(number, lambda: OSError(code, os.strerror(code)))
        with pytest.raises(OutputUnwritable, match=os.strerror(code)) as caught:
            publish_bundle(other, paths(directory), force=force, disk=disk)
        shown(caught.value)
        assert published(directory) in (None, bundle)
        assert leftovers(directory) == []
        if not force:
            assert os.listdir(directory) == []
        elif "rename" not in "".join(disk.calls[: number - 1]):
            assert (directory / NAMES[0]).read_bytes() == bundle.dataset


@pytest.mark.parametrize("force", [False, True])
def test_disk_that_refuses_for_ever(
    tmp_path: Path, bundle: Bundle, other: Bundle, force: bool
) -> None:
    """Clean-up fails too; still never a summary without its files."""
    for number, directory in every_call(tmp_path, bundle, force=force):
        disk = ScriptedDisk(number, lambda: OSError(errno.EIO, "no"), for_ever=True)
        with pytest.raises(OutputUnwritable):
            publish_bundle(other, paths(directory), force=force, disk=disk)
        assert published(directory) in (None, bundle, other)


@pytest.mark.parametrize("force", [False, True])
def test_crash_while_cleaning_up(
    tmp_path: Path, bundle: Bundle, other: Bundle, force: bool
) -> None:
    """The last sync fails, and the machine stops at each step of the clean-up."""
    total = calls_of(tmp_path / "dry", bundle, force=force)

    class Twice(ScriptedDisk):
        def call(self, name: str) -> None:
            if len(self.calls) + 1 == total:
                self.calls.append(name)
                raise OSError(errno.EIO, "no")
            super().call(name)

    for number in range(total + 1, total + 7):
        directory = tmp_path / str(number)
        directory.mkdir()
        if force:
            publish_bundle(bundle, paths(directory))
        disk = Twice(number)
        with pytest.raises(Crash):
            publish_bundle(other, paths(directory), force=force, disk=disk)
        assert published(directory) in (None, other)
        if number > total + 1:
            assert disk.calls[total] == f"unlink {NAMES[2]}"


@pytest.mark.parametrize("force", [False, True])
def test_interrupt_at_any_call(
    tmp_path: Path, bundle: Bundle, other: Bundle, force: bool
) -> None:
    """Ctrl-C is no crash: nothing staged is left."""
    for number, directory in every_call(tmp_path, bundle, force=force):
        disk = ScriptedDisk(number, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            publish_bundle(other, paths(directory), force=force, disk=disk)
        assert published(directory) in (None, bundle, other)
        assert leftovers(directory) == []


def test_interrupt_right_after_the_commit(tmp_path: Path, other: Bundle) -> None:
    class Late(Disk):
        def link(self, source: Path, target: Path) -> None:
            super().link(source, target)
            if target.name == NAMES[2]:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish_bundle(other, paths(tmp_path), disk=Late())
    assert published(tmp_path) == other
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK]
)
def test_file_system_without_hard_links(
    tmp_path: Path, bundle: Bundle, other: Bundle, code: int
) -> None:
    class Fat(Disk):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(code, os.strerror(code))

    publish_bundle(bundle, paths(tmp_path), disk=Fat())
    assert published(tmp_path) == bundle
    assert leftovers(tmp_path) == []
    with pytest.raises(OutputExists):
        publish_bundle(other, paths(tmp_path), disk=Fat())
    summary_in(tmp_path).unlink()
    (tmp_path / NAMES[0]).unlink()

    class Racing(Fat):
        def stage(self, path: Path, data: bytes) -> None:
            super().stage(path, data)
            (tmp_path / NAMES[0]).write_bytes(b"a rival's")

    (tmp_path / NAMES[1]).unlink()
    with pytest.raises(OutputExists):
        publish_bundle(other, paths(tmp_path), disk=Racing())
    assert (tmp_path / NAMES[0]).read_bytes() == b"a rival's"
    assert leftovers(tmp_path) == []


def test_directory_that_cannot_be_synced_is_no_failure(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    publish_bundle(bundle, paths(tmp_path))
    assert published(tmp_path) == bundle


def test_short_writes_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:7]))
    publish_file(tmp_path / "f", b"0123456789" * 10)
    assert (tmp_path / "f").read_bytes() == b"0123456789" * 10


# Rivals


def test_rival_at_any_call(tmp_path: Path, bundle: Bundle, other: Bundle) -> None:
    """Another process publishes everything between two calls: exactly one wins."""
    winners = set()
    for number, directory in every_call(tmp_path, bundle, force=False):
        outcome: list[str] = []

        def rival(place: Path = directory, outcome: list[str] = outcome) -> None:
            try:
                publish_bundle(other, paths(place), disk=ScriptedDisk())
            except OutputExists:
                outcome.append("rival lost")
            else:
                outcome.append("rival won")

        try:
            publish_bundle(
                bundle, paths(directory), disk=ScriptedDisk(number, then=rival)
            )
        except OutputExists as error:
            assert outcome == ["rival won"]
            shown(error)
            assert published(directory) == other
        else:
            assert outcome == ["rival lost"]
            assert published(directory) == bundle
        winners.add(outcome[0])
        assert leftovers(directory) == []
    assert winners == {"rival won", "rival lost"}


def test_rival_with_force_waits_for_its_turn(
    tmp_path: Path, bundle: Bundle, other: Bundle
) -> None:
    """Else it would finish in between, and lose half of its files again."""
    rival = threading.Thread(
        target=publish_bundle, args=(other, paths(tmp_path)), kwargs={"force": True}
    )

    class Slow(Disk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if target.name == NAMES[0]:
                rival.start()
                rival.join(0.2)
                assert rival.is_alive()

    publish_bundle(bundle, paths(tmp_path), force=True, disk=Slow())
    rival.join()
    assert published(tmp_path) == other
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("force", [False, True])
def test_rivals_at_once_leave_one_bundle(
    tmp_path: Path, bundle: Bundle, other: Bundle, force: bool
) -> None:
    """With --force too: never the dataset of one beside the summary of the other."""
    for round_number in range(6):
        directory = tmp_path / str(round_number)
        directory.mkdir()
        ready = threading.Barrier(4)
        lost: list[KilnError] = []

        def run(
            mine: Bundle,
            place: Path = directory,
            ready: threading.Barrier = ready,
            lost: list[KilnError] = lost,
        ) -> None:
            ready.wait()
            try:
                publish_bundle(mine, paths(place), force=force)
            except OutputExists as error:
                lost.append(error)

        threads = [
            threading.Thread(target=run, args=(mine,))
            for mine in (bundle, other, bundle, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert published(directory) in (bundle, other)
        assert leftovers(directory) == []
        assert len(lost) == (0 if force else 3)


# Single files


def test_file_is_published_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "f"
    publish_file(path, b"1")
    with pytest.raises(OutputExists):
        publish_file(path, b"2")
    assert path.read_bytes() == b"1"
    publish_file(path, b"2", force=True)
    assert path.read_bytes() == b"2"
    replace_file(path, b"3")
    assert path.read_bytes() == b"3"
    assert os.listdir(tmp_path) == ["f"]


def replaced_by(kind: str, path: Path, disk: Disk) -> None:
    if kind == "replace":
        replace_file(path, b"new", disk=disk)
    else:
        publish_file(path, b"new", force=True, disk=disk)


@pytest.mark.parametrize("kind", ["replace", "publish with force"])
def test_order_of_a_file_replacement(tmp_path: Path, kind: str) -> None:
    (tmp_path / "f").write_bytes(b"old")
    disk = ScriptedDisk()
    replaced_by(kind, tmp_path / "f", disk)
    assert disk.calls == ["create", "write", "sync", "rename f", "sync directory"]


@pytest.mark.parametrize("kind", ["replace", "publish with force"])
@pytest.mark.parametrize(
    "failure", [Crash, KeyboardInterrupt, lambda: OSError(errno.ENOSPC, "full")]
)
def test_failed_replacement_leaves_the_old_file_or_the_new(
    tmp_path: Path, kind: str, failure: Callable[[], BaseException]
) -> None:
    for number in range(1, 6):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "f").write_bytes(b"old")
        with pytest.raises((Crash, KeyboardInterrupt, OutputUnwritable)):
            replaced_by(kind, directory / "f", ScriptedDisk(number, failure))
        expected = b"old" if number < 5 else b"new"
        assert (directory / "f").read_bytes() == expected
        if failure is not Crash:
            assert os.listdir(directory) == ["f"]


def test_replacement_in_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(OutputUnwritable, match="No such file") as caught:
        replace_file(tmp_path / "no" / "f", b"x")
    shown(caught.value)
