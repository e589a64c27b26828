"""Debugging in the panel of a real JupyterLab in Chromium: the console, and what stuck ranks offer."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator

from tests.browser.cells import GRACE
from tests.browser.conftest import LAB, NOTEBOOK, Lab, keep_picture
from tests.conftest import LONG, eventually
from tests.kernel.test_readme import blocks

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
BOX = ".jp-Stdin-input"


def line(lab: Lab) -> Locator:
    """The line that waits to be typed."""
    return lab.panel.locator(".nbl-debug-input:not([readonly])")


def says(lab: Lab, text: str) -> None:
    lab.panel.locator(".nbl-debug-screen", has_text=text).wait_for()


def enter(lab: Lab, text: str) -> None:
    line(lab).fill(text)
    line(lab).press("Enter")


@pytest.mark.parametrize("served", [LAB, NOTEBOOK], ids=["lab", "notebook"], indirect=True)
def test_a_background_launch_is_debugged_across_a_reload(fresh_lab: Lab) -> None:
    lab = fresh_lab
    lab.run(STOPS + "launch = notebook_launcher(train, num_processes=2, block=False)")
    line(lab).wait_for()
    enter(lab, "p weights")
    says(lab, "tensor([2., 2., 2.])")
    line(lab).type("p we")
    line(lab).press("Tab")
    lab.panel.get_by_role("button", name="weights").wait_for()
    keep_picture(lab.page, f"panel-debugger-{lab.app}.png")
    line(lab).type("r")
    line(lab).press("Tab")
    eventually(lambda: line(lab).input_value() == "p weird")
    line(lab).press("Enter")
    says(lab, "'value'")
    line(lab).press("ArrowUp")
    line(lab).press("ArrowUp")
    assert line(lab).input_value() == "p weights"
    lab.panel.locator(".nbl-name").click()
    lab.save_and_reload()
    says(lab, "tensor([2., 2., 2.])")
    enter(lab, "c")
    lab.wait_for_state("finished")
    lab.log_says("[rank 1] done")


def box(lab: Lab) -> Locator:
    """The input box of the cell."""
    return lab.page.locator(f"{BOX}:visible")


def test_the_cells_box_and_the_panel_take_turns_also_after_a_reload(lab: Lab) -> None:
    lab.run(STOPS + "notebook_launcher(train, num_processes=2)[1]")
    line(lab).wait_for()
    box(lab).fill("p weird")
    box(lab).press("Enter")
    lab.page.locator(".jp-OutputArea-output", has_text="'value'").first.wait_for()
    says(lab, "'value'")
    line(lab).wait_for()
    eventually(lambda: box(lab).count() == 1)  # the first one goes
    keep_picture(lab.page, "panel-debugger-box.png")
    lab.panel.locator(".nbl-name").click()
    lab.save_and_reload()
    says(lab, "'value'")
    enter(lab, "p weights")
    says(lab, "tensor([2., 2., 2.])")
    assert box(lab).count() == 0
    enter(lab, "c")
    lab.wait_for_state("finished")
    assert box(lab).count() == 0


@pytest.mark.parametrize("size", [(1200, 1040)])
def test_the_readmes_cell_is_debugged_in_its_own_box(lab: Lab) -> None:
    (cell,) = [block for block in blocks("python") if "breakpoint()" in block]
    box = lab.page.locator(f"{BOX}:visible")
    lab.run("import torch\nimport torch.distributed as dist", cell.rstrip())
    typed = {"all p loss": "rank 1: tensor(nan)", "rank 0": "rank 0 runs on", "p rank, loss": "(0, tensor(0.7000))"}
    for text, answer in {**typed, "q": "", "c": ""}.items():
        eventually(
            lambda: box.evaluate_all("all => all.length === 1 && !all[0].value")
        )  # an answered one stays a while
        if text == "q":
            lab.page.locator(".jp-CodeCell").nth(2).evaluate("cell => cell.scrollIntoView({block: 'start'})")
            keep_picture(lab.page, "debugging.png")
        box.fill(text)
        box.press("Enter")
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
    lab.panel.locator(".nbl-stuck", has_text="rank 1 has begun 0 of 1").wait_for(timeout=LONG * 1000)
    keep_picture(lab.page, "panel-stuck.png")
    lab.button("Debug rank 1").click()
    line(lab).wait_for()
    eventually(lambda: line(lab).evaluate("input => input === document.activeElement"))
    enter(lab, "p late")
    says(lab, "'not yet'")
    keep_picture(lab.page, "panel-look.png")
    lab.panel.locator(".nbl-stuck").get_by_role("button", name="Stop").click()
    lab.wait_for_state("stopped")
    assert not lab.panel.locator(".nbl-stuck").is_visible()
