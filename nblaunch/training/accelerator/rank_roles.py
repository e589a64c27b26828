"""`RankRoles`: the process's position among its ranks, and what runs on which of them."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.algorithms.join import Join

from nblaunch.errors import ArgumentError
from nblaunch.machine.argument_checks import whole_number
from nblaunch.training import collectives
from nblaunch.training.accelerator.accelerator_settings import AcceleratorSettings
from nblaunch.training.accelerator.distributed_type import DistributedType, RankState
from nblaunch.training.parallel.parallelism import MeshSizes
from nblaunch.training.pytree import to_device
from nblaunch.training.topology import data_world, ensure_group, world

Decorated = Callable[..., Any]


class RankRoles(AcceleratorSettings):
    """The part of an `Accelerator` that knows which rank this is. Rank and device are looked up on each use."""

    # ------------------------------------------------------------------ position
    @property
    def rank(self) -> int:
        """This process's rank, over all machines."""
        return world().rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine."""
        return world().local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return world().size

    @property
    def copies(self) -> int:
        """Ranks that compute on the same samples: those of one tensor-parallel group."""
        return 1 if self.parallelism is None else self.parallelism.copies(world().size)

    process_index, local_process_index, num_processes = rank, local_rank, world_size  # accelerate's names

    @property
    def is_main_process(self) -> bool:
        return world().rank == 0

    @property
    def is_local_main_process(self) -> bool:
        return world().local_rank == 0

    @property
    def is_last_process(self) -> bool:
        return world().rank == world().size - 1

    @property
    def use_distributed(self) -> bool:
        return world().is_shared

    @property
    def multi_device(self) -> bool:
        """Whether there are several ranks, on GPUs, each with whole models."""
        return self.distributed_type == DistributedType.MULTI_GPU

    @property
    def distributed_type(self) -> DistributedType:
        """``NO``, ``MULTI_CPU``, ``MULTI_GPU`` or ``FSDP``: a string that equals accelerate's value.

        ``FSDP`` if ranks keep parts of every parameter, also on CPUs, where accelerate ignores its plugin.
        """
        if not world().is_shared:
            return DistributedType.NO
        if self.parallelism is not None and self.parallelism.sizes(world().size).shard > 1:
            return DistributedType.FSDP
        return DistributedType.MULTI_CPU if self.device.type == "cpu" else DistributedType.MULTI_GPU

    @property
    def should_save_model(self) -> bool:
        """Whether this rank may write the model's files: one rank of each machine."""
        return self.is_local_main_process

    @property
    def is_fsdp2(self) -> bool:
        """Whether ranks keep parts of every parameter."""
        return self.distributed_type == DistributedType.FSDP

    is_composable_parallelism_enabled = is_fsdp2  # accelerate's name

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of ``parallelism_config``, with accelerate's names of its dimensions; else None.

        A collective the first time.
        """
        config = self.parallelism_config
        return None if config is None or not world().is_shared else config.get_device_mesh(self.device.type)

    @property
    def data_parallel_rank(self) -> int:
        """This rank's group among those that each hold the whole model: 0 if there is one such group."""
        return self.rank if self.parallelism is None else self._mesh_place[0]

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank's place among those that divide every parameter."""
        return 0 if self.parallelism is None else self._mesh_place[1]

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's place among those that divide layers."""
        return 0 if self.parallelism is None else self._mesh_place[2]

    @property
    def _mesh_place(self) -> MeshSizes:
        """This rank's indices in the mesh of a `Parallelism`."""
        assert self.parallelism is not None
        if not world().is_shared:
            return MeshSizes(0, 0, 0)
        _, shard, tensor = self.parallelism.sizes(world().size)
        part, at = divmod(self.rank, tensor)
        return MeshSizes(part // shard, part % shard, at)

    @property
    def deepspeed_plugin(self) -> None:
        """None: there is no DeepSpeed here."""

    @property
    def state(self) -> RankState:
        """Device, rank and precision at this moment, for loops that read accelerate's ``state``."""
        place = world()
        return RankState(
            self.distributed_type,
            place.size,
            place.rank,
            place.local_rank,
            self.device,
            self.mixed_precision,
            self.fsdp_plugin,
        )

    # ------------------------------------------------------------------ on some ranks only
    def print(self, *values: Any, **kwargs: Any) -> None:
        """Call Python's ``print`` on the main process only."""
        if self.is_main_process:
            builtins.print(*values, **kwargs)  # noqa: T201  # the user's

    def on_main_process(self, function: Decorated | None = None) -> Decorated:
        """Decorate a function that runs on rank 0 only; elsewhere it returns None."""
        return self._on(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Decorated | None = None) -> Decorated:
        """Decorate a function that runs on each machine's rank 0 only; elsewhere it returns None."""
        return self._on(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Decorated | None = None) -> Decorated:
        """Decorate a function that runs on the last rank only; elsewhere it returns None."""
        return self._on(lambda: self.is_last_process, function)

    def on_process(self, function: Decorated | None = None, process_index: int | None = None) -> Decorated:
        """Decorate a function that runs on rank `process_index` only, as ``@accelerator.on_process(process_index=1)``.

        A single process runs it whatever the index.
        """
        index = whole_number("process_index", process_index, least=0)
        return self._on(lambda: not world().is_shared or self.rank == index, function)

    def on_local_process(self, function: Decorated | None = None, local_process_index: int | None = None) -> Decorated:
        """Decorate a function that runs on each machine's rank `local_process_index` only; see `on_process`."""
        index = whole_number("local_process_index", local_process_index, least=0)
        return self._on(lambda: not world().is_shared or self.local_rank == index, function)

    @staticmethod
    def _on(is_here: Callable[[], bool], function: Decorated | None) -> Decorated:
        if function is None:
            return functools.partial(RankRoles._on, is_here)
        own = function

        @functools.wraps(own)
        def called(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs) if is_here() else None

        return called

    # ------------------------------------------------------------------ one rank after another
    def wait_for_everyone(self) -> None:
        """Wait until every rank has called it. A collective."""
        self._join()
        collectives.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the body on rank 0 before the others, such as a download that the others then find. A collective."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the body on each machine's rank 0 before the others. A collective."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:  # release the others even if the body failed
                self.wait_for_everyone()

    def _join(self) -> None:
        """Ensure a process group before a collective: a launch has one, under torchrun and srun it is made now."""
        if not world().is_shared:
            return
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # nccl uses the current device
        ensure_group(self.backend, self._timeout)

    def set_trigger(self) -> None:
        """Ask all ranks to do something: `check_trigger` is then True once on each. For ends that one rank decides."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return True if any rank has called `set_trigger` since the last check. A collective."""
        self._join()
        own, self._is_triggered = self._is_triggered, False
        return bool(collectives.reduce(torch.tensor(int(own), device=self.device), "sum") > 0)

    # ------------------------------------------------------------------ data among ranks
    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A context in which ranks may have different numbers of batches.

        Ranks that have finished repeat the others' collectives. Prepared loaders have equally many batches on every
        rank, and need no such context. It joins if `even_batches` (default: as in
        ``dataloader_config``) is False, for loaders of your own.

        Args:
            joinables: Prepared modules, as ``torch.distributed.algorithms.Join`` takes them.
            even_batches: False to join.
        """
        is_even = self.even_batches if even_batches is None else even_batches
        if is_even or not self.use_distributed:
            yield
            return
        with Join(joinables):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """A context whose value is this rank's contiguous part of `inputs`; the first ranks take the remainder.

        Args:
            inputs: A list, tuple, tensor, dataset with a method ``select``, or a dict of them, all equally long. Dicts
                may be nested. Ranks that compute on the same samples (`copies`) get the same part.
            apply_padding: Repeat the last element until every rank has equally many. Padded tensors are on `device`.

        Raises:
            ArgumentError: `inputs` is something else, or a dict's values are not equally long.
        """
        place = data_world(self.copies)
        if not place.is_shared:
            yield inputs
            return
        lengths = set(_lengths(inputs))
        if len(lengths) > 1:
            raise ArgumentError(f"inputs: a dict's values must be equally long, and have {sorted(lengths)} elements")
        size, over = divmod(next(iter(lengths), 0), place.size)
        begin = place.rank * size + min(place.rank, over)
        missing = int(apply_padding and over > 0 and place.rank >= over)
        yield self._part(inputs, slice(begin, begin + size + (place.rank < over)), missing, apply_padding)

    def _part(self, inputs: Any, place: slice, missing: int, pads: bool) -> Any:
        if isinstance(inputs, dict):
            return {key: self._part(value, place, missing, pads) for key, value in inputs.items()}
        if isinstance(inputs, torch.Tensor):
            part = torch.cat([inputs[place], *[inputs[-1:]] * missing])
            return to_device(part, self.device) if pads else part
        if isinstance(inputs, (list, tuple)):
            own: Any = inputs
            return own[place] + own[-1:] * missing
        return inputs.select([*range(place.start, place.stop), *[len(inputs) - 1] * missing])


def _lengths(inputs: Any) -> Iterator[int]:
    """Yield the lengths of what `split_between_processes` can divide, in dicts too."""
    if isinstance(inputs, dict):
        for value in inputs.values():
            yield from _lengths(value)
        return
    if not (isinstance(inputs, (list, tuple)) or hasattr(inputs, "select")) or getattr(inputs, "shape", None) == ():
        raise ArgumentError(
            f"inputs={inputs!r:.80}: {type(inputs).__name__} cannot be divided: give a list, tuple, tensor or dict"
        )
    yield len(inputs)
