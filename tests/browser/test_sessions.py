"""A session in a real JupyterLab in Chromium."""

from __future__ import annotations

import contextlib
import os
import re
import signal

from playwright.sync_api import TimeoutError as TooLateError

from tests.browser.conftest import Lab, keep_picture
from tests.conftest import eventually

CELLS = (
    "%distributed session -n 2",
    "%%distributed\nimport torch.distributed as dist\nweights = torch.ones(3) * (rank + 1)\nprint('begun')\nweights",
    "%%distributed --background\nimport time\nprint('waiting', flush=True)\n"
    "dist.barrier() if rank == 0 else time.sleep(600)",
    "%%distributed --background\nonly_in_ranks_1 = rank",
    "%%distributed\nonly_in_ranks_2 = rank",
)


def tab_offers(lab: Lab, begun: str, *names: str) -> bool:
    """Type the beginning of names as the line, press Tab, and return True if these names are offered.

    Ranks have 300 ms to answer, too few on a busy machine: JupyterLab then inserts the one name that the cell has.
    """
    for key in ("End", "Shift+Home"):
        lab.page.keyboard.press(key)
    lab.page.keyboard.type(begun)
    lab.page.keyboard.press("Tab")
    offered = [lab.page.locator(".jp-Completer-item", has_text=name) for name in names]
    with contextlib.suppress(TooLateError):
        offered[0].wait_for(timeout=2000)
    return all(item.is_visible() for item in offered)


def test_a_session_shows_its_values_queue_names_and_deaths(lab: Lab) -> None:
    lab.page.set_viewport_size({"width": 1280, "height": 2400})  # JupyterLab removes cells that are out of sight
    lab.run("import torch", *CELLS)
    display = lab.page.locator(".jp-RenderedText", has_text="2 ranks on cpu")
    display.get_by_text("busy: Cell In[5]").wait_for()
    record = lab.page.locator(".jp-RenderedHTML", has_text="Cell In[4], session main")
    for value in ("tensor([1., 1., 1.])", "tensor([2., 2., 2.])"):
        record.get_by_text(value).wait_for(state="attached")
    display.get_by_text("2 more queued").wait_for()

    lab.title = "Cell In[5]"  # the cell before keeps its panel if it took long
    lab.log_says("waiting")
    lab.button("Stop").first.click()  # the kernel runs Cell In[7], which waits
    lab.wait_for_state("stopped")
    display.get_by_text("cpu, idle since").wait_for()

    lab.page.locator(".jp-CodeCell").last.locator(".cm-content").click()
    lab.page.keyboard.press("Control+End")
    lab.page.keyboard.press("Enter")
    eventually(lambda: tab_offers(lab, "only_in_r", "only_in_ranks_1", "only_in_ranks_2"))
    lab.page.keyboard.press("Escape")

    (pid,) = re.findall(r"rank 1: pid (\d+)", display.inner_text())
    os.kill(int(pid), signal.SIGKILL)
    display.get_by_text("`%distributed session restart --rank 1` restarts it").wait_for()
    assert re.search(r"rank 0: pid .*\n *rank 1: dead", display.inner_text())
    display.scroll_into_view_if_needed()
    keep_picture(lab.page, "session-jupyterlab.png")
    lab.server.end_kernels()  # and the session with its kernel
