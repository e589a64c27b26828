"""Run the checks that need a GPU, and print what was checked on what.

Usage: python -m tests.gpu [--write] [ARGUMENT...]    the arguments go to pytest
       python -m tests.gpu --look                     only say whether there is a GPU

It uses the Python that runs it as it is: `bash tests/run.sh --gpu` first makes an environment and installs what is
needed. Without a GPU it fails.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu import gpus

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
_TIMEOUT_S = 150
"""For one check, in whole seconds: one that hangs must leave time for the others."""
_LAST_BEGINS_AFTER_S = 420
"""Until then another check may begin: all end, and the table is printed, within ten minutes."""
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: pytest's, or 2 if nothing could be run."""
    if "--look" in arguments:
        print(_look())
        return 0
    if absent := gpus.absent_modules():
        print(f"tests/gpu needs what {sys.executable} lacks: {sys.executable} -m pip install {_packages(absent)}")
        return 2
    try:
        machine = gpus.found()
    except gpus.NoGpuError as error:
        print(f"tests/gpu: {error}")
        return 2

    import pytest

    from tests.gpu.outcomes import Outcomes

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH")]))
    outcomes = Outcomes(machine.has)
    own = [argument for argument in arguments if argument != "--write"]
    chosen = own if any(argument.startswith("tests/gpu") for argument in own) else [str(FOLDER), *own]
    versions_differ = ["-W", "default"]  # another torch or Jupyter may warn, which is not what is checked here
    limits = [f"--timeout={_TIMEOUT_S}", f"--session-timeout={_LAST_BEGINS_AFTER_S}"]
    status = int(pytest.main(["-v", *limits, *versions_differ, *chosen], plugins=[outcomes]))
    table = outcomes.table(machine.line())
    print("", table, sep="\n")
    if "--write" in arguments:
        README.write_text(with_table(README.read_text(), table))
    return status


def _packages(modules: Sequence[str]) -> str:
    return " ".join(gpus.PACKAGES[name] for name in modules)


def _look() -> str:
    count = 0 if gpus.absent_modules(["torch"]) else gpus.number()
    if not count and gpus.device_files() and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return "A GPU is here that torch does not see: tests/gpu was not run (bash tests/run.sh --gpu says why)"
    if not count:
        return gpus.ALONE
    return f"{count} GPU{'s are' if count > 1 else ' is'} here: bash tests/run.sh --gpu runs tests/gpu"


def with_table(text: str, table: str) -> str:
    """The text with another table before those that it has.

    Raises:
        ValueError: The text has no place for tables.
    """
    found = re.search(f"(?s){BEGIN}(.*){END}", text)
    if found is None:
        raise ValueError(f"no line {BEGIN.strip()} and {END.strip()}")
    older = found[1].replace("None yet: no GPU has been seen by these checks.\n", "")
    tables = f"{table}\n\n{older.strip()}".rstrip()
    return f"{text[: found.start()]}{BEGIN}{tables}\n{END}{text[found.end() :]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
