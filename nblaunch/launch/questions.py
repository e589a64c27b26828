"""Questions to the ranks of a session about their names. A thread asks: an interrupt of the caller loses no message."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from nblaunch.errors import RankDiedError, RankRaisedError, StartError
from nblaunch.launch import failures
from nblaunch.launch.frontend import wait_in_steps
from nblaunch.launch.session_ranks import SessionRanks
from nblaunch.launch.task import Task
from nblaunch.launch.turn_queue import BusyError
from nblaunch.machine import timeouts
from nblaunch.transfer.parcel import UncachedStore, pack, unpack
from nblaunch.transfer.pickling import Home
from nblaunch.wire.messages import Failed, Payload, Settings
from nblaunch.wire.session_messages import Question, SentName

T = TypeVar("T")


class Questions:
    """See the module. Thread-safe.

    Args:
        ranks: The ranks of the session.
    """

    def __init__(self, ranks: SessionRanks) -> None:
        self._ranks = ranks

    def ask(
        self,
        question: Question,
        names: Mapping[str, SentName] | None = None,
        *,
        home: Home | None = None,
        within: float | None = None,
    ) -> dict[int, Any]:
        """Ask the ranks, and return the answer of each.

        A rank that does not answer is interrupted, and left alone if it does not respond to that either.

        Args:
            question: What to ask.
            names: Names to bind first. Default: none.
            home: For the pickler.
            within: Seconds for the ranks to become idle and to answer. Default: no limit.

        Raises:
            BusyError: The ranks did not answer in time.
            RankDiedError: A rank is dead.
            KeyboardInterrupt: The user has interrupted the caller.
            Exception: The answer of a rank, if it is an exception.
        """
        deadline = float("inf") if within is None else time.monotonic() + within
        stop = threading.Event()

        def work() -> dict[int, list[int]]:
            ticket = self._ranks.queue.enqueue()
            with self._ranks.claimed(ticket, lambda: stop.is_set() or time.monotonic() > deadline, stop.set):
                return self.ask_now(question, names, home=home, deadline=deadline, stop=stop)

        return in_thread(lambda: _unpacked(work()), stop)

    def ask_now(
        self,
        question: Question,
        names: Mapping[str, SentName] | None = None,
        *,
        home: Home | None = None,
        deadline: float = float("inf"),
        stop: threading.Event,
    ) -> dict[int, list[int]]:
        """Ask ranks that the caller has claimed; return the packed answers, whose descriptors the caller closes.

        Args:
            question: What to ask.
            names: Names to bind first. Default: none.
            home: For the pickler.
            deadline: By the monotonic clock. Default: none.
            stop: Ends the question when it is set.

        Raises:
            Exception: See `ask`.
        """
        parcel = pack(
            lambda found: Payload(question, (), {}, None, Settings(), {}, names=names or {}),
            UncachedStore(self._ranks.log_dir),
            home=home,
        )
        try:
            return self.send(parcel.fds, question.ranks, names or {}, deadline, stop)
        finally:
            parcel.close()

    def send(
        self,
        fds: Sequence[int],
        wanted: Collection[int] | None,
        names: Mapping[str, SentName],
        deadline: float,
        stop: threading.Event,
    ) -> dict[int, list[int]]:
        """Send a packed question to ranks that the caller has claimed; see `ask_now`.

        Args:
            fds: The parcel.
            wanted: The ranks whose answers matter; None: all.
            names: Names that it binds.
            deadline: By the monotonic clock.
            stop: Ends the question when it is set.
        """
        ranks = self._ranks
        task = ranks.new_question()
        try:
            task.send(ranks.world, fds)
            self._await(task, deadline, stop)
            ranks.finish(task, names, Settings())
            ranks.check_group()
            refusal, ranks.group.refusal = ranks.group.refusal, ""  # it concerns the rank that was restarted
            if refusal:
                raise StartError(refusal)
            for rank in task.present if wanted is None else [task.ranks[number] for number in wanted]:
                if rank.failed is not None:
                    raise _exception(rank.failed)
                if rank.member.exited is not None:
                    restart = f"%distributed session restart --rank {rank.rank} starts another"
                    raise RankDiedError(f"rank {rank.rank} is dead: {restart}", rank.rank)
                if rank.done is None:
                    raise BusyError
            return task.take_results()
        finally:
            task.close()

    def _await(self, task: Task, deadline: float, stop: threading.Event) -> None:
        """Wait for the answers; once the time is over, interrupt the ranks, and wait a little longer."""
        group, give_up_at = self._ranks.group, float("inf")
        while not (task.is_over or group.is_over or group.refusal):
            for event in group.wait(min(timeouts.LOG_POLL_S, max(0.0, deadline - time.monotonic()))):
                task.take(event)
            now = time.monotonic()
            if give_up_at == float("inf") and (stop.is_set() or now > deadline):
                deadline, give_up_at = float("inf"), now + timeouts.QUESTION_STOP_TIMEOUT_S
                for rank in task.present:
                    if not rank.is_over:
                        group.interrupt(rank.rank, task.number)
            if now > give_up_at:
                return


def in_thread(work: Callable[[], T], stop: threading.Event) -> T:
    """Run `work` in a thread, and return what it returns. An interrupt of the caller sets `stop`.

    Raises:
        KeyboardInterrupt: The user has interrupted the caller. `work` is over.
        Exception: `work` raised it.
    """
    outcome: Future[T] = Future()
    over = threading.Event()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
            outcome.set_exception(error)
        over.set()

    interrupted = False
    try:
        threading.Thread(target=run, name="nblaunch-question", daemon=True).start()
        while not over.is_set():
            try:
                wait_in_steps(over, None)
            except KeyboardInterrupt:
                interrupted = True
                stop.set()
    finally:
        stop.set()  # also if an interrupt came between two lines
    if interrupted:
        raise KeyboardInterrupt
    return outcome.result()


def _unpacked(answers: dict[int, list[int]]) -> dict[int, Any]:
    values = {}
    try:
        while answers:
            rank, parcel = answers.popitem()
            values[rank] = unpack(parcel)
    finally:
        close_all(answers)
    return values


def close_all(answers: Mapping[int, Sequence[int]]) -> None:
    """Close packed answers."""
    for parcel in answers.values():
        for fd in parcel:
            os.close(fd)


def _exception(failed: Failed) -> BaseException:
    """Return the exception of a rank that could not answer."""
    error: BaseException | None = failures.rebuilt(failed)
    if error is not None:
        return error
    return RankRaisedError(f"rank {failed.rank} raised {failed.type_name}: {failed.text}", failed.rank)
