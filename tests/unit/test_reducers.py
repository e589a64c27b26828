"""Objects that have a row in the table of reducers: what arrives, and what is refused."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from nblaunch.transfer import pickling
from nblaunch.transfer.parcel import pack
from nblaunch.wire import RANK
from tests.unit.notebooks import Notebook


def sent(obj: Any) -> Any:
    return pickle.loads(pickling.dump(obj))


def reason(obj: Any) -> str:
    error = pickling.explain(obj, "it")
    assert error is not None
    return f"{error}: {error.advice}"


class Owner:
    """Holds references of all kinds to its parts."""

    def __init__(self) -> None:
        self.part = nn.Linear(1, 1)
        self.itself = weakref.ref(self)
        self.reference = weakref.ref(self.part)
        self.by_part = weakref.WeakKeyDictionary({self.part: 1})
        self.by_name = weakref.WeakValueDictionary({"part": self.part})
        self.parts = weakref.WeakSet([self.part])


# ------------------------------------------------------------------ functools
def test_single_dispatch_of_a_cell_is_refused_and_a_librarys_imported(notebook: Notebook) -> None:
    import pkgutil

    names = notebook.run(
        "import functools\n@functools.singledispatch\ndef f(x): return 'other'\ndef main(): return f(1)"
    )
    assert "`f`, made by functools.singledispatch in the notebook: define it inside" in reason(names["main"])
    assert sent(pkgutil.iter_importer_modules) is pkgutil.iter_importer_modules  # type: ignore[attr-defined]


def test_a_recursive_function_with_a_cache_is_sent(notebook: Notebook) -> None:
    fib = "@functools.cache\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)"
    assert sent(notebook.run(f"import functools\n{fib}")["fib"])(50) == 12586269025


# ------------------------------------------------------------------ references
def test_weak_references_refer_to_what_arrives() -> None:
    owner = sent(Owner())
    assert owner.itself() is owner
    assert owner.reference() is owner.part
    assert list(owner.by_part.items()) == [(owner.part, 1)]
    assert owner.by_name["part"] is owner.part
    assert list(owner.parts) == [owner.part]
    owner.part = None
    gc.collect()
    assert owner.reference() is None
    assert sent(owner).reference() is None


# ------------------------------------------------------------------ torch
class Symmetric(nn.Module):
    """A parametrization as users write it."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric(module: nn.Module) -> nn.Module:
    return nn.utils.parametrize.register_parametrization(module, "weight", Symmetric())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
        symmetric,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda module: prune.l1_unstructured(module, "weight", 2),
    ],
)
def test_a_changed_layer_arrives_as_it_was(wrap: Callable[[nn.Module], nn.Module]) -> None:
    layer = wrap(nn.Linear(4, 4)).eval()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    came, its_optimizer = sent((layer, optimizer))
    x = torch.ones(1, 4)
    assert torch.equal(came(x), layer(x))
    assert type(came).__name__ == type(layer).__name__
    assert list(came.state_dict()) == list(layer.state_dict())
    its_parameters = its_optimizer.param_groups[0]["params"]
    assert all(ours is its for ours, its in zip(came.parameters(), its_parameters, strict=True))
    came.train()(x).sum().backward()


def test_a_parametrized_class_of_a_cell_keeps_its_own_state(notebook: Notebook) -> None:
    names = notebook.run(
        "import torch, threading\n"
        "class Own(torch.nn.Linear):\n"
        "    def __getstate__(self): return {k: v for k, v in vars(self).items() if k != 'lock'}\n"
        "    def __setstate__(self, state): super().__setstate__(state); self.lock = 'new'\n"
        "own = torch.nn.utils.parametrizations.weight_norm(Own(2, 2))\nown.lock = threading.Lock()"
    )
    came = sent(names["own"])
    assert came.lock == "new"
    assert type(came).__bases__ == (names["Own"],)
    assert nn.utils.parametrize.is_parametrized(came, "weight")


@pytest.mark.filterwarnings("ignore:.torch.jit.trace.*is deprecated:FutureWarning")
def test_scripts_and_exported_programs_are_refused_with_advice() -> None:
    layer, x = nn.Linear(2, 1).eval(), torch.ones(1, 2)
    for script in (torch.jit.trace(lambda x: x * 2, x), nn.Sequential(torch.jit.trace(layer, x))):
        assert "with torch.jit.save, and load it inside the function" in reason(script)
    assert "with torch.export.save, and load it inside the function" in reason(torch.export.export(layer, (x,)))


def test_compiled_code_is_compiled_where_it_arrives(notebook: Notebook) -> None:
    names = notebook.run(
        "import torch\nrate = 2\ncompiled = []\n"
        "def backend(graph, inputs): compiled.append(1); return graph.forward\n"
        "@torch.compile(backend=backend)\ndef f(x): return x * rate\n"
        "class Net(torch.nn.Linear):\n    @torch.compile(backend=backend)\n    def forward(self, x): return x + rate\n"
        "net, in_place = Net(1, 1), torch.nn.Linear(1, 1)\nin_place.compile(backend=backend)\n"
        "def main(x):\n"
        "    before = len(compiled)\n    found = f(x).item(), net(x).item(), in_place(x).shape\n"
        "    return found, len(compiled) - before"
    )
    x = torch.ones(1)
    assert sent(names["main"])(x) == ((2.0, 3.0, (1,)), 3)


def test_operators_arrive_by_name_and_those_of_cells_are_refused_with_advice(notebook: Notebook) -> None:
    for operator in (torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor):
        assert sent(operator) is operator
    names = notebook.run(
        "import torch\n@torch.library.custom_op('reducers_test::same', mutates_args=())\n"
        "def same(x: torch.Tensor) -> torch.Tensor: return x.clone()"
    )
    for made in (names["same"], torch.library.Library("reducers_test_library", "DEF")):
        assert "notebook: define it with torch.library.custom_op inside the function, or" in reason({"a": made})


def test_an_operator_of_a_module_arrives_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reducers_test_ops.py").write_text(
        "import torch\n@torch.library.custom_op('reducers_test::own', mutates_args=())\n"
        "def own(x: torch.Tensor) -> torch.Tensor: return x.clone()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    operator = __import__("reducers_test_ops").own
    assert sent(operator) is operator


# ------------------------------------------------------------------ multiprocessing
def test_processes_are_refused_with_advice() -> None:
    process = multiprocessing.get_context("spawn").Process(target=print)
    assert reason([process]) == "it[0], a process, which only its parent can use: start it inside the function"


def test_other_machines_do_not_share_a_queue() -> None:
    queue = multiprocessing.get_context("spawn").Queue()
    with pytest.raises(TypeError, match="other machines"):
        pack(lambda found: queue, is_here=False)
    queue.close()


def test_other_machines_cannot_reach_a_manager_of_this_one() -> None:
    with multiprocessing.get_context("spawn").Manager() as manager:
        values = manager.dict()
        assert pack(lambda found: values).fds
        with pytest.raises(TypeError, match="other machines"):
            pack(lambda found: values, is_here=False)


def test_a_lock_without_a_name_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match="only forked processes can share"):
        pack(lambda found: multiprocessing.get_context("fork").Lock())
    assert "multiprocessing.get_context('spawn')" in reason(multiprocessing.get_context("fork").Queue())


def test_a_result_holds_no_end_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = multiprocessing.Pipe()
    monkeypatch.setenv(RANK, "0")
    with pytest.raises(TypeError, match="only the notebook"):
        pack(lambda found: ends)
    for end in ends:
        end.close()
