"""Live output: during the cell, below Jupyter's rate limits, and in the right cell."""

from __future__ import annotations

import re
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from tests.kernel.harness import Cell, Kernel

LINES = 100_000
"""Of each of two ranks."""
MESSAGES_A_SECOND = 10
BYTES_A_SECOND = 256_000
GO = "while not (folder / 'go').exists(): time.sleep(0.02)\n"
WAIT = f"import time\n{GO}"


def streams(cell: Cell) -> list[tuple[datetime, str]]:
    """When each stream message was sent, and its text."""
    return [(m["header"]["date"], m["content"]["text"]) for m in cell.messages if m["msg_type"] == "stream"]


def busiest_second(messages: list[tuple[datetime, str]]) -> tuple[int, int]:
    """The most messages and the most bytes in any second."""
    most_messages = most_bytes = 0
    for begin, _ in messages:
        within = [text for when, text in messages if 0 <= (when - begin).total_seconds() < 1]
        most_messages = max(most_messages, len(within))
        most_bytes = max(most_bytes, sum(len(text.encode()) for text in within))
    return most_messages, most_bytes


# ------------------------------------------------------------------ live
def test_lines_arrive_while_the_cell_runs(kernel: Kernel, folder: Path) -> None:
    request = kernel.start_cell(f"%%distributed -n 2\nprint('first of', rank)\n{WAIT}print('last of', rank)")

    for rank in range(2):
        kernel.finish_cell(request, until=f"[rank {rank}] first of {rank}\n")
    assert not kernel.cells[request].idle
    (folder / "go").touch()

    cell = kernel.finish_cell(request).check()
    lines = [line for line in cell.stdout.splitlines() if line.startswith("[rank")]  # a busy machine may cause a note
    assert sorted(lines[:2]) == ["[rank 0] first of 0", "[rank 1] first of 1"]
    assert {"[rank 0] last of 0", "[rank 1] last of 1"} <= set(lines)


def test_reports_and_progress_arrive_while_the_cell_runs(kernel: Kernel, folder: Path) -> None:
    source = f"nblaunch.report(step=1, loss=0.25)\nfor _ in nblaunch.progress([1, 2], desc='load'):\n    {GO}"
    request = kernel.start_cell(f"%%distributed -n 2\nimport nblaunch, time\n{source}")

    cell = kernel.finish_cell(request, until="loss 0.25")
    kernel.finish_cell(request, until="load: 0/2")
    assert not cell.idle
    (folder / "go").touch()
    kernel.finish_cell(request).check()


def test_a_progress_bar_moves_in_place(kernel: Kernel, folder: Path) -> None:
    source = (
        f"from tqdm import tqdm\nfor i in tqdm(range(4), desc='epoch', mininterval=0):\n    if i == 2:\n        {GO}"
    )
    request = kernel.start_cell(f"%%distributed -n 2 -o bars\nimport time\n{source}")

    cell = kernel.finish_cell(request, until="50%")
    assert not cell.idle
    (folder / "go").touch()

    cell = kernel.finish_cell(request).check()
    assert re.search(r"\[rank 1\] epoch: 100%\|.*\| 4/4", cell.text)
    assert kernel.ask("'100%' in bars.logs[1].err.read_text()")


def test_children_and_c_code_are_shown_too(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%distributed -n 2\nimport os\nos.system('echo from a child')\nos.write(2, b'from the fd\\n');"
    ).check()

    assert "[rank 1] from a child" in cell.stdout
    assert "[rank 1] from the fd" in cell.stderr


# ------------------------------------------------------------------ a flood
@pytest.fixture(scope="module")
def flood(shared_kernel: Kernel) -> Cell:
    """A cell in which two ranks print very many lines, over seconds."""
    source = (
        f"for i in range({LINES}):\n    print(f'line {{i:06d}} of rank {{rank}}')\n"
        "    if i % 1000 == 0: time.sleep(0.03)  # 3 s in all"
    )
    return shared_kernel.run(f"%%distributed -n 2 -o flood\nimport time\n{source}").check()


def test_a_flood_stays_below_jupyters_limits(flood: Cell) -> None:
    messages, size = busiest_second(streams(flood))

    assert messages <= MESSAGES_A_SECOND
    assert size <= BYTES_A_SECOND


def test_a_flood_is_whole_in_the_files(kernel: Kernel, flood: Cell) -> None:
    expected = f"[[f'line {{i:06d}} of rank {{rank}}' for i in range({LINES})] for rank in range(2)]"
    assert kernel.ask(f"[log.text().splitlines() for log in flood.logs] == {expected}")


# ------------------------------------------------------------------ a busy kernel
def test_a_kernel_that_holds_the_gil_does_not_stall_a_rank(kernel: Kernel, folder: Path) -> None:
    """In the seconds in which no thread of the kernel can run, a rank prints much more than a pipe holds."""
    kernel.run(
        "%%distributed -n 1 --background -o job\nimport time\ntimes = []\n"
        "while not (folder / 'go').exists():\n    print('x' * 4000)\n    times.append(time.monotonic())\n"
        "    (folder / 'printing').touch()\n    time.sleep(0.005)\ntimes"
    ).check()
    kernel.run("import time\nwhile not (folder / 'printing').exists(): time.sleep(0.02)").check()

    kernel.run(
        "begun = time.monotonic()\nsum(range(10**8))\nheld = (begun, time.monotonic())\n(folder / 'go').touch()"
    ).check()

    times: list[float] = kernel.ask("job.result()[0]")
    begin, end = kernel.ask("held")
    during = [begin, *(t for t in times if begin < t < end), end]
    assert end - begin > 1.0
    assert len(during) * 4000 > 1 << 17
    assert max(b - a for a, b in pairwise(during)) < (end - begin) / 2


# ------------------------------------------------------------------ the right place
def test_background_output_arrives_in_the_cell_that_launched_it(kernel: Kernel, folder: Path) -> None:
    request = kernel.start_cell(f"%%distributed -n 2 --background -o job\n{WAIT}print('late')")
    kernel.finish_cell(request).check()
    (folder / "go").touch()

    other = kernel.run("job.wait()\nprint('of another cell')").check()

    first = kernel.follow_cell(request, until="[rank 1] late")
    assert "late" not in other.text
    assert "of another cell" not in first.text
