"""The record of a launch: what a saved notebook keeps, and the wording and styles that its parts share."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nblaunch.launch.output.terminal_lines import without_colours
from nblaunch.launch.views import Failure, duration_text
from nblaunch.notebook.ansi_html import MAX_INPUT_LENGTH
from nblaunch.notebook.charts import COLOURS, Point, Summary, clean, summarise
from nblaunch.notebook.page_messages import OutputContent

FAILED_COLOUR = "#d64a3f"
MONO = "font-family:monospace;font-size:12px;line-height:1.4"
PRE = f"{MONO};white-space:pre-wrap;overflow-wrap:break-word;margin:4px 0;padding:0;background:transparent"
DIM = "opacity:0.7"
PICTURE = "display:block;max-width:100%;height:auto"
_STATES = {
    "finished": ("✓", "#2e9457", "in"),
    "failed": ("✗", FAILED_COLOUR, "after"),
    "stopped": ("■", "#b07a1c", "after"),
    "running": ("…", COLOURS[0], "for"),
}


@dataclass(frozen=True, slots=True)
class RankTail:
    """The end of one rank's log."""

    rank: int
    lines: tuple[str, ...]
    """As a terminal would show them, with colour sequences."""
    more: bool
    """Earlier lines are missing."""
    path: str
    """Path of the whole log."""


@dataclass(frozen=True, slots=True)
class RankOutputs:
    """What one rank has displayed."""

    rank: int
    contents: tuple[OutputContent, ...]
    left_out: int
    """Outputs that are missing."""


@dataclass(frozen=True, slots=True)
class Record:
    """A launch as a saved notebook keeps it."""

    name: str
    state: str
    """running, finished, failed or stopped."""
    seconds: float
    message: str
    ranks: str
    """As in ``2 ranks`` or ``rank 0 of 2``."""
    device: str
    ended_at: float
    """Seconds since the epoch; 0.0: it still runs."""
    metrics: Mapping[str, Mapping[int, Sequence[Point]]]
    """The points (x, y) of each rank for each metric; y may be NaN."""
    tails: Sequence[RankTail]
    notes: Sequence[str]
    failure: Failure | None
    log_dir: str
    charts: Sequence[Sequence[str]] | None = None
    """The metrics of each chart, in order. None: as their names say."""
    numbered: Collection[str] = ()
    """The metrics with the numbers of their reports as x."""
    best: Mapping[str, Point] = field(default_factory=dict)
    """The point that is marked as the best one, by metric; y may be NaN."""
    launch_id: str = ""
    """The page's script shows the live panel in place of the record with this id."""
    outputs: Sequence[RankOutputs] = ()
    """What ranks have displayed, by rank."""

    def heading(self) -> tuple[str, str, list[str]]:
        """Return the mark and colour of the state, and the facts that follow it."""
        mark, colour, preposition = _STATES.get(self.state, ("", COLOURS[0], "after"))
        when = f"{preposition} {duration_text(self.seconds)}"
        return mark, colour, [when, self.ranks, one_line(self.device, 100)]

    def summaries(self) -> list[list[Summary]]:
        """Return the metrics in numbers, those of each chart together."""
        return summarise(self.metrics, self.charts, self.best, self.numbered)

    def tails_shown(self, most: int) -> list[RankTail]:
        """Return at most `most` tails by rank, that of the failed rank first."""
        failed = self.failure.rank if self.failure else -1
        return sorted(self.tails, key=lambda tail: (tail.rank != failed, tail.rank))[:most]


def card(lines: Iterable[str], image: str, alt: str) -> str:
    """Return a chart below the lines that describe it, as HTML.

    Args:
        lines: As HTML.
        image: Its source.
        alt: Its text, as HTML.
    """
    style = "display:inline-block;vertical-align:bottom;width:340px;max-width:100%;margin:10px 16px 0 0"
    picture = f'<img src="{image}" alt="{alt}" width="340" height="150" style="{PICTURE}">'
    return f'<div style="{style}">{"".join(f"<div>{line}</div>" for line in lines)}{picture}</div>'


def in_rows(cards: Sequence[str]) -> str:
    """Return cards in even rows of at most three: four in two rows of two."""
    count = -(-len(cards) // 3)
    ends = [-(-len(cards) * number // count) for number in range(count + 1)] if count else []
    return "".join(f"<div>{''.join(cards[begin:end])}</div>" for begin, end in itertools.pairwise(ends))


def plain(text: str) -> str:
    """Return the beginning of `text` without colours and control characters."""
    return clean(without_colours(text[:MAX_INPUT_LENGTH])).strip()


def within(text: str, size: int) -> str:
    """Return at most `size` bytes of `text`."""
    data = text.encode()
    return text if len(data) <= size else data[: max(0, size - 3)].decode(errors="ignore") + "…"


def one_line(text: str, size: int) -> str:
    """Return at most `size` bytes of `text` as one plain line."""
    return within(" ".join(plain(text).split()), size)


def counted(number: int, name: str) -> str:
    """Return, for example, "1 rank" or "2 ranks"."""
    return f"{number} {name}{'s' * (number != 1)}"


def rank_name(rank: int) -> str:
    """Return "rank 3", or "the launch" for -1."""
    return f"rank {rank}" if rank >= 0 else "the launch"
