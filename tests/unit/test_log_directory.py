"""The log directories of launches: where they are, created, locked, kept while they are referenced, pruned."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

from nblaunch import errors
from nblaunch.errors import StartError
from nblaunch.launch.output import log_directory
from nblaunch.launch.output.log_directory import LaunchFiles, RankLogs, prune, state_root
from nblaunch.machine import processes
from nblaunch.wire import launch_files


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBLAUNCH_STATE_DIR", str(tmp_path / "launches"))
    return state_root()


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def past_launches(count: int, size: int = 0, suffix: str = "") -> list[Path]:
    made = []
    for number in range(count):
        files = LaunchFiles.create(f"id{number}{suffix}")
        append(files.out(0), b"x" * size)
        files.close()
        made.append(files.directory)
    return made


def descriptor_of(files: LaunchFiles) -> int:
    """The descriptor of a launch's lock."""
    held = None if files._lock is None else files._lock.peek()
    assert held is not None
    return int(held[2][0])


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process knows no more of its launches than another kernel does."""
    monkeypatch.setattr(log_directory, "_referenced", weakref.WeakValueDictionary())


# ------------------------------------------------------------------ directories
def test_a_log_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "rank0.out").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        processes.open_log(str(tmp_path / "rank0.out"))
    (tmp_path / "live").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        launch_files.acquire_lock(tmp_path)


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


def test_a_launch_has_a_directory_of_its_own(root: Path) -> None:
    files = LaunchFiles.create("abc")
    try:
        assert files.directory.parent == root
        assert files.directory.name.endswith("Z-abc")
        assert stat.S_IMODE(files.directory.stat().st_mode) == 0o700
        assert [files.out(1).name, files.err(1).name] == ["rank1.out", "rank1.err"]
        assert not os.get_inheritable(descriptor_of(files))
    finally:
        files.close()
        files.close()


def test_a_directory_that_is_pruned_while_it_is_made_is_made_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = launch_files.acquire_lock
    removed: list[Path] = []

    def pruned_meanwhile(directory: Path) -> int | None:
        if not removed:
            removed.append(directory)
            shutil.rmtree(directory)
        return acquire(directory)

    monkeypatch.setattr(launch_files, "acquire_lock", pruned_meanwhile)
    files = LaunchFiles.create("abc")
    assert files.directory != removed[0]
    assert (files.directory / "live").exists()
    files.close()


def test_without_locks_a_launch_works_and_is_never_pruned(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    files = LaunchFiles.create("abc")
    assert "will never be pruned: its file system does not support locks" in caplog.text
    files.close()
    prune(max_launches=0)
    assert files.directory.exists()


# ------------------------------------------------------------------ pruning


def test_cells_of_a_session_cost_no_launch_its_logs(root: Path) -> None:
    launches, cells = past_launches(2), past_launches(5, suffix=log_directory.CELL_SUFFIX)
    prune(max_launches=3)
    assert sorted(root.iterdir()) == [*launches, *cells[2:]]


def test_launches_are_pruned_by_size(root: Path) -> None:
    made = past_launches(5, size=1000)
    prune(max_bytes=2500)  # besides the newest
    assert sorted(root.iterdir()) == made[2:]


def test_the_newest_launch_is_not_pruned_however_large(root: Path) -> None:
    *_, earlier, newest = past_launches(3, size=1000)
    prune(max_bytes=500)
    assert sorted(root.iterdir()) == [newest]
    small = past_launches(1)[0]
    prune(max_launches=2, max_bytes=1000)
    assert sorted(root.iterdir()) == [newest, small]
    assert not earlier.exists()


@pytest.mark.parametrize("is_another_kernel", [False, True])
def test_referenced_logs_are_not_pruned(root: Path, monkeypatch: pytest.MonkeyPatch, is_another_kernel: bool) -> None:
    files = LaunchFiles.create("abc")
    append(files.out(0), b"x" * 1000)
    files.close()
    directory, rank = files.directory, RankLogs(files.out(0), files.err(0), files)
    past_launches(3)
    del files
    if is_another_kernel:
        forget(monkeypatch)
    prune(max_launches=1, max_bytes=500)
    assert rank.text() == "x" * 1000
    del rank
    prune(max_launches=1)
    assert not directory.exists()


def test_a_copy_of_what_refers_to_logs_keeps_them_too(root: Path) -> None:
    files = LaunchFiles.create("abc")
    append(files.out(0), b"x")
    files.close()
    rank = pickle.loads(pickle.dumps(RankLogs(files.out(0), files.err(0), files)))
    del files
    past_launches(2)
    prune(max_launches=1)
    assert rank.text() == "x"


def test_referenced_launches_take_a_bounded_number_of_descriptors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_directory, "MAX_FINISHED_LOCKS", 3)
    running = LaunchFiles.create("running")
    kept = [LaunchFiles.create(f"id{number}") for number in range(10)]
    for files in kept:
        files.close()
    prune(max_launches=1)
    assert len(list(root.iterdir())) == 11  # in this kernel none is lost
    forget(monkeypatch)
    prune(max_launches=1)
    assert sorted(root.iterdir()) == [running.directory, *(files.directory for files in kept[-3:])]


def test_a_forked_child_does_not_give_up_the_lock_of_its_parent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LaunchFiles.create("abc")
    log_directory._release(descriptor_of(files), owner=os.getpid() + 1)
    files.close()
    past_launches(1)
    forget(monkeypatch)
    prune(max_launches=1)
    assert files.directory.exists()


def test_logs_that_were_removed_are_not_taken_for_empty_ones(root: Path) -> None:
    directory = past_launches(1)[0]
    rank = RankLogs(directory / "rank7.out", directory / "rank7.err")
    assert rank.text() == ""
    shutil.rmtree(directory)
    with pytest.raises(FileNotFoundError, match=r"rank7\.out"):
        rank.text()


def test_foreign_files_stay(root: Path, tmp_path: Path) -> None:
    ours, newest = past_launches(2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (root / "notes.txt").write_text("mine")
    (root / "20240101-photos").mkdir()
    (root / "20240101T000000000000Z-file").write_text("not a directory")
    (root / "20240101T000000000000Z-link").symlink_to(elsewhere)
    foreign = sorted(path for path in root.iterdir() if path not in (ours, newest))
    prune(max_launches=0)
    assert sorted(root.iterdir()) == sorted([*foreign, newest])
    assert elsewhere.exists()


def test_two_kernels_prune_at_once(root: Path) -> None:
    made = past_launches(60, size=10)
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def run() -> None:
        barrier.wait()
        try:
            prune(max_launches=10)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prune(max_launches=10)
    assert errors == []
    assert sorted(root.iterdir()) == made[50:]


# ------------------------------------------------------------------ shared roots
def test_users_of_a_shared_root_have_their_own_directories(root: Path) -> None:
    root.chmod(0o1777)
    own = root / f"nblaunch-{os.getuid()}"
    assert state_root() == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    made = past_launches(3)
    prune(max_launches=1)
    assert sorted(own.iterdir()) == made[2:]
    os.chown(own, 65534, -1) if os.getuid() == 0 else own.chmod(0o770)  # another user could have created it
    with pytest.raises(StartError, match=r"it belongs to another user|other users can write"):
        state_root()


def test_the_launches_of_other_users_are_not_counted_and_not_touched(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = past_launches(3, size=1000)
    give_away(monkeypatch, *theirs)
    prune(max_launches=0, max_bytes=500)
    assert sorted(root.iterdir()) == theirs


# ------------------------------------------------------------------ the state directory


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
        patch.setattr(errors, "_said", set())
        yield


@pytest.mark.usefixtures("_no_home")
def test_a_missing_home_uses_a_temporary_root_and_warns_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="launch logs go to .*: set NBLAUNCH_STATE_DIR"):
        root = state_root()
    assert root == state_root() == tmp_path / f"nblaunch-{os.getuid()}"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


# ------------------------------------------------------------------ other users
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o700, ""),
        (0o755, ""),
        (0o777, "other users can write to it \\(mode 0777; fix it with `chmod go-w`"),
        (0o770, "other users can write to it \\(mode 0770;"),
        (0o500, "" if os.getuid() == 0 else "it is not writable"),
    ],
)
def test_a_root_that_another_user_can_change_is_refused(root: Path, mode: int, said: str) -> None:
    root.chmod(mode)
    if not said:
        assert state_root() == root
        return
    with pytest.raises(StartError, match=said):
        state_root()


def give_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Make these another user's; if root runs the tests, by chown."""
    if os.getuid() == 0:
        for path in paths:
            os.chown(path, 65534, 65534, follow_symlinks=False)
    else:
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)


def test_a_root_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(monkeypatch, root)
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
    give_away(monkeypatch, link)
    with pytest.raises(StartError, match="it belongs to another user"):
        state_root()


def test_a_state_root_of_the_users_that_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NBLAUNCH_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(StartError, match=r"^cannot store launch logs in NBLAUNCH_STATE_DIR='.*file': .*exi"):
        state_root()
