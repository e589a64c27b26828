"""The README's code runs, from top to bottom, in one kernel; what needs Slurm, in tests/engines.

The training README is in test_notebooks.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.kernel.harness import Kernel

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str, readme: Path = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", readme.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_every_python_block_of_the_readme_runs(kernel: Kernel) -> None:
    cells = blocks("python")
    assert len(cells) >= 5
    try:
        shown = [kernel.run(cell).check() for cell in cells if not re.search(r"breakpoint\(\)|slurm", cell)]
        debugged = [kernel.debug(cell, "p loss", "q") for cell in cells if "breakpoint()" in cell]
        sums = kernel.run("list(sums), sums.metrics.last").check().value
    finally:
        kernel.run("%distributed session stop").check()
    printed = "\n".join(cell.stdout for cell in shown)
    assert "[rank 1] 1 of 2 has 1.0" in printed
    assert "rank 1: invalid literal for int()" in printed
    assert shown[0].value == "1.0"
    assert [cell.prompts for cell in debugged] == [["(rank 1 of 2) "] * 2]
    assert "tensor(nan)" in debugged[0].stdout
    assert debugged[0].error.startswith("KeyboardInterrupt")
    assert sums == "([3.0, 3.0], {'total': 3.0})"


def test_the_commands_of_the_readme_exist() -> None:
    (commands,) = blocks("bash")
    for script in re.findall(r"^bash (\S+)", commands, flags=re.MULTILINE):
        assert (README.parent / script).is_file()


def test_the_readme_links_to_files_that_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 190
