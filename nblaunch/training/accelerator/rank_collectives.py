"""`RankCollectives`: combines values of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nblaunch.training import collectives
from nblaunch.training.accelerator.rank_roles import RankRoles


class RankCollectives(RankRoles):
    """The part of an `Accelerator` whose methods every rank must call: each is a collective."""

    def all_reduce_dict(self, d: Mapping[Any, Any], op: str = "mean") -> dict[Any, Any]:
        """Reduce a dict of numbers and tensors over all ranks, to the same bits on each. A collective.

        It takes one collective if each rank's values pickle to at most 1,016 bytes (some 25 numbers with names), else
        two. Ranks that compute on the same samples (`copies`) count as one.

        Args:
            d: By name ints (of int64's range), floats, bools, or tensors of any shape; in any order, the same names on
                every rank. A number that is a float on one rank is a float on all.
            op: ``"mean"`` (default; ``"avg"`` is the same), ``"sum"``, ``"max"`` or ``"min"``. Ints are summed exactly,
                and their mean is a float; floats are summed in float64. Tensors keep their shape, and their dtype
                except for means of integers (float64) and sums of bools (int64); they are returned on `log_device`.

        Raises:
            ArgumentError: On every rank: names, types or shapes differ between ranks (the message says how), or a
                value has another type.
        """
        self._join()
        return collectives.all_reduce_dict(d, op, self.log_device, self.copies)

    def gather(self, nest: Any) -> Any:
        """Concatenate every tensor of a pytree along dimension 0, by rank. A collective.

        The first dimensions may differ between ranks. A tensor without dimensions counts as one row.

        Raises:
            ArgumentError: On every rank: other dimensions, dtypes or the pytrees themselves differ.
        """
        self._join()
        return collectives.gather(nest)

    def gather_for_metrics(self, nest: Any, use_gather_object: bool = False) -> Any:
        """`gather` without results of repeated samples: over a pass each sample counts once. A collective.

        Objects that are not tensors, or anything with `use_gather_object`, come back as a list of the ranks' values,
        or of their elements if the values are lists or tuples.
        """
        self._join()
        is_padding = self._gradients.is_padding or self.rank % self.copies != 0
        gathered = collectives.gather_for_metrics(nest, is_padding=is_padding, as_objects=use_gather_object)
        kept = self._gradients.kept_rows
        return gathered if kept is None else collectives.first_rows(gathered, kept)

    def reduce(self, nest: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine every tensor of a pytree over the ranks. A collective, except for ``"none"``.

        Ranks that compute on the same samples (`copies`) count as one.

        Args:
            nest: Tensors, of the same shapes and dtypes on every rank.
            reduction: ``"sum"`` (default, as in accelerate), ``"mean"``, ``"max"``, or ``"none"``, which returns the
                pytree unchanged. Sums of bools are int64, means of integers float64; all else keeps its dtype.
            scale: Ignored, as accelerate ignores it except on TPUs.

        Raises:
            ArgumentError: On every rank: shapes, dtypes or the pytrees themselves differ, or ``"max"`` of complex
                numbers was requested.
        """
        self._join()
        return collectives.reduce(nest, reduction, self.copies)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object, of any kind, on every rank; GPU tensors on each rank's own GPU. A collective."""
        self._join()
        return collectives.broadcast(obj, src, self.device)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad every tensor of a pytree to the longest rank's size in one dimension. A collective.

        Args:
            tensor: Tensors with equally many dimensions and the same dtype on every rank.
            dim: The dimension, from the end if negative; a tensor that lacks it comes back itself.
            pad_index: The value to pad with.
            pad_first: Pad at the beginning instead of the end.

        Raises:
            ArgumentError: On every rank: dimensions, dtypes or the pytrees themselves differ.
        """
        self._join()
        return collectives.pad(tensor, dim, pad_index, pad_first=pad_first)
