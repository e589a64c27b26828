"""The restart of a session's ranks, with or without their names."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial

from nblaunch.errors import RankLostError
from nblaunch.launch.questions import Questions, close_all, in_thread
from nblaunch.launch.session_ranks import SessionRanks
from nblaunch.launch.turn_queue import Ticket
from nblaunch.machine import timeouts
from nblaunch.transfer.parcel import unpack
from nblaunch.wire.session_messages import Losses, Question


class Restart:
    """Restarts ranks in one turn of the queue: asks the old ranks for their names, then sends these to the new ranks.

    Args:
        ranks: The ranks of the session.
        questions: Asks them.

    Attributes:
        lost: What could not be kept, in words.
        unwrapped: Names of a DistributedDataParallel that now have the module in it.
    """

    def __init__(self, ranks: SessionRanks, questions: Questions) -> None:
        self._ranks, self._questions = ranks, questions
        self._stop = threading.Event()
        self.lost: list[str] = []
        self.unwrapped: list[str] = []

    def run(self, chosen: Collection[int], keep: bool) -> None:
        """Start ranks again, and replace the process group with the next task.

        Args:
            chosen: Those to restart; ranks that are alive are ended first.
            keep: Give each new rank the names of the old one that can be sent.

        Raises:
            StartError: The system refuses.
            KeyboardInterrupt: The user has interrupted the caller. As long as the old ranks live, nothing has changed.
                Later, the restart goes on; only names whose loading is interrupted are lost.
        """
        ticket = Ticket("the restart")
        in_thread(lambda: self._run(ticket, chosen, keep), self._stop, partial(self._ranks.said_of_queue, ticket))

    def _run(self, ticket: Ticket, chosen: Collection[int], keep: bool) -> None:
        ranks = self._ranks
        ranks.queue.enqueue(ticket)
        with ranks.claimed(ticket, self._stop.is_set, self._stop.set, needs_ranks=False):
            try:
                dumps = self._dumps(chosen) if keep else {}
            except BaseException:
                self.lost, self.unwrapped = [], []  # the old ranks have everything
                raise
            try:
                self._replace(chosen)
                self._stop.clear()  # now the names are in the dumps alone: an interrupt must not cost them
                deadline = time.monotonic() + timeouts.RANK_ANSWER_TIMEOUT_S
                close_all(self._questions.ask_now(Question("names"), deadline=deadline, stop=threading.Event()))
                while dumps:
                    self._load(*dumps.popitem())
            finally:
                self.lost += [f"rank {rank}: all names, as the ranks could not be restarted" for rank in dumps]
                close_all(dumps)

    def _replace(self, chosen: Collection[int]) -> None:
        ranks = self._ranks
        if not ranks.group.is_over and len(set(chosen)) < ranks.plan.world_size:
            with contextlib.suppress(RankLostError):  # the reaper was killed, and every rank with it
                ranks.replace_ranks(chosen)
                return
        ranks.renew()

    def _dumps(self, chosen: Collection[int]) -> dict[int, list[int]]:
        """Return a packed question for each rank: it binds the names that the old process has."""
        present = [rank for rank in chosen if rank in self._ranks.present and not self._ranks.group.is_over]
        self.lost += [f"rank {rank}: all names, as it was dead" for rank in chosen if rank not in present]
        if not present:
            return {}
        answers = self._questions.ask_now(Question("losses", ranks=tuple(present)), stop=self._stop)
        for rank in sorted(answers):
            found: Losses | None = unpack(answers.pop(rank))
            if found is not None:
                self.lost += [f"rank {rank}: {reason}" for reason in found.reasons]
                self.unwrapped += [name for name in found.unwrapped if name not in self.unwrapped]
        paths = self._questions.ask_now(Question("path", ranks=tuple(present)), stop=self._stop)
        self._ranks.own_path = list(dict.fromkeys(str(entry) for rank in present for entry in unpack(paths.pop(rank))))
        close_all(paths)
        dumps = self._questions.ask_now(Question("dump", ranks=tuple(present)), stop=self._stop)
        close_all({rank: dumps.pop(rank) for rank in list(dumps) if rank not in present})
        return dumps

    def _load(self, rank: int, parcel: Sequence[int]) -> None:
        try:
            answers = self._questions.send(parcel, (rank,), {}, float("inf"), self._stop)
            lost: Sequence[str] = unpack(answers.pop(rank))
            self.lost += [f"rank {rank}: {reason}" for reason in lost]
            close_all(answers)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # a user's __setstate__, or its interrupt
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            self.lost.append(f"rank {rank}: all names, as they could not be rebuilt ({why})")
        finally:
            close_all({rank: parcel})
