"""Pickling of user definitions by value, and explanations of what cannot be pickled."""

from __future__ import annotations

import io
import pickle
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from nblaunch.transfer import definitions, reducers
from nblaunch.transfer.pickling import (
    ByItself,
    Found,
    Late,
    Pickler,
    Unbuilt,
    UnsendableError,
    describe,
    dump,
    explain,
    names_of,
)
from tests.unit.notebooks import Notebook


def sent(obj: Any) -> Any:
    return pickle.loads(dump(obj))


def found_in(obj: Any) -> Found:
    pickler = Pickler(io.BytesIO())

    pickler.dump(obj)
    return pickler.found


# ------------------------------------------------------------------ there and back
def test_a_function_of_a_cell_travels_with_its_globals(notebook: Notebook) -> None:
    names = notebook.run("rate = 3\ndef helper(x, y=1): return x * rate * y\ndef train(x, y=1): return helper(x) + y")
    train = sent(names["train"])
    names["rate"] = 100
    assert train(2) == 7


def test_a_lambda_in_an_object_comes_back_as_itself(notebook: Notebook) -> None:
    names = notebook.run("class Box: pass\nrate = 2\nbox = Box()\nbox.act = lambda x: x * rate")
    assert sent(names["box"]).act is names["box"].act


def test_a_lambda_whose_code_changed_meanwhile_is_a_new_one(notebook: Notebook) -> None:
    act = notebook.run("act = lambda x: x * 2")["act"]
    data = dump(act)
    act.__code__ = (lambda x: x * 3).__code__
    assert (pickle.loads(data)(1), act(1)) == (2, 3)


@pytest.mark.parametrize(
    "source",
    [
        "def make():\n    seen = []\n    return lambda: seen\nact = make()",
        "act = lambda seen=[]: seen",
        "act = lambda *, seen=[]: seen",
        "act = lambda: act.seen\nact.seen = []",
    ],
)
def test_a_function_with_a_state_comes_back_with_that_of_its_sender(source: str, notebook: Notebook) -> None:
    act = notebook.run(source)["act"]
    act().append(1)
    data = dump(act)
    act().clear()
    back = pickle.loads(data)
    assert back is not act
    if not vars(act):  # else it looks itself up
        assert back() == [1]


def test_a_forks_classes_count_as_received_whatever_their_metaclass(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = notebook.run(
        "class Meta(type):\n    def __eq__(cls, other): return cls is other\n"
        "class Unhashable(metaclass=Meta): pass\nclass Node: pass\nNode.root = Node"
    )
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(**names))
    definitions.mark_received({name: names[name] for name in ("Node", "Unhashable")})
    assert names["Node"] in definitions._received


def test_closures_classes_and_defaults_travel(notebook: Notebook) -> None:
    names = notebook.run(
        "def make(n):\n"
        "    class Net:\n"
        "        size = n\n"
        "        def twice(self, by=n): return by * 2\n"
        "    return Net\n"
        "Net = make(4)"
    )
    net = sent(names["Net"]())
    assert (net.size, net.twice()) == (4, 8)


def test_a_class_that_is_known_is_not_rewritten(notebook: Notebook) -> None:
    names = notebook.run("rate = 2\nclass Net:\n    size = 1\n    def scaled(self): return rate")
    data = dump(names["Net"]())
    names["Net"].size, names["rate"] = 5, 3
    net = pickle.loads(data)
    assert (type(net), net.size, net.scaled()) == (names["Net"], 5, 3)


class InteractiveShell:
    """Has the name of IPython's, whose instance would be one for the whole test run."""

    def get_ipython(self) -> InteractiveShell:
        return self


def test_the_notebooks_shell_is_replaced_by_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions arrive before the rank's shell is known."""
    arrived = sent({"get_ipython": InteractiveShell().get_ipython})["get_ipython"]
    monkeypatch.setattr(reducers, "_shell_provider", None)
    reducers.provide_shell(lambda: "the rank's")
    assert arrived() == "the rank's"


def test_a_shell_that_comes_back_is_the_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = sent(sent(InteractiveShell().get_ipython))
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "get_ipython", lambda: "the notebook's", raising=False)
    assert arrived() == "the notebook's"
    monkeypatch.setattr(main, "get_ipython", arrived)
    assert arrived() is None
    monkeypatch.delattr(main, "get_ipython")
    assert arrived() is None


# ------------------------------------------------------------------ notes
def test_main_names_are_noted_by_qualified_name(notebook: Notebook) -> None:
    names = notebook.run("class Net: pass\ndef helper(): return Net()\ndef train(): return helper()")
    assert found_in(names["train"]).main == {name: names[name] for name in ("train", "helper", "Net")}


def test_lambdas_and_local_functions_are_not_resolved_by_name(notebook: Notebook) -> None:
    names = notebook.run("def make():\n    def inner(): pass\n    return inner, lambda: 0\npair = make()")
    assert found_in(names["pair"]).main == {}


def test_files_that_only_linecache_knows_are_noted(notebook: Notebook) -> None:
    notebook.run("def helper(): pass")
    names = notebook.run("def train(): helper()")
    assert found_in(names["train"]).files == set(notebook.labels)


def test_a_late_dict_is_filled_after_everything_before_it(notebook: Notebook) -> None:
    names = notebook.run("def train(): pass")
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump((names["train"], Late(lambda: {"seen": sorted(pickler.found.main)})))
    assert pickle.loads(file.getvalue())[1] == {"seen": ["train"]}


# ------------------------------------------------------------------ names that a function uses
def test_attributes_are_not_globals_that_a_function_uses(notebook: Notebook) -> None:
    names = notebook.run(
        "data = [1]\nmodel = [2]\nlr = 0.1\nseen = 0\n"
        "def train(batch):\n"
        "    global seen\n"
        "    import json as data\n"
        "    seen = batch.model\n"
        "    return [lr for _ in batch.data]"
    )
    assert set(names_of(names["train"])) == {"lr", "seen"}


def test_variables_of_enclosing_functions_are_used_names(notebook: Notebook) -> None:
    names = notebook.run(
        "def make():\n"
        "    bound, model = 1, 2\n"
        "    def train(): return bound, model, late\n"
        "    early = train\n"
        "    if False: late = 1\n"
        "    return early\n"
        "train = make()"
    )
    assert names_of(names["train"]) == {"bound": 1, "model": 2}


# ------------------------------------------------------------------ which part cannot be sent
LOCK = "import threading; lock = threading.Lock()\n"
BECAUSE = ", a thread lock, which cannot be sent to another process (TypeError: cannot pickle '_thread.lock' object)"


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("def train(): return lock", "`train` uses `lock`"),
        ("def helper(): return lock\ndef train(): return helper()", "`train` uses `helper` uses `lock`"),
        ("def make(inner):\n    def f(): return inner\n    return f\ntrain = make(lock)", "`train` uses `inner`"),
        ("def train(): return [lock for _ in range(2)]", "`train` uses `lock`"),
        ("def train(): return lambda: lock", "`train` uses `lock`"),
        ("def train(x=lock): pass", "a default value of `train`"),
        ("def train(*, x=lock): pass", "a default value of `train`"),
        ("config = {'a': [1, {'b{}': lock}]}\ndef train(): return config", "`train` uses `config`['a'][1]['b{}']"),
        ("train = [0, lock]", "`train`[1]"),
        ("train = (1, {2: lock})", "`train`[1][2]"),
        ("class Holder: pass\ntrain = Holder(); train.inner = Holder(); train.inner.held = lock", "`train`.inner.held"),
        ("class Runner:\n    def go(self): pass\nr = Runner(); r.held = lock\ntrain = r.go", "`train`'s object.held"),
        ("class Net:\n    def forward(self): return lock\ntrain = Net", "`train`.forward uses `lock`"),
        ("import functools\ntrain = functools.partial(print, 1, lock)", "`train`'s args[1]"),
        ("import functools\ntrain = functools.partial(print, end=lock)", "`train`'s keywords['end']"),
        ("import functools\ndef f(): return lock\ntrain = functools.partial(f)", "`train`'s function uses `lock`"),
        ("train = lock", "`train`"),
    ],
)
def test_the_part_that_cannot_be_sent_is_named(notebook: Notebook, source: str, path: str) -> None:
    reason = explain(notebook.run(LOCK + source)["train"], "`train`")
    assert isinstance(reason, UnsendableError)
    assert (str(reason), reason.path) == (path + BECAUSE, path)


def test_a_sendable_object_needs_no_explanation(notebook: Notebook) -> None:
    assert explain(notebook.run("def train(): return 1")["train"], "train") is None


def test_an_object_that_holds_itself_is_explained_all_the_same() -> None:
    loop: list[Any] = [threading.Lock()]
    loop.insert(0, loop)
    reason = explain(loop, "loop")
    assert reason is not None
    assert str(reason).startswith("loop")


def test_a_reduce_that_raises_is_quoted() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise RuntimeError("I stay here\nsecond line")

    reason = explain({"key": Stubborn()}, "args[0]")
    assert str(reason) == (
        "args[0]['key'], a tests.unit.test_pickling.Stubborn, which cannot be sent to another process "
        "(RuntimeError: I stay here)"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (threading.Lock, "a thread lock"),
        (threading.RLock, "a thread lock"),
        (lambda: open(__file__), "an open file"),
        (lambda: open(__file__, "rb"), "an open file"),
        (io.BytesIO, "an open file"),
        (lambda: (n for n in range(3)), "a generator"),
        (socket.socket, "a socket.socket"),
        (lambda: 3, "an int"),
        (lambda: "train", "a str"),
        (lambda: None, "a NoneType"),
    ],
)
def test_things_are_described_in_their_users_words(make: Callable[[], Any], words: str) -> None:
    thing = make()
    assert describe(thing) == words
    getattr(thing, "close", lambda: None)()


def test_a_reference_to_what_is_gone_says_what_to_do() -> None:
    with pytest.raises(definitions.LostReferenceError, match="this rank has deleted: run the cell again"):
        definitions.kept("model/1")


def test_a_module_of_a_subclass_is_imported() -> None:
    """torch.distributed.config is one, and cloudpickle sends it with code that uses these two names."""
    import torch.distributed.config  # it is what cloudpickle finds

    names: dict[str, Any] = {"__name__": "__main__", "torch": torch, "config": 3}
    exec("def f(): return torch.distributed.is_available(), config", names)

    assert sent(names["f"])()[1] == 3
    assert sent(sys.modules["torch.distributed.config"]) is sys.modules["torch.distributed.config"]


# ------------------------------------------------------------------ objects by themselves
class Refuses:
    """Cannot be rebuilt: its state is refused."""

    def __init__(self) -> None:
        self.kept = [1]

    def __setstate__(self, state: object) -> None:
        raise ValueError("refused")


def test_an_object_by_itself_that_fails_costs_no_other() -> None:
    shared = [1]
    value = {"bad": ByItself([Refuses(), shared]), "good": ByItself((shared, shared))}
    found = pickle.loads(dump(value))
    assert found["bad"] == Unbuilt("ValueError: refused")
    assert found["good"][0] is found["good"][1]
