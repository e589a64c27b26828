"""The panel: the live widget of a launch under its cell, replaced by its record when the launch ends.

The supervisor's events only update the state. A thread of the panel sends the changes to the page: at most eight
messages and 200 KB a second, also after the launch has ended, until the page has the last lines of the logs.

`nblaunch.notebook.page_messages` defines the messages. Those from the page arrive in any thread of the kernel, at once
or after the cell; the panel never waits for one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from nblaunch.launch import run_folders
from nblaunch.launch.views import (
    Begun,
    Controls,
    Ended,
    Event,
    LaunchInfo,
    Measured,
    Preparing,
    RanksPlaced,
    Started,
    UsageMeter,
    View,
)
from nblaunch.machine import timeouts
from nblaunch.notebook.cell_display import WIDGET, CellDisplay, WaitingDisplay
from nblaunch.notebook.launch_model import TAIL_LINES, LaunchModel
from nblaunch.notebook.page_messages import (
    Acknowledged,
    Delta,
    PanelInfo,
    RecordText,
    Request,
    Resync,
    Snapshot,
    TraceFile,
    from_content,
    to_content,
)
from nblaunch.notebook.record import as_html, as_text

_log = logging.getLogger(__name__)
_MIN_LOG_BYTES = 2 << 10
_MAX_SHORT_LOG_BYTES = 1000
"""A short launch with a longer log gets a panel."""
SHOW_DELAY_S = 0.1
"""A launch that ends sooner shows only its record, if the record holds everything."""
_SHOWN_TIMEOUT_S = 5.0
"""For the panels of launches in the background, at the end of a cell that shows nothing later; usually 0.3 s."""
_RECORD_TIMEOUT_S = 2.0
"""For a page to ask for the record, at the end of such a cell."""
_SEEN_DELAY_S = 2.0
"""After a launch, or after a page was opened, for the page to say that it shows the end."""
_SEND_INTERVAL_S = 0.125
"""Pause between two messages to the page: with display updates they stay below ten a second."""
_BYTES_PER_MESSAGE = (200 << 10) * _SEND_INTERVAL_S
"""With the record, which may follow at the end, the panel stays below 256 KB a second."""
HEARTBEAT_INTERVAL_S = 2.0
"""Longest silence to the page. After MAX_SILENCE_MS (``static/kernel.js``) a click no longer interrupts the kernel."""
_FIRST_SAMPLE_INTERVAL_S = 0.2
"""Pause between two samples of the ranks until each has been measured once: some may end within a second."""
_MAX_ENDED_PANELS = 20
"""Ended launches whose panels stay live; older ones keep only their record."""


class PanelView(View):
    """Shows a launch with a widget, and finally with its record. Construct it in the launching thread."""

    shows_failures = True

    def __init__(self, shell: Any) -> None:
        self._display = CellDisplay(shell)
        self._waiting = WaitingDisplay(self._display)
        self._model = LaunchModel()
        self._lock = threading.RLock()
        """Guards the model and the display. Never held during a wait."""
        self._workers: Measured | None = None
        """The ranks of the present attempt."""
        self._controls: Controls | None = None
        self._blocking = False
        self._over = threading.Event()
        self._widget: Any = None
        self._is_retired = False
        self._resyncs: list[Resync] = []
        self._needs_record = self._needs_trace = False
        self._needs_last = True
        """The page must be told once that nothing follows."""
        self._sender: threading.Thread | None = None
        self._credit = _BYTES_PER_MESSAGE
        self._sent_at = 0.0
        self._is_shown, self._is_recorded = threading.Event(), threading.Event()
        """The cell has the display; a page has asked for the record since the launch ended."""
        self._has_page, self._opened_at, self._is_seen = False, 0.0, False
        """A page has shown the panel; one has shown the end of the launch."""
        self._is_behind = False
        """The cell has a record of the running launch, which only a page can replace."""

    # -------------------------------------------------------------- from the launch
    def on(self, event: Event) -> None:
        with self._lock:
            self._take(event)
        while len(_ended) > _MAX_ENDED_PANELS:
            _ended.popleft().retire()

    def _take(self, event: Event) -> None:
        self._model.on(event)
        match event:
            case Begun(controls, blocking):
                self._controls = controls
                self._blocking = blocking and threading.current_thread() is threading.main_thread()
                if self._display.is_append_only:
                    _awaited.append(self)
            case Preparing(text, cancel):
                self._waiting.show(text, cancel)
            case Started():
                self._send_in_background()
            case RanksPlaced(workers):
                self._workers = workers
            case Ended():
                self._controls = self._workers = None  # drop the launch: it holds the result and the error
                self._over.set()
                self._show()
                _ended.append(self)
                _unjudged.append(self)

    def settle(self, wait: Callable[[threading.Event, float], bool]) -> None:
        """Run at the end of an append-only cell: wait until the cell has what it must show.

        Without a page that writes the record of a launch that has ended, show it again.
        """
        if not self._over.is_set():
            wait(self._is_shown, _SHOWN_TIMEOUT_S)
        elif self._is_behind and not wait(self._is_recorded, _RECORD_TIMEOUT_S):
            with self._lock:
                self._display.forget()
                self._show()

    # -------------------------------------------------------------- the display
    def _show(self) -> None:
        """Display the current state. Requires the lock.

        The widget is displayed only while the launch runs. Afterwards the record stands alone, because a saved
        notebook that is opened with another kernel has no widget. In a page that has the widget, the panel's script
        puts the live panel in the record's place. In JupyterLab it does so from the start, and keeps the record in the
        notebook current: see ``static/record.js``.
        """
        html = as_html(self._model.record())
        bundle: dict[str, Any] = {"text/plain": as_text(html), "text/html": html}
        metadata: dict[str, Any] = {}
        if self._widget is not None and not self._over.is_set():
            shown, metadata = self._widget._repr_mimebundle_()  # in Colab: where its page gets a widget manager
            bundle[WIDGET] = shown[WIDGET]
            self._is_behind = self._display.is_append_only
        self._display.show(bundle, metadata)
        self._is_shown.set()

    def record_html(self) -> str | None:
        """See `View`. The launching cell has the panel already."""
        if self._model.info is None or self._display.is_in_its_cell:
            return None
        with self._lock:
            record = self._model.record()
        return as_html(record)

    def _record_suffices(self) -> bool:
        """Return True if the record shows everything that a panel could."""
        model = self._model
        is_long = model.feed.waiting > _MAX_SHORT_LOG_BYTES or any(tail.more for tail in model.feed.tails(TAIL_LINES))
        return not (model.state.series or is_long) and model.outputs.fits_record

    def _open(self) -> None:
        """Construct the widget, in the panel's thread: the first import of anywidget is slow."""
        from nblaunch.notebook.widget import PanelWidget

        known = self._model.info
        assert known is not None
        info = PanelInfo(
            launch=known.launch_id,
            name=known.name,
            world_size=known.world_size,
            ranks=known.ranks_in_words,
            device=known.device,
            blocking=self._blocking,
            is_session=known.is_session,
            hosts=known.hosts,
            cell=self._display.cell,
            run=run_folders.name_in(known.log_dir),
        )
        widget = PanelWidget(info, self._receive)
        with self._lock:
            self._widget = widget
            if not self._over.is_set():
                self._show()
            is_late = self._is_retired
        if is_late:
            self.retire()

    def retire(self) -> None:
        with self._lock:
            self._is_retired = True
            widget, self._widget = self._widget, None
            if widget is not None:
                widget.layout.close()
                widget.close()

    # -------------------------------------------------------------- to the page
    def _send_in_background(self) -> None:
        """Start the sender thread unless it runs. Requires the lock."""
        if self._sender is None:
            sender = threading.Thread(target=self._send_all, name="nblaunch-panel", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: the cell gets the record alone
                sender.start()
                self._sender = sender

    def _send_all(self) -> None:
        try:
            self._display.context.copy().run(self._send_until_over)
        except Exception:  # noqa: BLE001  # widgets may raise anything; the launch continues
            _log.exception(
                "the panel of %s failed; its logs and its result are not affected", self._model.record().name
            )
            with self._lock:
                self._sender = None

    def _send_until_over(self) -> None:
        if self._widget is None:
            self._over.wait(SHOW_DELAY_S)
            if not (self._over.is_set() and self._record_suffices()):
                self._open()
        assert self._model.info is not None
        meter = UsageMeter(self._model.info.device, self._model.info.env)
        try:
            pause, due = threading.Event(), 0.0
            while self._has_more():
                if time.monotonic() >= due and not self._over.is_set():
                    is_whole = self._sample(meter)
                    due = time.monotonic() + (
                        timeouts.RESOURCE_SAMPLE_INTERVAL_S if is_whole else _FIRST_SAMPLE_INTERVAL_S
                    )
                self._send()
                (pause if self._over.is_set() else self._over).wait(_SEND_INTERVAL_S)
        finally:
            meter.close()

    def _has_more(self) -> bool:
        """Return True if the sender must continue; False ends its thread."""
        with self._lock:
            model = self._model
            is_sent = not (model.state.is_changed or model.feed.has_more or model.outputs.has_more)
            is_asked = self._resyncs or self._needs_record or self._needs_trace or self._needs_last
            over = self._over.is_set() and is_sent and not is_asked
            if self._widget is None or over:
                self._sender = None
                return False
            return True

    def _sample(self, meter: UsageMeter) -> bool:
        """Measure the ranks. Return True if each has been measured."""
        with self._lock:
            workers, ranks = self._workers, list(self._model.state.pids)
        usages = meter.sample(workers, ranks)
        with self._lock:
            self._model.state.set_resources(usages)
            return self._model.state.resources.keys() >= self._model.state.ranks.keys()

    def _send(self) -> None:
        """Send at most one message, if the rate limit allows it."""
        self._credit = min(_BYTES_PER_MESSAGE, self._credit + _BYTES_PER_MESSAGE)
        if self._credit <= 0:
            return
        model = self._model
        with self._lock:
            widget, is_over = self._widget, self._over.is_set()
            snapshot = record = None
            if self._resyncs:
                model.outputs.rewind()
                requests = [resync.request for resync in self._resyncs]
                snapshot = Snapshot(now=model.now(), changes=model.state.snapshot(), requests=requests)
                for resync in self._resyncs:  # under the lock: no message in between may carry the same lines
                    model.feed.rewind({(attempt, rank, stream): end for attempt, rank, stream, end in resync.logs})
                self._resyncs, self._needs_last = [], True
            elif self._needs_record:
                record, self._needs_record = model.record(), False
            changes = model.state.delta() if snapshot is None else None
            needs_trace, self._needs_trace = self._needs_trace, False
        if widget is None:
            return
        if needs_trace and model.trace is not None:
            trace = b""
            with contextlib.suppress(OSError):  # removed with the logs
                trace = model.trace.read_bytes()
            widget.send(to_content(TraceFile(name=model.trace.name)), [trace])
        if record is not None:
            html = as_html(record)
            content = to_content(RecordText(html=html, text=as_text(html)))
            widget.send(content)
            self._credit -= len(json.dumps(content))
        if snapshot is not None:
            self._send_message(widget, snapshot)
            return
        delta = Delta(now=model.now(), changes=changes)
        size = len(json.dumps(to_content(delta)))
        room = max(_MIN_LOG_BYTES, int(self._credit) - size)
        outputs, output_bytes = model.outputs.take(room // 2 if model.feed.has_more else room)
        logs = model.feed.take(max(_MIN_LOG_BYTES, room - len(output_bytes)))
        needs_heartbeat = not is_over and time.monotonic() - self._sent_at > HEARTBEAT_INTERVAL_S
        if changes or logs or outputs or needs_heartbeat:
            delta = Delta(now=delta.now, changes=changes, logs=logs or None, outputs=outputs or None)
            self._send_message(widget, delta, output_bytes)
        elif is_over and self._needs_last and not model.outputs.has_more:
            self._needs_last = False
            self._send_message(widget, Delta(now=model.now(), last=True))

    def _send_message(self, widget: Any, message: Delta | Snapshot, data: bytes = b"") -> None:
        self._sent_at = time.monotonic()
        self._credit -= widget.send_numbered(message, data)

    # -------------------------------------------------------------- from the page
    def _receive(self, content: Mapping[str, Any]) -> None:
        """Handle a message from the page, in any thread, without waiting."""
        match from_content(content):
            case Resync() as resync:
                self._has_page, self._opened_at = True, time.time()
                with self._lock:
                    self._resyncs.append(resync)
                    self._send_in_background()
            case Request(kind, launch, rank) if (info := self._model.info) is not None and info.launch_id == launch:
                if kind == "record":
                    with self._lock:
                        self._needs_record = True
                        self._send_in_background()
                        if self._over.is_set():
                            self._is_recorded.set()
                elif kind == "trace":
                    with self._lock:
                        self._needs_trace = True
                        self._send_in_background()
                elif kind == "seen":
                    self._has_page = True
                    self._is_seen = self._over.is_set()
                    if self._is_seen and run_folders.name_in(info.log_dir):
                        run_folders.mark_seen(info.log_dir.parent)
                else:
                    self._obey(kind, launch, rank or 0)

    def _obey(self, kind: str, launch: str, rank: int) -> None:
        controls, widget = self._controls, self._widget
        done = controls is None or controls.done
        match kind:
            case "look" if controls is not None:
                controls.console.look(rank)
            case "stacks" if controls is not None and not done:
                controls.ask_stacks()
            case "profile" if controls is not None and widget is not None:
                if not done:
                    controls.ask_profile()
                widget.send(to_content(Acknowledged(action="profile", launch=launch)))
            case "stop" | "kill" if widget is not None:
                if controls is not None and not done:
                    controls.kill() if kind == "kill" else controls.stop()
                action: Any = "done" if done else kind
                widget.send(to_content(Acknowledged(action=action, launch=launch)))


def unseen_panels(heard_until: float) -> list[LaunchInfo]:
    """Run at the end of each cell: return the launches whose page was gone when they ended, once.

    `heard_until`: when the kernel had last handled everything that pages had sent.
    """
    found = []
    for panel in list(_unjudged):
        info, last = panel._model.info, max(panel._model.ended_at, panel._opened_at)
        if not panel._is_seen and heard_until < last + _SEEN_DELAY_S:
            continue  # a page may be about to say so
        _unjudged.remove(panel)
        if panel._has_page and info is not None and not panel._is_seen:
            found.append(info)
    return found


def settle_panels(wait: Callable[[threading.Event, float], bool]) -> None:
    """Run at the end of each cell: settle the panels of a cell that can show nothing after its end."""
    while _awaited:
        _awaited.popleft().settle(wait)


_ended: deque[PanelView] = deque()
"""Live panels whose launch has ended, oldest first."""
_unjudged: deque[PanelView] = deque(maxlen=_MAX_ENDED_PANELS)
"""Those whose end a page may not have shown."""
_awaited: deque[PanelView] = deque()
"""Of the present cell, if it is append-only."""
