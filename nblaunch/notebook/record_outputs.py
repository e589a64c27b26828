"""What ranks have displayed, in the record: as HTML, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nblaunch.launch.output.terminal_lines import Excerpt, fair_shares, without_colours
from nblaunch.notebook.ansi_html import block
from nblaunch.notebook.charts import clean
from nblaunch.notebook.page_messages import OutputContent
from nblaunch.notebook.record import DIM, PRE, RankOutputs, counted, within

_MAX_TEXT_BYTES = 8 << 10
"""Of one output that is text."""
_MAX_TEXTS_BYTES = 2 << 10
"""Of all outputs in the record's text."""
_MAX_RANKS = 16


def outputs_html(ranks: Sequence[RankOutputs]) -> str:
    """Return the outputs of each rank, those of rank 0 open. HTML of ranks has been through `safe_html`."""
    parts = []
    for outputs in ranks:
        is_open = outputs.rank == 0 or len(ranks) == 1
        shown = "".join(f'<div style="margin:6px 0;overflow-x:auto">{_output(each)}</div>' for each in outputs.contents)
        left_out = f'<div style="{DIM}">{left_out_text(outputs.left_out)}</div>' if outputs.left_out else ""
        count = counted(len(outputs.contents) + outputs.left_out, "output")
        title = f'<b>rank {outputs.rank}</b> <span style="{DIM}">{count}</span>'
        summary = f'<summary style="cursor:pointer">{title}</summary>'
        parts.append(f"<details{' open' * is_open}>{summary}{shown}{left_out}</details>")
    return f'<div style="margin-top:10px">{"".join(parts)}</div>' if parts else ""


def left_out_text(count: int) -> str:
    """Return the sentence that says how many outputs are missing."""
    return f"{counted(count, 'output')} left out"


def _output(content: OutputContent) -> str:
    if content.kind == "html":
        return content.body
    if content.kind == "image":
        sides = "".join(
            f' {name}="{size}"' for name, size in (("width", content.width), ("height", content.height)) if size
        )
        style = "max-width:100%" if content.height else "max-width:100%;height:auto"
        return f'<img src="{escape(content.body)}" alt="{escape(content.text[:200])}"{sides} style="{style}">'
    return f'<pre style="{PRE}">{block(content.body.splitlines(), _MAX_TEXT_BYTES)}</pre>'


def outputs_text(ranks: Sequence[RankOutputs]) -> str:
    """Return the outputs as at most 2 KB of text."""
    shown = [outputs for outputs in ranks[:_MAX_RANKS] if outputs.contents or outputs.left_out]
    excerpts = [Excerpt(_MAX_TEXTS_BYTES // 4, _MAX_TEXTS_BYTES, prefix=f"[rank {each.rank}] ") for each in shown]
    for outputs, excerpt in zip(shown, excerpts, strict=True):
        for content in outputs.contents:
            text = content.body if content.kind == "text" else content.text
            for line in text[:_MAX_TEXTS_BYTES].splitlines():
                excerpt.add(within(clean(without_colours(line)), 200))
        if outputs.left_out:
            excerpt.add(left_out_text(outputs.left_out))
    for excerpt, share in zip(
        excerpts, fair_shares([excerpt.size for excerpt in excerpts], _MAX_TEXTS_BYTES), strict=True
    ):
        excerpt.cut(share)
    return "".join(excerpt.text("…") for excerpt in excerpts).rstrip()
