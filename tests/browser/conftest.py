"""One Chromium for all tests and one server for each configuration; each test has a page and kernels of its own.

With NBLAUNCH_PICTURES set to a folder, the pictures of the README and of the panel are kept there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Locator, Page

from tests.browser.lab import (
    end_kernels,
    open_notebook,
    open_page,
    run_all,
    running_chromium,
    running_lab,
    write_notebook,
)
from tests.conftest import LONG

SETUP = "%load_ext nblaunch\nfrom nblaunch import notebook_launcher, progress, report"


@dataclass
class Lab:
    """A server that runs, and a page in it.

    Attributes:
        url: The server's address.
        folder: Its notebooks.
        app: ``jupyterlab`` or ``notebook``.
        page: What the user sees.
    """

    url: str
    folder: Path
    app: str
    page: Page

    def run(self, *cells: str, name: str = "test") -> Locator:
        """Make a notebook of these cells, run all of it, and wait for the first panel, which is given."""
        write_notebook(self.folder / f"{name}.ipynb", SETUP, *cells)
        open_notebook(self.page, self.url, f"{name}.ipynb", self.app)
        run_all(self.page)
        self.panel.wait_for()
        return self.panel

    @property
    def panel(self) -> Locator:
        """The first panel of the notebook."""
        return self.page.locator(".nbl-root").first

    def state(self) -> str:
        """What the panel's pill says."""
        return self.panel.locator(".nbl-pill").inner_text().strip().lower()

    def wait_for_state(self, state: str, seconds: float = LONG) -> None:
        self.panel.locator(f'.nbl-pill[data-state="{state}"]').wait_for(timeout=seconds * 1000)

    def button(self, name: str) -> Locator:
        return self.panel.get_by_role("button", name=name)

    def log_says(self, text: str, seconds: float = LONG) -> None:
        """Wait until the panel's log shows this."""
        self.panel.locator(".nbl-log", has_text=text).wait_for(timeout=seconds * 1000)

    def find(self, text: str) -> None:
        """Search the log for a text, and wait until it is shown."""
        field = self.panel.get_by_role("searchbox")
        field.fill(text)
        field.press("Enter")
        self.panel.locator(".nbl-line", has_text=text).first.wait_for()

    def output(self, text: str) -> Locator:
        return self.page.locator(".jp-RenderedText", has_text=text)

    def save(self) -> None:
        """Save the notebook, and wait until its file is written."""
        self.page.keyboard.press("Control+s")
        self.page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.model.dirty")

    def save_and_reload(self) -> None:
        """Reload the page, which then shows the notebook as it is now."""
        self.save()
        self.page.reload()

    def run_cell(self, number: int) -> None:
        """Run a cell, without waiting for its end."""
        self.page.locator(".jp-CodeCell").nth(number).locator(".jp-InputArea").click()
        self.page.keyboard.press("Control+Enter")


@dataclass(frozen=True)
class Served:
    """What to serve: ``jupyterlab`` or ``notebook``, with these settings of the user."""

    app: str = "jupyterlab"
    settings: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()


LAB = Served()
NO_SUBSHELLS = Served(
    settings=(("@jupyterlab/apputils-extension/kernels-settings", (("commsOverSubshells", "disabled"),)),)
)
DARK = Served(settings=(("@jupyterlab/apputils-extension/themes", (("theme", "JupyterLab Dark"),)),))
NOTEBOOK = Served(app="notebook")


Server = tuple[str, Path, str]
"""Address, folder and app."""


@pytest.fixture(scope="package")
def chromium(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    """The browser of all tests; its cache is one, as compiling JupyterLab's scripts takes seconds."""
    with running_chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser.new_context()


@pytest.fixture(scope="package")
def _servers(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Served], Server]]:
    """Start a server for each configuration that a test asks for, and keep it for the next."""
    started: dict[Served, Server] = {}
    with contextlib.ExitStack() as stack:

        def start(served: Served) -> Server:
            if served not in started:
                folder = tmp_path_factory.mktemp("served") / "notebooks"
                folder.mkdir()
                settings = {plugin: dict(values) for plugin, values in served.settings}
                url = stack.enter_context(running_lab(folder, served.app, settings))
                started[served] = url, folder, served.app
            return started[served]

        yield start


@pytest.fixture(scope="package")
def server(request: pytest.FixtureRequest, _servers: Callable[[Served], Server]) -> Server:
    """A running server; ``parametrize("server", [...], indirect=True)`` says which."""
    return _servers(getattr(request, "param", LAB))


@pytest.fixture
def size() -> tuple[int, int]:
    """The page's width and height."""
    return 1200, 1000


@pytest.fixture
def lab(chromium: BrowserContext, server: Server, size: tuple[int, int]) -> Iterator[Lab]:
    """A page in the server; its kernels are ended with the test."""
    url, folder, app = server
    try:
        with open_page(chromium, url, *size) as page:
            yield Lab(url, folder, app, page)
    finally:
        end_kernels(url)  # the page has gone: it asks for no more of them


def keep_picture(page: Page, name: str) -> None:
    """Keep a picture of the page, where pictures are wanted."""
    if "NBLAUNCH_PICTURES" in os.environ:
        page.screenshot(path=str(Path(os.environ["NBLAUNCH_PICTURES"]) / name))
