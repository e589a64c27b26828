"""What shows a launch: the interface of a view, and the events that it shows."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nblaunch.engines.protocol import Sampler
from nblaunch.launch.debug_console import Console
from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.profiles.profile import Profile

if TYPE_CHECKING:
    from nblaunch.machine.usage import Usage  # which imports psutil

Stream = Literal["out", "err"]
State = Literal["finished", "failed", "stopped"]
RankState = Literal["starting", "running", "waiting", "stopping", "returned", "failed", "ended"]
"""Waiting: for a line that the user types, in a debugger or in ``input``."""


# ------------------------------------------------------------------ what events carry
class Controls(Protocol):
    """What a view may ask of its launch, from any thread. Each call returns at once."""

    @property
    def done(self) -> bool: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def ask_stacks(self, timeout: float = ...) -> None:
        """Request a `StacksShown` event with the stacks of all live ranks."""

    def ask_profile(self, seconds: float = ...) -> None:
        """Request a `ProfileShown` event with what the ranks do in the next seconds."""

    @property
    def console(self) -> Console: ...


class Measured(Protocol):
    """Ranks whose usage can be measured: the `Workers` of an engine, or those of a run that another process holds."""

    def sampler(self, device: str, env: Mapping[str, str]) -> Sampler: ...


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """What is known of a launch when it starts."""

    launch_id: str
    name: str
    world_size: int
    device: str
    log_dir: Path
    attempt: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    files: LaunchFiles | None = field(default=None, compare=False)
    """Keeps the logs from being pruned."""
    is_session: bool = False
    hosts: Sequence[str] = ()
    only: Sequence[int] | None = None
    """The ranks that a cell is for; None: all."""

    @property
    def ranks_in_words(self) -> str:
        """As in ``2 ranks`` or ``rank 0 of 2``."""
        shown = self.only if self.only is not None and len(self.only) < self.world_size else None
        if shown is None:
            return f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        return f"rank{'s' * (len(shown) != 1)} {', '.join(map(str, shown))} of {self.world_size}"


@dataclass(frozen=True, slots=True)
class RankStatus:
    rank: int
    state: RankState
    pid: int
    """0 until the rank has started."""


@dataclass(frozen=True, slots=True)
class LogLines:
    """What a rank has printed to one stream since the last event, as a terminal would show it."""

    rank: int
    stream: Stream
    path: str
    lines: Sequence[str]
    """Finished lines, each with its own colours."""
    open: Sequence[str] = ()
    """All unfinished lines that show something, such as progress bars."""
    retracted: int = 0
    """Lines of earlier events that are taken back, because the cursor has moved up to them."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The root cause of a failed launch."""

    rank: int
    """-1 if no rank failed."""
    type_name: str
    """Empty if the message names the rank and what happened to it."""
    message: str
    where: str
    """The user's own line, such as ``Cell In[3], line 4``; empty if unknown."""
    source: str
    traceback: str
    others: tuple[str, ...]
    """A line for each other rank that failed later."""
    details: str = ""
    """The rest of the message, or all of it, if neither `message` nor `traceback` has it."""

    @property
    def headline(self) -> str:
        if not self.type_name:
            return self.message
        who = f"Rank {self.rank}" if self.rank >= 0 else "The launch"
        return f"{who} failed: {self.type_name}{f': {self.message}' * bool(self.message)}"


@dataclass(frozen=True, slots=True)
class Outcome:
    state: State
    seconds: float
    message: str
    """One line: the root cause of a failure."""
    failure: Failure | None = None
    at: float = field(default_factory=time.time)
    """When the launch ended, in seconds since the epoch."""


def duration_text(seconds: float) -> str:
    """Return, for example, ``40 ms``, ``3.2 s`` or ``2 min 05 s``."""
    if 0 < seconds < 0.0995:
        return f"{math.ceil(seconds * 1000)} ms"
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


# ------------------------------------------------------------------ the events
class Event:
    """What a view may show."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Begun(Event):
    """The launch begins. The only event from the launching thread; the supervisor thread sends the later ones."""

    controls: Controls
    blocking: bool
    seconds: Callable[[], float]
    """Returns the time since the begin; while what happened before is shown, that of what is shown."""


@dataclass(frozen=True, slots=True)
class Preparing(Event):
    """What takes long before `Begun`: packing, from a thread, or the start of nodes."""

    text: str
    """Empty: it is over."""
    cancel: Callable[[], None] | None = None
    """Ends it; None: it cannot be ended alone."""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """An attempt of the launch has its files."""

    info: LaunchInfo


@dataclass(frozen=True, slots=True)
class RanksPlaced(Event):
    """An attempt has a group of ranks, whose usage can be measured from now on."""

    workers: Measured


@dataclass(frozen=True, slots=True)
class RanksChanged(Event):
    ranks: Sequence[RankStatus]


@dataclass(frozen=True, slots=True)
class Logs(Event):
    logs: Sequence[LogLines]


@dataclass(frozen=True, slots=True)
class Reports(Event):
    rank: int
    records: Sequence[Mapping[str, Any]]
    """As `nblaunch.ranks.report` spools them."""
    is_printed: bool = False
    """They were found in printed lines, and no spool has them."""


@dataclass(frozen=True, slots=True)
class Output:
    key: str
    mime: str
    """One of `nblaunch.wire.display_records.SUFFIXES`."""
    text: str
    """Stands for it where only text can be shown."""
    size: int
    body: str | Path = ""
    """A file if it is large or binary. It may be removed."""
    width: int | None = None
    height: int | None = None
    """Pixels on the page, if the user chose them."""


@dataclass(frozen=True, slots=True)
class Displays(Event):
    rank: int
    outputs: Sequence[Output]
    is_cleared: bool = False
    """Earlier outputs were removed first."""
    left_out: int | None = None
    """Outputs that the limits have left out since the last clear; None: as before."""


@dataclass(frozen=True, slots=True)
class Note(Event):
    text: str


@dataclass(frozen=True, slots=True)
class Stuck(Event):
    """Ranks wait in a collective, and why. Without lines: they have gone on. Replaces the previous one."""

    lines: Sequence[str] = ()
    ranks: Sequence[int] = ()
    """Live ranks that a debugger may explain."""


@dataclass(frozen=True, slots=True)
class Countdown(Event):
    text: str


@dataclass(frozen=True, slots=True)
class StacksShown(Event):
    texts: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class ProfileShown(Event):
    profile: Profile


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passes, about 20 times a second: show what is due."""


@dataclass(frozen=True, slots=True)
class Ended(Event):
    """The launch has ended. The last event: show everything that is pending."""

    outcome: Outcome


_log = logging.getLogger(__name__)
PREPARING_NOTE_DELAY_S = 0.5
"""For packing the data of a launch before the view says what takes time."""


class View(ABC):
    shows_notes: bool = True
    """False for a view that shows nothing."""
    shows_failures: bool = False
    """True for a view that shows a failure with its traceback."""

    @abstractmethod
    def on(self, event: Event) -> None:
        """Show an event. Ignore those that the view has no use for."""

    def record_html(self) -> str | None:
        """Return the record so far for a cell that displays the launch or its result; None: its text is enough."""
        return None


class NullView(View):
    shows_notes = False

    def on(self, event: Event) -> None:
        pass


class ShieldedView(View):
    """A view whose failure does not fail the launch: its first exception is logged, and ends the display."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.shows_notes, self.shows_failures = view.shows_notes, view.shows_failures

    def on(self, event: Event) -> None:
        try:
            self._view.on(event)
        except Exception as error:  # noqa: BLE001  # a replaced stdout may raise anything
            self._view = NullView()
            _log.warning("the launch continues, but its display stopped: %s: %s", type(error).__name__, error)

    def record_html(self) -> str | None:
        return self._view.record_html()


class Both(View):
    """Two views of a launch; the second decides what is shown."""

    def __init__(self, first: View, second: View) -> None:
        self._first, self._second = first, second
        self.shows_notes, self.shows_failures = second.shows_notes, second.shows_failures

    def on(self, event: Event) -> None:
        self._first.on(event)
        self._second.on(event)

    def record_html(self) -> str | None:
        return self._second.record_html()


class UsageMeter:
    """Measures the ranks of a launch, also after a restart has replaced their group. For one thread."""

    def __init__(self, device: str, env: Mapping[str, str]) -> None:
        self._device, self._env = device, env
        self._workers: Measured | None = None
        self._sampler: Sampler | None = None

    def sample(self, workers: Measured | None, ranks: Collection[int]) -> list[Usage]:
        if workers is not self._workers:
            self.close()
            self._workers = workers
            self._sampler = None if workers is None else workers.sampler(self._device, self._env)
        return [] if self._sampler is None else self._sampler.sample(ranks)

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self._workers = self._sampler = None


@contextlib.contextmanager
def preparing(view: View, name: str) -> Iterator[None]:
    """Let a view say what takes time, if the block that packs the data of a launch takes long."""
    text = f"preparing {name}: comparing its data with the cached data, and copying changes"
    timer = threading.Timer(PREPARING_NOTE_DELAY_S, lambda: ShieldedView(view).on(Preparing(text)))
    timer.daemon = True
    try:
        with contextlib.suppress(RuntimeError):  # no thread can be started: the launch reports it
            timer.start()
        yield
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()  # the event must not follow those of the launch
