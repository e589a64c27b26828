"""The files of a launch: made, followed, pruned."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import pickle
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.engines.growing_file import GrowingFile
from nblaunch.errors import StartError
from nblaunch.launch.output import log_files
from nblaunch.launch.output.log_files import (
    LaunchFiles,
    Piece,
    RankLogs,
    Spool,
    Tail,
    is_shared,
    last_lines,
    objection,
    prune,
    state_root,
)
from nblaunch.machine import processes


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBLAUNCH_STATE_DIR", str(tmp_path / "launches"))
    return state_root()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank0.out"


@pytest.fixture
def tail(log: Path) -> Iterator[Tail]:
    tail = Tail(log)
    yield tail
    tail.close()


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def past_launches(count: int, size: int = 0) -> list[Path]:
    made = []
    for number in range(count):
        files = LaunchFiles.create(f"id{number}")
        append(files.out(0), b"x" * size)
        files.close()
        made.append(files.directory)
    return made


def descriptor_of(files: LaunchFiles) -> int:
    """The descriptor of a launch's lock."""
    held = None if files._hold is None else files._hold.peek()
    assert held is not None
    return int(held[2][0])


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process knows no more of its launches than another kernel does."""
    monkeypatch.setattr(log_files, "_in_use", weakref.WeakValueDictionary())


# ------------------------------------------------------------------ directories
def test_the_state_root_is_this_users_alone(root: Path) -> None:
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert state_root() == root


def test_the_state_root_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NBLAUNCH_STATE_DIR", "here")
    assert state_root() == tmp_path / "here"


def test_without_the_variable_the_state_root_is_the_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBLAUNCH_STATE_DIR", raising=False)
    monkeypatch.setattr(platformdirs, "user_state_path", lambda name: tmp_path / name)
    assert state_root() == tmp_path / "nblaunch" / "launches"


@pytest.fixture
def _no_home(tmp_path: Path) -> Iterator[None]:
    """A user whose state directory cannot be made, and temporary files of the test's own."""
    (tmp_path / "file").touch()
    with pytest.MonkeyPatch.context() as patch:  # undone before it is looked for temporary files that are left
        patch.delenv("NBLAUNCH_STATE_DIR", raising=False)
        patch.setattr(platformdirs, "user_state_path", lambda name: tmp_path / "file" / name)
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        patch.setattr(log_files, "_told_of_temporary", False)
        yield


@pytest.mark.usefixtures("_no_home")
def test_without_a_home_the_state_root_is_a_temporary_one_and_that_is_said_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="logs of launches go to .*: set NBLAUNCH_STATE_DIR"):
        root = state_root()
    assert root == state_root() == tmp_path / f"nblaunch-{os.getuid()}"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@pytest.mark.usefixtures("_no_home")
@pytest.mark.parametrize("kind", ["open to all", "a link"])
def test_a_temporary_root_that_others_may_have_made_is_refused(tmp_path: Path, kind: str) -> None:
    root = tmp_path / f"nblaunch-{os.getuid()}"
    if kind == "a link":
        root.symlink_to(tmp_path)
    else:
        root.mkdir()
        root.chmod(0o777)
    said = "it is not a directory" if kind == "a link" else r"other users can write to it \(mode 0777; `chmod go-w`"
    with pytest.raises(StartError, match=rf"{said}.*: set NBLAUNCH_STATE_DIR to a directory of"):
        state_root()


# ------------------------------------------------------------------ other users
OURS, THEIRS = 1000, 1001


def status(mode: int, user: int = OURS, group: int = OURS) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, user, group, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (status(stat.S_IFDIR | 0o700), ""),
        (status(stat.S_IFDIR | 0o755), ""),
        (status(stat.S_IFDIR | 0o755, user=0), ""),
        (status(stat.S_IFDIR | 0o700, user=THEIRS), "it belongs to another user (uid 1001)"),
        (status(stat.S_IFDIR | 0o1777, user=THEIRS), "it belongs to another user (uid 1001)"),
        (status(stat.S_IFDIR | 0o777), "other users can write to it (mode 0777;"),
        (status(stat.S_IFDIR | 0o777, user=0), "other users can write to it (mode 0777;"),
        (status(stat.S_IFDIR | 0o770, group=50), "other users can write to it (mode 0770;"),
        (status(stat.S_IFDIR | 0o770), ""),
        (status(stat.S_IFLNK | 0o777), "it is not a directory"),
        (status(stat.S_IFREG | 0o600), "it is not a directory"),
    ],
)
def test_a_directory_that_another_user_can_change_is_objected_to(found: os.stat_result, said: str) -> None:
    problem = objection(found, OURS, own_group=OURS)
    assert problem.startswith(said)
    assert bool(problem) == bool(said)


@pytest.mark.parametrize(
    ("found", "shared"),
    [
        (status(stat.S_IFDIR | 0o1777, user=0), True),
        (status(stat.S_IFDIR | 0o1777), True),
        (status(stat.S_IFDIR | 0o1777, user=THEIRS), False),  # its owner can remove what is ours
        (status(stat.S_IFDIR | 0o777, user=0), False),
        (status(stat.S_IFDIR | 0o1700), False),
    ],
)
def test_a_directory_is_shared_where_nobody_can_touch_anothers_files(found: os.stat_result, shared: bool) -> None:
    assert is_shared(found, OURS) == shared


def be_somebody_else(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """From here on these are another user's: really, where root runs the tests."""
    if os.getuid() == 0:
        for path in paths:
            os.chown(path, 65534, 65534, follow_symlinks=False)
    else:
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)


def test_a_root_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_somebody_else(monkeypatch, root)
    with pytest.raises(StartError, match=r"it belongs to another user \(uid \d+\).*: set NBLAUNCH_STATE_DIR to a dir"):
        state_root()
    with pytest.raises(StartError, match="it belongs to another user"):
        LaunchFiles.create("abc")
    assert list(root.iterdir()) == []


def test_a_link_of_another_user_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    monkeypatch.setenv("NBLAUNCH_STATE_DIR", str(link))
    assert state_root() == link  # our own may lead to another disk
    be_somebody_else(monkeypatch, link)
    with pytest.raises(StartError, match="it belongs to another user"):
        state_root()


def test_a_root_that_others_can_write_to_is_refused_until_it_is_ours_alone(root: Path) -> None:
    root.chmod(0o777)
    with pytest.raises(StartError, match=r"other users can write to it \(mode 0777; `chmod go-w`"):
        state_root()
    root.chmod(0o755)
    assert state_root() == root


def test_in_a_root_that_all_users_share_each_has_a_directory_of_their_own(root: Path) -> None:
    root.chmod(0o1777)
    own = root / f"nblaunch-{os.getuid()}"
    assert state_root() == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    made = past_launches(3)
    prune(keep=1)
    assert sorted(own.iterdir()) == made[2:]
    own.rename(root / "away")
    own.symlink_to(root / "away")
    with pytest.raises(StartError, match="it is not a directory"):
        state_root()


def test_the_launches_of_other_users_are_not_counted_and_not_touched(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = past_launches(3, size=1000)
    be_somebody_else(monkeypatch, *theirs)
    prune(keep=0, most_bytes=500)
    assert sorted(root.iterdir()) == theirs


def test_a_log_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "rank0.out").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        processes.open_log(str(tmp_path / "rank0.out"))
    (tmp_path / "live").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        log_files._lock(tmp_path)


def test_a_log_that_there_is_no_room_for_is_a_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = os.open

    def no_room(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", no_room)
    log = processes.open_log(str(tmp_path / "rank0.out"))
    with pytest.raises(OSError, match="No space left on device"):
        os.write(log, b"x")
    os.close(log)


# ------------------------------------------------------------------ directories


def test_a_state_root_of_the_users_that_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NBLAUNCH_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(StartError, match=r"^NBLAUNCH_STATE_DIR='.*file' cannot hold the logs of launches: .*exists"):
        state_root()


def test_what_cannot_be_read_is_no_reason_not_to_launch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's launch, in a directory that several share."""
    first, *_ = past_launches(3, size=10)

    def refuse(directory: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "not yours", str(directory))

    monkeypatch.setattr(log_files, "_sizes", {})
    monkeypatch.setattr(Path, "iterdir", refuse)
    prune(keep=2)
    monkeypatch.undo()
    assert not first.exists()


def test_a_state_root_that_cannot_be_listed_is_no_reason_not_to_launch(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> Any:
        raise PermissionError(errno.EACCES, "not yours", str(directory))

    monkeypatch.setattr(os, "scandir", refuse)
    prune()


def test_a_launch_has_a_directory_of_its_own(root: Path) -> None:
    files = LaunchFiles.create("abc")
    try:
        assert files.directory.parent == root
        assert files.directory.name.endswith("Z-abc")
        assert stat.S_IMODE(files.directory.stat().st_mode) == 0o700
        names = [files.out(1).name, files.err(1).name, files.spool(1).name]
        assert names == ["rank1.out", "rank1.err", "rank1.spool"]
        assert not os.get_inheritable(descriptor_of(files))
    finally:
        files.close()
        files.close()


def test_attempts_of_one_launch_have_different_directories(root: Path) -> None:
    assert len(set(past_launches(20))) == 20
    first, second = LaunchFiles.create("same"), LaunchFiles.create("same")
    assert first.directory != second.directory
    first.close()
    second.close()


def test_a_directory_that_is_pruned_while_it_is_made_is_made_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = log_files._lock
    removed: list[Path] = []

    def pruned_meanwhile(directory: Path) -> int | None:
        if not removed:
            removed.append(directory)
            shutil.rmtree(directory)
        return lock(directory)

    monkeypatch.setattr(log_files, "_lock", pruned_meanwhile)
    files = LaunchFiles.create("abc")
    assert files.directory != removed[0]
    assert (files.directory / "live").exists()
    files.close()


def test_a_lock_on_a_file_that_was_replaced_does_not_count(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = past_launches(1)[0]
    flock = fcntl.flock

    def replaced_meanwhile(fd: int, operation: int) -> None:
        flock(fd, operation)
        (directory / "live").unlink()
        (directory / "live").touch()

    monkeypatch.setattr(fcntl, "flock", replaced_meanwhile)
    assert log_files._lock(directory) is None


def test_without_locks_a_launch_works_and_is_never_pruned(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    files = LaunchFiles.create("abc")
    assert "will not be pruned: its file system has no locks" in caplog.text
    files.close()
    prune(keep=0)
    assert files.directory.exists()


# ------------------------------------------------------------------ pruning
def test_the_oldest_launches_are_pruned(root: Path) -> None:
    made = past_launches(5)
    prune(keep=5)
    assert sorted(root.iterdir()) == made
    prune(keep=2)
    assert sorted(root.iterdir()) == made[3:]


def test_launches_are_pruned_by_size(root: Path) -> None:
    made = past_launches(5, size=1000)
    prune(most_bytes=2500)  # besides the newest
    assert sorted(root.iterdir()) == made[2:]


def test_a_live_launch_is_not_pruned(root: Path) -> None:
    live = LaunchFiles.create("live")
    append(live.out(0), b"x" * 1000)
    made = past_launches(2)
    prune(keep=1, most_bytes=500)
    assert sorted(root.iterdir()) == [live.directory, made[1]]
    live.close()
    del live
    prune(keep=1)
    assert sorted(root.iterdir()) == [made[1]]


def test_the_newest_launch_is_not_pruned_however_large(root: Path) -> None:
    *_, earlier, newest = past_launches(3, size=1000)
    prune(most_bytes=500)
    assert sorted(root.iterdir()) == [newest]
    small = past_launches(1)[0]
    prune(keep=2, most_bytes=1000)
    assert sorted(root.iterdir()) == [newest, small]
    assert not earlier.exists()


def test_a_large_newest_launch_does_not_cost_the_earlier_ones_their_logs(root: Path) -> None:
    made = past_launches(3, size=100)
    made += past_launches(1, size=5000)
    prune(most_bytes=1000)
    assert sorted(root.iterdir()) == made


@pytest.mark.parametrize("is_another_kernel", [False, True])
def test_what_something_refers_to_is_not_pruned(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_another_kernel: bool
) -> None:
    files = LaunchFiles.create("abc")
    append(files.out(0), b"x" * 1000)
    files.close()
    directory, rank = files.directory, RankLogs(files.out(0), files.err(0), files)
    past_launches(3)
    del files
    if is_another_kernel:
        forget(monkeypatch)
    prune(keep=1, most_bytes=500)
    assert rank.text() == "x" * 1000
    del rank
    prune(keep=1)
    assert not directory.exists()


def test_a_copy_of_what_refers_to_logs_keeps_them_too(root: Path) -> None:
    files = LaunchFiles.create("abc")
    append(files.out(0), b"x")
    files.close()
    rank = pickle.loads(pickle.dumps(RankLogs(files.out(0), files.err(0), files)))
    del files
    past_launches(2)
    prune(keep=1)
    assert rank.text() == "x"


def test_launches_that_are_referred_to_take_a_bounded_number_of_descriptors(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "_MOST_LOCKED", 3)
    running = LaunchFiles.create("running")
    kept = [LaunchFiles.create(f"id{number}") for number in range(10)]
    for files in kept:
        files.close()
    prune(keep=1)
    assert len(list(root.iterdir())) == 11  # in this kernel none is lost
    forget(monkeypatch)
    prune(keep=1)
    assert sorted(root.iterdir()) == [running.directory, *(files.directory for files in kept[-3:])]


def test_a_forked_child_does_not_give_up_the_lock_of_its_parent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LaunchFiles.create("abc")
    log_files._release(descriptor_of(files), owner=os.getpid() + 1)
    files.close()
    past_launches(1)
    forget(monkeypatch)
    prune(keep=1)
    assert files.directory.exists()


def test_logs_that_were_removed_are_not_taken_for_empty_ones(root: Path) -> None:
    directory = past_launches(1)[0]
    rank = RankLogs(directory / "rank7.out", directory / "rank7.err")
    assert rank.text() == ""
    shutil.rmtree(directory)
    with pytest.raises(FileNotFoundError, match="the logs of this launch were removed"):
        rank.text()


def test_the_size_of_a_live_launch_is_not_remembered(root: Path) -> None:
    live = LaunchFiles.create("live")
    prune()
    append(live.out(0), b"x" * 1000)
    live.close()
    del live
    newest = past_launches(1)[0]
    prune(most_bytes=500)
    assert list(root.iterdir()) == [newest]


def test_a_copy_of_the_lock_in_a_forked_process_keeps_nothing_alive(root: Path) -> None:
    files = LaunchFiles.create("abc")
    directory, copy = files.directory, os.dup(descriptor_of(files))
    files.close()
    del files
    past_launches(1)
    prune(keep=0)
    os.close(copy)
    assert not directory.exists()


def test_what_is_not_ours_stays(root: Path, tmp_path: Path) -> None:
    ours, newest = past_launches(2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (root / "notes.txt").write_text("mine")
    (root / "20240101-photos").mkdir()
    (root / "20240101T000000000000Z-file").write_text("not a directory")
    (root / "20240101T000000000000Z-link").symlink_to(elsewhere)
    foreign = sorted(path for path in root.iterdir() if path not in (ours, newest))
    prune(keep=0)
    assert sorted(root.iterdir()) == sorted([*foreign, newest])
    assert elsewhere.exists()


def test_two_kernels_prune_at_once(root: Path) -> None:
    made = past_launches(60, size=10)
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def run() -> None:
        barrier.wait()
        try:
            prune(keep=10)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prune(keep=10)
    assert errors == []
    assert sorted(root.iterdir()) == made[50:]


# ------------------------------------------------------------------ tails
def test_a_tail_waits_for_its_file(log: Path, tail: Tail) -> None:
    assert tail.read(100) is None
    append(log, b"")
    assert tail.read(100) is None
    append(log, b"one\ntw")
    assert tail.read(100) == Piece(b"one\ntw")
    assert tail.read(100) is None
    append(log, b"o\n")
    assert tail.read(100) == Piece(b"o\n")


def test_a_tail_holds_one_descriptor_that_no_child_gets(log: Path, tail: Tail) -> None:
    append(log, b"x")
    tail.read(100)
    source = tail._log
    assert isinstance(source, GrowingFile)
    first = source._fd
    append(log, b"y")
    tail.read(100)
    assert first is not None
    assert source._fd == first
    assert not os.get_inheritable(first)
    tail.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)


def test_a_flood_is_cut_at_line_ends(log: Path, tail: Tail) -> None:
    append(log, b"".join(b"line %04d\n" % number for number in range(1000)))
    piece = tail.read(1000)
    assert piece is not None
    assert piece.head.startswith(b"line 0000\n")
    assert piece.head.endswith(b"\n")
    assert piece.tail.startswith(b"line ")
    assert piece.tail.endswith(b"line 0999\n")
    assert len(piece.head) + len(piece.tail) + piece.skipped_bytes == 10_000
    assert piece.skipped_lines == piece.skipped_bytes // 10 == 900


def test_a_flood_without_line_ends_is_cut_anywhere(log: Path, tail: Tail) -> None:
    append(log, b"x" * 10_000)
    assert tail.read(1000) == Piece(b"x" * 250, 0, 9000, b"x" * 750)


def test_a_huge_flood_is_not_read_to_count_its_lines(log: Path, tail: Tail) -> None:
    append(log, b"begin\n")
    os.truncate(log, 70 << 20)  # a hole: it takes no room
    append(log, b"\nend\n")
    piece = tail.read(1000)
    assert piece is not None
    assert piece.skipped_lines == -1
    assert piece.skipped_bytes > 69 << 20


def test_a_file_that_shrinks_is_followed_from_its_new_end(log: Path, tail: Tail) -> None:
    append(log, b"a long first part\n")
    tail.read(100)
    os.truncate(log, 3)
    assert tail.read(100) is None
    append(log, b"next\n")
    assert tail.read(100) == Piece(b"next\n")


def test_a_file_that_shrinks_while_it_is_read_gives_what_is_left(
    log: Path, tail: Tail, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, b"0123456789")
    monkeypatch.setattr(tail, "_appended", lambda: (0, 99))
    tail._log.size()  # opens it
    assert tail.read(100) == Piece(b"0123456789")


@settings(derandomize=True, deadline=None)
@given(st.lists(st.text("ab\n", max_size=80), max_size=6), st.integers(8, 64))
def test_a_tail_gives_the_ends_and_counts_the_middle(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], limit: int
) -> None:
    log = tmp_path_factory.mktemp("tail") / "rank0.out"
    tail = Tail(log)
    for part in parts:
        data = part.encode()
        append(log, data)
        piece = tail.read(limit)
        if not data:
            assert piece is None
            continue
        assert piece is not None
        middle = data[len(piece.head) : len(data) - len(piece.tail)]
        assert data == piece.head + middle + piece.tail
        assert (piece.skipped_bytes, piece.skipped_lines) == (len(middle), middle.count(b"\n"))
        assert len(piece.head) + len(piece.tail) <= limit
        assert bool(middle) == (len(data) > limit)
    tail.close()


# ------------------------------------------------------------------ spools
def all_of(spool: Spool) -> list[dict[str, Any]]:
    return [record for records in spool.read() for record in records]


def test_a_spool_gives_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "rank0.spool"
    spool = Spool(path)
    assert all_of(spool) == []
    append(path, b'{"step": 1}\n{"step"')
    assert all_of(spool) == [{"step": 1}]
    append(path, b": 2}\n" + json.dumps({"metrics": {"loss": float("inf")}}).encode() + b"\n")
    assert all_of(spool) == [{"step": 2}, {"metrics": {"loss": float("inf")}}]
    assert all_of(spool) == []
    spool.close()


def test_a_flood_of_reports_is_read_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "_RECORDS_BLOCK", 1000)
    path = tmp_path / "rank0.spool"
    append(path, b"".join(b'{"step": %d}\n' % step for step in range(1000)))
    spool = Spool(path)
    blocks = list(spool.read())
    assert max(map(len, blocks)) < 100
    assert [record["step"] for block in blocks for record in block] == list(range(1000))
    spool.close()


def test_a_malformed_report_is_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rank0.spool"
    append(path, b"not json\n[1]\n\xff\n" + b"[" * 100_000 + b'\n{"step": 1}\n')
    spool = Spool(path)
    with caplog.at_level(logging.WARNING):
        assert all_of(spool) == [{"step": 1}]
    assert spool.malformed == 4
    assert "holds a line that is no report: b'not json'" in caplog.text
    append(path, b"x" * ((1 << 20) + 1))
    assert all_of(spool) == []
    assert spool.malformed == 5
    append(path, b'\n{"step": 2}\n')
    assert all_of(spool) == [{"step": 2}]
    spool.close()


# ------------------------------------------------------------------ the end of a log
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b"one\ntwo\n", "one\ntwo"),
        (b"a\nb\nc\nd", "b\nc\nd"),
        (b" 10%|#\r 20%|##\nb", " 20%|##\nb"),
        (b"\x1b[31mred\x1b[0m\0\xff\x07\ttab", "red\ufffd\ttab"),
        ("\x9b31m é".encode(), "31m é"),
    ],
)
def test_last_lines(log: Path, data: bytes, text: str) -> None:
    append(log, data)
    assert last_lines(log, count=3) == text


def test_last_lines_reads_the_end_alone(log: Path) -> None:
    append(log, b"a" * 100 + b"\nsecond\nthird\n")
    assert last_lines(log, most_bytes=20) == "second\nthird"
    append(log, b"b" * 100)
    assert last_lines(log, most_bytes=20) == "b" * 20


def test_last_lines_of_no_file(log: Path) -> None:
    assert last_lines(log) == ""


def test_rank_logs(log: Path) -> None:
    rank = RankLogs(log, log.with_suffix(".err"))
    assert rank.text() == ""
    append(log, "é\n".encode() + b"\xff")
    assert rank.text() == "é\n\ufffd"
    assert repr(rank) == f"RankLogs({str(log)!r}, 'rank0.err')"
