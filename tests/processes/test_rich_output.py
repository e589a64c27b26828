"""What real ranks display reaches the notebook, as text here; and what it leaves in the ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nblaunch import LaunchResult, notebook_launcher


# ------------------------------------------------------------------ what ranks run
def displays(rank: int) -> None:
    from IPython.display import HTML, display

    display(HTML(f"<b>rank {rank}</b>"), f"text {rank}")


def draws(rank: int) -> bool:
    """Rank 1 leaves a figure that cannot be drawn."""
    import matplotlib.pyplot as plt

    plt.plot([1, 2])  # shown when the function returns
    plt.title(r"$\frac{$" * rank)
    return "zmq" in __import__("sys").modules


def displays_in_a_child(rank: int) -> None:
    from IPython.display import display

    pid = os.fork()
    if pid == 0:
        display("from a child")
        os._exit(0)
    os.waitpid(pid, 0)


def shows_the_builtin(rank: int) -> None:
    display(f"builtin {rank}")  # type: ignore[name-defined]  # noqa: F821  # IPython defines it in builtins


# ------------------------------------------------------------------ what holds
@pytest.mark.parametrize("function", [displays, shows_the_builtin])
def test_outputs_of_ranks_are_shown(
    start_method: str, function: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook_launcher(function, num_processes=2, start_method=start_method, view="text")
    lines = capsys.readouterr().out.splitlines()
    word = "text" if function is displays else "builtin"
    assert {line for line in lines if word in line} == {f"[rank {rank}] '{word} {rank}'" for rank in (0, 1)}


def test_a_figure_is_shown_when_the_function_returns_and_cannot_fail_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # as a kernel does
    result = notebook_launcher(draws, num_processes=2, view="text")
    assert isinstance(result, LaunchResult)
    assert list(result) == [False, False]
    shown = capsys.readouterr()
    (path,) = re.findall(r"\[rank 0\] <Figure .+>: (.+\.png)", shown.out)
    assert Path(path).read_bytes().startswith(b"\x89PNG")
    assert "[rank 1] Traceback" in shown.err


def test_a_forked_child_of_a_rank_may_display(capsys: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(displays_in_a_child, num_processes=1, view="text")
    assert capsys.readouterr().out.count("[rank 0] 'from a child'") == 1
