"""Training on GPUs: compiled and mixed-precision code, batches copied ahead, the Trainer and the quickstart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.gpu import gpus
from tests.kernel.harness import Kernel

COUNT = gpus.number()
LINE = """
def line(size=512):
    '''Points and labels that two linear layers learn.'''
    at = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(at, (at.sum(1) > 0).long())

def net():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
"""


# ------------------------------------------------------------------ torch's own
@pytest.mark.needs("a C compiler and Python.h")
def test_compiled_code_gives_what_eager_code_gives(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(
        "def compiles(rank, device):\n"
        "    import torch\n"
        "    torch.manual_seed(rank)\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to(device)\n"
        "    x = torch.randn(32, 64, device=device)\n"
        "    compiled = torch.compile(model)\n"
        "    compiled(x).square().mean().backward()\n"
        "    gradient = model[0].weight.grad.clone()\n"
        "    model.zero_grad()\n"
        "    model(x).square().mean().backward()\n"
        "    return torch.allclose(gradient, model[0].weight.grad, rtol=1e-2, atol=1e-4)\n"
        f"env = {{name: {str(tmp_path)!r} for name in ('TMPDIR', 'TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR')}}\n"
        f"result = notebook_launcher(compiles, num_processes={COUNT}, env=env, view='none')"
    ).check()
    assert kernel.ask("list(result)") == [True] * COUNT


def test_float16_with_a_scaler_learns(kernel: Kernel) -> None:
    kernel.run(
        f"{LINE}\n"
        "def train(rank, world_size, device):\n"
        "    from torch.nn.parallel import DistributedDataParallel\n"
        "    model = DistributedDataParallel(net().to(device), device_ids=[device])\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)\n"
        "    scaler = torch.amp.GradScaler('cuda')\n"
        "    at, labels = (part.to(device)[rank::world_size] for part in line().tensors)\n"
        "    losses = []\n"
        "    for _ in range(40):\n"
        "        with torch.autocast('cuda', dtype=torch.float16):\n"
        "            output = model(at)\n"
        "            loss = torch.nn.functional.cross_entropy(output, labels)\n"
        "        scaler.scale(loss).backward()\n"
        "        scaler.step(optimizer)\n"
        "        scaler.update()\n"
        "        optimizer.zero_grad()\n"
        "        losses.append(loss.item())\n"
        "    weights = torch.cat([each.detach().flatten() for each in model.parameters()])\n"
        "    return str(output.dtype), losses[0], losses[-1], scaler.get_scale(), weights\n"
        f"result = notebook_launcher(train, num_processes={COUNT}, view='none')"
    ).check()
    for dtype, first, last, scale in kernel.ask("[value[:4] for value in result]"):
        assert dtype == "torch.float16"
        assert last < first / 2
        assert scale >= 1
    assert kernel.ask("all(torch.equal(result[0][4], value[4]) for value in result)")


def test_workers_give_pinned_batches(kernel: Kernel) -> None:
    kernel.run(
        f"{LINE}\n"
        "def reads(device):\n"
        "    torch.ones(1, device=device).item()\n"
        "    data = line()\n"
        "    loader = torch.utils.data.DataLoader(data, batch_size=64, num_workers=2, pin_memory=True)\n"
        "    batches = [(at.is_pinned(), at.to(device, non_blocking=True), at) for at, labels in loader]\n"
        "    torch.cuda.synchronize()\n"
        "    right = torch.equal(torch.cat([moved.cpu() for _, moved, _ in batches]), data.tensors[0])\n"
        "    return all(is_pinned for is_pinned, *_ in batches), right, len(batches)\n"
        f"result = notebook_launcher(reads, num_processes={COUNT}, view='none')"
    ).check()
    assert kernel.ask("list(result)") == [(True, True, 8)] * COUNT


# ------------------------------------------------------------------ batches copied ahead
@pytest.mark.parametrize("depth", [1, 3])
def test_batches_copied_ahead_are_right(kernel: Kernel, depth: int) -> None:
    """While a slow kernel delays their use, and each batch's memory is free for the next as soon as Python lets go."""
    kernel.run(
        "def sums(device):\n"
        "    from nblaunch.training import Prefetcher\n"
        "    numbers = torch.arange(1 << 20).pin_memory()\n"
        "    batches = [{'x': (numbers + step).pin_memory(), 'step': step} for step in range(30)]\n"
        "    found = []\n"
        f"    for batch in Prefetcher(batches, device, depth={depth}):\n"
        "        assert batch['x'].device == device\n"
        "        torch.cuda._sleep(5_000_000)\n"
        "        found.append(batch['x'].sum() - numbers.sum().item())\n"
        "        del batch\n"
        "        scratch = torch.full((1 << 20,), -1, device=device)  # takes memory that is wrongly free\n"
        "        del scratch\n"
        "    return [int(each) >> 20 for each in found]\n"
        f"result = notebook_launcher(sums, num_processes={COUNT}, view='none')"
    ).check()
    assert kernel.ask("list(result)") == [list(range(30))] * COUNT


def test_batches_are_copied_while_a_kernel_computes(kernel: Kernel) -> None:
    """A pass takes little more than its kernels; without the Prefetcher it takes the copies' time too."""
    kernel.run(
        "def overlaps(device):\n"
        "    from nblaunch.training import Prefetcher\n"
        "    def elapsed(work):\n"
        "        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "        begin.record()\n"
        "        work()\n"
        "        end.record()\n"
        "        torch.cuda.synchronize()\n"
        "        return begin.elapsed_time(end)\n"
        "    batches = [torch.ones(64 << 20, dtype=torch.uint8).pin_memory() for _ in range(12)]\n"
        "    elapsed(lambda: batches[0].to(device, non_blocking=True))\n"
        "    copy = min(elapsed(lambda: batches[0].to(device, non_blocking=True)) for _ in range(3))\n"
        "    elapsed(lambda: torch.cuda._sleep(1000))\n"
        "    cycles = int(10**8 / elapsed(lambda: torch.cuda._sleep(10**8)) * copy)\n"
        "    def seconds(moved):\n"
        "        torch.cuda.synchronize()\n"
        "        begin = time.perf_counter()\n"
        "        for batch in moved:\n"
        "            torch.cuda._sleep(cycles)\n"
        "        torch.cuda.synchronize()\n"
        "        return time.perf_counter() - begin\n"
        "    ahead, plain = [], []\n"
        "    for _ in range(5):\n"
        "        ahead.append(seconds(Prefetcher(batches, device)))\n"
        "        plain.append(seconds(batch.to(device, non_blocking=True) for batch in batches))\n"
        "    return min(ahead) / min(plain)\n"
        "result = notebook_launcher(overlaps, num_processes=1, view='none')"
    ).check()
    assert kernel.ask("result[0]") < 0.8  # a copy takes as long as its kernel: with overlap 0.54


# ------------------------------------------------------------------ nblaunch.training, the notebook
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_the_trainer_learns_on_gpus(kernel: Kernel, precision: str) -> None:
    kernel.run(
        f"{LINE}\n"
        "from nblaunch.training import Accuracy, TrainConfig, Trainer\n"
        "class OnGpu:\n"
        "    def on_epoch_end(self, trainer, results):\n"
        "        assert trainer.accelerator.device.type == 'cuda'\n"
        "model = net()\n"
        f"config = TrainConfig(epochs=4, batch_size=32, compute_setup='gpu', mixed_precision={precision!r})\n"
        "optimizer = torch.optim.Adam(model.parameters(), lr=0.01)\n"
        "given = {'loss_fn': torch.nn.functional.cross_entropy, 'metrics': {'accuracy': Accuracy()}}\n"
        "trainer = Trainer(model, optimizer, config, callbacks=[OnGpu()], **given)\n"
        "trainer.fit(line(4096), line(256))\n"
        "history = trainer.history"
    ).check()
    assert kernel.ask("history[-1]['valid_accuracy']") > 0.9
    assert kernel.ask("next(model.parameters()).device.type") == "cpu"


@pytest.mark.needs("the notebooks' packages")
def test_the_quickstart_runs_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single GPU its two ranks share it, over gloo."""
    import headless

    folder = Path(headless.__file__).parent
    text = (folder / "quickstart.ipynb").read_text()
    changes = {
        'where = \\"cpu\\" if torch.cuda.device_count() == 1 else \\"auto\\"': 'where = \\"cuda\\"',
        "num_processes=2, device=where": "num_processes=2, device=where" + ", backend='gloo'" * (COUNT == 1),
        "-n 2 --device {where}": "-n 2 --device {where}" + " --backend gloo" * (COUNT == 1),
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "quickstart.ipynb").write_text(text)
    shutil.copy(folder / "mnist_or_digits.py", tmp_path)
    monkeypatch.setenv("NBLAUNCH_QUICKSTART_DATA", "digits")
    notebook = headless.execute(tmp_path / "quickstart.ipynb")
    assert headless.accuracy(notebook) >= 0.9


def test_a_profile_shows_kernels_and_the_idle_gpu(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(
        "from pathlib import Path\n"
        f"enough = Path({str(tmp_path)!r}, 'enough')\n"
        "def train(rank, device):\n"
        "    import time\n"
        "    import torch.distributed as dist\n"
        "    x = torch.randn(2048, 2048, device=device)\n"
        "    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(8, device=device))], lr=0.1)\n"
        "    is_over = torch.zeros(1, device=device)\n"
        "    while not is_over:\n"
        "        for _ in range(20):\n"
        "            y = x @ x\n"
        "        torch.cuda.synchronize()\n"
        "        time.sleep(0.02)\n"
        "        optimizer.step()\n"
        "        is_over[0] = enough.exists()\n"
        "        dist.all_reduce(is_over)\n"
        f"running = notebook_launcher(train, num_processes={COUNT}, block=False, view='none')\n"
        "while not all('in train' in stack for stack in running.stacks().values()): pass\n"
        "profile = running.profile(1.0)\n"
        "enough.touch()\n"
        "running.wait()"
    ).check()
    assert kernel.ask("profile.missing") == {}
    for compute, other, rank_has_gpu in kernel.ask(
        "[(each.share('compute'), each.share('other'), each.has_gpu) for each in profile.ranks]"
    ):
        assert rank_has_gpu
        assert compute > 0.01
        assert other > 0.1
    assert any("gemm" in name.lower() for name in kernel.ask("[each.name for each in profile.operations]"))
    assert kernel.ask("[each.place is not None for each in profile.operations][0]")
