"""The agent: it stands for the kernel on another node, starts ranks there, and is linked to the kernel.

An engine (Slurm, Ray, ssh) starts one on each node, with `Boot` as a line of JSON on its stdin. Its ranks are those of
the local engine: the same fork server, reaper, files and memory. It exits when its connection to the kernel ends, or
when its own engine ends it; its fork server and reapers watch it and kill every rank.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import pickle
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from nblaunch.engines.link import (
    JOIN,
    LINK_CONNECT_TIMEOUT_S,
    PART_BYTES,
    BlobStore,
    Message,
    Outbox,
    configure,
    credential,
    parts_of,
    versions_here,
)
from nblaunch.engines.local import LocalEngine, LocalWorker, LocalWorkers
from nblaunch.engines.protocol import Event, Lost, Received, Sampler, Wakeup
from nblaunch.machine import timeouts
from nblaunch.machine.inventory import Machine, Process, address_towards, interface_of, this_machine, this_process
from nblaunch.machine.own_code import OwnFile, digest_of
from nblaunch.machine.processes import die_with_parent
from nblaunch.wire import AGENT_FOLDER, BELOW_AGENT, launch_files
from nblaunch.wire.launch_files import rank_file
from nblaunch.wire.link_messages import (
    Blob,
    BlobPart,
    Boot,
    Call,
    Drop,
    FromGroup,
    FromRank,
    Joined,
    Leaving,
    ModuleFile,
    Part,
    Place,
    Placed,
    Preload,
    Release,
    Written,
    in_other_clock,
)
from nblaunch.wire.messages import Done, Failed, NotStarted, RankExited, Swept, Task
from nblaunch.wire.tables import Begun, Dropped

_log = logging.getLogger(__name__)
_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_KEPT_DIRECTORIES = 3
"""Of the last tasks of kept ranks; the first directory of a group stays."""
_STREAMS: tuple[Literal["spool", "out", "err"], ...] = ("spool", "out", "err")
LINK_CLOSE_S = 1.0
"""For the last message of an agent to be sent."""
AGENT_POLL_S = 0.05
"""Between two reads of the files of an agent's ranks."""
AGENT_IDLE_POLL_S = 0.5
"""The same without groups."""
AGENT_OBSERVE_S = 0.5
"""Between two looks at what the ranks of a node have counted."""


# ------------------------------------------------------------------ files
class AgentFolder:
    """The folder of one agent, locked while it lives. Removes those of this user's agents that were killed."""

    def __init__(self) -> None:
        temporary = Path(tempfile.gettempdir())
        prefix = f"nblaunch-agent-{socket.gethostname()}-"  # a shared disk may have locks that other nodes do not see
        for old in temporary.glob(f"{glob.escape(prefix)}*"):
            with contextlib.suppress(OSError):  # it has no locks, or another agent is removing it
                if old.lstat().st_uid == os.getuid() and (lock := launch_files.acquire_lock(old)) is not None:
                    shutil.rmtree(old, ignore_errors=True)
                    launch_files.release_lock(lock)
        self._lock: int | None = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=temporary))
            try:
                self._lock = launch_files.acquire_lock(self.path)  # None: another agent has just removed it
            except OSError:
                break  # there are no locks: the folder stays if everything here is killed at once

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            launch_files.release_lock(self._lock)
            self._lock = None


_Piece = tuple[str, str, bytes]
"""The kernel's directory, the name of a file there, and bytes of it."""


class AgentFiles:
    """The files of the ranks of one group on this node, in a folder of its own in `folder`."""

    def __init__(self, folder: Path, group: str) -> None:
        self._group = group
        self.root = folder / group
        folder.mkdir(mode=0o700, exist_ok=True)  # a cleaner of /tmp may have removed it
        self.root.mkdir(mode=0o700)
        self._directories: dict[str, Path] = {}
        """By the kernel's path for the same directory."""
        self._sent: dict[Path, int] = {}
        """How much of each file was sent."""
        self._made = 0

    def directory(self, log_dir: str) -> Path:
        if log_dir not in self._directories:
            self._made += 1
            made = self.root / str(self._made)
            made.mkdir(mode=0o700)
            self._directories[log_dir] = made
            for name, old in list(self._directories.items())[1:-_KEPT_DIRECTORIES]:
                shutil.rmtree(old, ignore_errors=True)
                del self._directories[name]
                self._sent = {path: sent for path, sent in self._sent.items() if path.parent != old}
        return self._directories[log_dir]

    def has_new(self, rank: int) -> bool:
        """Return True if a rank has written something that was not sent. Looks at its present and last task."""
        return any(self._size(path) > self._sent.get(path, 0) for _, path in self._streams(rank))

    def unsent(self, ranks: Iterable[int]) -> Iterator[Message]:
        """Yield what ranks have written since the last call: what they display before the records that refer to it.

        Small pieces of many files share a message: each costs the kernel as much as a large one.
        """
        batch: list[_Piece] = []
        for piece in (piece for rank in ranks for piece in self._unsent_of(rank)):
            size = sum(len(data) for _, _, data in batch)
            if batch and (piece[0] != batch[0][0] or size + len(piece[2]) > PART_BYTES):
                yield self._message(batch)
                batch = []
            batch.append(piece)
        if batch:
            yield self._message(batch)

    def _message(self, batch: Sequence[_Piece]) -> Message:
        files = [(name, len(data)) for _, name, data in batch]
        return Written(self._group, batch[0][0], files), [b"".join(data for _, _, data in batch)]

    def _unsent_of(self, rank: int) -> Iterator[_Piece]:
        for log_dir, path in self._streams(rank):
            size = self._size(path)
            if size > self._sent.get(path, 0):
                if path.suffix == ".spool":
                    yield from self._displays(rank, log_dir, path.parent)
                yield from self._pieces(log_dir, path, size)

    def _streams(self, rank: int) -> Iterator[tuple[str, Path]]:
        for log_dir, directory in list(self._directories.items())[-2:]:
            for stream in _STREAMS:
                yield log_dir, rank_file(directory, rank, stream)

    def _displays(self, rank: int, log_dir: str, directory: Path) -> Iterator[_Piece]:
        for path in sorted(directory.glob(f"rank{rank}-output*")):
            if path not in self._sent and path.suffix != ".part":  # which is being written
                yield from self._pieces(log_dir, path, self._size(path))

    def _pieces(self, log_dir: str, path: Path, end: int) -> Iterator[_Piece]:
        start = self._sent.setdefault(path, 0)
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < end and (data := file.read(min(PART_BYTES, end - start))):
                start += len(data)
                self._sent[path] = start
                yield log_dir, path.name, data

    @staticmethod
    def _size(path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError:  # not yet there
            return 0

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def lay_out(modules: Sequence[OwnFile], contents: Mapping[bytes, bytes], root: Path) -> list[str]:
    """Write the user's own modules that this node lacks or has otherwise into `root`; return what finds them there.

    Of a package that differs, all files are those of the notebook's machine.
    """
    differing = {file.package for file in modules if digest_of(file.path) != file.digest}
    wanted = [file for file in modules if file.package in differing]
    for file in wanted:
        path = root / file.name
        if file.digest in contents and root in path.resolve().parents:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents[file.digest])
    return [str(root)] if wanted else []


# ------------------------------------------------------------------ the ranks of a group
class AgentGroup:
    """One worker group on an agent's node. Its ranks are those of the local engine. Used from the agent's thread."""

    def __init__(
        self, group: str, ranks: range, workers: LocalWorkers, files: AgentFiles, outbox: Outbox, blobs: BlobStore
    ) -> None:
        self.group, self.workers = group, workers
        self.has_started = self.is_over = False
        self._ranks, self._files, self._outbox, self._blobs = ranks, files, outbox, blobs
        self._by_rank: dict[int, LocalWorker] = {}
        self._waiting: list[tuple[Sequence[Task], Sequence[Blob]]] = []
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
        self._sampler: Sampler | None = None
        self._observe_at = self._measure_at = 0.0
        self._observed: tuple[dict[int, Dropped], dict[int, Sequence[Begun]]] = {}, {}
        self._blobs_made = 0

    # -------------------------------------------------------------- from the kernel
    def call(self, call: Call) -> None:
        """Do what the kernel asks, here, or in the workers or the worker of the local engine."""
        try:
            own = getattr(AgentGroup, call.method, None)
            if own is not None:
                own(self, *(() if call.rank is None else (call.rank,)), *call.arguments)
            else:
                target = self.workers if call.rank is None else self._by_rank[call.rank]
                getattr(target, call.method)(*call.arguments)
        except Exception as error:  # noqa: BLE001  # the kernel waits: it must be told, whatever it is
            self._refuse(error, -1 if call.rank is None else call.rank)

    def _refuse(self, error: Exception, rank: int = -1) -> None:
        self._outbox.put(FromGroup(self.group, NotStarted(rank, str(error) or repr(error))))

    def start(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        self._by_rank = {worker.rank: worker for worker in self.workers.start(environments.__getitem__)}
        self.has_started = True

    def restart(self, rank: int, environment: Mapping[str, str]) -> None:
        self._by_rank[rank] = self.workers.restart(rank, environment)
        self._closed.discard(rank)
        self._known_stacks.discard(rank)

    def send_tasks(self, tasks: Sequence[Task], parcel: Sequence[Blob]) -> None:
        self._waiting.append((tasks, parcel))
        self.hand_out()

    def interrupt(self, rank: int, task: int) -> None:
        if task > self._task:  # its data are still on their way
            self._interrupts[rank] = task
        else:
            self._by_rank[rank].interrupt(task)

    def ask_stacks(self, rank: int, signal_after_s: float) -> None:
        self._asked.add(rank)
        self._by_rank[rank].stacks.ask(time.monotonic() + signal_after_s)

    def measure(self, device: str) -> None:
        """Begin to measure the ranks once a second; end if no device is named."""
        if self._sampler is not None:
            self._sampler.close()
        self._sampler = self.workers.sampler(device, os.environ) if device else None

    def hand_out(self) -> None:
        """Send the tasks whose blobs have arrived; refuse those whose blobs cannot be kept here."""
        try:
            while self._waiting:
                sent, parcel = self._waiting[0]
                if lost := [self._blobs.lost[blob.key] for blob in parcel if blob.key in self._blobs.lost]:
                    self._waiting.clear()
                    raise OSError(f"{socket.gethostname()} cannot store the data: {lost[0]}")
                if not all(blob.key in self._blobs for blob in parcel):
                    return
                del self._waiting[0]
                folders = [str(self._files.directory(task.log_dir)) if task.log_dir else "" for task in sent]
                tasks = [replace(task, log_dir=folder) for task, folder in zip(sent, folders, strict=True)]
                self._task = max(task.task for task in tasks)
                self.workers.send_tasks(tasks, [self._blobs.descriptor(blob.key) for blob in parcel])
                for rank, task in self._interrupts.items():
                    self._by_rank[rank].interrupt(task)
                self._interrupts.clear()
        except Exception as error:  # noqa: BLE001  # as in `call`
            self._refuse(error)

    # -------------------------------------------------------------- to the kernel
    def step(self, now: float) -> None:
        if not self.has_started or self.is_over:
            return
        for event in self.workers.wait(0.0):
            self._send_event(event)
        self._send_stacks(now)
        for rank, worker in self._by_rank.items():
            if not (worker.is_open or worker.has_exited or rank in self._closed):
                self._closed.add(rank)
                self._tell("closed", rank)
        new = [rank for rank in self._ranks if rank not in self._is_reading and self._files.has_new(rank)]
        if new:
            self._is_reading.update(new)
            self._send(self._written(new))
        if now >= self._observe_at:
            self._observe_at = now + AGENT_OBSERVE_S
            self._observe(now)

    def _written(self, ranks: Sequence[int]) -> Iterator[Message]:
        self._is_reading.difference_update(ranks)
        yield from self._files.unsent(ranks)

    def _send(self, messages: Iterable[Message]) -> None:
        self._outbox.put_in(self.group, messages)

    def _tell(self, method: str, *arguments: object) -> None:
        """Call a method of the kernel's group, before what waits in the lane."""
        self._outbox.put(Call(self.group, method, arguments))

    def _send_event(self, event: Event) -> None:
        if isinstance(event, Received):
            if not (isinstance(event.message, (Done, Failed)) or event.parcel or event.lost):
                self._outbox.put(FromRank(self.group, event.rank, event.message))
                return
            self._send(self._files.unsent([event.rank]))
            messages = self._with_parcel(event)
            weakref.finalize(messages, event.parcel.close)  # also if the lane is dropped before it comes to them
            self._send(messages)
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
        yield FromRank(self.group, event.rank, in_other_clock(event.message), blobs, event.lost), ()

    def _send_stacks(self, now: float) -> None:
        for rank in list(self._asked):
            stacks = self._by_rank[rank].stacks
            if stacks.is_ready and rank not in self._known_stacks:
                self._known_stacks.add(rank)
                self._tell("stacks", rank, stacks.main, None)
            if stacks.look(now):
                self._asked.discard(rank)
                self._tell("stacks", rank, stacks.main, stacks.dump)

    # -------------------------------------------------------------- what is measured
    def _observe(self, now: float) -> None:
        dropped = {rank: worker.dropped() for rank, worker in self._by_rank.items()}
        begun = {rank: worker.collectives() for rank, worker in self._by_rank.items()}
        usage = None
        if self._sampler is not None and now >= self._measure_at:
            self._measure_at = now + timeouts.RESOURCE_SAMPLE_INTERVAL_S
            usage = self._sampler.sample(self._ranks)
        if (dropped, begun) != self._observed or usage is not None:
            self._observed = dropped, begun
            aged = {rank: list(map(in_other_clock, each)) for rank, each in begun.items()}
            self._tell("observed", dropped, aged, usage)

    # -------------------------------------------------------------- the end
    def close(self) -> None:
        self.is_over = True
        self.measure("")
        self.workers.close()
        self._files.close()


class Agent:
    """See the module."""

    def __init__(self, boot: Boot, machine: Machine, engine: LocalEngine, folder: AgentFolder) -> None:
        self._machine, self._engine, self._folder = machine, engine, folder
        self._outbox = Outbox()
        self._blobs = BlobStore()
        self._groups: dict[str, AgentGroup] = {}
        self._requests = queue.SimpleQueue[Callable[[], None]]()
        """What threads let the loop do."""
        self._modules: dict[bytes, bytes] = {}
        """Files of the user's own modules, by digest."""
        self._placing: dict[str, bool] = {}
        """Groups that are not yet placed, and whether they were closed meanwhile."""
        self._is_leaving = False
        self._boot = boot
        self._identity = os.urandom(12).hex().encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, boot.kernel_key.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, boot.public_key.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, boot.secret_key.encode())
        self._socket.setsockopt(zmq.ROUTING_ID, self._identity)
        configure(self._socket)
        self._monitor = self._socket.get_monitor_socket(_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(boot.endpoint)
        self._wake = Wakeup()
        self._reason_to_leave = ""
        self._term_at: float | None = None
        """When a SIGTERM was reported."""
        signal.signal(signal.SIGTERM, self._note_term)

    def _note_term(self, *_: object) -> None:
        self._reason_to_leave = "the node is being reclaimed (SIGTERM)"

    # -------------------------------------------------------------- the loop
    def run(self) -> None:
        threading.Thread(target=self._watch_connection, name="nblaunch-watch", daemon=True).start()
        self._join()
        while not self._is_leaving:
            self._poll(AGENT_POLL_S if self._groups else AGENT_IDLE_POLL_S)
            self._receive()
            while not self._requests.empty():
                self._requests.get()()
            now = time.monotonic()
            for group in list(self._groups.values()):
                self._step(group, now)
            if self._reason_to_leave:
                self._outbox.put(Leaving(self._reason_to_leave))
                self._reason_to_leave, self._term_at = "", now
            self._outbox.flush(self._send)
            if self._term_at is not None and not (self._groups or self._placing):  # no rank needs the grace period
                self._is_leaving = now - self._term_at > LINK_CLOSE_S
        for group in self._groups.values():
            group.close()
        self._folder.close()
        self._engine.stop()  # and no socket is closed: the other thread uses one

    def _request(self, act: Callable[[], None]) -> None:
        """Let the loop do something; from another thread."""
        self._requests.put(act)
        self._wake.set()

    def _step(self, group: AgentGroup, now: float) -> None:
        try:
            group.step(now)
        except Exception:  # noqa: BLE001  # the other groups go on
            _log.exception("nblaunch: group %s failed", group.group)
            self._outbox.put(FromGroup(group.group, Lost()))
            self._close(group.group)

    def _poll(self, seconds: float) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN if self._outbox.is_empty else zmq.POLLIN | zmq.POLLOUT)
        poller.register(self._wake, zmq.POLLIN)
        for group in self._groups.values():
            if group.has_started:
                poller.register(group.workers.fileno(), zmq.POLLIN)
        poller.poll(int(seconds * 1000))
        self._wake.clear()

    def _send(self, parts: Sequence[Part]) -> None:
        self._socket.send_multipart(parts, zmq.NOBLOCK)

    def _receive(self) -> None:
        until = time.monotonic() + AGENT_POLL_S
        while time.monotonic() < until and not self._is_leaving:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(pickle.loads(parts[0]), parts[1:])
            except Exception:  # noqa: BLE001  # one group must not end the others
                _log.exception("nblaunch: a message from the kernel failed")

    def _watch_connection(self) -> None:
        """Let the agent exit once its connection has ended. Runs in a thread: the loop may be busy."""
        is_there = self._monitor.poll(int(LINK_CONNECT_TIMEOUT_S * 1000))
        if is_there and recv_monitor_message(self._monitor)["event"] == _CONNECTED:
            recv_monitor_message(self._monitor)  # waits for the end
            self._is_leaving = True
            self._request(lambda: None)
            time.sleep(timeouts.AGENT_EXIT_TIMEOUT_S)
        else:
            with contextlib.suppress(OSError):  # no one reads it any more
                os.write(2, f"cannot connect to {self._boot.endpoint}\n".encode())
        self._folder.close()
        os._exit(1)  # the fork servers and reapers see it, and kill every rank

    # -------------------------------------------------------------- joining
    def _join(self) -> None:
        proof = credential(self._boot.text_to_prove(self._identity)) if self._boot.proof else ""
        joined = pickle.dumps(Joined(self._machine, self._boot.node), protocol=5)
        self._send([JOIN, json.dumps(asdict(versions_here())).encode(), proof.encode(), joined])

    # -------------------------------------------------------------- messages
    def _take(self, message: object, buffers: Sequence[Part]) -> None:
        if isinstance(message, BlobPart):
            if self._blobs.add(message, buffers[0]):
                for group in self._groups.values():
                    group.hand_out()
        elif isinstance(message, Drop):
            self._blobs.drop(message.keys)
        elif isinstance(message, Place):
            self._placing[message.group] = False
            threading.Thread(target=self._place, args=(message,), name=f"nblaunch-{message.group}").start()
        elif isinstance(message, Preload):
            self._engine.preload(message.modules)
        elif isinstance(message, ModuleFile):
            self._modules[message.digest] = bytes(buffers[0])
        elif isinstance(message, Release):
            self._close(message.group)
        elif isinstance(message, Call) and message.group in self._groups:  # else it was closed meanwhile
            self._groups[message.group].call(message)

    def _close(self, name: str) -> None:
        group = self._groups.pop(name, None)
        self._outbox.drop(name)
        if name in self._placing:
            self._placing[name] = True
        elif group is not None:
            group.close()

    # -------------------------------------------------------------- placing
    def _place(self, message: Place) -> None:
        """Get the processes of a group. Runs in a thread: the fork server may have to start."""
        files: AgentFiles | None = None
        workers: LocalWorkers | None = None
        try:
            files = AgentFiles(self._folder.path, message.group)
            process, note = self._process(message, files)
            method = self._engine.usable(message.order.method, message.order.envs[0], message.order.named)
            order = replace(
                message.order, method=method, process=process, log_dir=str(files.directory(message.order.log_dir))
            )
            workers = self._engine.place(order, self._wake)
            store = workers.open_store(address=self._machine.address) if message.serves_store else None
            answer = Placed(store=store, note=note)
        except Exception as error:  # noqa: BLE001  # the kernel waits: it must be told, whatever it is
            if workers is not None:
                workers.close()
            workers, answer = None, Placed(refusal=str(error) or repr(error))
        self._request(partial(self._adopt, message, workers, files, answer))

    def _process(self, message: Place, files: AgentFiles) -> tuple[Process, str]:
        """Return what ranks start from here, as like the notebook's process as this node allows, and a note."""
        wanted, own, note = message.order.process, this_process(), ""
        cwd = wanted.cwd
        modules = lay_out(message.modules, self._modules, files.root / "modules")
        if not os.path.isdir(cwd):
            cwd = str(files.root / "cwd")
            os.mkdir(cwd)
            note = f"{self._machine.name} has no directory {wanted.cwd}: its ranks run in an empty directory"
        path = modules + [entry for entry in wanted.sys_path if not entry or os.path.exists(entry)]
        path += [entry for entry in own.sys_path if entry and entry not in path]
        return replace(wanted, cwd=cwd, sys_path=tuple(path), limits=own.limits, cpus=own.cpus), note

    def _adopt(self, message: Place, workers: LocalWorkers | None, files: AgentFiles | None, answer: Placed) -> None:
        if self._placing.pop(message.group) or workers is None:
            for each in (workers, files):
                if each is not None:
                    each.close()
        else:
            assert files is not None
            made = AgentGroup(message.group, message.order.ranks[0], workers, files, self._outbox, self._blobs)
            self._groups[message.group] = made
        self._outbox.put(Call(message.group, "placed", [answer]))


def main() -> NoReturn:
    """Run an agent until its end; the process's main function. An argument is the pid of a process to die with."""
    if len(sys.argv) > 1:  # Ray's actor: to kill it must end the agent, too
        die_with_parent(int(sys.argv[1]))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    boot = Boot(**json.loads(sys.stdin.readline()))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):  # Slurm keeps a node while anything holds a task's stdout
        os.dup2(null, fd)
    kernel = urlsplit(boot.endpoint).hostname or ""
    address = address_towards(kernel)
    try:
        socket.gethostbyaddr(address)
    except OSError:  # torch would warn in each rank that an address has no name, as in many clusters
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    folder = AgentFolder()
    os.environ |= {BELOW_AGENT: str(os.getpid()), AGENT_FOLDER: str(folder.path)}
    engine = LocalEngine()
    engine.warm_up()
    machine = replace(this_machine(), name=socket.gethostname(), address=address, interface=interface_of(address))
    status = 1
    agent = Agent(boot, machine, engine, folder)
    try:
        agent.run()
        status = 0
    except BaseException:  # noqa: BLE001  # the process must exit here in any case
        with contextlib.suppress(OSError):  # as above
            traceback.print_exc()
        folder.close()
    finally:
        os._exit(status)  # threads of libraries must not keep the node


if __name__ == "__main__":
    main()
