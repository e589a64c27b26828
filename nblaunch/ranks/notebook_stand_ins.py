"""Stand-ins in ranks for what only a notebook has: display, input, magics, breakpoint."""

from __future__ import annotations

import builtins
import itertools
import re
import subprocess
import sys
import time
import timeit
from collections.abc import Sequence
from typing import Any, NoReturn

from nblaunch.ranks.report import current
from nblaunch.wire.launch_files import figure_file

_namespace: dict[str, Any] = {}
_figures = itertools.count(1)
"""Not matplotlib's numbers, which restart at 1 after each ``plt.show()``."""


def install(namespace: dict[str, Any]) -> None:
    """Install the stand-ins in builtins, and in the shipped functions' globals."""
    global _namespace
    _namespace = namespace
    namespace["get_ipython"] = get_ipython
    builtins.display = display  # type: ignore[attr-defined]  # as IPython does
    builtins.input = _no_input
    sys.breakpointhook = _no_breakpoint


def get_ipython() -> _RankShell:
    """Return the object that translated ``!command`` and ``%magic`` lines call."""
    return _RankShell()


def display(*objects: Any, **options: Any) -> None:
    """Print objects; a figure is saved beside the log, and its path printed."""
    for obj in objects:
        if hasattr(obj, "savefig"):
            save_figure(obj)
        else:
            _say(repr(obj))


def save_figure(figure: Any) -> None:
    """Save a matplotlib figure beside the rank's log, and print where."""
    context = current()
    if context is None:
        return
    path = figure_file(context.log_dir, context.rank, next(_figures))
    try:
        figure.savefig(path)
    except OSError as error:  # a full disk must not fail the training
        _say(f"figure not saved: {error}")
    else:
        _say(f"figure saved: {path}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _no_input(prompt: object = "") -> NoReturn:
    raise RuntimeError(
        f"input({str(prompt)!r}): a rank cannot read input; call input() in the notebook before the launch, "
        "and pass the answer as an argument"
    )


def _no_breakpoint(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("breakpoint(): a rank has no terminal; use print, or debug the function in the notebook itself")


class _RankShell:
    """The parts of IPython's shell that work in a rank."""

    def system(self, command: str) -> None:
        """Run ``!command``, with its output in this rank's log."""
        sys.stdout.flush()
        subprocess.run(_expand(command), shell=True, check=False)

    def getoutput(self, command: str) -> list[str]:
        """Run ``lines = !command``, and return the lines of its stdout."""
        done = subprocess.run(_expand(command), shell=True, check=False, stdout=subprocess.PIPE, text=True)
        return done.stdout.splitlines()

    def run_line_magic(self, name: str, line: str) -> Any:
        if name in ("time", "timeit"):
            return _time(line, repeat=name == "timeit")
        if name in ("matplotlib", "autoreload", "load_ext"):
            return None  # they only concern the notebook
        raise RuntimeError(f"%{name} cannot run in a rank: run it in a cell of its own, before the launch")

    def run_cell_magic(self, name: str, line: str, cell: str) -> NoReturn:
        raise RuntimeError(f"%%{name} cannot run in a rank: run it in a cell of its own, before the launch")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"get_ipython().{name}: a rank has no IPython; it supports !commands, %time and %timeit")


def _time(statement: str, repeat: bool) -> Any:
    if repeat:
        timer = timeit.Timer(statement, globals=_namespace)
        count, seconds = timer.autorange()
        _say(f"{seconds / count:.3g} s a loop (mean of {count} loops)")
        return None
    begin, cpu = time.perf_counter(), time.process_time()
    try:
        code = compile(statement, "<%time>", "eval")
    except SyntaxError:
        code = compile(statement, "<%time>", "exec")
    value = eval(code, _namespace)  # None for code compiled with "exec"
    _say(f"CPU time: {time.process_time() - cpu:.3g} s, wall time: {time.perf_counter() - begin:.3g} s")
    return value


def _expand(command: str) -> str:
    """Expand ``{expression}`` and ``$name`` as IPython does, if the names exist."""

    def value(match: re.Match[str]) -> str:
        expression: Sequence[str] = [group for group in match.groups() if group]
        try:
            return str(eval(expression[0], _namespace))
        except Exception:  # noqa: BLE001  # not Python
            return match.group(0)  # a variable or braces of the shell

    return re.sub(r"\{([^{}]+)\}|\$([A-Za-z_]\w*)", value, command)
