"""The pure parts of `nblaunch.export`: statements of cells, literals, the script's text, the job file."""

from __future__ import annotations

import linecache
import math
import os
import pathlib
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nblaunch.engines import current
from nblaunch.errors import ArgumentError, PayloadError
from nblaunch.launch import export
from nblaunch.launch.cell_statements import CellSource, Statement, statements_of
from nblaunch.launch.export import ExportedNames, literal_of
from nblaunch.launch.options import Options
from nblaunch.transfer.parameters import PROVIDED


def statements(*cells: str) -> list[Statement]:
    return statements_of([CellSource(f"Cell In[{i}]", cell, cell) for i, cell in enumerate(cells, 1)])


class Notebook:
    """Cells that have run in a namespace that calls itself ``__main__``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("__main__")
        monkeypatch.setitem(__import__("sys").modules, "__main__", module)
        self.names: dict[str, Any] = vars(module)
        self.cells: list[CellSource] = []

    def run(self, cell: str) -> None:
        file = f"<cell {len(self.cells)} of a test>"
        linecache.cache[file] = len(cell), None, cell.splitlines(keepends=True), file
        exec(compile(cell, file, "exec"), self.names)
        self.cells.append(CellSource(f"Cell In[{len(self.cells) + 1}]", cell, cell))

    def script(self, *names: str) -> str:
        """The statements that these names need."""
        return export.statements_text(self.needed(*names).in_order())

    def needed(self, *names: str) -> ExportedNames:
        needed = ExportedNames(self.cells, self.names, PROVIDED)
        needed.need(names)
        return needed


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    return Notebook(monkeypatch)


# ------------------------------------------------------------------ statements
def test_a_statement_has_the_comment_above_and_its_decorators() -> None:
    found = statements(
        "import os\n# doubles\n# a number\n@cache\n@other\ndef f(x):\n    return 2 * x  # twice\n\n# end"
    )

    assert [each.text for each in found] == [
        "import os",
        "# doubles\n# a number\n@cache\n@other\ndef f(x):\n    return 2 * x  # twice",
    ]


def test_cells_that_are_no_python_and_top_level_awaits_are_left_out() -> None:
    cells = "this is no python", "return 3", "x = await f()\ny = 1"
    assert [each.text for each in statements(*cells)] == ["y = 1"]


# ------------------------------------------------------------------ literals
@pytest.mark.parametrize(
    "value",
    [
        *(0.1, "it's", None, [1, {"a": (2,)}], set(), math.inf, -0.0, b"x"),
        *(pathlib.Path("data") / "it's", torch.device("cuda", 1), torch.float16),
    ],
    ids=repr,
)
def test_short_plain_values_are_literals(value: object) -> None:
    text = literal_of(value)

    assert text is not None
    assert eval(text) == value


# ------------------------------------------------------------------ names
def test_only_what_is_used_is_exported_in_the_notebooks_order(notebook: Notebook) -> None:
    notebook.run("import math\nimport json\nfrom math import pi, sin as sine")
    notebook.run("# the size\nSIZE = 3  # of all\nunused = 4")
    notebook.run("def area(r): return pi * r ** SIZE")
    notebook.run("def unused_too(): return json")
    notebook.run("def main(): return math.floor(area(2))")

    assert notebook.script("main") == (
        "import math\nfrom math import pi, sin as sine\n"
        "# the size\nSIZE = 3  # of all\n\n\ndef area(r): return pi * r ** SIZE\n\n\n"
        "def main(): return math.floor(area(2))"
    )


def test_a_value_that_has_changed_since_is_written_as_it_is_now(notebook: Notebook) -> None:
    notebook.run("steps = [1, 2]\nrate = 0.1\nname = 'a'\nwidth, depth = 8, 2")
    notebook.run("steps.append(3)\nrate *= 2\nsize = width * depth")
    notebook.run("def f(): return steps, rate, name, size, width")

    lines = notebook.script("f").splitlines()
    assert {"steps = [1, 2, 3]", "rate = 0.2", "name = 'a'", "size = 16", "width = 8"} < {*lines}
    assert "depth = 2" not in lines


def test_the_last_definition_counts_and_each_is_written_once(notebook: Notebook) -> None:
    notebook.run("def f(): return g()")
    notebook.run("def g(): return 1")
    notebook.run("def g(): return 2")

    assert notebook.script("f", "g") == "def f(): return g()\n\n\ndef g(): return 2"


def test_a_definition_of_a_cell_that_failed_does_not_count(notebook: Notebook) -> None:
    notebook.run("def f(): return 1\nclass Net:\n    def g(self): return 1")
    for cell in ("1 / 0\ndef f(): return 2", "1 / 0\nclass Net:\n    def g(self): return 2"):
        with pytest.raises(ZeroDivisionError):
            notebook.run(cell)
        notebook.cells.append(CellSource("Cell In[0]", cell, cell))

    assert notebook.script("f", "Net") == "def f(): return 1\n\n\nclass Net:\n    def g(self): return 1"


def test_a_base_class_comes_first_though_its_cell_ran_again(notebook: Notebook) -> None:
    base = "class Base:\n    def f(self): return 1"
    notebook.run(base)
    notebook.run("class Net(Base):\n    def g(self): return 2")
    notebook.run(base)

    text = notebook.script("Net")
    assert text.index("class Base") < text.index("class Net")


def test_classes_without_methods_are_found(notebook: Notebook) -> None:
    notebook.run("import enum\nfrom collections import namedtuple\nfrom dataclasses import dataclass\nimport typing")
    notebook.run("class Kind(enum.Enum):\n    ONE = 1\n@dataclass\nclass Config:\n    size: int = 1")
    notebook.run("Pair = namedtuple('Pair', 'a b')\nclass Triple(typing.NamedTuple):\n    a: int = 1")

    text = notebook.script("Kind", "Config", "Pair", "Triple")
    for line in ("class Kind(", "@dataclass\nclass Config", "Pair = namedtuple(", "class Triple("):
        assert line in text


def test_modules_and_their_submodules_are_imported(notebook: Notebook) -> None:
    notebook.run("import torch\nimport torch.nn as nn\nimport torch.utils.data\nfrom math import *\nrelu = torch.relu")
    notebook.run("def f(): return torch.utils.data.Subset, nn, floor(1.5)")

    assert notebook.script("f").splitlines()[:4] == [
        *("from math import floor", "import torch", "import torch.nn as nn", "import torch.utils.data")
    ]


def test_lambdas_closures_and_decorated_functions_are_found(notebook: Notebook) -> None:
    notebook.run("import functools, torch\nbase = 3\nadd = lambda x: x + base\nalias = add")
    notebook.run("def scaler(factor, shift=1):\n    def scale(x): return factor * x + shift\n    return scale")
    notebook.run("double = scaler(2)")
    notebook.run("def logged(f):\n    def inner(*a): return f(*a)\n    return inner\n@logged\ndef g(): return 1")
    notebook.run("@functools.lru_cache\ndef h(): return 2\n@torch.no_grad()\ndef k(): return 3")

    text = notebook.script("alias", "double", "g", "h", "k")
    for line in ("alias = add", "add = lambda x: x + base", "double = scaler(2)", "@logged\ndef g()", "def logged(f)"):
        assert line in text
    names: dict[str, Any] = {}
    exec(text, names)
    assert (names["alias"](1), names["double"](3), names["g"](), names["h"](), names["k"]()) == (4, 7, 1, 2, 3)


def test_a_function_that_no_cell_defines_is_refused(notebook: Notebook) -> None:
    notebook.run("exec('def f(): return 1')")

    with pytest.raises(PayloadError, match="`f`: no cell has the current definition of this function"):
        notebook.needed("f")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("import torch\nvalue = torch.ones(1)", "a torch.Tensor"),
        ("import torch\nvalue = torch.nn.Linear(1, 1)", "a torch.nn.modules.linear.Linear"),
        ("import threading\nvalue = threading.Lock()", "a thread lock"),
        ("value = (x for x in 'ab')", "a generator"),
        ("value = [1, {'f': lambda: 1}]", "a list"),
        ("value = list(range(5000))", "a list"),
        ("class Config: pass\nvalue = Config()", "a Config"),
    ],
)
def test_a_value_that_is_no_short_literal_is_refused(notebook: Notebook, cell: str, message: str) -> None:
    notebook.run(f"{cell}\ndef f(): return value")

    said = f"`value`, which `f` uses: {message} cannot be written into a script: create it in the function, or load it"
    with pytest.raises(PayloadError, match=f"^{said} from a file$"):
        notebook.needed("f")


def test_ipythons_syntax_in_a_definition_is_refused(notebook: Notebook) -> None:
    notebook.run("def f(): return get_ipython().getoutput('ls')")

    with pytest.raises(PayloadError, match=r"Cell In\[1\], line 1: `def f.*` is IPython syntax, used to define"):
        notebook.needed("f")


# ------------------------------------------------------------------ the script's text
def test_imports_from_the_future_come_first(notebook: Notebook) -> None:
    notebook.run("from __future__ import annotations\nimport math")
    notebook.run("def f(x: Nothing): return math")

    text = export.script_text(notebook.script("f"), "f(rank)", Options(device="cpu"), "main")
    assert text.startswith("from __future__ import annotations\nimport os\nimport torch\n\n\nimport math\n\n\ndef f")


def test_strings_over_several_lines_are_not_indented() -> None:
    text = 'x = """a\n  b\nc"""\nif x:\n    y = f"""{x}\nd"""\n\nz = 1'

    indented = export.indented(text)
    names: dict[str, Any] = {}
    exec(f"if True:\n{indented}", names)
    assert (names["x"], names["y"], names["z"]) == ("a\n  b\nc", "a\n  b\nc\nd", 1)


# ------------------------------------------------------------------ the job file
def written(engine: str, nodes: int | None = None, **options: Any) -> str:
    """The job file for an engine."""
    asked = current.job_request(engine, nodes)
    return export.job_file(asked, export.plan_of(asked, Options(**options)), "my train.py")


def test_the_command_has_the_options() -> None:
    given: dict[str, Any] = {"threads_per_rank": 2, "env": {"A": "b c"}, "max_restarts": 3, "timeout": 90.0}
    plan = export.plan_of(current.job_request(), Options(num_processes=4, device="cuda", **given))

    assert export.command_of(plan, "my train.py") == (
        "OMP_NUM_THREADS=2 A='b c' torchrun --nproc-per-node 4 --max-restarts 3 'my train.py'"
    )
    text = written("auto", num_processes=4, device="cuda", **given)
    for line in ("#SBATCH --gpus-per-node=4\n", "#SBATCH --time=2\n", "export A='b c'\n", "--max-restarts=3 "):
        assert line in text


def test_the_job_file_has_the_options_of_slurm_last() -> None:
    text = written("slurm -p gpu --time=60 --gres=gpu:2 '--comment=a b'", 2, timeout=600.0)

    assert [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")] == [
        *("--job-name='my train'", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--output=%x-%j.out"),
        *("--time=10", "-p gpu", "--time=60", "--gres=gpu:2", "'--comment=a b'"),
    ]


@pytest.mark.parametrize("options", ["--gres=gpu:2", "-G 2", "-G2", "--gpus-per-node=2", "--tres-per-node=gres/gpu:2"])
def test_gpus_are_asked_for_once(options: str) -> None:
    assert "--gpus-per-node=1\n" not in written(f"slurm {options}", device="cuda")
    assert "--gpus-per-node=1\n" in written("slurm", device="cuda")


def test_the_job_has_a_rank_for_each_gpu_or_as_many_as_a_launch() -> None:
    assert '--nproc-per-node="${SLURM_GPUS_ON_NODE:-2}" ' in written("slurm -G 8")
    assert "--nproc-per-node=3 " in written("slurm -G 8", num_processes=3)
    assert "--nproc-per-node=2 " in written("auto", device="cpu")
    assert "--nproc-per-node=1 " in written("auto", 2, device="cpu")


def test_the_number_of_nodes_is_that_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")

    assert current.job_request().nodes == 3
    assert current.job_request("ssh a b").nodes == 2
    assert current.job_request("slurm", 9).nodes == 9
    assert current.job_request("local").nodes == 1
    assert current.held() == []
    with pytest.raises(ArgumentError, match=r"engine='slurm -N 2': -N: use num_nodes="):
        current.job_request("slurm -N 2", 2)
    with pytest.raises(ArgumentError, match=r"num_nodes=2: engine='local' uses only this machine"):
        current.job_request("local", 2)


@pytest.mark.parametrize("sbatch", [True, False])
def test_a_script_alone_does_without_slurms_options(tmp_path: Path, sbatch: bool) -> None:
    written = export._write(tmp_path / "train.py", "", Options(engine="slurm -p gpu", num_nodes=1), sbatch, False)

    said = "the command runs on this machine: use sbatch=True (--sbatch) for engine='slurm' and its options"
    assert written.notes == (() if sbatch else (said,))


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a job file with stand-ins for Slurm's commands and torchrun; returns what torchrun got on each node."""
    stand_ins = {
        "scontrol": 'echo "$3" | tr , "\\n"',
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\n'
        'for ((i = 0; i < SLURM_JOB_NUM_NODES; i++)); do SLURM_NODEID=$i "$@"; done',
        "torchrun": 'echo "$NAME|$*"',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    file = tmp_path / "train.sbatch"
    file.write_text(written("auto", env={"NAME": "it's here"}))

    def run(nodes: str, **env: str) -> list[str]:
        subprocess.run(["bash", "-n", str(file)], check=True)
        slurm = {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_NUM_NODES": str(nodes.count(",") + 1), "SLURM_JOB_ID": "7"}
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(file)], env={"PATH": path, **slurm, **env}, check=True, capture_output=True, text=True
        )
        return done.stdout.splitlines()

    return run


def test_each_node_runs_one_torchrun_that_meets_at_the_first(job: Callable[..., list[str]]) -> None:
    begin = "it's here|--nnodes=2 --nproc-per-node=2 --max-restarts=0 --rdzv-backend=c10d --rdzv-id=7"
    conf = f"{begin} --rdzv-endpoint=n1:20007 --rdzv-conf=is_host"
    assert job("n1,n2") == [f"{conf}=1 --local-addr=n1 my train.py", f"{conf}=0 my train.py"]
