"""`%distributed stacks` and `Launch.stacks` in a real kernel: cells by their names, also while a cell blocks."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import eventually
from tests.kernel.harness import Kernel

TRAIN = """\
import time
def train(rank):
    leave = folder / "leave"
    while not leave.exists():
        time.sleep(0.02); (folder / f"ready{rank}").touch()
"""
"""It says that it is in its loop from a line of the loop."""


def ready(folder: Path) -> bool:
    return all((folder / f"ready{rank}").exists() for rank in range(2))


def shown(kernel: Kernel) -> str:
    return kernel.run("%distributed stacks").check().stdout


def test_stacks_lists_where_each_rank_of_each_launch_is(kernel: Kernel, folder: Path) -> None:
    kernel.run(TRAIN).check()
    kernel.run("job = notebook_launcher(train, num_processes=2, block=False, view='none')").check()
    eventually(lambda: ready(folder))

    texts: list[str] = []

    def have_answered() -> bool:  # a rank has 2 s to do so
        texts.append(shown(kernel))
        return texts[-1].count(", in train\n") == 2

    eventually(have_answered)
    text = texts[-1]

    assert re.match(r"<Launch .* of train: 2 ranks, running for \d+ s>\n", text)
    for rank in range(2):
        assert re.search(
            rf"\n\nrank {rank}\n  Main thread \(most recent call last\):\n"
            r"    Cell In\[\d+\], line [45], in train\n      (while not|time\.sleep\(0\.02\))",
            text,
        )
    assert "nblaunch" not in text
    (folder / "leave").touch()
    kernel.run("job.result()").check()
    assert shown(kernel) == "no launch is running\n"


def test_a_cell_that_blocks_can_be_asked_from_another_thread(kernel: Kernel, folder: Path) -> None:
    """As a kernel's subshell does, where the panel's messages come."""
    kernel.run(
        "import threading, time\n"
        "from nblaunch.launch.handle import live_launches\n"
        "def ask():\n"
        "    while not all((folder / f'ready{rank}').exists() for rank in range(2)): time.sleep(0.02)\n"
        "    found.update(live_launches()[0].stacks(60))\n"
        "    (folder / 'leave').touch()\n"
        "found = {}\n"
        "threading.Thread(target=ask, daemon=True).start()"
    ).check()

    body = "import time\nwhile not (folder / 'leave').exists(): time.sleep(0.02); (folder / f'ready{rank}').touch()"
    kernel.run(f"%%distributed -n 2 --view none\n{body}").check()

    found = kernel.ask("found")
    assert sorted(found) == [0, 1]
    assert all(re.search(r"\n  Cell In\[\d+\], line 3, in <module>\n    while not", text) for text in found.values())


def test_a_timeout_names_the_cells_line(kernel: Kernel, folder: Path) -> None:
    with kernel.changed("nblaunch.machine.timeouts", "TIMEOUT_STACKS_S", 60.0):
        cell = kernel.run("%%distributed -n 2 --timeout 6\nimport time\ntime.sleep(600)")
    places = r"(\n    rank \d was in Cell In\[\d+\], line 3: time\.sleep\(600\)){2}\nLogs: "
    assert re.match(
        rf"LaunchTimeoutError: Cell In\[\d+\] took longer than timeout=6 s and was stopped\.{places}", cell.error
    )


def test_a_cell_that_is_stuck_in_c_can_be_stopped_after_it_was_asked(kernel: Kernel, folder: Path) -> None:
    source = (
        "%%distributed -n 2 --background -o job --view none\nimport ctypes\n(folder / f'ready{rank}').touch()\n"
        "mutex = ctypes.create_string_buffer(64)\nlibc = ctypes.PyDLL(None)\n"
        "for _ in range(2): libc.pthread_mutex_lock(mutex)"
    )
    kernel.run(source).check()
    eventually(lambda: ready(folder))

    eventually(lambda: shown(kernel).count("libc.pthread_mutex_lock(mutex)") == 2)
    assert kernel.run("%distributed stop").check().stdout == "stopped 1 launch\n"
