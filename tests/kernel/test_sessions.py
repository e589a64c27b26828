"""Sessions in a real kernel: ranks that stay between cells, with their variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nblaunch.launch.output.terminal_lines import without_colours
from tests.conftest import command_of, eventually, has_failed, leaving_nothing, marked_processes
from tests.kernel.harness import Cell, Kernel
from tests.processes.test_deaths import alive

NET = """
import torch, time, os, signal
import torch.distributed as dist
import nblaunch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.fc(x) * scale
scale = 1.0
"""
REDUCES = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


@pytest.fixture(autouse=True)
def _nothing_left(kernel: Kernel, request: pytest.FixtureRequest) -> Iterator[None]:
    """Check nothing after a test, as it may restart ranks of the session; `kernel` checks the whole file."""
    yield
    if has_failed(request):
        kernel.interrupt()  # or its cell may keep all others waiting
        kernel.run("%distributed session restart")


@pytest.fixture(scope="module")
def kernel(shared_kernel: Kernel) -> Iterator[Kernel]:
    """The kernel with a session of two ranks."""
    shared_kernel.run(NET).check()
    with leaving_nothing():
        shared_kernel.run("%distributed session -n 2").check()
        shared_kernel.run("import nblaunch.launch.session as _all\ns = _all.find()").check()
        yield shared_kernel
        shared_kernel.run("%distributed session stop").check()


def on_ranks(kernel: Kernel, body: str, options: str = "") -> list[object]:
    """Run a cell in the session; return the last expression's value of each rank."""
    kernel.run(f"%%distributed -o _result {options}\n{body}").check()
    return list(kernel.ask("list(_result)"))


BEGUN = "print('begun', flush=True)"


def interrupted(kernel: Kernel, body: str) -> Cell:
    """Interrupt a cell of which `BEGUN` is a line, once both ranks have executed that."""
    request = kernel.start_cell(f"%%distributed\n{body}")
    for rank in range(2):
        kernel.finish_cell(request, until=f"[rank {rank}] begun")
    kernel.interrupt()
    return kernel.finish_cell(request)


# ------------------------------------------------------------------ names
def test_a_cell_finds_what_the_cell_before_has_bound(kernel: Kernel) -> None:
    kernel.run("%%distributed\nkept = [rank]\nprint(__name__)").check()
    kernel.run("%%distributed\nkept.append('more')").check()
    assert on_ranks(kernel, "kept") == [[0, "more"], [1, "more"]]
    assert kernel.run("kept").error.startswith("NameError")


def test_the_notebooks_names_are_sent_once_and_again_when_they_change(kernel: Kernel) -> None:
    kernel.run("lr = 0.5").check()
    assert "sent: lr" in kernel.run("%%distributed\nprint(lr)").check().text
    assert "sent" not in kernel.run("%%distributed\nprint(lr)").check().text
    kernel.run("lr = 0.25").check()
    again = kernel.run("%%distributed\nprint(lr)").check().text
    assert "sent: lr" in again
    assert "[rank 1] 0.25" in again


REBUILT = """
import multiprocessing, weakref
from torch.nn.utils import parametrizations

def double(x):
    return x * 2

compiled = torch.compile(double, backend="eager")
compiled(torch.ones(1))
normed = parametrizations.weight_norm(torch.nn.Linear(2, 1))
in_place = torch.nn.Linear(2, 1)
in_place.compile(backend="eager")
reference = weakref.ref(normed)
context = multiprocessing.get_context("spawn")
counts, lock, messages = context.Value("i", 0), context.Lock(), context.Queue()
"""
USED = """
x = torch.ones(2)
shapes = [len(normed(x)), len(in_place(x))]
with lock:
    counts.value += 1
messages.put(rank)
float(compiled(x).sum()), shapes, reference() is normed
"""


def test_empty_arrays_and_tensors_are_sent(kernel: Kernel) -> None:
    kernel.run("import numpy, torch\nnone, nothing = numpy.zeros(0), torch.zeros(0)").check()
    assert on_ranks(kernel, "none.size + nothing.numel()") == [0, 0]


def test_objects_that_ranks_rebuild_are_sent_once(kernel: Kernel) -> None:
    kernel.run(REBUILT).check()
    was = (4.0, [1, 1], True)
    assert on_ranks(kernel, USED) == [was, was]
    again = kernel.run(f"%%distributed\n{USED}").check().text
    assert "sent" not in again
    assert kernel.ask("counts.value, sorted(messages.get(timeout=10) for _ in range(4))") == (4, [0, 0, 1, 1])
    kernel.run("del counts, lock, messages; import gc; gc.collect()").check()  # with the names of their semaphores


def test_what_cells_do_to_modules_happens_in_ranks(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "effect_base").mkdir()
    (tmp_path / "effect_base/__init__.py").write_text("class Learner: ...")
    (tmp_path / "effect_base/extra.py").write_text("import effect_base as b\nb.Learner.extra = lambda self: 'patched'")
    kernel.run(
        f"import sys, threading; sys.path.insert(0, {str(tmp_path)!r})\nfrom effect_base.extra import *\n"
        "from effect_base import Learner\ndef use(): return Learner().extra()\n"
        "def launched(f): return nblaunch.notebook_launcher(f, (), 2, view='none')"
    ).check()
    assert on_ranks(kernel, "Learner().extra()") == ["patched"] * 2
    assert kernel.ask("list(launched(use))") == kernel.ask("list(s.run(use, view='none'))") == ["patched"] * 2
    kernel.run(
        "import functools\nplus, Learner.guard = 1, threading.Lock()\nLearner.added = lambda self: 2 + plus\n"
        "@functools.wraps(Learner.extra)\ndef extra(self): return extra.__wrapped__(self) + '!'\n"
        "Learner.extra = extra\n"
        "def use_added(): return Learner().added(), Learner().extra()\ndef use_guard(): return Learner().guard"
    ).check()
    for call in "launched(use_added)", "s.run(use_added, view='none')":
        assert kernel.ask(f"list({call})") == [(3, "patched!")] * 2
    assert "has no attribute 'guard'" in kernel.run("launched(use_guard)").traceback


def test_names_that_no_code_mentions_are_named(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(
        "import threading\nother, guard = 7, threading.Lock()\n"
        "def find(name): return globals()[name]\ndef notes(call, *args):\n    try: call(*args)\n"
        "    except Exception as error: return error.__notes__\n"
        "def launched(f, *args): return nblaunch.notebook_launcher(f, args, 2, view='none')"
    ).check()
    for way in ("launched", "s.run"):
        kernel.run(f"said = [*notes({way}, find, 'other'), *notes({way}, find, 'guard')]").check()
        said = str(kernel.ask("said"))
        assert "`other` exists in the notebook but was not sent: only names that appear in the code are sent." in said
        assert "was not sent: `guard`, a thread lock, which cannot be sent" in said
    assert (
        "`other` exists in the notebook but was not sent"
        in kernel.run("%%distributed\neval('oth' + str('er'))").traceback
    )
    (tmp_path / "lacks_import.py").write_text("def lacks(): return other")
    kernel.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom lacks_import import lacks").check()
    said = kernel.run("launched(lacks)").traceback
    assert "name 'other' is not defined" in said
    assert "was not sent" not in said


def test_ranks_know_their_rank_before_the_first_cell(kernel: Kernel) -> None:
    kernel.run(
        "with nblaunch.session(2, name='fresh') as fresh: got = fresh.pull('rank'), list(fresh.run(lambda: world_size))"
    )
    assert kernel.ask("got, fresh.is_open") == (([0, 1], [2, 2]), False)


def test_a_name_that_ranks_have_bound_stays_theirs(kernel: Kernel) -> None:
    keep = "mine: this cell used the ranks' own value, not the notebook's. session.push(mine=mine) replaces it"
    kernel.run("mine = 'notebook'").check()
    assert on_ranks(kernel, "mine") == ["notebook"] * 2
    kernel.run("%%distributed\nmine = rank").check()
    assert on_ranks(kernel, "mine") == [0, 1]
    for value in ("again", "and again"):
        kernel.run(f"mine = {value!r}").check()
        said = kernel.run("%%distributed\nmine").check().text
        assert keep in said
        assert "sent: " not in said
        assert keep not in kernel.run("%%distributed\nmine").check().text
        assert on_ranks(kernel, "mine") == [0, 1]
    kernel.run("s.push(mine=mine)").check()
    assert on_ranks(kernel, "mine") == ["and again"] * 2
    kernel.run("mine = 'the notebook has it back'").check()
    assert on_ranks(kernel, "mine") == ["the notebook has it back"] * 2


def test_a_module_that_both_have_imported_is_one(kernel: Kernel) -> None:
    kernel.run("%%distributed\nimport textwrap").check()
    kernel.run("import textwrap").check()
    assert "own value" not in kernel.run("%%distributed\ntextwrap.dedent('')").check().text


def test_a_name_that_one_rank_has_bound_stays_with_it(kernel: Kernel) -> None:
    kernel.run("mine_alone = [1]").check()
    assert on_ranks(kernel, "mine_alone") == [[1]] * 2
    kernel.run("%%rank 1\nmine_alone = [2]").check()
    kernel.run("mine_alone = [3]").check()
    kernel.run("%distributed session restart --keep").check()
    cell = kernel.run("%%distributed\nmine_alone").check()
    assert "[rank 0] [3]" in cell.text
    assert "[rank 1] [2]" in cell.text
    kernel.run("mine_alone = [4]").check()
    said = kernel.run("%%distributed\nmine_alone").check().text
    assert (
        "mine_alone: this cell used rank 1's own value, not the notebook's. session.push(mine_alone=mine_alone)" in said
    )
    assert "sent: mine_alone" in said


def test_an_optimizer_of_a_model_that_ranks_replaced_is_named(kernel: Kernel) -> None:
    build = "learned = torch.nn.Linear(1, 1)\nby_sgd = torch.optim.SGD(learned.parameters(), lr=1.0)"
    wrap = "learned = torch.nn.parallel.DistributedDataParallel(learned)"
    train = "%%distributed\nlearned(torch.ones(1, 1)).sum().backward()\nby_sgd.step()\nlearned.module.bias.item()"
    apart = "by_sgd: uses the notebook's learned; the ranks' learned is another object and will not be updated"
    kernel.run(build).check()
    kernel.run(f"%%distributed\n{wrap}").check()
    assert apart not in kernel.run(train).check().text
    kernel.run(build).check()
    assert apart in kernel.run(train).check().text
    kernel.run("s.push(learned=learned, by_sgd=by_sgd)").check()
    kernel.run(f"%%distributed\n{wrap}").check()
    before = kernel.ask("learned.bias.item()")
    assert apart not in kernel.run(train).check().text
    assert on_ranks(kernel, "learned.module.bias.item()") == [pytest.approx(before - 1.0)] * 2
    kernel.run(build).check()
    assert "learned: this cell used the ranks' own value" in kernel.run("%%distributed\nlearned").check().text
    assert apart in kernel.run("%%distributed\nby_sgd").check().text
    kernel.run("%%distributed\ndel learned, by_sgd").check()


def test_what_ranks_trained_is_not_overwritten_by_the_same_model(kernel: Kernel) -> None:
    kernel.run("model = Net()\nwith torch.no_grad(): model.fc.weight.fill_(1.0)").check()
    kernel.run("%%distributed\nwith torch.no_grad(): model.fc.weight += rank + 1").check()
    assert on_ranks(kernel, "model.fc.weight[0, 0].item()") == [2.0, 3.0]
    kernel.run("with torch.no_grad(): model.fc.weight.fill_(9.0)").check()
    assert on_ranks(kernel, "model.fc.weight[0, 0].item()") == [9.0, 9.0]


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ("torch.nn.Linear(2, 2)", "with torch.no_grad(): taken.weight += {}"),
        ("{'a': {'b': 1}}", "taken['a']['b'] += {}"),
        ("__import__('types').SimpleNamespace(x=1)", "taken.x += {}"),
    ],
    ids=["module", "nested dict", "object"],
)
def test_values_that_the_notebook_takes_back_are_named(kernel: Kernel, value: str, change: str) -> None:
    replaced = "taken: the notebook's new value replaced the value that ranks had modified in place"
    kernel.run("del taken" if kernel.ask("'taken' in globals()") else "").check()
    kernel.run("%%distributed\nglobals().pop('taken', None)").check()
    kernel.run(f"taken = {value}").check()
    kernel.run(f"%%distributed\n{change.format(1)}").check()
    assert replaced not in kernel.run("%%distributed\ntaken").check().text
    kernel.run(change.format(5)).check()
    request = kernel.start_cell("%%distributed\ntaken\nimport time\nwhile True: time.sleep(0.1)")
    kernel.finish_cell(request, until=replaced)  # before the end of the cell
    kernel.interrupt()
    kernel.finish_cell(request)
    kernel.run(change.format(5)).check()
    assert replaced not in kernel.run("%%distributed\ntaken").check().text


def test_ranks_import_from_new_entries_of_the_notebooks_path(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "of_the_project.py").write_text("answer = 42\n")
    assert kernel.run("%%distributed\nimport of_the_project").error.startswith("ModuleNotFoundError")
    kernel.run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})").check()
    assert on_ranks(kernel, "import of_the_project\nof_the_project.answer") == [42, 42]
    kernel.run("del sys.path[0]").check()


def test_a_restart_of_all_ranks_takes_the_notebooks_folder(kernel: Kernel, tmp_path: Path) -> None:
    before = kernel.ask("os.getcwd()")
    kernel.run("%%distributed\nhere = rank").check()
    kernel.run(f"os.chdir({str(tmp_path)!r})\n%distributed session restart --keep").check()
    kernel.run(f"os.chdir({before!r})").check()
    assert on_ranks(kernel, "os.getcwd(), here") == [(str(tmp_path), 0), (str(tmp_path), 1)]
    kernel.run("%distributed session restart").check()
    assert on_ranks(kernel, "os.getcwd()") == [before] * 2


def test_ranks_keep_the_source_of_their_functions(kernel: Kernel) -> None:
    kernel.run("%%distributed\nimport inspect\ndef stays():\n    return 1 / 0  # here").check()
    kernel.run("%%distributed\nrank").check()
    assert on_ranks(kernel, "'# here' in inspect.getsource(stays)") == [True, True]
    assert "return 1 / 0  # here" in kernel.run("%%distributed\nstays()").traceback


def test_what_a_rank_has_deleted_is_sent_again_by_itself(kernel: Kernel) -> None:
    kernel.run("gone = torch.nn.Linear(1, 1, bias=False)\nwith torch.no_grad(): gone.weight.fill_(7)").check()
    kernel.run("%%distributed\ngone").check()
    kernel.run("%%distributed\nif rank == 1: gone = None").check()
    kernel.run("later = torch.optim.SGD(gone.parameters(), lr=1.0)").check()
    looks = "gone is None, later.param_groups[0]['params'][0].item()"
    assert on_ranks(kernel, looks) == [(False, 7.0), (True, 7.0)]
    assert on_ranks(kernel, "later.param_groups[0]['params'][0] is gone.weight if rank == 0 else None") == [True, None]
    cell = kernel.run("%%distributed\nlater").check()
    assert "sent: " not in cell.text


def test_an_optimizer_sent_later_updates_the_ranks_own_model(kernel: Kernel) -> None:
    kernel.run("small = torch.nn.Linear(1, 1, bias=False)").check()
    kernel.run("%%distributed\nwith torch.no_grad(): small.weight.fill_(rank)").check()
    kernel.run("descent = torch.optim.SGD(small.parameters(), lr=1.0)").check()
    kernel.run("%%distributed\nsmall(torch.ones(1)).backward()\ndescent.step()").check()
    assert on_ranks(kernel, "small.weight.item()") == [-1.0, 0.0]


def test_an_unchanged_class_cell_may_run_again(kernel: Kernel) -> None:
    body = "class Twice(torch.nn.Linear):\n    pass"
    kernel.run(f"{body}\ntwice = Twice(1, 1, bias=False)").check()
    kernel.run("%%distributed\nwith torch.no_grad(): twice.weight.fill_(7.0)").check()
    kernel.run(body).check()
    assert on_ranks(kernel, "twice.weight.item()") == [7.0, 7.0]


def test_a_push_replaces_what_ranks_have_and_stays(kernel: Kernel) -> None:
    kernel.run("rate, reset = 0.01, torch.nn.Linear(1, 1, bias=False)").check()
    kernel.run("%%distributed\nwith torch.no_grad(): reset.weight.fill_(7.0)\nrate").check()
    kernel.run("with torch.no_grad(): reset.weight.fill_(3.0)\ns.push(reset=reset, rate=0.5)").check()
    assert on_ranks(kernel, "reset.weight.item(), rate") == [(3.0, 0.5)] * 2


def test_a_deleted_owner_leaves_its_value_to_another_name(kernel: Kernel) -> None:
    kernel.run("owner = torch.nn.Linear(1, 1)").check()
    kernel.run("%%distributed\nowner").check()
    kernel.run("heir = owner\ndel owner\n%distributed session restart").check()
    kernel.run("%%distributed\nheir").check()


def test_functions_see_the_names_of_the_ranks(kernel: Kernel) -> None:
    kernel.run("def total():\n    return base + scale").check()
    kernel.run("%%distributed\nbase = 10 * rank").check()
    assert on_ranks(kernel, "total()") == [1.0, 11.0]
    assert kernel.ask("list(s.run(total, view='none'))") == [1.0, 11.0]
    kernel.run("scale = 3.0").check()
    assert on_ranks(kernel, "total()") == [3.0, 13.0]
    kernel.run("scale = 1.0").check()


def test_a_class_is_one_class_on_both_sides_also_when_redefined(kernel: Kernel) -> None:
    kernel.run("class Point:\n    x = 1").check()
    kernel.run("%%distributed -o made\nPoint()").check()
    assert kernel.ask("[isinstance(p, Point) for p in made]") == [True, True]
    kernel.run("class Point:\n    x = 2\nold = made[0]").check()
    kernel.run("%%distributed -o made\np = Point()\nassert type(p) is Point\np").check()
    assert kernel.ask("[isinstance(p, Point) and p.x for p in made]") == [2, 2]


def test_the_last_value_is_shown_and_stays_in_the_rank(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed\nlock = __import__('threading').Lock()\nlock")
    assert "[rank 1] <unlocked _thread.lock" in cell.check().text
    assert "unlocked" not in kernel.run("%%distributed\nlock;").check().text


def test_a_value_that_the_notebook_has_set_after_a_push_is_not_said_to_be_sent(kernel: Kernel) -> None:
    kernel.run("s.push(first=1)").check()
    kernel.run("first = 99").check()
    cell = kernel.run("%%distributed -o firsts\nfirst").check()
    assert "first: this cell used the ranks' own value, not the notebook's. session.push(first=first)" in cell.text
    assert "sent: first" not in cell.text
    assert "first" not in kernel.run("%%distributed -o firsts\nfirst").check().text  # said once
    kernel.run("s.push(first=first)").check()
    kernel.run("%%distributed -o firsts\nfirst").check()
    assert kernel.ask("list(firsts)") == [99, 99]


def test_values_are_pushed_and_pulled(kernel: Kernel) -> None:
    kernel.run("s.push(pushed=torch.arange(3))").check()
    assert kernel.ask("[t.tolist() for t in s.pull('pushed')]") == [[0, 1, 2]] * 2
    kernel.run("s.push(pushed='one', ranks=[1])").check()
    assert kernel.ask("s.pull('pushed', ranks=[1])") == ["one"]
    assert "0, 1, 2" in kernel.run("s[0]['pushed']").check().value
    assert kernel.run("s.pull('no_such_name')").error.startswith("NameError")
    assert "0, 1, 2])\n# repr only; session.pull('pushed', ranks=[0]) returns" in kernel.run("s[0]['pushed']").value
    assert "the repr" not in kernel.ask("str(s[0]['pushed'])")
    assert "expression='1 +'" in kernel.run("s.pull('1 +')").error


def test_a_mapped_file_is_the_same_in_ranks_and_is_sent_once(kernel: Kernel, tmp_path: Path) -> None:
    file = str(tmp_path / "map")
    kernel.run(f"import numpy as np\nmapped = np.memmap({file!r}, np.int64, 'w+', shape=1 << 21)").check()
    write = "%%distributed -o wrote\nmapped[rank] += 1 + rank\nimport os\n(os.getpid(), id(mapped))"
    kernel.run(write).check()
    kernel.run("first = list(wrote); mapped[0] += 10").check()
    kernel.run(write).check()
    assert kernel.ask("mapped[:2].tolist(), np.fromfile(mapped.filename, np.int64)[:2].tolist()") == ([12, 4], [12, 4])
    assert kernel.ask("first == list(wrote), wrote.payload.copied") == (True, 0)
    kernel.run("s.push(mapped=mapped, piece=mapped[1:600])").check()
    kernel.run("%%distributed\npiece[500] = 5\nint(mapped[501])").check()
    assert kernel.ask("int(mapped[501]), [int(each[501]) for each in s.pull('mapped')]") == (5, [5, 5])
    kernel.run("import os; os.replace(mapped.filename, mapped.filename + '2')").check()
    kernel.run(f"mapped = np.memmap({file!r}, np.int64, 'w+', shape=1 << 21)").check()
    kernel.run("%%distributed -o found\nint(mapped[501])").check()
    assert kernel.ask("list(found)") == [0, 0]  # another file under the name


def test_others_are_sent_what_was_pushed_to_one_rank(kernel: Kernel) -> None:
    kernel.run("only = 1").check()
    assert on_ranks(kernel, "only") == [1, 1]
    kernel.run("only = 2\ns.push(only=only, ranks=[1])").check()
    assert on_ranks(kernel, "only") == [2, 2]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("s.push({'a': 1})", "push({'a': 1}): use keywords, as in push(a=1) or push(**{'a': 1})"),
        ("s.push(device='cpu')", "device='cpu': each rank has its own value of this name"),
        (
            "s.push(a=1, rank=0)",
            "rank=0: each rank has its own value of this name; use another name; ranks=[0] selects ranks",
        ),
        ("s.push(a=1, ranks=1)", "ranks=1: must be a list of ranks, as in ranks=[0]"),
        ("s.pull('x', ranks=[2])", "ranks=[2]: the ranks are 0 and 1"),
        ("s.pull('x', ranks=[0, 0])", "ranks=[0, 0]: must name each rank once"),
        ("s.pull('x', 'y')", "ranks='y': must be a list of ranks"),
        ("s.pull(['a', 'b'])", "expression=['a', 'b']: must be a name or an expression, as a string"),
        ("s.restart([])", "ranks=[]: must name a rank"),
        ("s.run('x = 1')", "function='x = 1': must be a function, not a str; %%distributed runs a cell"),
        ("s['x']", "session['x']: must be a rank, as in session[0]['name']; the ranks are 0 and 1"),
        ("s[5]", "session[5]: must be a rank, as in session[0]['name']; the ranks are 0 and 1"),
        ("s[0].x", "session[0].x: use session[0]['x']"),
        ("s[0]['x'] = 1", "session[0]['x'] = ...: use session.push(x=..., ranks=[0])"),
        ("%%distributed --ranks 7\n1", "--ranks 7: the ranks are 0 and 1"),
        ("%%distributed --fresh -n 1 --ranks 0,7\n1", "--ranks 0,7: the only rank is 0"),
        ("%distributed session -n 0 --name x", "--num-processes 0: must be an integer, at least 1"),
        ("%distributed session --idle-timeout 0 --name x", "--idle-timeout 0.0: must be a positive number of seconds"),
        ("%distributed session restart --rank 0,9", "--rank 0,9: the ranks are 0 and 1"),
        ("%distributed session restart --rank 0,x", "argument --rank: 0,x: must be comma-separated ranks"),
        ("%distributed session stop b", "unrecognized arguments: b; usage: %distributed session stop [--name NAME]"),
        ("%distributed session stop --name b", "--name b: no such session; running: main"),
        ("%distributed who main", "unrecognized arguments: main; usage: %distributed who [--name NAME]"),
        ("%distributed who --session b", "--name b: no such session; running: main"),
        ("%%distributed --session main --fresh\n1", "--session main --fresh: use only one of these options"),
        ("%%local 1\n1", "%%local 1: %%local takes no arguments"),
    ],
)
def test_a_misuse_is_named_as_it_was_typed(kernel: Kernel, wrong: str, said: str) -> None:
    cell = kernel.run(wrong)
    assert (f"UsageError: {said}" if wrong.startswith("%") else said) in cell.error + cell.text
    assert cell.reply["status"] == "error"


def test_what_cannot_be_pulled_is_named_in_one_line(kernel: Kernel) -> None:
    kernel.run("%%distributed\nlock = [__import__('threading').Lock()]").check()
    kernel.run("%%distributed\nddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))").check()
    cell = kernel.run("s.pull('lock')")
    assert re.match(r"ResultError: rank \d's `lock` could not be sent: lock\[0\], a thread lock,", cell.error)
    assert cell.traceback == cell.error
    assert kernel.ask("{type(each['it']).__name__ for each in s.pull('{\"it\": ddp}')}") == {"Linear"}
    shown = kernel.run("s.pull('no_such_name')").traceback
    assert "On rank" in shown
    assert "nblaunch" not in shown


def test_what_cannot_be_rebuilt_in_a_rank_is_named(kernel: Kernel) -> None:
    kernel.run(
        "class Bad:\n    def __init__(self): self.x = 1\n    def __setstate__(self, state): raise ValueError('no')"
    )
    kernel.run("bad, good = Bad(), 5").check()
    lines = {
        "%%distributed\nprint(good, bad)": "bad",
        "s.run(lambda given: given, bad)": "given",
        "s.push(pushed=[bad])": "pushed",
        "notebook_launcher(lambda: bad, num_processes=2)": "bad",
    }
    for line, name in lines.items():
        cell = kernel.run(line)
        assert cell.error == f"PayloadError: `{name}` could not be rebuilt in the rank: ValueError: no"
        assert "nblaunch/" not in cell.traceback.partition("Then, on other")[0]
        assert "line 3, in __setstate__" in cell.traceback
    assert on_ranks(kernel, "good") == [5, 5]


DECORATED = """
def logged(function):
    def wrapper(*args):
        return function(*args)
    return wrapper
extra = 5
@logged
def added(x): return x + extra
def counter():
    values = {'v': 1}
    def count(): return values['v']
    return count, values
count, values = counter()
def first(): return extra
second = first
def first(): return -1
def base():
    class Base:
        def get(self): return extra
    return Base
class Derived(base()): pass
derived = Derived()
"""


def test_functions_that_no_name_has_are_sent_with_what_they_use(kernel: Kernel) -> None:
    kernel.run(DECORATED).check()
    assert on_ranks(kernel, "added(1), second(), first(), derived.get()") == [(6, 5, -1, 5)] * 2
    assert kernel.ask("list(s.run(count, view='none'))") == [1, 1]
    kernel.run("values['v'] = 2\nextra = 6").check()
    assert kernel.ask("list(s.run(count, view='none'))") == [2, 2]
    assert on_ranks(kernel, "added(1), second(), derived.get()") == [(7, 6, 6)] * 2


def test_every_cell_shows_its_outputs(kernel: Kernel) -> None:
    many = "get_ipython().run_cell_magic('distributed', '', 'display(*[number for number in range(60)])')"
    kernel.run(f"for _ in range(3): {many}").check()
    assert "[rank 1] {'shown'}" in kernel.run("%%distributed\ndisplay({'shown'})").check().text


def test_what_cells_set_stays(kernel: Kernel) -> None:
    kernel.run("%%distributed\ntorch.set_num_threads(3)\nimport __main__\n__main__.flag = rank").check()
    assert on_ranks(kernel, "torch.get_num_threads(), __import__('__main__').flag") == [(3, 0), (3, 1)]


def test_a_private_name_that_ranks_deleted_is_sent_again(kernel: Kernel) -> None:
    kernel.run("_setting = 3").check()
    kernel.run("%%distributed\n_setting").check()
    kernel.run("%%distributed\ndel _setting").check()
    assert on_ranks(kernel, "_setting") == [3, 3]


def test_changed_modules_are_reloaded_in_the_ranks(kernel: Kernel, tmp_path: Path) -> None:
    module = tmp_path / "changing.py"
    module.write_text("value = 1")
    found = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport changing"
    kernel.run(f"%%distributed\n%load_ext autoreload\n%autoreload 2\n{found}").check()
    assert on_ranks(kernel, "changing.value") == [1, 1]
    module.write_text("value = 222")
    assert on_ranks(kernel, "changing.value") == [222, 222]


def test_a_commands_children_end_with_an_interrupt(kernel: Kernel) -> None:
    request = kernel.start_cell("%%distributed\n!echo sleeps; sleep 987 | cat")
    for rank in range(2):
        kernel.finish_cell(request, until=f"[rank {rank}] sleeps")
    kernel.interrupt()
    cell = kernel.finish_cell(request)
    assert cell.error.startswith("KeyboardInterrupt")
    assert kernel.ask("__import__('subprocess').run(['pgrep', '-f', 'sleep 987']).returncode") == 1


def test_odd_names_cost_no_rank(kernel: Kernel) -> None:
    before = on_ranks(kernel, "os.getpid()")
    body = "globals()[5] = 1\nclass Odd:\n    @property\n    def shape(self): time.sleep(100)\nodd = Odd()"
    kernel.run(f"%%distributed\n{body}").check()
    refuses = "class Refuses:\n    __slots__ = ()\n    def __getattr__(self, name): raise RuntimeError(name)"
    property_ = "class Odd:\n    @property\n    def __dict__(self): raise ValueError"
    kernel.run(f"%%distributed\n{refuses}\n{property_}\nrefuses, odd = Refuses(), Odd()").check()
    assert on_ranks(kernel, "os.getpid()") == before


def test_who_and_completion_know_the_ranks_names(kernel: Kernel) -> None:
    kernel.run("%%distributed\nfeatures = torch.zeros(3, 5)").check()
    assert "features: Tensor (3, 5) float32" in kernel.run("%distributed who").check().text
    completed = "s.complete('featu'), s.complete('features.contig')"  # by ranks that may be too late
    eventually(lambda: kernel.ask(completed) == (["features"], ["features.contiguous"]))


def test_some_ranks_may_run_a_cell_alone(kernel: Kernel) -> None:
    kernel.run("%%rank 1\nalone = True").check()
    assert on_ranks(kernel, "'alone' in globals()") == [False, True]
    assert "%%rank 2: the ranks are 0 and 1" in kernel.run("%%rank 2\n1").text
    assert "%%rank: give only ranks, as in %%rank 0" in kernel.run("%%rank\n1").text
    assert "%%rank 0 -o x: give only ranks" in kernel.run("%%rank 0 -o x\n1").text


# ------------------------------------------------------------------ interrupts and failures
@pytest.mark.parametrize(
    "body",
    ["dist.barrier() if rank == 0 else time.sleep(100)", "time.sleep(100)", "dist.recv(torch.ones(1), 1 - rank)"],
    ids=["a collective", "Python", "recv"],
)
def test_an_interrupt_keeps_the_variables(kernel: Kernel, body: str) -> None:
    cell = interrupted(kernel, f"state = rank + 5\n{BEGUN}\n{body}")
    assert cell.error.startswith("KeyboardInterrupt")
    assert on_ranks(kernel, f"{REDUCES} + state") == [7.0, 8.0]


def test_an_interrupt_frees_ddp_and_names_what_is_stale(kernel: Kernel) -> None:
    kernel.run("%%distributed\nddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))").check()
    cell = interrupted(kernel, f"{BEGUN}\nddp(torch.ones(2)).sum().backward() if rank == 0 else time.sleep(100)")
    assert cell.error.startswith("KeyboardInterrupt")
    assert "ddp: made for the old process group" in cell.text
    kernel.run("%%distributed\nddp = torch.nn.parallel.DistributedDataParallel(ddp.module)").check()
    kernel.run("%%distributed\nddp(torch.ones(2)).sum().backward()").check()


def test_an_exception_frees_the_other_ranks_and_keeps_their_names(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed\nbefore = rank\ndist.barrier()\nif rank: raise ValueError('no')\ndist.barrier()")
    assert cell.error == "ValueError: no"
    assert cell.seconds < 45
    assert on_ranks(kernel, f"{REDUCES} + before") == [2.0, 3.0]


def test_exceptions_on_every_rank_keep_the_process_group(kernel: Kernel) -> None:
    kernel.run("%distributed session regroup").check()
    kernel.run("%%distributed\nown = dist.new_group()").check()
    with kernel.changed("nblaunch.machine.timeouts", "PEER_FAILURE_WAIT_S", 60.0):
        cell = kernel.run("%%distributed\nt = torch.ones(1)\ndist.barrier()\n1 / 0")
    assert cell.error.startswith("ZeroDivisionError")
    assert on_ranks(kernel, "dist.all_reduce(t, group=own)\nt.item()") == [2.0, 2.0]
    cell = kernel.run("%%distributed\n1 / 0 if rank else dist.all_reduce(torch.ones(1))")
    assert cell.error.startswith("ZeroDivisionError")
    assert re.search(r"\bown\b.*: made for the old process group; create again", cell.text)
    kernel.run("%%distributed\ndel own").check()
    assert on_ranks(kernel, REDUCES) == [2.0, 2.0]


def test_objects_that_hold_a_stale_group_are_named(kernel: Kernel) -> None:
    kernel.run(
        "%%distributed\nwrapped = [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))]\n"
        "mesh = dist.device_mesh.init_device_mesh('cpu', (2,))"
    ).check()
    said = kernel.run("%distributed session regroup").check().text
    assert re.search(r"\bmesh\b.*\bwrapped\b.*: made for the old process group", said)
    kernel.run("%%distributed\ndel wrapped, mesh").check()


def test_an_interrupted_question_frees_its_collective(kernel: Kernel) -> None:
    before = on_ranks(kernel, "os.getpid()")
    kernel.run("%%distributed\nreached = []\ndef waits():\n    reached.append(1)\n    dist.barrier()").check()
    for body in ("x = 1", REDUCES):
        request = kernel.start_cell("print('asking', flush=True)\ns.pull('waits()', ranks=[0])")
        kernel.finish_cell(request, until="asking")
        kernel.interrupt()
        assert kernel.finish_cell(request).error.startswith("KeyboardInterrupt")
        cell = kernel.run(f"%%distributed\n{body}").check()
        assert cell.seconds < 45
    assert on_ranks(kernel, f"{REDUCES}, os.getpid()") == [(2.0, pid) for pid in before]


def test_a_question_may_begin_a_collective_on_one_rank(kernel: Kernel) -> None:
    assert on_ranks(kernel, REDUCES) == [2.0, 2.0]
    kernel.run("s.pull('bool(dist.all_reduce(torch.ones(4), async_op=True))', ranks=[0])").check()
    assert on_ranks(kernel, REDUCES) == [2.0, 2.0]
    kernel.run("%distributed session regroup").check()


def test_a_question_that_fails_on_one_rank_frees_the_others(kernel: Kernel) -> None:
    kernel.run("%%distributed\ndef fails():\n    1 / 0 if rank else dist.barrier()").check()
    kernel.run(
        "try: s.pull('fails()')\nexcept ZeroDivisionError as error: rank_of, cause = error.rank, error.__cause__"
    )
    assert kernel.ask("rank_of, 'in fails' in str(cause)") == (1, True)
    assert on_ranks(kernel, REDUCES) == [2.0, 2.0]


def test_collectives_that_some_ranks_alone_have_begun_are_named(kernel: Kernel) -> None:
    kernel.run("%distributed session regroup").check()
    cell = kernel.run(
        "%%distributed\nt = torch.ones(4)\nif rank == 0:\n    work = dist.all_reduce(t, async_op=True)"
    ).check()
    assert "rank 0 called 1 in this group, the last all_reduce #1 (4 float32, Cell In[" in cell.text
    assert "], line 4); rank 1 called none." in cell.text
    assert on_ranks(kernel, "a = torch.ones(1) * 5\ndist.all_reduce(a)\na.item()") == [10.0, 10.0]
    kernel.run("%distributed session regroup").check()
    ddp = "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\nddp(torch.ones(2)).sum().backward()"
    sends = "dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)"
    kernel.run(f"%%distributed\n{ddp}\n{sends}").check()
    assert "collectives" not in kernel.run(f"%%distributed\n{ddp}\n{sends}").check().text
    assert "collectives" not in kernel.run("%%rank 0\n1").check().text


def test_collectives_of_a_thread_of_the_user_raise_no_alarm(kernel: Kernel) -> None:
    work = "while not dist.all_reduce(flag := torch.zeros(1) + over) and not flag.item(): time.sleep(0.01 * (rank + 1))"
    body = (
        f"import threading\nover = 0\ndef work():\n    {work}\nthread = threading.Thread(target=work)\nthread.start()"
    )
    kernel.run(f"%%distributed\n{body}").check()
    for _ in range(5):
        assert "collectives" not in kernel.run("%%distributed\n1").check().text
    kernel.run("%%distributed\nover = 1\nthread.join()").check()


def test_a_dead_rank_costs_only_itself(kernel: Kernel) -> None:
    kernel.run("%%distributed\nsurvivor = rank + 1").check()
    cell = kernel.run("%%distributed\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)")
    assert "RankDiedError: rank 1 was killed by SIGKILL" in cell.error
    assert "%distributed session restart --rank 1" in cell.text
    assert kernel.ask("s.pull('survivor', ranks=[0])") == [1]
    assert "rank 1 is dead" in kernel.run("s.pull('survivor')").error
    assert "[rank 0] 1" in kernel.run("%%distributed\nsurvivor").check().text
    cell = kernel.run(f"%%distributed\n{REDUCES}")
    assert "process group" in cell.error
    assert "`%distributed session restart --rank 1` restarts it and creates the group" in cell.traceback
    kernel.run("%distributed session restart --rank 1").check()
    assert on_ranks(kernel, f"{REDUCES}, 'survivor' in globals()") == [(2.0, True), (2.0, False)]


def test_a_death_while_the_group_is_made_frees_the_others(kernel: Kernel) -> None:
    kernel.run("%%distributed\nspared = rank").check()
    kernel.run("%distributed session regroup").check()
    dies = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None"
    cell = kernel.run(f"%%distributed\n{dies}\ntorch.distributed.new_group()")
    assert "RankDiedError" in cell.error
    assert cell.seconds < 45
    assert kernel.ask("s.pull('spared', ranks=[0])") == [0]
    kernel.run("%distributed session restart").check()


def test_a_cell_without_ranks_says_so(kernel: Kernel) -> None:
    pids = on_ranks(kernel, "os.getpid()")
    kills = f"for pid in {pids[::-1]}: os.kill(pid, signal.SIGKILL) if rank == 0 else time.sleep(60)"
    noted = kernel.run(f"%%distributed\n{kills}").text
    assert "every rank is dead, and all variables are lost. `%distributed session restart` restarts them" in noted
    assert "The other ranks keep theirs" not in noted
    dead = "every rank of session main is dead: `%distributed session restart` restarts them"
    assert dead in kernel.run("%%distributed\n1").error
    assert dead in kernel.run("s.push(a=1)").error
    assert dead in kernel.run("s.pull('a')").error
    kernel.run("%distributed session restart").check()
    assert on_ranks(kernel, REDUCES) == [2.0, 2.0]


def test_the_cell_of_a_session_without_ranks_starts_it_again(kernel: Kernel) -> None:
    """The ranks die between two cells."""
    kernel.run("import os, signal").check()
    kernel.run("for pid in s.pull('__import__(\"os\").getpid()'): os.kill(pid, signal.SIGKILL)").check()
    eventually(lambda: kernel.run("%distributed session status").check().text.count("dead") == 2)
    said = "session main had lost its ranks and their variables: started 2 ranks again"
    assert said in kernel.run("again = nblaunch.session(2)").check().text
    assert on_ranks(kernel, REDUCES) == [2.0, 2.0]


def test_questions_cost_no_process_group(kernel: Kernel) -> None:
    kernel.run("%%distributed\nclass Slow:\n    @property\n    def x(self): time.sleep(2)\nslow = Slow()").check()
    before = kernel.ask("s._ranks.generation")
    kernel.run("s.complete('slow.x')").check()
    assert kernel.run("s.pull('no_such_name')").error.startswith("NameError")
    assert kernel.ask("s._ranks.generation") == before


def test_a_restart_may_keep_what_can_be_sent(kernel: Kernel) -> None:
    kernel.run("%%distributed\nheld = [rank, torch.ones(2) * rank]\nbolt = __import__('threading').Lock()").check()
    pids = on_ranks(kernel, "os.getpid()")
    for _ in range(2):
        kernel.run("%%distributed\nbolt = __import__('threading').Lock()").check()
        assert "rank 1: `bolt`, a thread lock, which cannot" in kernel.run("%distributed session restart --keep").text
    assert on_ranks(kernel, "held[0], held[1].sum().item(), 'bolt' in globals()") == [(0, 0.0, False), (1, 2.0, False)]
    assert not set(pids) & set(on_ranks(kernel, "os.getpid()"))
    kernel.run("%distributed session restart").check()
    assert on_ranks(kernel, "'held' in globals()") == [False, False]


def test_a_restart_keeps_the_rest_of_what_a_process_group_spoils(kernel: Kernel) -> None:
    kernel.run("%%distributed\nddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))").check()
    kernel.run("%%distributed\nholder, weight = [ddp], ddp.module.weight\nglobals()[5] = 1").check()
    kernel.run("%%distributed\nsgd = torch.optim.SGD(ddp.parameters(), lr=rank + 1.0)").check()
    cell = kernel.run("%distributed session restart --keep").check()
    assert "rank 0: `holder` holds a DistributedDataParallel, which needs the old process group" in cell.text
    assert "rank 1: only the module inside `ddp` was kept: wrap it again" in cell.text
    assert on_ranks(
        kernel, "'holder' in globals(), type(ddp).__name__, weight is ddp.weight, sgd.param_groups[0]['lr']"
    ) == [
        (False, "Linear", True, 1.0),
        (False, "Linear", True, 2.0),
    ]
    assert on_ranks(kernel, "sgd.param_groups[0]['params'][0] is ddp.weight") == [True, True]
    kernel.run(
        "%%distributed\nddp = torch.nn.parallel.DistributedDataParallel(ddp)\nddp(torch.ones(2))\ndel ddp"
    ).check()


def test_a_restart_loses_the_names_alone_that_fail(kernel: Kernel) -> None:
    fails = (
        "class Fails:\n    def __getstate__(self): return 1\n    def __setstate__(self, state): raise ValueError('no')"
    )
    keyed = "class Keyed(Fails):\n    def __hash__(self): return self.number"
    called = "class Called:\n    def __reduce__(self): return int, ('x',)"
    kernel.run(
        f"%%distributed\n{fails}\n{keyed}\n{called}\nkeyed = Keyed()\nkeyed.number = 1\nkeyed = {{keyed: 2}}"
    ).check()
    kernel.run(
        "%%distributed\nshared, fine = [rank], torch.ones(2) * rank\nbroken = Fails()\nholds = [broken, shared, fine]\n"
        "calls, pair, model = Called(), (shared, fine), torch.nn.Linear(1, 1)\n"
        "sgd = torch.optim.SGD(model.parameters())"
    ).check()
    cell = kernel.run("%distributed session restart --keep").check()
    assert "rank 1: `broken` could not be rebuilt (ValueError: no)" in cell.text
    for name in ("holds", "keyed", "calls"):
        assert f"rank 0: `{name}` could not be rebuilt" in cell.text
    assert "all names" not in cell.text
    lost = "[name for name in ('broken', 'holds', 'keyed', 'calls') if name in globals()]"
    same = "pair[0] == shared, pair[1] is fine, sgd.param_groups[0]['params'][0] is model.weight"
    assert on_ranks(kernel, f"shared, fine.sum().item(), {same}, {lost}, Fails.__name__") == [
        ([rank], 2.0 * rank, True, True, True, [], "Fails") for rank in range(2)
    ]


def test_a_module_of_the_notebook_that_fails_is_sent_again(kernel: Kernel, tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    check = f"if __import__('os').path.exists({str(fails)!r}): raise OSError('picky')"
    state = f"def __setstate__(self, state):\n        {check}\n        super().__setstate__(state)"
    kernel.run(f"class Picky(torch.nn.Linear):\n    {state}\npicky = Picky(1, 1)").check()
    kernel.run("%%rank 0\npicky.bias.data.fill_(7)").check()
    fails.touch()
    for _ in range(2):
        said = kernel.run("%distributed session restart --keep --rank 0").check().text
        assert ("rank 0: `picky` could not be rebuilt (OSError: picky)" in said) == fails.exists()
        fails.unlink(missing_ok=True)
    assert "[rank 0] True" in kernel.run("%%rank 0\npicky.bias.item() != 7").check().text


def test_a_restarted_rank_rebuilds_its_own_names_alone(kernel: Kernel, tmp_path: Path) -> None:
    write = f"open({str(tmp_path)!r} + f'/{{os.environ[\"RANK\"]}}', 'a').write(str(state))"
    writes = f"def __getstate__(self): return os.environ['RANK'] + ' '\n    def __setstate__(self, state): {write}"
    kernel.run(f"%%distributed\nimport os\nclass Writes:\n    {writes}\nwrites = Writes()").check()
    kernel.run("%distributed session restart --keep").check()
    kernel.run("%%distributed\ndel writes").check()
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0 ", "1 "]


def test_a_restart_that_hangs_can_be_interrupted(kernel: Kernel, tmp_path: Path) -> None:
    state = (
        f"def __setstate__(self, state): open({str(tmp_path / 'begun')!r}, 'w').close(), __import__('time').sleep(600)"
    )
    body = f"class Hangs:\n    def __getstate__(self): return 1\n    {state}\nhangs = Hangs()"
    kernel.run(f"%%distributed\n{body}").check()
    request = kernel.start_cell("%distributed session restart --keep")
    eventually((tmp_path / "begun").exists)
    kernel.interrupt()
    cell = kernel.finish_cell(request)
    assert cell.error.startswith("KeyboardInterrupt")
    assert "all names (they could not be rebuilt" in cell.text
    assert on_ranks(kernel, REDUCES) == [2.0, 2.0]


def test_a_signal_that_comes_too_early_to_end_a_call_is_sent_again(kernel: Kernel) -> None:
    loses = (
        "sent, real = [], signal.pthread_kill\nsignal.pthread_kill = lambda *to: real(*to) if sent else sent.append(to)"
    )
    before = on_ranks(kernel, f"{loses}\nos.getpid()")
    try:
        assert interrupted(kernel, f"{BEGUN}\ntime.sleep(600)").error.startswith("KeyboardInterrupt")
        assert on_ranks(kernel, "len(sent), os.getpid()") == [(1, pid) for pid in before]
    finally:
        kernel.run("%%distributed\nsignal.pthread_kill = real").check()


def test_a_restarted_rank_has_the_notebooks_settings(kernel: Kernel) -> None:
    kernel.run("torch.set_default_dtype(torch.float64)").check()
    try:
        kernel.run("%distributed session restart --rank 1").check()
        assert on_ranks(kernel, "torch.zeros(1).dtype == torch.float64") == [False, True]
    finally:
        kernel.run("torch.set_default_dtype(torch.float32)\n%distributed session restart").check()
    assert on_ranks(kernel, REDUCES) == [2.0, 2.0]


def test_a_collective_in_finally_ends(kernel: Kernel) -> None:
    saves = "    time.sleep(1)\n    dist.barrier()\n    saved = True"
    with kernel.changed("nblaunch.machine.timeouts", "FREE_DELAY_S", 60.0):
        cell = interrupted(kernel, f"try: {BEGUN}; time.sleep(100)\nfinally:\n{saves}")
    assert cell.error.startswith("KeyboardInterrupt")
    assert on_ranks(kernel, "saved") == [True, True]


def test_interrupts_of_short_tasks_cost_no_rank(kernel: Kernel) -> None:
    before = on_ranks(kernel, "os.getpid()")
    for _ in range(3):
        kept = "kept.append(s.run(len, 'ab', view='none'))"  # Python ignores an interrupt in what frees a result
        request = kernel.start_cell(f"kept = []\nprint('looping', flush=True)\nwhile True: {kept}")
        kernel.finish_cell(request, until="looping")
        kernel.interrupt()
        assert kernel.finish_cell(request).error.startswith("KeyboardInterrupt")
    assert on_ranks(kernel, "os.getpid()") == before


def test_an_interrupt_between_two_lines_of_ours_costs_no_rank(kernel: Kernel) -> None:
    before = on_ranks(kernel, "os.getpid()")
    kernel.run("sleeping = s.run(time.sleep, 600, view='none', block=False)\nsleeping._abandon()").check()
    assert kernel.ask("sleeping.done") is True
    assert on_ranks(kernel, "os.getpid()") == before


def test_a_question_that_is_stuck_in_c_code_costs_no_rank(kernel: Kernel) -> None:
    before = on_ranks(kernel, "os.getpid()")
    held = "libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\nlibc.pthread_mutex_lock(mutex)"
    body = "libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(time.time()) + 9))"
    slow = f"class Slow:\n    @property\n    def x(self): return {body}\nslow = Slow()"
    kernel.run(f"%%distributed\nimport ctypes\n{held}\n{slow}").check()
    kernel.run("begun = time.monotonic()\nfound = s.complete('slow.x.')\nlasted = time.monotonic() - begun").check()
    assert kernel.ask("found, lasted < 7") == ([], True)
    assert on_ranks(kernel, "os.getpid()") == before


def test_a_busy_session_completes_from_what_it_knew(kernel: Kernel) -> None:
    kernel.run("%%distributed\nremembered = torch.zeros(7)").check()
    kernel.run("%%distributed --background -o busy\ntime.sleep(1)").check()
    assert kernel.ask("s.complete('rememb')") == ["remembered"]
    kernel.run("busy.wait()").check()


def test_a_dead_rank_is_named_by_whatever_asks_it(kernel: Kernel) -> None:
    generation = kernel.ask("s._ranks.generation")
    kernel.run(f"os.kill({on_ranks(kernel, 'os.getpid()')[1]}, signal.SIGKILL)").check()
    said = "dead, its variables are lost; `%distributed session restart --rank 1` restarts it"
    eventually(lambda: f"rank 1: {said}" in kernel.ask("s.status()"))
    assert kernel.run("%distributed who").check().text.endswith(f"rank 1\n  {said}\n")
    assert kernel.run("s[1]").check().value == said
    assert "RankDiedError: rank 1 is dead: `%distributed" in kernel.run("s[1]['x']").error
    assert "pull('rank'): rank 1 is dead; use ranks=[0], or restart it: `%dist" in kernel.run("s.pull('rank')").error
    assert kernel.ask("s._ranks.generation") > generation
    kernel.run("%distributed session restart --rank 1").check()
    assert on_ranks(kernel, REDUCES) == [2.0, 2.0]


# ------------------------------------------------------------------ several cells, several sessions
def test_background_cells_queue_in_their_order(kernel: Kernel) -> None:
    kernel.run("%%distributed\nseen = []").check()
    for number in range(3):
        kernel.run(f"%%distributed --background -o job{number}\ntime.sleep(0.1)\nseen.append({number})").check()
    assert on_ranks(kernel, "seen") == [[0, 1, 2]] * 2
    assert kernel.ask("[job0.done, job1.done, job2.done]") == [True] * 3


def test_what_waits_for_a_running_cell_says_so(kernel: Kernel) -> None:
    kernel.run("%%distributed --background -o sleeping\nkept = 7\ntime.sleep(600)").check()
    kernel.run("%%distributed --background -o later\nkept").check()
    status = kernel.run("%distributed status").check().text
    assert status.index("ranks, running for") < status.index("ranks, queued for")
    for line in ("s.pull('kept')", "s.push(kept=8)", "s[0]['kept']", "%distributed session restart"):
        request = kernel.start_cell(line)
        kernel.finish_cell(request, until=", with 1 more ahead; interrupt to stop waiting")
        kernel.interrupt()
        cell = kernel.finish_cell(request)
        assert re.search(r"nblaunch: queued: session main is running Cell In\[\d+\], with 1 more ahead", cell.text)
        assert cell.error.startswith("KeyboardInterrupt")
    kernel.run("sleeping.stop()").check()
    assert kernel.ask("list(later.result())") == [7, 7]


def test_a_queued_cell_has_the_value_of_its_call(kernel: Kernel) -> None:
    kernel.run("turn = 1").check()
    kernel.run("%%distributed\nturn").check()
    kernel.run("%%distributed --background\ntime.sleep(0.3)").check()
    for value in (2, 1):
        kernel.run(f"turn = {value}").check()
        kernel.run(f"%%distributed --background -o turn{value}\nturn").check()
    assert kernel.ask("list(turn2.result()), list(turn1.result())") == ([2, 2], [1, 1])


def test_a_timeout_does_not_count_the_queue(kernel: Kernel) -> None:
    kernel.run("%%distributed --background\ntime.sleep(4.5)").check()
    kernel.run("%%distributed --timeout 4\ntime.sleep(0.1)").check()


def test_sessions_have_names_and_options_that_fit(kernel: Kernel) -> None:
    kernel.run("%distributed session -n 1 --name other -o other").check()
    assert kernel.ask("other.name") == "other"
    assert "other sessions: main (--name chooses one)" in kernel.run("%distributed session status").check().text
    kernel.run("%%distributed --session other\nplace = 'other'").check()
    assert kernel.run("%%distributed --session main\nplace").error.startswith("NameError")
    again = kernel.run("%distributed session -n 1 --name other -o same").check().text
    assert "session other is running: 1 rank, with" in again
    assert kernel.run("same is other, nblaunch.session(1, name='other') is other").check().value == "(True, True)"
    differs = kernel.run("nblaunch.session(2, name='other')").error
    assert differs.startswith("ArgumentError: num_processes=2: session other is already running with num_processes=1.")
    assert (
        "--device cpu: cannot be changed in session main"
        in kernel.run("%%distributed --session main --device cpu\n1").text
    )
    kernel.run("%distributed session stop --name other").check()
    assert "no such session" in kernel.run("%%distributed --session other\n1").text
    assert "other sessions" not in kernel.run("%distributed session status").check().text
    assert on_ranks(kernel, "world_size", "--session main") == [2, 2]


def test_a_fresh_cell_has_ranks_of_its_own(kernel: Kernel) -> None:
    kernel.run("%%distributed\nhere = 1").check()
    assert on_ranks(kernel, "'here' in globals()", "--fresh -n 2") == [False, False]


def test_auto_sends_every_cell_and_local_does_not(kernel: Kernel) -> None:
    kernel.run("from nblaunch.notebook import cells\n(cut := cells.paused()).__enter__()  # by an interrupt").check()
    kernel.run("import textwrap\ntextwrap.TextWrapper.x = False\ndef of_notebook(a): 'A doc.'").check()
    kernel.run("%distributed auto on").check()
    try:
        assert "[rank 1] 2" in kernel.run("automatic = 2 * rank\nautomatic").check().text
        assert kernel.run("%%local\n'automatic' in globals()").check().value == "False"
        assert "Wall time" in kernel.run("%%time\ntimed = rank").check().text
        assert "automatic" in kernel.complete("automat")
        kernel.run("def of_ranks(b): 'Another doc.'").check()
        assert "Signature: of_ranks(b)" in without_colours(kernel.run("of_ranks?").check().text)
        assert "[rank" not in kernel.run("of_notebook?").check().text
        kernel.run("textwrap.TextWrapper.x = torch.backends.cudnn.benchmark = True").check()
        assert (
            "[rank 1] (True, True)" in kernel.run("torch.backends.cudnn.benchmark, textwrap.TextWrapper.x").check().text
        )
        assert "Wall time" in kernel.run("%%local\n\n%%time\nhere = 1").check().text
    finally:
        kernel.run("%distributed auto off").check()
    assert kernel.run("automatic").error.startswith("NameError")
    assert kernel.run("timed").error.startswith("NameError")


@pytest.mark.parametrize("leaves", ["exit()", "import sys\nsys.exit(3)", "get_ipython().ask_exit()"])
def test_exit_ends_the_cell_and_no_rank(kernel: Kernel, leaves: str) -> None:
    kernel.run("%%distributed\nstays = rank + 5").check()
    error = kernel.run(f"%%distributed\n{leaves}").error
    assert re.match(
        r"RankRaisedError: rank \d called exit with status [03], which stops Cell In\[\d+\] on every", error
    )
    assert "`%distributed session stop` ends the ranks" in error
    assert on_ranks(kernel, "stays") == [5, 6]


@pytest.mark.parametrize(
    ("name", "made", "what"),
    [("s", "s", "a session"), ("going", "going = s.run(lambda: 1, block=False)\ngoing.wait()", "a launch")],
)
def test_what_belongs_to_the_notebook_is_named(kernel: Kernel, name: str, made: str, what: str) -> None:
    kernel.run(made).check()
    said = f"PayloadError: `{name}`, {what}, which works only in the notebook: write %%local"
    for code in (f"%%distributed\nprint({name})", f"s.run(lambda: {name})", f"s.push(x={name})"):
        assert kernel.run(code).error.replace("`x`", f"`{name}`").startswith(said)


@pytest.mark.parametrize("code", ["s.run(lambda: 1 / 0)", "s.pull('1 / 0')"])
def test_an_error_of_ranks_says_where_the_user_called(kernel: Kernel, code: str) -> None:
    cell = kernel.run(f"def of_user():\n    {code}\nof_user()")
    shown = without_colours(cell.traceback)
    count = cell.reply["execution_count"]
    assert "On rank" in shown
    assert (
        f"Called from:\n  Cell In[{count}], line 3, in <module>\n    of_user()\n"
        f"  Cell In[{count}], line 2, in of_user\n    {code}"
    ) in shown
    assert "Called from" not in kernel.run(code).traceback


@pytest.mark.parametrize(
    "code", ["s.push(lock=threading.Lock())", "s.run(print, threading.Lock())", "s.pull('', ranks=[9])", "s['x']"]
)
def test_errors_show_the_users_frames_alone(kernel: Kernel, code: str) -> None:
    cell = kernel.run(f"import threading\ndef of_user():\n    {code}\nof_user()")
    shown = without_colours(cell.traceback)
    assert cell.error
    assert f"----> 3     {code}\n" in shown
    assert "----> 4 of_user()\n" in shown
    assert "nblaunch/" not in shown
    assert "skipping hidden" not in shown


@pytest.mark.parametrize(
    ("body", "line"), [("a = 1\n1/0", 2), ("%%rank 0\na = 1\n1/0", 3), ("%%local\na = 1\n1/0", 3), ("\n\n1/0", 1)]
)
def test_auto_counts_a_cells_lines_as_typed(kernel: Kernel, body: str, line: int) -> None:
    kernel.run("%distributed auto on").check()
    try:
        failed, wrong = kernel.run(body), kernel.run(body.replace("1/0", "if 1"))
    finally:
        kernel.run("%distributed auto off").check()
    count = failed.reply["execution_count"]
    assert f"Cell In[{count}], line {line}" in without_colours(failed.traceback)
    assert "nblaunch/" not in without_colours(failed.traceback).partition("Logs:")[0]
    assert without_colours(wrong.traceback) == (
        f"  Cell In[{count + 1}], line {line}\n    if 1\n        ^\nSyntaxError: expected ':'\n"
    )


def test_auto_without_a_session_runs_nothing(kernel: Kernel) -> None:
    kernel.run("%distributed session -n 1 --name short").check()
    kernel.run("%distributed auto on").check()
    try:
        assert kernel.run("# is this help?\n'ran in ' + str(world_size)").check().text.count("ran in 1") == 1
        kernel.run("%distributed session stop --name short\n_all._active = ''").check()
        cell = kernel.run("wrong = 1")
        again = "session short has ended: start it again with `%distributed session -n 1 --name short`"
        assert f"%distributed auto is on, but {again}" in cell.error
    finally:
        kernel.run("%distributed auto off").check()
    assert kernel.ask("'wrong' in globals()") is False
    kernel.run("_all._active = 'main'").check()


def test_an_idle_session_stops_and_the_one_used_before_is_active(kernel: Kernel) -> None:
    kernel.run("second = nblaunch.session(1, name='second')").check()
    kernel.run("%%distributed --session main\n1").check()
    kernel.run("brief = nblaunch.session(1, name='brief', idle_timeout=0.3)").check()
    eventually(lambda: kernel.ask("getattr(_all._ended, 'name', '') == 'brief'"))
    assert "has ended after 0.3 s without a task: start it again" in kernel.run("brief.run(print)").error
    said = kernel.run("%%distributed\n1").text
    assert "session brief ended after its --idle-timeout, and its variables are lost" in said
    assert "run the cell again in session main" in said
    assert on_ranks(kernel, "world_size") == [2, 2]
    kernel.run("second.stop()").check()


def test_a_cell_says_once_that_its_session_has_ended(kernel: Kernel) -> None:
    kernel.run("%distributed session -n 1 --name over").check()
    kernel.run("%%distributed\nheld = 1").check()
    kernel.run("%distributed session stop --name over").check()
    again = "start it again with `%distributed session -n 1 --name over`"
    said = "session over has ended, and its variables are lost: this cell runs"
    assert f"{said} in session main; {again}\n" in kernel.run("%%distributed\n1").check().text
    assert "has ended" not in kernel.run("%%distributed\n1").check().text
    kernel.run("%distributed session -n 1 --name over").check()
    kernel.run("%distributed session stop --name over\n_all._active = ''").check()
    try:
        assert f"%%rank: session over has ended: {again}" in kernel.run("%%rank 0\n1").text
        cell = kernel.run("%%distributed -n 1\nheld")
        assert f"{said} on new ranks; {again}\n" in cell.text
        assert cell.error.startswith("NameError")
        assert "has ended" not in kernel.run("%%distributed -n 1\n1").check().text
        assert f"session over has ended: {again}" in kernel.run("%distributed who").text
    finally:
        kernel.run("_all._active = 'main'").check()


def test_a_reload_of_the_extension_keeps_sessions(kernel: Kernel) -> None:
    kernel.run("%%distributed\nreloaded = rank").check()
    kernel.run("%reload_ext nblaunch").check()
    assert on_ranks(kernel, "reloaded") == [0, 1]


def test_a_third_interrupt_kills_the_ranks(kernel: Kernel) -> None:
    kernel.run("%distributed session -n 1 --name stubborn").check()
    body = f"try: {BEGUN}; time.sleep(60)\nfinally: print('cleaning', flush=True); time.sleep(60)"
    request = kernel.start_cell(f"%%distributed --session stubborn\n{body}")
    for shown in ("[rank 0] begun", "s left; interrupt twice more to kill now", "s left; interrupt again to kill now"):
        kernel.finish_cell(request, until=shown)
        kernel.interrupt()
    cell = kernel.finish_cell(request)
    assert cell.error
    assert "interrupt again to kill the ranks that do not respond" in cell.text
    assert cell.seconds < 45
    assert "`%distributed session restart --name stubborn`" in kernel.run("%%distributed --session stubborn\n1").error
    kernel.run("%distributed session stop --name stubborn\n").check()
    kernel.run("%%distributed --session main\n1").check()


def test_an_interrupted_stop_kills_the_ranks(kernel: Kernel) -> None:
    kernel.run("slow = nblaunch.session(1, name='slow')").check()
    body = f"try: {BEGUN}; time.sleep(60)\nfinally: print('ending', flush=True); time.sleep(60)"
    running = kernel.start_cell(f"%%distributed --background --session slow\n{body}")
    kernel.follow_cell(running, "[rank 0] begun")
    request = kernel.start_cell("slow.stop()")
    kernel.follow_cell(running, "[rank 0] ending")
    kernel.interrupt()
    cell = kernel.finish_cell(request)
    assert cell.error.startswith("KeyboardInterrupt")
    assert cell.seconds < 45
    assert kernel.ask("slow.is_open") is False
    kernel.run("%%distributed --session main\n1").check()


STARTS = """
import threading
def interrupted_after(seconds):
    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT])
    try:
        timer.start()
        nblaunch.session(2, name='early')
        time.sleep(60)
    except KeyboardInterrupt:
        made = _all.live_sessions().get('early')
        if made is not None: made.stop()
        return made is None
"""


def test_an_interrupt_while_ranks_start_leaves_none(kernel: Kernel) -> None:
    kernel.run(STARTS).check()
    with leaving_nothing():
        kernel.run("early = [interrupted_after(0.004 * number) for number in range(16)]").check()
    assert kernel.ask("any(early)") is True
    kernel.run("%%distributed --session main\n1").check()


def test_an_interrupt_while_ranks_import_torch_leaves_none(kernel: Kernel) -> None:
    with leaving_nothing():
        before = marked_processes()
        request = kernel.start_cell("nblaunch.session(1, name='imports', start_method='spawn')")
        eventually(lambda: any("worker" in command_of(pid) for pid in marked_processes() - before))
        kernel.interrupt()
        cell = kernel.finish_cell(request)
    assert cell.error.startswith("KeyboardInterrupt")
    with leaving_nothing():
        kernel.run("with nblaunch.session(1, name='imports') as imports: imports.run(len, 'ab', view='none')").check()
    kernel.run("%%distributed --session main\n1").check()


def test_an_interrupt_of_a_stop_that_waits_kills_the_ranks(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("%distributed session -n 2 --name ending").check()
    hangs = f"open({str(tmp_path / 'begun')!r}, 'w').close(), time.sleep(600)"
    pids = on_ranks(kernel, f"import atexit\natexit.register(lambda: ({hangs}))\nos.getpid()", "--session ending")
    with kernel.changed("nblaunch.machine.timeouts", "KEPT_EXIT_TIMEOUT_S", 600.0):
        request = kernel.start_cell("%distributed session stop --name ending")
        eventually((tmp_path / "begun").exists)
        kernel.interrupt()
        cell = kernel.finish_cell(request)
    assert cell.error.startswith("KeyboardInterrupt")
    eventually(lambda: not any(alive(int(str(pid))) for pid in pids))
    kernel.run("%distributed session -n 2 --name ending").check()
    assert on_ranks(kernel, REDUCES, "--session ending") == [2.0, 2.0]
    kernel.run("%distributed session stop --name ending").check()
    kernel.run("%%distributed --session main\n1").check()


def test_many_cells_leave_nothing(kernel: Kernel) -> None:
    count = "len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))"
    links = "[os.readlink(entry.path) for entry in os.scandir('/proc/self/fd') if os.path.islink(entry.path)]"
    cell = "get_ipython().run_cell_magic('distributed', '', 'n = 1')"
    kernel.run(f"for _ in range(20): {cell}").check()
    before, of_ranks = kernel.ask(count), on_ranks(kernel, count)
    events = kernel.ask(f"{links}.count('anon_inode:[eventfd]')")
    kernel.run(f"for _ in range(60): {cell}").check()
    after, of_ranks_after = kernel.ask(count), on_ranks(kernel, count)
    assert after[0] <= before[0] + 60 + 10  # the logs' locks: at most 100 stay
    assert after[1] <= before[1] + 2
    assert kernel.ask(f"{links}.count('anon_inode:[eventfd]')") <= events + 5  # of the threads that have published
    assert of_ranks_after == of_ranks
