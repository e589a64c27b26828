"""The state directory: its choice, and the directories that are refused."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

from nblaunch.errors import StartError
from nblaunch.launch.output import log_directory as root_module
from nblaunch.launch.output.log_directory import LaunchFiles, is_shared, objection, state_root


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBLAUNCH_STATE_DIR", str(tmp_path / "launches"))
    return state_root()


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
        patch.setattr(root_module, "_has_warned", False)
        yield


@pytest.mark.usefixtures("_no_home")
def test_a_missing_home_uses_a_temporary_root_and_warns_once(tmp_path: Path) -> None:
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
    said = (
        "it is not a directory"
        if kind == "a link"
        else r"other users can write to it \(mode 0777; fix it with `chmod go-w`"
    )
    with pytest.raises(StartError, match=rf"{said}.*: set NBLAUNCH_STATE_DIR to a directory that only you"):
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
def test_a_directory_counts_as_shared_if_files_are_protected(found: os.stat_result, shared: bool) -> None:
    assert is_shared(found, OURS) == shared


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


def test_a_root_that_others_can_write_to_is_refused(root: Path) -> None:
    root.chmod(0o777)
    with pytest.raises(StartError, match=r"other users can write to it \(mode 0777; fix it with `chmod go-w`"):
        state_root()
    root.chmod(0o755)
    assert state_root() == root


def test_a_state_root_of_the_users_that_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NBLAUNCH_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(StartError, match=r"^cannot store the logs of launches in NBLAUNCH_STATE_DIR='.*file': .*exi"):
        state_root()
