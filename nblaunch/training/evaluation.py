"""`evaluate`: metrics of a model over a data set, each sample counted once; and outputs in the order of the data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nblaunch.errors import ArgumentError
from nblaunch.ranks.report import progress, report
from nblaunch.training.collectives import broadcast_tensors, exchange, in_step
from nblaunch.training.loader import Prefetcher, ShardedLoader, samplers_of, shard, shards
from nblaunch.training.metrics import Accuracy, Mean, Metric
from nblaunch.training.parallelism import copies_in, free_gathered, is_divided, unwrapped
from nblaunch.training.pytree import batch_size_of, to_device, tree_leaves, tree_map
from nblaunch.training.topology import ensure_group, own_device, world

TARGETS = ("labels", "label", "target")


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
    """Compute metrics of a model, with every sample counted once for any number of ranks. A collective.

    Each rank evaluates its part of the data with the original module, without DDP or ``torch.compile``. So ranks with
    fewer batches, or none, block no other rank. (For a sharded module they repeat a batch, which is not counted.) The
    module runs in eval mode, without gradients, and with rank 0's buffers, because the running statistics of batch norm
    differ between ranks. Afterwards each submodule's mode is restored. Rank 0 reports the results to the notebook.

    Args:
        model: The module, on its device, with the same weights on every rank.
        loader: A DataLoader, or a `Prefetcher` of one; it is sharded if it is not yet. Any other iterable is taken as
            this rank's own part.
        metrics: A metric, named after its class, or a dict of metrics by name. They are reset first. Default: accuracy.
        loss_fn: ``(output, target) -> loss``, a mean over the batch. The result ``loss`` is the mean over all samples,
            as precise as each batch's loss in the model's dtype.
        step: ``(model, batch) -> (output, target)``. Default: for batches ``(inputs, target)``, or dicts with the
            target under ``labels``, ``label`` or ``target``.
        size: ``batch -> int``, the number of samples. Default: the length of the target, else of the first tensor.
        device: Device of the batches. Default: that of the model's parameters.
        desc: Label of the progress bar.
        prefix: Prefix of the results' names, such as ``"valid_"``.
        at: Step at which the results are reported. Default: none.

    Returns:
        The results by name, the same on every rank.

    Raises:
        ArgumentError: The loader was prepared by accelerate, its sampler repeats samples (as torch's
            ``DistributedSampler`` does), or metrics or batches are not as described.
        RuntimeError: The ranks together counted another number of samples than the loader has.
    """
    own, module = named(metrics), unwrapped(model)
    for metric in own.values():
        metric.reset()
    sharded, copies = _sharded(loader, copies_in(module))
    where = device if device is not None else _device_of(module)
    losses: list[tuple[Tensor, int]] = []  # read at the end: reading waits for the GPU
    samples = 0
    with closing(batches_for(module, sharded, copies, desc)) as batches:
        for batch, is_counted in batches:
            batch = to_device(batch, where)
            output, target = (step or forward)(module, batch)
            if not is_counted:
                continue
            count = batch_size_of(target, batch) if size is None else size(batch)
            if count is None:
                raise ArgumentError("the batch has no tensor, so its size is unknown: pass size=lambda batch: ...")
            samples += count
            for metric in own.values():
                metric.update(output, target)
            if loss_fn is not None:
                losses.append((loss_fn(output, target).detach(), count))
    counted, total = sum(exchange(samples)), getattr(sharded, "total", None)
    if total is not None and counted != total:
        raise RuntimeError(
            f"evaluate counted {counted} samples over all ranks, but the loader has {total}. If dimension 0 of a batch "
            "is not its samples, pass size=lambda batch: ...; otherwise the loader lost or repeated samples"
        )
    results = {f"{prefix}{name}": metric.compute() for name, metric in own.items()}
    if loss_fn is not None:
        mean = Mean()
        for loss, count in losses:
            mean.update(loss, count if loss.numel() == 1 else 1)
        results[f"{prefix}loss"] = mean.compute()
    if world().rank == 0:
        report(results, at)
    return results


_ADVICE = "pass step to evaluate, such as step=lambda model, batch: (model(batch[0]), batch[1])"


def split(batch: Any, advice: str = _ADVICE) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        name = target_of(batch)
        if name is not None:
            return inputs_of(batch), batch[name]
        found = f"a dict with {sorted(map(str, batch))}"
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    else:
        found = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
    raise ArgumentError(
        f"the batch is {found}, neither (inputs, target) nor a dict with one of {', '.join(TARGETS)}: {advice}"
    )


def forward(module: nn.Module, batch: Any, advice: str = _ADVICE) -> tuple[Any, Any]:
    """Return the module's output for a batch, and the batch's target; named inputs become keyword arguments."""
    inputs, target = split(batch, advice)
    return (module(**inputs) if isinstance(inputs, Mapping) else module(inputs)), target


def named(metrics: Metric | Mapping[str, Metric] | None) -> dict[str, Metric]:
    if metrics is None:
        return {"accuracy": Accuracy()}
    offered: object = metrics
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    elif isinstance(offered, (list, tuple)):
        raise ArgumentError(f"metrics={offered!r:.80}: must be a dict, such as {{'accuracy': Accuracy()}}")
    else:
        named = {getattr(metrics, "name", type(metrics).__name__.lower()): metrics}
    for name, metric in named.items():
        given: object = metric
        if not isinstance(given, Metric) or isinstance(given, (Mean, type)):  # a Mean takes no outputs and targets
            raise ArgumentError(
                f"metrics: {name!r} is {metric!r:.80}: use a metric with update(output, target), such as Accuracy()"
            )
        if name in ("loss", "step"):
            raise ArgumentError(f"metrics: the name {name!r} is reserved: use another one")
    return named


# ------------------------------------------------------------------ the loader
def batches_for(module: nn.Module, loader: Any, copies: int, desc: str) -> Generator[tuple[Any, bool]]:
    """Yield each batch that this rank must run the module on, in eval mode, and whether its samples count.

    Without a divided module these are the batches that count. The forward pass of a divided one is a collective, so
    ranks with fewer batches repeat one; of the ranks that compute on the same samples those of the first count.
    """
    is_collective = is_divided(module)
    batches = progress(loader, desc=desc)
    modes = [(part, part.training) for part in module.modules()]  # some are frozen in eval mode on purpose
    module.eval()
    try:
        with torch.no_grad():  # inference mode would make tensors that cannot be trained on later
            if world().is_shared:  # DDP sends rank 0's buffers before each forward pass; after the last one they differ
                ensure_group()
                broadcast_tensors(module.buffers())
            for batch, is_repeat in in_step(batches) if is_collective else zip(batches, repeat(False)):
                is_counted = not (is_repeat or getattr(loader, "is_padding", False) or world().rank % copies)
                if is_counted or is_collective:
                    yield batch, is_counted
        free_gathered(module)
    finally:
        for part, training in modes:
            part.training = training


def _sharded(loader: Iterable[Any], copies: int) -> tuple[Iterable[Any], int]:
    """Return the loader of this rank's part, and how many ranks have the same part. No sample repeats within one."""
    inner = loader.loader if isinstance(loader, Prefetcher) else loader
    if isinstance(inner, Dataset):
        raise ArgumentError(f"loader={inner!r:.80}: must be a DataLoader, not a dataset: use DataLoader(dataset, ...)")
    if not isinstance(inner, DataLoader):
        return loader, copies
    sharded = shard(inner, copies=copies if copies > 1 else None)
    _refuse_repeats(sharded)
    if isinstance(loader, Prefetcher):
        return Prefetcher(sharded, loader.device, loader.depth), sharded.copies
    return sharded, sharded.copies


def _refuse_repeats(loader: ShardedLoader[Any]) -> None:
    own = loader.own_sampler_size()
    if own is None or not hasattr(loader.dataset, "__len__"):
        return
    given, size = sum(exchange(own)[:: loader.copies]), len(loader.dataset)
    if given > size:
        sampler = next(type(sampler).__name__ for sampler in samplers_of(loader) if shards(sampler))
        raise ArgumentError(
            f"loader: its {sampler} repeats {given - size} of the {size} samples, which would count twice: remove it, "
            "because shard(loader) divides exactly, or use ExactDistributedSampler"
        )


# ------------------------------------------------------------------ the module
def _device_of(module: nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        mesh: Any = getattr(tensor, "device_mesh", None)
        if mesh is None or mesh.device_type == tensor.device.type:  # else its parts stay on the CPU
            return tensor.device
    return own_device()


def target_of(batch: Mapping[Any, Any]) -> str | None:
    return next((name for name in TARGETS if name in batch), None)


def inputs_of(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        target = target_of(batch)
        inputs = {key: value for key, value in batch.items() if key != target}
        return next(iter(inputs.values())) if len(inputs) == 1 else inputs
    if isinstance(batch, (tuple, list)):
        if len(batch) in (1, 2):
            return batch[0]
        raise ArgumentError(
            f"the batch is a {type(batch).__name__} of {len(batch)}, neither inputs nor (inputs, target): override "
            "predict_batch(self, model, batch)"
        )
    return batch


def predict_part(
    model: nn.Module, loader: ShardedLoader[Any], predict_batch: Callable[[nn.Module, Any], Any], device: torch.device
) -> list[Any]:
    """Return the outputs for each of this rank's batches, on the CPU. A collective."""
    module = unwrapped(model)
    outputs: list[Any] = []
    with closing(batches_for(module, loader, loader.copies, "predicting")) as batches:
        for batch, is_counted in batches:
            output = to_device(predict_batch(module, to_device(batch, device)), "cpu")
            if not is_counted:
                continue
            size = getattr(loader, "own_samples", 0) or batch_size_of(output)
            for leaf in tree_leaves(output):
                is_tensor = isinstance(leaf, Tensor)
                if leaf is not None and not (is_tensor and leaf.dim() > 0 and len(leaf) == size):
                    found = f"a tensor of shape {tuple(leaf.shape)}" if is_tensor else f"{leaf!r:.40}"
                    raise ArgumentError(
                        f"predict_batch returned {found} for a batch of {size}: it must return tensors with the "
                        "samples in dimension 0"
                    )
            outputs.append(output)
    return outputs


def in_order(parts: Sequence[Sequence[Any]]) -> Any:
    """Return the ranks' outputs as one pytree, in the order of the data: round by round, and in each by rank."""
    rounds = range(max(map(len, parts)))
    outputs = [part[number] for number in rounds for part in parts if number < len(part)]
    by_leaf = zip(*map(tree_leaves, outputs), strict=True)
    joined = (torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0] for leaves in by_leaf)
    return tree_map(lambda _: next(joined), outputs[0]) if outputs else None
