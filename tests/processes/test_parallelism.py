"""Models that the ranks divide: training, data, evaluation and states equal those of whole models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.training import Accelerator, Accuracy, Parallelism, evaluate
from nblaunch.training.sharded_models import is_sharded
from nblaunch.training.sharded_states import full_state, load_sharded_state, save_sharded_state
from tests.processes.conftest import Launcher

PLAN = {
    **{f"layers.*.{name}": "colwise" for name in ("query", "key", "value", "up")},
    **{f"layers.*.{name}": "rowwise" for name in ("out", "down")},
}
ENCODINGS = 11


class Block(nn.Module):
    """A layer of a transformer; its heads may be divided."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part(self.first(x)).view(batch, length, -1, self.head_width).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """A small transformer that says the next of `ENCODINGS` tokens."""

    def __init__(self, seed: int = 0, *, tied: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(ENCODINGS, 8)
        self.layers = nn.ModuleList([Block(8, 4), Block(8, 4)])
        self.head = nn.Linear(8, ENCODINGS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def sentences(count: int = 26) -> TensorDataset:
    tokens = torch.randint(0, ENCODINGS, (count, 6), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def trained(
    parallelism: Parallelism | None,
    *,
    steps: int = 1,
    clip: float = 1.0,
    epochs: int = 2,
    batch_size: int = 8,
    model: Any = None,
    **settings: Any,
) -> tuple[Any, dict[str, Any], list[float]]:
    """Train, and return the prepared model, its whole weights (on rank 0) and the norms of the gradients."""
    accelerator = Accelerator(
        compute_setup="cpu", parallelism=parallelism, gradient_accumulation_steps=steps, seed=5, **settings
    )
    model = Model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(sentences(24), batch_size // accelerator.world_size * accelerator.copies, shuffle=True)
    loader, optimizer, net = accelerator.prepare(loader, optimizer, model)
    norms = []
    for _ in range(epochs):
        for inputs, target in loader:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net(inputs), target))
                norm = accelerator.clip_grad_norm_(net.parameters(), clip)
                if norm is not None:
                    assert not is_sharded(norm)
                    norms.append(norm.item())
                optimizer.step()
                optimizer.zero_grad()
    return net, full_state(net), norms


def run(parallelism: Parallelism | None, **options: Any) -> tuple[dict[str, Any], list[float]]:
    return trained(parallelism, **options)[1:]


def assert_close(result: Any, expected: Any, tolerance: float = 1e-10) -> None:
    (weights, norms), (own, own_norms) = result, expected
    assert list(weights) == list(own)
    for name, value in own.items():
        torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance)
    assert norms == pytest.approx(own_norms, rel=tolerance)


@pytest.mark.parametrize("steps", [1, 2])
def test_sharded_training_equals_a_single_process(launch: Launcher, steps: int) -> None:
    result = launch(partial(run, Parallelism(), steps=steps), device="cpu")
    assert_close(result[0], run(None, steps=steps))


MESHES = {
    "tensor": (2, Parallelism(tensor=2, plan=PLAN)),
    "shard and tensor": (4, Parallelism(tensor=2, plan=PLAN)),
    "replicate and shard": (4, Parallelism(replicate=2)),
    "replicate and tensor": (4, Parallelism(shard=False, tensor=2, plan=PLAN)),
    "uneven parts": (3, Parallelism(reshard_after_forward=False)),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_each_mesh_equals_a_single_process(launch: Launcher, mesh: str) -> None:
    ranks, parallelism = MESHES[mesh]
    size = 6 if ranks == 3 else 8
    result = launch(partial(run, parallelism, batch_size=size), num_processes=ranks, device="cpu")
    assert_close(result[0], run(None, batch_size=size))
