"""`Prefetcher`: copies the next batches to the device while the current one is in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from nblaunch.machine.arguments import whole_number
from nblaunch.training.loader import ShardedLoader
from nblaunch.training.pytree import tensors_in, to_device

_END: Any = object()


class Prefetcher:
    """A loader's batches on a device, copied there while earlier ones are in use.

    On CUDA batches are copied on a separate stream, `depth` batches ahead. The computing stream waits for the copy,
    and ``record_stream`` keeps the allocator from reusing the memory too early. Copies overlap with computation only
    from pinned memory: give the loader ``pin_memory=True``. On other devices batches are moved on demand, and nothing
    is read ahead.

    It replaces its loader, and has its attributes. A ``ShardedLoader``'s `is_padding`, `is_last`, `epoch` and
    `state_dict` describe the batch that was yielded, not those read ahead, so an Accelerator that prepared the loader
    counts right: prepare the loader, then wrap it.

    Args:
        loader: Yields batches, any pytrees of tensors: a ``ShardedLoader``, a DataLoader, any iterable.
        device: The target device.
        depth: Number of batches to copy ahead, at least 1; each takes its memory on the device.

    Raises:
        ArgumentError: `depth` is not a whole number of at least 1.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str, depth: int = 1) -> None:
        self.loader: Any = loader
        self.device = torch.device(device)
        self.depth = whole_number("depth", depth, least=1)

    def __len__(self) -> int:
        """Return the number of the loader's batches."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.device.type != "cuda":
            return (to_device(batch, self.device) for batch in self.loader)
        ahead = partial(copied_ahead, device=self.device, depth=self.depth)
        return self.loader.read(ahead) if isinstance(self.loader, ShardedLoader) else ahead(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)


def copied_ahead(batches: Iterable[Any], device: torch.device, depth: int, cuda: Any = torch.cuda) -> Iterator[Any]:
    """Yield pytrees on the device; `depth` later ones are on their way there, on a stream of their own."""
    stream, iterator, is_over = cuda.Stream(device), iter(batches), False
    waiting: deque[tuple[Any, Any]] = deque()
    while True:
        while len(waiting) <= depth and not is_over:
            stream.wait_stream(cuda.current_stream(device))  # may still write the loader's input
            with cuda.stream(stream):  # the loader too: its dataset may copy
                batch = next(iterator, _END)
                is_over = batch is _END
                if not is_over:
                    waiting.append((to_device(batch, device, non_blocking=True), stream.record_event()))
        if not waiting:
            return
        batch, copied = waiting.popleft()
        current = cuda.current_stream(device)
        current.wait_event(copied)
        for tensor in tensors_in(batch):  # allocated on the copy stream, which would reuse it too early
            tensor.record_stream(current)
        yield batch
