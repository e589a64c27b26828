"""Loading and unloading of the IPython extension: ``%load_ext nblaunch``."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

from nblaunch.engines import current as engines
from nblaunch.errors import StartError, warn
from nblaunch.launch import frontend
from nblaunch.launch.session import live_sessions
from nblaunch.notebook import cells
from nblaunch.notebook.completion import complete_distributed, inspect_ranks
from nblaunch.notebook.magics import DistributedMagics
from nblaunch.notebook.notebook_frontend import NotebookFrontend, can_show_panels, import_widget
from nblaunch.transfer.parcel import sent_data_cache

_HOOK = "post_run_cell"


def register_frontend(shell: Any) -> NotebookFrontend:
    """Make this shell the frontend of launches. Repeated calls do nothing."""
    current = frontend.host()
    if isinstance(current, NotebookFrontend) and current.shell is shell:
        return current
    notebook = NotebookFrontend(shell)
    frontend.register(notebook)
    colab = sys.modules.get("google.colab.output")
    if colab is not None:  # here, in the main thread: a thread that enables widgets enables its own displays alone
        colab.enable_custom_widget_manager()
    shell.events.register(_HOOK, notebook.after_cell)
    return notebook


def load(shell: Any) -> None:
    register_frontend(shell)
    shell.register_magics(DistributedMagics)
    matchers = _matchers(shell)
    if complete_distributed not in matchers:
        matchers.append(complete_distributed)
        inspect_ranks(shell)
    warm_up()


def warm_up() -> None:
    """Prepare for the first launch in the background: the fork server, and the panel's packages.

    Not torch: while a thread imports it, code of the user's that finds it in ``sys.modules`` would fail.
    """
    if os.environ.get("NBLAUNCH_WARM_UP") == "0":
        return
    try:
        engines.engine.warm_up()
    except StartError as error:  # the next launch raises it
        warn(str(error))
    if can_show_panels():
        with contextlib.suppress(RuntimeError):  # no more threads: the first panel imports it
            threading.Thread(target=import_widget, name="nblaunch-imports", daemon=True).start()


def unload(shell: Any) -> None:
    """Remove the magic and the hook, stop the engine, and free cached data.

    ``%reload_ext`` unloads, too: sessions stay, with their variables and the engine, until they are stopped.
    """
    current = frontend.host()
    if isinstance(current, NotebookFrontend):
        shell.events.unregister(_HOOK, current.after_cell)
        frontend.register(None)
    cells.set_auto(shell, False)
    for kind, name in (("line", "distributed"), ("cell", "distributed"), ("cell", "rank"), ("cell", "local")):
        shell.magics_manager.magics[kind].pop(name, None)
    matchers = _matchers(shell)
    if complete_distributed in matchers:
        matchers.remove(complete_distributed)
        del shell.object_inspect_mime  # the class's own again
    if not live_sessions():
        engines.stop()
        sent_data_cache.free()


def _matchers(shell: Any) -> list[Any]:
    matchers: list[Any] = getattr(getattr(shell, "Completer", None), "custom_matchers", [])
    return matchers
