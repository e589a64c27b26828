"""A rank's SIGINT handler: which interrupts take effect, and when."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nblaunch.ranks import worker
from nblaunch.ranks.kernel_channel import KernelChannel
from nblaunch.wire.channel import Channel, channel_pair
from nblaunch.wire.messages import Interrupt, Interrupted, Task, World
from tests.conftest import eventually


@pytest.fixture
def kernel() -> Iterator[tuple[Channel, Any]]:
    """The kernel's end of a rank's channel, and the rank's `KernelChannel` at the other end."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    here, there = channel_pair()
    rank = Channel(there)
    yield here, KernelChannel(rank, 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    here.close()
    rank.close()


def sent_to(kernel: Channel) -> list[object]:
    kernel.poll()
    return [message for message, _ in kernel.drain()]


def test_an_interrupt_before_the_first_line_of_a_task_takes_effect(kernel: tuple[Channel, Any]) -> None:
    channel, link = kernel
    task = Task(1, World("127.0.0.1", 1, "gloo", "cpu", 1))
    channel.send(task)
    link.next_task()
    os.kill(os.getpid(), signal.SIGINT)
    assert sent_to(channel) == [Interrupted(0, 1)]
    rank = object.__new__(worker._Rank)
    rank.link, rank.home = link, None
    with pytest.raises(KeyboardInterrupt):
        rank.work(task, [])
    os.kill(os.getpid(), signal.SIGINT)  # a second one, outside the task
    assert not link.armed
    assert sent_to(channel) == []


class Patience:
    """Lets an interrupt wait, until it no longer does."""

    def __init__(self) -> None:
        self.asked, self.is_over = 0, False

    def ask(self) -> None:
        self.asked += 1

    def may_wait(self) -> bool:
        return not self.is_over


def deferring(channel: Channel, link: Any) -> Patience:
    """Begin a task whose interrupt may wait."""
    patience = Patience()
    channel.send(Task(1, World("127.0.0.1", 1, "gloo", "cpu", 1)))
    link.next_task()
    link.armed = True
    link.defer(patience)
    return patience


def test_an_interrupt_that_may_wait_is_acknowledged_and_raised_once(kernel: tuple[Channel, Any]) -> None:
    channel, link = kernel
    patience = deferring(channel, link)
    os.kill(os.getpid(), signal.SIGINT)
    assert patience.asked
    assert sent_to(channel) == [Interrupted(0, 1)]
    os.kill(os.getpid(), signal.SIGINT)
    patience.is_over = True
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert sent_to(channel) == []


def test_an_interrupt_that_has_waited_is_not_raised_twice(kernel: tuple[Channel, Any]) -> None:
    """An editor's SIGINT has ended the run, which raises KeyboardInterrupt itself, when the kernel's arrives."""
    channel, link = kernel
    deferring(channel, link)
    os.kill(os.getpid(), signal.SIGINT)
    link.defer(None)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        pytest.fail("it was raised again")
    assert sent_to(channel) == [Interrupted(0, 1)]


def test_a_forked_child_goes_on_while_the_interrupt_waits(kernel: tuple[Channel, Any]) -> None:
    """A rank's last step needs the workers of its DataLoader."""
    channel, link = kernel
    deferring(channel, link)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_the_next_task_does_not_defer_its_interrupt(kernel: tuple[Channel, Any]) -> None:
    channel, link = kernel
    link.defer(Patience())
    channel.send(Task(1, World("127.0.0.1", 1, "gloo", "cpu", 1)))
    link.next_task()
    link.armed = True
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_that_comes_too_late_hits_no_later_task(kernel: tuple[Channel, Any]) -> None:
    channel, link = kernel
    for number in (1, 2):
        channel.send(Task(number, World("127.0.0.1", 1, "gloo", "cpu", 1)))
        link.next_task()
    link.armed = True
    channel.send(Interrupt(1))
    eventually(lambda: link._seen == 1)
    assert not link.interrupted
    assert sent_to(channel) == []


def interrupt_while_sending(link: KernelChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Python's handler run in the middle of the next send, as it does when another thread takes the signal."""
    send = Channel._send_with

    def interrupted(channel: Channel, data: bytes, fds: Sequence[int]) -> int:
        monkeypatch.setattr(Channel, "_send_with", send)
        sent = send(channel, data, fds)
        link._on_interrupt(signal.SIGINT, None)
        return sent

    monkeypatch.setattr(Channel, "_send_with", interrupted)


@pytest.mark.parametrize("armed", [True, False])
def test_an_interrupt_in_the_middle_of_a_message_waits_for_its_end(
    kernel: tuple[Channel, Any], monkeypatch: pytest.MonkeyPatch, armed: bool
) -> None:
    channel, link = kernel
    link.task, link.armed = 1, armed
    interrupt_while_sending(link, monkeypatch)
    with pytest.raises(KeyboardInterrupt) if armed else contextlib.nullcontext():
        link.send("a word")
    assert sent_to(channel) == ["a word", Interrupted(0, 1)]


def test_an_interrupt_during_its_acknowledgement_is_harmless(
    kernel: tuple[Channel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, link = kernel
    link.task, link.armed = 1, True
    interrupt_while_sending(link, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        link._on_interrupt(signal.SIGINT, None)
    link._on_interrupt(signal.SIGINT, None)
    assert sent_to(channel) == [Interrupted(0, 1)]
