"""Execute a notebook without a front end and print the test accuracy that it printed.

    python headless.py quickstart.ipynb

The file itself is left as it is: outputs stay in memory.
"""

from __future__ import annotations

import asyncio
import re
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

CELL_SECONDS = 3600  # MNIST itself takes minutes on a laptop's CPU


def execute(path: Path, show: Callable[[str], None] = lambda text: None) -> NotebookNode:
    """Run every cell in the notebook's own folder, with a fresh kernel, and return the copy with its outputs.

    Args:
        path: The notebook.
        show: Gets a line for each cell, in two parts: its name and its time; then what it has printed.

    Raises:
        CellExecutionError: A cell raised. Its message holds the cell and the traceback.
        CellTimeoutError: A cell took longer than an hour.
        DeadKernelError: The kernel died.
    """
    notebook = nbformat.read(path, as_version=4)
    names = cell_names(notebook)
    begun = 0.0

    def begin(cell: NotebookNode, cell_index: int) -> None:
        nonlocal begun
        begun = time.monotonic()
        show(f"{names[cell_index]} … ")

    def end(cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        show(f"{time.monotonic() - begun:.1f} s\n{textwrap.indent(printed(cell), '    ')}")

    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # or it warns of its TCP sockets, which are on loopback
        on_cell_execute=begin,
        on_cell_executed=end,
    )
    return asyncio.run(client.async_execute())  # execute() would leave its event loop open


def cell_names(notebook: NotebookNode) -> dict[int, str]:
    """Return a name for each code cell, by index: its number and the heading above it, as in ``[5/9] Launch it``."""
    heading, headings = "", {}
    for index, cell in enumerate(notebook.cells):
        found = re.findall(r"^#+ (.+)$", cell.source, flags=re.MULTILINE) if cell.cell_type == "markdown" else []
        heading = found[-1] if found else heading
        if cell.cell_type == "code":
            headings[index] = heading
    for count, index in enumerate(headings, start=1):
        headings[index] = f"[{count}/{len(headings)}] {headings[index]}".rstrip()
    return headings


def printed(part: NotebookNode) -> str:
    """Everything that a cell, or the cells of a notebook, printed, in order."""
    outputs = [output for cell in part.get("cells", [part]) for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def accuracy(notebook: NotebookNode) -> float:
    """The number of the last line ``test accuracy: 0.xxxx``.

    Raises:
        ValueError: No cell printed such a line.
    """
    found = re.findall(r"^test accuracy: (\d\.\d+)$", printed(notebook), flags=re.MULTILINE)
    if not found:
        raise ValueError('the notebook printed no line "test accuracy: 0.xxxx"')
    return float(found[-1])


def main(path: Path) -> int:
    print(f"Executing {path.name} …", flush=True)
    try:
        print(f"test accuracy: {accuracy(execute(path, lambda text: print(text, end='', flush=True))):.4f}")
    except (CellExecutionError, CellTimeoutError, DeadKernelError, ValueError) as error:
        print(f"{path.name} failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
