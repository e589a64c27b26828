"""Fork servers that cannot start, or that crash or hang during their imports."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from nblaunch.engines import fork_servers
from nblaunch.engines.fork_servers import ForkServer, Servers, Where, servers
from nblaunch.errors import StartError
from nblaunch.machine import processes
from nblaunch.machine.packages import installed_path
from nblaunch.notebook.notebook_frontend import NotebookFrontend
from nblaunch.ranks import forkserver, reaper
from nblaunch.wire import BELOW_AGENT
from nblaunch.wire.channel import Channel, channel_pair, readable
from nblaunch.wire.messages import Method, NewReaper
from tests.conftest import LONG, eventually, marked_processes, present_server

IN_ITS_IMPORT = {
    "dies": "import os, sys; sys.stderr.write('no licence'); sys.stderr.flush(); os._exit(3)",
    "hangs": "import time; time.sleep(600)",
}


@pytest.fixture
def _warm() -> None:
    """Have no server of this process begin while a test looks which there are."""
    servers.stop()


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no server import what takes long: no rank starts here."""
    monkeypatch.setattr(fork_servers, "_PRELOAD", ())


@pytest.fixture
def own() -> Iterator[Servers]:
    """Servers of the test's own."""
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture
def preload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the fork server import a module of this text."""

    def change(text: str) -> None:
        (tmp_path / "preloaded_for_a_test.py").write_text(text)
        paths = [*installed_path(), str(tmp_path)]
        monkeypatch.setattr(fork_servers, "installed_path", lambda: paths)
        monkeypatch.setattr(fork_servers, "_PRELOAD", ("preloaded_for_a_test",))

    return change


@pytest.mark.parametrize(("way", "reason"), [("dies", "no licence"), ("hangs", r"within 1 s \(exit status None\)")])
def test_ranks_are_spawned_if_the_fork_server_never_gets_ready(
    way: str, reason: str, own: Servers, preload: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    preload(IN_ITS_IMPORT[way])
    if way == "hangs":
        monkeypatch.setattr(fork_servers, "SERVER_START_TIMEOUT_S", 1.0)
    before = marked_processes()
    message = rf"cannot be used, so ranks are spawned \(slower\): the fork server did not start.*{reason}"
    with pytest.warns(UserWarning, match=message) as said:
        assert own.usable("forkserver") == "spawn"
    assert [warning.filename for warning in said] == [__file__]
    eventually(lambda: marked_processes() <= before)
    monkeypatch.setattr(fork_servers, "ForkServer", _not_again)
    with pytest.warns(UserWarning, match=r"reload_ext nblaunch tries again"):
        assert own.usable("forkserver") == "spawn"
    assert own.status()[0].startswith("fork server: disabled: the fork server did not start")


def _not_again(preload: tuple[str, ...]) -> NoReturn:
    raise AssertionError("it has been given up")


def test_a_launch_that_spawns_does_not_wait_for_a_fork_server(own: Servers, preload: Callable[[str], None]) -> None:
    preload(IN_ITS_IMPORT["hangs"])
    own.warm_up()
    own.reaper("spawn").channel.close()
    assert own._bare is not None
    assert own._bare.hello is not None


def test_a_fork_server_that_has_exited_unnoticed_is_replaced(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    own.warm_up()
    server = present_server(own)
    server.ready()
    server.process.kill()
    server.process.wait(LONG)
    with monkeypatch.context() as context:
        context.setattr(server, "alive", lambda: True)  # as in the moment between its last breath and the news
        own.reaper("forkserver").channel.close()
    assert server not in own._servers


def test_a_kernel_that_may_open_no_more_files_keeps_its_fork_server(
    own: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    own.warm_up()
    server = present_server(own)
    server.ready()
    with monkeypatch.context() as context:
        context.setattr(fork_servers, "channel_pair", refuse)
        with pytest.raises(
            StartError, match=r"^the ranks could not be started: .*Too many open files.*\(.*ulimit -n\)$"
        ):
            own.reaper("forkserver")
    assert present_server(own) is server
    own.reaper("forkserver").channel.close()
    assert re.fullmatch(r"fork server: pid \d+, 1 launch, ready after [\d.]+ s", own.status()[0])


def test_a_request_to_a_retired_server_goes_to_the_next(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    choose, chosen = own._for, []

    def late(method: Method, where: Any) -> ForkServer:
        chosen.append(choose(method, where))
        if len(chosen) == 1:
            assert chosen[0].ready().problem == ""
            own.retire(chosen[0])
        return chosen[-1]

    monkeypatch.setattr(own, "_for", late)
    own.reaper("forkserver").channel.close()
    assert present_server(own) is chosen[1] is not chosen[0]


def test_a_launch_says_that_it_waits_for_an_import_of_torch(own: Servers) -> None:
    shown: list[str] = []
    elsewhere = Where({**os.environ, "PYTHONHASHSEED": "1"}, os.sep, ("PYTHONHASHSEED",))
    for where in (None, None, elsewhere, elsewhere):
        own.usable("forkserver", where, shown.append)
    reasons = ("first launch", "first launch with these environment variables")
    assert shown == [f"importing torch ({reason}) …" for reason in reasons]
    own.stop()
    own.usable("spawn", None, shown.append)  # its ranks import torch themselves
    assert len(shown) == 2


def test_concurrent_environments_keep_their_own_servers(
    own: Servers, preload: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = range(fork_servers.MAX_ENV_SERVERS + 2)
    started: list[ForkServer] = []

    class Counted(ForkServer):
        def __init__(self, preload: Sequence[str], where: Where | None = None, ahead: Sequence[str] = ()) -> None:
            assert len(started) < len(environments), "a server that a launch waits for was given up"
            super().__init__(preload, where, ahead)
            started.append(self)

    def launch(number: int) -> str:
        where = Where({**os.environ, "PYTHONHASHSEED": str(number)}, os.sep, ("PYTHONHASHSEED",))
        method = own.usable("forkserver", where)
        own.reaper(method, where).channel.close()
        return method

    monkeypatch.setattr(fork_servers, "ForkServer", Counted)
    preload(
        "import os, time\n"
        f"open(os.path.join({str(tmp_path)!r}, 'begun' + os.environ['PYTHONHASHSEED']), 'w').close()\n"
        f"while not os.path.exists({str(tmp_path / 'go_on')!r}): time.sleep(0.02)\n"
    )
    with ThreadPoolExecutor(len(environments)) as threads:
        launches = [threads.submit(launch, number) for number in environments]
        try:
            eventually(lambda: len(list(tmp_path.glob("begun*"))) == len(environments))
        finally:
            (tmp_path / "go_on").touch()
        assert [each.result(LONG) for each in launches] == ["forkserver"] * len(environments)
    own.usable("forkserver", own._servers[-1].where)
    assert len(own._servers) == fork_servers.MAX_ENV_SERVERS


def test_a_retired_server_keeps_its_fd_while_a_thread_waits(
    preload: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[bool] = []

    def retired_meanwhile(channel: Channel, seconds: float) -> bool:
        number = channel.fileno()
        retiring = threading.Thread(target=server.retire)
        retiring.start()
        retiring.join()
        with contextlib.ExitStack() as stack:
            while max(each.fileno() for each in _sockets(stack)) <= number:
                pass  # a later file has any number that is free
            woken.append(readable(number, 2.0))
        return woken[0]

    preload(IN_ITS_IMPORT["hangs"])
    server = ForkServer(("preloaded_for_a_test",))
    monkeypatch.setattr(fork_servers, "readable", retired_meanwhile)
    with pytest.raises(StartError, match="the fork server did not start"):
        server.ready()
    assert woken == [True]
    assert server.channel.fileno() == -1  # the thread that waited has closed it


def _sockets(stack: contextlib.ExitStack) -> list[socket.socket]:
    return [stack.enter_context(each) for each in socket.socketpair()]


def test_a_server_that_is_stopped_ends_once_it_is_given_up(own: Servers) -> None:
    own.warm_up()
    server = present_server(own)
    server.ready()
    server.process.send_signal(signal.SIGSTOP)
    own.retire(server)
    eventually(lambda: not server.alive())


def test_a_failed_server_start_fails_no_cell_and_is_retried(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(preload: tuple[str, ...], where: object = None) -> NoReturn:
        raise StartError("no more processes")

    monkeypatch.setattr("nblaunch.engines.local.servers", own)
    own.reaper("forkserver").channel.close()
    before = present_server(own)
    monkeypatch.setattr(before, "alive", lambda: True)  # as while a launch of it goes on
    monkeypatch.setenv("OMP_DISPLAY_ENV", "false")
    with monkeypatch.context() as context:
        context.setattr(fork_servers, "ForkServer", refuse)
        NotebookFrontend(None).after_cell(None)
        assert own.status()[0] == "fork server: not running; the next launch starts it"
        with pytest.raises(StartError, match="no more processes"):
            own.reaper("forkserver")
    own.reaper("forkserver").channel.close()
    assert before not in own._servers


@pytest.mark.parametrize("way", ["the extension is loaded again", "what is read at import has changed"])
def test_a_fork_server_that_failed_is_tried_again(
    way: str, own: Servers, preload: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    preload("import os\nif 'OMP_DISPLAY_ENV' not in os.environ: os._exit(3)")
    with pytest.warns(UserWarning, match="the fork server did not start"):
        own.usable("forkserver")
    if way == "the extension is loaded again":
        preload("fine = True")
        own.warm_up()
    else:
        monkeypatch.setenv("OMP_DISPLAY_ENV", "false")
    assert own.usable("forkserver") == "forkserver"


def test_variables_that_c_libraries_read_once_select_the_server() -> None:
    env = {"OMP_PROC_BIND": "1", "GLIBC_TUNABLES": "x", "MKL_CBWR": "2", "OMP_NUM_THREADS": "3", "EDITOR": "vi"}
    assert sorted(Where(env, "/").read_at_import) == ["GLIBC_TUNABLES", "MKL_CBWR", "OMP_PROC_BIND"]


# ------------------------------------------------------------------ idle servers
SOON_IDLE = "from nblaunch.machine import timeouts\ntimeouts.SERVER_IDLE_TIMEOUT_S = 0.5\n"


def test_an_idle_server_ends_and_the_next_cell_starts_one(
    own: Servers, preload: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nblaunch.engines.local.servers", own)
    preload(SOON_IDLE)
    before = marked_processes()
    elsewhere = Where({**os.environ, "TORCH_DISTRIBUTED_DEBUG": "INFO"}, os.sep, ["TORCH_DISTRIBUTED_DEBUG"])
    assert own.usable("forkserver") == own.usable("forkserver", elsewhere) == "forkserver"
    eventually(lambda: marked_processes() <= before)
    assert own.status()[0] == "fork server: not running; the next cell starts it"
    NotebookFrontend(None).after_cell(None)
    assert present_server(own).alive()


def test_a_server_stays_while_a_launch_runs_and_below_an_agent(own: Servers, preload: Callable[[str], None]) -> None:
    """Below an agent, no cell would start another one."""
    preload(SOON_IDLE)
    reaper = own.reaper("forkserver")
    server = present_server(own)
    agents = ForkServer(fork_servers._PRELOAD, Where({**os.environ, BELOW_AGENT: str(os.getpid())}, os.sep))
    agents.ready()
    time.sleep(1.0)
    assert server.alive()
    assert agents.alive()
    agents.stop()
    reaper.channel.close()
    eventually(lambda: not server.alive())


def test_a_launch_that_comes_as_a_server_ends_is_still_started(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = channel_pair()
    server, started = forkserver._Server(Channel(there), 0, None), list[int]()
    read, write = os.pipe()

    def is_idle() -> bool:
        if not started:
            here.send(NewReaper(), [read])
        return not started

    monkeypatch.setattr(server, "select_timeout", lambda: 0.0)
    monkeypatch.setattr(server, "is_idle", is_idle)
    monkeypatch.setattr(server, "start_reaper", started.append)
    monkeypatch.setattr(server, "reap", lambda: None)  # the children here are not its own
    monkeypatch.setattr(reaper, "kill_descendants", lambda *args: None)
    server.serve()
    server.children.close()
    assert len(started) == 1
    with pytest.raises(BrokenPipeError):
        here.send(NewReaper())
    for fd in (read, write, *started):
        os.close(fd)
    here.close()
    server.channel.close()
    server.selector.close()


def test_exits_are_reported_before_orphans_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    one = SimpleNamespace(
        ranks={7: 0, 8: 1},
        keeps=True,
        children=SimpleNamespace(ended=lambda: [(7, -9), (9, 0), (8, -9)]),
        send=lambda exited: done.append(exited.rank),
        kill_orphans=lambda: done.append("orphans"),
    )
    monkeypatch.setattr(processes, "finds_orphans", lambda: True)
    reaper._Reaper.report_exits(one)  # type: ignore[arg-type]  # all that it uses
    assert done == [0, 1, "orphans"]
