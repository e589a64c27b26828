"""The code of the README and the reference runs, from top to bottom, in one kernel; what needs Slurm, in tests/engines.

The page on the toolkit is in test_notebooks.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from nblaunch.launch.options import TABLE, flag_of
from nblaunch.notebook.magics import _GROUPS, _OWN
from tests.kernel.harness import Kernel

README = Path(__file__).parents[2] / "README.md"
REFERENCE = README.parent / "notebooks/reference.md"
PAGES = [
    README,
    *sorted((README.parent / "notebooks").glob("*.md")),
    *sorted((README.parent / "notebooks").glob("*.ipynb")),
]


def blocks(language: str, readme: Path = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", readme.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_every_python_block_of_the_readme_and_the_reference_runs(kernel: Kernel) -> None:
    cells = blocks("python") + blocks("python", REFERENCE)
    assert len(cells) >= 7
    try:
        shown = [kernel.run(cell).check() for cell in cells if not re.search(r"breakpoint\(\)|slurm", cell)]
        debugged = [kernel.debug(cell, "p loss", "q") for cell in cells if "breakpoint()" in cell]
        totals = kernel.run("list(totals)").check().value
    finally:
        kernel.run("%distributed session stop").check()
        kernel.run("from nblaunch.launch import run_folders\nrun_folders.remove('nightly')").check()
    printed = "\n".join(cell.stdout for cell in shown)
    assert "[rank 1] rank 1 has 3.0" in printed
    assert "rank 1: invalid literal for int()" in printed
    assert (shown[0].value, totals) == ("[3.0, 3.0]", "[3.0, 3.0]")
    assert shown[2].value == "3.0"  # of a detached run
    assert shown[-1].value == "[10, 11]"
    assert [cell.prompts for cell in debugged] == [["(rank 1 of 2) "] * 2]
    assert "tensor(nan)" in debugged[0].stdout
    assert debugged[0].error.startswith("KeyboardInterrupt")


def test_the_commands_of_the_readme_exist() -> None:
    (commands,) = blocks("bash")
    for script in re.findall(r"^bash (\S+)", commands, flags=re.MULTILINE):
        assert (README.parent / script).is_file()


def prose(page: Path) -> str:
    if page.suffix == ".md":
        return page.read_text()
    cells = nbformat.read(page, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_sections_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", prose(page))
    assert links
    missing = []
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(link)
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return the sections of a page, as GitHub names them, and the anchors in its text."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    named = re.findall(r'<a id="([^"]+)">', prose(page))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(named)


@pytest.mark.parametrize("name", TABLE)
def test_the_reference_has_an_anchor_a_flag_and_the_takers_of_an_option(name: str) -> None:
    (row,) = re.findall(rf'^\| <a id="{name}"></a>(.+)\|$', REFERENCE.read_text(), flags=re.MULTILINE)
    assert not TABLE[name].help or f"`{flag_of(name)}`" in row
    takers = "".join(f"{taker[0]} " for taker in ("session", "cell") if taker in TABLE[name].takers.split())
    assert row.rpartition("|")[2].strip() == takers.strip()


def test_the_magic_has_each_option_that_has_help() -> None:
    assert {option for options in _GROUPS.values() for option in options} == {*_OWN} | {
        n for n in TABLE if TABLE[n].help
    }


def test_the_guide_lists_every_notebook_once() -> None:
    folder = README.parent / "notebooks"
    listed = re.findall(r"^\d+\. \[.*?\]\((.+?)\)", (folder / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted([*(path.name for path in folder.glob("*.ipynb")), "reference.md", "toolkit.md"])


def test_the_readme_is_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 90
