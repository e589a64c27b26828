"""Ranks on GPUs: a GPU for each, the backend, what is visible, and a notebook in which CUDA runs."""

from __future__ import annotations

import pytest

from tests.gpu import gpus
from tests.kernel.harness import Kernel

COUNT = gpus.number()
UUIDS = gpus.found().uuids if COUNT else ()
SLICES = gpus.found().slices if COUNT else ()

PLACES = """
def place(rank, local_rank, device):
    import torch
    import torch.distributed as dist
    assert torch.ones(2, device=device).sum().item() == 2
    summed, on_host = torch.full((3,), rank + 1.0, device=device), torch.full((3,), rank + 1.0)
    dist.all_reduce(summed)
    dist.all_reduce(on_host)
    backends = [type(dist.group.WORLD._get_backend(torch.device(kind))).__name__ for kind in ("cuda", "cpu")]
    return str(device), torch.cuda.current_device(), backends, summed.tolist(), on_host.tolist()
"""
SEES = """
def sees(device):
    import os
    import torch
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if device.type == "cuda":
        assert torch.ones(2, device=device).sum().item() == 2
    return str(device), os.environ.get("CUDA_VISIBLE_DEVICES"), uuids
"""
SHARES = """
def shares(rank, device):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    summed = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(summed)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False).to(device))
    model(torch.full((2, 4), float(rank), device=device)).sum().backward()
    return str(device), summed.tolist(), model.module.weight.grad.tolist()
"""


# ------------------------------------------------------------------ one rank a GPU
@pytest.mark.parametrize("ranks", sorted({1, COUNT}))
def test_each_rank_has_its_gpu_and_nccl(kernel: Kernel, ranks: int) -> None:
    kernel.run(f"{PLACES}\nresult = notebook_launcher(place, num_processes={ranks}, view='none')").check()
    total = [sum(range(1, ranks + 1)) * 1.0] * 3
    backends = ["ProcessGroupNCCL", "ProcessGroupGloo"]
    assert kernel.ask("list(result)") == [(f"cuda:{rank}", rank, backends, total, total) for rank in range(ranks)]


def test_by_default_every_gpu_has_a_rank(kernel: Kernel) -> None:
    kernel.run(f"{PLACES}\nresult = notebook_launcher(place, view='none')").check()
    assert kernel.ask("[value[0] for value in result]") == [f"cuda:{rank}" for rank in range(COUNT)]


def test_a_cell_has_its_gpu_too(kernel: Kernel) -> None:
    kernel.run(
        "%%distributed -o devices\ntorch.ones(1, device=device).device.index, torch.cuda.current_device()"
    ).check()
    assert kernel.ask("list(devices)") == [(rank, rank) for rank in range(COUNT)]


def test_more_ranks_than_gpus_are_refused_with_the_way_out(kernel: Kernel) -> None:
    cell = kernel.run(f"notebook_launcher(lambda: None, num_processes={COUNT + 1}, view='none')")
    visible = "1 GPU is" if COUNT == 1 else f"{COUNT} GPUs are"
    assert cell.error == (
        f"ArgumentError: num_processes={COUNT + 1}, but {visible} visible: use num_processes={COUNT}, or device='cpu', "
        "or backend='gloo' to let ranks share a GPU"
    )


def test_ranks_share_a_gpu_over_gloo(kernel: Kernel) -> None:
    ranks = COUNT + 1
    launch = f"notebook_launcher(shares, num_processes={ranks}, backend='gloo', view='none')"
    kernel.run(f"{SHARES}\nresult = {launch}").check()
    total = [sum(range(1, ranks + 1)) * 1.0] * 3
    found = kernel.ask("list(result)")
    assert [(device, summed) for device, summed, _ in found] == [
        (f"cuda:{rank % COUNT}", total) for rank in range(ranks)
    ]
    mean = 2 * sum(range(ranks)) / ranks  # of two samples of each rank's number
    assert all(gradient == [pytest.approx([mean] * 4)] for *_, gradient in found)


def test_ranks_on_the_cpu_use_no_gpu(kernel: Kernel) -> None:
    kernel.run(
        "def plain(device):\n"
        "    import torch\n"
        "    import torch.distributed as dist\n"
        "    summed = torch.ones(1, device=device)\n"
        "    dist.all_reduce(summed)\n"
        "    return str(device), summed.item(), torch.cuda.is_initialized()\n"
        "result = notebook_launcher(plain, num_processes=2, device='cpu', view='none')"
    ).check()
    assert kernel.ask("list(result)") == [("cpu", 2.0, False)] * 2


# ------------------------------------------------------------------ CUDA in the notebook
def test_a_launch_follows_a_kernel_on_the_notebooks_gpu(new_kernel: Kernel) -> None:
    new_kernel.run("x = torch.rand(512, 512, device='cuda')\ny = (x @ x).sum().item()").check()
    new_kernel.run(f"{PLACES}\nresult = notebook_launcher(place, num_processes=1, view='none')").check()
    assert new_kernel.ask("result[0][:2]") == ("cuda:0", 0)
    refused = new_kernel.run("notebook_launcher(place, num_processes=1, start_method='fork', view='none')")
    assert refused.error == (
        "StartError: start_method='fork': the notebook has used CUDA, which fails after a fork: use start_method='auto'"
    )
    spawned = "notebook_launcher(place, num_processes=1, start_method='spawn', view='none')[0][:2]"
    assert new_kernel.ask(spawned) == ("cuda:0", 0)


def test_a_question_about_cuda_is_noticed_before_a_fork(new_kernel: Kernel) -> None:
    """It initializes the driver, and torch would fail in the ranks."""
    new_kernel.run("assert torch.cuda.is_available()\nassert not torch.cuda.is_initialized()").check()
    refused = new_kernel.run("notebook_launcher(lambda: None, num_processes=1, start_method='fork', view='none')")
    assert refused.error.startswith("StartError: start_method='fork': the notebook has used CUDA")


def test_a_notebook_without_cuda_may_be_forked(new_kernel: Kernel) -> None:
    launch = "notebook_launcher(place, num_processes=1, start_method='fork', view='none')"
    new_kernel.run(f"{PLACES}\nresult = {launch}").check()
    assert new_kernel.ask("result[0][:2]") == ("cuda:0", 0)
    assert not new_kernel.ask("torch.cuda.is_initialized()")


# ------------------------------------------------------------------ CUDA_VISIBLE_DEVICES
@pytest.mark.needs("GPUs with UUIDs")
@pytest.mark.parametrize("entry", range(len(UUIDS)))
def test_a_uuid_chooses_the_gpu(kernel: Kernel, entry: int) -> None:
    """Also after CUDA has counted the GPUs of the notebook."""
    assert seen_with(kernel, UUIDS[entry]) == [("cuda:0", UUIDS[entry], [UUIDS[entry]])]


def test_an_index_chooses_the_gpu(new_kernel: Kernel) -> None:
    """Before and after CUDA has counted the GPUs of the notebook."""
    assert [device for device, *_ in seen_with(new_kernel, "0")] == ["cuda:0"]
    new_kernel.run("assert torch.ones(1, device='cuda').item() == 1").check()
    assert [device for device, *_ in seen_with(new_kernel, "0")] == ["cuda:0"]
    reversed_ones = ",".join(str(index) for index in reversed(range(COUNT)))
    assert [device for device, *_ in seen_with(new_kernel, reversed_ones)] == [f"cuda:{rank}" for rank in range(COUNT)]


def test_an_empty_list_means_the_cpu(kernel: Kernel) -> None:
    assert seen_with(kernel, "") == [("cpu", "", [])] * 2
    refused = kernel.run("os.environ['CUDA_VISIBLE_DEVICES'] = ''\nnotebook_launcher(sees, device='cuda', view='none')")
    kernel.run("os.environ.pop('CUDA_VISIBLE_DEVICES')").check()
    assert refused.error == (
        "ArgumentError: device='cuda', but no GPU is visible: check CUDA_VISIBLE_DEVICES, or use device='cpu'"
    )


@pytest.mark.needs("MIG slices")
@pytest.mark.parametrize("entry", range(len(SLICES)))
def test_a_slice_of_mig_is_one_gpu(new_kernel: Kernel, entry: int) -> None:
    ((device, visible, uuids),) = seen_with(new_kernel, SLICES[entry])
    assert (device, visible, len(uuids)) == ("cuda:0", SLICES[entry], 1)


def seen_with(kernel: Kernel, visible: str) -> list[tuple[str, str, list[str]]]:
    """Each rank's device, variable and GPUs if the notebook sets CUDA_VISIBLE_DEVICES, for this launch."""
    kernel.run(
        f"{SEES}\n"
        "before = os.environ.get('CUDA_VISIBLE_DEVICES')\n"
        f"os.environ['CUDA_VISIBLE_DEVICES'] = {visible!r}\n"
        "try:\n"
        "    result = notebook_launcher(sees, view='none')\n"
        "finally:\n"
        "    os.environ.pop('CUDA_VISIBLE_DEVICES')\n"
        "    if before is not None:\n"
        "        os.environ['CUDA_VISIBLE_DEVICES'] = before"
    ).check()
    return [
        (device, variable, [f"GPU-{uuid.removeprefix('GPU-')}" for uuid in uuids])
        for device, variable, uuids in kernel.ask("list(result)")
    ]
