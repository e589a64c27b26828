"""The frontend of a launch in an IPython shell."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ipykernel.iostream import OutStream
from IPython.display import display

from nblaunch.engines.current import engine
from nblaunch.errors import StartError, warn
from nblaunch.launch import run_folders
from nblaunch.launch.cell_statements import CellSource
from nblaunch.launch.frontend import Frontend, view_choice, wait_in_steps
from nblaunch.launch.session_state import SessionState
from nblaunch.launch.text_view import TextView, is_terminal, plain_writer
from nblaunch.launch.views import Stream, View
from nblaunch.machine.server_cells import runs_on_server
from nblaunch.notebook.cell_display import show_session
from nblaunch.notebook.cells import goes_to_session, paused, resume
from nblaunch.notebook.panel import PanelView, settle_panels, unseen_panels
from nblaunch.notebook.shell_channel import ShellChannel

_SERVE_INTERVAL_S = 0.1
"""Pause between two reads of the kernel's shell channel while a cell waits for its launch."""
_RUNS_HERE = re.compile(r"\A\s*(?:%%(?:time|capture|local)\b.*(?:\n|\Z))+")
"""Magics on top of a cell that runs in the notebook as if they were not there."""


class NotebookFrontend(Frontend):
    """An IPython shell, with a kernel or in a terminal."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self._was_examined = False
        """``%pdb`` is to be turned on again after the cell."""
        self._cells: list[CellSource] = []
        """What `cells` returned last: translating many cells takes a while."""
        self._has_looked = False
        """For runs of this notebook that have ended unseen."""
        self._busy_at = self._idle_until = 0.0
        """When a cell has begun or ended; when the kernel was idle, and had handled what pages had sent."""
        self._channel = ShellChannel(getattr(shell, "kernel", None))

    def view(self, choice: str) -> View:
        wanted = view_choice(choice)
        if wanted == "none" or not hasattr(self.shell, "kernel"):
            return super().view(wanted)
        return PanelView(self.shell) if wanted == "auto" and can_show_panels() else TextView(self.writer())

    def writer(self) -> Callable[[str, Stream], None]:
        return _cell_writer() if hasattr(self.shell, "kernel") else plain_writer()

    def can_update(self) -> bool:
        """Return True if a page shows this cell's output, also later, and the user has not chosen text."""
        kernel = getattr(self.shell, "kernel", None)
        return kernel is not None and not runs_on_server(kernel) and view_choice("auto") == "auto" and can_show_panels()

    def cell_label(self, filename: str) -> str:
        name = getattr(self.shell.compile, "format_code_name", lambda filename: None)(filename)
        return " ".join(name) if name else ""

    def notebook(self) -> str:
        told = os.environ.get("JPY_SESSION_NAME")  # of Jupyter's servers; the other is VS Code's
        told = told or getattr(self.shell, "user_ns", {}).get("__vsc_ipynb_file__")
        return told if isinstance(told, str) else ""

    def show_html(self, html: str, text: str) -> None:
        display({"text/html": html, "text/plain": text}, raw=True)

    def notebook_names(self) -> dict[str, Any] | None:
        names: dict[str, Any] = self.shell.user_ns
        return names

    def cells(self) -> list[CellSource]:
        """Return the cells that the notebook has run. A magic that runs its cell here is removed from the top."""
        known, found = self._cells, list[CellSource]()
        with paused():
            for number, typed in enumerate(self.shell.history_manager.input_hist_raw):
                if number < len(known) and known[number].typed is typed:
                    found.append(known[number])
                else:
                    python = self.shell.transform_cell(_RUNS_HERE.sub("", typed))
                    is_of_ranks = goes_to_session(self.shell, typed)
                    found.append(CellSource(f"Cell In[{number}]", typed, python, is_of_ranks))
        self._cells = found  # only now: launches in the background ask from their own threads
        return found

    def show_session(self, state: Callable[[], SessionState]) -> None:
        if self.can_update():
            show_session(self.shell, state)

    def can_type(self) -> bool:
        """Return True if this cell's page takes input: papermill, nbconvert and ``%%capture`` do not."""
        kernel = getattr(self.shell, "kernel", None)
        if kernel is None:
            return sys.stdin is not None and is_terminal(sys.stdin) and is_terminal(sys.stdout)
        return bool(getattr(kernel, "_allow_stdin", False)) and isinstance(sys.stdout, OutStream)

    def examines(self) -> bool:
        return bool(self.shell.call_pdb)

    def was_examined(self) -> None:
        self._was_examined = self._was_examined or bool(self.shell.call_pdb)
        self.shell.call_pdb = False

    def wait(
        self, over: threading.Event, timeout: float | None = None, between: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait for `over`. In a cell, answer pages that reload meanwhile, so that they get their panels back."""
        if threading.current_thread() is not threading.main_thread():
            return over.wait(timeout)

        def serve() -> None:
            self._channel.serve()
            between()

        with self._channel.answered(over):
            return wait_in_steps(over, timeout, _SERVE_INTERVAL_S, serve)

    def forget_thread(self) -> None:
        """Close the socket by which this thread has published.

        ipykernel closes it up to 10 s later: a loop of launches would run out of descriptors by then.
        """
        publisher = getattr(getattr(self.shell, "kernel", None), "iopub_thread", None)
        sockets = getattr(publisher, "_event_pipes", None)
        socket = sockets.pop(threading.current_thread(), None) if isinstance(sockets, dict) else None
        if socket is not None:
            socket.close(linger=_LINGER_MS)

    def before_cell(self, info: Any) -> None:
        """Run before each cell: see whether it has waited behind others."""
        now = time.time()
        if now - self._busy_at > _IDLE_S:
            self._idle_until = now
        self._busy_at = now

    def after_cell(self, result: Any) -> None:
        """Run at the end of each cell: refresh the engine."""
        resume()
        settle_panels(self.wait)
        self._tell_unseen()
        if self._was_examined:
            self._was_examined, self.shell.call_pdb = False, True
        with contextlib.suppress(StartError):  # the next launch retries and reports it
            engine.refresh()
        self._busy_at = time.time()

    def _tell_unseen(self) -> None:
        """Say once what has ended while no page showed it."""
        calls = [
            f"{info.name} ended: nblaunch.show({(run_folders.name_in(info.log_dir) or info.launch_id)!r})"
            for info in unseen_panels(self._idle_until)
        ]
        if not self._has_looked and (notebook := self.notebook()):
            self._has_looked = True
            with contextlib.suppress(StartError, OSError):  # no usable state directory: launches report it
                for run in run_folders.unseen(notebook):
                    run_folders.mark_seen(run.path)
                    calls.append(f"run {run.name} {_ENDS[run.state]}: nblaunch.attach({run.name!r})")
        if calls:
            text = "\n".join(f"nblaunch: while no page showed it, {call} shows it here" for call in calls)
            display({"text/plain": text}, raw=True)


_ENDS = {"finished": "finished", "failed": "failed", "stopped": "was stopped", "lost": "was lost"}
_IDLE_S = 1.0
"""Between two cells: the second has not waited, nor has what the page sent before it."""
_LINGER_MS = 1000
"""For ipykernel to read the last wakeups of a thread; it reads them at once."""
_widget_problem = ""


def can_show_panels() -> bool:
    """Return True if the cell's output goes to a page, not to ``%%capture``, and the widget can be imported."""
    has_page = isinstance(sys.stdout, OutStream)
    return has_page and not _widget_problem and importlib.util.find_spec("anywidget") is not None


def import_widget() -> None:
    """Import the widget ahead of the first panel. If that fails, launches are shown as text."""
    global _widget_problem
    try:
        importlib.import_module("nblaunch.notebook.widget")
    except Exception as error:  # noqa: BLE001  # a broken installation may raise anything
        _widget_problem = f"{type(error).__name__}: {error}"
        warn(f"anywidget cannot be imported ({_widget_problem}), so launches are shown as text: reinstall anywidget")


def _cell_writer() -> Callable[[str, Stream], None]:
    """Return a `write` that writes to the current cell, also later and from other threads.

    ipykernel sends the output of a thread to the latest cell, so send the message directly, with this cell as its
    parent. A replacement of stdout (``%%capture``) gets the text itself.
    """
    streams = {"out": sys.stdout, "err": sys.stderr}
    parents = {name: getattr(stream, "parent_header", None) for name, stream in streams.items()}
    for stream in streams.values():
        stream.flush()
    owner = os.getpid()

    def write(text: str, stream: Stream) -> None:
        target = streams[stream]
        if isinstance(target, OutStream) and os.getpid() == owner:
            content = {"name": target.name, "text": text}
            target.session.send(target.pub_thread, "stream", content, parent=parents[stream], ident=target.topic)
        else:
            target.write(text)
            target.flush()

    return write
