"""Cells that the Jupyter server runs itself, as jupyter-server-nbmodel and jupyter-server-documents do.

Such a server sends with jupyter_client, from the kernel's parent process, as this test does.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LONG
from tests.kernel.harness import Cell, Kernel
from tests.kernel.page import WIDGET, Page

SENT_BY_SERVER = "__import__('nblaunch.machine.server_cells', fromlist=['']).runs_on_server(get_ipython().kernel)"
CONNECTION_FILE = """
from jupyter_client.multikernelmanager import MultiKernelManager
print(MultiKernelManager().pre_start_kernel("python3", {})[0].connection_file)
"""
"""Of a kernel as a Jupyter server starts it."""
WAITS = """
def waits(go):
    import pathlib, time
    while not pathlib.Path(go).exists():
        time.sleep(0.01)
"""


@pytest.fixture
def served(page: Page) -> Iterator[Kernel]:
    """The kernel of the panels, with a connection file named as a server names it."""
    made = subprocess.run([sys.executable, "-c", CONNECTION_FILE], check=True, capture_output=True, text=True)
    app = "get_ipython().kernel.parent"
    page.kernel.run(f"import builtins; builtins.own_file = {app}.connection_file").check()
    page.kernel.run(f"{app}.connection_file = {made.stdout.strip()!r}").check()
    with page.kernel.changed("nblaunch.launch.views", "PREPARING_NOTE_DELAY_S", 600):  # a display of its own
        yield page.kernel
    page.kernel.run(f"{app}.connection_file = own_file").check()


def _displayed(cell: Cell) -> list[tuple[str, dict[str, Any]]]:
    messages = [message for message in cell.messages if message["msg_type"].endswith("display_data")]
    return [(message["msg_type"], message["content"]["data"]) for message in messages]


def test_a_cell_of_the_server_is_told_from_one_of_a_page(served: Kernel) -> None:
    assert served.ask(SENT_BY_SERVER) is True
    message = served.client.session.msg("execute_request", {"code": f"print({SENT_BY_SERVER})", "silent": False})
    message["header"]["msg_id"] = message["msg_id"] = str(uuid.uuid4())  # as a page sends it
    served.cells[message["msg_id"]] = Cell()
    served.client.shell_channel.send(message)
    assert served.finish_cell(message["msg_id"]).check().stdout == "False\n"


def test_nbclient_is_told_from_a_server(page: Page) -> None:
    assert page.kernel.ask(SENT_BY_SERVER) is False  # nbclient starts its kernel as this one was started


def test_without_a_page_the_cell_ends_with_the_record(served: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    request = served.start_cell(f"{WAITS}\nnotebook_launcher(waits, args=({str(go)!r},), num_processes=1)")
    cell, deadline = served.cells[request], time.monotonic() + LONG
    while not _displayed(cell):
        served.take_message(deadline)
    go.touch()
    shown = _displayed(served.finish_cell(request).check())
    assert [(kind, WIDGET in bundle) for kind, bundle in shown] == [("display_data", True), ("display_data", False)]
    assert ["Running" in bundle["text/plain"] for _, bundle in shown] == [True, False]


def test_a_page_that_writes_the_record_gets_no_other(served: Kernel, page: Page, tmp_path: Path) -> None:
    go = tmp_path / "go"
    page.new_subshell()
    request = page.start(f"{WAITS}\nnotebook_launcher(waits, args=({str(go)!r},), num_processes=1)")
    page.take_until(lambda: page.displays and page.status == "running")
    go.touch()
    page.take_until(lambda: page.status == "finished")
    page.send(kind="record", launch=page.state["info"]["launch"])
    page.take_until(lambda: request in page.idle and page.of("record"))
    assert len(page.displays) == 1
    assert "Finished" in page.of("record")[0]["text"]


def test_a_server_gets_the_record_of_a_short_launch(served: Kernel) -> None:
    *_, (kind, bundle) = _displayed(served.run("notebook_launcher(lambda: None, num_processes=1)").check())
    assert kind == "display_data"
    assert "Finished in" in bundle["text/plain"]


def test_the_panel_of_a_background_launch_is_in_its_cell(served: Kernel, tmp_path: Path) -> None:
    start = f"launch = notebook_launcher(waits, args=({str(tmp_path / 'go')!r},), num_processes=1, block=False)"
    cell = served.run(f"{WAITS}\n{start}").check()
    assert [(kind, WIDGET in bundle) for kind, bundle in _displayed(cell)] == [("display_data", True)]


def test_texts_before_the_panel_are_shown_once(served: Kernel) -> None:
    cell = served.run(
        "from nblaunch.notebook.cell_display import CellDisplay\n"
        "display = CellDisplay(get_ipython())\n"
        "for text in ('importing', 'still importing', ''):\n"
        "    display.show({'text/plain': text})\n"
        "for text in ('running', 'finished'):\n"
        "    display.show({'text/plain': text, 'text/html': text})"
    ).check()
    assert [(kind, bundle["text/plain"]) for kind, bundle in _displayed(cell)] == [
        ("display_data", "importing"),
        ("display_data", "running"),
    ]


def test_training_in_place_shows_its_begin_and_end(served: Kernel) -> None:
    cell = served.run(
        "import time\n"
        "from nblaunch.training.fit_display import FitDisplay\n"
        "display = FitDisplay(total=3, done=0)\n"
        "for number in display.batches(range(3), 'epoch 1'):\n"
        "    time.sleep(0.15)\n"  # longer than between two updates in a page
        "    display.step(number + 1)\n"
        "display.close()"
    ).check()
    shown = [(kind, bundle["text/plain"].split(" · ")[1]) for kind, bundle in _displayed(cell)]
    assert shown == [("display_data", "step 0 of 3"), ("display_data", "step 3 of 3")]


def test_a_session_says_its_status_where_none_can_change(served: Kernel) -> None:
    cell = served.run("%distributed session -n 1").check()
    served.run("%distributed session stop").check()
    (kind, bundle), *others = _displayed(cell)
    assert (kind, others, set(bundle)) == ("display_data", [], {"text/plain"})
    assert "session main: 1 rank" in bundle["text/plain"]
