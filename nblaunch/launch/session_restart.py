"""The restart of a session's ranks, with or without their names."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

from nblaunch.errors import RankLostError
from nblaunch.launch.questions import Questions, close_all, in_thread
from nblaunch.launch.session_ranks import SessionRanks
from nblaunch.transfer.parcel import unpack
from nblaunch.wire.session_messages import Question


class Restart:
    """One restart: what the old ranks have is asked, the new ones are given, in one turn of the queue.

    Args:
        ranks: The ranks of the session.
        questions: Asks them.

    Attributes:
        lost: What could not be kept, in words.
    """

    def __init__(self, ranks: SessionRanks, questions: Questions) -> None:
        self._ranks, self._questions = ranks, questions
        self._stop = threading.Event()
        self.lost: list[str] = []

    def run(self, chosen: Collection[int], keep: bool) -> None:
        """Start ranks again, and replace the process group with the next task.

        Args:
            chosen: Those to restart; ranks that are alive are ended first.
            keep: Give each new rank the names of the old one that can be sent.

        Raises:
            StartError: The system refuses.
            KeyboardInterrupt: The user has interrupted the caller. Ranks that still lived are as before.
        """
        in_thread(lambda: self._run(chosen, keep), self._stop)

    def _run(self, chosen: Collection[int], keep: bool) -> None:
        ranks = self._ranks
        ticket = ranks.queue.enqueue("the restart")
        with ranks.claimed(ticket, self._stop.is_set, self._stop.set, needs_ranks=False):
            dumps: dict[int, list[int]] = {}
            try:
                try:
                    ranks.check_group()
                    dumps = self._dumps([rank for rank in chosen if rank in ranks.present]) if keep else {}
                    ranks.replace_ranks(chosen)
                except RankLostError:  # the reaper was killed, and every rank with it
                    ranks.renew()
                close_all(self._questions.ask_now(Question("names"), stop=self._stop))
                while dumps:
                    self._load(*dumps.popitem())
            finally:
                close_all(dumps)

    def _dumps(self, chosen: Sequence[int]) -> dict[int, list[int]]:
        """Return a packed question for each rank: it binds the names that the old process has."""
        if not chosen:
            return {}
        reasons = self._questions.ask_now(Question("unsendable", ranks=tuple(chosen)), stop=self._stop)
        for rank in sorted(reasons):
            found: Mapping[str, str] | None = unpack(reasons.pop(rank))
            self.lost += [f"rank {rank}: {reason}" for reason in (found or {}).values()]
        dumps = self._questions.ask_now(Question("dump", ranks=tuple(chosen)), stop=self._stop)
        close_all({rank: dumps.pop(rank) for rank in list(dumps) if rank not in chosen})
        return dumps

    def _load(self, rank: int, parcel: Sequence[int]) -> None:
        try:
            close_all(self._questions.send(parcel, (rank,), {}, float("inf"), self._stop))
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # a user's __setstate__, or its interrupt
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            self.lost.append(f"rank {rank}: all names, as they could not be rebuilt ({why})")
        finally:
            close_all({rank: parcel})
