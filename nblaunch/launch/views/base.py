"""The interface of a view, and the view that shows nothing."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch.launch.views.events import (
    Begun,
    Controls,
    Countdown,
    Ended,
    Event,
    LaunchInfo,
    LogPiece,
    Logs,
    Note,
    Outcome,
    RanksChanged,
    RankStatus,
    Reports,
    StacksShown,
    Started,
    Tick,
)

_log = logging.getLogger(__name__)


class View(ABC):
    """Shows one launch. Subclasses implement `on`; the other methods build its events."""

    wants_text: bool = False
    """`Logs` must carry the text. False for a view that reads the log files itself."""

    @abstractmethod
    def on(self, event: Event) -> None:
        """Show an event. Ignore those that the view has no use for."""

    def begun(self, controls: Controls, blocking: bool) -> None:
        self.on(Begun(controls, blocking))

    def started(self, info: LaunchInfo) -> None:
        self.on(Started(info))

    def ranks(self, changed: Sequence[RankStatus]) -> None:
        self.on(RanksChanged(changed))

    def logs(self, pieces: Sequence[LogPiece]) -> None:
        self.on(Logs(pieces))

    def reports(self, rank: int, records: Sequence[Mapping[str, Any]]) -> None:
        self.on(Reports(rank, records))

    def note(self, text: str) -> None:
        self.on(Note(text))

    def countdown(self, text: str) -> None:
        self.on(Countdown(text))

    def stacks(self, texts: Mapping[int, str]) -> None:
        self.on(StacksShown(texts))

    def tick(self) -> None:
        self.on(Tick())

    def finished(self, outcome: Outcome) -> None:
        self.on(Ended(outcome))


class NullView(View):
    """Shows nothing."""

    def on(self, event: Event) -> None:
        pass


class ShieldedView(View):
    """A view whose failure does not fail the launch: its first exception is logged, and ends the display."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.wants_text = view.wants_text

    def on(self, event: Event) -> None:
        try:
            self._view.on(event)
        except Exception as error:  # noqa: BLE001  # a replaced stdout may raise anything
            self._view = NullView()
            _log.warning("the launch continues, but its display stopped: %s: %s", type(error).__name__, error)
