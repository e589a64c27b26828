"""The debug console in the panel: what the page gets of it, and what the record keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nblaunch.launch.debug_console import DebugConsole
from nblaunch.notebook.page_messages import CompletionRequest, LookRequest, TypedLine
from nblaunch.notebook.panel_console import PanelConsole
from nblaunch.wire.debug_messages import Asked, Complete, Completions, Look, Opened, Printed, Typed


class Rank:
    """The debugger of rank 1, in a console of two ranks that a panel shows."""

    def __init__(self, *, is_in_cell: bool = False) -> None:
        self.console = DebugConsole(2, {})
        self.console.begin(1, lambda: None)
        self.panel = PanelConsole()
        self.panel.open(self.console, is_in_cell=is_in_cell)

    def opens(self) -> None:
        self.console.take(Opened(1, 1, "breakpoint", "a.py", 3))

    def prints(self, text: str) -> None:
        self.console.take(Printed(1, 1, text))

    def asks(self, number: int = 1, *, is_secret: bool = False) -> None:
        self.console.take(Asked(1, 1, number, "", is_secret))

    def types(self, line: str | None) -> None:
        prompt = self.console.prompt
        assert prompt is not None
        self.panel.obey(TypedLine(launch="L", number=prompt.number, line=line))

    def sent(self) -> list[Any]:
        return [message for _, message in self.console.outgoing()]


@pytest.fixture
def rank() -> Rank:
    return Rank()


def delta(rank: Rank) -> Any:
    found = rank.panel.delta()
    assert found is not None
    return found


def test_a_console_that_was_never_used_is_no_news(rank: Rank) -> None:
    assert not rank.panel.is_changed
    assert rank.panel.delta() is None
    assert rank.panel.snapshot() is None


def test_text_is_sent_once_and_whole_in_a_snapshot(rank: Rank) -> None:
    rank.opens()
    rank.prints("one\n")
    first = delta(rank)
    assert first.text.startswith("rank 1 has stopped at a breakpoint, a.py, line 3\n")
    assert (first.text.endswith("one\n"), first.prompt, first.ranks) == (True, None, [])
    rank.prints("two\n")
    rank.asks()
    second = delta(rank)
    assert (second.text, second.prompt.text, second.prompt.rank, second.ranks) == ("two\n", "(rank 1 of 2) ", 1, [1])
    assert rank.panel.delta() is None
    whole = rank.panel.snapshot()
    assert whole is not None
    assert (whole.text, whole.prompt) == (first.text + second.text, second.prompt)
    assert not rank.panel.is_changed


def test_a_flood_comes_in_parts_and_keeps_its_end(rank: Rank) -> None:
    rank.opens()
    rank.prints("".join(f"{number:07d}\n" for number in range(50_000)))
    parts = []
    while (found := rank.panel.delta()) is not None:
        parts.append(found.text)
    assert max(map(len, parts)) < 20_000
    assert sum(map(len, parts)) < 70_000
    assert parts[0].startswith("…\n")
    assert parts[-1].endswith("0049999\n")
    whole = rank.panel.snapshot()
    assert whole is not None
    assert whole.text == "".join(parts)


def test_a_typed_line_reaches_the_rank(rank: Rank) -> None:
    rank.opens()
    rank.asks(7)
    delta(rank)
    rank.types("p x")
    assert rank.sent() == [Typed(1, 7, "p x")]
    after = delta(rank)
    assert (after.text, after.prompt, after.ranks) == ("(rank 1 of 2) p x\n", None, [])
    rank.asks(8)
    rank.types(None)
    assert rank.sent() == [Typed(1, 8, None)]


def test_completions_and_looks_are_asked_for(rank: Rank) -> None:
    rank.opens()
    rank.asks()
    delta(rank)
    rank.panel.obey(CompletionRequest(launch="L", request=5, text="x."))
    rank.panel.obey(LookRequest(launch="L", rank=0))
    assert rank.sent() == [Complete(1, 1, "x."), Look(1, "")]
    rank.console.take(Completions(1, 1, 1, ("x.shape", "x.size")))
    found = delta(rank).completions
    assert (found.request, list(found.names)) == (5, ["x.shape", "x.size"])
    assert rank.panel.delta() is None


def test_a_launch_that_has_ended_keeps_its_text_and_obeys_nothing(rank: Rank) -> None:
    rank.opens()
    rank.asks()
    rank.console.end()
    rank.panel.close()
    found = delta(rank)
    assert ("breakpoint" in found.text, found.prompt) == (True, None)
    rank.panel.obey(LookRequest(launch="L", rank=0))
    assert rank.sent() == []


@pytest.mark.parametrize(
    ("is_in_cell", "types", "is_kept"),
    [
        (False, lambda rank: rank.types("p x"), True),
        (False, lambda rank: rank.console.type(1, "p x", "cell"), False),
        (True, lambda rank: rank.types("p x"), False),
    ],
    ids=["in the panel", "in the cell", "in both"],
)
def test_the_record_has_what_the_cell_has_not(is_in_cell: bool, types: Callable[[Rank], Any], is_kept: bool) -> None:
    rank = Rank(is_in_cell=is_in_cell)
    rank.opens()
    rank.asks()
    types(rank)
    rank.panel.close()
    assert ("(rank 1 of 2) p x" in rank.panel.for_record) is is_kept
