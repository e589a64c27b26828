"""Metrics and progress from ranks to the notebook: `report`, `mark_best` and `progress`. No-ops outside a launch.

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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Generic, Protocol, SupportsFloat, TypeVar

from nblaunch.machine import timeouts
from nblaunch.wire.tables import Drops

T = TypeVar("T")


class Interrupted:
    """Returned by a function that an interrupt ended early: the launch counts as stopped, and the value is kept."""


class Deferral(Protocol):
    """Lets the interrupt of a task take effect later."""

    def ask(self) -> None:
        """Note that the rank is interrupted. Called by the thread that reads the channel, and by the main thread."""

    def may_wait(self) -> bool:
        """Return False if KeyboardInterrupt must be raised now. Called at each SIGINT by the main thread."""


@dataclass(frozen=True, slots=True)
class Context:
    rank: int
    local_rank: int
    world_size: int
    device: str
    spool: int
    log_dir: str
    drops: Drops | None = None
    """Notes reports that do not fit on the disk."""
    defer: Callable[[Deferral | None], None] | None = None
    """Sets what decides when an interrupt takes effect; with None it does at once."""


_current: Context | None = None
_is_torn = False
"""True if the last record was written in part."""
_reported: tuple[int | None, dict[str, float]] = None, {}
"""The last step of a report, and the metrics of all its reports."""


def current() -> Context | None:
    return _current


def enter(context: Context | None) -> None:
    global _current, _reported
    _current, _reported = context, (None, {})
    _bars.clear()


def report(
    first: int | Mapping[str, SupportsFloat] | None = None, /, step: int | None = None, **metrics: SupportsFloat
) -> None:
    """Show this rank's metrics live in the notebook, and keep them in ``result.metrics``. A no-op outside a launch.

    Args:
        first: The step, or metrics as a dict: ``report({"loss": 0.5}, step=1)``.
        step: The training step, in any unit, such as batches or epochs. Default: None.
        metrics: Numbers or one-element tensors or arrays, by name, as in ``accuracy=0.97``. CUDA tensors synchronize.

    Raises:
        TypeError: A metric is not a number, or the step is not an integer.
    """
    if _current is None:
        return
    given: dict[Any, Any] = {**first, **metrics} if isinstance(first, Mapping) else metrics
    if not isinstance(first, Mapping) and first is not None:
        if step is not None:
            raise TypeError(f"report({first!r:.80}, step={step!r:.80}): give the step once, and metrics by name")
        step = first
    if unnamed := [name for name in given if not isinstance(name, str)]:
        raise TypeError(f"report({{{unnamed[0]!r:.80}: ...}}): metric names must be strings")
    values = {name: _number(name, value) for name, value in given.items()}
    at = None if step is None else _step(step)
    global _reported
    _reported = at, {**_reported[1], **values} if at == _reported[0] else values
    spool({"time": time.time(), "step": at, "metrics": values})


def mark_best(metric: str, step: int, value: SupportsFloat | None = None) -> None:
    """Mark a step as the best so far for a metric, in the metric's chart and in ``result.metrics.best``.

    A later call for the same metric replaces the mark. A no-op outside a launch.

    Args:
        metric: The name of a metric that this rank reports.
        step: The step of the report.
        value: The metric's value. Default: the value that this rank reported at `step`.

    Raises:
        TypeError: The metric is not a name, the step is not an integer, or the value is not a number.
    """
    if _current is None:
        return
    if not isinstance(metric, str):
        raise TypeError(f"mark_best(metric={metric!r:.80}): expected the name of a metric, such as 'valid_loss'")
    at, (last, values) = _step(step, "mark_best"), _reported
    default = values.get(metric) if at == last else None  # of an earlier step: the reader knows it
    known = default if value is None else _number("value", value, "mark_best")
    spool({"time": time.time(), "best": metric, "step": at, "value": known})


class Progress:
    """A progress bar of this rank, moved by position. Outside a launch it shows nothing.

    A bar that begins while others are open is shown below them: a bar of all steps stays above those of its epochs. The
    time left is estimated from the steps that this bar has seen: a resumed run passes what was done before as `done`.

    Args:
        total: The number of steps; None, or anything that is not a finite number, if it is unknown.
        desc: The label of the bar. Default: none.
        done: Steps that were done before. Default: 0.
    """

    def __init__(self, total: int | None, desc: str = "", done: int = 0) -> None:
        self.total, self.desc, self.done = _total(total), str(desc), done
        self._first = done
        self._begin = self._shown = time.monotonic()
        self._level = len(_bars)
        _bars.add(self)
        self._show()

    def reach(self, done: int) -> None:
        """Set the number of steps done. Shown ten times a second at most, and once `total` is reached."""
        self.done = done
        now = time.monotonic()
        if now - self._shown >= timeouts.PROGRESS_INTERVAL_S or done == self.total:
            self._shown = now
            self._show()

    def step(self) -> None:
        """Advance by one step."""
        self.reach(self.done + 1)

    def close(self) -> None:
        """End the bar where it is. Idempotent."""
        if self in _bars:
            _bars.discard(self)
            is_cut = self.total is not None and self.done != self.total
            if is_cut or self._shown_done != self.done:
                self._show(is_cut)

    def _show(self, is_cut: bool = False) -> None:
        self._shown_done = self.done
        seconds = None if is_cut else time.monotonic() - self._begin  # without seconds, no time is left
        bar = {"progress": self.desc, "done": self.done, "total": self.total, "seconds": seconds}
        spool({**bar, "first": self._first, "level": self._level})


_bars: weakref.WeakSet[Progress] = weakref.WeakSet()


class progress(Generic[T]):  # noqa: N801  # called like a function: for batch in progress(loader)
    """Iterate over `iterable` and show a progress bar for this rank. Outside a launch, show no bar.

    Bars can be nested: ``for epoch in progress(range(10)): for batch in progress(loader): ...``.

    Args:
        iterable: The items.
        total: The number of items. Default: ``len(iterable)``, or unknown if the iterable has no length.
        desc: The label of the bar. Default: no label.
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
            raise TypeError("progress(): the iterable has no length; pass total=")
        return self.total

    def __iter__(self) -> Iterator[T]:
        if _current is None:
            yield from self.iterable
            return
        bar = Progress(self.total, self.desc)
        try:
            for item in self.iterable:
                yield item
                bar.step()
        finally:
            bar.close()


def _total(value: Any) -> float | None:
    try:
        number: float = operator.index(value)
    except TypeError:
        number = value if isinstance(value, float) else math.nan
    return number if 0 <= number < math.inf else None


def _number(name: str, value: Any, caller: str = "report") -> float:
    try:
        if hasattr(value, "detach"):
            return float(value.detach())  # torch warns for a loss with a graph
        return float(value.item() if getattr(value, "size", None) == 1 else value)  # numpy refuses array([2.5])
    except (TypeError, ValueError, RuntimeError, AttributeError):
        said = f"{caller}({name}={value!r:.80}): a metric must be a number or a one-element tensor"
    raise TypeError(said)


def _step(value: Any, caller: str = "report") -> int:
    """Return `value` as an int. A float such as ``2.0`` and an integer tensor of one element are integers."""
    try:
        return operator.index(value)
    except TypeError:
        pass  # not an integer, but it may be 2.0
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not number.is_integer():
        raise TypeError(f"{caller}(step={value!r:.80}): a step must be an integer, such as 2")
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
        context.drops.note("reports", reason)
