"""The quickstart notebook in JupyterLab, in a browser."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import headless
import nbformat
import pytest

from tests.browser.conftest import Lab, keep_picture
from tests.browser.lab import open_notebook, run_all, write_notebook

pytestmark = pytest.mark.alone

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("size", [(1200, 1180)])
def test_the_quickstart_trains_and_shows_its_accuracy_while_it_runs(lab: Lab) -> None:
    for name in ("quickstart.ipynb", "mnist_or_digits.py"):
        shutil.copy(NOTEBOOKS / name, lab.folder)
    open_notebook(lab.page, lab.url, "quickstart.ipynb")
    run_all(lab.page)
    accuracy = lab.panel.locator(".nbl-card", has_text="accuracy").first
    accuracy.wait_for()
    lab.log_says("epoch 2")
    assert lab.page.locator('.jp-Notebook-ExecutionIndicator[data-status="busy"]').count() == 1
    assert re.search(r"0\.\d+", accuracy.inner_text())
    last = lab.output("test accuracy: 0.").last
    last.wait_for(state="attached")
    lab.panel.evaluate("panel => panel.closest('.jp-Cell').scrollIntoView({block: 'end'})")
    keep_picture(lab.page, "quickstart.png")
    lab.save()
    notebook = nbformat.read(lab.folder / "quickstart.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert headless.accuracy(notebook) >= 0.95
    assert headless.printed(notebook).splitlines()[-1].startswith("test accuracy: ")


def test_the_interrupt_button_stops_the_ranks_and_the_kernel_goes_on(lab: Lab) -> None:
    waits = "%%distributed -n 2\nimport time\nprint('begun', flush=True)\nwhile True:\n    time.sleep(0.01)"
    lab.run(waits, "40 + 2")
    lab.log_says("begun")
    lab.page.click('[data-command="notebook:interrupt-kernel"], jp-button[title*="Interrupt"]')
    lab.output("KeyboardInterrupt").wait_for(timeout=10_000)
    lab.wait_for_state("stopped", 10)
    lab.run_cell(2)
    lab.page.locator(".jp-OutputArea-executeResult", has_text="42").wait_for()


def test_the_text_view_shows_each_line_with_its_rank(lab: Lab) -> None:
    prints = "notebook_launcher(lambda rank: print('I am', rank), num_processes=2, view='text')"
    write_notebook(lab.folder / "text.ipynb", "from nblaunch import notebook_launcher", prints)
    open_notebook(lab.page, lab.url, "text.ipynb")
    run_all(lab.page)
    lab.output("[rank 1] I am 1").wait_for()
    assert lab.page.locator(".nbl-root").count() == 0
