"""The kernel's shell channel while its cell waits for a launch: a page that is reloaded gets its answers meanwhile.

A page that connects asks who the kernel is (``kernel_info_request``) and then for the state of all widgets, and shows
no widget before it has both. The kernel handles one request of its shell at a time, so both would wait for the cell.
Here such a request is answered as it arrives, and so are the messages to a launch's own panel. Everything else goes
the kernel's own way, in its order: cells above all, and messages to other widgets, whose callbacks are the user's code.
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
_CONTROL = "jupyter.widget.control"
"""The target of the comm by which ipywidgets' page asks for the state of all widgets."""
_BUSY_EVERY_S = 1.0
_BUSY_FOR_S = 5.0
"""How long a page that connects is told that the kernel is busy: the threads that answer it say that they are idle."""
Handler = Callable[[list[bytes], dict[str, Any]], object]


class ShellChannel:
    """What arrives for a kernel's shell.

    ipykernel 7 reads the channel in a thread of its own, which answers. ipykernel 6 reads it in the thread that runs
    cells, which has to call `serve` while it waits.

    Args:
        kernel: An ipykernel; None where there is none.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        stream = getattr(kernel, "shell_stream", None)
        self._stream: Any = stream if isinstance(stream, ZMQStream) and hasattr(stream, "_recv_callback") else None
        self._loop = getattr(getattr(kernel, "shell_channel_thread", None), "io_loop", None)
        """Of the thread that reads the channel; None where that is the thread that runs cells."""
        self._kernels_own: Callable[[Sequence[Any]], Any] | None = None
        """What the kernel does with a message, while `_arrived` sees each first."""
        self._cell: Any = None
        """The request of the cell that waits."""
        self._over = threading.Event()
        self._busy_at = self._busy_until = 0.0
        if self._stream is None:
            _log.debug("this shell has no channel to read: a page that is reloaded shows its panels after the cell")

    @contextlib.contextmanager
    def answered(self, over: threading.Event) -> Iterator[None]:
        """Answer within this context: that of the thread that runs cells, while it waits in one until `over` is set."""
        if self._stream is None:
            yield
            return
        self._cell, self._over = self._kernel.get_parent(), over
        try:
            self._in_its_thread(self._begin)
            yield
        finally:
            self._in_its_thread(self._end)

    def serve(self) -> None:
        """Do what is for the thread that waits: it calls this again and again."""
        if self._stream is None:
            return
        if self._loop is None:
            with _interrupt_held():  # it could lose a cell that has been read and is not queued yet
                self._stream.flush(zmq.POLLIN)
                self._stream.flush(zmq.POLLOUT)
        if self._busy_at + _BUSY_EVERY_S <= time.monotonic() < self._busy_until:
            self._publish_busy()

    def _in_its_thread(self, act: Callable[[], None]) -> None:
        """Call something where the channel is read: a ZMQStream is for one thread alone."""
        if self._loop is None:
            act()
        else:
            self._loop.add_callback(act)

    def _begin(self) -> None:
        if self._kernels_own is None:
            self._kernels_own = self._stream._recv_callback
            self._stream.on_recv(self._arrived, copy=False)

    def _end(self) -> None:
        if self._kernels_own is not None:
            self._stream.on_recv(self._kernels_own, copy=False)
            self._kernels_own = None

    def _arrived(self, frames: Sequence[Any]) -> Any:
        kernels_own = self._kernels_own
        assert kernels_own is not None
        if self._over.is_set():
            self._end()  # here too: an interrupt may keep `answered` from its last line
        elif self._is_answered(frames):
            return None
        return kernels_own(frames)

    def _is_answered(self, frames: Sequence[Any]) -> bool:
        """Answer a message, if it need not wait for the cell; return whether it has been answered."""
        session = self._kernel.session
        try:
            idents, parts = session.feed_identities(frames, copy=False)
            # Not by `deserialize`: it remembers each signature, and the kernel would take the message for a replay.
            header, content = (session.unpack(parts[number].bytes) for number in (1, 4))
            handler = None if header.get("subshell_id") else self._handler(header["msg_type"], content)
            if handler is None:
                return False
            message = session.deserialize(parts, content=True, copy=False)
        except Exception:  # noqa: BLE001  # no message of Jupyter's, or not signed with its key
            _log.debug("a message that cannot be read is left to the kernel", exc_info=True)
            return False
        self._publish("busy", message)
        try:
            handler(idents, message)
        except Exception:  # noqa: BLE001  # whatever widgets raise: as in the kernel, it ends no cell
            _log.exception("a %s was not answered", header["msg_type"])
        self._publish("idle", message)
        if not self._over.is_set():
            self._publish_busy()
        return True

    # -------------------------------------------------------------- what is answered
    def _handler(self, kind: str, content: Mapping[str, Any]) -> Handler | None:
        """What answers such a message; None where the kernel is to handle it in its turn."""
        if kind == "kernel_info_request":
            return self._tell_kernel_info
        if kind == "comm_info_request":
            return self._tell_comms
        manager = self._kernel.comm_manager
        if kind == "comm_open" and content["target_name"] == _CONTROL:
            return functools.partial(manager.comm_open, self._stream)
        comm = manager.comms.get(content.get("comm_id"))
        if kind == "comm_close" and getattr(comm, "target_name", "") == _CONTROL:
            return functools.partial(manager.comm_close, self._stream)
        return _callback(comm) if kind == "comm_msg" else None

    def _tell_kernel_info(self, idents: list[bytes], message: dict[str, Any]) -> None:
        self._busy_until = time.monotonic() + _BUSY_FOR_S
        self._reply(idents, message, self._kernel.kernel_info)

    def _tell_comms(self, idents: list[bytes], message: dict[str, Any]) -> None:
        wanted = message["content"].get("target_name")
        targets = {key: comm.target_name for key, comm in list(self._kernel.comm_manager.comms.items())}
        comms = {key: {"target_name": target} for key, target in targets.items() if wanted in (None, target)}
        self._reply(idents, message, {"comms": comms})

    def _reply(self, idents: list[bytes], message: dict[str, Any], content: Mapping[str, Any]) -> None:
        kind = message["header"]["msg_type"].replace("_request", "_reply")
        self._kernel.session.send(self._stream, kind, {"status": "ok", **content}, parent=message, ident=idents)

    # -------------------------------------------------------------- what pages show
    def _publish_busy(self) -> None:
        """Say that the cell goes on: a page shows the state that it heard last, whatever it was about."""
        self._busy_at = time.monotonic()
        self._publish("busy", self._cell)

    def _publish(self, state: str, parent: dict[str, Any]) -> None:
        kernel = self._kernel
        topic = f"kernel.{kernel.ident}.status".encode()
        kernel.session.send(kernel.iopub_socket, "status", {"execution_state": state}, parent=parent, ident=topic)


def _callback(comm: Any) -> Handler | None:
    """What a comm's message is for, if that may be called now: the state of all widgets, or a launch's panel.

    Not by `comm.handle_msg`: that tells IPython that a cell begins and ends, which shows the real cell's unfinished
    figures.
    """
    callback = getattr(comm, "_msg_callback", None)
    if callback is None:
        return None
    is_prompt = comm.target_name == _CONTROL or getattr(getattr(callback, "__self__", None), "is_prompt", False)
    return (lambda idents, message: callback(message)) if is_prompt else None


@contextlib.contextmanager
def _interrupt_held() -> Iterator[None]:
    """Let an interrupt come at the end of this context, and not within."""
    came: list[int] = []  # no Event: a second signal, within its lock, would wait for the first
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)
