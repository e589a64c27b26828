"""Answers to a page that reloads while the kernel's cell waits for a launch.

A page that connects sends ``kernel_info_request`` and asks for the state of all widgets. It shows no widget before both
replies. The kernel handles one shell request at a time, so both would wait for the cell. This module answers them as
they arrive, and passes on messages to the panels of launches. The kernel handles everything else in order: cells, and
messages to other widgets, whose callbacks are user code.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import zmq
from zmq.eventloop.zmqstream import ZMQStream

_log = logging.getLogger(__name__)
_BUSY_INTERVAL_S = 1.0
"""Pause between two "busy" statuses for a page that connects while a cell runs."""
_BUSY_DURATION_S = 5.0
"""How long a page that connects, or gets a panel, has "busy" statuses: the threads that answer it report "idle"."""
_CONTROL = "jupyter.widget.control"
"""Target of the comm by which ipywidgets asks for the state of all widgets."""
Handler = Callable[[list[bytes], dict[str, Any]], object]


class ShellChannel:
    """The shell channel of a kernel.

    ipykernel 7 reads the channel in a thread of its own, which answers. ipykernel 6 reads it in the thread that runs
    cells, which must call `serve` while it waits. Without a kernel it does nothing.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        stream = getattr(kernel, "shell_stream", None)
        self._stream: Any = stream if isinstance(stream, ZMQStream) and hasattr(stream, "_recv_callback") else None
        self._loop = getattr(getattr(kernel, "shell_channel_thread", None), "io_loop", None)
        """Loop of the thread that reads the channel; None if that thread runs the cells."""
        self._kernel_handler: Callable[[Sequence[Any]], Any] | None = None
        """The kernel's own handler, while `_arrived` replaces it."""
        self._cell: Any = None
        self._over = threading.Event()
        self._busy_at = self._busy_until = 0.0
        if self._stream is None:
            _log.debug("cannot read the shell channel: a reloaded page shows its panels only after the cell")

    @contextlib.contextmanager
    def answered(self, over: threading.Event) -> Iterator[None]:
        """Answer pages in this context, while a cell in the current thread waits for `over`."""
        if self._stream is None:
            yield
            return
        self._cell, self._over = self._kernel.get_parent(), over
        self._busy_at = time.monotonic()
        self._busy_until = self._busy_at + _BUSY_DURATION_S  # pages that open a panel show "idle"
        try:
            self._in_its_thread(self._begin)
            yield
        finally:
            self._in_its_thread(self._end)

    def serve(self) -> None:
        """Handle what the waiting thread must handle itself. Call it repeatedly."""
        if self._stream is None:
            return
        if self._loop is None:
            with _interrupt_held():  # an interrupt could lose a cell that is read but not yet queued
                self._stream.flush(zmq.POLLIN)
                self._stream.flush(zmq.POLLOUT)
        if self._busy_at + _BUSY_INTERVAL_S <= time.monotonic() < self._busy_until:
            self._publish_busy()

    def _in_its_thread(self, act: Callable[[], None]) -> None:
        """Call `act` in the thread that reads the channel: a ZMQStream is not thread-safe."""
        if self._loop is None:
            act()
        else:
            self._loop.add_callback(act)

    def _begin(self) -> None:
        if self._kernel_handler is None:
            self._kernel_handler = self._stream._recv_callback
            self._stream.on_recv(self._arrived, copy=False)

    def _end(self) -> None:
        if self._kernel_handler is not None:
            self._stream.on_recv(self._kernel_handler, copy=False)
            self._kernel_handler = None

    def _arrived(self, frames: Sequence[Any]) -> Any:
        kernel_handler = self._kernel_handler
        assert kernel_handler is not None
        if self._over.is_set():
            self._end()  # an interrupt may have cut off the end of `answered`
        elif self._is_answered(frames):
            return None
        return kernel_handler(frames)

    def _is_answered(self, frames: Sequence[Any]) -> bool:
        """Answer a message that need not wait for the cell. Return True if it was answered."""
        session = self._kernel.session
        try:
            idents, parts = session.feed_identities(frames, copy=False)
            # Not `deserialize`: it stores each signature, and the kernel would reject the message as a replay.
            header, content = (session.unpack(parts[number].bytes) for number in (1, 4))
            if header.get("subshell_id"):  # the kernel answers it at once, and then says "idle"
                self._busy_until = time.monotonic() + _BUSY_DURATION_S
                return False
            handler = self._handler(header["msg_type"], content)
            if handler is None:
                return False
            message = session.deserialize(parts, content=True, copy=False)
        except Exception:  # noqa: BLE001  # malformed, or not signed with the kernel's key
            _log.debug("cannot read a message; the kernel handles it", exc_info=True)
            return False
        self._publish("busy", message)
        try:
            handler(idents, message)
        except Exception:  # noqa: BLE001  # widgets may raise anything; the cell continues
            _log.exception("failed to answer a %s", header["msg_type"])
        self._publish("idle", message)
        if not self._over.is_set():
            self._publish_busy()
        return True

    # -------------------------------------------------------------- answers
    def _handler(self, kind: str, content: Mapping[str, Any]) -> Handler | None:
        """Return the handler of a message; None if the kernel must handle it in its turn."""
        if kind == "kernel_info_request":
            return self._send_kernel_info
        if kind == "comm_info_request":
            return self._send_comms
        manager = self._kernel.comm_manager
        if kind == "comm_open" and content["target_name"] == _CONTROL:
            return functools.partial(manager.comm_open, self._stream)
        comm = manager.comms.get(content.get("comm_id"))
        if kind == "comm_close" and getattr(comm, "target_name", "") == _CONTROL:
            return functools.partial(manager.comm_close, self._stream)
        return _callback(comm) if kind == "comm_msg" else None

    def _send_kernel_info(self, idents: list[bytes], message: dict[str, Any]) -> None:
        self._busy_until = time.monotonic() + _BUSY_DURATION_S
        self._reply(idents, message, self._kernel.kernel_info)

    def _send_comms(self, idents: list[bytes], message: dict[str, Any]) -> None:
        wanted = message["content"].get("target_name")
        targets = {key: comm.target_name for key, comm in list(self._kernel.comm_manager.comms.items())}
        comms = {key: {"target_name": target} for key, target in targets.items() if wanted in (None, target)}
        self._reply(idents, message, {"comms": comms})

    def _reply(self, idents: list[bytes], message: dict[str, Any], content: Mapping[str, Any]) -> None:
        kind = message["header"]["msg_type"].replace("_request", "_reply")
        self._kernel.session.send(self._stream, kind, {"status": "ok", **content}, parent=message, ident=idents)

    # -------------------------------------------------------------- status
    def _publish_busy(self) -> None:
        """Publish that the cell still runs: a page shows the latest status, whichever request it belongs to."""
        self._busy_at = time.monotonic()
        self._publish("busy", self._cell)

    def _publish(self, state: str, parent: dict[str, Any]) -> None:
        kernel = self._kernel
        topic = f"kernel.{kernel.ident}.status".encode()
        kernel.session.send(kernel.iopub_socket, "status", {"execution_state": state}, parent=parent, ident=topic)


def _callback(comm: Any) -> Handler | None:
    """Return the callback of a comm if it may run now: for the state of all widgets, or for a launch's panel.

    Not `comm.handle_msg`: it runs IPython's hooks of a cell, which show the real cell's unfinished figures.
    """
    callback = getattr(comm, "_msg_callback", None)
    if callback is None:
        return None
    is_prompt = comm.target_name == _CONTROL or getattr(getattr(callback, "__self__", None), "is_prompt", False)
    return (lambda idents, message: callback(message)) if is_prompt else None


@contextlib.contextmanager
def _interrupt_held() -> Iterator[None]:
    """Defer an interrupt to the end of this context."""
    came: list[int] = []  # not an Event: a signal that interrupts its lock would deadlock
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)
