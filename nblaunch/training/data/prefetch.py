"""Batches on the device before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from nblaunch.training.data.epochs import checked
from nblaunch.training.nests import tensors_in, to_device

_TOLD = ("is_padding", "is_last", "remaining")
"""What a loader says of the batch that it gave out last."""
_END: Any = object()


class _Ahead(NamedTuple):
    """A batch that is on its way, and what its loader said when it gave it out."""

    batch: Any
    copied: Any
    """The event after its copy; None if it was not copied on a stream."""
    told: dict[str, Any]
    """Those of `_TOLD` that the loader has."""
    state: dict[str, int] | None


class Prefetcher:
    """A loader's batches on a device, copied there while the ones before are computed with.

    On CUDA each batch is copied on a stream of its own, `depth` batches ahead; the stream that computes waits for the
    copy, and the allocator is told (``record_stream``) that it uses the memory, which would otherwise be given away
    under it. The copies overlap with computing only from pinned memory: give the loader ``pin_memory=True``. On other
    devices batches are moved when they are asked for, and nothing is read ahead.

    It stands for its loader: `is_padding`, `is_last`, `epoch` and `state_dict` are those of the batch that was given
    out, not of what was read ahead, and every other attribute is the loader's. The loader too says `is_padding` and
    `is_last` of that batch, so an Accelerator that prepared the loader counts right: prepare it, then wrap it.

    Args:
        loader: Yields batches, any nests of tensors: a ``ShardedLoader``, a DataLoader, any iterable.
        device: Where to.
        depth: How many batches are copied ahead, at least 1; each takes its memory on the device.

    Raises:
        ArgumentError: `depth` is no whole number of at least 1.
    """

    is_padding: bool = False
    is_last: bool = False

    def __init__(self, loader: Iterable[Any], device: torch.device | str, depth: int = 1) -> None:
        self.loader: Any = loader
        self.device = torch.device(device)
        self.depth = checked(depth, "depth", 1)
        self._state: dict[str, int] | None = None
        """The loader's, after the batch that was given out last; None if nothing is read ahead."""
        self._ahead: dict[str, int] | None = None
        """The loader's at that time: while it says so, nobody has moved it."""

    def __len__(self) -> int:
        """How many batches the loader has."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        copier = copier_for(self.device)
        depth = self.depth if copier.runs_ahead else 0
        try:
            yield from self._given_out(copier, depth)
        finally:
            if not self.is_last and hasattr(self.loader, "break_off"):
                self.loader.break_off()
            self._ahead = self._state and self.loader.state_dict()

    def _given_out(self, copier: Copier, depth: int) -> Iterator[Any]:
        for ahead in self._read_ahead(copier, depth):
            self.is_padding, self.is_last = ahead.told.get("is_padding", False), ahead.told.get("is_last", False)
            self._state = ahead.state
            self._ahead = self._state and self.loader.state_dict()
            for name, value in ahead.told.items():
                setattr(self.loader, name, value)  # reading ahead has changed it
            copier.await_copy(ahead.batch, ahead.copied)
            yield ahead.batch

    def state_dict(self) -> dict[str, int]:
        """The loader's state after the batch that was given out last."""
        now: dict[str, int] = self.loader.state_dict()
        return now if self._state is None or now != self._ahead else self._state

    def load_state_dict(self, state: dict[str, int]) -> None:
        """As the loader's."""
        self._state = None
        self.loader.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet, while this is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _read_ahead(self, copier: Copier, depth: int) -> Iterator[_Ahead]:
        waiting: deque[_Ahead] = deque()
        for batch, copied in copier.copies(self.loader):
            waiting.append(self._noted(copier, batch, copied))
            # The loader takes the step after its last batch for the pass's end: not before that batch was given out.
            while waiting and (len(waiting) > depth or waiting[-1].told.get("is_last")):
                yield waiting.popleft()
        yield from waiting

    def _noted(self, copier: Copier, batch: Any, copied: Any) -> _Ahead:
        told = {name: getattr(self.loader, name) for name in _TOLD if hasattr(self.loader, name)}
        state = self.loader.state_dict() if copier.runs_ahead and hasattr(self.loader, "state_dict") else None
        return _Ahead(batch, copied, told, state)


class Copier:
    """Moves batches when they are asked for."""

    runs_ahead = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copies(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Each batch on the device, and what to wait for before it is used."""
        return ((to_device(batch, self._device), None) for batch in loader)

    def await_copy(self, batch: Any, copied: Any) -> None:
        """From now on the batch may be used."""


class CudaCopier(Copier):
    """Copies batches on a stream of its own.

    Args:
        device: A GPU.
        cuda: ``torch.cuda``, or what stands for it in a test.
    """

    runs_ahead = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._stream = cuda.Stream(device)

    def copies(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        batches = iter(loader)
        while True:
            self._stream.wait_stream(self._cuda.current_stream(self._device))  # it may have made what the loader reads
            with self._cuda.stream(self._stream):  # around the loader too: one that an Accelerator prepared copies
                batch = next(batches, _END)
                if batch is _END:
                    return
                moved = to_device(batch, self._device, non_blocking=True)
            yield moved, self._stream.record_event()

    def await_copy(self, batch: Any, copied: Any) -> None:
        current = self._cuda.current_stream(self._device)
        current.wait_event(copied)
        for tensor in tensors_in(batch):  # their memory is the copying stream's, which may reuse it too early
            tensor.record_stream(current)


def copier_for(device: torch.device) -> Copier:
    """How batches get to a device."""
    return CudaCopier(device) if device.type == "cuda" else Copier(device)
