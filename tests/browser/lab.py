"""A real JupyterLab, shown in a real Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

import nbformat
from playwright.sync_api import Browser, BrowserContext, Error, Page, sync_playwright
from playwright.sync_api import TimeoutError as TooLateError

from tests.conftest import LONG, MARK

_CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_KERNEL_IS_IDLE = """() => {
    const panel = window.jupyterapp?.shell.currentWidget
    return panel?.sessionContext?.isReady && panel.sessionContext.session?.kernel?.status === "idle"
}"""


@contextmanager
def running_lab(folder: Path, settings: Path) -> Iterator[str]:
    """A JupyterLab server on `folder`, on a free loopback port, which serves Jupyter Notebook, too; gives its address.

    Args:
        folder: Where its notebooks are.
        settings: The folder for `write_settings`.
    """
    config = folder.parent / f"{folder.name}-config"
    (config / "labconfig").mkdir(parents=True, exist_ok=True)  # a killed server has left it
    (config / "labconfig/page_config.json").write_text('{"buildCheck": false}')  # each page would run yarn
    log = folder.parent / f"{folder.name}.log"
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"),
        *("--LabApp.expose_app_in_browser=True", "--JupyterNotebookApp.expose_app_in_browser=True"),
        *("--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True"),
        f"--ServerApp.root_dir={folder}",
    ]
    env = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(config),
        "JUPYTER_RUNTIME_DIR": str(config / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
    }
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        yield _address(server, config / "runtime", log)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:  # seen: it waits for a worker thread of its own that never ends
            server.kill()
            server.wait()


def write_settings(folder: Path, chosen: Mapping[str, Any]) -> None:
    """Have the next pages as their user has them, but with every cell in the page, and no news.

    Args:
        folder: Of the server's settings; others than these are removed.
        chosen: The user's, by plugin.
    """
    needed = {
        "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
        "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }
    shutil.rmtree(folder, ignore_errors=True)
    for plugin, settings in {**needed, **chosen}.items():
        file = folder / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))


def _address(server: subprocess.Popen[bytes], runtime: Path, log: Path) -> str:
    """Wait until the server answers; it writes the file with its address before it listens."""
    deadline = time.monotonic() + LONG
    while server.poll() is None and time.monotonic() < deadline:
        for file in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(json.JSONDecodeError, URLError):  # half written; not listening yet
                url = str(json.loads(file.read_text())["url"])
                urllib.request.urlopen(f"{url}api").close()
                return url
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not come up:\n{log.read_text()[-3000:]}")


@contextmanager
def running_chromium(temporary: Path) -> Iterator[Browser]:
    """Start Chromium, with its temporary files in this folder.

    It runs without this worker's mark: its processes come and go by its own rules and are no leak of a test.
    """
    env: dict[str, str | float | bool] = {**os.environ, "TMPDIR": str(temporary)}
    del env[MARK]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=_CHROMIUM_OPTIONS, env=env)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(context: BrowserContext) -> Iterator[Page]:
    """Open a page with a default timeout of LONG, which shares the context's cache."""
    page = context.new_page()
    try:
        page.set_default_timeout(LONG * 1000)
        yield page
    finally:
        page.close()


def load_notebook(page: Page, url: str, name: str, app: str = "jupyterlab") -> None:
    """Load a page with this notebook alone, in a workspace of its own, and wait until its kernel is idle."""
    page.goto(url + (f"{_workspace()}/tree/{name}?reset" if app == "jupyterlab" else f"notebooks/{name}"))
    try:
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    except TooLateError:  # seen once: Notebook 7 has it and shows nothing, before any code of ours is in the page
        page.reload()
    wait_until_idle(page)


def load_lab(page: Page, url: str) -> None:
    """Load JupyterLab in a workspace of its own, and wait for its launcher: no document is open."""
    page.goto(f"{url}{_workspace()}?reset")
    page.locator(".jp-Launcher").wait_for()


def _workspace() -> str:
    """The address of a new workspace that shows one document."""
    return f"doc/workspaces/nblaunch-{time.monotonic_ns()}"


def open_notebook(page: Page, name: str) -> None:
    """Open a notebook in JupyterLab as it is loaded, and wait until its kernel is idle."""
    page.evaluate(OPENED, name)
    wait_until_idle(page)


OPENED = """async path => {
    const { commands, restored } = window.jupyterapp
    await restored
    await commands.execute("docmanager:open", { path, factory: "Notebook" })
}"""


def close_documents(page: Page) -> bool:
    """Close all documents of JupyterLab without saving them.

    Returns:
        Whether the page is as it was loaded: it shows its launcher and no dialog.
    """
    try:
        page.evaluate(_DOCUMENTS_CLOSED)
        page.mouse.move(0, 0)  # nothing of the next notebook is hovered
        page.locator(".jp-Launcher").wait_for()
        return bool(page.evaluate(_NOTHING_OPEN))
    except Error:
        return False


_DOCUMENTS_CLOSED = """() => {
    for (const widget of [...window.jupyterapp.shell.widgets("main")]) if (widget.context) widget.dispose()
}"""
_NOTHING_OPEN = """() => [...window.jupyterapp.shell.widgets("main")].length === 1
    && !document.querySelector(".jp-Dialog, .jp-Document, .nbl-root")"""


def choose_theme(page: Page, name: str) -> None:
    """Choose a theme in the settings of JupyterLab, and wait until the page has it."""
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", name)
    page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)


def wait_until_idle(page: Page) -> None:
    """Wait until the notebook is there, with a kernel that has nothing to do."""
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_function(_KERNEL_IS_IDLE)


def write_notebook(path: Path, *cells: str) -> None:
    """A notebook of these code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


def start_kernel(url: str, name: str) -> str:
    """Start the kernel of a notebook that is not open yet, and return its session."""
    wanted = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}}
    request = urllib.request.Request(f"{url}api/sessions", data=json.dumps(wanted).encode(), method="POST")
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["id"])


def kernel_states(url: str) -> dict[str, str]:
    """Return what the kernel of each session does, such as ``idle``."""
    with urllib.request.urlopen(f"{url}api/sessions") as answer:
        return {session["id"]: session["kernel"]["execution_state"] for session in json.load(answer)}


def end_kernels(url: str, but: str = "") -> None:
    """Shut down every kernel of the server.

    Args:
        url: The server's address.
        but: The session whose kernel is left.
    """
    for session in kernel_states(url).keys() - {but}:
        request = urllib.request.Request(f"{url}api/sessions/{session}", method="DELETE")
        urllib.request.urlopen(request).close()


def run_all(page: Page) -> None:
    """Run > Run All Cells, without waiting for their end."""
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
