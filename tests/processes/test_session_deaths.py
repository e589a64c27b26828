"""A session leaves nothing, whatever dies: its kernel, its fork server, its reaper, all of its ranks."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nblaunch
from nblaunch import Session
from nblaunch.engines import local
from nblaunch.engines.fork_servers import servers
from nblaunch.engines.protocol import Wakeup
from nblaunch.errors import LaunchTimeoutError, RankDiedError, RankError, StartError
from nblaunch.launch import session as live_sessions
from nblaunch.launch.handle import live_launches
from nblaunch.launch.session_ranks import Ticket
from nblaunch.training import Accelerator
from nblaunch.wire.messages import NotStarted
from tests.conftest import (
    LONG,
    MARK,
    command_of,
    eventually,
    files,
    left_files,
    marked_processes,
    settled_server,
)
from tests.processes.test_deaths import alive, start_daemon
from tests.processes.test_process_group import listeners_beyond_loopback, summed


@pytest.fixture
def session() -> Iterator[Session]:
    with nblaunch.session(2, name="deaths") as made:
        yield made


def pids(folder: str) -> tuple[int, int]:
    """Return the pids of a rank and its reaper, after starting a daemon that is tied to neither."""
    rank = int(os.environ["RANK"])
    start_daemon(Path(folder), rank)
    while not (Path(folder) / f"daemon{rank}").exists():
        time.sleep(0.01)
    return os.getpid(), os.getppid()


def family(session: Session, folder: Path) -> tuple[list[int], int]:
    """Return every process of the session, and its reaper."""
    result = session.run(pids, str(folder), view="none")
    daemons = [int((folder / f"daemon{rank}").read_text()) for rank in range(2)]
    reaper = result[0][1]
    return [*(pid for pid, _ in result), reaper, *daemons], reaper


def test_the_death_of_the_reaper_ends_all_and_a_restart_begins_again(session: Session, tmp_path: Path) -> None:
    everyone, reaper = family(session, tmp_path)
    os.kill(reaper, signal.SIGKILL)
    eventually(lambda: not any(map(alive, everyone)))
    said = "dead, its variables are lost; `%distributed session restart --name deaths` restarts all"
    eventually(lambda: session.status().count(said) == 2)
    with pytest.raises(
        RankError, match="the ranks of session deaths are lost: `%distributed session restart --name deaths`"
    ) as caught:
        session.run(os.getpid, view="none")
    assert "_supervise" not in [frame.name for frame in caught.traceback]
    session.restart()
    assert len(set(session.run(os.getpid, view="none"))) == 2


def test_the_death_of_the_fork_server_ends_the_session(session: Session, tmp_path: Path) -> None:
    everyone, _ = family(session, tmp_path)
    settled_server()
    for server in servers.all():
        os.kill(server.process.pid, signal.SIGKILL)
    eventually(lambda: not any(map(alive, everyone)))
    session.restart()
    assert len(session.run(os.getpid, view="none")) == 2


_KERNEL = """
import os, sys, time
import nblaunch
from pathlib import Path
from tests.processes.test_session_deaths import family
if __name__ == "__main__":
    session = nblaunch.session(2)
    everyone, _ = family(session, Path(sys.argv[1]))
    Path(sys.argv[1], "new").write_text(" ".join(map(str, everyone)))
    Path(sys.argv[1], "new").rename(Path(sys.argv[1], "everyone"))
    session.run(time.sleep, 600, view="none")
"""


def test_the_death_of_the_kernel_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KERNEL, str(tmp_path)]
    kernel = subprocess.Popen(command, cwd=Path(nblaunch.__file__).parents[1])
    eventually((tmp_path / "everyone").exists)
    everyone = list(map(int, (tmp_path / "everyone").read_text().split()))
    assert all(map(alive, everyone))
    kernel.kill()
    kernel.wait()
    eventually(lambda: not any(map(alive, everyone)))


_STARTING_KERNEL = """
import os, sys
import nblaunch
if __name__ == "__main__":
    os.mkdir(sys.argv[1])
    nblaunch.session(2, start_method=sys.argv[2])
    os.rmdir(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("start_method", "generations"),
    [("forkserver", 1), ("forkserver", 2), ("spawn", 3)],
    ids=["its fork server starts", "its reaper exists", "a rank is spawned"],
)
def test_the_death_of_a_kernel_whose_ranks_start_leaves_nothing(
    start_method: str, generations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill it as soon as the chain kernel, fork server, reaper, rank has this many processes below the kernel."""
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    before, starts = files(), tmp_path / "starts"
    command = [sys.executable, "-c", _STARTING_KERNEL, str(starts), start_method]
    while not starts.exists():  # else the ranks had started before the kernel was killed: once more
        kernel = subprocess.Popen(command, cwd=Path(nblaunch.__file__).parents[1])
        eventually(starts.exists)
        while kernel.poll() is None and depth_below(kernel.pid) < generations:
            time.sleep(0.001)
        kernel.kill()
        kernel.wait()
    eventually(lambda: not marked_processes(), LONG, lambda: [command_of(pid) for pid in marked_processes()])
    assert left_files(before) == set()


def depth_below(pid: int) -> int:
    """Return how many generations of processes descend from a process."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return max((1 + depth_below(int(child)) for child in children), default=0)


def stuck_in_c(begun: str, rank: int) -> None:
    """Make a folder and never return, both in C: between two lines, an interrupt would end the task."""
    if rank == 0:
        never = partial(hashlib.pbkdf2_hmac, "sha256", b"", b"", 2**31 - 1)
        list(map(methodcaller("__call__"), (partial(os.mkdir, begun), never)))
    dist.barrier()


def test_c_code_that_never_returns_costs_its_rank_alone(tmp_path: Path) -> None:
    with nblaunch.session(2, name="stuck", stop_grace=5.0) as session:
        session.push(kept=5)
        launch = session.run(stuck_in_c, str(tmp_path / "begun"), view="none", block=False)
        eventually((tmp_path / "begun").exists)
        launch.stop()
        assert launch.wait(60)
        assert session.pull("kept", ranks=[1]) == [5]
        assert "rank 0: dead" in session.status()
        session.restart([0])
        assert list(session.run(summed, view="none")) == [3.0, 3.0]


def test_a_timeout_keeps_the_ranks(session: Session) -> None:
    before = list(session.run(os.getpid, view="none"))
    with pytest.raises(LaunchTimeoutError, match=r"took longer than timeout=0.5 s and was stopped"):
        session.run(time.sleep, 600, view="none", timeout=0.5)
    assert list(session.run(os.getpid, view="none")) == before


def test_a_session_listens_on_loopback_alone(session: Session) -> None:
    assert list(session.run(summed, view="none")) == [3.0, 3.0]
    session.restart([1])
    assert list(session.run(summed, view="none")) == [3.0, 3.0]
    assert listeners_beyond_loopback() == set()


def test_ranks_share_one_copy_of_what_is_pushed(session: Session) -> None:
    size = 128 << 20
    session.push(big=torch.ones(size // 4))
    share = "__import__('tests.processes.test_payload', fromlist=['_']).mapped_share(big, '', 0, 2)"
    shares = session.pull(share)
    assert size * 0.4 < shares[0] < size * 0.6
    assert sum(shares) < 1.1 * size


def test_each_task_has_a_log_of_its_own_that_ends_at_the_limit() -> None:
    with nblaunch.session(1, name="talks", env={"NBLAUNCH_MAX_LOG_BYTES": "100"}) as made:
        for _ in range(2):
            (log,) = made.run(print, "x" * 80, "\n", "y" * 80, view="none").logs
            assert log.dropped
            assert log.out.read_text().endswith("further output is dropped\n")
        (log,) = made.run(print, "little", view="none").logs
        assert (log.text(), log.dropped) == ("little\n", False)


def test_queued_tasks_share_one_copy_of_their_data(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_KEEP_BYTES", "0")
    data, go = torch.ones(2_000_000), torch.zeros(1).share_memory_()

    def waits() -> None:
        while not go.item():
            time.sleep(0.01)

    running = session.run(waits, view="none", block=False)
    queued = [session.run(torch.sum, data, view="none", block=False) for _ in range(3)]
    go.fill_(1)
    running.result()
    assert [each.result().payload.copied for each in queued] == [data.nbytes, 0, 0]


def test_a_dead_ranks_descendants_go_and_the_others_stay(session: Session, tmp_path: Path) -> None:
    (first, second, _, *daemons), _ = family(session, tmp_path)
    os.kill(second, signal.SIGKILL)
    eventually(lambda: not alive(daemons[1]))
    assert alive(first)
    assert alive(daemons[0])


def needs_group(how: str) -> None:
    """Do what waits for all ranks where there is no process group yet."""
    if how == "torch":
        dist.init_process_group("gloo")
    elif how == "mesh":
        dist.init_device_mesh("cpu", (2,))
    elif how == "wait":
        Accelerator(compute_setup="cpu").wait_for_everyone()
    elif how == "prepare":
        Accelerator(compute_setup="cpu").prepare(torch.nn.Linear(1, 1))
    else:
        Accelerator(compute_setup="cpu").gather(torch.ones(1))


def worked_alone() -> tuple[int, int, str, float]:
    """Use what needs no other rank, then prepare and reduce in a group of this rank alone; return what came out."""
    accelerator = Accelerator(compute_setup="cpu")
    place = accelerator.rank, accelerator.world_size
    module = accelerator.unwrap_model(torch.nn.Linear(1, 1))
    accelerator.backward(module(torch.ones(1, 1)).sum())
    dist.init_process_group("gloo", world_size=1, rank=0)
    try:
        alone = Accelerator(compute_setup="cpu")
        total = float(alone.reduce(alone.prepare(module).weight.grad, "sum"))
    finally:
        dist.destroy_process_group()
    return *place, str(accelerator.device), total


def gradient_of_all() -> float:
    """Return a mean gradient of the ranks."""
    accelerator = Accelerator(compute_setup="cpu")
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.backward(model(torch.full((1, 1), dist.get_rank() + 1.0)).sum())
    (weight, _) = model.parameters()
    return float(weight.grad)


@pytest.fixture
def bereaved(session: Session) -> Session:
    """A session whose rank 1 is dead."""
    with pytest.raises(RankDiedError):
        session.run(lambda rank: os.kill(os.getpid(), signal.SIGKILL if rank == 1 else 0), view="none")
    return session


NO_GROUP = (
    "rank 1 is dead, so there is no process group: `%distributed session restart --rank 1 --name deaths` restarts it "
    "and creates the group"
)


def test_nothing_waits_for_a_dead_rank_in_a_new_group(bereaved: Session) -> None:
    for how in ("torch", "mesh", "wait", "prepare", "gather"):
        with pytest.raises(RankError) as caught:
            bereaved.run(needs_group, how, view="none", timeout=60)
        assert (str(caught.value), getattr(caught.value, "__notes__", [])) == (NO_GROUP, [])
    bereaved.restart([1])
    assert list(bereaved.run(gradient_of_all, view="none")) == [1.5] * 2


def test_torchs_own_error_gets_a_note_on_the_dead_rank(bereaved: Session) -> None:
    with pytest.raises(ValueError, match="process group has not been initialized") as caught:
        bereaved.run(summed, view="none", timeout=60)
    assert getattr(caught.value, "__notes__", []) == [NO_GROUP]


def test_a_session_with_a_dead_rank_says_so_when_it_is_asked_for(
    bereaved: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nblaunch.session(name="deaths") is bereaved
    assert f"session deaths is running, but {NO_GROUP}" in capsys.readouterr().out


def test_a_rank_that_is_left_works_alone(bereaved: Session) -> None:
    assert bereaved.run(worked_alone, view="none", timeout=60)[0] == (0, 2, "cpu", 1.0)


def test_several_dead_ranks_are_named_together() -> None:
    with nblaunch.session(3) as made:
        _, *victims = made.run(os.getpid, view="none")
        kills = f"kill -9 {victims[0]} {victims[1]}"
        with pytest.raises(RankDiedError):
            made.run(lambda rank: time.sleep(60) if rank else os.system(kills), view="none")
        eventually(lambda: made.status().count("dead") == 2)
        with pytest.raises(RankError, match=r"ranks 1, 2 are dead.* restart --rank 1 --rank 2` restarts them"):
            made.run(needs_group, "torch", view="none", timeout=60)


def test_a_rank_that_cannot_be_restarted_costs_one_question(session: Session) -> None:
    session.push(value=3)
    with pytest.raises(RankDiedError):
        session.run(lambda rank: os.kill(os.getpid(), signal.SIGKILL if rank == 1 else 0), view="none")
    session._ranks.group._noted(NotStarted(1, "Cannot allocate memory"))  # as the reaper reports it
    with pytest.raises(StartError, match="rank 1 could not be started: Cannot allocate memory"):
        session.pull("value", ranks=[0])
    assert session.pull("value", ranks=[0]) == [3]


def test_a_session_that_could_not_be_restarted_has_a_status(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise OSError("no port is free")

    with monkeypatch.context() as patch:
        patch.setattr(local, "serve_store", refuse)
        with pytest.raises(StartError, match=r"cannot serve the rendezvous.*no port is free"):
            session.restart()
        assert session.status().count("dead") == 2
    session.restart()
    assert list(session.run(lambda rank: rank, view="none")) == [0, 1]


@pytest.fixture
def lost(session: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session whose ranks have died just now: their exits are not reported yet."""
    for pid in session.run(os.getpid, view="none"):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: session.state().text().count("dead") == 2)
    workers, late = session._ranks.group.workers, [(), ()]
    wait = workers.wait
    monkeypatch.setattr(workers, "wait", lambda seconds: late.pop() if late else wait(seconds))
    return session


def test_ranks_are_dead_before_their_exits_are_reported(lost: Session) -> None:
    with pytest.raises(RankError, match="every rank of session deaths is dead"):
        lost.run(os.getpid, view="none")


def test_a_session_is_dead_although_its_ranks_are_being_looked_at(
    lost: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    queue, ticket = lost._ranks.queue, Ticket(lost._ranks)
    queue.enqueue(ticket)
    threading.Timer(3.0, queue.discard, [ticket]).start()
    assert nblaunch.session(2, name="deaths") is lost
    assert "had lost its ranks and their variables: started 2 ranks again" in capsys.readouterr().out
    assert list(lost.run(summed, view="none")) == [3.0, 3.0]


def test_stopping_a_session_ends_the_task_that_runs(session: Session) -> None:
    launch = session.run(time.sleep, 600, view="none", block=False)
    eventually(lambda: "busy" in session.status())
    session.stop()
    assert launch.wait(LONG)
    with pytest.raises(StartError, match="has ended"):
        session.run(os.getpid)


def test_a_stop_frees_ranks_that_join_their_group(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    late = session._ranks.group.members[1].pid
    os.kill(late, signal.SIGSTOP)
    try:
        launch = session.run(os.getpid, view="text", block=False)
        eventually(lambda: "in init_process_group" in launch.stacks(0.5).get(0, ""))
        launch.stop()
        eventually(lambda: "in init_process_group" not in launch.stacks(0.5).get(0, ""))
    finally:
        os.kill(late, signal.SIGCONT)
    launch.wait()
    assert "stopped after" in capsys.readouterr().out


def test_questions_beside_tasks_of_several_threads_block_nothing(session: Session) -> None:
    failed: list[BaseException] = []

    def asks() -> None:
        try:
            for _ in range(10):
                session.complete("pr")
                session.pull("1")
        except BaseException as error:  # raised in the test's thread
            failed.append(error)

    threads = [threading.Thread(target=asks) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        session.run(os.getpid, view="none")
    for thread in threads:
        thread.join(60)
    assert not failed
    assert not any(thread.is_alive() for thread in threads)
    assert session.pull("1") == [1, 1]


def test_a_question_of_another_thread_ends_with_the_session(session: Session) -> None:
    asking = threading.Thread(target=lambda: session.pull("__import__('time').sleep(600)"), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda args: None)  # its pull fails
        asking.start()
        eventually(lambda: "busy" in session.status())
        session.stop()
        asking.join(60)
    assert not asking.is_alive()


def test_a_session_that_was_stopped_leaves_another_of_its_name_alone() -> None:
    first = nblaunch.session(1, name="twice")
    first.stop()
    with nblaunch.session(1, name="twice") as second:
        first.stop()
        assert live_sessions.find("twice") is second


def test_a_session_that_is_about_to_end_is_not_handed_out() -> None:
    first = nblaunch.session(1, name="twice")
    assert first._ranks.queue.close_if_empty()  # as it does when it has been idle for long
    threading.Timer(1.0, first.stop).start()
    with nblaunch.session(1, name="twice") as second:
        assert not first.is_open
        assert second.pull("1") == [1]


_named_while_loaded: list[str] = []


def _name_while_loaded() -> None:
    _named_while_loaded.extend(map(repr, live_launches()))


class _NamesLaunches:
    def __reduce__(self) -> Any:
        return _name_while_loaded, ()


def test_a_task_whose_result_is_being_loaded_is_not_queued(session: Session) -> None:
    session.run(_NamesLaunches, view="none")
    assert len(_named_while_loaded) == 2
    assert "queued" not in "".join(_named_while_loaded)


def test_a_session_is_not_idle_while_a_task_is_packed() -> None:
    class Slow:
        def __reduce__(self) -> tuple[object, ...]:
            time.sleep(3)
            return int, (1,)

    with nblaunch.session(1, name="packing", idle_timeout=2) as made:
        assert list(made.run(abs, Slow(), view="none")) == [1]


def kills_its_reaper(rank: int) -> None:
    if rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def test_a_reaper_that_dies_under_a_task_says_how_to_go_on(session: Session) -> None:
    with pytest.raises(RankError, match="killed, and all ranks with it: `%distributed session restart --name deaths`"):
        session.run(kills_its_reaper, view="none")


def test_an_interrupt_reaches_no_reader_of_the_ranks_messages(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two lines of a selector, it would break the session."""
    workers, threads = session._ranks.group.workers, set()
    listen_to = workers.listen_to

    def noting(wakeup: Wakeup) -> None:
        threads.add(threading.get_ident())
        listen_to(wakeup)

    monkeypatch.setattr(workers, "listen_to", noting)
    session.status()
    session.push(value=1)
    assert session.pull("value") == [1, 1]
    session.run(os.getpid, view="none")
    session.restart()
    assert threads
    assert threading.get_ident() not in threads


def test_a_reaper_that_dies_under_a_question_is_named(session: Session) -> None:
    reaper = session.run(os.getppid, view="none")[0]
    threading.Timer(0.5, os.kill, [reaper, signal.SIGKILL]).start()
    with pytest.raises(RankError, match="the ranks of session deaths are lost"):
        session.pull("__import__('time').sleep(600)")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "not a name"}, "name='not a name': must be a valid identifier"),
        ({"start_method": "fork"}, "start_method='fork': not available in sessions"),
    ],
)
@pytest.mark.filterwarnings("ignore:start_method='fork':UserWarning")
def test_wrong_arguments_are_named_before_anything_starts(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(nblaunch.errors.ArgumentError, match=said):
        nblaunch.session(**arguments)  # type: ignore[arg-type]  # they are wrong


def test_spawned_ranks_stay_too() -> None:
    with nblaunch.session(1, name="spawned", start_method="spawn") as made:
        made.push(value=3)
        made.run(os.getpid, view="none")
        assert made.pull("value + 1") == [4]
