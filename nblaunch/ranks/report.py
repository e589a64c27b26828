"""Metrics and progress from ranks to the notebook: `report` and `progress`. No-ops outside a launch.

Runs in ranks and their children. A report is one line of JSON, appended to the rank's spool file in one write: it
never waits for the notebook, DataLoader workers may report too, and nothing is lost when a rank is killed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import operator
import os
import time
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Generic, SupportsFloat, TypeVar

from nblaunch.machine import timeouts
from nblaunch.wire.drops import Counter

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Context:
    """This rank's identity and files while user code runs."""

    rank: int
    local_rank: int
    world_size: int
    device: str
    spool: int
    """The descriptor of the spool file."""
    log_dir: str
    drops: Counter | None = None
    """Counts the reports that do not fit on the disk."""


_current: Context | None = None
_is_torn = False
"""True if the last record was written in part."""


def current() -> Context | None:
    """Return this rank's context; None outside a launch."""
    return _current


def enter(context: Context | None) -> None:
    """Set this rank's context. Called by the rank's main loop."""
    global _current
    _current = context


def report(step: int | None = None, **metrics: SupportsFloat) -> None:
    """Show this rank's metrics live in the notebook, and keep them in ``result.metrics``. A no-op outside a launch.

    Args:
        step: The training step, in any unit: batches, epochs. Default: none.
        metrics: Numbers by name, such as ``accuracy=0.97``, or one-element tensors. A CUDA tensor synchronizes.

    Raises:
        TypeError: A metric is not a number, or the step is not a whole number.
    """
    if _current is None:
        return
    values = {name: _number(name, value) for name, value in metrics.items()}
    at = None if step is None else _step(step)
    spool({"time": time.time(), "step": at, "metrics": values})


class progress(Generic[T]):  # noqa: N801  # called like a function: for batch in progress(loader)
    """Iterate with a progress bar for this rank in the notebook. Outside a launch, only iterate.

    Args:
        iterable: The items.
        total: The number of items. Default: ``len(iterable)``, or unknown if it has none.
        desc: The label of the bar. Default: none.
    """

    def __init__(self, iterable: Iterable[T], total: int | None = None, desc: str = "") -> None:
        self.iterable = iterable
        self.total = total
        if total is None and isinstance(iterable, Sized):
            with contextlib.suppress(TypeError):  # a DataLoader of an IterableDataset has no length after all
                self.total = len(iterable)
        self.desc = desc

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("progress() cannot determine the length: pass total=")
        return self.total

    def __iter__(self) -> Iterator[T]:
        if _current is None:
            yield from self.iterable
            return
        begin = shown = time.monotonic()
        done = 0
        self._show(done, 0.0)
        for item in self.iterable:
            yield item
            done += 1
            now = time.monotonic()
            if now - shown >= timeouts.PROGRESS_INTERVAL_S:
                shown = now
                self._show(done, now - begin)
        self._show(done, time.monotonic() - begin)

    def _show(self, done: int, seconds: float) -> None:
        spool({"progress": self.desc, "done": done, "total": self.total, "seconds": seconds})


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)  # torch warns for a loss with a graph
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"report({name}={value!r:.80}): a metric must be a number or a one-element tensor") from error


def _step(value: Any) -> int:
    """Return `value` as an int. A float such as ``2.0`` and an integer tensor of one element are whole numbers."""
    try:
        return operator.index(value)
    except TypeError:
        pass  # not an integer, but it may be 2.0
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not number.is_integer():
        raise TypeError(f"report(step={value!r:.80}): a step must be a whole number, such as 2")
    return int(number)


def spool(record: dict[str, Any]) -> None:
    """Append a record to this rank's spool. A full disk drops records and never fails the training."""
    global _is_torn
    context = _current
    if context is None:
        return
    line = b"\n" * _is_torn + json.dumps(record).encode() + b"\n"
    reason = 0
    try:
        _is_torn = os.write(context.spool, line) < len(line)
        reason = errno.ENOSPC * _is_torn
    except OSError as error:
        reason = error.errno or errno.EIO
    if reason and context.drops is not None and "progress" not in record:  # a later one replaces it
        context.drops.add("reports", 1, reason)
