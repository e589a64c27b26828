"""The benchmark's figures as pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

from tests.benchmarks.scale import slope


def draw(figures: Mapping[str, Any], folder: Path) -> None:
    """Draw what was measured: `launch.png`, `data.png` and `scale.png`, as far as there are figures for them."""
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    for name, bars in {"launch": _launch(figures), "data": _data(figures)}.items():
        if bars:
            _bars(bars, folder / f"{name}.png")
    if "scale" in figures:
        _growth(figures["scale"], folder / "scale.png")


Bars = dict[str, dict[str, float]]
"""Seconds by measure and way."""


def _launch(figures: Mapping[str, Any]) -> Bars:
    return {
        measure: {way: statistics.median(times) for way, times in ways.items()}
        for measure, ways in figures.get("seconds", {}).items()
    }


def _data(figures: Mapping[str, Any]) -> Bars:
    ways: list[dict[str, Any]] = next(iter(figures.get("data", {}).get("captured", {}).values()), [])
    names = {"first": "first launch", "again": "again", "changed": "after a change"} if ways else {}
    return {
        words: {"one copy": statistics.median(ways[0]["copy"])}
        | {way["name"]: statistics.median(way[name]) for way in ways}
        for name, words in names.items()
    }


def _bars(measures: Bars, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(measures), figsize=(4 * len(measures), 3), layout="constrained", squeeze=False)
    for place, (measure, ways) in zip(axes[0], measures.items(), strict=True):
        ways = {way: seconds for way, seconds in ways.items() if math.isfinite(seconds)}  # not of one that hangs
        bars = place.barh(list(ways), list(ways.values()))
        place.bar_label(bars, fmt="%.2f", padding=3)
        place.set(title=measure, xlabel="seconds", xscale="log")
        place.invert_yaxis()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _growth(figures: Mapping[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, place = plt.subplots(figsize=(5, 3.5), layout="constrained")
    ours = {int(n): statistics.median(seconds for seconds, _ in times) for n, times in figures["ranks"].items()}
    floor = {int(n): statistics.median(times) for n, times in figures["floor"].items()}
    for name, seconds in {"nblaunch": ours, "fork and gloo alone": floor}.items():
        place.plot(list(seconds), list(seconds.values()), "o-", label=f"{name}: {slope(seconds) * 1000:.0f} ms a rank")
    place.set(xlabel="ranks", ylabel="seconds of a launch", ylim=0)
    place.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
