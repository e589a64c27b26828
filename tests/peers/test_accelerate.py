"""accelerate in a launch: it finds rank and world size, and uses the existing process group or makes its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.errors import ArgumentError, PayloadError
from tests.peers import documents
from tests.peers.conftest import GOOD, STEPS, TEST_IMAGES
from tests.processes.conftest import Launcher


# ------------------------------------------------------------------ what ranks run
def place(rank: int, group: str) -> tuple[int, int, bool, list[int]]:
    """Where accelerate sees itself; whether the group is the one from before; what it gathers."""
    from accelerate import Accelerator

    if group == "accelerate's":
        dist.destroy_process_group()
    elif group == "the document's":
        documents.setup(rank, 2)
    before = dist.group.WORLD
    accelerator = Accelerator()
    gathered = accelerator.gather(torch.tensor([accelerator.process_index]))
    return accelerator.process_index, accelerator.num_processes, dist.group.WORLD is before, gathered.tolist()


def places(rank: int) -> list[Any]:
    """As found; with a group by the document's setup, for which ours steps aside; with one that accelerate makes."""
    from accelerate.state import AcceleratorState, PartialState

    found = []
    for group in ("ours", "the document's", "accelerate's"):
        found.append(place(rank, group))
        AcceleratorState._reset_state()
        PartialState._reset_state()
    return found


def evaluated_exactly() -> tuple[int, str]:
    """`evaluate` of a module that accelerate has wrapped, over the loader from before; and over the prepared one."""
    from accelerate import Accelerator

    from nblaunch.training import Accuracy, evaluate

    loader = DataLoader(TensorDataset(torch.eye(7), torch.arange(7)), batch_size=2)
    model, prepared = Accelerator().prepare(torch.nn.Linear(7, 7), loader)
    accuracy = Accuracy()
    evaluate(model, loader, metrics=accuracy)
    try:
        evaluate(model, prepared)
    except ArgumentError as error:
        return accuracy.count, str(error)
    return accuracy.count, "no error"


def learning_rates(accelerator: Any, schedule_of: Callable[[Any], Any]) -> list[float]:
    """The learning rate after each of 16 batches of this rank's."""
    net = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(64, 1)), 2)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule_of(optimizer))
    rates = []
    for (x,) in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(x).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    return rates


def of_both(every: int, schedule_of: Callable[[Any], Any], with_optimizer: bool) -> tuple[list[float], list[float]]:
    """The learning rates of accelerate and of nblaunch."""
    import accelerate

    from nblaunch import Accelerator

    options: Any = {"gradient_accumulation_steps": every, "step_scheduler_with_optimizer": with_optimizer}
    theirs = learning_rates(accelerate.Accelerator(cpu=True, **options), schedule_of)
    return theirs, learning_rates(Accelerator(compute_setup="cpu", schedule_steps="rank", **options), schedule_of)


# ------------------------------------------------------------------ the tests
@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    "schedule_of", [lambda optimizer: StepLR(optimizer, 3, 0.5), lambda optimizer: OneCycleLR(optimizer, 0.1, 21)]
)
@pytest.mark.filterwarnings("ignore")
def test_a_schedule_that_counts_ranks_is_accelerates(
    launch: Launcher, schedule_of: Callable[[Any], Any], every: int, with_optimizer: bool
) -> None:
    for theirs, ours in launch(of_both, (every, schedule_of, with_optimizer), device="cpu"):
        assert ours == theirs
        assert len(ours) == 16
        assert len(set(ours)) > 2


@pytest.mark.usefixtures("port_of_the_document")
def test_accelerate_finds_the_group_or_makes_one(launch: Launcher) -> None:
    for rank, found in enumerate(launch(places)):
        as_found, made_by_the_document, made_by_accelerate = found
        assert as_found == (rank, 2, True, [0, 1])
        assert made_by_the_document == (rank, 2, True, [0, 1])
        assert made_by_accelerate == (rank, 2, False, [0, 1])


def test_train_ddp_accelerate(launch: Launcher, readers_folder: Path) -> None:
    result = launch(documents.train_ddp_accelerate)
    for came in result:
        assert came == {**came, "seen": TEST_IMAGES, "steps": STEPS, "processes": 2, "model": "DistributedDataParallel"}
        assert came["accuracy"] > GOOD
    assert result[0]["accuracy"] == result[1]["accuracy"]


def test_evaluate_counts_exactly_beside_accelerate(launch: Launcher) -> None:
    for counted, refused in launch(evaluated_exactly):
        assert counted == 7
        assert "DataLoaderShard, already divided by accelerate" in refused


def test_an_accelerator_of_the_notebook_is_each_ranks_own(launch: Launcher) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        state = accelerator.state

        def place() -> tuple[Any, ...]:
            model = type(accelerator.prepare(torch.nn.Linear(1, 1))).__name__
            return accelerator.process_index, state.num_processes, accelerator.gradient_accumulation_steps, model

        parallel = "DistributedDataParallel"
        assert list(launch(place)) == [(0, 2, 2, parallel), (1, 2, 2, parallel)]
        accelerator.prepare(torch.nn.Linear(1, 1))
        with pytest.raises(PayloadError, match=r"prepared objects.*: create it, and call prepare\(\), inside"):
            launch(place)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
