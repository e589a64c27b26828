"""Execute a notebook without a front end and print the test accuracy that it printed.

    python headless.py quickstart.ipynb

The file itself is left as it is: outputs stay in memory.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

CELL_SECONDS = 3600  # MNIST itself takes minutes on a laptop's CPU


def execute(path: Path) -> NotebookNode:
    """Run every cell in the notebook's own folder, with a fresh kernel, and return the copy with its outputs.

    Raises:
        CellExecutionError: A cell raised. Its message holds the cell and the traceback.
        CellTimeoutError: A cell took longer than an hour.
        DeadKernelError: The kernel died.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # or it warns of its TCP sockets, which are on loopback
    )
    return asyncio.run(client.async_execute())  # execute() would leave its event loop open


def printed(notebook: NotebookNode) -> str:
    """Everything that the cells printed, in order."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
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
        print(f"test accuracy: {accuracy(execute(path)):.4f}")
    except (CellExecutionError, CellTimeoutError, DeadKernelError, ValueError) as error:
        print(f"{path.name} failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
