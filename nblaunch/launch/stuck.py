"""Why ranks that wait in a collective, or for a send or receive, do not get on: compares what each rank has begun.

Judges what `nblaunch.launch.stacks` has found. Ranks wait whose last call is in torch.distributed, or that are in a
backward pass or in a ``wait()`` and use no CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nblaunch.launch.group import Rank
from nblaunch.launch.stacks import Frame, Place, StackFormatter, frames_of, waits_in_backward, waits_in_collective
from nblaunch.machine import timeouts
from nblaunch.wire.messages import Source
from nblaunch.wire.tables import Begun, in_ranges, members_of, name_of_call

Where = Literal["waits", "runs", "returned", "raised", "died"]
"""``waits``: the last call of the rank's main thread is in torch.distributed."""
_ALIKE = {"allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "allreduce_coalesced"}
"""Collectives whose tensors have one size on every rank."""
_SETUP = {"new_group", "init_process_group", "init_device_mesh", "destroy_process_group", "split_group"}
"""torch's functions that wait for other ranks without a collective."""
_ENDED: dict[Where, str] = {"returned": "returned", "raised": "raised an exception", "died": "is dead"}
_NEVER = "this will never complete"
_MAX_RANKS = 8
"""Ranks that are described one by one."""


@dataclass(frozen=True, slots=True)
class RankView:
    """What is known of one rank: its present line, and its last collective in each process group, the latest first."""

    rank: int
    where: Where
    place: str = ""
    begun: Sequence[Begun] = ()
    is_busy: bool = False

    def in_group(self, name: str) -> Begun:
        return next((each for each in self.begun if each.group == name), Begun())


@dataclass(frozen=True, slots=True)
class StuckVerdict:
    """Why ranks wait; `is_final`: waiting cannot help.

    Attributes:
        reason: The same for the same collective and the same ranks, wherever these are.
        ranks: Live ranks to debug: those that the others wait for, or one of each call if the calls differ.
        pair: A rank that waits, and one of its process group that has returned; None: no such rank has.
    """

    lines: tuple[str, ...]
    is_final: bool
    reason: str
    ranks: tuple[int, ...] = ()
    pair: tuple[int, int] | None = None

    @property
    def text(self) -> str:
        return "; ".join(self.lines)


@dataclass(slots=True)
class _Group:
    """The ranks of the process group that the first waiting rank waits in."""

    waiting: list[RankView]
    passed: list[RankView] = field(default_factory=list)
    """They have begun the same collective or a later one, and do not wait in this group."""
    missing: list[RankView] = field(default_factory=list)
    """They have begun fewer collectives."""

    @property
    def gone(self) -> list[RankView]:
        return [each for each in (*self.missing, *self.passed) if each.where in _ENDED]


def judge(ranks: Sequence[RankView], seconds: float, place_of: Callable[[Begun], str]) -> StuckVerdict | None:
    """Return why ranks have waited for some seconds, or None if none waits in a collective that was logged."""
    waiting = [each for each in ranks if each.where == "waits" and each.begun]
    if not waiting:
        return None
    oldest = {each.begun[0].group: each.begun[0] for each in sorted(waiting, key=lambda each: -each.begun[0].time_ns)}
    judged = [_judge_group(ranks, begun, seconds, place_of) for begun in reversed(oldest.values())]
    found = [each for each in judged if each is not None]
    return next(
        (each for each in found if each.is_final), found[0] if found else _judge_transfers(ranks, seconds, place_of)
    )


def _judge_transfers(
    ranks: Sequence[RankView], seconds: float, place_of: Callable[[Begun], str]
) -> StuckVerdict | None:
    """Judge ranks that wait in ``send`` or ``recv`` while none works. Which rank they wait for is not known."""
    waiting = [each for each in ranks if each.where == "waits" and each.begun and each.begun[0].is_transfer]
    others = [each for each in ranks if each not in waiting]
    if not waiting or any(each.is_busy for each in others):
        return None
    alive = [each for each in others if each.where in ("runs", "waits") and each.place][:_MAX_RANKS]
    lines = [*_said_of_waiting(waiting, place_of), *(f"rank {each.rank} is at {each.place}" for each in alive)]
    lines[0] = f"Waiting for {seconds:.0f} s: {lines[0]}"
    calls = sorted((each.rank, each.begun[0].time_ns) for each in waiting)
    return StuckVerdict(tuple(lines), False, str(calls), tuple(sorted(each.rank for each in alive)))


def _judge_group(
    ranks: Sequence[RankView], begun: Begun, seconds: float, place_of: Callable[[Begun], str]
) -> StuckVerdict | None:
    """Judge the ranks of one process group, in which a rank has waited since it began this collective."""
    of_group = members_of(begun, len(ranks))
    members = [each for each in ranks if of_group is None or each.rank in of_group]
    group = _sorted(members, begun)
    if group is None:
        return None
    lines = _said_of_waiting(group.waiting, place_of)
    more, ending, is_final = _reason(group, place_of)
    lines = [f"{'Stuck' if is_final else 'Waiting'} for {seconds:.0f} s: {lines[0]}", *lines[1:], *more]
    lines[-1] += ending
    ranks_of = [sorted(each.rank for each in views) for views in (group.waiting, group.passed, group.missing)]
    key = f"{begun.group} {begun.count} {sorted({each.begun[0].call for each in group.waiting})} {ranks_of} {is_final}"
    returned = next((each.rank for each in group.gone if each.where == "returned"), None)
    pair = None if returned is None else (group.waiting[0].rank, returned)
    return StuckVerdict(tuple(lines), is_final, key, _to_debug(group)[:_MAX_RANKS], pair)


def _sorted(members: Sequence[RankView], begun: Begun) -> _Group | None:
    """Sort the ranks of a group by whether they have begun its latest collective; None if none waits in one."""
    waits = [
        each
        for each in members
        if each.where == "waits" and each.begun and each.begun[0].group == begun.group and not each.begun[0].is_transfer
    ]
    if not waits:  # in send and recv, which not every rank calls
        return None
    count = max(each.begun[0].count for each in waits)
    group = _Group([each for each in waits if each.begun[0].count == count])
    for each in members:
        if each not in group.waiting:
            is_behind = each.in_group(begun.group).count < count
            (group.missing if is_behind else group.passed).append(each)
    return group


def _reason(group: _Group, place_of: Callable[[Begun], str]) -> tuple[list[str], str, bool]:
    calls = [each.begun[0] for each in group.waiting]
    if len({each.call for each in calls}) > 1:
        return [], f". The collectives differ: {_NEVER}", True
    if len({each.detail for each in calls}) > 1 and calls[0].call in _ALIKE:
        return [], f". The sizes or dtypes differ: {_NEVER}", True
    for gone in group.gone[:1]:
        done = min(gone.in_group(calls[0].group).count, calls[0].count)
        said = f"rank {gone.rank} {_ENDED[gone.where]} after {done} of {calls[0].count} collectives: {_NEVER}"
        return [said], "", True
    if group.missing:
        return _said_of_missing(group.missing, calls[0], place_of), "", False
    if not (group.passed or any(each.is_busy for each in group.waiting)):
        said = ". Every rank of the process group waits in it: the network or a device is slow, or does not respond"
        return [], said, False
    return [], "", False


def _to_debug(group: _Group) -> tuple[int, ...]:
    """Return the live ranks that the others wait for. If the collectives differ, return the first rank of each."""
    missing = [each.rank for each in group.missing if each.where in ("runs", "waits")]
    calls = {(each.begun[0].call, each.begun[0].detail): each.rank for each in reversed(group.waiting)}
    differ = len(calls) > 1 and (len({call for call, _ in calls}) > 1 or group.waiting[0].begun[0].call in _ALIKE)
    return tuple(sorted(calls.values() if differ else missing))


def _said_of_waiting(waiting: Sequence[RankView], place_of: Callable[[Begun], str]) -> list[str]:
    by_call: dict[tuple[str, str, str], list[RankView]] = {}
    for each in waiting:
        by_call.setdefault((each.begun[0].call, each.begun[0].detail, place_of(each.begun[0])), []).append(each)
    said = []
    for (_, _, place), views in by_call.items():
        ranks = in_ranges(each.rank for each in views).replace(",", ", ")
        who = f"rank {ranks} waits" if len(views) == 1 else f"ranks {ranks} wait"
        said.append(f"{who} in {in_words(views[0].begun[0], place)}")
    return said


def in_words(begun: Begun, place: str) -> str:
    """Return a call, such as ``all_reduce #57 (8 float32, Cell In[3], line 14)``. Transfers have no number."""
    number = "" if begun.is_transfer else f" #{begun.count}"
    about = ", ".join(filter(None, [begun.detail, place]))
    return f"{name_of_call(begun.call)}{number}{f' ({about})' * bool(about)}"


def difference(
    waiting: Sequence[Begun], finished: Sequence[Begun], ranks: tuple[int, int], sources: Mapping[str, Source]
) -> str:
    """Return how the last collectives of two ranks differ that have begun as many of them, in lines.

    `waiting` are those of a rank that has waited for the other; the result is empty if they do not differ.
    """
    first = waiting[0] if waiting else Begun()
    second = next((each for each in finished if each.group == first.group), Begun())
    differ = first.call != second.call or (first.call in _ALIKE and first.detail != second.detail)
    if not first.call or first.is_transfer or first.count != second.count or not differ:
        return ""
    pairs = sorted(zip(ranks, (first, second), strict=True), key=lambda pair: pair[0])
    said = (f"rank {rank}: {in_words(each, place_of(each, sources))}" for rank, each in pairs)
    return "\n    ".join([f"the ranks called different collectives as #{first.count}.", *said])


def _said_of_missing(missing: Sequence[RankView], begun: Begun, place_of: Callable[[Begun], str]) -> list[str]:
    said = []
    for each in missing[:_MAX_RANKS]:
        done = each.in_group(begun.group).count
        other = each.begun[0] if each.where == "waits" and each.begun and each.begun[0].group != begun.group else None
        if other is not None:
            place = place_of(other)
            at = f"waits in {name_of_call(other.call)} of another group{f' ({place})' * bool(place)}"
        else:
            at = f"is at {each.place}" if each.place else "does not respond: it may be in C code"
        said.append(f"rank {each.rank} has started {done} of {begun.count} collectives, and {at}")
    if len(missing) > _MAX_RANKS:
        said[-1] += ", …"
    return said


def place_of(begun: Begun, sources: Mapping[str, Source]) -> str:
    source = sources.get(begun.file)
    file = source.label if source is not None and source.label else begun.file
    return f"{file}, line {begun.line}" if file else ""


def waited_for(frames: Sequence[Frame], begun: Sequence[Begun], *, is_wait: bool = False) -> Begun | None:
    """Return the collective that a rank waits in, if its stack shows so; None if it may wait in another call of torch.

    `is_wait`: the stack ends in ``work.wait()``.
    """
    last = begun[0] if begun else None
    if last is None or not last.call or not frames:
        return None
    if is_wait:
        return last
    is_of_backward = not last.file  # of a thread of autograd's
    is_called_there = any(frame.line == last.line and frame.file.startswith(last.file) for frame in frames)
    is_setup = any(frame.function in _SETUP for frame in frames)
    return last if (is_of_backward or is_called_there) and not is_setup else None


# ------------------------------------------------------------------ over time
class StuckWatch:
    """Notices that ranks wait in a collective and none gets on. Called from the supervisor's thread.

    Attributes:
        verdict: Why ranks wait; None: they get on, or nothing is known.
    """

    def __init__(self, ranks: Sequence[Rank], sources: Mapping[str, Source]) -> None:
        self.verdict: StuckVerdict | None = None
        self._ranks, self._sources, self._formatter = ranks, sources, StackFormatter(sources)
        self._begun: dict[int, Sequence[Begun]] = {}
        self._since = 0.0
        """When a rank was last seen to have begun a collective."""

    def observe(self, now: float) -> None:
        """Note what the ranks have begun. To be called once a second."""
        begun = {rank.rank: rank.member.worker.collectives() for rank in self._ranks if not rank.is_absent}
        if begun != self._begun or not self.running:
            self._begun, self._since, self.verdict = begun, now, None

    @property
    def running(self) -> list[int]:
        return [rank.rank for rank in self._ranks if not rank.is_over and rank.is_running and rank.member.listens]

    def quiet(self, now: float) -> float:
        """Return for how many seconds no rank has begun a collective; 0.0 if none ever has."""
        return now - self._since if any(self._begun.values()) else 0.0

    def judge(self, places: Mapping[int, Place], now: float) -> None:
        self.observe(now)
        quiet = self.quiet(now)
        if quiet >= timeouts.STUCK_AFTER_S:
            views = [self._view(rank, places.get(rank.rank, Place())) for rank in self._ranks]
            self.verdict = judge(views, quiet, lambda begun: place_of(begun, self._sources))

    def pause(self) -> None:
        self._begun, self.verdict = {}, None

    def _view(self, rank: Rank, place: Place) -> RankView:
        begun, stacks, main = self._begun.get(rank.rank, ()), place.stacks, place.main
        where: Where = "runs"
        if rank.done is not None:
            where = "returned"
        elif rank.failed is not None:
            where = "raised"
        elif rank.member.exited is not None:
            where = "died"
        if where != "runs" or not stacks:
            return RankView(rank.rank, where, "", begun)
        is_wait = self._formatter.is_wait(stacks, main) and not place.is_busy
        may_wait = waits_in_collective(stacks, main) or (waits_in_backward(stacks, main) and not place.is_busy)
        if (may_wait or is_wait) and waited_for(frames_of(stacks, main), begun, is_wait=is_wait) is not None:
            where = "waits"
        return RankView(rank.rank, where, self._formatter.where(stacks, main), begun, place.is_busy)
