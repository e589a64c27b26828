"""The record as HTML that needs no kernel and no script.

JupyterLab sanitizes the HTML of an untrusted notebook: it drops ``<style>``, ``<svg>``, ``aria-`` attributes, and
styles with unknown values. This HTML survives it. Its colours are mid-tones and half-transparent, for light and dark
pages. Where a page drops all styles, as GitHub does, the words suffice.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from html import escape

from nblaunch.launch.output.metric_names import direction, kind, number_of
from nblaunch.launch.output.terminal_lines import Excerpt, fair_shares
from nblaunch.launch.views import Failure
from nblaunch.notebook.ansi_html import block, coloured, cut, terminal_lines
from nblaunch.notebook.charts import (
    COLOURS,
    MAX_LINES,
    MEAN_COLOUR,
    Line,
    Stroke,
    Summary,
    colour_of,
    data_uri,
    has_line,
    line_chart,
    line_of,
    stroke_beside,
)
from nblaunch.notebook.record import (
    DIM,
    FAILED_COLOUR,
    MONO,
    PRE,
    RankTail,
    Record,
    card,
    counted,
    in_rows,
    plain,
    rank_name,
)
from nblaunch.notebook.record_outputs import outputs_html

_MAX_CHARTS = 12
_MAX_METRICS = 24
_MAX_COLUMNS = 8
_MAX_RANKS = 64
_MAX_CHARTS_BYTES = 52 << 10
_MAX_TAILS_BYTES = 22 << 10
_MAX_TRACEBACK_BYTES = 8 << 10
"""Together with the markup, all parts stay below 150 KB."""
_MAX_LINE_LENGTH = 400
"""Characters of one line of a log."""
_MAX_TAIL_LINES = 20
_MAX_NOTES = 5
_MAX_OTHERS = 8
_CODE = re.compile("`([^`]+)`")


def as_html(record: Record) -> str:
    """Return the record as at most 150 KB of HTML, and what ranks displayed. No text becomes a tag or an attribute."""
    groups = record.summaries()
    message = ""
    if record.message.strip():
        message = f'<div style="margin-top:6px;white-space:pre-wrap">{_text(record.message, 1000)}</div>'
    parts = [
        _header(record),
        _failure(record.failure) if record.failure else message,
        *(f'<div style="margin-top:6px">{_with_code(note)}</div>' for note in record.notes[-_MAX_NOTES:]),
        outputs_html(record.outputs),
        _metrics(record, groups),
        _table([summary for group in groups for summary in group]),
        _tails(record),
    ]
    if record.log_dir:
        log_dir = _text(record.log_dir, _MAX_LINE_LENGTH)
        parts.append(f'<div style="margin-top:8px;font-size:12px;{DIM}">logs: <code>{log_dir}</code></div>')
    # The classes keep MathJax from reading dollar signs in a message as mathematics.
    style = "border:1px solid rgba(128,128,128,0.35);border-radius:6px;padding:10px 14px;margin:2px 0;line-height:1.4"
    marker = f"nblaunch-{escape(record.launch_id)}{'' if record.ended_at else ' nblaunch-running'}"
    return f'<div class="{marker} tex2jax_ignore mathjax_ignore" style="{style}">{"".join(parts)}</div>'


def _text(text: str, most: int, *, in_attribute: bool = False) -> str:
    """Return at most `most` characters of `text` as HTML without tags."""
    return escape(cut(plain(text), most), quote=in_attribute)


def _with_code(note: str) -> str:
    """Return a note as HTML: what stands in backticks is code."""
    return _CODE.sub(r"<code>\1</code>", _text(note, 200))


def _header(record: Record) -> str:
    mark, colour, facts = record.heading()
    state = f"{mark} {_text(record.state, 40)}"
    rest = " · ".join(escape(fact) for fact in [*facts, _when(record)] if fact)
    return (
        f'<div><b style="font-size:15px">{_text(record.name, 120)}</b> '
        f'<b style="color:{colour}">{state}</b> <span style="{DIM}">{rest}</span></div>'
    )


def _when(record: Record) -> str:
    """Return when the launch ended, or until when the record of one that runs goes."""
    try:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.ended_at or time.time()))
        return at if record.ended_at else f"as of {at}"
    except (OverflowError, ValueError, OSError):  # not a time
        return ""


def _failure(failure: Failure) -> str:
    parts = [f'<b style="color:{FAILED_COLOUR}">{_text(failure.headline, 300)}</b>']
    if failure.details.strip():
        parts.append(f'<pre style="{PRE}">{_text(failure.details, 2000)}</pre>')
    if failure.where:
        parts.append(f'<div style="margin-top:6px">{_text(failure.where, 200)}</div>')
    if failure.source:
        parts.append(f'<pre style="{PRE}"><b>    {_text(failure.source, 200)}</b></pre>')
    if failure.traceback.strip():
        lines = block(failure.traceback.rstrip().splitlines(), _MAX_TRACEBACK_BYTES)
        parts.append(_folded(f"traceback of {rank_name(failure.rank)}", lines, is_open=True))
    if failure.others:
        parts.append(
            _folded(f"then, on {counted(len(failure.others), 'other rank')}", block(failure.others[:_MAX_OTHERS], 2000))
        )
    style = f"border-left:4px solid {FAILED_COLOUR};background:rgba(214,74,63,0.09);padding:8px 12px;margin-top:8px"
    return f'<div style="{style}">{"".join(parts)}</div>'


def _folded(title: str, lines: str, *, is_open: bool = False) -> str:
    summary = f'<summary style="{DIM};cursor:pointer">{title}</summary>'
    return f'<details{" open" * is_open} style="margin-top:6px">{summary}<pre style="{PRE}">{lines}</pre></details>'


# ------------------------------------------------------------------ metrics
def _metrics(record: Record, groups: Sequence[Sequence[Summary]]) -> str:
    """Return a card for each chart: the numbers of its metrics, and a chart if there is a line to draw."""
    shown = groups[:_MAX_METRICS]
    drawn = [group for group in shown if has_line(record.metrics, group)][:_MAX_CHARTS]
    cards = [_card(group, image) for group, image in zip(drawn, _charts(record, drawn), strict=True)]
    rest = [f"<div>{_numbers(summary)}</div>" for group in shown if group not in drawn for summary in group]
    more = len(groups) - len(shown)
    note = [f"<div>and {counted(more, 'more metric')}</div>"] if more else []
    return "".join([in_rows(cards), *rest, *note])


def _charts(record: Record, groups: Sequence[Sequence[Summary]]) -> list[str]:
    """Return an image for each of these charts, together at most `_MAX_CHARTS_BYTES`."""
    images: list[str] = []
    for most_points in (300, 150, 75, 40, 20, 8):
        images = [_image(record, group, most_points) for group in groups]
        if sum(map(len, images)) <= _MAX_CHARTS_BYTES:
            break
    return images


def _image(record: Record, group: Sequence[Summary], most_points: int) -> str:
    first, *others = group
    lines = [Line(line_of(record.metrics, other), stroke_beside(other.name), other.ring) for other in others]
    title = cut(" and ".join(summary.name for summary in group), 60)
    chart = line_chart(
        record.metrics[first.name],
        first.mean,
        title,
        lines=lines,
        marked=first.ring,
        kind=kind(first.name),
        way=direction(first.name),
        most_points=most_points,
    )
    return data_uri(chart)


def _card(group: Sequence[Summary], image: str) -> str:
    said = [", ".join(filter(None, (f"latest {s.latest_text}", s.best_text, _mean_of(s)))) for s in group]
    names = [_text(summary.name, 60, in_attribute=True) for summary in group]
    alt = f"chart of {'; '.join(f'{name}: {text}' for name, text in zip(names, said, strict=True))}"
    legend = _legend(group[0])
    values = [
        _numbers(group[0], has_legend=bool(legend)),
        *(_numbers(other, stroke_beside(other.name)) for other in group[1:]),
    ]
    return card(filter(None, [*values, legend]), image, alt)


def _numbers(summary: Summary, stroke: Stroke | None = None, *, has_legend: bool = False) -> str:
    """Return the values of a metric, with its stroke if it is beside another one. A legend names the mean."""
    mean = _mean_of(summary) if summary.differs and not has_legend else ""
    facts = ", ".join(filter(None, (summary.best_text, mean, "by report" * summary.is_numbered)))
    more = f' <span style="{DIM}">{facts}</span>' if facts else ""
    alarm = "" if math.isfinite(summary.latest) else f";color:{FAILED_COLOUR}"
    latest = f'<span style="font-size:{13 if stroke else 16}px{alarm}">{summary.latest_text}</span>'
    line = f"{stroke.sample} " if stroke else ""
    return f"{line}<b>{_text(summary.name, 60)}</b> {latest}{more}"


def _mean_of(summary: Summary) -> str:
    return f"mean of {len(summary.by_rank)} ranks" if len(summary.by_rank) > 1 else ""


def _legend(summary: Summary) -> str:
    """Return which line of a chart is which rank's; empty for a rank alone."""
    ranks = list(summary.by_rank)
    if len(ranks) < 2:
        return ""
    mean = f'<span style="color:{MEAN_COLOUR}">━ mean</span>'
    if len(ranks) > MAX_LINES:
        rest = f'<span style="color:{colour_of(0)}">▒ lowest to highest of {len(ranks)} ranks</span>'
    elif len(ranks) > len(COLOURS):
        rest = f'<span style="{DIM}">─ {len(ranks)} ranks</span>'
    else:
        names = [f"rank {ranks[0]}", *map(str, ranks[1:])]
        rest = " ".join(
            f'<span style="white-space:nowrap;color:{colour_of(rank)}">─ {name}</span>'
            for rank, name in zip(ranks, names, strict=True)
        )
    return f'<span style="font-size:12px">{mean} {rest}</span>'


def _table(summaries: Sequence[Summary]) -> str:
    """Return the latest values of each rank, for metrics that differ between ranks."""
    columns = [summary for summary in summaries if summary.differs][:_MAX_COLUMNS]
    ranks = sorted({rank for summary in columns for rank in summary.by_rank})[:_MAX_RANKS]
    if not columns:
        return ""

    def values(rank: int) -> list[str]:
        found = [(summary.name, summary.by_rank.get(rank)) for summary in columns]
        return ["" if value is None else number_of(name, value) for name, value in found]

    rows = [
        _row("td", "mean", (summary.latest_text for summary in columns)),
        *(_row("td", f"rank {rank}", values(rank)) for rank in ranks),
    ]
    head = _row("th", "latest", (_text(summary.name, 60) for summary in columns))
    table = (
        '<table cellpadding="4" style="margin:4px 0 0 0;border-collapse:collapse;text-align:right">'
        f"<thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
    )
    summary = f'<summary style="cursor:pointer">latest values of {counted(len(ranks), "rank")}</summary>'
    return f'<details style="margin-top:8px;overflow-x:auto">{summary}{table}</details>'


def _row(cell: str, name: str, values: Iterable[str]) -> str:
    cells = "".join(f"<{cell}>{value}</{cell}>" for value in values)
    return f"<tr><th>{name}</th>{cells}</tr>"


# ------------------------------------------------------------------ logs
def _tails(record: Record) -> str:
    shown = record.tails_shown(_MAX_RANKS)
    if not shown:
        return ""
    characters = min(_MAX_LINE_LENGTH, _MAX_TAILS_BYTES // len(shown) // 6)
    excerpts = [Excerpt(0, _MAX_TAILS_BYTES) for _ in shown]
    for tail, excerpt in zip(shown, excerpts, strict=True):
        for line in terminal_lines(tail.lines[-max(5, min(_MAX_TAIL_LINES, 160 // len(shown))) :]):
            excerpt.add(coloured(line, characters))
    shares = fair_shares([excerpt.size for excerpt in excerpts], _MAX_TAILS_BYTES)
    for excerpt, share in zip(excerpts, shares, strict=True):
        excerpt.cut(share)
    has_failed = [record.failure is not None and record.failure.rank == tail.rank for tail in shown]
    is_few = len(shown) <= MAX_LINES
    parts = [
        _tail(tail, excerpt, is_open=failed or len(shown) == 1, preview=is_few)
        for tail, excerpt, failed in zip(shown, excerpts, has_failed, strict=True)
    ]
    if len(record.tails) > len(shown):
        parts.append(f"<div>and {len(record.tails) - len(shown)} more ranks</div>")
    if not is_few:
        first = sum(has_failed)
        summary = f'<summary style="cursor:pointer">the last lines of {counted(len(shown) - first, "rank")}</summary>'
        parts[first:] = [f"<details>{summary}{''.join(parts[first:])}</details>"]
    return f'<div style="margin-top:10px">{"".join(parts)}</div>'


def _tail(tail: RankTail, excerpt: Excerpt, *, is_open: bool, preview: bool) -> str:
    file = re.split(r"[\\/]", tail.path)[-1]
    lines = excerpt.text("")
    last = next(filter(str.strip, reversed(tail.lines)), "") if preview and not is_open else ""
    preview_text = f' <span style="{MONO};{DIM}">{_text(last, 80)}</span>' if last else ""
    summary = f'<summary style="cursor:pointer"><b>rank {tail.rank}</b>{preview_text}</summary>'
    before = ""
    if tail.more or excerpt.left_lines or lines.count("\n") < len(tail.lines):
        where = f" in {_text(file, 60)}" if file and preview else ""
        before = f'<span style="{DIM}">… more before{where}</span>\n'
    if not (before or lines):
        return f'<div><b>rank {tail.rank}</b> <span style="{DIM}">printed nothing</span></div>'
    return f'<details{" open" * is_open}>{summary}<pre style="{PRE}">{before}{lines}</pre></details>'
