"""What users do in a notebook, in the kernel of each platform. One kernel runs all tests of a platform, in order."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from packaging.requirements import Requirement

from tests.conftest import eventually
from tests.kernel.harness import Kernel, running_kernel
from tests.kernel.page import WIDGET, Page
from tests.platforms import environments
from tests.platforms.environments import Platform, platform

_PROGRAM = """
import os, time, torch
import torch.distributed as dist
from nblaunch import notebook_launcher, report

def trains(rank, world_size, device):
    total = torch.ones(1, device=device) * (rank + 1)
    dist.all_reduce(total)
    report(step=0, loss=total.item())
    print(f"rank {rank} of {world_size}")
    time.sleep(3)
    return total.item(), torch.arange(300_000)

def waits():
    print("waiting", flush=True)
    time.sleep(600)
"""


DIFFERENT = ("colab", "oldest", "sagemaker")
"""Kaggle's is like the oldest, and the newest is what all other tests run in, unless each has its own Python."""


@pytest.fixture(scope="module", params=environments.NAMES if environments.is_real() else DIFFERENT)
def where(request: pytest.FixtureRequest) -> Platform:
    return platform(request.param)


@pytest.fixture(scope="module")
def kernel(where: Platform, _marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """The platform's, with `_PROGRAM` in it; it shows panels."""
    state = str(tmp_path_factory.mktemp("state"))
    with running_kernel(*where.command, **where.env, NBLAUNCH_VIEW="auto", NBLAUNCH_STATE_DIR=state) as kernel:
        # or ipykernel 6 aborts a cell that arrives right after a failed one
        kernel.client.execute = functools.partial(kernel.client.execute, stop_on_error=False)  # type: ignore[method-assign]
        kernel.run("%load_ext nblaunch").check()
        assert kernel.run(_PROGRAM).check().stderr == ""
        yield kernel


@pytest.fixture
def page(kernel: Kernel) -> Page:
    return Page(kernel)


def test_an_installation_upgrades_nothing(where: Platform) -> None:
    requirements = [Requirement(each) for each in importlib.metadata.requires("nblaunch") or ()]
    wanted = {each.name: each.specifier for each in requirements if each.marker is None}
    assert {name: pin for name, pin in where.pins.items() if name in wanted and pin not in wanted[name]} == {}
    assert where.torch in wanted["torch"]


def test_the_kernel_has_the_platforms_versions(where: Platform, kernel: Kernel) -> None:
    import_ = "__import__('importlib.metadata', fromlist=['version']).version"
    assert {name: kernel.ask(f"{import_}({name!r})") for name in where.pins} == where.pins


def test_a_launch_shows_a_panel_that_ends_as_its_record(where: Platform, page: Page) -> None:
    page.run("result = notebook_launcher(trains, num_processes=2)")
    page.take_until(lambda: page.tracebacks or (page.status == "finished" and page.log(1)))

    assert not page.tracebacks
    assert list(page.log(1).values())[-1] == "rank 1 of 2"  # before it torch 2.8 says who is connected
    assert page.part("charts")
    assert any(WIDGET in each for each in page.displays)
    assert "Finished in" in page.displays[-1]["text/plain"]
    assert WIDGET not in page.displays[-1]
    assert page.kernel.ask("[each[0] for each in result], result[1][1].sum().item()") == ([3.0, 3.0], 44_999_850_000)


def test_colabs_page_is_told_its_widget_manager(where: Platform, kernel: Kernel) -> None:
    cell = kernel.run("_ = notebook_launcher(trains, num_processes=1)").check()
    shown = [each["content"] for each in cell.messages if WIDGET in each["content"].get("data", {})]
    opened = [each["content"]["data"]["state"] for each in cell.messages if each["msg_type"] == "comm_open"]
    (panel,) = [state for state in opened if "info" in state]
    if where.name != "colab":
        assert shown[0]["metadata"] == {}
        assert panel["script"].startswith("IPY_MODEL_")
        return
    assert list(shown[0]["metadata"][WIDGET]["colab"]) == ["custom_widget_manager"]
    assert "export default" in panel["script"]
    assert panel["sheet"]
    assert kernel.ask("__import__('sys').modules['google.colab.output'].threads[0]") == "MainThread"


def test_a_cell_runs_on_ranks(kernel: Kernel) -> None:
    kernel.run("%%distributed -n 2 -o sums --view text\nt = torch.ones(1) * (rank + 1)\ndist.all_reduce(t)\nt.item()")
    assert kernel.ask("list(sums)") == [3.0, 3.0]
    assert "--num-processes" in kernel.complete("%%distributed --num")
    assert "Run the cell on every rank" in kernel.run("%distributed help").check().stdout
    assert kernel.run("%distributed status").check().stdout.startswith("fork server")


def test_errors_are_at_the_cells_line(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed -n 2\nx = 1\nx / 0")
    assert cell.error == "ZeroDivisionError: division by zero"
    assert re.search(r"line 3|----> 3", _plain(cell.traceback))
    cell = kernel.run("%%distributed -n 2\nx = 1\nif x\n    pass")
    assert cell.error.startswith("SyntaxError: expected ':'")
    assert "line 3" in _plain(cell.traceback)
    assert "nblaunch" not in cell.traceback  # none of our frames


def test_stop_reaches_ranks_while_the_cell_runs(page: Page) -> None:
    has_subshells = page.kernel.ask("__import__('ipykernel').version_info[0] >= 7")
    request = page.start("notebook_launcher(waits, num_processes=2)")
    page.take_until(lambda: page.log(0) and page.log(1))
    if has_subshells:
        page.new_subshell()
    page.send(kind="stop", launch=page.state["info"]["launch"])
    page.take_until(lambda: request in page.idle)
    assert (page.status, len(page.tracebacks)) == ("stopped", 1)
    page.end_subshells()


def test_an_interrupt_ends_the_launch(kernel: Kernel) -> None:
    request = kernel.start_cell("notebook_launcher(waits, num_processes=2, view='text')")
    kernel.finish_cell(request, until="[rank 1] waiting")
    kernel.interrupt()
    assert kernel.finish_cell(request).error.startswith("KeyboardInterrupt")
    assert kernel.run("1 + 1").value == "2"


def test_a_session_keeps_names_and_opens_debuggers(kernel: Kernel) -> None:
    kernel.run("%distributed session -n 2 -o s").check()
    kernel.run("%%distributed\ntotal = rank + 5").check()
    assert kernel.ask("s.pull('total')") == [5, 6]
    stopped = kernel.debug("%%distributed\nbreakpoint()\ntotal += 1", "p total * 100", "c", "c")
    assert re.search("^[56]00$", stopped.check().stdout, re.MULTILINE)
    assert kernel.ask("s.pull('total')") == [6, 7]
    assert kernel.run("%%distributed\ntotal / 0").error.startswith("ZeroDivisionError")
    assert re.search("^[67]00$", kernel.debug("%distributed debug", "p total * 100", "q").check().stdout, re.MULTILINE)
    kernel.run("%distributed session stop").check()


@pytest.mark.parametrize("where", ["kaggle"], indirect=True)  # whose "Save & Run All" has no page
def test_a_notebook_is_executed_without_a_page(
    where: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in where.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NBLAUNCH_STATE_DIR", str(tmp_path))
    cells = [nbformat.v4.new_code_cell(each) for each in (_PROGRAM, "notebook_launcher(trains, num_processes=2)")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, timeout=180)
    client.create_kernel_manager().kernel_spec.argv = [*where.command, "-f", "{connection_file}"]  # type: ignore[union-attr]
    client.execute()
    record, *_ = [each for each in cells[1].outputs if "text/html" in each.get("data", {})]
    assert "✓ Finished" in record.data["text/html"]
    assert "rank 1 of 2" in record.data["text/html"]
    eventually(lambda: client.km is None or not client.km.has_kernel)


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)
