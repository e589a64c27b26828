"""Training runs in cells: the second document's Accelerator and Trainer, and one rank in the notebook's process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel.harness import Kernel

REPAIRS = {
    "from qadence.ml_tools.train_utils import Accelerator": "from nblaunch import Accelerator",
    "from import DataLoader, TensorDataset": "from torch.utils.data import DataLoader, TensorDataset",
    "nn.Linear(100, 1) # Output Layer": "nn.Linear(100, 1)) # Output Layer",
    'backend="nccl" # Backend for communication': 'backend="nccl") # Backend for communication',
    "from qadence.ml_tools.trainer import Trainer": "from nblaunch.training import Trainer",
    "from qadence.ml_tools import TrainConfig": "from nblaunch.training import TrainConfig",
    "model, optimizer =\n": "model, optimizer = trainer.fit(dataset)\n",
    'backend="gloo" # choose `nccl` for GPU': 'backend="gloo") # choose `nccl` for GPU',
    "output = model(batch_data)": "optimizer.zero_grad()\n            output = model(batch_data)",
    "loss = torch.nn.functional.mse_loss(output, batch_targets)": (
        "loss = torch.nn.functional.mse_loss(output, batch_targets)\n            loss.backward()\n            "
        "optimizer.step()"
    ),
}
"""What the page's text lost (an import's module, closing brackets, the step in the loop), and where ours is found.
Its indentation, lost too, is put back below."""

SETTINGS = """
accelerator = Accelerator(
    nprocs=4, # Number of processes (e.g., GPUs). Enables multiprocessing.
    compute_setup="auto", # Automatically selects available compute devices
    log_setup="cpu", # Logs on CPU to avoid memory overhead
    dtype=torch.float32, # Data type for numerical precision
    backend="nccl" # Backend for communication
"""

TRAINER = """
from qadence.ml_tools.trainer import Trainer
from qadence.ml_tools import TrainConfig
config = TrainConfig(nprocs=4)
trainer = Trainer(model, optimizer, config)
model, optimizer =
"""

DEFINITIONS = """
import torch
from torch import nn
from import DataLoader, TensorDataset
from qadence.ml_tools.train_utils import Accelerator

def train_epoch(epochs, model, dataloader, optimizer, accelerator):
    # Prepare model, optimizer, and dataloader for distributed training
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    # accelerator.rank will provide you the rank of the process.
    if accelerator.rank == 0:
        print("Prepared model of type: ", type(model))
        print("Prepared optimizer of type: ", type(optimizer))
        print("Prepared dataloader of type: ", type(dataloader))
    for epoch in range(epochs):
        for batch in dataloader:
            # Move batch to the correct device
            batch = accelerator.prepare_batch(batch)
            batch_data, batch_targets = batch
            output = model(batch_data)
            loss = torch.nn.functional.mse_loss(output, batch_targets)
            print("Rank: ", accelerator.rank, " | Epoch: ", epoch, " | Loss: ", loss.item())
"""

PROGRAM = """
if __name__ == "__main__":
    n_epochs = 10
    model = nn.Sequential(
        nn.Linear(10, 100), # Input Layer
        nn.ReLU(), # Activation Function
        nn.Linear(100, 1) # Output Layer
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # A random dataset with 10 features and a target to predict.
    dataset = TensorDataset(torch.randn(100, 10), torch.randn(100, 1))
    dataloader = DataLoader(dataset, batch_size=32)
    accelerator = Accelerator(
        nprocs=4, # Number of processes (e.g., GPUs). Enables multiprocessing.
        compute_setup="cpu", # or choose GPU
        backend="gloo" # choose `nccl` for GPU
    distributed_train_epoch = accelerator.distribute(train_epoch)
    distributed_train_epoch(n_epochs, model, dataloader, optimizer, accelerator)
"""


def repaired(code: str) -> str:
    for broken, whole in REPAIRS.items():
        code = code.replace(broken, whole)
    return code


@pytest.fixture
def cells(kernel: Kernel) -> Kernel:
    kernel.run("import torch; torch.manual_seed(0)").check()
    return kernel


def test_the_documented_example_trains_the_notebooks_model(cells: Kernel) -> None:
    cells.run(repaired(DEFINITIONS)).check()
    cell = cells.run(repaired(PROGRAM)).check()

    for rank in range(4):
        assert f"Rank:  {rank}  | Epoch:  9  | Loss: " in cell.stdout
    assert "DistributedDataParallel" in cell.stdout
    assert "torch.optim.adam.Adam" in cell.stdout
    assert "ShardedLoader" in cell.stdout
    assert "not returned" not in cell.text
    steps, shape = cells.ask("[int(s['step']) for s in optimizer.state.values()], list(model[0].weight.shape)")
    assert (steps, shape) == ([10 * 1] * 4, [100, 10])
    cells.run(
        "x, y = dataset.tensors\nwith torch.no_grad(): error = nn.functional.mse_loss(model(x), y).item()"
    ).check()
    assert cells.ask("error") < 1.0  # what the mean of the targets alone would get


def test_the_documented_trainer_returns_model_and_optimizer(cells: Kernel) -> None:
    cells.run(repaired("from nblaunch import Accelerator\n" + SETTINGS)).check()
    cells.run(
        "from torch import nn\nfrom torch.utils.data import TensorDataset\n"
        "inputs = torch.randn(100, 10)\ndataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))\n"
        "model = given = nn.Linear(10, 1)\noptimizer = torch.optim.Adam(model.parameters(), lr=0.1)\n"
        "before = nn.functional.mse_loss(model(inputs), dataset.tensors[1]).item()"
    ).check()
    cells.run(repaired(TRAINER)).check()
    assert cells.ask("model is given, trainer.accelerator.nprocs, [int(r['step']) for r in trainer.history]") == (
        True,
        4,
        [1],
    )
    cells.run("after = nn.functional.mse_loss(model(inputs), dataset.tensors[1]).item()").check()
    assert cells.ask("after < before")


IN_PLACE = """
import os, threading
from nblaunch.training import TrainConfig, Trainer

torch.manual_seed(0)
inputs = torch.randn(40, 2)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
pids = set()

class Notes:
    def on_step_end(self, trainer, loss):
        pids.add(os.getpid())
        if trainer.step == wait_at:
            wait_until_asked()

def new_trainer(epochs=3, **config):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    config = TrainConfig(nprocs=1, epochs=epochs, batch_size=8, compute_setup="cpu", log_every=5, **config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, config, callbacks=[Notes()])

def wait_until_asked():
    import time
    from nblaunch.training.step_boundaries import StepBoundaries
    asked, ask = threading.Event(), StepBoundaries.ask
    StepBoundaries.ask = lambda self: (ask(self), asked.set())
    print("waiting", flush=True)
    while not asked.is_set():
        time.sleep(0.01)
"""


def test_one_rank_trains_in_the_notebook_and_shows_a_line(cells: Kernel) -> None:
    cells.run(IN_PLACE + "wait_at = None").check()
    cell = cells.run("trainer = new_trainer()\ntrainer.fit(data, data);").check()
    shown = [message["content"] for message in cell.messages if message["msg_type"].endswith("display_data")]
    assert len({content["transient"]["display_id"] for content in shown}) == 1
    last = shown[-1]["data"]["text/plain"]
    assert last.startswith("epoch 3/3 · step 15 of 15 · loss 0.")
    assert "samples per second" in last
    assert "valid loss 0." in last
    assert cells.ask("pids == {os.getpid()}")
    assert cell.stderr == ""


def test_an_interrupt_brings_back_weights_and_says_what_is_next(cells: Kernel, folder: Path) -> None:
    define = IN_PLACE.replace("nprocs=1", "nprocs=2")
    cells.run(f"{define}wait_at = 6\nbroken = new_trainer()").check()
    request = cells.start_cell("broken.fit(data)")
    cells.follow_cell(request, "waiting")
    cells.interrupt()
    cell = cells.finish_cell(request)
    assert cell.error.startswith("KeyboardInterrupt: Trainer.fit was stopped after")
    assert "have the state after step 6. The next fit starts" in cell.traceback
    assert cells.ask("broken.step, len(broken.history)") == (6, 2)
    cells.run("wait_at = None\nwhole = new_trainer(max_steps=6)\nwhole.fit(data)").check()
    assert cells.ask("torch.equal(broken.model.weight, whole.model.weight)")


def test_a_method_of_a_cells_class_trains_its_object(cells: Kernel) -> None:
    cells.run(
        "from nblaunch import Accelerator\n"
        "class Run:\n"
        "    def __init__(self):\n"
        "        self.model = torch.nn.Linear(1, 1)\n"
        "        self.accelerator = Accelerator(nprocs=2, compute_setup='cpu')\n"
        "    def train(self, value, rank):\n"
        "        torch.nn.init.constant_(self.model.weight, value)\n"
        "        if value < 0: raise ValueError('negative')\n"
        "        return rank\n"
        "run = Run()"
    ).check()
    assert cells.run("list(run.accelerator.distribute(run.train)(3.0))").check().value == "[0, 1]"
    assert cells.ask("run.model.weight.item()") == 3.0
    failed = cells.run("run.accelerator.distribute(run.train)(-1.0)")
    assert failed.error == "ValueError: negative"
    assert "raise ValueError('negative')" in failed.traceback
    assert "training/distribute" not in failed.traceback  # our own frames are left out
    assert cells.ask("run.model.weight.item()") == 3.0
