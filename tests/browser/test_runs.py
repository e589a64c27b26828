"""Detached runs whose JupyterLab is killed meanwhile, and launches whose page is closed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import BrowserContext, Locator

from nblaunch.launch import run_folders
from nblaunch.launch.attached import attach
from nblaunch.notebook.run_table import record_of
from tests.browser.conftest import NO_SUBSHELLS, SHARED, Lab, Server, keep_picture
from tests.browser.lab import choose_theme, load_notebook, open_page, running_lab, wait_until_idle, write_settings
from tests.conftest import LONG, eventually

TRAINS = """
import os, time
def train(rank, name):
    print("begun", flush=True)
    step = 0
    while not (folder / f"{name}.go").exists():
        if step < 40:
            report(step=step, loss=1 / (step + 1) + rank)
        if step in (0, 10):
            print("step", step, flush=True)
        step += 1
        time.sleep(0.05)
    return rank + 40
"""
STARTS = "{0} = notebook_launcher(train, ('{0}',), num_processes=2, detach='{0}')".format
UNSEEN = "nblaunch: while no page showed it, "


@contextmanager
def _jupyter(chromium: BrowserContext, folder: Path) -> Iterator[Lab]:
    """A JupyterLab of the test's own, with a page of 1000 pixels."""
    settings = folder.parent / "settings"
    write_settings(settings, {})
    folder.mkdir(exist_ok=True)
    with running_lab(folder, settings) as url, open_page(chromium) as page:
        page.set_viewport_size({"width": 1000, "height": 1400})
        yield Lab(Server(url, folder, settings), "jupyterlab", page, loaded=False)


def _kill(server: Server) -> None:
    """Kill a server with its process group."""
    runtime = server.folder.parent / f"{server.folder.name}-config/runtime"
    known = [json.loads(file.read_text()) for file in runtime.glob("jpserver-*.json")]
    os.killpg(next(each["pid"] for each in known if each["url"] == server.url), signal.SIGKILL)


def _setup(folder: Path) -> str:
    state = f"import os; os.environ['NBLAUNCH_STATE_DIR'] = {os.environ['NBLAUNCH_STATE_DIR']!r}"
    return f"{state}\nfrom pathlib import Path\nfolder = Path({str(folder)!r})\nfrom nblaunch import attach, show"


def _has_every_step(panel: Locator, last: int = 30) -> None:
    chart = panel.get_by_role("img", name="Chart of loss")
    chart.focus()
    chart.press("Home")
    for step in range(last):
        assert panel.get_by_text(f"step {step}: ").is_visible(), step
        chart.press("ArrowRight")
    chart.press("Escape")


def _texts(lab: Lab) -> list[str]:
    """Save the notebook, and return the text of each output."""
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save()")
    notebook = nbformat.read(lab.folder / SHARED, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.get("data", {}).get("text/plain", "") for output in outputs]


def _keep_pictures(lab: Lab, name: str) -> None:
    keep_picture(lab.page, f"{name}-light.png")
    choose_theme(lab.page, "JupyterLab Dark")
    lab.page.locator("#jupyterlab-splash").wait_for(state="detached")
    keep_picture(lab.page, f"{name}-dark.png")
    choose_theme(lab.page, "JupyterLab Light")
    lab.page.locator("#jupyterlab-splash").wait_for(state="detached")


@pytest.fixture
def _ended() -> Iterator[None]:
    """End the runs of a test that has failed."""
    yield
    for run in run_folders.every():
        if run.is_detached and not run.is_over:
            launch = attach(run.name, view="none")
            launch.kill()
            launch.wait(LONG)


@pytest.mark.usefixtures("_ended")
def test_a_run_outlives_jupyter_and_two_cells_show_it_whole(chromium: BrowserContext, tmp_path: Path) -> None:
    folder = tmp_path / "notebooks"
    with _jupyter(chromium, folder) as lab:
        own_pid = "(folder / 'kernel').write_text(str(os.getpid()))"
        lab.run(_setup(tmp_path) + TRAINS + own_pid, STARTS("long"), STARTS("short"))
        lab.log_says("step 10")
        lab.number = 1
        lab.log_says("begun")
        _kill(lab.server)
        with suppress(ProcessLookupError):  # it ends without its server
            os.kill(int((tmp_path / "kernel").read_text()), signal.SIGKILL)
        lab.page.close()
    (tmp_path / "short.go").touch()
    eventually(lambda: run_folders.find_run("short").is_over)
    with _jupyter(chromium, folder) as lab:
        attaches = "run = attach('long')"
        lab.run(
            _setup(tmp_path),
            attaches,
            attaches,
            "sum(attach('short').result())",
            "import nblaunch\nnblaunch.runs()",
            "show('short')",
        )
        lab.wait_for_cells()
        _keep_pictures(lab, "run-attached")
        for lab.number in (0, 1):
            lab.log_says("step 10")
            lab.find("begun")
            _has_every_step(lab.panel)
        lab.page.locator(".jp-CodeCell").last.scroll_into_view_if_needed()
        keep_picture(lab.page, "run-table.png")
        texts = _texts(lab)
        assert texts[0] == f"{UNSEEN}run short finished: nblaunch.attach('short') shows it here"
        assert UNSEEN not in "".join(texts[1:])
        assert "81" in texts
        lab.page.reload()
        for lab.number in (0, 1):
            lab.log_says("step 10")
            lab.find("begun")
            _has_every_step(lab.panel)
        lab.button("Stop").click()
        for lab.number in (0, 1):
            lab.wait_for_state("stopped")
        eventually(
            lambda: sum("train, run long ■ Stopped" in text for text in _texts(lab)) == 2, 30, lambda: _texts(lab)
        )
        assert "Stopped" in record_of(run_folders.find_run("long"))
        keep_picture(lab.page, "run-stopped.png")


SEEN_WITHIN = "import nblaunch.notebook.panel as panels\npanels._SEEN_DELAY_S = {}".format
BEGINS = "launch = notebook_launcher(train, ('it',), num_processes=2, block=False)"


@pytest.mark.parametrize("is_saved", [True, False])
def test_the_end_of_a_launch_without_a_page_is_shown_or_told_once(
    fresh_lab: Lab, chromium: BrowserContext, tmp_path: Path, is_saved: bool
) -> None:
    lab = fresh_lab
    lab.run(_setup(tmp_path) + TRAINS, BEGINS, SEEN_WITHIN(0), SEEN_WITHIN(2) + "\nshow(launch.id)")
    lab.log_says("begun")
    if is_saved:
        _texts(lab)
    lab.page.close()
    (tmp_path / "it.go").touch()
    eventually(lambda: run_folders.find("train").is_over)
    told = f"{UNSEEN}train ended: nblaunch.show({run_folders.find('train').name!r}) shows it here"
    with open_page(chromium) as lab.page:
        load_notebook(lab.page, lab.server.url, SHARED)
        if is_saved:
            lab.wait_for_state("finished")
        lab.run_cell(3)
        lab.run_cell(4)
        eventually(lambda: sum("Finished in" in text for text in _texts(lab)) == 1 + is_saved)
        wait_until_idle(lab.page)
        keep_picture(lab.page, f"reopened-{is_saved}.png")
        texts = _texts(lab)
    assert [text for text in texts if text.startswith(UNSEEN)] == ([] if is_saved else [told])


@pytest.mark.parametrize("served", [NO_SUBSHELLS], indirect=True)  # what it says waits behind cells
def test_a_page_that_was_open_is_told_nothing(lab: Lab, tmp_path: Path) -> None:
    judges = "from nblaunch.notebook import notebook_frontend\nnotebook_frontend._IDLE_S = {}\nlen(panels._unjudged)"
    cells = [
        BEGINS,
        "launch.wait()",
        "time.sleep(2)",
        BEGINS,
        "launch.wait(); time.sleep(2)",
        SEEN_WITHIN(2) + "\n" + judges.format(1),
        judges.format(0),
    ]
    lab.run(_setup(tmp_path) + TRAINS + SEEN_WITHIN(1), *cells)
    (tmp_path / "it.go").touch()
    lab.wait_for_cells()
    for number in (8, 8, 7):  # the last one restores the constants
        lab.run_cell(number)
    eventually(lambda: _texts(lab)[-2:] == ["0", "0"])
    assert not [text for text in _texts(lab) if text.startswith(UNSEEN)]
    lab.server.end_kernels()  # cells of the next file count from 1
