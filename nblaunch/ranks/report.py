"""Metrics and progress from a rank to the notebook. Outside a launch both do nothing, so the same code runs anywhere.

A report is one line of JSON, appended to the rank's spool file in one write: it never waits for the notebook, a
DataLoader worker may report too, and nothing is lost when a rank is killed.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, SupportsFloat, TypeVar

from nblaunch.wire.drops import Counter

T = TypeVar("T")
_PROGRESS_EVERY = 0.1
"""Seconds between two progress lines of one bar."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a rank knows of itself while user code runs."""

    rank: int
    local_rank: int
    world_size: int
    device: str
    spool: int
    """The descriptor of the spool file."""
    log_dir: str
    drops: Counter | None = None
    """Counts the reports that the disk has no room for."""


_current: Context | None = None
_is_torn = False
"""The last record could not be written whole."""


def current() -> Context | None:
    """This rank's context; None outside a launch."""
    return _current


def enter(context: Context | None) -> None:
    """Set this rank's context. Called by the bootstrap."""
    global _current
    _current = context


def report(step: int | None = None, **metrics: SupportsFloat) -> None:
    """Show metrics of this rank in the notebook while it runs, and keep them in ``result.metrics``.

    Args:
        step: Where training stands, in whatever unit you count: batches, epochs. Default: none.
        metrics: Numbers by name, such as ``accuracy=0.97``; tensors of one element too (one on a GPU is waited for).

    Raises:
        TypeError: A metric is not a number, or the step no whole one.

    Outside a launch it does nothing.
    """
    if _current is None:
        return
    values = {name: _number(name, value) for name, value in metrics.items()}
    at = None if step is None else _whole("step", step)
    _spool(_current, {"time": time.time(), "step": at, "metrics": values})


class progress(Generic[T]):  # noqa: N801  # called like a function: for batch in progress(loader)
    """Iterate, and show how far this rank is in the notebook.

    Args:
        iterable: What to go through.
        total: Its length, where ``len(iterable)`` does not tell. Default: unknown.
        desc: A word before the bar. Default: none.

    Outside a launch it only iterates.
    """

    def __init__(self, iterable: Iterable[T], total: int | None = None, desc: str = "") -> None:
        self.iterable = iterable
        self.total = _length(iterable) if total is None else total
        self.desc = desc

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("this progress has no length: give total=")
        return self.total

    def __iter__(self) -> Iterator[T]:
        if _current is None:
            yield from self.iterable
            return
        begin = shown = time.monotonic()
        done = 0
        self._show(_current, done, 0.0)
        for item in self.iterable:
            yield item
            done += 1
            now = time.monotonic()
            if now - shown >= _PROGRESS_EVERY:
                shown = now
                self._show(_current, done, now - begin)
        self._show(_current, done, time.monotonic() - begin)

    def _show(self, context: Context, done: int, seconds: float) -> None:
        _spool(context, {"progress": self.desc, "done": done, "total": self.total, "seconds": seconds})


def _length(iterable: Any) -> int | None:
    try:
        return len(iterable)
    except TypeError:
        return None  # a generator; a DataLoader of an IterableDataset, which has a __len__ that raises


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)  # of a loss with a graph torch would warn
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"report({name}={value!r:.80}): a metric is a number or a tensor of one element") from error


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    try:
        return int(number)
    except (ValueError, OverflowError) as error:
        raise TypeError(f"report({name}={value!r:.80}): a step is a whole number") from error


def _spool(context: Context, record: dict[str, Any]) -> None:
    """Append a record; a disk that is full costs the records, and not the training."""
    global _is_torn
    line = b"\n" * _is_torn + json.dumps(record).encode() + b"\n"
    reason = 0
    try:
        _is_torn = os.write(context.spool, line) < len(line)
        reason = errno.ENOSPC * _is_torn
    except OSError as error:
        reason = error.errno or errno.EIO
    if reason and context.drops is not None and "metrics" in record:  # the next bar tells what a lost one did
        context.drops.add("reports", 1, reason)
