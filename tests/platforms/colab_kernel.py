"""A kernel that does what Colab's does, where it differs from others: run this file as ``ipykernel_launcher`` is run.

Colab's package (github.com/googlecolab/colabtools) is in no registry. Its shell shows errors by itself, has a handler
for exceptions and an inspector of its own; its kernel inspects and completes by itself. Its page draws widgets of other
libraries only if the display message names a widget manager, which a hook of the thread that has enabled it adds.
"""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from ipykernel.jsonutil import json_clean
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython import get_ipython
from IPython.core import oinspect
from IPython.core.history import HistoryManager
from IPython.utils import PyColorize, tokenutil

URL = "https://colab.example/manager.min.js"
_VIEW = "application/vnd.jupyter.widget-view+json"


def _add_manager(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content", {})
    if _VIEW in content.get("data", {}):
        content["metadata"][_VIEW] = {"colab": {"custom_widget_manager": {"url": URL}}}
    return message


def enable_custom_widget_manager(version: str = "5.0.0a") -> None:
    """Add the manager to what this thread displays from now on."""
    if output._widgets._installed_url is None:
        get_ipython().display_pub.register_hook(_add_manager)
    output._widgets._installed_url = URL
    output.threads.append(threading.current_thread().name)


class Inspector(oinspect.Inspector):
    """Colab's has no pictures of its own of what it inspects."""


class Shell(ZMQInteractiveShell):
    """Colab's shell."""

    def init_inspector(self) -> None:
        self.inspector = Inspector(oinspect.InspectColors, PyColorize.ANSICodeColors, "NoColor", 0)

    def init_history(self) -> None:
        self.history_manager = type("ColabHistoryManager", (HistoryManager,), {})(shell=self, parent=self)
        self.configurables.append(self.history_manager)

    def _showtraceback(self, etype: type, evalue: BaseException, stb: Any) -> None:
        content = {"traceback": stb, "ename": str(etype.__name__), "evalue": str(evalue)}
        hook = self.displayhook
        hook.session.send(hook.pub_socket, "error", json_clean(content), hook.parent_header)
        self._last_traceback = stb

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        return super().run_cell_magic(magic_name, line, cell or " " * bool(line))

    def init_pdb(self) -> None:
        super().init_pdb()
        self.set_custom_exc((ImportError,), lambda shell, kind, error, trace, tb_offset=None: shell.showtraceback())


class Kernel(IPythonKernel):
    """Colab's kernel."""

    def _shell_class_default(self) -> type:
        return Shell

    def do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, *args: Any, **options: Any) -> Any:
        found = self.shell.object_inspect(tokenutil.token_at_cursor(code, cursor_pos))
        data = {"application/json": json_clean(dict(found))} if found["found"] else {}
        return {"status": "ok", "data": data, "metadata": {}, "found": found["found"]}

    def complete_request(self, stream: Any, ident: Any, parent: Any) -> None:
        content = parent["content"]
        matches = json_clean(self.do_complete(content["code"], content["cursor_pos"]))
        self.session.send(stream, "complete_reply", matches, parent, ident)


output: Any = types.ModuleType("google.colab.output")
if __name__ == "__main__":
    output.enable_custom_widget_manager, output.threads = enable_custom_widget_manager, []
    output._widgets = types.SimpleNamespace(_installed_url=None)
    sys.modules.update({"google.colab": types.ModuleType("google.colab"), "google.colab.output": output})
    IPKernelApp.launch_instance(kernel_class=Kernel)
