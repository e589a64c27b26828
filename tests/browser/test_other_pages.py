"""The panel's real scripts in Chromium, with a real kernel, in pages that behave as those of VS Code and Colab.

There is no comm while a cell runs: what the page sends waits for its end. VS Code runs a widget's script only when the
user scrolls to it; earlier messages are lost. Its kernel connection takes control messages, and a server that does not
exist for everything else. Colab's page has an iframe for each output, with no kernel at all.
"""

from __future__ import annotations

import base64
import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext

from nblaunch.notebook.widget import loader, script, style
from tests.browser.conftest import keep_picture
from tests.browser.lab import open_page
from tests.conftest import eventually
from tests.kernel.harness import Kernel, running_kernel
from tests.kernel.page import Page

WAITS = """
def waits(rank):
    import time
    for number in range(50 * rank):  # of one rank alone: with another's after it, its last line would be out of sight
        print(f"line {number} of rank {rank}", flush=True)
    while True:
        time.sleep(0.05)

notebook_launcher(waits, num_processes=2)
"""


class OtherPage:
    """A page with one panel.

    Args:
        shown: In Chromium.
        page: What the kernel has sent for the panel.
    """

    def __init__(self, shown: Any, page: Page) -> None:
        self.shown, self.page = shown, page
        self.delivered = 0
        self.has_ended = False
        """The cell: from then on what the page sends reaches the kernel."""
        shown.expose_function("control", self._control)
        shown.add_script_tag(path=str(Path(__file__).with_name("other_page.js")))

    def start_waiting(self) -> str:
        """Start a cell of which rank 1 has printed all that it prints."""
        request = self.page.start(WAITS)
        self.page.take_until(lambda: "line 49 of rank 1" in self.page.log(1).values())
        return request

    def open(self, is_vscode: bool) -> None:
        """Draw the panel now: what came before is lost."""
        models = {"scripts": {"script": script(), "sheet": style()}} if is_vscode else {}
        state = self.page.state | ({"script": "IPY_MODEL_scripts"} if is_vscode else {})
        self.delivered = len(self.page.messages)
        given = {"loader": loader(), "state": state, "models": models, "isVsCode": is_vscode}
        self.shown.evaluate("(given) => window.open(given)", given)

    def _control(self, kind: str) -> None:
        client = self.page.kernel.client
        client.control_channel.send(client.session.msg(kind, {}))

    def says(self, text: str) -> bool:
        """Deliver what comes until the panel says this."""
        found = self.shown.get_by_text(text)
        self._deliver_until(lambda: found.count() > 0 and found.first.is_visible())
        return True

    def click(self, name: str) -> None:
        self.shown.get_by_role("button", name=name).first.click()

    def finish(self, request: str) -> None:
        """Deliver until the cell has ended."""
        self._deliver_until(lambda: request in self.page.idle)
        self.has_ended = True

    def _deliver_until(self, condition: Any) -> None:
        def delivered() -> bool:
            with contextlib.suppress(queue.Empty):
                self.page.take(0.1)
            self._deliver()
            return bool(condition())

        eventually(delivered)

    def _deliver(self) -> None:
        for _, content, data in self.page.messages[self.delivered :]:
            self.shown.evaluate(
                "([content, data]) => window.deliver(content, data)", [content, base64.b64encode(data).decode()]
            )
        self.delivered = len(self.page.messages)
        for content in self.shown.evaluate("window.queue.splice(0)") if self.has_ended else []:
            self.page.send(**content)
        self.shown.evaluate("new Promise(requestAnimationFrame)")  # and let the page call `control`


@pytest.fixture(scope="module")
def kernel(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with running_kernel(NBLAUNCH_VIEW="auto", NBLAUNCH_STATE_DIR=str(tmp_path_factory.mktemp("state"))) as kernel:
        kernel.run("%load_ext nblaunch\nfrom nblaunch import notebook_launcher").check()
        yield kernel


@pytest.fixture
def other(chromium: BrowserContext, kernel: Kernel) -> Iterator[OtherPage]:
    with open_page(chromium) as shown:
        yield OtherPage(shown, Page(kernel))


def test_in_vscode_a_panel_that_is_drawn_late_is_whole(other: OtherPage) -> None:
    request = other.start_waiting()
    other.open(is_vscode=True)
    other.click("Stacks")
    assert other.says("No stacks: the kernel does not answer while a cell runs.")
    other.click("Restart kernel")
    assert other.says("Use your editor's Restart button")

    other.click("Stop")  # by an interrupt
    other.finish(request)
    assert other.says("Stopped")
    assert other.says("line 49 of rank 1")
    keep_picture(other.shown, "vscode.png")
    assert len(other.page.tracebacks) == 1
    assert other.page.tracebacks[0].startswith("KeyboardInterrupt")


def test_in_colab_stop_points_at_the_notebooks_button(other: OtherPage) -> None:
    carries = "import sys, types; sys.modules['google.colab.output'] = types.SimpleNamespace(_widgets=types."
    other.page.run(f"{carries}SimpleNamespace(_installed_url='x'), enable_custom_widget_manager=lambda: None)")
    request = other.start_waiting()
    other.open(is_vscode=False)
    other.click("Stop")
    assert other.says("use the notebook's Interrupt button")
    other.page.kernel.interrupt()
    other.finish(request)
    assert other.says("Stopped")
    assert other.says("line 49 of rank 1")
    other.page.run("del sys.modules['google.colab.output']")
