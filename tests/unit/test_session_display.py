"""The display of a session: what it says of ranks, the queue and memory."""

from __future__ import annotations

from collections.abc import Sequence

from nblaunch.launch.session_state import RankHolding, SessionState
from nblaunch.machine.usage import Usage
from nblaunch.notebook.cell_display import session_html

IDLE = [RankHolding(0, 100, 3, 4000), RankHolding(1, 101, 2, 10)]
USAGES = {rank: Usage(rank, 0.0, 300_000_000, None, None) for rank in range(2)}


def session(
    running: str = "", queued: Sequence[str] = (), ranks: Sequence[RankHolding] = (), *, is_open: bool = True
) -> SessionState:
    return SessionState("main", "cpu", running, queued, 12.0, ranks or IDLE, is_open)


def test_an_idle_session_shows_what_its_ranks_hold() -> None:
    html = session_html(session(), USAGES)
    assert "<b>session main</b> · 2 ranks on cpu · <b>idle since " in html
    assert "idle, pid 100" in html
    assert "300 MB" in html
    assert "GPU" not in html


def test_a_busy_session_shows_its_cell_and_the_queued_ones() -> None:
    html = session_html(session("Cell In[3]", [f"Cell In[{n}]" for n in range(4, 30)]), USAGES)
    assert "<b>runs Cell In[3]</b>" in html
    assert html.count("<div>queued: ") == 9
    assert html.count("busy, pid") == 2


def test_a_dead_rank_is_named() -> None:
    html = session_html(session(ranks=[IDLE[0], RankHolding(1, 0, 0, 0)]), USAGES)
    assert ">dead<" in html
    assert "`%distributed session restart --rank 1` restarts it" in html
    unnoticed = session_html(session(), USAGES, {101})  # until the next task
    assert ">dead<" in unnoticed
    assert "--rank 1` restarts it" in unnoticed
    assert "session restart` restarts them" in session_html(session(), USAGES, {100, 101})
    three = [*IDLE, RankHolding(2, 102, 0, 0)]
    assert "restart --rank 0 --rank 1` restarts them" in session_html(session(ranks=three), USAGES, {100, 101})
    assert "restart" not in session_html(session(), USAGES)


def test_names_cannot_become_markup() -> None:
    assert "<script>" not in session_html(session("<script>", ["<script>"]), {})


def test_the_text_names_each_rank() -> None:
    text = session("Cell In[3]", ["Cell In[4]"], [IDLE[0], RankHolding(1, 0, 0, 0)]).text()
    assert text.splitlines()[0] == "session main: 2 ranks on cpu, busy: Cell In[3], 1 more queued"
    assert "rank 1: dead" in text


def test_gpu_memory_is_shown() -> None:
    usages = {0: Usage(0, 0.0, 10, 0.5, 2_000_000_000), 1: Usage(1, 0.0, 10, None, None)}
    html = session_html(session(), usages)
    assert "GPU memory" in html
    assert "2.0 GB" in html
