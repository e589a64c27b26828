"""Functions run on every rank with the notebook's state, and their values return."""

from __future__ import annotations

import atexit
import multiprocessing
import random
import re
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nblaunch import LaunchResult, notebook_launcher
from nblaunch.transfer.cell_effects import FLAGS, read_flags, set_flags
from tests.conftest import conformance
from tests.processes.conftest import Launcher


# ------------------------------------------------------------------ what ranks run
def where(rank: int, world_size: int, local_rank: int, device: torch.device) -> tuple[int, int, int, str]:
    return rank, world_size, local_rank, str(device)


def echo(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return args, kwargs


def draws() -> tuple[float, float, list[float]]:
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()


def warn(category: type[Warning]) -> str:
    try:
        warnings.warn("have a look", category, stacklevel=1)
    except Warning as raised:
        return f"raised {type(raised).__name__}"
    return "went on"


def train_in_place(net: nn.Module, seen: list[int], untouched: dict[str, int]) -> int:
    with torch.no_grad():
        net.weight.add_(1.0)  # type: ignore[operator]
    seen.append(1)
    return len(untouched)


# ------------------------------------------------------------------ results and arguments
@conformance("forkserver", "fork")
def test_each_ranks_value_comes_back_in_the_order_of_ranks(launch: Launcher) -> None:
    result = launch(where, num_processes=3)
    assert isinstance(result, LaunchResult)
    assert list(result) == [(rank, 3, rank, "cpu") for rank in range(3)]
    assert result.duration > 0
    assert re.fullmatch(r"<LaunchResult of where: 3 ranks, \d+\.\d\d s>", repr(result))
    assert [log.out.name for log in result.logs] == ["rank0.out", "rank1.out", "rank2.out"]


def test_arguments_and_keyword_arguments_reach_every_rank(launch: Launcher, few: int) -> None:
    args, kwargs = (1, "two", [3.0], {"four": (4,)}), {"lr": 0.1, "name": "é"}
    assert list(launch(echo, args, kwargs=kwargs, num_processes=few)) == [(args, kwargs)] * few


def leave_files(folder: Path, rank: int) -> None:
    """Leave a file at the exit by each way that Python has."""
    atexit.register((folder / f"atexit{rank}").touch)
    weakref.finalize(leave_files, (folder / f"finalize{rank}").touch)
    Finalize(None, (folder / f"multiprocessing{rank}").touch, exitpriority=1)


@pytest.mark.parametrize("start_method", ["fork"], indirect=True)
def test_a_fork_of_the_notebook_leaves_the_notebooks_exit_to_it(launch: Launcher, tmp_path: Path) -> None:
    """IPython's history saver, and what the user registered; what a rank registers is the rank's."""
    notebooks = [(tmp_path / name).touch for name in ("the notebook's", "and its")]
    atexit.register(notebooks[0])
    Finalize(None, notebooks[1], exitpriority=1)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
        worker.start()
    try:
        with pytest.warns(UserWarning, match="start_method='fork'"):
            launch(leave_files, (tmp_path,))
        assert worker.is_alive()
    finally:
        atexit.unregister(notebooks[0])
        worker.kill()
        worker.join()
    kinds = ("atexit", "finalize", "multiprocessing")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        ["state", *(f"{kind}{rank}" for kind in kinds for rank in (0, 1))]
    )


@pytest.mark.parametrize("start_method", ["fork"], indirect=True)
def test_a_fork_of_the_notebook_is_refused_when_cuda_runs(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    from nblaunch.errors import StartError

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(StartError, match="start_method='fork': the notebook has used CUDA, which fails after a fork"):
        launch(where, device="cpu")


# ------------------------------------------------------------------ what the notebook itself keeps
@pytest.fixture
def _no_warning_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nblaunch.launch.handle._noted", set())


@pytest.mark.usefixtures("_no_warning_yet")
def test_unreturned_changes_are_reported_once_with_the_fix(
    launch: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    net, seen, untouched = nn.Linear(2, 2), [0], {"a": 1}
    before = net.weight.clone()
    for _ in range(2):
        launch(train_in_place, (net, seen, untouched), view="text")
    shown = capsys.readouterr().out
    assert shown.count("`net` was modified in the ranks, but ranks work on copies") == 1
    assert "Return it (for a module, its `state_dict()`) to get the new value" in shown
    assert shown.count("`seen` was modified in the ranks") == 1
    assert "`untouched`" not in shown
    assert torch.equal(net.weight, before)
    assert seen == [0]


# ------------------------------------------------------------------ the notebook's settings
@pytest.fixture
def _settings_restored() -> Iterator[None]:
    flags = read_flags()
    yield
    set_flags(flags)


def draw_some() -> None:
    """Seed every generator, and draw: its state is then not that right after a seed."""
    torch.manual_seed(11)
    np.random.seed(12)
    random.seed(13)
    torch.rand(5), np.random.rand(), random.random()


def change_flags() -> dict[str, Any]:
    """Change every flag, and return them."""
    usual = read_flags()
    other: dict[str, Any] = {
        "errors": dict(np.geterr(), divide="ignore"),
        "anomaly detection": (True, False),
        "start method": "spawn",
    }
    other |= {"default dtype": torch.float64, "default device": "meta", "matmul precision": "medium"}
    other |= {"deterministic": (True, True), "recursion limit": sys.getrecursionlimit() + 7}
    other |= {"sharing strategy": "file_system"}
    other |= {name: not value for name, value in usual.items() if isinstance(value, bool)}
    assert other.keys() == usual.keys() == FLAGS.keys()
    assert all(other[name] != usual[name] for name in usual)
    set_flags(other)
    return other


def test_ranks_continue_the_notebooks_random_states(launch: Launcher) -> None:
    draw_some()
    for _ in range(2):
        from_ranks = list(launch(draws))
        here = draws()
        assert from_ranks == [here, here]


@pytest.mark.usefixtures("_settings_restored")
def test_ranks_have_the_notebooks_flags(launch: Launcher) -> None:
    usual = read_flags()
    assert list(launch(read_flags)) == [usual, usual]
    changed = change_flags()  # which imports torch's compiler, here and in ranks
    assert list(launch(read_flags, num_processes=1)) == [changed]


@pytest.mark.parametrize(("action", "outcome"), [("error", "raised FutureWarning"), ("ignore", "went on")])
def test_ranks_filter_warnings_as_the_notebook_does(action: Any, outcome: str, launch: Launcher) -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter(action, FutureWarning)
        result = launch(warn, (FutureWarning,))
    assert list(result) == [outcome] * 2


# ------------------------------------------------------------------ coming from accelerate
def test_a_call_written_for_accelerate_warns_of_unused_arguments(start_method: str) -> None:
    with pytest.warns(UserWarning, match="is ignored: ") as said:
        result: Any = notebook_launcher(
            where, (), 2, "bf16", use_port="29501", master_addr="127.0.0.1", node_rank=0, num_nodes=1,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", rdzv_conf=None, rdzv_id="job", max_restarts=0,
            monitor_interval=0.5, log_line_prefix_template="", start_method=start_method, view="none",
        )  # fmt: skip
    assert [rank for rank, *_ in result] == [0, 1]
    named = {str(warning.message).partition("=")[0] for warning in said}
    assert named == {
        "use_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "monitor_interval", "log_line_prefix_template",
    }  # fmt: skip
    assert all(warning.filename == __file__ for warning in said)
