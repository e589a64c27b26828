"""Tensors of the notebook on a GPU reach each rank's own GPU, and results come back to the host."""

from __future__ import annotations

import pytest

from tests.gpu import gpus
from tests.kernel.harness import Kernel

COUNT = gpus.number()
SEED = "torch.manual_seed(3)"
KINDS = {
    "float32": "torch.randn(1000, device='cuda')",
    "float64": "torch.randn(1000, device='cuda', dtype=torch.float64)",
    "float16": "torch.randn(1000, device='cuda').half()",
    "bfloat16": "torch.randn(1000, device='cuda').bfloat16()",
    "float8_e4m3fn": "torch.randn(1000, device='cuda').to(torch.float8_e4m3fn)",
    "float8_e5m2": "torch.randn(40_000, device='cuda').to(torch.float8_e5m2)",
    "complex64": "torch.randn(1000, device='cuda', dtype=torch.complex64)",
    "complex128, conjugate": "torch.randn(1000, device='cuda', dtype=torch.complex128).conj()",
    "int8": "torch.randint(-128, 128, (1000,), device='cuda', dtype=torch.int8)",
    "int64": "torch.arange(1000, device='cuda')",
    "bool": "torch.rand(1000, device='cuda') > 0.5",
    "sparse": "torch.eye(50, device='cuda').to_sparse()",
    "sparse, by rows": "torch.eye(50, device='cuda').to_sparse_csr()",
    "a view": "torch.randn(1000, 30, device='cuda')[::3, 5:]",
    "transposed": "torch.randn(100, 30, device='cuda').t()",
    "64 MB": "torch.randn(1 << 24, device='cuda')",
    "empty": "torch.empty(0, 3, device='cuda')",
    "a scalar": "torch.tensor(2.5, device='cuda')",
    "a parameter": "torch.nn.Parameter(torch.randn(10, device='cuda'))",
}
SENDS = """
def plain(tensor):
    '''The values as something that can be compared.'''
    dense = (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach().cpu().resolve_conj()
    return dense.to(torch.float64) if dense.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else dense

def send(rank, device):
    return value.device == device, value.dtype, value.layout, plain(value), value
"""
COMPARED = """
for is_here, dtype, layout, values, returned in result:
    assert is_here, 'not on the GPU of the rank'
    assert (dtype, layout) == (value.dtype, value.layout), (dtype, layout)
    assert torch.equal(values, plain(value)), 'other values in the rank'
    assert returned.device.type == 'cpu', returned.device
    assert (returned.dtype, returned.layout, returned.shape) == (value.dtype, value.layout, value.shape), returned
    assert torch.equal(plain(returned), plain(value)), 'other values came back'
assert value.is_cuda
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_travels_to_each_gpu_and_back(kernel: Kernel, kind: str) -> None:
    kernel.run(f"{SEED}\nvalue = {KINDS[kind]}\n{SENDS}").check()
    kernel.run(f"result = notebook_launcher(send, num_processes={COUNT}, view='none')").check()
    assert kernel.ask("len(result)") == COUNT
    kernel.run(COMPARED).check()


def test_tied_weights_and_views_stay_tied(kernel: Kernel) -> None:
    kernel.run(
        "layers = torch.nn.ModuleList([torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)]).cuda()\n"
        "layers[1].weight = layers[0].weight\n"
        "whole = torch.zeros(100_000, device='cuda')\n"
        "left, right = whole[:60_000], whole[40_000:]\n"
        "def ties(device):\n"
        "    left[50_000:] = 7\n"
        "    devices = {str(each.device) for each in (*layers.parameters(), left, right)}\n"
        "    return layers[0].weight is layers[1].weight, right[:10_001].unique().tolist(), devices == {str(device)}\n"
        f"result = notebook_launcher(ties, num_processes={COUNT}, view='none')"
    ).check()
    assert kernel.ask("list(result)") == [(True, [0.0, 7.0], True)] * COUNT
    assert kernel.ask("whole.sum().item()") == 0.0  # ranks work on copies


def test_an_argument_and_a_nested_result_travel_too(kernel: Kernel) -> None:
    kernel.run(
        "def doubles(batch, device):\n"
        "    assert batch['x'][0].device == device and batch['y'].device.type == 'cpu'\n"
        "    return {'x': [batch['x'][0] * 2], 'y': batch['y'] * 2}\n"
        "batch = {'x': (torch.arange(5.0, device='cuda'),), 'y': torch.arange(3)}\n"
        f"result = notebook_launcher(doubles, (batch,), num_processes={COUNT}, view='none')"
    ).check()
    found = "[(r['x'][0].device.type, r['x'][0].tolist(), r['y'].tolist()) for r in result]"
    assert kernel.ask(found) == [("cpu", [0.0, 2.0, 4.0, 6.0, 8.0], [0, 2, 4])] * COUNT


def test_a_trained_module_comes_back_to_the_host(kernel: Kernel) -> None:
    kernel.run(
        "def train(rank, device):\n"
        "    from torch.nn.parallel import DistributedDataParallel\n"
        "    torch.manual_seed(0)\n"
        "    model = DistributedDataParallel(torch.nn.Linear(4, 2).to(device), device_ids=[device])\n"
        "    model(torch.full((2, 4), rank + 1.0, device=device)).sum().backward()\n"
        "    torch.optim.SGD(model.parameters(), lr=0.1).step()\n"
        "    return model.module.state_dict()\n"
        f"result = notebook_launcher(train, num_processes={COUNT}, view='none')\n"
        "model = torch.nn.Linear(4, 2)\n"
        "model.load_state_dict(result[0])"
    ).check()
    assert kernel.ask("{tensor.device.type for state in result for tensor in state.values()}") == {"cpu"}
    assert kernel.ask("all(torch.equal(result[0]['weight'], state['weight']) for state in result)")


def test_a_session_takes_and_gives_tensors_of_a_gpu(kernel: Kernel) -> None:
    kernel.run(f"s = nblaunch.session({COUNT})\nweights = torch.arange(4.0, device='cuda')").check()
    try:
        kernel.run(
            "%%distributed\nassert weights.device == device\nkept = weights * (rank + 1)\nassert kept.is_cuda"
        ).check()
        pulled = "[(each.device.type, each.tolist()) for each in s.pull('kept')]"
        expected = [("cpu", [0.0, rank + 1.0, 2.0 * (rank + 1), 3.0 * (rank + 1)]) for rank in range(COUNT)]
        assert kernel.ask(pulled) == expected
        kernel.run("s.push(weights=torch.full((2,), 5.0, device='cuda'))").check()
        kernel.run("%%distributed -o given\nstr(weights.device), weights.tolist()").check()
        assert kernel.ask("list(given)") == [(f"cuda:{rank}", [5.0, 5.0]) for rank in range(COUNT)]
    finally:
        kernel.run("s.stop()").check()
