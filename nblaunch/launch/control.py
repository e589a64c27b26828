"""The socket of a detached run: its runner serves it, and the kernels that attach connect to it. JSON, a line each.

To the runner go ``do`` (stop, kill, stacks, look, type) with their arguments; from it come the usage of the ranks and
what its debug console shows. Everything else is in the run's folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from nblaunch.launch.debug_console import RemoteConsole
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
_CONSOLE_POLL_S = 0.1
_READ_BYTES = 64 << 10
_MAX_TEXT = 8 << 10
_SEND_TIMEOUT = struct.pack("ll", 2, 0)
"""Seconds and microseconds: a process that does not read for longer is cut off, and may connect again."""


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


class Line:
    """One end of a connection. A peer that does not read is cut off. Sending is thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self.is_closed = False
        self._rest = b""
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            try:
                if not self.is_closed:
                    self.socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self.is_closed = True

    def receive(self) -> list[dict[str, Any]]:
        """Return what has arrived, without waiting."""
        try:
            while data := self.socket.recv(_READ_BYTES, socket.MSG_DONTWAIT):
                self._rest += data
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        *lines, self._rest = self._rest.split(b"\n")
        return [message for line in lines if isinstance(message := _parsed(line), dict)]

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self.socket.close()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


# ------------------------------------------------------------------ in the runner
class ControlServer(View):
    """Lets other processes of this user control a launch. As its view, it learns where the ranks are."""

    shows_notes = False

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address(folder) as address:
            self._listener.bind(address)
        self._listener.listen()
        self._path = folder / _SOCKET
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lines: list[Line] = []
        self._workers: Measured | None = None
        self._info: LaunchInfo | None = None
        self._cancel: Callable[[], None] | None = None
        self._launch: Controls | None = None
        self._is_stopped = False
        """Before there was a launch."""
        self._shown: dict[str, Any] = {}
        self._text = ""
        """Of the console, since a line was typed: what a process that attaches now has missed."""
        self._new: list[Line] = []
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
        for line in self._lines:
            line.close()
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        meter, measured_at = None, 0.0
        while not self._is_over.is_set():
            ready = self._selector.select(_CONSOLE_POLL_S)
            if not self._path.parent.exists():  # removed by hand: no one could stop the run, or see its end
                self.stop()
            try:
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        for message in key.data.receive():
                            self._obey(message)
                self._show_console()
                if self._lines and time.monotonic() >= measured_at + timeouts.RESOURCE_SAMPLE_INTERVAL_S:
                    measured_at = time.monotonic()
                    if meter is None and self._info is not None:
                        meter = UsageMeter(self._info.device, self._info.env)
                    if meter is not None and self._info is not None:
                        usages = meter.sample(self._workers, range(self._info.world_size))
                        self._tell({"usage": [dataclasses.asdict(usage) for usage in usages]})
            except Exception:  # noqa: BLE001  # a group that ends meanwhile, a peer of another version; serve the others
                _log.debug("nblaunch: a peer was not served", exc_info=True)
            self._drop_closed()
        if meter is not None:
            meter.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        credentials = getattr(socket, "SO_PEERCRED", None)
        if credentials is not None:
            data = connection.getsockopt(socket.SOL_SOCKET, credentials, struct.calcsize("3i"))
            if struct.unpack("3i", data)[1] != os.getuid():
                connection.close()
                return
        line = Line(connection)
        self._lines.append(line)
        self._selector.register(connection, selectors.EVENT_READ, line)
        self._shown = {}  # the new one has seen nothing
        self._new.append(line)

    def _drop_closed(self) -> None:
        for line in [line for line in self._lines if line.is_closed]:
            self._lines.remove(line)
            self._selector.unregister(line.socket)
            line.close()

    def _tell(self, message: Mapping[str, Any]) -> None:
        for line in self._lines:
            line.send(message)

    def _show_console(self) -> None:
        """Tell the others what the console shows; keep its text until there is one."""
        if self._launch is None or not self._lines:
            return
        console = self._launch.console
        prompt, text = console.prompt, console.take_text()  # in this order: the text before it is then shown first
        shown = {
            "prompt": None if prompt is None else {"text": prompt.text, "asked": dataclasses.asdict(prompt.asked)},
            "is_open": console.is_open,
            "has_examined": console.has_examined,
            "stopped": [*console.stopped],
            "states": [*console.states],
        }
        if shown != self._shown or text:
            self._shown, self._text = shown, (self._text + text)[-_MAX_TEXT:]
            for line in self._lines:
                line.send({"console": {**shown, "text": self._text if line in self._new else text}})
            self._new.clear()

    def _obey(self, message: Mapping[str, Any]) -> None:
        launch, kind = self._launch, message.get("do")
        if kind == "stop":
            self.stop()
        if launch is None:
            return
        if kind == "kill":
            launch.kill()
        elif kind == "stacks":
            launch.ask_stacks()
        elif kind == "look":
            launch.console.look(int(message["rank"]))
        elif kind == "type":
            prompt = launch.console.prompt
            if prompt is not None and dataclasses.asdict(prompt.asked) == message["asked"]:  # else it is answered
                self._text = ""
                launch.console.type(prompt, message["line"])


# ------------------------------------------------------------------ in a kernel that has attached
class ControlLink:
    """The connection of this process to the runner of a run. OSError: the runner cannot be reached."""

    def __init__(self, folder: Path) -> None:
        self.usages: list[Usage] = []
        """What the ranks used last."""
        self.console = RemoteConsole(self.send)
        self._folder = folder
        self._line = self._connected()

    def _connected(self) -> Line:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(self._folder) as address:
                connection.connect(address)
        except OSError:
            connection.close()
            raise
        return Line(connection)

    @property
    def is_closed(self) -> bool:
        return self._line.is_closed

    def reconnect(self) -> None:
        """Connect again if the runner lives: it has cut off a process that was stopped for long."""
        with contextlib.suppress(OSError):
            self._line.close()
            self._line = self._connected()

    def send(self, message: Mapping[str, Any]) -> None:
        self._line.send(message)

    def poll(self) -> None:
        """Take what the runner has sent."""
        for message in self._line.receive():
            if "usage" in message:
                self.usages = [Usage(**usage) for usage in message["usage"]]
            elif "console" in message:
                self.console.take(message["console"])

    def sampler(self, device: str, env: Mapping[str, str]) -> ControlLink:
        return self

    def sample(self, ranks: Collection[int]) -> list[Usage]:
        return [usage for usage in self.usages if usage.rank in ranks]

    def close(self) -> None:
        """As a sampler: nothing to release; the link is used until the run ends."""

    def disconnect(self) -> None:
        self.console.end()
        self._line.close()
