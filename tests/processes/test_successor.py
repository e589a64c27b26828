"""Successions of fork servers, and their clean-up when any of them ends."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch import LaunchResult, notebook_launcher
from nblaunch.engines import generations as all_servers
from nblaunch.engines import server_client
from nblaunch.engines import successor as successor_module
from nblaunch.engines.generations import Servers
from nblaunch.engines.grandchild import Grandchild
from nblaunch.engines.import_environment import Where
from nblaunch.engines.server_client import ForkServer
from nblaunch.engines.successor import Successor
from nblaunch.machine import processes, timeouts
from nblaunch.machine.packages import installed_path
from nblaunch.machine.processes import descendants
from nblaunch.ranks import reaper
from nblaunch.wire.channel import Channel, channel_pair, readable
from nblaunch.wire.messages import NewReaper
from tests.conftest import LONG, eventually, is_spare, state_of
from tests.processes.conftest import Launcher
from tests.processes.test_deaths import SURVIVES_AT_MOST, alive

HANGS = "import time\ntime.sleep(600)\n"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """Servers of the test's own."""
    servers = Servers()
    monkeypatch.setattr("nblaunch.engines.local.servers", servers)
    monkeypatch.setattr("nblaunch.engines.local_workers.servers", servers)
    monkeypatch.setattr(timeouts, "BUILD_QUIET_S", 0.1)
    yield servers
    servers.stop()
    eventually(lambda: servers._builder.thread is None)


@pytest.fixture
def soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the first successor import a module of this text, and not what takes long."""

    def change(text: str) -> None:
        (tmp_path / "imported_soon.py").write_text(text)
        paths = [*installed_path(), str(tmp_path)]
        monkeypatch.setattr(server_client, "installed_path", lambda: paths)
        monkeypatch.setattr(all_servers, "_SOON", ("imported_soon",))

    return change


@pytest.fixture
def parent() -> Iterator[ForkServer]:
    server = ForkServer(())
    yield server
    server.stop()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Open more files than ``select`` supports, as a notebook with a thousand shared tensors does."""
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


def launched(function: Callable[..., Any], *args: object) -> list[Any]:
    result = notebook_launcher(function, args, 2, start_method="forkserver", view="none")
    assert isinstance(result, LaunchResult)
    return list(result)


def reaper_and_modules(*names: str) -> tuple[int, list[str]]:
    """The reaper's pid, and which modules were there before this rank imported anything."""
    return os.getppid(), [name for name in names if name in sys.modules]


def built(own: Servers) -> bool:
    return own._builder.thread is None


# ------------------------------------------------------------------ taking over
def test_the_first_optimizers_imports_are_preloaded_soon(own: Servers) -> None:
    assert [there for _, there in launched(reaper_and_modules, "torch", "torch._dynamo")] == [["torch"]] * 2
    first = own._warm
    eventually(lambda: built(own))
    assert own._warm is not first
    assert first is not None
    eventually(lambda: not first.alive())
    names = ["torch", "torch._dynamo", "nblaunch.training"]
    assert [there for _, there in launched(reaper_and_modules, *names)] == [names] * 2


def test_its_imports_read_the_environment_of_the_launch(own: Servers) -> None:
    def sympys_own() -> tuple[bool, str]:
        there = "sympy" in sys.modules
        return there, importlib.import_module("sympy.core.cache").USE_CACHE

    found = []
    for _ in range(2):
        env = {"SYMPY_USE_CACHE": "no"}
        result = notebook_launcher(sympys_own, (), 1, start_method="forkserver", view="none", env=env)
        assert isinstance(result, LaunchResult)
        found += list(result)
        eventually(lambda: built(own), LONG, own.status)
    assert found == [(False, "no"), (True, "no")]


def test_no_launch_waits_for_a_server_that_is_being_built(own: Servers, soon: Callable[[str], None]) -> None:
    soon(HANGS)
    launched(os.getpid)
    eventually(lambda: own._builder.building is not None and own._builder.building.process.pid)
    hanging, served = own._builder.building, own._warm
    for _ in range(3):
        assert launched(os.getpid)
    assert own._builder.building is hanging
    assert own._warm is served
    assert served is not None
    assert served.launches == 4


def test_building_pauses_while_a_launch_starts(
    own: Servers, soon: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    soon(HANGS)
    own.warm_up()
    eventually(lambda: own._builder.building is not None and own._builder.building.process.pid)
    assert own._builder.building is not None
    pid = own._builder.building.process.pid
    with own._builder.paused():
        eventually(lambda: state_of(pid) == "T")
    eventually(lambda: state_of(pid) != "T")


def test_a_build_that_hangs_costs_only_itself(
    own: Servers, soon: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "PRELOAD_TIMEOUT_S", 1.0)
    soon(HANGS)
    launched(os.getpid)
    eventually(lambda: built(own), LONG, own.status)
    assert own.status()[-1] == "not imported ahead of launches: imported_soon, as importing it takes more than 1 s"
    assert launched(os.getpid)


def test_a_build_that_spoils_the_process_leaves_ranks_to_fork(own: Servers, soon: Callable[[str], None]) -> None:
    soon("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()")
    launched(os.getpid)
    eventually(lambda: built(own), LONG, own.status)
    assert "imported_soon, as the preload left 2 threads running" in own.status()[-1]
    assert own.usable("forkserver") == "forkserver"


def test_a_launch_outlives_the_server_that_started_it(
    own: Servers, soon: Callable[[str], None], tmp_path: Path
) -> None:
    go_on = tmp_path / "go_on"
    soon(f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.02)\n")
    begun = tmp_path / "begun"

    def wait() -> str:
        begun.touch()
        while not (tmp_path / "leave").exists():
            time.sleep(0.02)
        return "returned"

    running: Any = notebook_launcher(wait, (), 2, start_method="forkserver", view="none", block=False)
    eventually(begun.exists)
    first = own._warm
    go_on.touch()
    eventually(lambda: own._warm is not first)
    assert launched(os.getpid)
    assert first is not None
    assert first.alive()
    (tmp_path / "leave").touch()
    assert list(running.result()) == ["returned"] * 2
    eventually(lambda: not first.alive())
    assert launched(os.getpid)


def test_a_launch_goes_on_while_the_servers_before_its_own_end(
    own: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm server adopts the third of the line when the second ends, and the fourth when that does."""
    monkeypatch.setattr(all_servers, "_SOON", ())

    def wait(name: str) -> str:
        (tmp_path / f"{name}-{os.getpid()}").touch()
        while not (tmp_path / f"{name}-leave").exists():
            time.sleep(0.02)
        return name

    def launched_on_one_that_has(name: str) -> tuple[ForkServer, Any]:
        own.preload([name])
        eventually(lambda: own._stocked is not None and name in own._stocked.preload, LONG, own.status)
        launch: Any = notebook_launcher(wait, (name,), 2, start_method="forkserver", view="none", block=False)
        eventually(lambda: len(list(tmp_path.glob(f"{name}-*"))) == 2)
        assert own._stocked is not None
        assert own._stocked.launches == 1
        return own._stocked, launch

    launched(os.getpid)
    names = "colorsys", "wave", "tabnanny"
    line = {name: launched_on_one_that_has(name) for name in names}
    for name in names[:2]:
        server, launch = line[name]
        (tmp_path / f"{name}-leave").touch()
        assert list(launch.result()) == [name] * 2
        eventually(lambda pid=server.process.pid: not processes.alive(pid))  # type: ignore[misc]
    env = {"NOT_AS_THE_STOCKED_ONE": "has it"}
    notebook_launcher(os.getpid, (), 2, start_method="forkserver", view="none", env=env)
    server, launch = line[names[2]]
    assert server.alive()  # and the one that has read the end of its parent has served since
    (tmp_path / f"{names[2]}-leave").touch()
    assert list(launch.result()) == [names[2]] * 2


def test_a_kernel_with_more_than_a_thousand_open_files_launches(
    own: Servers, many_files: None, launch: Launcher
) -> None:
    assert len(launch(os.getpid)) == 2
    server = own._warm or own._bare
    assert server is not None
    assert server.channel.fileno() >= 1024
    eventually(lambda: built(own))
    assert len(launch(os.getpid)) == 2


def test_a_forked_child_of_the_kernel_ends_no_server(own: Servers) -> None:
    own.warm_up()
    server = own._warm
    own._retire(server)
    child = os.fork()
    if child == 0:
        own.forget()
        os._exit(len(own.all()))
    assert os.waitpid(child, 0)[1] == 0
    assert own._retired == [server]


def test_ranks_of_each_server_in_a_line_are_alike(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_servers, "_SOON", ())

    def is_connection(fd: int) -> bool:
        try:
            with socket.socket(fileno=os.dup(fd)) as opened:
                return opened.family != socket.AF_UNIX
        except OSError:
            return False

    def open_files_and_frames() -> tuple[int, int]:
        """Count them; gloo's connections are not inherited, and some close late."""
        files = [name for name in os.listdir("/dev/fd") if not is_connection(int(name))]
        return len(files), len(list(traceback.walk_stack(None)))

    def found_on(server: ForkServer | None) -> list[Any]:
        assert server is not None
        pid = server.process.pid
        eventually(lambda: sum(map(is_spare, descendants(pid))) == 3)  # so that all ranks are of their like
        before = server.launches
        found = launched(open_files_and_frames)
        assert server.launches == before + 1
        return found

    launched(os.getpid)
    eventually(lambda: built(own))
    found = [found_on(own._warm)]
    for name in ("colorsys", "wave"):
        own.preload([name])
        eventually(lambda: built(own))
        found.append(found_on(own._stocked))
    assert found == found[:1] * 3


# ------------------------------------------------------------------ its end
def test_its_end_is_seen_through_any_descriptor(many_files: None, parent: ForkServer) -> None:
    pid = parent.process.pid
    child = Grandchild(pid, os.pidfd_open(pid))
    assert child.poll() is None
    child.kill()
    os.waitid(os.P_PIDFD, child._pidfd or 0, os.WEXITED | os.WNOWAIT)
    assert child.poll() == 0


def test_no_zombie_is_left_of_it_in_a_kernel_that_adopts_it(own: Servers, soon: Callable[[str], None]) -> None:
    """As the first process of a container does; its first parent ends as soon as it serves."""
    code = (
        "import ctypes, os, sys, time; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        "from nblaunch.engines import generations as all_servers\n"
        "from nblaunch.machine import timeouts\n"
        "all_servers._SOON, timeouts.BUILD_QUIET_S = (), 0.0\n"
        "servers = all_servers.servers; servers.warm_up(); first = servers._warm\n"
        "while servers._builder.thread is not None or first.alive(): time.sleep(0.02)\n"
        "pid = servers._warm.process.pid\n"
        "assert pid != first.process.pid\n"
        "assert f'PPid:\\t{os.getpid()}\\n' in open(f'/proc/{pid}/status').read()\n"
        "servers.stop()\n"
        "assert not os.path.exists(f'/proc/{pid}')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONG)


@pytest.mark.alone
def test_a_server_that_is_killed_while_it_builds_the_next_is_to_blame(
    own: Servers, soon: Callable[[str], None]
) -> None:
    soon(HANGS)
    own.warm_up()
    eventually(lambda: own._builder.building is not None and own._builder.building.process.pid)
    assert own._builder.building is not None
    assert own._warm is not None
    hanging = own._builder.building.process.pid
    os.kill(own._warm.process.pid, signal.SIGKILL)
    eventually(lambda: not alive(hanging), SURVIVES_AT_MOST)
    eventually(lambda: built(own))
    assert not own._preloads._left_out
    assert launched(os.getpid)


def test_an_unused_server_ends_with_its_builder(
    own: Servers, soon: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    soon(HANGS)
    own.warm_up()
    eventually(lambda: own._builder.building is not None and own._builder.building.process.pid)
    assert own._builder.building is not None
    hanging = own._builder.building.process.pid
    monkeypatch.setenv("OMP_DISPLAY_ENV", "false")
    own.refresh()
    eventually(lambda: not alive(hanging))
    assert not own._preloads._left_out


def test_a_server_retired_while_it_builds_is_built_again(
    own: Servers, soon: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = tmp_path / "hang"
    hang.touch()
    soon(f"import os, time\nif os.path.exists({str(hang)!r}): time.sleep(600)\n")
    still_open: list[bool] = []

    def retired_meanwhile(source: Any, seconds: float | None = 0.0) -> bool:
        building, warm = own._builder.building, own._warm
        if building is not None and source is building.channel and building.process.pid and hang.exists():
            assert warm is not None
            hang.unlink()
            monkeypatch.setenv("OMP_DISPLAY_ENV", "false")
            retiring = threading.Thread(target=own.refresh)
            retiring.start()
            retiring.join()
            still_open.append(building.channel.fileno() >= 0)
            eventually(lambda: not warm.alive())
        return readable(source, seconds)

    monkeypatch.setattr(successor_module, "readable", retired_meanwhile)
    own.warm_up()
    eventually(lambda: built(own))
    assert still_open == [True]
    assert isinstance(own._warm, Successor)


def test_no_launch_waits_for_a_builder_that_does_not_end(
    own: Servers, soon: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while it waits for a disk that does not answer."""
    soon(HANGS)
    own.warm_up()
    eventually(lambda: own._builder.building is not None and own._builder.building.process.pid)
    retired, may_end = threading.Event(), threading.Event()
    wait = Grandchild.wait

    def refresh() -> None:
        own.refresh()
        retired.set()

    def late(process: Grandchild, *timeout: float) -> None:
        may_end.wait(LONG)
        wait(process, *timeout)

    monkeypatch.setattr(Grandchild, "wait", late)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "false")
    retiring = threading.Thread(target=refresh)
    retiring.start()
    try:
        assert retired.wait(LONG)
    finally:
        may_end.set()
        retiring.join()


def test_an_interrupted_start_leaves_no_builder_paused(
    own: Servers, soon: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    soon(HANGS)
    own.warm_up()
    eventually(lambda: own._builder.building is not None and own._builder.building.process.pid)
    assert own._builder.building is not None
    pid = own._builder.building.process.pid
    heed = Successor.heed

    def interrupted(building: Successor) -> bool:
        works = heed(building)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return works

    monkeypatch.setattr(Successor, "heed", interrupted)
    with pytest.raises(KeyboardInterrupt), own._builder.paused():
        pass
    eventually(own._builder.is_quiet)
    eventually(lambda: state_of(pid) != "T")


# ------------------------------------------------------------------ spares
def test_spares_exit_when_idle_and_return_after_a_launch(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_servers, "_SOON", ())
    short = "from nblaunch.machine import timeouts; timeouts.SPARE_IDLE_TIMEOUT_S = 5.0; "
    monkeypatch.setattr(server_client, "_MAIN", short + server_client._MAIN)
    launched(os.getpid)
    eventually(lambda: built(own))

    def spares() -> list[int]:
        assert own._warm is not None
        return [pid for pid in descendants(own._warm.process.pid) if is_spare(pid)]

    for _ in range(2):
        launched(os.getpid)
        eventually(lambda: len(spares()) == 3, LONG, spares)  # a reaper and two ranks
        eventually(lambda: not spares(), LONG, spares)
    assert launched(os.getpid)


def test_a_launch_survives_the_death_of_its_spare() -> None:
    """It comes when the end of the process has woken who takes launches, and not before."""
    server, there = socket.socketpair()
    kernel, control = channel_pair()
    with server, control, contextlib.closing(kernel):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                ended = processes.ChildWatch.ended

                def ended_as_it_comes(watch: processes.ChildWatch) -> list[tuple[int, int]]:
                    gone = ended(watch)
                    if gone and not came:
                        Channel(server).send(NewReaper("late", 1), [control.fileno()])
                        came.append(gone)
                    return gone

                came: list[object] = []
                waits = reaper._Reaper(Channel(there), [os.getppid()], lambda spec, sock: None)
                processes.ChildWatch.ended = ended_as_it_comes  # type: ignore[method-assign,assignment]
                waits.fork_child = lambda fd, run: _killed()  # type: ignore[method-assign]
                os._exit(0 if waits.wait_for_launch(1) else 3)
            os._exit(4)
        there.close()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _killed() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(1)
    return pid


# ------------------------------------------------------------------ the kernel's end
STAGES = ("first with the second in the making", "second", "second with the third in the making", "third")


def be_a_kernel(stage: str, folder: str) -> None:
    """In a separate process: reach `stage`, write the pids, and wait to be killed."""
    site = Path(folder, "site-packages")
    site.mkdir()
    (site / "hangs.py").write_text(HANGS)
    (site / "fine.py").write_text("")
    sys.path.insert(0, str(site))
    servers = all_servers.servers
    timeouts.BUILD_QUIET_S = 0.0
    all_servers._SOON = ("hangs",) if stage == STAGES[0] else ()
    servers.warm_up()
    first = servers._warm
    assert first is not None
    pids = [first.process.pid]
    if stage != STAGES[0]:
        eventually(lambda: servers._builder.thread is None and not first.alive())
        servers.preload(["hangs" if stage == STAGES[2] else "fine"] if stage != STAGES[1] else [], Where.here())
    if stage in (STAGES[0], STAGES[2]):
        eventually(lambda: servers._builder.building is not None and servers._builder.building.process.pid)
    elif stage == STAGES[3]:
        eventually(lambda: servers._stocked is not None)
    launch: Any = notebook_launcher(time.sleep, (600,), 2, start_method="forkserver", view="none", block=False)
    assert not launch.done
    eventually(lambda: any(is_spare(pid) for server in servers.all() for pid in descendants(server.process.pid)))
    pids += [server.process.pid for server in servers.all()]
    pids += [pid for server in servers.all() for pid in descendants(server.process.pid)]
    Path(folder, "pids.tmp").write_text(json.dumps(sorted(set(pids))))
    Path(folder, "pids.tmp").rename(Path(folder, "pids"))
    threading.Event().wait()


@pytest.mark.alone
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_survives_the_kernel_at_any_stage(stage: str, tmp_path: Path) -> None:
    code = "import sys; from tests.processes.test_successor import be_a_kernel; be_a_kernel(sys.argv[1], sys.argv[2])"
    kernel = subprocess.Popen([sys.executable, "-c", code, stage, str(tmp_path)])
    try:
        eventually(lambda: (tmp_path / "pids").exists() or kernel.poll() is not None)
        pids = json.loads((tmp_path / "pids").read_text())
        living = [pid for pid in pids if alive(pid)]
        assert len(living) >= 5  # a server, a reaper, two ranks, and who waits for the next launch
    finally:
        kernel.kill()
        kernel.wait()
    eventually(lambda: not any(map(alive, pids)), SURVIVES_AT_MOST, lambda: [pid for pid in pids if alive(pid)])
