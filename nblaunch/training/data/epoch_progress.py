"""The position in a pass over data: the epoch, and how much of the pass is done."""

from __future__ import annotations

from dataclasses import dataclass

from nblaunch.machine.arguments import whole_number


@dataclass(slots=True)
class EpochProgress:
    """The position of one loader or sampler."""

    epoch: int = 0
    done: int = 0
    """Batches or indices taken in the latest pass."""
    start: int = 0
    """Where passes of this epoch begin: 0, except after `resume`."""
    samples: int = 0
    """Samples that all ranks have taken in that pass; 0 if not counted."""
    start_samples: int = 0
    """Like `start`, in samples of all ranks."""
    once: int | None = None
    """Where the next pass alone begins, instead of `start`."""
    ended: bool = False
    """Whether all of this epoch was taken by a caller who stopped at the last item."""

    def begin(self) -> int:
        """Begin a pass; return its first position."""
        if self.ended:
            self.complete(self.epoch)
        start, self.once = self.start if self.once is None else self.once, None
        self.done, self.samples = start, self.start_samples
        return start

    def complete(self, epoch: int) -> None:
        """Advance after a complete pass of `epoch`, unless the epoch was set meanwhile."""
        if self.epoch == epoch:
            self.move_to(epoch + 1)

    def move_to(self, epoch: int) -> None:
        """Move to the beginning of `epoch`. Moving to the current epoch changes nothing.

        Raises:
            ArgumentError: `epoch` is not a whole number of at least 0.
        """
        epoch = whole_number("epoch", epoch, least=0)
        self.ended = False
        if epoch != self.epoch:
            self.epoch, self.done, self.start, self.samples, self.start_samples = epoch, 0, 0, 0, 0

    def resume(self, epoch: int, done: int, samples: int = 0) -> None:
        """Begin passes of `epoch` after `done` items, until it is completed."""
        self.epoch = whole_number("epoch", epoch, least=0)
        self.done = self.start = whole_number("position", done, least=0)
        self.samples = self.start_samples = whole_number("samples", samples, least=0)
        self.ended = False
