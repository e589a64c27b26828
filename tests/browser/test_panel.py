"""What the panel shows in a real JupyterLab in Chromium, with real ranks; the quickstart is one of its notebooks."""

from __future__ import annotations

import json
import os
import re
import shutil

import headless
import nbformat
import pytest
from playwright.sync_api import Dialog

from tests.browser.cells import TRAINS
from tests.browser.conftest import PICTURES, SHARED, Lab, keep_picture
from tests.browser.lab import OPENED, close_documents, run_all, wait_until_idle
from tests.conftest import eventually
from tests.kernel.executed import NOTEBOOKS, smaller
from tests.kernel.harness import IMPORT_AHEAD

DARK = "JupyterLab Dark"
FAILS = """
def train(rank):
    import time
    for step in progress(range(300)):
        print(f"rank {rank} step {step}: " + "noise " * 10, flush=True)
        report(step=step, loss=1 / (step + 1))
        time.sleep(0.01)
        if rank == 5 and step == 150:
            raise ValueError("no such class: 11")
notebook_launcher(train, num_processes=8)
"""


@pytest.mark.parametrize("size", [(1200, 1180)])
def test_the_quickstart_trains_and_shows_its_accuracy_while_it_runs(lab: Lab) -> None:
    shutil.copy(NOTEBOOKS / "mnist_or_digits.py", lab.folder)
    whole = (NOTEBOOKS / "quickstart.ipynb").read_text()
    quick = smaller("quickstart").replace("%load_ext", json.dumps(IMPORT_AHEAD)[1:-1] + "%load_ext")
    (lab.folder / "quickstart.ipynb").write_text(whole if PICTURES in os.environ else quick)
    lab.open("quickstart.ipynb")
    lab.title = "train_ddp"  # the second launch
    run_all(lab.page)
    accuracy = lab.panel.locator(".nbl-card", has_text="accuracy").first
    accuracy.wait_for()
    lab.log_says("epoch 2")
    lab.page.locator('.jp-Notebook-ExecutionIndicator[data-status="busy"]').wait_for(state="attached")
    assert re.search(r"0\.\d+", accuracy.inner_text())
    lab.wait_for_cells()
    lab.panel.evaluate("panel => panel.closest('.jp-Cell').scrollIntoView({block: 'end'})")
    keep_picture(lab.page, "quickstart.png")
    lab.save()
    notebook = nbformat.read(lab.folder / "quickstart.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert headless.accuracy(notebook) >= 0.8
    assert headless.printed(notebook).splitlines()[-1].startswith("test accuracy: ")


DISPLAYS = """
def show(rank):
    import matplotlib.pyplot as plt
    from IPython.display import HTML, display
    print("begun", flush=True)
    report(step=0, loss=2), report(step=1, loss=1)
    display(HTML(f"<table><td>{rank + 0.5}</td></table>"))
    plt.plot([1, 2])
    plt.show()
notebook_launcher(show, num_processes=2)
"""


def test_outputs_of_ranks_are_shown_and_come_again_after_a_reload(lab: Lab) -> None:
    lab.run(DISPLAYS)
    for reloaded in (False, True):
        if reloaded:
            lab.save_and_reload()
        outputs = lab.panel.locator(".nbl-outputs details")
        outputs.first.locator("td", has_text="0.5").wait_for()
        image = outputs.first.locator("img")
        image.wait_for()
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
        assert [outputs.nth(rank).evaluate("box => box.open") for rank in (0, 1)] == [True, False]
        outputs.nth(1).locator("summary").click()
        outputs.nth(1).locator("td", has_text="1.5").wait_for()
        if not reloaded:
            keep_picture(lab.page, "outputs.png")


def test_a_saved_notebook_shows_the_record_also_untrusted(lab: Lab) -> None:
    lab.run(TRAINS + "notebook_launcher(train, kwargs={'steps': 60}, num_processes=2)")
    lab.wait_for_state("finished")
    lab.page.keyboard.press("Control+s")
    path = lab.folder / SHARED
    eventually(lambda: "Finished in" in path.read_text())
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source += "  # changed elsewhere: this notebook is not trusted"
    for kernel in ("python3", "gone"):  # another kernel, no kernel
        notebook.metadata["kernelspec"]["name"] = kernel
        if kernel == "gone":
            notebook.metadata["kernelspec"]["language"] = notebook.metadata["language_info"]["name"] = "gone"
        nbformat.write(notebook, lab.folder / f"saved-{kernel}.ipynb")
        close_documents(lab.page)
        lab.page.evaluate(OPENED, f"saved-{kernel}.ipynb")
        record = lab.page.locator(".jp-RenderedHTMLCommon", has_text="Finished in")
        record.wait_for()
        if kernel == "gone":  # not by name, nor another one of its language: JupyterLab asks, and starts none
            lab.page.locator(".jp-Dialog", has_text="Select Kernel").wait_for()
        else:
            wait_until_idle(lab.page)
            keep_picture(lab.page, "record.png")
        assert record.is_visible()
        assert lab.page.get_by_text("Error displaying widget").count() == 0
        assert lab.page.locator(".nbl-root").count() == 0
        chart = record.locator("img").first
        assert chart.evaluate("image => image.complete && image.naturalWidth > 0")
        assert "loss" in (chart.get_attribute("alt") or "")


VALIDATES = """
def fits(rank):
    import time
    from nblaunch.ranks.report import Progress, mark_best
    fit = Progress(40, "fit")
    for step in range(1, 41):
        report(step, loss=1 / step, lr=3e-4, samples_per_second=1200 + step)
        if step % 10 == 0:
            report(step, valid_loss=abs(step - 20) / 100 + 0.25)
            if step <= 20:
                mark_best("valid_loss", step)
        fit.reach(step)
        time.sleep(0.01)
notebook_launcher(fits, num_processes=2)
"""
STYLES = "() => [...document.querySelectorAll('style')].filter(s => s.textContent.includes('.nbl-root')).length"


def test_two_panels_with_validation_share_one_script(lab: Lab) -> None:
    lab.run(VALIDATES, VALIDATES)
    for lab.number in (0, 1):
        lab.wait_for_state("finished")
        chart = lab.panel.get_by_role("img", name="Chart of loss")
        chart.focus()
        chart.press("Home")
        assert lab.panel.get_by_text("step 1: 1", exact=True).is_visible()
        assert "valid_loss 0.45, best 0.25 at step 20" in (chart.get_attribute("aria-label") or "")
        assert lab.panel.get_by_text("40/40").count() == 2
    names = lab.panel.locator(".nbl-metric-top .nbl-metric-name").all_inner_texts()
    assert names == ["loss", "samples_per_second", "lr"]  # a constant is a number below the charts
    assert lab.panel.locator(".nbl-log").bounding_box()["height"] < 40  # type: ignore[index]  # it is on the page
    assert lab.page.evaluate(STYLES) == 1
    keep_picture(lab.page, "validation.png")


def test_nothing_that_a_rank_says_becomes_html(lab: Lab) -> None:
    hostile = """
evil = '<img src=x onerror="window.hacked = true"><script>window.hacked = true</script>"><b>bold'
def train(rank):
    import sys
    print(evil, flush=True)
    print(evil, file=sys.stderr, flush=True)
    report(step=1, **{evil: 1.0}); report(step=2, **{evil: 2.0})
    for _ in progress(range(3), desc=evil): pass
    raise ValueError(evil)
train.__name__ = train.__qualname__ = evil
notebook_launcher(train, num_processes=2)
"""
    dialogs: list[str] = []

    def opens(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    lab.page.on("dialog", opens)
    lab.run(hostile)
    lab.wait_for_state("failed")
    lab.log_says("<img src=x onerror")
    assert lab.page.evaluate("() => window.hacked === undefined")
    lab.page.remove_listener("dialog", opens)
    assert dialogs == []
    assert lab.panel.locator("img, script, [onerror]").count() == 0
    assert lab.panel.locator(".nbl-failure", has_text="<script>window.hacked").count() == 1
    lab.page.keyboard.press("Control+s")
    path = lab.folder / SHARED
    eventually(lambda: "✗ Failed" in path.read_text(encoding="utf-8"))
    saved = json.loads(path.read_text())
    html = "".join("".join(output.get("data", {}).get("text/html", "")) for output in saved["cells"][1]["outputs"])
    assert "&lt;script&gt;" in html
    assert "<script" not in html


@pytest.mark.parametrize("size", [(520, 1000)])
def test_the_rank_that_failed_first_is_on_top_among_eight_noisy_ones(lab: Lab) -> None:
    lab.run(FAILS)
    lab.wait_for_state("failed")
    _failure_is_on_top(lab)
    keep_picture(lab.page, "panel-failed-narrow.png")
    lab.page.set_viewport_size({"width": 1200, "height": 1000})
    lab.page.wait_for_function("() => document.querySelector('.nbl-root').clientWidth > 520")
    _failure_is_on_top(lab)
    keep_picture(lab.page, "failed.png")
    with lab.theme(DARK):
        _failure_is_on_top(lab)
        keep_picture(lab.page, "panel-failed-dark.png")


def _failure_is_on_top(lab: Lab) -> None:
    failure = lab.panel.locator(".nbl-failure")
    box, panel = failure.bounding_box(), lab.panel.bounding_box()
    assert box
    assert panel
    assert box["y"] - panel["y"] < 220  # right below the head
    text = failure.inner_text()
    assert "rank 5" in text
    assert "no such class: 11" in text
    assert 'raise ValueError("no such class: 11")' in text
    assert re.search(r"Cell In\[\d+\], line \d+", text)
    assert lab.page.evaluate(
        "() => { const p = document.querySelector('.nbl-root'); return p.scrollWidth <= p.clientWidth }"
    )
    lab.panel.scroll_into_view_if_needed()


LONG_LINES = """
class Images:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 17:
            raise ValueError("bad image 17")
        return index

def load(rank):
    import torch
    torch.manual_seed(rank)
    for i in range(60):
        print(f"step {i}", "\\x1b[31mred\\x1b[0m " * (30 if i % 3 == 0 else 1), "end", i)
    if rank == 0:
        list(torch.utils.data.DataLoader(Images(), batch_size=8, num_workers=1))

notebook_launcher(load, num_processes=2, max_restarts=1)
"""


@pytest.mark.parametrize("size", [(700, 1000)])
def test_long_lines_wrap_below_a_short_headline_and_the_notes(lab: Lab) -> None:
    lab.run(LONG_LINES)
    lab.wait_for_state("failed")
    cause, notes, log = (lab.panel.locator(f".nbl-{name}") for name in ("cause", "notes", "log"))
    assert cause.inner_text() == "Rank 0 failed: ValueError: bad image 17 (in DataLoader worker 0)"
    assert "bad image 17 (in DataLoader worker 0): restarting all ranks (1 of 1)" in notes.inner_text()
    ends_in_sight = """log => {
        const [rows, box] = [[...log.querySelectorAll('.nbl-line')], log.getBoundingClientRect()]
        const last = rows.at(-1).getBoundingClientRect()
        const apart = rows.slice(1).some((row, i) =>
            Math.abs(row.getBoundingClientRect().top - rows[i].getBoundingClientRect().bottom) > 1)
        return !apart && log.scrollWidth <= log.clientWidth && Math.abs(last.bottom - box.bottom) < 3
            && rows.some(row => row.offsetHeight > 30)
    }"""
    lab.page.wait_for_function(f"() => ({ends_in_sight})(document.querySelector('.nbl-log'))")
    log.scroll_into_view_if_needed()
    keep_picture(lab.page, "long-lines-narrow.png")
    lab.page.set_viewport_size({"width": 1100, "height": 1000})
    with lab.theme(DARK):
        notes.scroll_into_view_if_needed()
        lab.page.wait_for_function(f"() => ({ends_in_sight})(document.querySelector('.nbl-log'))")
        keep_picture(lab.page, "long-lines-dark.png")
    lab.panel.get_by_role("button", name="Wrap long lines").click()
    assert log.evaluate("log => log.scrollWidth > log.clientWidth")
    assert log.evaluate("log => [...log.querySelectorAll('.nbl-line')].every(row => row.offsetHeight === 18)")


@pytest.mark.parametrize("size", [(1200, 1300)])
def test_eight_ranks_that_go_well_show_their_progress_and_metrics(lab: Lab) -> None:
    go = lab.folder / "eight.go"
    with lab.theme(DARK):
        lab.run(f"{TRAINS}notebook_launcher(train, kwargs={{'steps': 200, 'go': {str(go)!r}}}, num_processes=8)")
        lab.log_says("step 60")
        _progress_and_metrics_are_shown(lab)
        keep_picture(lab.page, "panel-running-dark.png")
    _progress_and_metrics_are_shown(lab)
    keep_picture(lab.page, "panel-running-light.png")
    go.touch()
    lab.wait_for_state("finished")
    keep_picture(lab.page, "panel-finished-light.png")
    with lab.theme(DARK):
        lab.page.wait_for_function(_AXIS_HAS_THE_THEMES_COLOUR)
        keep_picture(lab.page, "panel-finished-dark.png")
    lab.page.wait_for_function(_AXIS_HAS_THE_THEMES_COLOUR)


_AXIS_HAS_THE_THEMES_COLOUR = """() => {
    const canvas = document.querySelector(".nbl-canvas");
    const axis = Object.assign(document.createElement("i"), { className: "nbl-ink-axis" });
    canvas.parentNode.append(axis);
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = getComputedStyle(axis).color;
    axis.remove();
    probe.fillRect(0, 0, 1, 1);
    const wanted = probe.getImageData(0, 0, 1, 1).data;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const isOfAxis = (i) => data[i + 3] > 200 && [0, 1, 2].every((part) => Math.abs(data[i + part] - wanted[part]) < 8);
    return Array.from({ length: data.length / 4 }, (_, i) => 4 * i).some(isOfAxis);
}"""


def _progress_and_metrics_are_shown(lab: Lab) -> None:
    lab.panel.get_by_role("progressbar").nth(7).wait_for()
    assert lab.panel.locator(".nbl-card .nbl-metric-name").all_inner_texts() == ["loss", "accuracy"]
    lab.panel.scroll_into_view_if_needed()


def test_the_panel_stays_alive_and_accessible_in_the_place_of_the_record(lab: Lab) -> None:
    trains = TRAINS + "notebook_launcher(train, kwargs={'steps': 60}, num_processes=2)"
    lab.run(trains, "notebook_launcher(int)")
    lab.wait_for_state("finished")
    record = lab.page.locator(".jp-RenderedHTMLCommon", has_text="Finished in").first
    record.wait_for(state="hidden")
    assert lab.panel.get_by_role("tab").count() == 3
    assert lab.panel.get_by_role("listitem", name="rank 0, returned").count() == 1
    assert [lab.panel.get_by_role("button", name=name).count() for name in ("Restart", "Pause", "Follow")] == [0, 0, 0]
    nameless = lab.panel.locator("button, input, [role=tab], [role=progressbar]").evaluate_all(
        """all => all.filter(e => !e.hidden && !(e.ariaLabel || e.textContent.trim() || e.title || e.placeholder))
                     .map(e => e.outerHTML)"""
    )
    assert nameless == []
    lab.panel.get_by_role("tab").first.focus()
    lab.page.keyboard.press("ArrowRight")
    assert lab.panel.get_by_role("tab").nth(1).get_attribute("aria-selected") == "true"
    box, cell = lab.panel.bounding_box(), lab.page.locator(".jp-CodeCell .jp-InputArea-editor").nth(1).bounding_box()
    assert box
    assert cell
    assert abs(box["width"] - cell["width"]) < 40  # it fills the cell
    keep_picture(lab.page, "panel-at-the-end.png")
    lab.server.end_kernels()
    lab.panel.wait_for()
