"""The panel: a launch shown live under its cell, by a widget; and its record, which stays when the launch has ended.

The supervisor's calls only note what has changed. A thread of the panel's own sends it: at most ten messages and
256 KB a second, whatever the ranks print, also after the launch has ended, until the page has the logs' last lines.

Messages to the page (`nblaunch/notebook/static/panel.js` is what reads them) have a ``kind`` and a number ``seq``:

* ``delta``: the parts of `PanelState` that have changed, and ``logs``: for each part of a log its attempt ``a``, rank
  ``r``, stream ``s``, offset ``o``, length ``n`` and time ``t``; its bytes follow in the buffer, one after the other.
* ``snapshot``: all parts; ``rewound`` where the logs' last lines follow as deltas.

and without a number ``older`` (an earlier part of a log, as it was asked for) and ``ack`` (a click was heard).

The page sends ``stop``, ``kill``, ``stacks``, ``resync`` (it has missed messages) and ``older``. They come
in whatever thread the kernel has for them, at once or when the cell is over; nothing here ever waits for one.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch.launch.output.log_directory import LaunchFiles
from nblaunch.launch.views.view import Controls, LaunchInfo, LogPiece, NullView, Outcome, RankStatus, Stream
from nblaunch.machine.usage import Sampler
from nblaunch.notebook.cell_display import CellDisplay
from nblaunch.notebook.log_feed import Chunk, LogFeed
from nblaunch.notebook.panel_state import PanelState, thinned
from nblaunch.notebook.record import Record, as_html, as_text

_log = logging.getLogger(__name__)
_SHOW_AFTER = 0.1
"""Seconds: a launch that is over before shows its record alone, if that says all."""
_EVERY = 0.125
"""Seconds between two messages: with those of its display they stay below ten a second."""
_RATE = 200 << 10
"""Bytes a second: with the record, which may be some more at the end, below 256 KB."""
_MOST_AT_ONCE = int(_RATE * _EVERY)
_LEAST_OF_LOGS = 2 << 10
_SAMPLE_EVERY = 1.0
_SIGN_OF_LIFE_EVERY = 2.0
"""Seconds: a page interrupts the kernel for a click that is not heard, but only while it knows its launch to run."""
_RECORD_POINTS = 300
"""Points of a series in the record's charts."""
_TAIL_LINES = 20
_MOST_PANELS = 20
"""Panels that stay live after their launch has ended; of older ones the record is left."""
_WIDGET = "application/vnd.jupyter.widget-view+json"


class PanelView(NullView):
    """Shows a launch by a widget, and ends as its record. Made in the thread that launches.

    Args:
        shell: The notebook's shell.
    """

    wants_text = False

    def __init__(self, shell: Any) -> None:
        self._display = CellDisplay(shell)
        self._feed = LogFeed()
        self._lock = threading.RLock()
        """Held while the state or what is displayed changes; never while something is waited for."""
        self._state = PanelState(0)
        self._info: LaunchInfo | None = None
        self._files: list[LaunchFiles | None] = []
        """Those of every attempt, which the page may ask for."""
        self._controls: Controls | None = None
        self._blocking = False
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._ended_at = 0.0
        self._widget: Any = None
        self._is_missed = False
        """A page has missed messages."""
        self._is_rewound = False
        """And all lines of the logs: the last of them follow the snapshot."""
        self._sender: threading.Thread | None = None
        self._credit = float(_MOST_AT_ONCE)
        self._told_at = 0.0
        self._is_retired = False

    # -------------------------------------------------------------- from the launch
    def begun(self, controls: Controls, blocking: bool) -> None:
        self._controls = controls
        self._blocking = blocking and threading.current_thread() is threading.main_thread()
        self._begun = time.monotonic()

    def started(self, info: LaunchInfo) -> None:
        with self._lock:
            if self._info is None:
                self._state = PanelState(info.world_size)
            self._info = info
            self._files.append(info.files)
            self._state.started(info)
            self._send_in_background()

    def ranks(self, changed: Sequence[RankStatus]) -> None:
        with self._lock:
            self._state.ranks_stand(changed)

    def logs(self, pieces: Sequence[LogPiece]) -> None:
        assert self._info is not None
        now = self._now()
        for log in pieces:
            self._feed.grew(self._info.attempt, self._info.log_dir, log.rank, log.stream, log.end, now)

    def reports(self, rank: int, records: Sequence[Mapping[str, Any]]) -> None:
        with self._lock:
            self._state.reported(rank, records)

    def note(self, text: str) -> None:
        with self._lock:
            self._state.noted(self._now(), text)

    def countdown(self, text: str) -> None:
        with self._lock:
            self._state.counts_down(text)

    def stacks(self, texts: Mapping[int, str]) -> None:
        with self._lock:
            self._state.stacks_are(self._now(), texts)

    def finished(self, outcome: Outcome) -> None:
        with self._lock:
            self._controls = None  # the launch has the result and the error, which are not the panel's to keep
            self._state.ended(outcome)
            self._ended_at = time.time()
            self._over.set()
            self._show()
        _keep(self)

    def _now(self) -> float:
        return round(time.monotonic() - self._begun, 2)

    # -------------------------------------------------------------- what is displayed
    def _show(self) -> None:
        """Display how the launch stands; the lock is held.

        While it runs the widget is displayed. When it has ended its record is, alone: a notebook that is saved and
        opened with another kernel would find no widget. In a page that has the widget, the panel's script puts the
        live panel in the record's place.
        """
        record = self._record()
        bundle: dict[str, Any] = {"text/plain": as_text(record), "text/html": as_html(record)}
        if self._widget is not None and not self._over.is_set():
            bundle[_WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        self._display.show(bundle)

    def _record(self) -> Record:
        state, info = self._state, self._info
        return Record(
            name=info.name if info else "the launch",
            state=state.state["name"] if self._over.is_set() else "running",
            seconds=state.state["seconds"] or self._now(),
            message=state.state["message"],
            world_size=info.world_size if info else 0,
            device=info.device if info else "",
            ended_at=self._ended_at,
            metrics={
                name: {rank: thinned(series.points, _RECORD_POINTS) for rank, series in ranks.items()}
                for name, ranks in state.series.items()
            },
            tails=self._feed.tails(_TAIL_LINES) if self._over.is_set() else [],
            notes=[text for _, text in state.notes],
            failure=state.failure,
            log_dir=str(info.log_dir) if info else "",
            launch_id=info.launch_id if info else "",
        )

    def _says_all(self) -> bool:
        """Whether the record holds all that a panel could show."""
        is_long = self._feed.waiting > 1000 or any(tail.more for tail in self._feed.tails(_TAIL_LINES))
        return not (self._state.series or is_long)

    def _open(self) -> None:
        """Make the widget, in the panel's thread: it takes a moment, the first time most of all."""
        from nblaunch.notebook.widget import PanelWidget

        assert self._info is not None
        info = {
            "launch": self._info.launch_id,
            "name": self._info.name,
            "world": self._info.world_size,
            "device": self._info.device,
            "method": self._info.start_method,
            "blocking": self._blocking,
        }
        widget = PanelWidget(info, self._heard)
        with self._lock:
            self._widget = widget
            if not self._over.is_set():
                self._show()
            is_late = self._is_retired
        if is_late:
            self.retire()

    def retire(self) -> None:
        """Let the widget go; the record stays."""
        with self._lock:
            self._is_retired = True
            widget, self._widget = self._widget, None
            if widget is None:
                return
            widget.layout.close()
            widget.close()

    # -------------------------------------------------------------- to the page
    def _send_in_background(self) -> None:
        """Have a thread send until there is nothing left; the lock is held."""
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, name="nblaunch-panel", daemon=True)
            self._sender.start()

    def _send_all(self) -> None:
        try:
            self._display.in_its_context(self._send_until_over)
        except Exception:  # noqa: BLE001  # whatever widgets raise; the launch goes on
            _log.exception("the panel of %s shows no more; its logs and result are safe", self._record().name)
            with self._lock:
                self._sender = None

    def _send_until_over(self) -> None:
        if self._widget is None:
            self._over.wait(_SHOW_AFTER)
            if not (self._over.is_set() and self._says_all()):
                self._open()
        assert self._info is not None
        sampler = Sampler(self._info.device, self._info.env)
        try:
            pause, due = threading.Event(), 0.0
            while self._has_more():
                if time.monotonic() >= due and not self._over.is_set():
                    due = time.monotonic() + _SAMPLE_EVERY
                    self._sample(sampler)
                self._send()
                pause.wait(_EVERY) if self._over.is_set() else self._over.wait(_EVERY)
        finally:
            sampler.close()

    def _has_more(self) -> bool:
        """Whether to go on sending; if not, the thread counts as ended from here on."""
        with self._lock:
            over = self._over.is_set() and not (self._state.is_changed or self._feed.has_more or self._is_missed)
            if self._widget is None or over:
                self._sender = None
                return False
            return True

    def _sample(self, sampler: Sampler) -> None:
        with self._lock:
            pids = dict(self._state.pids)
        usages = sampler.sample(pids)
        with self._lock:
            self._state.used(usages)

    def _send(self) -> None:
        """One message, if there is something to say and its time has come."""
        self._credit = min(float(_MOST_AT_ONCE), self._credit + _MOST_AT_ONCE)
        if self._credit <= 0:
            return
        with self._lock:
            widget, is_over = self._widget, self._over.is_set()
            kind = "snapshot" if self._is_missed else "delta"
            parts = self._state.snapshot() if self._is_missed else self._state.delta()
            if self._is_rewound:
                self._feed.rewind()  # now: no message between may have some of the lines already
                parts["rewound"] = True
            self._is_missed = self._is_rewound = False
        if widget is None:
            return
        chunks: list[Chunk] = []
        if kind == "delta":
            size = len(json.dumps(parts))
            chunks = self._feed.take(max(_LEAST_OF_LOGS, int(self._credit) - size), is_over=is_over)
        is_quiet = not is_over and time.monotonic() - self._told_at > _SIGN_OF_LIFE_EVERY
        if parts or chunks or is_quiet:
            content = {"kind": kind, "now": self._now(), **parts}
            if chunks:
                content["logs"] = [_place(chunk) for chunk in chunks]
            self._tell(widget, content, chunks)
        elif is_over:
            self._fill(widget)

    def _tell(self, widget: Any, content: dict[str, Any], chunks: Sequence[Chunk]) -> None:
        data = b"".join(chunk.data for chunk in chunks)
        self._told_at = time.monotonic()
        self._credit -= len(json.dumps(content)) + len(data)
        widget.tell(content, data)

    def _fill(self, widget: Any) -> None:
        """Send lines that were left out of a flood, though they are among the last."""
        chunks = self._feed.fill(int(self._credit))
        if chunks:
            self._credit -= sum(len(chunk.data) for chunk in chunks)
            _send_older(widget, None, chunks)

    # -------------------------------------------------------------- from the page
    def _heard(self, content: Mapping[str, Any]) -> None:
        """A message from the page, in any thread. What it asks is noted, or answered from what is there."""
        kind = content.get("kind")
        if kind == "resync":
            with self._lock:
                self._is_missed = True
                self._is_rewound |= not content.get("have")
                self._send_in_background()
        elif kind == "older":
            self._answer(content)
        elif kind in ("stop", "kill", "stacks"):
            self._obey(kind, content.get("launch"))

    def _obey(self, kind: str, launch: Any) -> None:
        controls, info, widget = self._controls, self._info, self._widget
        if info is None or widget is None or launch != info.launch_id:
            return  # another launch's panel
        done = controls is None or controls.done
        if controls is not None and not done:
            {"stop": controls.stop, "kill": controls.kill, "stacks": controls.ask_stacks}[kind]()
        if kind != "stacks":
            widget.send({"kind": "ack", "what": "done" if done else kind, "launch": launch})

    def _answer(self, content: Mapping[str, Any]) -> None:
        """Send an earlier part of a log."""
        try:
            wanted = [int(content[key]) for key in ("a", "r", "from", "to")]
        except (KeyError, TypeError, ValueError):
            return  # not our page's
        attempt, rank, start, end = wanted
        stream: Stream = "err" if content.get("s") == "err" else "out"
        chunks = self._feed.older(attempt, rank, stream, start, end)
        with self._lock:
            widget = self._widget
        if widget is not None:
            _send_older(widget, content.get("id"), chunks or [Chunk(attempt, rank, stream, start, 0.0, b"")])


def _send_older(widget: Any, request: Any, chunks: Sequence[Chunk]) -> None:
    """Send an earlier part of a log, as the answer to a request or, with None, unasked."""
    first, data = chunks[0], b"".join(chunk.data for chunk in chunks)
    content = {
        "kind": "older",
        "id": request,
        "a": first.attempt,
        "r": first.rank,
        "s": first.stream,
        "from": first.offset,
        "to": first.offset + len(data),
        "spans": [[len(chunk.data), chunk.time] for chunk in chunks if chunk.data],
    }
    widget.send(content, [data])


def _place(chunk: Chunk) -> dict[str, Any]:
    return {
        "a": chunk.attempt,
        "r": chunk.rank,
        "s": chunk.stream,
        "o": chunk.offset,
        "n": len(chunk.data),
        "t": chunk.time,
    }


_kept: deque[PanelView] = deque()
"""Panels whose launch has ended, oldest first."""


def _keep(panel: PanelView) -> None:
    _kept.append(panel)
    while len(_kept) > _MOST_PANELS:
        _kept.popleft().retire()
