"""What a training run shows: reports and progress of a rank, or a line under the cell that trains in place."""

from __future__ import annotations

import logging
import math
import sys
import time
import uuid
from collections.abc import Generator, Iterable
from typing import Any

from nblaunch.errors import warn
from nblaunch.machine import timeouts
from nblaunch.machine.server_cells import runs_on_server
from nblaunch.ranks.report import Progress, current, mark_best, progress, report
from nblaunch.training.topology import world

_logger = logging.getLogger(__name__)


class FitDisplay:
    """Shows one training run.

    In a launch this is the panel's part. In the notebook's own process it is one line of text, which is replaced while
    training goes on. Elsewhere (a script, torchrun) rank 0 logs the results at level INFO.
    """

    def __init__(self, total: int | None, done: int) -> None:
        self._total, self._done, self._desc = total, done, ""
        self._values: dict[str, float] = {}
        self.first_step, self._best = done + 1, ""
        self._has_warned = False
        self._begin = self._shown = time.monotonic()
        self._line = None if current() is not None else _Line.in_notebook()
        self._bar = Progress(total, "fit", done)

    def batches(self, loader: Iterable[Any], desc: str) -> Generator[Any]:
        self._desc = desc
        self._show(now=time.monotonic())
        yield from progress(loader, desc=desc)

    def step(self, step: int) -> None:
        self._done = step
        self._bar.reach(step)
        now = time.monotonic()
        if now - self._shown >= timeouts.PROGRESS_INTERVAL_S:
            self._show(now)

    def report(self, step: int, **values: float) -> None:
        report(values, step)
        self.note(step, values)

    def note(self, step: int, values: dict[str, float]) -> None:
        self._values |= values
        if current() is None and world().rank == 0:
            _logger.info("step %d: %s", step, _in_words(values))

    def checked_loss(self, step: int, loss: float) -> float:
        if not (math.isfinite(loss) or self._has_warned):
            self._has_warned = True
            warn(
                f"the loss is {loss} at step {step} on rank {world().rank}, and training continues: check that batch, "
                "lower the learning rate, or set TrainConfig(max_grad_norm=1.0)",
                each_time=True,
            )
        return loss

    def report_again(self, history: list[dict[str, float]], validations: list[dict[str, float]]) -> None:
        """Report the epochs and validations before a resume, so that charts have the whole run."""
        if world().rank == 0:
            for results in validations:
                values = {name: value for name, value in results.items() if name not in ("epoch", "step")}
                report(values, int(results["step"]))
            for results in history:
                report(int(results["step"]), epoch_loss=results["loss"])

    def mark_best(self, metric: str, step: int, value: float) -> None:
        self._best = f"best {_in_words({metric: value})} at step {step}"
        if world().rank == 0:
            mark_best("epoch_loss" if metric == "loss" else metric, step, value)

    def close(self) -> None:
        self._bar.close()
        self._show(time.monotonic(), is_last=True)

    def _show(self, now: float, *, is_last: bool = False) -> None:
        if self._line is None:
            return
        self._shown = now
        steps = f"step {self._done}" + (f" of {self._total}" if self._total else "")
        parts = [self._desc, steps, _in_words(self._values), self._best, self._time(now - self._begin)]
        self._line.show(" · ".join(part for part in parts if part), is_last=is_last)

    def _time(self, seconds: float) -> str:
        done, total = self._done + 1 - self.first_step, self._total or 0
        left = f", {_duration(seconds * (total - self._done) / done)} left" if done and total > self._done else ""
        return _duration(seconds) + left


class _Line:
    """A line of text in the notebook that is replaced; where that cannot be done, only the first and the last."""

    def __init__(self, publisher: Any, *, is_append_only: bool = False) -> None:
        self._publisher, self._is_append_only = publisher, is_append_only
        self._transient = {"display_id": uuid.uuid4().hex}
        self._is_shown = False

    @classmethod
    def in_notebook(cls) -> _Line | None:
        ipython = sys.modules.get("IPython")
        shell: Any = ipython.get_ipython() if ipython is not None else None
        if not hasattr(shell, "kernel"):
            return None
        return cls(shell.display_pub, is_append_only=runs_on_server(shell.kernel))

    def show(self, text: str, *, is_last: bool = False) -> None:
        if not (self._is_append_only and self._is_shown and not is_last):
            update = self._is_shown and not self._is_append_only
            self._publisher.publish({"text/plain": text}, transient=self._transient, update=update)
        self._is_shown = True


def _in_words(values: dict[str, float]) -> str:
    return " · ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items())


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
