"""What the operating system does for us: who dies with whom, and who is whose descendant.

Linux has all of it; elsewhere each function says by its return value that it could not, and the reaper falls
back to process groups and to looking twice a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

from nblaunch.machine.memory_maps import mappings

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE})
"""What a write fails with because of the disk: it is full, a quota or limit is reached, or it has gone."""
LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_OOM_LEVEL = 500
_MADV_COLLAPSE = 25
"""Linux 6.1 and later; an older one refuses it."""
_HUGE = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


def die_with_parent(parent: int) -> None:
    """Ask for SIGKILL when the thread that forked this process ends; leave at once if it has already.

    Args:
        parent: The parent's pid, taken before the fork: comparing with 1 would be wrong in containers,
            where the kernel itself may be pid 1.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Take back what `die_with_parent` has asked for."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def set_name(name: str) -> None:
    """Name this process in the system's lists; of at most 15 characters."""
    if _libc is not None:
        _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def name_of(pid: int) -> str:
    """What `set_name` has named a process; empty where it is gone, or the system does not tell."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().rstrip("\n")
    except (OSError, ValueError):  # of the latter: another program's name, in which any bytes may be
        return ""


def become_subreaper() -> bool:
    """Adopt descendants whose parents die, daemons that fork twice and call setsid included. False off Linux."""
    return _libc is not None and _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when `pid` ends; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def alive(pid: int) -> bool:
    """Whether a process with this pid exists (a zombie does)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def raise_oom_score() -> None:
    """Offer this process to the out-of-memory killer before the notebook."""
    with contextlib.suppress(OSError):  # not Linux, or a container that forbids it
        with open("/proc/self/oom_score_adj", "r+") as file:
            score = min(1000, int(file.read()) + _OOM_LEVEL)
            file.seek(0)
            file.write(str(score))


def collapse_heap() -> Iterator[None]:
    """Gather this process's heap into huge pages, one at each step; where the system cannot, nothing happens.

    A fork copies the page table, and importing torch fills 270 MB with small pages: with huge ones a fork takes
    2.4 ms instead of 8.2, and the end of the child 6 instead of 10. A page that a child writes to is split first,
    so it still copies 4 KB.
    """
    if _libc is None:
        return
    madvise = _libc.madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in anonymous_memory():
        for address in range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            madvise(address, _HUGE, _MADV_COLLAPSE)
            yield


def anonymous_memory() -> list[tuple[int, int]]:
    """The writable mappings of this process that no file backs; those that touch, as one."""
    found: list[tuple[int, int]] = []
    for begin, end, mode, _, (_, inode), name in mappings():
        if mode == "rw-p" and not inode and name in ("", "[heap]"):
            joined = found.pop()[0] if found and found[-1][1] == begin else begin  # NumPy asks for huge pages in parts
            found.append((joined, end))
    return found


def thread_count() -> int:
    """Threads of this process as the operating system counts them; 1 where it cannot be told."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def parents_of_all() -> dict[int, int]:
    """The parent of every process on the machine, by pid; empty where there is no /proc."""
    parents: dict[int, int] = {}
    if not LINUX:
        return parents
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it ended while we looked
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return parents


def children(parent: int) -> list[int]:
    """Its living and dead-but-unread children, adopted ones included; none where there is no /proc."""
    return [pid for pid, its_parent in parents_of_all().items() if its_parent == parent]


def has_children() -> bool:
    """Return True if this process has a child, ended or not; a subreaper without one has no descendants."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(root: int, spare: Callable[[int], bool] | None = None) -> list[int]:
    """All living and dead-but-unread descendants of `root`, without those that `spare` is true of and theirs."""
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
    """Whether a process is multiprocessing's, which unlinks shared memory when all its users have ended, and ends."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def forget_resource_tracker() -> None:
    """Let a forked rank start a tracker of its own, once `close_all_but` has taken its parent's pipe from it.

    The notebook has one as soon as it uses shared memory or spawns workers. What the rank wrote to the number that was
    its pipe would be lost without an error: a killed rank's semaphores would stay in /dev/shm for ever.
    """
    module: Any = sys.modules.get("multiprocessing.resource_tracker")
    if module is not None:
        module._resource_tracker.__init__()  # the object stays: others hold its methods


def close_all_but(keep: Collection[int]) -> None:
    """Let go of every descriptor above 2 that is not in `keep`.

    Their numbers are pointed at /dev/null instead of being freed: a Python object that this process inherited
    may close its number at any later time, and must not hit a file of the user's.
    """
    try:
        opened = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        opened = list(range(3, 1024))
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in opened:
        if fd > 2 and fd != null and fd not in keep:
            with contextlib.suppress(OSError):  # not open: the listing's own descriptor is gone already
                os.fstat(fd)
                os.dup2(null, fd, inheritable=False)
    os.close(null)


def open_log(path: str) -> int:
    """A descriptor that appends to this file, which is made if need be; never to what a link names.

    Where there is no room for the file it is a device that is full: writing fails there as it would on the disk.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return os.open("/dev/full" if LINUX else os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def kill(pid: int, signum: int, group: bool = False) -> bool:
    """Signal a process, or the group that it leads; False when there is none."""
    try:
        (os.killpg if group else os.kill)(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class ChildWatch:
    """A descriptor that becomes readable when a child of this process ends.

    Runs in the fork server and in reapers, which have one thread and no signal handlers but this.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if LINUX else _pipe()
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """For selectors."""
        return self._read

    def ended(self) -> list[tuple[int, int]]:
        """(pid, returncode) of every child that has ended since the last call."""
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
        """Give SIGCHLD back; for a child that has inherited this."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write
