"""The panel in a real JupyterLab in Chromium, with real clicks and ranks."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import WebSocket

from tests.browser.conftest import DARK, LAB, NO_SUBSHELLS, NOTEBOOK, Lab, keep_picture
from tests.browser.lab import end_kernels, wait_until_idle
from tests.conftest import eventually, marked_processes

pytestmark = pytest.mark.alone

TRAINS = """
def train(rank, steps=10_000):
    import math, time
    print("begun", flush=True)
    for step in progress(range(steps), desc="epoch 0"):
        time.sleep(0.02)
        report(step=step, accuracy=1 - math.exp(-step / 50) / 2, loss=math.exp(-step / 40))
        if step % 20 == 0:
            print(f"step {step}: loss {math.exp(-step / 40):.4f}", flush=True)
    return rank
"""
SAVES = """
def train(rank):
    import time
    for step in progress(range(10_000)):
        report(step=step, loss=1 / (step + 1))
        try:
            print("step", step, flush=True)
            time.sleep(0.05)
        except KeyboardInterrupt:
            print("saving a checkpoint", flush=True)
            for part in progress(range(40), desc="checkpoint"):
                time.sleep(0.1)
            print("saved", flush=True)
            raise
notebook_launcher(train, num_processes=2)
"""
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


DEAF = "from nblaunch.launch.frontend import host; host()._channel._stream = None  # as with another ipykernel"


@pytest.mark.parametrize(
    ("server", "kernel", "raised"),
    [
        (LAB, "", "LaunchStoppedError"),
        (NO_SUBSHELLS, "", "LaunchStoppedError"),
        (NO_SUBSHELLS, DEAF, "KeyboardInterrupt"),
        (NOTEBOOK, "", "LaunchStoppedError"),
    ],
    ids=["lab", "without subshells", "kernel that cannot hear", "notebook"],
    indirect=["server"],
)
def test_stop_ends_the_ranks_of_a_cell_that_blocks(lab: Lab, kernel: str, raised: str) -> None:
    lab.run(f"{kernel}\n{TRAINS}notebook_launcher(train, num_processes=2)", "40 + 2")
    lab.log_says("begun")
    lab.panel.locator(".nbl-card").first.wait_for()
    assert lab.state() == "running"
    assert lab.page.locator('.jp-Notebook-ExecutionIndicator[data-status="busy"]').count() == 1
    lab.button("Stop").click()
    lab.wait_for_state("stopped", 10)
    lab.output(raised).wait_for(timeout=10_000)
    lab.run_cell(2)
    lab.page.locator(".jp-OutputArea-executeResult", has_text="42").wait_for()


def test_a_checkpoint_is_finished_with_the_countdown_shown_and_a_second_click_would_kill(lab: Lab) -> None:
    lab.run(SAVES)
    lab.log_says("step 5")
    lab.button("Stop").click()
    lab.log_says("saving a checkpoint", 10)
    lab.panel.get_by_text(re.compile(r"\d+ s left for checkpoints")).wait_for()
    keep_picture(lab.page, "panel-stopping.png")
    lab.button("Kill").wait_for(timeout=5_000)
    lab.wait_for_state("stopped", 15)
    lab.log_says("saved")


def test_a_second_click_kills_ranks_that_do_not_obey(lab: Lab) -> None:
    ignores = """
import time
def ignores():
    print("begun", flush=True)
    while True:
        try:
            time.sleep(100)
        except KeyboardInterrupt:
            print("not now", flush=True)
notebook_launcher(ignores, num_processes=2)
"""
    lab.run(ignores)
    lab.log_says("begun")
    lab.button("Stop").click()
    lab.log_says("not now", 10)
    lab.button("Kill").click()
    lab.wait_for_state("stopped", 10)


@pytest.mark.parametrize("server", [LAB, NOTEBOOK], ids=["lab", "notebook"], indirect=True)
def test_restart_ends_everything_with_two_clicks_and_the_next_launch_works(lab: Lab) -> None:
    lab.run(
        TRAINS + "notebook_launcher(train, num_processes=2)", "notebook_launcher(lambda: 'fresh', num_processes=2)[1]"
    )
    lab.log_says("begun")
    ranks = _ranks()
    assert len(ranks) == 2
    lab.button("Restart kernel").click()
    lab.button("Click again").click()
    eventually(lambda: not ranks & marked_processes(), 10)
    assert lab.page.locator(".jp-Dialog").count() == 0
    lab.panel.locator('.nbl-pill[data-state="gone"]').wait_for()
    wait_until_idle(lab.page)
    lab.run_cell(0)
    lab.run_cell(2)
    lab.page.locator(".jp-OutputArea-executeResult", has_text="fresh").wait_for()
    assert lab.button("Stop").count() == 0 or not lab.button("Stop").is_visible()


@pytest.mark.parametrize("server", [NO_SUBSHELLS], ids=["without subshells"], indirect=True)
def test_stop_ends_ranks_that_have_long_been_silent(lab: Lab) -> None:
    silent = """
def stops_itself():
    import os, signal
    print("begun", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
notebook_launcher(stops_itself, num_processes=2)
"""
    lab.run(silent)
    lab.log_says("begun")
    lab.page.wait_for_timeout(7000)  # longer than MAX_SILENCE_MS of the page: it now counts the launch as silent
    lab.button("Stop").click()
    lab.wait_for_state("stopped", 15)


def test_the_end_of_a_launch_leaves_the_reader_where_he_is(lab: Lab) -> None:
    lab.run(TRAINS + "notebook_launcher(train, kwargs={'steps': 400}, num_processes=2)")
    lab.log_says("step 60")
    lab.panel.get_by_role("tab", name="rank 1").click()
    lab.find("begun")
    lab.wait_for_state("finished")
    lab.page.wait_for_function("() => document.querySelectorAll('.nbl-root').length === 1")
    assert lab.panel.get_by_role("tab", name="rank 1").get_attribute("aria-selected") == "true"
    assert lab.panel.get_by_role("searchbox").input_value() == "begun"
    lab.panel.locator(".nbl-line", has_text="begun").first.wait_for(timeout=5_000)


def test_a_log_that_leaves_the_page_while_it_scrolls_goes_on_at_the_end(lab: Lab) -> None:
    lab.run(TRAINS + "notebook_launcher(train, kwargs={'steps': 400}, num_processes=2)")
    lab.log_says("step 240")  # more lines than are in sight
    lab.page.evaluate(_SCROLLED_AND_HIDDEN)
    lab.wait_for_state("finished")
    lab.log_says("step 380", 10)
    assert lab.button("Pause").is_visible()


_SCROLLED_AND_HIDDEN = """async () => {
    const log = document.querySelector(".nbl-log"), root = log.closest(".nbl-root")
    log.scrollTop -= 1 // as a new line would: the event comes with the next frame
    root.style.display = "none"
    await new Promise(requestAnimationFrame)
    await new Promise(requestAnimationFrame)
    root.style.display = ""
}"""


def test_a_background_launch_is_followed_and_stopped_with_the_kernel_free(lab: Lab) -> None:
    lab.run(TRAINS + "launch = notebook_launcher(train, num_processes=2, block=False)", "40 + 2")
    lab.page.locator(".jp-OutputArea-executeResult", has_text="42").wait_for()
    lab.log_says("step 40")
    lab.button("Stop").click()
    lab.wait_for_state("stopped", 10)


def test_stacks_show_what_ranks_do_while_the_cell_blocks(lab: Lab) -> None:
    lab.run(TRAINS + "notebook_launcher(train, num_processes=2)")
    lab.log_says("begun")
    lab.button("Stacks").click()
    lab.panel.locator(".nbl-stacks", has_text="time.sleep(0.02)").wait_for()
    keep_picture(lab.page, "panel-stacks.png")


@pytest.mark.parametrize(
    "server", [LAB, NO_SUBSHELLS, NOTEBOOK], ids=["lab", "without subshells", "notebook"], indirect=True
)
def test_after_a_reload_the_panel_is_back_whole_while_its_cell_still_blocks(lab: Lab) -> None:
    trains = f"from nblaunch.errors import LaunchStoppedError\n{TRAINS}"
    waits = "try:\n    notebook_launcher(train, num_processes=2)\nexcept LaunchStoppedError:\n    order = ['stopped']"
    lab.run(trains + waits, *(f"order.append({number})" for number in range(3)), "order")
    lab.log_says("step 40")
    connected: list[float] = []

    def connects(socket: WebSocket) -> None:
        if "/channels" in socket.url:  # of a kernel
            connected.append(time.monotonic())

    lab.page.on("websocket", connects)
    lab.save_and_reload()
    lab.panel.wait_for()
    assert time.monotonic() - connected[-1] < BACK_WITHIN
    lab.wait_for_state("running", 10)
    cards = lab.panel.locator(".nbl-card .nbl-metric-name")
    cards.first.wait_for()
    assert cards.all_inner_texts() == ["accuracy", "loss"]
    for rank in range(2):
        lab.panel.get_by_role("tab", name=f"rank {rank}").click()
        lab.find("begun")
    keep_picture(lab.page, "panel-reloaded.png")
    lab.button("Stop").click()
    lab.wait_for_state("stopped", 10)
    lab.run_cell(5)
    lab.page.locator(".jp-OutputArea-executeResult", has_text="['stopped', 0, 1, 2]").wait_for()


BACK_WITHIN = 4.0
"""Seconds from the page's connection to the kernel; alone it takes under one. ipywidgets gives up a request after 4."""


@pytest.mark.parametrize("ended", [False, True], ids=["runs in the background", "has ended"])
def test_after_a_reload_the_panel_of_a_launch_comes_back_whole_with_the_kernel_free(lab: Lab, ended: bool) -> None:
    steps = 60 if ended else 10_000
    lab.run(TRAINS + f"launch = notebook_launcher(train, [], 2, kwargs={{'steps': {steps}}}, block={ended})")
    lab.log_says("step 40")
    if ended:
        lab.wait_for_state("finished")
    lab.save_and_reload()
    lab.panel.wait_for()
    lab.panel.locator(".nbl-card").first.wait_for()
    lab.log_says("step ")
    lab.find("begun")
    if ended:
        lab.wait_for_state("finished")
        record = lab.page.locator(".jp-RenderedHTMLCommon", has_text="finished in")
        assert (record.count(), record.is_visible()) == (1, False)  # the panel is in its place
    else:
        lab.button("Stop").click()
        lab.wait_for_state("stopped", 10)


@pytest.mark.parametrize("kernel", ["python3", "gone"], ids=["another kernel", "no kernel"])
def test_a_saved_notebook_shows_the_record_also_untrusted(lab: Lab, kernel: str) -> None:
    lab.run(TRAINS + "notebook_launcher(train, kwargs={'steps': 60}, num_processes=2)")
    lab.wait_for_state("finished")
    lab.page.keyboard.press("Control+s")
    path = lab.folder / "test.ipynb"
    eventually(lambda: "finished in" in path.read_text())
    end_kernels(lab.url)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source += "  # changed elsewhere: this notebook is not trusted"
    notebook.metadata["kernelspec"]["name"] = kernel
    if kernel == "gone":
        notebook.metadata["kernelspec"]["language"] = notebook.metadata["language_info"]["name"] = "gone"
    nbformat.write(notebook, lab.folder / "saved.ipynb")
    lab.page.goto(f"{lab.url}doc/workspaces/nblaunch-saved-{kernel}/tree/saved.ipynb?reset")
    record = lab.page.locator(".jp-RenderedHTMLCommon", has_text="finished in")
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
    assert "accuracy" in (chart.get_attribute("alt") or "")


def test_the_panel_stays_alive_in_the_place_of_the_record(lab: Lab) -> None:
    lab.run(TRAINS + "notebook_launcher(train, kwargs={'steps': 60}, num_processes=2)", "notebook_launcher(int)")
    lab.wait_for_state("finished")
    record = lab.page.locator(".jp-RenderedHTMLCommon", has_text="finished in").first
    record.wait_for(state="hidden")
    assert lab.panel.get_by_role("tab").count() == 3
    box, cell = lab.panel.bounding_box(), lab.page.locator(".jp-CodeCell .jp-InputArea-editor").nth(1).bounding_box()
    assert box
    assert cell
    assert abs(box["width"] - cell["width"]) < 40  # it fills the cell
    keep_picture(lab.page, "panel-at-the-end.png")
    end_kernels(lab.url)
    lab.panel.wait_for()


def test_two_hundred_thousand_lines_leave_the_page_quick(lab: Lab) -> None:
    prints = """
def prints(rank):
    for number in range(100_000):
        print(f"line {number:06d} of rank {rank}")
result = notebook_launcher(prints, num_processes=2)
"""
    lab.run(prints)
    lab.wait_for_state("finished")
    lab.log_says("line 099999 of rank")  # of the rank that printed last
    slowest = lab.page.evaluate(_SCROLLED)
    assert lab.page.locator(".nbl-line").count() < 500  # only what is seen is in the page
    lab.panel.get_by_role("tab", name="rank 1").click()
    lab.find("line 091234 of rank 1")
    assert slowest < 1000, f"the slowest frame while scrolling took {slowest:.0f} ms"  # a frozen page takes seconds


_SCROLLED = """async () => {
    const log = document.querySelector(".nbl-log")
    let slowest = 0, last = performance.now()
    for (let step = 0; step < 60; step++) {
        log.scrollTop = log.scrollHeight * Math.abs(Math.sin(step / 7))
        await new Promise(requestAnimationFrame)
        const now = performance.now()
        slowest = Math.max(slowest, now - last)
        last = now
    }
    log.scrollTop = log.scrollHeight
    return slowest
}"""


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
    lab.page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    lab.run(hostile)
    lab.wait_for_state("failed")
    lab.log_says("<img src=x onerror")
    assert lab.page.evaluate("() => window.hacked === undefined")
    assert lab.panel.locator("img, script, [onerror]").count() == 0
    assert lab.panel.locator(".nbl-failure", has_text="<script>window.hacked").count() == 1
    lab.page.keyboard.press("Control+s")
    path = lab.folder / "test.ipynb"
    eventually(lambda: "failed after" in path.read_text())
    saved = json.loads(path.read_text())
    html = "".join("".join(output.get("data", {}).get("text/html", "")) for output in saved["cells"][1]["outputs"])
    assert "&lt;script&gt;" in html
    assert "<script" not in html


@pytest.mark.parametrize(
    ("name", "server", "size"),
    [("light", LAB, (1200, 1000)), ("narrow", LAB, (520, 1000)), ("dark", DARK, (1200, 1000))],
    indirect=["server"],
)
def test_the_rank_that_failed_first_is_on_top_among_eight_noisy_ones(lab: Lab, name: str) -> None:
    lab.run(FAILS)
    lab.wait_for_state("failed")
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
    keep_picture(lab.page, "failed.png" if name == "light" else f"panel-failed-{name}.png")


@pytest.mark.parametrize(("name", "server"), [("light", LAB), ("dark", DARK)], indirect=["server"])
@pytest.mark.parametrize("size", [(1200, 1300)])
def test_eight_ranks_that_go_well_show_their_progress_and_metrics(lab: Lab, name: str) -> None:
    lab.run(TRAINS + "notebook_launcher(train, kwargs={'steps': 200}, num_processes=8)")
    lab.log_says("step 60")
    assert lab.panel.get_by_role("progressbar").count() == 8
    cards = lab.panel.locator(".nbl-card .nbl-metric-name").all_inner_texts()
    assert cards == ["accuracy", "loss"]
    lab.panel.scroll_into_view_if_needed()
    keep_picture(lab.page, f"panel-running-{name}.png")
    lab.wait_for_state("finished")
    keep_picture(lab.page, f"panel-finished-{name}.png")


def test_everything_is_reached_by_the_keyboard_and_has_a_name(lab: Lab) -> None:
    lab.run(TRAINS + "notebook_launcher(train, kwargs={'steps': 100}, num_processes=2)")
    lab.wait_for_state("finished")
    nameless = lab.panel.locator("button, input, [role=tab], [role=progressbar]").evaluate_all(
        """all => all.filter(e => !e.hidden && !(e.ariaLabel || e.textContent.trim() || e.title || e.placeholder))
                     .map(e => e.outerHTML)"""
    )
    assert nameless == []
    tab = lab.panel.get_by_role("tab").first
    tab.focus()
    lab.page.keyboard.press("ArrowRight")
    assert lab.panel.get_by_role("tab").nth(1).get_attribute("aria-selected") == "true"


def _ranks() -> set[int]:
    """Processes of this test run that lead a group whose parent is a reaper: the ranks."""
    ranks = set()
    for pid in marked_processes():
        try:
            group, parent = (int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[i]) for i in (2, 1))
            names = Path(f"/proc/{pid}/comm").read_text()
            grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            is_rank = group == pid and "forkserver" in Path(f"/proc/{grandparent}/cmdline").read_text()
        except (OSError, IndexError):
            continue
        if is_rank and names:
            ranks.add(pid)
    return ranks
