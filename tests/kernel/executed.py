"""Execute the notebooks in `notebooks/` cell by cell in a kernel: as they are, but with less to compute."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import headless
import nbformat

from tests.kernel.harness import Cell, Kernel

NOTEBOOKS = Path(headless.__file__).parent
SMALLER = {
    "nn.Conv2d(1, 32, 3, 1)": "nn.Conv2d(1, 8, 3, 2)",
    "nn.Conv2d(32, 64, 3, 1)": "nn.Conv2d(8, 16, 3, 1)",
    "nn.Linear(9216, 128)": "nn.Linear(400, 128)",
    "nn.Conv2d(3, 32, 3, padding=1)": "nn.Conv2d(3, 16, 3, 2, padding=1)",
    "nn.Conv2d(32, 64, 3, padding=1)": "nn.Conv2d(16, 32, 3, padding=1)",
    "nn.Linear(64 * 8 * 8, 512)": "nn.Linear(32 * 4 * 4, 256)",
    "nn.Linear(512, 10)": "nn.Linear(256, 10)",
    "nn.Conv2d(1, 16, 3, 2)": "nn.Conv2d(1, 16, 3, 2)",
    "pretrain(max_steps=150)": "pretrain(max_steps=40)",
    "pretrain(max_steps=300)": "pretrain(max_steps=80)",
    "validate_every=50": "validate_every=20",
    "valid, _ = dataset(files[::6], per_kind=120)": "valid, _ = dataset(files[::6], per_kind=40)",
    "width=64, layers=2": "width=32, layers=1",
    "WORDS, LENGTH = 1000, 40": "WORDS, LENGTH = 1000, 20",
    "early_stop=5": "early_stop=3",
    "lr=3e-4": "lr=1e-3",
    "(load_by_spawn, num_processes=2": "(load_by_spawn, num_processes=1",
    "timeout=40": "timeout=16",
    "args=(3, folder)": "args=(1, folder)",
    "for workers in (0, 1, 2)": "for workers in (0, 1)",
    "time.sleep(0.03)": "time.sleep(0.06)",
}
"""Layers that learn the digits as well in a fraction of the time, less and quicker training of the
transformer, one spawned worker, a shorter wait for a hang, and a slow transform that is slow beside other tests too.
"""


@dataclass
class Executed:
    """What the code cells of a notebook have shown."""

    cells: list[Cell]

    @property
    def printed(self) -> str:
        return re.sub(r"[^\n]*\r", "", "".join(cell.stdout for cell in self.cells))  # without bars

    @property
    def accuracy(self) -> float:
        return float(re.findall(r"^test accuracy: (\d\.\d+)$", self.printed, flags=re.MULTILINE)[-1])


def execute(kernel: Kernel, name: str, folder: Path, engine: str = "local") -> Executed:
    """Execute a notebook in `folder`, the kernel's, and type what the text below a cell says. No cell may raise.

    `engine` takes the place of ``"local"`` in the notebook on several machines.
    """
    for file in NOTEBOOKS.glob("*_or_digits.py"):
        shutil.copy(file, folder)
    kernel.run("%reset -f\nget_ipython().execution_count = 1").check()
    cells = nbformat.reads(smaller(name), as_version=4).cells
    executed = []
    for cell, after in zip(cells, [*cells[1:], nbformat.v4.new_markdown_cell()], strict=True):
        if cell.cell_type == "code":
            shown = "".join(re.findall(r"^```text\n(.*?)^```", after.source, flags=re.DOTALL | re.MULTILINE))
            lines = re.findall(r"^\(rank \d of 2\) (.*)\n", shown, flags=re.MULTILINE)
            source = cell.source.replace('engine = "local"', f"engine = {engine!r}")
            done = kernel.debug(source, *lines).check()
            executed.append(done)
            box = [f"{prompt}{line}" for prompt, line in zip(done.prompts, lines, strict=True)]
            seen = "\n".join([re.sub(r"\x1b\[[0-9;]*m", "", done.text), *box])
            assert not lines or [line for line in shown.splitlines() if line not in seen] == [], seen
    return Executed(executed)


def smaller(name: str) -> str:
    """Return the text of a notebook with less to compute."""
    text = (NOTEBOOKS / f"{name}.ipynb").read_text()
    for given, smaller in SMALLER.items():
        text = text.replace(given, smaller)
    assert all(layer in SMALLER.values() for layer in re.findall(r"nn\.Conv2d\([^)]*\)", text))
    return text
