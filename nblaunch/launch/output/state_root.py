"""The directory that holds the log directories of all launches, and the check that only this user can change it."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

import platformdirs

from nblaunch.errors import StartError, warn

_has_warned = False


def state_root() -> Path:
    """Create the directory of all launches if necessary, and return it.

    It is ``$NBLAUNCH_STATE_DIR`` or ``nblaunch/launches`` in the user's state directory. Inside a sticky directory that
    all users share, such as ``/tmp``, it is a subdirectory of this user's own. If the user's state directory is
    unusable, it is a temporary directory, with one warning.

    Raises:
        StartError: No directory is writable, or other users can change it.
    """
    chosen = os.environ.get("NBLAUNCH_STATE_DIR")
    try:
        if chosen:
            return _safe(Path(chosen).expanduser().absolute())
        try:
            return _safe(platformdirs.user_state_path("nblaunch") / "launches")
        except OSError as error:
            return _temporary_root(error)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        name = f"NBLAUNCH_STATE_DIR={chosen!r}" if chosen else "the temporary directory"
        raise StartError(
            f"cannot store the logs of launches in {name}: {error}: set NBLAUNCH_STATE_DIR to a directory that only "
            "you can write to"
        ) from error


def _temporary_root(reason: OSError) -> Path:
    global _has_warned
    root = _own_in(Path(tempfile.gettempdir()))
    if not _has_warned:
        _has_warned = True
        warn(
            f"logs of launches go to {root}, because your state directory is unusable ({reason}): set "
            "NBLAUNCH_STATE_DIR to another directory to keep them"
        )
    return root


def _safe(root: Path) -> Path:
    """Create `root` and return it, or this user's subdirectory if `root` is shared."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    link, found = root.lstat(), root.stat()
    if link.st_uid not in (0, os.getuid()):
        raise PermissionError(errno.EACCES, f"it belongs to another user (uid {link.st_uid})", str(root))
    return _own_in(root) if is_shared(found, os.getuid()) else _checked(root, found)


def _own_in(shared: Path) -> Path:
    own = shared / f"nblaunch-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    return _checked(own, own.lstat())  # lstat: another user may have created a link by this name


def _checked(root: Path, found: os.stat_result) -> Path:
    problem = objection(found, os.getuid(), _own_group() if found.st_mode & stat.S_IWGRP else None)
    if not (problem or os.access(root, os.W_OK | os.X_OK)):
        problem = "it is not writable"
    if problem:
        raise PermissionError(errno.EACCES, problem, str(root))
    return root


def is_shared(found: os.stat_result, user: int) -> bool:
    """Return True if every user may create files in a directory with this status, but only change their own."""
    return found.st_uid in (0, user) and bool(found.st_mode & stat.S_ISVTX and found.st_mode & stat.S_IWOTH)


def objection(found: os.stat_result, user: int, own_group: int | None = None) -> str:
    """Return why a directory is unsafe for the logs of `user`, or an empty string if it is safe.

    Args:
        found: The status of the directory.
        user: The uid.
        own_group: The gid of the group whose only member is `user`, if there is one.
    """
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid not in (0, user):
        return f"it belongs to another user (uid {found.st_uid})"
    may_write = stat.S_IWOTH | (stat.S_IWGRP if found.st_gid != own_group else 0)
    if found.st_mode & may_write:
        return f"other users can write to it (mode {stat.S_IMODE(found.st_mode):04o}; fix it with `chmod go-w`)"
    return ""


def _own_group() -> int | None:
    """Return the gid of the user's private group, which many systems create for each user."""
    try:
        user = pwd.getpwuid(os.getuid())
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return None
    is_alone = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return user.pw_gid if is_alone else None
