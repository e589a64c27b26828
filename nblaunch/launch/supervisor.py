"""One attempt of a launch, from the start of its ranks to the end of the last.

Runs in a thread of the kernel. It sees ranks through channels (what they say, what they print, how they end) and
never touches a pid: signals go by way of the reaper. Everything it waits for is an event; only logs are looked at
by the clock, as they are files.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nblaunch.engines.server_client import Reaper, remedy
from nblaunch.errors import StartError
from nblaunch.launch import failures
from nblaunch.launch.commands import Commands
from nblaunch.launch.output.follower import Reading
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.output.log_files import Spool, Tail
from nblaunch.launch.output.metric_patterns import PrintedMetrics
from nblaunch.launch.plan import Plan
from nblaunch.launch.rank_state import Rank
from nblaunch.launch.rendezvous import Rendezvous
from nblaunch.launch.stacks import Stacks
from nblaunch.launch.stopping import Ladder, Reason
from nblaunch.launch.verdict import Verdict, judge
from nblaunch.launch.views.view import RankStatus, Stream, View
from nblaunch.machine.process_state import Process
from nblaunch.wire.channel import Channel, LostDescriptorsError, channel_pair, must_be_read, readable
from nblaunch.wire.messages import (
    Done,
    Failed,
    Interrupted,
    Leaving,
    NotStarted,
    RankExited,
    RankSpec,
    RankStarted,
    ReaperStarted,
    Running,
    SendSignal,
    Source,
    StartRank,
    Swept,
    Taken,
    Task,
)

_LOOK_EVERY = 0.05
"""Seconds between two looks at the logs."""
_QUIET = 0.1
"""Seconds between the first failure and the stopping of the others, in which theirs arrive by themselves."""
_TELL_FAILURE_AFTER = 0.5
"""Seconds after the first failure, from which on it is shown although other ranks have not ended."""
_RETURN_WITHIN = 5.0
"""The same where a result cannot be sent: what the others return, a little later, is not to be lost."""
_TELL_AFTER = 5.0
"""Seconds that a rank which has returned may wait for its threads before that is said."""
_ON_THEIR_WAY = 100
"""Descriptors that a launch may have on their way at once, or those of one rank if these are more: Linux lets users
who are not root have as many, of all their programs together, as one process may open."""
_LEAVE_WITHIN = 30.0
"""Seconds that a rank gets to leave once its threads have ended: atexit functions, torch's clean-up."""
_SWEEP_WITHIN = 8.0
"""Seconds to wait for the reaper once every rank has ended."""
_DEAF_AFTER = 6.0
"""Seconds after the last rank was to be killed; the reaper itself gives up on a rank that will not die after 5."""
_REAPER_READS_WITHIN = 10.0
"""Seconds that the reaper gets to read what it was sent before."""
_MEET_WITHIN = 10.0
"""Seconds after which it is said that no reaper has been forked yet; a fork of the kernel is given up then."""


class Attempt:
    """See the module.

    Args:
        plan: What to launch.
        launch_id: Names the launch to its ranks.
        number: 0, or which restart this is.
        process: What ranks start from.
        parcel: The descriptors of the payload.
        files: Where its logs go.
        view: What shows it.
        commands: How others stop it.
        deadline: When the launch must have ended, by the monotonic clock.
        sources: The cells that the function comes from.
    """

    def __init__(
        self,
        plan: Plan,
        launch_id: str,
        number: int,
        process: Process,
        parcel: Sequence[int],
        files: LaunchFiles,
        view: View,
        commands: Commands,
        deadline: float,
        sources: Mapping[str, Source],
    ) -> None:
        self.plan, self.launch_id, self.number, self.process = plan, launch_id, number, process
        self.parcel, self.files, self.view, self.commands = parcel, files, view, commands
        self.ranks: list[Rank] = []
        self.taskless: list[Rank] = []
        """Those that have not been sent what they are to do."""
        self.offered: set[int] = set()
        """Those that have."""
        self.is_careful = len(parcel) * plan.world_size > _ON_THEIR_WAY
        self.reading = Reading(self.ranks, view, commands)
        self.ladder: Ladder | None = None
        self.met_reaper = False
        self.told_of_server = False
        self.lost = False
        self.swept = False
        self.stuck: tuple[int, ...] = ()
        self.sources = sources
        self.stop_others_at = math.inf
        self.tell_failure_at = math.inf
        self.all_done = 0.0
        self.all_leaving = 0.0
        self.told = False
        self.all_ended = 0.0
        self.all_killed = 0.0
        self.begun = time.monotonic()
        self.deadline = deadline
        self.refusal = ""
        self.stacks = Stacks(files.directory, sources, commands, view, self._signal)
        self.reaper_pidfd: int | None = None
        self.scratch = ""
        self.results: dict[int, list[int]] = {}
        """Once it has run: the parcels of the ranks that returned, which are the caller's to close."""

    def run(self, reaper: Reaper) -> Verdict:
        """Start the ranks under this reaper and see them through to their end.

        Raises:
            StartError: A rank could not be started; none is left.
        """
        self.reaper, self.control = reaper, reaper.channel
        with contextlib.ExitStack() as opened:
            opened.callback(lambda: shutil.rmtree(self.scratch, ignore_errors=True))  # last: ranks may still use it
            opened.callback(self._close)
            self._open(opened)
            with Rendezvous(self.plan.world_size) as meeting:
                self._watch(self.control, self._hear_reaper)
                self._watch(self.commands, self.commands.clear)
                self._start_all(meeting.port)
                self._follow()
            self._last_words()
            if self.refusal:
                raise StartError(self.refusal)
            verdict = judge([rank.end() for rank in self.ranks], self.ladder, self.lost)
            self.results = {rank.rank: rank.take_result() for rank in self.ranks if rank.result}
            return verdict

    # -------------------------------------------------------------- starting
    def _open(self, opened: contextlib.ExitStack) -> None:
        """Open what the attempt needs before its ranks. The reaper waits by now, and leaves when `_close` is called."""
        try:
            self.selector = opened.enter_context(selectors.DefaultSelector())
            self.scratch = tempfile.mkdtemp(prefix="nbl-")  # short: sockets will be in it, whose paths are limited
        except OSError as error:
            hint = remedy(error) or ": free space there, or set TMPDIR to another folder"
            raise StartError(f"the ranks have no place for temporary files: {error}{hint}") from error

    def _start_all(self, port: int) -> None:
        self.reading.count_drops(self.scratch, self.plan.world_size)
        try:
            for rank in range(self.plan.world_size):
                self._start(rank, port)
        except OSError as error:  # descriptors have run out, or nobody reads
            raise StartError(f"the ranks could not be started: {error}{remedy(error)}") from error

    def _start(self, number: int, port: int) -> None:
        channel, there = channel_pair()
        tails: dict[Stream, Tail] = {"out": Tail(self.files.out(number)), "err": Tail(self.files.err(number))}
        printed = PrintedMetrics(self.plan.metric_patterns, self.files.out(number), self.files.err(number))
        rank = Rank(number, channel, tails, Spool(self.files.spool(number)), printed)
        self.ranks.append(rank)
        spec = self._spec(number, port)
        with there:
            self._tell_reaper(StartRank(spec), [there.fileno()])
        if spec.method == "spawn":
            self._tell(channel, StartRank(spec))  # a fresh interpreter has not got it from the reaper
        channel.post(Task(self.plan.world(number, port), acknowledge=self.is_careful), self.parcel)
        self.taskless.append(rank)
        self._hand_out_tasks()
        self._watch(channel, lambda: self._hear_rank(rank))

    def _hand_out_tasks(self) -> None:
        """Send the ranks what they are to do: all at once, but where so many descriptors must be taken first."""
        while self.taskless and (not self.is_careful or self._would_take(self.taskless[0])):
            channel = self.taskless[0].channel
            with contextlib.suppress(ConnectionError):  # it has ended, which we hear by another road
                if not channel.flush():
                    return
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_WR)  # no further task will come
            self.offered.add(self.taskless.pop(0).rank)

    def _would_take(self, rank: Rank) -> bool:
        """Whether a rank runs that would take its descriptors, and few others have theirs still to take."""
        waiting = [number for number in self.offered if not self.ranks[number].took and self.ranks[number].listens]
        return rank.pid > 0 and (len(waiting) + 1) * len(self.parcel) <= max(_ON_THEIR_WAY, len(self.parcel))

    def _spec(self, rank: int, port: int) -> RankSpec:
        return RankSpec(
            launch_id=self.launch_id,
            rank=rank,
            local_rank=rank,
            world_size=self.plan.world_size,
            local_world_size=self.plan.world_size,
            method=self.plan.method,
            env=self.plan.environment(rank, port, self.launch_id, self.number, self.files.error(rank)),
            cwd=self.process.cwd,
            sys_path=self.process.sys_path,
            argv=self.process.argv,
            umask=self.process.umask,
            limits=self.process.limits,
            cpus=self.process.cpus,
            log_dir=str(self.files.directory),
            scratch=self.scratch,
        )

    def _tell(self, channel: Channel, message: object, fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(ConnectionError):  # whoever it was has ended, which we hear by another road
            channel.send(message, fds)

    def _tell_reaper(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send the reaper a message, and hear it first: it reads nothing while it waits for us to read."""
        while not self.control.closed and must_be_read(self.control, _REAPER_READS_WITHIN):
            self._hear_reaper()
        self._tell(self.control, message, fds)

    def _watch(self, source: Any, react: Callable[[], None]) -> None:
        self.selector.register(source, selectors.EVENT_READ, react)

    def _unwatch(self, source: Any) -> None:
        if source in self.selector.get_map():
            self.selector.unregister(source)

    # -------------------------------------------------------------- following
    def _follow(self) -> None:
        due = 0.0
        while not (self.swept or self.lost):
            for key, _ in self.selector.select(max(0.0, due - time.monotonic())):
                key.data()
            self._climb()
            self._tell_states()
            if time.monotonic() >= due:  # and not at each of the messages that many ranks send
                due = time.monotonic() + _LOOK_EVERY
                self._hand_out_tasks()
                self.reading.look()
                self.stacks.look([rank.rank for rank in self.ranks if rank.listens])
                self.view.tick()

    def _tell_states(self) -> None:
        changed = []
        asked = self.ladder.interrupted | self.ladder.killed if self.ladder is not None else set()
        for rank in self.ranks:
            state = rank.state(asked)
            if state != rank.shown and rank.pid:
                rank.shown = state
                changed.append(RankStatus(rank.rank, state, rank.pid))
        if changed:
            self.view.ranks(changed)

    def _live(self) -> list[int]:
        return [rank.rank for rank in self.ranks if rank.exited is None]

    def _hear_reaper(self) -> None:
        self.control.poll()
        try:
            self._take_in_reapers()
        except LostDescriptorsError as error:  # without it nobody would tell that the reaper was killed
            raise StartError(f"the ranks could not be started: {error}") from error
        if self.control.closed:
            self._reaper_ended()

    def _take_in_reapers(self) -> None:
        for message, fds in self.control.drain():
            if isinstance(message, ReaperStarted):
                self.met_reaper = True
                if fds:
                    self.reaper_pidfd = fds[0]
                    self._watch(fds[0], self._reaper_ended)
            elif isinstance(message, NotStarted):
                name = f"rank {message.rank} could not be started" if message.rank >= 0 else "no rank could be started"
                self.refusal = self.refusal or f"{name}: {message.reason}"
                self._stop_others_within(_QUIET)
            elif isinstance(message, RankStarted):
                self.ranks[message.rank].pid = message.pid
                self._hand_out_tasks()
            elif isinstance(message, RankExited):
                self._hear_out(self.ranks[message.rank])  # what it said before it ended
                self.ranks[message.rank].exited = message
                self._note_failure(self.ranks[message.rank])
            elif isinstance(message, Swept):
                self.swept, self.stuck = True, message.stuck

    def _reaper_ended(self) -> None:
        """The reaper's process is gone. What it said before is still in the channel."""
        if self.reaper_pidfd is not None:
            self._unwatch(self.reaper_pidfd)
            os.close(self.reaper_pidfd)
            self.reaper_pidfd = None
            self._hear_reaper()
        self._unwatch(self.control)
        self.lost = not self.swept

    def _hear_rank(self, rank: Rank) -> None:
        rank.channel.poll()
        try:
            self._take_in(rank)
        except LostDescriptorsError as lost:
            if not isinstance(lost.message, Done):
                raise
            text = f"its result holds too much shared memory or too many large pieces for the notebook: {lost.strerror}"
            rank.failed = Failed(rank.rank, lost.message.time_ns, "result", "OSError", text, "")
        if rank.channel.closed:
            self._unwatch(rank.channel)
        self._note_failure(rank)

    def _take_in(self, rank: Rank) -> None:
        for message, fds in rank.channel.drain():
            if isinstance(message, Taken):
                rank.took = True
                self._hand_out_tasks()
            elif isinstance(message, Running):
                rank.running = True
            elif isinstance(message, Interrupted):
                rank.interrupted = True
            elif isinstance(message, Done):
                rank.done, rank.result = message, fds
            elif isinstance(message, Failed):
                rank.failed = message
            elif isinstance(message, Leaving):
                rank.leaving = True

    def _hear_out(self, rank: Rank) -> None:
        while not rank.channel.closed and readable(rank.channel):
            self._hear_rank(rank)

    def _note_failure(self, rank: Rank) -> None:
        if rank.has_failed:
            self.tell_failure_at = min(self.tell_failure_at, time.monotonic() + _TELL_FAILURE_AFTER)
            is_only_its_result = rank.failed is not None and rank.failed.kind == "result"
            self._stop_others_within(_RETURN_WITHIN if is_only_its_result else _QUIET)

    def _stop_others_within(self, seconds: float) -> None:
        self.stop_others_at = min(self.stop_others_at, time.monotonic() + seconds)

    # -------------------------------------------------------------- stopping
    def _climb(self) -> None:
        """Begin or go on with the stopping of ranks, if there is a reason to."""
        now = time.monotonic()
        reason = self._reason_to_stop(now) if self.ladder is None else None
        if reason is not None:
            self.ladder = Ladder(reason, now, self.plan.stop_grace)
        live = self._live()
        if self.ladder is not None:
            if self.commands.kill:
                self.ladder.kill()
            running = [rank.rank for rank in self.ranks if rank.running]
            leaving = [rank.rank for rank in self.ranks if rank.leaving or rank.failed is not None]
            self.ladder.answered.update(rank.rank for rank in self.ranks if rank.interrupted)
            self.ladder.waiting.update(self.stacks.in_collectives(self.ladder.silent(now, live)))
            for due in self.ladder.due(now, live, running, leaving):
                self._signal(due.rank, due.signum, due.group)
            if live:
                self.view.countdown(self.ladder.countdown(now))
        if now >= self.tell_failure_at:
            self._tell_failure(live)
        self._end_stragglers(now, live)

    def _tell_failure(self, live: list[int]) -> None:
        """Show why the other ranks are being stopped: some have their time for ``finally`` and checkpoints."""
        self.tell_failure_at = math.inf
        working = [rank for rank in live if self.ranks[rank].done is None and self.ranks[rank].failed is None]
        cause = judge([rank.end() for rank in self.ranks], self.ladder, self.lost).cause
        if working and cause is not None and cause.end is not None:
            said = failures.headline(cause.end, self.sources)
            self.view.note(f"{said}: the other ranks are being stopped, and have up to {self.plan.stop_grace:g} s")

    def _reason_to_stop(self, now: float) -> Reason | None:
        if self.commands.stop:
            return "user"
        if now >= self.deadline and self.stacks.located(now):
            return "timeout"
        if now >= self.stop_others_at:
            return "failure"
        return None

    def _signal(self, rank: int, signum: int, group: bool = False) -> None:
        self._tell_reaper(SendSignal(rank, signum, group))

    def _end_stragglers(self, now: float, live: list[int]) -> None:
        """Do not wait for ever for ranks that have returned but do not leave, nor for a reaper with no ranks."""
        if live and all(rank.done is not None for rank in self.ranks):
            self.all_done = self.all_done or now
            self._hurry(now, live)
        if not live and self.ranks:
            self.all_ended = self.all_ended or now
            if now - self.all_ended > _SWEEP_WITHIN:
                self.lost = True
        self._end_deaf_reaper(now, live)

    def _hurry(self, now: float, live: list[int]) -> None:
        """Every rank has returned. Their threads get their time, as they may be saving; exit functions not for ever."""
        waiting = [rank for rank in live if not self.ranks[rank].leaving]
        if waiting:
            if now - self.all_done > _TELL_AFTER and not self.told:
                self.told = True
                self.view.note(f"rank {waiting[0]} has returned, and waits for a thread of its own that is no daemon")
            self.all_leaving = now
        elif self.ladder is None and now - (self.all_leaving or self.all_done) > _LEAVE_WITHIN:
            self.view.note(
                f"rank {live[0]} returned but did not leave within {_LEAVE_WITHIN:.0f} s (an exit function?): killed"
            )
            self.ladder = Ladder("failure", now, 0.0)

    def _end_deaf_reaper(self, now: float, live: list[int]) -> None:
        """Do without a reaper that does not answer (it was stopped, or hangs): the ranks die with it."""
        if self.ladder is not None and live and self.ladder.killed.issuperset(live):
            self.all_killed = self.all_killed or now
        if self.all_killed and now - self.all_killed > _DEAF_AFTER:
            _kill_process(self.reaper_pidfd, self.reaper.child)
            self.lost = True
        if not self.met_reaper and now - self.begun > _MEET_WITHIN:
            self._end_or_await_reaper()

    def _end_or_await_reaper(self) -> None:
        """Give up a fork of the kernel, where a lock may be held forever; wait for a fork server, which is slow."""
        server = self.reaper.server
        if server is None:
            _kill_process(None, self.reaper.child)
            self.lost = True
        elif not self.told_of_server:
            self.told_of_server = True
            server.wake()
            self.view.note(
                f"the fork server (pid {server.process.pid}) has not answered for {_MEET_WITHIN:.0f} s: waiting (a "
                "machine short of memory?)"
            )

    def _last_words(self) -> None:
        for rank in self.ranks:
            self._hear_out(rank)
        self._tell_states()
        self.reading.look()
        self.reading.search_the_rest()
        self.reading.tell_what_was_dropped()
        if self.stuck:
            self.view.note(
                f"processes {', '.join(map(str, self.stuck))} survived SIGKILL: they wait in the operating system"
            )

    def _close(self) -> None:
        self.stacks.close()
        self.reading.close()
        for rank in self.ranks:
            rank.close()
        self.control.close()
        if self.reaper_pidfd is not None:
            os.close(self.reaper_pidfd)
        if self.reaper.child is not None:
            with contextlib.suppress(ChildProcessError):  # the user's own code has read its end
                os.waitpid(self.reaper.child, 0)


def _kill_process(pidfd: int | None, child: int | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        elif child is not None:
            os.kill(child, signal.SIGKILL)
