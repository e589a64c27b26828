"""The buttons of the panel and its notebook in a real JupyterLab in Chromium: Stop, Kill, Restart, Stacks, Profile."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from pathlib import Path

import pytest

from tests.browser.cells import GRACE, TRAINS
from tests.browser.conftest import LAB, NO_SUBSHELLS, NOTEBOOK, SHARED, Lab, keep_picture
from tests.browser.lab import wait_until_idle
from tests.conftest import eventually, marked_processes

SAVES = """
def train(rank):
    import time
    for step in progress(range(10_000)):
        report(step=step, loss=1 / (step + 1))
        try:
            if step < 6:
                print("step", step, flush=True)
            time.sleep(0.05)
        except KeyboardInterrupt:
            print("saving a checkpoint", flush=True)
            for part in progress(range(100_000), desc="checkpoint"):
                time.sleep(0.1)
                if go.exists():
                    break
            print("saved", flush=True)
            raise
notebook_launcher(train, num_processes=2, stop_grace=600)
"""
DEAF = """
from nblaunch.launch.frontend import host
channel = host()._channel
stream, channel._stream = channel._stream, None  # as with another ipykernel
"""
LISTENS_AGAIN = "channel._stream = stream\n"


@pytest.mark.parametrize(
    ("served", "kernel", "raised"),
    [
        (LAB, "", "LaunchStoppedError"),
        (NO_SUBSHELLS, DEAF, "KeyboardInterrupt"),
        (NOTEBOOK, "", "LaunchStoppedError"),
    ],
    ids=["lab", "kernel that does not listen", "notebook"],
    indirect=["served"],
)
def test_stop_ends_the_ranks_of_a_cell_that_blocks(lab: Lab, kernel: str, raised: str) -> None:
    trains = f"{kernel}\n{TRAINS}notebook_launcher(train, num_processes=2, stop_grace={GRACE})"
    lab.run(trains, (LISTENS_AGAIN if kernel else "") + "40 + 2")
    lab.log_says("begun")
    lab.panel.locator(".nbl-card").first.wait_for()
    assert lab.state() == "running"
    lab.page.locator('.jp-Notebook-ExecutionIndicator[data-status="busy"]').wait_for(state="attached")
    lab.button("Stop").click()
    lab.wait_for_state("stopped")
    assert "Logs" not in lab.panel.locator(".nbl-notice").inner_text()  # their path stands below the log
    either = lab.output(raised).or_(lab.output("KeyboardInterrupt"))  # the page interrupts a kernel that answers late
    either.first.wait_for()
    lab.run_cell(2)
    lab.page.locator(".jp-OutputArea-executeResult", has_text="42").wait_for()


def test_stop_shows_a_countdown_while_a_checkpoint_finishes(lab: Lab) -> None:
    go = lab.folder / "go"
    lab.run(f"from pathlib import Path\ngo = Path({str(go)!r}){SAVES}")
    lab.log_says("step 5")
    lab.button("Stop").click()
    lab.log_says("saving a checkpoint")
    lab.panel.get_by_text(re.compile(r"\d+ s left for checkpoints")).wait_for()
    keep_picture(lab.page, "panel-stopping.png")
    lab.button("Kill").wait_for()
    go.touch()
    lab.wait_for_state("stopped")
    lab.log_says("saved")


def test_stacks_show_ranks_that_only_a_second_click_kills(lab: Lab) -> None:
    ignores = f"""
import time
def ignores():
    says = "begun"
    while True:
        try:
            print(says, flush=True)
            time.sleep(100)
        except KeyboardInterrupt:
            says = "not now"
notebook_launcher(ignores, num_processes=2, stop_grace={GRACE})
"""
    lab.run(ignores)
    lab.log_says("begun")
    lab.button("Stacks").click()  # while the cell blocks
    lab.panel.locator(".nbl-stacks", has_text="time.sleep(100)").wait_for()
    keep_picture(lab.page, "panel-stacks.png")
    lab.button("Stop").click()
    lab.log_says("not now")
    lab.button("Kill").click()
    lab.wait_for_state("stopped")


WAITS_FOR_ITS_DATA = """
import time, torch, torch.distributed as dist
class Slow(torch.utils.data.Dataset):
    def __init__(self, nap): self.nap = nap
    def __len__(self): return 10**6
    def __getitem__(self, index):
        time.sleep(self.nap)
        return torch.ones(4)
def train(rank):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
    for x in torch.utils.data.DataLoader(Slow(0.01 + 0.03 * rank)):
        dist.all_reduce(x)
        optimizer.step()
        print("begun", flush=True)
notebook_launcher(train, num_processes=2)
"""


@pytest.mark.parametrize("size", [(1000, 900)])
def test_profile_says_what_takes_the_time_and_the_record_keeps_it(lab: Lab) -> None:
    lab.run(WAITS_FOR_ITS_DATA)
    lab.log_says("begun")
    lab.button("Profile").click()  # while the cell blocks
    lab.panel.get_by_text("Recording what the ranks do, then reading it …").wait_for()
    profile = lab.panel.get_by_role("region", name="Profile")
    profile.get_by_text(re.compile(r"Rank 0 waits \d+% of the time for rank 1, whose data loading takes")).wait_for()
    assert lab.panel.get_by_text("Recording what the ranks do, then reading it …").count() == 0
    profile.get_by_text("Operations that took the most time").click()
    place = profile.locator('tr:has(span[title="DataLoader"]) code')  # other rows may have a line with that word
    assert place.inner_text().endswith("time.sleep(self.nap)")
    waiting = profile.locator('span[title^="waiting"]').first  # in rank 0's bar
    assert waiting.evaluate("part => part.offsetWidth / part.parentNode.offsetWidth") > 0.4
    keep_picture(lab.page, "panel-profile.png")
    with lab.theme("JupyterLab Dark"):
        keep_picture(lab.page, "panel-profile-dark.png")
    with lab.page.expect_download() as saved:
        profile.get_by_role("button", name="Save trace").click()
    events = json.loads(gzip.decompress(saved.value.path().read_bytes()))["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    profile.get_by_role("button", name="Close the profile").click()
    profile.wait_for(state="hidden")
    lab.button("Stop").click()
    lab.wait_for_state("stopped")
    lab.save()
    assert "whose data loading takes" in (lab.folder / SHARED).read_text()


@pytest.mark.parametrize("served", [NO_SUBSHELLS], ids=["without subshells"], indirect=True)
def test_stop_ends_ranks_that_have_long_been_silent(lab: Lab) -> None:
    silent = f"""
def stops_itself():
    import os, signal
    print("begun", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
notebook_launcher(stops_itself, num_processes=2, stop_grace={GRACE})
"""
    lab.run(silent)
    lab.log_says("begun")
    lab.page.wait_for_timeout(7000)  # longer than MAX_SILENCE_MS of the page: it now counts the launch as silent
    lab.button("Stop").click()
    lab.wait_for_state("stopped")


def test_restart_takes_two_clicks_and_the_next_launch_works(lab: Lab) -> None:
    trains = TRAINS + "notebook_launcher(train, num_processes=2)"
    lab.run(trains, "notebook_launcher(lambda: 'fresh', num_processes=2)[1]")
    lab.log_says("begun")
    ranks = _ranks()
    assert len(ranks) == 2
    lab.button("Restart kernel").click(trial=True)
    lab.button("Restart kernel").evaluate(_CLICKED_TWICE)
    eventually(lambda: not ranks & marked_processes())
    assert lab.page.locator(".jp-Dialog").count() == 0
    lab.panel.locator('.nbl-pill[data-state="gone"]').wait_for()
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save()")
    assert "■ Kernel restarted" in (lab.folder / SHARED).read_text(encoding="utf-8")
    wait_until_idle(lab.page)
    lab.run_cell(0)
    lab.run_cell(2)
    lab.page.locator(".jp-OutputArea-executeResult", has_text="fresh").wait_for()
    assert lab.button("Stop").count() == 0 or not lab.button("Stop").is_visible()
    lab.server.end_kernels()  # the process that the test has started


_CLICKED_TWICE = """async button => { // in the page, as the first click is forgotten after 3 s
    button.click()
    while (!button.textContent.startsWith("Click again")) await new Promise(requestAnimationFrame)
    button.click()
}"""


def _ranks() -> set[int]:
    ranks = set()
    for pid in marked_processes():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text() == "nblaunch-rank\n":
                ranks.add(pid)
    return ranks
