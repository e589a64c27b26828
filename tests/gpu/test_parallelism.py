"""Models that GPUs divide: the weights of a single process, memory, mixed precision, offloading, and states."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import gpus
from tests.kernel.harness import Kernel

COUNT = gpus.number()
MODEL = """
from torch import nn
from nblaunch.training import Accelerator, Parallelism, evaluate
from nblaunch.training.parallelism import full_state

class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

class Deep(nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

PLAN = {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}

def steps(net, optimizer, accelerator, numbers, width=16, dtype=torch.float64):
    size, losses = 8 * 12, []
    parts = accelerator.world_size // accelerator.copies
    part = accelerator.rank // accelerator.copies
    for number in numbers:
        x = torch.randn(size, width, dtype=dtype, generator=torch.Generator().manual_seed(number))
        x = x.chunk(parts)[part].to(accelerator.device)
        loss = nn.functional.cross_entropy(net(x), (x.sum(1) > 0).long())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def train(parallelism, numbers=range(4), **settings):
    accelerator = Accelerator(parallelism=parallelism, **settings)
    dtype = torch.float32 if settings else torch.float64
    model = Deep().to(dtype)
    net, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = steps(net, optimizer, accelerator, numbers, dtype=dtype)
    return full_state(net), losses, str(next(net.parameters()).device.type)

def same(weights, others):
    return all(torch.allclose(weights[name], value.cpu(), 1e-9, 1e-9) for name, value in others.items())
"""
EVEN = COUNT - COUNT % 2
"""Ranks: all GPUs, or all but one."""
PARALLELISMS = {
    "sharded": "Parallelism()",
    "not resharded": "Parallelism(reshard_after_forward=False)",
    "replicated": f"Parallelism(replicate={EVEN // 2})",
    "divided": "Parallelism(tensor=2, plan=PLAN)",
}
pytestmark = pytest.mark.needs("two GPUs")


@pytest.mark.parametrize("kind", PARALLELISMS)
def test_gpus_that_divide_a_model_train_it_as_one_does(kernel: Kernel, kind: str) -> None:
    kernel.run(
        f"{MODEL}\n"
        f"def check():\n    return train({PARALLELISMS[kind]})\n"
        f"result = notebook_launcher(check, num_processes={EVEN}, view='none')\n"
        "model = Deep().double()\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n"
        "steps(model, optimizer, Accelerator(compute_setup='cpu'), range(4))"
    ).check()
    assert kernel.ask("same(result[0][0], model.state_dict())")
    assert kernel.ask("[value[2] for value in result]") == ["cuda"] * EVEN


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_on_sharded_gpus(kernel: Kernel, precision: str) -> None:
    kernel.run(
        f"{MODEL}\n"
        f"def check():\n    return train(Parallelism(), range(60), mixed_precision={precision!r})[1]\n"
        f"result = notebook_launcher(check, num_processes={EVEN}, view='none')"
    ).check()
    for first, last in kernel.ask("[(losses[0], losses[-1]) for losses in result]"):
        assert last < first / 2


def test_sharded_gpus_hold_their_part(kernel: Kernel) -> None:
    """Of 128 MB of parameters: with those of one layer while it computes, and with everything else."""
    kernel.run(
        f"{MODEL}\n"
        "def check(rank, world_size, device):\n"
        "    accelerator = Accelerator(parallelism=Parallelism(reshard_after_forward=True))\n"
        "    model = Deep(width=512, depth=16)\n"
        "    whole = sum(parameter.nbytes for parameter in model.parameters())\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"  # it holds the parameters
        "    net = accelerator.prepare(model)\n"
        "    torch.cuda.synchronize()\n"
        "    first = torch.cuda.max_memory_allocated(device)\n"
        "    held = torch.cuda.memory_allocated(device)\n"
        "    torch.cuda.reset_peak_memory_stats(device)\n"
        "    with torch.no_grad():\n"
        "        net(torch.ones(2, 512, device=device))\n"
        "    return held / whole, max(first, torch.cuda.max_memory_allocated(device)) / whole\n"
        f"result = notebook_launcher(check, num_processes={EVEN}, view='none')"
    ).check()
    for held, peak in kernel.ask("list(result)"):
        assert held < 1 / EVEN + 0.1
        assert peak < 1 / EVEN + 0.5


def test_offloaded_parameters_stay_on_the_cpu(kernel: Kernel) -> None:
    kernel.run(
        f"{MODEL}\n"
        "def check():\n    return train(Parallelism(cpu_offload=True))\n"
        "def whole():\n    return train(Parallelism())\n"
        f"result = notebook_launcher(check, num_processes={EVEN}, view='none')\n"
        f"other = notebook_launcher(whole, num_processes={EVEN}, view='none')"
    ).check()
    assert kernel.ask("same(result[0][0], other[0][0])")
    assert kernel.ask("[value[2] for value in result]") == ["cpu"] * EVEN


def test_a_state_of_gpus_loads_on_the_cpu_and_back(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(
        f"{MODEL}\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "def run(parallelism, load, save, numbers, setup):\n"
        "    accelerator = Accelerator(compute_setup=setup, parallelism=parallelism)\n"
        "    model = Deep().double()\n"
        "    net, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))\n"
        "    if load:\n"
        "        accelerator.load_state(folder / load)\n"
        "    steps(net, optimizer, accelerator, numbers)\n"
        "    accelerator.save_state(folder / save)\n"
        "    return full_state(net)\n"
        "first = lambda: run(Parallelism(), None, 'gpus', range(2), 'gpu')\n"
        "second = lambda: run(Parallelism(tensor=2, plan=PLAN), 'cpus', 'last', range(4, 6), 'gpu')\n"
        f"notebook_launcher(first, num_processes={EVEN}, view='none')\n"
        "run(None, 'gpus', 'cpus', range(2, 4), 'cpu')\n"
        f"result = notebook_launcher(second, num_processes={EVEN}, view='none')\n"
        "model = Deep().double()\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n"
        "steps(model, optimizer, Accelerator(compute_setup='cpu'), range(6))"
    ).check()
    assert kernel.ask("same(result[0], model.state_dict())")


def test_evaluate_counts_uneven_parts_on_gpus_once(kernel: Kernel) -> None:
    kernel.run(
        f"{MODEL}\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "x = torch.randn(4 * 12 + 1, 16, generator=torch.Generator().manual_seed(1))\n"
        "data = TensorDataset(x, (x[:, 0] > 0).long())\n"
        "def check(rank):\n"
        "    net = Accelerator(parallelism=Parallelism()).prepare(Deep())\n"
        "    own = [] if rank else list(DataLoader(data, 10))\n"
        "    return [evaluate(net, loader)['accuracy'] for loader in (DataLoader(data, 4), own)]\n"
        f"result = notebook_launcher(check, num_processes={EVEN}, view='none')\n"
        "alone = evaluate(Deep(), DataLoader(data, 49))['accuracy']"
    ).check()
    assert kernel.ask("[value == [alone, alone] for value in result]") == [True] * EVEN


@pytest.mark.parametrize("kind", ["sharded", "divided"])
def test_a_trainer_resumes_on_gpus_and_saves_states(kernel: Kernel, tmp_path: Path, kind: str) -> None:
    kernel.run(
        f"{MODEL}\n"
        "from torch.utils.data import TensorDataset\n"
        "from nblaunch.training import TrainConfig, Trainer\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "x = torch.randn(48, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))\n"
        "data = TensorDataset(x, (x.sum(1) > 0).long())\n"
        "def fitted(parallelism, setup, nprocs, steps):\n"
        "    model = Deep().double()\n"
        "    parts = nprocs // (parallelism.tensor if parallelism else 1)\n"
        "    config = TrainConfig(nprocs=nprocs, compute_setup=setup, batch_size=24 // parts, max_steps=steps,\n"
        "        checkpoint_dir=folder / setup, parallelism=parallelism)\n"
        "    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), config,\n"
        "        loss_fn=nn.functional.cross_entropy)\n"
        "    trainer.fit(data, data)\n"
        "    return trainer\n"
        f"fitted({PARALLELISMS[kind]}, 'gpu', {EVEN}, 3)\n"
        f"one = fitted({PARALLELISMS[kind]}, 'gpu', {EVEN}, 4)\n"
        "alone = fitted(None, 'cpu', 1, 4)\n"
        "def saved(load):\n"
        f"    accelerator = Accelerator(parallelism={PARALLELISMS[kind]})\n"
        "    model = Deep().double()\n"
        "    net, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))\n"
        "    if load:\n"
        "        accelerator.load_state(folder / 'saved')\n"
        "    steps(net, optimizer, accelerator, range(2, 4) if load else range(2))\n"
        "    if not load:\n"
        "        accelerator.save_state(folder / 'saved')\n"
        "        steps(net, optimizer, accelerator, range(2, 4))\n"
        "    return accelerator.get_state_dict(net)\n"
        f"whole = notebook_launcher(saved, (False,), num_processes={EVEN}, view='none')[0]\n"
        f"resumed = notebook_launcher(saved, (True,), num_processes={EVEN}, view='none')[0]"
    ).check()
    assert kernel.ask("same(one.model.state_dict(), alone.model.state_dict())")
    assert kernel.ask("one.validations[-1]['valid_loss'] - alone.validations[-1]['valid_loss']") == pytest.approx(0)
    assert kernel.ask("torch.allclose(one.predict(data), alone.predict(data))")
    assert kernel.ask("same(whole, resumed)")
