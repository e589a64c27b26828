"""IPython's shell in a rank: magics, ``!commands``, ``display``. The only module of this room that imports IPython.

Created once in the fork server; each rank enters it with its own namespace. It has no history, keeps no files, starts
no thread, and never talks to the kernel. A cell is not run by the shell: it swallows exceptions, and
`nblaunch.ranks.worker` must report them. For the same reason ``!command`` is our own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import traitlets
from IPython.core import interactiveshell, page
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell
from IPython.utils.text import LSString, SList

from nblaunch.ranks import rank_display
from nblaunch.wire import MATPLOTLIB_BACKEND

_NEEDS_THE_NOTEBOOK = frozenset({
    "autosave", "conda", "connect_info", "debug", "distributed", "ed", "edit", "gui", "hist", "history",
    "javascript", "js", "load", "loadpy", "logoff", "logon", "logstart", "logstate", "logstop", "macro", "mamba",
    "micromamba", "notebook", "pastebin", "pdb", "pip", "qtconsole", "recall", "rep", "rerun", "save", "store",
    "subshell", "uv",
})  # fmt: skip
"""Magics that act on the page, the kernel, its history or its packages."""


class _Publisher(DisplayPublisher):
    def publish(
        self,
        data: Any,
        metadata: Any = None,
        source: Any = None,
        *,
        transient: Any = None,
        update: bool = False,
        **options: Any,
    ) -> None:
        rank_display.publish(data, metadata or {}, (transient or {}).get("display_id", ""), update=update)

    def clear_output(self, wait: bool = False) -> None:
        rank_display.clear(wait=wait)


class _ValueHook(DisplayHook):
    """Shows values of expressions without ``Out[1]:``, and keeps none."""

    def quiet(self) -> bool:
        return False

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        rank_display.publish(format_dict, md_dict or {})

    def log_output(self, format_dict: Any) -> None:
        pass

    def finish_displayhook(self) -> None:
        self._is_active = False


class RankShell(InteractiveShell):
    """The shell of a rank. `rank_shell` returns the only instance."""

    profile_dir = traitlets.Any(SimpleNamespace(location=""))

    def __init__(self) -> None:
        classes = {"display_pub_class": _Publisher, "displayhook_class": _ValueHook}
        with _without_database():
            super().__init__(user_ns={}, cache_size=0, xmode="Plain", **classes)
        self.db = {}  # %cd keeps its folders there
        atexit.unregister(self.atexit_operations)  # it would save the history
        formatter: Any = self.display_formatter
        formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", rank_display.as_png)
        self.set_hook("show_in_pager", page.as_hook(page.display_page), 90)

    # ------------------------------------------------------------------ set-up that a rank must not have
    def init_ipython_dir(self, ipython_dir: Any) -> None:
        """Keep no files."""

    def init_profile_dir(self, profile_dir: Any) -> None:
        """Keep no files."""

    def init_virtualenv(self) -> None:
        """Leave ``sys.path`` as the notebook's."""

    def init_sys_modules(self) -> None:
        """Leave ``__main__`` to `nblaunch.ranks.main_module`."""

    def init_prompts(self) -> None:
        """Do not set ``sys.ps1``: libraries take it for an interactive session and refuse to run distributed."""

    def init_completer(self) -> None:
        """Complete nothing."""

    def init_history(self) -> None:
        """Record no history, which would take a thread and a database."""
        self.history_manager = HistoryManager(shell=self, parent=self, enabled=False, hist_file=":memory:")

    # ------------------------------------------------------------------ in a rank
    def enter(self, namespace: dict[str, Any]) -> None:
        """Use this namespace and the current folder, environment and streams. Called when a task begins."""
        self.user_module, self.user_ns = self.prepare_user_module(None, namespace)
        self.ns_table.update(user_global=namespace, user_local=namespace)
        try:
            folder = os.getcwd()
        except OSError:  # it was removed
            folder = os.sep
        namespace.setdefault("_dh", [folder])  # %cd appends to it
        self.user_ns_hidden = dict.fromkeys(("_dh", "get_ipython", "_exit_code"))
        self.starting_dir = folder
        self.save_sys_module_state()
        self.init_encoding()
        self.init_pushd_popd_magic()

    def begin_cell(self, source: str) -> None:
        """Run the hooks that extensions, such as autoreload, have registered for the start of a cell."""
        self.events.trigger("pre_execute")
        self.events.trigger("pre_run_cell", ExecutionInfo(source, False, False, False, None))

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
        _refuse(f"%{magic_name}")
        if magic_name in ("load_ext", "reload_ext") and line.strip() == "nblaunch":
            return None  # it starts launches, and a rank cannot
        return super().run_line_magic(magic_name, line, _stack_depth + 1)

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        _refuse(f"%%{magic_name}")
        return super().run_cell_magic(magic_name, line, cell)

    def system(self, cmd: str) -> None:
        """Run ``!cmd``, with its output in this rank's log. An interrupt reaches the cell."""
        self._run(self.var_expand(cmd, depth=1))

    system_piped = system_raw = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        text = self._run(self.var_expand(cmd, depth=depth + 1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return SList(text.splitlines()) if split else LSString(text)

    def _run(self, command: str, **streams: int) -> str:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        shell = os.environ.get("SHELL") or None
        process: subprocess.Popen[str] = subprocess.Popen(
            command,
            shell=True,
            executable=shell,
            text=True,
            errors="replace",
            start_new_session=True,
            **streams,  # type: ignore[call-overload]
        )
        try:
            text, _ = process.communicate()
        except BaseException:  # an interrupt: the rank may stay, and the command must not
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        self.user_ns["_exit_code"] = process.returncode
        if getattr(self, "system_raise_on_error", False) and process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        return text or ""

    def enable_matplotlib(self, gui: Any = None) -> tuple[str, str]:
        import matplotlib

        matplotlib.use(MATPLOTLIB_BACKEND)
        return "inline", MATPLOTLIB_BACKEND

    def ask_exit(self) -> None:
        """End the cell, for an ``exit`` that comes from the notebook."""
        raise SystemExit

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: a rank has no event loop of windows."""


@contextlib.contextmanager
def _without_database() -> Iterator[None]:
    """Keep IPython 8 from creating a folder for its database."""
    module: Any = interactiveshell
    opened = getattr(module, "PickleShareDB", None)
    module.PickleShareDB = lambda path: {}
    try:
        yield
    finally:
        module.PickleShareDB = opened


def rank_shell() -> RankShell:
    """Return this process's shell. In a fork of the kernel, it takes the place of the kernel's."""
    found: Any = InteractiveShell._instance
    if isinstance(found, RankShell):
        return found
    if found is not None:
        _forget(found)
    return RankShell.instance()


def _forget(kernels: InteractiveShell) -> None:
    """Drop the kernel's shell and its comms: they write to the kernel's sockets."""
    type(kernels).clear_instance()  # clears its bases too, but no subclass
    comm: Any = sys.modules.get("comm")
    if comm is not None:
        manager = comm.base_comm.CommManager()
        comm.create_comm, comm.get_comm_manager = comm.DummyComm, lambda: manager
    if "matplotlib" in sys.modules and os.environ.get("MPLBACKEND") == MATPLOTLIB_BACKEND:
        sys.modules["matplotlib"].use(MATPLOTLIB_BACKEND)  # it was loaded with the notebook's


def _refuse(magic: str) -> None:
    if magic.lstrip("%") in _NEEDS_THE_NOTEBOOK:
        raise RuntimeError(f"{magic} cannot run in a rank: run it in a cell of the notebook")
