"""The record of a launch: what a saved notebook keeps, as HTML that needs no kernel and no script, and as text.

JupyterLab sanitizes the HTML of an untrusted notebook: it drops ``<style>``, ``<svg>``, ``aria-`` attributes, and
styles with unknown values. This HTML survives it. Its colours are mid-tones and half-transparent, for light and dark
pages; the rest looks as in ``panel.css``. Where a page drops all styles, as GitHub does, the words suffice.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape, unescape

from nblaunch.launch.output.metric_names import direction, kind
from nblaunch.launch.output.terminal_lines import Excerpt, without_colours
from nblaunch.launch.views import Failure, LaunchInfo, duration_text
from nblaunch.notebook.charts import (
    COLOURS,
    MAX_LINES,
    MEAN_COLOUR,
    Line,
    Point,
    Stroke,
    Summary,
    clean,
    colour_of,
    data_uri,
    has_line,
    line_chart,
    line_of,
    stroke_beside,
    summarise,
)
from nblaunch.notebook.page_messages import OutputContent
from nblaunch.notebook.panel_state import PanelState
from nblaunch.profiles.profile import IDLE_GPU, PARTS, Part, Profile, number_text

FAILED_COLOUR = "#d64a3f"
MONO = "font-size:12px;line-height:1.5;word-break:normal"
PRE = f"{MONO};white-space:pre-wrap;overflow-wrap:break-word;margin:4px 0;padding:0;background:transparent"
DIM = "opacity:0.7"
_LINE = "border:1px solid rgba(128,128,128,0.3)"
BOX = f"{_LINE};border-radius:6px;padding:10px 12px;margin:2px 0;font-size:13px;line-height:1.4"
_LOG = f"{_LINE};border-radius:4px;background:rgba(128,128,128,0.06);padding:4px 8px;margin-top:10px"
_POINTER = "cursor:pointer"
_STATES = {
    "finished": ("✓ Finished", "#2e9457", "in"),
    "failed": ("✗ Failed", FAILED_COLOUR, "after"),
    "stopped": ("■ Stopped", "#b07a1c", "after"),
    "late": ("■ Timed out", FAILED_COLOUR, "after"),
    "running": ("… Running", COLOURS[0], "for"),
}
_MAX_INPUT_LENGTH = 4500
"""Characters of any text that are read: a huge text costs little."""
_MAX_OTHERS = 8

# Of the HTML. With the markup, all parts stay below 150 KB.
_MAX_CHARTS = 12
_MAX_METRICS = 24
_MAX_CHARTS_BYTES = 52 << 10
_MAX_TAILS_BYTES = 22 << 10
_MAX_BLOCK_BYTES = 8 << 10
"""Of a traceback, and of one output that is text."""
_MAX_LINE_LENGTH = 400
"""Characters of one line of a log."""
_MAX_TAILS, _MAX_TAIL_LINES = 16, 20
_MAX_FIRST_LINES, _MAX_LAST_LINES = 100, 300
"""Lines of a traceback or output that are read."""

_MAX_TEXT_BYTES = 8000


@dataclass(frozen=True, slots=True)
class RankTail:
    rank: int
    lines: tuple[str, ...]
    """As a terminal would show them."""
    more: bool
    path: str


@dataclass(frozen=True, slots=True)
class RankOutputs:
    rank: int
    contents: tuple[OutputContent, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class Record:
    """A launch as a saved notebook keeps it."""

    name: str
    state: str
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
    charts: Sequence[Sequence[str]] = ()
    """The metrics of each chart, in order."""
    numbered: Collection[str] = ()
    """The metrics with the numbers of their reports as x."""
    best: Mapping[str, Point] = field(default_factory=dict)
    """The point that is marked as the best one, by metric; y may be NaN."""
    launch_id: str = ""
    """The page's script shows the live panel in place of the record with this id."""
    outputs: Sequence[RankOutputs] = ()
    profile: str = ""
    """The last profile, as safe HTML."""

    def summaries(self) -> list[list[Summary]]:
        return summarise(self.metrics, self.charts, self.best, self.numbered)


def record_of(
    state: PanelState,
    info: LaunchInfo | None,
    seconds: float,
    ended_at: float = 0.0,
    tails: Sequence[RankTail] = (),
    outputs: Sequence[RankOutputs] = (),
) -> Record:
    """Return the record of a launch from what its panel shows. An end of 0.0: it still runs."""
    return Record(
        name=info.name if info else "the launch",
        state=state.state.name if ended_at else "running",
        seconds=state.state.seconds or seconds,
        message=state.state.message,
        ranks=info.ranks_in_words if info else "0 ranks",
        device=info.device if info else "",
        ended_at=ended_at,
        metrics={
            name: {rank: series.points(numbered=name in state.plan.numbered) for rank, series in ranks.items()}
            for name, ranks in state.series.items()
        },
        charts=[chart.names for chart in state.plan.charts],
        numbered=state.plan.numbered,
        best={name: (entry.x, math.nan if entry.y is None else entry.y) for name, (_, entry) in state.best.items()},
        tails=tails,
        notes=[note.text for note in state.notes],
        failure=state.failure,
        log_dir=str(info.log_dir) if info else "",
        launch_id=info.launch_id if info else "",
        outputs=outputs,
        profile=state.profile.html if state.profile is not None else "",
    )


# ------------------------------------------------------------------ words
def plain(text: str, most: int = _MAX_INPUT_LENGTH) -> str:
    """Return at most `most` characters of `text` without colours and control characters."""
    text = clean(without_colours(text[:_MAX_INPUT_LENGTH])).strip()
    return text if len(text) <= most else text[:most] + "…"


def one_line(text: str, most: int) -> str:
    """Return at most `most` characters of `text` as one plain line."""
    return plain(" ".join(plain(text).split()), most)


def counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _text(text: str, most: int, *, in_attribute: bool = False) -> str:
    """Return at most `most` characters of `text` as HTML without tags."""
    return escape(plain(text, most), quote=in_attribute)


def _line(line: str, most: int) -> str:
    """Return at most `most` characters of a line as HTML without tags and colours."""
    text = clean(without_colours(line[:_MAX_INPUT_LENGTH])).replace("\n", " ")
    return escape(text if len(text) <= most else text[:most] + "…", quote=False)


# ------------------------------------------------------------------ HTML
def as_html(record: Record) -> str:
    """Return the record as at most 150 KB of HTML, and what ranks displayed. No text becomes a tag or an attribute."""
    message = f'<div style="margin-top:6px;white-space:pre-wrap">{_text(record.message, 1000)}</div>'
    notes = (re.sub("`([^`]+)`", r"<code>\1</code>", _text(note, 300)) for note in record.notes[-5:])
    log_dir = f'<code style="background:transparent">{_text(record.log_dir, _MAX_LINE_LENGTH)}</code>'
    parts = [
        _header(record),
        _failure(record.failure) if record.failure else message if record.message.strip() else "",
        _outputs(record.outputs),
        _metrics(record, record.summaries()),
        f'<div style="margin-top:10px">{record.profile}</div>' if record.profile else "",
        _notice(COLOURS[0], "".join(f"<div>{note}</div>" for note in notes)) if record.notes else "",
        _tails(record),
        f'<div style="margin-top:4px;font-size:11px;{DIM}">Logs: {log_dir}</div>' if record.log_dir else "",
    ]
    # The classes keep MathJax from reading dollar signs in a message as mathematics.
    marker = f"nblaunch-{escape(record.launch_id)}{'' if record.ended_at else ' nblaunch-running'}"
    return f'<div class="{marker} tex2jax_ignore mathjax_ignore" style="{BOX}">{"".join(parts)}</div>'


def _header(record: Record) -> str:
    is_late = record.state == "stopped" and record.message.startswith("LaunchTimeoutError")
    state, colour, preposition = _STATES.get("late" if is_late else record.state, (record.state, COLOURS[0], "after"))
    pill = f"padding:1px 9px;border:1px solid {_faint(colour, 0.45)};border-radius:10px;font-size:12px;color:{colour}"
    pill += f";background:{_faint(colour, 0.12)};white-space:nowrap"
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.ended_at or time.time()))
    facts = [f"{preposition} {duration_text(record.seconds)}", record.ranks, one_line(record.device, 100)]
    facts.append(at if record.ended_at else f"as of {at}")
    return (
        f'<div><b style="font-size:15px">{_text(record.name, 120)}</b> <b style="{pill}">{_text(state, 40)}</b> '
        f'<span style="{DIM}">{" · ".join(map(escape, filter(None, facts)))}</span></div>'
    )


def _faint(colour: str, share: float) -> str:
    return f"rgba({','.join(map(str, bytes.fromhex(colour[1:])))},{share})"


def _notice(colour: str, content: str) -> str:
    style = f"border-left:4px solid {colour};border-radius:4px;background:{_faint(colour, 0.08)}"
    return f'<div style="{style};padding:8px 12px;margin-top:10px">{content}</div>'


def _failure(failure: Failure) -> str:
    parts = [f'<div style="font-size:15px;color:{FAILED_COLOUR}"><b>{_text(failure.headline, 300)}</b></div>']
    if failure.details.strip():
        parts.append(f'<pre style="{PRE}">{_text(failure.details, 2000)}</pre>')
    if failure.where:
        parts.append(f'<div style="margin-top:6px">{_text(failure.where, 200)}</div>')
    if failure.source:
        parts.append(f'<pre style="{PRE}"><b>    {_text(failure.source, 200)}</b></pre>')
    if failure.traceback.strip():
        lines = _block(failure.traceback.rstrip().splitlines(), _MAX_BLOCK_BYTES, _MAX_BLOCK_BYTES // 5)
        parts.append(_folded("Traceback", f'<pre style="{PRE}">{lines}</pre>', is_open=True))
    if failure.others:
        others = f'<pre style="{PRE}">{_block(failure.others[:_MAX_OTHERS], 2000)}</pre>'
        parts.append(_folded(f"{counted(len(failure.others), 'other rank')} failed after it", others))
    return _notice(FAILED_COLOUR, "".join(parts))


def _folded(title: str, content: str, *, is_open: bool = False) -> str:
    summary = f'<summary style="{_POINTER}">{title}</summary>'
    return f'<details{" open" * is_open} style="margin-top:6px;overflow-x:auto">{summary}{content}</details>'


def _outputs(ranks: Sequence[RankOutputs]) -> str:
    """Return the outputs of each rank, those of rank 0 open. HTML of ranks has been through `safe_html`."""
    parts = []
    for outputs in ranks:
        shown = "".join(f'<div style="margin:6px 0;overflow-x:auto">{_output(each)}</div>' for each in outputs.contents)
        if outputs.left_out:
            shown += f'<div style="{DIM}">{counted(outputs.left_out, "output")} left out</div>'
        count = counted(len(outputs.contents) + outputs.left_out, "output")
        title = f'<b>rank {outputs.rank}</b> <span style="{DIM}">{count}</span>'
        parts.append(_folded(title, shown, is_open=outputs.rank == 0 or len(ranks) == 1))
    return "".join(parts)


def _output(content: OutputContent) -> str:
    if content.kind == "html":
        return content.body
    if content.kind == "image":
        given = (("width", content.width), ("height", content.height))
        sides = "".join(f' {name}="{size}"' for name, size in given if size)
        style = "max-width:100%" if content.height else "max-width:100%;height:auto"
        return f'<img src="{escape(content.body)}" alt="{escape(content.text[:200])}"{sides} style="{style}">'
    return f'<pre style="{PRE}">{_block(content.body.splitlines(), _MAX_BLOCK_BYTES)}</pre>'


def _tails(record: Record) -> str:
    if not record.tails:
        return ""
    failed_rank = record.failure.rank if record.failure else -1
    shown = sorted(record.tails, key=lambda tail: (tail.rank != failed_rank, tail.rank))[:_MAX_TAILS]
    parts = [_tail(tail, len(shown), is_open=tail.rank == failed_rank or len(shown) == 1) for tail in shown]
    if len(record.tails) > len(shown):
        parts.append(f"<div>and {len(record.tails) - len(shown)} more ranks</div>")
    return f'<div style="{_LOG}">{"".join(parts)}</div>'


def _tail(tail: RankTail, ranks: int, *, is_open: bool) -> str:
    size = _MAX_TAILS_BYTES // ranks
    excerpt = Excerpt(0, size)
    for line in tail.lines[-min(_MAX_TAIL_LINES, 160 // ranks) :]:
        excerpt.add(_line(line, min(_MAX_LINE_LENGTH, size // 6 - 1)))
    lines = excerpt.text("")
    before = ""
    if tail.more or excerpt.left_lines or lines.count("\n") < len(tail.lines):
        file = re.split(r"[\\/]", tail.path)[-1]
        where = f" in {_text(file, 60)}" if file else ""
        before = f'<span style="{DIM}">… more before{where}</span>\n'
    if not (before or lines):
        return f'<div><b>rank {tail.rank}</b> <span style="{DIM}">printed nothing</span></div>'
    last = "" if is_open else next(filter(str.strip, reversed(tail.lines)), "")
    preview_text = f' <code style="{DIM};background:transparent">{_text(last, 80)}</code>' if last else ""
    title = f"<b>rank {tail.rank}</b>{preview_text}"
    return _folded(title, f'<pre style="{PRE}">{before}{lines}</pre>', is_open=is_open)


# ------------------------------------------------------------------ profiles
_PART_COLOURS: dict[Part, str] = {
    "compute": COLOURS[0],
    "communication": COLOURS[3],
    "waiting": FAILED_COLOUR,
    "data": COLOURS[1],
    "optimizer": COLOURS[2],
    "other": MEAN_COLOUR,
}
_MAX_PROFILED = 16
"""Ranks whose bars are shown."""
_MAX_COLUMNS = 8
"""Ranks with a column in the table of operations."""
_BAR = "width:100%;height:13px;overflow:hidden;white-space:nowrap;font-size:0;border-radius:2px"


def profile_html(profile: Profile) -> str:
    """Return a profile as HTML of some 10 KB, for records and panels."""
    parts = [f"<div><b>{_text(profile.sentence, 500)}</b></div>"]
    parts += [f'<div style="{DIM}">{_text(said, 500)}</div>' for said in profile.missing_text]
    if profile.ranks:
        parts += [_shares(profile), f'<div style="font-size:11px;{DIM}">{_text(profile.length_text, 200)}</div>']
    if profile.operations:
        parts.append(_folded("Operations that took the most time", _operations(profile)))
    if profile.trace is not None:
        path = f'<code style="background:transparent">{_text(str(profile.trace), _MAX_LINE_LENGTH)}</code>'
        parts.append(
            f'<div style="margin-top:4px;font-size:11px;{DIM}">Trace, for https://ui.perfetto.dev: {path}</div>'
        )
    return "".join(parts)


def _shares(profile: Profile) -> str:
    """Return a bar for each rank, and the table that says the same in numbers."""
    is_gpu = any(each.has_gpu for each in profile.ranks)
    names = [
        f'<span style="color:{colour}">■</span>&nbsp;{_part_name(part, is_gpu)}'
        for part, colour in _PART_COLOURS.items()
    ]
    bars, rows = [], [_row(["", "steps/s", *names], is_head=True)]
    for each in profile.ranks[:_MAX_PROFILED]:
        name, shares = f"rank&nbsp;{each.rank}", {part: each.share(part) for part in PARTS}
        bar = "".join(
            f'<span title="{_part_name(part, is_gpu)} {share:.0%}" style="display:inline-block;height:13px;'
            f'width:{100 * share:.2f}%;background:{_PART_COLOURS[part]}"></span>'
            for part, share in shares.items()
            if share > 0
        )
        bars.append(f'<tr><td>{name}</td><td style="width:100%"><div style="{_BAR}">{bar}</div></td></tr>')
        rate = number_text(each.steps_per_second) if each.steps else "–"
        percents = [f"{share:.0%}" if share >= 0.005 else f'<span style="{DIM}">0%</span>' for share in shares.values()]
        rows.append(_row([name, rate, *percents]))
    more = len(profile.ranks) - _MAX_PROFILED
    said = f"<div>and {counted(more, 'more rank')}</div>" if more > 0 else ""
    return _table(bars) + _table(rows) + said


def _part_name(part: Part, is_gpu: bool) -> str:
    return IDLE_GPU if part == "other" and is_gpu else part


def _operations(profile: Profile) -> str:
    ranks = [each.rank for each in profile.ranks][:_MAX_COLUMNS]
    rows = [_row(["", "line", *(f"rank&nbsp;{rank}" for rank in ranks)], left=2, is_head=True)]
    for each in profile.operations:
        times = [
            f"{1000 * each.seconds[rank]:,.0f}&nbsp;ms{_calls(each.calls[rank])}" if each.seconds.get(rank) else "–"
            for rank in ranks
        ]
        name = f'<span title="{_text(each.name, 300, in_attribute=True)}">{_text(each.name, 60)}</span>'
        place = f'<code style="background:transparent">{_text(str(each.place), 120)}</code>' if each.place else ""
        rows.append(_row([name, place, *times], left=2))
    return _table(rows)


def _calls(number: int) -> str:
    return f' <span style="{DIM}">{number:,}×</span>' if number else ""


def _table(rows: Sequence[str]) -> str:
    style = "table-layout:auto;border-collapse:collapse;width:100%;margin-top:6px;font-size:12px"
    return f'<table style="{style}">{"".join(rows)}</table>'


def _row(cells: Sequence[str], *, left: int = 1, is_head: bool = False) -> str:
    """Return a row whose first cells are on the left; pages put the others on the right."""
    tag = "th" if is_head else "td"
    styles = [' style="text-align:left"'] * left + [""] * (len(cells) - left)
    shown = (f"<{tag}{style}>{cell}</{tag}>" for style, cell in zip(styles, cells, strict=True))
    return f"<tr>{''.join(shown)}</tr>"


# ------------------------------------------------------------------ metrics
def _metrics(record: Record, groups: Sequence[Sequence[Summary]]) -> str:
    """Return a card for each chart: the numbers of its metrics, and a chart if there is a line to draw."""
    shown = groups[:_MAX_METRICS]
    drawn = [group for group in shown if has_line(record.metrics, group)][:_MAX_CHARTS]
    images: list[str] = []
    for most_points in (300, 150, 75, 40, 20, 8):
        images = [_image(record, group, most_points) for group in drawn]
        if sum(map(len, images)) <= _MAX_CHARTS_BYTES:
            break
    cards = [_card(group, image) for group, image in zip(drawn, images, strict=True)]
    rest = [_card(group) for group in shown if group not in drawn]
    rows = (f"<div>{''.join(row)}</div>" for row in (cards, rest) if row)
    more = len(groups) - len(shown)
    return "".join(rows) + f"<div>and {counted(more, 'more metric')}</div>" * bool(more)


def _image(record: Record, group: Sequence[Summary], most_points: int) -> str:
    first, *others = group
    chart = line_chart(
        record.metrics[first.name],
        first.mean,
        plain(" and ".join(summary.name for summary in group), 60),
        lines=[Line(line_of(record.metrics, other), stroke_beside(other.name), other.ring) for other in others],
        marked=first.ring,
        kind=kind(first.name),
        way=direction(first.name),
        most_points=most_points,
    )
    return data_uri(chart)


def _card(group: Sequence[Summary], image: str = "") -> str:
    said = (", ".join(filter(None, (f"latest {s.latest_text}", s.best_text, _mean_of(s)))) for s in group)
    names = (_text(summary.name, 60, in_attribute=True) for summary in group)
    alt = f"chart of {'; '.join(f'{name}: {text}' for name, text in zip(names, said, strict=True))}"
    legend = _legend(group[0]) if image else ""
    values = [_numbers(group[0], has_legend=bool(legend))]
    values += [_numbers(other, stroke_beside(other.name)) for other in group[1:]]
    return card([*values, *([legend] if legend else [])], image, alt)


def card(lines: Iterable[str], image: str, alt: str) -> str:
    """Return lines of HTML, and the chart that they describe below them, if there is one."""
    style = f"display:inline-block;vertical-align:top;{_LINE};border-radius:4px;padding:6px 10px;margin:8px 8px 0 0"
    style += ";box-sizing:border-box;width:362px;max-width:100%" if image else ""
    size = 'width="340" height="150" style="display:block;max-width:100%;height:auto"'
    picture = f'<img src="{image}" alt="{alt}" {size}>' if image else ""
    return f'<div style="{style}">{"".join(f"<div>{line}</div>" for line in lines)}{picture}</div>'


def _numbers(summary: Summary, stroke: Stroke | None = None, *, has_legend: bool = False) -> str:
    """Return the values of a metric, with its stroke if it is beside another one. A legend names the mean."""
    mean = _mean_of(summary) if summary.differs and not has_legend else ""
    facts = ", ".join(filter(None, (summary.best_text, mean, "by report" * summary.is_numbered)))
    more = f' <span style="font-size:11px;{DIM}">{facts}</span>' if facts else ""
    alarm = "" if math.isfinite(summary.latest) else f";color:{FAILED_COLOUR}"
    latest = f'<b style="font-size:{14 if stroke else 22}px{alarm}">{summary.latest_text}</b>'
    line = f'<span style="color:{stroke.colour}">╍</span> ' if stroke else ""
    style = f"{'' if stroke else 'display:block;'}font-size:12px;{DIM}"
    return f'{line}<span style="{style}">{_text(summary.name, 60)}</span> {latest}{more}'


def _mean_of(summary: Summary) -> str:
    return f"mean of {len(summary.by_rank)} ranks" if len(summary.by_rank) > 1 else ""


def _legend(summary: Summary) -> str:
    """Return which line of a chart is which rank's; empty for a rank alone."""
    ranks = list(summary.by_rank)
    if len(ranks) < 2:
        return ""
    keys = [(f"rank {rank}", colour_of(rank)) for rank in ranks]
    if len(ranks) > len(COLOURS):
        first = f"the first {MAX_LINES} of " if len(ranks) > MAX_LINES else ""
        keys = [(f"{first}{len(ranks)} ranks", MEAN_COLOUR)]
    style = f"font-size:11px;white-space:nowrap;{DIM}"
    return " ".join(
        f'<span style="{style}"><b style="color:{colour}">━</b> {text}</span>'
        for text, colour in [("mean", MEAN_COLOUR), *keys]
    )


def _block(lines: Sequence[str], size: int, most: int = 300) -> str:
    """Return lines of at most `most` characters as at most `size` bytes of HTML; omit lines in the middle."""
    excerpt = Excerpt(size // 4, size * 3 // 4)
    left_out = len(lines) - _MAX_FIRST_LINES - _MAX_LAST_LINES
    if left_out > 0:
        lines = [*lines[:_MAX_FIRST_LINES], f"… {left_out} lines omitted …", *lines[-_MAX_LAST_LINES:]]
    for line in lines:
        excerpt.add(_line(line, most))
    return excerpt.text(f"… {excerpt.left_lines} lines omitted …")


# ------------------------------------------------------------------ text
_PICTURE = re.compile(r'<img [^>]*alt="(?!chart of)([^"]+)"[^>]*>')
_PREVIEW = re.compile("<code[^>]*>[^<]*</code></summary>")
_LINE_END = re.compile(r"<br>|</(?:div|summary|pre|tr|p|li|h\d)>")
_CELL_END = re.compile("</t[dh]>")
_TAG = re.compile("<[^>]*>")


def as_text(html: str) -> str:
    """Return a record's HTML as at most 8 KB of text, for terminals and pages without HTML."""
    for pattern, text in ((_PICTURE, r"\1"), (_PREVIEW, "\n"), (_LINE_END, "\n"), (_CELL_END, " "), (_TAG, "")):
        html = pattern.sub(text, html)
    excerpt = Excerpt(_MAX_TEXT_BYTES // 2, _MAX_TEXT_BYTES // 2)
    for line in filter(str.strip, clean(unescape(html)).splitlines()):
        excerpt.add(line[:500].rstrip())
    return excerpt.text("…").rstrip()
