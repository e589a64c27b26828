"""The folders of launches and of detached runs, as any process reads them: what ran, when, and how it ended.

The folder is the truth. A launch's is its log directory. A detached run's is ``run-NAME`` beside them, with the log
directory of each attempt in it, and what its runner needs and leaves: the socket, its own log, and the results.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from nblaunch.errors import ArgumentError
from nblaunch.launch.events_file import ends_of
from nblaunch.launch.output.log_directory import LAUNCH_NAME, is_own, state_root
from nblaunch.launch.output.reports import ReportList
from nblaunch.launch.views import Ended, Event, Outcome, Preparing, Reports, Started
from nblaunch.machine.arguments import FILE_NAME
from nblaunch.wire import launch_files

PREFIX = "run-"
_FACTS = "run.json"
RUNNER_LOG = "runner.log"
_SEEN = "seen"
"""In the folder of a run whose end was shown."""
_SPOOL_TAIL_BYTES = 16 << 10


@functools.cache
def boot_id() -> str:
    """Return what is different after each start of this machine; empty if it has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def write_facts(folder: Path, launch_id: str, function: str, notebook: str, **more: Any) -> None:
    """Write what does not change about a launch."""
    facts = {"id": launch_id, "function": function, "notebook": notebook, "began": time.time()}
    facts |= {"host": socket.gethostname(), "boot": boot_id(), **more}
    (folder / _FACTS).write_text(json.dumps(facts, indent=1) + "\n")


def facts_of(folder: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads((folder / _FACTS).read_text()))


def versions() -> dict[str, str]:
    known = {name: metadata.version(name) for name in ("nblaunch", "torch")}
    return {"python": platform.python_version(), **known}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one launch or detached run, as it was when it was read.

    Attributes:
        name: The name of a run; of another launch its id.
        state: ``starting``, ``running``, ``finished``, ``failed``, ``stopped``, or ``lost``: its process has died.
        ended: When it ended, in seconds since the epoch; 0.0: it runs, or no one knows.
        message: Why it failed or was stopped, or what it waits for.
    """

    path: Path
    name: str
    function: str
    state: str
    ranks: int
    began: float
    ended: float
    seconds: float
    """How long its ranks have run; 0.0 if no one knows."""
    message: str
    notebook: str
    log_dir: Path
    printed: Sequence[Reports] = ()
    """The last metrics that were found in printed lines."""

    @property
    def is_detached(self) -> bool:
        return self.path.name.startswith(PREFIX)

    @property
    def is_over(self) -> bool:
        return self.state not in ("starting", "running")

    @property
    def lost(self) -> Outcome:
        """The end of a run whose process has died: no event tells it."""
        written = [path for path in self.path.rglob("*") if path.is_file() and path.name != _SEEN]
        last = self.began
        with contextlib.suppress(OSError):  # removed meanwhile
            last = max((path.stat().st_mtime for path in written), default=last)
        return Outcome("failed", max(0.0, last - self.began), f"lost: {self.message}", at=last)

    @property
    def metrics(self) -> dict[str, float]:
        """The latest value of each metric: the mean over the ranks that reported it."""
        reports = ReportList()
        records = [(each.rank, record) for each in self.printed for record in each.records]
        for path in self.log_dir.glob("rank*.spool"):
            rank = int(path.stem.removeprefix("rank"))
            records += [(rank, record) for record in _last_records(path)]
        for rank, record in records:
            if "metrics" in record:
                reports.add(rank, record["time"], record["step"], record["metrics"])
        return reports.last


def _last_records(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _SPOOL_TAIL_BYTES))
        for line in file:
            with contextlib.suppress(ValueError):  # the first one may be torn
                if isinstance(record := json.loads(line), dict):
                    yield record


def read(path: Path) -> RunFolder | None:
    """Return what a folder says; None if it holds no launch."""
    try:
        facts = facts_of(path)
        function, notebook, began = str(facts["function"]), str(facts["notebook"]), float(facts["began"])
        name = path.name.removeprefix(PREFIX) if path.name.startswith(PREFIX) else str(facts["id"])
    except (OSError, ValueError, KeyError, TypeError):  # damaged, or none
        return None
    held = _is_held(path)  # first: a launch that ends now is then seen as running
    now, told = time.time(), ends_of(path)
    events: list[Event] = [event for _, event in told]
    since = next((at for at, event in told if isinstance(event, Started)), now)
    started = [event.info for event in events if isinstance(event, Started)]
    begun = max((at for at, event in enumerate(events) if isinstance(event, Started)), default=0)
    end = next((event.outcome for event in reversed(events) if isinstance(event, Ended)), None)
    last = events[-1] if events else None
    state, message = "running" if started else "starting", last.text if isinstance(last, Preparing) else ""
    if end is not None:
        state, message = end.state, end.message
    elif not held:
        rebooted = facts.get("boot") not in ("", boot_id()) and facts.get("host") == socket.gethostname()
        state, message = "lost", _REBOOTED if rebooted else _DIED[path.name.startswith(PREFIX)]
    attempts = sorted(each for each in path.glob("*Z-*") if each.is_dir())
    return RunFolder(
        path,
        name,
        function,
        state,
        started[-1].world_size if started else 0,
        began,
        end.at if end is not None else 0.0,
        end.seconds if end is not None else 0.0 if state == "lost" else max(0.0, now - since),
        message,
        notebook,
        attempts[-1] if attempts else path,
        [event for event in events[begun:] if isinstance(event, Reports)],
    )


_REBOOTED = "the machine was started again"
_DIED = {
    True: f"the process that held the run died, and the ranks with it; {RUNNER_LOG} may tell why",
    False: "its kernel ended, and the ranks with it",
}


def _is_held(folder: Path) -> bool:
    """Return True if a process holds the lock of a folder."""
    try:
        fd = os.open(folder / launch_files.LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:  # out of descriptors, or the file system gives no answer now
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others who look have shared locks, too
    except OSError as error:
        return error.errno not in launch_files.NO_LOCKS
    finally:
        os.close(fd)
    return False


def is_removed(folder: Path) -> bool:
    try:
        os.stat(folder / _FACTS)
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # else the file system gives no answer now
    return False


def folder_of(name: str) -> Path:
    return state_root() / f"{PREFIX}{name}"


def name_in(log_dir: Path) -> str:
    """Return the name of the run that an attempt's log directory belongs to; empty for another launch."""
    parent = log_dir.parent
    return parent.name.removeprefix(PREFIX) if (parent / _FACTS).exists() else ""


def mark_seen(folder: Path) -> None:
    with contextlib.suppress(OSError):  # removed, or a full disk
        (folder / _SEEN).touch()


def unseen(notebook: str) -> list[RunFolder]:
    """Return the runs of a notebook that have ended, and no one has seen it."""
    runs = (_own(path) for path in state_root().glob(f"{PREFIX}*") if not (path / _SEEN).exists())
    return [run for run in runs if run is not None and run.is_over and run.notebook == notebook]


def every() -> list[RunFolder]:
    """Return all launches and runs of this user, the latest first."""
    with os.scandir(state_root()) as entries:
        names = [each for each in entries if each.name.startswith(PREFIX) or LAUNCH_NAME.fullmatch(each.name)]
        found = [read(Path(each.path)) for each in names if is_own(each)]
    return sorted((each for each in found if each is not None), key=lambda each: -each.began)


def find(name: str | None) -> RunFolder:
    """Return the run of this name, else the latest launch with this id or function; None: the latest of all.

    ArgumentError: there is none.
    """
    if name is not None and (run := _named(name)) is not None:
        return run
    known = every()
    found = next((each for each in known if name is None or name in (each.name, each.function)), None)
    if found is None:
        if name is None:
            raise ArgumentError(f"there is no run or launch in {state_root()} yet")
        runs = ", ".join(each.name for each in known if each.is_detached)
        listed = f"the runs are: {runs}" if runs else "nblaunch.runs() lists all launches"
        raise ArgumentError(f"name={name!r}: no such run or launch in {state_root()}; {listed}")
    return found


def _named(name: str) -> RunFolder | None:
    if not isinstance(name, str):
        raise ArgumentError(f"name={name!r:.100}: must be the name of a run, as a string")
    return _own(folder_of(name)) if FILE_NAME.fullmatch(name) else None


def _own(path: Path) -> RunFolder | None:
    """Return the run in a folder; None if there is none of this user's: users may share the state directory."""
    try:
        return read(path) if path.lstat().st_uid == os.getuid() else None
    except OSError:
        return None


def find_run(name: str) -> RunFolder:
    """Return the detached run of this name. ArgumentError: there is none."""
    run = _named(name)  # and no launch or function of that name
    if run is None:
        known = every()
        if name in [each.name for each in known]:
            raise ArgumentError(f"name={name!r}: a launch, no detached run: nblaunch.show({name!r}) shows its record")
        names = ", ".join(each.name for each in known if each.is_detached)
        said = f"the runs are: {names}" if names else "there is none"
        raise ArgumentError(f"name={name!r}: no such run in {state_root()}; {said}")
    return run


def check_free(name: str) -> None:
    """Raise ArgumentError if the name of a run is in use."""
    folder = folder_of(name)
    if folder.exists():
        run = _own(folder)
        if run is None:
            raise ArgumentError(f"detach={name!r}: the name is in use: {folder} exists")
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began))
        raise ArgumentError(
            f"detach={name!r}: the name is in use by a run of {run.function} from {since} ({run.state}): "
            f"nblaunch.attach({name!r}) shows it, `python -m nblaunch {'rm' if run.is_over else 'stop'} {name}` "
            f"{'removes' if run.is_over else 'stops'} it"
        )


def create(name: str) -> Path:
    """Create the folder of a new run. ArgumentError: the name is in use."""
    folder = folder_of(name)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # also of a run that another process has started meanwhile
        check_free(name)
        raise
    return folder


def remove(name: str) -> None:
    """Remove the folder of a run that is over. ArgumentError: it runs, or there is none."""
    run = find_run(name)
    if not run.is_over:
        raise ArgumentError(
            f"name={name!r}: the run is {run.state}: stop it first, with `python -m nblaunch stop {name}`"
        )
    host = facts_of(run.path).get("host")
    if run.state == "lost" and host != socket.gethostname():  # where it may run, if locks are not shared
        raise ArgumentError(f"name={name!r}: the run was started on {host}: remove it there, or delete {run.path}")
    shutil.rmtree(run.path)


def size_of(path: Path) -> int:
    with contextlib.suppress(OSError):  # removed meanwhile
        return sum(each.lstat().st_size for each in path.rglob("*"))
    return 0
