"""Payloads: argument checks, names of parts, sources and settings."""

from __future__ import annotations

import functools
import importlib
import os
import random
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from nblaunch.errors import ArgumentError, PayloadError
from nblaunch.launch.payload import for_cell, for_function, name_of, parts_of, ship, sources_in
from nblaunch.transfer.cell_effects import read_flags, set_flags
from nblaunch.transfer.parcel import unpack
from nblaunch.wire.messages import Cell, Payload, Settings, Source
from tests.unit.notebooks import Notebook

FIX = ": create it in the ranks, or send the data to create it from"
LOCK = "import threading; lock = threading.Lock()\n"


def arrived(payload: Payload) -> Payload:
    """The payload as a rank gets it: a process that knows none of the notebook's definitions."""
    shipment = ship(payload)
    assert shipment.parcel is not None
    with pytest.MonkeyPatch.context() as rank:
        rank.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", weakref.WeakValueDictionary())
        return unpack([os.dup(fd) for fd in shipment.parcel.fds])


def cell_of(source: str) -> Cell:
    return Cell(source, "<distributed cell 7>", "Cell In[7]")


def train(data: object, rank: int) -> None: ...


# ------------------------------------------------------------------ wrong arguments
def test_the_error_of_a_call_names_the_types_of_large_arguments() -> None:
    said = "args=(1, Linear), kwargs={'rate': 0.1, 'net': Linear} do not fit train: got an unexpected keyword argument"
    with pytest.raises(ArgumentError, match=re.escape(said)):
        for_function(train, (1, torch.nn.Linear(1, 1)), {"rate": 0.1, "net": torch.nn.Linear(1, 1)})


# ------------------------------------------------------------------ what can be launched
class Callable_:  # noqa: N801  # the object is what is called
    def __call__(self, rank: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (train, ([1],), "train"),
        (functools.partial(train, 1), (), "train"),
        (functools.partial(print, end=""), ("a",), "print"),
        (print, ("hello",), "print"),
        (max, [1, 2], "max"),
        (dict, (), "dict"),
        (Callable_(), (), "Callable_"),
        (Callable_, (), "Callable_"),
        (torch.nn.Linear(2, 2), (torch.ones(2),), "Linear"),
        (random.Random(1).random, (), "Random.random"),
    ],
)
def test_whatever_can_be_called_can_be_sent(function: Callable[..., Any], args: Any, name: str) -> None:
    payload = for_function(function, args, None)
    back = arrived(payload)
    assert callable(back.function)
    assert len(back.args) == len(args)
    assert name_of(function) == name


def test_all_shipped_functions_share_the_anchors_globals(notebook: Notebook) -> None:
    names = notebook.run("rate = 1\ndef helper(): return rate\ndef train(): return helper()")
    back = arrived(for_function(names["train"], (), None))
    assert back.function.__globals__ is back.anchor.__globals__
    assert back.function.__globals__["helper"].__globals__ is back.anchor.__globals__
    back.anchor.__globals__["rate"] = 5
    assert back.function() == 5
    assert names["rate"] == 1


def test_a_cells_names_travel_in_that_dict_too(notebook: Notebook) -> None:
    notebook.run("rate = 1\nunused = 2\ndef helper(): return rate")
    back = arrived(for_cell(cell_of("rate = 7; helper()"), ["helper", "rate"]))
    exec(back.function.source, back.anchor.__globals__)
    assert back.anchor.__globals__["helper"]() == 7
    assert "unused" not in back.anchor.__globals__
    assert notebook.names["rate"] == 1


def test_mains_names_travel_for_pickle_to_find(notebook: Notebook) -> None:
    names = notebook.run("class Net: pass\ndef train(): return Net()")
    back = arrived(for_function(names["train"], (), None))
    assert {"Net", "train"} <= set(back.main)
    assert back.main["train"] is back.function
    assert type(back.function()) is back.main["Net"]


# ------------------------------------------------------------------ which part cannot be sent
@pytest.mark.parametrize(
    ("source", "args", "path"),
    [
        ("def train(): return lock", "()", "`train` uses `lock`"),
        ("def helper(): return lock\ndef train(): helper()", "()", "`train` uses `helper` uses `lock`"),
        ("def make(mutex):\n    def train(): return mutex\n    return train\ntrain = make(lock)", "()", "uses `mutex`"),
        ("def train(*xs): pass", "(1, lock)", "args[1]"),
        ("def train(*xs): pass", "([0, {'a': (lock,)}],)", "args[0][1]['a'][0]"),
        ("class Net: pass\nnet = Net(); net.guard = lock\ndef train(x): pass", "(net,)", "args[0].guard"),
        ("def train(x=lock): pass", "()", "a default value of `train`"),
        ("class Runner:\n    def go(self): pass\nr = Runner(); r.held = lock; train = r.go", "()", "'s object.held"),
    ],
)
def test_the_part_that_cannot_be_sent_is_named_with_the_fix(
    notebook: Notebook, source: str, args: str, path: str
) -> None:
    names = notebook.run(LOCK + source)
    payload = for_function(names["train"], eval(args, names), None)
    with pytest.raises(PayloadError, match=re.escape(f"{path}, a thread lock, which cannot be sent")) as caught:
        ship(payload)
    assert str(caught.value).endswith(FIX)
    assert isinstance(caught.value, TypeError)


def test_a_keyword_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(PayloadError, match=re.escape("kwargs['data'], a thread lock")):
        ship(for_function(train, (), {"data": threading.Lock()}))


def test_a_cells_name_that_cannot_be_sent_is_named(notebook: Notebook) -> None:
    notebook.run(LOCK + "held = [lock]")
    with pytest.raises(PayloadError, match=re.escape("the cell uses `held`[0], a thread lock")):
        ship(for_cell(cell_of("held"), ["held"]))


def test_a_global_that_shares_an_attributes_name_is_not_sent(notebook: Notebook) -> None:
    names = notebook.run(LOCK + "data = [lock]\nmodel = [lock]\ndef train(batch): return batch.data, batch.model")
    assert arrived(for_function(names["train"], (1,), None)).watched == {}


# ------------------------------------------------------------------ what is sent, and how large it is
@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("def train(): return data", {"data"}),
        ("def helper(): return data\ndef train(): return helper()", {"data"}),
        ("def train(): return [data for _ in range(2)]", {"data"}),
        ("def train(): return (lambda: data)()", {"data"}),
        ("class Net:\n    def forward(self): return data\ndef train(): return Net()", {"data"}),
        ("class Net:\n    table = [1]\ndef train(): return Net()", set()),
        ("def make(inner):\n    def train(): return inner\n    return train\ntrain = make([1])", {"inner"}),
        ("def train(): return other.data", set()),
        ("def train(): import math; return math.pi, torch.nn", set()),
        ("class Runner:\n    def go(self): return data\ntrain = Runner().go", {"data", "Runner object"}),
        ("import functools\ntrain = functools.partial(lambda x, y: data, [1], y=[2])", {"data", "args[0]", "y"}),
    ],
)
def test_only_data_that_code_names_is_sent(notebook: Notebook, source: str, parts: set[str]) -> None:
    names = notebook.run("import torch\ndata = [0]\nother = 1\nunused = [2]\n" + source)
    found = parts_of(for_function(names["train"], (), None))
    assert set(found) == parts


def test_arguments_have_the_names_of_their_parameters(notebook: Notebook) -> None:
    names = notebook.run("def train(model, *rest, lr, rank): pass")
    found = parts_of(for_function(names["train"], ([0], [1]), {"lr": [2]}))
    assert found == {"model": [0], "rest": ([1],), "lr": [2]}


def test_a_cells_names_are_its_parts(notebook: Notebook) -> None:
    notebook.run("data = [0]\nnumber = 3\nunused = [1]\ndef helper(): return more\nmore = [2]")
    assert parts_of(for_cell(cell_of("helper(), data, number"), ["data", "helper", "number"])) == {
        "data": [0],
        "more": [2],
    }


def test_sent_data_is_listed_largest_first(notebook: Notebook) -> None:
    names = notebook.run(
        "import torch\nsmall, large = torch.ones(10_000), torch.ones(1_000_000)\ndef train(text): return small, large"
    )
    sent = ship(for_function(names["train"], ("x" * 100_000,), None)).sent
    assert [(name, round(size / 1000)) for name, size in sent.parts] == [("large", 4000), ("text", 100), ("small", 40)]
    assert sent.copied == 4_040_000
    assert re.fullmatch(r"<Sent 4 MB: large 4 MB, text 100 KB, small 40 KB; 4 MB copied>", repr(sent))


def test_the_body_of_a_class_in_a_function_has_its_globals(notebook: Notebook) -> None:
    names = notebook.run("size = 3\ndef train():\n    class Net:\n        width = size\n    return Net.width")
    assert arrived(for_function(names["train"], (), None)).function() == 3


def test_names_that_a_class_binds_itself_are_not_the_notebooks(notebook: Notebook) -> None:
    names = notebook.run(
        LOCK + "data = [1]\n"
        "def train():\n"
        "    class Net:\n"
        "        lock = 3\n"
        "        double = lock * 2\n"
        "        @property\n"
        "        def data(self): return self.double\n"
        "        @data.setter\n"
        "        def data(self, value): ...\n"
        "    return Net().data"
    )
    payload = for_function(names["train"], (), None)
    assert parts_of(payload) == {}
    assert arrived(payload).function() == 6


def test_functions_and_properties_with_a_cache_are_sent(notebook: Notebook) -> None:
    names = notebook.run(
        "import functools\n"
        "data = [7]\n"
        "@functools.lru_cache(maxsize=3)\n"
        "def down(i): return down(i - 1) if i else data[0]\n"
        "class Net:\n"
        "    @functools.lru_cache\n"
        "    def twice(self, x): return 2 * x\n"
        "    @functools.cached_property\n"
        "    def width(self): return [3]\n"
        "def train():\n"
        "    net = Net()\n"
        "    return down(2), net.twice(2), net.width, net.width is net.width, down.cache_info()[:3]\n"
    )
    payload = for_function(names["train"], (), None)
    assert parts_of(payload) == {"data": [7]}
    assert arrived(payload).function() == (7, 4, [3], True, (0, 3, 3))


# ------------------------------------------------------------------ sources
def test_the_cells_of_shipped_functions_are_sent_with_their_labels(notebook: Notebook) -> None:
    notebook.run("def helper():\n    raise ValueError\n")
    names = notebook.run("def train():\n    helper()\n")
    payload = for_function(names["train"], (), None)
    sources = ship(payload).sources
    assert sources == {
        "<made-up cell 1>": Source("def helper():\n    raise ValueError\n", "Cell In[1]"),
        "<made-up cell 2>": Source("def train():\n    helper()\n", "Cell In[2]"),
    }
    assert arrived(payload).sources == sources


def test_a_distributed_cell_brings_its_own_source_and_its_helpers(notebook: Notebook) -> None:
    notebook.run("def helper(): pass")
    sources = ship(for_cell(cell_of("helper()"), ["helper"])).sources
    assert sources["<distributed cell 7>"] == Source("helper()", "Cell In[7]")
    assert sources["<made-up cell 1>"].label == "Cell In[1]"


def test_without_serialising_the_functions_own_cell_is_known(notebook: Notebook) -> None:
    names = notebook.run("def train(): pass")
    assert sources_in(for_function(names["train"], (), None)) == {
        "<made-up cell 1>": Source("def train(): pass", "Cell In[1]")
    }
    assert sources_in(for_function(print, (), None)) == {}
    assert sources_in(for_cell(cell_of("1"), [])) == {"<distributed cell 7>": Source("1", "Cell In[7]")}


# ------------------------------------------------------------------ watched
def test_modules_and_containers_that_the_function_names_are_watched(notebook: Notebook) -> None:
    names = notebook.run(
        "import torch\n"
        "model, seen, table, chosen = torch.nn.Linear(1, 1), [], {}, set()\n"
        "unused, number, text, pair = [], 3, 'x', (1, 2)\n"
        "def train(data, lr): return model, seen, table, chosen, number, text, pair"
    )
    payload = for_function(names["train"], ([1],), {"lr": 0.1})
    assert set(payload.watched) == {"model", "seen", "table", "chosen", "data"}


def test_variables_of_enclosing_functions_are_watched(notebook: Notebook) -> None:
    names = notebook.run(
        "def make():\n    seen = []\n    def train(): seen.append(1)\n    return train\ntrain = make()"
    )
    assert set(for_function(names["train"], (), None).watched) == {"seen"}


def test_globals_of_an_imported_function_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "payloads_module.py").write_text(
        "import threading\nseen = {'gate': threading.Lock()}\ndef train(): return seen"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    payload = for_function(importlib.import_module("payloads_module").train, (), None)
    assert payload.watched == {}
    shipped = ship(payload).sent
    assert "seen" not in repr(shipped)


def test_an_imported_function_with_a_cache_is_sent_by_its_name(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cached_module.py").write_text(
        "import functools, threading\ngate = threading.Lock()\n"
        "@functools.lru_cache\ndef known():\n    with gate: return 3"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    names = notebook.run("from cached_module import known\ndef train(): return known()")
    payload = for_function(names["train"], (), None)
    assert parts_of(payload) == {}
    assert arrived(payload).function() == 3


# ------------------------------------------------------------------ settings
@pytest.fixture
def torchs_settings_restored() -> Iterator[None]:
    flags, generator = read_flags(), torch.get_rng_state()
    yield
    torch._C._set_deterministic_algorithms(False)  # the public one imports half of torch's compiler
    set_flags(flags)
    torch.set_rng_state(generator)


def settings_now() -> Settings:
    return for_function(print, (), None).settings


def test_a_seed_that_was_not_set_is_not_set_in_the_ranks(torchs_settings_restored: None) -> None:
    torch.default_generator.manual_seed(67280421310721)
    assert settings_now().torch_seed is None


def test_settings_of_unloaded_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    settings = settings_now()
    assert (settings.torch_rng, settings.numpy_rng) == (None, None)
    assert "default dtype" not in settings.flags


def test_the_filters_of_warnings_travel_with_their_categories_by_name() -> None:
    """Whatever a category is: a rank must not import IPython because the notebook's filters name it."""

    class Local(UserWarning):
        held = threading.Lock()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a message", UserWarning)
        warnings.filterwarnings("ignore", category=Local)
        filters = arrived(for_function(print, (), None)).settings.warning_filters or ()
    assert ("ignore", ("builtins", "UserWarning")) in [(f.action, f.category) for f in filters]
    assert "a message" in [f.message.pattern for f in filters if isinstance(f.message, re.Pattern)]
    assert (__name__, Local.__qualname__) in [f.category for f in filters]
