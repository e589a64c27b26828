"""What every test shares: start methods, a folder for its logs, and the check that nothing is left behind.

The tests run in several pytest-xdist workers at once. A worker has its own mark, temporary folder, cache and fork
server, and the check counts only what this worker has started.

Each rank whose function a test file defines imports this file: it must import nothing that takes long.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import multiprocessing.util
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from nblaunch.engines import fork_servers
from nblaunch.engines.fork_servers import ForkServer, Servers, Where, servers
from nblaunch.machine.processes import descendants, is_resource_tracker
from nblaunch.ranks.forkserver import NAME as SERVER
from nblaunch.transfer.parcel import sent_data_cache
from nblaunch.wire import launch_files

LONG = 300.0
"""Timeout in seconds for what must come true. Only a failing test waits that long, so a slow machine may take it."""
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # jsonschema does without; it takes 2 s
MARK = "NBLAUNCH_TEST_RUN"
"""Environment variable of this worker's own: identifies every process that its tests start, however detached."""
_NAMELESS = re.compile(r"^/.*/#\d+ \(deleted\)$")
"""A temporary file without a name is shown by its number."""
_NUMBER = re.compile(r":\[\d+\]$")
"""Of a socket or pipe; ``anon_inode:[eventpoll]`` has none."""
_SHARING = {"browser", "kernel"}
"""Folders whose files share what takes long to start."""
_START_METHODS: dict[str, Any] = {
    "forkserver": "forkserver",
    "spawn": "spawn",
    "fork": pytest.param("fork", marks=pytest.mark.filterwarnings("ignore:start_method='fork':UserWarning")),
}


def conformance(*methods: str) -> pytest.MarkDecorator:
    """Run a test over these start methods. Other tests run once, over the fork server."""
    return pytest.mark.parametrize("start_method", [_START_METHODS[each] for each in methods], indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while all files are imported, which would take a third of that time, nor later among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest units first and tests/unit last: its short files fill up the workers that finish early."""
    items.sort(key=lambda item: (not _SHARING & {*item.path.parts}, "unit" in item.path.parts))


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


def has_failed(request: pytest.FixtureRequest) -> bool:
    """Return True if the test has failed: what it shares with others may be in any state."""
    return bool(request.node.stash[_FAILED])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show at once what has failed in one of several workers: a long run that is cut off prints no summary."""
    if report.failed and hasattr(report, "node"):
        print(f"\n{time.strftime('%T')} {report.when} of {report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    scheduling = LoadFileScheduling(config, log)
    scheduling._split_scope = _unit_of
    return scheduling


def _unit_of(nodeid: str) -> str:
    """Return what one worker runs: a file, or all that share a browser or a kernel, which take seconds of a core."""
    file = nodeid.partition("::")[0]
    room = file.split("/")[1]
    return room if room in _SHARING and not file.endswith("test_notebooks.py") else file


@pytest.fixture(scope="session", autouse=True)
def _marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    fork_servers._PRELOAD += ("pytest", "nblaunch.launch.session")  # each rank imports a test file, and these
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits SIG_IGN, and so would ranks
    os.environ[MARK] = uuid.uuid4().hex
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("tmp"))  # what appears there is ours
    os.environ["NBLAUNCH_PRELOAD"] = "0"  # importing ahead takes 5 s of a core for each server
    resource_tracker.ensure_running()  # ranks use it, and it stays
    eventually(lambda: resource_tracker._resource_tracker._pid in marked_processes())  # type: ignore[attr-defined]
    multiprocessing.util.get_temp_dir()  # forked workers use it too; a folder of their own is left if they are killed
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))  # but torch's cache, which stays
    yield
    servers.stop()


@pytest.fixture(autouse=True)
def _own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def port_of_the_document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """MASTER_PORT 12355, which the first document sets: another worker may not run it at the same time."""
    with (tmp_path_factory.getbasetemp().parent / "port-12355.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def start_method(request: pytest.FixtureRequest) -> str:
    """The fork server; `conformance` names others."""
    return str(getattr(request, "param", "forkserver"))


@pytest.fixture
def _warm() -> None:
    """Start no fork server in this process; the folders whose tests launch here override this."""


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest, _marked: None, _own_logs: None, _warm: None) -> Iterator[None]:
    """Assert that a test leaves no process, descriptor, shared memory or temporary file, unless it fails anyway."""
    before = None if _is_unit(request) else _Belongings.now()
    yield
    sent_data_cache.free()  # it is no leak, and what a test sends must not depend on those before it
    if before is not None and not has_failed(request):
        before.expect_no_more()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_by_units(request: pytest.FixtureRequest, _marked: None) -> Iterator[None]:
    """Assert the same of a whole file of tests/unit: looking takes longer than most of its tests."""
    with leaving_nothing() if _is_unit(request) else contextlib.nullcontext():
        yield


def _is_unit(request: pytest.FixtureRequest) -> bool:
    return "unit" in request.path.parts


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    before = _Belongings.now()
    yield
    before.expect_no_more()


class _Belongings:
    """What this process and its descendants hold at one moment."""

    def __init__(self, processes: set[int], descriptors: dict[str, int], files: set[str]) -> None:
        self.processes, self.descriptors, self.files = processes, descriptors, files

    @classmethod
    def now(cls) -> _Belongings:
        processes = {pid for pid in marked_processes() if not _serves_another(pid)}
        return cls(processes, _descriptors(), files())

    def expect_no_more(self) -> None:
        eventually(lambda: not self.more_than_then(), LONG, self.more_than_then)

    def more_than_then(self) -> str:
        """What there is now and was not then; empty if nothing."""
        more = self._more()
        if more and not more.startswith("process"):
            gc.collect()  # what only waits for the collector is no leak; it takes long, so not while processes end
            more = self._more()
        return more

    def _more(self) -> str:
        now = self.now()
        more = [f"process {pid}: {command_of(pid)}" for pid in now.processes - self.processes - _server_pids()]
        more += [f"file {name}" for name in sorted(left_files(self.files))]
        grown = {kind: count for kind, count in now.descriptors.items() if count > self.descriptors.get(kind, 0)}
        more += [f"descriptors {kind}: {self.descriptors.get(kind, 0)} -> {count}" for kind, count in grown.items()]
        return "; ".join(more)


def eventually(
    condition: Callable[[], object], limit: float = LONG, otherwise: Callable[[], object] = lambda: ""
) -> None:
    """Assert that a condition outside this process's reach comes true within `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, otherwise() or "the condition did not come true"
        time.sleep(0.02)


def settled_server() -> ForkServer:
    """The fork server, once none is being built that would take its place."""
    servers.warm_up()
    eventually(lambda: servers._builder is None, otherwise=servers.status)
    return present_server()


def present_server(of: Servers = servers) -> ForkServer:
    """The server that a launch here would use."""
    server = of._best(Where.here())
    assert server is not None
    return server


def marked_processes() -> set[int]:
    """Every living process that this worker has started, by its environment."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if mark not in Path(f"/proc/{name}/environ").read_bytes():
                    continue
                state = state_of(int(name))
            except OSError:
                continue  # it has ended meanwhile
            if state != "Z":
                found.add(int(name))
    return found


def state_of(pid: int) -> str:
    """Return the state letter of a process: ``T`` if stopped, ``Z`` if it has exited.

    Raises:
        OSError: There is no such process.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def parent_of(pid: int) -> int:
    """Return a process's parent; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _serves_another(pid: int) -> bool:
    """Return True for a resource tracker or fork server of a test's kernel that lives: both may come at any time."""
    if is_resource_tracker(pid):
        return parent_of(pid) not in (0, 1, os.getpid())
    try:
        if Path(f"/proc/{pid}/comm").read_text().rstrip() != SERVER:
            return False  # another process's third argument is something else: a worker's is a number
        kernel = json.loads(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[3])[1]
    except (OSError, IndexError, ValueError):
        return False
    return kernel != os.getpid() and Path(f"/proc/{kernel}").exists()


def command_of(pid: int, most: int = 200) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:most]
    except OSError:
        return "gone"


def _server_pids() -> set[int]:
    """The fork servers, which stay for the next launch, and those that are being built."""
    return {server.process.pid for server in servers.all()}


def _descriptors() -> dict[str, int]:
    """Open descriptors of this process by kind, without those of the fork servers."""
    kinds: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if is_log_lock(target):
            continue
        kind = _NAMELESS.sub("a nameless file", _NUMBER.sub("", target))
        kinds[kind] = kinds.get(kind, 0) + 1
    for server in servers.all():
        kinds["socket"] = kinds.get("socket", 0) - (server.channel.fileno() >= 0)
        kinds["a nameless file"] = kinds.get("a nameless file", 0) - (not server._errors.closed)
    return kinds


def is_log_lock(target: str) -> bool:
    """Return True if this is the lock of a log directory: a result or an error holds it, perhaps one that pytest keeps.

    Args:
        target: What a link in ``/proc/self/fd`` points to.
    """
    return Path(target.removesuffix(" (deleted)")).name == launch_files.LOCK


def files() -> set[str]:
    """Temporary files of this worker, and all shared memory."""
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {str(path) for place in places if place.is_dir() for path in place.iterdir()}


def left_files(before: set[str]) -> set[str]:
    """Files that `before` does not have, without the shared memory that other workers use."""
    new = files() - before
    mapped = _mapped_elsewhere() if new else set()
    return {name for name in new if _inode(name) not in mapped}


def _inode(name: str) -> int:
    try:
        return os.stat(name).st_ino
    except OSError:
        return 0  # gone meanwhile


def _mapped_elsewhere() -> set[int]:
    """Inodes of shared memory that processes of other workers have mapped: a semaphore is mapped by another name."""
    ours = {os.getpid(), *descendants(os.getpid()), *marked_processes()}
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in ours:
            with contextlib.suppress(OSError):  # exited meanwhile, or another user's
                maps = Path(f"/proc/{name}/maps").read_text()
                found |= {int(line.split()[4]) for line in maps.splitlines() if "/dev/shm/" in line}
    return found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What runs in this process takes one thread, as a rank does: threads that wait make tiny steps slow."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
