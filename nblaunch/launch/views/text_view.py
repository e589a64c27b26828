"""A launch as plain text: what is shown in notebooks without the panel, in terminals and in scripts."""

from __future__ import annotations

import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from nblaunch.launch.output.terminal_lines import Excerpt, LineAssembler, fair_shares, without_colours
from nblaunch.launch.views.view import LaunchInfo, LogPiece, NullView, Outcome, Stream
from nblaunch.wire.launch_files import rank_file

_EVERY = 0.2
"""Seconds between two emissions, of at most two messages each: Jupyter drops output beyond its limits."""
_MESSAGE_EVERY = 0.1
_MOST_AT_ONCE = 40 << 10
"""Bytes in one emission: with the last, which does not wait, six in a second are below 256 KB."""
_MOST_IN_ALL = 2_000_000
"""Bytes of text in one launch: a notebook with more is slow to open. From there on output is only counted."""
_MOST_AT_END = 256 << 10
_LAST_LINES = 20
_WIDTH = 120
_RANKS_IN_STATUS = 3
_REPORTS_AT_ONCE = 10.0
"""So many reports in a row are lines of their own, and then one a second."""
_FLOOD_LEVEL = 15.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


class _Source(NamedTuple):
    """Where lines come from: a rank's log, its reports, or (rank -1) nblaunch itself."""

    rank: int
    stream: Literal["out", "err", "report"]
    where: str
    """What holds all of them."""

    @property
    def prefix(self) -> str:
        return f"[rank {self.rank}] " if self.rank >= 0 else ""


_NBLAUNCH = _Source(-1, "report", "")


@dataclass(slots=True)
class _Reported:
    """What one rank has reported so far."""

    metrics: dict[str, float] = field(default_factory=dict)
    count: int = 0
    level: float = 0.0
    time: float = 0.0

    def floods(self, now: float) -> bool:
        """Count a report; whether they come too often for lines: a bucket that leaks one a second."""
        leaked = max(0.0, now - self.time) if self.count else 0.0
        self.level = min(max(0.0, self.level - leaked) + 1.0, _FLOOD_LEVEL)
        self.time = now
        self.count += 1
        return self.level > _REPORTS_AT_ONCE


class TextView(NullView):
    """Shows a launch as text: ranks' lines with ``[rank 1]`` before each, and below them what is in flux.

    Args:
        write: Sends one message of text to "out" or "err".
        show_err_as_err: Send ranks' stderr to "err". Default: True.
        is_terminal: The lines must fit the terminal, or clearing the status would miss a part. Default: False.
        clock: Seconds. Default: ``time.monotonic``.
        status: Show what is in flux, which needs a place where a carriage return works. Default: True.
    """

    wants_text = True

    def __init__(
        self,
        write: Callable[[str, Stream], None],
        *,
        show_err_as_err: bool = True,
        is_terminal: bool = False,
        clock: Callable[[], float] = time.monotonic,
        status: bool = True,
    ) -> None:
        self._write = write
        self._clock = clock
        self._show_err_as_err = show_err_as_err
        self._status = _Status(is_terminal) if status else None
        self._info: LaunchInfo | None = None
        self._assemblers: dict[_Source, LineAssembler] = {}
        self._reported: dict[int, _Reported] = {}
        self._blocks: list[tuple[_Source, Excerpt]] = []
        """What is to be shown next, in order: stretches of lines from one source."""
        self._late: dict[_Source, Excerpt] | None = None
        """Once enough has been shown: the last lines of each source, for the end."""
        self._due = -math.inf
        self._shown = 0
        self._noted = False

    def started(self, info: LaunchInfo) -> None:
        self._finish_lines()
        self._info = info

    def logs(self, pieces: Sequence[LogPiece]) -> None:
        for log in pieces:
            source = _Source(log.rank, log.stream, self._where(log.rank, log.stream))
            assembler = self._assemblers.setdefault(source, LineAssembler())
            self._add(source, assembler.feed(log.piece.head))
            if log.piece.skipped_bytes:
                self._add(source, assembler.finish())
                self._block(source).skip(log.piece.skipped_lines, log.piece.skipped_bytes)
                self._add(source, assembler.feed(log.piece.tail))
            self._in_flux(log.rank, log.stream, assembler.partial)
        self._emit_if_due()

    def reports(self, rank: int, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            if "metrics" in record:
                self._metrics(rank, record)
            elif "progress" in record:
                self._in_flux(rank, "progress", _progress_text(record))
        self._emit_if_due()

    def note(self, text: str) -> None:
        self._noted = True
        self._add(_NBLAUNCH, [f"nblaunch: {line}" for line in text.splitlines()])
        self._emit_if_due()

    def countdown(self, text: str) -> None:
        if self._status is not None:
            self._status.countdown = _one_line(text)
        self._emit_if_due()

    def tick(self) -> None:
        self._emit_if_due()

    def finished(self, outcome: Outcome) -> None:
        self._finish_lines()
        self._blocks += (self._late or {}).items()
        closing = [_summary(rank, reported) for rank, reported in sorted(self._reported.items())]
        if outcome.state != "finished" or self._noted:
            name = self._info.name if self._info else "the launch"
            closing.append(f"nblaunch: {name} {outcome.state} after {outcome.seconds:.1f} s")
        self._add(_NBLAUNCH, closing)
        self._emit(_MOST_AT_END if self._late else _MOST_AT_ONCE)

    # -------------------------------------------------------------- taking in
    def _where(self, rank: int, stream: Stream) -> str:
        return str(rank_file(self._info.log_dir, rank, stream)) if self._info else "its log"

    def _metrics(self, rank: int, record: Mapping[str, Any]) -> None:
        reported = self._reported.setdefault(rank, _Reported())
        floods = reported.floods(float(record.get("time") or 0.0))
        reported.metrics.update(record["metrics"])
        step = "" if record.get("step") is None else f"step {record['step']}: "
        text = step + _metrics_text(record["metrics"])
        if floods or self._late is not None:
            self._in_flux(rank, "metrics", text)
        else:
            self._in_flux(rank, "metrics", "")
            self._add(_Source(rank, "report", "the result's metrics"), [text])

    def _in_flux(self, rank: int, kind: str, text: str) -> None:
        if self._status is not None:
            self._status.put(rank, kind, _one_line(text))

    def _finish_lines(self) -> None:
        for source, assembler in self._assemblers.items():
            self._add(source, assembler.finish())
        self._assemblers.clear()
        if self._status is not None:
            self._status.calm()

    def _add(self, source: _Source, lines: Sequence[str]) -> None:
        if lines:
            block = self._block(source)
            for line in lines:
                block.add(line)

    def _block(self, source: _Source) -> Excerpt:
        if self._late is not None and source != _NBLAUNCH:
            return self._late.setdefault(source, Excerpt(0, _MOST_AT_ONCE, _LAST_LINES, source.prefix))
        # A new block where another source came between; but in a flood each source gets one, with one gap.
        full = sum(excerpt.size for _, excerpt in self._blocks) > _MOST_AT_ONCE
        for known, excerpt in reversed(self._blocks):
            if known == source:
                return excerpt
            if not full:
                break
        excerpt = Excerpt(_MOST_AT_ONCE // 4, _MOST_AT_ONCE * 3 // 4, prefix=source.prefix)
        self._blocks.append((source, excerpt))
        return excerpt

    # -------------------------------------------------------------- showing
    def _emit_if_due(self) -> None:
        if self._clock() >= self._due:
            self._emit(_MOST_AT_ONCE)

    def _emit(self, most: int) -> None:
        text: dict[Stream, str] = {"out": "", "err": ""}
        blocks, self._blocks = self._blocks, []
        shares = fair_shares([excerpt.size for _, excerpt in blocks], most)
        for (source, excerpt), share in zip(blocks, shares, strict=True):
            excerpt.cut(share)
            shown = excerpt.text(_gap_text(source, excerpt))
            text["err" if source.stream == "err" and self._show_err_as_err else "out"] += shown
            self._shown += len(shown.encode(errors="replace"))
        sent = self._send(text["out"], text["err"])
        if sent:
            self._due = self._clock() + max(_EVERY, _MESSAGE_EVERY * sent)
        if self._shown > _MOST_IN_ALL and self._late is None:
            self._late = {}
            logs = f"the logs in {self._info.log_dir}" if self._info else "the logs"
            self._add(_NBLAUNCH, [f"nblaunch: {_human(self._shown)} shown; from here on output goes to {logs} alone"])

    def _send(self, out: str, err: str) -> int:
        """Send what there is, in at most three messages: the status line must be last, and there is one "out"."""
        after = ""
        if self._status is not None:
            if out or err:
                out = self._status.erase() + out
            after = self._status.redraw()
        messages: list[tuple[str, Stream]] = [(out, "out"), (err, "err"), (after, "out")]
        if not err:
            messages = [(out + after, "out")]
        messages = [message for message in messages if message[0]]
        for text, stream in messages:
            self._write(text, stream)
        return len(messages)


class _Status:
    """The line below the others, redrawn in place."""

    def __init__(self, is_terminal: bool) -> None:
        self.countdown = ""
        self._is_terminal = is_terminal
        self._flux: dict[int, dict[str, str]] = {}
        self._drawn = ""

    def put(self, rank: int, kind: str, text: str) -> None:
        """Something in flux of this rank; empty when it no longer is."""
        if text:
            self._flux.setdefault(rank, {})[kind] = text
        elif rank in self._flux:
            self._flux[rank].pop(kind, None)

    def calm(self) -> None:
        """Nothing is in flux any more."""
        self._flux.clear()
        self.countdown = ""

    def erase(self) -> str:
        """What to write so that lines can follow."""
        blank = " " * len(self._drawn)
        self._drawn = ""
        return f"\r{blank}\r" if blank else ""

    def redraw(self) -> str:
        """What to write so that it shows how things stand; empty when it does."""
        text = self._text()
        if text == self._drawn:
            return ""
        if not text:
            return self.erase()
        drawn, self._drawn = f"\r{text:<{len(self._drawn)}}", text
        return drawn

    def _text(self) -> str:
        width = min(_WIDTH, shutil.get_terminal_size().columns - 1) if self._is_terminal else _WIDTH
        if self.countdown:
            return _clip(self.countdown, width)
        texts = [f"[rank {rank}] " + " · ".join(flux.values()) for rank, flux in sorted(self._flux.items()) if flux]
        shown = texts[:_RANKS_IN_STATUS]
        more = f"  … and {len(texts) - len(shown)} more" if len(texts) > len(shown) else ""
        shares = fair_shares([len(text) for text in shown], width - len(more) - 2 * (len(shown) - 1))
        return "  ".join(map(_clip, shown, shares)) + more


def is_terminal(stream: object) -> bool:
    """Whether a stream is a terminal; what stands in for stdout may not say."""
    return bool(getattr(stream, "isatty", lambda: False)())


def plain_writer() -> Callable[[str, Stream], None]:
    """A `write` for `TextView` that goes to whatever ``sys.stdout`` and ``sys.stderr`` are at the time."""

    def write(text: str, stream: Stream) -> None:
        file = sys.stdout if stream == "out" else sys.stderr
        if file is None:  # closed when Python started
            return
        try:
            file.write(text)
        except UnicodeEncodeError:  # a terminal that is not UTF-8
            encoding = file.encoding or "ascii"
            file.write(text.encode(encoding, "replace").decode(encoding))
        file.flush()

    return write


# ------------------------------------------------------------------ wording
def _gap_text(source: _Source, excerpt: Excerpt) -> str:
    amount = _human(excerpt.left_bytes)
    if excerpt.left_lines and not excerpt.uncounted:
        amount = f"{excerpt.left_lines:,} line{'s' * (excerpt.left_lines != 1)} ({amount})"
    return f"… {amount} left out here" + (f"; all of it is in {source.where} …" if source.where else " …")


def _summary(rank: int, reported: _Reported) -> str:
    return f"[rank {rank}] {_metrics_text(reported.metrics)} ({reported.count:,} report{'s' * (reported.count != 1)})"


def _metrics_text(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{_one_line(name)} {number(value)}" for name, value in metrics.items())


def _progress_text(record: Mapping[str, Any]) -> str:
    done, total, seconds = record.get("done") or 0, record.get("total"), record.get("seconds") or 0.0
    if done == total:
        return ""  # it is over: nothing is in flux
    desc = f"{record['progress']}: " if record["progress"] else ""
    share = f"{done}/{total} {done / total:.0%}" if total else f"{done}"
    rate = done / seconds if seconds else 0.0
    return f"{desc}{share}" + (f" {rate:,.0f} it/s" if rate >= 1000 else f" {rate:.3g} it/s" if rate else "")


def number(value: float) -> str:
    """A value as it is read most easily: four digits, or a whole number."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def _human(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def _one_line(text: str) -> str:
    return _CONTROL.sub(" ", without_colours(text)).strip()


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
