"""The pure parts of `nblaunch.export`: statements of cells, literals, the script's text, the job file, marked files."""

from __future__ import annotations

import ast
import dataclasses
import enum
import gc
import math
import os
import pathlib
import subprocess
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies

from nblaunch.engines import current
from nblaunch.errors import ArgumentError, PayloadError
from nblaunch.launch.export import job_file, literals, marked_files, origins, saved_values, script
from nblaunch.launch.export.cell_statements import CellSource, Statement, is_same_code, statements_of
from nblaunch.launch.export.exported_names import ExportedNames
from nblaunch.launch.export.job_file import Start
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
        exec(cell, self.names)
        self.cells.append(CellSource(f"Cell In[{len(self.cells) + 1}]", cell, cell))

    def script(self, *names: str) -> str:
        """Imports and entries of what these names need."""
        needed = self.needed(*names)
        imports = script.imports_text(
            needed.imports, needed.modules, origins.other_imports(needed.statements, needed.imports, "")
        )
        return f"{imports}\n---\n{script.entries_text(needed.entries('_saved', '_objects'))}"

    def needed(self, *names: str) -> ExportedNames:
        needed = ExportedNames(self.cells, self.names, PROVIDED)
        needed.need(names)
        needed.settle()
        return needed


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    notebook = Notebook(monkeypatch)
    yield notebook
    if "log" in notebook.names:
        notebook.names["log"].close()


# ------------------------------------------------------------------ statements
def test_a_statement_has_the_comment_above_and_its_decorators() -> None:
    found = statements(
        "import os\n# doubles\n# a number\n@cache\n@other\ndef f(x):\n    return 2 * x  # twice\n\n# end"
    )

    assert [each.text for each in found] == [
        "import os",
        "# doubles\n# a number\n@cache\n@other\ndef f(x):\n    return 2 * x  # twice",
    ]


def test_statements_on_one_line_stay_together() -> None:
    found = statements("a = 1; b = 2\nc = 3")

    assert [(each.text, sorted(each.binds)) for each in found] == [("a = 1; b = 2", ["a", "b"]), ("c = 3", ["c"])]


def test_a_function_reads_its_defaults_at_once_and_its_body_later() -> None:
    (found,) = statements("@deco\ndef f(x, y=default) -> Kind:\n    return x + later + [inner for each in x]")

    assert found.reads_at_once >= {"deco", "default", "Kind"}
    assert "later" not in found.reads_at_once
    assert found.reads >= {"deco", "default", "Kind", "later", "inner"}


def test_a_comprehension_and_a_class_body_read_at_once() -> None:
    found = statements("class A(Base):\n    size = WIDTH\n    def f(self): return later\nb = [scale * x for x in xs]")

    assert found[0].reads_at_once == {"Base", "WIDTH"}
    assert {"scale", "xs"} <= found[1].reads_at_once


def test_local_names_that_change_are_not_read() -> None:
    function, cell = statements("def f():\n    total = 0\n    total += 1\n    del total", "count += 1")
    assert function.reads == set()
    assert cell.reads == {"count"}


def test_cells_that_are_no_python_and_top_level_awaits_are_left_out() -> None:
    assert [each.text for each in statements("this is no python", "x = await f()\ny = 1")] == ["y = 1"]


def test_the_line_in_ipythons_syntax_is_the_one_typed() -> None:
    cell = CellSource("Cell In[1]", "x = 1\nfiles = !ls", "x = 1\nfiles = get_ipython().getoutput('ls')")
    plain, shell = statements_of([cell])

    assert plain.shell_line() is None
    assert shell.shell_line() == (2, "files = !ls")


def code_of(text: str) -> types.CodeType:
    names: dict[str, Any] = {}
    exec(text, names)
    code: types.CodeType = names["f"].__code__
    return code


def test_code_is_the_same_on_another_line_and_not_with_another_number() -> None:
    text = "def f(x):\n    class A:\n        def g(self): return 1\n    return lambda: x + 1"

    assert is_same_code(code_of(text), code_of(f"\n\n{text}"))
    assert not is_same_code(code_of(text), code_of(text.replace("x + 1", "x + 2")))


# ------------------------------------------------------------------ literals
class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    first: list[int]
    second: str


@dataclasses.dataclass
class Point:
    x: float
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Doubled:
    x: float

    def __post_init__(self) -> None:
        self.x *= 2


def always(name: str, thing: object) -> bool:
    return True


PLAIN = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats(allow_nan=False)
    | strategies.text()
    | strategies.binary()
    | strategies.complex_numbers(allow_nan=False, allow_infinity=False),
    lambda inner: (
        strategies.lists(inner)
        | strategies.tuples(inner, inner)
        | strategies.tuples(inner)
        | strategies.dictionaries(strategies.text(), inner)
    ),
    max_leaves=10,
)


@hypothesis.given(PLAIN)
def test_a_literal_gives_the_value_again(value: object) -> None:
    text = literals.literal(value, always)

    assert text is not None
    again = eval(text)
    assert again == value
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        *(pathlib.Path("data") / "it's", torch.device("cuda", 1), torch.float16, Colour.RED, Point(1.0, ["a"])),
        *(range(3), numpy.float32(0.5), math.inf, set(), (), (1,), Pair([1], "b")),
    ],
    ids=repr,
)
def test_named_values_are_literals(value: object) -> None:
    text = literals.literal(value, always)

    assert text is not None
    assert eval(text) == value


@pytest.mark.parametrize(
    "value", [object(), Doubled(1.0), OrderedDict(a=1), torch.ones(1), "x" * 3000, [object()], {1: object()}]
)
def test_other_values_are_no_literals(value: object) -> None:
    assert literals.literal(value, always) is None


def test_a_literal_needs_its_class_under_its_name() -> None:
    assert literals.literal(Point(1.0), lambda name, thing: False) is None


# ------------------------------------------------------------------ names
def test_only_what_is_used_is_exported_in_the_notebooks_order(notebook: Notebook) -> None:
    notebook.run("import math, json\nfrom math import pi, sin as sine")
    notebook.run("# the size\nSIZE = 3  # of all\nunused = 4")
    notebook.run("def area(r): return pi * r ** SIZE")
    notebook.run("def unused_too(): return json")
    notebook.run("def main(): return math.floor(area(2))")

    assert notebook.script("main") == (
        "import math\nfrom math import pi\n---\n"
        "# the size\nSIZE = 3  # of all\n\n\ndef area(r): return pi * r ** SIZE\n\n\n"
        "def main(): return math.floor(area(2))"
    )


def test_a_value_that_has_changed_since_is_written_as_it_is_now(notebook: Notebook) -> None:
    notebook.run("steps = [1, 2]\nrate = 0.1\nname = 'a'")
    notebook.run("steps.append(3)\nrate *= 2")
    notebook.run("def f(): return steps, rate, name")

    text = notebook.script("f")
    for line in ("steps = [1, 2, 3]\n", "rate = 0.2\n", "name = 'a'\n"):
        assert line in text


def test_the_last_definition_counts_and_each_is_written_once(notebook: Notebook) -> None:
    notebook.run("def f(): return g()")
    notebook.run("def g(): return 1")
    notebook.run("def g(): return 2")

    assert notebook.script("f", "g") == "\n---\ndef f(): return g()\n\n\ndef g(): return 2"


def test_a_base_class_comes_first_though_its_cell_ran_again(notebook: Notebook) -> None:
    base = "class Base:\n    def f(self): return 1"
    notebook.run(base)
    notebook.run("class Net(Base):\n    def g(self): return 2")
    notebook.run(base)

    text = notebook.script("Net")
    assert text.index("class Base") < text.index("class Net")


def test_an_expression_that_gives_the_value_again_is_kept(notebook: Notebook) -> None:
    notebook.run("import torch\nfrom functools import partial\nfrom pathlib import Path")
    notebook.run("WIDTH, DEPTH = 8, 2\nHIDDEN = WIDTH * DEPTH\nfolder = Path('data') / f'{WIDTH}'")
    notebook.run("criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)\ndef f(x, y): return x * y")
    notebook.run("twice = partial(f, 2)\ndevice_of = torch.device('cuda' if torch.cuda.is_available() else 'cpu')")

    text = notebook.script("HIDDEN", "folder", "criterion", "twice", "device_of")
    assert "WIDTH, DEPTH = 8, 2\nHIDDEN = WIDTH * DEPTH\n" in text
    assert "criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)" in text
    assert "twice = partial(f, 2)" in text
    assert "device_of = torch.device('cuda' if torch.cuda.is_available() else 'cpu')" in text


def test_export_calls_no_function_of_the_user(notebook: Notebook) -> None:
    notebook.run("calls = []\ndef load():\n    calls.append(1)\n    return [1, 2]")
    notebook.run("class Reader:\n    def __init__(self): calls.append(2)\nvalue = load()\nreader = Reader()")

    text = notebook.script("value", "reader")
    assert notebook.names["calls"] == [1, 2]
    assert "value = [1, 2]" in text
    assert 'reader = _objects["reader"]' in text
    assert "class Reader" in text


def test_a_name_that_depends_on_itself_is_a_literal(notebook: Notebook) -> None:
    notebook.run("names = ['b', 'a']")
    notebook.run("names = sorted(names)")

    assert notebook.script("names").endswith('names = ["a", "b"]')


def test_a_value_whose_source_was_bound_again_is_a_literal(notebook: Notebook) -> None:
    notebook.run("a = 1")
    notebook.run("b = a + 1")
    notebook.run("a = 1")

    assert notebook.script("b").endswith("b = 2")


def test_tensors_and_arrays_are_saved_without_pickle(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(
        "import numpy, torch\nimages = torch.ones(100)[:2]\ntable = numpy.arange(3.0)\n"
        "many = list(range(5000))\nmany.append(1)"
    )

    needed = notebook.needed("images", "table", "many")
    torch.save(needed.saved(), tmp_path / "saved.pt")
    again = torch.load(tmp_path / "saved.pt", weights_only=True)

    assert torch.equal(again["images"], torch.ones(2))
    assert again["images"].untyped_storage().nbytes() == 8
    assert (again["table"].numpy() == numpy.arange(3.0)).all()
    assert again["many"] == [*range(5000), 1]
    assert needed.objects() == {}


def test_a_module_is_made_again_and_loads_its_weights(notebook: Notebook) -> None:
    notebook.run("import torch\nfrom torch import nn\nWIDTH = 4")
    notebook.run("class Net(nn.Module):\n    def __init__(self, width):\n        super().__init__()")
    notebook.run("net = nn.Sequential(nn.Linear(WIDTH, 2), Net(3))\nnet.eval()")
    state = torch.get_rng_state()

    needed = notebook.needed("net")
    assert torch.equal(torch.get_rng_state(), state)
    assert set(needed.saved()["net"]) == {"0.weight", "0.bias"}
    assert 'net.load_state_dict(_saved["net"])\nnet.eval()' in notebook.script("net")
    assert needed.objects() == {}


def test_an_optimizer_keeps_the_parameters_of_its_model(notebook: Notebook) -> None:
    notebook.run("import torch\nnet = torch.nn.Linear(2, 2)")
    notebook.run("fresh = torch.optim.SGD(net.parameters(), lr=0.1)")
    assert "fresh = torch.optim.SGD(net.parameters(), lr=0.1)" in notebook.script("fresh")

    notebook.run("used = torch.optim.Adam(net.parameters())")
    notebook.run("net(torch.ones(2)).sum().backward()\nused.step()")
    objects = notebook.needed("net", "used").objects()
    assert set(objects) == {"net", "used"}
    assert objects["used"].param_groups[0]["params"][0] is objects["net"].weight


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
    exec(text.replace("---", ""), names)
    assert (names["alias"](1), names["double"](3), names["g"](), names["h"](), names["k"]()) == (4, 7, 1, 2, 3)


def test_a_closure_with_a_state_of_its_own_is_refused(notebook: Notebook) -> None:
    notebook.run(
        "def counter():\n    count = 0\n    def step():\n        nonlocal count\n        count += 1\n    return step"
    )
    notebook.run("step = counter()\nstep()")

    with pytest.raises(PayloadError, match=r"`step` has its own `count`, and `counter\(\)` might give another one"):
        notebook.needed("step")


def test_a_function_that_no_cell_defines_is_refused(notebook: Notebook) -> None:
    notebook.run("exec('def f(): return 1')")

    with pytest.raises(PayloadError, match="`f`: no cell of the notebook defines this function as it is now"):
        notebook.needed("f")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("import threading\nlock = threading.Lock()", "`lock`, a thread lock, which cannot be saved for a script"),
        ("log = open('/dev/null')", "`log`, an open file, which cannot be saved for a script"),
        ("made = (x for x in 'ab')", "`made`, a generator, which cannot be saved for a script"),
        (
            "q = [1, {'f': lambda: 1}]",
            r"`q`\[1\]\['f'\], a function, which cannot be saved for a script .*: create it in",
        ),
    ],
    ids=["lock", "file", "generator", "lambda"],
)
def test_what_cannot_be_saved_is_named(notebook: Notebook, cell: str, message: str) -> None:
    notebook.run(cell)

    with pytest.raises(PayloadError, match=message):
        notebook.needed("lock", "log", "made", "q")


def test_an_object_of_an_older_class_is_refused(notebook: Notebook) -> None:
    notebook.run("class Net:\n    def f(self): return 1\nnet = Net()")
    notebook.run("class Net:\n    def f(self): return 2")

    with pytest.raises(PayloadError, match="`net` is of a class that a cell has defined again since"):
        notebook.needed("net")


def test_a_mapped_file_is_opened_by_the_script_and_never_emptied(notebook: Notebook, tmp_path: Path) -> None:
    file = str(tmp_path / "map")
    numpy.save(file + ".npy", numpy.arange(100))
    notebook.run("import numpy as np")
    notebook.run(f"new = np.memmap({file!r}, np.int64, mode='w+', shape=(8, 5))")
    notebook.names["new"][:] = 1
    notebook.run(f"read = np.load({file + '.npy'!r}, mmap_mode='r')[10:]\ntwo = new[2:4]\nsome = new[:, 1]")
    text = notebook.script("new", "read", "two", "some")
    assert (numpy.fromfile(file, numpy.int64) == 1).all()
    assert f'new = numpy.memmap("{file}", "<i8", "r+", 0, (8, 5))' in text
    assert f'read = numpy.memmap("{file}.npy", "<i8", "r", 208, (90,))' in text
    assert f'two = numpy.memmap("{file}", "<i8", "r+", 80, (2, 5))' in text
    assert 'some = _saved["some"].numpy()' in text
    found: dict[str, Any] = {"_saved": notebook.needed("some").saved(), "numpy": numpy}
    exec(text.partition("---")[2], found)
    assert all((found[name] == notebook.names[name]).all() for name in ("new", "read", "two"))
    os.unlink(file)
    notebook.run("half = read.astype('f4')")
    assert 'new = _saved["new"].numpy()' in notebook.script("new")
    assert notebook.needed("new").notes == ["`new` is mapped from a file, and the script gets a copy of it"]
    assert not notebook.needed("half").notes
    assert 'half = _saved["half"].numpy()' in notebook.script("half")
    found.clear()  # closes the files
    notebook.names.clear()
    gc.collect()


def test_an_object_is_created_again_only_if_that_changes_nothing(notebook: Notebook, tmp_path: Path) -> None:
    file = tmp_path / "file.zip"
    notebook.run("import torch, zipfile\nfrom torch.optim.lr_scheduler import StepLR\nnet = torch.nn.Linear(2, 2)")
    notebook.run("opt = torch.optim.SGD(net.parameters(), 0.1)\nplan = StepLR(opt, 1)\nopt.step()\nplan.step()")
    notebook.run("def make(archive):\n    def read(name): return archive.read(name)\n    return read")
    notebook.run(f"read = make(zipfile.ZipFile({str(file)!r}, 'w'))\nseen = []\n")
    notebook.run("best = sorted([2, 1], key=lambda each: seen.append(each) or each)")
    notebook.names["seen"].clear()
    file.write_bytes(b"an archive")

    assert 'plan = _objects["plan"]' in notebook.script("plan")
    assert notebook.names["opt"].param_groups[0]["lr"] == pytest.approx(0.01)
    with pytest.raises(PayloadError, match="might give another one in a script"):
        notebook.needed("read")
    assert file.read_bytes() == b"an archive"
    assert "best = [1, 2]" in notebook.script("best")
    assert not notebook.names["seen"]


BACKBONE = "import torch\nfrom torch import nn\nbase = nn.Sequential(nn.Linear(2, 3))"
HEAD = """class Net(nn.Module):
    def __init__(self{parameter}):
        super().__init__()
        self.body = base
        self.body[0] = nn.Linear(2, 2)
"""


@pytest.mark.parametrize(
    ("cells", "held"),
    [
        ([HEAD.format(parameter=", base"), "net = Net(base)"], "base[0].weight"),
        ([HEAD.format(parameter=""), "net = Net()"], "base[0].weight"),
        (["net = nn.Sequential(base).half()", "net.float()"], "base[0].weight"),
        (["net = nn.Sequential(base)", "base.eval()"], "base.training"),
        (["net = nn.Sequential(base).eval()", "base.train()"], "base.training"),
        (["rows = iter(range(9))", "net = list(zip(range(3), rows))"], "rows.__reduce__()"),
        (["rows = [iter(range(9))]", "net = list(zip(range(3), rows[0]))"], "rows[0].__reduce__()"),
        (["rows = iter(range(9))", "net = 3 in rows"], "rows.__reduce__()"),
        (["from collections import *", "seen = defaultdict(list)", "net = len(seen[1])", "seen.clear()"], "dict(seen)"),
        (
            [
                "from dataclasses import *\nfrom itertools import count\nnumbers = count()",
                "@dataclass\nclass Named:\n    number: int = field(default_factory=lambda: next(numbers))",
                "net = Named()",
            ],
            "str(numbers)",
        ),
        (
            [
                "class Deep(nn.Module):\n    def __init__(self, sizes):\n        super().__init__()\n"
                "        self.layers = nn.ModuleList([nn.Linear(2, sizes.pop())])",
                "sizes = [4, 4]",
                "net = Deep(sizes)",
            ],
            "sizes",
        ),
        (
            [
                "class Deep(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
                "        config.sizes['made'] = config.made = config.made + 1",
                "class Config:\n    sizes, made = {}, 0\nconfig = Config()\nconfig.sizes = {}",
                "net = Deep(config)",
            ],
            "config.made, config.sizes",
        ),
        (
            [
                "class Deep(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.reset()\n"
                "    @staticmethod\n    def reset():\n        nn.init.zeros_(base[0].weight)",
                "net = Deep()",
            ],
            "base[0].weight",
        ),
    ],
)
def test_an_export_changes_nothing_of_the_notebooks(notebook: Notebook, cells: list[str], held: str) -> None:
    def copy_of_held() -> Any:
        found = eval(held, notebook.names)
        return found.tolist() if isinstance(found, torch.Tensor) else str(found)

    for cell in [BACKBONE, *cells]:
        notebook.run(cell)
    with torch.no_grad():
        notebook.names["base"][0].weight.fill_(0.1234567)  # training
    before = copy_of_held()

    notebook.needed("net")

    assert copy_of_held() == before


def test_sizes_of_tensors_let_a_module_be_created_again(notebook: Notebook) -> None:
    notebook.run("import torch\nX = torch.ones(4, 3)")
    notebook.run(
        "class Net(torch.nn.Linear):\n    def __init__(self, inputs):\n        super().__init__(inputs, X.shape[1])"
    )
    notebook.run("net = Net(int(X.shape[1])).eval()")

    assert "net = Net(int(X.shape[1])).eval()" in notebook.script("net")


def test_a_data_frame_is_created_again(notebook: Notebook) -> None:
    notebook.run('import pandas as pd\nframe = pd.DataFrame({"a": [1, 2]})')

    assert 'frame = pd.DataFrame({"a": [1, 2]})' in notebook.script("frame")


def test_an_export_downloads_no_dataset(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    class Digits:
        downloads = 0

        def __init__(self, root: str, download: bool = False) -> None:
            self.root = root
            Digits.downloads += download

    Digits.__module__, Digits.__qualname__ = "torchvision.datasets.digits", "Digits"
    module: Any = types.ModuleType(Digits.__module__)
    module.Digits = Digits
    monkeypatch.setitem(__import__("sys").modules, Digits.__module__, module)
    notebook.run("from torchvision.datasets.digits import Digits\ndigits = Digits('data', download=True)")

    assert "digits = Digits('data', download=True)" in notebook.script("digits")
    assert Digits.downloads == 1


def test_an_export_restores_the_random_states_of_gpus(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [1, 2]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda found: states.__setitem__(slice(None), found))
    notebook.run("import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        draw()\n")
    notebook.names["draw"] = lambda: states.append(3)

    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        literals.repeat(ast.parse("Net().weight", mode="eval").body, notebook.names)

    assert states == [1, 2]


def test_a_variable_of_the_environment_is_written_as_it_is(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS_OF_THIS_TEST", "7")
    notebook.run("import os\nsteps = os.environ['STEPS_OF_THIS_TEST']")
    assert 'steps = "7"' in notebook.script("steps")


def test_too_much_data_is_refused(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_values, "MAX_DATA_BYTES", 1_000_000)
    notebook.run("import torch\nsmall, large = torch.ones(10), torch.ones(300_000)")

    with pytest.raises(PayloadError, match=r"`large` has 1 MB, and .* may have 1 MB: load it in the cell or function"):
        notebook.needed("small", "large")


def test_ipythons_syntax_in_a_definition_is_refused(notebook: Notebook) -> None:
    notebook.run("def f(): return get_ipython().getoutput('ls')")

    with pytest.raises(
        PayloadError, match=r"Cell In\[1\], line 1: `def f.*` is IPython's syntax, and a script needs it"
    ):
        notebook.needed("f")


def test_a_method_that_was_added_later_is_refused(notebook: Notebook) -> None:
    notebook.run("import functools\n@functools.total_ordering\nclass Net:\n    def __lt__(self, other): return True")
    notebook.needed("Net")
    notebook.run("def late(self): return 1\nNet.late = late")

    with pytest.raises(PayloadError, match=r"`Net\.late` was added to the class after its cell had run: write it into"):
        notebook.needed("Net")


def test_an_older_base_class_is_noted(notebook: Notebook) -> None:
    notebook.run("class Base:\n    def f(self): return 1\nclass Net(Base):\n    def g(self): return 2")
    assert notebook.needed("Net").notes == []

    notebook.run("class Base:\n    def f(self): return 3")
    assert notebook.needed("Net").notes == ["`Net` is based on an earlier `Base`; the script has the present one"]


# ------------------------------------------------------------------ the script's text
def test_imports_from_the_future_come_first(notebook: Notebook) -> None:
    notebook.run("from __future__ import annotations\nimport math")
    notebook.run("def f(x: Nothing): return math")

    needed = notebook.needed("f")
    text = script.imports_text(needed.imports, {"os"}, origins.other_imports(needed.statements, needed.imports, ""))
    assert text == "from __future__ import annotations\nimport os\n\nimport math"


def test_strings_over_several_lines_are_not_indented() -> None:
    text = 'x = """a\n  b\nc"""\nif x:\n    y = f"""{x}\nd"""\n\nz = 1'

    indented = script.indented(text)
    names: dict[str, Any] = {}
    exec(f"if True:\n{indented}", names)
    assert (names["x"], names["y"], names["z"]) == ("a\n  b\nc", "a\n  b\nc\nd", 1)


def test_imports_are_those_of_the_user_without_unused_names(notebook: Notebook) -> None:
    notebook.run("import os.path, sys  # two\nfrom math import (\n    pi,\n    tau,\n)\nfrom math import cos, sin")
    notebook.run("def f(): return os, pi, tau, sin")

    needed = notebook.needed("f")
    assert script.imports_text(needed.imports, {"pathlib", "os"}, ()) == (
        "import pathlib\n\nimport os.path\nfrom math import (\n    pi,\n    tau,\n)\nfrom math import sin"
    )


# ------------------------------------------------------------------ the job file
START = Start(2, "auto", {"NAME": "it's here"}, None, 0, None)


def test_the_command_has_the_options() -> None:
    start = Start(4, "cuda", {"A": "b c"}, 2, 3, 90.0)

    assert job_file.command(start, "my train.py") == (
        "OMP_NUM_THREADS=2 A='b c' torchrun --nproc-per-node 4 --max-restarts 3 'my train.py'"
    )
    text = job_file.job_file(start, "train.py", "train.sbatch")
    for line in ("#SBATCH --gpus-per-node=4\n", "#SBATCH --time=2\n", "export A='b c'\n", "--max-restarts=3 "):
        assert line in text


def written(engine: str, nodes: int | None = None, ranks: int | None = None, device: str = "auto", **more: Any) -> str:
    """The job file for an engine."""
    arguments = {"backend": None, "threads": None, "env": None, "max_restarts": 0, "timeout": None, "checks": False}
    asked = current.job_request(engine, nodes)
    return job_file.job_file(job_file.start_of(asked, ranks, device, **{**arguments, **more}), "a.py", "a.sbatch")


def test_the_job_file_has_the_options_of_slurm() -> None:
    text = written("slurm -p gpu --time=60 --gres=gpu:2 '--comment=a b' --mpi=pmix --overlap", 2, device="cuda")

    for line in ("-p gpu", "--time=60", "--gres=gpu:2", "'--comment=a b'", "--nodes=2", "--output=%x-%j.out"):
        assert text.count(f"#SBATCH {line}\n") == 1
    assert "--nproc-per-node=2 " in text
    assert "Add what your cluster needs: an environment.\n" in text
    for absent in ("--mpi", "--overlap", "--gpus-per-node"):
        assert absent not in text


def test_the_users_options_replace_those_of_the_job_file() -> None:
    text = written("slurm -c 8 -t5 -o log -q high", timeout=600.0)

    assert [line for line in text.splitlines() if line.startswith("#SBATCH")][3:] == [
        *("#SBATCH -c 8", "#SBATCH -t5", "#SBATCH -o log", "#SBATCH -q high")
    ]
    assert "Add what your cluster needs: a partition, an environment.\n" in text


@pytest.mark.parametrize(
    ("options", "count"),
    [
        *(("--gres=gpu", 1), ("--gres=gpu:a100:4,ssd:1", 4), ("--gres=gpu:a100-80", 1), ("-G 8", 4)),
        *(("--gpus-per-node=h100:8", 8), ("--gpus=6", 3), ("--tres-per-node=gres/gpu:2", 2)),
    ],
)
def test_a_rank_for_each_gpu_that_slurm_is_asked_for(options: str, count: int) -> None:
    assert f"--nproc-per-node={count} " in written(f"slurm {options}", 2)


def test_the_job_has_as_many_cpu_ranks_a_node_as_a_launch() -> None:
    one, two = written("auto", device="cpu"), written("auto", 2, device="cpu")

    assert "--nproc-per-node=2 " in one
    assert "sbatch --nodes=2 a.sbatch" in one
    assert "--nproc-per-node=1 " in two
    assert "sbatch --nodes=4 a.sbatch" in two


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
    with pytest.raises(ArgumentError, match=r"num_nodes=2: engine='local' is this machine alone"):
        current.job_request("local", 2)


@pytest.mark.parametrize(
    ("engine", "sbatch", "notes"),
    [
        ("auto", False, []),
        ("slurm -p gpu", True, []),
        ("slurm -p gpu", False, ["the command runs on this machine: engine='slurm' and its options need a job file"]),
        ("slurm --mpi=pmix", True, ["`--mpi=pmix` is left out of the job file: it is an option of srun alone"]),
        ("ssh a b", False, ["the script does not use engine='ssh': start torchrun on each node yourself"]),
        ("ray", True, ["the script does not use engine='ray': start torchrun on each node yourself, or submit the"]),
    ],
)
def test_notes_say_what_the_script_does_not_do(engine: str, sbatch: bool, notes: list[str]) -> None:
    found = job_file.notes(current.job_request(engine), sbatch)

    assert len(found) == len(notes)
    assert all(text.startswith(start) for text, start in zip(found, notes, strict=True))


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
    file.write_text(job_file.job_file(START, "my train.py", file.name))

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
    common = "it's here|--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=7 --rdzv-endpoint=n1:20007"

    conf = f"{common} --rdzv-conf=is_host"
    assert job("n1,n2") == [f"{conf}=1 --local-addr=n1 my train.py", f"{conf}=0 my train.py"]


def test_the_address_of_the_first_node_can_be_set(job: Callable[..., list[str]]) -> None:
    (alone,) = job("n1")
    (ours,) = job("n1", MASTER_ADDR="10.0.0.1", MASTER_PORT="5")

    assert "--rdzv-endpoint=127.0.0.1:20007" in alone
    assert "--rdzv-endpoint=10.0.0.1:5" in ours


# ------------------------------------------------------------------ files
def test_a_file_of_an_export_may_be_replaced_until_it_is_edited(tmp_path: Path) -> None:
    for text in ("import os\n", "#!/bin/bash\necho\n"):
        path = tmp_path / "train.py"
        path.write_text(marked_files.marked(text))
        assert path.read_text().splitlines()[0] == ("#!/bin/bash" if "#!" in text else path.read_text().splitlines()[0])
        marked_files.check(path, [path], [], force=False)

        path.write_text(path.read_text() + "\n# mine")
        with pytest.raises(
            ArgumentError, match=r"train.py exists, and it was edited since it was exported: use another"
        ):
            marked_files.check(path, [path], [], force=False)
        marked_files.check(path, [path], [], force=True)


def test_a_users_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    data = path.with_suffix(".data.pt")
    data.write_bytes(b"\x80")

    with pytest.raises(ArgumentError, match=r"train.data.pt exists: use another name, or force=True"):
        marked_files.check(path, [path], [data], force=False)
    path.write_text("import os\n")
    with pytest.raises(ArgumentError, match=r"train.py exists: use another name, or force=True"):
        marked_files.check(path, [path], [], force=False)
