"""Detached runs in real kernels: several at once, in two kernels, in cells, in the debugger, over a restart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.kernel.harness import Kernel, running_kernel
from tests.kernel.test_debugger import plain

SETUP = """
import nblaunch
from pathlib import Path
from nblaunch import attach, notebook_launcher, report, runs
folder = Path({!r})
"""
TRAIN = """
def train(rank, go=folder / "go"):
    import time
    step = 0
    while not go.exists():
        report(step=step, loss=1 / (step + 1))
        step += 1
        time.sleep(0.05)
    return rank + 10
"""
STARTS = "{0} = notebook_launcher(train, num_processes=2, detach='{0}')".format
END_ALL = """
for run in runs():
    if run.is_detached and not run.is_over:
        attach(run.name, view="none").kill()
    if run.is_detached:
        attach(run.name, view="none").wait()
        nblaunch.launch.run_folders.remove(run.name)
"""


@pytest.fixture(scope="module")
def other(shared_kernel: Kernel) -> Iterator[Kernel]:
    """The kernel of another notebook, with the same state directory."""
    with running_kernel(**_env(shared_kernel), JPY_SESSION_NAME="b.ipynb") as kernel:
        yield kernel


def _env(kernel: Kernel) -> dict[str, str]:
    state = kernel.ask("__import__('os').environ['NBLAUNCH_STATE_DIR']")
    return {"NBLAUNCH_STATE_DIR": state, "NBLAUNCH_WARM_UP": "0", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def _ready(kernel: Kernel, other: Kernel, folder: Path) -> Iterator[None]:
    """Both kernels know the folder; afterwards no run is left."""
    for each in (kernel, other):
        each.run(SETUP.format(str(folder)) + TRAIN).check()
    yield
    kernel.run(END_ALL).check()


def test_three_runs_at_once_belong_to_no_kernel(kernel: Kernel, other: Kernel, folder: Path) -> None:
    names = ["one", "two", "three"]
    for name in names:
        kernel.run(STARTS(name)).check()
        other.run(f"{name} = attach({name!r})").check()
    states = "[(run.state, *run.metrics) for run in runs() if run.is_detached]"
    for each in (kernel, other):  # neither is busy
        eventually(lambda: each.ask(states) == [("running", "loss")] * 3)  # noqa: B023  # called at once
        status = each.run("%load_ext nblaunch\n%distributed status").check().text
        assert re.findall(r"<Launch (\w+) of train: 2 ranks, running for \d+ s>", status) == sorted(names)
    kernel.run("%distributed stop").check()
    assert kernel.ask("one.done") is False
    cell = other.run("two.stop(); two.wait(); two").check()
    assert cell.value == "<Launch two of train: 2 ranks, stopped>"
    assert re.match("LaunchStoppedError: train was stopped after", kernel.run("two.result()").error)

    waiting = kernel.start_cell("print('waits')\none.result()")
    kernel.finish_cell(waiting, until="waits")
    kernel.interrupt()
    interrupted = kernel.finish_cell(waiting)
    assert interrupted.error == "KeyboardInterrupt: the run one goes on: stop() stops it"
    assert "handle.py" not in interrupted.traceback
    assert other.ask("one.done") is False
    (folder / "go").touch()
    for each in (kernel, other):
        assert each.ask("[list(run.result()) for run in (one, three)]") == [[10, 11]] * 2
    table = kernel.run("runs()").check()
    html = next(each["content"]["data"]["text/html"] for each in table.messages if each["msg_type"] == "execute_result")
    for said in (*names, "finished", "stopped", "loss 0."):
        assert f">{said}" in html


def test_a_cell_can_be_detached(kernel: Kernel) -> None:
    kernel.run("%%distributed -n 2 --detach named -o values\nprint('from', rank)\nrank + 5").check()
    kernel.run("%%distributed -n 1 --detach\nrank").check()  # its name is the cell's
    assert kernel.ask("list(values.result()), values.result().logs[1].out.read_text()") == ([5, 6], "from 1\n")
    named = kernel.ask("[(run.name, list(attach(run.name).result())) for run in runs() if run.is_detached]")
    assert re.fullmatch(r"Cell-In-\d+-\d{8}-\d{6}", named[0][0])
    assert [values for _, values in named] == [[0], [5, 6]]
    again = kernel.run("%%distributed -n 2 --detach named\nrank").text
    assert re.search(r"--detach 'named': the name is in use by a run of Cell In\[\d+\] from .* \(finished\)", again)
    kernel.run("%distributed session -n 1").check()
    try:
        refused = kernel.run("%%distributed --detach more\nrank").text
        assert "--detach: session main keeps its ranks: add --fresh for new ones" in refused
    finally:
        kernel.run("%distributed session stop").check()


def test_a_restarted_kernel_is_told_once_of_what_ended_meanwhile(kernel: Kernel, folder: Path) -> None:
    with running_kernel(**_env(kernel), JPY_SESSION_NAME="c.ipynb") as restarted:
        restarted.run(SETUP.format(str(folder)) + TRAIN + STARTS("nightly")).check()
        restarted.end()
        (folder / "go").touch()
        eventually(lambda: kernel.ask("runs()[0].state") == "finished")
        restarted.restart()
        told = "nblaunch: while no page showed it, run nightly finished: nblaunch.attach('nightly') shows it here\n"
        assert restarted.run("from nblaunch import attach").check().text == told
        assert restarted.run("1").check().text == ""
        assert restarted.ask("list(attach('nightly', view='none').result())") == [10, 11]


STOPS = """
def stops(rank):
    x = rank * 7
    if rank == 1:
        breakpoint()
    return x
stopping = notebook_launcher(stops, num_processes=2, detach='stopping', on_breakpoint='wait')
"""


def test_a_breakpoint_waits_for_who_attaches_and_types(kernel: Kernel, other: Kernel) -> None:
    begin = kernel.start_cell(STOPS)
    kernel.finish_cell(begin).check()
    noted = kernel.follow_cell(begin, ": to type there, call wait() or result(), or run %distributed debug")
    assert "rank 1 stopped at a breakpoint" in noted.text
    cell = other.debug("print(list(attach('stopping').result()))", "p x", "c").check()
    assert cell.prompts == ["(rank 1 of 2) "] * 2
    assert "\n7\n" in plain(cell)
    assert "[0, 7]" in cell.text
    assert kernel.ask("list(stopping.result())") == [0, 7]
    assert (
        kernel.ask("'to debug' in (runs()[0].path / 'events.jsonl').read_text()") is False
    )  # each notes it for itself
