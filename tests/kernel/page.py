"""A fake page that opens a panel, records its messages and clicks, over the comms of a real kernel."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tests.conftest import LONG
from tests.kernel.harness import Kernel

WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass
class Page:
    """All that a kernel has sent for one panel, and a way to answer.

    Args:
        kernel: Where the panel is.
        subshell: The kernel's thread that gets what is sent here; empty for the shell, which waits for the cell.
    """

    kernel: Kernel
    subshell: str = ""
    panel: str = ""
    """The comm's id."""
    state: dict[str, Any] = field(default_factory=dict)
    messages: list[tuple[float, dict[str, Any], bytes]] = field(default_factory=list)
    """When the kernel sent each, its content and its buffer."""
    displays: list[dict[str, Any]] = field(default_factory=list)
    """Each bundle that was displayed."""
    tracebacks: list[str] = field(default_factory=list)
    idle: set[str] = field(default_factory=set)
    subshells: list[str] = field(default_factory=list)
    """All that it has asked for."""

    def new_subshell(self) -> None:
        """Send by a thread of the kernel's own from now on, as JupyterLab does."""
        client = self.kernel.client
        client.control_channel.send(client.session.msg("create_subshell_request", {}))
        reply = client.control_channel.get_msg(timeout=LONG)
        self.subshell = reply["content"]["subshell_id"]
        self.subshells.append(self.subshell)

    def end_subshells(self) -> None:
        """End the kernel's threads that were started for this page, as a page does that is closed."""
        client = self.kernel.client
        for subshell in self.subshells:
            client.control_channel.send(client.session.msg("delete_subshell_request", {"subshell_id": subshell}))
            assert client.control_channel.get_msg(timeout=LONG)["content"]["status"] == "ok"
        self.subshells.clear()

    def send(self, **content: Any) -> None:
        """What the page's script sends with ``model.send``."""
        data = {"method": "custom", "content": content}
        message = self.kernel.client.session.msg("comm_msg", {"comm_id": self.panel, "data": data})
        if self.subshell:
            message["header"]["subshell_id"] = self.subshell
        self.kernel.client.shell_channel.send(message)

    def take(self, limit: float = LONG) -> None:
        """Wait for one message of the kernel's, and keep it."""
        message = self.kernel.client.get_iopub_msg(timeout=limit)
        kind, content = message["msg_type"], message["content"]
        if kind == "comm_open" and "info" in content["data"].get("state", {}):
            self.panel, self.state = content["comm_id"], content["data"]["state"]
        elif kind == "comm_msg" and content["comm_id"] == self.panel and content["data"]["method"] == "custom":
            buffer = b"".join(bytes(part) for part in message["buffers"])
            sent = message["header"]["date"].timestamp()
            self.messages.append((sent, content["data"]["content"], buffer))
        elif kind in ("display_data", "update_display_data"):
            self.displays.append(content["data"])
        elif kind == "error":
            self.tracebacks.append("\n".join(content["traceback"]))
        elif kind == "status" and content["execution_state"] == "idle":
            self.idle.add(message["parent_header"].get("msg_id", ""))

    def take_until(self, condition: Any, limit: float = LONG) -> None:
        """Take messages until this comes true."""
        deadline = time.monotonic() + limit
        while not condition():
            self.take(deadline - time.monotonic())

    def run(self, code: str) -> None:
        """Run a cell, to its end."""
        request = self.start(code)
        self.take_until(lambda: request in self.idle)

    def start(self, code: str) -> str:
        """Begin a cell."""
        return str(self.kernel.client.execute(code))

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The messages of one kind."""
        return [content for _, content, _ in self.messages if content["kind"] == kind]

    def part(self, name: str) -> Any:
        """The latest value of a part of the panel's state."""
        changes = [content.get("changes", {}) for _, content, _ in self.messages]
        return next((found[name] for found in reversed(changes) if name in found), None)

    @property
    def status(self) -> str | None:
        """What the panel says of the launch; None before its first message."""
        state = self.part("state")
        return state and state["name"]

    def left_out(self, rank: int) -> int | None:
        """How many outputs of a rank were left out: messages name the ranks alone whose outputs have changed."""
        entries = [entry for _, content, _ in self.messages for entry in content.get("changes", {}).get("outputs", [])]
        return next((entry[2] for entry in reversed(entries) if entry[0] == rank), None)

    def log(self, rank: int, stream: str = "out") -> dict[int, str]:
        """The lines that the page has of a log, by number."""
        lines: dict[int, str] = {}
        for content in self.of("delta"):
            for part in content.get("logs", []):
                if (part["rank"], part["stream"]) == (rank, stream):
                    lines = {number: text for number, text in lines.items() if number < part["first"]}
                    lines |= {part["first"] + at: text for at, (_, text) in enumerate(part["lines"])}
        return lines
