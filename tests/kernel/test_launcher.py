"""`notebook_launcher` in the cells of a real kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.kernel.harness import Kernel, running_kernel


@pytest.fixture(scope="module")
def bare_kernel(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel of the file's own, in which nothing has been imported before its first test."""
    with running_kernel(CUDA_VISIBLE_DEVICES="", NBLAUNCH_STATE_DIR=str(tmp_path_factory.mktemp("bare"))) as kernel:
        yield kernel


# ------------------------------------------------------------------ loading
SERVER = "__import__('nblaunch.engines.fork_servers', fromlist=['servers']).servers.status()[0]"
WIDGET = "nblaunch.notebook.widget"
IMPORTING = "'nblaunch-imports' in [each.name for each in __import__('threading').enumerate()]"
"""A module is in sys.modules from the beginning of its import on."""
LOAD = """
import sys
get_ipython().run_line_magic("load_ext", "nblaunch")
"""


def test_the_extension_and_the_launcher_prepare_the_first_launch(bare_kernel: Kernel) -> None:
    warm_up = "os.environ['NBLAUNCH_WARM_UP']"
    for cell, prepares in (
        ("import os, sys\nfrom nblaunch import export, report", False),
        (f"{warm_up} = '0'\n{LOAD}from nblaunch import session", False),
        (f"del {warm_up}\nfrom nblaunch import notebook_launcher", True),
        (LOAD, True),
    ):
        bare_kernel.run(cell).check()
        if prepares:
            eventually(lambda: "ready after" in bare_kernel.ask(SERVER) or "importing" in bare_kernel.ask(SERVER))
            eventually(lambda: bare_kernel.ask(f"'{WIDGET}' in sys.modules and not {IMPORTING}"))
            assert not bare_kernel.ask("'torch' in sys.modules")
            bare_kernel.run(f"%unload_ext nblaunch\nsys.modules.pop({WIDGET!r})").check()
        else:
            bare_kernel.run("1").check()
            assert bare_kernel.ask(SERVER) == "fork server: not running; the next launch starts it"
            assert not bare_kernel.ask(f"'{WIDGET}' in sys.modules")


def test_load_ext_warns_if_no_fork_server_can_start(bare_kernel: Kernel) -> None:
    bare_kernel.run("import os\nos.environ['TOO_LONG'] = 'x' * 200_000").check()

    cell = bare_kernel.run("%load_ext nblaunch").check()
    assert "UserWarning: the fork server could not be started" in cell.stderr
    launched = bare_kernel.run("%%distributed -n 2\nrank")
    assert launched.error.startswith("StartError: the fork server could not be started")
    assert "del os.environ['TOO_LONG']" in launched.error
    bare_kernel.run("del os.environ['TOO_LONG']\n%unload_ext nblaunch").check()


def test_a_launch_works_without_load_ext_and_is_shown_in_the_cell(bare_kernel: Kernel) -> None:
    cell = bare_kernel.run(
        "import nblaunch; vars(nblaunch).pop('notebook_launcher', None)\nfrom nblaunch import notebook_launcher\n"
        "def hello(rank):\n    print('hello')\n    return rank\n"
        "list(notebook_launcher(hello, num_processes=2))"
    ).check()

    assert cell.value == "[0, 1]"
    assert "[rank 1] hello" in cell.stdout


def test_unloading_takes_everything_out_and_loading_brings_it_back(bare_kernel: Kernel) -> None:
    bare_kernel.run("%load_ext nblaunch").check()
    server = int(re.findall(r"pid (\d+)", bare_kernel.run("%distributed status").stdout)[0])

    bare_kernel.run("%unload_ext nblaunch").check()
    assert "not found" in bare_kernel.run("%distributed status").stderr
    assert not Path(f"/proc/{server}").exists()

    bare_kernel.run("%load_ext nblaunch").check()
    assert bare_kernel.run("%%distributed -n 2\nrank").check().value == "0"
    bare_kernel.run("%unload_ext nblaunch").check()


def test_a_rank_imports_nothing_of_the_notebook(kernel: Kernel) -> None:
    """The fork server imports IPython's core once, for the shell of ranks."""
    kernel.run("def loaded():\n    import sys\n    return sorted(sys.modules)\n").check()
    modules = kernel.ask("notebook_launcher(loaded, num_processes=1, view='none')[0]")
    roots = {module.partition(".")[0] for module in modules}
    assert "torch" in roots
    assert not roots & {"ipykernel", "zmq", "ipywidgets", "jupyter_client", "matplotlib", "sqlite3"}
    assert not [module for module in modules if module.startswith(("nblaunch.launch", "nblaunch.notebook"))]


# ------------------------------------------------------------------ what can be launched
DEFINITIONS = """
from functools import partial
offset = 100

class Model:
    def __init__(self, factor): self.factor = factor
    def __call__(self, rank): return self.factor * rank + offset
    def method(self, rank): return ('method', self(rank))
    @staticmethod
    def static(rank): return ('static', rank)

def closure(step):
    def inner(rank): return Model(step)(rank)
    return inner

def recursive(rank, depth=3): return rank if depth == 0 else recursive(rank, depth - 1)
def positional(factor, rank): return Model(factor)(rank)
"""


@pytest.mark.parametrize(
    ("call", "values"),
    [
        ("closure(2)", [100, 102]),
        ("Model(3)", [100, 103]),
        ("Model(3).method", [("method", 100), ("method", 103)]),
        ("Model.static", [("static", 0), ("static", 1)]),
        ("lambda rank: rank + offset", [100, 101]),
        ("partial(positional, 5)", [100, 105]),
        ("recursive", [0, 1]),
        ("positional, (7,)", [100, 107]),
        ("positional, kwargs={'factor': 8}", [100, 108]),
    ],
)
def test_definitions_of_cells_can_be_launched(kernel: Kernel, call: str, values: list[object]) -> None:
    kernel.run(DEFINITIONS).check()

    assert kernel.ask(f"list(notebook_launcher({call}, num_processes=2, view='none'))") == values


# ------------------------------------------------------------------ accelerate's keywords
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("lambda: 1, num_processes='two'", "num_processes='two': must be an integer, at least 1"),
        ("lambda a: a", "missing a required argument: 'a'"),
    ],
)
def test_wrong_arguments_are_named_before_anything_starts(kernel: Kernel, call: str, message: str) -> None:
    cell = kernel.run(f"notebook_launcher({call})")

    assert cell.error.startswith("ArgumentError: ")
    assert message in cell.error
    assert cell.traceback.count("nblaunch/") <= 1  # IPython shows the frame that raises, hidden or not
    assert cell.stdout == ""


def test_a_lock_is_named_before_anything_starts(kernel: Kernel) -> None:
    cell = kernel.run(
        "import threading\nlock = threading.Lock()\ndef locked():\n    with lock: print('ran')\n"
        "notebook_launcher(locked, num_processes=2)"
    )

    assert cell.error.startswith("PayloadError: `locked` uses `lock`, a thread lock, which cannot be sent")
    assert cell.stdout == ""


# ------------------------------------------------------------------ errors
def test_an_error_is_shown_with_the_cells_own_line_and_label(kernel: Kernel) -> None:
    defined = kernel.run("def fail(rank):\n    if rank == 1:\n        raise ValueError('no luck')  # here").check()
    label = f"Cell In[{defined.reply['execution_count']}], line 3"

    cell = kernel.run("notebook_launcher(fail, num_processes=2)")

    assert cell.error == "ValueError: no luck"
    assert cell.traceback.startswith("ValueError: no luck\n")
    assert label in cell.traceback
    assert "raise ValueError('no luck')  # here" in cell.traceback
    assert "On rank 1 of fail:" in cell.traceback
    assert "nblaunch/" not in cell.traceback.partition("Logs: ")[0]


def test_a_cell_can_catch_a_ranks_exception_as_itself(kernel: Kernel) -> None:
    cell = kernel.run(
        "class Trouble(ValueError): pass\ndef fail(rank):\n    if rank == 1: raise Trouble('no', 'luck')\n"
        "try:\n    notebook_launcher(fail, num_processes=2)\n"
        "except Trouble as error:\n    print('caught', error.args, error.rank)"
    ).check()

    assert "caught ('no', 'luck') 1" in cell.stdout


# ------------------------------------------------------------------ where ranks start from
def test_a_filter_of_a_warning_that_a_cell_defines_holds_in_the_ranks(kernel: Kernel) -> None:
    cell = kernel.run(
        "import warnings\nclass Odd(UserWarning): pass\n"
        "def f():\n    try:\n        warnings.warn('odd', Odd)\n    except Odd:\n        return 'raised'\n"
        "with warnings.catch_warnings():\n    warnings.simplefilter('error', Odd)\n"
        "    outcome = list(notebook_launcher(f, num_processes=2, view='none'))\noutcome"
    ).check()

    assert cell.value == "['raised', 'raised']"


# ------------------------------------------------------------------ the end of the kernel
def test_a_kernel_that_ends_takes_its_background_launch_along(bare_kernel: Kernel, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    bare_kernel.run(
        f"import os, time, pathlib\nfrom nblaunch import notebook_launcher\npids = pathlib.Path({str(pids)!r})\n"
        "def wait(rank):\n    (pids / str(os.getpid())).touch()\n    time.sleep(600)\n"
        "job = notebook_launcher(wait, num_processes=2, block=False)"
    ).check()
    eventually(lambda: len(list(pids.iterdir())) == 2)

    # it ignores SIGTERM, so ipykernel 7 would signal it for 29 s first
    end = "os.kill(tracker, 9)\nos.waitpid(tracker, 0)"
    bare_kernel.run(
        f"import multiprocessing.resource_tracker as own\ntracker = own._resource_tracker._pid\n{end}"
    ).check()

    bare_kernel.client.shutdown()

    eventually(lambda: not any(Path(f"/proc/{pid.name}").exists() for pid in pids.iterdir()))
    bare_kernel.client.stop_channels()  # its heartbeat would open sockets to the dead kernel, again and again
