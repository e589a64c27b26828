"""Where a pass over data stands: the epoch, and how much of it has been taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nblaunch.errors import ArgumentError


@dataclass(slots=True)
class Progress:
    """One loader's or sampler's place in its data."""

    epoch: int = 0
    done: int = 0
    """Taken of the pass that was begun last."""
    start: int = 0
    """Where a pass of this epoch begins: 0, but after `resume`."""
    samples: int = 0
    """What all ranks together have taken of that pass; 0 where it is not counted."""
    start_samples: int = 0
    """As `start`, counted in those."""
    ended: bool = False
    """All of the present epoch was taken, by somebody who stopped before asking for more."""

    def begin(self) -> int:
        """A pass begins, or begins again; gives where."""
        if self.ended:
            self.complete(self.epoch)
        self.done, self.samples = self.start, self.start_samples
        return self.start

    def complete(self, epoch: int) -> None:
        """A pass of `epoch` was taken to its end: the next one is another epoch's, unless it was set meanwhile."""
        if self.epoch == epoch:
            self.move_to(epoch + 1)

    def move_to(self, epoch: int) -> None:
        """Be at an epoch's beginning; to be told of the present epoch changes nothing.

        Raises:
            ArgumentError: `epoch` is no whole number of at least 0.
        """
        checked(epoch, "epoch")
        self.ended = False
        if epoch != self.epoch:
            self.epoch, self.done, self.start, self.samples, self.start_samples = epoch, 0, 0, 0, 0

    def resume(self, epoch: int, done: int, samples: int = 0) -> None:
        """Passes of `epoch` begin after what was `done`, until it is completed."""
        self.epoch, self.done, self.start = checked(epoch, "epoch"), done, checked(done, "position")
        self.samples, self.start_samples = samples, checked(samples, "samples")
        self.ended = False


def checked(number: Any, name: str, least: int = 0) -> int:
    """A whole number.

    Raises:
        ArgumentError: It is something else, or below `least`.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ArgumentError(f"{name}={number!r}: must be a whole number, at least {least}")
    return number
