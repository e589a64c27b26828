"""One task over a worker group: from the ranks' first message to a verdict.

It knows no process and opens no file: parcels and log directories pass through it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from nblaunch.engines.protocol import Event, NodeLeaving, Received
from nblaunch.launch import failures
from nblaunch.launch.commands import Commands
from nblaunch.launch.debug_console import DebugConsole
from nblaunch.launch.group import Rank, WorkerGroup
from nblaunch.launch.profiling import Profiling
from nblaunch.launch.stacks import Inspector
from nblaunch.launch.stopping import (
    LAUNCH,
    ByUser,
    Ladder,
    NoProgress,
    PeerFailed,
    Policy,
    Reason,
    TakenBack,
    TimedOut,
)
from nblaunch.launch.stuck import StuckWatch, difference
from nblaunch.launch.verdict import Verdict, judge
from nblaunch.launch.views import Countdown, Note, RanksChanged, RankStatus, Stuck, View
from nblaunch.machine import timeouts
from nblaunch.wire import messages
from nblaunch.wire.messages import (
    Done,
    Failed,
    FromDebugger,
    Interrupted,
    Leaving,
    Names,
    NotStarted,
    Profiled,
    RankExited,
    Running,
    Source,
    Stepped,
    World,
)

_log = logging.getLogger(__name__)


class Task:
    """See the module. Used from the supervisor's thread. `joins`: the ranks need their process group.

    Attributes:
        number: From 1, in its group.
        deadline: When to stop the task, by the monotonic clock; later by the time of debugging.
        present: The ranks that take part: a kept rank may have exited before.
        difference: How the collective that a rank waited in differs from that of the rank it waited for, if known.
        profiling: Makes the profiles of the task; None: it has none.
    """

    def __init__(
        self,
        number: int,
        group: WorkerGroup,
        view: View,
        commands: Commands,
        sources: Mapping[str, Source],
        stop_grace: float,
        deadline: float = math.inf,
        policy: Policy = LAUNCH,
        joins: bool = True,
        console: DebugConsole | None = None,
    ) -> None:
        self.number, self.group, self.view, self.commands = number, group, view, commands
        self.sources, self.stop_grace, self.deadline = sources, stop_grace, deadline
        self.ranks = [Rank(member, is_absent=member.exited is not None) for member in group.members]
        self.present = [rank for rank in self.ranks if not rank.is_absent]
        self.policy, self._joins = policy, joins
        self.ladder: Ladder | None = None
        self.inspector = Inspector(group, sources, commands)
        self._failure: PeerFailed | TakenBack = PeerFailed()
        self._watches_stuck = joins and policy.kills
        self.stuck = StuckWatch(self.present, sources)
        self._observe_at = time.monotonic() + timeouts.STUCK_POLL_S
        self._shown_stuck = ""
        self.difference = ""
        self.profiling: Profiling | None = None
        self._stop_at = math.inf
        """When to stop the other ranks after a failure."""
        self._failed_at: float | None = None
        self._has_noted_failure = False
        self._returned_at: float | None = None
        self._threads_ended_at = 0.0
        self._has_noted_threads = False
        self._is_last = False
        self.console = console or DebugConsole(len(self.ranks), sources)
        self.console.begin(number, commands.set)
        self._stepped_at = time.monotonic()

    def send(
        self,
        world: Callable[[int], World],
        parcel: Sequence[int],
        *,
        last: bool = False,
        log_dir: str = "",
        path: tuple[str, ...] = (),
        wanted: Collection[int] | None = None,
        reports_step: bool = False,
    ) -> None:
        """Send the task to every rank. The parcel's descriptors stay open until every rank runs.

        Kept ranks write to `log_dir` from now on (empty: where they did before), need `path` in their ``sys.path``, and
        return None at once if they are not `wanted`. After the last task ranks exit.
        """
        self._is_last = last
        tasks = [
            messages.Task(
                self.number,
                replace(world(rank.rank), waits_for_user=self.console.debugging.can_type),
                log_dir=log_dir,
                joins=self._joins,
                path=path,
                is_last=last,
                takes_part=wanted is None or rank.rank in wanted,
                debugging=self.console.debugging,
                reports_step=reports_step,
            )
            for rank in self.ranks
        ]
        self.group.workers.send_tasks(tasks, parcel)

    # -------------------------------------------------------------- events
    def take(self, event: Event) -> None:
        if isinstance(event, Received):
            self._receive(event)
        elif isinstance(event, RankExited):
            self._note_failure(self.ranks[event.rank])
        elif isinstance(event, NotStarted):
            self._stop_within(timeouts.PEER_FAILURE_WAIT_S)
        elif isinstance(event, NodeLeaving) and not isinstance(self._failure, TakenBack):
            self._failure = TakenBack(event.reason)
            self.view.on(Note(f"{event.reason}: stopping the ranks within {self.stop_grace:g} s"))
            self._stop_within(0.0)

    def _receive(self, event: Received) -> None:
        rank, message = self.ranks[event.rank], event.message
        if getattr(message, "task", None) != self.number:  # a late message of an earlier task
            event.parcel.close()
        elif isinstance(message, Running):
            rank.is_running, rank.taken = True, message.names
        elif isinstance(message, Interrupted):
            rank.interrupted = True
        elif isinstance(message, Done) and event.lost:
            text = f"the result could not be received: {event.lost}"
            rank.failed = Failed(rank.rank, self.number, message.time_ns, "result", "OSError", text, "")
            self._note_failure(rank)
        elif isinstance(message, Done):
            rank.done, rank.result = message, event.parcel
        elif isinstance(message, Failed):
            rank.failed = message
            self._note_failure(rank)
        elif isinstance(message, Leaving):
            rank.is_leaving = True
        elif isinstance(message, Names):
            rank.names = message
        elif isinstance(message, FromDebugger):
            self.console.take(message)
        elif isinstance(message, (Stepped, Profiled)) and self.profiling is not None:
            self.profiling.take(message, event.parcel, event.lost, time.monotonic())

    def _note_failure(self, rank: Rank) -> None:
        if not rank.has_failed:
            return
        if self._failed_at is None:
            self._failed_at = time.monotonic()
        lost_result = rank.failed is not None and rank.failed.kind == "result"
        self._stop_within(timeouts.RESULT_FAILURE_WAIT_S if lost_result else timeouts.PEER_FAILURE_WAIT_S)

    def _stop_within(self, seconds: float) -> None:
        self._stop_at = min(self._stop_at, time.monotonic() + seconds)

    # -------------------------------------------------------------- time
    def step(self) -> None:
        """Do what is due: start or continue stopping the ranks, and show their states."""
        now = time.monotonic()
        self._serve_debuggers(now)
        if self._returned_at is None and all(rank.done is not None for rank in self.present):
            self._returned_at = self._threads_ended_at = now
        self._inspect(now)
        if self.profiling is not None:
            self.profiling.step(now)
        reason = self._reason_to_stop(now) if self.ladder is None else None
        if reason is not None:
            self.ladder = Ladder(reason, now, self.stop_grace, self.policy)
        live = self.group.live
        if not self._is_last:  # ranks that are done wait for the next task
            live = [rank for rank in live if not self.ranks[rank].is_over]
        if self.ladder is not None:
            self._climb(self.ladder, now, live)
        is_due = self._failed_at is not None and now >= self._failed_at + timeouts.FAILURE_NOTE_DELAY_S
        if is_due and not (self._has_noted_failure or self.console.is_open):  # which announces the failure itself
            self._has_noted_failure = True
            self._say_failure(live)
        if self._returned_at is not None and live and self._is_last:
            self._await_exits(now, live, self._returned_at)
        self._show_states()

    def _serve_debuggers(self, now: float) -> None:
        """Pass on what the user has typed. Time limits wait while a debugger is open."""
        console = self.console
        if console.is_open:
            console.paused_s += now - self._stepped_at
            self._stop_at += now - self._stepped_at
            self.stuck.pause()
        elif self.profiling is not None and self.profiling.is_recording:  # a rank that returns stores it first
            self.deadline += now - self._stepped_at
        self._stepped_at = now
        fates = {rank.rank: partial(failures.fate, rank.end, self.sources) for rank in self.present if rank.is_over}
        console.left(fates, is_stopping=self.ladder is not None or self.commands.stop)
        console.step()
        for number, message in console.outgoing():
            self.group.members[number].worker.tell(message)
        if console.has_quit and not self.commands.stop:
            self.commands.ask()

    def _inspect(self, now: float) -> None:
        """Ask the ranks where they are, while something waits or the user asks."""
        is_running = self._failed_at is None and self._returned_at is None and self.ladder is None
        watches = is_running and self._watches_stuck and not self.console.is_open
        is_quiet = watches and self.stuck.quiet(now) >= timeouts.STUCK_AFTER_S / 2
        interval = timeouts.STUCK_REPEAT_S if is_quiet else math.inf
        has_answers = self.inspector.step(now, self.stuck.running, interval)
        if not watches:
            return
        try:
            if now >= self._observe_at:
                self._observe_at = now + timeouts.STUCK_POLL_S
                self.stuck.observe(now)
            if has_answers:
                self.stuck.judge(self.inspector.places, now)
            found = self.stuck.verdict
            reason = found.reason if found is not None else ""
            if reason != self._shown_stuck:
                self._shown_stuck = reason
                self.view.on(Stuck(found.lines, found.ranks) if found is not None else Stuck())
        except Exception:  # noqa: BLE001  # best effort: must never fail the task
            _log.exception("nblaunch: cannot determine why the ranks of task %d wait", self.number)
            self._watches_stuck = False

    def _reason_to_stop(self, now: float) -> Reason | None:
        if self.commands.stop:
            return ByUser()
        if now >= self.deadline + self.console.paused_s and self.inspector.located(now):
            return TimedOut()
        if self.console.has_examined and self.console.debugging.post_mortem:
            return PeerFailed()
        if self.console.is_open:
            return None
        if now >= self._stop_at:
            return self._failure
        verdict = self.stuck.verdict
        is_long = self.stuck.quiet(now) >= timeouts.COLLECTIVE_TIMEOUT_S
        is_alone = verdict is not None and verdict.pair is not None and self.policy.keeps
        return NoProgress(verdict) if verdict is not None and (is_long or is_alone) else None

    def _climb(self, ladder: Ladder, now: float, live: list[int]) -> None:
        if self.commands.kill:
            ladder.at_once = True
        running = [rank.rank for rank in self.ranks if rank.is_running]
        leaving = [rank.rank for rank in self.ranks if rank.is_leaving or rank.failed is not None]
        ladder.answered.update(rank.rank for rank in self.ranks if rank.interrupted)
        has_left = any(rank.is_over for rank in self.present)
        for number in ladder.to_free(now, live, has_left=has_left):
            self.group.members[number].worker.free(self.number)
        interrupts, kills = ladder.due(now, live, running, leaving)
        for number in interrupts:
            self.group.members[number].worker.interrupt(self.number)
        for number in kills:
            self.group.kill(number)
        if live:
            self.view.on(Countdown(ladder.countdown(now, self.commands.interrupts_to_kill)))

    def _say_failure(self, live: list[int]) -> None:
        working = [rank for rank in live if self.ranks[rank].done is None and self.ranks[rank].failed is None]
        cause = self.verdict().cause
        if working and cause is not None and cause.end is not None:
            said = f"rank {cause.rank} {failures.fate(cause.end, self.sources)}"
            self.view.on(Note(f"{said}: stopping the other ranks within {self.stop_grace:g} s"))

    def _await_exits(self, now: float, live: list[int], returned_at: float) -> None:
        """Wait for non-daemon threads, which may be saving, without a limit; kill ranks whose exit functions hang."""
        waiting = [rank for rank in live if not self.ranks[rank].is_leaving]
        if waiting:
            self._threads_ended_at = now
            if now - returned_at > timeouts.THREADS_NOTE_DELAY_S and not self._has_noted_threads:
                self._has_noted_threads = True
                self.view.on(Note(f"rank {waiting[0]} returned, but waits for a non-daemon thread to end"))
        elif self.ladder is None and now - self._threads_ended_at > timeouts.EXIT_TIMEOUT_S:
            self.view.on(
                Note(
                    f"rank {live[0]} returned but did not exit within {timeouts.EXIT_TIMEOUT_S:.0f} s (an atexit "
                    "function, or an unread multiprocessing queue?): killed"
                )
            )
            self.ladder = Ladder(PeerFailed(), now, 0.0)

    def _show_states(self) -> None:
        changed = []
        stopped = self.ladder.interrupted | self.ladder.killed if self.ladder is not None else set()
        waiting = self.console.stopped
        for rank in self.ranks:
            state = "returned" if self.policy.keeps and rank.done is not None else rank.state(stopped)
            state = "waiting" if state == "running" and rank.rank in waiting else state
            if state != rank.shown and rank.member.pid:
                rank.shown = state
                changed.append(RankStatus(rank.rank, state, rank.member.pid))
        if changed:
            self.view.on(RanksChanged(changed))

    # -------------------------------------------------------------- the end
    def give_up(self) -> None:
        """Stop the task, as if a rank had failed."""
        self._stop_within(0.0)

    @property
    def is_given_up(self) -> bool:
        """Whether ranks that did not respond are left alone."""
        return self.ladder is not None and self.ladder.is_given_up(time.monotonic())

    @property
    def is_over(self) -> bool:
        return all(rank.is_over for rank in self.ranks)

    def finish(self) -> Verdict:
        """Return the verdict. Every rank has returned, failed or exited."""
        self._show_states()
        if self.profiling is not None:
            if self.profiling.is_reading:
                self.view.on(Note("the ranks have ended; what they have recorded is being read"))
            self.profiling.finish()
        verdict = self.verdict()
        reason = self.ladder.reason if self.ladder is not None else None
        pair = reason.verdict.pair if isinstance(reason, NoProgress) else None
        if verdict.cause is not None and verdict.cause.kind == "collective":
            pair = verdict.cause.rank, verdict.cause.finished_rank
        if pair is not None:
            first, second = (self.group.members[rank].worker.collectives() for rank in pair)
            self.difference = difference(first, second, pair, self.sources)
        return verdict

    def verdict(self) -> Verdict:
        verdict = judge([rank.end for rank in self.present], self.ladder, self.group.is_lost)
        return replace(verdict, crashed=()) if self.policy.keeps else verdict  # a kept rank does not exit

    def take_results(self) -> dict[int, list[int]]:
        return {rank.rank: rank.result.take() for rank in self.ranks if rank.result}

    def close(self) -> None:
        """Close results that were not taken; answer open requests for stacks and profiles with none."""
        self.console.end()
        if self.profiling is not None:
            self.profiling.close()
        self.inspector.close()
        for rank in self.ranks:
            rank.result.close()
