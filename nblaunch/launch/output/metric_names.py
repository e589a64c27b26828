"""What the names of metrics say: which belong in one chart, in which order, which way is better, and how to write them.

``valid_loss`` belongs beside ``loss``, and so do ``train_loss``, ``val/loss``, ``evalLoss`` and ``loss_epoch``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["up", "down", ""]
Kind = Literal["", "rate", "lr"]
"""How to write a value: as a plain number, as a rate such as 1.2k/s, or as a learning rate such as 3e-4."""
Part = Literal["training", "epoch", "valid", "test"]
"""The data that a metric is of; "epoch" is a mean over an epoch of training."""

_UP = {"accuracy", "acc", "f1", "auc", "precision", "recall", "map", "iou", "miou", "bleu", "score"}
_DOWN = {"loss", "error", "perplexity", "mae", "mse", "rmse", "err", "ppl", "nll", "cer", "wer"}
_WORD = re.compile(r"f1|[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PARTS: dict[str, Part] = {"train": "training", "epoch": "epoch", "val": "valid", "eval": "valid", "test": "test"}
_PREFIX = re.compile(
    r"((?i:train|val|eval|test|epoch))(?i:(?<=train)ing|(?<=val)id(?:ation)?|(?<=eval)uation)?"
    r"(?:[_/. -]+|(?<=[a-z])(?=[A-Z]))(?=.)"
)
_SUFFIX = re.compile(r"(?<=.)[_/. -](step|epoch)$", re.IGNORECASE)
_ORDER: tuple[Part, ...] = ("training", "epoch", "valid", "test")
_SECOND = ("s", "sec", "second")


def direction(name: str) -> Direction:
    """Return "up" or "down" for the better direction of a metric, judged by its name; "" if unknown."""
    # Read names both ways: "valLoss" has two words, "mAP" has one. The last known word decides.
    for word in [*re.findall("f1|[a-z]+", name.lower()), *map(str.lower, _WORD.findall(name))][::-1]:
        if word in _UP:
            return "up"
        if word in _DOWN:
            return "down"
    return ""


def kind(name: str) -> Kind:
    words = [word.lower() for word in _WORD.findall(name)]
    *_, before, last = ["", "", *words]
    if "throughput" in words or (last in _SECOND and (before == "per" or name.lower().endswith(f"/{last}"))):
        return "rate"
    is_rate = "lr" in words or "learning rate" in " ".join(words)
    return "lr" if is_rate and not direction(name) else ""  # such as lr_loss


def family(name: str) -> tuple[str, Part]:
    """Return what a metric measures, in lower case, and on which data: ``("loss", "valid")`` for ``val_loss``."""
    part: Part = "training"
    base = name
    while match := _PREFIX.match(base):
        found = _PARTS[match[1].lower()]
        part = max(part, found, key=_ORDER.index)
        base = base[match.end() :]
    if match := _SUFFIX.search(base):
        part = "epoch" if match[1].lower() == "epoch" and part == "training" else part
        base = base[: match.start()]
    return base.lower(), part


def number(value: float) -> str:
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def number_of(name: str, value: float) -> str:
    """Format a value of a metric, such as 0.9672, 1.2k/s or 3e-4."""
    return formatted(value, kind(name))


def formatted(value: float, kind: Kind) -> str:
    if not math.isfinite(value) or not kind:
        return number(value)
    if kind == "lr":
        if value == 0 or not abs(value) < 0.01:
            return f"{value:.3g}"
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:.3g}{unit}/s" if abs(value) < 999.5 * factor else f"{value / factor:.0f}{unit}/s"
    return f"{value:.3g}/s"


@dataclass(frozen=True, slots=True)
class Chart:
    names: tuple[str, ...]

    @property
    def direction(self) -> Direction:
        return direction(self.names[0])

    @property
    def kind(self) -> Kind:
        return kind(self.names[0])


class ChartPlan:
    """Which metrics are drawn in one chart: those of one family, if their steps count the same.

    The steps of a metric count the same as those of its family's first metric if it is reported at about the step where
    that one is: not if one counts batches and the other one epochs. A metric whose steps go back, or stand, is drawn
    alone, over the numbers of its reports.
    """

    def __init__(self, points: Iterable[tuple[str, float, Hashable]] = ()) -> None:
        self.numbered: set[str] = set()
        """The metrics that are drawn over the numbers of their reports."""
        self._latest: dict[str, float] = {}
        self._ends: dict[tuple[str, Hashable], float] = {}
        """The latest x of each metric and source."""
        self._families: dict[str, list[str]] = {}
        """The metrics of each family, training first."""
        self._leaders: dict[str, str] = {}
        """For each metric that is not the first of its family, that first one."""
        self._apart: set[str] = set()
        for name, x, source in points:
            self.add(name, x, source)

    def add(self, name: str, x: float, source: Hashable) -> bool:
        """Add a value that `source`, such as a rank, reports in order. Return True if the charts have changed."""
        is_new = name not in self._latest
        self._latest[name] = x
        if is_new:
            self._join(name)
        end = self._ends.get((name, source))
        self._ends[name, source] = x
        if end is not None and x <= end and name not in self.numbered:
            self.numbered.add(name)
            is_new = True
        leader = self._leaders.get(name)
        if leader is None:
            return is_new
        was_apart = name in self._apart
        low, high = sorted((x + 1, self._latest[leader] + 1))  # both begin at 0 or 1
        if low == high or (low > 0 and high < 2 * low):
            self._apart.discard(name)
        else:
            self._apart.add(name)
        return is_new or was_apart != (name in self._apart)

    def leads(self, names: Iterable[str]) -> bool:
        """Return True if each of these metrics is known, and the first of its family."""
        return all(name in self._latest and name not in self._leaders for name in names)

    def extend(self, name: str, xs: Sequence[float], source: Hashable) -> bool:
        """Add values as `add` does, one after the other."""
        changed = self.add(name, xs[0], source)
        if name not in self.numbered and any(map(operator.le, xs[1:], xs)):
            self.numbered.add(name)
            changed = True
        return self.add(name, xs[-1], source) or changed if len(xs) > 1 else changed

    def _join(self, name: str) -> None:
        base, part = family(name)
        names = self._families.setdefault(base, [])
        at = next(
            (i for i, other in enumerate(names) if _ORDER.index(family(other)[1]) > _ORDER.index(part)), len(names)
        )
        names.insert(at, name)
        self._leaders.pop(names[0], None)
        self._apart.difference_update(names[:1])
        self._leaders.update((other, names[0]) for other in names[1:])

    @property
    def charts(self) -> list[Chart]:
        """The charts: losses first, then other metrics by name, learning rates and throughputs last."""
        charts = []
        for first, *others in self._families.values():
            apart = set(others) if first in self.numbered else self._apart | self.numbered
            charts.append(Chart((first, *(name for name in others if name not in apart))))
            charts += [Chart((name,)) for name in others if name in apart]
        return sorted(charts, key=_place)


def _place(chart: Chart) -> tuple[int, str, str]:
    name, way = chart.names[0], chart.direction
    kinds: dict[Kind, int] = {"lr": 4, "rate": 5, "": 0}
    by_way: dict[Direction, int] = {"up": 1, "down": 2, "": 3}
    place = kinds[chart.kind] or (0 if family(name)[0].endswith("loss") else by_way[way])
    return place, name.lower(), name
