"""Many printed lines from two ranks: how long the launch takes, and what it costs the notebook's server and page.

Each way runs in a real kernel of its own. The client here counts what a server would have to pass on: every message on
iopub and its bytes, while the cell runs and until nothing has come for two seconds.
"""

from __future__ import annotations

import json
import queue
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from tests.kernel.harness import Kernel, running_kernel

_QUIET = 2.0
_LIMIT = 60.0
"""Seconds after which a way is stopped: what it has printed until then counts."""

_LINE = "lr 0.001"
"""The end of each line."""
_PRINTS = """
import os, time

def noisy(lines):
    rank = os.environ.get("RANK", "0")
    for number in range(lines):
        print(f"rank {rank} line {number:07d}: loss 0.123456 accuracy 0.987654 lr 0.001")

def silent(lines):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    noisy(lines)
"""
_NBLAUNCH = """
%load_ext nblaunch
from nblaunch import notebook_launcher

def launch(function, lines):
    notebook_launcher(function, args=(lines,), num_processes=2, device="cpu", start_method="forkserver")
launch(noisy, 0)  # prints nothing: what a panel still sends of it must not count as lines of the next
"""
_ACCELERATE = """
from accelerate import notebook_launcher

def launch(function, lines):
    notebook_launcher(function, args=(lines,), num_processes=2, use_port="29512")
launch(noisy, 0)  # prints nothing: what a panel still sends of it must not count as lines of the next
"""


@dataclass(frozen=True)
class Streamed:
    """What one way took."""

    name: str
    seconds: float
    """Of the cell; infinite where it was stopped."""
    until_quiet: float
    """Until the last message had come."""
    lines: int
    """That the client received."""
    messages: int
    size: int
    busiest_second: tuple[int, int]
    """The most messages, and the most bytes, in one second."""


def measure(lines: int) -> list[Streamed]:
    """Each way with so many lines a rank."""
    ways: dict[str, tuple[dict[str, str], str, str]] = {
        "nblaunch, to /dev/null": ({"NBLAUNCH_VIEW": "auto"}, _NBLAUNCH, "silent"),
        "nblaunch, panel": ({"NBLAUNCH_VIEW": "auto"}, _NBLAUNCH, "noisy"),
        "nblaunch, text": ({"NBLAUNCH_VIEW": "text"}, _NBLAUNCH, "noisy"),
        "accelerate (fork)": ({}, _ACCELERATE, "noisy"),
    }
    streamed = []
    for name, (environment, setup, function) in ways.items():
        with tempfile.TemporaryDirectory() as folder, running_kernel(**environment, TMPDIR=folder) as kernel:
            kernel.run(_PRINTS + setup).check()
            streamed.append(_watch(kernel, name, f"launch({function}, {lines})"))
    return streamed


def _watch(kernel: Kernel, name: str, code: str) -> Streamed:
    arrivals: list[tuple[float, int]] = []
    lines = 0
    begin = time.monotonic()
    request = kernel.client.execute(code)
    seconds, last = float("inf"), begin
    while (now := time.monotonic()) - last < _QUIET or seconds == float("inf"):
        if seconds == float("inf") and now - begin > _LIMIT:
            break
        try:
            message = kernel.client.get_iopub_msg(timeout=0.2)
        except queue.Empty:
            continue
        last = time.monotonic()
        content = message["content"]
        if message["msg_type"] == "status" and message["parent_header"].get("msg_id") == request:
            seconds = last - begin if content["execution_state"] == "idle" else seconds
            continue
        arrivals.append((last - begin, len(json.dumps(content)) + sum(map(len, message["buffers"]))))
        lines += _lines_in(content.get("text", "") if message["msg_type"] == "stream" else content)
    return Streamed(
        name,
        seconds,
        arrivals[-1][0] if arrivals else 0.0,
        lines,
        len(arrivals),
        sum(size for _, size in arrivals),
        _busiest(arrivals),
    )


def _lines_in(content: Any) -> int:
    """Count the printed lines of a message: in text, or in a panel's entries of one line each."""
    if isinstance(content, dict):
        content = [*content.values()]
    if isinstance(content, list):
        return sum(map(_lines_in, content))
    return content.count(f"{_LINE}\n") or content.endswith(_LINE) if isinstance(content, str) else 0


def _busiest(arrivals: list[tuple[float, int]]) -> tuple[int, int]:
    """The most messages and the most bytes in one second, at the panel's steady state: its opening is left out."""
    most_messages = most_bytes = 0
    for begin, _ in arrivals:
        within = [size for at, size in arrivals if begin <= at < begin + 1 and size < 90_000]
        most_messages, most_bytes = max(most_messages, len(within)), max(most_bytes, sum(within))
        if len(arrivals) > 5000:
            break  # far beyond what a server passes on
    return most_messages, most_bytes


def table(streamed: list[Streamed], lines: int) -> str:
    """The figures as a Markdown table."""
    rows = [
        f"| 2 × {lines:,} lines | cell, s | until quiet, s | lines received | messages | MB "
        "| most messages, KB in a second |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in streamed:
        seconds = f"{way.seconds:.2f}" if way.seconds != float("inf") else f"stopped after {_LIMIT:.0f}"
        messages, size = way.busiest_second
        rows.append(
            f"| {way.name} | {seconds} | {way.until_quiet:.1f} | {way.lines:,} | {way.messages:,} "
            f"| {way.size / 1e6:.2f} | {messages}, {size / 1024:.0f} |"
        )
    return "\n".join(rows)
