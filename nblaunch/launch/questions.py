"""Questions to the ranks of a session about their names. A thread asks: an interrupt of the caller loses no message."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from nblaunch.errors import ArgumentError, NblaunchError, RankDiedError, RankRaisedError, ResultError, text_of
from nblaunch.launch import failures
from nblaunch.launch.frontend import host, wait_in_steps
from nblaunch.launch.rank_names import line_of
from nblaunch.launch.session_ranks import SessionRanks
from nblaunch.launch.session_state import restart_command
from nblaunch.launch.task import Task
from nblaunch.launch.turn_queue import BusyError, Ticket
from nblaunch.launch.views import Note, ShieldedView
from nblaunch.machine import timeouts
from nblaunch.transfer.parcel import pack, unpack
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

        ticket = Ticket()

        def work() -> dict[int, list[int]]:
            self._ranks.queue.enqueue(ticket)
            with self._ranks.claimed(ticket, lambda: stop.is_set() or time.monotonic() > deadline, stop.set):
                return self.ask_now(question, names, home=home, deadline=deadline, stop=stop)

        __tracebackhide__ = True  # IPython omits this frame
        waits_for = partial(self._ranks.said_of_queue, ticket) if within is None else str
        return in_thread(lambda: _unpacked(work(), question.text), stop, waits_for)

    def look(self) -> None:
        """Note ranks that have died meanwhile, unless a task runs."""
        in_thread(self._ranks.look, threading.Event(), str)

    def complete(self, text: str) -> list[str]:
        """See `Session.complete`."""
        known = sorted({each.name for names in self._ranks.bound for each in names if each.name.startswith(text)})
        if self._ranks.queue:
            return known
        try:
            answers = self.ask(Question("complete", text), within=timeouts.QUESTION_TIMEOUT_S)
        except (BusyError, NblaunchError):
            return known
        except Exception:  # noqa: BLE001  # a property of the user's raised
            return []
        return sorted({name for names in answers.values() for name in names})

    def inspect(self, expression: str) -> str:
        """See `Session.inspect`."""
        if not self._ranks.present:
            return ""
        rank = self._ranks.present[0]
        known = next((line_of(each) for each in self._ranks.bound[rank] if each.name == expression), "")
        if self._ranks.queue:
            return known
        try:
            question = Question("inspect", checked_expression(expression), (rank,))
            return str(self.ask(question, within=timeouts.QUESTION_TIMEOUT_S)[rank])
        except Exception:  # noqa: BLE001  # busy, dead, or the expression raises
            return known

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
            self._ranks.log_dir,
            {name: sent.value for name, sent in (names or {}).items()},
            home,
            is_here=self._ranks.sent.is_here,
        )
        try:
            is_code = question.kind in ("value", "repr") and deadline == float("inf")  # the user's, without a limit
            code = question.text if is_code else ""
            return self.send(parcel.fds, question.ranks, names or {}, deadline, stop, code=code)
        finally:
            parcel.close()

    def send(
        self,
        fds: Sequence[int],
        wanted: Collection[int] | None,
        names: Mapping[str, SentName],
        deadline: float,
        stop: threading.Event,
        *,
        code: str = "",
    ) -> dict[int, list[int]]:
        """Send a packed question to ranks that the caller has claimed; see `ask_now`.

        Args:
            fds: The parcel.
            wanted: The ranks whose answers matter; None: all.
            names: Names that it binds.
            deadline: By the monotonic clock.
            stop: Ends the question when it is set.
            code: Code of the user that it runs, which may call collectives: the ranks join their process group, and are
                freed from a collective at the price of the group when the question ends early. Default: none.
        """
        ranks = self._ranks
        is_of_all = wanted is None or set(wanted) == set(range(ranks.plan.world_size))
        task = ranks.new_question(joins=bool(code) and is_of_all)
        try:
            task.send(ranks.world, fds, path=ranks.path, wanted=wanted)
            self._await(task, deadline, stop, may_free=bool(code))
            ranks.finish(task, names, Settings())
            ranks.check_group()
            ranks.group.raise_refusal()  # it concerns the rank that was restarted
            asked = task.present if wanted is None else [task.ranks[number] for number in wanted]
            failed = [rank.failed for rank in asked if rank.failed is not None]
            if failed:  # the first, unless it comes from a collective that another failure has ended
                raise _exception(min(failed, key=lambda each: (bool(each.collective), each.time_ns)), code)
            for rank in asked:
                if rank.member.exited is not None:
                    restart = restart_command(ranks.name, [rank.rank])
                    raise RankDiedError(f"rank {rank.rank} is dead: {restart} restarts it", rank.rank)
                if rank.done is None:
                    raise BusyError
            return task.take_results()
        finally:
            task.close()

    def _await(self, task: Task, deadline: float, stop: threading.Event, *, may_free: bool) -> None:
        """Wait for the answers. Once the time is over or a rank has failed, interrupt the ranks that have not answered.

        Where `may_free`, ranks that wait in a collective are freed from it, and the process group is replaced.
        """
        group, never = self._ranks.group, float("inf")
        give_up_at = free_at = never
        while not (task.is_over or group.is_over or group.refusal):
            for event in group.wait(min(timeouts.LOG_POLL_S, max(0.0, deadline - time.monotonic()))):
                task.take(event)
            now = time.monotonic()
            if give_up_at == never and any(rank.has_failed for rank in task.present):
                deadline = min(deadline, now + timeouts.PEER_FAILURE_WAIT_S)
            asked = [rank.rank for rank in task.present if not rank.is_over]
            if give_up_at == never and (stop.is_set() or now > deadline):
                deadline = never
                give_up_at = now + (timeouts.QUESTION_FREE_TIMEOUT_S if may_free else timeouts.QUESTION_STOP_TIMEOUT_S)
                free_at = now + timeouts.FREE_AFTER_FAILURE_S if may_free else never
                for number in asked:
                    group.interrupt(number, task.number)
            if now > free_at and asked:
                free_at = now + timeouts.FREE_INTERVAL_S
                self._ranks.generation += 1
                for number in asked:
                    group.free(number, task.number)
            if now > give_up_at:
                return


def in_thread(work: Callable[[], T], stop: threading.Event, waits_for: Callable[[], str]) -> T:
    """Run `work` in a thread, and return what it returns. An interrupt of the caller sets `stop`.

    Args:
        work: What to run.
        stop: Ends it.
        waits_for: Returns what it waits for, which is shown after a moment; empty: nothing.

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
                if not wait_in_steps(over, timeouts.QUEUED_NOTE_DELAY_S) and (text := waits_for()):
                    ShieldedView(host().view("text")).on(Note(text))
                wait_in_steps(over, None)
            except KeyboardInterrupt:
                interrupted = True
                stop.set()
    finally:
        stop.set()  # also if an interrupt came between two lines
    if interrupted:
        raise KeyboardInterrupt
    error = outcome.exception()
    if error is not None and (isinstance(error, NblaunchError) or hasattr(error, "_render_traceback_")):
        raise error.with_traceback(None)  # the frames below are nblaunch's own
    return outcome.result()


def checked_expression(text: Any) -> str:
    """Return an expression for `Question`.

    Raises:
        ArgumentError: It is none.
    """
    if not isinstance(text, str) or not text.strip():
        raise ArgumentError(
            f"expression={text!r:.80}: must be a name or an expression, as a string, such as 'a' or 'a, b'"
        )
    try:
        compile(text.strip(), "<expression>", "eval")
    except SyntaxError as error:
        raise ArgumentError(f"expression={text!r}: {error.msg}") from None
    return text.strip()


def _unpacked(answers: dict[int, list[int]], code: str) -> dict[int, Any]:
    values = {}
    try:
        while answers:
            rank = min(answers)
            try:
                values[rank] = unpack(answers.pop(rank))
            except Exception as error:
                why = f"{type(error).__name__}: {text_of(error)}"
                advice = failures.result_advice(type(error).__name__, "Pull")
                said = f"rank {rank}'s `{code}` cannot be rebuilt in the notebook: {why.rstrip('.')}. {advice}"
                raise _shown_as(ResultError(said, rank), f"ResultError: {said}") from error
    finally:
        close_all(answers)
    return values


def close_all(answers: Mapping[int, Sequence[int]]) -> None:
    """Close packed answers."""
    for parcel in answers.values():
        for fd in parcel:
            os.close(fd)


def _exception(failed: Failed, code: str) -> BaseException:
    """Return the exception of a rank that could not answer, with its rank and traceback."""
    if failed.kind == "result":
        why = failed.text.replace("result", code, int(code.isidentifier() and failed.text.startswith("result")))
        advice = failures.result_advice(failed.type_name, "Pull")
        said = f"rank {failed.rank}'s `{code}` could not be sent: {why}. {advice}"
        return _shown_as(ResultError(said, failed.rank), f"ResultError: {said}")
    error: Any = failures.rebuilt(failed)
    if error is None:
        error = RankRaisedError(f"rank {failed.rank} raised {failed.type_name}: {failed.text}", failed.rank)
    with contextlib.suppress(Exception):  # a user's __setattr__
        error.rank = failed.rank
        error.__cause__ = failures.RankTraceback(f"on rank {failed.rank}:\n{failed.traceback}")
        lines = [f"{type(error).__name__}: {text_of(error)}", "", f"On rank {failed.rank}:"]
        _shown_as(error, *lines, *failed.traceback.rstrip().splitlines())
    return error  # type: ignore[no-any-return]  # Any, to give it attributes


def _shown_as(error: Any, *lines: str) -> BaseException:
    """Make IPython show these lines of an error instead of nblaunch's frames; return the error."""
    failures.show_as(error, lines)
    return error  # type: ignore[no-any-return]  # Any, to give it an attribute
