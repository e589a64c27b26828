"""The interface of a view, and the view that shows nothing."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

from nblaunch.launch.views.events import Event, Preparing
from nblaunch.machine import timeouts

_log = logging.getLogger(__name__)


class View(ABC):
    """Shows one launch."""

    wants_text: bool = False
    """`Logs` must carry the text. False for a view that reads the log files itself."""
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
    """Shows nothing."""

    shows_notes = False

    def on(self, event: Event) -> None:
        pass


class ShieldedView(View):
    """A view whose failure does not fail the launch: its first exception is logged, and ends the display."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.wants_text, self.shows_notes = view.wants_text, view.shows_notes
        self.shows_failures = view.shows_failures

    def on(self, event: Event) -> None:
        try:
            self._view.on(event)
        except Exception as error:  # noqa: BLE001  # a replaced stdout may raise anything
            self._view = NullView()
            _log.warning("the launch continues, but its display stopped: %s: %s", type(error).__name__, error)

    def record_html(self) -> str | None:
        return self._view.record_html()


@contextlib.contextmanager
def preparing(view: View, name: str) -> Iterator[None]:
    """Let a view say what takes time, if the block that packs the data of a launch takes long."""
    text = f"preparing {name}: comparing its data with what was sent before, and copying what is new"
    timer = threading.Timer(timeouts.PREPARING_NOTE_DELAY_S, lambda: ShieldedView(view).on(Preparing(text)))
    timer.daemon = True
    try:
        with contextlib.suppress(RuntimeError):  # no thread can be started: the launch reports it
            timer.start()
        yield
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()  # the event must not follow those of the launch
