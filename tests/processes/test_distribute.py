"""`distribute` in a script, its results, and an Accelerator under torchrun."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import LaunchResult
from nblaunch.errors import ArgumentError, NestedLaunchError, PayloadError, RankError
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.distribute import _Returned
from tests.conftest import LONG, eventually
from tests.torchrun import torchrun

pytestmark = pytest.mark.usefixtures("imported_ahead")


@pytest.fixture
def options(start_method: str) -> dict[str, Any]:
    return {"view": "none", "start_method": start_method}


class Held(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer


class Experiment:
    """An object with a method that trains, as people write them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.extra: dict[str, Any] = {
            "schedule": StepLR(self.optimizer, 1, gamma=0.5),
            "held": [Held(self.model, self.optimizer)],
        }
        self.frozen = nn.Linear(2, 2)
        self.accelerator = Accelerator(nprocs=2, compute_setup="cpu", backend="gloo")

    def train(self, epochs: int, *, rank: int) -> Any:
        """Some steps; the weights that it ends with."""
        data = DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2)), 2)
        accelerator = self.accelerator
        model, optimizer, schedule, data = accelerator.prepare(self.model, self.optimizer, self.extra["schedule"], data)
        for _ in range(epochs):
            for (x,) in data:
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        return accelerator.rank == rank, {k: v.clone() for k, v in self.model.state_dict().items()}


OUTSIDE: Any = nn.Linear(2, 1)
"""A module that a function names, and is not given."""


def train_outside(step: float) -> int:
    with torch.no_grad():
        OUTSIDE.weight += step * (1 + Accelerator(compute_setup="cpu").rank)
    return os.getpid()


# ------------------------------------------------------------------ what comes back
def test_the_parts_of_a_bound_methods_object_are_trained(options: dict[str, Any]) -> None:
    experiment = Experiment()
    frozen, weight = experiment.frozen.weight.detach().clone(), experiment.model[0].weight
    distributed = experiment.accelerator.distribute(experiment.train, **options)
    assert (distributed.__name__, distributed.__doc__) == ("train", experiment.train.__doc__)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said of changes that were not returned
        result = distributed(epochs=2)

    assert isinstance(result, LaunchResult)
    assert "Experiment.train" in repr(result)
    assert [is_own for is_own, _ in result] == [True, True]
    for name, value in experiment.model.state_dict().items():
        assert torch.equal(value, result[0][1][name])
    assert experiment.model[0].weight is weight
    assert experiment.optimizer.state[weight]["step"] == 4
    assert experiment.extra["schedule"].get_last_lr() == [0.025]
    assert experiment.optimizer.param_groups[0]["lr"] == 0.025
    assert torch.equal(experiment.frozen.weight, frozen)


def test_arguments_closures_and_globals_are_trained_afterwards(options: dict[str, Any]) -> None:
    with torch.no_grad():
        OUTSIDE.weight.zero_()
    inside, given = nn.Linear(1, 1), nn.Linear(1, 1).double()
    accelerator = Accelerator(2, "cpu", dtype=torch.float32)

    def fill(boxes: dict[str, list[nn.Module]], value: float, rank: int, world_size: int, device: torch.device) -> Any:
        boxes["first"].insert(0, nn.Linear(5, 5))  # what is found is what was sent
        accelerator.prepare(boxes["first"][1])
        layers: Any = (inside, boxes["first"][1])
        for module in layers:
            nn.init.constant_(module.weight, value + rank)
        assert (world_size, device) == (2, torch.device("cpu"))
        return train_outside(0.0)

    result = accelerator.distribute(fill, **options)({"first": [given]}, value=3.0)
    assert len({*result, os.getpid()}) == 3
    assert inside.weight.item() == given.weight.item() == 3.0
    assert given.weight.dtype == torch.float64  # the notebook's own
    # it has a copy of each state; the thread of the launch may be about to let go of it
    eventually(lambda: gc.collect() >= 0 and not any(type(each) is _Returned for each in gc.get_objects()))


def test_variables_that_a_function_names_are_trained(options: dict[str, Any]) -> None:
    with torch.no_grad():
        OUTSIDE.weight.zero_()

    def train(step: float) -> None:
        with torch.no_grad():
            OUTSIDE.weight.add_(step * (1 + Accelerator(compute_setup="cpu").rank))

    accelerator = Accelerator(2, "cpu")
    accelerator.distribute(functools.partial(train, 0.5), **options)()
    assert OUTSIDE.weight.tolist() == [[0.5, 0.5]]
    accelerator.distribute(train_outside, **options)(0.5)  # ranks import it, and have a module of their own
    assert OUTSIDE.weight.tolist() == [[0.5, 0.5]]


def test_a_state_of_another_shape_warns_and_keeps_the_results(options: dict[str, Any]) -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1))
    before = model[0].weight.item()

    def widen() -> int:
        model[0] = nn.Linear(3, 3)
        return 7

    with pytest.warns(UserWarning, match="the trained state of the Sequential does not fit"):
        result = Accelerator(2, "cpu").distribute(widen, **options)()
    assert list(result) == [7, 7]
    assert model[0].weight.item() == before


# ------------------------------------------------------------------ what goes wrong
def test_errors_are_those_of_the_launcher(options: dict[str, Any]) -> None:
    accelerator = Accelerator(2, "cpu")

    def fails(rank: int) -> None:
        raise LookupError(f"on {rank}")

    def launches() -> None:
        from nblaunch import notebook_launcher

        try:
            notebook_launcher(fails, num_processes=2)
        except NestedLaunchError:
            accelerator.distribute(fails)(rank=5)  # in a rank this is a plain call

    with pytest.raises(LookupError, match="on 5"):
        accelerator.distribute(launches, **options)()
    with pytest.raises(RankError, match=r"result\.value, a generator, which cannot be sent"):
        accelerator.distribute(lambda: (_ for _ in ()), **options)()
    with pytest.raises(PayloadError, match=r"args\[0\], a generator, which cannot be sent"):
        accelerator.distribute(lambda x: x, **options)(_ for _ in ())
    with pytest.raises(ArgumentError, match=r"the arguments do not fit .*fails: got an unexpected keyword"):
        accelerator.distribute(fails, **options)(x=1)
    assert torch.distributed.is_initialized() is False


# ------------------------------------------------------------------ torchrun, and Slurm
SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from nblaunch import report
    from nblaunch.training.accelerator import Accelerator

    accelerator = Accelerator(compute_setup="cpu", gradient_accumulation_steps=2)
    torch.manual_seed(accelerator.rank)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(20.0).reshape(10, 2)), 2, shuffle=True)
    assert not torch.distributed.is_initialized()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert torch.distributed.get_backend() == "gloo"

    def train(model):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
            yield from accelerator.gather_for_metrics(x)[:, 0].tolist()
        report(loss=1.0)  # shown nowhere

    seen = accelerator.distribute(lambda: sorted(train(model)))()  # here a plain call
    weights = accelerator.gather(accelerator.unwrap_model(model).weight)
    assert torch.equal(weights[0], weights[1])
    figures = accelerator.all_reduce_dict({"rank": accelerator.rank, "local": accelerator.local_rank}, op="sum")
    accelerator.save(model.state_dict(), sys.argv[1])
    accelerator.wait_for_everyone()
    accelerator.print(accelerator.world_size, seen == [2.0 * i for i in range(10)], figures)
"""
TRAINS = """
    from nblaunch.training import TrainConfig, Trainer

    torch.manual_seed(0)
    model, at = nn.Linear(1, 1), torch.arange(7.0).reshape(7, 1)
    config = TrainConfig(epochs=2, batch_size=2, compute_setup="cpu", dtype=torch.float64)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), config)
    model, optimizer = trainer.fit(TensorDataset(at, at), TensorDataset(at, at))
    outputs = trainer.predict(TensorDataset(at))
    assert torch.equal(outputs, model.to(outputs.dtype)(at.to(outputs.dtype)))
    assert trainer.validate(TensorDataset(at, at))["valid_loss"] == trainer.history[-1]["valid_loss"]
    assert trainer.step == 4
"""
RESUMES = """
    def train(load):
        accelerator = Accelerator(compute_setup="cpu", seed=1)
        net = nn.Linear(1, 1)
        data = DataLoader(TensorDataset(torch.arange(12.0).reshape(-1, 1)), 2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3), data)
        if load:
            accelerator.load_state(sys.argv[2])
        for number, (inputs,) in enumerate(loader, load):
            accelerator.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                accelerator.save_state(sys.argv[2])
        return number, net.weight.item()

    assert train(0) == train(1)
    accelerator.wait_for_everyone()
"""
STARTS = """
    import os, runpy, sys
    import torch._dynamo  # which optimizers import: once, instead of in every task
    from nblaunch.training import accelerator

    tasks = []
    for rank in range(2):
        tasks.append(os.fork())
        if tasks[-1] == 0:
            os.environ["SLURM_PROCID"] = str(rank)
            runpy.run_path(sys.argv[1])
            sys.exit()
    assert not any(os.waitpid(task, 0)[1] for task in tasks)
"""
END = "    torch.distributed.destroy_process_group()\n"


def test_it_works_under_torchrun_without_a_launch(tmp_path: Path) -> None:
    script, saved = tmp_path / "train.py", tmp_path / "model.pt"
    script.write_text(textwrap.dedent(SCRIPT + TRAINS + RESUMES + END))
    printed = torchrun(script, str(saved), str(tmp_path / "state"), PYTHONPATH=os.getcwd())

    assert printed.strip() == "2 True {'rank': 1, 'local': 1}"
    assert list(torch.load(saved)) == ["module.weight", "module.bias"]


def test_tasks_of_a_slurm_step_on_two_nodes_are_ranks(tmp_path: Path, free_port: int) -> None:
    """Forks stand for them, as importing torch takes longer than what they do."""
    script, starts, saved = tmp_path / "train.py", tmp_path / "starts.py", tmp_path / "model.pt"
    script.write_text(textwrap.dedent(SCRIPT + END).replace("sys.argv[1]", repr(str(saved))))
    starts.write_text(textwrap.dedent(STARTS))
    step = {"SLURM_JOB_ID": str(free_port), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    nodes = {"SLURM_STEP_NODELIST": "localhost,other", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "0"}
    own = {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    tasks = subprocess.Popen(
        [sys.executable, str(starts), str(script)],
        env={**os.environ, **own, **step, **nodes},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, said = tasks.communicate(timeout=LONG)
    finally:
        with contextlib.suppress(ProcessLookupError):  # they have ended
            os.killpg(tasks.pid, signal.SIGKILL)

    assert (tasks.returncode, out) == (0, "2 True {'rank': 1, 'local': 0}\n"), said
    assert list(torch.load(saved)) == ["module.weight", "module.bias"]
