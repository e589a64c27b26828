"""`Trainer.predict` and `validate`: every sample once and in order, for any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from nblaunch import notebook_launcher
from nblaunch.errors import ArgumentError
from nblaunch.training import ExactDistributedSampler, TrainConfig, Trainer, shard
from tests.processes.trained import Stream, points, trainer

pytestmark = pytest.mark.usefixtures("imported_ahead", "quiet")


class Named(Trainer):
    """Its outputs are a dict, with what is no tensor left out."""

    def predict_batch(self, model: nn.Module, batch: Any) -> Any:
        return {"scores": model(batch["at"]), "numbers": (batch["number"], None)}


class Numbered(TensorDataset):
    """Samples that know their places."""

    def __getitem__(self, index: int) -> Any:
        return {"at": self.tensors[0][index], "number": index}


def named(nprocs: int, batch_size: int = 4) -> Named:
    config = TrainConfig(nprocs=nprocs, batch_size=batch_size, compute_setup="cpu")
    model = nn.Linear(2, 3)
    return Named(model, torch.optim.SGD(model.parameters()), config)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_outputs_come_once_each_and_in_order(nprocs: int) -> None:
    """Also where ranks repeat samples, because there are fewer than ranks."""
    counts = [(23, 4), (25, 4), (2, 4), (5, 1)]
    runs = [(named(nprocs, size), Numbered(points(count).tensors[0])) for count, size in counts]
    result: Any = notebook_launcher(
        lambda: [one.predict(data) for one, data in runs], num_processes=nprocs, device="cpu"
    )
    for (one, data), outputs in zip(runs, result[0], strict=True):
        assert outputs["numbers"][0].tolist() == list(range(len(data)))
        assert outputs["numbers"][1] is None
        assert torch.allclose(outputs["scores"], one.model(data.tensors[0]), atol=1e-6)
        assert not outputs["scores"].requires_grad


def test_loaders_and_streams_are_predicted_too() -> None:
    one, (at, labels) = trainer(batch_size=4), points(23).tensors
    one.model.eval()
    expected = one.model(at)
    one.model.train()
    pairs = DataLoader(TensorDataset(at), batch_sampler=BatchSampler(SequentialSampler(at), 5, drop_last=False))
    kinds: list[Dataset[Any] | DataLoader[Any]] = [
        DataLoader(TensorDataset(at, labels), 7),
        pairs,
        Stream(at),
        shard(pairs),
    ]
    result: Any = notebook_launcher(lambda: [*map(one.predict, kinds)], num_processes=2, device="cpu")
    for outputs in [one.predict(TensorDataset(at, labels)), *result[0]]:
        assert torch.allclose(outputs, expected, atol=1e-6)
    assert one.model.training  # in eval mode while it predicted


def test_what_cannot_be_concatenated_is_said() -> None:
    class Scalar(Trainer):
        def predict_batch(self, model: nn.Module, batch: Any) -> Any:
            return model(batch[0]), "words"

    at, labels = points(9).tensors
    given = trainer(nprocs=1, batch_size=4)
    with pytest.raises(ArgumentError, match=r"returned 'words' for a batch of 4: it must return"):
        Scalar(given.model, given.optimizer, given.config).predict(TensorDataset(at))
    with pytest.raises(ArgumentError, match=r"the batch is a list of 3, neither inputs nor .*: override predict_batch"):
        given.predict(TensorDataset(at, labels, labels))
    with pytest.raises(ArgumentError, match=r"its RandomSampler changes the order .* DataLoader with shuffle=False"):
        given.predict(DataLoader(TensorDataset(at), shuffle=True))
    with pytest.raises(ArgumentError, match=r"its SubsetRandomSampler changes the order"):
        given.predict(DataLoader(TensorDataset(at), sampler=SubsetRandomSampler(range(4))))
    parts = ExactDistributedSampler(9, num_replicas=2, rank=0)
    with pytest.raises(ArgumentError, match=r"its ExactDistributedSampler changes the order"):
        given.predict(DataLoader(TensorDataset(at), sampler=parts))


def test_a_rank_gets_all_outputs_and_the_same_results() -> None:
    one, data = trainer(batch_size=4), points(23)

    def work() -> Any:
        return one.predict(data), one.validate(data)

    (first, results), (second, others) = notebook_launcher(work, num_processes=2, device="cpu")  # type: ignore[misc]
    assert torch.equal(first, second)
    assert results == others == one.validate(data)
    assert torch.equal(first, one.predict(data))
    assert one.result is None  # of `fit` only
