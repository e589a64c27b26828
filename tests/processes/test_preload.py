"""Packages that are imported before ranks fork, and packages that are left out."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch import LaunchResult, notebook_launcher
from nblaunch.engines import fork_servers
from nblaunch.engines.fork_servers import ForkServer, Servers, servers
from nblaunch.errors import ArgumentError
from nblaunch.launch import api
from nblaunch.machine.packages import KNOWN_SAFE
from tests.conftest import LONG, eventually, present_server

RECORDS = "import os\nWHO, SETTING = os.getpid(), os.environ.get('A_SETTING')\n"
"""A package that records the importing process and a variable of its environment."""
PACKAGES = dict.fromkeys(("recorder", "another", "hidden", "upgraded"), RECORDS) | {
    "configured": "import os\nWHO, HERE = os.getpid(), os.path.exists('settings')\n"
    "SETTING = open('settings').read() if HERE else ''\n",
    "strict": "import warnings\nwarnings.filterwarnings('error', message='not here')\n",
    "writes": "import sys\nOUT = sys.stdout\n",
    "known/__init__": RECORDS,
    "known/part": RECORDS,
    "known/other": RECORDS,
}
IN_BUILDER = "if not os.environ.get('NBLAUNCH_RANK'): "
BAD = {
    "starts_a_thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
        "the preload left 2 threads running",
    ),
    "ends_the_process": (f"{IN_BUILDER}os._exit(3)\n", "importing it ends the process"),
    "hangs": (f"import time\n{IN_BUILDER}time.sleep(600)\n", "importing it takes more than 2 s"),
    "raises": (f"{IN_BUILDER}raise ValueError('no licence')\n", "importing it raises ValueError: no licence"),
    "exits": (f"import sys\n{IN_BUILDER}sys.exit(2)\n", "importing it raises SystemExit: 2"),
    "touches_cuda": (
        f"import torch\n{IN_BUILDER}torch.cuda.is_initialized = lambda: True\n",
        "the preload initialised CUDA",
    ),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which every package of these tests is installed."""
    site = tmp_path_factory.mktemp("lib") / "site-packages"
    for name, text in (PACKAGES | {name: f"import os\n{text}{RECORDS}" for name, (text, _) in BAD.items()}).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield site


@pytest.fixture(scope="module")
def own(site: Path) -> Iterator[Servers]:
    """The servers of all tests, which here are built at once and have no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_servers, "_SOON", ())
        patch.setattr(fork_servers, "BUILD_QUIET_S", 0.02)
        servers.stop()  # what other files have had imported soon counts as packages now
        yield servers
        servers.stop()
        eventually(lambda: servers._builder is None)


def use(name: str) -> tuple[int, int, Any]:
    """Import a module; who had, who did, and what it saw."""
    module = importlib.import_module(name)
    return os.getpid(), module.WHO, module.SETTING


def launched(name: str, **options: Any) -> list[tuple[int, int, Any]]:
    """Launch one rank: what is said of a server's imports holds for each of its children."""
    result = notebook_launcher(use, (name,), 1, start_method="forkserver", view="none", **options)
    assert isinstance(result, LaunchResult)
    return list(result)


def imported_by_ranks(found: list[tuple[int, int, Any]]) -> bool:
    return all(rank == who for rank, who, _ in found)


def settle(own: Servers) -> None:
    """Wait until everything that is wanted is built."""
    own.build_soon()
    eventually(lambda: own._builder is None, LONG, own.status)


def had(own: Servers, *names: str) -> ForkServer:
    """Have these modules ready for the next launch; an environment that is new counts from the second launch on."""
    for _ in range(2):
        launched(names[0], preload=names)
    settle(own)
    return stocked(own)


def stocked(own: Servers) -> ForkServer:
    """The server that has packages."""
    (server,) = [each for each in own._servers if not each.is_plain]
    return server


def test_a_module_that_the_user_names_is_there_for_the_next_launch(own: Servers) -> None:
    assert imported_by_ranks(launched("recorder", preload="recorder"))
    settle(own)
    assert {who for _, who, _ in launched("recorder")} == {stocked(own).process.pid}
    assert re.search(r"with .*\brecorder\b.* imported: pid \d+, 1 launch,", "\n".join(own.status()))


def test_packages_named_later_are_added(own: Servers) -> None:
    first = had(own, "recorder")
    second = had(own, "another")
    assert second is not first
    eventually(lambda: not first.alive())
    assert not imported_by_ranks(launched("recorder"))
    assert not imported_by_ranks(launched("another"))


def test_the_notebooks_modules_of_a_known_package_are_preloaded(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers, "KNOWN_SAFE", {"known"})
    importlib.import_module("known.part")
    try:
        had(own, "recorder")
        assert imported_by_ranks(launched("known.part"))  # NBLAUNCH_PRELOAD=0, which the tests have
        monkeypatch.delenv("NBLAUNCH_PRELOAD")
        settle(own)
        assert not imported_by_ranks(launched("known.part"))
        assert imported_by_ranks(launched("known.other"))
    finally:
        for name in ("known", "known.part"):
            sys.modules.pop(name)


def test_only_installed_packages_are_imported_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(RECORDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ArgumentError, match=r"^preload='mine': it is no installed package: its files may be edited"):
        launched("mine", preload="mine")
    with pytest.raises(ArgumentError, match=r"^preload='no_such_package': no such module is installed"):
        launched("mine", preload=["no_such_package"])
    with pytest.raises(ArgumentError, match=r"^preload='a b': must be the name of a module"):
        launched("mine", preload=["a b"])
    with pytest.raises(ArgumentError, match=r"^preload='torchmetrics': it reads LOCAL_RANK while it is imported"):
        launched("mine", preload="torchmetrics")


def test_a_module_of_the_notebooks_own_hides_an_installed_one(
    own: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    had(own, "hidden")
    assert not imported_by_ranks(launched("hidden"))
    (tmp_path / "hidden.py").write_text(RECORDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert imported_by_ranks(launched("hidden"))


def test_an_environment_that_a_package_has_not_seen_is_seen(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    first = had(own, "recorder")
    for seed in range(3):  # a sweep: the server uses each package once
        assert [setting for _, _, setting in launched("recorder", env={"A_SETTING": f"{seed}"})] == [f"{seed}"]
        settle(own)
    assert stocked(own) is first
    monkeypatch.setenv("A_SETTING", "2")
    for _ in range(2):
        assert [setting for _, _, setting in launched("recorder")] == ["2"]
    settle(own)
    found = launched("recorder")
    assert not imported_by_ranks(found)
    assert [setting for _, _, setting in found] == ["2"]


def test_an_import_reads_the_environment_of_its_own_launch(own: Servers, site: Path) -> None:
    (site / "reads.py").write_text("import os\nWHO = 0\nSETTING = os.environ.get('COLUMNS')\n")
    for value in ("1", "2"):
        assert [seen for _, _, seen in launched("reads", env={"COLUMNS": value}, preload="reads")] == [value]
        settle(own)


def test_a_package_finds_the_settings_in_the_notebooks_folder(
    own: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings").write_text(name)
        monkeypatch.chdir(tmp_path / name)
        for _ in range(3):
            found = launched("configured", preload="configured")
            settle(own)
            assert [setting for _, _, setting in found] == [name]
        assert not imported_by_ranks(found)


def test_a_change_of_what_is_installed_begins_a_generation(own: Servers, site: Path) -> None:
    had(own, "upgraded")
    before = present_server()
    own.refresh()
    assert present_server() is before
    (site / "upgraded.py").write_text(RECORDS.replace("os.environ.get('A_SETTING')", "'version 2'"))
    (site / "upgraded-2.dist-info").mkdir()
    assert [setting for _, _, setting in launched("upgraded")] == ["version 2"]
    assert before not in own._servers
    eventually(lambda: not before.alive())


@pytest.mark.parametrize("name", BAD)
def test_packages_that_ranks_must_not_share_are_left_out(
    name: str, own: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "hangs":
        monkeypatch.setattr(fork_servers, "PRELOAD_TIMEOUT_S", 2.0)
    own.preload([name])
    had(own, "recorder")
    reason = BAD[name][1]
    assert any(line.startswith(f"not imported ahead of launches: {name}, as {reason}") for line in own.status())
    assert not imported_by_ranks(launched("recorder"))
    settle(own)
    own._named.pop(name)
    own._left_out.pop(name)


@pytest.mark.parametrize("way", ["link", "path"])
def test_a_package_that_imports_what_may_be_edited_is_left_out(
    way: str, own: Servers, site: Path, tmp_path: Path
) -> None:
    edited, needs = f"edited_by_{way}", f"needs_{way}"
    (tmp_path / edited).mkdir()
    (tmp_path / edited / "__init__.py").write_text("VALUE = 1\n")
    if way == "link":
        (site / edited).symlink_to(tmp_path / edited)
    (site / f"{needs}.py").write_text(f"import sys\nsys.path.append({str(tmp_path)!r})\nimport {edited}\n" + RECORDS)
    own.preload([needs])
    had(own, "recorder")
    reason = f"it imports {edited}, whose files may be edited between launches"
    assert f"not imported ahead of launches: {needs}, as {reason}" in own.status()
    assert imported_by_ranks(launched(needs))
    own._named.pop(needs)
    own._left_out.pop(needs)


def test_a_package_that_failed_is_tried_again_only_when_the_user_asks(own: Servers, site: Path, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    (site / "fails.py").write_text(f"open({str(tries)!r}, 'a').write('.')\nraise ValueError('no licence')\n")
    launched("recorder")  # an environment that is new counts from the second launch on
    for _ in range(3):
        launched("recorder", preload="fails")
        settle(own)
        assert tries.read_text() == "."
    api.preload(["fails"])
    settle(own)
    assert tries.read_text() == ".."
    own._named.pop("fails")
    own._left_out.pop("fails")


def test_a_server_with_packages_that_is_killed_is_replaced(own: Servers) -> None:
    killed = had(own, "recorder")
    os.kill(killed.process.pid, signal.SIGKILL)
    assert launched("recorder")
    settle(own)
    assert stocked(own) is not killed
    assert not imported_by_ranks(launched("recorder"))


def test_what_a_package_changes_in_its_process_holds_in_ranks(own: Servers) -> None:
    """Filters of warnings; and a stream that it has found writes to the rank's log."""

    def uses() -> str:
        import warnings

        import strict  # type: ignore[import-not-found]
        import writes  # type: ignore[import-not-found]

        writes.OUT.write("said by the package")  # and no end of a line
        try:
            warnings.warn("not here", stacklevel=1)
        except UserWarning as warning:
            return f"{warning} in {strict.__name__}"
        return "no error"

    own.preload(["strict", "writes"])
    had(own, "recorder")
    result = notebook_launcher(uses, (), 1, start_method="forkserver", view="none")
    assert isinstance(result, LaunchResult)
    assert list(result) == ["not here in strict"]
    assert [log.out.read_text() for log in result.logs] == ["said by the package"]


# ------------------------------------------------------------------ the packages that are known
USES = {
    "PIL": ("PIL.Image", "str(module.new('L', (2, 2), 7).getpixel((0, 0)))", "7"),
    "accelerate": ("accelerate", "str(module.Accelerator(cpu=True).num_processes)", "2"),
    "matplotlib": ("matplotlib.pyplot", "str(len(module.figure().axes))", "0"),
    "pandas": ("pandas", "str(module.DataFrame({'a': [1, 2]}).a.sum())", "3"),
    "scipy": ("scipy.stats", "f'{module.norm.cdf(0.0):.1f}'", "0.5"),
    "sklearn": ("sklearn.linear_model", "f'{module.LinearRegression().fit([[0], [1]], [0, 1]).coef_[0]:.1f}'", "1.0"),
    "torchvision": ("torchvision.transforms.v2", "str(module.CenterCrop(2)(torch.ones(1, 4, 4)).sum().item())", "4.0"),
    "transformers": ("transformers.models.bert.configuration_bert", "module.BertConfig().model_type", "bert"),
}
"""For each: a module that is imported ahead, what a rank does with it, and what that gives."""


def test_known_packages_may_be_imported_before_ranks_are_forked(own: Servers) -> None:
    used = {name: USES[package][:2] for package in KNOWN_SAFE for name in USES[package][:1]}

    def run() -> dict[str, tuple[bool, str]]:
        import torch

        were_there = {name for name in used if name in sys.modules}
        return {
            name: (name in were_there, eval(expression, {"module": importlib.import_module(name), "torch": torch}))
            for name, (_, expression) in used.items()
        }

    own.preload(list(used))
    had(own, "recorder")
    assert not KNOWN_SAFE & own._left_out.keys()
    result = notebook_launcher(run, (), 2, start_method="forkserver", view="none")
    assert isinstance(result, LaunchResult)
    assert list(result) == [{USES[package][0]: (True, USES[package][2]) for package in KNOWN_SAFE}] * 2


def test_numpy_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
        "PathFinder.find_spec = staticmethod(lambda name, *rest: None if name == 'numpy' else find(name, *rest))\n"
    )
    script = (
        "import warnings, torch\nwarnings.filterwarnings('error', message='(?!Failed to initialize NumPy)')\n"
        "from nblaunch import notebook_launcher\n"
        "if __name__ == '__main__':\n"
        "    assert list(notebook_launcher(abs, (torch.ones(1),), 2, view='none')) == [1, 1]\n"
        "    try: import numpy\n    except ImportError: print('launched')\n"
    )
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=LONG)
    assert (done.stdout, done.returncode) == ("launched\n", 0), done.stderr
    assert "fork server cannot be used" not in done.stderr
