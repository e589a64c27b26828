"""The plain-text view of a launch: for terminals, scripts, and notebooks without the panel."""

from __future__ import annotations

import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from nblaunch.launch.output.metric_names import number_of
from nblaunch.launch.output.terminal_lines import Excerpt, fair_shares, without_colours
from nblaunch.launch.views import (
    PREPARING_NOTE_DELAY_S,
    Countdown,
    Displays,
    Ended,
    Event,
    LaunchInfo,
    Logs,
    Note,
    Outcome,
    Output,
    Preparing,
    ProfileShown,
    RanksChanged,
    Reports,
    Started,
    Stream,
    Stuck,
    Tick,
    View,
    duration_text,
)
from nblaunch.machine.segments import in_words

_MAX_EMISSION_BYTES = 40 << 10
_MAX_LAUNCH_BYTES = 2_000_000
"""A notebook with more text opens slowly: beyond this, output goes to the logs alone."""
_EMIT_INTERVAL_S = 0.35
"""Minimum pause between two emissions, of at most three messages. Jupyter drops output beyond its rate limits."""
_STATUS_WIDTH = 120
_MAX_STATUS_RANKS = 3
STARTING = "starting the ranks: they import torch and join the process group …"
"""The panel says the same."""
_MAX_REPORT_LINES = 10
"""Reports in a row that are lines of their own; later ones only if they come at most once a second."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


class _Source(NamedTuple):
    """The source of a line: the log of a rank, its reports, or (rank -1) nblaunch."""

    rank: int
    stream: Literal["out", "err", "report", "display"]
    where: str
    """The file or attribute that holds every line."""

    @property
    def prefix(self) -> str:
        return f"[rank {self.rank}] " if self.rank >= 0 else ""


_NBLAUNCH = _Source(-1, "report", "")


@dataclass(slots=True)
class _RankReports:
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, str] = field(default_factory=dict)
    count: int = 0
    time: float = 0.0


class TextView(View):
    """Shows a launch as text: the lines of each rank after a ``[rank 1]`` prefix, and a status line below them.

    In a terminal the status line has its width, because a wrapped line cannot be cleared. It requires an output that
    honours carriage returns.
    """

    def __init__(
        self,
        write: Callable[[str, Stream], None],
        *,
        is_terminal: bool = False,
        clock: Callable[[], float] = time.monotonic,
        status: bool = True,
    ) -> None:
        self._write = write
        self._clock = clock
        self._status = _Status(is_terminal, is_shown=status)
        self._info: LaunchInfo | None = None
        self._reported: dict[int, _RankReports] = {}
        self._blocks: list[tuple[_Source, Excerpt]] = []
        """Pending blocks of lines, each from one source, in display order."""
        self._is_full = False
        self._due = -math.inf
        self._start_late_at = math.inf
        """When to say what the ranks do before they run."""
        self._shown_bytes = 0
        self._noted = False

    def on(self, event: Event) -> None:
        match event:
            case Started(info):
                self._status.clear()
                self._info = info
                self._start_late_at = math.inf if info.is_session else self._clock() + PREPARING_NOTE_DELAY_S
            case RanksChanged(ranks) if any(rank.state != "starting" for rank in ranks):
                self._start_late_at = math.inf
                self._wait_for("")
            case Preparing(text, cancel=None):
                self._wait_for(text)
                self._emit()
            case Logs(logs):
                for log in logs:
                    self._add(_Source(log.rank, log.stream, log.path), log.lines)
                    self._status.set(log.rank, log.stream, " · ".join(log.open))
            case Reports(rank, records):
                for record in records:
                    if "metrics" in record:
                        self._add_metrics(rank, record)
                    elif "progress" in record:
                        self._status.set(rank, f"progress {record.get('level', 0)}", _progress_text(record))
                    elif "best" in record:
                        self._reported.setdefault(rank, _RankReports()).best[record["best"]] = _best_text(record)
            case Displays(rank, outputs):
                for output in outputs:
                    self._add(_Source(rank, "display", "the files beside the logs"), _output_lines(output))
            case Note(text) | Preparing(text=text) if text:
                self._note(text.splitlines())
            case Stuck(lines):
                self._note(lines)
            case ProfileShown(profile):
                self._note(repr(profile).splitlines())
            case Countdown(text):
                self._status.countdown = _one_line(text)
            case Tick():
                if self._clock() >= self._start_late_at:
                    self._wait_for(STARTING)
            case Ended(outcome):
                self._end(outcome)
        if self._clock() >= self._due:
            self._emit()

    # -------------------------------------------------------------- taking in
    def _add_metrics(self, rank: int, record: Mapping[str, Any]) -> None:
        reported = self._reported.setdefault(rank, _RankReports())
        now, before = float(record.get("time") or 0.0), reported.time
        reported.metrics.update(record["metrics"])
        reported.count, reported.time = reported.count + 1, now
        step = "" if record.get("step") is None else f"step {record['step']}: "
        text = step + _metrics_text(record["metrics"])
        if not self._is_full and (reported.count <= _MAX_REPORT_LINES or now - before >= 1.0):
            self._status.set(rank, "metrics", "")
            self._add(_Source(rank, "report", "the result's metrics"), [text])
        else:
            self._status.set(rank, "metrics", text)

    def _note(self, lines: Iterable[str]) -> None:
        self._noted = True
        self._add(_NBLAUNCH, [f"nblaunch: {line}" for line in lines])

    def _wait_for(self, text: str) -> None:
        """Let the status line say what the launch waits for, before its ranks run; nothing if `text` is empty."""
        self._status.awaited = f"nblaunch: {_one_line(text)}" if text else ""

    def _end(self, outcome: Outcome) -> None:
        self._status.clear()
        closing = [
            f"[rank {rank}] {'; '.join(filter(None, (_metrics_text(reported.metrics), *reported.best.values())))} "
            f"({reported.count:,} report{'s' * (reported.count != 1)})"
            for rank, reported in sorted(self._reported.items())
        ]
        if outcome.state != "finished" or self._noted:
            name = self._info.name if self._info else "the launch"
            closing.append(f"nblaunch: {name} {outcome.state} after {duration_text(outcome.seconds)}")
        self._add(_NBLAUNCH, closing)
        self._emit()

    def _add(self, source: _Source, lines: Sequence[str]) -> None:
        if lines and (source == _NBLAUNCH or not self._is_full):
            block = self._block(source)
            for line in lines:
                block.add(line)

    def _block(self, source: _Source) -> Excerpt:
        # A block ends where another source prints. In a flood, each source has one block, with one gap.
        full = sum(excerpt.size for _, excerpt in self._blocks) > _MAX_EMISSION_BYTES
        for known, excerpt in reversed(self._blocks):
            if known == source:
                return excerpt
            if not full:
                break
        excerpt = Excerpt(_MAX_EMISSION_BYTES // 4, _MAX_EMISSION_BYTES * 3 // 4, source.prefix)
        self._blocks.append((source, excerpt))
        return excerpt

    # -------------------------------------------------------------- showing
    def _emit(self) -> None:
        text: dict[Stream, str] = {"out": "", "err": ""}
        blocks, self._blocks = self._blocks, []
        shares = fair_shares([excerpt.size for _, excerpt in blocks], _MAX_EMISSION_BYTES)
        for (source, excerpt), share in zip(blocks, shares, strict=True):
            excerpt.cut(share)
            lines = f"{excerpt.left_lines:,} line{'s' * (excerpt.left_lines != 1)}"
            where = f"; see {source.where}" if source.where else ""
            shown = excerpt.text(f"… {lines} ({in_words(excerpt.left_bytes)}) omitted{where} …")
            text["err" if source.stream == "err" else "out"] += shown
            self._shown_bytes += len(shown.encode(errors="replace"))
        self._send(text["out"], text["err"])
        if self._shown_bytes > _MAX_LAUNCH_BYTES and not self._is_full:
            self._is_full = True
            logs = f"the logs in {self._info.log_dir}" if self._info else "the logs"
            self._add(_NBLAUNCH, [f"nblaunch: {in_words(self._shown_bytes)} shown; further output goes only to {logs}"])

    def _send(self, out: str, err: str) -> None:
        if out or err:
            out = self._status.erase() + out
        after = self._status.redraw()
        messages: list[tuple[str, Stream]] = [(out, "out"), (err, "err"), (after, "out")]
        if not err:
            messages = [(out + after, "out")]
        for text, stream in messages:
            if text:
                self._write(text, stream)
                self._due = self._clock() + _EMIT_INTERVAL_S


class _Status:
    def __init__(self, is_terminal: bool, *, is_shown: bool) -> None:
        self.countdown = ""
        self.awaited = ""
        self._is_terminal, self._is_shown = is_terminal, is_shown
        self._texts: dict[int, dict[str, str]] = {}
        self._drawn = ""

    def set(self, rank: int, kind: str, text: str) -> None:
        """Set one part of a rank's status; an empty text removes it."""
        text = _one_line(text)
        if text:
            self._texts.setdefault(rank, {})[kind] = text
        elif rank in self._texts:
            self._texts[rank].pop(kind, None)

    def clear(self) -> None:
        self._texts.clear()
        self.countdown = self.awaited = ""

    def erase(self) -> str:
        blank = " " * len(self._drawn)
        self._drawn = ""
        return f"\r{blank}\r" if blank else ""

    def redraw(self) -> str:
        text = self._text()
        if text == self._drawn:
            return ""
        if not text:
            return self.erase()
        drawn, self._drawn = f"\r{text:<{len(self._drawn)}}", text
        return drawn

    def _text(self) -> str:
        if not self._is_shown:
            return ""
        width = min(_STATUS_WIDTH, shutil.get_terminal_size().columns - 1) if self._is_terminal else _STATUS_WIDTH
        if self.countdown or self.awaited:
            return _clip(self.countdown or self.awaited, width)
        texts = [f"[rank {rank}] " + " · ".join(parts.values()) for rank, parts in sorted(self._texts.items()) if parts]
        shown = texts[:_MAX_STATUS_RANKS]
        more = f"  … and {len(texts) - len(shown)} more" if len(texts) > len(shown) else ""
        shares = fair_shares([len(text) for text in shown], width - len(more) - 2 * (len(shown) - 1))
        return "  ".join(map(_clip, shown, shares)) + more


def is_terminal(stream: object) -> bool:
    """Return True if `stream` is a terminal. A replacement of stdout may lack ``isatty``."""
    return bool(getattr(stream, "isatty", lambda: False)())


def plain_writer() -> Callable[[str, Stream], None]:
    """Return a `write` for `TextView` that looks up ``sys.stdout`` and ``sys.stderr`` at each call."""

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
def _metrics_text(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{_one_line(name)} {number_of(name, value)}" for name, value in metrics.items())


def _progress_text(record: Mapping[str, Any]) -> str:
    done, total, seconds = record.get("done") or 0, record.get("total"), record.get("seconds") or 0.0
    if done == total:
        return ""  # complete
    desc = f"{record['progress']}: " if record["progress"] else ""
    share = f"{done}/{total} {done / total:.0%}" if total else f"{done}"
    rate = max(0.0, done - record.get("first", 0)) / seconds if seconds else 0.0
    left = f", {duration_text((total - done) / rate)} left" if total and rate and total > done else ""
    return f"{desc}{share}" + (f" {rate:,.0f} it/s" if rate >= 1000 else f" {rate:.3g} it/s" if rate else "") + left


def _best_text(record: Mapping[str, Any]) -> str:
    value = "" if record["value"] is None else f" {number_of(record['best'], record['value'])}"
    return f"best {_one_line(record['best'])}{value} at step {record['step']:,}"


def _output_lines(output: Output) -> list[str]:
    lines = [_CONTROL.sub(" ", line) for line in without_colours(output.text).splitlines()] or [""]
    if not isinstance(output.body, str) and output.mime.startswith("image/"):
        lines[-1] += f": {output.body}"
    return lines


def _one_line(text: str) -> str:
    return _CONTROL.sub(" ", without_colours(text)).strip()


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
