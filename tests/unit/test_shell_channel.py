"""The shell channel of a kernel that reads it in the cells' thread, as ipykernel 6 does; and no kernel."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from jupyter_client.session import Session
from tornado.ioloop import IOLoop
from zmq.eventloop.zmqstream import ZMQStream

from nblaunch.notebook.shell_channel import ShellChannel

ANSWER_LIMIT_MS = 5000


@dataclass
class Kernel:
    """The parts of a kernel that its shell channel uses."""

    shell_stream: ZMQStream
    session: Session
    iopub_socket: zmq.Socket[bytes]
    ident: str = "kernel"
    kernel_info: dict[str, Any] = field(default_factory=lambda: {"implementation": "fake"})
    comm_manager: Any = field(default_factory=lambda: SimpleNamespace(comms={}))
    queued: list[Any] = field(default_factory=list)

    def get_parent(self) -> dict[str, Any]:
        return {}

    def queue(self, frames: list[zmq.Frame]) -> None:
        """What the kernel does with every message."""
        _, parts = self.session.feed_identities(frames, copy=False)
        self.queued.append(self.session.deserialize(parts, copy=False)["msg_type"])


@dataclass
class Page:
    """A page's end of the channel."""

    socket: zmq.Socket[bytes]
    session: Session

    def send(self, kind: str) -> None:
        self.session.send(self.socket, kind, {})

    def receive(self) -> Any:
        assert self.socket.poll(ANSWER_LIMIT_MS), "no answer"
        return self.session.recv(self.socket)[1]


@pytest.fixture
def ends() -> Iterator[tuple[Kernel, Page]]:
    """The two ends of a channel, and a loop that does not run: a cell blocks."""
    with zmq.Context() as context:
        loop = IOLoop(make_current=False)
        shell, dealer, iopub = context.socket(zmq.ROUTER), context.socket(zmq.DEALER), context.socket(zmq.PUB)
        shell.bind("inproc://shell")
        dealer.connect("inproc://shell")
        key = b"secret"
        kernel = Kernel(ZMQStream(shell, loop), Session(key=key), iopub)
        kernel.shell_stream.on_recv(kernel.queue, copy=False)
        yield kernel, Page(dealer, Session(key=key))
        kernel.shell_stream.close()
        dealer.close()
        iopub.close()
        loop.close()


def test_requests_of_a_page_are_answered_and_cells_stay_queued(ends: tuple[Kernel, Page]) -> None:
    kernel, page = ends
    channel = ShellChannel(kernel)
    with channel.answered(threading.Event()):
        for kind in ("execute_request", "kernel_info_request", "complete_request"):
            page.send(kind)
        channel.serve()
        assert page.receive()["content"] == {"status": "ok", "implementation": "fake"}
    assert kernel.queued == ["execute_request", "complete_request"]


def test_a_finished_wait_answers_no_more_requests(ends: tuple[Kernel, Page]) -> None:
    kernel, page = ends
    channel, over = ShellChannel(kernel), threading.Event()
    with channel.answered(over):
        over.set()
        page.send("kernel_info_request")
        channel.serve()
        page.send("kernel_info_request")
        kernel.shell_stream.flush()
        assert kernel.queued == ["kernel_info_request", "kernel_info_request"]


def test_a_message_with_another_key_is_not_answered(ends: tuple[Kernel, Page]) -> None:
    kernel, page = ends
    Session(key=b"guessed").send(page.socket, "kernel_info_request", {})
    page.send("kernel_info_request")
    channel = ShellChannel(kernel)
    with channel.answered(threading.Event()), pytest.raises(ValueError, match="Signature"):  # by the kernel itself
        channel.serve()
    assert not page.socket.poll(0)


def test_an_interrupt_loses_no_message_that_is_being_read(ends: tuple[Kernel, Page]) -> None:
    kernel, page = ends

    def interrupted(frames: list[zmq.Frame]) -> None:
        signal.raise_signal(signal.SIGINT)
        kernel.queue(frames)

    kernel.shell_stream.on_recv(interrupted, copy=False)
    channel = ShellChannel(kernel)
    before = signal.getsignal(signal.SIGINT)
    page.send("execute_request")
    with pytest.raises(KeyboardInterrupt), channel.answered(threading.Event()):
        channel.serve()
    assert kernel.queued == ["execute_request"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_message_to_a_subshell_is_followed_by_busy(
    ends: tuple[Kernel, Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says "idle" after it, and pages would show that until the cell ends."""
    kernel, page = ends
    said: list[str] = []
    now = [100.0]
    monkeypatch.setattr("nblaunch.notebook.shell_channel.time.monotonic", lambda: now[0])
    monkeypatch.setattr(ShellChannel, "_publish", lambda self, state, parent: said.append(state))
    channel = ShellChannel(kernel)
    with channel.answered(threading.Event()):
        now[0] += 60  # long after the panel came
        channel.serve()
        assert said == []
        message = page.session.msg("comm_msg", {})
        message["header"]["subshell_id"] = "one"
        page.session.send(page.socket, message)
        channel.serve()
        assert said == ["busy"]
    assert kernel.queued == ["comm_msg"]


@pytest.mark.parametrize("kernel", [None, SimpleNamespace(shell_stream=object())], ids=["no kernel", "other streams"])
def test_a_wait_works_without_a_readable_channel(kernel: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "nblaunch")
    channel = ShellChannel(kernel)
    with channel.answered(threading.Event()):
        channel.serve()
    assert "cannot read the shell channel" in caplog.text
