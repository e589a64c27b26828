"""The verdict on a task: which rank failed first, and which errors are consequences of that.

Pure: reads what each rank sent, and how its process exited.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nblaunch.launch.group import RankEnd
from nblaunch.launch.stopping import ByUser, Ladder, PeerFailed, TimedOut


@dataclass(frozen=True, slots=True)
class Cause:
    kind: Literal["exception", "exit", "interrupt", "result", "died", "collective", "lost"]
    rank: int
    time_ns: int
    end: RankEnd | None = None
    finished_rank: int = -1
    """For ``collective``: a rank that had finished before."""


@dataclass(frozen=True, slots=True)
class Verdict:
    state: Literal["finished", "failed", "stopped"]
    cause: Cause | None = None
    crashed: tuple[RankEnd, ...] = ()
    """If it finished: the ranks whose process crashed after the function had returned."""


def judge(ends: Sequence[RankEnd], ladder: Ladder | None, lost: bool) -> Verdict:
    """Return the verdict on a task.

    Success is a `Done` message of every rank: a crash of its process afterwards does not cost the result. Ranks that
    return after the timeout has interrupted them have timed out, and those whose function says so were stopped. The
    earliest *primary* failure is the cause. An error raised by a collective is secondary if anything else explains it.
    `lost`: the process that supervises the ranks died before them.
    """
    returned = [end.done.time_ns for end in ends if end.done is not None]
    if len(returned) == len(ends):
        if ladder is not None and isinstance(ladder.reason, TimedOut) and max(returned, default=0) > ladder.begun * 1e9:
            return Verdict("stopped")
        if any(end.done.was_stopped for end in ends if end.done is not None):
            return Verdict("stopped")
        return Verdict("finished", crashed=tuple(end for end in ends if _crashed(end, ladder)))
    primary = [cause for cause in (_primary(end, ladder) for end in ends) if cause is not None]
    if primary:
        return Verdict("failed", min(primary, key=lambda cause: cause.time_ns))
    if lost:
        return Verdict("failed", Cause("lost", -1, 0))
    if any(_by_the_user(end, ladder) for end in ends):
        return Verdict("stopped")
    secondary = [end for end in ends if end.failed is not None and not _by_our_hand(end, _failed_at(end), ladder)]
    if secondary:
        return Verdict("failed", _echo(min(secondary, key=_failed_at), ends))
    return Verdict("stopped")


def _crashed(end: RankEnd, ladder: Ladder | None) -> bool:
    if end.exited is None:
        return True
    return end.exited.returncode != 0 and not _by_our_hand(end, end.exited.time_ns, ladder)


def _primary(end: RankEnd, ladder: Ladder | None) -> Cause | None:
    """Return the failure of a rank that needs no other explanation; None if there is none."""
    if end.failed is not None:
        if end.failed.collective or _by_our_hand(end, end.failed.time_ns, ladder):
            return None
        return Cause(end.failed.kind, end.rank, end.failed.time_ns, end)
    if end.done is not None or end.exited is None:
        return None
    if ladder is not None and isinstance(ladder.reason, PeerFailed):  # its exit is seen after its peers' errors
        is_ours = end.rank in ladder.killed or end.exited.returncode == -signal.SIGINT
    else:
        is_ours = _by_our_hand(end, end.exited.time_ns, ladder)
    return None if is_ours else Cause("died", end.rank, end.exited.time_ns, end)


def _by_our_hand(end: RankEnd, time_ns: int, ladder: Ladder | None) -> bool:
    """Return True if our signals, or the user's, explain what happened to a rank at `time_ns`."""
    if _by_the_user(end, ladder):
        return True
    if ladder is None or time_ns < ladder.begun * 1e9:
        return False
    return end.rank in ladder.interrupted or end.rank in ladder.killed


def _by_the_user(end: RankEnd, ladder: Ladder | None) -> bool:
    """Return True if the user's interrupt ended a rank; editors signal every descendant, possibly before us."""
    is_by_user = ladder is not None and isinstance(ladder.reason, ByUser)
    return is_by_user and end.failed is not None and end.failed.kind == "interrupt"


def _echo(end: RankEnd, ends: Sequence[RankEnd]) -> Cause:
    """Return the cause of a collective's error without a primary failure: a finished rank, or the error itself."""
    for other in ends:
        if other.done is not None and other.done.time_ns < _failed_at(end):
            return Cause("collective", end.rank, _failed_at(end), end, finished_rank=other.rank)
    return Cause("exception", end.rank, _failed_at(end), end)


def _failed_at(end: RankEnd) -> int:
    return end.failed.time_ns if end.failed is not None else 0
