"""Installed packages that launches import are there before the next one's ranks; what may not be, is left out."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nblaunch import LaunchResult, notebook_launcher
from nblaunch.errors import StartError
from nblaunch.launch import forkserver
from nblaunch.launch.servers import Servers, servers
from nblaunch.ranks import system
from tests.conftest import eventually

LONG = 60.0
TELLS = "import os\nWHO, SETTING = os.getpid(), os.environ.get('A_SETTING')\n"
"""A package that tells who imported it, and what it saw."""

Install = Callable[..., None]


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
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a module of this name and text, or another version of it."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def put(name: str, text: str, version: str = "1") -> None:
        (site / f"{name}.py").write_text(text)
        for old in site.glob(f"{name}-*.dist-info"):
            old.rmdir()
        (site / f"{name}-{version}.dist-info").mkdir()

    return put


def use(name: str) -> tuple[int, int, Any]:
    """Import a module; who had, who did, and what it saw."""
    module = __import__(name)
    return os.getpid(), module.WHO, module.SETTING


def launched(name: str, **options: Any) -> list[tuple[int, int, Any]]:
    result = notebook_launcher(use, (name,), 2, start_method="forkserver", view="none", **options)
    assert isinstance(result, LaunchResult)
    return list(result)


def imported_by_ranks(found: list[tuple[int, int, Any]]) -> bool:
    return all(rank == who for rank, who, _ in found)


def learnt(own: Servers) -> bool:
    """Whether the successor that was wanted is there."""
    return own._teacher is None and own._successor is not None


def test_what_a_launch_has_imported_is_there_for_the_next(own: Servers, install: Install) -> None:
    install("tells", TELLS)
    assert imported_by_ranks(launched("tells"))
    eventually(lambda: learnt(own), LONG)
    found = launched("tells")
    assert {who for _, who, _ in found} == {own._successor.process.pid}  # type: ignore[union-attr]
    assert re.search(r"its successor: pid \d+, which has .*\btells\b.* imported", "\n".join(own.status()))


def test_it_has_what_all_launches_have_imported(own: Servers, install: Install) -> None:
    install("tells", TELLS)
    install("another", TELLS)
    for name in ("tells", "another"):
        launched(name)
        eventually(lambda: learnt(own), LONG)
    assert not imported_by_ranks(launched("tells"))
    assert not imported_by_ranks(launched("another"))


def test_a_module_of_the_notebooks_own_is_never_imported_ahead(
    own: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(TELLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(3):
        assert imported_by_ranks(launched("mine"))
        eventually(lambda: own._teacher is None, LONG)
    (tmp_path / "mine.py").write_text(TELLS.replace("os.environ.get('A_SETTING')", "'edited'"))
    assert [setting for _, _, setting in launched("mine")] == ["edited"] * 2


def test_a_module_of_the_notebooks_own_hides_an_installed_one(
    own: Servers, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("tells", TELLS)
    launched("tells")
    eventually(lambda: learnt(own), LONG)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tells.py").write_text(TELLS)
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    assert imported_by_ranks(launched("tells"))


def test_what_an_installed_one_looks_for_is_found_in_the_notebooks_own(
    own: Servers, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import os\nWHO, SETTING = os.getpid(), ''\ntry: from own_settings import SETTING\nexcept ImportError: pass\n"
    )
    install("looks", text)
    for _ in range(2):
        found = launched("looks")
        eventually(lambda: learnt(own), LONG)
    assert not imported_by_ranks(found)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_settings.py").write_text("SETTING = 'own'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    assert [setting for _, _, setting in launched("looks")] == ["own"] * 2


def test_an_environment_that_it_has_not_seen_is_seen(
    own: Servers, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("tells", TELLS)
    launched("tells")
    eventually(lambda: learnt(own), LONG)
    assert [setting for _, _, setting in launched("tells", env={"A_SETTING": "1"})] == ["1", "1"]
    monkeypatch.setenv("A_SETTING", "2")
    for _ in range(2):
        assert [setting for _, _, setting in launched("tells")] == ["2", "2"]
    eventually(lambda: learnt(own), LONG)
    found = launched("tells")
    assert not imported_by_ranks(found)
    assert [setting for _, _, setting in found] == ["2", "2"]


def test_environments_that_are_each_used_once_make_no_successors(own: Servers, install: Install) -> None:
    install("tells", TELLS)
    launched("tells")
    eventually(lambda: learnt(own), LONG)
    first = own._successor
    for seed in range(3):
        assert [setting for _, _, setting in launched("tells", env={"A_SETTING": f"{seed}"})] == [f"{seed}"] * 2
        eventually(lambda: own._teacher is None, LONG)
    assert own._successor is first
    assert not imported_by_ranks(launched("tells"))


def test_another_version_is_noticed(own: Servers, install: Install) -> None:
    install("tells", TELLS)
    launched("tells")
    eventually(lambda: learnt(own), LONG)
    install("tells", TELLS.replace("os.environ.get('A_SETTING')", "'version 2'"), "2")
    assert [setting for _, _, setting in launched("tells")] == ["version 2"] * 2


def test_a_change_of_what_is_installed_begins_a_generation_in_the_background(own: Servers, install: Install) -> None:
    own.warm_up()
    before = own._warm
    own.refresh()
    assert own._warm is before
    install("new", "")
    own.refresh()
    assert own._warm is not before
    assert before is not None
    eventually(lambda: not before.alive(), LONG)


BAD = {
    "starts a thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
        "the preload left 2 threads running",
    ),
    "keeps a file open": ("FILE = open(__file__)\n", "it keeps files open"),
    "ends the process": (
        "import os\nif not os.environ.get('NBLAUNCH_RANK'): os._exit(3)\n",
        "importing it ends the process",
    ),
    "hangs": (
        "import os, time\nif not os.environ.get('NBLAUNCH_RANK'): time.sleep(600)\n",
        "importing it takes more than 5 s",
    ),
    "reads its rank": ("import os\nRANK = os.environ.get('RANK')\n", "it reads RANK while it is imported"),
    "asks for its peers": ("import os\nALONE = 'MASTER_ADDR' not in os.environ\n", "it reads MASTER_ADDR while"),
    "asks for its threads": (
        "import os\nTHREADS = os.environ.get('OMP_NUM_THREADS')\n",
        "it reads OMP_NUM_THREADS while",
    ),
    "patches another": ("import json\njson.dumps = lambda value: 'patched'\n", "it changes json.dumps while"),
    "makes a generator": ("import random\nDRAW = random.Random()\n", "it makes generators of random numbers"),
    "makes NumPy's generator": ("import numpy\nDRAW = numpy.random.default_rng()\n", "it makes generators of random"),
    "draws a number": ("import random\nNUMBER = random.random()\n", "it changes random's state while it is imported"),
    "seeds torch": ("import torch\ntorch.manual_seed(5)\n", "it changes torch's random state"),
    "changes the environment": ("import os\nos.environ['A_CHANGE'] = '1'\n", "it changes os.environ"),
    "changes the path": ("import sys\nsys.path.append('/a/folder')\n", "it changes sys.path"),
    "changes the folder": ("import os\nos.chdir('/tmp')\n", "it changes the working directory"),
    "switches gradients off": ("import torch\ntorch.set_grad_enabled(False)\n", "it changes torch's settings"),
    "makes numpy strict": ("import numpy\nnumpy.seterr(all='raise')\n", "it changes NumPy's settings"),
    "logs": ("import logging\nlogging.basicConfig(level=logging.DEBUG)\n", "it changes logging's root"),
    "ignores a signal": (
        "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n",
        "it changes how signals are handled",
    ),
    "starts a process": (
        "import subprocess\nCHILD = subprocess.Popen(['sleep', '600'], start_new_session=True)\n",
        "it starts processes",
    ),
    "has something to do at the exit": (
        "import atexit\natexit.register(print, 'over')\n",
        "it arranges something for the exit of the process while",
    ),
    "makes a folder": (
        "import tempfile\nFOLDER = tempfile.TemporaryDirectory()\n",
        "it arranges something for the exit",
    ),
    "prints half a line": ("import sys\nsys.stdout.write('half')\n", "it prints while it is imported"),
    "sets what is the notebook's": (
        "import torch\ntorch.backends.cudnn.benchmark = True\n",
        "it changes torch's settings while",
    ),
    "cannot be looked at": (
        "import os\n"
        "if not os.environb.get(b'NBLAUNCH_RANK'): os.mkdir('gone'), os.chdir('gone'), os.rmdir('../gone')\n",
        "it cannot be told what it does while it is imported: FileNotFoundError",
    ),
    "touches CUDA": (
        "import os, torch\nif not os.environ.get('NBLAUNCH_RANK'): torch.cuda.is_initialized = lambda: True\n",
        "the preload initialised CUDA",
    ),
}


@pytest.mark.parametrize("way", BAD)
def test_what_may_not_be_there_before_a_fork_is_left_out_and_that_is_said(
    way: str, own: Servers, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if way == "hangs":
        monkeypatch.setattr(forkserver, "_IMPORT_LIMIT", 5.0)
    text, reason = BAD[way]
    install("tells", TELLS)
    install("bad", text + TELLS)
    launched("bad")
    launched("tells")
    eventually(lambda: learnt(own) and own._left_out, LONG, own.status)
    assert any(line.startswith(f"not imported ahead of launches: bad, as {reason}") for line in own.status())
    assert not imported_by_ranks(launched("tells"))
    assert imported_by_ranks(launched("bad"))


def test_what_is_left_out_leaves_nothing_behind(own: Servers, install: Install, tmp_path: Path) -> None:
    text = (
        "import os, subprocess, tempfile\n"
        "CHILD = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "FOLDER = tempfile.TemporaryDirectory()\n"
        "if not os.environb.get(b'NBLAUNCH_RANK'):\n"
        f"    open({str(tmp_path / 'left')!r}, 'w').write(f'{{CHILD.pid}} {{FOLDER.name}}')\n"
    )
    install("bad", text + TELLS)
    launched("bad")
    eventually(lambda: own._teacher is None and own._left_out, LONG)
    pid, folder = (tmp_path / "left").read_text().split()
    eventually(lambda: not system.alive(int(pid)), LONG)
    assert not Path(folder).exists()


def test_a_program_that_has_ended_is_no_hindrance(own: Servers, install: Install) -> None:
    install("runs", "import subprocess\nsubprocess.run(['true'], check=True)\n" + TELLS)
    launched("runs")
    eventually(lambda: learnt(own), LONG)
    assert not imported_by_ranks(launched("runs"))


def test_a_successor_that_is_killed_is_replaced(own: Servers, install: Install) -> None:
    install("tells", TELLS)
    launched("tells")
    eventually(lambda: learnt(own), LONG)
    killed = own._successor
    assert killed is not None
    os.kill(killed.process.pid, signal.SIGKILL)
    assert launched("tells")
    eventually(lambda: learnt(own) and own._successor is not killed, LONG)
    assert not imported_by_ranks(launched("tells"))


@pytest.mark.parametrize("way", ["stopped", "killed"])
def test_a_successor_that_hangs_in_an_import_ends_with_its_server(
    way: str, own: Servers, install: Install, tmp_path: Path
) -> None:
    tells = f"if not os.environ.get('NBLAUNCH_RANK'): open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    install("bad", f"import os\n{tells}{BAD['hangs'][0]}{TELLS}")
    launched("bad")
    eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), LONG)
    assert own._warm is not None
    assert not own._left_out
    if way == "stopped":
        own.stop()
    else:
        os.kill(own._warm.process.pid, signal.SIGKILL)
    hanging = int((tmp_path / "pid").read_text())
    eventually(lambda: not system.alive(hanging), LONG)
    eventually(lambda: own._teacher is None, LONG)
    assert not own._left_out  # it is not to blame


def test_where_no_successor_can_be_made_that_is_tried_once_a_launch(
    own: Servers, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(*arguments: object) -> None:
        asked.append(arguments)
        raise StartError("no more processes")

    monkeypatch.setattr("nblaunch.launch.servers.Successor", refuse)
    install("tells", TELLS)
    for count in (1, 2):
        assert imported_by_ranks(launched("tells"))
        eventually(lambda: own._teacher is None, LONG)
        assert len(asked) == count


def test_a_forked_child_of_the_kernel_has_no_servers() -> None:
    mine = {"_warm", "_successor"}
    assert servers._warm is not None
    child = os.fork()
    if child == 0:
        os._exit(sum(vars(servers)[name] is not None for name in mine))
    assert os.waitpid(child, 0)[1] == 0
    assert servers._warm.alive()


def test_an_edited_file_of_an_installed_package_is_seen(own: Servers, install: Install, tmp_path: Path) -> None:
    install("tells", TELLS)
    launched("tells")
    eventually(lambda: learnt(own), LONG)
    (tmp_path / "site-packages" / "tells.py").write_text(TELLS.replace("os.environ.get('A_SETTING')", "'edited'"))
    assert [setting for _, _, setting in launched("tells")] == ["edited"] * 2
    eventually(lambda: learnt(own), LONG)
    found = launched("tells")
    assert not imported_by_ranks(found)
    assert [setting for _, _, setting in found] == ["edited"] * 2


def test_a_file_that_is_edited_while_a_successor_is_made_is_seen(
    own: Servers, install: Install, tmp_path: Path
) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    waits = (
        "import os, time\n"
        f"if not os.environb.get(b'NBLAUNCH_RANK'):\n    open({str(begun)!r}, 'w').close()\n"
        f"    while not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
    )
    install("tells", TELLS)
    install("waits", f"import tells\n{waits}{TELLS}")
    launched("waits")
    eventually(begun.exists, LONG)
    (tmp_path / "site-packages" / "tells.py").write_text(TELLS.replace("os.environ.get('A_SETTING')", "'edited'"))
    go_on.touch()
    eventually(lambda: learnt(own), LONG)
    assert [setting for _, _, setting in launched("tells")] == ["edited"] * 2
    eventually(lambda: learnt(own), LONG)
    assert not imported_by_ranks(found := launched("tells"))
    assert [setting for _, _, setting in found] == ["edited"] * 2


def test_a_library_with_an_openmp_of_its_own_has_the_launchs_threads(
    own: Servers, install: Install, tmp_path: Path
) -> None:
    of_torch = next((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    library = shutil.copy(of_torch, tmp_path / "libgomp-own.so")
    install(
        "omp",
        f"import ctypes\nSETTING = ctypes.CDLL({str(library)!r}).omp_get_max_threads\nimport os\nWHO = os.getpid()\n",
    )

    def threads() -> tuple[bool, int, int]:
        import omp  # type: ignore[import-not-found]

        return os.getpid() == omp.WHO, omp.SETTING(), torch.get_num_threads()

    for result, is_cold in zip(twice(own, threads, threads_per_rank=3), (True, False), strict=True):
        assert list(result) == [(is_cold, 3, 3)] * 2


def twice(own: Servers, function: Callable[[], Any], **options: Any) -> list[LaunchResult]:
    """A launch that imports something, and one in which that is there before."""
    results = []
    for _ in range(2):
        results.append(notebook_launcher(function, (), 2, start_method="forkserver", view="none", **options))
        eventually(lambda: learnt(own), LONG)
    return [result for result in results if isinstance(result, LaunchResult)]


def test_its_warnings_filters_hold_there_too(own: Servers, install: Install) -> None:
    install("strict", "import warnings\nwarnings.filterwarnings('error', message='not here')\n")

    def warns() -> str:
        import warnings

        import strict  # type: ignore[import-not-found]

        try:
            warnings.warn("not here", stacklevel=1)
        except UserWarning as warning:
            return f"{warning} in {strict.__name__}"
        return "no error"

    assert [list(result) for result in twice(own, warns)] == [["not here in strict"] * 2] * 2


def test_what_it_writes_to_the_stream_that_it_found_is_in_the_log(own: Servers, install: Install) -> None:
    install("writes", "import sys\nOUT = sys.stdout\n")

    def says() -> None:
        import writes  # type: ignore[import-not-found]

        writes.OUT.write("said by the package")  # and no end of a line

    for result in twice(own, says):
        assert [log.out.read_text() for log in result.logs] == ["said by the package"] * 2


def test_it_finds_the_settings_in_the_notebooks_folder(
    own: Servers, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("configured", "try:\n    SETTING = open('settings').read()\nexcept OSError:\n    SETTING = 'none'\n")

    def setting() -> str:
        import configured  # type: ignore[import-not-found]

        return str(configured.SETTING)

    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings").write_text(name)
        monkeypatch.chdir(tmp_path / name)
        assert [list(result) for result in twice(own, setting)] == [[name] * 2] * 2


def test_nothing_is_imported_ahead_where_that_is_switched_off(
    own: Servers, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBLAUNCH_LEARN_IMPORTS", "0")
    install("tells", TELLS)
    for _ in range(2):
        assert imported_by_ranks(launched("tells"))
    assert own._teacher is None is own._successor


def touches(path: Path) -> Callable[[], str]:
    """A function that puts something among the modules, which cannot be looked at: it leaves a file, and fails."""

    def function() -> str:
        import sys

        class Strange:
            def __getattr__(self, name: str) -> object:
                path.touch()
                raise KeyError(name)

        sys.modules["strange"] = Strange()  # type: ignore[assignment]
        return "a result"

    return function


def test_what_a_function_puts_among_the_modules_does_not_cost_its_result(own: Servers, tmp_path: Path) -> None:
    result = notebook_launcher(touches(tmp_path / "it"), (), 2, start_method="forkserver", view="none")
    assert (tmp_path / "it").exists()
    assert isinstance(result, LaunchResult)
    assert list(result) == ["a result"] * 2


def test_nobody_looks_at_modules_where_learning_is_switched_off(
    own: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBLAUNCH_LEARN_IMPORTS", "0")
    assert notebook_launcher(touches(tmp_path / "it"), (), 2, start_method="forkserver", view="none")
    assert not (tmp_path / "it").exists()
