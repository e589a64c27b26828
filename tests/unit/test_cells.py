"""Reading a %%distributed cell: its names, its lines."""

from __future__ import annotations

import traceback
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from nblaunch.notebook.cells import _to_session, make_cell, names_used, paused
from nblaunch.notebook.notebook_frontend import NotebookFrontend
from nblaunch.wire.messages import Cell


class Shell:
    """What reading a cell asks of IPython's shell."""

    history_manager = SimpleNamespace(input_hist_raw=[""] * 8)  # the first is no cell's

    def transform_cell(self, body: str) -> str:
        return TransformerManager().transform_cell(body)


def cell_of(body: str) -> Cell:
    return make_cell(Shell(), body, None)


PROVIDED = ("rank", "device", "display", "In", "open", "__name__")
NOTEBOOK = dict.fromkeys((*"abcfxy", "Net", "model", "total", "json", *PROVIDED))


def used(body: str) -> str:
    return " ".join(names_used(cell_of(body), NOTEBOOK))


@pytest.mark.parametrize(
    ("body", "names"),
    [
        # reads and assignments
        ("a + b", "a b"),
        ("a = 1", ""),
        ("a = a + 1", "a"),
        ("a, b = b, 2", "b"),
        ("a: int = b", "b"),
        ("for a in b: pass", "b"),
        ("with f(a) as c: pass", "a f"),
        ("import json", ""),
        ("(a := b)", "b"),
        ("print(f'{a:{b}}')", "a b"),
        ("match a:\n    case [b, *c]: pass", "a"),
        ("try: f()\nexcept a as b: pass", "a f"),
        # changed in place
        ("a += 1", "a"),
        ("del a", "a"),
        ("del (a, b[0])", "a b"),
        ("def f():\n    global total\n    total += 1", "total"),
        ("def f():\n    global total\n    del total", "total"),
        ("def f():\n    total = 0\n    total += 1", ""),
        ("def f(total):\n    total += 1\n    del total", ""),
        ("class A:\n    total += 1", "total"),
        # attributes and keywords are no names
        ("a.model.json", "a"),
        ("f(model=1, x=a)", "a f"),
        ("'model {x}'", ""),
        # functions
        ("def f(x): return x + a", "a"),
        ("def f(x: a) -> b: pass", "a b"),
        ("@f\ndef a(): pass", "f"),
        ("def f():\n    a = 1\n    def g(): return a + b\n    return g", "b"),
        ("def f():\n    global a\n    return a", "a"),
        ("def f():\n    global a\n    a = 1", ""),
        ("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x += y", "y"),
        ("lambda a=b: a", "b"),
        # comprehensions
        ("[x for x in a if x > b]", "a b"),
        ("[[y for y in x] for x in a]", "a"),
        ("def f(): return [a for b in c]", "a c"),
        # classes
        ("class A(Net):\n    x = a", "Net a"),
        ("class A:\n    a = a", "a"),
        ("class A:\n    def go(self): return model", "model"),
        ("class A:\n    x = 1\n    def go(self): return x", "x"),
        # notebook syntax
        ("%time f(a, model.b)", "a b f model"),
        ("!echo {a} $b c", "a b"),
        ("y = !ls {model.x}", "model x"),
        ("!echo $HOME", ""),
        ("a?", "a"),
        # names that the cell binds before it reads them
        ("model = f()\nmodel.train()", "f"),
        ("if rank:\n    model = 1\nmodel", "model"),
        ("model = model.half()\nmodel", "model"),
        ("def f():\n    return model\nmodel = 1\nf()", "model"),
        ("import model\nmodel.x", ""),
        ("model: int\nmodel", "model"),
        # await at the top
        ("await f(a)", "a f"),
        ("async with a as item: item", "a"),
        ("async for item in a: f(item)", "a f"),
        ("x = [y async for y in a]", "a"),
        ("async def g(): return await f()\nawait g()", "f"),
        # what a rank has of its own
        ("rank + device; display(In); open(a); __name__", "a"),
        ("", ""),
    ],
)
def test_the_names_that_a_cell_uses(body: str, names: str) -> None:
    assert used(body) == names


# ------------------------------------------------------------------ lines
def line_of_error(body: str) -> int:
    """The line that a traceback of the cell names."""
    cell = cell_of(body)
    try:
        exec(
            compile(cell.source, cell.filename, "exec"), {"get_ipython": lambda: SimpleNamespace(run_line_magic=print)}
        )
    except ZeroDivisionError as error:
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        assert line is not None
        return line
    raise AssertionError("it did not raise")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("1/0\n", 2),
        ("   \n\t\n\n1/0", 5),
        ("\na = 1\n\n1/0\n\n", 5),
        ("%time 1\n1/0", 3),
        ("def f():\n    return 1/0\n\nf()", 3),
        ('text = """\n\n"""\n1/0', 5),
    ],
)
def test_lines_are_counted_from_the_magics_own(body: str, line: int) -> None:
    assert line_of_error(body) == line


# ------------------------------------------------------------------ cells that cannot be run
def test_two_threads_may_ask_for_the_notebooks_cells() -> None:
    typed = [f"x = {number}" for number in range(3)]
    asked: list[Any] = []

    def transform(cell: str) -> str:
        if not asked:
            asked.append(None)
            asked[:] = frontend.cells()  # as another thread would, in the middle
        return cell

    history = SimpleNamespace(input_hist_raw=typed)
    frontend = NotebookFrontend(SimpleNamespace(history_manager=history, transform_cell=transform))
    for cells in (frontend.cells(), asked, frontend.cells()):
        assert [(cell.label, cell.typed) for cell in cells] == [(f"Cell In[{n}]", typed[n]) for n in range(3)]


def test_reading_the_cells_in_a_thread_changes_no_cell_of_the_user() -> None:
    cell: list[str] = ["%%local\n", "x\n"]
    of_user: list[str] = []
    with paused():
        user = Thread(target=lambda: of_user.extend(_to_session(cell)))
        user.start()
        user.join()
        assert _to_session(cell) == cell
    assert of_user == ["\n", "x\n"]
