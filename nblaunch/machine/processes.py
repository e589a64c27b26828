"""The operating system's services for processes: death signals, subreapers, pidfds, descendants, descriptors.

Linux has all of them. Elsewhere, or in a container without /proc or some system calls, a function's return value says
that it failed, and the reaper falls back to process groups and polling.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
from collections.abc import Callable, Collection
from typing import Any

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE})
"""Errors of a write that has no disk: it is full, over a quota or limit, or gone."""
LINUX = sys.platform == "linux"
LISTS_PROCESSES = os.path.exists("/proc/self/stat")
"""Whether the descendants of a process can be found: on Linux with a /proc."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_OOM_LEVEL = 500
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Signals of the thread that has caused them: blocked, they would end the process without faulthandler's report."""
_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


def die_with_parent(parent: int) -> None:
    """Request SIGKILL for when the thread that forked this process ends; exit at once if it already has.

    `parent` is the parent's pid, read before the fork. A comparison with 1 would be wrong in containers, where the
    notebook's kernel may be pid 1.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def leave_signals_to_main_thread() -> None:
    """Block signals in the calling thread, except those of a crash: the main thread handles them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _CRASHES)


def set_name(name: str) -> None:
    """Set this process's name, of at most 15 characters."""
    if _libc is not None:
        _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def become_subreaper() -> bool:
    """Adopt orphaned descendants, daemons that double-fork and call setsid included. Return False if it cannot."""
    return _libc is not None and _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def finds_orphans() -> bool:
    """Return True if this process, which may be a subreaper, finds all its descendants, however detached."""
    is_subreaper = ctypes.c_int()
    if _libc is not None:
        _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0)
    return LISTS_PROCESSES and bool(is_subreaper)


def pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when `pid` ends, and takes signals; None where the system has none."""
    try:
        fd = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
    try:
        signal.pidfd_send_signal(fd, 0)
    except ProcessLookupError:
        return fd
    except OSError:  # a sandbox has one system call without the other
        os.close(fd)
        return None
    return fd


def alive(pid: int) -> bool:
    """Return True if a process runs; one that has ended and was not waited for does not, where there is a /proc."""
    with contextlib.suppress(PermissionError):  # another user's
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    with contextlib.suppress(OSError, IndexError):
        return _stat(pid)[0] != b"Z"
    return True


def _stat(pid: int) -> list[bytes]:
    """Return the fields of a process after its name: its state, its parent and more."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def raise_oom_score() -> None:
    with contextlib.suppress(OSError):  # not Linux, or a container that forbids it
        with open("/proc/self/oom_score_adj", "r+") as file:
            score = min(1000, int(file.read()) + _OOM_LEVEL)
            file.seek(0)
            file.write(str(score))


def thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def parents_of_all() -> dict[int, int]:
    """Return the parent of every process, by pid; empty if there is no /proc."""
    parents: dict[int, int] = {}
    if not LISTS_PROCESSES:
        return parents
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):  # the process has ended
                parents[int(name)] = int(_stat(int(name))[1])
    return parents


def children(parent: int) -> list[int]:
    return [pid for pid, its_parent in parents_of_all().items() if its_parent == parent]


def has_children() -> bool:
    """Return True if this process has a child, zombies included; a subreaper without one has no descendants."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    except OSError:  # a sandbox without waitid
        return bool(children(os.getpid()))
    return True


def descendants(root: int, spare: Callable[[int], bool] | None = None) -> list[int]:
    """Return all descendants of `root`, zombies included; leave out the subtrees that `spare` returns True for."""
    parents = parents_of_all()
    by_parent: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        by_parent.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = [pid for pid in by_parent.get(queue.pop(), ()) if spare is None or not spare(pid)]
        found += below
        queue += below
    return found


def is_resource_tracker(pid: int) -> bool:
    """Return True for multiprocessing's tracker, which unlinks shared memory once all its users have exited."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def close_all_but(keep: Collection[int]) -> None:
    """Close every descriptor above 2 that is not in `keep`, and not that of multiprocessing's resource tracker.

    Their numbers are redirected to /dev/null, not freed: an inherited Python object may close its number at any later
    time, which must not close a file of the user's.
    """
    try:
        opened = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        opened = list(range(3, 1024))
    tracker: Any = sys.modules.get("multiprocessing.resource_tracker")
    kept = {*keep, -1 if tracker is None else tracker._resource_tracker._fd}
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in opened:
        if fd > 2 and fd != null and fd not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.fstat(fd)
                os.dup2(null, fd, inheritable=False)
    os.close(null)


def open_log(path: str) -> int:
    """Open a file for appending, without following links; create it if it does not exist.

    On a full disk, return a descriptor of a full device: writes fail as they would on the disk.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return os.open("/dev/full" if LINUX else os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def kill(pid: int, signum: int, group: bool = False) -> bool:
    """Signal a process, or the group that it leads. Return False if it does not exist."""
    try:
        (os.killpg if group else os.kill)(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class ChildWatch:
    """A descriptor that becomes readable when a child of this process ends.

    Used in the fork server and in reapers: they have one thread and no other signal handlers.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._read

    def ended(self) -> list[tuple[int, int]]:
        """Reap the children that have ended since the last call; return their (pid, returncode) pairs."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass
        gone: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return gone
            if pid == 0:
                return gone
            gone.append((pid, os.waitstatus_to_exitcode(status)))

    def close(self) -> None:
        """Restore SIGCHLD, in a child that has inherited the watch."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)
