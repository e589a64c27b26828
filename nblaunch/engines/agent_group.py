"""One worker group on an agent's node: its ranks are those of the local engine, and the kernel is far away."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nblaunch.engines.agent_files import AgentFiles
from nblaunch.engines.blob_store import BlobStore, parts_of
from nblaunch.engines.group_events import Event, Lost, LostDescriptors, Received
from nblaunch.engines.link import Message, Outbox
from nblaunch.engines.local_worker import LocalWorker
from nblaunch.engines.local_workers import LocalWorkers
from nblaunch.machine import timeouts
from nblaunch.wire.collective_table import Begun
from nblaunch.wire.drops import Dropped
from nblaunch.wire.link_messages import (
    AskStacks,
    Blob,
    Call,
    Closed,
    FromGroup,
    FromRank,
    Measure,
    Observed,
    Restart,
    SendTasks,
    Stacks,
    Start,
    ToGroup,
    in_other_clock,
)
from nblaunch.wire.messages import Done, Failed, NotStarted, RankExited, Swept

if TYPE_CHECKING:
    from nblaunch.engines.local_sampler import LocalSampler


class Silence:
    """An `engines.protocol.Wakeup` that never wakes: an agent polls."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def clear(self) -> None:
        """Nothing to read."""

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class AgentGroup:
    """See the module. Used from the agent's thread.

    Args:
        group: Its id.
        ranks: The ranks of this node.
        workers: Their processes.
        files: What they write.
        outbox: Takes messages to the kernel.
        blobs: What the kernel has sent.
    """

    def __init__(
        self, group: str, ranks: range, workers: LocalWorkers, files: AgentFiles, outbox: Outbox, blobs: BlobStore
    ) -> None:
        self.group, self.workers = group, workers
        self.has_started = self.is_over = False
        self._ranks, self._files, self._outbox, self._blobs = ranks, files, outbox, blobs
        self._by_rank: dict[int, LocalWorker] = {}
        self._early: list[ToGroup] = []
        """Messages that came before `Start`."""
        self._waiting: list[SendTasks] = []
        """Tasks whose blobs are on their way."""
        self._interrupts: dict[int, int] = {}
        """By rank: the task to interrupt once it is sent."""
        self._task = 0
        """The last task that was sent."""
        self._asked: set[int] = set()
        """Ranks that owe their stacks."""
        self._closed: set[int] = set()
        self._known_stacks: set[int] = set()
        self._is_reading: set[int] = set()
        """Ranks whose files wait in the lane."""
        self._sampler: LocalSampler | None = None
        self._observe_at = self._measure_at = 0.0
        self._dropped: dict[int, Dropped] = {}
        self._collectives: dict[int, Sequence[Begun]] = {}
        self._blobs_made = 0

    # -------------------------------------------------------------- from the kernel
    def take(self, message: ToGroup) -> None:
        """Do what the kernel asks, once the ranks are started: urgent messages overtake the one that starts them."""
        if not (self.has_started or isinstance(message, Start)):
            self._early.append(message)
            return
        try:
            self._obey(message)
            while self._early:
                self._obey(self._early.pop(0))
        except Exception as error:  # noqa: BLE001  # the kernel waits: it must be told, whatever it is
            self.refuse(str(error) or repr(error), getattr(message, "rank", -1))

    def refuse(self, reason: str, rank: int = -1) -> None:
        """Report that ranks could not be started, or do not get their task."""
        self._send([(FromGroup(self.group, NotStarted(rank, reason)), ())], at_once=True)

    def _obey(self, message: ToGroup) -> None:
        if isinstance(message, Start):
            self._by_rank = {w.rank: w for w in self.workers.start(lambda rank: message.environments[rank])}
            self.has_started = True
        elif isinstance(message, Restart):
            self._by_rank[message.rank] = self.workers.restart(message.rank, message.environment)
            self._closed.discard(message.rank)
            self._known_stacks.discard(message.rank)
        elif isinstance(message, SendTasks):
            self._waiting.append(message)
            self.hand_out()
        elif isinstance(message, Call):
            self._call(message)
        elif isinstance(message, AskStacks):
            self._asked.add(message.rank)
            self._by_rank[message.rank].stacks.ask(time.monotonic() + message.signal_after_s)
        elif isinstance(message, Measure):
            self._measure(message.device)

    def _call(self, message: Call) -> None:
        if message.rank is None:
            getattr(self.workers, message.method)(*message.arguments)
        elif message.method == "interrupt" and message.arguments[0] > self._task:  # its data are still on their way
            self._interrupts[message.rank] = message.arguments[0]
        else:
            getattr(self._by_rank[message.rank], message.method)(*message.arguments)

    def lose_blob(self, key: str, reason: str) -> None:
        """Refuse the tasks that wait for a blob, which cannot be kept here."""
        if any(blob.key == key for message in self._waiting for blob in message.parcel):
            self._waiting.clear()
            self.refuse(reason)

    def hand_out(self) -> None:
        """Send the tasks whose blobs have arrived."""
        try:
            self._hand_out()
        except Exception as error:  # noqa: BLE001  # as in `take`
            self.refuse(str(error) or repr(error))

    def _hand_out(self) -> None:
        while self._waiting and all(blob.key in self._blobs for blob in self._waiting[0].parcel):
            message = self._waiting.pop(0)
            tasks = [
                replace(task, log_dir=str(self._files.directory(task.log_dir)) if task.log_dir else "")
                for task in message.tasks
            ]
            self._task = max(task.task for task in tasks)
            self.workers.send_tasks(tasks, [self._blobs.descriptor(blob.key) for blob in message.parcel])
            for rank, task in self._interrupts.items():
                self._by_rank[rank].interrupt(task)
            self._interrupts.clear()

    # -------------------------------------------------------------- to the kernel
    def step(self, now: float) -> bool:
        """Send on what the ranks have done; return True if they have written something."""
        if not self.has_started or self.is_over:
            return False
        for event in self.workers.wait(0.0):
            self._send_event(event)
        self._send_stacks(now)
        for rank, worker in self._by_rank.items():
            if not (worker.is_open or worker.has_exited or rank in self._closed):
                self._closed.add(rank)
                self._send([(Closed(self.group, rank), ())])
        new = [rank for rank in self._ranks if rank not in self._is_reading and self._files.has_new(rank)]
        if new:
            self._is_reading.update(new)
            self._send(self._written(new))
        if now >= self._observe_at:
            self._observe_at = now + timeouts.AGENT_OBSERVE_S
            self._observe(now)
        return bool(new)

    def _written(self, ranks: Sequence[int]) -> Iterator[Message]:
        self._is_reading.difference_update(ranks)
        yield from self._files.unsent(ranks)

    def _send(self, messages: Iterable[Message], *, at_once: bool = False) -> None:
        self._outbox.put_in(self.group, messages, goes_first=at_once)

    def _send_event(self, event: Event) -> None:
        if isinstance(event, Received):
            is_end = isinstance(event.message, (Done, Failed))
            if is_end:
                self._send(self._files.unsent([event.rank]))
            messages = self._with_parcel(event)
            weakref.finalize(messages, event.parcel.close)  # also if the lane is dropped before it comes to them
            self._send(messages, at_once=not is_end)
            return
        if isinstance(event, LostDescriptors):
            lost = FromRank(
                self.group,
                event.rank,
                in_other_clock(event.message),
                lost=event.error.strerror or str(event.error),
            )
            self._send([(lost, ())])
            return
        if isinstance(event, (RankExited, Swept, Lost)):
            ended = [event.rank] if isinstance(event, RankExited) else self._ranks
            self._send(self._files.unsent(ended))
        self._send((FromGroup(self.group, in_other_clock(each)), ()) for each in [event])  # its age when it is sent

    def _with_parcel(self, event: Received) -> Iterator[Message]:
        fds, blobs = event.parcel.take(), []
        try:
            for fd in fds:
                self._blobs_made += 1
                blob = Blob(f"{self.group}:{self._ranks[0]}:{self._blobs_made}", os.fstat(fd).st_size)
                yield from parts_of(fd, blob.key, blob.size)
                blobs.append(blob)
        finally:
            for fd in fds:
                os.close(fd)
        yield FromRank(self.group, event.rank, in_other_clock(event.message), blobs), ()

    def _send_stacks(self, now: float) -> None:
        for rank in list(self._asked):
            stacks = self._by_rank[rank].stacks
            if stacks.is_ready and rank not in self._known_stacks:
                self._known_stacks.add(rank)
                self._send([(Stacks(self.group, rank, stacks.main), ())], at_once=True)
            if stacks.look(now):
                self._asked.discard(rank)
                self._send([(Stacks(self.group, rank, stacks.main, stacks.dump), ())], at_once=True)

    # -------------------------------------------------------------- what is measured
    def _observe(self, now: float) -> None:
        dropped = {rank: worker.dropped() for rank, worker in self._by_rank.items()}
        begun = {rank: worker.collectives() for rank, worker in self._by_rank.items()}
        usage = None
        if self._sampler is not None and now >= self._measure_at:
            self._measure_at = now + timeouts.RESOURCE_SAMPLE_INTERVAL_S
            usage = self._sampler.sample(self._ranks)
        changed = Observed(
            self.group,
            {rank: each for rank, each in dropped.items() if each != self._dropped.get(rank, Dropped())},
            {
                rank: list(map(in_other_clock, each))
                for rank, each in begun.items()
                if list(each) != list(self._collectives.get(rank, ()))
            },
            usage,
        )
        self._dropped, self._collectives = dropped, begun
        if changed.dropped or changed.collectives or usage is not None:
            self._send([(changed, ())], at_once=True)

    def _measure(self, device: str) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self._sampler = self.workers.sampler(device, os.environ) if device else None

    # -------------------------------------------------------------- the end
    def close(self) -> None:
        """Release everything; ranks that still run are killed."""
        self.is_over = True
        self._measure("")
        self.workers.close()
        self._files.close()
