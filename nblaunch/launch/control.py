"""The socket of a detached run: its runner serves it, and the kernels that attach ask.

A connection is one request, a line of JSON: what to ``do`` (stop, kill, stacks, profile, look, type) with its
arguments, or how much of the debug console was ``seen``. The latter has an answer: what is new there, and the usage of
the ranks. All else is in the run's folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from nblaunch.launch.debug_console import RemoteConsole
from nblaunch.launch.run_folders import is_removed
from nblaunch.launch.views import (
    Controls,
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
from nblaunch.machine.usage import Usage

_log = logging.getLogger(__name__)
_SOCKET = "control"
_MAX_PATH_BYTES = 100
"""Of a socket; the system's limit is 103 or 107."""
_PEER_TIMEOUT_S = 2.0
_POLL_S = 0.1
_MAX_TEXT = 1 << 20
"""Characters of the console that are kept for those who attach, or are slow."""
_MAX_TEXT_BEFORE = 8 << 10
"""Of those, for a process that attaches while a rank waits there."""


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield the path of a folder's socket, short enough for the system."""
    path = str(folder / _SOCKET)
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield path
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_SOCKET}"
    finally:
        os.close(fd)


# ------------------------------------------------------------------ in the runner
class ControlServer(View):
    """Lets other processes of this user control a launch. As its view, it learns where the ranks are."""

    shows_notes = False

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address(folder) as address:
            self._listener.bind(address)
        self._listener.listen()
        self._listener.settimeout(_POLL_S)
        self._path = folder / _SOCKET
        self._workers: Measured | None = None
        self._info: LaunchInfo | None = None
        self._cancel: Callable[[], None] | None = None
        self._launch: Controls | None = None
        self._is_stopped = False
        """Before there was a launch."""
        self._text, self._shown, self._typed_at = "", 0, 0
        """What the console has shown last, and how many characters in all, and before the last line was typed."""
        self._meter: UsageMeter | None = None
        self._usages: list[dict[str, Any]] = []
        self._measure_at = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="nblaunch-control", daemon=True)
        self._thread.start()

    def on(self, event: Event) -> None:
        match event:
            case RanksPlaced(workers):
                self._workers = workers
            case Started(info):
                self._info, self._workers = info, None
            case Preparing(_, cancel):
                self._cancel = cancel
                if self._is_stopped and cancel is not None:
                    cancel()

    def control(self, launch: Controls) -> None:
        """Control this launch from now on."""
        self._launch = launch
        if self._is_stopped:
            launch.stop()

    def stop(self) -> None:
        """Stop the launch, or the wait for its nodes. Safe in a signal handler."""
        self._is_stopped = True
        if self._launch is not None:
            self._launch.stop()
        elif self._cancel is not None:
            self._cancel()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._is_over.is_set():
            if is_removed(self._path.parent):  # by hand: no one could stop the run, or see its end
                self.stop()
            try:
                connection, _ = self._listener.accept()
                with connection:
                    self._answer(connection)
            except TimeoutError:  # of nobody, or of a peer that sends nothing
                pass
            except Exception:  # noqa: BLE001  # a group that ends meanwhile, a peer of another version; serve the others
                _log.debug("nblaunch: a peer was not served", exc_info=True)
        if self._meter is not None:
            self._meter.close()

    def _answer(self, connection: socket.socket) -> None:
        credentials = getattr(socket, "SO_PEERCRED", None)
        if credentials is not None:
            data = connection.getsockopt(socket.SOL_SOCKET, credentials, struct.calcsize("3i"))
            if struct.unpack("3i", data)[1] != os.getuid():
                return
        connection.settimeout(_PEER_TIMEOUT_S)
        with connection.makefile("rw") as stream:
            request = json.loads(stream.readline())
            self._obey(request)
            if "seen" in request:
                answer = {"usage": self._usage(), "console": self._console(request["seen"])}
                stream.write(json.dumps(answer) + "\n")

    def _obey(self, request: Mapping[str, Any]) -> None:
        launch, what = self._launch, request.get("do")
        if what == "stop":
            self.stop()
        if launch is None:
            return
        if what == "kill":
            launch.kill()
        elif what == "stacks":
            launch.ask_stacks(float(request["timeout"]))
        elif what == "profile":
            launch.ask_profile(float(request["seconds"]))
        elif what == "look":
            launch.console.look(int(request["rank"]))
        elif what == "type":
            prompt = launch.console.prompt
            if prompt is not None and dataclasses.asdict(prompt.asked) == request["asked"]:  # else it is answered
                self._typed_at = self._shown
                launch.console.type(prompt, request["line"])

    def _usage(self) -> list[dict[str, Any]]:
        if self._info is not None and time.monotonic() >= self._measure_at:
            self._measure_at = time.monotonic() + timeouts.RESOURCE_SAMPLE_INTERVAL_S
            if self._meter is None:
                self._meter = UsageMeter(self._info.device, self._info.env)
            usages = self._meter.sample(self._workers, range(self._info.world_size))
            self._usages = [dataclasses.asdict(usage) for usage in usages]
        return self._usages

    def _console(self, seen: int | None) -> dict[str, Any] | None:
        """Return what the console shows, and its text after `seen` characters; None: since a line was typed."""
        if self._launch is None:
            return None
        console = self._launch.console
        prompt, text = console.prompt, console.take_text()  # in this order: the text before it is then shown first
        self._shown += len(text)
        self._text = (self._text + text)[-_MAX_TEXT:]
        since = max(self._typed_at, self._shown - _MAX_TEXT_BEFORE) if seen is None else seen
        return {
            "prompt": None if prompt is None else {"text": prompt.text, "asked": dataclasses.asdict(prompt.asked)},
            "is_open": console.is_open,
            "has_examined": console.has_examined,
            "states": [*console.states],
            "text": self._text[max(0, len(self._text) - (self._shown - since)) :],
            "shown": self._shown,
        }


# ------------------------------------------------------------------ in a kernel that has attached
class ControlLink:
    """Asks the runner of a run. OSError at the begin: it cannot be reached."""

    def __init__(self, folder: Path) -> None:
        self.usages: list[Usage] = []
        """What the ranks used last."""
        self.console = RemoteConsole(self.send)
        self._folder = folder
        self._seen: int | None = None
        with contextlib.suppress(TimeoutError):  # it is there, and busy
            self._ask({"seen": None})

    def _ask(self, request: Mapping[str, Any]) -> str:
        """Return the answer; empty if there is none."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PEER_TIMEOUT_S)
            with _address(self._folder) as address:
                connection.connect(address)
            with connection.makefile("rw") as stream:
                stream.write(json.dumps(request) + "\n")
                stream.flush()
                return stream.readline() if "seen" in request else ""

    def send(self, request: Mapping[str, Any]) -> None:
        """Ask for something; the folder or the next `poll` tells what came of it."""
        with contextlib.suppress(OSError):
            self._ask(request)

    def poll(self) -> bool:
        """Ask for what is new. Return False if there is no answer."""
        try:
            said = self._ask({"seen": self._seen})
        except OSError:
            return False
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a runner of another version
            answer = json.loads(said)
            self.usages = [Usage(**usage) for usage in answer["usage"]]
            if answer["console"] is not None:
                self._seen = answer["console"]["shown"]
                self.console.take(answer["console"])
        return bool(said)

    def sampler(self, device: str, env: Mapping[str, str]) -> ControlLink:
        return self

    def sample(self, ranks: Collection[int]) -> list[Usage]:
        return [usage for usage in self.usages if usage.rank in ranks]

    def close(self) -> None:
        """As a sampler: nothing to release."""
