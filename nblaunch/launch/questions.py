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

from nblaunch.errors import ArgumentError, NblaunchError, RankDiedError, RankLostError
from nblaunch.launch import failures
from nblaunch.launch.frontend import host, wait_in_steps
from nblaunch.launch.group import WorkerGroup
from nblaunch.launch.session_ranks import BusyError, SessionRanks, Ticket
from nblaunch.launch.session_state import restart_command
from nblaunch.launch.task import Task
from nblaunch.launch.views import Note, ShieldedView
from nblaunch.machine import timeouts
from nblaunch.machine.segments import in_words
from nblaunch.transfer.parcel import pack, unpack
from nblaunch.transfer.pickling import Home
from nblaunch.wire.messages import Bound, Payload, Question, SentName, Settings

T = TypeVar("T")


def ask(
    ranks: SessionRanks,
    question: Question,
    names: Mapping[str, SentName] | None = None,
    *,
    home: Home | None = None,
    within: float | None = None,
) -> dict[int, Any]:
    """Ask the ranks, which bind these names first, and return the answer of each, or raise it.

    A rank that does not answer is interrupted, and left alone if it does not respond to that either. BusyError: the
    ranks have not become idle and answered `within` these seconds.
    """
    deadline = float("inf") if within is None else time.monotonic() + within
    stop = threading.Event()
    ticket = Ticket(ranks)

    def work() -> dict[int, list[int]]:
        ranks.queue.enqueue(ticket)
        with ranks.claimed(ticket, lambda: stop.is_set() or time.monotonic() > deadline, stop.set):
            return ask_now(ranks, question, names, home=home, deadline=deadline, stop=stop)

    __tracebackhide__ = True  # IPython omits this frame
    waits_for = partial(ranks.said_of_queue, ticket) if within is None else str
    return in_thread(lambda: _unpacked(work(), question.text), stop, waits_for)


def look(ranks: SessionRanks) -> None:
    """Note ranks that have died meanwhile, unless a task runs, which notes them itself."""

    def work() -> None:
        if not (ranks.queue or ranks.is_ended):
            ranks.queue.enqueue(ticket := Ticket(ranks))
            claimed = ranks.claimed(ticket, lambda: True, needs_ranks=False, is_task=False)
            with contextlib.suppress(NblaunchError), claimed:
                pass

    in_thread(work, threading.Event(), str)


def ask_now(
    ranks: SessionRanks,
    question: Question,
    names: Mapping[str, SentName] | None = None,
    *,
    home: Home | None = None,
    deadline: float = float("inf"),
    stop: threading.Event,
) -> dict[int, list[int]]:
    """Ask ranks that the caller has claimed; return the packed answers, whose descriptors the caller closes."""
    names = names or {}
    parcel = pack(
        lambda found: Payload(question, (), {}, None, Settings(), {}, names=names),
        {name: sent.value for name, sent in names.items()},
        home,
        is_here=ranks.sent.is_here,
    )
    try:
        is_code = question.kind in ("value", "repr") and deadline == float("inf")  # the user's, without a limit
        code = question.text if is_code else ""
        return send(ranks, parcel.fds, question.ranks, names, deadline, stop, code=code)
    finally:
        parcel.close()


def send(
    ranks: SessionRanks,
    fds: Sequence[int],
    wanted: Collection[int] | None,
    names: Mapping[str, SentName],
    deadline: float,
    stop: threading.Event,
    *,
    code: str = "",
) -> dict[int, list[int]]:
    """Send a packed question to ranks that the caller has claimed; see `ask_now`.

    `code` of the user may call collectives: all ranks join their process group, and are freed from a collective at
    the price of the group when the question ends early. `wanted` are the ranks whose answers matter; None: all.
    """
    is_of_all = wanted is None or set(wanted) == set(range(ranks.plan.world_size))
    task = ranks.new_question(bool(code), joins=bool(code) and is_of_all)
    try:
        task.send(ranks.world, fds, path=ranks.path, wanted=wanted)
        _await(ranks.group, task, deadline, stop)
        ranks.finish(task, names, Settings())
        ranks.check_group()
        ranks.group.raise_refusal()  # it concerns the rank that was restarted
        asked = task.present if wanted is None else [task.ranks[number] for number in wanted]
        failed = [rank.failed for rank in asked if rank.failed is not None]
        if failed:  # the first, unless it comes from a collective that another failure has ended
            first = min(failed, key=lambda each: (bool(each.collective), each.time_ns))
            raise failures.answer_of(task.ranks[first.rank].end, code, ranks.name, ranks.files)
        for rank in asked:
            restart = f"{restart_command(ranks.name, [rank.rank])} restarts it"
            if rank.member.exited is not None:
                raise RankDiedError(f"rank {rank.rank} is dead: {restart}", rank.rank)
            if rank.done is None:
                raise BusyError(f"rank {rank.rank} does not respond: {restart}. Log: {ranks.files.err(rank.rank)}")
        return task.take_results()
    finally:
        task.close()


def _await(group: WorkerGroup, task: Task, deadline: float, stop: threading.Event) -> None:
    """Wait for the answers. Ranks that have not answered when the time is over, or one has failed, are stopped."""
    while not (task.is_over or task.is_given_up or group.is_over or group.refusal):
        for event in group.wait(min(timeouts.LOG_POLL_S, max(0.0, deadline - time.monotonic()))):
            task.take(event)
        if stop.is_set() or time.monotonic() > deadline:
            deadline = float("inf")
            task.give_up()
        task.step()


def in_thread(work: Callable[[], T], stop: threading.Event, waits_for: Callable[[], str]) -> T:
    """Run `work` in a thread, and return what it returns. An interrupt of the caller sets `stop`, which ends it.

    After a moment a note says what it waits for, unless `waits_for` returns nothing.
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
                    ShieldedView(host().view("text")).on(Note(f"{text}; interrupt to stop waiting"))
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
    """Return an expression for `Question`; raise ArgumentError if it is none."""
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
                raise failures.not_rebuilt(rank, error, None, f"`{code}`", "Pull") from error
    finally:
        close_all(answers)
    return values


def line_of(bound: Bound) -> str:
    size = f", {in_words(bound.size)}" if bound.size > 10_000 else ""
    return f"{bound.name}: {bound.type_name}{' ' + bound.detail if bound.detail else ''}{size}"


def close_all(answers: Mapping[int, Sequence[int]]) -> None:
    for parcel in answers.values():
        for fd in parcel:
            os.close(fd)


def restart(ranks: SessionRanks, chosen: Collection[int], keep: bool, lost: list[str]) -> None:
    """Start ranks again in one turn of the queue, and replace the process group with the next task.

    `keep`: ask the old ranks for their names, and send these to the new ranks; to `lost` comes what could not be kept
    as it was. A KeyboardInterrupt changes nothing as long as the old ranks live. Later, the restart goes on; only names
    whose loading is interrupted are lost.
    """
    ticket, stop = Ticket(ranks, "the restart"), threading.Event()

    def work() -> None:
        ranks.queue.enqueue(ticket)
        with ranks.claimed(ticket, stop.is_set, stop.set, needs_ranks=False):
            ranks.own_path = []
            dumps = _dumps(ranks, chosen, stop) if keep else {}
            try:
                try:
                    is_of_all = ranks.group.is_over or len(set(chosen)) == ranks.plan.world_size
                    (ranks.renew if is_of_all else partial(ranks.replace_ranks, chosen))()
                except RankLostError:  # the reaper was killed, and every rank with it
                    ranks.renew()
                stop.clear()  # now the names are in the dumps alone: an interrupt must not cost them
                if keep:
                    lost.extend(f"rank {rank}: all names (the rank was dead)" for rank in chosen if rank not in dumps)
                deadline = time.monotonic() + timeouts.RANK_ANSWER_TIMEOUT_S
                close_all(ask_now(ranks, Question("names"), deadline=deadline, stop=threading.Event()))
                while dumps:
                    lost.extend(_load(ranks, *dumps.popitem(), stop))
            finally:
                lost.extend(f"rank {rank}: all names (the ranks could not be restarted)" for rank in dumps)
                close_all(dumps)

    in_thread(work, stop, partial(ranks.said_of_queue, ticket))


def _dumps(ranks: SessionRanks, chosen: Collection[int], stop: threading.Event) -> dict[int, list[int]]:
    """Return a packed question for each rank that lives: it binds the names that the old process has."""
    present = [rank for rank in chosen if rank in ranks.present]
    if not present:
        return {}
    deadline = time.monotonic() + timeouts.RANK_ANSWER_TIMEOUT_S
    of_path = Question("value", "[*map(str, __import__('sys').path)]", tuple(present))
    answers = _unpacked(ask_now(ranks, of_path, deadline=deadline, stop=stop), of_path.text)
    ranks.own_path = list(dict.fromkeys(entry for path in answers.values() for entry in path or ()))
    dumps = ask_now(ranks, Question("dump", ranks=tuple(present)), stop=stop)
    close_all({rank: dumps.pop(rank) for rank in list(dumps) if rank not in present})
    return dumps


def _load(ranks: SessionRanks, rank: int, parcel: Sequence[int], stop: threading.Event) -> list[str]:
    try:
        answers = send(ranks, parcel, (rank,), {}, float("inf"), stop)
        lost: Sequence[str] = unpack(answers.pop(rank))
        close_all(answers)
        return [f"rank {rank}: {reason}" for reason in lost]
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # a user's __setstate__, or its interrupt
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        return [f"rank {rank}: all names (they could not be rebuilt: {why})"]
    finally:
        close_all({rank: parcel})
