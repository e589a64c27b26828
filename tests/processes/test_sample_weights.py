"""Every sample of an optimizer step counts the same: N ranks end with the weights of one process over big batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from nblaunch import notebook_launcher
from nblaunch.training import Accelerator, ExactDistributedSampler, TrainConfig, Trainer, shard
from tests.processes.trained import Stream, fitted

pytestmark = pytest.mark.usefixtures("imported_ahead", "quiet")


def lines(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    at = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(at, (at**3).sum(1, keepdim=True))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained(data: Any, nprocs: int, size: int, **config: Any) -> Tensor:
    """The weights after some epochs of plain gradient descent, with clipping."""
    model = net()
    config = {"epochs": 3, "max_grad_norm": 0.5, "compute_setup": "cpu", **config}
    given = TrainConfig(nprocs=nprocs, batch_size=size, **config)
    one = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), given)
    losses = [result["loss"] for result in fitted(one, data)]
    return torch.cat([weights(model), torch.tensor(losses, dtype=torch.float64)])


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def of_ranks(nprocs: int, *runs: Callable[[], Tensor]) -> list[Tensor]:
    """What several runs end with, in the ranks of one launch."""
    result: Any = notebook_launcher(lambda: [run() for run in runs], num_processes=nprocs, device="cpu")
    return list(result[0])


def looped(size: int) -> Tensor:
    """The weights after a loop with an Accelerator."""
    accelerator, model = Accelerator(compute_setup="cpu"), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    net_, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(lines(53), size))
    for _ in range(3):
        for at, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net_(at), target)
            accelerator.backward(loss * loader.sample_weight)
            optimizer.step()
    return weights(model)


def test_a_loop_of_ones_own_can_weigh_by_samples() -> None:
    assert apart(of_ranks(3, lambda: looped(8))[0], looped(24)) < 1e-12


def plain() -> Tensor:
    """The weights after torch's own loop."""
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for at, target in shard(DataLoader(lines(48), 8)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(at), target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return weights(model)


def test_even_batches_give_the_bits_of_plain_ddp() -> None:
    own, theirs = of_ranks(2, lambda: trained(DataLoader(lines(48), 8), 2, 8), plain)
    assert torch.equal(own[:-3], theirs)  # without the losses


def test_ranks_end_with_the_weights_of_one_big_batch() -> None:
    """53 = 2 x 24 + 5 and 61 = 2 x 24 + 13: in the last step a rank has one sample more than another."""
    few, many = lines(53), lines(61)
    exact, exact_many = of_ranks(3, lambda: trained(few, 3, 8), lambda: trained(many, 3, 8))
    alone, alone_many = trained(few, 1, 24), trained(many, 1, 24)
    assert apart(exact, alone) < 1e-12
    assert apart(exact_many, alone_many) < 1e-12


def test_repeated_samples_do_not_count() -> None:
    """Of 5 samples in batches of one, rank 1 repeats one in the last step."""
    assert apart(trained(lines(5), 2, 1), trained(lines(5), 1, 2)) < 1e-12


@pytest.mark.parametrize("nprocs", [1, 3])
def test_accumulated_batches_weigh_by_their_samples(nprocs: int) -> None:
    """53 samples are rounds of 12, 12, 12, 12 and 5: the last step has two rounds of 12 and 5."""
    data, size = lines(53), 12 // nprocs
    shuffled, streamed = of_ranks(
        nprocs,
        lambda: trained(data, nprocs, size, gradient_accumulation_steps=2),
        lambda: trained(Stream(data), nprocs, size, gradient_accumulation_steps=2),
    )
    assert apart(shuffled, trained(data, 1, 24)) < 1e-12
    assert apart(streamed, trained(DataLoader(data, 24), 1, 24)) < 1e-12


class InBatches(BatchSampler):
    """A batch sampler of the user's own, whose batches stay whole."""


def test_batches_of_a_batch_sampler_weigh_by_their_samples() -> None:
    data = lines(10)
    three = DataLoader(data, batch_sampler=InBatches(SequentialSampler(data), 3, drop_last=False))
    alone = trained(DataLoader(data, 6), 1, 6)
    assert apart(trained(three, 2, 3), alone) < 1e-12  # 3 and 3, 3 and 1


def test_unknown_sizes_of_other_ranks_are_said() -> None:
    def work() -> list[str]:
        sampler = ExactDistributedSampler(11, shuffle=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(DataLoader(lines(11), 4, sampler=sampler), 2, 4)
        return [str(warning.message) for warning in caught]

    said = notebook_launcher(work, num_processes=2, device="cpu")
    first, second = list(said)  # type: ignore[arg-type]
    assert [line.split(",")[0] for line in first] == ["batches have 4 and 2 samples"]
    assert [line.split(",")[0] for line in second] == ["batches have 4 and 1 samples"]
