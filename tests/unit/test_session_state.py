"""The text of a session: what it runs, and what each rank holds."""

from __future__ import annotations

from nblaunch.launch.session_state import RankHolding, SessionState


def text(running: str, queued: list[str], pids: list[int]) -> str:
    ranks = [RankHolding(rank, pid, 1, 4000) for rank, pid in enumerate(pids)]
    return SessionState("main", "cpu", running, queued, 12.0, ranks, is_open=True).text()


def test_the_text_names_each_rank() -> None:
    first, alive, dead = text("Cell In[3]", ["Cell In[4]"], [100, 0]).splitlines()
    assert first == "session main: 2 ranks on cpu, busy: Cell In[3], 1 more queued"
    assert alive == "  rank 0: pid 100, 1 name, 4 KB"
    assert dead.endswith("rank 1: dead, its variables are lost; `%distributed session restart --rank 1` restarts it")
    assert "session main: 1 rank on cpu, idle since " in text("", [], [100])
    assert text("", [], [0, 0]).count("session restart` restarts all") == 2
