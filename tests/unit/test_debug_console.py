"""The console of debuggers: whose prompt is shown, and where a line goes."""

from __future__ import annotations

import time

import pytest

from nblaunch.launch.debug_console import DebugConsole
from nblaunch.machine import timeouts
from nblaunch.wire.messages import (
    Asked,
    Closed,
    FromDebugger,
    Look,
    Opened,
    OpenedBy,
    Printed,
    Source,
    ToDebugger,
    Typed,
)

TASK = 3


class Ranks:
    """Three ranks of a task, and what the user sees."""

    def __init__(self) -> None:
        self.now = 100.0
        sources = {"<cell 1>": Source("x = 1", "Cell In[1]")}
        self.console = DebugConsole(3, sources, clock=lambda: self.now)
        self.wakes = 0
        self.console.begin(TASK, self.wake)
        self._numbers = [0, 0, 0]

    def wake(self) -> None:
        self.wakes += 1

    def say(self, message: FromDebugger) -> None:
        self.console.take(message)

    def stops(self, rank: int, text: str = "-> x = 1\n", by: OpenedBy = "breakpoint") -> None:
        self.say(Opened(rank, TASK, by, "<cell 1>", 4, "f"))
        self.prints(rank, text)
        self.asks(rank)

    def prints(self, rank: int, text: str) -> None:
        self.say(Printed(rank, TASK, text))

    def asks(self, rank: int, prompt: str = "", *, is_secret: bool = False, is_command: bool = True) -> None:
        self._numbers[rank] += 1
        self.say(Asked(rank, TASK, self._numbers[rank], prompt, is_secret, is_command))

    def reads(self, rank: int, prompt: str = "", *, is_secret: bool = False) -> None:
        """Call ``input``."""
        self.say(Opened(rank, TASK, "input"))
        self.asks(rank, prompt, is_secret=is_secret, is_command=False)

    def looked_at(self, rank: int) -> None:
        """Answer a look."""
        self.say(Opened(rank, TASK, "look", "<cell 1>", 4, "f"))
        self.asks(rank)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.console.step()

    def closes(self, rank: int, **how: bool) -> None:
        self.say(Closed(rank, TASK, **how))

    def types(self, line: str | None) -> list[tuple[int, ToDebugger]]:
        """Type a line, and return what is sent."""
        prompt = self.console.prompt
        assert prompt is not None
        self.console.type(prompt, line)
        return list(self.console.outgoing())

    @property
    def prompt(self) -> str:
        return self.console.prompt.text if self.console.prompt is not None else ""

    @property
    def news(self) -> str:
        """What was shown since the last call."""
        return self.console.take_text()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_the_first_rank_that_stops_is_in_front(ranks: Ranks) -> None:
    assert (ranks.prompt, ranks.console.is_open) == ("", False)
    ranks.stops(1)
    assert ranks.prompt == "(rank 1 of 3) "
    assert ranks.news.startswith("rank 1 stopped at a breakpoint, Cell In[1], line 4\nn: next line")
    ranks.stops(0)
    assert ranks.prompt == "(rank 1 of 3) "
    assert ranks.news == "rank 0 stopped at a breakpoint, Cell In[1], line 4: `rank 0` switches to it\n"
    assert ranks.console.stopped == [0, 1]
    assert ranks.types("p x") == [(1, Typed(TASK, 1, "p x"))]
    assert ranks.prompt == ""
    assert ranks.wakes == 1


def test_a_line_answers_one_prompt_alone(ranks: Ranks) -> None:
    ranks.stops(0)
    prompt = ranks.console.prompt
    assert prompt is not None
    ranks.console.type(prompt, "n")
    assert list(ranks.console.outgoing()) == [(0, Typed(TASK, 1, "n"))]
    ranks.asks(0)
    ranks.console.type(prompt, "n")
    assert list(ranks.console.outgoing()) == []


def test_a_rank_that_goes_on_makes_place_for_the_next(ranks: Ranks) -> None:
    ranks.stops(2)
    ranks.stops(0, "-> rank 0\n")
    ranks.types("c")
    assert "rank 0 stopped" in ranks.news
    ranks.closes(2)
    assert ranks.prompt == "(rank 0 of 3) "
    assert ranks.news.endswith("-> rank 0\n")
    ranks.closes(0)
    assert not ranks.console.is_open


def test_a_rank_that_steps_stays_in_front_for_a_while(ranks: Ranks) -> None:
    ranks.stops(1)
    ranks.stops(0)
    ranks.types("n")
    ranks.closes(1, steps=True)
    ranks.wait(0)
    assert (ranks.prompt, ranks.console.is_open) == ("", True)
    ranks.stops(1)
    assert ranks.prompt == "(rank 1 of 3) "
    ranks.types("n")
    ranks.closes(1, steps=True)
    ranks.wait(timeouts.STEP_TIMEOUT_S + 1)
    assert ranks.prompt == "(rank 0 of 3) "
    assert "rank 1 continues\n" in ranks.news


def test_a_long_step_of_the_only_rank_is_no_debugging(ranks: Ranks) -> None:
    """Time limits count again."""
    ranks.stops(1)
    ranks.types("n")
    ranks.closes(1, steps=True)
    ranks.wait(timeouts.STEP_TIMEOUT_S + 1)
    assert not ranks.console.is_open


def test_all_sends_a_command_to_each_rank_and_waits_for_the_answers(ranks: Ranks) -> None:
    ranks.stops(1)
    ranks.stops(0)
    ranks.news  # noqa: B018  # read
    assert ranks.types("all p x") == [
        (0, Typed(TASK, 1, "p x")),
        (1, Typed(TASK, 1, "p x")),
        (2, Look(TASK, "p x")),
    ]
    ranks.prints(1, "one\n")
    ranks.asks(1)
    assert ranks.prompt == ""  # the other answers would come after it
    ranks.prints(0, "zero\n")
    ranks.asks(0)
    ranks.say(Opened(2, TASK, "look", "<cell 1>", 4, "f", command="p x"))
    ranks.prints(2, "two\n")
    ranks.closes(2)
    assert ranks.prompt == "(rank 1 of 3) "
    assert ranks.news == "rank 1: one\nrank 0: zero\nrank 2: two\n"


def test_a_rank_that_does_not_answer_a_look_is_given_up(ranks: Ranks) -> None:
    ranks.stops(1)
    assert ranks.types("rank 0") == [(0, Look(TASK, ""))]
    assert ranks.prompt == ""
    ranks.wait(timeouts.LOOK_TIMEOUT_S + 1)
    assert ranks.prompt == "(rank 1 of 3) "
    assert "rank 0 does not respond: it is busy, or C code is holding the GIL\n" in ranks.news


def test_a_rank_that_fails_is_announced_at_a_prompt(ranks: Ranks) -> None:
    fates = {1: lambda: "raised ValueError: no"}
    ranks.stops(0)
    ranks.news  # noqa: B018  # read
    prompt = ranks.console.prompt
    ranks.console.left(fates)
    ranks.console.left({**fates, 2: lambda: ""})
    assert ranks.news == "rank 1 raised ValueError: no; the launch ends when you close the debugger\n"
    assert ranks.console.prompt is prompt
    ranks.types("ranks")
    assert ranks.news.splitlines()[1:] == ["rank 1 raised ValueError: no", "rank 2 returned"]
    ranks.types("rank 1")
    assert ranks.news == "rank 1 raised ValueError: no\n"


def test_failures_during_a_stop_are_no_news(ranks: Ranks) -> None:
    ranks.stops(0)
    ranks.console.left({1: lambda: "raised KeyboardInterrupt"}, is_stopping=True)
    assert "KeyboardInterrupt" not in ranks.news


def test_all_says_who_takes_no_command(ranks: Ranks) -> None:
    for rank in range(3):
        ranks.stops(rank)
    ranks.types("time.sleep(9)")
    ranks.console.look(1)
    list(ranks.console.outgoing())
    ranks.asks(1)
    ranks.reads(2)
    assert ranks.types("all p x") == [(1, Typed(TASK, 2, "p x"))]
    assert ranks.news.endswith("rank 0 is still running the last command\nrank 2 is waiting for input\n")


def test_a_click_on_a_rank_in_input_shows_its_prompt(ranks: Ranks) -> None:
    ranks.reads(0, "a? ")
    ranks.reads(1, "b? ")
    ranks.console.look(1)
    assert ranks.prompt == "(rank 1 of 3) b? "
    assert ranks.news == "rank 1 is waiting for input\n"


def test_answers_to_all_wake_the_cell_at_once(ranks: Ranks) -> None:
    ranks.stops(0)
    ranks.stops(1)
    ranks.types("all p x")
    ranks.console.wait(0)
    ranks.prints(1, "one\n")
    ranks.asks(1)
    begun = time.monotonic()
    ranks.console.wait(60)
    assert time.monotonic() < begun + 30


def test_ranks_that_have_returned_or_do_not_exist_are_not_asked(ranks: Ranks) -> None:
    ranks.console.left({0: lambda: ""})
    ranks.stops(1)
    assert ranks.types("rank 0") == []
    assert "rank 0 is not running your code now\n" in ranks.news
    assert ranks.types("rank 3") == []
    assert "there is no rank 3: the ranks are 0 to 2\n" in ranks.news
    assert ranks.prompt == "(rank 1 of 3) "


@pytest.mark.parametrize("line", ["rank", "rank = 3", "all(x)", "all = 4", "ranks = []", "p ranks"])
def test_names_like_the_consoles_words_go_to_the_debugger(ranks: Ranks, line: str) -> None:
    ranks.stops(1)
    assert ranks.types(line) == [(1, Typed(TASK, 1, line))]


def test_input_gets_its_line_as_it_is_typed(ranks: Ranks) -> None:
    ranks.reads(2, "name? ", is_secret=True)
    assert ranks.prompt == "(rank 2 of 3) name? "
    assert ranks.types("rank 0") == [(2, Typed(TASK, 1, "rank 0"))]
    assert "rank 0" not in ranks.news
    ranks.closes(2)
    assert not ranks.console.is_open


def test_a_prompt_ends_with_its_rank(ranks: Ranks) -> None:
    ranks.stops(1)
    ranks.console.left({1: lambda: ""})
    assert (ranks.prompt, ranks.console.is_open) == ("", False)
