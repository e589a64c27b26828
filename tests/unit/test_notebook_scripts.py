"""What notebooks/run.sh and tests/run.sh do and say around pip, JupyterLab and the notebooks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import headless
import nbformat.v4

NOTEBOOKS = Path(headless.__file__).parent


def _installs(folder: Path, ending: str) -> subprocess.Popen[str]:
    """Call pip_install with a pip that begins, waits for a file in `folder`, and ends so."""
    pip = folder / "pip"
    pip.write_text(
        f'#!/bin/bash\necho "Collecting torch"; until [ -e "{folder}/go_on" ]; do sleep 0.05; done; {ending}'
    )
    pip.chmod(0o700)
    script = (
        f'set -euo pipefail; source "{NOTEBOOKS / "venv.sh"}"; SAY_EVERY_S=0; python={pip}; status=0; '
        'pip_install torch || status=$?; echo "status $status" >&2'
    )
    return subprocess.Popen(["bash", "-c", script], stderr=subprocess.PIPE, text=True)


def test_an_installation_without_a_terminal_says_what_it_does(tmp_path: Path) -> None:
    for ending, said in (("exit 0", ["status 0"]), ("echo no network; exit 1", ["no network", "status 1"])):
        with _installs(tmp_path, ending) as process:
            assert process.stderr is not None
            assert any(re.fullmatch(r"  \d+ s: Collecting torch\n", line) for line in process.stderr)
            (tmp_path / "go_on").touch()
            lines = process.stderr.read().splitlines()
        (tmp_path / "go_on").unlink()
        assert lines[-len(said) :] == said


def test_each_cell_that_runs_without_a_browser_is_named(tmp_path: Path) -> None:
    new = nbformat.v4
    cells = [new.new_markdown_cell("# Train\ntext"), new.new_code_cell("print('hello')"), new.new_code_cell("1")]
    path = tmp_path / "small.ipynb"
    nbformat.write(new.new_notebook(cells=[*cells, new.new_markdown_cell("## Use it"), new.new_code_cell("2")]), path)
    shown: list[str] = []
    headless.execute(path, shown.append)
    assert shown[0::2] == ["[1/3] Train … ", "[2/3] Train … ", "[3/3] Use it … "]
    assert shown[1].endswith(" s\n    hello\n")
    assert shown[3].endswith(" s\n")


def test_copies_are_kept_helpers_renewed_and_the_address_last(tmp_path: Path) -> None:
    notebooks, venv = tmp_path / "notebooks", tmp_path / ".venv"
    copies = notebooks / "copies"
    for folder in (copies, venv / "bin"):
        folder.mkdir(parents=True)
    for script in ("run.sh", "venv.sh"):
        shutil.copy(NOTEBOOKS / script, notebooks)
    for name in ("ddp.ipynb", "quickstart.ipynb", "mnist_or_digits.py", "reference.md", "headless.py"):
        (notebooks / name).write_text("new")
    for name in ("quickstart.ipynb", "mnist_or_digits.py", "reference.md"):
        (copies / name).write_text("edited, or old")
    (tmp_path / "pyproject.toml").write_text("")
    (venv / ".nblaunch-lab").write_text(f"# {tmp_path}\n")
    (venv / "bin/python").write_text(
        f"""#!/bin/bash
        case "$*" in
            "-m jupyter --runtime-dir") echo {tmp_path} ;;
            "-m jupyterlab "*)
                echo "the log" >&2
                echo '{{"url": "http://localhost:8888/", "token": "abc"}}' > {tmp_path}/jpserver-$$.json ;;
            "- "*) exec {sys.executable} "$@" ;;
        esac"""
    )
    (venv / "bin/sleep").symlink_to(shutil.which("true") or "")
    (venv / "bin/python").chmod(0o700)
    env = {**os.environ, "NBLAUNCH_VENV": str(venv), "PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", notebooks / "run.sh"], env=env, stderr=subprocess.PIPE, text=True, check=True)
    assert {path.name: path.read_text() for path in copies.iterdir()} == {
        "ddp.ipynb": "new",
        "quickstart.ipynb": "edited, or old",
        "mnist_or_digits.py": "new",
        "reference.md": "new",
    }
    lines = done.stderr.split()
    assert "log" in lines
    assert lines[-1] == "http://localhost:8888/lab/tree/quickstart.ipynb?token=abc"
