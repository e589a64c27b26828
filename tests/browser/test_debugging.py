"""Debugging in a real JupyterLab or Notebook in Chromium: the cell's box, and what stuck ranks offer."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator

from tests.browser.cells import GRACE
from tests.browser.conftest import NOTEBOOK, Lab, keep_picture
from tests.conftest import LONG, eventually
from tests.kernel.test_readme import REFERENCE, blocks

STOPS = """
import torch
def train(rank):
    weights = torch.ones(3) * (rank + 1)
    weird = "value"
    if rank == 1:
        breakpoint()
    print("done", flush=True)
    return float(weights.sum())
"""
EMPTY = "all => all.length === 1 && !all[0].value"


def box(lab: Lab) -> Locator:
    """The input box of the cell."""
    return lab.page.locator(".jp-Stdin-input:visible")


def enter(lab: Lab, text: str) -> None:
    box(lab).fill(text)
    box(lab).press("Enter")


@pytest.mark.parametrize("served", [NOTEBOOK], ids=["notebook"], indirect=True)
def test_a_background_launch_says_what_brings_the_prompt(fresh_lab: Lab) -> None:
    lab = fresh_lab
    go = lab.folder / "debug.go"
    debug = f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n%distributed debug"
    lab.run(STOPS + "launch = notebook_launcher(train, num_processes=2, block=False)", debug)
    lab.panel.locator(".nbl-rank-state", has_text="waiting for you").wait_for()
    lab.panel.locator(".nbl-note", has_text="or run %distributed debug").wait_for()
    go.touch()
    keep_picture(lab.page, f"panel-debugger-{lab.app}.png")
    box(lab).wait_for()
    enter(lab, "p weights")
    lab.output("tensor([2., 2., 2.])").first.wait_for()
    eventually(lambda: box(lab).evaluate_all(EMPTY))
    enter(lab, "c")
    lab.wait_for_state("finished")
    lab.log_says("[rank 1] done")


def test_stop_ends_a_cell_that_waits_for_a_line(lab: Lab) -> None:
    lab.run(STOPS + "notebook_launcher(train, num_processes=2)[1]")
    box(lab).wait_for()
    lab.panel.locator(".nbl-pill", has_text="Waiting for you: rank 1").wait_for()
    lab.button("Stop").click()
    lab.wait_for_state("stopped")
    lab.output("KeyboardInterrupt").first.wait_for()


@pytest.mark.parametrize("size", [(1200, 1040)])
def test_the_readmes_cell_is_debugged_in_its_own_box(lab: Lab) -> None:
    (cell,) = [block for block in blocks("python", REFERENCE) if "breakpoint()" in block]
    lab.run("import torch\nimport torch.distributed as dist", cell.rstrip())
    typed = {"all p loss": "rank 1: tensor(nan)", "rank 0": "rank 0 is running", "p rank, loss": "(0, tensor(0.7000))"}
    for text, answer in {**typed, "q": "", "c": ""}.items():
        eventually(lambda: box(lab).evaluate_all(EMPTY))  # an answered one stays a while
        if text == "q":
            lab.page.locator(".jp-CodeCell").nth(2).evaluate("cell => cell.scrollIntoView({block: 'start'})")
            keep_picture(lab.page, "debugging.png")
        enter(lab, text)
        lab.output(answer).first.wait_for()
    lab.wait_for_state("finished")


def test_a_stuck_rank_is_debugged_and_stopped_from_the_banner(lab: Lab) -> None:
    stuck = f"""
import torch.distributed as dist
from nblaunch.machine import timeouts
timeouts.STUCK_AFTER_S = 1.0
def waits(rank):
    import time
    late = "not yet"
    if rank == 1:
        while True:
            time.sleep(0.1)
    dist.barrier()
notebook_launcher(waits, num_processes=2, stop_grace={GRACE})
"""
    lab.run(stuck)
    lab.panel.locator(".nbl-stuck", has_text="rank 1 has started 0 of 1").wait_for(timeout=LONG * 1000)
    keep_picture(lab.page, "panel-stuck.png")
    lab.button("Debug rank 1").click()
    box(lab).wait_for()
    enter(lab, "p late")
    lab.output("'not yet'").first.wait_for()
    keep_picture(lab.page, "panel-look.png")
    lab.panel.locator(".nbl-stuck").get_by_role("button", name="Stop").click()
    lab.wait_for_state("stopped")
    assert not lab.panel.locator(".nbl-stuck").is_visible()
    lab.server.end_kernels()  # the numbers of the next file's cells begin at 1
