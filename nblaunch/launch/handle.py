"""The user's handle of a launch, and the launch that this process supervises, blocking or in the background."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from nblaunch.engines.protocol import Engine, GivenUpError
from nblaunch.errors import LaunchStoppedError, NblaunchError, RankError, StartError, warn
from nblaunch.launch import failures
from nblaunch.launch.cell_input import CellInput, debugging_of
from nblaunch.launch.commands import Commands
from nblaunch.launch.debug_console import Console, DebugConsole
from nblaunch.launch.ending import Ending, incomplete, places, reason_of
from nblaunch.launch.events_file import EventsFile
from nblaunch.launch.frontend import host
from nblaunch.launch.options import profile_seconds
from nblaunch.launch.output.log_directory import CELL_SUFFIX, LaunchFiles, prune
from nblaunch.launch.payload import Shipment, name_of
from nblaunch.launch.plan import Plan, moved
from nblaunch.launch.result import LaunchResult, notes_on
from nblaunch.launch.run import Job, Run
from nblaunch.launch.run_folders import PREFIX, write_facts
from nblaunch.launch.session_ranks import BusyError, SessionRanks, Ticket
from nblaunch.launch.stopping import Account
from nblaunch.launch.verdict import Verdict
from nblaunch.launch.views import (
    Begun,
    Both,
    Ended,
    LaunchInfo,
    Note,
    Outcome,
    ShieldedView,
    StacksShown,
    Started,
    State,
    View,
)
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import this_process
from nblaunch.machine.limits import process_advice, remedy
from nblaunch.profiles.profile import Profile
from nblaunch.transfer.pickling import OfNotebookError
from nblaunch.wire.messages import Cell, Question

_log = logging.getLogger(__name__)
_live: dict[str, OwnLaunch] = {}
_noted: set[str] = set()
"""Notes that this kernel shows once: names that the ranks changed, and large values."""
_numbers = itertools.count(1)
_cells = itertools.count()
CELLS_PER_PRUNING = 10
"""Cells of sessions until logs are pruned again: that takes as long as half a cell."""
INSIST = "interrupt again to kill the ranks that do not respond; their variables will be lost"
PROFILE_S = 2.0
RUNNING_TIMEOUT_S = 5.0
"""For the ranks of a launch to run before they are profiled."""
MAX_STATES = 4
"""Ranks in a debugger that a handle's text names."""


class Launch(ABC):
    """A launch, as `notebook_launcher` returns it with ``block=False`` or ``detach=``, and `nblaunch.attach`.

    Attributes:
        name: The function's name.
        world_size: The number of ranks; 0 while a detached run waits for nodes.
        id: The id in ``%distributed status`` and in the ranks' ``TORCHELASTIC_RUN_ID``.
        console: The console of the ranks' debuggers.
        profiles: The profiles that were made, once the launch has ended, also if it was stopped; see `profile`.
    """

    def __init__(self, name: str, world_size: int, launch_id: str, view: View, console: Console) -> None:
        self.name, self.world_size, self.id = name, world_size, launch_id
        self.console = console
        self._view = view
        self._input = CellInput(console, view)
        self._finished = threading.Event()
        self._begin = time.monotonic()
        self._result: LaunchResult | None = None
        self._error: BaseException | None = None
        self.profiles: tuple[Profile, ...] = ()
        self._returned: dict[int, Any] = {}
        self._crash = ""
        """A crash after every rank had returned, until `result` has warned of it."""

    @property
    def done(self) -> bool:
        """True if the launch has finished or failed, or was stopped."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: forever) for the launch to end. Return True if it has ended.

        A rank's debugger opens in the cell during the wait, and its prompt may outlast `timeout`.
        """
        return self._input.wait(self._finished, timeout)

    def result(self) -> LaunchResult:
        """Wait for the launch to end and return its result. Warn once if a rank crashed after every rank returned.

        Raises:
            Exception: The exception of the rank that failed first, or one of `nblaunch.errors`. Its ``results`` maps
                each rank that had returned to its return value.
        """
        __tracebackhide__ = True  # IPython leaves this frame out
        self.wait()
        crash, self._crash = self._crash, ""
        if crash:
            try:
                warn(crash)
            except Warning as raised:  # the user's filters make warnings errors
                failures.attach(self._returned, raised)
                raise
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    @abstractmethod
    def stop(self) -> None:
        """Interrupt the ranks and return at once. Each rank gets one KeyboardInterrupt, and time for ``finally``.

        A rank that does not handle the interrupt within 3 s is killed; in a session, after ``stop_grace`` seconds.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill the ranks and return at once."""

    @abstractmethod
    def ask_stacks(self, timeout: float = timeouts.STACKS_TIMEOUT_S) -> None:
        """Show the ranks' stacks in the launch's view. Return at once."""

    @abstractmethod
    def stacks(self, timeout: float = timeouts.STACKS_TIMEOUT_S) -> dict[int, str]:
        """Return the Python stacks of each rank, including ranks that are stuck in C code. The ranks keep running.

        Args:
            timeout: Seconds to wait for the ranks; the result says which ranks did not respond. Default: 2.

        Returns:
            The threads of each running rank, the main thread first; empty if the launch has ended.
        """

    @abstractmethod
    def ask_profile(self, seconds: float = PROFILE_S) -> None:
        """Show a profile of the ranks in the launch's view, once it is made. Return at once."""

    def profile(self, seconds: float = PROFILE_S) -> Profile:
        """Profile the running ranks, all at once, and return where their time goes. Their code needs no change.

        The shares are of the time from the first recorded step of an optimizer to the last, or of the whole recording
        if there are fewer than three: choose `seconds` for three or more. Waiting is the time in a collective until its
        last rank joins. Ranks that use all cores are 10 to 15 % slower while they are recorded, and a quarter slower
        while the traces are read. A ``torch.profiler`` of their own ends the recording.

        Args:
            seconds: How long to record, at most 10. Default: 2. A rank whose trace would exceed 16 MB, as the first
                0.2 s tell, records for a shorter time.

        Returns:
            A `nblaunch.profiles.profile.Profile`: ``sentence`` says what takes the time, ``summary`` is a table, and
            ``trace`` is a file for https://ui.perfetto.dev. Ranks that could not be recorded are in ``missing``, such
            as one that runs C code that holds the GIL for 5 s.

        Raises:
            ArgumentError: `seconds` is invalid.
            NblaunchError: The launch has ended, or cannot be profiled yet.
        """
        found = self._profiled(profile_seconds("seconds", seconds))
        if found is None:
            raise NblaunchError(f"{self.name} has ended: only running ranks can be profiled")
        return found

    @abstractmethod
    def _profiled(self, seconds: float) -> Profile | None:
        """Return a profile; None if the launch ends first."""

    def _not_running(self) -> NblaunchError:
        return NblaunchError(f"{self.name} cannot be profiled now: it is queued, or its ranks start")

    def __reduce__(self) -> NoReturn:
        raise OfNotebookError(self, "a launch")

    def __repr__(self) -> str:
        state = "; ".join([self._state(), *self.console.states[:MAX_STATES]])
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}, " if self.world_size else ""
        return f"<Launch {self.id} of {self.name}: {ranks}{state}>"

    def _state(self) -> str:
        if not self.done:
            return f"running for {time.monotonic() - self._begin:.0f} s"
        return "stopped" if isinstance(self._error, LaunchStoppedError) else "failed" if self._error else "finished"

    def _repr_html_(self) -> str | None:
        return self._view.record_html()


class OwnLaunch(Launch):
    """A launch that a thread of this process supervises.

    `ticket`: its place in the queue of a session's ranks; None: it starts its own. `root`: a detached run's folder, for
    its log directories; `view` writes its events.
    """

    console: DebugConsole

    def __init__(
        self,
        plan: Plan,
        shipment: Shipment,
        view: View,
        engine: Engine,
        ticket: Ticket | None,
        root: Path | None = None,
    ) -> None:
        console = DebugConsole(plan.world_size, shipment.sources)
        name, number = name_of(shipment.payload.function), next(_numbers)
        launch_id = f"{os.getpid()}-{number}-{secrets.token_hex(3)}"
        shielded: View = ShieldedView(view)
        if root is None:
            begin = partial(_folder_of, launch_id, name, host().notebook())  # without `self`: a result keeps its view
            shielded = Both(ShieldedView(EventsFile(begin)), shielded)
        super().__init__(name, plan.world_size, launch_id, shielded, console)
        self._plan, self._root = plan, root
        self._parcel, self._sent = shipment.parcel, shipment.sent
        self._engine, self._ticket = engine, ticket
        self._commands = Commands()
        self._is_blocking = False
        self._interrupts = 0
        timeout = plan.options.timeout
        deadline = float("inf") if timeout is None else self._begin + timeout
        self._job = Job(plan, self.id, this_process(), shipment, deadline, console)
        self._account: Account | None = None
        self._thread = threading.Thread(target=self._supervise, name=f"nblaunch-{self.id}", daemon=True)

    def begin(self, *, blocking: bool = False) -> None:
        """Start the launch. `blocking`: the caller waits for its end."""
        self._is_blocking = blocking
        self._input.begin(blocking=blocking)
        debugging = debugging_of(self._plan.options, is_seen=blocking or self._view.shows_notes)
        is_question = isinstance(self._job.shipment.payload.function, Question)
        self.console.debugging = replace(debugging, post_mortem=False) if is_question else debugging
        try:
            self._view.on(Begun(self, blocking, lambda: time.monotonic() - self._begin))
            _live[self.id] = self
            self._thread.start()
        except RuntimeError as error:
            self._release()
            raise StartError(f"{self.name} could not be started: {error}: {process_advice()}") from error
        except BaseException:  # the user's interrupt: the caller gets no handle
            self._abandon()
            self.discard()
            raise

    def discard(self) -> None:
        """Release the resources of a launch that was not started; its own thread releases those of a started one."""
        if self._thread.ident is None:
            self._release()

    def runs_in(self, ranks: SessionRanks) -> bool:
        return self._ticket is not None and self._ticket.ranks is ranks

    @property
    def keeps_ranks(self) -> bool:
        """Return True if it runs in a session, whose ranks stay: a kill costs their variables."""
        return self._ticket is not None

    def stop(self) -> None:
        self._commands.ask()

    def kill(self) -> None:
        self._commands.ask(kill=True)

    def ask_stacks(self, timeout: float = timeouts.STACKS_TIMEOUT_S) -> None:
        def show(asked: concurrent.futures.Future[dict[int, str]]) -> None:
            if stacks := asked.result():  # else the launch has ended
                self._view.on(StacksShown(stacks))

        self._commands.want_stacks(timeout).add_done_callback(show)

    def stacks(self, timeout: float = timeouts.STACKS_TIMEOUT_S) -> dict[int, str]:
        asked = self._commands.want_stacks(timeout)
        with contextlib.suppress(concurrent.futures.TimeoutError):  # the supervisor is starting or ending
            return asked.result(timeout + timeouts.STACKS_QUEUE_TIMEOUT_S)
        return {}

    def ask_profile(self, seconds: float = PROFILE_S) -> None:
        self._commands.want_profile(seconds)

    def _profiled(self, seconds: float) -> Profile | None:
        asked = self._commands.want_profile(seconds)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return asked.result(RUNNING_TIMEOUT_S)
        if asked.cancel():
            raise self._not_running()
        return asked.result()

    def _state(self) -> str:
        is_queued = self._ticket is not None and self._ticket in self._ticket.ranks.queue.tickets[1:]
        state = super()._state()
        return state.replace("running", "queued") if is_queued else state

    def join(self) -> LaunchResult:
        """Start the launch and wait for it to end.

        One interrupt stops the ranks, a second one (in a session, a third one) kills them.

        Raises:
            KeyboardInterrupt: The user interrupted it. Every rank has exited, or, in a session, finished the task.
        """
        __tracebackhide__ = True  # IPython leaves this frame out
        try:
            self.begin(blocking=True)
            interrupted = self._wait_out()
        except BaseException as error:  # an interrupt between two lines of ours
            self._abandon()
            failures.attach(self._returned, error)
            raise
        if interrupted and isinstance(self._error, LaunchStoppedError):
            files = getattr(self._error, "_nblaunch_files", None)
            raise failures.interruption(str(self._error), self._returned, files) from None
        if interrupted and self._error is None:  # end a loop of launches, too; the exception carries the result
            said = f"{self.name} was interrupted, but every rank returned: the values are in sys.last_value.results"
            raise failures.interruption(said, self._returned)
        return self.result()

    def _abandon(self) -> None:
        """End what an interrupt between two lines of ours has left running."""
        if self.id not in _live:
            return
        self._interrupts += 1
        self._commands.ask(kill=not self.keeps_ranks)  # the variables of a session are lost with its ranks
        if self.keeps_ranks and self._thread.ident is not None:
            self._wait_out()
        else:
            self._finished.wait(timeouts.KILLED_LAUNCH_TIMEOUT_S)

    def _wait_out(self) -> bool:
        to_kill = 3 if self.keeps_ranks else 2
        while not self._finished.is_set():
            try:
                self._commands.interrupts_to_kill = max(0, to_kill - self._interrupts)
                if self._interrupts:
                    self._commands.ask(kill=self._interrupts >= to_kill)
                if self.keeps_ranks and self._interrupts == 2:
                    self._view.on(Note(INSIST))
                self._input.wait(self._finished, None, is_stopping=self._interrupts > 0)
            except KeyboardInterrupt:
                self._interrupts += 1
        return self._interrupts > 0 or self.console.has_quit

    # -------------------------------------------------------------- in the supervisor thread
    def _supervise(self) -> None:
        try:
            for number in range(self._plan.options.max_restarts + 1):
                if not self._attempt(number):
                    break
        except (BusyError, GivenUpError):
            self._error = LaunchStoppedError(f"{self.name} was stopped before its ranks started")
            self._view.on(Ended(self._outcome("stopped", self._error)))
        except BaseException as error:  # noqa: BLE001  # `result` raises it
            if isinstance(error, StartError) and self._error is not None:  # of the attempt before
                self._view.on(Note(f"the ranks could not be restarted: {error}"))
                error = self._error
            elif isinstance(error, (StartError, RankError)):
                error = error.with_traceback(None)  # the frames are nblaunch's own
            else:
                _log.exception("the supervisor of launch %s failed", self.id)
            self._error = error
            self._view.on(Ended(self._outcome("failed", error)))
        finally:
            del self._job  # the payload: the notebook may keep this handle for long
            self._release()
            if not self.keeps_ranks or next(_cells) % CELLS_PER_PRUNING == 0:
                prune()  # late: no caller waits for it, though the next cell may
            host().forget_thread()

    def _release(self) -> None:
        _live.pop(self.id, None)
        self._commands.close()
        if self._parcel is not None:
            self._parcel.close()
        if self._ticket is not None:
            self._ticket.ranks.queue.discard(self._ticket)
        self._finished.set()

    def _attempt(self, number: int) -> bool:
        """Run the task once. Return True if it is to be run again."""
        try:
            files = LaunchFiles.create(self.id + CELL_SUFFIX if self.keeps_ranks else self.id, self._root)
        except OSError as refusal:
            raise StartError(f"cannot create the log directory of {self.name}: {refusal}{remedy(refusal)}") from refusal
        try:
            if number > 0 and not self._engine.is_local:  # lost nodes are replaced
                machines = self._engine.machines(lambda text: self._view.on(Note(text)), lambda: self._commands.stop)
                self._plan = moved(self._plan, machines)
                self._job = replace(self._job, plan=self._plan)
            self._view.on(Started(self._info(files, number)))
            if number == 0:
                for note in notes_on(self._sent, _noted):
                    self._view.on(Note(note))
            run = Run(self._job, number, files, self._view, self._commands, lists_reports=self._root is None)
            verdict = run.start(self._engine) if self._ticket is None else run.take_turn(self._ticket)
            error = self._conclude(verdict, run, files)
            self._error = error
            again = number < self._plan.options.max_restarts and not self._commands.stop
            if error is not None and verdict.state == "failed" and again:
                restarting = f"restarting all ranks ({number + 1} of {self._plan.options.max_restarts})"
                self._view.on(Note(f"{failures.summary(error)}: {restarting}"))
                return True
            state: State = "failed" if error is not None and verdict.state == "finished" else verdict.state
            self._view.on(Ended(self._outcome(state, error, files.directory)))
            return False
        finally:
            files.close()

    def _info(self, files: LaunchFiles, number: int) -> LaunchInfo:
        plan, function = self._plan, self._job.shipment.payload.function
        name = f"{self.name}, session {self._ticket.ranks.name}" if self._ticket is not None else self.name
        name += f", run {self._root.name.removeprefix(PREFIX)}" if self._root is not None else ""
        shown = self.id, name, plan.world_size, plan.device, files.directory, number, plan.env, files
        only = function.ranks if isinstance(function, Cell) else None
        return LaunchInfo(*shown, is_session=self.keeps_ranks, hosts=plan.hosts, only=only)

    def _outcome(self, state: State, error: BaseException | None, logs: Path | None = None) -> Outcome:
        seconds = time.monotonic() - self._begin
        if error is None:
            return Outcome(state, seconds, "")
        failure = failures.describe(error, self._account) if state == "failed" else None
        return Outcome(state, seconds, failures.summary(error, logs), failure)  # views show the path

    # -------------------------------------------------------------- the end
    def _conclude(self, verdict: Verdict, run: Run, files: LaunchFiles) -> BaseException | None:
        """Take what the ranks have returned. Return the exception to raise, if there is one."""
        task, plan = run.task, self._plan
        account = Account(
            self.name,
            [rank.end for rank in task.present],
            files,
            self._job.shipment.sources,
            {rank.rank: rank.logs for rank in run.output.ranks},
            run.hint,
            task.difference,
            "" if self._ticket is None else self._ticket.ranks.name,
            plan.hosts,
            is_shown=self._is_blocking and self._view.shows_failures,
            seconds=time.monotonic() - self._begin,
            timeout=plan.options.timeout,
            incomplete=incomplete(task),
            places=places(task),
        )
        dropped = {rank.rank: rank.dropped for rank in run.output.ranks}
        ending = Ending(verdict, account, reason_of(task), self.world_size, dropped, self._sent)
        self.profiles = run.profiles
        error = self._take(ending, run)
        if ending.crash:
            self._view.on(Note(ending.crash))
        if verdict.state == "finished" and error is None:
            changed = {name for rank in task.ranks if rank.done is not None for name in rank.done.changed}
            for name in sorted(changed - _noted):
                _noted.add(name)
                self._view.on(
                    Note(
                        f"`{name}` was modified in the ranks, but ranks work on copies. Return it (for a module, its "
                        "`state_dict()`) to get the new value"
                    )
                )
        elif verdict.cause is not None:
            self._account = account
        error = error if (raised := ending.error()) is None else raised
        if error is not None:
            failures.attach(self._returned, error, files)
        return error

    def _take(self, ending: Ending, run: Run) -> BaseException | None:
        """Take the results of the ranks. Return what keeps them from being loaded."""
        self._returned, error = ending.load(run.results)
        self._crash = ending.crash
        if ending.verdict.state == "finished" and error is None:
            self._result = ending.result(self._returned, run.output.reports, self._view.record_html)
            self._result.profiles = self.profiles
        return error


def _folder_of(launch_id: str, name: str, notebook: str, info: LaunchInfo) -> Path:
    """Return the folder of an attempt, which begins with what is known of the launch."""
    write_facts(info.log_dir, launch_id, name, notebook)
    return info.log_dir


def live_launches() -> list[OwnLaunch]:
    return list(_live.values())
