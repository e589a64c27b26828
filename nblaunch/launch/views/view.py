"""What a launch shows while it runs: the interface that it talks to.

Everything here is called from the launch's supervisor thread alone, but for `View.begun`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.output.log_files import Piece

Stream = Literal["out", "err"]
State = Literal["finished", "failed", "stopped"]
RankState = Literal["starting", "running", "stopping", "returned", "failed", "ended"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """What is known of a launch when it starts."""

    launch_id: str
    name: str
    world_size: int
    device: str
    start_method: str
    log_dir: Path
    attempt: int = 0
    """0, or which restart this is."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The environment of the ranks."""
    files: LaunchFiles | None = field(default=None, compare=False)
    """Keeps the logs from being pruned."""


class Controls(Protocol):
    """What a view may ask of its launch, from any thread; each returns at once."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    def stop(self) -> None:
        """Interrupt the ranks."""

    def kill(self) -> None:
        """End the ranks now."""

    def ask_stacks(self) -> None:
        """Have `View.stacks` called with what each rank is doing."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where one rank stands."""

    rank: int
    state: RankState
    pid: int
    """0 until it has started."""


@dataclass(frozen=True, slots=True)
class LogPiece:
    """What was appended to one log."""

    rank: int
    stream: Stream
    piece: Piece
    """Empty for a view that has `View.wants_text` false."""
    end: int = 0
    """The log's size so far."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The root cause of a launch that failed."""

    rank: int
    """-1 where it was no rank's."""
    type_name: str
    message: str
    where: str
    """The user's own line, such as ``Cell In[3], line 4``; empty where none is known."""
    source: str
    """The text of that line."""
    traceback: str
    others: tuple[str, ...]
    """A line for each other rank that raised something afterwards."""
    log: str
    """The path of the rank's stderr, else of the folder of the logs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended."""

    state: State
    seconds: float
    message: str
    """One line: the root cause where it failed."""
    failure: Failure | None = None


class View(Protocol):
    """What shows a launch. Called from the launch's supervisor thread alone, but for `begun`."""

    wants_text: bool
    """Whether `logs` is to carry what was printed; False for a view that reads the files itself."""

    def begun(self, controls: Controls, blocking: bool) -> None:
        """The launch begins. Called in the thread that launches; `blocking` where it then waits for the end."""

    def started(self, info: LaunchInfo) -> None:
        """The launch, or another attempt of it, has files now."""

    def logs(self, pieces: Sequence[LogPiece]) -> None:
        """What ranks have printed."""

    def reports(self, rank: int, records: Sequence[Mapping[str, Any]]) -> None:
        """What a rank has reported: metrics and progress, as `nblaunch.ranks.report` spools them."""

    def ranks(self, changed: Sequence[RankStatus]) -> None:
        """Ranks that stand elsewhere than before."""

    def stacks(self, texts: Mapping[int, str]) -> None:
        """What each rank that lives is doing, as it was asked for by `Controls.ask_stacks`."""

    def note(self, text: str) -> None:
        """Something that nblaunch itself has to say, such as "restarting (1 of 3)"."""

    def countdown(self, text: str) -> None:
        """Where the stopping stands; each call replaces the one before."""

    def tick(self) -> None:
        """Time passes (about 20 times a second): show what is due."""

    def finished(self, outcome: Outcome) -> None:
        """It is over, and this is the last call: show everything that is left."""


class Shielded:
    """A view whose failure ends no launch: after its first exception nothing more is shown, and a warning says so."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.wants_text = view.wants_text

    def begun(self, controls: Controls, blocking: bool) -> None:
        """See `View`, as for all below."""
        self._show("begun", controls, blocking)

    def started(self, info: LaunchInfo) -> None:
        """Shown, or not."""
        self._show("started", info)

    def logs(self, pieces: Sequence[LogPiece]) -> None:
        """Shown, or not."""
        self._show("logs", pieces)

    def reports(self, rank: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Shown, or not."""
        self._show("reports", rank, records)

    def ranks(self, changed: Sequence[RankStatus]) -> None:
        """Shown, or not."""
        self._show("ranks", changed)

    def stacks(self, texts: Mapping[int, str]) -> None:
        """Shown, or not."""
        self._show("stacks", texts)

    def note(self, text: str) -> None:
        """Shown, or not."""
        self._show("note", text)

    def countdown(self, text: str) -> None:
        """Shown, or not."""
        self._show("countdown", text)

    def tick(self) -> None:
        """Shown, or not."""
        self._show("tick")

    def finished(self, outcome: Outcome) -> None:
        """Shown, or not."""
        self._show("finished", outcome)

    def _show(self, name: str, *arguments: Any) -> None:
        try:
            getattr(self._view, name)(*arguments)
        except Exception as error:  # noqa: BLE001  # whatever a replaced stdout raises
            self._view = NullView()
            _log.warning("the launch goes on, but nothing more of it is shown: %s: %s", type(error).__name__, error)


class NullView:
    """Shows nothing; also what other views inherit for the calls that they have no use for."""

    wants_text = False

    def begun(self, controls: Controls, blocking: bool) -> None:
        """Nothing."""

    def started(self, info: LaunchInfo) -> None:
        """Nothing."""

    def logs(self, pieces: Sequence[LogPiece]) -> None:
        """Nothing."""

    def reports(self, rank: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def ranks(self, changed: Sequence[RankStatus]) -> None:
        """Nothing."""

    def stacks(self, texts: Mapping[int, str]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def countdown(self, text: str) -> None:
        """Nothing."""

    def tick(self) -> None:
        """Nothing."""

    def finished(self, outcome: Outcome) -> None:
        """Nothing."""
