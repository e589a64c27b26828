"""The record as plain text: for terminals, and for pages without HTML."""

from __future__ import annotations

from collections.abc import Sequence

from nblaunch.launch.output.metric_names import number_of
from nblaunch.launch.output.terminal_lines import Excerpt, fair_shares, without_colours
from nblaunch.launch.views import Failure
from nblaunch.notebook.ansi_html import MAX_INPUT_LENGTH, terminal_lines
from nblaunch.notebook.charts import Summary, clean
from nblaunch.notebook.record import Record, one_line, plain, within
from nblaunch.notebook.record_outputs import outputs_text

_MAX_TRACEBACK_BYTES = 2000
_MAX_METRICS_BYTES = 1300
_MAX_TAILS_BYTES = 1700
"""Less, if the parts would exceed `_MAX_BYTES`."""
_MAX_BYTES = 8 << 10
"""Of all parts together, without outputs."""
_MAX_TAIL_LINE_BYTES = 500
"""A warning is one line, with its remedy at the end."""
_PREFIX_BYTES = 12
"""At least as long as ``[rank 15]`` with a space and the line's end."""
_MAX_RANKS = 16
_MAX_OTHERS = 8


def as_text(record: Record) -> str:
    """Return the record as at most 10 KB of text."""
    summaries = [summary for group in record.summaries() for summary in group]
    _, _, facts = record.heading()
    first = f"{one_line(record.name, 200)}: {one_line(record.state, 40)} {' · '.join(filter(None, facts))}"
    outputs = outputs_text(record.outputs)
    parts = [
        first,
        _failure_text(record.failure) if record.failure else within(plain(record.message), 500),
        "\n".join(one_line(note, 300) for note in record.notes[-3:]),
        outputs,
        _metrics_text(summaries),
        f"logs: {one_line(record.log_dir, 300)}" if record.log_dir else "",
    ]
    left = _MAX_BYTES + len(outputs.encode()) - sum(len(part.encode()) + 1 for part in parts)
    parts.insert(-1, _tails_text(record, min(_MAX_TAILS_BYTES, left)))
    return "\n".join(part for part in parts if part)


def _failure_text(failure: Failure) -> str:
    lines = [one_line(failure.headline, 600), *within(plain(failure.details), 900).splitlines()]
    if failure.where or failure.source:
        lines.append("  " + one_line(": ".join(filter(None, (failure.where, failure.source))), 250))
    if failure.traceback.strip():
        excerpt = Excerpt(_MAX_TRACEBACK_BYTES // 4, _MAX_TRACEBACK_BYTES * 3 // 4, prefix="  ")
        for line in failure.traceback.rstrip().splitlines():
            excerpt.add(within(clean(without_colours(line[:MAX_INPUT_LENGTH])), 300))
        lines += ["", excerpt.text("…").rstrip()]
    if failure.others:
        lines += ["then, on other ranks:", *(f"  {one_line(other, 100)}" for other in failure.others[:_MAX_OTHERS])]
    return "\n".join([*lines, ""])


def _metrics_text(summaries: Sequence[Summary]) -> str:
    excerpt = Excerpt(_MAX_METRICS_BYTES, 0)
    for summary in summaries:
        best = f" ({summary.best_text})" if summary.best_text else ""
        ranks = ""
        if summary.differs:
            values = [
                f"{rank}: {number_of(summary.name, value)}"
                for rank, value in list(summary.by_rank.items())[:_MAX_OTHERS]
            ]
            more = ", …" * (len(summary.by_rank) > _MAX_OTHERS)
            ranks = f", mean of {len(summary.by_rank)} ranks; rank {', '.join(values)}{more}"
        excerpt.add(f"{one_line(summary.name, 80)} {summary.latest_text}{best}{ranks}")
    return excerpt.text(f"and {excerpt.left_lines} more metrics").rstrip()


def _tails_text(record: Record, max_bytes: int) -> str:
    shown = record.tails_shown(_MAX_RANKS)
    most = 5 if len(shown) <= 4 else 2
    size = min(_MAX_TAIL_LINE_BYTES, max_bytes // max(1, len(shown)) - _PREFIX_BYTES)
    excerpts = [Excerpt(0, max_bytes, prefix=f"[rank {tail.rank}] ") for tail in shown]
    for tail, excerpt in zip(shown, excerpts, strict=True):
        for line in terminal_lines([line for line in tail.lines if line.strip()][-most:]):
            excerpt.add(within(clean(without_colours(line)), size))
    shares = fair_shares([excerpt.size for excerpt in excerpts], max_bytes)
    for excerpt, share in zip(excerpts, shares, strict=True):
        excerpt.cut(share)
    return "".join(excerpt.text("") for excerpt in excerpts).rstrip()
