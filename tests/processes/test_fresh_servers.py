"""Fork servers that take another one's place, with more imported, and their clean-up when any process ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch import LaunchResult, notebook_launcher
from nblaunch.engines import fork_servers
from nblaunch.engines.fork_servers import ForkServer, Servers, Where
from nblaunch.machine.packages import installed_path
from nblaunch.machine.processes import descendants
from tests.conftest import LONG, eventually
from tests.processes.test_deaths import alive

HANGS = "import time\ntime.sleep(600)\n"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """Servers of the test's own."""
    servers = Servers()
    monkeypatch.setattr("nblaunch.engines.local.servers", servers)
    monkeypatch.setattr(fork_servers, "BUILD_QUIET_S", 0.1)
    monkeypatch.delenv("NBLAUNCH_PRELOAD")
    monkeypatch.setattr(fork_servers, "KNOWN_SAFE", set())
    yield servers
    servers.stop()
    eventually(lambda: servers._builder is None)


@pytest.fixture
def soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the second server import a module of this text, and not what takes long."""

    def change(text: str) -> None:
        site = tmp_path / "site-packages"
        site.mkdir()
        (site / "imported_soon.py").write_text(text)
        paths = [*installed_path(), str(site)]
        monkeypatch.setattr(fork_servers, "installed_path", lambda: paths)
        monkeypatch.setattr(fork_servers, "_SOON", ("imported_soon",))

    return change


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


def modules(*names: str) -> list[str]:
    """Which modules were there before this rank imported anything."""
    return [name for name in names if name in sys.modules]


def has_built(own: Servers) -> bool:
    return own._builder is None


def being_built(own: Servers) -> ForkServer:
    """The server that is being built, once it imports what the other lacks."""
    eventually(lambda: own._building is not None)
    building = own._building
    assert building is not None
    return building


# ------------------------------------------------------------------ taking over
def test_the_first_optimizers_imports_are_there_soon(own: Servers) -> None:
    assert launched(modules, "torch", "torch._dynamo") == [["torch"]] * 2
    (first,) = own._servers
    eventually(lambda: has_built(own), LONG, own.status)
    assert first not in own._servers
    eventually(lambda: not first.alive())
    names = ["torch", "torch._dynamo", "nblaunch.training"]
    assert launched(modules, *names) == [names] * 2


def test_no_launch_waits_for_a_server_that_is_being_built(own: Servers, soon: Callable[[str], None]) -> None:
    """Nor blames it, if the other one is killed; and it ends with the others."""
    soon(HANGS)
    launched(os.getpid)
    hanging, (served,) = being_built(own), own._servers
    assert launched(os.getpid)
    assert own._servers == [served]
    assert served.launches == 2
    assert own.status()[-1] == "starting: a fork server that preloads imported_soon"
    os.kill(served.process.pid, signal.SIGKILL)
    eventually(lambda: not served.alive())
    assert launched(os.getpid)
    assert own._building is hanging
    own.stop()
    assert not hanging.alive()
    eventually(lambda: has_built(own))
    assert not own._left_out


def test_a_launch_outlives_the_server_that_started_it(
    own: Servers, soon: Callable[[str], None], many_files: None, tmp_path: Path
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
    (first,) = own._servers
    go_on.touch()
    eventually(lambda: first not in own._servers)
    assert own._servers[-1].channel.fileno() >= 1024
    assert launched(os.getpid)
    assert first.alive()
    (tmp_path / "leave").touch()
    assert list(running.result()) == ["returned"] * 2
    eventually(lambda: not first.alive())


def test_a_forked_child_of_the_kernel_ends_no_server(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers, "_PRELOAD", ())
    own.warm_up()
    (server,) = own._servers
    own.retire(server)
    child = os.fork()
    if child == 0:
        own.forget()
        os._exit(len(own.all()))
    assert os.waitpid(child, 0)[1] == 0
    assert own._retired == [server]


# ------------------------------------------------------------------ the kernel's end
def be_a_kernel(folder: str) -> None:
    """In a separate process: launch while a second server is in the making, write the pids, and wait to be killed."""
    site = Path(folder, "site-packages")
    site.mkdir()
    (site / "hangs.py").write_text(HANGS)
    sys.path.insert(0, str(site))
    servers = fork_servers.servers
    fork_servers.BUILD_QUIET_S = 0.0
    servers.warm_up()
    servers.preload(["hangs"], Where.here())
    being_built(servers)
    launch: Any = notebook_launcher(time.sleep, (600,), 2, start_method="forkserver", view="none", block=False)
    assert not launch.done
    eventually(lambda: sum(len(descendants(server.process.pid)) for server in servers.all()) >= 3)
    pids = {server.process.pid for server in servers.all()}
    pids |= {pid for server in pids for pid in descendants(server)}
    Path(folder, "pids.tmp").write_text(json.dumps(sorted(pids)))
    Path(folder, "pids.tmp").rename(Path(folder, "pids"))
    threading.Event().wait()


def test_nothing_survives_the_kernel_while_a_server_is_built(tmp_path: Path) -> None:
    code = "import sys; from tests.processes.test_fresh_servers import be_a_kernel; be_a_kernel(*sys.argv[1:])"
    kernel = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        eventually(lambda: (tmp_path / "pids").exists() or kernel.poll() is not None)
        pids = json.loads((tmp_path / "pids").read_text())
        living = [pid for pid in pids if alive(pid)]
        assert len(living) >= 5  # two servers, a reaper, two ranks
    finally:
        kernel.kill()
        kernel.wait()
    eventually(lambda: not any(map(alive, pids)), LONG, lambda: [pid for pid in pids if alive(pid)])
