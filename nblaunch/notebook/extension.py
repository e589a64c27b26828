"""What ``%load_ext nblaunch`` puts into IPython, and takes out again."""

from __future__ import annotations

import sys
import threading
from typing import Any

from nblaunch.engines.generations import servers
from nblaunch.errors import StartError, warn
from nblaunch.launch import frontend as hosts
from nblaunch.notebook.completion import complete_distributed
from nblaunch.notebook.magics import DistributedMagics
from nblaunch.notebook.notebook_frontend import NotebookHost, can_show_panels, import_widget
from nblaunch.transfer.sent_data import sent_data_cache

_HOOK = "post_run_cell"


def meet(shell: Any) -> NotebookHost:
    """Have launches from this shell shown by the notebook's room; does nothing the second time."""
    present = hosts.host()
    if isinstance(present, NotebookHost) and present.shell is shell:
        return present
    host = NotebookHost(shell)
    hosts.register(host)
    shell.events.register(_HOOK, host.after_cell)
    return host


def load(shell: Any) -> None:
    """Register the magic and its completion, and start the fork server in the background."""
    meet(shell)
    shell.register_magics(DistributedMagics)
    matchers = _matchers(shell)
    if complete_distributed not in matchers:
        matchers.append(complete_distributed)
    if can_show_panels():
        # The first panel would have to wait for this. A thread, as the first cell need not.
        threading.Thread(target=import_widget, daemon=True).start()
    if sys.platform == "linux":
        try:
            servers.warm_up()
        except StartError as error:  # a launch will say it as an error
            warn(str(error))


def unload(shell: Any) -> None:
    """Take the magic and the hook out, end the fork server, and keep no data."""
    present = hosts.host()
    if isinstance(present, NotebookHost):
        shell.events.unregister(_HOOK, present.after_cell)
        hosts.register(None)
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("distributed", None)
    matchers = _matchers(shell)
    if complete_distributed in matchers:
        matchers.remove(complete_distributed)
    servers.stop()
    sent_data_cache.free()


def _matchers(shell: Any) -> list[Any]:
    matchers: list[Any] = getattr(getattr(shell, "Completer", None), "custom_matchers", [])
    return matchers
