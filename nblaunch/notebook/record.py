"""What stays of a launch in a saved notebook: HTML and plain text that need no kernel and no script.

JupyterLab takes much away from the HTML of a notebook that it does not trust: ``<style>``, ``<svg>``, ``aria-``
attributes, and each style whose value it does not know. What is written here survives it. Colours are mid-tones and
half-transparent, for light pages and dark ones; where a page drops all styles, as GitHub does, the words suffice.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from nblaunch.launch.output.terminal_lines import Excerpt, fair_shares, without_colours
from nblaunch.launch.views.text_view import number
from nblaunch.launch.views.view import Failure
from nblaunch.notebook.ansi_html import MOST_READ, block, coloured, cut, terminal_lines
from nblaunch.notebook.charts import (
    MEAN_COLOUR,
    MOST_LINES,
    Point,
    Summary,
    clean,
    colour_of,
    data_uri,
    line_chart,
    summarise,
)

_MOST_CHARTS = 12
_MOST_METRICS = 24
_MOST_COLUMNS = 8
_MOST_RANKS = 64
_CHART_BYTES = 52 << 10
_TAIL_BYTES = 22 << 10
_TRACEBACK_BYTES = 8 << 10
"""With what stands between them, all parts are below 150 KB of HTML."""
_LINE = 400
"""Characters of a line of a log."""
_LAST_LINES = 20
_MOST_NOTES = 5
_OTHERS = 8

_TEXT_TRACEBACK = 2000
_TEXT_METRICS = 1300
_TEXT_TAILS = 1700
"""Bytes in the text version, which is below 8 KB."""

_STATES = {
    "finished": ("✓", "#2e9457", "in"),
    "failed": ("✗", "#d64a3f", "after"),
    "stopped": ("■", "#b07a1c", "after"),
    "running": ("…", MEAN_COLOUR, "for"),
}
_MONO = "font-family:monospace;font-size:12px;line-height:1.4"
_PRE = f"{_MONO};white-space:pre-wrap;overflow-wrap:break-word;margin:4px 0;padding:0;background:transparent"
_DIM = "opacity:0.7"
_PICTURE = "display:block;max-width:100%;height:auto"
_RED = _STATES["failed"][1]


@dataclass(frozen=True, slots=True)
class RankTail:
    """The end of one rank's log."""

    rank: int
    lines: tuple[str, ...]
    """As a terminal would show them; they may hold colour sequences."""
    more: bool
    """There was more before."""
    path: str
    """Of the whole log."""


@dataclass(frozen=True, slots=True)
class Record:
    """A launch as it is kept."""

    name: str
    state: str
    """running, finished, failed or stopped."""
    seconds: float
    message: str
    world_size: int
    device: str
    ended_at: float
    """Seconds since the epoch."""
    metrics: Mapping[str, Mapping[int, Sequence[Point]]]
    """The points (x, y) of each rank for each metric; y may be NaN."""
    tails: Sequence[RankTail]
    notes: Sequence[str]
    failure: Failure | None
    log_dir: str
    launch_id: str = ""
    """The page's script shows the live panel in the place of the record with this id."""


def as_html(record: Record) -> str:
    """The record for a page: at most 150 KB, whatever it holds. Nothing in it can become a tag or an attribute."""
    summaries = summarise(record.metrics)
    parts = [
        _header(record),
        _failure(record.failure) if record.failure else _message(record.message),
        *(f'<div style="margin-top:6px">{_text(note, 200)}</div>' for note in record.notes[-_MOST_NOTES:]),
        _metrics(record, summaries),
        _table(summaries),
        _tails(record),
        f'<div style="margin-top:8px;font-size:12px;{_DIM}">logs: <code>{_text(record.log_dir, _LINE)}</code></div>'
        if record.log_dir
        else "",
    ]
    # The classes keep MathJax from taking two dollar signs in a message for mathematics.
    style = "border:1px solid rgba(128,128,128,0.35);border-radius:6px;padding:10px 14px;margin:2px 0;line-height:1.4"
    marker = f"nblaunch-{escape(record.launch_id)}"
    return f'<div class="{marker} tex2jax_ignore mathjax_ignore" style="{style}">{"".join(parts)}</div>'


def as_text(record: Record) -> str:
    """The record for a page without HTML, or a terminal: at most 8 KB."""
    summaries = summarise(record.metrics)
    parts = [
        _first_line(record),
        _failure_text(record.failure) if record.failure else _within(_plain(record.message), 500),
        "\n".join(_one_line(note, 150) for note in record.notes[-3:]),
        _metrics_text(summaries),
        _tails_text(record),
        f"logs: {_one_line(record.log_dir, 300)}" if record.log_dir else "",
    ]
    return "\n".join(part for part in parts if part)


# ------------------------------------------------------------------ text that is safe to show
def _text(text: str, most: int, *, in_attribute: bool = False) -> str:
    """At most so many characters of `text`, as HTML with no tags."""
    return escape(cut(_plain(text), most), quote=in_attribute)


def _plain(text: str) -> str:
    return clean(without_colours(text[:MOST_READ])).strip()


def _within(text: str, size: int) -> str:
    """At most so many bytes of `text`."""
    data = text.encode()
    return text if len(data) <= size else data[: max(0, size - 3)].decode(errors="ignore") + "…"


def _one_line(text: str, size: int) -> str:
    return _within(" ".join(_plain(text).split()), size)


# ------------------------------------------------------------------ what happened
def _heading(record: Record) -> tuple[str, str, list[str]]:
    """The state's mark and colour, and the facts that follow it."""
    mark, colour, preposition = _STATES.get(record.state, ("", MEAN_COLOUR, "after"))
    when = f"{preposition} {_duration(record.seconds)}"
    return mark, colour, [when, _count(record.world_size, "rank"), _one_line(record.device, 100)]


def _header(record: Record) -> str:
    mark, colour, facts = _heading(record)
    state = f"{mark} {_text(record.state, 40)}"
    rest = " · ".join(escape(fact) for fact in [*facts, _when(record.ended_at)] if fact)
    return (
        f'<div><b style="font-size:15px">{_text(record.name, 120)}</b> '
        f'<b style="color:{colour}">{state}</b> <span style="{_DIM}">{rest}</span></div>'
    )


def _first_line(record: Record) -> str:
    _, _, facts = _heading(record)
    return f"{_one_line(record.name, 200)}: {_one_line(record.state, 40)} {' · '.join(filter(None, facts))}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _when(ended_at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(ended_at))
    except (OverflowError, ValueError, OSError):  # no time at all
        return ""


def _message(message: str) -> str:
    return f'<div style="margin-top:6px;white-space:pre-wrap">{_text(message, 1000)}</div>' if message.strip() else ""


def _failure(failure: Failure) -> str:
    headline = f"{_who(failure)}: {_text(failure.type_name, 100)}"
    parts = [f'<b style="color:{_RED}">{headline}</b>']
    if failure.message.strip():
        parts.append(f'<pre style="{_PRE}">{_text(failure.message, 1000)}</pre>')
    if failure.where:
        parts.append(f'<div style="margin-top:6px">{_text(failure.where, 200)}</div>')
    if failure.source:
        parts.append(f'<pre style="{_PRE}"><b>    {_text(failure.source, 200)}</b></pre>')
    if failure.traceback.strip():
        lines = block(failure.traceback.rstrip().splitlines(), _TRACEBACK_BYTES)
        parts.append(_folded(f"traceback of {_rank_name(failure.rank)}", lines, is_open=True))
    if failure.others:
        parts.append(
            _folded(f"then, on {_count(len(failure.others), 'other rank')}", block(failure.others[:_OTHERS], 2000))
        )
    style = f"border-left:4px solid {_RED};background:rgba(214,74,63,0.09);padding:8px 12px;margin-top:8px"
    return f'<div style="{style}">{"".join(parts)}</div>'


def _folded(title: str, lines: str, *, is_open: bool = False) -> str:
    summary = f'<summary style="{_DIM};cursor:pointer">{title}</summary>'
    return f'<details{" open" * is_open} style="margin-top:6px">{summary}<pre style="{_PRE}">{lines}</pre></details>'


def _who(failure: Failure) -> str:
    return f"{_rank_name(failure.rank)} failed"


def _rank_name(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "the launch"


def _failure_text(failure: Failure) -> str:
    lines = [f"{_who(failure)}: {_within(_plain(f'{failure.type_name}: {failure.message}'), 600)}"]
    if failure.where or failure.source:
        lines.append("  " + _one_line(": ".join(filter(None, (failure.where, failure.source))), 250))
    if failure.traceback.strip():
        excerpt = Excerpt(_TEXT_TRACEBACK // 4, _TEXT_TRACEBACK * 3 // 4, prefix="  ")
        for line in failure.traceback.rstrip().splitlines():
            excerpt.add(_within(clean(without_colours(line[:MOST_READ])), 300))
        lines += ["", excerpt.text("…").rstrip()]
    if failure.others:
        lines += ["then, on other ranks:", *(f"  {_one_line(other, 100)}" for other in failure.others[:_OTHERS])]
    return "\n".join([*lines, ""])


# ------------------------------------------------------------------ what it measured
def _metrics(record: Record, summaries: Sequence[Summary]) -> str:
    """A card for each metric: its numbers, and a chart where there is something to draw."""
    shown = summaries[:_MOST_METRICS]
    drawn = [summary for summary in shown if _has_line(record.metrics[summary.name])][:_MOST_CHARTS]
    charts = dict(zip((summary.name for summary in drawn), _charts(record, drawn), strict=True))
    cards = [_card(summary, charts[summary.name]) for summary in drawn]
    rest = [f"<div>{_numbers(summary)}</div>" for summary in shown if summary.name not in charts]
    more = [f"<div>and {len(summaries) - len(shown)} more metrics</div>"] if len(summaries) > len(shown) else []
    return "".join([*cards, _legend(drawn), *rest, *more]) if shown else ""


def _has_line(series: Mapping[int, Sequence[Point]]) -> bool:
    return len({x for points in series.values() for x, y in points if math.isfinite(x) and math.isfinite(y)}) > 1


def _charts(record: Record, summaries: Sequence[Summary]) -> list[str]:
    """An image for each of these, all of them together small enough."""
    images: list[str] = []
    for most_points in (300, 150, 75, 40, 20, 8):
        images = [
            data_uri(line_chart(record.metrics[s.name], s.mean, cut(s.name, 60), most_points=most_points))
            for s in summaries
        ]
        if sum(map(len, images)) <= _CHART_BYTES:
            break
    return images


def _card(summary: Summary, image: str) -> str:
    style = "display:inline-block;vertical-align:top;width:340px;max-width:100%;margin:10px 16px 0 0"
    alt = f"chart of {_text(summary.name, 60, in_attribute=True)}: {_in_words(summary)}"
    picture = f'<img src="{image}" alt="{alt}" width="340" height="150" style="{_PICTURE}">'
    return f'<div style="{style}"><div>{_numbers(summary)}</div>{picture}</div>'


def _numbers(summary: Summary) -> str:
    best = f' <span style="{_DIM}">best {number(summary.best)}</span>' if summary.best is not None else ""
    alarm = "" if math.isfinite(summary.latest) else f";color:{_RED}"
    latest = f'<span style="font-size:16px{alarm}">{number(summary.latest)}</span>'
    return f"<b>{_text(summary.name, 60)}</b> {latest}{best}"


def _in_words(summary: Summary) -> str:
    best = f", best {number(summary.best)}" if summary.best is not None else ""
    ranks = f", mean of {len(summary.by_rank)} ranks" if len(summary.by_rank) > 1 else ""
    return f"latest {number(summary.latest)}{best}{ranks}"


def _legend(summaries: Sequence[Summary]) -> str:
    ranks = sorted({rank for summary in summaries for rank in summary.by_rank})
    if len(ranks) < 2:
        return ""
    mean = f'<span style="color:{MEAN_COLOUR}">━ mean</span>'
    if len(ranks) > MOST_LINES:
        rest = f'<span style="color:{colour_of(0)}">▒ lowest to highest of {len(ranks)} ranks</span>'
    else:
        style = "white-space:nowrap;color:"
        rest = " ".join(f'<span style="{style}{colour_of(rank)}">─ rank {rank}</span>' for rank in ranks)
    return f'<div style="font-size:12px;margin-bottom:6px">{mean} {rest}</div>'


def _table(summaries: Sequence[Summary]) -> str:
    """The latest values of each rank, of the metrics in which ranks differ."""
    columns = [summary for summary in summaries if summary.differs][:_MOST_COLUMNS]
    ranks = sorted({rank for summary in columns for rank in summary.by_rank})[:_MOST_RANKS]
    if not columns:
        return ""
    rows = [
        _row("td", "mean", (number(summary.latest) for summary in columns)),
        *(_row("td", f"rank {rank}", (_cell(summary.by_rank.get(rank)) for summary in columns)) for rank in ranks),
    ]
    head = _row("th", "latest", (_text(summary.name, 60) for summary in columns))
    table = (
        '<table cellpadding="4" style="margin:4px 0 0 0;border-collapse:collapse;text-align:right">'
        f"<thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
    )
    summary = f'<summary style="cursor:pointer">latest values of {_count(len(ranks), "rank")}</summary>'
    return f'<details style="margin-top:8px;overflow-x:auto">{summary}{table}</details>'


def _row(cell: str, name: str, values: Iterable[str]) -> str:
    cells = "".join(f"<{cell}>{value}</{cell}>" for value in values)
    return f"<tr><th>{name}</th>{cells}</tr>"


def _cell(value: float | None) -> str:
    return "" if value is None else number(value)


def _metrics_text(summaries: Sequence[Summary]) -> str:
    excerpt = Excerpt(_TEXT_METRICS, 0)
    for summary in summaries:
        best = f" (best {number(summary.best)})" if summary.best is not None else ""
        ranks = ""
        if summary.differs:
            values = [f"{rank}: {number(value)}" for rank, value in list(summary.by_rank.items())[:_OTHERS]]
            ranks = f"; rank {', '.join(values)}{', …' * (len(summary.by_rank) > _OTHERS)}"
        excerpt.add(f"{_one_line(summary.name, 80)} {number(summary.latest)}{best}{ranks}")
    return excerpt.text(f"and {excerpt.left_lines} more metrics").rstrip()


# ------------------------------------------------------------------ what the ranks said
def _tails_shown(record: Record) -> list[RankTail]:
    """The tails in order, that of the rank that failed first."""
    failed = record.failure.rank if record.failure else -1
    return sorted(record.tails, key=lambda tail: (tail.rank != failed, tail.rank))[:_MOST_RANKS]


def _tails(record: Record) -> str:
    shown = _tails_shown(record)
    if not shown:
        return ""
    characters = min(_LINE, _TAIL_BYTES // len(shown) // 6)
    excerpts = [_tail_excerpt(tail, len(shown), characters) for tail in shown]
    shares = fair_shares([excerpt.size for excerpt in excerpts], _TAIL_BYTES)
    for excerpt, share in zip(excerpts, shares, strict=True):
        excerpt.cut(share)
    has_failed = [record.failure is not None and record.failure.rank == tail.rank for tail in shown]
    is_few = len(shown) <= MOST_LINES
    parts = [
        _tail(tail, excerpt, is_open=failed or len(shown) == 1, preview=is_few)
        for tail, excerpt, failed in zip(shown, excerpts, has_failed, strict=True)
    ]
    if len(record.tails) > len(shown):
        parts.append(f"<div>and {len(record.tails) - len(shown)} more ranks</div>")
    if not is_few:
        first = sum(has_failed)
        summary = f'<summary style="cursor:pointer">the last lines of {_count(len(shown) - first, "rank")}</summary>'
        parts[first:] = [f"<details>{summary}{''.join(parts[first:])}</details>"]
    return f'<div style="margin-top:10px">{"".join(parts)}</div>'


def _tail_excerpt(tail: RankTail, among: int, characters: int) -> Excerpt:
    """The last lines of a rank, as HTML."""
    most = max(5, min(_LAST_LINES, 160 // among))
    excerpt = Excerpt(0, _TAIL_BYTES)
    for line in terminal_lines(tail.lines[-most:]):
        excerpt.add(coloured(line, characters))
    return excerpt


def _tail(tail: RankTail, excerpt: Excerpt, *, is_open: bool, preview: bool) -> str:
    file = re.split(r"[\\/]", tail.path)[-1]
    lines = excerpt.text("")
    last = next(filter(str.strip, reversed(tail.lines)), "") if preview and not is_open else ""
    said = f' <span style="{_MONO};{_DIM}">{_text(last, 80)}</span>' if last else ""
    summary = f'<summary style="cursor:pointer"><b>rank {tail.rank}</b>{said}</summary>'
    before = ""
    if tail.more or excerpt.left_lines or lines.count("\n") < len(tail.lines):
        where = f" in {_text(file, 60)}" if file and preview else ""
        before = f'<span style="{_DIM}">… more before{where}</span>\n'
    if not (before or lines):
        return f'<div><b>rank {tail.rank}</b> <span style="{_DIM}">printed nothing</span></div>'
    return f'<details{" open" * is_open}>{summary}<pre style="{_PRE}">{before}{lines}</pre></details>'


def _tails_text(record: Record) -> str:
    shown = _tails_shown(record)[:16]
    most = 5 if len(shown) <= 4 else 2
    excerpts = [Excerpt(0, _TEXT_TAILS, prefix=f"[rank {tail.rank}] ") for tail in shown]
    for tail, excerpt in zip(shown, excerpts, strict=True):
        for line in terminal_lines([line for line in tail.lines if line.strip()][-most:]):
            excerpt.add(_within(clean(without_colours(line)), 100))
    shares = fair_shares([excerpt.size for excerpt in excerpts], _TEXT_TAILS)
    for excerpt, share in zip(excerpts, shares, strict=True):
        excerpt.cut(share)
    return "".join(excerpt.text("") for excerpt in excerpts).rstrip()
