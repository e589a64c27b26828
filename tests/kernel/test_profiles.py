"""Profiles in a real kernel: the line magics, the option of a cell, and the messages of a page."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from tests.conftest import eventually
from tests.kernel.harness import Kernel
from tests.kernel.page import Page

TRAIN = """\
import time, torch
def train(rank, steps=1_000_000):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
    for step in range(steps):
        time.sleep(0.02)
        optimizer.step()
        (folder / f"ready{rank}").touch()
        if (folder / "leave").exists():
            break
"""
SENTENCE = r"Code outside of torch takes \d+% of a step, most of it in Cell In\[\d+\], line 5: time\.sleep\(0\.02\)\."


def ready(folder: Path) -> bool:
    return all((folder / f"ready{rank}").exists() for rank in range(2))


def test_the_line_magic_profiles_launches_and_cells_of_sessions(kernel: Kernel, folder: Path) -> None:
    assert kernel.run("%distributed profile").check().stdout == "no launch is running\n"
    kernel.run("%distributed session -n 2").check()
    kernel.run(TRAIN).check()
    kernel.run("%%distributed --background -o job --view none\ntrain(rank)").check()
    eventually(lambda: ready(folder))
    shown = kernel.run("%distributed profile --seconds 0.5").check().stdout
    recorded = r"Recorded: \d+\.\d s, \d+ steps of an optimizer"
    assert re.match(rf"<Launch .* of .*: 2 ranks, running for \d+ s>\n{SENTENCE}\n{recorded}\nrank  steps/s", shown), (
        shown
    )
    (folder / "leave").touch()
    kernel.run("job.result()\n%distributed session stop").check()
    wrong = kernel.run("%distributed profile --seconds x")
    assert "invalid float value: 'x'" in wrong.stderr + wrong.error


def test_a_cell_takes_the_option(kernel: Kernel, folder: Path) -> None:
    kernel.run(TRAIN).check()
    shown = kernel.run("%%distributed -n 2 --profile 0.5 -o result --view text\ntrain(rank, steps=60)").check()
    assert re.search(SENTENCE, shown.stdout + shown.stderr), shown
    assert kernel.ask("len(result.profiles)") == 1
    assert kernel.ask("list(result.profiles[0].summary.to_pandas().columns)[:2]") == ["rank", "seconds"]
    assert kernel.ask("result.profiles[0].trace.exists()")
    refused = kernel.run("%%distributed -n 2 --profile 0\n1")
    assert re.match(r"UsageError: --profile 0\.0: must be a positive number of seconds", refused.stderr)


def test_a_page_gets_a_profile_while_the_cell_runs_and_saves_its_trace(page: Page, folder: Path) -> None:
    page.run(f"from pathlib import Path\nfolder = Path({str(folder)!r})\n{TRAIN}")
    page.new_subshell()
    cell = page.start("result = notebook_launcher(train, num_processes=2)")
    page.take_until(lambda: page.status == "running" and ready(folder))
    launch = page.state["info"]["launch"]
    page.send(kind="profile", launch=launch)
    page.take_until(lambda: page.of("acknowledged"))
    page.take_until(lambda: page.part("profile"))
    assert re.search("Code outside of torch takes", page.part("profile")["html"])
    assert cell not in page.idle
    page.send(kind="trace", launch=launch)
    page.take_until(lambda: page.of("trace"))
    (content,) = (data for _, message, data in page.messages if message["kind"] == "trace")
    events = json.loads(gzip.decompress(content))["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    (folder / "leave").touch()
    page.take_until(lambda: cell in page.idle)
    assert "Code outside of torch takes" in page.displays[-1]["text/html"]
    page.kernel.run("result.profiles[0].trace.unlink()").check()
    page.messages.clear()
    page.send(kind="trace", launch=launch)
    page.take_until(lambda: page.of("trace"))
    assert page.messages[-1][2] == b""
