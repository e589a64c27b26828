"""The line under a cell that trains in the notebook's own process."""

from __future__ import annotations

import pytest

from nblaunch.training import fit_display
from nblaunch.training.fit_display import FitDisplay


class Page:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def publish(self, data: dict[str, str], transient: dict[str, str], update: bool) -> None:
        assert update == bool(self.lines)
        self.lines.append(data["text/plain"])


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    monkeypatch.setattr(fit_display._Line, "in_notebook", lambda: fit_display._Line(page))
    return page


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fit_display, "time", clock)
    return clock


def test_the_line_says_how_long_is_left(page: Page, clock: Clock) -> None:
    display = FitDisplay(total=100, done=40)
    list(display.batches([1], "epoch 1/3"))
    assert page.lines == ["epoch 1/3 · step 40 of 100 · 0 s"]
    clock.now += 10
    display.step(60)  # 20 steps in 10 s
    assert page.lines[-1] == "epoch 1/3 · step 60 of 100 · 10 s, 20 s left"
    clock.now += 600
    display.step(61)
    assert page.lines[-1].endswith("step 61 of 100 · 10 min, 19 min left")
    display.step(100)
    clock.now += 7200
    display.close()
    assert page.lines[-1].endswith("step 100 of 100 · 2.2 h")


def test_the_best_step_says_by_which_result(page: Page, clock: Clock) -> None:
    display = FitDisplay(total=None, done=0)
    display.mark_best("valid_loss", 7, 0.25)
    display.close()
    assert page.lines == ["step 0 · best valid loss 0.25 at step 7 · 0 s"]
