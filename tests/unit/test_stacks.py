"""Stacks as faulthandler writes them, and as the notebook shows them."""

from __future__ import annotations

import math
import os
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import nblaunch
from nblaunch.engines.rank_files import StackFile
from nblaunch.launch.commands import Commands
from nblaunch.launch.group import WorkerGroup
from nblaunch.launch.stacks import Frame, Inspector, Stack, StackFormatter, parse, waits_in_collective
from nblaunch.machine import timeouts
from nblaunch.machine.own_code import COLLECTIVE_LOG
from nblaunch.ranks.stack_dumps import dump
from nblaunch.wire.launch_files import BEGIN, WHOLE, DumpHead
from nblaunch.wire.messages import Source
from tests.conftest import LONG
from tests.unit.fake_engine import FakeWorkers

RANKS = str(Path(nblaunch.__file__).parent / "ranks")
LIBRARY = f"{sysconfig.get_path('stdlib')}/site-packages/torch/distributed/distributed_c10d.py"
CELL = "/tmp/ipykernel_7/123.py"
MAIN = "0x00007f0000000001"
TEXT = "import torch.distributed as dist\ndef train(rank):\n    for step in range(10):\n        dist.barrier()\n"
SOURCES = {CELL: Source(TEXT, "Cell In[3]")}
DUMP = f"""\
Thread 0x00007f0000000003 (most recent call first):
  File "{threading.__file__}", line 331 in wait
  File "{threading.__file__}", line 629 in wait
  File "/venv/lib/python3.12/site-packages/tqdm/_monitor.py", line 60 in run
  File "{threading.__file__}", line 1045 in _bootstrap_inner
  File "{threading.__file__}", line 1002 in _bootstrap

Thread 0x00007f0000000002 [loader] (most recent call first):
  File "/home/me/load.py", line 8 in load
  File "{threading.__file__}", line 982 in run
  File "{threading.__file__}", line 1045 in _bootstrap_inner
  File "{threading.__file__}", line 1002 in _bootstrap

Current thread {MAIN} (most recent call first):
  Garbage-collecting
  File "{LIBRARY}", line 4818 in barrier
  File "{CELL}", line 4 in train
  File "{RANKS}/worker.py", line 331 in _call
  File "{RANKS}/worker.py", line 250 in work
  File "{RANKS}/worker.py", line 130 in serve
  File "{RANKS}/reaper.py", line 150 in fork
  File "{RANKS}/forkserver.py", line 40 in main
  File "<string>", line 1 in <module>
"""


# ------------------------------------------------------------------ reading


def test_a_dump_that_is_cut_anywhere_is_read_as_far_as_it_goes() -> None:
    for end in range(len(DUMP)):
        stacks = parse(DUMP[:end])
        assert StackFormatter(SOURCES).format(stacks, MAIN).count("(most recent call last)") == len(stacks)


def test_omitted_calls_are_marked() -> None:
    stacks = parse(f'Thread {MAIN} (most recent call first):\n  File "{CELL}", line 4 in train\n  ...\n')

    assert stacks[0].cut
    assert StackFormatter(SOURCES).format(stacks, MAIN).splitlines()[1] == "  … older calls omitted …"


# ------------------------------------------------------------------ places
def test_a_stack_reads_as_a_traceback_from_the_users_function_on() -> None:
    text, *_ = StackFormatter(SOURCES).format(parse(DUMP), MAIN).split("\n\n")

    assert text.splitlines() == [
        "Main thread (most recent call last):",
        "  Cell In[3], line 4, in train",
        "    dist.barrier()",
        f'  File "{LIBRARY}", line 4818, in barrier',
    ]


def test_the_users_threads_come_before_those_of_libraries() -> None:
    _, users, librarys = StackFormatter(SOURCES).format(parse(DUMP), MAIN).split("\n\n")

    assert users == ('Thread loader (most recent call last):\n  File "/home/me/load.py", line 8, in load')
    assert librarys.startswith("Thread 0x00007f0000000003 of a library (most recent call last):\n")
    assert "_bootstrap" not in librarys


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        ([(CELL, 4, "train"), (LIBRARY, 9, "barrier")], "Cell In[3], line 4: dist.barrier()"),
        ([(CELL, 3, "train"), ("/home/me/load.py", 2, "f")], "Cell In[3], line 3: for step in range(10):"),
        ([("/home/me/load.py", 2, "f"), (LIBRARY, 9, "barrier")], '"/home/me/load.py", line 2'),
        ([(LIBRARY, 9, "init"), (LIBRARY, 8, "connect")], f'"{LIBRARY}", line 8'),
        ([(CELL, 99, "train")], "Cell In[3], line 99"),
        ([(CELL, 0, "train")], "Cell In[3], line ?"),
        ([], "C code without a Python caller"),
    ],
)
def test_a_ranks_place_is_the_users_own_line(frames: list[tuple[str, int, str]], where: str) -> None:
    stacks = [Stack("0x2", (Frame(CELL, 1, "other"),)), Stack(MAIN, tuple(Frame(*frame) for frame in frames))]

    assert StackFormatter(SOURCES).where(stacks, MAIN) == where


def test_an_edited_line_is_shown_as_it_is_now(tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    stack = Stack(MAIN, (Frame(str(module), 1, "f"),))
    for text in ("first()", "second_and_longer()"):
        module.write_text(text + "\n")
        assert StackFormatter({}).format([stack], MAIN).splitlines()[-1] == f"    {text}"


@pytest.mark.parametrize(
    ("last", "waits"),
    [
        ("torch/distributed/distributed_c10d.py", True),
        ("torch/distributed/utils.py", True),
        ("torch/nn/parallel/distributed.py", True),
        ("torch/distributed/checkpoint/filesystem.py", False),
        ("torch/serialization.py", False),
        ("torch/autograd/graph.py", False),
        ("mytorch/distributed/mine.py", False),
    ],
)
def test_a_last_call_in_torch_distributed_is_a_collective(last: str, waits: bool) -> None:
    frames = (Frame(LIBRARY, 9, "all_reduce"), Frame(f"/env/site-packages/{last}", 3, "f"))
    others = Stack("0x00007f0000000002", (Frame(LIBRARY, 9, "barrier"),))
    for ours in ((), (Frame(COLLECTIVE_LOG, 5, "kernel"),)):
        assert waits_in_collective([others, Stack(MAIN, frames + ours)], MAIN) == waits


# ------------------------------------------------------------------ asking
class Asking:
    """An `Inspector` over files and pipes that the test makes, with the signals that it sends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.commands, self.sent = folder, Commands(), list[tuple[int, int]]()
        self.pipes: dict[int, int] = {}
        self.workers = FakeWorkers(3)
        for worker in self.workers.ranks:
            worker.stacks = self.stack_file(worker.rank)  # type: ignore[assignment]  # real files
        group = WorkerGroup(self.workers, lambda text: None)
        group.start(lambda rank: {})
        self.inspector = Inspector(group, SOURCES, self.commands)

    def live(self, *ranks: int) -> None:
        """Let only these ranks live."""
        for worker in self.workers.ranks:
            worker.is_open = worker.rank in ranks

    def look(self) -> None:
        self.inspector.step(time.monotonic(), (), math.inf)

    def stack_file(self, rank: int) -> StackFile:
        path = self.folder / f"rank{rank}.stacks"
        return StackFile(path, lambda signum: self.sent.append((rank, signum)))

    def register(self, rank: int) -> None:
        pipe = self.folder / f"rank{rank}.ask"
        os.mkfifo(pipe)
        self.pipes[rank] = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        (self.folder / f"rank{rank}.stacks").write_bytes(DumpHead(47, str(pipe), MAIN).to_line())

    def asked(self, rank: int) -> int:
        """How often a rank was asked since the last call."""
        try:
            return len(os.read(self.pipes[rank], 100))
        except BlockingIOError:
            return 0

    def close(self) -> None:
        self.inspector.close()
        self.commands.close()
        for pipe in self.pipes.values():
            os.close(pipe)

    def write(self, rank: int, text: str) -> None:
        with open(self.folder / f"rank{rank}.stacks", "a") as file:
            file.write(text)

    def look_until(self, done: Callable[[], bool]) -> None:
        while not done():  # the test's own limit of time ends it
            self.look()


@pytest.fixture
def asking(tmp_path: Path) -> Iterator[Asking]:
    asking = Asking(tmp_path)
    yield asking
    asking.close()


def test_a_silent_rank_gets_one_signal_and_no_further_request(asking: Asking) -> None:
    asking.live(0)
    asking.register(0)
    for within in (0.1, 0.1, 0.1):
        asked = asking.commands.want_stacks(within)
        asking.look_until(asked.done)
        assert asked.result()[0].startswith("no response within 0.1 s: the process is stopped (SIGSTOP), or in")

    assert (asking.asked(0), asking.sent) == (1, [(0, 47)])

    asking.write(0, DUMP)  # it goes on, and answers what it was asked long ago
    asked = asking.commands.want_stacks(60.0)
    asking.look()
    assert asking.asked(0) == 1
    asking.write(0, DUMP + BEGIN + DUMP.replace("line 4 in train", "line 3 in train") + WHOLE)
    asking.look_until(asked.done)
    assert asked.result()[0].count("Main thread") == 1
    assert "Cell In[3], line 3, in train" in asked.result()[0]


def test_places_are_known_as_ranks_answer_and_no_signal_is_sent(asking: Asking) -> None:
    for rank in (0, 1):
        asking.register(rank)  # rank 2 cannot be asked
    now = time.monotonic()
    assert not asking.inspector.step(now, [0, 1, 2], 1.0)
    assert [asking.asked(rank) for rank in (0, 1)] == [1, 1]

    asking.write(0, BEGIN + DUMP + WHOLE)
    assert not asking.inspector.step(now, [0, 1, 2], 1.0)
    assert waits_in_collective(asking.inspector.places[0].stacks, MAIN)

    assert asking.inspector.step(now + timeouts.STACKS_TIMEOUT_S, [0, 1, 2], 1.0)
    assert [bool(place.stacks) for place in asking.inspector.places.values()] == [True, False, False]
    assert (asking.asked(0), asking.sent) == (0, [])


@pytest.mark.parametrize("begun", [0, 90, 400, 900])
def test_an_answer_amid_a_faulthandler_dump_is_shown_alone(asking: Asking, begun: int) -> None:
    """A rank that was stopped goes on: the signal and the question have both waited for it."""
    asking.live(0)
    asking.register(0)
    asked = asking.commands.want_stacks(60.0)
    asking.look()
    other = DUMP.replace("line 4 in train", "line 3 in train")
    asking.write(0, other[:begun] + BEGIN + DUMP + WHOLE + other[begun:])
    asking.look_until(asked.done)

    assert asked.result() == {0: StackFormatter(SOURCES).format(parse(DUMP), MAIN)}


def test_a_ranks_own_dump_is_parsed_like_faulthandlers() -> None:
    """With one thread more: its names are not ASCII, and it is 200 calls deep."""
    ready, leave = threading.Event(), threading.Event()

    def grüße(depth: int) -> None:
        if depth:
            grüße(depth - 1)
        ready.set()
        leave.wait()

    thread = threading.Thread(target=grüße, args=(200,), name="a ∇ [loader]")
    thread.start()
    assert ready.wait(LONG)
    pool = ThreadPoolExecutor(1)  # in a rank another thread than the main one answers
    text = pool.submit(dump).result().encode("ascii", "backslashreplace").decode()
    leave.set()
    thread.join()
    pool.shutdown()

    (found,) = [stack for stack in parse(text) if stack.name == "a ∇ [loader]"]
    assert int(found.thread, 16) == thread.ident
    assert (len(found.frames), found.cut) == (100, True)
    assert [frame.function for frame in found.frames[-3:]] == ["grüße", "wait", "wait"]
    assert any(stack.name == "MainThread" and not stack.cut for stack in parse(text))
    assert text.startswith(BEGIN)
    assert text.endswith(WHOLE)


def test_only_ranks_that_answered_before_their_end_are_shown(asking: Asking) -> None:
    asking.live(0, 1, 2)
    asked = asking.commands.want_stacks(60.0)
    for rank in (0, 1, 2):
        asking.register(rank)
    asking.look()
    for rank in (0, 1):
        asking.write(rank, DUMP)
    asking.look_until(lambda: 0 in asking.inspector.places)

    asking.live(1)
    asking.look_until(asked.done)

    assert sorted(asked.result()) == [0, 1]


def test_an_ask_that_comes_while_others_are_answered_is_answered_next(asking: Asking) -> None:
    asking.live(0)
    asking.register(0)
    first = asking.commands.want_stacks(60.0)
    asking.look()
    second = asking.commands.want_stacks(60.0)

    asking.write(0, DUMP)
    asking.look_until(first.done)
    assert not second.done()
    asking.look()
    assert asking.asked(0) == 2
    asking.write(0, DUMP)

    asking.look_until(second.done)


def test_a_request_after_the_end_returns_no_rank(asking: Asking) -> None:
    asking.live(0)
    waiting, underway = asking.commands.want_stacks(60.0), asking.commands.want_stacks(60.0)
    asking.look()
    late = asking.commands.want_stacks(60.0)

    asking.inspector.close()
    asking.commands.close()

    assert [asked.result(0) for asked in (waiting, underway, late, asking.commands.want_stacks(1.0))] == [{}] * 4
