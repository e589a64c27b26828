"""Packages that are imported before ranks fork, and packages that are left out.

Most tests start no rank, which would import torch: they look which server a launch gets, and what that has imported.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nblaunch import LaunchResult, notebook_launcher
from nblaunch.engines import fork_servers
from nblaunch.engines.fork_servers import ForkServer, Servers, Where, servers
from nblaunch.errors import ArgumentError
from nblaunch.machine.packages import KNOWN_SAFE
from tests.conftest import LONG, eventually

RECORDS = "import os\nWHO = os.getpid()\n"
"""A package that records the importing process."""
PACKAGES = dict.fromkeys(("recorder", "another", "hidden", "upgraded"), RECORDS) | {
    "strict": "import warnings\nwarnings.filterwarnings('error', message='not here')\n",
    "writes": "import sys\nOUT = sys.stdout\n",
    "known/__init__": RECORDS,
    "known/part": RECORDS,
    "half/__init__": RECORDS,
    "half/broken": "raise ValueError('no licence')\n",
}
BAD = {
    "starts_a_thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
        "preloading left 2 threads running",
    ),
    "ends_the_process": ("os._exit(3)\n", "importing it terminates the process"),
    "hangs": ("import time\ntime.sleep(600)\n", "importing it takes more than 5 s"),
    "raises": ("raise ValueError('no licence')\n", "importing it raises ValueError: no licence"),
    "touches_cuda": (
        "import sys, types\nsys.modules['torch.cuda'] = types.SimpleNamespace(is_initialized=lambda: True)\n",
        "preloading initialized CUDA",
    ),
    "needs_link": ("import edited_by_link\n", "it imports edited_by_link, which may be edited between launches"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which every package of these tests is installed."""
    site = tmp_path_factory.mktemp("lib") / "site-packages"
    for name, text in (PACKAGES | {name: f"import os\n{text}{RECORDS}" for name, (text, _) in BAD.items()}).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / f"{name}.py").write_text(text)
    (site.parent / "edited.py").write_text("")
    (site / "edited_by_link.py").symlink_to(site.parent / "edited.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield site


@pytest.fixture
def _warm() -> None:
    """Start no fork server: each test has its own, and a package that is installed would end this one."""


@pytest.fixture
def own(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """Servers of the test's own, which import little and are built at once."""
    monkeypatch.setattr(fork_servers, "_PRELOAD", ())
    monkeypatch.setattr(fork_servers, "BUILD_QUIET_S", 0.02)
    made = Servers()
    yield made
    made.stop()
    eventually(lambda: made._builder is None)


def served(own: Servers, **env: str) -> ForkServer:
    """Start what a launch with this ``env=`` starts, without ranks; return the server that does, when all is built."""
    where = Where({**os.environ, **env}, os.getcwd(), tuple(env))
    own.reaper("forkserver", where).channel.close()
    server = own._servers[-1]
    own.build_soon()
    eventually(lambda: own._builder is None, LONG, own.status)
    return server


def had(own: Servers, *names: str, **env: str) -> ForkServer:
    """Have these modules ready for the next launch there, by the server that is returned."""
    own.preload(names)
    for _ in range(2):  # an environment that is new counts from the second launch on
        served(own, **env)
    (server,) = [each for each in own._servers if not each.is_plain]
    assert set(names) <= set(server.ahead)
    return server


def test_packages_named_later_are_added(own: Servers) -> None:
    first = had(own, "recorder")
    assert served(own) is first
    second = had(own, "another")
    assert second is not first
    assert served(own) is second
    assert {"recorder", "another"} <= set(second.ahead)
    eventually(lambda: not first.alive())
    assert any(line.startswith("with another, recorder imported: pid ") for line in own.status())


def test_the_notebooks_modules_of_a_known_package_are_preloaded(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers, "KNOWN_SAFE", {"known"})
    importlib.import_module("known.part")
    try:
        assert "known.part" not in had(own, "recorder").ahead  # NBLAUNCH_PRELOAD=0, which the tests have
        monkeypatch.delenv("NBLAUNCH_PRELOAD")
        monkeypatch.setattr(fork_servers, "_SOON", ())
        served(own)
        assert "known.part" in served(own).ahead
    finally:
        for name in ("known", "known.part"):
            sys.modules.pop(name)


def test_only_installed_packages_are_imported_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(RECORDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for named, why in [
        ("mine", "'mine': it is not an installed package: its files may be edited"),
        (["no_such_package"], "'no_such_package': no such module is installed"),
        (["a b"], "'a b': must be the name of a module"),
        ("torchmetrics", "'torchmetrics': it reads LOCAL_RANK when imported"),
    ]:
        with pytest.raises(ArgumentError, match=f"^preload={why}"):
            notebook_launcher(abs, (1,), 1, view="none", preload=named)


def test_a_module_of_the_notebooks_own_hides_an_installed_one(
    own: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = had(own, "hidden")
    assert served(own) is server
    (tmp_path / "hidden.py").write_text(RECORDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert served(own).is_plain


def test_an_environment_that_a_package_has_not_seen_is_seen(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    first = had(own, "recorder")
    for seed in range(3):  # a sweep: the server uses each package once
        assert served(own, A_SETTING=f"{seed}").is_plain
    assert served(own) is first
    monkeypatch.setenv("A_SETTING", "2")
    second = had(own)
    assert second is not first
    assert second.where.env["A_SETTING"] == "2"
    assert served(own) is second
    assert had(own, COLUMNS="1").where.env["COLUMNS"] == "1"


def test_a_package_finds_the_settings_in_the_notebooks_folder(
    own: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert had(own, "recorder").where.cwd == str(tmp_path / name)


def test_a_change_of_what_is_installed_begins_a_generation(own: Servers, site: Path) -> None:
    before = had(own, "upgraded")
    own.refresh()
    assert served(own) is before
    (site / "upgraded-2.dist-info").mkdir()
    assert served(own) is not before
    eventually(lambda: not before.alive())


def test_packages_that_ranks_must_not_share_are_left_out(own: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers, "PRELOAD_TIMEOUT_S", 5.0)
    own.preload([*BAD, "half.broken"])
    assert not {*BAD, "half", "half.broken"} & set(had(own, "recorder").ahead)
    said = [line.removeprefix("not preloaded: ") for line in own.status()]
    half = "importing half.broken raises ValueError: no licence"
    for name, reason in [*((name, reason) for name, (_, reason) in BAD.items()), ("half", half)]:
        assert any(line.startswith(f"{name} ({reason}") for line in said)


def test_a_package_that_failed_is_tried_again_only_when_the_user_asks(own: Servers, site: Path, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    (site / "fails.py").write_text(f"open({str(tries)!r}, 'a').write('.')\nraise ValueError('no licence')\n")
    for _ in range(3):
        own.preload(["fails"])
        served(own)
        assert tries.read_text() == "."
    own.preload(["fails"], Where.here())
    served(own)
    assert tries.read_text() == ".."


def test_a_server_with_packages_that_is_killed_is_replaced(own: Servers) -> None:
    killed = had(own, "recorder")
    killed.process.kill()
    killed.process.wait()
    served(own)
    assert "recorder" in served(own).ahead


# ------------------------------------------------------------------ in ranks
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


def launched(function: Callable[[], object]) -> LaunchResult:
    result = notebook_launcher(function, (), 2, start_method="forkserver", view="none", preload=[*_OURS, *_THEIRS])
    assert isinstance(result, LaunchResult)
    eventually(lambda: servers._builder is None, LONG, servers.status)
    return result


_OURS = ("recorder", "strict", "writes")
_THEIRS = tuple(USES[package][0] for package in KNOWN_SAFE)


def test_named_and_known_packages_are_there_in_the_next_launch(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they change in their process: filters of warnings; and a stream that one finds is the rank's log."""
    monkeypatch.setattr(fork_servers, "BUILD_QUIET_S", 0.02)
    used = {USES[package][0]: USES[package][1] for package in KNOWN_SAFE}

    def has_none() -> bool:
        return not {"recorder", *used} & sys.modules.keys()

    def run() -> tuple[bool, int, str, dict[str, str]]:
        import warnings

        import recorder  # type: ignore[import-not-found]
        import torch
        import writes  # type: ignore[import-not-found]

        were_there = used.keys() <= sys.modules.keys()
        writes.OUT.write("said by the package")  # and no end of a line
        try:
            warnings.warn("not here", stacklevel=1)
            said = "no error"
        except UserWarning as warning:
            said = str(warning)
        modules = {name: importlib.import_module(name) for name in used}
        found = {name: eval(used[name], {"module": module, "torch": torch}) for name, module in modules.items()}
        return were_there, recorder.WHO, said, found

    servers.stop()
    assert list(launched(has_none)) == [True, True]
    assert not KNOWN_SAFE & servers._left_out.keys()
    result = launched(run)
    (server,) = [each for each in servers._servers if not each.is_plain]
    expected = {USES[package][0]: USES[package][2] for package in KNOWN_SAFE}
    assert list(result) == [(True, server.process.pid, "not here", expected)] * 2
    assert [log.out.read_text() for log in result.logs] == ["said by the package"] * 2
    servers.stop()


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
