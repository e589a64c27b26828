"""Everything that is said to be fast, side by side with what else a user would take, in one run.

Launches, cells of sessions, data and results, printed lines, growth with the number of ranks, training, the training
toolkit, and one day in a notebook; each way in a real kernel of its own. Medians, with ratios; of many printed lines
and of the day one run each.

Usage: python -m tests.benchmarks [--only launch,data,...] [--rounds 11] [--quick] [--write] [--json FILE]
                                  [--plots FOLDER]

Where the time of a launch of two ranks goes, on 2 cores (by time stamps): checking, packing and asking the fork server
10 ms, its fork of the reaper 7, the reaper's forks of the ranks 16, their own start and their meeting by gloo 26, the
function and its result 8, and the exits 15. With data it is the copy into sealed memory, or the compare with what was
sent before; and both are as fast as memory is.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import queue
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks import (
    cells,
    data,
    gpu,
    nodes,
    plots,
    profiles,
    scale,
    scenario,
    sessions,
    streaming,
    toolkit,
    training,
    two_nodes,
)
from tests.benchmarks.contenders import BASELINE, CONTENDERS, Contender
from tests.benchmarks.patience import seconds_of, shown
from tests.conftest import LONG
from tests.gpu import gpus
from tests.kernel.harness import Kernel, running_kernel

MEASURES = {
    "2 ranks, one all_reduce": "timed(train, 2)",
    "8 ranks, one all_reduce": "timed(train, 8)",
    "a rank's death, as an error": "timed(die, 2)",
}
Times = dict[str, dict[str, list[float]]]
Part = tuple[dict[str, Any], str]
"""Figures for the JSON file, and tables."""
README = Path(__file__).with_name("README.md")


def main() -> None:
    """Measure, print or write the tables, write the JSON, draw the plots."""
    options = _options()
    parts = chosen(options.only)
    figures: dict[str, Any] = {"machine": machine()}
    for part in parts:
        try:
            found, text = PARTS[part](options)
        except queue.Empty:
            print(f"\n{part}: no table, as a kernel gave no answer in time")
            continue
        figures |= found
        print("", text, sep="\n")
        if options.write:
            README.write_text(replaced(README.read_text(), part, f"{text}\n\n({_measured()})"))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    if options.plots:
        plots.draw(figures, options.plots)


def chosen(only: list[str] | None) -> list[str]:
    """The parts to measure: those that were asked for, or all that this machine has the GPU for.

    Raises:
        SystemExit: The part on GPUs was asked for, and there is none.
    """
    if only is None:
        return [part for part in PARTS if part != "gpu" or gpus.number()]
    if "gpu" in only:
        try:
            gpus.found()
        except gpus.NoGpuError as error:
            sys.exit(f"--only gpu: {error}")
    return only


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--only", type=_parts, help=f"some of {','.join(PARTS)}; default: all")
    parser.add_argument("--rounds", type=int, default=11, help="measurements of each launch; the median counts")
    parser.add_argument("--lines", type=int, default=100_000, help="lines that each of two ranks prints")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs, not how fast")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {README.name} beside this file")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    parser.add_argument("--plots", type=Path, help="draw figures into this folder")
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    named = text.split(",")
    if unknown := set(named) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    return named


def replaced(text: str, part: str, tables: str) -> str:
    """The text with these tables between the markers of a part.

    Raises:
        ValueError: The text has no such markers.
    """
    begin, end = f"<!-- {part} -->\n", f"<!-- end of {part} -->\n"
    if not (begin in text and end in text):
        raise ValueError(f"no line {begin.strip()} and {end.strip()}")
    return re.sub(f"(?s){begin}.*{end}", lambda _: f"{begin}{tables}\n{end}", text)


def _measured() -> str:
    return f"Measured on {datetime.date.today()}: {machine()}"


def _launch(options: argparse.Namespace) -> Part:
    times = measure(1 if options.quick else options.rounds)
    loading = import_time()
    return {"seconds": times, "import": loading}, table(times, loading)


def _cells(options: argparse.Namespace) -> Part:
    figures = cells.measure(2, 1, 0.5) if options.quick else cells.measure(4 * options.rounds, 3, 65.0)
    return {"cells": figures.as_json()}, cells.table(figures)


def _lines(options: argparse.Namespace) -> Part:
    lines = 1000 if options.quick else options.lines
    streamed = streaming.measure(lines)
    return {"lines": [asdict(s) for s in streamed]}, streaming.table(streamed, lines)


def _data(options: argparse.Namespace) -> Part:
    figures = data.measure(64 << 20, 2, 1) if options.quick else data.measure(2 << 30, 4, 3)
    return {"data": figures.as_json()}, data.table(figures)


def _scale(options: argparse.Namespace) -> Part:
    if options.quick:
        figures = scale.measure((2, 4), 1, 20_000, (2,))
    else:
        figures = scale.measure((2, 4, 8, 16, 32, 64), 5, 1_000_000, (16,))
    return {"scale": figures.as_json()}, scale.table(figures)


def _day(options: argparse.Namespace) -> Part:
    figures = scenario.measure(16 << 20, 400, 0.2) if options.quick else scenario.measure(1 << 30, 20_000, 3.0)
    return {"day": figures.as_json()}, scenario.table(figures)


def _training(options: argparse.Namespace) -> Part:
    figures = training.measure(options.quick)
    return {"training": figures.as_json()}, training.table(figures)


def _toolkit(options: argparse.Namespace) -> Part:
    figures = toolkit.measure(1, 1, 4) if options.quick else toolkit.measure(options.rounds, 50, 200)
    return {"toolkit": figures.as_json()}, toolkit.table(figures)


def _profiles(options: argparse.Namespace) -> Part:
    figures = profiles.measure(0.2, 1, 0.5, (64,)) if options.quick else profiles.measure(2.0, 5)
    return {"profiles": figures.as_json()}, profiles.table(figures)


def _sessions(options: argparse.Namespace) -> Part:
    if options.quick:
        figures = sessions.measure(1, 1 << 20, 10)
    else:
        figures = sessions.measure(10 * options.rounds, 64 << 20, 2000)
    return {"sessions": figures.as_json()}, sessions.table(figures)


def _nodes(options: argparse.Namespace) -> Part:
    figures = nodes.measure((1, 2), 1.0) if options.quick else nodes.measure((1, 4, 16, 64), 8.0)
    return {"nodes": figures.as_json()}, nodes.table(figures)


def _two_nodes(options: argparse.Namespace) -> Part:
    figures = two_nodes.measure(1, 1 << 20) if options.quick else two_nodes.measure(options.rounds, 1 << 30)
    return {"two_nodes": figures.as_json()}, two_nodes.table(figures)


def _gpu(options: argparse.Namespace) -> Part:
    figures = gpu.measure(1, 3) if options.quick else gpu.measure(min(options.rounds, 3), 50)
    return {"gpu": figures.as_json()}, gpu.table(figures)


PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {
    "launch": _launch,
    "cells": _cells,
    "sessions": _sessions,
    "data": _data,
    "scale": _scale,
    "day": _day,
    "lines": _lines,
    "training": _training,
    "toolkit": _toolkit,
    "profiles": _profiles,
    "nodes": _nodes,
    "two_nodes": _two_nodes,
    "gpu": _gpu,
}


def measure(rounds: int, contenders: Sequence[Contender] = CONTENDERS, limit: float = LONG) -> Times:
    """Seconds of each measure and contender, taken in turn so that a slow minute hits all of them.

    A contender that does not answer within `limit` seconds is given up: its seconds are infinite from then on.
    """
    times: Times = {measure: {c.name: [] for c in contenders} for measure in MEASURES}
    hung: set[str] = set()
    with contextlib.ExitStack() as stack:
        kernels: dict[str, Kernel] = {}

        def timed(contender: str, expression: str) -> float:
            seconds = math.inf if contender in hung else seconds_of(kernels[contender], expression, limit)
            if seconds == math.inf:
                hung.add(contender)
            return seconds

        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        for contender in contenders:
            # accelerate leaves files of torch's elastic agent among the temporary ones: they go with the folder
            kernels[contender.name] = stack.enter_context(running_kernel(BENCHMARK_FOLDER=folder, TMPDIR=folder))
            kernels[contender.name].run(contender.cells).check()
            timed(contender.name, "timed(train, 2)")  # the first pays for imports, everywhere
        for name, expression in MEASURES.items():
            for _ in range(rounds):
                for launcher in kernels:
                    times[name][launcher].append(timed(launcher, expression))
    return times


def import_time() -> float:
    """Seconds that ``import nblaunch`` adds to Python's start: the least of ten."""
    script = "import time; t = time.perf_counter(); import nblaunch; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
        for _ in range(10)
    ]
    return min(float(run.stdout) for run in runs)


def machine() -> str:
    """What the figures were measured on."""
    import torch

    return f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}"


def table(times: Times, loading: float) -> str:
    """The medians as a Markdown table, with the ratio to accelerate of each."""
    contenders = list(next(iter(times.values())))
    lines = [f"| median of {_rounds(times)}, seconds | {' | '.join(contenders)} |"]
    lines.append("|---" * (len(contenders) + 1) + "|")
    for measure, by_contender in times.items():
        base = statistics.median(by_contender.get(BASELINE, [math.inf]))
        cells = [shown(statistics.median(values), 3, base) for values in by_contender.values()]
        lines.append(f"| {measure} | {' | '.join(cells)} |")
    two, eight = (statistics.median(times[m]["nblaunch"]) for m in list(MEASURES)[:2])
    growth = f"nblaunch, 8 ranks / 2 ranks: {eight / two:.2f}. import nblaunch: {loading * 1000:.1f} ms."
    return "\n".join([*lines, "", f"In brackets: the ratio to {BASELINE}. {growth}"])


def _rounds(times: Times) -> int:
    return len(next(iter(next(iter(times.values())).values())))


if __name__ == "__main__":
    main()
