"""A real kernel for tests: runs cells, and collects their output."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from tests.conftest import LONG

_WAITING = re.compile(r"\rnblaunch: (?:starting the ranks|preparing )[^\r\n]*|^\r +\r", re.MULTILINE)
"""The status line of a launch whose start takes more than half a second, as it may on a loaded machine; its erasure."""

IMPORT_AHEAD = "from nblaunch.engines import fork_servers\nfork_servers._PRELOAD += fork_servers._SOON\n"
"""Or every rank with an optimizer or DDP imports torch's compiler, for 3 s of a core; before the fork server starts."""

ensure_event_loop()  # jupyter_client makes one loop for the whole process: not a leak of the test that came first


@dataclass
class Cell:
    """The output of a cell: streams, value, error, and the messages that carried them."""

    stdout: str = ""
    stderr: str = ""
    value: str = ""
    error: str = ""
    """``ename: evalue``."""
    traceback: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    idle: bool = False
    reply: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    """Of the lines that were typed for it."""

    def check(self) -> Cell:
        """Return the cell; fail if it raised."""
        assert not self.error, self.traceback
        return self

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


class Kernel:
    """A kernel process and its client."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client
        self.cells: dict[str, Cell] = {}

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def start_cell(self, code: str) -> str:
        """Start a cell, and return its request id."""
        request = str(self.client.execute(code))
        self.cells[request] = Cell()
        return request

    def run(self, code: str, limit: float = LONG) -> Cell:
        """Run a cell to its end."""
        return self.finish_cell(self.start_cell(code), limit)

    def finish_cell(self, request: str, limit: float = LONG, until: str = "") -> Cell:
        """Collect messages until a cell is idle, or until it has printed `until`."""
        cell = self.cells[request]
        begin = time.monotonic()
        while not (cell.idle or (until and until in cell.text)):
            self.take_message(begin + limit)
        while cell.idle and not cell.reply:
            message = self.client.get_shell_msg(timeout=limit)
            if message["parent_header"]["msg_id"] == request:  # not a late answer to `wait_for_ready`
                cell.reply = message["content"]
        cell.seconds += time.monotonic() - begin
        return cell

    def follow_cell(self, request: str, until: str, limit: float = LONG) -> Cell:
        """Go on collecting what comes to a cell, idle or not, until it holds `until`."""
        cell = self.cells[request]
        deadline = time.monotonic() + limit
        while until not in cell.text:
            self.take_message(deadline)
        return cell

    def debug(self, code: str, *lines: str, limit: float = LONG) -> Cell:
        """Run a cell, and type these lines when it asks for them."""
        request = self.start_cell(code)
        self.type(request, *lines, limit=limit)
        return self.finish_cell(request, limit)

    def type(self, request: str, *lines: str, limit: float = LONG) -> Cell:
        """Type lines for a cell, each once it is asked for."""
        cell = self.cells[request]
        for line in lines:
            cell.prompts.append(self.wait_for_prompt(limit))
            self.client.input(line)
        return cell

    def wait_for_prompt(self, limit: float = LONG) -> str:
        """Wait until the cell asks for a line, and return the prompt."""
        return str(self.client.get_stdin_msg(timeout=limit)["content"]["prompt"])

    def take_message(self, deadline: float) -> None:
        """Wait for one message until `deadline`, and put it to the cell that it belongs to."""
        message = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
        cell = self.cells.get(message["parent_header"].get("msg_id", ""))
        if cell is not None:
            cell.idle = _take(cell, message) or cell.idle

    def complete(self, code: str) -> list[str]:
        """What the tab key offers at the end of `code`."""
        self.client.complete(code)
        return list(self.client.get_shell_msg(timeout=LONG)["content"]["matches"])

    @contextmanager
    def changed(self, module: str, name: str, value: float) -> Iterator[None]:
        """Give a constant in the kernel another value meanwhile."""
        constant = f"__import__({module!r}, fromlist=['']).{name}"
        before = self.ask(constant)
        self.run(f"{constant} = {value}").check()
        yield
        self.run(f"{constant} = {before}").check()

    @contextmanager
    def another_client(self) -> Iterator[Kernel]:
        """The same kernel as another page has it."""
        client = self.manager.blocking_client()
        client.start_channels()
        try:
            yield Kernel(self.manager, client)
        finally:
            client.stop_channels()

    def end(self) -> None:
        """SIGKILL, and no other process until `restart`."""
        self.manager.shutdown_kernel(now=True, restart=True)

    def replace(self) -> None:
        """Start a fresh process, with a client that has seen nothing of the old one."""
        self.client.stop_channels()
        self.client, self.cells = self.manager.blocking_client(), {}
        self.client.start_channels()
        self.restart()

    def restart(self) -> None:
        """As the notebook's button does: SIGKILL, and a fresh process."""
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=LONG)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the kernel, by its repr."""
        import ast

        said = self.run(f"print('asked:', repr(({expression})))").check().stdout
        return ast.literal_eval(said.partition("asked: ")[2].splitlines()[0])  # the end of a cell may add a note

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()


def _take(cell: Cell, message: dict[str, Any]) -> bool:
    """Add a message to the cell; whether the cell is over."""
    kind, content = message["msg_type"], message["content"]
    cell.messages.append(message)
    if kind == "stream":
        if content["name"] == "stdout":
            cell.stdout = _WAITING.sub("", cell.stdout + content["text"])
        else:
            cell.stderr += content["text"]
    elif kind == "execute_result":
        cell.value = content["data"]["text/plain"]
    elif kind == "display_data":
        cell.stdout += content["data"].get("text/plain", "") + "\n"
    elif kind == "error":
        cell.error = f"{content['ename']}: {content['evalue']}"
        cell.traceback = "\n".join(content["traceback"])
    return bool(kind == "status" and content["execution_state"] == "idle")


@contextmanager
def running_kernel(*command: str, **env: str) -> Iterator[Kernel]:
    """A kernel that is started now and asserted dead afterwards; launches are shown as text unless `env` says more.

    Args:
        command: Starts it, followed by the file of its connection. Default: the kernel of this Python.
        env: Added to its environment.
    """
    manager = KernelManager(kernel_name="python3")
    if command:
        manager.kernel_spec.argv = [*command, "-f", "{connection_file}"]  # type: ignore[union-attr]
    manager.start_kernel(env={**os.environ, "NBLAUNCH_VIEW": "text", **env})
    kernel = Kernel(manager, manager.blocking_client())
    kernel.client.start_channels()
    try:
        kernel.client.wait_for_ready(timeout=LONG)
        yield kernel
    finally:
        kernel.client.stop_channels()  # perhaps another one: its thread would look for the dead kernel for ever
        manager.shutdown_kernel(now=True)
        assert not manager.is_alive()
