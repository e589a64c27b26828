"""`Prefetcher`: copies the next batches to the device while the current one is in use."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from nblaunch.machine.arguments import whole_number
from nblaunch.training.pytree import tensors_in, to_device

_POSITION = ("is_padding", "is_last", "remaining", "own_samples", "all_samples")
"""A loader's attributes that describe its latest batch."""
_END: Any = object()
_readers: weakref.WeakKeyDictionary[Any, weakref.ref[Prefetcher]] = weakref.WeakKeyDictionary()
"""The loaders that are read ahead, each with its reader."""


def reader_of(loader: Any) -> Prefetcher | None:
    """Return the Prefetcher that reads `loader` ahead, and so knows the position of the batch in use."""
    reference = _readers.get(loader)
    return None if reference is None else reference()


class _Ahead(NamedTuple):
    """A batch that was read ahead, and its loader's position then."""

    batch: Any
    copied: Any
    """The event after its copy; None if it was not copied on a stream."""
    position: dict[str, Any]
    """Those of `_POSITION` that the loader has."""
    state: dict[str, int] | None


class Prefetcher:
    """A loader's batches on a device, copied there while earlier ones are in use.

    On CUDA batches are copied on a separate stream, `depth` batches ahead. The computing stream waits for the copy,
    and ``record_stream`` keeps the allocator from reusing the memory too early. Copies overlap with computation only
    from pinned memory: give the loader ``pin_memory=True``. On other devices batches are moved on demand, and nothing
    is read ahead.

    It replaces its loader: `is_padding`, `is_last`, `epoch` and `state_dict` describe the batch that was yielded, not
    those read ahead, and every other attribute is the loader's. The loader's own `is_padding` and `is_last` describe
    that batch too, so an Accelerator that prepared the loader counts right: prepare the loader, then wrap it.

    Args:
        loader: Yields batches, any pytrees of tensors: a ``ShardedLoader``, a DataLoader, any iterable.
        device: The target device.
        depth: Number of batches to copy ahead, at least 1; each takes its memory on the device.

    Raises:
        ArgumentError: `depth` is not a whole number of at least 1.
    """

    is_padding: bool = False
    is_last: bool = False

    def __init__(self, loader: Iterable[Any], device: torch.device | str, depth: int = 1) -> None:
        self.loader: Any = loader
        self.device = torch.device(device)
        self.depth = whole_number("depth", depth, least=1)
        self._state: dict[str, int] | None = None
        """The loader's state after the latest yielded batch; None if nothing is read ahead."""
        self._ahead: dict[str, int] | None = None
        """The loader's actual state at that time; if it differs now, the user has moved the loader."""

    def __len__(self) -> int:
        """Return the number of the loader's batches."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        copier = copier_for(self.device)
        depth = self.depth if copier.runs_ahead else 0
        if copier.runs_ahead and hasattr(self.loader, "state_dict"):
            _readers[self.loader] = weakref.ref(self)
        try:
            yield from self._iterate(copier, depth)
        finally:
            if not self.is_last and hasattr(self.loader, "break_off"):
                self.loader.break_off()
            self._ahead = self._state and self.loader.state_dict()

    def _iterate(self, copier: Copier, depth: int) -> Iterator[Any]:
        for ahead in self._read_ahead(copier, depth):
            self.is_padding = ahead.position.get("is_padding", False)
            self.is_last = ahead.position.get("is_last", False)
            self._state = ahead.state
            self._ahead = self._state and self.loader.state_dict()
            for name, value in ahead.position.items():
                setattr(self.loader, name, value)  # undo the effect of reading ahead
            copier.await_copy(ahead.batch, ahead.copied)
            yield ahead.batch

    def state_dict(self) -> dict[str, int]:
        """Return the loader's state after the latest yielded batch."""
        now: dict[str, int] = self.loader.state_dict()
        return now if self._state is None or now != self._ahead else self._state

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Call the loader's ``load_state_dict``."""
        self._state = None
        self.loader.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _read_ahead(self, copier: Copier, depth: int) -> Iterator[_Ahead]:
        waiting: deque[_Ahead] = deque()
        for batch, copied in copier.copies(self.loader):
            position = {name: getattr(self.loader, name) for name in _POSITION if hasattr(self.loader, name)}
            state = self.loader.state_dict() if copier.runs_ahead and hasattr(self.loader, "state_dict") else None
            waiting.append(_Ahead(batch, copied, position, state))
            # Resuming the loader after its last batch completes its pass: yield that batch first.
            while waiting and (len(waiting) > depth or waiting[-1].position.get("is_last")):
                yield waiting.popleft()
        yield from waiting


class Copier:
    runs_ahead = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copies(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each batch on the device, with the event to wait for before its use."""
        return ((to_device(batch, self._device), None) for batch in loader)

    def await_copy(self, batch: Any, copied: Any) -> None:
        """Wait until the batch may be used."""


class CudaCopier(Copier):
    runs_ahead = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._stream = cuda.Stream(device)

    def copies(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        batches = iter(loader)
        while True:
            self._stream.wait_stream(self._cuda.current_stream(self._device))  # may still write the loader's input
            with self._cuda.stream(self._stream):  # the loader too: a prepared one copies
                batch = next(batches, _END)
                if batch is _END:
                    return
                moved = to_device(batch, self._device, non_blocking=True)
            yield moved, self._stream.record_event()

    def await_copy(self, batch: Any, copied: Any) -> None:
        current = self._cuda.current_stream(self._device)
        current.wait_event(copied)
        for tensor in tensors_in(batch):  # allocated on the copy stream, which would reuse it too early
            tensor.record_stream(current)


def copier_for(device: torch.device) -> Copier:
    return CudaCopier(device) if device.type == "cuda" else Copier(device)
