"""`evaluate`: metrics of a model over every sample once; and the metrics themselves, from `counting`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nblaunch.errors import ArgumentError
from nblaunch.ranks.report import progress, report
from nblaunch.training.counting import Accuracy, FromTorchmetrics, Mean, Metric
from nblaunch.training.data.loader import ShardedLoader
from nblaunch.training.data.orders import samplers_of, shards
from nblaunch.training.data.prefetch import Prefetcher
from nblaunch.training.data.sharding import shard
from nblaunch.training.nests import samples_in, to_device
from nblaunch.training.unwrap import unwrapped
from nblaunch.training.world import collective_device, ensure_group, exchange, own_device, world

__all__ = ["Accuracy", "FromTorchmetrics", "Mean", "Metric", "evaluate", "split"]

TARGETS = ("labels", "label", "target")
"""Where a batch that is a dict may hold its target."""


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    metrics: Metric | Mapping[str, Metric] | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    step: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
    size: Callable[[Any], int] | None = None,
    device: torch.device | str | None = None,
    desc: str = "evaluating",
    prefix: str = "",
    at: int | None = None,
) -> dict[str, float]:
    """Metrics of a model over every sample once, whatever the number of ranks. A collective; alone it works too.

    Each rank takes its part of the data, and runs the module itself, without DistributedDataParallel or torch.compile
    around it: ranks with fewer batches, or none, keep nobody waiting. It runs in eval mode, without gradients, and
    with rank 0's buffers (running means of batch norm differ between ranks); every submodule is then trained or not as
    before. Rank 0 reports the figures to the notebook.

    Args:
        model: Alike on every rank, on its device.
        loader: A DataLoader, sharded here where it is not yet (but not inside a `Prefetcher`). Another iterable is
            taken for this rank's own part.
        metrics: By name; one alone is named after its class. They are reset first. Default: accuracy.
        loss_fn: ``(output, target) -> loss``, a mean over the batch, for the figure ``loss``: the batches' losses,
            weighted by size. It is as good as `loss_fn` computes it in the model's dtype, batch by batch.
        step: ``(model, batch) -> (output, target)``. Default: for a batch ``(inputs, target)`` or a dict, see `split`.
        size: The number of samples in a batch. Default: the length of its target, else of its first tensor.
        device: Where batches go. Default: where the model's parameters are.
        desc: The word before the progress bar.
        prefix: Put before every name, such as ``"valid_"``.
        at: The step that the figures are reported with. Default: none.

    Returns:
        Figures by name, the same on every rank.

    Raises:
        ArgumentError: The loader was prepared by accelerate, is an undivided one in a `Prefetcher`, or has a sampler
            that repeats samples, as torch's ``DistributedSampler`` does; metrics or batches are not as above.
        RuntimeError: The samples counted over all ranks are not as many as the loader has.
    """
    taken = _Taken(named(metrics), loss_fn, step or forward, size)
    divided = _divided(loader)
    module = unwrapped(model)
    where = device if device is not None else _device_of(module)
    with _in_eval_mode(module), torch.no_grad():  # a tensor made in inference mode could not serve training later
        _share_buffers(module)
        for batch in _real_batches(divided, desc):
            taken.take(module, to_device(batch, where))
    _check(sum(exchange(taken.samples)), getattr(divided, "total", None))
    figures = {f"{prefix}{name}": value for name, value in taken.figures().items()}
    if world().rank == 0:
        report(at, **figures)
    return figures


def split(batch: Any) -> tuple[Any, Any]:
    """A batch's inputs and its target.

    Args:
        batch: ``(inputs, target)``, or a dict with the target under ``labels``, ``label`` or ``target``.

    Returns:
        Of a dict with one other entry its value as the inputs, with several a dict of them.

    Raises:
        ArgumentError: It is something else.
    """
    if isinstance(batch, Mapping):
        name = next((name for name in TARGETS if name in batch), None)
        if name is not None:
            others = {key: value for key, value in batch.items() if key != name}
            return (next(iter(others.values())) if len(others) == 1 else others), batch[name]
        found = f"a dict with {sorted(map(str, batch))}"
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    else:
        found = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
    raise ArgumentError(
        f"the batch is {found}, neither (inputs, target) nor a dict with one of {', '.join(TARGETS)}: "
        "give evaluate a step, such as step=lambda model, batch: (model(batch[0]), batch[1]); for a Trainer override "
        "compute_loss(self, model, batch), and for its metrics return (loss, output, target)"
    )


def forward(module: nn.Module, batch: Any) -> tuple[Any, Any]:
    """The module's output for a batch, and the batch's target; several inputs by name go in by name."""
    inputs, target = split(batch)
    return (module(**inputs) if isinstance(inputs, Mapping) else module(inputs)), target


def named(metrics: Metric | Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Metrics by name; accuracy where there are none.

    Raises:
        ArgumentError: One is no metric, or has a name that is taken.
    """
    if metrics is None:
        return {"accuracy": Accuracy()}
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    else:
        named = {getattr(metrics, "name", type(metrics).__name__.lower()): metrics}
    for name, metric in named.items():
        if not _is_metric(metric):
            raise ArgumentError(
                f"metrics: {name!r} is {metric!r:.80}: use Accuracy() or another with update(output, target)"
            )
        if name in ("loss", "step"):
            raise ArgumentError(f"metrics: a metric cannot be called {name!r}: choose another name")
    return named


def _is_metric(thing: object) -> bool:
    return isinstance(thing, Metric) and not isinstance(thing, (Mean, type))  # a Mean takes no outputs and targets


class OfOutput:
    """A metric of the output, where a Trainer's ``compute_loss`` gives (loss, output)."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric

    def update(self, computed: tuple[Tensor, Any], target: Any) -> None:
        if computed[1] is None:
            raise ArgumentError("metrics need the output: let compute_loss return (loss, output)")
        self.metric.update(computed[1], target)

    def compute(self) -> float:
        return self.metric.compute()

    def reset(self) -> None:
        self.metric.reset()


class _Taken:
    """What the batches of this rank have come to."""

    def __init__(self, metrics: dict[str, Metric], loss_fn: Any, step: Any, size: Any) -> None:
        self.samples = 0
        self._metrics, self._loss_fn, self._step, self._size = metrics, loss_fn, step, size
        self._losses: list[tuple[Tensor, int]] = []  # read at the end, as a GPU would have to be waited for
        for metric in metrics.values():
            metric.reset()

    def take(self, module: nn.Module, batch: Any) -> None:
        output, target = self._step(module, batch)
        samples = self._size(batch) if self._size is not None else _size(target, batch)
        self.samples += samples
        for metric in self._metrics.values():
            metric.update(output, target)
        if self._loss_fn is not None:
            self._losses.append((self._loss_fn(output, target).detach(), samples))

    def figures(self) -> dict[str, float]:
        """Over all ranks; a collective."""
        figures = {name: metric.compute() for name, metric in self._metrics.items()}
        return figures if self._loss_fn is None else {**figures, "loss": self._loss()}

    def _loss(self) -> float:
        mean = Mean()
        for loss, samples in self._losses:
            mean.update(loss, samples if loss.numel() == 1 else 1)
        return mean.compute()


# ------------------------------------------------------------------ the loader
def _divided(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader, of which this rank gets its part, and all ranks together no sample twice."""
    inner = _innermost(loader)
    if isinstance(inner, Dataset):
        raise ArgumentError(f"loader={inner!r:.80}: is a dataset: give DataLoader(dataset, batch_size=...)")
    if not isinstance(inner, DataLoader) or (inner is not loader and not world().is_shared):
        return loader
    sharded = shard(inner)
    if inner is loader:
        loader = sharded
    elif sharded is not inner and not any(map(shards, samplers_of(inner))):
        raise ArgumentError(
            f"loader: the Prefetcher's {type(inner).__name__} is not divided among the {world().size} ranks, so that "
            "each would count every sample: give Prefetcher(shard(loader), device), or the loader itself"
        )
    _refuse_repeats(sharded)
    return loader


def _innermost(loader: Iterable[Any]) -> Iterable[Any]:
    return _innermost(loader.loader) if isinstance(loader, Prefetcher) else loader


def _refuse_repeats(loader: ShardedLoader[Any]) -> None:
    own = loader.given_out()
    if own is None or not hasattr(loader.dataset, "__len__"):
        return
    given, size = sum(exchange(own)), len(loader.dataset)
    if given > size:
        sampler = next(type(one).__name__ for one in samplers_of(loader) if shards(one))
        raise ArgumentError(
            f"loader: its {sampler} gives the ranks {given} samples of a dataset of {size}, so it repeats "
            f"{given - size} samples, which would count twice: leave it out, as shard(loader) divides exactly, or use "
            "ExactDistributedSampler, or a sampler with drop_last=True where some samples may be missing"
        )


def _real_batches(loader: Iterable[Any], desc: str) -> Iterator[Any]:
    """The batches, without those that repeat a sample so that every rank has as many."""
    for batch in progress(loader, desc=desc):
        if not getattr(loader, "is_padding", False):
            yield batch


def _size(target: Any, batch: Any) -> int:
    samples = samples_in(target, batch)
    if samples is None:
        raise ArgumentError("the batch holds no tensor whose length tells its number of samples: give size=")
    return samples


def _check(counted: int, total: int | None) -> None:
    if total is not None and counted != total:
        raise RuntimeError(
            f"evaluate counted {counted} samples over all ranks, but the loader has {total}. If a batch's first "
            "dimension is not its samples, give size=lambda batch: ...; else the loader lost or repeated some"
        )


# ------------------------------------------------------------------ the module
def _device_of(module: nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return own_device()


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Eval mode, and afterwards for each submodule what it was: some are frozen in eval mode on purpose."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def _share_buffers(module: nn.Module) -> None:
    """Give every rank rank 0's buffers, byte by byte so that any dtype will do.

    As DistributedDataParallel does before a forward pass; after the last one of training they have drifted apart.
    """
    if not world().is_shared:
        return
    ensure_group()
    for buffer in module.buffers():
        data = buffer.detach().reshape(-1).contiguous().view(torch.uint8).to(collective_device(), copy=True)
        dist.broadcast(data, src=0)
        buffer.copy_(data.to(buffer.device).view(buffer.dtype).view(buffer.shape))
