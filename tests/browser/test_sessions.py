"""A session in a real JupyterLab and a real Jupyter Notebook, in Chromium."""

from __future__ import annotations

import pytest

from tests.browser.conftest import LAB, NOTEBOOK, Lab, keep_picture

CELLS = (
    "%distributed session -n 2",
    "%%distributed\nimport torch.distributed as dist\nweights = torch.ones(3) * (rank + 1)\nprint('begun')\nweights",
    "%%distributed\nimport time\nprint('waiting', flush=True)\ndist.barrier() if rank == 0 else time.sleep(600)",
)


@pytest.mark.parametrize("served", [LAB, NOTEBOOK], ids=["lab", "notebook"], indirect=True)
def test_a_session_shows_its_values_and_stops_a_cell(lab: Lab) -> None:
    lab.run("import torch", *CELLS)
    display = lab.page.locator(".jp-RenderedHTML", has_text="2 ranks on cpu")
    display.get_by_text("runs Cell In[5]").wait_for()
    record = lab.page.locator(".jp-RenderedHTML", has_text="Cell In[4], session main")
    for value in ("tensor([1., 1., 1.])", "tensor([2., 2., 2.])"):
        record.get_by_text(value).wait_for(state="attached")
    lab.title = "Cell In[5]"  # the cell before keeps its panel if it took long
    lab.log_says("waiting")
    lab.button("Stop").first.click()
    lab.wait_for_state("stopped")
    display.get_by_text("idle, pid").first.wait_for()
    display.scroll_into_view_if_needed()
    keep_picture(lab.page, f"session-{lab.app}.png")
    lab.server.end_kernels()  # and the session with its kernel
