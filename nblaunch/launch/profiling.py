"""Profiles of a task: asks its ranks for recordings, and has a process read them. Used from the supervisor's thread.

One profile at a time: the ranks record at the same moment, and answer with a file each.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from nblaunch.engines.protocol import Descriptors
from nblaunch.launch.commands import Commands
from nblaunch.launch.group import Rank
from nblaunch.launch.stacks import StackFormatter
from nblaunch.machine.packages import installed_path
from nblaunch.profiles.profile import Place, Profile
from nblaunch.wire.messages import Profiled, Source, StartProfile, Stepped

BEGIN_TIMEOUT_S = 5.0
"""For a rank to begin its recording, and for the other ranks to take the first step of an optimizer."""
_STORE_TIMEOUT_S = 60.0
"""For a rank to store its recording."""
_READ_TIMEOUT_S = 300.0
"""For the process that reads the recordings."""
_FAILED_READ_TIMEOUT_S = 5.0
"""The same, for a launch that was stopped or has failed."""
_READ_POLL_S = 0.1
_MAIN = (
    "import json, sys; path, *order = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from nblaunch.profiles.summarise import main; main(*order)"
)
_NO_ANSWER = f"no answer within {BEGIN_TIMEOUT_S:g} s: it runs C code that holds the GIL, or is stopped"
_NOT_STORED = f"its recording was not stored within {_STORE_TIMEOUT_S:g} s"
_NO_STEP = "no optimizer has made a step"
_ENDED = "its function ended, failed or was stopped before the recording was stored"


@dataclass(slots=True)
class _Profile:
    """One that is being made."""

    number: int
    seconds: float
    futures: list[Future[Profile | None]]
    deadlines: dict[int, float] = field(default_factory=dict)
    """Of the ranks that have not answered."""
    begun: set[int] = field(default_factory=set)
    recordings: dict[int, list[int]] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    reader: threading.Thread | None = None
    process: subprocess.Popen[bytes] | None = None
    result: Profile | None = None
    is_given_up: bool = False


class Profiling:
    """See the module.

    Attributes:
        finished: The profiles so far.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        task: int,
        commands: Commands,
        sources: Mapping[str, Source],
        directory: Path,
        show: Callable[[Profile], None],
        first: float | None = None,
    ) -> None:
        """`first`: the seconds of a profile that begins after the first step of an optimizer; None: no such profile."""
        self.finished: list[Profile] = []
        self._ranks, self._task, self._commands, self._directory, self._show = ranks, task, commands, directory, show
        self._formatter = StackFormatter(sources)
        self._first = first
        self._stepped: set[int] = set()
        self._stepped_at = math.inf
        self._current: _Profile | None = None

    def step(self, now: float) -> None:
        if self._current is not None:
            self._current.futures += [future for _, future in self._commands.take_profiles()]
            self._advance(self._current, now)
        elif self._first is not None and self._have_stepped(now):
            seconds, self._first = self._first, None
            self._begin(seconds, now, [])
        elif self._are_running and (wanted := self._commands.take_profiles()):
            self._begin(max(seconds for seconds, _ in wanted), now, [future for _, future in wanted])

    @property
    def is_recording(self) -> bool:
        return self._current is not None and bool(self._current.deadlines)

    @property
    def is_reading(self) -> bool:
        return self._current is not None and self._current.result is None

    @property
    def _are_running(self) -> bool:
        return all(rank.is_running or rank.is_over for rank in self._ranks)

    def _have_stepped(self, now: float) -> bool:
        expected = {rank.rank for rank in self._ranks if not rank.is_over}
        return bool(self._stepped) and (expected <= self._stepped or now >= self._stepped_at + BEGIN_TIMEOUT_S)

    def _begin(self, seconds: float, now: float, futures: list[Future[Profile | None]]) -> None:
        self._current = current = _Profile(len(self.finished) + 1, seconds, futures)
        for rank in self._ranks:
            if rank.is_over:
                current.missing[rank.rank] = _ENDED
            else:
                current.deadlines[rank.rank] = now + BEGIN_TIMEOUT_S
                rank.member.worker.tell(StartProfile(self._task, current.number, seconds))

    def take(self, message: Stepped | Profiled, parcel: Descriptors, lost: str, now: float) -> None:
        current = self._current
        if isinstance(message, Stepped):
            self._stepped.add(message.rank)
            self._stepped_at = min(self._stepped_at, now)
        elif current is None or message.number != current.number or message.rank not in current.deadlines:
            parcel.close()  # of a rank that was given up
        elif message.has_begun:
            current.begun.add(message.rank)
            current.deadlines[message.rank] = now + current.seconds + _STORE_TIMEOUT_S
        else:
            del current.deadlines[message.rank]
            if fds := parcel.take():
                current.recordings[message.rank] = fds
            else:
                current.missing[message.rank] = message.problem or f"its recording could not be received: {lost}"

    def _advance(self, current: _Profile, now: float) -> None:
        for rank in self._ranks:
            if rank.rank in current.deadlines and (rank.is_over or now >= current.deadlines[rank.rank]):
                del current.deadlines[rank.rank]
                late = _NOT_STORED if rank.rank in current.begun else _NO_ANSWER
                current.missing[rank.rank] = _ENDED if rank.is_over else late
        if current.deadlines:
            return
        if current.reader is None:
            current.reader = threading.Thread(target=self._read, args=[current], name="nblaunch-profile", daemon=True)
            try:
                current.reader.start()
            except RuntimeError as error:  # no more threads
                self._refuse(current, error)
        elif current.result is not None:
            self._current = None
            self._deliver(current.result, current.futures)

    def _deliver(self, result: Profile, futures: Sequence[Future[Profile | None]] = ()) -> None:
        is_cut = self._commands.stop or all(rank.is_over for rank in self._ranks)
        steps = min((each.steps for each in result.ranks), default=0)
        if steps or not (is_cut and any(each.ranks for each in self.finished)):  # else an earlier one says more
            self._show(result)
        self.finished.append(result)
        for future in futures:
            future.set_result(result)

    def finish(self) -> None:
        """Finish the current profile: the task has ended."""
        if self._first is not None and all(rank.done is not None for rank in self._ranks):
            self._deliver(Profile([], missing={rank.rank: _NO_STEP for rank in self._ranks}))
        if self._current is not None:
            self._current.missing.update(dict.fromkeys(self._current.deadlines, _ENDED))
            self._current.deadlines.clear()
        since = time.monotonic()
        while (current := self._current) is not None:
            self._advance(current, since)
            is_short = self._commands.stop or any(rank.has_failed for rank in self._ranks)
            if self._commands.kill or (is_short and time.monotonic() > since + _FAILED_READ_TIMEOUT_S):
                return  # `close` gives it up
            if current.result is None and current.reader is not None:
                current.reader.join(_READ_POLL_S)

    def close(self) -> None:
        """Give up the current profile, if there is one."""
        current, self._current = self._current, None
        if current is not None:
            current.is_given_up = True
            if current.process is not None:
                current.process.kill()
            if current.reader is None:
                _close(current)
            for future in current.futures:
                future.set_result(None)

    # -------------------------------------------------------------- in a thread
    def _read(self, current: _Profile) -> None:
        trace = self._directory / f"profile{current.number}.json.gz"
        try:
            found = self._placed(self._summarised(current, trace)) if current.recordings else Profile([])
            current.result = replace(found, missing=dict(sorted(current.missing.items())))
            _close(current)
        except Exception as error:  # noqa: BLE001  # the profile says so
            with contextlib.suppress(OSError):
                trace.unlink()
            self._refuse(current, error)
        self._commands.set()

    def _refuse(self, current: _Profile, error: Exception) -> None:
        why = f"its recording could not be read: {error}"
        current.result = Profile([], missing={**dict.fromkeys(current.recordings, why), **current.missing})
        _close(current)

    def _summarised(self, current: _Profile, trace: Path) -> Profile:
        recordings = sorted(current.recordings.items())
        current.process = process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, json.dumps([installed_path(), os.getpid(), str(trace), recordings])],
            pass_fds=[fd for _, fds in recordings for fd in fds],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # an interrupt of the terminal is not for it
        )
        with process:
            if current.is_given_up:  # before `process` was set
                process.kill()
            try:
                answer, errors = process.communicate(timeout=_READ_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise RuntimeError(f"that takes more than {_READ_TIMEOUT_S:g} s") from None
        if process.returncode:
            said = errors.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"]
            raise RuntimeError(said[-1])
        return Profile.from_json(json.loads(answer))

    def _placed(self, profile: Profile) -> Profile:
        """Return a profile that names lines as the notebook does."""
        ranks = [
            replace(each, places={part: self._named(place) for part, place in each.places.items()})
            for each in profile.ranks
        ]
        operations = [
            replace(each, place=self._named(each.place)) if each.place is not None else each
            for each in profile.operations
        ]
        return replace(profile, ranks=ranks, operations=operations)

    def _named(self, place: Place) -> Place:
        return replace(place, text=self._formatter.line_at(place.file, place.line))


def _close(profile: _Profile) -> None:
    for fds in profile.recordings.values():
        for fd in fds:
            os.close(fd)
