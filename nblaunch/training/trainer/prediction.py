"""Outputs of a model over a data set, in its order, from the parts that ranks have computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nblaunch.errors import ArgumentError
from nblaunch.training.data.sharded_loader import ShardedLoader
from nblaunch.training.evaluation import TARGETS, batches_for, broadcast_buffers, eval_mode
from nblaunch.training.pytree import batch_size_of, to_device, tree_leaves, tree_map
from nblaunch.training.wrappers import unwrapped


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's outputs."""

    outputs: Any
    """A pytree of tensors on the CPU; None if this rank has no sample."""
    sizes: list[int]
    """Rows of each batch."""


def inputs_of(batch: Any) -> Any:
    """Return a batch's inputs; a target beside them is left out.

    Raises:
        ArgumentError: The batch has another form than a tensor, ``(inputs,)``, ``(inputs, target)`` or a dict.
    """
    if isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if key not in TARGETS}
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
) -> Part:
    """Return the outputs for this rank's batches. A collective.

    Args:
        model: The same on every rank, on the device.
        loader: A sharded loader, without shuffling.
        predict_batch: Returns the outputs for a batch.
        device: The device of the batches.
    """
    module = unwrapped(model)
    outputs: list[Any] = []
    sizes: list[int] = []
    with eval_mode(module), torch.no_grad():
        broadcast_buffers(module)
        for batch, is_counted in batches_for(module, loader, loader.copies, "predicting"):
            output = to_device(predict_batch(module, to_device(batch, device)), "cpu")
            if not is_counted:
                continue
            size = getattr(loader, "own_samples", 0) or batch_size_of(output)
            if size is None or not all(_is_rows(leaf, size) for leaf in tree_leaves(output)):
                raise ArgumentError(
                    f"predict_batch returned {_shapes(output)} for a batch of {size}: let it return tensors only, "
                    "whose first dimension is the samples"
                )
            outputs.append(output)
            sizes.append(size)
    return Part(_joined(outputs), sizes)


def in_order(parts: Sequence[Part]) -> Any:
    """Return the ranks' outputs as one pytree, in the order of the data: round by round, and in each by rank."""
    filled = [part for part in parts if part.sizes]
    if len(filled) < 2:
        return filled[0].outputs if filled else None
    leaves = [[*tree_leaves(part.outputs)] for part in filled]
    merged = iter([_merged([own[place] for own in leaves], filled) for place in range(len(leaves[0]))])
    return tree_map(lambda leaf: next(merged), filled[0].outputs)


def _merged(tensors: Sequence[Any], parts: Sequence[Part]) -> Any:
    """Return one leaf of all ranks in order."""
    if not isinstance(tensors[0], Tensor):
        return tensors[0]
    shapes = {(tensor.dtype, *tensor.shape[1:]) for tensor in tensors}
    if len(shapes) > 1:
        raise ArgumentError(
            f"predict: outputs differ between ranks, {' and '.join(sorted(map(str, shapes)))}: let predict_batch pad "
            "them to one shape"
        )
    rows = [tensor.split(part.sizes) for tensor, part in zip(tensors, parts, strict=True)]
    rounds = range(max(map(len, rows)))
    return torch.cat([own[number] for number in rounds for own in rows if number < len(own)])


def _is_rows(leaf: Any, size: int) -> bool:
    """Return True if a leaf can be concatenated, or is None."""
    return leaf is None or (isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size)


def _shapes(output: Any) -> str:
    return ", ".join(
        f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{leaf!r:.40}"
        for leaf in tree_leaves(output)
    )


def _joined(outputs: list[Any]) -> Any:
    """Return the batches' outputs as one pytree, and empty the list: rows are in memory twice for one leaf only."""
    if not outputs:
        return None
    by_leaf = [list(leaves) for leaves in zip(*(tree_leaves(output) for output in outputs), strict=True)]
    first = outputs[0]
    outputs.clear()

    def join(leaf: Any) -> Any:
        tensors = by_leaf.pop(0)
        if not isinstance(leaf, Tensor):
            return leaf
        shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
        if len(shapes) > 1:
            raise ArgumentError(
                f"predict: the batches' outputs have the shapes {', '.join(map(str, sorted(shapes)))} per sample: let "
                "predict_batch pad them to one shape"
            )
        return torch.cat(tensors)

    return tree_map(join, first)
