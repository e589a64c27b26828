"""Cells that the Jupyter server runs itself."""

from __future__ import annotations

import os
import re
from typing import Any

_SERVERS_FILE = re.compile(r"kernel-[0-9a-f-]{36}\.json")
"""The connection file of a kernel that a Jupyter server has started has the kernel's UUID in its name."""


def runs_on_server(kernel: Any) -> bool:
    """Return True if the Jupyter server sent the present cell, not a page: it then writes the outputs itself.

    jupyter-server-nbmodel 0.2.9 ignores ``update_display_data``. jupyter-server-documents 0.3.3 appends its content as
    another output. Both drop what a cell displays after its end. Comms reach the page as usual.

    A page's request has a UUID as its id. The server sends with jupyter_client, which puts its own pid into the id:
    that of the kernel's parent. nbclient and papermill do the same, but their kernels have another connection file.
    """
    parts = str(kernel.get_parent().get("header", {}).get("msg_id", "")).rsplit("_", 2)
    is_of_parent = len(parts) == 3 and parts[1] == os.environ.get("JPY_PARENT_PID")
    file = os.path.basename(getattr(kernel.parent, "connection_file", ""))
    return is_of_parent and _SERVERS_FILE.fullmatch(file) is not None
