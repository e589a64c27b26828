"""One Chromium for all tests, one server for each configuration, and one page with JupyterLab in it for each file.

A test opens its notebook in the file's page, with a kernel of its own. A page that a test leaves in doubt is replaced.

With NBLAUNCH_PICTURES set to a folder, the pictures of the README and of the panel are kept there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Error, Locator, Page

from tests.browser.lab import (
    choose_theme,
    close_documents,
    end_kernels,
    load_lab,
    load_notebook,
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
        loaded: JupyterLab is in the page already.
    """

    url: str
    folder: Path
    app: str
    page: Page
    loaded: bool

    def open(self, name: str) -> None:
        """Open a notebook alone, and wait until its kernel is idle."""
        if self.loaded:
            open_notebook(self.page, name)
        else:
            load_notebook(self.page, self.url, name, self.app)

    def run(self, *cells: str) -> Locator:
        """Make a notebook of these cells, run all of it, and wait for the first panel, which is given."""
        write_notebook(self.folder / "test.ipynb", SETUP, *cells)
        self.open("test.ipynb")
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

    @contextmanager
    def theme(self, name: str) -> Iterator[None]:
        """Choose another theme for a while."""
        before = self.page.evaluate("() => document.body.dataset.jpThemeName")
        choose_theme(self.page, name)
        try:
            yield
        finally:
            choose_theme(self.page, before)


@dataclass(frozen=True)
class Served:
    """What to serve: ``jupyterlab`` or ``notebook``, with these settings of the user."""

    app: str = "jupyterlab"
    settings: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()


LAB = Served()
NO_SUBSHELLS = Served(
    settings=(("@jupyterlab/apputils-extension/kernels-settings", (("commsOverSubshells", "disabled"),)),)
)
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
def fresh_lab(chromium: BrowserContext, server: Server, size: tuple[int, int]) -> Iterator[Lab]:
    """A page of the test's own, which loads its notebook by address; its kernels are ended with the test."""
    url, folder, app = server
    try:
        with open_page(chromium) as page:
            page.set_viewport_size({"width": size[0], "height": size[1]})
            yield Lab(url, folder, app, page, loaded=False)
    finally:
        end_kernels(url)  # the page has gone: it asks for no more of them


@pytest.fixture
def lab(request: pytest.FixtureRequest, server: Server, size: tuple[int, int], _pages: _Pages) -> Iterator[Lab]:
    """The file's page in the server, with no document open; its kernels are ended with the test.

    Jupyter Notebook has a page for each notebook: there it is `fresh_lab`.
    """
    url, folder, app = server
    if app == "notebook":
        yield request.getfixturevalue("fresh_lab")
        return
    page = _pages.get(url)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    try:
        yield Lab(url, folder, app, page, loaded=True)
    finally:
        _pages.clear(url, failed=request.node.stash.get(_FAILED, True))
        end_kernels(url)  # no document is open: the page asks for no more of them


@pytest.fixture(scope="module")
def _pages(chromium: BrowserContext) -> Iterator[_Pages]:
    pages = _Pages(chromium)
    yield pages
    pages.close()


class _Pages:
    """The pages of a file, in which JupyterLab is loaded: one for each server."""

    def __init__(self, chromium: BrowserContext) -> None:
        self._chromium = chromium
        self._opened: dict[str, tuple[Page, contextlib.ExitStack, list[Error]]] = {}

    def get(self, url: str) -> Page:
        """Return the server's page, which has no document open."""
        if url not in self._opened:
            errors: list[Error] = []
            with contextlib.ExitStack() as stack:
                page = stack.enter_context(open_page(self._chromium))
                page.on("pageerror", lambda error: errors.append(error))
                load_lab(page, url)
                self._opened[url] = page, stack.pop_all(), errors
        return self._opened[url][0]

    def clear(self, url: str, failed: bool) -> None:
        """Close all documents of a page, or the page itself if what was done there may reach the next test."""
        page, stack, errors = self._opened[url]
        if failed or not close_documents(page) or errors:
            del self._opened[url]
            stack.close()

    def close(self) -> None:
        """Close all pages."""
        for _, stack, _ in self._opened.values():
            stack.close()


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember whether a test failed: its page is not for another test."""
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


def keep_picture(page: Page, name: str) -> None:
    """Keep a picture of the page, where pictures are wanted."""
    if "NBLAUNCH_PICTURES" in os.environ:
        page.screenshot(path=str(Path(os.environ["NBLAUNCH_PICTURES"]) / name))
