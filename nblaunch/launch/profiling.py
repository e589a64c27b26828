"""Profiles of a task: asks its ranks for recordings, and has a process read them. Used from the supervisor's thread.

One profile at a time: the ranks record at the same moment, and answer with a file each.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
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
from nblaunch.wire.messages import Profiled, Source, StartProfile

BEGIN_TIMEOUT_S = 5.0
"""For a rank to begin its recording."""
_STORE_TIMEOUT_S = 60.0
"""For a rank to store its recording: on a GPU it may have a million events."""
_READ_TIMEOUT_S = 300.0
"""For the process that reads the recordings."""
_MAIN = (
    "import json, sys; path, *order = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from nblaunch.profiles.summarise import main; main(*order)"
)
_NO_ANSWER = f"no answer within {BEGIN_TIMEOUT_S:g} s: it runs C code that holds the GIL, or is stopped"


@dataclass(slots=True)
class _Profile:
    """One that is being made."""

    number: int
    futures: Sequence[Future[Profile | None]]
    deadlines: dict[int, float]
    """Of the ranks that have not answered."""
    recordings: dict[int, list[int]] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    reader: threading.Thread | None = None
    found: Profile | None = None


class Profiling:
    """See the module.

    Attributes:
        made: The profiles so far.
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
        self.made: list[Profile] = []
        self._ranks, self._task, self._commands, self._directory, self._show = ranks, task, commands, directory, show
        self._formatter = StackFormatter(sources)
        self._first = first
        self._present: _Profile | None = None

    def step(self, now: float) -> None:
        if self._present is None and self._first is not None and all(rank.is_running for rank in self._ranks):
            seconds, self._first = self._first, None
            self._begin(seconds, math.inf, [], after_step=True)
        if self._present is None and (wanted := self._commands.take_profiles()):
            seconds = max(seconds for seconds, _ in wanted)
            self._begin(seconds, now + BEGIN_TIMEOUT_S, [future for _, future in wanted])
        if self._present is not None:
            self._go_on(self._present, now)

    def _begin(
        self, seconds: float, deadline: float, futures: Sequence[Future[Profile | None]], *, after_step: bool = False
    ) -> None:
        number = len(self.made) + 1
        self._present = made = _Profile(number, futures, {}, seconds=seconds)
        for rank in self._ranks:
            if rank.is_over or not rank.is_running:
                made.missing[rank.rank] = "it has ended" if rank.is_over else "it has not begun to run"
            else:
                made.deadlines[rank.rank] = deadline
                rank.member.worker.tell(StartProfile(self._task, number, seconds, after_step))

    def take(self, message: Profiled, parcel: Descriptors, lost: str, now: float) -> None:
        made = self._present
        if made is None or message.number != made.number or message.rank not in made.deadlines:
            parcel.close()  # of a rank that was given up
        elif message.has_begun:
            made.deadlines[message.rank] = now + made.seconds + _STORE_TIMEOUT_S
        else:
            del made.deadlines[message.rank]
            fds = parcel.take()
            if fds:
                made.recordings[message.rank] = fds
            else:
                made.missing[message.rank] = message.problem or f"its recording could not be received: {lost}"

    def _go_on(self, made: _Profile, now: float) -> None:
        for rank in self._ranks:
            if rank.rank in made.deadlines and (rank.is_over or now >= made.deadlines[rank.rank]):
                del made.deadlines[rank.rank]
                made.missing[rank.rank] = "it has ended" if rank.is_over else _NO_ANSWER
        if made.deadlines:
            return
        if made.reader is None:
            made.reader = threading.Thread(target=self._read, args=[made], name="nblaunch-profile", daemon=True)
            made.reader.start()
        elif made.found is not None:
            self._present = None
            self.made.append(made.found)
            self._show(made.found)
            for future in made.futures:
                future.set_result(made.found)

    def finish(self, now: float) -> None:
        """Finish the present profile: the ranks have ended."""
        while (made := self._present) is not None:
            self._go_on(made, now)
            if made.reader is not None:
                made.reader.join()

    def close(self) -> None:
        """Give up the present profile; the supervisor has failed."""
        made, self._present = self._present, None
        if made is not None:
            if made.reader is None:
                _close(made)
            for future in made.futures:
                future.set_result(None)

    # -------------------------------------------------------------- in a thread
    def _read(self, made: _Profile) -> None:
        try:
            found = self._summarised(made)
            made.found = replace(self._placed(found), missing=dict(sorted(made.missing.items())))
        except Exception as error:  # noqa: BLE001  # the profile says so
            why = f"its recording could not be read: {error}"
            made.found = Profile([], missing={**dict.fromkeys(made.recordings, why), **made.missing})
        finally:
            _close(made)
            self._commands.set()

    def _summarised(self, made: _Profile) -> Profile:
        recordings = [made.recordings[rank] for rank in sorted(made.recordings)]
        if not recordings:
            return Profile([])
        trace = str(self._directory / f"profile{made.number}.json.gz")
        done = subprocess.run(
            [sys.executable, "-c", _MAIN, json.dumps([installed_path(), os.getpid(), trace, recordings])],
            pass_fds=[fd for fds in recordings for fd in fds],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            start_new_session=True,  # an interrupt of the terminal is not for it
            timeout=_READ_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
            raise RuntimeError(said[-1])
        return Profile.from_json(json.loads(done.stdout))

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


def _close(made: _Profile) -> None:
    for fds in made.recordings.values():
        for fd in fds:
            os.close(fd)
