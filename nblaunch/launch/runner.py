"""The process that holds a detached run: it outlives the kernel that has started it, and supervises like one."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from nblaunch.engines import current
from nblaunch.errors import LaunchStoppedError, NblaunchError, StartError
from nblaunch.launch.attached import ENDING, RunOrder, store_parcel
from nblaunch.launch.control import ControlServer
from nblaunch.launch.ending import Ending
from nblaunch.launch.events_file import EventsFile
from nblaunch.launch.handle import OwnLaunch
from nblaunch.launch.machines import planned, with_usable_method
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.payload import Shipment
from nblaunch.launch.run import Run
from nblaunch.launch.verdict import Verdict
from nblaunch.launch.views import Both, Ended, Note, Outcome, ShieldedView, State, View
from nblaunch.machine import processes
from nblaunch.transfer.parcel import Parcel
from nblaunch.wire import launch_files
from nblaunch.wire.messages import Cell, Payload, Settings

_log = logging.getLogger(__name__)
_STORE_RETRY_S = 2.0
"""Between two attempts to write results to a full disk."""


def main(folder: str, ready: int, lock: int, orders: int, *parcel: int) -> None:
    """Hold the run of a folder until it ends. `ready` gets a word once it can be attached; `lock` is the folder's."""
    processes.set_name("nblaunch-run")
    logging.basicConfig(format="%(asctime)s %(message)s")
    with open(orders, "rb") as file:
        order: RunOrder = pickle.load(file)  # from the kernel that has started this process
    sys.path[:], sys.argv[:] = order.process.sys_path, order.process.argv  # ranks inherit them
    os.environ["NBLAUNCH_PRELOAD"] = "0"  # no cell follows that a fresh server with more imported would speed up
    path = Path(folder)
    try:
        server = ControlServer(path)
    except OSError as error:
        sys.exit(f"cannot serve a socket in {path}: {error}: set NBLAUNCH_STATE_DIR to a short path on a local disk")
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, frame: server.stop())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.write(ready, b"ok")
    os.close(ready)
    try:
        _hold(path, order, parcel, server)
    finally:
        server.close()
        current.release()  # the fork server ends after this process, once it has killed what a dead reaper has left
        launch_files.release_lock(lock)


def _hold(folder: Path, order: RunOrder, parcel: Sequence[int], server: ControlServer) -> None:
    events = EventsFile(lambda info: folder)
    events.open(folder)
    try:
        launch = _prepared(folder, order, parcel, Both(ShieldedView(events), ShieldedView(server)))
        server.control(launch)
        launch.begin()
        launch.outlast()
    except Exception as refused:  # noqa: BLE001  # the folder tells it
        if not isinstance(refused, NblaunchError):
            _log.exception("the run could not be held")
        _leave(refused, folder)
        state: State = "stopped" if isinstance(refused, LaunchStoppedError) else "failed"
        events.on(Ended(Outcome(state, 0.0, str(refused))))


def _prepared(folder: Path, order: RunOrder, parcel: Sequence[int], shown: View) -> HeldLaunch:
    engine, plan = planned(order.options, shown)
    plan = with_usable_method(plan, engine, shown)
    if order.options.preload:
        engine.preload(order.options.preload)
    stand_in = Cell("", "", order.function, order.only)  # its name is all that a supervisor needs of a function
    payload = Payload(stand_in, (), {}, None, Settings(), {})
    received = SimpleNamespace(fds=parcel, close=lambda: None)  # the process ends with the run
    shipment = Shipment(payload, cast("Parcel", received), order.sources, order.sent)
    return HeldLaunch(plan, shipment, shown, engine, None, folder)


class HeldLaunch(OwnLaunch):
    """A launch that leaves its end in its folder, for the processes that attach."""

    _told: BaseException | None = None
    """The error of the last attempt that has left its end."""
    _waits_for_room = _has_given_up = False

    def stop(self) -> None:
        super().stop()
        self._has_given_up = self._waits_for_room

    def kill(self) -> None:
        super().kill()
        self._has_given_up = self._waits_for_room

    def begin(self, *, blocking: bool = False) -> None:
        super().begin(blocking=blocking)
        self.console.on_step = lambda: None  # those who attach note for themselves that a rank waits

    def outlast(self) -> None:
        """Wait for the end in the main thread, which handles signals, and has no user."""
        self._finished.wait()

    def _conclude(self, verdict: Verdict, run: Run, files: LaunchFiles) -> BaseException | None:
        error = super()._conclude(verdict, run, files)
        if (files.directory / ENDING).exists():
            self._told = error
        return error

    def _outcome(self, state: State, error: BaseException | None, logs: Path | None = None) -> Outcome:
        if error is not None and error is not self._told and self._root is not None:
            _leave(error, self._root)
        return super()._outcome(state, error, logs)

    def _take(self, ending: Ending, run: Run) -> BaseException | None:
        """Write the end to files. While there is no room, keep it, and try again until the user stops the run."""
        self._waits_for_room = False  # as an attempt before may have done
        while True:
            try:
                self._store(ending, run)
                return None
            except OSError as error:
                directory = ending.account.files.directory
                said = f"the results cannot be written to {directory}: {error}"
                has_room = error.errno not in processes.NO_ROOM
                if has_room or self._has_given_up or not directory.is_dir():  # or it would wait for ever
                    for partial in directory.glob("rank*.result.*"):
                        partial.unlink(missing_ok=True)  # there must be room to say so
                    return StartError(said)
                if not self._waits_for_room:
                    self._waits_for_room = True
                    advice = "The run keeps them, and tries again: free some space there, or stop the run"
                    self._view.on(Note(f"{said}. {advice}"))
            threading.Event().wait(_STORE_RETRY_S)

    def _store(self, ending: Ending, run: Run) -> None:
        directory = ending.account.files.directory
        for rank, fds in run.results.items():
            store_parcel(directory, rank, fds)
        _write(directory / ENDING, pickle.dumps(ending))
        for fds in run.results.values():
            for fd in fds:
                os.close(fd)


def _leave(error: BaseException, folder: Path) -> None:
    """Leave the error of a run that no attempt has left, before the event that tells its end."""
    try:
        _write(folder / ENDING, pickle.dumps(error))
    except Exception:  # noqa: BLE001  # no room, or one of the user's own
        _log.exception("the error could not be left; its message is among the events")


def _write(path: Path, data: bytes) -> None:
    """Write a file that is whole once it has its name."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
