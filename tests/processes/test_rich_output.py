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
    import matplotlib.pyplot as plt

    plt.plot([1, 2])  # shown when the function returns
    return "zmq" in __import__("sys").modules


def leaves_a_figure_that_cannot_be_drawn(rank: int) -> int:
    import matplotlib.pyplot as plt

    plt.plot([1, 2])
    plt.title(r"$\frac{$")
    return rank


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
@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that a kernel sets."""
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")


@pytest.mark.parametrize("function", [displays, shows_the_builtin])
def test_outputs_of_ranks_are_shown(
    start_method: str, function: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook_launcher(function, num_processes=2, start_method=start_method, view="text")
    lines = capsys.readouterr().out.splitlines()
    word = "text" if function is displays else "builtin"
    assert {line for line in lines if word in line} == {f"[rank {rank}] '{word} {rank}'" for rank in (0, 1)}


@pytest.mark.usefixtures("inline")
def test_a_figure_is_shown_when_the_function_returns(capsys: pytest.CaptureFixture[str]) -> None:
    result = notebook_launcher(draws, num_processes=2, view="text")
    assert isinstance(result, LaunchResult)
    assert list(result) == [False, False]
    paths = re.findall(r"\[rank \d\] <Figure .+>: (.+\.png)", capsys.readouterr().out)
    found = [Path(path) for path in paths]
    assert len(found) == 2
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)


@pytest.mark.usefixtures("inline")
def test_a_figure_that_cannot_be_drawn_does_not_fail_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    result = notebook_launcher(leaves_a_figure_that_cannot_be_drawn, num_processes=1, view="text")
    assert isinstance(result, LaunchResult)
    assert list(result) == [0]
    assert "[rank 0] Traceback" in capsys.readouterr().err


def test_a_forked_child_of_a_rank_may_display(capsys: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(displays_in_a_child, num_processes=1, view="text")
    assert capsys.readouterr().out.count("[rank 0] 'from a child'") == 1
