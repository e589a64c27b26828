"""A detached run as another process sees it: what its folder holds, shown from the begin and while it grows."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nblaunch.engines import current
from nblaunch.errors import RankLostError, ResultError, StartError
from nblaunch.launch import run_folders
from nblaunch.launch.control import ControlLink
from nblaunch.launch.debug_console import RemoteConsole
from nblaunch.launch.ending import Ending
from nblaunch.launch.events_file import EventsReader
from nblaunch.launch.failures import attach as attach_results
from nblaunch.launch.frontend import host
from nblaunch.launch.handle import PROFILE_S, RUNNING_TIMEOUT_S, Launch
from nblaunch.launch.options import Options
from nblaunch.launch.output.follower import OutputFollower
from nblaunch.launch.output.reports import ReportList
from nblaunch.launch.payload import Shipment
from nblaunch.launch.result import LaunchResult, Sent
from nblaunch.launch.run_folders import RunFolder
from nblaunch.launch.views import (
    Begun,
    Ended,
    Event,
    Note,
    Outcome,
    Preparing,
    ProfileShown,
    RanksPlaced,
    Reports,
    ShieldedView,
    StacksShown,
    Started,
    Tick,
    View,
)
from nblaunch.machine import segments, timeouts
from nblaunch.machine.inventory import Process
from nblaunch.machine.packages import installed_path
from nblaunch.profiles.profile import Profile
from nblaunch.wire import launch_files
from nblaunch.wire.messages import Source

ENDING = "ending.pickle"
_MAIN = (
    "import json, os, sys; os.fork() and os._exit(0); folder, path, *fds = json.loads(sys.argv[1]); "
    "sys.path[:] = path; from nblaunch.launch.runner import main; main(folder, *fds)"
)
"""The runner is no descendant of the kernel: VS Code kills those."""
_shown = itertools.count(1)
_live: weakref.WeakSet[AttachedLaunch] = weakref.WeakSet()


# ------------------------------------------------------------------ starting a run
@dataclass(frozen=True)
class RunOrder:
    """What a runner is to run; the payload comes as descriptors."""

    function: str
    only: tuple[int, ...] | None
    """The ranks that a cell is for; None: all."""
    options: Options
    process: Process
    sources: Mapping[str, Source]
    sent: Sent


def start_run(name: str, shipment: Shipment, order: RunOrder) -> RunFolder:
    """Start the runner of a new run. ArgumentError: the name is in use. StartError: the system refuses."""
    notebook, source = host().notebook(), next(iter(order.sources.values()), Source("", ""))
    folder = lock = None
    try:
        folder = run_folders.create(name)
        lock = launch_files.acquire_lock(folder)  # the runner inherits it: the run always has a holder
        assert lock is not None  # no one looks for it in a folder without facts
        job = os.environ.get("SLURM_JOB_ID", "")
        facts = {"source": source.text, "versions": run_folders.versions(), "job": job}
        run_folders.write_facts(folder, name, order.function, notebook, **facts)
        _start_runner(folder, lock, shipment, order)
    except BaseException as error:  # the user's interrupt, too: a runner ends if it cannot tell that it is ready
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise StartError(f"the run {name} could not be started: {error}") from error
        raise
    finally:
        if lock is not None:
            os.close(lock)
    return run_folders.find_run(name)


def _start_runner(folder: Path, lock: int, shipment: Shipment, order: RunOrder) -> None:
    with contextlib.ExitStack() as opened:
        log = opened.enter_context(open(folder / run_folders.RUNNER_LOG, "ab"))
        orders = opened.enter_context(tempfile.TemporaryFile())
        pickle.dump(order, orders)
        orders.flush()
        orders.seek(0)
        ready, told = os.pipe()
        opened.callback(os.close, ready)
        fds = [told, lock, orders.fileno(), *shipment.fds]
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, json.dumps([str(folder), installed_path(), *fds])],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(told)
        process.wait()
        if os.read(ready, 2) != b"ok":
            said = (folder / run_folders.RUNNER_LOG).read_text(errors="replace").strip()[-4000:]
            raise StartError(f"the process that holds the run could not be started: {said or 'it was killed'}")


# ------------------------------------------------------------------ showing a folder
class Replay:
    """Shows the events and outputs of a folder to a view: first those that are there, then those that are added.

    Attributes:
        outcome: How the launch has ended, once that is shown.
        seconds: The time since its ranks were started, as a launch's outcome counts; before, since its begin.
    """

    def __init__(self, run: RunFolder, view: View, stop: Callable[[], None] = lambda: None) -> None:
        self.outcome: Outcome | None = None
        self._run, self._view, self._stop = run, view, stop
        self._id = f"{run.name}-{os.getpid()}-{next(_shown)}"  # each panel of a run has its own
        self._reader = EventsReader(run.path)
        self._at: float | None = None
        self._began = run.began
        self._output: OutputFollower | None = None
        self._printed: list[Reports] = []
        """Of the present attempt."""
        self.profiles: list[Profile] = []
        """Of the present attempt."""
        self._directory = run.path

    def seconds(self) -> float:
        return (time.time() if self._at is None else self._at) - self._began

    @property
    def reports(self) -> ReportList:
        return self._output.listed(self._printed) if self._output is not None else ReportList()

    def read(self) -> list[tuple[float, Event]]:
        """Show what has been added; return the events as they are shown, with their times."""
        events = []
        for at, event in self._reader.read():
            self._at = at
            events.append((at, self._take(event)))
        self._at = None
        if self._output is not None and self.outcome is None:
            self._output.poll()
            self._view.on(Tick())
        return events

    def end(self, outcome: Outcome) -> None:
        """Show the end that the folder does not tell."""
        self._take(Ended(outcome))

    def _take(self, event: Event) -> Event:
        if isinstance(event, (Started, Ended)) and self._output is not None:
            self._output.finish()
        if isinstance(event, Started):
            if self._output is None and self._at is not None:  # the first attempt
                self._began = self._at
            directory = self._run.path / event.info.log_dir.name if self._run.is_detached else self._run.path
            info = replace(event.info, launch_id=self._id, log_dir=directory)  # it may have been moved
            ranks = [current.files_of(rank, info.log_dir) for rank in range(info.world_size)]
            self._output = OutputFollower(ranks, (), self._view, lists_reports=False)
            self._printed.clear()
            self.profiles.clear()
            self._directory = directory
            event = Started(info)
        elif isinstance(event, Reports):
            self._printed.append(event)
        elif isinstance(event, ProfileShown):
            profile = event.profile
            if profile.trace is not None:
                profile = replace(profile, trace=self._directory / profile.trace.name)
            self.profiles.append(profile)
            event = ProfileShown(profile)
        elif isinstance(event, Preparing) and event.cancel is not None:
            event = replace(event, cancel=self._stop)
        elif isinstance(event, Ended):
            self.outcome = event.outcome
        self._view.on(event)
        return event


class AttachedLaunch(Launch):
    """A run that another process holds. A thread shows it in this one's view."""

    def __init__(self, run: RunFolder, view: View) -> None:
        self._run = run
        self._link = _linked(run)
        shielded = ShieldedView(view)
        console = self._link.console if self._link is not None else RemoteConsole(lambda message: None)
        super().__init__(run.function, run.ranks, run.name, shielded, console)
        self._replay = Replay(run, shielded, self.stop)
        self._asked: list[tuple[float, type[Event], Future[Any]]] = []
        """When stacks or a profile was asked for, the event that brings it, and what waits for it."""
        self._is_loaded = False
        self._input.begin(blocking=False)
        self._view.on(Begun(self, False, self._replay.seconds))
        _live.add(self)
        thread = threading.Thread(target=self._follow, name=f"nblaunch-run-{run.name}", daemon=True)
        thread.start()
        if self._link is None:
            thread.join()  # `done` is right at once

    @property
    def outcome(self) -> Outcome | None:
        """How the run has ended, once that is shown."""
        return self._replay.outcome

    def stop(self) -> None:
        self._tell("stop")

    def kill(self) -> None:
        self._tell("kill")

    def ask_stacks(self, timeout: float = timeouts.STACKS_TIMEOUT_S) -> None:
        self._tell("stacks", timeout=timeout)

    def stacks(self, timeout: float = timeouts.STACKS_TIMEOUT_S) -> dict[int, str]:
        asked: Future[dict[int, str] | None] = Future()
        self._asked.append((time.time(), StacksShown, asked))
        self.ask_stacks(timeout)
        with contextlib.suppress(TimeoutError):
            return {} if self.done else asked.result(timeout + timeouts.STACKS_QUEUE_TIMEOUT_S) or {}
        return {}

    def ask_profile(self, seconds: float = PROFILE_S) -> None:
        self._tell("profile", seconds=seconds)

    def _profiled(self, seconds: float) -> Profile | None:
        deadline = time.monotonic() + RUNNING_TIMEOUT_S
        while not (self.world_size or self._finished.wait(timeouts.LOG_POLL_S)):
            if time.monotonic() > deadline:
                raise self._not_running()
        asked: Future[Profile | None] = Future()
        self._asked.append((time.time(), ProfileShown, asked))
        self.ask_profile(seconds)
        return None if self.done else asked.result()

    def wait(self, timeout: float | None = None) -> bool:
        __tracebackhide__ = True  # IPython leaves this frame out
        try:
            is_over = super().wait(timeout)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the run {self.id} goes on: stop() stops it") from None
        if is_over:
            run_folders.mark_seen(self._run.path)
        return is_over

    def result(self) -> LaunchResult:
        __tracebackhide__ = True  # IPython leaves this frame out
        self.wait()
        if not self._is_loaded:
            self._load()
            self._is_loaded = True
        return super().result()

    def _state(self) -> str:
        if not self.done:
            return f"running for {self._replay.seconds():.0f} s" if self.world_size else "starting"
        return self._replay.outcome.state if self._replay.outcome is not None else "lost"

    def _tell(self, what: str, **arguments: Any) -> None:
        if self._link is not None:
            self._link.send({"do": what, **arguments})

    # -------------------------------------------------------------- in the thread
    def _follow(self) -> None:
        try:
            if self._link is not None:
                self._view.on(RanksPlaced(self._link))
            while not self._step():
                time.sleep(timeouts.LOG_POLL_S)
        finally:
            if self._link is not None:
                self._link.console.end()
            self.profiles = tuple(self._replay.profiles)
            self._finished.set()
            self._answer(math.inf, Event, None)
            self.console.on_step()
            host().forget_thread()

    def _step(self) -> bool:
        """Show what is new. Return True if that is all."""
        is_over = self._link is None or (not self._link.poll() and self._has_ended())  # first
        for at, event in self._replay.read():
            if isinstance(event, Started):
                if not self.world_size and self._link is not None:
                    self._view.on(Note(self._fate()))
                self.world_size = event.info.world_size
            elif isinstance(event, StacksShown):
                self._answer(at, StacksShown, dict(event.texts))
            elif isinstance(event, ProfileShown):
                self._answer(at, ProfileShown, event.profile)
        self.console.on_step()
        if is_over and self._replay.outcome is None:
            self._lose()
        return self._replay.outcome is not None

    def _answer(self, at: float, kind: type[Event], found: Any) -> None:
        """Give what was found at this time to all who had asked for it before."""
        for asked in [asked for asked in self._asked if asked[0] <= at and issubclass(asked[1], kind)]:
            self._asked.remove(asked)
            asked[2].set_result(found)

    def _fate(self) -> str:
        job = run_folders.facts_of(self._run.path).get("job")
        until = f"Slurm job {job} ends" if job else "its container or machine stops"
        return f"this run needs no kernel, but ends when {until}. nblaunch.attach({self.id!r}) shows it in any notebook"

    def _has_ended(self) -> bool:
        now = run_folders.read(self._run.path)
        return now.is_over if now is not None else run_folders.is_removed(self._run.path)

    def _lose(self) -> None:
        """Show that the run is lost: its runner has died, and left no end."""
        now = run_folders.read(self._run.path)
        removed = Outcome("failed", self._replay.seconds(), "lost: its folder was removed")
        lost = now.lost if now is not None else removed
        self._error = RankLostError(f"the run {self._run.name} is {lost.message}. Logs: {self._run.path}")
        self._is_loaded = True
        self._replay.end(lost)

    # -------------------------------------------------------------- the result
    def _load(self) -> None:
        """Load what the ranks have returned, or the error, from the folder."""
        folder = self._run.path
        try:
            directory, found = _ending_in(folder)
        except Exception as trouble:  # unpickling code of another version may raise anything
            made, here = run_folders.facts_of(folder).get("versions"), run_folders.versions()
            said = f"cannot be loaded with {_listed(here)}; it was written with {_listed(made or {})}"
            raise ResultError(f"the result of the run {self._run.name} {said}") from trouble
        if found is None:
            outcome = self._replay.outcome
            missing = f"the run {self._run.name} has left no result in {folder}: was it moved or removed?"
            self._error = StartError((outcome.message if outcome is not None else "") or missing)
            return
        if isinstance(found, BaseException):
            self._error = found
            return
        found = found.moved_to(directory)
        parcels = parcels_in(directory)
        if found.verdict.state == "finished" and len(parcels) < found.world_size:
            for fd in itertools.chain(*parcels.values()):
                os.close(fd)
            raise ResultError(f"the run {self._run.name} lacks results: files were removed from {directory}")
        self._returned, error = found.load(parcels)
        self._error, self._crash = error if (raised := found.error()) is None else raised, found.crash
        if self._error is None:
            self._result = found.result(self._returned, self._replay.reports, self._view.record_html)
            self._result.profiles = self.profiles
        else:
            attach_results(self._returned, self._error, found.account.files)


def _linked(run: RunFolder) -> ControlLink | None:
    """Return the connection to the runner of a run; None if the run is over."""
    try:
        return None if run.is_over else ControlLink(run.path)
    except OSError as error:
        now = run_folders.read(run.path)
        if now is None or now.is_over:
            return None
        raise StartError(
            f"the run {run.name} cannot be reached from here ({error}): it was started on another machine, or in "
            "another container"
        ) from error


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(map(" ".join, versions.items())) or "unknown versions"


def _ending_in(folder: Path) -> tuple[Path, Ending | BaseException | None]:
    """Return how a run has ended, and the directory that holds its results."""
    for directory in (folder, *sorted(folder.glob("*Z-*"), reverse=True)):
        with contextlib.suppress(FileNotFoundError):
            return directory, pickle.loads((directory / ENDING).read_bytes())
    return folder, None


# ------------------------------------------------------------------ results in files
_SHARED = "shared"
"""Ends the name of memory that ranks share: to map it would change the file. The rest is mapped copy-on-write."""


def store_parcel(directory: Path, rank: int, fds: Sequence[int]) -> None:
    """Write the parcel of a rank's result to files. OSError: there is no room."""
    for number, fd in enumerate(fds):
        kind = "" if segments.is_sealed(fd) else _SHARED
        with open(directory / f"rank{rank}.result.{number:04}{kind}", "wb") as file, open(os.dup(fd), "rb") as held:
            held.seek(0)
            shutil.copyfileobj(held, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())


def parcels_in(directory: Path) -> dict[int, list[int]]:
    """Open the parcels of a directory: descriptors by rank, which the caller closes."""
    parcels: dict[int, list[int]] = {}
    for path in sorted(directory.glob("rank*.result.*")):
        rank = int(path.name.removeprefix("rank").partition(".")[0])
        is_shared = path.name.endswith(_SHARED)
        fd = segments.unsealed(path.read_bytes()) if is_shared else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        parcels.setdefault(rank, []).append(fd)
    return parcels


# ------------------------------------------------------------------ the user's call
def attached() -> list[AttachedLaunch]:
    """Return the runs that this process shows and that have not ended."""
    return sorted((each for each in _live if not each.done), key=lambda each: each.id)


def attach(name: str, view: str = "auto") -> Launch:
    """Show a detached run in this cell: all that it has reported and printed so far, and live what follows.

    Several notebooks, kernels and terminals of this machine may attach to the same run. Each of them can stop it.

    Args:
        name: The name of the run; `nblaunch.runs` lists all runs.
        view: See `nblaunch.notebook_launcher`.

    Returns:
        A `Launch`. Its ``wait()`` and ``result()`` wait for the end of the run, and ``stop()`` stops the run. The
        result is available until the run is removed, also after a restart of the kernel or of the machine.

    Raises:
        ArgumentError: There is no run of this name. Launches that are not detached have none.
        StartError: The run is in another container, or on another machine.
    """
    return AttachedLaunch(run_folders.find_run(name), host().view(view))
