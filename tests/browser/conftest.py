"""One Chromium and one server for all tests, and one page with JupyterLab in it for each configuration.

A test opens its notebook in that page. The notebook's kernel is the file's, which a test leaves idle. A page
that a test leaves in doubt is replaced. After a test that failed, or ended the kernel, every test has its own.

With NBLAUNCH_PICTURES set to a folder, the pictures of the README and of the panel are kept there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Error, Locator, Page
from playwright.sync_api import TimeoutError as TooLateError

from tests.browser.lab import (
    choose_theme,
    close_documents,
    end_kernels,
    kernel_states,
    load_lab,
    load_notebook,
    open_notebook,
    open_page,
    run_all,
    running_chromium,
    running_lab,
    start_kernel,
    write_notebook,
    write_settings,
)
from tests.conftest import LONG, eventually, has_failed

SETUP = "%load_ext nblaunch\nfrom nblaunch import notebook_launcher, progress, report"
PICTURES = "NBLAUNCH_PICTURES"
SHARED = "test.ipynb"
"""The notebook with the shared kernel: Jupyter keeps the kernel of a notebook that is closed."""


@dataclass
class Server:
    """A server that runs.

    Attributes:
        url: Its address.
        folder: Its notebooks.
        settings: Where it reads what the user has set, when a page is loaded.
        session: That of the notebook with the shared kernel; empty before there is one.
    """

    url: str
    folder: Path
    settings: Path
    session: str = ""

    def share_a_kernel(self) -> None:
        """Start the shared kernel, unless it lives."""
        if self.session not in kernel_states(self.url):
            self.session = start_kernel(self.url, SHARED)

    def settle(self, failed: bool) -> None:
        """End a test's own kernels, and wait until the shared one does nothing; after a failure end it, too."""
        if not failed:
            eventually(lambda: kernel_states(self.url).get(self.session) != "busy")
        end_kernels(self.url, but="" if failed else self.session)

    def end_kernels(self) -> None:
        """End all kernels, the shared one included: a test that does so is the last of its file."""
        end_kernels(self.url)


@dataclass
class Lab:
    """A server that runs, and a page in it.

    Attributes:
        server: The server.
        app: ``jupyterlab`` or ``notebook``.
        page: What the user sees.
        loaded: JupyterLab is in the page already.
        number: The panel of the notebook that is looked at, from 0.
        title: Looks at the panels that contain this text alone.
    """

    server: Server
    app: str
    page: Page
    loaded: bool
    number: int = 0
    title: str = ""

    @property
    def folder(self) -> Path:
        """The server's notebooks."""
        return self.server.folder

    def open(self, name: str) -> None:
        """Open a notebook alone, and wait until its kernel is idle."""
        if self.loaded:
            open_notebook(self.page, name)
        else:
            load_notebook(self.page, self.server.url, name, self.app)

    def run(self, *cells: str) -> Locator:
        """Make a notebook of these cells, run all of it, and wait for the first panel, which is given."""
        write_notebook(self.folder / SHARED, SETUP, *cells)
        self.open(SHARED)
        run_all(self.page)
        self._await(self.panel, LONG)
        return self.panel

    def _await(self, shown: Locator, seconds: float) -> None:
        """Wait until a part of a panel is shown; if it is not, say what the page shows."""
        try:
            shown.wait_for(timeout=seconds * 1000)
        except TooLateError:
            pills = self.page.locator(".nbl-pill").all_inner_texts()
            seen = "\n".join(self.page.locator(".jp-CodeCell").all_inner_texts())
            raise AssertionError(f"{shown} is not shown; panels: {pills}\n{seen}") from None

    @property
    def panel(self) -> Locator:
        """The panel that is looked at."""
        return self.page.locator(".nbl-root", has_text=self.title).nth(self.number)

    def state(self) -> str:
        """What the panel's pill says."""
        return self.panel.locator(".nbl-pill").inner_text().strip().lower()

    def wait_for_state(self, state: str, seconds: float = LONG) -> None:
        self._await(self.panel.locator(f'.nbl-pill[data-state="{state}"]'), seconds)

    def button(self, name: str) -> Locator:
        return self.panel.get_by_role("button", name=name)

    def log_says(self, text: str, seconds: float = LONG) -> None:
        """Wait until the panel's log shows this."""
        self._await(self.panel.locator(".nbl-log", has_text=text), seconds)

    def find(self, text: str) -> None:
        """Search the log for a text, and wait until it is shown."""
        field = self.panel.get_by_role("searchbox")
        field.fill(text)
        field.press("Enter")
        self.panel.locator(".nbl-line", has_text=text).first.wait_for()

    def output(self, text: str) -> Locator:
        return self.page.locator(".jp-RenderedText", has_text=text)

    def wait_for_cells(self) -> None:
        """Wait until every code cell has run: its output arrives before its number."""
        self.page.wait_for_function(_ALL_CELLS_RAN)

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

    @contextmanager
    def theme(self, name: str) -> Iterator[None]:
        """Choose another theme for a while."""
        before = self.page.evaluate("() => document.body.dataset.jpThemeName")
        choose_theme(self.page, name)
        try:
            yield
        finally:
            choose_theme(self.page, before)


_ALL_CELLS_RAN = """() => [...window.jupyterapp.shell.currentWidget.model.cells]
    .every(cell => cell.type !== "code" || cell.executionCount)"""


@dataclass(frozen=True)
class Served:
    """What to load: ``jupyterlab`` or ``notebook``, with these settings of the user."""

    app: str = "jupyterlab"
    settings: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()


LAB = Served()
NO_SUBSHELLS = Served(
    settings=(("@jupyterlab/apputils-extension/kernels-settings", (("commsOverSubshells", "disabled"),)),)
)
NOTEBOOK = Served(app="notebook")


@pytest.fixture(scope="package")
def chromium(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    """The browser of all tests; its cache is one, as compiling JupyterLab's scripts takes seconds."""
    with running_chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser.new_context()


@pytest.fixture(scope="package")
def server(_marked: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, which serves JupyterLab and Jupyter Notebook."""
    folder = tmp_path_factory.mktemp("served") / "notebooks"
    folder.mkdir()
    with running_lab(folder, settings := folder.parent / "settings") as url:
        yield Server(url, folder, settings)


@pytest.fixture(scope="module")
def _shared_kernel(server: Server) -> None:
    """Start the file's kernel before its tests: none of them must leave a process."""
    server.share_a_kernel()


@pytest.fixture
def served(request: pytest.FixtureRequest, server: Server, _shared_kernel: None) -> Served:
    """What pages are loaded; ``parametrize("served", [...], indirect=True)`` says which."""
    chosen: Served = getattr(request, "param", LAB)
    write_settings(server.settings, {plugin: dict(values) for plugin, values in chosen.settings})
    return chosen


@pytest.fixture
def size() -> tuple[int, int]:
    """The page's width and height."""
    return 1200, 1000


@pytest.fixture
def fresh_lab(
    request: pytest.FixtureRequest, chromium: BrowserContext, server: Server, served: Served, size: tuple[int, int]
) -> Iterator[Lab]:
    """A page of the test's own, which loads its notebook by address."""
    try:
        with open_page(chromium) as page:
            page.set_viewport_size({"width": size[0], "height": size[1]})
            yield Lab(server, served.app, page, loaded=False)
    finally:
        server.settle(has_failed(request))  # the page has gone: it asks for no more of them


@pytest.fixture
def lab(
    request: pytest.FixtureRequest, server: Server, served: Served, size: tuple[int, int], _pages: _Pages
) -> Iterator[Lab]:
    """The configuration's page in the server, with no document open.

    Jupyter Notebook has a page for each notebook: there it is `fresh_lab`.
    """
    if served.app == "notebook":
        yield request.getfixturevalue("fresh_lab")
        return
    page = _pages.get(server.url, served)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    try:
        yield Lab(server, served.app, page, loaded=True)
    finally:
        _pages.clear(served, failed=has_failed(request))
        server.settle(has_failed(request))  # no document is open: the page asks for no more of them


@pytest.fixture(scope="package")
def _pages(chromium: BrowserContext) -> Iterator[_Pages]:
    pages = _Pages(chromium)
    yield pages
    pages.close()


class _Pages:
    """The pages in which JupyterLab is loaded: one for each configuration."""

    def __init__(self, chromium: BrowserContext) -> None:
        self._chromium = chromium
        self._opened: dict[Served, tuple[Page, contextlib.ExitStack, list[Error]]] = {}

    def get(self, url: str, served: Served) -> Page:
        """Return the page with this configuration, which has no document open."""
        if served not in self._opened:
            errors: list[Error] = []
            with contextlib.ExitStack() as stack:
                page = stack.enter_context(open_page(self._chromium))
                page.on("pageerror", lambda error: errors.append(error))
                load_lab(page, url)
                self._opened[served] = page, stack.pop_all(), errors
        return self._opened[served][0]

    def clear(self, served: Served, failed: bool) -> None:
        """Close all documents of a page, or the page itself if what was done there may reach the next test."""
        page, stack, errors = self._opened[served]
        if failed or not close_documents(page) or errors:
            del self._opened[served]
            stack.close()

    def close(self) -> None:
        """Close all pages."""
        for _, stack, _ in self._opened.values():
            stack.close()


def keep_picture(page: Page, name: str) -> None:
    """Keep a picture of the page, where pictures are wanted."""
    if PICTURES in os.environ:
        page.screenshot(path=str(Path(os.environ[PICTURES]) / name))
