"""The making of a successor of the fork server, as the kernel sees it."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch.channel import Channel, channel_pair
from nblaunch.launch import forkserver
from nblaunch.launch.forkserver import ForkServer, Successor, _Grandchild
from nblaunch.launch.servers import Servers, _Where
from nblaunch.messages import PROTOCOL, Hello, Importing
from tests.conftest import eventually
from tests.processes.conftest import Launcher

LONG = 60.0


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """Servers of the test's own, which learn."""
    servers = Servers()
    monkeypatch.setattr("nblaunch.launch.launch.servers", servers)
    monkeypatch.setattr("nblaunch.launch.launcher.servers", servers)
    monkeypatch.setenv("NBLAUNCH_LEARN_IMPORTS", "1")
    yield servers
    eventually(lambda: servers._teacher is None, LONG)
    servers.stop()


@pytest.fixture
def parent() -> Iterator[ForkServer]:
    server = ForkServer(())
    yield server
    server.stop()


@pytest.fixture
def many_files() -> Iterator[None]:
    """More open files than ``select`` can tell apart, as a notebook has with a thousand shared tensors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    files: list[int] = []
    try:
        while not files or files[-1] < 1100:
            files.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def import_two() -> int:
    import colorsys
    import wave

    return len((colorsys.__name__, wave.__name__))


def test_a_kernel_with_more_than_a_thousand_open_files_launches_and_has_a_successor(
    own: Servers, many_files: None, launch: Launcher
) -> None:
    assert list(launch(import_two)) == [2, 2]
    server = own._warm or own._bare
    assert server is not None
    assert server.channel.fileno() >= 1024
    if own._warm is not None:  # spawned ranks import for themselves
        eventually(lambda: own._successor is not None and own._teacher is None, LONG)
        assert own._successor is not None
        assert list(launch(import_two)) == [2, 2]
        assert own._successor.launches == 1


def test_its_end_is_seen_through_any_descriptor(many_files: None, parent: ForkServer) -> None:
    pid = parent.process.pid
    child = _Grandchild(pid, os.pidfd_open(pid))
    assert child.poll() is None
    child.kill()
    child.wait()
    assert child.poll() == 0


def test_a_package_has_its_time_from_when_it_is_named(parent: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports before the first takes longer where the fork server itself has not come so far."""
    here, sock = channel_pair()
    there = Channel(sock)
    pid = parent.process.pid
    pidfd = os.pidfd_open(pid)
    said: list[Any] = [
        (Importing("", pid), [pidfd]),
        (Importing("package", pid),),
        (Hello(PROTOCOL, pid, "", 0.0),),
    ]
    waited = []

    def next_word(source: object, seconds: float) -> bool:
        waited.append(seconds)
        there.send(*said.pop(0))
        return True

    monkeypatch.setattr(forkserver, "readable", next_word)
    monkeypatch.setattr(parent, "ask_for_successor", lambda *what: here)
    successor = Successor(parent, ["package"], {}, "/")
    successor.import_all()
    assert waited == [forkserver._READY_LIMIT, forkserver._READY_LIMIT, forkserver._IMPORT_LIMIT]
    successor.retire()
    there.close()
    os.close(pidfd)


def has_learnt(own: Servers) -> tuple[ForkServer, Successor]:
    """A fork server, and its successor."""
    own.warm_up()
    server = own._warm
    assert server is not None
    server.ready()
    own.learn(["wave"], dict(os.environ), os.sep)
    eventually(lambda: own._teacher is None, LONG)
    assert own._successor is not None
    return server, own._successor


def test_it_goes_with_the_server_that_forked_it(own: Servers) -> None:
    server, successor = has_learnt(own)
    assert not [line for line in own.status() if "successor" in line]  # what is Python's own is not worth a line
    own.give_up(server)
    own.warm_up()
    assert own._successor is None
    eventually(lambda: not successor.alive(), LONG)
    eventually(lambda: own._teacher is None, LONG)


def test_it_leaves_in_order_when_all_servers_are_stopped(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_LAST_MOMENT", LONG)
    _, successor = has_learnt(own)
    killed = []
    with monkeypatch.context() as context:
        context.setattr(successor.process, "kill", lambda: killed.append(successor.alive()))
        own.stop()
    assert killed == [False]


def test_one_that_does_not_leave_is_killed(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_LAST_MOMENT", 0.01)
    _, successor = has_learnt(own)
    os.kill(successor.process.pid, signal.SIGSTOP)
    own.stop()
    assert not successor.alive()


def test_it_goes_when_learning_is_switched_off_and_no_other_is_made(
    own: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, successor = has_learnt(own)
    where = _Where(dict(os.environ), os.sep)
    assert own._for("forkserver", where) is successor
    with monkeypatch.context() as context:
        context.setenv("NBLAUNCH_LEARN_IMPORTS", "0")
        assert own._for("forkserver", _Where(dict(os.environ), os.sep)) is server
        eventually(lambda: not successor.alive(), LONG)
        own._teach_soon()
        assert own._teacher is None
    own.learn(["wave"], dict(os.environ), os.sep)
    eventually(lambda: own._teacher is None, LONG)
    assert own._for("forkserver", where) is own._successor is not None


def test_a_forked_child_ends_no_server_that_its_parent_has_retired(own: Servers) -> None:
    own.warm_up()
    server = own._warm
    own._retire(server)
    child = os.fork()
    if child == 0:
        own.forget()
        os._exit(len(own._retired))
    assert os.waitpid(child, 0)[1] == 0
    assert own._retired == [server]


def seen() -> object:
    import reads_one  # type: ignore[import-not-found]  # the test installs it

    return reads_one.SEEN


@pytest.mark.parametrize(
    "name", ["ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "COLUMNS", "PWD", "NBLAUNCH_SEED", "MASTER_KEY"]
)
def test_what_a_package_reads_at_its_import_is_of_the_launch_that_it_runs_in(
    name: str, own: Servers, launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "reads_one.py").write_text(f"import os\nSEEN = os.environ.get({name!r})\n")
    monkeypatch.syspath_prepend(str(site))
    for value in ("1", "2"):
        assert list(launch(seen, env={name: value})) == [value, value]
        eventually(lambda: own._teacher is None, LONG)
