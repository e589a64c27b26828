"""Models that the ranks divide: training, data, evaluation and states equal those of whole models."""

from __future__ import annotations

import gc
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.errors import ArgumentError, ResultError
from nblaunch.training import (
    Accelerator,
    Accuracy,
    DistributedWeightedSampler,
    ExactDistributedSampler,
    Parallelism,
    evaluate,
)
from nblaunch.training.collectives import exchange
from nblaunch.training.parallelism import full_state, is_sharded
from tests.processes.conftest import Launcher

pytestmark = pytest.mark.usefixtures("imported_ahead")

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

    def __init__(
        self, seed: int = 0, *, tied: bool = False, dtype: torch.dtype = torch.float64, layers: int = 2
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(ENCODINGS, 8)
        self.layers: Any = nn.ModuleList(Block(8, 4) for _ in range(layers))
        self.scale: Tensor
        self.head = nn.Linear(8, ENCODINGS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).transpose(1, 2) * self.scale


def sentences(count: int = 26) -> TensorDataset:
    tokens = torch.randint(0, ENCODINGS, (count, 6), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def trained(
    parallelism: Parallelism | None,
    *,
    steps: int = 1,
    clip: float = 1.0,
    epochs: int = 1,
    batch_size: int = 8,
    model: Any = None,
    layers: int = 2,
    **settings: Any,
) -> tuple[Any, dict[str, Any], list[float]]:
    """Train, and return the prepared model, its whole weights (on rank 0) and the norms of the gradients."""
    accelerator = Accelerator(
        compute_setup="cpu", parallelism=parallelism, gradient_accumulation_steps=steps, seed=5, **settings
    )
    model = Model(layers=layers) if model is None else model
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


RUNS: dict[int, list[tuple[Parallelism, dict[str, Any]]]] = {
    2: [
        (Parallelism(), {}),
        (Parallelism(), {"steps": 2}),
        (Parallelism(tensor=2, plan=PLAN), {}),
    ],
    3: [(Parallelism(reshard_after_forward=False), {"batch_size": 6})],  # uneven parts
    4: [
        (Parallelism(replicate=2), {"layers": 1}),
        (Parallelism(tensor=2, plan=PLAN), {"layers": 1}),
        (Parallelism(shard=False, tensor=2, plan=PLAN), {"layers": 1}),
    ],
}


@pytest.mark.parametrize("ranks", RUNS)
def test_training_equals_that_of_a_single_process(launch: Launcher, on_ranks: Launcher, ranks: int) -> None:
    def check() -> list[Any]:
        return [run(parallelism, **options) for parallelism, options in RUNS[ranks]]

    results = (launch(check, num_processes=3, device="cpu") if ranks == 3 else on_ranks(check, ranks))[0]
    for result, (_, options) in zip(results, RUNS[ranks], strict=True):
        assert_close(result, run(None, **options))


# ------------------------------------------------------------------ parameters and optimizers
def test_an_optimizer_keeps_its_groups_and_its_state(on_ranks: Launcher) -> None:
    def halves(model: Model) -> list[dict[str, Any]]:
        head = [model.head.weight, model.tokens.weight]
        return [
            {"params": head, "lr": 0.1, "weight_decay": 0.5},
            {"params": list(model.layers.parameters())},
        ]

    def step(net: Any, optimizer: Any) -> None:
        inputs, target = sentences(4).tensors
        loss_of(net(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    def check(parallelism: Parallelism | None, apart: bool = False) -> list[Any]:
        model = Model(layers=1)
        optimizer = torch.optim.AdamW(halves(model), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step(model, optimizer)  # there is a state to divide
        scheduler.step()
        accelerator = Accelerator(compute_setup="cpu", parallelism=parallelism)
        if apart:
            model = accelerator.prepare(model)
            scheduler, optimizer = accelerator.prepare(scheduler, optimizer)
        else:
            scheduler, model, optimizer = accelerator.prepare(scheduler, model, optimizer)
        step(model, optimizer)
        scheduler.step()
        assert all(p is q for p, q in zip(optimizer.param_groups[1]["params"], model.layers.parameters(), strict=True))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
        return [full_state(model), full_state(optimizer)]

    def both(parallelism: Parallelism | None) -> list[Any]:
        return [check(parallelism), check(parallelism, apart=True)]

    expected = both(None)
    for ranks, parallelism in ((2, Parallelism()), (4, Parallelism(tensor=2, plan=PLAN))):
        result = on_ranks(partial(both, parallelism), ranks)
        torch.testing.assert_close(result[0], expected, rtol=1e-10, atol=1e-10)
        assert result[1] == [[{}, {}], [{}, {}]]


def test_rank_0_decides_the_weights(on_ranks: Launcher) -> None:
    def check(rank: int) -> list[dict[str, Any]]:
        states = []
        for parallelism in (Parallelism(), Parallelism(tensor=2, plan=PLAN)):
            model = Model(seed=rank)
            model.scale.fill_(rank + 3)
            states.append(full_state(Accelerator(compute_setup="cpu", parallelism=parallelism).prepare(model)))
        return states

    expected = {**Model(seed=0).state_dict(), "scale": torch.tensor(3.0, dtype=torch.float64)}
    for weights in on_ranks(check)[0]:
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


TIED_PLAN = {**PLAN, "tokens": "rowwise", "head": "colwise_gather"}


@pytest.mark.parametrize("kind", ["shard", "tensor"])
def test_tied_and_frozen_weights_stay_so(on_ranks: Launcher, kind: str) -> None:
    def check(parallelism: Parallelism | None) -> Any:
        model = Model(tied=True)
        model.layers[0].requires_grad_(False)
        net, weights, norms = trained(parallelism, model=model)
        assert net.head.weight is net.tokens.weight
        assert weights == {} or torch.equal(weights["head.weight"], weights["tokens.weight"])
        assert [p.requires_grad for p in net.layers[0].parameters()] == [False] * 16
        return weights, norms

    parallelism = Parallelism() if kind == "shard" else Parallelism(tensor=2, plan=TIED_PLAN)
    expected = check(None)
    assert_close(on_ranks(partial(check, parallelism))[0], expected)
    before = Model(tied=True).state_dict()
    assert torch.equal(expected[0]["layers.0.up.weight"], before["layers.0.up.weight"])
    assert not torch.equal(expected[0]["head.weight"], before["head.weight"])


def test_whole_parameters_are_freed_before_the_optimizer_lets_go(on_ranks: Launcher) -> None:
    def check() -> list[list[int]]:
        sizes = []
        for parallelism in (Parallelism(), Parallelism(tensor=2, plan=PLAN)):
            model = Model(layers=1)
            optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
            accelerator = Accelerator(compute_setup="cpu", parallelism=parallelism)
            accelerator.prepare(model)
            held = [parameter.numel() for parameter in optimizer.param_groups[0]["params"]]
            accelerator.prepare(optimizer)
            sizes.append([sum(held), sum(parameter.numel() for parameter in optimizer.param_groups[0]["params"])])
        return sizes

    size = sum(parameter.numel() for parameter in Model(layers=1).layers.parameters())
    assert list(on_ranks(check)) == [[[0, size], [32, size]]] * 2  # of the plan norms are left


# ------------------------------------------------------------------ data
def test_ranks_of_a_tensor_group_read_the_same(on_ranks: Launcher) -> None:
    def check(rank: int) -> list[Any]:
        accelerator = Accelerator(compute_setup="cpu", parallelism=Parallelism(tensor=2, plan=PLAN))
        numbers = TensorDataset(torch.arange(10))
        weighted = DistributedWeightedSampler(torch.ones(10), replacement=False)
        loaders = [
            DataLoader(numbers, 2, shuffle=True),
            DataLoader(numbers, 2, sampler=weighted),
            DataLoader(Stream(10), 2),
        ]
        read = []
        for loader in accelerator.prepare(*loaders):
            batches = list(loader)
            assert len(batches) == 3
            read.append(
                [number for batch in batches for number in (batch[0] if isinstance(batch, list) else batch).tolist()]
            )
            assert loader.state_dict()["world_size"] == 2
        first = accelerator.prepare(DataLoader(numbers, 2))
        counted = torch.cat([accelerator.gather_for_metrics(batch) for (batch,) in first]).tolist()
        total = accelerator.reduce(torch.tensor(float(rank // 2 + 1)), "sum").item()
        mean = accelerator.reduce(torch.tensor(rank // 2 + 1), "mean").item()
        figures = accelerator.all_reduce_dict({"n": rank // 2 + 1}, "sum")["n"]
        return [read, sorted(counted), total, mean, figures]

    result = list(on_ranks(check, 4))
    assert result[0] == result[1]
    assert result[2] == result[3]
    for read, other in zip(result[0][0], result[2][0], strict=True):
        assert sorted(read + other) == list(range(10))
    assert all(rest == [list(range(10)), 3.0, 1.5, 3] for _, *rest in result)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(torch.arange(self.size))


@pytest.mark.parametrize("mesh", ["shard", "tensor"])
def test_evaluate_counts_uneven_parts_once(on_ranks: Launcher, mesh: str) -> None:
    def check(rank: int, parallelism: Parallelism | None) -> list[Any]:
        model = Accelerator(compute_setup="cpu", parallelism=parallelism).prepare(Model())
        options: Any = {"metrics": {"accuracy": Accuracy(), "count": Count()}, "loss_fn": loss_of}
        results = [evaluate(model, DataLoader(sentences(count), 4), **options) for count in (26, 1)]
        exact = ExactDistributedSampler(5)  # of two ranks, three samples for rank 0, and two for rank 1
        results.append(evaluate(model, DataLoader(sentences(5), 1, sampler=exact), **options))
        if parallelism is None or parallelism.tensor == 1:
            none: Any = [] if rank else list(DataLoader(sentences(3), 1))
            results.append(evaluate(model, none, **options))
            assert parallelism is None or all(map(is_sharded, model.parameters()))  # none is left gathered
        return results

    parallelism = Parallelism() if mesh == "shard" else Parallelism(tensor=2, plan=PLAN)
    expected = check(0, None)
    for results in on_ranks(partial(check, parallelism=parallelism)):
        for result, own in zip(results, expected, strict=mesh == "shard"):
            assert result == pytest.approx(own, rel=1e-10)


def test_evaluate_counts_prepared_loaders_and_own_parts_once(on_ranks: Launcher) -> None:
    def check() -> list[Any]:
        accelerator = Accelerator(compute_setup="cpu", parallelism=Parallelism(tensor=2, plan=PLAN))
        divided, whole = accelerator.prepare(Model()), Model()
        loader = accelerator.prepare(DataLoader(sentences(10), 2))  # its ranks read the same in pairs
        exact = DataLoader(sentences(5), 1, sampler=ExactDistributedSampler(5))
        return [evaluate(whole, loader, metrics=Count()), evaluate(divided, exact, metrics=Count())]

    assert list(on_ranks(check, 4)) == [[{"count": 10.0}, {"count": 5.0}]] * 4


class Count:
    """The samples that were counted, over all ranks."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, output: Any, target: Any) -> None:
        self.count += len(target)

    def compute(self) -> float:
        return float(sum(exchange(self.count)))

    def reset(self) -> None:
        self.count = 0


# ------------------------------------------------------------------ precision, randomness, and what goes wrong
@pytest.mark.parametrize("mesh", ["shard", "tensor"])
def test_bfloat16_computes_in_half_and_keeps_float32(on_ranks: Launcher, mesh: str) -> None:
    def check(parallelism: Parallelism) -> list[Any]:
        seen: list[torch.dtype] = []
        model = Model(dtype=torch.float32)
        model.layers[0].up.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        accelerator = Accelerator(compute_setup="cpu", parallelism=parallelism, mixed_precision="bf16")
        net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for _ in range(10):
            inputs, target = sentences(8).tensors
            output = net(inputs)
            loss = loss_of(output, target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        parameter = optimizer.param_groups[0]["params"][0]
        return [seen[0], output.dtype, parameter.dtype, losses[-1] < losses[0], losses[-1]]

    parallelism = Parallelism() if mesh == "shard" else Parallelism(tensor=2, plan=PLAN)
    first, second = on_ranks(partial(check, parallelism))
    assert first[:4] == [torch.bfloat16, torch.float32, torch.float32, True]
    assert first == second


def test_one_infinite_gradient_skips_the_step_on_all_ranks(on_ranks: Launcher) -> None:
    def check(rank: int) -> list[Any]:
        model = nn.Linear(4, 4)
        accelerator = Accelerator(compute_setup="cpu", parallelism=Parallelism(), mixed_precision="fp16")
        net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for is_bad in (False, True, False):
            before = full_state(net)
            accelerator.backward(net(torch.ones(2, 4)).square().mean())
            if is_bad and rank == 1:
                net.weight.grad.to_local()[0, 0] = torch.inf  # of one rank's part only
            norm: Any = accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            after = full_state(net)
            found.append(
                (
                    not accelerator._gradients.has_stepped(optimizer),
                    norm.isfinite().item(),
                    all(after[k].equal(before[k]) for k in after),
                )
            )
        return found

    first, second = on_ranks(check)
    assert first == [(False, True, False), (True, False, True), (False, True, False)]
    assert [each[:2] for each in second] == [each[:2] for each in first]


def test_ranks_of_a_tensor_group_drop_the_same(on_ranks: Launcher) -> None:
    def check(rank: int) -> Tensor:
        torch.manual_seed(rank)
        plan = {"0": "colwise", "2": "rowwise"}
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 4), nn.Dropout(0.5))
        net = Accelerator(compute_setup="cpu", parallelism=Parallelism(tensor=2, plan=plan)).prepare(model)
        return torch.cat([net(torch.ones(4, 4)) for _ in range(3)]).detach()

    outputs = list(on_ranks(check, 4))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])
    assert not torch.equal(outputs[0] == 0, outputs[2] == 0)


def test_a_rank_cannot_return_its_part_of_a_model(on_ranks: Launcher) -> None:
    def check() -> Any:
        return Accelerator(compute_setup="cpu", parallelism=Parallelism()).prepare(nn.Linear(2, 2)).state_dict()

    with pytest.raises(ResultError, match=r"result\['weight'\].*one rank's shard.*full_tensor.*full_state\(model\)"):
        on_ranks(check)


def test_what_cannot_be_divided_says_why(on_ranks: Launcher) -> None:
    def check(rank: int) -> None:
        def prepare(parallelism: Parallelism, *objects: Any, **settings: Any) -> None:
            Accelerator(compute_setup="cpu", parallelism=parallelism, **settings).prepare(*objects)

        def save() -> None:
            accelerator = Accelerator(compute_setup="cpu", parallelism=Parallelism())
            accelerator.save(accelerator.prepare(nn.Linear(2, 2)).state_dict(), "never")

        layer, tied, rows = nn.Linear(4, 3), Model(tied=True), nn.Sequential(nn.Linear(4, 4))
        prepare(Parallelism(shard=False, tensor=2, plan={"0": "colwise_gather"}), rows)
        with torch.device("meta"):
            empty = nn.Linear(2, 2)
        first, second, trunk, sharer, scalar = (nn.Linear(2, 2) for _ in range(5))
        sharer.weight, scalar.bias = trunk.weight, nn.Parameter(torch.tensor(1.0))
        for call, part in (
            (
                lambda: prepare(Parallelism(tensor=2, plan={"0": "colwise"}), nn.Sequential(layer)),
                "plan: 0 has out_features=3, not divisible by tensor=2",
            ),
            (
                lambda: prepare(Parallelism(tensor=2, plan={"tokens": "rowwise"}), tied),
                "plan: tokens.weight and head.weight are the same parameter, but would be split differently",
            ),
            (
                lambda: prepare(Parallelism(units=["tokens", "layers.*"]), Model(tied=True)),
                "tokens.weight and head.weight are the same parameter, but in different units (tokens and the rest)",
            ),
            (lambda: prepare(Parallelism(cpu_offload=True), layer), "cpu_offload=True needs GPUs"),
            (lambda: prepare(Parallelism(), empty), "prepare: the Linear is on the meta device"),
            (
                lambda: prepare(Parallelism(), rows),
                "prepare: the Sequential is already tensor-parallel, and its gradients would not",
            ),
            (
                lambda: prepare(Parallelism(tensor=2, plan=PLAN), Model(), mixed_precision="fp16"),
                'mixed_precision="fp16", tensor=2',
            ),
            (save, "save: obj holds sharded tensors"),
            (
                lambda: prepare(
                    Parallelism(), first, torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
                ),
                "the SGD has a parameter of shape [2, 2] that is in no sharded module",
            ),
            (
                lambda: prepare(Parallelism(), trunk, sharer),
                "weight of the Linear is also a parameter of a sharded module",
            ),
            (
                lambda: prepare(Parallelism(), nn.Sequential(trunk, nn.Linear(2, 2))),
                "the Sequential is sharded, but its 1.weight is not",
            ),
            (
                lambda: prepare(Parallelism(), scalar),
                "bias of the Linear is a scalar, which cannot be sharded: give it shape [1]",
            ),
            (lambda: prepare(Parallelism(), nn.LazyLinear(2)), "weight of the LazyLinear is uninitialized"),
            (
                lambda: prepare(Parallelism(units=["layers"]), Model()),
                "units: layers is a ModuleList, which has no forward",
            ),
            (
                lambda: prepare(Parallelism(), nn.Linear(2 + rank, 2, bias=False)),
                "weight is float32 [2, 2] on rank 0, float32 [2, 3] on rank 1",
            ),
            (
                lambda: prepare(Parallelism(), nn.Linear(2, 2).requires_grad_(rank == 0)),
                "frozen is none on rank 0, weight, bias on rank 1",
            ),
        ):
            with pytest.raises(ArgumentError) as caught:
                call()
            assert part in str(caught.value)

    on_ranks(check)


# ------------------------------------------------------------------ modules of other kinds, and meshes
@pytest.mark.parametrize("kind", ["sharded by the user", "compiled"])
def test_modules_of_the_user_accumulate_too(on_ranks: Launcher, kind: str) -> None:
    def check(parallelism: Parallelism | None) -> Any:
        model: Any = Model()
        if parallelism is not None and kind == "compiled":
            warnings.filterwarnings(
                "ignore", message="The .grad attribute of a Tensor that is not a leaf"
            )  # torch's own
            model = torch.compile(model, backend="eager")
            return trained(parallelism, steps=2, model=model)[1:]
        if parallelism is not None:
            for part in (*model.layers, model):
                fully_shard(part)
        return trained(None, steps=2, model=model)[1:]

    assert_close(on_ranks(partial(check, Parallelism()))[0], check(None))


def test_without_parts_there_is_ddp(on_ranks: Launcher) -> None:
    def check() -> bool:
        net = Accelerator(compute_setup="cpu", parallelism=Parallelism(shard=False)).prepare(nn.Linear(2, 2))
        return isinstance(net, nn.parallel.DistributedDataParallel)

    assert list(on_ranks(check)) == [True, True]


def test_gradients_wait_for_the_end_of_a_step(on_ranks: Launcher) -> None:
    def check() -> list[bool]:
        accelerator = Accelerator(compute_setup="cpu", parallelism=Parallelism(), gradient_accumulation_steps=3)
        net = accelerator.prepare(Model())
        exchanged = []
        for _ in range(6):
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net(sentences(2).tensors[0]), sentences(2).tensors[1]))
            exchanged.append(all(parameter.grad is not None for parameter in net.parameters()))
            if accelerator.sync_gradients:
                net.zero_grad()
        return exchanged

    assert list(on_ranks(check)) == [[False, False, True] * 2] * 2


def test_a_mesh_ends_with_its_group(launch: Launcher, tmp_path: Path) -> None:
    def check(rank: int, folder: Path) -> list[int]:
        counts = []
        for number in range(5):
            dist.destroy_process_group()
            dist.init_process_group("gloo", f"file://{folder}/{number}", rank=rank, world_size=2)
            accelerator = Accelerator(compute_setup="cpu", parallelism=Parallelism())
            nets = [accelerator.prepare(nn.Linear(2, 2)) for _ in range(2)]
            nets[1](torch.ones(1, 2)).sum().backward()
            assert nets[0].weight.device_mesh is nets[1].weight.device_mesh
            del nets
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
        return counts

    for counts in launch(partial(check, folder=tmp_path), device="cpu"):
        assert counts[4] < counts[1] + 3, (
            counts
        )  # a mesh that stays holds its sockets; one that closes may take a moment
