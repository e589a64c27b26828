"""Interrupting and restarting a real kernel during a launch."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LONG, eventually, marked_processes
from tests.kernel.harness import Kernel, running_kernel

END_LIMIT = 25.0
"""Seconds within which ranks have ended that do not cooperate: five times what is promised, as other tests run too."""
CHECKPOINT = """
import os, time
def train(rank, seconds):
    (folder / f'pid{rank}').write_text(str(os.getpid()))
    interrupts = 0
    try:
        print('training')
        time.sleep(600)
    except KeyboardInterrupt:
        interrupts += 1
        raise
    finally:
        (folder / f'begun{rank}').touch()
        time.sleep(seconds)
        (folder / f'checkpoint{rank}').write_text(str(interrupts))
"""


@pytest.fixture(autouse=True)
def _trained(kernel: Kernel, folder: Path) -> None:
    """A function `train` in the kernel that writes a checkpoint in `finally`."""
    kernel.run(CHECKPOINT).check()


def start_training(kernel: Kernel, seconds: float, **options: object) -> str:
    """Begin a cell that trains, with a checkpoint of so many seconds; come back when both ranks are at it."""
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    request = kernel.start_cell(f"notebook_launcher(train, kwargs={{'seconds': {seconds}}}, num_processes=2{given})")
    for rank in range(2):
        kernel.finish_cell(request, until=f"[rank {rank}] training")
    return request


def ranks_are_gone(folder: Path) -> bool:
    return not any(Path(f"/proc/{file.read_text()}").exists() for file in folder.glob("pid*"))


def test_an_interrupt_ends_the_ranks_and_leaves_the_kernel_usable(kernel: Kernel, folder: Path) -> None:
    request = start_training(kernel, 0.0)

    kernel.interrupt()

    cell = kernel.finish_cell(request, END_LIMIT)
    assert cell.error.startswith("KeyboardInterrupt: train was stopped after ")
    assert ranks_are_gone(folder)
    assert kernel.run("notebook_launcher(lambda rank: rank, num_processes=2)[1]").check().value == "1"


def test_a_checkpoint_completes_while_the_countdown_is_shown(kernel: Kernel, folder: Path) -> None:
    request = start_training(kernel, 4.0)

    kernel.interrupt()

    cell = kernel.finish_cell(request)
    assert cell.error.startswith("KeyboardInterrupt")
    assert "s left for checkpoints; interrupt again to kill now" in cell.stdout
    assert [(folder / f"checkpoint{rank}").read_text() for rank in range(2)] == ["1", "1"]


def test_a_second_interrupt_kills_now(kernel: Kernel, folder: Path) -> None:
    request = start_training(kernel, LONG)
    kernel.interrupt()
    eventually(lambda: all((folder / f"begun{rank}").exists() for rank in range(2)))

    kernel.interrupt()

    cell = kernel.finish_cell(request, END_LIMIT)
    assert cell.error.startswith("KeyboardInterrupt")
    assert ranks_are_gone(folder)
    assert not (folder / "checkpoint0").exists()


def test_an_interrupted_distributed_cell_does_not_bind_its_output(kernel: Kernel, folder: Path) -> None:
    request = kernel.start_cell("%%distributed -n 2 -o never\nprint('at it')\nimport time\ntime.sleep(600)")
    kernel.finish_cell(request, until="[rank 1] at it")

    kernel.interrupt()

    assert kernel.finish_cell(request, END_LIMIT).error.startswith("KeyboardInterrupt")
    assert not kernel.ask("'never' in globals()")


def test_a_cell_can_catch_the_interrupt_and_has_what_was_returned(kernel: Kernel, folder: Path) -> None:
    request = kernel.start_cell(
        "def uneven(rank):\n    (folder / f'pid{rank}').write_text(str(os.getpid()))\n"
        "    if rank == 1: print('waits'); time.sleep(600)\n    return 'early'\n"
        "try:\n    notebook_launcher(uneven, num_processes=2)\n"
        "except KeyboardInterrupt as interrupt:\n    print('caught', interrupt.results)"
    )
    kernel.finish_cell(request, until="[rank 1] waits")
    pid = folder / "pid0"
    eventually(lambda: pid.exists() and pid.read_text() and not Path(f"/proc/{pid.read_text()}").exists())

    kernel.interrupt()

    assert "caught {0: 'early'}" in kernel.finish_cell(request).check().stdout


def test_an_interrupt_leaves_a_background_launch_alone(kernel: Kernel, folder: Path) -> None:
    kernel.run(
        "%%distributed -n 2 --background -o job\nimport time\n(folder / f'up{rank}').touch()\n"
        "while not (folder / 'go').exists(): time.sleep(0.02)\nrank"
    ).check()
    eventually(lambda: (folder / "up0").exists() and (folder / "up1").exists())
    request = kernel.start_cell("print('waiting')\njob.wait()")
    kernel.finish_cell(request, until="waiting")

    kernel.interrupt()

    assert kernel.finish_cell(request).error.startswith("KeyboardInterrupt")
    (folder / "go").touch()
    assert kernel.ask("list(job.result())") == [0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_an_interrupt_at_any_moment_of_the_start_leaves_no_rank(kernel: Kernel, folder: Path, seed: int) -> None:
    """Whatever the moment hits, the cell ends with KeyboardInterrupt and nothing runs on."""
    before = marked_processes()
    request = kernel.start_cell("print('begin')\nnotebook_launcher(train, kwargs={'seconds': 0.0}, num_processes=2)")
    kernel.finish_cell(request, until="begin")
    time.sleep(random.Random(seed).uniform(0.0, 0.3))  # not to wait for anything: the moment is what is tested

    kernel.interrupt()

    assert kernel.finish_cell(request, 30.0).error.startswith("KeyboardInterrupt")
    eventually(lambda: marked_processes() <= before, END_LIMIT)
    assert kernel.ask("__import__('nblaunch.launch.handle', fromlist=['live_launches']).live_launches()") == []


# ------------------------------------------------------------------ restart
@pytest.fixture
def own_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel that a test may restart."""
    with running_kernel(CUDA_VISIBLE_DEVICES="", NBLAUNCH_STATE_DIR=str(tmp_path / "state")) as kernel:
        kernel.run(prelude(tmp_path)).check()
        yield kernel


def prelude(folder: Path) -> str:
    imports = "%load_ext nblaunch\nfrom nblaunch import notebook_launcher\nfrom pathlib import Path\n"
    return f"{imports}folder = Path({str(folder)!r})"


def test_a_kernel_restart_kills_the_ranks_and_launches_work_again(own_kernel: Kernel, tmp_path: Path) -> None:
    own_kernel.run(CHECKPOINT).check()
    start_training(own_kernel, LONG)

    own_kernel.restart()

    eventually(lambda: ranks_are_gone(tmp_path), 27.0)
    own_kernel.run(prelude(tmp_path)).check()
    assert own_kernel.run("notebook_launcher(lambda rank: rank, num_processes=2)[1]").check().value == "1"


def test_an_interrupt_ends_the_cell_although_the_ranks_return(kernel: Kernel) -> None:
    """Or Stop could not end a loop of launches."""
    kernel.run(
        "def saves(rank):\n    import time\n    try:\n        print('waiting')\n        time.sleep(600)\n"
        "    except KeyboardInterrupt:\n        return f'saved {rank}'\n"
    ).check()
    request = kernel.start_cell(
        "for i in range(2):\n    print('loop', i)\n    notebook_launcher(saves, num_processes=2)"
    )
    for rank in range(2):
        kernel.finish_cell(request, until=f"[rank {rank}] waiting")

    kernel.interrupt()

    cell = kernel.finish_cell(request, LONG)
    assert cell.error.startswith("KeyboardInterrupt: saves was interrupted, but every rank returned")
    assert "loop 1" not in cell.stdout
    assert kernel.ask("__import__('sys').last_value.results") == {0: "saved 0", 1: "saved 1"}
