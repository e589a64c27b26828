"""A page that is reloaded, and one with a long log, in a real JupyterLab in Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.cells import TRAINS
from tests.browser.conftest import LAB, NO_SUBSHELLS, Lab, keep_picture


@pytest.mark.parametrize("served", [LAB, NO_SUBSHELLS], ids=["lab", "without subshells"], indirect=True)
def test_a_reload_restores_the_panel_of_a_blocking_cell(fresh_lab: Lab) -> None:
    lab = fresh_lab
    trains = f"from nblaunch.errors import LaunchStoppedError\n{TRAINS}"
    stopped = "(LaunchStoppedError, KeyboardInterrupt)"  # the page interrupts a kernel that answers late
    waits = f"try:\n    notebook_launcher(train, num_processes=2)\nexcept {stopped}:\n    order = ['stopped']"
    lab.run(trains + waits, *(f"order.append({number})" for number in range(3)), "order")
    lab.log_says("step 40")
    lab.save_and_reload()
    lab.panel.wait_for()
    lab.wait_for_state("running")
    cards = lab.panel.locator(".nbl-card .nbl-metric-name")
    cards.first.wait_for()
    assert cards.all_inner_texts() == ["loss", "accuracy"]
    for rank in range(2):
        lab.panel.get_by_role("tab", name=f"rank {rank}").click()
        lab.find("begun")
    keep_picture(lab.page, "panel-reloaded.png")
    lab.button("Stop").click()
    lab.wait_for_state("stopped")
    lab.run_cell(5)
    lab.page.locator(".jp-OutputArea-executeResult", has_text="['stopped', 0, 1, 2]").wait_for()


def test_of_two_hundred_thousand_lines_only_those_in_sight_are_in_the_page(lab: Lab, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    prints = f"""
import os, time
def prints(rank):
    for number in range(100_000):
        print(f"line {{number:06d}} of rank {{rank}}")
    while not os.path.exists({str(enough)!r}):
        time.sleep(0.1)
result = notebook_launcher(prints, num_processes=2)
"""
    lab.run(prints)
    lab.wait_for_state("running")  # not over before the page shows its panel
    enough.touch()
    lab.wait_for_state("finished")
    lab.log_says("line 099999 of rank")  # of the rank that printed last
    lab.page.evaluate(_SCROLLED)
    assert lab.page.locator(".nbl-line").count() < 500  # only what is seen is in the page
    lab.panel.get_by_role("tab", name="rank 1").click()
    lab.find("line 099234 of rank 1")
    lab.server.end_kernels()  # the numbers of the next file's cells begin at 1


_SCROLLED = """async () => {
    const log = document.querySelector(".nbl-log")
    for (let step = 0; step < 60; step++) {
        log.scrollTop = log.scrollHeight * Math.abs(Math.sin(step / 7))
        await new Promise(requestAnimationFrame)
    }
    log.scrollTop = log.scrollHeight
}"""
