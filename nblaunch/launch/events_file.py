"""The events of a launch in a file of its folder: one JSON object in each line, with its time since the epoch.

What ranks print, report and display is in files already, which a reader follows for itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nblaunch.launch.views import (
    Countdown,
    Ended,
    Event,
    Failure,
    LaunchInfo,
    Note,
    Outcome,
    Preparing,
    ProfileShown,
    RanksChanged,
    RankStatus,
    Reports,
    StacksShown,
    Started,
    Stuck,
    View,
)
from nblaunch.profiles.profile import Profile

_log = logging.getLogger(__name__)
EVENTS = "events.jsonl"
_INFO = ("launch_id", "name", "world_size", "device", "attempt", "is_session", "hosts", "only")
_PLAIN: dict[str, type[Event]] = {each.__name__: each for each in (Countdown, Note, Reports, Stuck)}
"""Events that are read as they are written."""


def _of_its_runner() -> None:
    """Stand for a cancellation that only the writer of the event can make."""


def to_line(event: Event, at: float) -> bytes | None:
    """Return an event as a line; None for those that a reader finds elsewhere."""
    content: Mapping[str, Any]
    match event:
        case Started(info):
            content = {**{name: getattr(info, name) for name in _INFO}, "log_dir": str(info.log_dir)}
        case Preparing(text, cancel):
            content = {"text": text, "can_cancel": cancel is not None}
        case Reports() if not event.is_printed:
            return None
        case ProfileShown(profile):
            content = {"profile": profile.to_json()}
        case RanksChanged() | StacksShown() | Countdown() | Note() | Reports() | Stuck() | Ended():
            content = asdict(event)
        case _:
            return None
    return json.dumps({"at": round(at, 3), "event": type(event).__name__, **content}).encode() + b"\n"


def from_line(line: bytes) -> tuple[float, Event] | None:
    """Return the time and the event of a line; None if it is torn, as after a full disk, or of another version."""
    try:
        content = json.loads(line)
        at, kind = float(content.pop("at")), content.pop("event")
        match kind:
            case "Started":
                return at, Started(LaunchInfo(**{**content, "log_dir": Path(content["log_dir"])}))
            case "Preparing":
                return at, Preparing(content["text"], _of_its_runner if content["can_cancel"] else None)
            case "RanksChanged":
                return at, RanksChanged([RankStatus(**each) for each in content["ranks"]])
            case "StacksShown":
                return at, StacksShown({int(rank): text for rank, text in content["texts"].items()})
            case "ProfileShown":
                return at, ProfileShown(Profile.from_json(content["profile"]))
            case "Ended":
                outcome = content["outcome"]
                failure = outcome.pop("failure")
                return at, Ended(Outcome(**outcome, failure=Failure(**failure) if failure else None))
            case _:
                return at, _PLAIN[kind](**content)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class EventsFile(View):
    """Writes the events to the folder that `begin` returns for each attempt. A full disk costs events, no more."""

    shows_notes = False

    def __init__(self, begin: Callable[[LaunchInfo], Path]) -> None:
        self._begin = begin
        self._path: Path | None = None
        self._countdown = ""
        self._is_torn = self._has_warned = False

    def on(self, event: Event) -> None:
        if isinstance(event, Started):
            try:
                self.open(self._begin(event.info))
            except OSError as error:
                _log.warning("nblaunch: %s lacks a record: %s", event.info.log_dir, error)
        elif isinstance(event, Countdown):
            if event.text == self._countdown:
                return
            self._countdown = event.text
        line = to_line(event, time.time())
        if line is not None and self._path is not None:
            self._write(self._path, line)

    def open(self, folder: Path) -> None:
        """Write to this folder from now on."""
        path = folder / EVENTS
        if self._path not in (None, path):
            text = f"its ranks were restarted: see {folder}"
            self._write(self._path, to_line(Ended(Outcome("failed", 0.0, text)), time.time()))
        self._path = path

    def _write(self, path: Any, line: bytes | None) -> None:
        data = b"\n" * self._is_torn + (line or b"")
        try:
            with open(path, "ab", buffering=0) as file:
                self._is_torn = file.write(data) < len(data)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("nblaunch: %s lacks events: %s", path, error)


class EventsReader:
    """Reads the events of a folder while they are written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS
        self._at = 0
        self._rest = b""

    def read(self) -> Iterator[tuple[float, Event]]:
        """Yield the events since the last call."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._at)
            for line in file:
                self._at += len(line)
                whole = self._rest + line
                self._rest = b"" if whole.endswith(b"\n") else whole
                found = None if self._rest else from_line(whole)
                if found is not None:
                    yield found


def ends_of(folder: Path, most: int = 64 << 10) -> list[tuple[float, Event]]:
    """Return the first and the last events of a folder: of a long file, those in so many bytes at each end."""
    try:
        fd = os.open(folder / EVENTS, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        size = os.fstat(fd).st_size
        if size <= 2 * most:
            data = os.pread(fd, 2 * most, 0)
        else:
            data = os.pread(fd, most, 0) + b"\n" + os.pread(fd, most, size - most)
    finally:
        os.close(fd)
    return [found for line in data.splitlines(keepends=True) if (found := from_line(line)) is not None]
