"""Judging how a launch ended: who failed first, and whose error is only an echo of that.

Pure: it reads what each rank said and how its process ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nblaunch.launch.stopping import Ladder
from nblaunch.wire.messages import Done, Failed, RankExited


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    done: Done | None
    failed: Failed | None
    exited: RankExited | None


@dataclass(frozen=True, slots=True)
class Cause:
    """The failure that brought a launch down."""

    kind: Literal["exception", "exit", "interrupt", "result", "died", "collective", "lost"]
    rank: int
    time_ns: int
    end: RankEnd | None = None
    finished_rank: int = -1
    """For ``collective``: the rank that had finished before."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the attempt ended."""

    state: Literal["finished", "failed", "stopped"]
    cause: Cause | None = None
    crashed: tuple[RankEnd, ...] = ()
    """Of a launch that finished: the ranks whose process did not end well after the function had returned."""


def judge(ends: Sequence[RankEnd], ladder: Ladder | None, lost: bool) -> Verdict:
    """Judge an attempt whose processes have all ended.

    Args:
        ends: How each rank ended.
        ladder: How they were made to stop, if they were.
        lost: Whether the reaper went before its ranks did.

    Success is a DONE message of every rank: what happens to its process afterwards costs no result. Ranks that return
    after the timeout has interrupted them have run out of time. Among failures the first *primary* one counts. An error
    that came out of a collective is secondary, an echo, if anything else happened that explains it.
    """
    if all(end.done is not None for end in ends):
        if ladder is not None and ladder.reason == "timeout" and any(_returned_late(end, ladder) for end in ends):
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


def _returned_late(end: RankEnd, ladder: Ladder) -> bool:
    return end.done is not None and end.done.time_ns > ladder.begun * 1e9


def _crashed(end: RankEnd, ladder: Ladder | None) -> bool:
    """Return True if a rank that had returned neither left with status 0 nor was killed by us for not leaving."""
    if end.exited is None:
        return True
    return end.exited.returncode != 0 and not _by_our_hand(end, end.exited.time_ns, ladder)


def _primary(end: RankEnd, ladder: Ladder | None) -> Cause | None:
    """The failure of a rank that needs no other to explain it; None if there is none."""
    if end.failed is not None:
        if end.failed.collective or _by_our_hand(end, end.failed.time_ns, ladder):
            return None
        return Cause(end.failed.kind, end.rank, end.failed.time_ns, end)
    if end.done is not None or end.exited is None or _by_our_hand(end, end.exited.time_ns, ladder):
        return None
    return Cause("died", end.rank, end.exited.time_ns, end)


def _by_our_hand(end: RankEnd, time_ns: int, ladder: Ladder | None) -> bool:
    """Whether what happened to a rank at `time_ns` came of our own signals, or the user's."""
    if _by_the_user(end, ladder):
        return True
    if ladder is None or time_ns < ladder.begun * 1e9:
        return False
    return end.rank in ladder.interrupted or end.rank in ladder.killed


def _by_the_user(end: RankEnd, ladder: Ladder | None) -> bool:
    """Whether the user's interrupt ended a rank; it may come before ours, as editors signal every descendant."""
    user = ladder is not None and ladder.reason == "user"
    return user and end.failed is not None and end.failed.kind == "interrupt"


def _echo(end: RankEnd, ends: Sequence[RankEnd]) -> Cause:
    """A collective's error with no primary failure: another rank had finished, or it stands for itself."""
    for other in ends:
        if other.done is not None and other.done.time_ns < _failed_at(end):
            return Cause("collective", end.rank, _failed_at(end), end, finished_rank=other.rank)
    return Cause("exception", end.rank, _failed_at(end), end)


def _failed_at(end: RankEnd) -> int:
    return end.failed.time_ns if end.failed is not None else 0
